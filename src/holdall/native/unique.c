/* Which slices a batch is made of, each named once, and their bytes side by side.
 *
 * For devices: what several observations share is copied, decoded and sent once.
 */
#include "codec.h"
#include "hands.h"
#include "part.h"

#include <stdatomic.h>
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

/* Write down where the slices named begin, in units of so many bytes (a power of two), given where those of each part
 * do. Returns -1, or the first one of a part whose start is not known: less than 0. */
EXPORT int64_t holdall_locate(const names *n, const int64_t *starts, int64_t slice_bytes, int64_t unit, int64_t *out) {
    int shift = 0; /* a division a slice would take as long as all the rest */
    while (unit >> shift > 1) shift++;
    for (int64_t i = 0; i < n->count; i++) {
        const int64_t start = starts[n->part[i]];
        if (start < 0) return i;
        out[i] = (start + n->number[i] * slice_bytes) >> shift;
    }
    return -1;
}

enum { MOST_WAVES = 16 };

/* Starts a copy to a device and returns 0: the signature of cuMemcpyHtoDAsync. */
typedef int (*sender)(uint64_t there, const void *here, size_t nbytes, void *stream);

/* A sender for where the device is the host. */
EXPORT int holdall_send_here(uint64_t there, const void *here, size_t nbytes, void *stream) {
    (void)stream;
    memcpy((void *)(uintptr_t)there, here, nbytes);
    return 0;
}

/* Slices on their way to `out`: cut into pieces that hands take one by one, and sent wave by wave. */
typedef struct {
    const part *parts;
    const names *n;
    int64_t slice_bytes;
    uint8_t *out;
    decoder *const *decoders; /* one a hand, or NULL */
    int64_t piece;            /* slices of a piece */
    int64_t pieces;
    int64_t wave; /* pieces of a wave */
    _Atomic int64_t taken;
    _Atomic int64_t failed; /* a slice that cannot be decoded, or -1 */
    _Atomic int64_t done[MOST_WAVES];
} bringing;

/* Copy or decode the slices named [from, to) to their places; returns -1, or the first that cannot be decoded. */
static int64_t bring(const bringing *b, int64_t from, int64_t to, decoder *d) {
    const int64_t slice_bytes = b->slice_bytes;
    for (int64_t i = from; i < to; i++) {
        const part *const p = &b->parts[b->n->part[i]];
        uint8_t *const here = b->out + i * slice_bytes;
        if (p->sealed == 0) {
            memcpy(here, (const uint8_t *)(intptr_t)p->slices + b->n->number[i] * slice_bytes, (size_t)slice_bytes);
            continue;
        }
        const sealed_block *const block = (const sealed_block *)(intptr_t)p->sealed;
        if (!d || block->form.slice_bytes != slice_bytes || !decode_slice(d, block, b->n->number[i], here)) return i;
    }
    return -1;
}

/* Bring one piece that nobody took yet; 0 if there is none. */
static int bring_piece(bringing *b, int64_t hand) {
    const int64_t piece = atomic_fetch_add_explicit(&b->taken, 1, memory_order_relaxed);
    if (piece >= b->pieces) return 0;
    const int64_t from = piece * b->piece, end = from + b->piece;
    const int64_t failed = bring(b, from, end < b->n->count ? end : b->n->count, b->decoders ? b->decoders[hand] : NULL);
    if (failed >= 0) atomic_store(&b->failed, failed);
    atomic_fetch_add_explicit(&b->done[piece / b->wave], 1, memory_order_release);
    return 1;
}

static void bring_pieces(void *job, int64_t hand) {
    while (bring_piece(job, hand)) continue;
}

/* Bring all slices named to their places in `out`, and send every wave of them but the last as soon as it is there;
 * `*sent` says how many slices were.
 * Returns -1, the first slice that cannot be decoded, or -2 - the sender's error. */
EXPORT int64_t holdall_bring(const part *parts, const names *n, int64_t slice_bytes, uint8_t *out,
                             decoder *const *decoders, int64_t piece, int64_t waves, hands *h, int64_t helpers,
                             sender send, uint64_t there, void *stream, int64_t *sent) {
    bringing b = {.parts = parts, .n = n, .slice_bytes = slice_bytes, .out = out, .decoders = decoders};
    b.piece = piece;
    b.pieces = (n->count + piece - 1) / piece;
    if (waves > MOST_WAVES) waves = MOST_WAVES;
    b.wave = b.pieces > waves ? (b.pieces + waves - 1) / waves : 1;
    b.failed = -1;
    int64_t result = -1;
    *sent = 0;
    hands_begin(h, bring_pieces, &b, helpers);
    for (int64_t first = 0, w = 0; first < b.pieces && result == -1; first += b.wave, w++) {
        const int64_t end = first + b.wave < b.pieces ? first + b.wave : b.pieces;
        while (atomic_load_explicit(&b.done[w], memory_order_acquire) < end - first)
            if (!bring_piece(&b, 0)) hands_pause();
        result = atomic_load(&b.failed);
        if (result != -1 || !send || end == b.pieces) continue;
        const int64_t from = first * piece * slice_bytes, nbytes = b.wave * piece * slice_bytes;
        const int error = send(there + (uint64_t)from, out + from, (size_t)nbytes, stream);
        if (error) result = -2 - (int64_t)error;
        else *sent = end * piece;
    }
    atomic_store(&b.taken, b.pieces); /* after a failure there is no point in the rest */
    hands_end(h);
    return result;
}
