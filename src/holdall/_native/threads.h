/* Threads that wait in C for work, so that sharing it among them needs no lock of Python's. */
#ifndef HOLDALL_THREADS_H
#define HOLDALL_THREADS_H

#include <stdint.h>

typedef struct thread_pool thread_pool;

/* What a thread does with a job: it takes pieces until none are left. Thread 0 is the caller, the helpers that begin
 * are 1, 2, ... up to as many as were asked for. */
typedef void (*work_on)(void *job, int64_t thread);

/* Let up to `helpers` threads begin a job, and return at once; `pool` may be NULL if there are none. */
void threads_begin(thread_pool *pool, work_on work, void *job, int64_t helpers);
/* Return when no helper works on the job any more; one that did not begin yet never does. */
void threads_end(thread_pool *pool);
/* Let another thread use the core for a moment. */
void threads_pause(void);

#endif
