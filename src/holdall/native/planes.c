/* Images whose channels lie pixel by pixel, put plane by plane.
 *
 * Frame stacks are most often made that way round and stored the other; reading four channels
 * of sixteen pixels at a time is four times as fast as one byte after another.
 */
#include "codec.h"

#include <stdint.h>
#include <string.h>

#ifdef HAVE_X86
/* Part four channels, of which `from` is the first, of as many pixels as sixteens go into; returns how many. */
__attribute__((target("ssse3"))) static int64_t part_four(uint8_t *to, const uint8_t *from, int64_t pixels,
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

/* `from` holds `images` images of `pixels` pixels of `channels` bytes; `to` gets them channel by channel. */
EXPORT void holdall_part_channels(const uint8_t *from, uint8_t *to, int64_t images, int64_t pixels, int64_t channels) {
#ifdef HAVE_X86
    const int fast = __builtin_cpu_supports("ssse3");
#endif
    for (int64_t image = 0; image < images; image++, from += pixels * channels, to += pixels * channels)
        for (int64_t c = 0; c < channels; c += 4) {
            const int64_t together = channels - c < 4 ? channels - c : 4;
            int64_t done = 0;
#ifdef HAVE_X86
            if (fast && together == 4) done = part_four(to + c * pixels, from + c, pixels, channels);
#endif
            for (int64_t k = c; k < c + together; k++)
                for (int64_t i = done; i < pixels; i++) to[k * pixels + i] = from[i * channels + k];
        }
}
