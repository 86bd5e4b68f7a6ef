/* The Python type ObservationLog: the observations of one field of a rollout. Observations that overlap share memory.
 *
 * Every lane has a log of slices, one after another. An observation is `cut.count` consecutive slices of its lane's
 * log, and its cursor is the number of the first one. The observation of the next tick
 *
 *   - has the same cursor if it is equal,
 *   - appends `cut.shift` slices if it is shifted by as many,
 *   - appends all its slices otherwise.
 *
 * The memory for the case that nothing overlaps is reserved once. The system provides pages as they are written to, so
 * a log takes as much RAM as the longest rollout so far needed. */
#include "engine.h"
#include "module.h"
#include "strided.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    PyObject_HEAD
    window cut;
    Py_ssize_t slice_bytes;
    Py_ssize_t row_bytes;
    Py_ssize_t lanes;
    Py_ssize_t capacity; /* ticks that fit */
    Py_ssize_t ticks;    /* ticks that were written */
    uint8_t *slices;     /* the logs of all lanes, `capacity * row_bytes` bytes each */
    uint32_t *cursors;   /* of observation (tick, lane) at tick * lanes + lane */
    uint8_t *tick_copy;  /* room for one tick in C order */
    uint8_t *row_copy;   /* room for the slices of one observation, one after another */
} ObservationLog;

static inline uint8_t *lane_slices(const ObservationLog *log, Py_ssize_t lane) {
    return log->slices + lane * log->capacity * log->row_bytes;
}

static inline size_t slices_bytes(const ObservationLog *log) {
    return (size_t)log->lanes * (size_t)log->capacity * (size_t)log->row_bytes;
}

static inline size_t cursors_bytes(const ObservationLog *log) {
    return (size_t)log->lanes * (size_t)log->capacity * sizeof *log->cursors;
}

/* ---- writing ----------------------------------------------------------------------------- */

/* Copy the slices of an observation to `to`, one after another. Called with constant `run_bytes` where that is small. */
static inline void collect_slices(const window *cut, const uint8_t *row, Py_ssize_t run_bytes, uint8_t *to) {
    for (Py_ssize_t s = 0; s < cut->count; s++)
        for (Py_ssize_t o = 0; o < cut->outer; o++, to += run_bytes)
            memcpy(to, row + (o * cut->count + s) * run_bytes, (size_t)run_bytes);
}

/* Return the slices of an observation one after another: `row` itself if it has them in this order, else `row_copy`. */
static const uint8_t *separate_slices(const ObservationLog *log, const uint8_t *row) {
    const window *const cut = &log->cut;
    if (cut->outer == 1) return row;
    if (cut->run_bytes == 1) part_channels(log->row_copy, row, cut->outer, cut->count);
    else if (cut->run_bytes == 3) collect_slices(cut, row, 3, log->row_copy);
    else if (cut->run_bytes == 4) collect_slices(cut, row, 4, log->row_copy);
    else collect_slices(cut, row, cut->run_bytes, log->row_copy);
    return log->row_copy;
}

/* Write the observation of one lane. `before` is the cursor of the lane's previous observation, or NULL. Return the
 * cursor. */
static uint32_t write_row(const ObservationLog *log, Py_ssize_t lane, const uint32_t *before, const uint8_t *row) {
    const window *const cut = &log->cut;
    const uint8_t *const slices = separate_slices(log, row);
    uint8_t *const lane_log = lane_slices(log, lane);
    if (!before) {
        memcpy(lane_log, slices, (size_t)log->row_bytes);
        return 0;
    }
    const uint8_t *const last = lane_log + *before * log->slice_bytes;
    const Py_ssize_t new_bytes = cut->shift * log->slice_bytes;
    const Py_ssize_t shared_bytes = log->row_bytes - new_bytes;
    uint8_t *const end = lane_log + *before * log->slice_bytes + log->row_bytes;
    if (memcmp(last, slices, (size_t)log->row_bytes) == 0) return *before;
    if (shared_bytes > 0 && memcmp(last + new_bytes, slices, (size_t)shared_bytes) == 0) {
        memcpy(end, slices + shared_bytes, (size_t)new_bytes);
        return *before + (uint32_t)cut->shift;
    }
    memcpy(end, slices, (size_t)log->row_bytes);
    return *before + (uint32_t)cut->count;
}

/* Return the observations of a tick in C order, in `tick_copy` if the array has another order. NULL with an exception
 * set if the array does not fit. */
static const uint8_t *find_tick(const ObservationLog *log, PyObject *object) {
    PyArrayObject *const array = (PyArrayObject *)object;
    if (!PyArray_Check(object) || PyArray_NDIM(array) < 1 || PyArray_NDIM(array) > MAX_NDIM + 1 ||
        PyArray_DIM(array, 0) != log->lanes || PyArray_NBYTES(array) != log->lanes * log->row_bytes) {
        PyErr_Format(PyExc_ValueError, "obs must be an array of %zd rows of %zd bytes", log->lanes, log->row_bytes);
        return NULL;
    }
    if (PyArray_IS_C_CONTIGUOUS(array)) return PyArray_DATA(array);
    strided_copy(log->tick_copy, PyArray_DATA(array), PyArray_NDIM(array), PyArray_DIMS(array), PyArray_STRIDES(array),
                 PyArray_ITEMSIZE(array));
    return log->tick_copy;
}

static PyObject *log_write(PyObject *self, PyObject *arguments) {
    ObservationLog *const log = (ObservationLog *)self;
    Py_ssize_t tick;
    PyObject *obs;
    if (!PyArg_ParseTuple(arguments, "nO:write", &tick, &obs)) return NULL;
    if (tick < 0 || tick > log->ticks || tick >= log->capacity)
        return PyErr_Format(PyExc_IndexError, "tick is %zd, but %zd of %zd ticks were written", tick, log->ticks,
                            log->capacity);
    const uint8_t *const rows = find_tick(log, obs);
    if (!rows) return NULL;
    uint32_t *const cursors = log->cursors + tick * log->lanes;
    for (Py_ssize_t lane = 0; lane < log->lanes; lane++) {
        const uint32_t *const before = tick > 0 ? cursors + lane - log->lanes : NULL;
        cursors[lane] = write_row(log, lane, before, rows + lane * log->row_bytes);
    }
    log->ticks = tick + 1;
    Py_RETURN_NONE;
}

/* ---- reading ----------------------------------------------------------------------------- */

/* The slices of the observation `place`, which is tick * lanes + lane. */
static inline const uint8_t *find_slices(const ObservationLog *log, int64_t place) {
    return lane_slices(log, (Py_ssize_t)(place % log->lanes)) + log->cursors[place] * log->slice_bytes;
}

/* Make pixels of channels that are stored one after another. Called with constant `count`, so that the compiler can
 * unroll the inner loop. */
static inline void interleave_bytes(const uint8_t *slices, Py_ssize_t outer, Py_ssize_t count, uint8_t *out) {
    for (Py_ssize_t o = 0; o < outer; o++)
        for (Py_ssize_t s = 0; s < count; s++) out[o * count + s] = slices[s * outer + o];
}

/* Copy each slice to its places in an observation. Called with constant `run_bytes` where that is small. */
static inline void place_slices(const window *cut, const uint8_t *slices, Py_ssize_t run_bytes, uint8_t *out) {
    for (Py_ssize_t s = 0; s < cut->count; s++)
        for (Py_ssize_t o = 0; o < cut->outer; o++, slices += run_bytes)
            memcpy(out + (o * cut->count + s) * run_bytes, slices, (size_t)run_bytes);
}

/* Copy an observation whose slices are stored one after another. */
static void join_slices(const ObservationLog *log, const uint8_t *slices, uint8_t *out) {
    const window *const cut = &log->cut;
    if (cut->outer == 1) memcpy(out, slices, (size_t)log->row_bytes);
    else if (cut->run_bytes == 1 && cut->count == 2) interleave_bytes(slices, cut->outer, 2, out);
    else if (cut->run_bytes == 1 && cut->count == 3) interleave_bytes(slices, cut->outer, 3, out);
    else if (cut->run_bytes == 1 && cut->count == 4) interleave_bytes(slices, cut->outer, 4, out);
    else if (cut->run_bytes == 1) place_slices(cut, slices, 1, out);
    else if (cut->run_bytes == 3) place_slices(cut, slices, 3, out);
    else if (cut->run_bytes == 4) place_slices(cut, slices, 4, out);
    else place_slices(cut, slices, cut->run_bytes, out);
}

static PyObject *log_gather(PyObject *self, PyObject *arguments) {
    const ObservationLog *const log = (ObservationLog *)self;
    PyArrayObject *places, *out;
    if (!PyArg_ParseTuple(arguments, "O!O!:gather", &PyArray_Type, &places, &PyArray_Type, &out)) return NULL;
    if (PyArray_TYPE(places) != NPY_INT64 || PyArray_NDIM(places) != 1 || !PyArray_ISCARRAY_RO(places))
        return PyErr_Format(PyExc_TypeError, "places must be a contiguous one-dimensional array of int64");
    const Py_ssize_t count = PyArray_SIZE(places);
    if (PyArray_NBYTES(out) != count * log->row_bytes || !PyArray_IS_C_CONTIGUOUS(out) || !PyArray_ISWRITEABLE(out))
        return PyErr_Format(PyExc_ValueError, "out must be a contiguous and writable array of %zd rows of %zd bytes",
                            count, log->row_bytes);
    /* A copy, because other threads may write to the array without the GIL after its numbers were checked. */
    int64_t *const numbers = malloc((size_t)count * sizeof *numbers + 1);
    if (!numbers) return PyErr_NoMemory();
    memcpy(numbers, PyArray_DATA(places), (size_t)count * sizeof *numbers);
    for (Py_ssize_t i = 0; i < count; i++)
        if (numbers[i] >= log->ticks * log->lanes) {
            PyErr_Format(PyExc_IndexError, "places[%zd] is %lld, but %zd ticks of %zd lanes were written", i,
                         (long long)numbers[i], log->ticks, log->lanes);
            free(numbers);
            return NULL;
        }
    uint8_t *to = PyArray_DATA(out);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++, to += log->row_bytes) {
        if (numbers[i] < 0) memset(to, 0, (size_t)log->row_bytes);
        else join_slices(log, find_slices(log, numbers[i]), to);
    }
    Py_END_ALLOW_THREADS
    free(numbers);
    Py_RETURN_NONE;
}

static PyObject *log_clear(PyObject *self, PyObject *Py_UNUSED(none)) {
    ((ObservationLog *)self)->ticks = 0;
    Py_RETURN_NONE;
}

/* ---- construction -------------------------------------------------------------------------- */

static PyObject *log_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"layout", "ticks", "lanes", "row_bytes", NULL};
    PyObject *layout;
    Py_ssize_t capacity, lanes, row_bytes;
    int kind;
    window cut;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "Onnn:ObservationLog", names, &layout, &capacity, &lanes,
                                     &row_bytes))
        return NULL;
    if (layout_parse(layout, row_bytes, &kind, &cut) < 0) return NULL;
    if (kind != PART_SLICED) return PyErr_Format(PyExc_ValueError, "layout is %R, but must be a sliced one", layout);
    if (capacity < 1 || lanes < 1 || row_bytes < 1 || capacity > UINT32_MAX / cut.count ||
        capacity > PY_SSIZE_T_MAX / 8 / lanes / row_bytes)
        return PyErr_Format(PyExc_ValueError, "%zd ticks of %zd lanes of %zd bytes are too few or too many", capacity,
                            lanes, row_bytes);
    ObservationLog *const log = object_new(type);
    if (!log) return NULL;
    log->cut = cut;
    log->slice_bytes = cut.outer * cut.run_bytes;
    log->row_bytes = row_bytes;
    log->lanes = lanes;
    log->capacity = capacity;
    log->slices = area_new(slices_bytes(log));
    log->cursors = area_new(cursors_bytes(log));
    log->tick_copy = area_new((size_t)(lanes * row_bytes));
    log->row_copy = area_new((size_t)row_bytes);
    if (!log->slices || !log->cursors || !log->tick_copy || !log->row_copy) {
        Py_DECREF((PyObject *)log);
        return PyErr_NoMemory();
    }
    return (PyObject *)log;
}

static void log_dealloc(PyObject *self) {
    ObservationLog *const log = (ObservationLog *)self;
    area_free(log->slices, slices_bytes(log));
    area_free(log->cursors, cursors_bytes(log));
    area_free(log->tick_copy, (size_t)(log->lanes * log->row_bytes));
    area_free(log->row_copy, (size_t)log->row_bytes);
    object_free(self);
}

static PyObject *log_ticks(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(((ObservationLog *)self)->ticks);
}

static PyObject *log_slice_bytes(PyObject *self, void *Py_UNUSED(closure)) {
    const ObservationLog *const log = (ObservationLog *)self;
    Py_ssize_t slices = 0;
    for (Py_ssize_t lane = 0; log->ticks > 0 && lane < log->lanes; lane++)
        slices += log->cursors[(log->ticks - 1) * log->lanes + lane] + log->cut.count;
    return PyLong_FromSsize_t(slices * log->slice_bytes);
}

static PyObject *log_cursor_bytes(PyObject *self, void *Py_UNUSED(closure)) {
    const ObservationLog *const log = (ObservationLog *)self;
    return PyLong_FromSsize_t(log->ticks * log->lanes * (Py_ssize_t)sizeof *log->cursors);
}

static PyObject *log_broken(PyObject *self, void *Py_UNUSED(closure)) {
    const ObservationLog *const log = (ObservationLog *)self;
    Py_ssize_t broken = 0;
    for (Py_ssize_t i = log->lanes; i < log->ticks * log->lanes; i++)
        broken += log->cursors[i] - log->cursors[i - log->lanes] == log->cut.count;
    return PyLong_FromSsize_t(broken);
}

static PyMethodDef log_methods[] = {
    {"write", log_write, METH_VARARGS,
     "write(tick, obs, /)\n--\n\nWrite the observations of one tick, and forget later ticks."},
    {"gather", log_gather, METH_VARARGS, "gather(places, out, /)\n--\n\nCopy observations to `out`."},
    {"clear", log_clear, METH_NOARGS, "clear()\n--\n\nForget all ticks, and keep the memory."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef log_properties[] = {
    {"ticks", log_ticks, NULL, "Ticks that were written.", NULL},
    {"slice_bytes", log_slice_bytes, NULL, "Bytes of the slices of all lanes.", NULL},
    {"cursor_bytes", log_cursor_bytes, NULL, "Bytes of the cursors.", NULL},
    {"broken", log_broken, NULL, "Observations that do not overlap the one before.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot log_slots[] = {
    {Py_tp_doc, "ObservationLog(layout, ticks, lanes, row_bytes)\n--\n\n"
                "Observations of one field of a rollout. Overlapping ones share memory."},
    {Py_tp_new, (void *)log_new},
    {Py_tp_dealloc, (void *)log_dealloc},
    {Py_tp_methods, log_methods},
    {Py_tp_getset, log_properties},
    {0, NULL},
};

static PyType_Spec log_spec = {
    "holdall._native.ObservationLog", sizeof(ObservationLog), 0, Py_TPFLAGS_DEFAULT, log_slots,
};

int add_observation_log(PyObject *module) {
    PyTypeObject *const type = type_add(module, &log_spec, "ObservationLog");
    Py_XDECREF((PyObject *)type);
    return type ? 0 : -1;
}
