/* Pages ahead of who writes: a thread makes them present, so that `add` does not wait for the system to clear one.
 *
 * The first write to a large page takes 0.2 ms, and 6 ms on a virtual machine whose host has to find memory first. So the
 * memory of a block gets small pages, and this thread makes large ones of those behind the one that is being written, if it
 * expects to be done before the writer gets there. A writer that is faster goes on in small pages: they take no less time in
 * all, but never long at once. Python starts and ends the thread; it waits here, without the GIL. Nothing here changes a
 * byte. */
#ifdef __linux__
#define _GNU_SOURCE /* for madvise */
#endif
#include "holdall.h"
#include "pages.h"

#ifdef __linux__
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { MOST_ARENAS = 8, LARGE_PAGE = 1 << 21, SMALL_PAGE = 1 << 12, MOST_AHEAD = 2, RECENT = 4 };
/* What is assumed before it is known: that there is time. */
static const int64_t LONG = 1000000000;

/* The memory of a block that is being written. */
typedef struct {
    uint8_t *start;
    int64_t bytes;
    uint8_t *next;        /* the large page to make present next */
    uint8_t *written;     /* up to here it is written */
    int64_t since;        /* when that was said */
    int64_t is_begun;     /* whether that was where a large page begins */
    int64_t took[RECENT]; /* nanoseconds that such pages took to fill, by the last ones */
    int64_t filled;       /* how many there were */
} arena;

struct page_feeder {
    pthread_mutex_t lock; /* never held for long */
    pthread_cond_t asked;
    arena arenas[MOST_ARENAS];
    int64_t count;
    int64_t generation; /* another one when the arenas are others; and ... */
    int64_t touching;   /* ... the one whose page is being touched, or 0 */
    int64_t cost;       /* nanoseconds that a large page takes, by the last ones */
    int dismissed;
};

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static uint8_t *page_of(const uint8_t *p) { return (uint8_t *)((uintptr_t)p & ~(uintptr_t)(LARGE_PAGE - 1)); }

/* Write to every page what stands there already. Who writes there at the same moment is not disturbed: a byte other than 0
 * is left alone, and a 0 is replaced by a 0 in one step. */
static void touch(uint8_t *page) {
    for (uint8_t *p = page; p < page + LARGE_PAGE; p += SMALL_PAGE) {
        uint8_t expected = 0;
        __atomic_compare_exchange_n(p, &expected, 0, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
}

/* Return the next page of an arena that can be made present before the writer gets there; NULL if there is none. */
static uint8_t *next_page(page_feeder *f, arena *a) {
    /* Pages that are ahead take at most half of all memory that is being written. */
    const int64_t share = a->bytes / (2 * f->count * LARGE_PAGE), ahead = share < MOST_AHEAD ? share : MOST_AHEAD;
    uint8_t *const behind = page_of(a->written) + LARGE_PAGE, *const end = page_of(a->start + a->bytes);
    int64_t least = a->took[0];
    for (int i = 1; i < RECENT; i++)
        if (a->took[i] < least) least = a->took[i];
    if (a->next < behind) a->next = behind;
    for (; a->next < end && a->next < behind + ahead * LARGE_PAGE; a->next += LARGE_PAGE) {
        if (f->cost <= a->since + least * ((a->next - behind) / LARGE_PAGE + 1) - now()) return a->next;
        f->cost -= f->cost / 8; /* so that it is tried again some time */
    }
    return NULL;
}

EXPORT int64_t holdall_pages_size(void) { return (int64_t)sizeof(page_feeder); }

EXPORT void holdall_pages_new(page_feeder *f) {
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->asked, NULL);
    for (int64_t i = 0; i < MOST_ARENAS * RECENT; i++) f->arenas[i / RECENT].took[i % RECENT] = LONG;
}

/* Ask for small or large pages for memory; what is there stays as it is. */
static void advise(const arena *a, int advice) {
    if (a->bytes > 0) madvise(a->start, (size_t)a->bytes, advice);
}

/* Follow other memory from now on: `count` starts, sizes and what of it is written; the memory before still lives.
 * Returns the generation that is still being touched, whose memory must live until holdall_pages_feed returns; or 0. */
EXPORT int64_t holdall_pages_follow(page_feeder *f, int64_t generation, const int64_t *memory, int64_t count) {
    arena before[MOST_ARENAS];
    const int64_t moment = now(), count_before = f->count; /* nobody else changes it */
    pthread_mutex_lock(&f->lock);
    memcpy(before, f->arenas, sizeof before);
    f->count = count < MOST_ARENAS ? count : MOST_ARENAS;
    f->generation = generation;
    for (int64_t i = 0; i < f->count; i++, memory += 3) {
        arena *const a = &f->arenas[i];
        a->start = (uint8_t *)(intptr_t)memory[0];
        a->bytes = memory[1];
        a->written = a->start + memory[2];
        a->next = page_of(a->start + LARGE_PAGE - 1);
        a->since = moment;
        a->is_begun = 0;
        if (i >= count_before || before[i].start != a->start) advise(a, MADV_NOHUGEPAGE);
    }
    const int64_t touching = f->touching;
    pthread_cond_signal(&f->asked);
    pthread_mutex_unlock(&f->lock);
    /* One kind of pages again, so that the system need not keep the parts of the memory apart. */
    for (int64_t i = 0; i < count_before; i++)
        if (i >= count || before[i].start != f->arenas[i].start) advise(&before[i], MADV_HUGEPAGE);
    return touching;
}

/* Make pages present until the feeder is dismissed, then return 0; or until the memory that was touched last is not
 * followed any more: then return which generation is, and have all memory before let go of. */
EXPORT int64_t holdall_pages_feed(page_feeder *f) {
    int64_t generation = 0;
    pthread_mutex_lock(&f->lock);
    while (!f->dismissed) {
        uint8_t *page = NULL;
        for (int64_t i = 0; i < f->count && !page; i++)
            if ((page = next_page(f, &f->arenas[i]))) f->arenas[i].next += LARGE_PAGE;
        if (!page) {
            pthread_cond_wait(&f->asked, &f->lock);
            continue;
        }
        generation = f->touching = f->generation;
        pthread_mutex_unlock(&f->lock);
        const int64_t began = now();
        madvise(page, LARGE_PAGE, MADV_HUGEPAGE);
        touch(page);
        const int64_t took = now() - began;
        pthread_mutex_lock(&f->lock);
        f->touching = 0;
        f->cost = f->cost ? (f->cost + took) / 2 : took;
        if (generation != f->generation) break;
    }
    generation = f->dismissed ? 0 : f->generation;
    pthread_mutex_unlock(&f->lock);
    return generation;
}

EXPORT void holdall_pages_dismiss(page_feeder *f) {
    pthread_mutex_lock(&f->lock);
    f->dismissed = 1;
    pthread_cond_broadcast(&f->asked);
    pthread_mutex_unlock(&f->lock);
}

int64_t pages_ask(page_feeder *f, int64_t number, const uint8_t *start, int64_t used_bytes) {
    const uint8_t *const at = start + used_bytes;
    if (number >= MOST_ARENAS) return INT64_MAX;
    if (pthread_mutex_trylock(&f->lock) != 0) return used_bytes; /* again with the next tick: nobody waits here */
    if (number < f->count) {
        arena *const a = &f->arenas[number];
        const int64_t moment = now();
        if (a->is_begun) a->took[a->filled++ % RECENT] = moment - a->since;
        a->since = moment;
        a->is_begun = 1;
        a->written = (uint8_t *)(uintptr_t)at;
        pthread_cond_signal(&f->asked);
    }
    pthread_mutex_unlock(&f->lock);
    return page_of(at) + LARGE_PAGE - start;
}
#else
EXPORT int64_t holdall_pages_size(void) { return 0; } /* there is no such thread */
EXPORT void holdall_pages_new(page_feeder *f) { (void)f; }
EXPORT int64_t holdall_pages_follow(page_feeder *f, int64_t generation, const int64_t *memory, int64_t count) {
    return (void)f, (void)generation, (void)memory, (void)count, 0;
}
EXPORT int64_t holdall_pages_feed(page_feeder *f) { return (void)f, 0; }
EXPORT void holdall_pages_dismiss(page_feeder *f) { (void)f; }
int64_t pages_ask(page_feeder *f, int64_t number, const uint8_t *start, int64_t used_bytes) {
    return (void)f, (void)number, (void)start, (void)used_bytes, INT64_MAX;
}
#endif
