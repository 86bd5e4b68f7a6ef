/* Observations of a rollout, put together from the slices that were stored once.
 *
 * In: places, tick * lanes + lane; a negative one asks for a row of zeros. Every number that is
 * read from a table or log is checked before it is used.
 */
#include "codec.h"

#include <stdint.h>
#include <string.h>

/* Slices and the log of their numbers; mirrored by REEL_FIELDS in track.py. */
typedef struct {
    int64_t log;         /* address of the numbers, (log_rows, lanes); 0: slices lie in log order */
    int64_t log_rows;
    int64_t slices;      /* address of the slices, one after another */
    int64_t slice_count;
    int64_t sealed;      /* address of a sealed_block that holds the slices instead, or 0 */
} reel;

/* One field of a rollout; mirrored by _Track in native_rollout.py. */
typedef struct {
    const reel *reels;
    int64_t reel_count;
    const int32_t *reel_by_tick;
    const uint32_t *cursors; /* (ticks, lanes), as holdall_append gives them */
    int64_t ticks;
    int64_t lanes;
    int64_t outer;     /* runs of a slice */
    int64_t run_bytes; /* bytes of a run, contiguous in slice and observation */
    int64_t window;    /* slices of an observation */
    int64_t shift;     /* slices by which the next observation starts later */
} track;

static const uint32_t NEXT_IS_WHOLE = UINT32_C(1) << 31;

/* Put slice `w` of an observation where it belongs. */
static void lay(const track *t, const uint8_t *slice, int64_t w, uint8_t *out) {
    const int64_t stretch = t->window * t->run_bytes;
    out += w * t->run_bytes;
    if (t->run_bytes == 1)
        for (int64_t o = 0; o < t->outer; o++) out[o * stretch] = slice[o];
    else
        for (int64_t o = 0; o < t->outer; o++)
            memcpy(out + o * stretch, slice + o * t->run_bytes, (size_t)t->run_bytes);
}

/* Bring slice `number` of a reel to its place in an observation; 0 if it cannot be decoded. */
static int bring(const track *t, const reel *r, int64_t number, int64_t w, uint8_t *out, decoder *d) {
    const int64_t slice_bytes = t->outer * t->run_bytes;
    if (r->sealed == 0) {
        lay(t, (const uint8_t *)(intptr_t)r->slices + number * slice_bytes, w, out);
        return 1;
    }
    const sealed_block *const block = (const sealed_block *)(intptr_t)r->sealed;
    if (!d || block->form.slice_bytes != slice_bytes) return 0;
    if (t->outer == 1) return decode_slice(d, block, number, out + w * t->run_bytes);
    uint8_t *const slice = d->scratch + 2 * coded_bytes(&block->form);
    if (d->scratch_bytes < slice - d->scratch + slice_bytes) return 0;
    if (!decode_slice(d, block, number, slice)) return 0;
    lay(t, slice, w, out);
    return 1;
}

/* Rows [from, to) of a batch. Returns -1, or the first row whose place is not inside the rollout
 * or cannot be decoded. A cursor names the tick before: its next observation is what is wanted. */
EXPORT int64_t holdall_gather_track(const track *t, const int64_t *places, int64_t from, int64_t to, uint8_t *out,
                                    decoder *d) {
    const int64_t obs_bytes = t->outer * t->run_bytes * t->window;
    for (int64_t i = from; i < to; i++) {
        uint8_t *const row = out + i * obs_bytes;
        if (places[i] < 0) {
            memset(row, 0, (size_t)obs_bytes);
            continue;
        }
        if (places[i] >= t->ticks * t->lanes) return i;
        const int64_t lane = places[i] % t->lanes, number_of_reel = t->reel_by_tick[places[i] / t->lanes];
        if (number_of_reel < 0 || number_of_reel >= t->reel_count) return i;
        const reel *const r = &t->reels[number_of_reel];
        const uint32_t cursor = t->cursors[places[i]];
        const int64_t start = (int64_t)(cursor & ~NEXT_IS_WHOLE) + (cursor & NEXT_IS_WHOLE ? t->window : t->shift);
        if (start + t->window > r->log_rows) return i;
        for (int64_t w = 0; w < t->window; w++) {
            const int64_t entry = (start + w) * t->lanes + lane;
            const int64_t number = r->log ? ((const uint32_t *)(intptr_t)r->log)[entry] : entry;
            if (number >= r->slice_count || !bring(t, r, number, w, row, d)) return i;
        }
    }
    return -1;
}
