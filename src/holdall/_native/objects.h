/* Fields of Python's and NumPy's objects, for the files whose functions are built-in functions of Python. one_call.py
 * compares their places with those of real objects before anything is read. */
#ifndef HOLDALL_OBJECTS_H
#define HOLDALL_OBJECTS_H

#include <stdint.h>

/* What every object begins with; tuples; arrays of NumPy's (PyArrayObject_fields). */
typedef struct {
    int64_t references;
    const void *type;
} object;

typedef struct {
    object head;
    int64_t length;
    const void *first;
} tuple;

typedef struct {
    object head;
    uint8_t *data;
    int dimensions;
    const int64_t *lengths;
    const int64_t *strides;
    const void *base;
    const void *dtype;
    int flags;
} array;

enum { C_CONTIGUOUS = 1 }; /* of an array's flags */

/* A function's own object is a tuple: an array over its struct, and what must live as long as it. */
static inline void *own_struct(const void *self) { return ((const array *)((const tuple *)self)->first)->data; }

#endif
