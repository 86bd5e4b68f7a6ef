/* Loops of rollouts: advantages, and trajectories that are sent to a device. */
#include "holdall.h"
#include "threads.h"

#include <stdatomic.h>
#include <string.h>

/* ---- advantages -------------------------------------------------------------------- */

/* Generalised advantage estimation, backwards in time, all lanes side by side. Every product and sum is a statement of
 * its own, in single precision and in the order of the NumPy twin (rollout.py): so no compiler may join two of them
 * into one rounding.
 *
 * `rewards`, `values`, `ends`, `advantages` and `returns` are (steps, lanes); `ends` is 1 where the episode ended with
 * the step. `rewards` may be `advantages`: a row is read before it is written. */
EXPORT void holdall_advantages(const float *rewards, const float *values, const float *ends, const float *last_values,
                               float gamma, float decay, int64_t steps, int64_t lanes, float *advantages,
                               float *returns) {
    for (int64_t t = steps - 1; t >= 0; t--) {
        const int64_t row = t * lanes;
        const int is_last = t == steps - 1;
        const float *const next_values = is_last ? last_values : values + row + lanes;
        const float *const later = advantages + row + lanes; /* not read in the last row */
        for (int64_t i = 0; i < lanes; i++) {
            const float going = 1.0f - ends[row + i];
            float ahead = gamma * next_values[i];
            ahead = ahead * going;
            float delta = rewards[row + i] + ahead;
            delta = delta - values[row + i];
            float carried = decay * going;
            carried = carried * (is_last ? 0.0f : later[i]);
            const float advantage = delta + carried;
            advantages[row + i] = advantage;
            returns[row + i] = advantage + values[row + i];
        }
    }
}

/* ---- trajectories on their way to a device ----------------------------------------- */

typedef int (*sender)(uint64_t there, const void *here, size_t nbytes, void *stream);
typedef int (*recorder)(void *event, void *stream);
typedef int (*querier)(void *event);

enum { NOT_YET = 600 }; /* what cuEventQuery returns */

typedef struct {
    int64_t source, first, bytes, at, load; /* bytes of a source, where in the slots they go, and with which load */
} piece_of_load;

typedef struct {
    int64_t end, there, bytes; /* behind its last piece; where it goes on the device */
} slot_load;

typedef struct {
    const piece_of_load *pieces;
    int64_t count;
    const uint8_t *const *sources;
    uint8_t *slots;
    _Atomic int64_t taken, allowed; /* pieces */
    _Atomic int64_t *done;          /* pieces, by load */
} sending;

/* Copy the next piece if its slot may be written to. Returns 0 if it may not yet, and -1 if none is left. */
static int copy_next(sending *b) {
    int64_t next = atomic_load_explicit(&b->taken, memory_order_relaxed);
    do {
        if (next >= b->count) return -1;
        if (next >= atomic_load_explicit(&b->allowed, memory_order_acquire)) return 0;
    } while (!atomic_compare_exchange_weak(&b->taken, &next, next + 1));
    const piece_of_load *const p = &b->pieces[next];
    memcpy(b->slots + p->at, b->sources[p->source] + p->first, (size_t)p->bytes);
    atomic_fetch_add_explicit(&b->done[p->load], 1, memory_order_release);
    return 1;
}

static void copy_pieces(void *job, int64_t thread) {
    (void)thread;
    for (int found; (found = copy_next(job)) >= 0;)
        if (!found) threads_pause();
}

/* Copy sources into pinned slots, by several threads that are woken once, and have every slot sent as soon as it is
 * filled; a slot is filled again when its event has passed. `done` is 0 for every load. Returns 0, or the driver's error:
 * then events stand behind all that was sent. */
EXPORT int holdall_send_slots(const piece_of_load *pieces, int64_t count, const slot_load *loads, int64_t load_count,
                              const uint8_t *const *sources, uint8_t *slots, int64_t slot_bytes, int64_t slot_count,
                              _Atomic int64_t *done, thread_pool *pool, int64_t helpers, sender send, uint64_t there,
                              void *stream, recorder record, querier query, void *const *events) {
    sending b = {.pieces = pieces, .count = count, .sources = sources, .slots = slots, .done = done};
    int error = 0;
    threads_begin(pool, copy_pieces, &b, helpers);
    for (int64_t sent = 0, allowed = 0; sent < load_count && !error;) {
        while (allowed < load_count && allowed < sent + slot_count && !error) {
            error = query ? query(events[allowed % slot_count]) : 0;
            if (error) break;
            atomic_store_explicit(&b.allowed, loads[allowed++].end, memory_order_release);
        }
        if (error && error != NOT_YET) break;
        error = 0;
        const slot_load *const load = &loads[sent];
        const int64_t begin = sent ? loads[sent - 1].end : 0;
        if (atomic_load_explicit(&done[sent], memory_order_acquire) == load->end - begin) {
            const uint8_t *const slot = slots + sent % slot_count * slot_bytes;
            error = send(there + (uint64_t)load->there, slot, (size_t)load->bytes, stream);
            const int unmarked = record ? record(events[sent % slot_count], stream) : 0;
            if (!error) error = unmarked;
            sent++;
        } else if (copy_next(&b) <= 0) {
            threads_pause();
        }
    }
    atomic_store(&b.taken, count); /* after an error the rest is not needed */
    threads_end(pool);
    return error;
}
