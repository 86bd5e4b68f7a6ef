/* The loops that touch every byte: append and gather.
 *
 * A plain shared library without Python headers, called through ctypes, which
 * lets go of the GIL for the length of a call. Every index that is read from a
 * log or a table is checked before it is used; a bad one ends the call with the
 * number of the row that held it, and nothing outside the given blocks is read.
 */
#include "codec.h"
#include "part.h"

#include <stdint.h>
#include <string.h>

/* A block of unique slices and the open-addressing table that finds them by their bytes;
 * mirrored by _Block in native.py. A slot holds a slice number + 1, or 0. */
typedef struct {
    uint8_t *arena;
    uint64_t *hashes;
    uint32_t *slots;
    int64_t mask; /* slots - 1, a power of two less one, at least twice the capacity */
    int64_t capacity;
    int64_t used;
    int64_t slice_bytes;
} slice_block;

/* How a tick lies in the caller's memory, if not as it is stored; mirrored by _Layout in native.py.
 * Dimensions and byte strides of the whole tick, outermost first, down to runs of `run_bytes`. */
typedef struct layout {
    int64_t dimensions;
    int64_t lengths[8];
    int64_t strides[8];
    int64_t run_bytes;
} layout;

/* One field of the open segment; mirrored by _OpenPart in native.py. */
typedef struct {
    slice_block *block; /* NULL: slices lie in log order, in `direct` */
    uint8_t *direct;
    uint32_t *log;
    uint8_t *last;     /* the newest observation of each lane, where its slices cannot be compared */
    uint8_t *last_raw; /* the same as it was handed in, if that was in another layout */
    uint8_t *packed;   /* room for two ticks: observations and next observations as they are stored */
    const struct layout *last_layout;
    int64_t *end;     /* log entries of each lane */
    uint8_t *scratch; /* room for one slice */
    int64_t log_rows;
    int64_t lanes;
    int64_t outer;
    int64_t run_bytes;
    int64_t window;
    int64_t shift;
    int64_t longest; /* the largest of `end` */
    int64_t steps;
    int64_t broken_steps; /* steps that did not shift as the window says */
    int64_t pushed;       /* slices handed in, known or new */
} open_part;

EXPORT int64_t holdall_kernels_version(void) { return 8; }

static inline uint64_t word_at(const uint8_t *p) {
    uint64_t w;
    memcpy(&w, p, sizeof w);
    return w;
}

static inline uint64_t stir(uint64_t state, uint64_t word) {
    state = (state ^ word) * UINT64_C(0x9E3779B97F4A7C15);
    return state ^ (state >> 29);
}

/* A hash that only has to spread well: every hit is compared byte for byte. Eight sums side by
 * side, since each multiplication waits for the one before in its own sum only. */
static uint64_t hash_slice(const uint8_t *p, int64_t bytes) {
    uint64_t sums[8];
    for (uint64_t k = 0; k < 8; k++) sums[k] = (uint64_t)bytes + k * UINT64_C(0xD1B54A32D192ED03);
    int64_t i = 0;
    for (; i + 64 <= bytes; i += 64)
        for (int64_t k = 0; k < 8; k++) sums[k] = stir(sums[k], word_at(p + i + 8 * k));
    for (; i + 8 <= bytes; i += 8) sums[0] = stir(sums[0], word_at(p + i));
    if (i < bytes) {
        uint64_t tail = 0;
        memcpy(&tail, p + i, (size_t)(bytes - i));
        sums[1] = stir(sums[1], tail);
    }
    for (int64_t k = 1; k < 8; k++) sums[0] = stir(sums[0], sums[k]);
    return sums[0];
}

/* Number a slice, copying it behind the others if it was not seen before.
 * The caller made sure that there is room for one more. */
static uint32_t intern(slice_block *b, const uint8_t *slice) {
    const uint64_t hash = hash_slice(slice, b->slice_bytes);
    uint64_t place = hash & (uint64_t)b->mask;
    for (; b->slots[place] != 0; place = (place + 1) & (uint64_t)b->mask) {
        const uint32_t seen = b->slots[place] - 1;
        if (b->hashes[seen] == hash &&
            memcmp(b->arena + seen * b->slice_bytes, slice, (size_t)b->slice_bytes) == 0)
            return seen;
    }
    const uint32_t number = (uint32_t)b->used;
    memcpy(b->arena + b->used * b->slice_bytes, slice, (size_t)b->slice_bytes);
    b->hashes[number] = hash;
    b->slots[place] = number + 1;
    b->used++;
    return number;
}

/* Whether `next_obs` shows, `shift` slices further left, what `obs` shows. */
static int is_shifted(const open_part *p, const uint8_t *obs, const uint8_t *next_obs) {
    const int64_t stretch = p->window * p->run_bytes;
    const int64_t skipped = p->shift * p->run_bytes;
    for (int64_t o = 0; o < p->outer; o++)
        if (memcmp(obs + o * stretch + skipped, next_obs + o * stretch,
                   (size_t)(stretch - skipped)) != 0)
            return 0;
    return 1;
}

/* Append the newest `count` slices of an observation to a lane's log. */
static void push(open_part *p, const uint8_t *obs, int64_t lane, int64_t count) {
    const int64_t slice_bytes = p->outer * p->run_bytes;
    for (int64_t w = p->window - count; w < p->window; w++) {
        const int64_t entry = p->end[lane] * p->lanes + lane;
        uint8_t *cut = p->block ? p->scratch : p->direct + entry * slice_bytes;
        for (int64_t o = 0; (p->outer > 1 || !p->block) && o < p->outer; o++)
            memcpy(cut + o * p->run_bytes, obs + (o * p->window + w) * p->run_bytes,
                   (size_t)p->run_bytes);
        if (p->block)
            p->log[entry] = intern(p->block, p->outer > 1 ? cut : obs + w * p->run_bytes);
        p->end[lane]++;
    }
    p->pushed += count;
    if (p->end[lane] > p->longest) p->longest = p->end[lane];
}

#ifdef HAVE_X86
/* Part the first pixels of three interleaved channels, 16 at a time; returns how many. */
__attribute__((target("ssse3"))) static int64_t part_channels(uint8_t *to, const uint8_t *from, int64_t pixels) {
    const __m128i low = _mm_setr_epi8(0, 3, 6, 9, 12, 15, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m128i mid = _mm_setr_epi8(-1, -1, -1, -1, -1, -1, 2, 5, 8, 11, 14, -1, -1, -1, -1, -1);
    const __m128i high = _mm_setr_epi8(-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 1, 4, 7, 10, 13);
    int64_t i = 0;
    for (; i + 17 <= pixels; i += 16) /* the last channel's loads reach two bytes further */
        for (int64_t c = 0; c < 3; c++) {
            const __m128i *const at = (const __m128i *)(from + 3 * i + c);
            const __m128i parted =
                _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(_mm_loadu_si128(at), low),
                                          _mm_shuffle_epi8(_mm_loadu_si128(at + 1), mid)),
                             _mm_shuffle_epi8(_mm_loadu_si128(at + 2), high));
            _mm_storeu_si128((__m128i *)(to + c * pixels + i), parted);
        }
    return i;
}
#endif

/* Copy what lies in the layout's order from `from` on to `to`, one run after another. */
static uint8_t *pack(uint8_t *to, const uint8_t *from, const layout *l, int64_t d) {
    const int64_t length = l->lengths[d], stride = l->strides[d];
    if (d + 2 == l->dimensions && length == 3 && stride == 1 && l->strides[d + 1] == 3 && l->run_bytes == 1) {
        const int64_t pixels = l->lengths[d + 1]; /* an image whose channels lie pixel by pixel */
        int64_t i = 0;
#ifdef HAVE_X86
        if (__builtin_cpu_supports("ssse3")) i = part_channels(to, from, pixels);
#endif
        for (; i < pixels; i++)
            for (int64_t c = 0; c < 3; c++) to[c * pixels + i] = from[3 * i + c];
        return to + 3 * pixels;
    }
    if (d + 1 < l->dimensions) {
        for (int64_t i = 0; i < length; i++) to = pack(to, from + i * stride, l, d + 1);
        return to;
    }
    if (l->run_bytes == 1)
        for (int64_t i = 0; i < length; i++) to[i] = from[i * stride];
    else
        for (int64_t i = 0; i < length; i++) memcpy(to + i * l->run_bytes, from + i * stride, (size_t)l->run_bytes);
    return to + length * l->run_bytes;
}

/* Whether `obs` is the newest observation of its lane. */
static int is_newest(const open_part *p, int64_t lane, const uint8_t *obs) {
    const int64_t obs_bytes = p->window * p->outer * p->run_bytes;
    if (p->steps == 0) return 0;
    if (!p->block || p->outer > 1) return memcmp(obs, p->last + lane * obs_bytes, (size_t)obs_bytes) == 0;
    for (int64_t w = 0; w < p->window; w++) {
        const int64_t number = p->log[(p->end[lane] - p->window + w) * p->lanes + lane];
        if (memcmp(obs + w * p->run_bytes, p->block->arena + number * p->run_bytes, (size_t)p->run_bytes) != 0)
            return 0;
    }
    return 1;
}

/* Write one lane's observation and next observation; return the cursor to them. */
static uint32_t append_lane(open_part *p, int64_t lane, int is_known, const uint8_t *obs, const uint8_t *next_obs) {
    if (!is_known) push(p, obs, lane, p->window);
    const uint32_t cursor = (uint32_t)(p->end[lane] - p->window);
    if (is_shifted(p, obs, next_obs)) {
        push(p, next_obs, lane, p->shift);
        return cursor;
    }
    push(p, next_obs, lane, p->window);
    p->broken_steps++;
    return cursor | NEXT_IS_WHOLE;
}

/* Write one tick, an observation and a next observation per lane, and the cursors to it.
 * `l` is NULL if the lanes lie one after another as they are stored; else both arrays fill their
 * memory in the order that `l` says. Returns 0, or -1 if it might not fit; then nothing was written. */
EXPORT int64_t holdall_append(open_part *p, const uint8_t *obs, const uint8_t *next_obs, const layout *l,
                              uint32_t *cursor) {
    const int64_t obs_bytes = p->window * p->outer * p->run_bytes, tick_bytes = p->lanes * obs_bytes;
    if (p->longest + 2 * p->window > p->log_rows) return -1;
    if (p->block && p->block->used + 2 * p->lanes * p->window > p->block->capacity) return -1;
    if (l && (!p->packed || !p->last_raw)) return -1;
    /* Most often a tick's observations are the next observations of the tick before: then one
     * comparison of all lanes, as they were handed in, says so. */
    const int all_known =
        l && p->steps > 0 && p->last_layout == l && memcmp(obs, p->last_raw, (size_t)tick_bytes) == 0;
    const uint8_t *now = obs, *next = next_obs;
    if (l) {
        if (!all_known) pack(p->packed, obs, l, 0);
        pack(p->packed + tick_bytes, next_obs, l, 0);
        now = all_known ? p->last : p->packed;
        next = p->packed + tick_bytes;
    }
    for (int64_t lane = 0; lane < p->lanes; lane++) {
        const int64_t start = lane * obs_bytes;
        const int is_known = all_known || is_newest(p, lane, now + start);
        cursor[lane] = append_lane(p, lane, is_known, now + start, next + start);
    }
    /* Slices in one piece are compared where they stand; for all else the newest tick is kept. */
    if (l || !p->block || p->outer > 1) memcpy(p->last, next, (size_t)tick_bytes);
    if (l) memcpy(p->last_raw, next_obs, (size_t)tick_bytes);
    p->last_layout = l;
    p->steps += p->lanes;
    return 0;
}

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

/* Where slices that were decoded for this batch stand already, by this thread; mirrored by
 * _Reuse in native.py. A place is overwritten by whoever comes next: a miss only costs time. */
typedef struct {
    uint64_t batch; /* entries of other batches are void */
    int64_t places; /* a power of two */
    struct reuse_entry {
        uint64_t batch;
        int64_t sealed, number;
        const uint8_t *slice;
    } *entries;
} reuse;

/* Bring one slice of a sealed block to `out`, from where it stands already if it does. */
static int fetch(decoder *d, reuse *known, const part *p, int64_t number, uint8_t *out) {
    const sealed_block *const block = (const sealed_block *)(intptr_t)p->sealed;
    const uint64_t hash = ((uint64_t)number ^ ((uint64_t)p->sealed >> 4)) * UINT64_C(0x9E3779B97F4A7C15);
    struct reuse_entry *const entry = &known->entries[(hash >> 32) & (uint64_t)(known->places - 1)];
    if (entry->batch == known->batch && entry->sealed == p->sealed && entry->number == number) {
        memcpy(out, entry->slice, (size_t)block->form.slice_bytes);
        return 1;
    }
    if (!decode_slice(d, block, number, out)) return 0;
    *entry = (struct reuse_entry){known->batch, p->sealed, number, out};
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
static int decode_windows(decoder *d, reuse *known, const part *p, int64_t start, int whole, int64_t lane,
                          int64_t lanes, uint8_t *obs, uint8_t *next_obs) {
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
            if (!fetch(d, known, p, number, to)) return 0;
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

/* Have the system read what a batch needs from files, all at once instead of row by row. Places that are
 * not inside their segment are passed over: the gather that follows names them. */
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

/* Rows [from, to) of a batch: observation and next observation of one field; NULL for one that is not wanted.
 * Returns -1, or the first row whose place is not inside its segment or cannot be decoded. */
EXPORT int64_t holdall_gather(const part *parts, int64_t part_count, const int32_t *segment,
                              const uint32_t *cursor, const int32_t *lane, int64_t lanes,
                              int64_t from, int64_t to, int64_t obs_bytes, uint8_t *obs,
                              uint8_t *next_obs, decoder *d, reuse *known) {
    for (int64_t i = from; i < to; i++) {
        if (segment[i] < 0 || segment[i] >= part_count) return i;
        if (lane[i] < 0 || lane[i] >= lanes) return i;
        const part *const p = &parts[segment[i]];
        if (p->outer * p->run_bytes * p->window != obs_bytes) return i;
        const int64_t start = (int64_t)(cursor[i] & ~NEXT_IS_WHOLE);
        const int whole = (cursor[i] & NEXT_IS_WHOLE) != 0;
        uint8_t *const now = obs ? obs + i * obs_bytes : NULL, *const after = next_obs ? next_obs + i * obs_bytes : NULL;
        if (p->sealed != 0) {
            if (!d || !known) return i;
            if (!decode_windows(d, known, p, start, whole, lane[i], lanes, now, after)) return i;
            continue;
        }
        if (now && !copy_window(p, start, lane[i], lanes, now)) return i;
        if (after && !copy_window(p, start + (whole ? p->window : p->shift), lane[i], lanes, after)) return i;
    }
    return -1;
}
