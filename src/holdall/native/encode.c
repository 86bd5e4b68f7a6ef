/* Encoding of a whole block of slices, as the sealer does it: palettes, predictors, byte shuffle, then LZ4 or Zstandard. */
#include "codec.h"

#include <string.h>

/* ---- differences ------------------------------------------------------------------- */

static void deinterleave(const transform *form, const uint8_t *in, uint8_t *planes) {
    const int64_t plane = form->rows * form->columns;
    for (int64_t i = 0; i < plane; i++)
        for (int64_t p = 0; p < form->planes; p++) planes[p * plane + i] = in[i * form->planes + p];
}

static void interleave(const transform *form, const uint8_t *planes, uint8_t *out) {
    const int64_t plane = form->rows * form->columns;
    for (int64_t i = 0; i < plane; i++)
        for (int64_t p = 0; p < form->planes; p++) out[i * form->planes + p] = planes[p * plane + i];
}

/* Turn planes of values into planes of differences, in place. */
static void take_differences(const transform *form, uint8_t *planes) {
    const int64_t columns = form->columns, plane = form->rows * columns;
    if (form->green)
        for (int64_t i = 0; i < plane; i++) {
            planes[i] = (uint8_t)(planes[i] - planes[plane + i]);
            planes[2 * plane + i] = (uint8_t)(planes[2 * plane + i] - planes[plane + i]);
        }
    for (int64_t p = 0; p < form->planes; p++) {
        uint8_t *const first = planes + p * plane;
        for (int64_t y = form->rows - 1; y >= 0; y--) {
            uint8_t *const row = first + y * columns;
            if (form->predictor == PREDICT_LEFT) {
                for (int64_t x = columns - 1; x > 0; x--) row[x] = (uint8_t)(row[x] - row[x - 1]);
                if (y > 0) row[0] = (uint8_t)(row[0] - row[-columns]);
            } else if (y > 0) {
                for (int64_t x = 0; x < columns; x++) row[x] = (uint8_t)(row[x] - row[x - columns]);
            }
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

/* Bytes that a unit is compressed against: those of its key, or of a dictionary. */
typedef struct {
    const uint8_t *bytes; /* NULL: none */
    int64_t count;
} known_bytes;

static int64_t compress(const encoder *e, known_bytes known, const uint8_t *in, int64_t bytes, uint8_t *out,
                        int64_t room) {
    if (e->method == METHOD_LZ4) {
        int length;
        if (known.bytes) {
            e->lz4_reset_hc(e->stream, e->level > 0 ? (int)e->level : 1);
            e->lz4_load_dict_hc(e->stream, (const char *)known.bytes, (int)known.count);
            length = e->lz4_continue_hc(e->stream, (const char *)in, (char *)out, (int)bytes, (int)room);
        } else if (e->level > 0) {
            length = e->lz4_compress_hc((const char *)in, (char *)out, (int)bytes, (int)room, (int)e->level);
        } else {
            length = e->lz4_compress_default((const char *)in, (char *)out, (int)bytes, (int)room);
        }
        return length > 0 ? length : bytes;
    }
    if (e->method == METHOD_ZSTD) {
        /* For one frame; a dictionary is part of the context. */
        if (known.bytes) e->zstd_ref_prefix(e->cctx, known.bytes, (size_t)known.count);
        const size_t length = e->zstd_compress2(e->cctx, out, (size_t)room, in, (size_t)bytes);
        return e->zstd_is_error(length) ? bytes : (int64_t)length;
    }
    return bytes;
}

/* Transform one slice; returns where the coded bytes stand: in `slice`, `a` or `b`. */
static const uint8_t *transformed(const transform *form, const uint8_t *slice, const uint8_t *palette,
                                  const uint16_t *slots, uint8_t *a, uint8_t *b) {
    const int64_t coded = coded_bytes(form);
    const uint8_t *stage = slice;
    if (form->word_bytes > 0) {
        number_words(form, stage, palette, slots, a);
        stage = a;
    }
    if (form->predictor == PIXELS) {
        interleave(form, stage, b);
        stage = b;
    } else if (form->predictor) {
        if (form->interleaved) deinterleave(form, stage, b);
        else memcpy(b, stage, (size_t)coded);
        take_differences(form, b);
        stage = b;
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
    const uint8_t *palette;
    const uint16_t *slots;
} block_of_slices;

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

/* Code `count` slices from `slices` on into `data`, and write where their units end to `offsets`. With `order`, slice
 * order[i] is coded in place i. `slots` is room for the palette's table, zeroed. Returns the bytes written; -1: there are
 * more than 256 words; -2: the scratch memory or `room` is too small, or `order` names a slice that is not there. */
EXPORT int64_t holdall_encode(const encoder *e, const transform *form, const uint8_t *slices, const uint32_t *order,
                              int64_t count, uint8_t *data, int64_t room, uint32_t *offsets, uint8_t *palette,
                              uint16_t *slots) {
    const int64_t coded = coded_bytes(form), unit_bytes = e->group * coded;
    uint8_t *const a = e->scratch, *const b = a + coded, *const unit = b + coded, *const key = unit + unit_bytes;
    uint8_t *const packed = key + (e->key > 0 ? unit_bytes : 0);
    const int64_t packed_room = e->scratch_bytes - (packed - e->scratch);
    const block_of_slices block = {form, slices, order, palette, slots};
    int64_t used = 0;
    offsets[0] = 0;
    if (e->group < 1 || e->key < 0 || packed_room < unit_bytes) return -2;
    for (int64_t i = 0; order && i < count; i++)
        if (order[i] >= count) return -2;
    if (form->word_bytes > 0 && !collect_words(form, slices, count, palette, slots)) return -1;
    for (int64_t first = 0, u = 0; first < count; first += e->group, u++) {
        const int64_t in_unit = count - first < e->group ? count - first : e->group, bytes = in_unit * coded;
        const int is_key = e->key > 0 && u % e->key == 0;
        const uint8_t *const stage = staged(&block, first, in_unit, a, b, unit);
        known_bytes known = {e->common, e->common_bytes};
        if (e->key > 0 && !is_key) known = (known_bytes){key, unit_bytes};
        int64_t length = is_key && e->keeps_keys_raw ? bytes : compress(e, known, stage, bytes, packed, packed_room);
        if (length >= bytes) length = bytes;
        if (used + length > room || used + length > UINT32_MAX) return -2;
        memcpy(data + used, length == bytes ? stage : packed, (size_t)length);
        if (is_key) memcpy(key, stage, (size_t)bytes);
        used += length;
        offsets[u + 1] = (uint32_t)used;
    }
    return used;
}
