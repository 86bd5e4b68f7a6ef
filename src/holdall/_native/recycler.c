/* Recycled memory, and the Python type ArrayPool, which makes arrays in such memory. */
#include "recycler.h"
#include "module.h"

#include <stdlib.h>
#include <string.h>

static PyTypeObject *recycled_type;

/* ---- kept memory --------------------------------------------------------------------- */

recycler *recycler_new(Py_ssize_t max_kept_bytes) {
    recycler *const r = calloc(1, sizeof *r);
    if (!r) return NULL;
    r->references = 1;
    r->max_kept_bytes = max_kept_bytes;
    return r;
}

/* Remove kept piece `i`, and return its memory. */
static void *remove_kept(recycler *r, int i) {
    void *const data = r->kept[i].data;
    r->kept_bytes -= r->kept[i].bytes;
    r->kept_count--;
    memmove(&r->kept[i], &r->kept[i + 1], (size_t)(r->kept_count - i) * sizeof *r->kept);
    return data;
}

static void free_oldest(recycler *r) {
    const Py_ssize_t bytes = r->kept[0].bytes;
    area_free(remove_kept(r, 0), (size_t)bytes);
}

void recycler_clear(recycler *r) {
    while (r->kept_count > 0) free_oldest(r);
}

void recycler_release(recycler *r) {
    if (!r || --r->references > 0) return;
    recycler_clear(r);
    free(r);
}

/* Remove the newest piece of at least `*bytes` bytes, and at most about twice as many, and set `*bytes` to its size. NULL if no
 * piece has such a size. */
static void *take_kept(recycler *r, Py_ssize_t *bytes) {
    for (int i = r->kept_count - 1; i >= 0; i--) {
        if (r->kept[i].bytes < *bytes || r->kept[i].bytes / 2 > *bytes) continue;
        *bytes = r->kept[i].bytes;
        return remove_kept(r, i);
    }
    return NULL;
}

/* Keep memory, and free the oldest pieces if that is too much. */
static void keep(recycler *r, void *data, Py_ssize_t bytes) {
    if (bytes > r->max_kept_bytes) {
        area_free(data, (size_t)bytes);
        return;
    }
    while (r->kept_count == MAX_KEPT || r->kept_bytes + bytes > r->max_kept_bytes) free_oldest(r);
    r->kept[r->kept_count].data = data;
    r->kept[r->kept_count].bytes = bytes;
    r->kept_count++;
    r->kept_bytes += bytes;
}

/* ---- memory in use --------------------------------------------------------------------- */

static void recycled_dealloc(PyObject *self) {
    Recycled *const memory = (Recycled *)self;
    if (memory->data) keep(memory->recycler, memory->data, memory->bytes);
    recycler_release(memory->recycler);
    object_free(self);
}

static PyType_Slot recycled_slots[] = {
    {Py_tp_doc, "The memory of arrays, which is used again when they are freed."},
    {Py_tp_dealloc, (void *)recycled_dealloc},
    {0, NULL},
};
static PyType_Spec recycled_spec = {
    "holdall._native.Recycled", sizeof(Recycled), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    recycled_slots,
};

Recycled *recycled_new(recycler *r, Py_ssize_t bytes) {
    Recycled *const memory = object_new(recycled_type);
    if (!memory) return NULL;
    memory->recycler = r;
    r->references++;
    memory->bytes = bytes + RECYCLED_ALIGNMENT;
    memory->data = take_kept(r, &memory->bytes);
    if (!memory->data) {
        memory->data = area_new((size_t)memory->bytes);
        if (memory->data) area_use_huge_pages(memory->data, (size_t)memory->bytes);
    }
    if (!memory->data) {
        Py_DECREF((PyObject *)memory);
        PyErr_NoMemory();
        return NULL;
    }
    return memory;
}

uint8_t *recycled_start(const Recycled *memory) {
    const uintptr_t start = (uintptr_t)memory->data;
    return (uint8_t *)((start + RECYCLED_ALIGNMENT - 1) / RECYCLED_ALIGNMENT * RECYCLED_ALIGNMENT);
}

/* ---- ArrayPool ------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    recycler *recycler;
} ArrayPool;

static PyObject *pool_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"max_kept_bytes", NULL};
    Py_ssize_t max_kept_bytes;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "n:ArrayPool", names, &max_kept_bytes)) return NULL;
    if (max_kept_bytes < 0)
        return PyErr_Format(PyExc_ValueError, "max_kept_bytes is %zd, but must be at least 0", max_kept_bytes);
    ArrayPool *const pool = object_new(type);
    if (!pool) return NULL;
    pool->recycler = recycler_new(max_kept_bytes);
    if (!pool->recycler) {
        Py_DECREF((PyObject *)pool);
        return PyErr_NoMemory();
    }
    return (PyObject *)pool;
}

static void pool_dealloc(PyObject *self) {
    recycler_release(((ArrayPool *)self)->recycler);
    object_free(self);
}

/* Read a shape from a tuple. Return the bytes of such an array, or -1 with an exception set. */
static Py_ssize_t parse_shape(PyObject *given, Py_ssize_t item_bytes, npy_intp *shape) {
    if (PyTuple_Size(given) > MAX_NDIM + 1) {
        PyErr_Format(PyExc_ValueError, "shape is %R, but at most %d axes are possible", given, MAX_NDIM + 1);
        return -1;
    }
    Py_ssize_t bytes = item_bytes;
    for (Py_ssize_t i = 0; i < PyTuple_Size(given); i++) {
        shape[i] = PyLong_AsSsize_t(PyTuple_GetItem(given, i));
        if (shape[i] == -1 && PyErr_Occurred()) return -1;
        if (shape[i] < 0 || (shape[i] > 0 && bytes > PY_SSIZE_T_MAX / 2 / shape[i])) {
            PyErr_Format(PyExc_ValueError, "shape is %R, which has a negative length or is too large", given);
            return -1;
        }
        bytes *= shape[i];
    }
    return bytes;
}

static PyObject *pool_empty(PyObject *self, PyObject *arguments) {
    PyObject *given, *array = NULL;
    PyArray_Descr *descr = NULL;
    Recycled *memory = NULL;
    npy_intp shape[MAX_NDIM + 1];
    if (!PyArg_ParseTuple(arguments, "O!O&:empty", &PyTuple_Type, &given, PyArray_DescrConverter, &descr)) goto done;
    if (PyDataType_REFCHK(descr)) {
        PyErr_Format(PyExc_TypeError, "dtype is %R, but arrays of objects cannot be made", (PyObject *)descr);
        goto done;
    }
    const Py_ssize_t bytes = parse_shape(given, PyDataType_ELSIZE(descr), shape);
    if (bytes < 0) goto done;
    memory = recycled_new(((ArrayPool *)self)->recycler, bytes);
    if (!memory) goto done;
    array = PyArray_NewFromDescr(&PyArray_Type, (PyArray_Descr *)Py_NewRef((PyObject *)descr), (int)PyTuple_Size(given),
                                 shape, NULL, recycled_start(memory), NPY_ARRAY_CARRAY, NULL);
    if (array) PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef((PyObject *)memory)); /* takes the reference */
done:
    Py_XDECREF((PyObject *)memory);
    Py_XDECREF((PyObject *)descr);
    return array;
}

static PyObject *pool_clear(PyObject *self, PyObject *Py_UNUSED(none)) {
    recycler_clear(((ArrayPool *)self)->recycler);
    Py_RETURN_NONE;
}

static PyObject *pool_kept_bytes(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(((ArrayPool *)self)->recycler->kept_bytes);
}

static PyMethodDef pool_methods[] = {
    {"empty", pool_empty, METH_VARARGS, "empty(shape, dtype, /)\n--\n\nReturn an array whose contents are arbitrary."},
    {"clear", pool_clear, METH_NOARGS, "clear()\n--\n\nFree the memory that is kept."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef pool_properties[] = {
    {"kept_bytes", pool_kept_bytes, NULL, "Memory of freed arrays that is kept for the next ones.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot pool_slots[] = {
    {Py_tp_doc, "ArrayPool(max_kept_bytes)\n--\n\nMakes arrays, and uses the memory of freed ones again."},
    {Py_tp_new, (void *)pool_new},
    {Py_tp_dealloc, (void *)pool_dealloc},
    {Py_tp_methods, pool_methods},
    {Py_tp_getset, pool_properties},
    {0, NULL},
};
static PyType_Spec pool_spec = {"holdall._native.ArrayPool", sizeof(ArrayPool), 0, Py_TPFLAGS_DEFAULT, pool_slots};

int add_recycler(PyObject *module) {
    if (!(recycled_type = (PyTypeObject *)PyType_FromSpec(&recycled_spec))) return -1;
    PyTypeObject *const type = type_add(module, &pool_spec, "ArrayPool");
    Py_XDECREF((PyObject *)type);
    return type ? 0 : -1;
}
