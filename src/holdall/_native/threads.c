/* The thread pool. Python starts, names and joins the threads. They wait here, without the GIL. */
#ifdef __linux__
#define _GNU_SOURCE /* for the cores that a thread may use */
#endif
#include "threads.h"

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
#endif

#define MAX_PLACED 64

struct thread_pool {
    mutex lock;
    condition has_work;
    condition is_idle; /* signalled when `busy` becomes 0 */
    work_on work;
    void *job;
    int64_t wanted; /* helpers that may still begin the job */
    int64_t begun;  /* helpers that began the job */
    int64_t busy;   /* helpers that work on the job */
    int is_dismissed;
#ifdef __linux__
    pthread_t helpers[MAX_PLACED];
    int helper_count;
    int caller_core; /* number of the core that the helpers avoid, plus 1; 0: none */
#endif
};

#ifdef __linux__
/* Record the calling thread as a helper. The next job places all helpers again. */
static void join_pool(thread_pool *pool) {
    if (pool->helper_count < MAX_PLACED) pool->helpers[pool->helper_count++] = pthread_self();
    pool->caller_core = 0;
}

/* Remove the calling thread, which is about to end. A number of a thread that has ended may be that of another one. */
static void leave_pool(thread_pool *pool) {
    for (int i = 0; i < pool->helper_count; i++)
        if (pthread_equal(pool->helpers[i], pthread_self())) {
            pool->helpers[i] = pool->helpers[--pool->helper_count];
            return;
        }
}

/* Allow helpers all cores of the caller, except for the one that it runs on now. Otherwise the kernel wakes helpers
 * on that core while all other cores are busy, for example with threads of torch that spin after a training step. The
 * helpers and the caller would then take turns on one core. */
static void place_helpers(thread_pool *pool) {
    const int core = sched_getcpu();
    cpu_set_t cores;
    if (core < 0 || core >= CPU_SETSIZE || core + 1 == pool->caller_core) return;
    if (sched_getaffinity(0, sizeof cores, &cores) != 0) return; /* The set has too little room for all cores. */
    CPU_CLR(core, &cores);
    if (CPU_COUNT(&cores) == 0) return;
    for (int i = 0; i < pool->helper_count; i++) pthread_setaffinity_np(pool->helpers[i], sizeof cores, &cores);
    pool->caller_core = core + 1;
}
#else
static void join_pool(thread_pool *pool) { (void)pool; }
static void leave_pool(thread_pool *pool) { (void)pool; }
static void place_helpers(thread_pool *pool) { (void)pool; }
#endif

thread_pool *threads_new(void) {
    thread_pool *const pool = calloc(1, sizeof *pool);
    if (pool) {
        MUTEX_NEW(&pool->lock);
        CONDITION_NEW(&pool->has_work);
        CONDITION_NEW(&pool->is_idle);
    }
    return pool;
}

/* Helpers are numbered in the order in which they begin a job: any threads of the pool may begin it, and the caller has
 * memory for as many helpers as it asked for. */
void threads_help(thread_pool *pool) {
    LOCK(&pool->lock);
    join_pool(pool);
    for (;;) {
        while (!pool->is_dismissed && pool->wanted == 0) WAIT(&pool->has_work, &pool->lock);
        if (pool->is_dismissed) break;
        pool->wanted--;
        pool->busy++;
        const int64_t thread = ++pool->begun;
        const work_on work = pool->work;
        void *const job = pool->job;
        UNLOCK(&pool->lock);
        work(job, thread);
        LOCK(&pool->lock);
        if (--pool->busy == 0) WAKE_ALL(&pool->is_idle);
    }
    leave_pool(pool);
    UNLOCK(&pool->lock);
}

void threads_dismiss(thread_pool *pool) {
    LOCK(&pool->lock);
    pool->is_dismissed = 1;
    WAKE_ALL(&pool->has_work);
    UNLOCK(&pool->lock);
}

void threads_free(thread_pool *pool) { free(pool); }

void threads_begin(thread_pool *pool, work_on work, void *job, int64_t helpers) {
    if (!pool || helpers < 1) return;
    LOCK(&pool->lock);
    place_helpers(pool);
    pool->work = work;
    pool->job = job;
    pool->wanted = helpers;
    pool->begun = 0;
    UNLOCK(&pool->lock);
    for (int64_t i = 0; i < helpers; i++) WAKE_ONE(&pool->has_work);
}

void threads_end(thread_pool *pool) {
    if (!pool) return;
    LOCK(&pool->lock);
    pool->wanted = 0;
    while (pool->busy > 0) WAIT(&pool->is_idle, &pool->lock);
    UNLOCK(&pool->lock);
}
