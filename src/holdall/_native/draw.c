/* The function `draw_slots`: ids in the order in which Stable-Baselines3 draws them. */
#include "python_api.h"
#include "module.h"

#include <numpy/random/bitgen.h>

/* Draw a number from 0 to `max`, which is above 0, in the way of NumPy's RandomState.randint, whose sequences never change:
 * draw the bits of `mask` until they are a number of at most `max`. */
static uint64_t draw_at_most(bitgen_t *generator, uint64_t max, uint64_t mask) {
    uint64_t drawn;
    do {
        drawn = max > UINT32_MAX ? generator->next_uint64(generator->state) : generator->next_uint32(generator->state);
        drawn &= mask;
    } while (drawn > max);
    return drawn;
}

/* Draw `count` numbers below `end`. Nothing is drawn if `end` is 1. */
static void draw_below(bitgen_t *generator, uint64_t end, npy_intp count, int64_t *out) {
    const uint64_t max = end - 1;
    uint64_t mask = max;
    for (int shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
    for (npy_intp i = 0; i < count; i++) out[i] = max > 0 ? (int64_t)draw_at_most(generator, max, mask) : 0;
}

/* Draw slots, then lanes, and write the ids of the transitions that are stored there. */
static void draw_ids(bitgen_t *generator, int64_t filled, int64_t slots, int64_t newest, int64_t lanes, npy_intp count,
                     int64_t *ids, int64_t *lane_of) {
    const int64_t newest_slot = newest % slots;
    const int64_t round_start = newest - newest_slot; /* the tick in slot 0 */
    draw_below(generator, (uint64_t)filled, count, ids);
    draw_below(generator, (uint64_t)lanes, count, lane_of);
    for (npy_intp i = 0; i < count; i++) {
        const int64_t tick = ids[i] + (ids[i] > newest_slot ? round_start - slots : round_start);
        ids[i] = tick * lanes + lane_of[i];
    }
}

/* Names of attributes, made once: looking them up with a C string costs as much as drawing 32 numbers. */
static PyObject *capsule_name, *lock_name, *acquire_name, *release_name;

/* Return the state of a NumPy bit generator, which the generator owns. NULL with an exception set. */
static bitgen_t *find_state(PyObject *generator) {
    PyObject *const capsule = PyObject_GetAttr(generator, capsule_name);
    if (!capsule) return NULL;
    bitgen_t *const state = PyCapsule_GetPointer(capsule, "BitGenerator");
    Py_DECREF(capsule);
    return state;
}

static PyObject *draw_slots(PyObject *Py_UNUSED(module), PyObject *arguments) {
    PyObject *generator;
    long long count, filled, slots, newest, lanes;
    if (!PyArg_ParseTuple(arguments, "OLLLLL:draw_slots", &generator, &count, &filled, &slots, &newest, &lanes))
        return NULL;
    if (count < 0) return PyErr_Format(PyExc_ValueError, "count is %lld, but must be at least 0", count);
    if (filled < 1 || slots < filled)
        return PyErr_Format(PyExc_ValueError, "filled is %lld, but must be 1 to %lld", filled, slots);
    if (newest < 0) return PyErr_Format(PyExc_ValueError, "newest is %lld, but must be at least 0", newest);
    if (lanes < 1) return PyErr_Format(PyExc_ValueError, "lanes is %lld, but must be at least 1", lanes);
    bitgen_t *const state = find_state(generator);
    if (!state) return NULL;
    npy_intp shape[1] = {(npy_intp)count};
    PyObject *const ids = PyArray_SimpleNew(1, shape, NPY_INT64);
    int64_t *const lane_of = PyMem_Malloc((size_t)count * sizeof *lane_of + 1);
    PyObject *const lock = ids && lane_of ? PyObject_GetAttr(generator, lock_name) : NULL;
    PyObject *const acquired = lock ? PyObject_CallMethodObjArgs(lock, acquire_name, NULL) : NULL;
    if (!acquired) {
        if (!lane_of) PyErr_NoMemory();
        PyMem_Free(lane_of);
        Py_XDECREF(ids);
        Py_XDECREF(lock);
        return NULL;
    }
    Py_DECREF(acquired);
    draw_ids(state, filled, slots, newest, lanes, shape[0], PyArray_DATA((PyArrayObject *)ids), lane_of);
    PyObject *const released = PyObject_CallMethodObjArgs(lock, release_name, NULL);
    PyMem_Free(lane_of);
    Py_DECREF(lock);
    if (!released) {
        Py_DECREF(ids);
        return NULL;
    }
    Py_DECREF(released);
    return ids;
}

static PyMethodDef functions[] = {
    {"draw_slots", draw_slots, METH_VARARGS,
     "draw_slots(bit_generator, count, filled, slots, newest, lanes, /)\n--\n\n"
     "Draw ids as Stable-Baselines3 does: randint(0, filled, count), then randint(0, lanes, count)."},
    {NULL, NULL, 0, NULL},
};

int add_drawing(PyObject *module) {
    capsule_name = PyUnicode_InternFromString("capsule");
    lock_name = PyUnicode_InternFromString("lock");
    acquire_name = PyUnicode_InternFromString("acquire");
    release_name = PyUnicode_InternFromString("release");
    if (!capsule_name || !lock_name || !acquire_name || !release_name) return -1;
    return PyModule_AddFunctions(module, functions);
}
