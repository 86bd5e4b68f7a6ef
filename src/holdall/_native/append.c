/* Writing: an observation and the next one of every lane become slices, each kept once, and a log of their numbers.
 *
 * Python calls these loops through ctypes, without the GIL. The caller has checked the sizes of all arrays; that a
 * tick fits into the block and the log is checked here.
 */
#include "holdall.h"
#include "strided.h"
#include "structs.h"

#include <string.h>

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
        if (memcmp(obs + o * stretch + skipped, next_obs + o * stretch, (size_t)(stretch - skipped)) != 0) return 0;
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

/* ---- ticks -------------------------------------------------------------------------- */

/* Copy what lies in the layout's order from `from` on to `to`, one run after another. */
static uint8_t *pack(uint8_t *to, const uint8_t *from, const layout *l, int64_t d) {
    const int64_t length = l->lengths[d], stride = l->strides[d];
    if (d + 2 == l->dimensions && length >= 3 && stride == 1 && l->strides[d + 1] == length && l->run_bytes == 1) {
        part_channels(to, from, l->lengths[d + 1], length);
        return to + length * l->lengths[d + 1];
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

/* Whether one more tick fits, even if nothing of it is known. */
static int has_room(const open_part *p, const layout *l) {
    if (p->longest + 2 * p->window > p->log_rows) return 0;
    if (p->block && p->block->used + 2 * p->lanes * p->window > p->block->capacity) return 0;
    return !l || (p->packed && p->last_raw);
}

/* Write one tick that fits, see holdall_append. */
static void append(open_part *p, const uint8_t *obs, const uint8_t *next_obs, const layout *l, uint32_t *cursor) {
    const int64_t obs_bytes = p->window * p->outer * p->run_bytes, tick_bytes = p->lanes * obs_bytes;
    /* Most often a tick's observations are the next observations of the tick before: then one
     * comparison of all lanes, as the caller passed them, shows that. */
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
}

/* Write one tick of one field, an observation and a next observation per lane, and the cursors to it.
 * `l` is NULL if the lanes lie one after another as they are stored; else both arrays fill their
 * memory in the order that `l` says. Returns 0, or -1 if it might not fit; then nothing was written. */
EXPORT int64_t holdall_append(open_part *p, const uint8_t *obs, const uint8_t *next_obs, const layout *l,
                              uint32_t *cursor) {
    if (!has_room(p, l)) return -1;
    append(p, obs, next_obs, l, cursor);
    return 0;
}

/* `from` holds images that lie pixel by pixel; they are written to `to` channel by channel. */
EXPORT void holdall_part_channels(const uint8_t *from, uint8_t *to, int64_t images, int64_t pixels, int64_t channels) {
    for (int64_t i = 0; i < images; i++)
        part_channels(to + i * pixels * channels, from + i * pixels * channels, pixels, channels);
}

/* Write one tick of a rollout, where every tick is the next one of the tick before. `ticks` has room for two: the one
 * written last stands there, and this one is put beside it, so `obs` is read once. If it is there already, it stays; if
 * `channels` is not 0, it holds images that lie pixel by pixel. Returns as holdall_append does, which may not be called
 * for the same part. */
EXPORT int64_t holdall_append_next(open_part *p, uint8_t *ticks, const uint8_t *obs, int64_t channels,
                                   uint32_t *cursor) {
    const int64_t obs_bytes = p->window * p->outer * p->run_bytes, tick_bytes = p->lanes * obs_bytes;
    const int64_t is_odd = p->steps / p->lanes % 2, is_known = p->steps > 0;
    uint8_t *const next = ticks + is_odd * tick_bytes;
    const uint8_t *const now = is_known ? ticks + (1 - is_odd) * tick_bytes : next;
    if (!has_room(p, NULL)) return -1;
    if (channels)
        holdall_part_channels(obs, next, p->lanes, obs_bytes / channels, channels);
    else if (obs != next)
        memcpy(next, obs, (size_t)tick_bytes);
    for (int64_t lane = 0; lane < p->lanes; lane++)
        cursor[lane] = append_lane(p, lane, (int)is_known, now + lane * obs_bytes, next + lane * obs_bytes);
    p->steps += p->lanes;
    return 0;
}

enum { NOT_CONTINUED = 0, NO_ROOM = -1, ANOTHER_SIZE = -2 };

/* Whether a packed tick's observations are the next observations of the tick before, wherever these have no other
 * place. */
static int is_continued(const tick_writer *t, int64_t slot, const uint8_t *packed) {
    for (const flat_field *f = t->flat; f < t->flat + t->flat_count; f++) {
        if (f->is_observation && !f->next &&
            memcmp(f->rows + slot * f->tick_bytes, packed, (size_t)f->tick_bytes) != 0)
            return 0;
        packed += (f->is_observation ? 2 : 1) * f->tick_bytes;
    }
    return 1;
}

/* Save the next observations of the tick before that a packed tick is not, lane by lane; with `only_asks`, say whether
 * there is room for all of them, and save nothing. */
static int keep_apart(const tick_writer *t, int64_t slot, const uint8_t *packed, int only_asks) {
    const int64_t first_id = (t->next_tick - 1) * t->lanes;
    for (const flat_field *f = t->flat; f < t->flat + t->flat_count; f++) {
        const uint8_t *const standing = f->rows + slot * f->tick_bytes, *const coming = packed;
        const int64_t row_bytes = f->tick_bytes / t->lanes;
        packed += (f->is_observation ? 2 : 1) * f->tick_bytes;
        if (!f->is_observation || f->next || memcmp(standing, coming, (size_t)f->tick_bytes) == 0) continue;
        apart_rows *const a = f->apart;
        int64_t *const ids = a ? (int64_t *)(intptr_t)a->ids : NULL;
        /* Those of this tick may have been saved before a call was interrupted. */
        if (only_asks && (!a || (a->end > 0 && ids[a->end - 1] >= first_id))) return 0;
        uint8_t *const rows = (uint8_t *)(intptr_t)a->rows;
        int64_t end = a->end;
        for (int64_t lane = 0; lane < t->lanes; lane++) {
            const int64_t at = lane * row_bytes;
            if (memcmp(standing + at, coming + at, (size_t)row_bytes) == 0) continue;
            if (end >= a->room) return 0;
            if (!only_asks) {
                memcpy(rows + end * row_bytes, standing + at, (size_t)row_bytes);
                ids[end] = first_id + lane;
            }
            end++;
        }
        if (!only_asks) a->end = end;
    }
    return 1;
}

/* Write one tick of all fields, and count it: Python runs no signal handler inside, so a tick is written whole or not
 * at all. `packed` holds the fields in rings, one after another; the others are named in `t->sliced`.
 * Returns the number of ticks written in all. If that is not above 0, nothing was written: NOT_CONTINUED, unless
 * `is_kept`, if next observations of the tick before would be lost, and there is no room to save them; NO_ROOM if the
 * tick might not fit into a part. */
EXPORT int64_t holdall_write_tick(tick_writer *t, const uint8_t *packed, int64_t packed_bytes, int64_t is_kept) {
    const int64_t slot = t->next_tick % t->ring_ticks, next_slot = (t->next_tick + 1) % t->ring_ticks;
    if (packed_bytes != t->packed_bytes) return ANOTHER_SIZE;
    const int is_broken = !is_kept && t->next_tick > t->first_tick && !is_continued(t, slot, packed);
    if (is_broken && !(t->is_changed && keep_apart(t, slot, packed, 1))) return NOT_CONTINUED;
    for (const sliced_field *s = t->sliced; s < t->sliced + t->sliced_count; s++)
        if (!has_room(s->part, s->order)) return NO_ROOM;
    if (is_broken) *t->is_changed = (uint8_t)keep_apart(t, slot, packed, 0);
    for (const flat_field *f = t->flat; f < t->flat + t->flat_count; f++) {
        memcpy(f->rows + slot * f->tick_bytes, packed, (size_t)f->tick_bytes);
        packed += f->tick_bytes;
        if (!f->is_observation) continue;
        uint8_t *const next = f->next ? f->next + slot * f->tick_bytes : f->rows + next_slot * f->tick_bytes;
        memcpy(next, packed, (size_t)f->tick_bytes);
        packed += f->tick_bytes;
    }
    for (const sliced_field *s = t->sliced; s < t->sliced + t->sliced_count; s++)
        append(s->part, s->obs, s->next_obs, s->order, s->cursors + slot * s->part->lanes);
    return ++t->next_tick;
}

/* Write ticks one after another: `packed` holds them so, and each sliced field's observations lie as they are stored,
 * tick after tick. Returns how many were written: fewer if a tick needs what holdall_write_tick returns for it. */
EXPORT int64_t holdall_write_ticks(tick_writer *t, const uint8_t *packed, int64_t packed_bytes, int64_t ticks) {
    int64_t written = 0;
    while (written < ticks && t->next_tick < t->pause_tick &&
           holdall_write_tick(t, packed + written * packed_bytes, packed_bytes, 0) > 0) {
        written++;
        for (sliced_field *s = t->sliced; s < t->sliced + t->sliced_count; s++) {
            const int64_t tick_bytes = s->part->lanes * s->part->window * s->part->outer * s->part->run_bytes;
            s->obs += tick_bytes;
            s->next_obs += tick_bytes;
        }
    }
    return written;
}
