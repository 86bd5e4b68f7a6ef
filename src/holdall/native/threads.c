/* The thread pool: Python starts, names and joins its threads; they wait here, without the GIL. */
#include "threads.h"

#include "holdall.h"

#include <stdlib.h>

#ifdef _WIN32
#include <windows.h>
typedef SRWLOCK mutex;
typedef CONDITION_VARIABLE condition;
#define MUTEX_NEW(m) InitializeSRWLock(m)
#define LOCK(m) AcquireSRWLockExclusive(m)
#define UNLOCK(m) ReleaseSRWLockExclusive(m)
#define CONDITION_NEW(c) InitializeConditionVariable(c)
#define WAIT(c, m) SleepConditionVariableSRW(c, m, INFINITE, 0)
#define WAKE_ONE(c) WakeConditionVariable(c)
#define WAKE_ALL(c) WakeAllConditionVariable(c)
#define YIELD() SwitchToThread()
#else
#include <pthread.h>
#include <sched.h>
typedef pthread_mutex_t mutex;
typedef pthread_cond_t condition;
#define MUTEX_NEW(m) pthread_mutex_init(m, NULL)
#define LOCK(m) pthread_mutex_lock(m)
#define UNLOCK(m) pthread_mutex_unlock(m)
#define CONDITION_NEW(c) pthread_cond_init(c, NULL)
#define WAIT(c, m) pthread_cond_wait(c, m)
#define WAKE_ONE(c) pthread_cond_signal(c)
#define WAKE_ALL(c) pthread_cond_broadcast(c)
#define YIELD() sched_yield()
#endif

struct thread_pool {
    mutex lock;
    condition has_work;
    condition all_left;
    work_on work;
    void *job;
    int64_t wanted; /* helpers that may still begin the job */
    int64_t busy;   /* helpers that work on it */
    int dismissed;
};

EXPORT thread_pool *holdall_threads_new(void) {
    thread_pool *const pool = calloc(1, sizeof *pool);
    if (pool) {
        MUTEX_NEW(&pool->lock);
        CONDITION_NEW(&pool->has_work);
        CONDITION_NEW(&pool->all_left);
    }
    return pool;
}

/* What a helper's thread runs until the pool is dismissed; `thread` is its number, from 1 on. */
EXPORT void holdall_threads_help(thread_pool *pool, int64_t thread) {
    LOCK(&pool->lock);
    for (;;) {
        while (!pool->dismissed && pool->wanted == 0) WAIT(&pool->has_work, &pool->lock);
        if (pool->dismissed) break;
        pool->wanted--;
        pool->busy++;
        const work_on work = pool->work;
        void *const job = pool->job;
        UNLOCK(&pool->lock);
        work(job, thread);
        LOCK(&pool->lock);
        if (--pool->busy == 0) WAKE_ALL(&pool->all_left);
    }
    UNLOCK(&pool->lock);
}

/* Let every helper's thread end. */
EXPORT void holdall_threads_dismiss(thread_pool *pool) {
    LOCK(&pool->lock);
    pool->dismissed = 1;
    WAKE_ALL(&pool->has_work);
    UNLOCK(&pool->lock);
}

/* Free a pool that was dismissed, after its threads were joined. */
EXPORT void holdall_threads_free(thread_pool *pool) { free(pool); }

void threads_begin(thread_pool *pool, work_on work, void *job, int64_t helpers) {
    if (!pool || helpers < 1) return;
    LOCK(&pool->lock);
    pool->work = work;
    pool->job = job;
    pool->wanted = helpers;
    UNLOCK(&pool->lock);
    for (int64_t i = 0; i < helpers; i++) WAKE_ONE(&pool->has_work);
}

void threads_end(thread_pool *pool) {
    if (!pool) return;
    LOCK(&pool->lock);
    pool->wanted = 0;
    while (pool->busy > 0) WAIT(&pool->all_left, &pool->lock);
    UNLOCK(&pool->lock);
}

void threads_pause(void) { YIELD(); }
