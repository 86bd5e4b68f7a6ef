/* Encoding of all slices of a block: transforms, then LZ4 or Zstandard. decode.c undoes both. */
#include "codec.h"

#include <lz4.h>
#include <lz4hc.h>
#include <string.h>
#include <zstd.h>

/* ---- differences ------------------------------------------------------------------- */

static void subtract(uint8_t *restrict from, const uint8_t *restrict what, int64_t count) {
    for (int64_t i = 0; i < count; i++) from[i] = (uint8_t)(from[i] - what[i]);
}

static void subtract_to(const uint8_t *restrict from, const uint8_t *what, uint8_t *restrict out, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = (uint8_t)(from[i] - what[i]);
}

/* Write the differences of planes of values to `out`. `planes` is overwritten. */
static void take_differences(const transform *form, uint8_t *planes, uint8_t *out) {
    const int64_t columns = form->columns, plane = form->rows * columns;
    if (form->green) {
        subtract(planes, planes + plane, plane);
        subtract(planes + 2 * plane, planes + plane, plane);
    }
    for (int64_t p = 0; p < form->planes; p++) {
        const uint8_t *const first = planes + p * plane;
        uint8_t *const to = out + p * plane;
        to[0] = first[0];
        subtract_to(first + 1, first, to + 1, plane - 1);
        /* The first value of a row is a difference to the value above it. */
        for (int64_t y = 1; y < form->rows; y++)
            to[y * columns] = (uint8_t)(first[y * columns] - first[(y - 1) * columns]);
    }
}

/* ---- words ------------------------------------------------------------------------- */

/* Write the first bytes of all words, then the second ones, and so on. */
static void shuffle(int64_t word_bytes, int64_t bytes, const uint8_t *in, uint8_t *out) {
    const int64_t words = bytes / word_bytes;
    for (int64_t b = 0; b < word_bytes; b++)
        for (int64_t i = 0; i < words; i++) out[b * words + i] = in[i * word_bytes + b];
    memcpy(out + words * word_bytes, in + words * word_bytes, (size_t)(bytes - words * word_bytes));
}

static uint64_t read_word(const uint8_t *p, int64_t bytes) {
    uint64_t word = 0;
    memcpy(&word, p, (size_t)bytes);
    return word;
}

enum { WORD_SLOTS = WORD_TABLE_BYTES / 2 };

/* Return the slot of a word, or the free slot where it belongs. A slot holds a palette index + 1, or 0. */
static uint64_t find_word(const transform *form, const uint8_t *palette, const uint16_t *slots, uint64_t word) {
    uint64_t slot = (word * UINT64_C(0x9E3779B97F4A7C15)) >> 54;
    while (slots[slot] != 0 && read_word(palette + (slots[slot] - 1) * form->word_bytes, form->word_bytes) != word)
        slot = (slot + 1) & (WORD_SLOTS - 1);
    return slot;
}

/* Sort the `known` words of a palette, so that similar values get similar numbers, and rebuild its table. */
static void sort_words(const transform *form, int64_t known, uint8_t *palette, uint16_t *slots) {
    const int64_t size = form->word_bytes;
    uint64_t sorted[256];
    for (int64_t i = 0; i < known; i++) {
        const uint64_t word = read_word(palette + i * size, size);
        int64_t at = i;
        for (; at > 0 && sorted[at - 1] > word; at--) sorted[at] = sorted[at - 1];
        sorted[at] = word;
    }
    memset(slots, 0, WORD_TABLE_BYTES);
    for (int64_t i = 0; i < known; i++) {
        memcpy(palette + i * size, &sorted[i], (size_t)size);
        slots[find_word(form, palette, slots, sorted[i])] = (uint16_t)(i + 1);
    }
}

/* Collect the words of all slices in the palette. Return 0 if there are more than 256. */
static int collect_words(const transform *form, const uint8_t *slices, int64_t count, uint8_t *palette,
                         uint16_t *slots) {
    const int64_t size = form->word_bytes, words = count * (form->slice_bytes / size);
    int64_t known = 0;
    for (int64_t i = 0; i < words; i++) {
        const uint64_t word = read_word(slices + i * size, size);
        const uint64_t slot = find_word(form, palette, slots, word);
        if (slots[slot] != 0) continue;
        if (known == 256) return 0;
        memcpy(palette + known * size, &word, (size_t)size);
        slots[slot] = (uint16_t)(++known);
    }
    sort_words(form, known, palette, slots);
    return 1;
}

static void number_words(const transform *form, const uint8_t *slice, const uint8_t *palette, const uint16_t *slots,
                         uint8_t *out) {
    const int64_t words = form->slice_bytes / form->word_bytes;
    for (int64_t i = 0; i < words; i++) {
        const uint64_t word = read_word(slice + i * form->word_bytes, form->word_bytes);
        out[i] = (uint8_t)(slots[find_word(form, palette, slots, word)] - 1);
    }
}

/* ---- changes ----------------------------------------------------------------------- */

enum { MIN_EQUAL_BYTES = 4 }; /* Changes with fewer equal bytes between them are stored as one. */

static uint8_t *write_number(uint8_t *to, int64_t number) {
    for (; number > 127; number >>= 7) *to++ = (uint8_t)(number | 128);
    *to++ = (uint8_t)number;
    return to;
}

static int64_t count_number_bytes(int64_t number) {
    int64_t bytes = 1;
    for (; number > 127; number >>= 7) bytes++;
    return bytes;
}

/* Return the first position from `at` on where two slices differ, or `bytes`. */
static int64_t find_difference(const uint8_t *before, const uint8_t *slice, int64_t at, int64_t bytes) {
    uint64_t a, b;
    for (; at + 8 <= bytes; at += 8) {
        memcpy(&a, before + at, 8);
        memcpy(&b, slice + at, 8);
        if (a != b) break;
    }
    while (at < bytes && before[at] == slice[at]) at++;
    return at;
}

/* Write how a slice differs from the slice `before`: the number of changes, and for each the number of equal bytes before
 * it, its length, and the new bytes. Return the end of the written bytes, NULL if there is no room. */
static uint8_t *write_changes(const uint8_t *before, const uint8_t *slice, int64_t bytes, uint8_t *to, const uint8_t *end) {
    int64_t changes = 0, written_up_to = 0;
    if (end - to < 1) return NULL;
    uint8_t *const number_at = to++; /* Few slices have more than 127 changes. */
    for (int64_t start = find_difference(before, slice, 0, bytes), next; start < bytes; start = next, changes++) {
        int64_t stop = start + 1;
        next = find_difference(before, slice, stop, bytes);
        while (next < bytes && next - stop < MIN_EQUAL_BYTES) {
            stop = next + 1;
            next = find_difference(before, slice, stop, bytes);
        }
        const int64_t skipped = start - written_up_to, length = stop - start;
        if (end - to < count_number_bytes(skipped) + count_number_bytes(length) + length) return NULL;
        to = write_number(write_number(to, skipped), length);
        memcpy(to, slice + start, (size_t)length);
        to += length;
        written_up_to = stop;
    }
    const int64_t more = count_number_bytes(changes) - 1;
    if (end - to < more) return NULL;
    memmove(number_at + 1 + more, number_at + 1, (size_t)(to - number_at - 1));
    write_number(number_at, changes);
    return to + more;
}

/* Write the first slice of a unit and the changes of the others. Return the bytes written, 0 if they would not be at
 * least one slice fewer than the unit has. */
static int64_t write_unit_changes(const uint8_t *unit, int64_t count, int64_t coded, uint8_t *out) {
    const uint8_t *const end = out + (count - 1) * coded;
    if (count < 2) return 0;
    memcpy(out, unit, (size_t)coded);
    uint8_t *to = out + coded;
    for (int64_t i = 1; to && i < count; i++)
        to = write_changes(unit + (i - 1) * coded, unit + i * coded, coded, to, end);
    return to ? to - out : 0;
}

/* ---- compression ------------------------------------------------------------------- */

/* Make LZ4 read the dictionary, if there is one. That takes far longer than compressing a unit, so the resulting state is
 * kept and copied for each unit. */
static void load_dictionary(const encoder *e) {
    if (e->method != METHOD_LZ4 || !e->common) return;
    LZ4_resetStreamHC_fast(e->loaded, e->level > 0 ? (int)e->level : 1);
    LZ4_loadDictHC(e->loaded, (const char *)e->common, (int)e->common_bytes);
}

static int64_t compress_lz4(const encoder *e, const uint8_t *in, int64_t bytes, uint8_t *out, int64_t room) {
    int length;
    if (e->common) {
        memcpy(e->stream, e->loaded, sizeof(LZ4_streamHC_t));
        length = LZ4_compress_HC_continue(e->stream, (const char *)in, (char *)out, (int)bytes, (int)room);
    } else if (e->level > 0) {
        length = LZ4_compress_HC((const char *)in, (char *)out, (int)bytes, (int)room, (int)e->level);
    } else {
        length = LZ4_compress_default((const char *)in, (char *)out, (int)bytes, (int)room);
    }
    return length > 0 ? length : -1;
}

/* Compress bytes. Return the compressed length, -1 if it does not fit into `room`. */
static int64_t compress(const encoder *e, const uint8_t *in, int64_t bytes, uint8_t *out, int64_t room) {
    if (e->method == METHOD_LZ4) return compress_lz4(e, in, bytes, out, room);
    /* The context of Zstandard includes the dictionary. */
    const size_t length = ZSTD_compress2(e->cctx, out, (size_t)room, in, (size_t)bytes);
    return ZSTD_isError(length) ? -1 : (int64_t)length;
}

/* ---- units ------------------------------------------------------------------------- */

/* The slices of a block, and scratch memory. */
typedef struct {
    const transform *form;
    const uint8_t *slices;
    const uint32_t *order; /* slice number by place; NULL: in the order of their numbers */
    uint8_t *palette;
    uint16_t *words;       /* table of the words in the palette, or ... */
    known_colour *colours; /* ... of the colours */
    uint8_t *a, *b;        /* room for a transformed slice each */
    uint8_t *unit;         /* room for the transformed slices of a unit */
    uint8_t *changes;      /* room for as many bytes */
    uint8_t *packed;       /* room for a compressed unit */
    int64_t packed_room;
} encoding;

static const uint8_t *slice_at(const encoding *s, int64_t place) {
    return s->slices + (s->order ? s->order[place] : place) * s->form->slice_bytes;
}

/* Transform one slice. Return the transformed bytes, which are in `slice`, `a` or `b`. */
static const uint8_t *transform_slice(const encoding *s, const uint8_t *slice) {
    const transform *const form = s->form;
    const int64_t coded = coded_bytes(form);
    const uint8_t *stage = slice;
    if (is_of_colours(form)) return number_colours(form, slice, s->colours, s->a, s->b);
    if (form->word_bytes > 0) {
        number_words(form, stage, s->palette, s->words, s->a);
        stage = s->a;
    }
    if (form->kind == TRANSFORM_PIXELS) {
        interleave(form, stage, s->b);
        stage = s->b;
    } else if (form->kind == TRANSFORM_LEFT) {
        if (form->interleaved) separate_planes(form, stage, s->b);
        else memcpy(s->b, stage, (size_t)coded);
        take_differences(form, s->b, s->a);
        stage = s->a;
    }
    if (form->shuffle > 0) {
        uint8_t *const to = stage == s->b ? s->a : s->b;
        shuffle(form->shuffle, coded, stage, to);
        stage = to;
    }
    return stage;
}

/* Transform the slices of a unit. Return them, one after another. */
static const uint8_t *transform_unit(const encoding *s, int64_t first, int64_t count) {
    const int64_t coded = coded_bytes(s->form);
    if (count == 1) return transform_slice(s, slice_at(s, first));
    for (int64_t i = 0; i < count; i++)
        memcpy(s->unit + i * coded, transform_slice(s, slice_at(s, first + i)), (size_t)coded);
    return s->unit;
}

/* Fill the palette with the words or colours of all slices, if the transform has a palette. Return 0 if there are too many. */
static int collect_palette(const encoding *s, int64_t count) {
    if (is_of_colours(s->form)) return collect_colours(s->form, s->slices, count, s->palette, s->colours);
    return s->form->word_bytes == 0 || collect_words(s->form, s->slices, count, s->palette, s->words);
}

/* Write the colours that precede unit `u`. Return the bytes written, -1 if there are too many colours. */
static int64_t write_head(const encoding *s, int64_t u, int64_t first, int64_t count, uint8_t *head) {
    const uint8_t *slices[MAX_UNIT_SLICES];
    if (!is_of_colours(s->form)) return 0;
    for (int64_t i = 0; i < count; i++) slices[i] = slice_at(s, first + i);
    return begin_unit(s->form, slices, count, u, s->colours, head);
}

/* Transform and compress a unit. Return its length; `*out` is where it is stored. */
static int64_t encode_unit(const encoder *e, const encoding *s, int64_t first, int64_t count, const uint8_t **out) {
    const int64_t coded = coded_bytes(s->form), bytes = count * coded;
    const uint8_t *const stage = transform_unit(s, first, count);
    int64_t length = bytes;
    *out = stage;
    if (s->form->kind == TRANSFORM_CHANGES) {
        const int64_t written = write_unit_changes(stage, count, coded, s->changes);
        if (written > 0) {
            length = written;
            *out = s->changes;
        }
    }
    if (e->method == METHOD_STORED) return length;
    const int64_t packed = compress(e, *out, length, s->packed, s->packed_room);
    if (packed >= 0 && packed < bytes) {
        *out = s->packed;
        return packed;
    }
    *out = stage;
    return bytes;
}

int64_t encode_units(const encoder *e, const transform *form, const uint8_t *slices, const uint32_t *order,
                     int64_t count, uint8_t *data, int64_t room, uint32_t *offsets, uint8_t *palette, void *table) {
    const int64_t coded = coded_bytes(form), unit_bytes = e->group * coded;
    encoding s = {.form = form, .slices = slices, .order = order, .palette = palette, .words = table, .colours = table};
    s.a = e->scratch;
    s.b = s.a + coded;
    s.unit = s.b + coded;
    s.changes = s.unit + unit_bytes;
    s.packed = s.changes + (form->kind == TRANSFORM_CHANGES ? unit_bytes : 0);
    s.packed_room = e->scratch_bytes - (s.packed - e->scratch);
    uint8_t head[1 + 4 * MAX_UNIT_COLOURS];
    int64_t used = 0;
    offsets[0] = 0;
    if (s.packed_room < unit_bytes) return -2;
    if (!collect_palette(&s, count)) return -1;
    load_dictionary(e);
    for (int64_t u = 0; u * e->group < count; u++) {
        const int64_t first = u * e->group, left = count - first, in_unit = left < e->group ? left : e->group;
        const int64_t head_length = write_head(&s, u, first, in_unit, head);
        if (head_length < 0) return -1;
        const uint8_t *unit;
        const int64_t length = encode_unit(e, &s, first, in_unit, &unit);
        if (used + head_length + length > room || used + head_length + length > UINT32_MAX) return -2;
        memcpy(data + used, head, (size_t)head_length);
        memcpy(data + used + head_length, unit, (size_t)length);
        used += head_length + length;
        offsets[u + 1] = (uint32_t)used;
    }
    return used;
}
