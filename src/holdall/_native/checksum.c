/* The low half of XXH64 with seed 0. It is fast enough to check every unit that is read from a file, and misses a damaged
 * unit in one of four thousand million cases. */
#include "codec.h"

#include <string.h>

static const uint64_t P1 = UINT64_C(0x9E3779B185EBCA87), P2 = UINT64_C(0xC2B2AE3D27D4EB4F),
                      P3 = UINT64_C(0x165667B19E3779F9), P4 = UINT64_C(0x85EBCA77C2B2AE63),
                      P5 = UINT64_C(0x27D4EB2F165667C5);

/* Words are little-endian by definition, and so are all machines that this is built for. */
static inline uint64_t word64(const uint8_t *p) {
    uint64_t w;
    memcpy(&w, p, sizeof w);
    return w;
}

static inline uint32_t word32(const uint8_t *p) {
    uint32_t w;
    memcpy(&w, p, sizeof w);
    return w;
}

static inline uint64_t rotate(uint64_t x, int by) { return (x << by) | (x >> (64 - by)); }

static inline uint64_t mix(uint64_t sum, uint64_t word) { return rotate(sum + word * P2, 31) * P1; }

static inline uint64_t merge(uint64_t sum, uint64_t lane) { return (sum ^ mix(0, lane)) * P1 + P4; }

uint32_t checksum(const uint8_t *p, int64_t bytes) {
    const uint8_t *const end = p + bytes;
    uint64_t sum = P5;
    if (bytes >= 32) {
        uint64_t a = P1 + P2, b = P2, c = 0, d = 0 - P1;
        for (; end - p >= 32; p += 32) {
            a = mix(a, word64(p));
            b = mix(b, word64(p + 8));
            c = mix(c, word64(p + 16));
            d = mix(d, word64(p + 24));
        }
        sum = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
        sum = merge(merge(merge(merge(sum, a), b), c), d);
    }
    sum += (uint64_t)bytes;
    for (; end - p >= 8; p += 8) sum = rotate(sum ^ mix(0, word64(p)), 27) * P1 + P4;
    if (end - p >= 4) {
        sum = rotate(sum ^ (uint64_t)word32(p) * P1, 23) * P2 + P3;
        p += 4;
    }
    for (; p < end; p++) sum = rotate(sum ^ *p * P5, 11) * P1;
    sum = (sum ^ (sum >> 33)) * P2;
    sum = (sum ^ (sum >> 29)) * P3;
    return (uint32_t)(sum ^ (sum >> 32));
}
