/* Encoding of a whole block of slices, as the sealer does it: palettes, predictors, byte shuffle, then LZ4 or Zstandard. */
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

/* Write the differences of planes of values to `out`; `planes` is written over. */
static void take_differences(const transform *form, uint8_t *planes, uint8_t *out) {
    const int64_t columns = form->columns, plane = form->rows * columns;
    if (form->green) {
        subtract(planes, planes + plane, plane);
        subtract(planes + 2 * plane, planes + plane, plane);
    }
    for (int64_t p = 0; p < form->planes; p++) {
        const uint8_t *const first = planes + p * plane;
        uint8_t *const to = out + p * plane;
        if (form->predictor == PREDICT_LEFT) {
            /* All rows at once; then the first value of each, which is predicted by the one above. */
            to[0] = first[0];
            subtract_to(first + 1, first, to + 1, plane - 1);
            for (int64_t y = 1; y < form->rows; y++)
                to[y * columns] = (uint8_t)(first[y * columns] - first[(y - 1) * columns]);
        } else {
            memcpy(to, first, (size_t)columns);
            subtract_to(first + columns, first, to + columns, plane - columns);
        }
    }
}

/* ---- words ------------------------------------------------------------------------- */

static void shuffle(int64_t word, int64_t bytes, const uint8_t *in, uint8_t *out) {
    const int64_t words = bytes / word;
    for (int64_t b = 0; b < word; b++)
        for (int64_t i = 0; i < words; i++) out[b * words + i] = in[i * word + b];
    memcpy(out + words * word, in + words * word, (size_t)(bytes - words * word));
}

static uint64_t read_word(const uint8_t *p, int64_t bytes) {
    uint64_t word = 0;
    memcpy(&word, p, (size_t)bytes);
    return word;
}

/* Where a word stands in the table of 1024 slots, each a palette index + 1 or 0; or where it would. */
static uint64_t slot_of(const transform *form, const uint8_t *palette, const uint16_t *slots, uint64_t word) {
    uint64_t place = (word * UINT64_C(0x9E3779B97F4A7C15)) >> 54;
    while (slots[place] != 0 &&
           read_word(palette + (slots[place] - 1) * form->word_bytes, form->word_bytes) != word)
        place = (place + 1) & 1023;
    return place;
}

/* Collect the words of all slices into the palette; 0 if there are more than 256. They are put in
 * order, so that words which are near to each other, as those of an image are, differ by little. */
static int collect_words(const transform *form, const uint8_t *slices, int64_t count, uint8_t *palette,
                         uint16_t *slots) {
    const int64_t size = form->word_bytes, words = count * (form->slice_bytes / size);
    int64_t known = 0;
    for (int64_t i = 0; i < words; i++) {
        const uint64_t word = read_word(slices + i * size, size);
        const uint64_t place = slot_of(form, palette, slots, word);
        if (slots[place] != 0) continue;
        if (known == 256) return 0;
        memcpy(palette + known * size, &word, (size_t)size);
        slots[place] = (uint16_t)(++known);
    }
    uint64_t sorted[256];
    for (int64_t i = 0; i < known; i++) {
        const uint64_t word = read_word(palette + i * size, size);
        int64_t at = i;
        for (; at > 0 && sorted[at - 1] > word; at--) sorted[at] = sorted[at - 1];
        sorted[at] = word;
    }
    memset(slots, 0, 1024 * sizeof *slots);
    for (int64_t i = 0; i < known; i++) {
        memcpy(palette + i * size, &sorted[i], (size_t)size);
        slots[slot_of(form, palette, slots, sorted[i])] = (uint16_t)(i + 1);
    }
    return 1;
}

static void number_words(const transform *form, const uint8_t *slice, const uint8_t *palette, const uint16_t *slots,
                         uint8_t *out) {
    const int64_t words = form->slice_bytes / form->word_bytes;
    for (int64_t i = 0; i < words; i++) {
        const uint64_t word = read_word(slice + i * form->word_bytes, form->word_bytes);
        out[i] = (uint8_t)(slots[slot_of(form, palette, slots, word)] - 1);
    }
}

/* ---- units ------------------------------------------------------------------------- */

/* Let LZ4 read the dictionary, if there is one. That takes far longer than compressing a unit, so the resulting state is
 * kept and copied for each unit. */
static void load_dictionary(const encoder *e) {
    if (e->method != METHOD_LZ4 || !e->common) return;
    LZ4_resetStreamHC_fast(e->loaded, e->level > 0 ? (int)e->level : 1);
    LZ4_loadDictHC(e->loaded, (const char *)e->common, (int)e->common_bytes);
}

/* Compress bytes; returns how many came of them, -1 if that cannot be done in the room. */
static int64_t compress(const encoder *e, const uint8_t *in, int64_t bytes, uint8_t *out, int64_t room) {
    if (e->method == METHOD_LZ4) {
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
    if (e->method == METHOD_ZSTD) {
        /* A dictionary is part of the context. */
        const size_t length = ZSTD_compress2(e->cctx, out, (size_t)room, in, (size_t)bytes);
        return ZSTD_isError(length) ? -1 : (int64_t)length;
    }
    return -1;
}

/* Transform one slice; returns where the coded bytes stand: in `slice`, `a` or `b`. */
static const uint8_t *transformed(const transform *form, const uint8_t *slice, const uint8_t *palette,
                                  uint16_t *slots, uint8_t *a, uint8_t *b) {
    const int64_t coded = coded_bytes(form);
    const uint8_t *stage = slice;
    if (is_of_colours(form)) return number_colours(form, slice, (known_colour *)(void *)slots, a, b);
    if (form->word_bytes > 0) {
        number_words(form, stage, palette, slots, a);
        stage = a;
    }
    if (form->predictor == PIXELS) {
        interleave(form, stage, b);
        stage = b;
    } else if (form->predictor == PREDICT_LEFT || form->predictor == PREDICT_UP) {
        if (form->interleaved) part_pixels(form, stage, b);
        else memcpy(b, stage, (size_t)coded);
        take_differences(form, b, a);
        stage = a;
    }
    if (form->shuffle > 0) {
        uint8_t *const to = stage == b ? a : b;
        shuffle(form->shuffle, coded, stage, to);
        stage = to;
    }
    return stage;
}

/* A block that is being coded. */
typedef struct {
    const transform *form;
    const uint8_t *slices;
    const uint32_t *order; /* which slice comes first, second, ...; NULL: as they stand */
    uint8_t *palette;
    uint16_t *slots; /* the palette's table, of words or of colours */
} block_of_slices;

/* Find what numbers stand for, in all slices: words or colours. 0 if there are too many. */
static int collect(const block_of_slices *s, int64_t count) {
    if (is_of_colours(s->form))
        return collect_colours(s->form, s->slices, count, s->palette, (known_colour *)(void *)s->slots);
    return s->form->word_bytes == 0 || collect_words(s->form, s->slices, count, s->palette, s->slots);
}

/* Write what stands in front of unit `u`; returns the bytes of that, -1 if it has too many colours. */
static int64_t head_of_unit(const block_of_slices *s, int64_t u, int64_t first, int64_t count, uint8_t *head) {
    const uint8_t *slices[MOST_IN_A_UNIT];
    if (!is_of_colours(s->form)) return 0;
    for (int64_t i = 0; i < count; i++)
        slices[i] = s->slices + (s->order ? s->order[first + i] : first + i) * s->form->slice_bytes;
    return begin_unit(s->form, slices, count, u, (known_colour *)(void *)s->slots, head);
}

/* Transform the slices from place `first` on and put them side by side in `unit`; returns where they stand: a single one
 * may be left where it was. */
static const uint8_t *staged(const block_of_slices *s, int64_t first, int64_t count, uint8_t *a, uint8_t *b,
                             uint8_t *unit) {
    const int64_t coded = coded_bytes(s->form);
    for (int64_t i = 0; i < count; i++) {
        const int64_t number = s->order ? s->order[first + i] : first + i;
        const uint8_t *const slice = s->slices + number * s->form->slice_bytes;
        const uint8_t *const done = transformed(s->form, slice, s->palette, s->slots, a, b);
        if (count == 1) return done;
        memcpy(unit + i * coded, done, (size_t)coded);
    }
    return unit;
}

enum { EQUAL_BETWEEN = 4 }; /* changes that so many bytes part are two */

static uint8_t *write_count(uint8_t *to, int64_t count) {
    for (; count > 127; count >>= 7) *to++ = (uint8_t)(count | 128);
    *to++ = (uint8_t)count;
    return to;
}

/* Where two slices differ from `at` on, or `bytes`. */
static int64_t next_difference(const uint8_t *before, const uint8_t *slice, int64_t at, int64_t bytes) {
    uint64_t a, b;
    for (; at + 8 <= bytes; at += 8) {
        memcpy(&a, before + at, 8);
        memcpy(&b, slice + at, 8);
        if (a != b) break;
    }
    while (at < bytes && before[at] == slice[at]) at++;
    return at;
}

static int64_t bytes_of_count(int64_t count) {
    int64_t bytes = 1;
    for (; count > 127; count >>= 7) bytes++;
    return bytes;
}

/* Write how a slice differs from the one before: the number of changes, and for each the bytes that are skipped, its
 * length, and what stands there now. Returns the end of it, NULL if there is no room. */
static uint8_t *note_changes(const uint8_t *before, const uint8_t *slice, int64_t bytes, uint8_t *to, const uint8_t *end) {
    int64_t changes = 0, behind = 0;
    if (end - to < 1) return NULL;
    uint8_t *const counted = to++; /* few have more than 127 */
    for (int64_t at = next_difference(before, slice, 0, bytes); at < bytes; changes++) {
        int64_t stop = at + 1, next;
        while ((next = next_difference(before, slice, stop, bytes)) < bytes && next - stop < EQUAL_BETWEEN) stop = next + 1;
        if (end - to < bytes_of_count(at - behind) + bytes_of_count(stop - at) + stop - at) return NULL;
        to = write_count(write_count(to, at - behind), stop - at);
        memcpy(to, slice + at, (size_t)(stop - at));
        to += stop - at;
        behind = stop, at = next;
    }
    const int64_t more = bytes_of_count(changes) - 1;
    if (end - to < more) return NULL;
    memmove(counted + 1 + more, counted + 1, (size_t)(to - counted - 1));
    write_count(counted, changes);
    return to + more;
}

/* Turn a unit into its first slice and the changes of the others; returns the bytes of that, 0 if it would not spare a
 * whole slice. */
static int64_t changes_of(const uint8_t *unit, int64_t count, int64_t coded, uint8_t *out) {
    const uint8_t *const end = out + (count - 1) * coded;
    if (count < 2) return 0;
    memcpy(out, unit, (size_t)coded);
    uint8_t *to = out + coded;
    for (int64_t i = 1; to && i < count; i++) to = note_changes(unit + (i - 1) * coded, unit + i * coded, coded, to, end);
    return to ? to - out : 0;
}

/* Code the slices in places [first, end) of `count` into `data`, and write where their units end to `offsets`. With
 * `order`, slice order[i] is coded in place i. The first one begins a unit. `slots` is room for
 * the palette's table, zeroed; a palette is made of all slices, wherever the range. Returns the bytes written; -1: there are
 * more than 256 words, or colours of a unit; -2: the scratch memory or `room` is too small, or `order` or the range name what is not there. */
EXPORT int64_t holdall_encode(const encoder *e, const transform *form, const uint8_t *slices, const uint32_t *order,
                              int64_t count, int64_t first, int64_t end, uint8_t *data, int64_t room,
                              uint32_t *offsets, uint8_t *palette, uint16_t *slots) {
    const int64_t coded = coded_bytes(form), unit_bytes = e->group * coded;
    uint8_t *const a = e->scratch, *const b = a + coded, *const unit = b + coded, *const changes = unit + unit_bytes;
    uint8_t *const packed = changes + (form->predictor == CHANGES ? unit_bytes : 0);
    const int64_t packed_room = e->scratch_bytes - (packed - e->scratch);
    const block_of_slices block = {form, slices, order, palette, slots};
    uint8_t head[1 + 4 * MOST_NEW_COLOURS];
    int64_t used = 0;
    offsets[0] = 0;
    if (e->group < 1 || e->group > MOST_IN_A_UNIT || packed_room < unit_bytes || first < 0 || end > count) return -2;
    for (int64_t i = first; order && i < end; i++)
        if (order[i] >= count) return -2;
    if (!collect(&block, count)) return -1;
    load_dictionary(e);
    for (int64_t u = 0; first < end; first += e->group, u++) {
        const int64_t in_unit = end - first < e->group ? end - first : e->group, bytes = in_unit * coded;
        const int64_t before = head_of_unit(&block, u, first, in_unit, head);
        if (before < 0) return -1;
        const uint8_t *const stage = staged(&block, first, in_unit, a, b, unit);
        const int64_t noted = form->predictor == CHANGES ? changes_of(stage, in_unit, coded, changes) : 0;
        const uint8_t *from = noted ? changes : stage;
        int64_t length = noted ? noted : bytes;
        if (e->method != METHOD_STORED) {
            length = compress(e, from, length, packed, packed_room);
            from = packed;
        }
        if (length < 0 || length >= bytes) length = bytes, from = stage;
        if (used + before + length > room || used + before + length > UINT32_MAX) return -2;
        memcpy(data + used, head, (size_t)before);
        used += before;
        memcpy(data + used, from, (size_t)length);
        used += length;
        offsets[u + 1] = (uint32_t)used;
    }
    return used;
}

/* ---- what decoding will have to do ------------------------------------------------- */

/* What there is to do for a unit: sequences, literals of Huffman's code, tables of that code. */
typedef struct {
    int64_t sequences, literals, tables;
} unit_work;

static int64_t read_number(const uint8_t *p, int64_t bytes, const uint8_t *end) {
    int64_t number = 0;
    for (int64_t i = 0; i < bytes && p + i < end; i++) number |= (int64_t)p[i] << (8 * i);
    return number;
}

/* The sequences of an LZ4 block: a token, literals, and a match each. */
static unit_work work_of_lz4(const uint8_t *p, const uint8_t *end) {
    unit_work work = {0, 0, 0};
    while (p < end) {
        const int token = *p++;
        int64_t literals = token >> 4;
        work.sequences++;
        if (literals == 15) {
            while (p < end && *p == 255) literals += *p++;
            if (p < end) literals += *p++;
        }
        if (literals + 2 > end - p) break;
        p += literals + 2;
        if ((token & 15) == 15) {
            while (p < end && *p == 255) p++;
            p++;
        }
    }
    return work;
}

/* The same for a block of a Zstandard frame, by its headers. */
static unit_work work_of_zstd_block(const uint8_t *p, const uint8_t *end) {
    static const int64_t plain[4][2] = {{1, 3}, {2, 4}, {1, 3}, {3, 4}}, coded[4][2] = {{3, 10}, {3, 10}, {4, 14}, {5, 18}};
    unit_work work = {0, 0, 0};
    if (p >= end) return work;
    const int kind = *p & 3, form = *p >> 2 & 3;
    int64_t skipped;
    if (kind < 2) { /* literals as they are, or one of them repeated */
        skipped = plain[form][0] + (kind == 0 ? read_number(p, plain[form][0], end) >> plain[form][1] : 1);
    } else {
        const int64_t sizes = read_number(p, coded[form][0], end) >> 4, bits = coded[form][1];
        work.literals = sizes & ((INT64_C(1) << bits) - 1);
        work.tables = kind == 2;
        skipped = coded[form][0] + (sizes >> bits);
    }
    if (skipped >= end - p) return work;
    p += skipped;
    const int64_t first = p[0], second = p + 1 < end ? p[1] : 0, third = p + 2 < end ? p[2] : 0;
    work.sequences = first < 128 ? first : first < 255 ? ((first - 128) << 8) + second : second + (third << 8) + 0x7F00;
    return work;
}

static unit_work work_of_zstd(const uint8_t *p, const uint8_t *end) {
    static const int64_t of_dictionary[4] = {0, 1, 2, 4}, of_content[4] = {0, 2, 4, 8};
    unit_work work = {0, 0, 0};
    if (end - p < 5) return work;
    const int head = p[4], is_single = head >> 5 & 1;
    p += 5 + (1 - is_single) + of_dictionary[head & 3] + (head >> 6 ? of_content[head >> 6] : is_single);
    for (int is_last = 0; !is_last && end - p >= 3;) {
        const int64_t block = read_number(p, 3, end), kind = block >> 1 & 3, size = kind == 1 ? 1 : block >> 3;
        is_last = block & 1;
        p += 3;
        if (size > end - p) break;
        if (kind == 2) {
            const unit_work more = work_of_zstd_block(p, p + size);
            work.sequences += more.sequences, work.literals += more.literals, work.tables += more.tables;
        }
        p += size;
    }
    return work;
}

/* Count what there is to do for some units of a block in memory, three numbers for each: none for a unit that is stored as
 * it was, or is not there. */
EXPORT void holdall_count_work(const sealed_block *b, const int64_t *units, int64_t count, int64_t *work) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t u = units[i];
        unit_work found = {0, 0, 0};
        if (u >= 0 && u * b->group < b->slice_count && b->data && is_inside(b, u)) {
            const uint8_t *start = b->data + b->offsets[u], *const end = b->data + b->offsets[u + 1];
            if (is_of_colours(&b->form) && start < end) start += 1 + 4 * (int64_t)start[0];
            if (start < end && end - start < bytes_of_unit(b, u))
                found = b->method == METHOD_LZ4 ? work_of_lz4(start, end) : work_of_zstd(start, end);
        }
        work[3 * i] = found.sequences, work[3 * i + 1] = found.literals, work[3 * i + 2] = found.tables;
    }
}
