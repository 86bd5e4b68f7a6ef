/* Memory of arrays that is used again once no array refers to it. Fresh memory costs a page fault for every 4 KiB,
 * which takes longer than copying rows into it. */
#ifndef HOLDALL_RECYCLER_H
#define HOLDALL_RECYCLER_H

#include "engine.h"

enum {
    MAX_KEPT = 16,           /* the most pieces of memory that are kept */
    RECYCLED_ALIGNMENT = 64, /* bytes; every array begins at a multiple of it, as torch's own tensors do */
};

/* Memory that is kept for later arrays. The maker of the recycler and every Recycled object own a reference. Used with the
 * GIL. */
typedef struct {
    Py_ssize_t references;
    Py_ssize_t max_kept_bytes;
    Py_ssize_t kept_bytes;
    int kept_count;
    struct {
        void *data;
        Py_ssize_t bytes;
    } kept[MAX_KEPT]; /* oldest first */
} recycler;

/* Memory of one or more arrays, which own references. When the last reference is dropped, the recycler keeps the memory. */
typedef struct {
    PyObject_HEAD
    recycler *recycler;
    void *data;
    Py_ssize_t bytes;
} Recycled;

/* Return a recycler that keeps nothing yet. NULL without an exception if there is no memory. */
recycler *recycler_new(Py_ssize_t max_kept_bytes);
/* Drop a reference; `r` may be NULL. */
void recycler_release(recycler *r);
/* Free everything that is kept. */
void recycler_clear(recycler *r);

/* Return at least `bytes` bytes of memory, kept or new. NULL with an exception set. */
Recycled *recycled_new(recycler *r, Py_ssize_t bytes);
/* The first aligned byte. */
uint8_t *recycled_start(const Recycled *memory);

#endif
