/* Copies that threads share out among themselves, in order.
 *
 * Each thread takes the next piece when it is done with one, so a thread that the system does not
 * schedule costs nothing. Pieces beyond `allowed` wait: where they go is still being read.
 */
#include "codec.h"

#include <stdint.h>
#include <string.h>

/* Mirrored by PIECE_FIELDS in conveyor.py. */
typedef struct {
    int64_t from; /* addresses */
    int64_t to;
    int64_t bytes;
    int64_t chunk; /* which of `left` counts it */
} piece;

/* Mirrored by JobStruct in native_rollout.py. */
typedef struct {
    const piece *pieces;
    int64_t count;
    int64_t next;    /* the first piece that nobody took */
    int64_t allowed; /* pieces from here on have to wait */
    int64_t *left;   /* pieces of each chunk that are not copied yet */
} copy_job;

static inline void pause_a_little(void) {
#ifdef HAVE_X86
    _mm_pause();
#endif
}

/* Copy up to `most` pieces; where a piece has to wait, wait for it or, unless `waits`, return.
 * Returns how many were copied. */
EXPORT int64_t holdall_copy_pieces(copy_job *job, int64_t most, int64_t waits) {
    int64_t copied = 0;
    while (copied < most) {
        int64_t k = __atomic_load_n(&job->next, __ATOMIC_RELAXED);
        if (k >= __atomic_load_n(&job->count, __ATOMIC_RELAXED)) break;
        if (k >= __atomic_load_n(&job->allowed, __ATOMIC_ACQUIRE)) {
            if (!waits) break;
            pause_a_little();
            continue;
        }
        if (!__atomic_compare_exchange_n(&job->next, &k, k + 1, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
        const piece *const p = &job->pieces[k];
        memcpy((void *)(intptr_t)p->to, (const void *)(intptr_t)p->from, (size_t)p->bytes);
        __atomic_sub_fetch(&job->left[p->chunk], 1, __ATOMIC_RELEASE);
        copied++;
    }
    return copied;
}

/* How many pieces of a chunk are not copied yet; 0: all its bytes can be seen. */
EXPORT int64_t holdall_pieces_left(const copy_job *job, int64_t chunk) {
    return __atomic_load_n(&job->left[chunk], __ATOMIC_ACQUIRE);
}
