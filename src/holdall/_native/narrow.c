/* Narrow parts: rows of float32 extras whose values need fewer than four bytes.
 *
 * Networks that compute in bfloat16 return float32 values whose lower halves are zero. Discrete latents are zeros and ones.
 * Such rows are stored as the upper halves, or as one bit per value. Every value is checked before it is written, and a part
 * that cannot represent it is replaced by a wider one.
 */
#include "engine.h"

#include <stdlib.h>
#include <string.h>

#define ONE UINT32_C(0x3F800000) /* the bits of 1.0F */

enum { VALUE_BYTES = 4, CHUNK_VALUES = 1024 };

static inline uint32_t value_at(const uint8_t *values, Py_ssize_t i) {
    uint32_t value;
    memcpy(&value, values + i * VALUE_BYTES, sizeof value);
    return value;
}

Py_ssize_t narrow_row_bytes(int kind, Py_ssize_t row_bytes) {
    if (kind == PART_HALVES) return row_bytes / 2;
    if (kind == PART_BITS) return (row_bytes / VALUE_BYTES + 7) / 8;
    return row_bytes;
}

int narrow_find_kind(const uint8_t *values, Py_ssize_t bytes) {
    const Py_ssize_t count = bytes / VALUE_BYTES;
    uint32_t not_bits = 0;
    for (Py_ssize_t first = 0; first < count; first += CHUNK_VALUES) {
        const Py_ssize_t end = first + CHUNK_VALUES < count ? first + CHUNK_VALUES : count;
        uint32_t lower = 0;
        for (Py_ssize_t i = first; i < end; i++) {
            const uint32_t value = value_at(values, i);
            lower |= value & UINT32_C(0xFFFF);
            not_bits |= (uint32_t)((value != 0) & (value != ONE));
        }
        if (lower) return PART_ROWS;
    }
    return not_bits ? PART_HALVES : PART_BITS;
}

/* The arrays that are written below are `restrict`, and no branch in the loops depends on the data, so that compilers
 * can vectorise them. */

static void write_halves(uint16_t *restrict to, const uint8_t *restrict values, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) to[i] = (uint16_t)(value_at(values, i) >> 16);
}

static void read_halves(uint32_t *restrict to, const uint16_t *restrict from, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) to[i] = (uint32_t)from[i] << 16;
}

/* Return the bits of up to eight values. */
static uint8_t collect_bits(const uint8_t *values, int count) {
    unsigned bits = 0;
    for (int k = 0; k < count; k++) bits |= (unsigned)(value_at(values, k) != 0) << k;
    return (uint8_t)bits;
}

static void write_bits(uint8_t *restrict to, const uint8_t *restrict values, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count / 8; i++) to[i] = collect_bits(values + i * 8 * VALUE_BYTES, 8);
    if (count % 8) to[count / 8] = collect_bits(values + count / 8 * 8 * VALUE_BYTES, (int)(count % 8));
}

static void read_bits(uint32_t *restrict to, const uint8_t *restrict from, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count / 8; i++) {
        const uint32_t bits = from[i];
        for (int k = 0; k < 8; k++) to[8 * i + k] = (0 - ((bits >> k) & 1)) & ONE;
    }
    for (Py_ssize_t i = count / 8 * 8; i < count; i++) to[i] = (from[i / 8] >> (i % 8)) & 1 ? ONE : 0;
}

void narrow_write(const Part *part, Py_ssize_t row, const uint8_t *values) {
    const Py_ssize_t count = part->row_bytes / VALUE_BYTES;
    uint8_t *const to = part->rows + row * part->stored_bytes;
    if (part->kind == PART_HALVES) write_halves((uint16_t *)(void *)to, values, count);
    else write_bits(to, values, count);
}

void narrow_read(const Part *part, Py_ssize_t row, uint8_t *out) {
    const Py_ssize_t count = part->row_bytes / VALUE_BYTES;
    const uint8_t *const from = part->rows + row * part->stored_bytes;
    uint32_t *const values = (uint32_t *)(void *)out;
    if (part->kind == PART_HALVES) read_halves(values, (const uint16_t *)(const void *)from, count);
    else read_bits(values, from, count);
}

/* Whether all bytes are zero. */
static int is_zero(const uint8_t *values, Py_ssize_t bytes) {
    return bytes == 0 || (values[0] == 0 && memcmp(values, values + 1, (size_t)bytes - 1) == 0);
}

Part *narrow_close(const Part *part, Py_ssize_t ticks) {
    const Py_ssize_t rows = ticks * part->lanes, bytes = rows * part->row_bytes;
    /* Zeros are mostly placeholders, which `rewrite` replaces by other values. */
    const int kind = is_zero(part->rows, bytes) ? PART_ROWS : narrow_find_kind(part->rows, bytes);
    if (kind == PART_ROWS) return part_trim(part, ticks, 0);
    Part *const closed = part_new(kind, part->lanes, part->row_bytes, ticks, NULL, NULL);
    for (Py_ssize_t row = 0; closed && row < rows; row++) narrow_write(closed, row, part->rows + row * part->row_bytes);
    return closed;
}

Part *narrow_widen(const Part *part, int kind) {
    Part *const wide = part_new(kind, part->lanes, part->row_bytes, part->capacity, NULL, NULL);
    uint8_t *const values = wide ? malloc((size_t)part->row_bytes) : NULL;
    if (wide && !values) {
        Py_DECREF((PyObject *)wide);
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t row = 0; wide && row < part->capacity * part->lanes; row++) {
        narrow_read(part, row, kind == PART_ROWS ? wide->rows + row * part->row_bytes : values);
        if (kind != PART_ROWS) narrow_write(wide, row, values);
    }
    free(values);
    return wide;
}
