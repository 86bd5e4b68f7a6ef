/* What the loader in library.py asks first: the version, the structs, and the processor. */
#include "holdall.h"
#include "structs.h"

#include <stdatomic.h>
#ifdef HAVE_X86
#include <cpuid.h>

/* The compilers' own question, __builtin_cpu_supports, needs a runtime library that not every linker adds to a shared
 * library. SSSE3 uses no registers that the system has to save for it, so the processor's answer is enough. */
int has_ssse3(void) {
    static _Atomic int known; /* 0: not asked yet, 1: no, 2: yes */
    int answer = atomic_load_explicit(&known, memory_order_relaxed);
    if (answer == 0) {
        unsigned a, b, c = 0, d;
        answer = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSSE3) ? 2 : 1;
        atomic_store_explicit(&known, answer, memory_order_relaxed);
    }
    return answer == 2;
}
#endif

/* Raised with every change of an exported function; library.py expects the same number. */
EXPORT int64_t holdall_version(void) { return 13; }

/* A field of a struct; without a field name, the struct itself. */
typedef struct {
    const char *type;
    const char *field;
    int64_t offset;
    int64_t size;
} struct_field;

#define STRUCT(type) {#type, "", 0, sizeof(type)}
#define FIELD(type, field) {#type, #field, offsetof(type, field), sizeof(((type *)0)->field)}

static const struct_field FIELDS[] = {
    STRUCT(transform),
    FIELD(transform, slice_bytes),
    FIELD(transform, word_bytes),
    FIELD(transform, predictor),
    FIELD(transform, planes),
    FIELD(transform, rows),
    FIELD(transform, columns),
    FIELD(transform, interleaved),
    FIELD(transform, green),
    FIELD(transform, shuffle),
    STRUCT(sealed_block),
    FIELD(sealed_block, data),
    FIELD(sealed_block, offsets),
    FIELD(sealed_block, checks),
    FIELD(sealed_block, palette),
    FIELD(sealed_block, ddict),
    FIELD(sealed_block, data_bytes),
    FIELD(sealed_block, slice_count),
    FIELD(sealed_block, group),
    FIELD(sealed_block, method),
    FIELD(sealed_block, file),
    FIELD(sealed_block, file_start),
    FIELD(sealed_block, form),
    STRUCT(decoded_slice),
    FIELD(decoded_slice, batch),
    FIELD(decoded_slice, sealed),
    FIELD(decoded_slice, number),
    FIELD(decoded_slice, slice),
    STRUCT(decoder),
    FIELD(decoder, lz4_decompress_safe),
    FIELD(decoder, zstd_decompress_using_ddict),
    FIELD(decoder, dctx),
    FIELD(decoder, scratch),
    FIELD(decoder, scratch_bytes),
    FIELD(decoder, unit),
    FIELD(decoder, unit_bytes),
    FIELD(decoder, unit_of),
    FIELD(decoder, unit_number),
    FIELD(decoder, read),
    FIELD(decoder, read_bytes),
    FIELD(decoder, read_of),
    FIELD(decoder, read_first),
    FIELD(decoder, read_end),
    FIELD(decoder, error),
    FIELD(decoder, batch),
    FIELD(decoder, decoded_places),
    FIELD(decoder, decoded),
    STRUCT(encoder),
    FIELD(encoder, lz4_compress_default),
    FIELD(encoder, lz4_compress_hc),
    FIELD(encoder, zstd_compress2),
    FIELD(encoder, zstd_is_error),
    FIELD(encoder, cctx),
    FIELD(encoder, scratch),
    FIELD(encoder, scratch_bytes),
    FIELD(encoder, group),
    FIELD(encoder, method),
    FIELD(encoder, level),
    STRUCT(slice_block),
    FIELD(slice_block, arena),
    FIELD(slice_block, hashes),
    FIELD(slice_block, slots),
    FIELD(slice_block, mask),
    FIELD(slice_block, capacity),
    FIELD(slice_block, used),
    FIELD(slice_block, slice_bytes),
    STRUCT(layout),
    FIELD(layout, dimensions),
    FIELD(layout, lengths),
    FIELD(layout, strides),
    FIELD(layout, run_bytes),
    STRUCT(open_part),
    FIELD(open_part, block),
    FIELD(open_part, direct),
    FIELD(open_part, log),
    FIELD(open_part, last),
    FIELD(open_part, last_raw),
    FIELD(open_part, packed),
    FIELD(open_part, last_layout),
    FIELD(open_part, end),
    FIELD(open_part, scratch),
    FIELD(open_part, log_rows),
    FIELD(open_part, lanes),
    FIELD(open_part, outer),
    FIELD(open_part, run_bytes),
    FIELD(open_part, window),
    FIELD(open_part, shift),
    FIELD(open_part, longest),
    FIELD(open_part, steps),
    FIELD(open_part, broken_steps),
    FIELD(open_part, pushed),
    STRUCT(flat_field),
    FIELD(flat_field, rows),
    FIELD(flat_field, next),
    FIELD(flat_field, tick_bytes),
    FIELD(flat_field, is_observation),
    STRUCT(sliced_field),
    FIELD(sliced_field, part),
    FIELD(sliced_field, cursors),
    FIELD(sliced_field, obs),
    FIELD(sliced_field, next_obs),
    FIELD(sliced_field, order),
    STRUCT(tick_writer),
    FIELD(tick_writer, next_tick),
    FIELD(tick_writer, first_tick),
    FIELD(tick_writer, ring_ticks),
    FIELD(tick_writer, packed_bytes),
    FIELD(tick_writer, flat),
    FIELD(tick_writer, sliced),
    FIELD(tick_writer, flat_count),
    FIELD(tick_writer, sliced_count),
    STRUCT(part),
    FIELD(part, log),
    FIELD(part, log_rows),
    FIELD(part, log_width),
    FIELD(part, slices),
    FIELD(part, slice_count),
    FIELD(part, outer),
    FIELD(part, run_bytes),
    FIELD(part, window),
    FIELD(part, shift),
    FIELD(part, sealed),
    STRUCT(row_column),
    FIELD(row_column, ring),
    FIELD(row_column, row_bytes),
    FIELD(row_column, later),
    FIELD(row_column, block),
    FIELD(row_column, apart_count),
    FIELD(row_column, apart_ids),
    FIELD(row_column, apart_rows),
    FIELD(row_column, unless),
    STRUCT(names),
    FIELD(names, part),
    FIELD(names, number),
    FIELD(names, slots),
    FIELD(names, mask),
    FIELD(names, room),
    FIELD(names, count),
};

/* Every struct that Python mirrors, field by field; writes their number to `*count`. */
EXPORT const struct_field *holdall_structs(int64_t *count) {
    *count = (int64_t)(sizeof FIELDS / sizeof *FIELDS);
    return FIELDS;
}
