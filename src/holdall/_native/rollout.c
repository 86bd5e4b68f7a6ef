/* Loops of rollouts: advantages, and trajectories that are sent to a device. */
#include "holdall.h"
#include "threads.h"

#include <stdatomic.h>
#include <string.h>

/* ---- advantages -------------------------------------------------------------------- */

/* Generalised advantage estimation of one step in one lane. Every product and sum is a statement of its own, in single
 * precision and in the order of these statements: so no compiler may join two of them into one rounding. */
static inline float advantage_of(float reward, float value, float end, float next_value, float later, float gamma,
                                 float decay) {
    const float going = 1.0f - end;
    float ahead = gamma * next_value;
    ahead = ahead * going;
    float delta = reward + ahead;
    delta = delta - value;
    float carried = decay * going;
    carried = carried * later;
    return delta + carried;
}

/* One step in lanes by fours. Nothing that is read may be written, or lanes would not be computed side by side: rewards
 * that stand where advantages go are NULL. */
static void estimate_fours(int64_t fours, const float *restrict rewards, const float *restrict values,
                           const float *restrict ends, const float *restrict next_values, const float *restrict later,
                           float gamma, float decay, float *restrict advantages, float *restrict returns) {
    for (int64_t i = 0; i < 4 * fours; i++) {
        const float reward = rewards ? rewards[i] : advantages[i];
        const float advantage = advantage_of(reward, values[i], ends[i], next_values[i], later[i], gamma, decay);
        advantages[i] = advantage;
        returns[i] = advantage + values[i];
    }
}

/* Advantages and returns, backwards in time. `rewards`, `values`, `ends`, `advantages` and `returns` are (steps, lanes);
 * `ends` is 1 where the episode ended with the step. `rewards` may be `advantages`. */
EXPORT void holdall_advantages(const float *rewards, const float *values, const float *ends, const float *last_values,
                               float gamma, float decay, int64_t steps, int64_t lanes, float *advantages,
                               float *returns) {
    const int64_t last = (steps - 1) * lanes, fours = lanes / 4;
    for (int64_t row = last; row >= 0; row -= lanes) {
        const int is_last = row == last;
        if (!is_last && fours)
            estimate_fours(fours, rewards == advantages ? NULL : rewards + row, values + row, ends + row,
                           values + row + lanes, advantages + row + lanes, gamma, decay, advantages + row,
                           returns + row);
        for (int64_t i = is_last ? 0 : 4 * fours; i < lanes; i++) {
            const int64_t at = row + i;
            const float next_value = is_last ? last_values[i] : values[at + lanes];
            const float later = is_last ? 0.0f : advantages[at + lanes];
            const float advantage = advantage_of(rewards[at], values[at], ends[at], next_value, later, gamma, decay);
            advantages[at] = advantage;
            returns[at] = advantage + values[at];
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
