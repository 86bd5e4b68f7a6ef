/* Which slices a batch is made of, each named once, and their bytes side by side.
 *
 * For devices: what several observations share is copied, decoded and sent once.
 */
#include "codec.h"
#include "part.h"

#include <string.h>

/* Slices named so far, and the table that finds them; mirrored by _Names in native_unique.py. */
typedef struct {
    int32_t *part;    /* of each slice named, and ... */
    int32_t *number;  /* ... its number there */
    uint32_t *slots;  /* open addressing: a name + 1, or 0 */
    int64_t mask;     /* slots - 1, at least twice the names there is room for */
    int64_t room;
    int64_t count;
} names;

/* Name a slice; -1 if there is no room for one more. */
static int64_t name(names *n, const part *parts, int64_t which, int64_t number) {
    const part *const p = &parts[which];
    const uint64_t source = (uint64_t)(p->sealed ? p->sealed : p->slices);
    const uint64_t hash = ((uint64_t)number ^ (source >> 4)) * UINT64_C(0x9E3779B97F4A7C15);
    uint64_t place = (hash >> 32) & (uint64_t)n->mask;
    for (; n->slots[place] != 0; place = (place + 1) & (uint64_t)n->mask) {
        const int64_t seen = n->slots[place] - 1;
        const part *const q = &parts[n->part[seen]];
        if (n->number[seen] == number && (uint64_t)(q->sealed ? q->sealed : q->slices) == source) return seen;
    }
    if (n->count == n->room) return -1;
    n->part[n->count] = (int32_t)which;
    n->number[n->count] = (int32_t)number;
    n->slots[place] = (uint32_t)n->count + 1;
    return n->count++;
}

/* Write the names of all slices of some rows' observations, (rows, window); NULL for one that is not wanted.
 * With `base`, a slice's name is its number plus its part's base, and nothing is put down.
 * Returns -1, or the first row whose place is not inside its segment or whose windows are others. */
EXPORT int64_t holdall_name(const part *parts, int64_t part_count, const int32_t *segment, const uint32_t *cursor,
                            const int32_t *lane, int64_t lanes, int64_t rows, int64_t window, int64_t slice_bytes,
                            int32_t *obs, int32_t *next_obs, const int64_t *base, names *n) {
    for (int64_t i = 0; i < rows; i++) {
        if (segment[i] < 0 || segment[i] >= part_count || lane[i] < 0 || lane[i] >= lanes) return i;
        const part *const p = &parts[segment[i]];
        if (p->window != window || p->outer * p->run_bytes != slice_bytes) return i;
        const int64_t start = (int64_t)(cursor[i] & ~NEXT_IS_WHOLE);
        const int64_t step = (cursor[i] & NEXT_IS_WHOLE) != 0 ? p->window : p->shift;
        const int64_t first = obs ? 0 : step, end = next_obs ? step + window : window;
        if (start + end > p->log_rows) return i;
        for (int64_t w = first; w < end; w++) {
            const int64_t number = number_at(p, start + w, lane[i], lanes);
            if (number < 0 || number > INT32_MAX) return i;
            const int in_obs = obs && w < window, in_next = next_obs && w >= step;
            if (!in_obs && !in_next) continue;
            const int64_t named = base ? base[segment[i]] + number : name(n, parts, segment[i], number);
            if (named < 0 || named > INT32_MAX) return i;
            if (in_obs) obs[i * window + w] = (int32_t)named;
            if (in_next) next_obs[i * window + w - step] = (int32_t)named;
        }
    }
    return -1;
}

/* Copy or decode the slices named [from, to) to their places in `out`.
 * Returns -1, or the first one that cannot be decoded. */
EXPORT int64_t holdall_fetch(const part *parts, const names *n, int64_t from, int64_t to, int64_t slice_bytes,
                             uint8_t *out, decoder *d) {
    for (int64_t i = from; i < to; i++) {
        const part *const p = &parts[n->part[i]];
        uint8_t *const to_here = out + i * slice_bytes;
        if (p->sealed == 0) {
            memcpy(to_here, (const uint8_t *)(intptr_t)p->slices + n->number[i] * slice_bytes, (size_t)slice_bytes);
            continue;
        }
        const sealed_block *const block = (const sealed_block *)(intptr_t)p->sealed;
        if (!d || block->form.slice_bytes != slice_bytes || !decode_slice(d, block, n->number[i], to_here)) return i;
    }
    return -1;
}
