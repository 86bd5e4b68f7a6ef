/* Decoding of slices: LZ4 and Zstandard, byte shuffle, predictors, palettes; from memory or from a file.
 *
 * What is read from a block is treated as if a stranger had written it: offsets are checked
 * against the block, and a slice that does not decode to exactly its size is an error.
 */
#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64

#include "codec.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#ifdef HAVE_X86
#include <cpuid.h>
#endif
#ifndef _WIN32
#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>
#endif

enum { MOST_IN_A_UNIT = 64 };

/* ---- differences ------------------------------------------------------------------- */

#ifdef HAVE_X86
/* Running sums of 16 bytes in four shifted additions, on top of what the byte before summed to, which is left in every
 * byte of `before` for the next 16. */
__attribute__((target("ssse3"))) static inline void sum_on(uint8_t *at, __m128i *before) {
    __m128i v = _mm_loadu_si128((const __m128i *)at);
    v = _mm_add_epi8(v, _mm_slli_si128(v, 1));
    v = _mm_add_epi8(v, _mm_slli_si128(v, 2));
    v = _mm_add_epi8(v, _mm_slli_si128(v, 4));
    v = _mm_add_epi8(_mm_add_epi8(v, *before), _mm_slli_si128(v, 8));
    _mm_storeu_si128((__m128i *)at, v);
    *before = _mm_shuffle_epi8(v, _mm_set1_epi8(15));
}

/* The same for four bytes. */
__attribute__((target("ssse3"))) static inline void sum_four_on(uint8_t *at, __m128i *before) {
    int32_t four;
    memcpy(&four, at, 4);
    __m128i v = _mm_cvtsi32_si128(four);
    v = _mm_add_epi8(v, _mm_slli_si128(v, 1));
    v = _mm_add_epi8(_mm_add_epi8(v, *before), _mm_slli_si128(v, 2));
    four = _mm_cvtsi128_si32(v);
    memcpy(at, &four, 4);
    *before = _mm_shuffle_epi8(v, _mm_set1_epi8(3));
}

/* Sum up four neighbouring rows as far as 4 divides them; side by side, since each addition waits for the one before in
 * its own row only. */
__attribute__((target("ssse3"))) static int64_t undo_left_from(uint8_t *first, int64_t columns, int64_t x) {
    uint8_t *const a = first, *const b = a + columns, *const c = b + columns, *const d = c + columns;
    const __m128i zero = _mm_setzero_si128();
    __m128i sa = x ? _mm_set1_epi8((char)a[x - 1]) : zero, sb = x ? _mm_set1_epi8((char)b[x - 1]) : zero;
    __m128i sc = x ? _mm_set1_epi8((char)c[x - 1]) : zero, sd = x ? _mm_set1_epi8((char)d[x - 1]) : zero;
    for (; x + 16 <= columns; x += 16) {
        sum_on(a + x, &sa);
        sum_on(b + x, &sb);
        sum_on(c + x, &sc);
        sum_on(d + x, &sd);
    }
    for (; x + 4 <= columns; x += 4) {
        sum_four_on(a + x, &sa);
        sum_four_on(b + x, &sb);
        sum_four_on(c + x, &sc);
        sum_four_on(d + x, &sd);
    }
    return x;
}

/* Whether the processor has AVX2, and the system keeps its registers; asked once. */
static int has_avx2(void) {
    static _Atomic int known; /* 0: not asked yet, 1: no, 2: yes */
    int answer = atomic_load_explicit(&known, memory_order_relaxed);
    if (answer == 0) {
        unsigned a, b, c = 0, d, kept = 0;
        if (__get_cpuid(1, &a, &b, &c, &d) && (c & bit_OSXSAVE)) __asm__("xgetbv" : "=a"(kept), "=d"(d) : "c"(0));
        answer = (kept & 6) == 6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2) ? 2 : 1;
        atomic_store_explicit(&known, answer, memory_order_relaxed);
    }
    return answer == 2;
}

/* As `sum_on`, for 16 bytes each of two rows. */
__attribute__((target("avx2"))) static inline void sum_two_on(uint8_t *at, uint8_t *other, __m256i *before) {
    __m256i v = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)at)),
                                        _mm_loadu_si128((const __m128i *)other), 1);
    v = _mm256_add_epi8(v, _mm256_slli_si256(v, 1));
    v = _mm256_add_epi8(v, _mm256_slli_si256(v, 2));
    v = _mm256_add_epi8(v, _mm256_slli_si256(v, 4));
    v = _mm256_add_epi8(_mm256_add_epi8(v, *before), _mm256_slli_si256(v, 8));
    _mm_storeu_si128((__m128i *)at, _mm256_castsi256_si128(v));
    _mm_storeu_si128((__m128i *)other, _mm256_extracti128_si256(v, 1));
    *before = _mm256_shuffle_epi8(v, _mm256_set1_epi8(15));
}

/* Sum up four neighbouring rows as far as 16 divides them. */
__attribute__((target("avx2"))) static int64_t undo_left_wide(uint8_t *first, int64_t columns) {
    __m256i ab = _mm256_setzero_si256(), cd = ab;
    int64_t x = 0;
    for (; x + 16 <= columns; x += 16) {
        sum_two_on(first + x, first + columns + x, &ab);
        sum_two_on(first + 2 * columns + x, first + 3 * columns + x, &cd);
    }
    return x;
}
#endif

/* Sum up `rows` neighbouring rows from their first bytes on. */
static void undo_left_rows(uint8_t *first, int64_t columns, int64_t rows) {
    int64_t x = 0;
#ifdef HAVE_X86
    if (rows == 4 && has_ssse3()) x = undo_left_from(first, columns, has_avx2() ? undo_left_wide(first, columns) : 0);
#endif
    for (int64_t y = 0; y < rows; y++) {
        uint8_t *const row = first + y * columns;
        for (int64_t i = x > 1 ? x : 1; i < columns; i++) row[i] = (uint8_t)(row[i] + row[i - 1]);
    }
}

static void add_row(uint8_t *restrict row, const uint8_t *restrict above, int64_t columns) {
    for (int64_t x = 0; x < columns; x++) row[x] = (uint8_t)(row[x] + above[x]);
}

/* Turn planes of differences back into planes of values, in place. */
static void undo_differences(const transform *form, uint8_t *planes) {
    const int64_t columns = form->columns, plane = form->rows * columns;
    for (int64_t p = 0; p < form->planes; p++) {
        uint8_t *const first = planes + p * plane;
        if (form->predictor == PREDICT_LEFT) {
            uint8_t sum = 0; /* what stands in memory would be waited for in every row */
            for (int64_t y = 0; y < form->rows; y++) first[y * columns] = sum = (uint8_t)(sum + first[y * columns]);
            int64_t y = 0;
            for (; y + 4 <= form->rows; y += 4) undo_left_rows(first + y * columns, columns, 4);
            for (; y < form->rows; y++) undo_left_rows(first + y * columns, columns, 1);
        } else {
            for (int64_t y = 1; y < form->rows; y++)
                add_row(first + y * columns, first + (y - 1) * columns, columns);
        }
    }
    if (form->green) {
        add_row(planes, planes + plane, plane);
        add_row(planes + 2 * plane, planes + plane, plane);
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
__attribute__((target("ssse3"))) static int64_t part_pixels_fast(const uint8_t *in, int64_t plane, uint8_t *planes) {
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

void part_pixels(const transform *form, const uint8_t *in, uint8_t *planes) {
    const int64_t plane = form->rows * form->columns;
    int64_t i = 0;
#ifdef HAVE_X86
    if (form->planes == 3 && has_ssse3()) i = part_pixels_fast(in, plane, planes);
#endif
    for (; i < plane; i++)
        for (int64_t p = 0; p < form->planes; p++) planes[p * plane + i] = in[i * form->planes + p];
}

/* ---- words ------------------------------------------------------------------------- */

static void unshuffle(int64_t word, int64_t bytes, const uint8_t *in, uint8_t *out) {
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

static void look_up_words(const transform *form, const uint8_t *palette, const uint8_t *in, uint8_t *out) {
    const int64_t words = form->slice_bytes / form->word_bytes;
    if (form->word_bytes == 4) {
        for (int64_t i = 0; i < words; i++) memcpy(out + 4 * i, palette + 4 * in[i], 4);
    } else if (form->word_bytes == 8) {
        for (int64_t i = 0; i < words; i++) memcpy(out + 8 * i, palette + 8 * in[i], 8);
    } else {
        for (int64_t i = 0; i < words; i++) memcpy(out + 2 * i, palette + 2 * in[i], 2);
    }
}

/* ---- one unit ---------------------------------------------------------------------- */

/* Whether a block's numbers agree with each other, so that no sum or product of them overflows: they may come from a
 * file. */
static int is_cut_soundly(const sealed_block *b) {
    if (b->form.slice_bytes < 1 || b->form.slice_bytes > INT32_MAX) return 0;
    if (b->group < 1 || b->group > MOST_IN_A_UNIT || b->slice_count < 0 || b->slice_count > UINT32_MAX) return 0;
    if (b->key < 0 || b->key > UINT32_MAX || b->common_bytes < 0 || b->common_bytes > INT32_MAX) return 0;
    if (b->data_bytes < 0 || b->file_start < 0 || b->file_start > INT64_MAX - b->data_bytes) return 0;
    return b->group * coded_bytes(&b->form) <= INT32_MAX;
}

/* The slice of the units that a number names; -1 if there is none. */
static int64_t place_of_slice(const sealed_block *b, int64_t number) {
    if (number < 0 || number >= b->slice_count) return -1;
    if (!b->places) return number;
    const int64_t place = b->place_bytes == 2 ? ((const uint16_t *)b->places)[number]
                                              : (int64_t)((const uint32_t *)b->places)[number];
    return place < b->slice_count ? place : -1;
}

#ifdef _WIN32
static int read_file(decoder *d, const sealed_block *b, int64_t start, int64_t bytes, uint8_t *to) {
    (void)b, (void)start, (void)bytes, (void)to;
    d->error = ENOSYS;
    return 0;
}
void expect_slices(const sealed_block *b, int64_t first, int64_t end) { (void)b, (void)first, (void)end; }
#else
/* Read `bytes` bytes from `start` of a block's units on; 0 if the file does not have them. */
static int read_file(decoder *d, const sealed_block *b, int64_t start, int64_t bytes, uint8_t *to) {
    d->error = 0;
    for (int64_t done = 0; done < bytes;) {
        const ssize_t got =
            pread((int)b->file, to + done, (size_t)(bytes - done), (off_t)(b->file_start + start + done));
        if (got <= 0) {
            if (got < 0 && errno == EINTR) continue;
            d->error = got < 0 ? errno : 0;
            return 0;
        }
        done += got;
    }
    return 1;
}

#ifdef POSIX_FADV_WILLNEED
static void expect_units(const sealed_block *b, int64_t first, int64_t end) {
    const int64_t start = b->offsets[first], stop = b->offsets[end];
    if (start < stop && stop <= b->data_bytes)
        posix_fadvise((int)b->file, (off_t)(b->file_start + start), (off_t)(stop - start), POSIX_FADV_WILLNEED);
}
#endif

void expect_slices(const sealed_block *b, int64_t first, int64_t end) {
#ifdef POSIX_FADV_WILLNEED
    if (!is_cut_soundly(b) || first < 0 || end > b->slice_count || first >= end) return;
    for (int64_t number = first; number < end;) {
        /* Slices that are in order lie side by side; of others each is looked up. */
        const int64_t stop = b->places ? number + 1 : end, place = place_of_slice(b, number);
        const int64_t unit = place / b->group;
        if (place >= 0) expect_units(b, unit, (place + stop - 1 - number) / b->group + 1);
        if (place >= 0 && b->key > 0) expect_units(b, unit - unit % b->key, unit - unit % b->key + 1);
        number = stop;
    }
#else
    (void)b, (void)first, (void)end;
#endif
}
#endif

/* Read units [unit, stop) of a block in a file at once, as many as there is room for. */
static void read_units(decoder *d, const sealed_block *b, int64_t unit, int64_t stop) {
    if (d->read_of == b && unit >= d->read_first && stop <= d->read_end) return;
    d->read_of = NULL;
    for (int64_t u = unit; u < stop; u++) {
        if (is_inside(b, u) && (int64_t)b->offsets[u + 1] - b->offsets[unit] <= d->read_bytes) continue;
        stop = u;
    }
    /* A unit that did not shrink is read straight to where it belongs. */
    if (stop <= unit || (int64_t)b->offsets[unit + 1] - b->offsets[unit] == bytes_of_unit(b, unit)) return;
    if (!read_file(d, b, b->offsets[unit], (int64_t)b->offsets[stop] - b->offsets[unit], d->read)) return;
    for (int64_t u = unit; u < stop; u++) {
        const int64_t length = (int64_t)b->offsets[u + 1] - b->offsets[u];
        if (checksum(d->read + (b->offsets[u] - b->offsets[unit]), length) != b->checks[u]) stop = u;
    }
    d->read_of = b, d->read_first = unit, d->read_end = stop;
}

/* Decompress a unit; `key` is what it was compressed against, NULL where that is a dictionary or nothing. */
static int decompress(const decoder *d, const sealed_block *b, const uint8_t *key, const uint8_t *from, int64_t length,
                      uint8_t *to, int64_t expected) {
    if (length == expected) { /* did not shrink, so it was stored */
        memcpy(to, from, (size_t)length);
        return 1;
    }
    if (b->method == METHOD_LZ4) {
        const char *const known = (const char *)(key ? key : b->common);
        const int64_t bytes = key ? b->group * coded_bytes(&b->form) : b->common_bytes;
        return d->lz4_decompress_using_dict((const char *)from, (char *)to, (int)length, (int)expected, known,
                                            (int)bytes) == (int)expected;
    }
    if (b->method == METHOD_ZSTD && key) { /* for this frame only */
        d->zstd_ref_prefix(d->dctx, key, (size_t)(b->group * coded_bytes(&b->form)));
        return d->zstd_decompress_dctx(d->dctx, to, (size_t)expected, from, (size_t)length) == (size_t)expected;
    }
    if (b->method == METHOD_ZSTD)
        return d->zstd_decompress_using_ddict(d->dctx, to, (size_t)expected, from, (size_t)length, b->ddict) ==
               (size_t)expected;
    return 0;
}

/* Decompress unit `u` to `to`, where `expected` bytes must come of it. */
static int decompress_unit(decoder *d, const sealed_block *b, const uint8_t *key, int64_t u, uint8_t *to,
                           int64_t expected) {
    if (!is_inside(b, u)) return 0;
    const int64_t length = (int64_t)b->offsets[u + 1] - b->offsets[u];
    if (b->data) return decompress(d, b, key, b->data + b->offsets[u], length, to, expected);
    if (length == expected)
        return read_file(d, b, b->offsets[u], length, to) && checksum(to, length) == b->checks[u];
    if (d->read_of != b || u < d->read_first || u >= d->read_end) {
        read_units(d, b, u, u + 1);
        if (d->read_of != b || u < d->read_first || u >= d->read_end) return 0;
    }
    return decompress(d, b, key, d->read + (b->offsets[u] - b->offsets[d->read_first]), length, to, expected);
}

/* What unit `u` was compressed against, if that is another unit; 0 if it cannot be decompressed. A key that is stored as
 * it was is read where it lies; the last one that was not is kept. */
static int find_key(decoder *d, const sealed_block *b, int64_t u, const uint8_t **key) {
    *key = NULL;
    if (b->key == 0 || u % b->key == 0) return 1;
    const int64_t number = u - u % b->key, bytes = b->group * coded_bytes(&b->form);
    if (!is_inside(b, number)) return 0;
    if (b->data && (int64_t)b->offsets[number + 1] - b->offsets[number] == bytes) {
        *key = b->data + b->offsets[number];
        return 1;
    }
    *key = d->key;
    if (d->key_of == b && d->key_number == number) return 1;
    d->key_of = NULL;
    if (bytes > d->unit_bytes || !decompress_unit(d, b, NULL, number, d->key, bytes)) return 0;
    d->key_of = b, d->key_number = number;
    return 1;
}

void read_slices(decoder *d, const sealed_block *b, int64_t first, int64_t end) {
    if (!is_cut_soundly(b) || first < 0 || end > b->slice_count || first >= end) return;
    const int64_t place = place_of_slice(b, first), last = b->places ? place : end - 1;
    const uint8_t *key;
    if (place < 0) return;
    /* First, since it is read to the same memory. */
    find_key(d, b, last / b->group, &key);
    read_units(d, b, place / b->group, last / b->group + 1);
}

/* Copy the coded bytes of the slice in a place of the units to `to`. */
static int fetch_coded(decoder *d, const sealed_block *b, int64_t place, uint8_t *to) {
    const int64_t coded = coded_bytes(&b->form), u = place / b->group;
    const uint8_t *key;
    if (b->group == 1) return find_key(d, b, u, &key) && decompress_unit(d, b, key, u, to, coded);
    if (d->unit_of != b || d->unit_number != u) {
        const int64_t bytes = bytes_of_unit(b, u);
        d->unit_of = NULL;
        if (bytes > d->unit_bytes || !find_key(d, b, u, &key) || !decompress_unit(d, b, key, u, d->unit, bytes)) return 0;
        d->unit_of = b, d->unit_number = u;
    }
    memcpy(to, d->unit + (place - u * b->group) * coded, (size_t)coded);
    return 1;
}

/* ---- one slice --------------------------------------------------------------------- */

/* Whether the numbers of a transform agree with each other; they, too, may come from a file. */
static int is_sound(const transform *form) {
    const int64_t word = form->word_bytes;
    if (form->slice_bytes <= 0 || form->slice_bytes > INT32_MAX || form->shuffle < 0) return 0;
    if (word != 0 && word != 2 && word != 4 && word != 8) return 0;
    if (word != 0 && form->slice_bytes % word != 0) return 0;
    if (form->predictor == PREDICT_NOTHING) return 1;
    if (form->predictor == PIXELS ? form->interleaved || form->green
                                  : form->predictor != PREDICT_LEFT && form->predictor != PREDICT_UP)
        return 0;
    if (form->planes < 1 || form->rows < 1 || form->columns < 1 || (form->green && form->planes < 3)) return 0;
    /* Each is at most the whole, so that the product cannot overflow. */
    const int64_t coded = coded_bytes(form);
    if (form->planes > coded || form->rows > coded || form->columns > coded) return 0;
    return form->shuffle == 0 && form->planes * form->rows <= coded && form->planes * form->rows * form->columns == coded;
}

int decode_slice(decoder *d, const sealed_block *b, int64_t number, uint8_t *out) {
    const transform *const form = &b->form;
    if (!is_sound(form) || !is_cut_soundly(b)) return 0;
    const int64_t coded = coded_bytes(form);
    const int64_t place = place_of_slice(b, number);
    if (place < 0 || 2 * coded > d->scratch_bytes) return 0;
    const int last_is_words = form->word_bytes > 0;
    const int is_pixels = form->predictor == PIXELS, is_predicted = form->predictor != PREDICT_NOTHING && !is_pixels;
    const int moves = form->shuffle > 0 || is_pixels || (is_predicted && form->interleaved);
    uint8_t *stage = last_is_words || moves ? d->scratch : out;
    if (!fetch_coded(d, b, place, stage)) return 0;
    if (is_predicted) undo_differences(form, stage);
    if (moves) {
        uint8_t *const to = last_is_words ? d->scratch + coded : out;
        if (form->shuffle > 0) unshuffle(form->shuffle, coded, stage, to);
        else if (is_pixels) part_pixels(form, stage, to);
        else interleave(form, stage, to);
        stage = to;
    }
    if (last_is_words) look_up_words(form, b->palette, stage, out);
    return 1;
}

/* ---- a whole block ----------------------------------------------------------------- */

/* Decode slices of a block, given by their numbers, one after another. Returns -1, or the position of the first one that
 * cannot be decoded. */
EXPORT int64_t holdall_decode(decoder *d, const sealed_block *b, const int64_t *numbers, int64_t count, uint8_t *out) {
    for (int64_t i = 0; i < count; i++)
        if (!decode_slice(d, b, numbers[i], out + i * b->form.slice_bytes)) return i;
    return -1;
}
