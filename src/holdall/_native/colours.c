/* Images of few colours: a pixel becomes the number of its colour in a palette of 256.
 *
 * A block has one palette, of the colours that most of its slices show. The other colours of a unit precede the unit: a
 * count, and for each colour its number and its three bytes. Such a number replaces a palette colour that the unit does
 * not use. Where a scene moves sideways, columns repeat and rows do not, so numbers may be stored column by column. */
#include "codec.h"

#include <string.h>

enum { TABLE_SLOTS = 1 << 16, MAX_BLOCK_COLOURS = 1 << 15 };
static const uint32_t NO_COLOUR = UINT32_MAX; /* the palette entry of a free number */

/* ---- columns ----------------------------------------------------------------------- */

#ifdef HAVE_X86
/* Transpose 8 rows of 8 numbers. */
static void transpose_8(const uint8_t *in, int64_t columns, uint8_t *out, int64_t rows) {
    __m128i pair[4], four[4], eight[4];
    for (int i = 0; i < 4; i++)
        pair[i] = _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *)(in + 2 * i * columns)),
                                    _mm_loadl_epi64((const __m128i *)(in + (2 * i + 1) * columns)));
    for (int i = 0; i < 2; i++) {
        four[2 * i] = _mm_unpacklo_epi16(pair[2 * i], pair[2 * i + 1]);
        four[2 * i + 1] = _mm_unpackhi_epi16(pair[2 * i], pair[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        eight[2 * i] = _mm_unpacklo_epi32(four[i], four[2 + i]);
        eight[2 * i + 1] = _mm_unpackhi_epi32(four[i], four[2 + i]);
    }
    for (int i = 0; i < 4; i++) {
        _mm_storel_epi64((__m128i *)(out + 2 * i * rows), eight[i]);
        _mm_storel_epi64((__m128i *)(out + (2 * i + 1) * rows), _mm_unpackhi_epi64(eight[i], eight[i]));
    }
}
#endif

/* Turn rows into columns. */
static void transpose(const uint8_t *in, int64_t rows, int64_t columns, uint8_t *out) {
    int64_t y = 0;
#ifdef HAVE_X86
    for (; y + 8 <= rows; y += 8) {
        int64_t x = 0;
        for (; x + 8 <= columns; x += 8) transpose_8(in + y * columns + x, columns, out + x * rows + y, rows);
        for (; x < columns; x++)
            for (int64_t i = y; i < y + 8; i++) out[x * rows + i] = in[i * columns + x];
    }
#endif
    for (; y < rows; y++)
        for (int64_t x = 0; x < columns; x++) out[x * rows + y] = in[y * columns + x];
}

/* ---- encoding ---------------------------------------------------------------------- */

/* A colour of a block, in a table with open addressing. */
struct known_colour {
    uint32_t key;        /* the colour + 1; 0: the slot is free */
    uint32_t slices;     /* number of slices that show the colour */
    uint32_t last;       /* number + 1 of the last slice that shows the colour; once colours are collected, of the last unit */
    int16_t number;      /* number in the palette of the block, or -1 */
    int16_t unit_number; /* number in the palette of the last unit that shows the colour */
};

static inline uint32_t hash_of(uint32_t colour) { return colour * UINT32_C(0x9E3779B1); }

static inline uint32_t colour_at(const transform *form, const uint8_t *slice, int64_t pixel) {
    const int64_t plane = form->rows * form->columns, step = form->interleaved ? 1 : plane;
    const uint8_t *const at = slice + (form->interleaved ? 3 * pixel : pixel);
    return at[0] | (uint32_t)at[step] << 8 | (uint32_t)at[2 * step] << 16;
}

/* Return the slot of a colour, or the free slot where it belongs. */
static known_colour *find_colour(known_colour *table, uint32_t colour) {
    uint32_t place = hash_of(colour) >> 16;
    while (table[place].key != 0 && table[place].key != colour + 1) place = (place + 1) & (TABLE_SLOTS - 1);
    return &table[place];
}

/* Whether colour `a` is sorted before `b`: more slices show `a`, or equally many do and `a` is the smaller number. */
static int comes_before(const known_colour *a, const known_colour *b) {
    return a->slices != b->slices ? a->slices > b->slices : a->key < b->key;
}

/* Number the colours of a block. Colours of the given palette keep their numbers. The most frequent other colours get the
 * free numbers. */
static void fill_palette(known_colour *table, uint32_t *palette) {
    const known_colour *best[256];
    int64_t found = 0, number = 0;
    for (int64_t i = 0; i < 256; i++) {
        if (palette[i] == NO_COLOUR) continue;
        palette[i] &= 0xFFFFFF;
        known_colour *const known = find_colour(table, palette[i]);
        if (known->key != 0 && known->number < 0) known->number = (int16_t)i;
        else palette[i] = NO_COLOUR;
    }
    for (int64_t i = 0; i < TABLE_SLOTS; i++) {
        const known_colour *const one = &table[i];
        if (one->key == 0 || one->number >= 0 || (found == 256 && !comes_before(one, best[255]))) continue;
        int64_t at = found < 256 ? found++ : 255;
        for (; at > 0 && comes_before(one, best[at - 1]); at--) best[at] = best[at - 1];
        best[at] = one;
    }
    for (int64_t i = 0; i < found; i++) {
        while (number < 256 && palette[number] != NO_COLOUR) number++;
        if (number == 256) return;
        palette[number] = best[i]->key - 1;
        find_colour(table, best[i]->key - 1)->number = (int16_t)number;
    }
}

int collect_colours(const transform *form, const uint8_t *slices, int64_t count, uint8_t *palette, known_colour *table) {
    const int64_t pixels = coded_bytes(form);
    int64_t known = 0;
    for (int64_t s = 0; s < count; s++) {
        const uint8_t *const slice = slices + s * form->slice_bytes;
        uint32_t before = NO_COLOUR;
        for (int64_t i = 0; i < pixels; i++) {
            const uint32_t colour = colour_at(form, slice, i);
            if (colour == before) continue;
            before = colour;
            known_colour *const one = find_colour(table, colour);
            if (one->key == 0) {
                if (++known > MAX_BLOCK_COLOURS) return 0;
                *one = (known_colour){.key = colour + 1, .number = -1};
            }
            if (one->last != (uint32_t)s + 1) one->slices++;
            one->last = (uint32_t)s + 1;
        }
    }
    uint32_t words[256];
    memcpy(words, palette, sizeof words);
    fill_palette(table, words);
    memcpy(palette, words, sizeof words);
    for (int64_t i = 0; i < TABLE_SLOTS; i++) table[i].last = 0;
    return 1;
}

/* Number the colours of a unit that the palette of the block lacks. The number depends on the colour, so that it is the
 * same in most units. */
static void number_missing(known_colour *const *missing, int64_t count, uint8_t *is_used, uint8_t *head) {
    head[0] = (uint8_t)count;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t colour = missing[i]->key - 1;
        uint32_t number = hash_of(colour) >> 24;
        while (is_used[number]) number = (number + 1) & 255;
        is_used[number] = 1;
        missing[i]->unit_number = (int16_t)number;
        uint8_t *const entry = head + 1 + 4 * i;
        entry[0] = (uint8_t)number;
        entry[1] = (uint8_t)colour;
        entry[2] = (uint8_t)(colour >> 8);
        entry[3] = (uint8_t)(colour >> 16);
    }
}

int64_t begin_unit(const transform *form, const uint8_t *const *slices, int64_t count, int64_t unit, known_colour *table,
                   uint8_t *head) {
    const int64_t pixels = coded_bytes(form);
    known_colour *missing[MAX_UNIT_COLOURS];
    uint8_t is_used[256] = {0};
    int64_t shown_count = 0, missing_count = 0;
    for (int64_t s = 0; s < count; s++) {
        uint32_t before = NO_COLOUR;
        for (int64_t i = 0; i < pixels; i++) {
            const uint32_t colour = colour_at(form, slices[s], i);
            if (colour == before) continue;
            before = colour;
            known_colour *const one = find_colour(table, colour);
            if (one->last == (uint32_t)unit + 1) continue;
            one->last = (uint32_t)unit + 1;
            one->unit_number = one->number;
            if (++shown_count > 256) return -1;
            if (one->number >= 0) is_used[one->number] = 1;
            else if (missing_count == MAX_UNIT_COLOURS) return -1;
            else missing[missing_count++] = one;
        }
    }
    /* Numbers save two of the three bytes of a pixel. The colours must not take more than that. */
    if (1 + 4 * missing_count > 2 * count * pixels) return -1;
    number_missing(missing, missing_count, is_used, head);
    return 1 + 4 * missing_count;
}

const uint8_t *number_colours(const transform *form, const uint8_t *slice, known_colour *table, uint8_t *a, uint8_t *b) {
    const int64_t pixels = coded_bytes(form);
    uint32_t before = NO_COLOUR;
    uint8_t number = 0;
    for (int64_t i = 0; i < pixels; i++) {
        const uint32_t colour = colour_at(form, slice, i);
        if (colour != before) number = (uint8_t)find_colour(table, colour)->unit_number;
        before = colour;
        a[i] = number;
    }
    if (form->kind == TRANSFORM_COLOURS) return a;
    transpose(a, form->rows, form->columns, b);
    return b;
}

/* ---- decoding ---------------------------------------------------------------------- */

int64_t read_unit_colours(decoder *d, const coded_block *b, const uint8_t *from, int64_t length) {
    if (length < 1 || 1 + 4 * (int64_t)from[0] > length) return -1;
    const int64_t count = from[0];
    d->unit_palette = b->palette;
    if (count > 0) {
        memcpy(d->colours, b->palette, PALETTE_BYTES);
        for (int64_t i = 0; i < count; i++) memcpy(d->colours + 4 * from[1 + 4 * i], from + 2 + 4 * i, 3);
        d->unit_palette = d->colours;
    }
    return 1 + 4 * count;
}

#ifdef HAVE_X86
/* Sixteen colours as three tables of bytes, so that one shuffle of bytes looks up 32 numbers. */
typedef struct {
    __m256i plane[3];
} colour_table;

__attribute__((target("avx2"))) static void split_palette(const uint8_t *palette, int64_t tables, colour_table *out) {
    const __m128i by_plane = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int64_t t = 0; t < tables; t++) {
        __m128i four[4];
        for (int i = 0; i < 4; i++)
            four[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(palette + 64 * t + 16 * i)), by_plane);
        const __m128i ab = _mm_unpacklo_epi32(four[0], four[1]), cd = _mm_unpacklo_epi32(four[2], four[3]);
        const __m128i blue = _mm_unpacklo_epi64(_mm_unpackhi_epi32(four[0], four[1]), _mm_unpackhi_epi32(four[2], four[3]));
        out[t].plane[0] = _mm256_broadcastsi128_si256(_mm_unpacklo_epi64(ab, cd));
        out[t].plane[1] = _mm256_broadcastsi128_si256(_mm_unpackhi_epi64(ab, cd));
        out[t].plane[2] = _mm256_broadcastsi128_si256(blue);
    }
}

/* Look up 32 numbers in 1, 2, 4 or 8 tables of 16 colours. The higher bits of a number select the table. */
__attribute__((target("avx2"), always_inline)) static inline __m256i look_up_wide(const colour_table *t, int tables, int p,
                                                                                  __m256i in) {
    __m256i found[8];
    for (int i = 0; i < tables; i++) found[i] = _mm256_shuffle_epi8(t[i].plane[p], in);
    if (tables > 1)
        for (int i = 0; i < tables; i += 2) found[i] = _mm256_blendv_epi8(found[i], found[i + 1], _mm256_slli_epi16(in, 3));
    if (tables > 2)
        for (int i = 0; i < tables; i += 4) found[i] = _mm256_blendv_epi8(found[i], found[i + 2], _mm256_slli_epi16(in, 2));
    if (tables > 4) found[0] = _mm256_blendv_epi8(found[0], found[4], _mm256_slli_epi16(in, 1));
    return found[0];
}

/* Return a bit for each of 32 numbers that `tables` tables do not have. */
__attribute__((target("avx2"))) static inline uint32_t find_missing(int tables, __m256i in) {
    const __m256i last = _mm256_set1_epi8((char)(16 * tables - 1));
    return ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(in, last), last));
}

/* Look up 32 numbers at a time, and the few that are not in the tables one by one. Return how many were looked up. */
#define LOOK_UP_IN(tables)                                                                                             \
    __attribute__((target("avx2"))) static int64_t look_up_in_##tables(const uint8_t *palette, const uint8_t *in,      \
                                                                       int64_t plane, uint8_t *out) {                  \
        colour_table t[tables];                                                                                        \
        int64_t i = 0;                                                                                                 \
        split_palette(palette, tables, t);                                                                              \
        for (; i + 32 <= plane; i += 32) {                                                                             \
            const __m256i numbers = _mm256_loadu_si256((const __m256i *)(in + i));                                     \
            for (int p = 0; p < 3; p++)                                                                                \
                _mm256_storeu_si256((__m256i *)(out + p * plane + i), look_up_wide(t, tables, p, numbers));            \
            for (uint32_t rest = find_missing(tables, numbers); rest; rest &= rest - 1) {                                    \
                const int64_t at = i + __builtin_ctz(rest);                                                            \
                for (int p = 0; p < 3; p++) out[p * plane + at] = palette[4 * in[at] + p];                             \
            }                                                                                                          \
        }                                                                                                              \
        return i;                                                                                                      \
    }
LOOK_UP_IN(1)
LOOK_UP_IN(2)
LOOK_UP_IN(4)
LOOK_UP_IN(8)

/* Return the number of tables with which a look-up is fastest, or 16 if a look-up without tables is. A quarter of the numbers
 * decides. Times were measured for 32 numbers, in tenths of nanoseconds: 125 without tables; with tables, the time in `times`
 * plus 25 for each number that the tables do not have. */
__attribute__((target("avx2"))) static int choose_tables(const uint8_t *in, int64_t plane) {
    static const int64_t times[] = {11, 20, 31, 62};
    int64_t best = 16, least = 125 * (plane / 128);
    for (int k = 0; k < 4; k++) {
        int64_t cost = times[k] * (plane / 128);
        for (int64_t i = 0; i + 128 <= plane && cost < least; i += 128)
            for (uint32_t rest = find_missing(1 << k, _mm256_loadu_si256((const __m256i *)(in + i))); rest; rest &= rest - 1)
                cost += 25;
        if (cost < least) {
            least = cost;
            best = 1 << k;
        }
    }
    return (int)best;
}

/* Look up 16 numbers one by one, and separate the colours into planes at once. */
__attribute__((target("ssse3"))) static int64_t look_up_words_of_16(const uint8_t *palette, const uint8_t *in,
                                                                    int64_t plane, uint8_t *out) {
    const __m128i by_plane = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    int64_t i = 0;
    for (; i + 16 <= plane; i += 16) {
        __m128i four[4];
        for (int k = 0; k < 4; k++) {
            int32_t word[4];
            for (int j = 0; j < 4; j++) memcpy(&word[j], palette + 4 * in[i + 4 * k + j], 4);
            four[k] = _mm_shuffle_epi8(_mm_setr_epi32(word[0], word[1], word[2], word[3]), by_plane);
        }
        const __m128i ab = _mm_unpacklo_epi32(four[0], four[1]), cd = _mm_unpacklo_epi32(four[2], four[3]);
        const __m128i blue = _mm_unpacklo_epi64(_mm_unpackhi_epi32(four[0], four[1]), _mm_unpackhi_epi32(four[2], four[3]));
        _mm_storeu_si128((__m128i *)(out + i), _mm_unpacklo_epi64(ab, cd));
        _mm_storeu_si128((__m128i *)(out + plane + i), _mm_unpackhi_epi64(ab, cd));
        _mm_storeu_si128((__m128i *)(out + 2 * plane + i), blue);
    }
    return i;
}

/* Look up a multiple of the length of a register. Return how many were looked up. */
static int64_t look_up_fast(const uint8_t *palette, const uint8_t *in, int64_t plane, uint8_t *out) {
    switch (has_avx2() ? choose_tables(in, plane) : 16) {
    case 1: return look_up_in_1(palette, in, plane, out);
    case 2: return look_up_in_2(palette, in, plane, out);
    case 4: return look_up_in_4(palette, in, plane, out);
    case 8: return look_up_in_8(palette, in, plane, out);
    }
    return has_ssse3() ? look_up_words_of_16(palette, in, plane, out) : 0;
}
#endif

void look_up_colours(const transform *form, const uint8_t *palette, const uint8_t *in, uint8_t *scratch, uint8_t *out) {
    const int64_t plane = form->rows * form->columns;
    int64_t i = 0;
    if (form->kind == TRANSFORM_COLOUR_COLUMNS) {
        transpose(in, form->columns, form->rows, scratch);
        in = scratch;
    }
    if (form->interleaved) { /* A fourth byte is written, too, which the next pixel overwrites. */
        for (; i + 1 < plane; i++) memcpy(out + 3 * i, palette + 4 * in[i], 4);
        memcpy(out + 3 * i, palette + 4 * in[i], 3);
        return;
    }
#ifdef HAVE_X86
    i = look_up_fast(palette, in, plane, out);
#endif
    for (; i < plane; i++)
        for (int64_t p = 0; p < 3; p++) out[p * plane + i] = palette[4 * in[i] + p];
}
