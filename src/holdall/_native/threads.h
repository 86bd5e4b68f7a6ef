/* Threads that wait in C for work, so that sharing work among them does not need the GIL. */
#ifndef HOLDALL_THREADS_H
#define HOLDALL_THREADS_H

#include <stdint.h>

typedef struct thread_pool thread_pool;

/* The work of one thread on a job: it takes pieces until none are left. `thread` is 0 for the caller of `threads_begin`, and
 * 1 to `helpers` for the helpers. */
typedef void (*work_on)(void *job, int64_t thread);

/* A pool without threads. NULL if there is no memory. */
thread_pool *threads_new(void);
/* Work on jobs until the pool is dismissed. The calling thread is then a helper of the pool. */
void threads_help(thread_pool *pool);
/* Make `threads_help` return in all helpers. */
void threads_dismiss(thread_pool *pool);
/* Free a pool without threads. */
void threads_free(thread_pool *pool);

/* Make up to `helpers` threads begin a job, and return at once. `pool` may be NULL if `helpers` is 0. */
void threads_begin(thread_pool *pool, work_on work, void *job, int64_t helpers);
/* Wait until no helper works on the job. Helpers that have not begun it will not begin it. */
void threads_end(thread_pool *pool);

#endif
