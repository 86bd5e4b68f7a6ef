/* Copies of arrays whose elements are not stored in C order. */
#ifndef HOLDALL_STRIDED_H
#define HOLDALL_STRIDED_H

#include <stdint.h>

/* Copy an image with interleaved channels of one byte each to `to`, one channel after another. */
void part_channels(uint8_t *to, const uint8_t *from, int64_t pixels, int64_t channels);

/* Copy an array to `to` in C order. Return the end of the copy. */
uint8_t *strided_copy(uint8_t *to, const uint8_t *from, int ndim, const intptr_t *shape, const intptr_t *strides,
                      int64_t item_bytes);

#endif
