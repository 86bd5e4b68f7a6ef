/* The threads behind hands.h. Python starts them, names them and joins them; all waiting is here. */
#include "hands.h"
#include "codec.h"

#include <stdlib.h>

#ifdef _WIN32
#include <windows.h>
typedef SRWLOCK lock;
typedef CONDITION_VARIABLE bell;
#define LOCK_NEW(l) InitializeSRWLock(l)
#define LOCK(l) AcquireSRWLockExclusive(l)
#define UNLOCK(l) ReleaseSRWLockExclusive(l)
#define BELL_NEW(b) InitializeConditionVariable(b)
#define AWAIT(b, l) SleepConditionVariableSRW(b, l, INFINITE, 0)
#define RING_ONE(b) WakeConditionVariable(b)
#define RING_ALL(b) WakeAllConditionVariable(b)
#define YIELD() SwitchToThread()
#else
#include <pthread.h>
#include <sched.h>
typedef pthread_mutex_t lock;
typedef pthread_cond_t bell;
#define LOCK_NEW(l) pthread_mutex_init(l, NULL)
#define LOCK(l) pthread_mutex_lock(l)
#define UNLOCK(l) pthread_mutex_unlock(l)
#define BELL_NEW(b) pthread_cond_init(b, NULL)
#define AWAIT(b, l) pthread_cond_wait(b, l)
#define RING_ONE(b) pthread_cond_signal(b)
#define RING_ALL(b) pthread_cond_broadcast(b)
#define YIELD() sched_yield()
#endif

struct hands {
    lock lock;
    bell work_is_there;
    bell all_left;
    handiwork work;
    void *job;
    int64_t wanted; /* helpers that may still begin on the job */
    int64_t busy;   /* helpers at the job */
    int dismissed;
};

EXPORT hands *holdall_hands_new(void) {
    hands *const h = calloc(1, sizeof *h);
    if (h) {
        LOCK_NEW(&h->lock);
        BELL_NEW(&h->work_is_there);
        BELL_NEW(&h->all_left);
    }
    return h;
}

/* What a helper's thread does until it is dismissed; `hand` is its number, from 1 on. */
EXPORT void holdall_hands_help(hands *h, int64_t hand) {
    LOCK(&h->lock);
    for (;;) {
        while (!h->dismissed && h->wanted == 0) AWAIT(&h->work_is_there, &h->lock);
        if (h->dismissed) break;
        h->wanted--;
        h->busy++;
        const handiwork work = h->work;
        void *const job = h->job;
        UNLOCK(&h->lock);
        work(job, hand);
        LOCK(&h->lock);
        if (--h->busy == 0) RING_ALL(&h->all_left);
    }
    UNLOCK(&h->lock);
}

/* Let every helper's thread end. */
EXPORT void holdall_hands_dismiss(hands *h) {
    LOCK(&h->lock);
    h->dismissed = 1;
    RING_ALL(&h->work_is_there);
    UNLOCK(&h->lock);
}

/* Free what was dismissed, after its threads were joined. */
EXPORT void holdall_hands_free(hands *h) { free(h); }

void hands_begin(hands *h, handiwork work, void *job, int64_t helpers) {
    if (!h || helpers < 1) return;
    LOCK(&h->lock);
    h->work = work;
    h->job = job;
    h->wanted = helpers;
    UNLOCK(&h->lock);
    for (int64_t i = 0; i < helpers; i++) RING_ONE(&h->work_is_there);
}

void hands_end(hands *h) {
    if (!h) return;
    LOCK(&h->lock);
    h->wanted = 0;
    while (h->busy > 0) AWAIT(&h->all_left, &h->lock);
    UNLOCK(&h->lock);
}

void hands_pause(void) { YIELD(); }
