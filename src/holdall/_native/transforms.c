/* Undoing transforms: differences, planes and pixels, shuffled bytes, palettes of words, changes. */
#include "codec.h"

#include <string.h>

/* ---- differences ------------------------------------------------------------------- */

/* Write the sums of a row to `out`, each plus its byte of `more` if that is not NULL. The first byte of a row is a
 * difference to `above`, and every other byte to its left neighbour. */
static void sum_row(const uint8_t *from, int64_t columns, uint8_t above, const uint8_t *more, uint8_t *out) {
    uint8_t sum = above;
    for (int64_t x = 0; x < columns; x++) {
        sum = (uint8_t)(sum + from[x]);
        out[x] = (uint8_t)(sum + (more ? more[x] : 0));
    }
}

#ifdef HAVE_X86
enum { WIDTH = 16 };

/* Return 16 bytes of each of two neighbouring rows, one row in each half. */
__attribute__((target("avx2"))) static inline __m256i load_two(const uint8_t *at, int64_t columns) {
    const __m256i first = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)at));
    return _mm256_inserti128_si256(first, _mm_loadu_si128((const __m128i *)(at + columns)), 1);
}

/* Store 16 bytes of each of two neighbouring rows, each plus its byte of `more` if that is not NULL. */
__attribute__((target("avx2"))) static inline void store_two(__m256i v, const uint8_t *more, int64_t columns, uint8_t *out) {
    if (more) v = _mm256_add_epi8(v, load_two(more, columns));
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(v));
    _mm_storeu_si128((__m128i *)(out + columns), _mm256_extracti128_si256(v, 1));
}

/* Return the running sums of each half, in four shifted additions. All bytes of `before` are the sum so far. */
__attribute__((target("avx2"))) static inline __m256i running_sums(__m256i v, __m256i before) {
    v = _mm256_add_epi8(v, _mm256_slli_si256(v, 1));
    v = _mm256_add_epi8(v, _mm256_slli_si256(v, 2));
    v = _mm256_add_epi8(v, _mm256_slli_si256(v, 4));
    return _mm256_add_epi8(_mm256_add_epi8(v, before), _mm256_slli_si256(v, 8));
}

/* As `sum_row`, for two neighbouring rows of at least 16 columns. The last 16 columns may overlap those before, so their
 * differences are loaded before `out`, which may be `from`, is written to. */
__attribute__((target("avx2"))) static void sum_two_rows(const uint8_t *from, int64_t columns, uint8_t above,
                                                         const uint8_t *more, uint8_t *out) {
    const __m128i second_above = _mm_set1_epi8((char)(above + from[0]));
    __m256i before = _mm256_inserti128_si256(_mm256_set1_epi8((char)above), second_above, 1);
    int64_t x = 0;
    for (; x + 2 * WIDTH <= columns; x += WIDTH) {
        const __m256i sums = running_sums(load_two(from + x, columns), before);
        store_two(sums, more ? more + x : NULL, columns, out + x);
        before = _mm256_shuffle_epi8(sums, _mm256_set1_epi8(WIDTH - 1));
    }
    const int64_t end = columns - WIDTH;
    const __m256i last = load_two(from + end, columns), sums = running_sums(load_two(from + x, columns), before);
    store_two(sums, more ? more + x : NULL, columns, out + x);
    if (end == x) return;
    before = _mm256_shuffle_epi8(sums, _mm256_set1_epi8((char)(end - x - 1)));
    store_two(running_sums(last, before), more ? more + end : NULL, columns, out + end);
}
#endif

/* Write the sums of a plane to `out`, each plus its byte of `more` if that is not NULL. */
static void sum_plane(const uint8_t *from, int64_t rows, int64_t columns, const uint8_t *more, uint8_t *out) {
    uint8_t above = 0;
    int64_t y = 0;
#ifdef HAVE_X86
    if (columns >= WIDTH && has_avx2())
        for (; y + 2 <= rows; y += 2) {
            const int64_t at = y * columns;
            const uint8_t next_above = (uint8_t)(above + from[at] + from[at + columns]);
            sum_two_rows(from + at, columns, above, more ? more + at : NULL, out + at);
            above = next_above;
        }
#endif
    for (; y < rows; y++) {
        const int64_t at = y * columns;
        const uint8_t next_above = (uint8_t)(above + from[at]);
        sum_row(from + at, columns, above, more ? more + at : NULL, out + at);
        above = next_above;
    }
}

void undo_differences(const transform *form, const uint8_t *planes, uint8_t *out) {
    const int64_t plane = form->rows * form->columns;
    const uint8_t *const green = form->green ? out + plane : NULL;
    /* The planes 0 and 2 are differences to plane 1, which is therefore the first. */
    if (green) sum_plane(planes + plane, form->rows, form->columns, NULL, out + plane);
    for (int64_t p = 0; p < form->planes; p++) {
        if (green && p == 1) continue;
        const uint8_t *const more = p == 0 || p == 2 ? green : NULL;
        sum_plane(planes + p * plane, form->rows, form->columns, more, out + p * plane);
    }
}

#ifdef HAVE_X86
__attribute__((target("ssse3"))) static int64_t interleave_fast(const uint8_t *planes, int64_t plane,
                                                                 uint8_t *out) {
    const __m128i r0 = _mm_setr_epi8(0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1, -1, 5);
    const __m128i g0 = _mm_setr_epi8(-1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1, -1);
    const __m128i b0 = _mm_setr_epi8(-1, -1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1);
    const __m128i r1 = _mm_setr_epi8(-1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1, 10, -1);
    const __m128i g1 = _mm_setr_epi8(5, -1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1, 10);
    const __m128i b1 = _mm_setr_epi8(-1, 5, -1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1);
    const __m128i r2 = _mm_setr_epi8(-1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15, -1, -1);
    const __m128i g2 = _mm_setr_epi8(-1, -1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15, -1);
    const __m128i b2 = _mm_setr_epi8(10, -1, -1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15);
    int64_t i = 0;
    for (; i + 16 <= plane; i += 16) {
        const __m128i r = _mm_loadu_si128((const __m128i *)(planes + i));
        const __m128i g = _mm_loadu_si128((const __m128i *)(planes + plane + i));
        const __m128i b = _mm_loadu_si128((const __m128i *)(planes + 2 * plane + i));
        __m128i *const to = (__m128i *)(out + 3 * i);
        _mm_storeu_si128(to, _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(r, r0), _mm_shuffle_epi8(g, g0)),
                                          _mm_shuffle_epi8(b, b0)));
        _mm_storeu_si128(to + 1, _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(r, r1), _mm_shuffle_epi8(g, g1)),
                                              _mm_shuffle_epi8(b, b1)));
        _mm_storeu_si128(to + 2, _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(r, r2), _mm_shuffle_epi8(g, g2)),
                                              _mm_shuffle_epi8(b, b2)));
    }
    return i;
}
#endif

void interleave(const transform *form, const uint8_t *planes, uint8_t *out) {
    const int64_t plane = form->rows * form->columns;
    int64_t i = 0;
#ifdef HAVE_X86
    if (form->planes == 3 && has_ssse3()) i = interleave_fast(planes, plane, out);
#endif
    for (; i < plane; i++)
        for (int64_t p = 0; p < form->planes; p++) out[i * form->planes + p] = planes[p * plane + i];
}

#ifdef HAVE_X86
/* Separate 32 pixels at a time, 16 in each half of the registers. The bytes of a plane have different positions in three
 * registers, so they are collected in one register first and then put in order. Return the number of pixels done. */
__attribute__((target("avx2"))) static int64_t separate_planes_wide(const uint8_t *in, int64_t plane, uint8_t *planes) {
    const __m128i every_third = _mm_setr_epi8(-1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1);
    const __m256i first = _mm256_broadcastsi128_si256(every_third);
    const __m256i second = _mm256_broadcastsi128_si256(_mm_slli_si128(every_third, 1));
    const __m256i third = _mm256_broadcastsi128_si256(_mm_slli_si128(every_third, 2));
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 3, 6, 9, 12, 15, 2, 5, 8, 11, 14, 1, 4, 7, 10, 13));
    const __m256i order_1 = _mm256_broadcastsi128_si256(_mm_setr_epi8(1, 4, 7, 10, 13, 0, 3, 6, 9, 12, 15, 2, 5, 8, 11, 14));
    const __m256i order_2 = _mm256_broadcastsi128_si256(_mm_setr_epi8(2, 5, 8, 11, 14, 1, 4, 7, 10, 13, 0, 3, 6, 9, 12, 15));
    int64_t i = 0;
    for (; i + 32 <= plane; i += 32) {
        const __m128i *const at = (const __m128i *)(in + 3 * i);
        const __m256i a = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(at)), _mm_loadu_si128(at + 3), 1);
        const __m256i b = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(at + 1)), _mm_loadu_si128(at + 4), 1);
        const __m256i c = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(at + 2)), _mm_loadu_si128(at + 5), 1);
        const __m256i red = _mm256_blendv_epi8(_mm256_blendv_epi8(b, a, first), c, second);
        const __m256i green = _mm256_blendv_epi8(_mm256_blendv_epi8(c, b, first), a, second);
        const __m256i blue = _mm256_blendv_epi8(_mm256_blendv_epi8(b, c, first), a, third);
        _mm256_storeu_si256((__m256i *)(planes + i), _mm256_shuffle_epi8(red, order));
        _mm256_storeu_si256((__m256i *)(planes + plane + i), _mm256_shuffle_epi8(green, order_1));
        _mm256_storeu_si256((__m256i *)(planes + 2 * plane + i), _mm256_shuffle_epi8(blue, order_2));
    }
    return i;
}

__attribute__((target("ssse3"))) static int64_t separate_planes_fast(const uint8_t *in, int64_t plane, uint8_t *planes) {
    const __m128i from_a[3] = {_mm_setr_epi8(0, 3, 6, 9, 12, 15, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1),
                               _mm_setr_epi8(1, 4, 7, 10, 13, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1),
                               _mm_setr_epi8(2, 5, 8, 11, 14, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1)};
    const __m128i from_b[3] = {_mm_setr_epi8(-1, -1, -1, -1, -1, -1, 2, 5, 8, 11, 14, -1, -1, -1, -1, -1),
                               _mm_setr_epi8(-1, -1, -1, -1, -1, 0, 3, 6, 9, 12, 15, -1, -1, -1, -1, -1),
                               _mm_setr_epi8(-1, -1, -1, -1, -1, 1, 4, 7, 10, 13, -1, -1, -1, -1, -1, -1)};
    const __m128i from_c[3] = {_mm_setr_epi8(-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 1, 4, 7, 10, 13),
                               _mm_setr_epi8(-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 2, 5, 8, 11, 14),
                               _mm_setr_epi8(-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 3, 6, 9, 12, 15)};
    int64_t i = 0;
    for (; i + 16 <= plane; i += 16) {
        const __m128i *const at = (const __m128i *)(in + 3 * i);
        const __m128i a = _mm_loadu_si128(at), b = _mm_loadu_si128(at + 1), c = _mm_loadu_si128(at + 2);
        for (int p = 0; p < 3; p++) {
            const __m128i ab = _mm_or_si128(_mm_shuffle_epi8(a, from_a[p]), _mm_shuffle_epi8(b, from_b[p]));
            _mm_storeu_si128((__m128i *)(planes + p * plane + i), _mm_or_si128(ab, _mm_shuffle_epi8(c, from_c[p])));
        }
    }
    return i;
}
#endif

void separate_planes(const transform *form, const uint8_t *in, uint8_t *planes) {
    const int64_t plane = form->rows * form->columns;
    int64_t i = 0;
#ifdef HAVE_X86
    if (form->planes == 3 && has_ssse3())
        i = has_avx2() ? separate_planes_wide(in, plane, planes) : separate_planes_fast(in, plane, planes);
#endif
    for (; i < plane; i++)
        for (int64_t p = 0; p < form->planes; p++) planes[p * plane + i] = in[i * form->planes + p];
}

/* ---- words ------------------------------------------------------------------------- */

void unshuffle(int64_t word, int64_t bytes, const uint8_t *in, uint8_t *out) {
    const int64_t words = bytes / word;
    if (word == 4) {
        for (int64_t i = 0; i < words; i++) {
            out[4 * i] = in[i];
            out[4 * i + 1] = in[words + i];
            out[4 * i + 2] = in[2 * words + i];
            out[4 * i + 3] = in[3 * words + i];
        }
    } else {
        for (int64_t b = 0; b < word; b++)
            for (int64_t i = 0; i < words; i++) out[i * word + b] = in[b * words + i];
    }
    memcpy(out + words * word, in + words * word, (size_t)(bytes - words * word));
}

void look_up_words(const transform *form, const uint8_t *palette, const uint8_t *in, uint8_t *out) {
    const int64_t words = form->slice_bytes / form->word_bytes;
    if (form->word_bytes == 4) {
        for (int64_t i = 0; i < words; i++) memcpy(out + 4 * i, palette + 4 * in[i], 4);
    } else if (form->word_bytes == 8) {
        for (int64_t i = 0; i < words; i++) memcpy(out + 8 * i, palette + 8 * in[i], 8);
    } else {
        for (int64_t i = 0; i < words; i++) memcpy(out + 2 * i, palette + 2 * in[i], 2);
    }
}

/* ---- changes ----------------------------------------------------------------------- */

/* Read a number of seven bits per byte, the lowest first. Return its end, NULL if it does not end before `end`. */
static inline const uint8_t *read_number(const uint8_t *p, const uint8_t *end, int64_t *count) {
    if (p < end && *p < 128) {
        *count = *p;
        return p + 1;
    }
    *count = 0;
    for (int shift = 0; p < end && shift < 35; shift += 7) {
        *count |= (int64_t)(*p & 127) << shift;
        if (*p++ < 128) return p;
    }
    return NULL;
}

enum { AT_ONCE = 16 };

/* Copy `count` bytes, at most AT_ONCE, without a branch on `count`, which the processor would predict wrongly each time.
 * AT_ONCE bytes must be readable and writable on both sides; the bytes after `count` keep their values. */
static inline void copy_few(uint8_t *to, const uint8_t *from, int64_t count) {
    static const uint8_t kept[2 * AT_ONCE] = {[AT_ONCE] = 255, 255, 255, 255, 255, 255, 255, 255,
                                              255, 255, 255, 255, 255, 255, 255, 255};
    uint64_t mask[2], before[2], after[2];
    memcpy(mask, kept + AT_ONCE - count, AT_ONCE);
    memcpy(before, to, AT_ONCE);
    memcpy(after, from, AT_ONCE);
    for (int i = 0; i < 2; i++) after[i] ^= (before[i] ^ after[i]) & mask[i];
    memcpy(to, after, AT_ONCE);
}

const uint8_t *apply_changes(const uint8_t *p, const uint8_t *end, uint8_t *slice, int64_t bytes) {
    int64_t changes, skipped, length, at = 0;
    p = read_number(p, end, &changes);
    for (; p && changes > 0; changes--) {
        p = read_number(p, end, &skipped);
        if (p) p = read_number(p, end, &length);
        if (!p) return NULL;
        if (skipped > bytes - at || length > bytes - at - skipped || length > end - p) return NULL;
        at += skipped;
        if (length <= AT_ONCE && bytes - at >= AT_ONCE && end - p >= AT_ONCE) copy_few(slice + at, p, length);
        else memcpy(slice + at, p, (size_t)length);
        at += length;
        p += length;
    }
    return p;
}
