/* Memory of arrays that is used again once no array refers to it. Fresh memory costs a page fault for every 4 KiB,
 * which takes longer than copying rows into it. */
#ifndef HOLDALL_RECYCLER_H
#define HOLDALL_RECYCLER_H

#include "engine.h"

enum {
    MAX_KEPT = 16,           /* pieces of memory that are kept */
    RECYCLED_ALIGNMENT = 64, /* of the first byte of every array: where torch's own tensors begin */
};

/* The memory that is kept. Owned by whoever made the recycler and by all arrays in its memory. Used with the GIL. */
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

/* Memory that arrays refer to. When the last reference is dropped, the recycler keeps it. */
typedef struct {
    PyObject_HEAD
    recycler *recycler;
    void *data;
    Py_ssize_t bytes;
} Recycled;

/* NULL without an exception if there is no memory. */
recycler *recycler_new(Py_ssize_t max_kept_bytes);
/* Drop a reference; `r` may be NULL. */
void recycler_release(recycler *r);
/* Free everything that is kept. */
void recycler_clear(recycler *r);

/* Return memory for arrays of `bytes` bytes together, kept or new. NULL with an exception set. */
Recycled *recycled_new(recycler *r, Py_ssize_t bytes);
/* The first aligned byte. */
uint8_t *recycled_start(const Recycled *memory);

#endif
