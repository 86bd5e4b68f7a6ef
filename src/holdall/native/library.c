/* What the loader in library.py asks first: the version, the structs, the processor, and the compression inside. */
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
    STRUCT(python),
    FIELD(python, array_type),
    FIELD(python, dict_type),
    FIELD(python, ordered_dict_type),
    FIELD(python, list_type),
    FIELD(python, str_type),
    FIELD(python, is_false),
    FIELD(python, is_none),
    FIELD(python, number),
    FIELD(python, bytes),
    FIELD(python, dict_size),
    FIELD(python, dict_next),
    FIELD(python, dict_item),
    FIELD(python, list_size),
    FIELD(python, list_item),
    FIELD(python, str_compare),
    FIELD(python, error),
    FIELD(python, take),
    FIELD(python, drop),
    STRUCT(argument_form),
    FIELD(argument_form, key),
    FIELD(argument_form, dtype),
    FIELD(argument_form, dimensions),
    FIELD(argument_form, lengths),
    FIELD(argument_form, bytes),
    STRUCT(fast_tick),
    FIELD(fast_tick, python),
    FIELD(fast_tick, writer),
    FIELD(fast_tick, observed),
    FIELD(fast_tick, observed_count),
    FIELD(fast_tick, small_count),
    FIELD(fast_tick, is_dict),
    FIELD(fast_tick, rest),
    FIELD(fast_tick, packed),
    FIELD(fast_tick, packed_bytes),
    FIELD(fast_tick, is_open),
    FIELD(fast_tick, cut_key),
    FIELD(fast_tick, lock_owner),
    FIELD(fast_tick, is_pending),
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
    STRUCT(device_field),
    FIELD(device_field, places),
    FIELD(device_field, positions),
    FIELD(device_field, repeats),
    FIELD(device_field, base),
    FIELD(device_field, to),
    FIELD(device_field, first),
    FIELD(device_field, end),
    FIELD(device_field, end_repeat),
    FIELD(device_field, window),
    FIELD(device_field, outer),
    FIELD(device_field, run_bytes),
    STRUCT(assembly),
    FIELD(assembly, head_from),
    FIELD(assembly, head_to),
    FIELD(assembly, head_bytes),
    FIELD(assembly, fields),
    FIELD(assembly, field),
    STRUCT(sliced_source),
    FIELD(sliced_source, parts),
    FIELD(sliced_source, part_count),
    FIELD(sliced_source, cursors),
    FIELD(sliced_source, starts),
    FIELD(sliced_source, are_named),
    FIELD(sliced_source, places),
    FIELD(sliced_source, positions),
    FIELD(sliced_source, repeats),
    FIELD(sliced_source, to),
    STRUCT(copied_array),
    FIELD(copied_array, from),
    FIELD(copied_array, offset),
    FIELD(copied_array, bytes),
    STRUCT(row_place),
    FIELD(row_place, segment),
    FIELD(row_place, lane),
    FIELD(row_place, cursor),
    FIELD(row_place, unused),
    STRUCT(batch_request),
    FIELD(batch_request, ids),
    FIELD(batch_request, last_ids),
    FIELD(batch_request, rows),
    FIELD(batch_request, first_id),
    FIELD(batch_request, next_id),
    FIELD(batch_request, ring_rows),
    FIELD(batch_request, lanes),
    FIELD(batch_request, columns),
    FIELD(batch_request, column_count),
    FIELD(batch_request, first_ticks),
    FIELD(batch_request, segments),
    FIELD(batch_request, head),
    FIELD(batch_request, block),
    FIELD(batch_request, observed),
    FIELD(batch_request, rest),
    FIELD(batch_request, last_observed),
    FIELD(batch_request, last_rest),
    FIELD(batch_request, copied),
    FIELD(batch_request, copied_count),
    FIELD(batch_request, source),
    FIELD(batch_request, slots),
    FIELD(batch_request, slot_count),
    FIELD(batch_request, found),
    FIELD(batch_request, first_rows),
    FIELD(batch_request, launch),
    FIELD(batch_request, bring),
    FIELD(batch_request, finish),
    FIELD(batch_request, stream),
    FIELD(batch_request, most_blocks),
    FIELD(batch_request, wrong),
    FIELD(batch_request, task),
};

/* Every struct that Python mirrors, field by field; writes their number to `*count`. */
EXPORT const struct_field *holdall_structs(int64_t *count) {
    *count = (int64_t)(sizeof FIELDS / sizeof *FIELDS);
    return FIELDS;
}

/* A function of Zstandard or LZ4; Python casts it to its real type. */
typedef void (*named_function)(void);

#ifdef HOLDALL_COMPRESSION /* wheels; a build on the user's machine uses the libraries that are installed there */
#include <lz4.h>
#include <lz4hc.h>
#include <string.h>
#include <zstd.h>

#define FUNCTION(name) {#name, (named_function)name}

static const struct {
    const char *name;
    named_function function;
} COMPRESSION[] = {
    FUNCTION(ZSTD_createCCtx),
    FUNCTION(ZSTD_freeCCtx),
    FUNCTION(ZSTD_CCtx_setParameter),
    FUNCTION(ZSTD_CCtx_refCDict),
    FUNCTION(ZSTD_compress2),
    FUNCTION(ZSTD_createDCtx),
    FUNCTION(ZSTD_freeDCtx),
    FUNCTION(ZSTD_decompress_usingDDict),
    FUNCTION(ZSTD_createCDict),
    FUNCTION(ZSTD_freeCDict),
    FUNCTION(ZSTD_createDDict),
    FUNCTION(ZSTD_freeDDict),
    FUNCTION(ZSTD_isError),
    FUNCTION(LZ4_decompress_safe),
    FUNCTION(LZ4_compress_default),
    FUNCTION(LZ4_compress_HC),
};

/* A function of Zstandard or LZ4 that is linked in; NULL if there is none of this name. */
EXPORT named_function holdall_compression(const char *name) {
    for (size_t i = 0; i < sizeof COMPRESSION / sizeof *COMPRESSION; i++)
        if (strcmp(COMPRESSION[i].name, name) == 0) return COMPRESSION[i].function;
    return NULL;
}
#else
/* None is linked in. */
EXPORT named_function holdall_compression(const char *name) {
    (void)name;
    return NULL;
}
#endif
