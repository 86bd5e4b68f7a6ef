/* A checksum for bytes that come back from a file. */
#ifndef HOLDALL_CHECKSUM_H
#define HOLDALL_CHECKSUM_H

#include <stdint.h>

uint32_t checksum(const uint8_t *p, int64_t bytes);

#endif
