/* Reading: the observations of a batch are put together from their slices, raw or compressed, in memory or in a file.
 *
 * Every index that is read from a log or a table is checked before it is used; a bad one ends the call with the
 * number of the row that held it, and nothing outside the given blocks is read.
 */
#include "codec.h"
#include "reading.h"
#include "threads.h"

#include <stdatomic.h>
#include <string.h>

/* Put slice `w` of an observation where it belongs. */
static void place(const part *p, const uint8_t *slice, int64_t w, uint8_t *out) {
    const int64_t stretch = p->window * p->run_bytes;
    out += w * p->run_bytes;
    if (p->run_bytes == 1)
        for (int64_t o = 0; o < p->outer; o++) out[o * stretch] = slice[o];
    else
        for (int64_t o = 0; o < p->outer; o++)
            memcpy(out + o * stretch, slice + o * p->run_bytes, (size_t)p->run_bytes);
}

/* Copy the observation that starts at `position` of a lane's log; 0 if an index is off. */
static int copy_window(const part *p, int64_t position, int64_t lane, int64_t lanes, uint8_t *out) {
    if (position < 0 || position + p->window > p->log_rows) return 0;
    const uint8_t *const slices = (const uint8_t *)(intptr_t)p->slices;
    for (int64_t w = 0; w < p->window; w++) {
        const int64_t number = number_at(p, position + w, lane, lanes);
        if (number < 0) return 0;
        place(p, slices + number * p->outer * p->run_bytes, w, out);
    }
    return 1;
}

/* Decode one slice of a sealed block to `out`, or copy it if the same thread decoded it for the same batch before. */
static int fetch(decoder *d, const part *p, int64_t number, uint8_t *out) {
    const sealed_block *const block = (const sealed_block *)(intptr_t)p->sealed;
    const uint64_t hash = ((uint64_t)number ^ ((uint64_t)p->sealed >> 4)) * UINT64_C(0x9E3779B97F4A7C15);
    decoded_slice *const known = &d->decoded[(hash >> 32) & (uint64_t)(d->decoded_places - 1)];
    if (known->batch == d->batch && known->sealed == p->sealed && known->number == number) {
        memcpy(out, known->slice, (size_t)block->form.slice_bytes);
        return 1;
    }
    if (!decode_slice(d, block, number, out)) return 0;
    *known = (decoded_slice){d->batch, p->sealed, number, out};
    return 1;
}

/* How many entries from `position` on name slices that follow each other in their block. */
static int64_t run_at(const part *p, int64_t position, int64_t end, int64_t lane, int64_t lanes) {
    const int64_t first = number_at(p, position, lane, lanes);
    int64_t run = 1;
    while (position + run < end && number_at(p, position + run, lane, lanes) == first + run) run++;
    return run;
}

/* Decode an observation and the next one, or one of them. What the two share is decoded once. */
static int decode_windows(decoder *d, const part *p, int64_t start, int whole, int64_t lane, int64_t lanes,
                          uint8_t *obs, uint8_t *next_obs) {
    const sealed_block *const block = (const sealed_block *)(intptr_t)p->sealed;
    const int64_t slice_bytes = p->outer * p->run_bytes;
    const int64_t step = whole ? p->window : p->shift, entries = step + p->window;
    int64_t read_up_to = 0;
    if (block->form.slice_bytes != slice_bytes) return 0;
    if (start < 0 || start + entries > p->log_rows) return 0;
    for (int64_t w = 0; w < entries; w++) {
        const int64_t number = number_at(p, start + w, lane, lanes);
        if (number < 0) return 0;
        const int in_obs = obs && w < p->window, in_next = next_obs && w >= step;
        if (!in_obs && !in_next) continue;
        if (!block->data && w >= read_up_to) {
            const int64_t run = run_at(p, start + w, start + entries, lane, lanes);
            read_slices(d, block, number, number + run);
            read_up_to = w + run;
        }
        if (p->outer == 1) {
            uint8_t *const to = in_obs ? obs + w * slice_bytes : next_obs + (w - step) * slice_bytes;
            if (!fetch(d, p, number, to)) return 0;
            if (in_obs && in_next) memcpy(next_obs + (w - step) * slice_bytes, to, (size_t)slice_bytes);
        } else {
            uint8_t *const slice = d->scratch + 2 * coded_bytes(&block->form);
            if (d->scratch_bytes < slice - d->scratch + slice_bytes) return 0;
            if (!decode_slice(d, block, number, slice)) return 0;
            if (in_obs) place(p, slice, w, obs);
            if (in_next) place(p, slice, w - step, next_obs);
        }
    }
    return 1;
}

/* Advise the system of everything that a batch needs from files, at once instead of row by row. Places that are not
 * inside their segment are skipped: the gather that follows reports them. */
EXPORT void holdall_expect(const part *parts, int64_t part_count, const int32_t *segment, const uint32_t *cursor,
                           const int32_t *lane, int64_t lanes, int64_t rows) {
    for (int64_t i = 0; i < rows; i++) {
        if (segment[i] < 0 || segment[i] >= part_count || lane[i] < 0 || lane[i] >= lanes) continue;
        const part *const p = &parts[segment[i]];
        const sealed_block *const block = (const sealed_block *)(intptr_t)p->sealed;
        if (!block || block->data) continue;
        const int64_t start = (int64_t)(cursor[i] & ~NEXT_IS_WHOLE);
        const int64_t end = start + p->window + ((cursor[i] & NEXT_IS_WHOLE) != 0 ? p->window : p->shift);
        if (end > p->log_rows) continue;
        for (int64_t position = start; position < end;) {
            const int64_t run = run_at(p, position, end, lane[i], lanes);
            const int64_t first = number_at(p, position, lane[i], lanes);
            if (first >= 0) expect_slices(block, first, first + run);
            position += run;
        }
    }
}

/* A batch on its way to `obs` and `next_obs`, cut into pieces that threads take one by one. */
typedef struct {
    const part *parts;
    int64_t part_count;
    const int32_t *segment;
    const uint32_t *cursor;
    const int32_t *lane;
    int64_t lanes;
    int64_t rows;
    const int64_t *to; /* which row of `obs` each of them becomes, or NULL: they are in order */
    int64_t to_rows;
    int64_t obs_bytes;
    uint8_t *obs, *next_obs;
    decoder *const *decoders; /* one a thread, or NULL */
    int64_t pieces;
    int64_t error; /* errno of the thread that failed first, or 0 */
    _Atomic int64_t taken;
    _Atomic int64_t failed; /* the row that failed first, or -1 */
} gathering;

/* Gather rows [from, to). Returns -1, or the first row whose place is not inside its segment, cannot be decoded, or
 * which belongs outside the batch. */
static int64_t gather_rows(const gathering *g, int64_t from, int64_t to, decoder *d) {
    for (int64_t i = from; i < to; i++) {
        const int64_t lane = g->lane[i], row = g->to ? g->to[i] : i;
        if (row < 0 || row >= g->to_rows) return i;
        if (g->segment[i] < 0 || g->segment[i] >= g->part_count) return i;
        if (lane < 0 || lane >= g->lanes) return i;
        const part *const p = &g->parts[g->segment[i]];
        if (p->outer * p->run_bytes * p->window != g->obs_bytes) return i;
        const int64_t start = (int64_t)(g->cursor[i] & ~NEXT_IS_WHOLE);
        const int whole = (g->cursor[i] & NEXT_IS_WHOLE) != 0;
        uint8_t *const now = g->obs ? g->obs + row * g->obs_bytes : NULL;
        uint8_t *const after = g->next_obs ? g->next_obs + row * g->obs_bytes : NULL;
        if (p->sealed != 0) {
            if (!d || !decode_windows(d, p, start, whole, lane, g->lanes, now, after)) return i;
            continue;
        }
        if (now && !copy_window(p, start, lane, g->lanes, now)) return i;
        if (after && !copy_window(p, start + (whole ? p->window : p->shift), lane, g->lanes, after)) return i;
    }
    return -1;
}

static void gather_pieces(void *job, int64_t thread) {
    gathering *const g = job;
    decoder *const d = g->decoders ? g->decoders[thread] : NULL;
    for (;;) {
        const int64_t piece = atomic_fetch_add_explicit(&g->taken, 1, memory_order_relaxed);
        if (piece >= g->pieces) return;
        const int64_t row = gather_rows(g, g->rows * piece / g->pieces, g->rows * (piece + 1) / g->pieces, d);
        if (row < 0) continue;
        int64_t none = -1;
        if (atomic_compare_exchange_strong(&g->failed, &none, row)) g->error = d ? d->error : 0;
        atomic_store(&g->taken, g->pieces); /* nothing of the batch is returned, so the rest is not needed */
        return;
    }
}

/* Have decoders begin a batch: what an older one was decoded to, or read from, may be gone. Not before the call: a signal
 * handler may make another batch with the same decoders between the two. */
static void begin_batch(decoder *const *decoders, int64_t count) {
    for (int64_t i = 0; i < count && decoders; i++) {
        decoder *const d = decoders[i];
        d->unit_of = d->read_of = NULL;
        d->unit_behind = NULL;
        d->error = 0;
        d->batch++;
    }
}

/* Fill observation and next observation of one field for all rows of a batch; NULL for one that is not wanted. Where
 * `to` is not NULL, row i becomes row to[i] of the `to_rows` that there is room for.
 * Returns -1, or a row whose place is not inside its segment or cannot be decoded; `*error` is then the errno of the
 * read that failed, or 0. */
EXPORT int64_t holdall_gather(const part *parts, int64_t part_count, const int32_t *segment, const uint32_t *cursor,
                              const int32_t *lane, int64_t lanes, int64_t rows, const int64_t *to, int64_t to_rows,
                              int64_t obs_bytes, uint8_t *obs, uint8_t *next_obs, decoder *const *decoders,
                              int64_t pieces, thread_pool *pool, int64_t helpers, int64_t *error) {
    gathering g = {.parts = parts, .part_count = part_count, .segment = segment, .cursor = cursor, .lane = lane};
    g.lanes = lanes, g.rows = rows, g.to = to, g.to_rows = to_rows, g.obs_bytes = obs_bytes, g.obs = obs, g.next_obs = next_obs;
    g.decoders = decoders, g.pieces = pieces, g.failed = -1;
    begin_batch(decoders, 1 + helpers);
    threads_begin(pool, gather_pieces, &g, helpers);
    gather_pieces(&g, 0);
    threads_end(pool);
    *error = g.error;
    return g.failed;
}

/* ---- short rows -------------------------------------------------------------------- */

enum { ALIGNMENT_BYTES = 64, ROWS_AHEAD = 8 };

/* Where `id` stands among ascending ids, or -1. The search begins where the id would stand if all episodes were of one
 * length, and reaches out from there. */
static int64_t place_of(int64_t id, const int64_t *ids, int64_t count) {
    if (count == 0 || id < ids[0] || id > ids[count - 1]) return -1;
    const double share = (double)(id - ids[0]) / (double)(ids[count - 1] - ids[0] + 1);
    int64_t low = (int64_t)(share * (double)(count - 1)), high = low + 1;
    for (int64_t reach = 1; ids[low] > id; reach *= 2) {
        high = low;
        low = low > reach ? low - reach : 0;
    }
    for (int64_t reach = 1; high < count && ids[high] <= id; reach *= 2) {
        low = high;
        high = high + reach < count ? high + reach : count;
    }
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (ids[middle] <= id) low = middle;
        else high = middle;
    }
    return ids[low] == id ? low : -1;
}

/* Copy one column. `start` is where the row of id `first_id` stands; no id is so far behind that it passes the ring's end
 * twice. */
static void copy_column(const row_column *c, const int64_t *ids, int64_t rows, int64_t first_id, int64_t start,
                        int64_t ring_rows, uint8_t *out) {
    const uint8_t *const ring = (const uint8_t *)(intptr_t)c->ring;
    const int64_t bytes = c->row_bytes, offset = start + c->later - first_id;
#define ROW_OF(i) (ring + (ids[i] + offset - (ids[i] + offset >= ring_rows ? ring_rows : 0)) * bytes)
#define COPY(n)                                                                                                       \
    case n:                                                                                                           \
        for (int64_t i = 0; i < rows; i++) memcpy(out + i * (n), ROW_OF(i), n);                                       \
        break
    switch (bytes) {
        COPY(1);
        COPY(4);
        COPY(8);
        COPY(12);
        COPY(16);
    default:
        for (int64_t i = 0; i < rows; i++) {
            if (i + ROWS_AHEAD < rows) FETCH_SOON(ROW_OF(i + ROWS_AHEAD));
            memcpy(out + i * bytes, ROW_OF(i), (size_t)bytes);
        }
    }
#undef COPY
#undef ROW_OF
}

/* Put those rows of a column where they belong that do not stand in the ring. */
static void copy_apart(const row_column *c, const int64_t *ids, int64_t rows, uint8_t *out) {
    const int64_t bytes = c->row_bytes;
    const int64_t *const apart_ids = (const int64_t *)(intptr_t)c->apart_ids;
    const uint8_t *const apart = (const uint8_t *)(intptr_t)c->apart_rows;
    for (int64_t i = 0; i < rows && c->apart_count; i++) {
        const int64_t place = place_of(ids[i], apart_ids, c->apart_count);
        if (place >= 0) memcpy(out + i * bytes, apart + place * bytes, (size_t)bytes);
    }
}

/* Fill one column with 1.0f where a flag is set and another one is not, else 0.0f. */
static void copy_flags(const row_column *c, const int64_t *ids, int64_t rows, int64_t first_id, int64_t start,
                       int64_t ring_rows, uint8_t *out) {
    const uint8_t *const flags = (const uint8_t *)(intptr_t)c->ring, *const unless = (const uint8_t *)(intptr_t)c->unless;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t at = start + ids[i] - first_id, slot = at >= ring_rows ? at - ring_rows : at;
        const float value = flags[slot] > unless[slot] ? 1.0f : 0.0f;
        memcpy(out + i * (int64_t)sizeof value, &value, sizeof value);
    }
}

/* Copy all short fields of a batch, column after column, each from a multiple of ALIGNMENT_BYTES on in its block.
 * Rings have `ring_rows` rows, and the row of a transition stands at its id modulo that.
 * Returns -1; or the position of an id outside [first_id, next_id), and nothing was copied. */
EXPORT int64_t holdall_read_rows(const row_column *columns, int64_t count, const int64_t *ids, int64_t rows,
                                 int64_t first_id, int64_t next_id, int64_t ring_rows, uint8_t *observed,
                                 uint8_t *rest) {
    uint8_t *blocks[] = {observed, rest};
    for (int64_t i = 0; i < rows; i++)
        if (ids[i] < first_id || ids[i] >= next_id) return i;
    for (int64_t k = 0; k < count && rows; k++)
        if (first_id < 0 || columns[k].later < 0 || next_id - first_id > ring_rows - columns[k].later) return 0;
    for (int64_t k = 0; k < count && rows; k++) {
        const row_column *const c = &columns[k];
        uint8_t **const block = &blocks[c->block != 0];
        if (c->runs) copy_from_runs(c, ids, rows, ring_rows, *block);
        else (c->unless ? copy_flags : copy_column)(c, ids, rows, first_id, first_id % ring_rows, ring_rows, *block);
        copy_apart(c, ids, rows, *block);
        *block += (rows * c->row_bytes + ALIGNMENT_BYTES - 1) / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
    }
    return -1;
}

/* Numbers below `end`, drawn as NumPy's RandomState.randint does, whose sequence never changes. */
static void draw_below(uint32_t (*next_uint32)(void *), void *state, uint32_t end, int64_t count, int64_t *out) {
    const uint32_t most = end - 1; /* 0: nothing is drawn */
    uint32_t mask = most;
    for (int shift = 1; shift < 32; shift *= 2) mask |= mask >> shift;
    for (int64_t i = 0; i < count; i++) {
        uint32_t drawn = 0;
        while (most != 0 && (drawn = next_uint32(state) & mask) > most) continue;
        out[i] = drawn;
    }
}

/* Draw slots, then lanes, and write the ids of the transitions there: tick t stands in slot t modulo `slots`, and the
 * newest tick is `newest`. `lane` is memory for as many numbers; NULL: there is one lane, and none is drawn. */
EXPORT void holdall_draw(uint32_t (*next_uint32)(void *), void *state, int64_t filled, int64_t slots, int64_t newest,
                         int64_t lanes, int64_t rows, int64_t *ids, int64_t *lane) {
    const int64_t newest_slot = newest % slots, turn = newest - newest_slot;
    draw_below(next_uint32, state, (uint32_t)filled, rows, ids);
    if (lane) draw_below(next_uint32, state, (uint32_t)lanes, rows, lane);
    for (int64_t i = 0; i < rows; i++)
        ids[i] = (ids[i] + (ids[i] > newest_slot ? turn - slots : turn)) * lanes + (lane ? lane[i] : 0);
}

/* Find the segment and the lane of every transition: segments begin at ascending ticks, the first at or before all. */
EXPORT void holdall_find(const int64_t *first_ticks, int64_t segments, const int64_t *ids, int64_t rows, int64_t lanes,
                         int32_t *segment, int32_t *lane) {
    for (int64_t i = 0; i < rows; i++) {
        const int64_t tick = lanes == 1 ? ids[i] : ids[i] / lanes;
        segment[i] = segment_of(tick, first_ticks, segments);
        lane[i] = (int32_t)(ids[i] - tick * lanes);
    }
}

/* ---- slices by name ---------------------------------------------------------------- */

/* For devices: which slices a batch is made of, each named once, and their bytes side by side. What several
 * observations share is copied, decoded and sent once. */

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
 * Returns -1, or the first row whose place is not inside its segment or whose windows are others. */
EXPORT int64_t holdall_name(const part *parts, int64_t part_count, const int32_t *segment, const uint32_t *cursor,
                            const int32_t *lane, int64_t lanes, int64_t rows, int64_t window, int64_t slice_bytes,
                            int32_t *obs, int32_t *next_obs, names *n) {
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
            const int64_t named = name(n, parts, segment[i], number);
            if (named < 0) return i;
            if (in_obs) obs[i * window + w] = (int32_t)named;
            if (in_next) next_obs[i * window + w - step] = (int32_t)named;
        }
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

/* Slices on their way to `out`: cut into pieces that threads take one by one, and sent wave by wave. */
typedef struct {
    const part *parts;
    const names *n;
    int64_t slice_bytes;
    uint8_t *out;
    decoder *const *decoders; /* one a thread, or NULL */
    int64_t piece;            /* slices of a piece */
    int64_t pieces;
    int64_t wave; /* pieces of a wave */
    _Atomic int64_t taken;
    _Atomic int64_t failed; /* a slice that cannot be decoded, or -1 */
    _Atomic int64_t done[MOST_WAVES];
} collecting;

/* Copy or decode the slices named [from, to) to their places; returns -1, or the first that cannot be decoded. */
static int64_t collect(const collecting *b, int64_t from, int64_t to, decoder *d) {
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

/* Copy one piece that no thread has taken yet; 0 if there is none. */
static int collect_piece(collecting *b, int64_t thread) {
    const int64_t piece = atomic_fetch_add_explicit(&b->taken, 1, memory_order_relaxed);
    if (piece >= b->pieces) return 0;
    const int64_t from = piece * b->piece, end = from + b->piece;
    decoder *const d = b->decoders ? b->decoders[thread] : NULL;
    const int64_t failed = collect(b, from, end < b->n->count ? end : b->n->count, d);
    if (failed >= 0) atomic_store(&b->failed, failed);
    atomic_fetch_add_explicit(&b->done[piece / b->wave], 1, memory_order_release);
    return 1;
}

static void collect_pieces(void *job, int64_t thread) {
    while (collect_piece(job, thread)) continue;
}

/* Copy or decode all slices named to their places in `out`, and send every wave of them but the last as soon as it is
 * complete; `*sent` is then the number of slices sent.
 * Returns -1, the first slice that cannot be decoded, or -2 - the sender's error. */
EXPORT int64_t holdall_collect(const part *parts, const names *n, int64_t slice_bytes, uint8_t *out,
                               decoder *const *decoders, int64_t piece, int64_t waves, thread_pool *pool,
                               int64_t helpers, sender send, uint64_t there, void *stream, int64_t *sent) {
    collecting b = {.parts = parts, .n = n, .slice_bytes = slice_bytes, .out = out, .decoders = decoders};
    b.piece = piece;
    b.pieces = (n->count + piece - 1) / piece;
    if (waves > MOST_WAVES) waves = MOST_WAVES;
    b.wave = b.pieces > waves ? (b.pieces + waves - 1) / waves : 1;
    b.failed = -1;
    int64_t result = -1;
    *sent = 0;
    begin_batch(decoders, 1 + helpers);
    threads_begin(pool, collect_pieces, &b, helpers);
    for (int64_t first = 0, w = 0; first < b.pieces && result == -1; first += b.wave, w++) {
        const int64_t end = first + b.wave < b.pieces ? first + b.wave : b.pieces;
        while (atomic_load_explicit(&b.done[w], memory_order_acquire) < end - first)
            if (!collect_piece(&b, 0)) threads_pause();
        result = atomic_load(&b.failed);
        if (result != -1 || !send || end == b.pieces) continue;
        const int64_t from = first * piece * slice_bytes, nbytes = b.wave * piece * slice_bytes;
        const int error = send(there + (uint64_t)from, out + from, (size_t)nbytes, stream);
        if (error) result = -2 - (int64_t)error;
        else *sent = end * piece;
    }
    atomic_store(&b.taken, b.pieces); /* after a failure the rest is not needed */
    threads_end(pool);
    return result;
}
