/* Threads that wait in C for work to share, so that sharing it out takes no lock of Python's. */
#ifndef HOLDALL_HANDS_H
#define HOLDALL_HANDS_H

#include <stdint.h>

typedef struct hands hands;

/* What a hand does with a job: take pieces of it until there are none. Hand 0 is the caller. */
typedef void (*handiwork)(void *job, int64_t hand);

/* Let up to `helpers` threads begin on a job, and go on; NULL for no hands. */
void hands_begin(hands *h, handiwork work, void *job, int64_t helpers);
/* Return when no helper is at the job any more; one that did not begin yet never will. */
void hands_end(hands *h);
/* Let others have the core for a moment. */
void hands_pause(void);

#endif
