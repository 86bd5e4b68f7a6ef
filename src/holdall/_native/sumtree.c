/* The Python type SumTree: numbers of at least 0 in slots, and a binary tree of their sums.
 *
 * Node 1 is the root, and the children of node i are 2 i and 2 i + 1. The last half of the nodes are the slots. Every
 * node is the sum of its two children, always computed anew, so the tree depends on the numbers in the slots only, to
 * the last bit, and not on the order in which they were set.
 *
 * All methods run with the GIL held and check their arguments first, so each of them is atomic. */
#include "engine.h"
#include "module.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    WALK_COUNT = 128,   /* paths that are followed together, because each of them waits for memory at every level */
    TOP_NODES = 128,    /* levels with fewer nodes are summed as a whole, which is faster than along every path */
    REBUILD_SHARE = 16, /* if more than one leaf in REBUILD_SHARE changes, summing all levels is faster */
};

typedef struct {
    PyObject_HEAD
    double *nodes;
    int64_t slots;
    int64_t leaves;  /* the smallest power of two that is at least `slots` */
    double highest;  /* the largest number that `update` or `raise_highest` was given */
} SumTree;

/* ---- loops --------------------------------------------------------------------------- */

static inline void add_children(double *nodes, int64_t node) { nodes[node] = nodes[2 * node] + nodes[2 * node + 1]; }

/* Sum up all nodes from number `first` down to the root. */
static void sum_from(SumTree *tree, int64_t first) {
    for (int64_t node = first; node > 0; node--) add_children(tree->nodes, node);
}

/* Sum up the nodes above `count` slots. */
static void sum_above(SumTree *tree, const int64_t *slots, int64_t count) {
    int64_t shift = 1;
    for (int64_t level = tree->leaves; level > 1; level /= 2, shift++)
        for (int64_t i = 0; i < count; i++) add_children(tree->nodes, (tree->leaves + slots[i]) >> shift);
}

/* Set the numbers of ids, which were checked. */
static void update_ids(SumTree *tree, const int64_t *ids, const double *values, int64_t count, int64_t first_id) {
    const int64_t top = tree->leaves < TOP_NODES ? tree->leaves : TOP_NODES;
    for (int64_t begin = 0; begin < count; begin += WALK_COUNT) {
        const int64_t end = begin + WALK_COUNT < count ? begin + WALK_COUNT : count;
        int64_t nodes[WALK_COUNT];
        int64_t walks = 0;
        for (int64_t i = begin; i < end; i++) {
            if (ids[i] < first_id) continue;
            const int64_t slot = ids[i] < tree->slots ? ids[i] : ids[i] % tree->slots;
            nodes[walks] = tree->leaves + slot;
            tree->nodes[nodes[walks++]] = values[i];
            if (values[i] > tree->highest) tree->highest = values[i];
        }
        for (int64_t level = tree->leaves; level > top; level /= 2)
            for (int64_t i = 0; i < walks; i++) add_children(tree->nodes, nodes[i] /= 2);
    }
    sum_from(tree, top - 1);
}

/* Follow up to WALK_COUNT points of [0, 1), multiplied by the sum of all slots, to the slots that they fall on. */
static void find_slots(const SumTree *tree, const double *points, int64_t count, int64_t *slots) {
    int64_t node[WALK_COUNT];
    double rest[WALK_COUNT];
    for (int64_t i = 0; i < count; i++) {
        node[i] = 1;
        rest[i] = points[i] * tree->nodes[1];
    }
    for (int64_t level = 1; level < tree->leaves; level *= 2)
        for (int64_t i = 0; i < count; i++) {
            const double in_left = tree->nodes[2 * node[i]];
            const double in_right = tree->nodes[2 * node[i] + 1];
            /* Rounding can put a point after the last number. It is then kept on a side whose sum is not 0. */
            const int64_t is_right = ((rest[i] >= in_left) & (in_right > 0)) | (in_left == 0);
            rest[i] -= (double)is_right * in_left; /* A branch would be predicted wrongly half of the time. */
            node[i] = 2 * node[i] + is_right;
            FETCH_SOON(tree->nodes + (2 * level < tree->leaves ? 2 * node[i] : 1));
        }
    for (int64_t i = 0; i < count; i++) slots[i] = node[i] - tree->leaves;
}

/* ---- arguments ----------------------------------------------------------------------- */

/* A contiguous one-dimensional array of `type_number`, with `count` entries unless that is negative. NULL with an
 * exception set. */
static PyArrayObject *as_vector(PyObject *object, int type_number, const char *name, npy_intp count) {
    PyObject *const array = PyArray_FROMANY(object, type_number, 1, 1, NPY_ARRAY_IN_ARRAY);
    if (array && count >= 0 && PyArray_SIZE((PyArrayObject *)array) != count) {
        PyErr_Format(PyExc_ValueError, "%s has %zd entries, but must have %zd", name,
                     (Py_ssize_t)PyArray_SIZE((PyArrayObject *)array), (Py_ssize_t)count);
        Py_DECREF(array);
        return NULL;
    }
    return (PyArrayObject *)array;
}

/* -1 with an IndexError unless all slots exist. */
static int require_slots(const SumTree *tree, const int64_t *slots, npy_intp count) {
    for (npy_intp i = 0; i < count; i++)
        if (slots[i] < 0 || slots[i] >= tree->slots) {
            PyErr_Format(PyExc_IndexError, "slots[%zd] is %lld, but there are %lld slots", (Py_ssize_t)i,
                         (long long)slots[i], (long long)tree->slots);
            return -1;
        }
    return 0;
}

/* Raise a ValueError about a number. PyErr_Format has no floating-point conversions. */
static void raise_number(const char *name, npy_intp at, double value, const char *rule) {
    PyObject *const number = PyFloat_FromDouble(value);
    if (number) PyErr_Format(PyExc_ValueError, "%s[%zd] is %R, but must be %s", name, (Py_ssize_t)at, number, rule);
    Py_XDECREF(number);
}

/* ---- methods ------------------------------------------------------------------------- */

static PyObject *sum_tree_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"slots", "highest", NULL};
    long long slots;
    double highest = 0;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "L|d:SumTree", names, &slots, &highest)) return NULL;
    if (slots < 1 || slots > INT64_C(1) << 48)
        return PyErr_Format(PyExc_ValueError, "slots is %lld, but must be from 1 to 2^48", slots);
    SumTree *const tree = object_new(type);
    if (!tree) return NULL;
    tree->slots = slots;
    tree->leaves = 1;
    while (tree->leaves < slots) tree->leaves *= 2;
    tree->highest = highest;
    tree->nodes = calloc((size_t)tree->leaves, 2 * sizeof *tree->nodes);
    if (!tree->nodes) {
        Py_DECREF((PyObject *)tree);
        return PyErr_NoMemory();
    }
    return (PyObject *)tree;
}

static void sum_tree_dealloc(PyObject *self) {
    free(((SumTree *)self)->nodes);
    object_free(self);
}

static PyObject *sum_tree_put(PyObject *self, PyObject *arguments) {
    SumTree *const tree = (SumTree *)self;
    PyObject *slots_given, *values_given;
    if (!PyArg_ParseTuple(arguments, "OO:put", &slots_given, &values_given)) return NULL;
    PyArrayObject *const slots = as_vector(slots_given, NPY_INT64, "slots", -1);
    if (!slots) return NULL;
    const npy_intp count = PyArray_SIZE(slots);
    const int64_t *const numbers = PyArray_DATA(slots);
    const int is_scalar = PyFloat_Check(values_given);
    PyArrayObject *values = NULL;
    if (!is_scalar && !(values = as_vector(values_given, NPY_DOUBLE, "values", count))) goto failed;
    if (require_slots(tree, numbers, count) < 0) goto failed;
    const double scalar = is_scalar ? PyFloat_AsDouble(values_given) : 0;
    const double *const given = is_scalar ? &scalar : PyArray_DATA(values);
    for (npy_intp i = 0; i < (is_scalar ? 1 : count); i++)
        if (!(given[i] >= 0 && given[i] < INFINITY)) {
            raise_number("values", i, given[i], "finite and at least 0");
            goto failed;
        }
    for (npy_intp i = 0; i < count; i++) tree->nodes[tree->leaves + numbers[i]] = given[is_scalar ? 0 : i];
    if (count > tree->leaves / REBUILD_SHARE) sum_from(tree, tree->leaves - 1);
    else sum_above(tree, numbers, count);
    Py_DECREF((PyObject *)slots);
    Py_XDECREF((PyObject *)values);
    Py_RETURN_NONE;
failed:
    Py_DECREF((PyObject *)slots);
    Py_XDECREF((PyObject *)values);
    return NULL;
}

/* -1 with an exception set unless all ids and values can be set. */
static int require_update(const int64_t *ids, const double *values, npy_intp count, int64_t next_id, double max_value) {
    for (npy_intp i = 0; i < count; i++) {
        if (ids[i] >= next_id) {
            PyErr_Format(PyExc_IndexError, "ids[%zd] is %lld, but must be below %lld", (Py_ssize_t)i, (long long)ids[i],
                         (long long)next_id);
            return -1;
        }
        if (!(values[i] > 0 && values[i] <= max_value)) {
            raise_number("values", i, values[i], "above 0 and at most max_value");
            return -1;
        }
    }
    return 0;
}

static PyObject *sum_tree_update(PyObject *self, PyObject *arguments) {
    SumTree *const tree = (SumTree *)self;
    PyObject *ids_given, *values_given;
    long long first_id, next_id;
    double max_value;
    if (!PyArg_ParseTuple(arguments, "OOLLd:update", &ids_given, &values_given, &first_id, &next_id, &max_value))
        return NULL;
    if (first_id < 0) return PyErr_Format(PyExc_ValueError, "first_id is %lld, but must be at least 0", first_id);
    PyArrayObject *const ids = as_vector(ids_given, NPY_INT64, "ids", -1);
    if (!ids) return NULL;
    const npy_intp count = PyArray_SIZE(ids);
    PyArrayObject *const values = as_vector(values_given, NPY_DOUBLE, "values", count);
    if (!values || require_update(PyArray_DATA(ids), PyArray_DATA(values), count, next_id, max_value) < 0) {
        Py_DECREF((PyObject *)ids);
        Py_XDECREF((PyObject *)values);
        return NULL;
    }
    update_ids(tree, PyArray_DATA(ids), PyArray_DATA(values), count, first_id);
    Py_DECREF((PyObject *)ids);
    Py_DECREF((PyObject *)values);
    Py_RETURN_NONE;
}

static PyObject *sum_tree_find(PyObject *self, PyObject *points_given) {
    const SumTree *const tree = (SumTree *)self;
    PyArrayObject *const points = as_vector(points_given, NPY_DOUBLE, "points", -1);
    if (!points) return NULL;
    npy_intp count = PyArray_SIZE(points);
    PyObject *const slots = PyArray_SimpleNew(1, &count, NPY_INT64);
    PyObject *const shares = PyArray_SimpleNew(1, &count, NPY_FLOAT32);
    if (!slots || !shares) {
        Py_DECREF((PyObject *)points);
        Py_XDECREF(slots);
        Py_XDECREF(shares);
        return NULL;
    }
    int64_t *const numbers = PyArray_DATA((PyArrayObject *)slots);
    float *const share = PyArray_DATA((PyArrayObject *)shares);
    const double *const values = tree->nodes + tree->leaves;
    double lowest = INFINITY;
    for (npy_intp i = 0; i < count; i += WALK_COUNT)
        find_slots(tree, (const double *)PyArray_DATA(points) + i, count - i < WALK_COUNT ? count - i : WALK_COUNT,
                   numbers + i);
    for (npy_intp i = 0; i < count; i++) lowest = values[numbers[i]] < lowest ? values[numbers[i]] : lowest;
    for (npy_intp i = 0; i < count; i++) share[i] = (float)(lowest / values[numbers[i]]);
    Py_DECREF((PyObject *)points);
    return Py_BuildValue("(NN)", slots, shares);
}

static PyObject *sum_tree_values(PyObject *self, PyObject *slots_given) {
    const SumTree *const tree = (SumTree *)self;
    PyArrayObject *const slots = as_vector(slots_given, NPY_INT64, "slots", -1);
    if (!slots) return NULL;
    npy_intp count = PyArray_SIZE(slots);
    const int64_t *const numbers = PyArray_DATA(slots);
    PyObject *out = NULL;
    if (require_slots(tree, numbers, count) == 0) out = PyArray_SimpleNew(1, &count, NPY_DOUBLE);
    if (out) {
        double *const to = PyArray_DATA((PyArrayObject *)out);
        for (npy_intp i = 0; i < count; i++) to[i] = tree->nodes[tree->leaves + numbers[i]];
    }
    Py_DECREF((PyObject *)slots);
    return out;
}

static PyObject *sum_tree_copy_to(PyObject *self, PyObject *object) {
    const SumTree *const tree = (SumTree *)self;
    PyArrayObject *const out = (PyArrayObject *)object;
    if (!PyArray_Check(object) || PyArray_TYPE(out) != NPY_DOUBLE || PyArray_NDIM(out) != 1 || !PyArray_ISCARRAY(out))
        return PyErr_Format(PyExc_TypeError, "out must be a contiguous and writable one-dimensional float64 array");
    if (PyArray_SIZE(out) > tree->slots)
        return PyErr_Format(PyExc_ValueError, "out has %zd entries, but there are %lld slots",
                            (Py_ssize_t)PyArray_SIZE(out), (long long)tree->slots);
    memcpy(PyArray_DATA(out), tree->nodes + tree->leaves, (size_t)PyArray_SIZE(out) * sizeof *tree->nodes);
    Py_RETURN_NONE;
}

static PyObject *sum_tree_raise_highest(PyObject *self, PyObject *value_given) {
    SumTree *const tree = (SumTree *)self;
    const double value = PyFloat_AsDouble(value_given);
    if (value == -1 && PyErr_Occurred()) return NULL;
    if (value > tree->highest) tree->highest = value;
    Py_RETURN_NONE;
}

/* Return the arguments of SumTree(...), and the numbers in the slots for `__setstate__`. */
static PyObject *sum_tree_reduce(PyObject *self, PyObject *Py_UNUSED(none)) {
    const SumTree *const tree = (SumTree *)self;
    npy_intp count = (npy_intp)tree->slots;
    PyObject *const values = PyArray_SimpleNew(1, &count, NPY_DOUBLE);
    if (!values) return NULL;
    memcpy(PyArray_DATA((PyArrayObject *)values), tree->nodes + tree->leaves, (size_t)count * sizeof *tree->nodes);
    return Py_BuildValue("O(Ld)N", Py_TYPE(self), (long long)tree->slots, tree->highest, values);
}

static PyObject *sum_tree_setstate(PyObject *self, PyObject *state) {
    SumTree *const tree = (SumTree *)self;
    PyArrayObject *const values = as_vector(state, NPY_DOUBLE, "state", (npy_intp)tree->slots);
    if (!values) return NULL;
    memcpy(tree->nodes + tree->leaves, PyArray_DATA(values), (size_t)tree->slots * sizeof *tree->nodes);
    sum_from(tree, tree->leaves - 1);
    Py_DECREF((PyObject *)values);
    Py_RETURN_NONE;
}

static PyObject *sum_tree_total(PyObject *self, void *Py_UNUSED(closure)) {
    return PyFloat_FromDouble(((SumTree *)self)->nodes[1]);
}

static PyObject *sum_tree_highest(PyObject *self, void *Py_UNUSED(closure)) {
    return PyFloat_FromDouble(((SumTree *)self)->highest);
}

static PyObject *sum_tree_slot_count(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromLongLong(((SumTree *)self)->slots);
}

static PyMethodDef sum_tree_methods[] = {
    {"put", sum_tree_put, METH_VARARGS, "put(slots, values, /)\n--\n\nSet the numbers in some slots."},
    {"update", sum_tree_update, METH_VARARGS,
     "update(ids, values, first_id, next_id, max_value, /)\n--\n\nSet the numbers of ids, and raise `highest`."},
    {"find", sum_tree_find, METH_O, "find(points, /)\n--\n\nReturn the slots that points of [0, 1) fall on."},
    {"values", sum_tree_values, METH_O, "values(slots, /)\n--\n\nReturn the numbers in some slots."},
    {"copy_to", sum_tree_copy_to, METH_O, "copy_to(out, /)\n--\n\nCopy the numbers of the first slots."},
    {"raise_highest", sum_tree_raise_highest, METH_O,
     "raise_highest(value, /)\n--\n\nSet `highest` to `value` if that is larger."},
    {"__reduce__", sum_tree_reduce, METH_NOARGS, NULL},
    {"__setstate__", sum_tree_setstate, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef sum_tree_properties[] = {
    {"total", sum_tree_total, NULL, "The sum of all slots.", NULL},
    {"highest", sum_tree_highest, NULL, "The largest number that `update` or `raise_highest` was given.", NULL},
    {"slots", sum_tree_slot_count, NULL, "The number of slots.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot sum_tree_slots[] = {
    {Py_tp_doc, "SumTree(slots, highest=0.0)\n--\n\nNumbers of at least 0 in slots, and their sums."},
    {Py_tp_new, (void *)sum_tree_new},
    {Py_tp_dealloc, (void *)sum_tree_dealloc},
    {Py_tp_methods, sum_tree_methods},
    {Py_tp_getset, sum_tree_properties},
    {0, NULL},
};

static PyType_Spec sum_tree_spec = {
    "holdall._native.SumTree", sizeof(SumTree), 0, Py_TPFLAGS_DEFAULT, sum_tree_slots,
};

int add_sum_tree(PyObject *module) {
    PyTypeObject *const type = type_add(module, &sum_tree_spec, "SumTree");
    Py_XDECREF((PyObject *)type);
    return type ? 0 : -1;
}
