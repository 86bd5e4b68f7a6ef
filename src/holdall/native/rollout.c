/* Loops of rollouts: advantages, and images that are put into the order in which they are stored. */
#include "holdall.h"

#include <string.h>

/* ---- advantages -------------------------------------------------------------------- */

/* Generalised advantage estimation, backwards in time, all lanes side by side. Every product and sum is a statement of
 * its own, in single precision and in the order of the NumPy twin (rollout.py): so no compiler may join two of them
 * into one rounding.
 *
 * `rewards`, `values`, `ends`, `advantages` and `returns` are (steps, lanes); `ends` is 1 where the episode ended with
 * the step. `rewards` may be `advantages`: a row is read before it is written. */
EXPORT void holdall_advantages(const float *rewards, const float *values, const float *ends, const float *last_values,
                               float gamma, float decay, int64_t steps, int64_t lanes, float *advantages,
                               float *returns) {
    for (int64_t t = steps - 1; t >= 0; t--) {
        const int64_t row = t * lanes;
        const int is_last = t == steps - 1;
        const float *const next_values = is_last ? last_values : values + row + lanes;
        const float *const later = advantages + row + lanes; /* not read in the last row */
        for (int64_t i = 0; i < lanes; i++) {
            const float going = 1.0f - ends[row + i];
            float ahead = gamma * next_values[i];
            ahead = ahead * going;
            float delta = rewards[row + i] + ahead;
            delta = delta - values[row + i];
            float carried = decay * going;
            carried = carried * (is_last ? 0.0f : later[i]);
            const float advantage = delta + carried;
            advantages[row + i] = advantage;
            returns[row + i] = advantage + values[row + i];
        }
    }
}

/* ---- images ------------------------------------------------------------------------ */

#ifdef HAVE_X86
/* Separate four neighbouring channels, 16 pixels at a time, which takes a quarter of the time of single bytes; `from` is
 * the first of them. Returns how many pixels that were. */
__attribute__((target("ssse3"))) static int64_t separate_four(uint8_t *to, const uint8_t *from, int64_t pixels,
                                                               int64_t channels) {
    const __m128i by_channel = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    int64_t i = 0;
    for (; i + 16 <= pixels; i += 16) {
        __m128i rows[4]; /* of four pixels each: four words, one a channel */
        for (int64_t k = 0; k < 4; k++) {
            int32_t words[4];
            for (int64_t j = 0; j < 4; j++) memcpy(&words[j], from + (i + 4 * k + j) * channels, sizeof words[j]);
            rows[k] = _mm_shuffle_epi8(_mm_setr_epi32(words[0], words[1], words[2], words[3]), by_channel);
        }
        const __m128i low_a = _mm_unpacklo_epi32(rows[0], rows[1]), low_b = _mm_unpacklo_epi32(rows[2], rows[3]);
        const __m128i high_a = _mm_unpackhi_epi32(rows[0], rows[1]), high_b = _mm_unpackhi_epi32(rows[2], rows[3]);
        _mm_storeu_si128((__m128i *)(to + i), _mm_unpacklo_epi64(low_a, low_b));
        _mm_storeu_si128((__m128i *)(to + pixels + i), _mm_unpackhi_epi64(low_a, low_b));
        _mm_storeu_si128((__m128i *)(to + 2 * pixels + i), _mm_unpacklo_epi64(high_a, high_b));
        _mm_storeu_si128((__m128i *)(to + 3 * pixels + i), _mm_unpackhi_epi64(high_a, high_b));
    }
    return i;
}
#endif

/* `from` holds images of `pixels` pixels of `channels` bytes, pixel by pixel; they are written to `to` channel by
 * channel. */
EXPORT void holdall_part_channels(const uint8_t *from, uint8_t *to, int64_t images, int64_t pixels, int64_t channels) {
#ifdef HAVE_X86
    const int fast = has_ssse3();
#endif
    for (int64_t image = 0; image < images; image++, from += pixels * channels, to += pixels * channels)
        for (int64_t c = 0; c < channels; c += 4) {
            const int64_t together = channels - c < 4 ? channels - c : 4;
            int64_t done = 0;
#ifdef HAVE_X86
            if (fast && together == 4) done = separate_four(to + c * pixels, from + c, pixels, channels);
#endif
            for (int64_t k = c; k < c + together; k++)
                for (int64_t i = done; i < pixels; i++) to[k * pixels + i] = from[i * channels + k];
        }
}
