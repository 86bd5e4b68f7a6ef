/* Writer: the owner of everything that `add` changes.
 *
 * Every method checks its arguments and allocates all memory first. From then on it cannot fail, keeps the GIL and runs
 * no Python code, so that a signal handler or another thread sees the change completely or not at all.
 */
#include "engine.h"
#include "module.h"
#include "strided.h"

#include <stdlib.h>
#include <string.h>

enum { WRITTEN = 0, FULL = 1, UNCHECKED = 2 };
enum { GROUP_OBS = 0, GROUP_ACTION = 1, GROUP_EXTRAS = 2, GROUP_COUNT = 3 };
enum {
    FIRST_LOG_ROWS = 64, /* entries per lane in a new log */
    MIN_BLOCK_TICKS = 2, /* ticks that fit into every block, even if none of their slices are equal */
    MIN_ROOM_SHARE = 8,  /* a block is continued if at least one in MIN_ROOM_SHARE of its slices is free */
};

/* One column of the open segment. */
typedef struct {
    int kind; /* the layout of the segment */
    window cut;
    Part *part; /* borrowed from the open segment */

    /* Sliced parts. */
    Py_ssize_t *ends;   /* number of log entries of each lane */
    Py_ssize_t longest; /* the largest of `ends` */
    uint8_t *last;      /* newest next observation of each lane; NULL where slices can be compared in the block */
    uint8_t *slice;     /* room for one slice */

    /* Room for one tick in C order, for arguments that are stored in another order. */
    uint8_t *copy;
    uint8_t *next_copy;
} open_column;

/* Leaves that are passed together, as one argument of `append`. */
typedef struct {
    int first; /* column of the first leaf */
    int count;
    PyObject *keys; /* tuple of the keys of a Dict in leaf order, or NULL */
} group;

typedef struct {
    PyObject_HEAD
    Catalog *catalog; /* all segments that are held; the last one is open */
    open_column *columns;
    group groups[GROUP_COUNT];
    int reward;
    int flags;
    Py_ssize_t lanes;
    Py_ssize_t segment_ticks;
    Py_ssize_t block_bytes;
    int64_t dropped_early; /* transitions that `evict` dropped before the capacity was reached */
} Writer;

static inline Segment *open_segment(const Writer *w) { return w->catalog->segments[w->catalog->segment_count - 1]; }
static inline int column_count(const Writer *w) { return w->catalog->column_count; }
static inline int is_observation(const Writer *w, int i) { return w->catalog->columns[i].role == ROLE_OBSERVATION; }

/* ---- writing a tick ------------------------------------------------------------------ */

/* The rows of one tick. The rows of all lanes are stored one after another, in C order. */
typedef struct {
    const uint8_t *rows[MAX_COLUMNS];
    const uint8_t *next[MAX_COLUMNS]; /* of observation columns */
    const uint8_t *terminated;
    const uint8_t *truncated;
    const uint8_t *valid; /* NULL: all lanes are valid */
} tick;

/* Whether `next_obs` is `obs` without its first `shift` slices, followed by as many others. */
static int overlaps(const window *cut, const uint8_t *obs, const uint8_t *next_obs) {
    const Py_ssize_t stretch = cut->count * cut->run_bytes, skipped = cut->shift * cut->run_bytes;
    for (Py_ssize_t o = 0; o < cut->outer; o++)
        if (memcmp(obs + o * stretch + skipped, next_obs + o * stretch, (size_t)(stretch - skipped)) != 0) return 0;
    return 1;
}

/* Append the last `count` slices of an observation to the log of `lane`. */
static void push_slices(open_column *c, const uint8_t *obs, Py_ssize_t lane, Py_ssize_t count) {
    const window *const cut = &c->cut;
    Part *const part = c->part;
    for (Py_ssize_t s = cut->count - count; s < cut->count; s++) {
        const uint8_t *slice = obs + s * cut->run_bytes;
        if (cut->outer > 1) {
            for (Py_ssize_t o = 0; o < cut->outer; o++)
                memcpy(c->slice + o * cut->run_bytes, obs + (o * cut->count + s) * cut->run_bytes, (size_t)cut->run_bytes);
            slice = c->slice;
        }
        ((uint32_t *)part->log)[c->ends[lane] * part->lanes + lane] = block_intern(part->block, slice, lane);
        c->ends[lane]++;
    }
    if (c->ends[lane] > c->longest) c->longest = c->ends[lane];
}

/* Whether `obs` is the newest observation of `lane`, which its log ends with. */
static int is_newest(const open_column *c, Py_ssize_t lane, const uint8_t *obs) {
    const Part *const part = c->part;
    if (c->ends[lane] == 0) return 0;
    if (c->last) return memcmp(obs, c->last + lane * part->row_bytes, (size_t)part->row_bytes) == 0;
    const uint8_t *const slices = ((const Raw *)part->block->form)->data;
    for (Py_ssize_t s = 0; s < c->cut.count; s++) {
        const Py_ssize_t number = log_entry(part, c->ends[lane] - c->cut.count + s, lane);
        if (memcmp(obs + s * c->cut.run_bytes, slices + number * c->cut.run_bytes, (size_t)c->cut.run_bytes) != 0) return 0;
    }
    return 1;
}

static void write_sliced(open_column *c, Py_ssize_t at, const uint8_t *obs, const uint8_t *next_obs) {
    Part *const part = c->part;
    for (Py_ssize_t lane = 0; lane < part->lanes; lane++) {
        const uint8_t *const now = obs + lane * part->row_bytes, *const next = next_obs + lane * part->row_bytes;
        if (!is_newest(c, lane, now)) push_slices(c, now, lane, c->cut.count);
        uint32_t cursor = (uint32_t)(c->ends[lane] - c->cut.count);
        if (overlaps(&c->cut, now, next)) {
            push_slices(c, next, lane, c->cut.shift);
        } else {
            push_slices(c, next, lane, c->cut.count);
            cursor |= NEXT_FOLLOWS;
            part->broken++;
        }
        part->cursors[at * part->lanes + lane] = cursor;
    }
    if (c->last) memcpy(c->last, next_obs, (size_t)(part->lanes * part->row_bytes));
}

static void write_shared(Part *part, Py_ssize_t at, const uint8_t *obs, const uint8_t *next_obs) {
    const Py_ssize_t row_bytes = part->row_bytes, tick_bytes = part->lanes * row_bytes;
    uint8_t *const rows = part->rows + at * tick_bytes;
    if (at == 0) {
        memcpy(rows, obs, (size_t)tick_bytes);
    } else if (memcmp(rows, obs, (size_t)tick_bytes) != 0) {
        /* `rows` has the next observations of the previous tick. Save those that are about to be overwritten. */
        for (Py_ssize_t lane = 0; lane < part->lanes; lane++) {
            if (memcmp(rows + lane * row_bytes, obs + lane * row_bytes, (size_t)row_bytes) == 0) continue;
            part->exception_rows[part->exception_count] = (uint32_t)((at - 1) * part->lanes + lane);
            memcpy(part->exceptions + part->exception_count * row_bytes, rows + lane * row_bytes, (size_t)row_bytes);
            part->exception_count++;
        }
        memcpy(rows, obs, (size_t)tick_bytes);
    }
    memcpy(rows + tick_bytes, next_obs, (size_t)tick_bytes);
}

static void write_paired(Part *part, Py_ssize_t at, const uint8_t *obs, const uint8_t *next_obs) {
    const Py_ssize_t row_bytes = part->row_bytes;
    uint8_t *to = part->rows + 2 * at * part->lanes * row_bytes;
    for (Py_ssize_t lane = 0; lane < part->lanes; lane++) {
        memcpy(to, obs + lane * row_bytes, (size_t)row_bytes);
        memcpy(to + row_bytes, next_obs + lane * row_bytes, (size_t)row_bytes);
        to += 2 * row_bytes;
    }
}

static void write_flags(const Writer *w, Py_ssize_t at, const tick *t) {
    Segment *const segment = open_segment(w);
    uint8_t *const flags = w->columns[w->flags].part->rows + at * w->lanes;
    for (Py_ssize_t lane = 0; lane < w->lanes; lane++) {
        const int is_invalid = t->valid && !t->valid[lane];
        flags[lane] = (uint8_t)((t->terminated[lane] ? FLAG_TERMINATED : 0) | (t->truncated[lane] ? FLAG_TRUNCATED : 0) |
                                (is_invalid ? FLAG_INVALID : 0));
        segment->invalid_count += is_invalid;
    }
}

/* Write one tick that fits. */
static void write_tick(Writer *w, const tick *t) {
    Segment *const segment = open_segment(w);
    const Py_ssize_t at = segment->ticks;
    for (int i = 0; i < w->flags; i++) {
        open_column *const c = &w->columns[i];
        const Py_ssize_t tick_bytes = w->lanes * c->part->row_bytes;
        if (c->kind == PART_SLICED) write_sliced(c, at, t->rows[i], t->next[i]);
        else if (c->kind == PART_SHARED) write_shared(c->part, at, t->rows[i], t->next[i]);
        else if (c->kind == PART_PAIRED) write_paired(c->part, at, t->rows[i], t->next[i]);
        else memcpy(c->part->rows + at * tick_bytes, t->rows[i], (size_t)tick_bytes);
    }
    write_flags(w, at, t);
    segment->ticks++;
}

/* Make room for two more observations in every lane's log. -1 with an exception set. */
static int grow_log(open_column *c) {
    Part *const part = c->part;
    const Py_ssize_t needed = c->longest + 2 * c->cut.count;
    if (needed <= part->log_rows) return 0;
    Py_ssize_t log_rows = part->log_rows ? 2 * part->log_rows : FIRST_LOG_ROWS;
    while (log_rows < needed) log_rows *= 2;
    const size_t entry = (size_t)part->lanes * sizeof(uint32_t);
    void *const log = area_new((size_t)log_rows * entry);
    if (!log) {
        PyErr_NoMemory();
        return -1;
    }
    if (part->log) memcpy(log, part->log, (size_t)c->longest * entry);
    area_free(part->log, (size_t)part->log_rows * entry);
    part->log = log;
    part->log_rows = log_rows;
    return 0;
}

/* Make room for one exception per lane. -1 with an exception set. */
static int grow_exceptions(Part *part) {
    const Py_ssize_t needed = part->exception_count + part->lanes;
    if (needed <= part->exception_capacity) return 0;
    const Py_ssize_t capacity = needed + part->exception_capacity;
    uint32_t *const rows = realloc(part->exception_rows, (size_t)capacity * sizeof *rows);
    if (rows) part->exception_rows = rows;
    uint8_t *const contents = realloc(part->exceptions, (size_t)(capacity * part->row_bytes) + 1);
    if (contents) part->exceptions = contents;
    if (!rows || !contents) {
        PyErr_NoMemory();
        return -1;
    }
    part->exception_capacity = capacity;
    return 0;
}

/* Make sure that one more tick fits. Return WRITTEN if it does, FULL, or -1 with an exception set. */
static int make_room(Writer *w) {
    const Segment *const segment = open_segment(w);
    if (segment->ticks == w->columns[w->flags].part->capacity) return FULL;
    for (int i = 0; i < w->groups[GROUP_OBS].count; i++) {
        open_column *const c = &w->columns[i];
        if (c->kind == PART_SHARED && grow_exceptions(c->part) < 0) return -1;
        if (c->kind != PART_SLICED) continue;
        if (c->part->block->used + 2 * c->cut.count * w->lanes > c->part->block->capacity) return FULL;
        if (grow_log(c) < 0) return -1;
    }
    return WRITTEN;
}

/* ---- arguments of append --------------------------------------------------------------- */

/* Collect the leaves of an argument. Return 1; 0 if its form is not accepted; -1 with an exception set. New
 * references are stored in `leaves`, because looking up a key can run code that drops the caller's. */
static int collect_leaves(const group *g, PyObject *value, PyObject **leaves) {
    if (g->count == 1 && !g->keys && !PyTuple_Check(value)) {
        leaves[0] = Py_NewRef(value);
        return 1;
    }
    if (PyTuple_CheckExact(value)) {
        if (PyTuple_Size(value) != g->count) return 0;
        for (int i = 0; i < g->count; i++) leaves[i] = Py_NewRef(PyTuple_GetItem(value, i));
        return 1;
    }
    if (!g->keys || !PyDict_Check(value) || PyDict_Size(value) != g->count) return 0;
    for (int i = 0; i < g->count; i++) {
        PyObject *const leaf = PyDict_GetItemWithError(value, PyTuple_GetItem(g->keys, i));
        if (!leaf) return PyErr_Occurred() ? -1 : 0;
        leaves[i] = Py_NewRef(leaf);
    }
    return 1;
}

/* Whether `array` has the dtype of the column, and its shape after `leading` axes of the lengths `lengths`. */
static int fits_column(const column *c, PyArrayObject *array, int leading, const Py_ssize_t *lengths) {
    if (PyArray_TYPE(array) != c->type_number || !PyArray_ISNOTSWAPPED(array)) return 0;
    if (PyArray_NDIM(array) != leading + c->ndim) return 0;
    for (int i = 0; i < leading; i++)
        if (PyArray_DIM(array, i) != lengths[i]) return 0;
    for (int i = 0; i < c->ndim; i++)
        if (PyArray_DIM(array, leading + i) != c->shape[i]) return 0;
    return 1;
}

/* Return the rows of a tick in C order, in `copy` if the array is stored in another order. NULL if the array does not
 * fit the column. The lane axis may be missing if there is one lane. */
static const uint8_t *find_rows(const Writer *w, int i, PyObject *value, uint8_t **copy) {
    const column *const c = &w->catalog->columns[i];
    if (!PyArray_CheckExact(value)) return NULL;
    PyArrayObject *const array = (PyArrayObject *)value;
    if (!fits_column(c, array, 1, &w->lanes) && !(w->lanes == 1 && fits_column(c, array, 0, NULL))) return NULL;
    if (PyArray_IS_C_CONTIGUOUS(array)) return PyArray_DATA(array);
    if (!*copy) *copy = malloc((size_t)(w->lanes * c->row_bytes) + 1);
    if (!*copy) return NULL;
    strided_copy(*copy, PyArray_DATA(array), PyArray_NDIM(array), PyArray_DIMS(array), PyArray_STRIDES(array),
                 PyArray_ITEMSIZE(array));
    return *copy;
}

/* Return the flags of a tick, one byte per lane; NULL if `value` is something else. A single lane may pass a bool. */
static const uint8_t *find_flags(const Writer *w, PyObject *value) {
    static const uint8_t constants[2] = {0, 1};
    if (w->lanes == 1 && value == Py_False) return &constants[0];
    if (w->lanes == 1 && value == Py_True) return &constants[1];
    if (!PyArray_CheckExact(value)) return NULL;
    PyArrayObject *const array = (PyArrayObject *)value;
    if (PyArray_TYPE(array) != NPY_BOOL || PyArray_NDIM(array) != 1 || PyArray_DIM(array, 0) != w->lanes) return NULL;
    return PyArray_IS_C_CONTIGUOUS(array) ? PyArray_DATA(array) : NULL;
}

/* The arguments of `append`, in their order. */
enum { OBS = 0, ACTION, REWARD, NEXT_OBS, TERMINATED, TRUNCATED, EXTRAS, VALID, INFOS, MAX_ARGUMENTS };

/* Lanes whose time limits are collected without allocating memory. */
enum { FEW_LANES = 64 };

/* The flags of a tick whose time limits are in info dicts, as Gymnasium's TimeLimit and Stable-Baselines3 write them. */
typedef struct {
    uint8_t *truncated;  /* one byte per lane; NULL if `append` was given `truncated` */
    uint8_t *terminated; /* done and not truncated; if a step was truncated without being done, also set */
    uint8_t few[2 * FEW_LANES];
} time_limits;

/* Return 1 if an info dict says that a time limit ended the step, else 0; 2 if `info` is not a dict, or its value neither True
 * nor False; -1 with an exception set. */
static int read_truncated(PyObject *info, PyObject *key) {
    if (!PyDict_Check(info)) return 2;
    PyObject *const value = PyDict_GetItemWithError(info, key);
    if (!value) return PyErr_Occurred() ? -1 : 0;
    if (value == Py_False) return 0;
    return value == Py_True ? 1 : 2;
}

/* Collect the flags from `infos`, a list or tuple with one dict per lane, and from `done`. Return 1; 0 if an argument has
 * another form; -1 with an exception set. This can run Python code. */
static int collect_time_limits(const Writer *w, PyObject *infos, PyObject *done, time_limits *limits) {
    static PyObject *key;
    if (!key && !(key = PyUnicode_InternFromString("TimeLimit.truncated"))) return -1;
    const int is_list = PyList_CheckExact(infos);
    if (!is_list && !PyTuple_CheckExact(infos)) return 0;
    if ((is_list ? PyList_Size(infos) : PyTuple_Size(infos)) != w->lanes) return 0;
    limits->truncated = w->lanes <= FEW_LANES ? limits->few : malloc(2 * (size_t)w->lanes);
    if (!limits->truncated) {
        PyErr_NoMemory();
        return -1;
    }
    limits->terminated = limits->truncated + w->lanes;
    for (Py_ssize_t lane = 0; lane < w->lanes; lane++) {
        /* Looking up a key can run code that shortens the list. */
        if (is_list && lane >= PyList_Size(infos)) return 0;
        PyObject *const info = Py_NewRef(is_list ? PyList_GetItem(infos, lane) : PyTuple_GetItem(infos, lane));
        const int truncated = read_truncated(info, key);
        Py_DECREF(info);
        if (truncated < 0) return -1;
        if (truncated > 1) return 0;
        limits->truncated[lane] = (uint8_t)truncated;
    }
    const uint8_t *const ended = find_flags(w, done);
    for (Py_ssize_t lane = 0; ended && lane < w->lanes; lane++)
        limits->terminated[lane] = (uint8_t)((ended[lane] != 0) ^ limits->truncated[lane]);
    return ended != NULL;
}

/* Find all rows of a tick. `leaves` has the leaves of obs, action and extras by column, `next_leaves` those of next_obs, and
 * `given` all arguments. `*number` is memory for a reward that is a float. Return 0 if an argument does not fit. */
static int find_tick(Writer *w, PyObject *const *leaves, PyObject *const *next_leaves, PyObject *const *given,
                     const time_limits *limits, double *number, tick *t) {
    for (int i = 0; i < w->flags; i++) {
        if (i == w->reward) continue;
        open_column *const c = &w->columns[i];
        if (!(t->rows[i] = find_rows(w, i, leaves[i], &c->copy))) return 0;
        if (is_observation(w, i) && !(t->next[i] = find_rows(w, i, next_leaves[i], &c->next_copy))) return 0;
    }
    const column *const reward = &w->catalog->columns[w->reward];
    if (w->lanes == 1 && PyFloat_CheckExact(given[REWARD]) && reward->type_number == NPY_DOUBLE && reward->ndim == 0) {
        *number = PyFloat_AsDouble(given[REWARD]);
        t->rows[w->reward] = (const uint8_t *)number;
    } else if (!(t->rows[w->reward] = find_rows(w, w->reward, given[REWARD], &w->columns[w->reward].copy))) {
        return 0;
    }
    t->terminated = limits->truncated ? limits->terminated : find_flags(w, given[TERMINATED]);
    t->truncated = limits->truncated ? limits->truncated : find_flags(w, given[TRUNCATED]);
    t->valid = NULL;
    if (given[VALID] && given[VALID] != Py_None && !(t->valid = find_flags(w, given[VALID]))) return 0;
    return t->terminated && t->truncated;
}

/* append(obs, action, reward, next_obs, terminated, truncated, extras=None, valid=None, infos=None) -> int */
static PyObject *writer_append(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    Writer *const w = (Writer *)self;
    PyObject *leaves[MAX_COLUMNS], *next_leaves[MAX_COLUMNS], *given[MAX_ARGUMENTS] = {NULL};
    if (count < EXTRAS || count > MAX_ARGUMENTS) {
        PyErr_Format(PyExc_TypeError, "append takes 6 to 9 arguments, got %zd", count);
        return NULL;
    }
    memcpy(given, arguments, (size_t)count * sizeof *given);
    memset(leaves, 0, (size_t)column_count(w) * sizeof *leaves);
    memset(next_leaves, 0, (size_t)column_count(w) * sizeof *next_leaves);
    const group *const groups = w->groups;
    int fits = collect_leaves(&groups[GROUP_OBS], given[OBS], leaves);
    if (fits == 1) fits = collect_leaves(&groups[GROUP_OBS], given[NEXT_OBS], next_leaves);
    if (fits == 1) fits = collect_leaves(&groups[GROUP_ACTION], given[ACTION], leaves + groups[GROUP_ACTION].first);
    const int has_extras = given[EXTRAS] && given[EXTRAS] != Py_None;
    if (fits == 1 && groups[GROUP_EXTRAS].count > 0)
        fits = has_extras ? collect_leaves(&groups[GROUP_EXTRAS], given[EXTRAS], leaves + groups[GROUP_EXTRAS].first) : 0;
    else if (fits == 1 && has_extras)
        fits = 0;
    time_limits limits;
    limits.truncated = NULL;
    if (fits == 1 && given[INFOS] && given[INFOS] != Py_None)
        fits = collect_time_limits(w, given[INFOS], given[TERMINATED], &limits);

    /* No Python code runs from here on. */
    tick t;
    double number;
    int outcome = fits;
    if (fits == 1) {
        outcome = find_tick(w, leaves, next_leaves, given, &limits, &number, &t) ? make_room(w) : UNCHECKED;
        if (outcome == WRITTEN) write_tick(w, &t);
    } else if (fits == 0) {
        outcome = UNCHECKED;
    }
    if (limits.truncated != limits.few) free(limits.truncated);
    for (int i = 0; i < column_count(w); i++) {
        Py_XDECREF(leaves[i]);
        Py_XDECREF(next_leaves[i]);
    }
    return outcome < 0 ? NULL : PyLong_FromLong(outcome);
}

/* ---- extend ---------------------------------------------------------------------------- */

/* Return the data of an array in C order with the column's dtype and shape after (steps, lanes). NULL with a ValueError. */
static const uint8_t *find_steps(const Writer *w, const column *c, PyObject *value, Py_ssize_t steps) {
    const Py_ssize_t leading[2] = {steps, w->lanes};
    if (PyArray_CheckExact(value) && fits_column(c, (PyArrayObject *)value, 2, leading) &&
        PyArray_IS_C_CONTIGUOUS((PyArrayObject *)value))
        return PyArray_DATA((PyArrayObject *)value);
    PyErr_SetString(PyExc_ValueError, "extend takes contiguous arrays with the dtypes and shapes of the columns");
    return NULL;
}

/* Find the arrays of a group, a tuple in leaf order. -1 with an exception set. */
static int find_group_steps(const Writer *w, int which, PyObject *value, Py_ssize_t steps, const uint8_t **rows) {
    const group *const g = &w->groups[which];
    if (!PyTuple_CheckExact(value) || PyTuple_Size(value) != g->count) {
        PyErr_Format(PyExc_ValueError, "extend takes tuples with one array per leaf, here %d", g->count);
        return -1;
    }
    for (int i = 0; i < g->count; i++) {
        const column *const c = &w->catalog->columns[g->first + i];
        if (!(rows[g->first + i] = find_steps(w, c, PyTuple_GetItem(value, i), steps))) return -1;
    }
    return 0;
}

/* Advance all rows of a tick by `steps` ticks. */
static void advance_tick(const Writer *w, tick *t, Py_ssize_t steps) {
    for (int i = 0; i < w->flags; i++) {
        const Py_ssize_t bytes = steps * w->lanes * w->catalog->columns[i].row_bytes;
        t->rows[i] += bytes;
        if (is_observation(w, i)) t->next[i] += bytes;
    }
    t->terminated += steps * w->lanes;
    t->truncated += steps * w->lanes;
    if (t->valid) t->valid += steps * w->lanes;
}

/* extend((obs, action, reward, next_obs, terminated, truncated, extras, valid), progress) -> int */
static PyObject *writer_extend(PyObject *self, PyObject *arguments) {
    Writer *const w = (Writer *)self;
    PyObject *given[VALID + 1];
    PyArrayObject *progress;
    if (!PyArg_ParseTuple(arguments, "(OOOOOOOO)O!", &given[0], &given[1], &given[2], &given[3], &given[4], &given[5],
                          &given[6], &given[7], &PyArray_Type, &progress))
        return NULL;
    if (PyArray_TYPE(progress) != NPY_INT64 || PyArray_SIZE(progress) != 1 || !PyArray_ISCARRAY(progress)) {
        PyErr_SetString(PyExc_ValueError, "progress must be a writable array with one int64");
        return NULL;
    }
    if (!PyArray_CheckExact(given[REWARD]) || PyArray_NDIM((PyArrayObject *)given[REWARD]) < 2) {
        PyErr_SetString(PyExc_ValueError, "reward must be an array with a time axis and a lane axis");
        return NULL;
    }
    const Py_ssize_t steps = PyArray_DIM((PyArrayObject *)given[REWARD], 0);
    const column flag = {.type_number = NPY_BOOL, .row_bytes = 1};
    tick t = {0};
    if (find_group_steps(w, GROUP_OBS, given[OBS], steps, t.rows) < 0 ||
        find_group_steps(w, GROUP_OBS, given[NEXT_OBS], steps, t.next) < 0 ||
        find_group_steps(w, GROUP_ACTION, given[ACTION], steps, t.rows) < 0 ||
        (w->groups[GROUP_EXTRAS].count && find_group_steps(w, GROUP_EXTRAS, given[EXTRAS], steps, t.rows) < 0))
        return NULL;
    if (!(t.rows[w->reward] = find_steps(w, &w->catalog->columns[w->reward], given[REWARD], steps)) ||
        !(t.terminated = find_steps(w, &flag, given[TERMINATED], steps)) ||
        !(t.truncated = find_steps(w, &flag, given[TRUNCATED], steps)) ||
        (given[VALID] != Py_None && !(t.valid = find_steps(w, &flag, given[VALID], steps))))
        return NULL;
    int64_t *const next = PyArray_DATA(progress);
    const int64_t first = *next;
    if (first < 0 || first > steps) {
        PyErr_Format(PyExc_ValueError, "progress (%lld) must be from 0 to the number of steps, %zd", (long long)first, steps);
        return NULL;
    }
    advance_tick(w, &t, (Py_ssize_t)first);
    while (*next < steps) {
        const int room = make_room(w);
        if (room < 0) return NULL;
        if (room == FULL) break;
        write_tick(w, &t);
        advance_tick(w, &t, 1);
        *next += 1;
    }
    return PyLong_FromLongLong(*next - first);
}

/* ---- segments -------------------------------------------------------------------------- */

static void free_open_column(open_column *c) {
    free(c->ends);
    free(c->last);
    free(c->slice);
    free(c->copy);
    free(c->next_copy);
    memset(c, 0, sizeof *c);
}

static void free_open_columns(open_column *columns, int count) {
    for (int i = 0; columns && i < count; i++) free_open_column(&columns[i]);
    free(columns);
}

/* Whether the next segment, which begins with `first_tick`, may add slices to a block. A scene that comes back is stored once
 * in a block, so blocks are continued. A block is freed as a whole, so it is used for at most as many ticks as the memory
 * holds. If everything was evicted, the old block can be freed, so a new one is used. */
static int can_continue(const Writer *w, const Block *block, const window *cut, int64_t first_tick) {
    const Py_ssize_t room = block->capacity - block->used;
    return block->slice_bytes == cut->outer * cut->run_bytes && room >= 2 * cut->count * w->lanes &&
           room >= block->capacity / MIN_ROOM_SHARE &&
           first_tick - block->first_tick < w->catalog->capacity_ticks &&
           catalog_first_tick(w->catalog) < catalog_next_tick(w->catalog);
}

/* Return a new reference to the block of the next segment: the block of the segment before if it can be continued, else a new
 * block. NULL with an exception set. */
static Block *next_block(const Writer *w, const open_column *before, const window *cut, int64_t first_tick) {
    Block *const block = before && before->kind == PART_SLICED ? before->part->block : NULL;
    if (block && can_continue(w, block, cut, first_tick)) return (Block *)Py_NewRef((PyObject *)block);
    const Py_ssize_t slice_bytes = cut->outer * cut->run_bytes, tick_slices = 2 * cut->count * w->lanes;
    Py_ssize_t capacity = w->block_bytes / slice_bytes;
    if (capacity < MIN_BLOCK_TICKS * tick_slices) capacity = MIN_BLOCK_TICKS * tick_slices;
    Block *const opened = block_new(slice_bytes, capacity, w->lanes);
    if (!opened) return NULL;
    opened->first_tick = first_tick;
    /* If one block was filled, the next one is likely to be. A page fault for every 4 KiB takes longer than copying 4 KiB. */
    const int is_filled = block && block->used >= block->capacity / 2;
    if (is_filled) area_use_huge_pages(((Raw *)opened->form)->data, (size_t)(slice_bytes * capacity));
    return opened;
}

/* Fill in the open column `to` and its part. -1 with an exception set. */
static int open_one(const Writer *w, int i, int kind, const window *cut, const open_column *before, Segment *segment,
                    open_column *to) {
    const Py_ssize_t row_bytes = w->catalog->columns[i].row_bytes;
    Block *block = NULL;
    to->kind = kind;
    to->cut = *cut;
    if (kind == PART_SLICED) {
        block = next_block(w, before, cut, segment->first_tick);
        if (!block) return -1;
        to->ends = calloc((size_t)w->lanes, sizeof *to->ends);
        to->slice = malloc((size_t)(cut->outer * cut->run_bytes));
        if (cut->outer > 1) to->last = malloc((size_t)(w->lanes * row_bytes));
        if (!to->ends || !to->slice || (cut->outer > 1 && !to->last)) {
            Py_DECREF((PyObject *)block);
            PyErr_NoMemory();
            return -1;
        }
    }
    to->part = part_new(kind, w->lanes, row_bytes, w->segment_ticks, cut, block);
    Py_XDECREF((PyObject *)block);
    segment->parts[i] = to->part;
    return to->part ? 0 : -1;
}

/* Make an open segment and its columns. `layouts` is a sequence with a layout per column, or NULL: those of the open
 * segment. Return the segment, NULL with an exception set. */
static Segment *open_new(const Writer *w, int64_t first_tick, PyObject *layouts, open_column **opened) {
    const int count = column_count(w);
    Segment *const segment = segment_new(first_tick, w->lanes, count);
    open_column *const columns = calloc((size_t)count, sizeof *columns);
    if (!segment || !columns) goto failed;
    for (int i = 0; i < count; i++) {
        int kind = PART_ROWS;
        window cut = {0};
        const open_column *const before = w->columns ? &w->columns[i] : NULL;
        if (is_observation(w, i) && layouts) {
            PyObject *const layout = PySequence_GetItem(layouts, i);
            const int failed = !layout || layout_parse(layout, w->catalog->columns[i].row_bytes, &kind, &cut) < 0;
            Py_XDECREF(layout);
            if (failed) goto failed;
        } else if (is_observation(w, i)) {
            kind = before->kind;
            cut = before->cut;
        }
        if (open_one(w, i, kind, &cut, before, segment, &columns[i]) < 0) goto failed;
    }
    *opened = columns;
    return segment;
failed:
    if (!PyErr_Occurred()) PyErr_NoMemory();
    free_open_columns(columns, count);
    Py_XDECREF((PyObject *)segment);
    return NULL;
}

/* Whether the values of column `i` may be stored in narrow parts: it is an extra of float32. */
static int may_be_narrow(const Writer *w, int i) {
    return i >= w->groups[GROUP_EXTRAS].first && i < w->flags && w->catalog->columns[i].type_number == NPY_FLOAT32;
}

/* Return a closed copy of the open segment that shares its blocks. NULL with an exception set. */
static Segment *close_copy(const Writer *w) {
    const Segment *const open = open_segment(w);
    Segment *const closed = segment_new(open->first_tick, open->lanes, open->part_count);
    if (!closed) return NULL;
    closed->ticks = open->ticks;
    closed->invalid_count = open->invalid_count;
    for (int i = 0; i < open->part_count; i++) {
        closed->parts[i] = may_be_narrow(w, i) ? narrow_close(open->parts[i], open->ticks)
                                               : part_trim(open->parts[i], open->ticks, w->columns[i].longest);
        if (!closed->parts[i]) {
            Py_DECREF((PyObject *)closed);
            return NULL;
        }
    }
    return closed;
}

/* Put a segment into place `i` of a catalog under construction; takes a new reference. */
static void put_segment(Catalog *catalog, Py_ssize_t i, Segment *segment) {
    catalog->segments[i] = (Segment *)Py_NewRef((PyObject *)segment);
    catalog->first_ticks[i] = segment->first_tick;
    if (i < catalog->segment_count - 1 && segment->invalid_count > 0) catalog->has_invalid = 1;
}

/* Publish a catalog, whose reference is taken over. The old one is released last, because that can run any code. */
static void publish(Writer *w, Catalog *catalog) {
    Catalog *const old = w->catalog;
    w->catalog = catalog;
    Py_XDECREF((PyObject *)old);
}

/* Return how many of the oldest segments end before `first_tick`. The open segment is not counted. */
static Py_ssize_t count_before(const Catalog *catalog, int64_t first_tick) {
    Py_ssize_t count = 0;
    while (count < catalog->segment_count - 1 &&
           catalog->segments[count]->first_tick + catalog->segments[count]->ticks <= first_tick)
        count++;
    return count;
}

/* Replace the open segment by `closed`, if not NULL, and a new open segment. References are taken over. Evicted segments
 * are dropped. -1 with an exception set; then nothing was changed, and the references are still the caller's. */
static int publish_open(Writer *w, Segment *closed, Segment *opened, open_column *columns) {
    const Py_ssize_t dropped = count_before(w->catalog, catalog_first_tick(w->catalog));
    const Py_ssize_t kept = w->catalog->segment_count - 1 - dropped;
    Catalog *const catalog = catalog_new(w->catalog, kept + (closed ? 2 : 1));
    if (!catalog) return -1;
    for (Py_ssize_t i = 0; i < kept; i++) put_segment(catalog, i, w->catalog->segments[dropped + i]);
    if (closed) put_segment(catalog, kept, closed);
    put_segment(catalog, catalog->segment_count - 1, opened);
    open_column *const old_columns = w->columns;
    const int count = column_count(w);
    for (int i = 0; i < count; i++) {
        const open_column *const before = &old_columns[i];
        if (before->kind == PART_SLICED && (columns[i].kind != PART_SLICED || columns[i].part->block != before->part->block))
            block_close(before->part->block);
    }
    w->columns = columns;
    publish(w, catalog);
    free_open_columns(old_columns, count);
    Py_XDECREF((PyObject *)closed);
    Py_DECREF((PyObject *)opened);
    return 0;
}

/* roll(layouts=None) -> Segment | None */
static PyObject *writer_roll(PyObject *self, PyObject *arguments) {
    Writer *const w = (Writer *)self;
    PyObject *layouts = Py_None;
    if (!PyArg_ParseTuple(arguments, "|O", &layouts)) return NULL;
    /* Making a tuple of `layouts` can run Python code, which may add ticks. The open segment is looked at after that. */
    PyObject *const given = layouts == Py_None ? NULL : PySequence_Tuple(layouts);
    if (layouts != Py_None && !given) return NULL;
    Catalog *const before = (Catalog *)Py_NewRef((PyObject *)w->catalog);
    const Segment *const open = open_segment(w);
    const Py_ssize_t ticks = open->ticks;
    Segment *closed = NULL, *opened = NULL;
    open_column *columns = NULL;
    const int is_held = ticks > 0 && catalog_first_tick(before) < open->first_tick + ticks;
    if (is_held && !(closed = close_copy(w))) goto failed;
    opened = open_new(w, open->first_tick + ticks, given, &columns);
    if (!opened) goto failed;
    if (w->catalog != before || open->ticks != ticks) {
        PyErr_SetString(PyExc_RuntimeError, "reading the layouts ran code that changed the writer");
        goto failed;
    }
    PyObject *const result = closed ? Py_NewRef((PyObject *)closed) : Py_NewRef(Py_None);
    if (publish_open(w, closed, opened, columns) < 0) {
        Py_DECREF(result);
        goto failed;
    }
    Py_XDECREF(given);
    Py_DECREF((PyObject *)before);
    return result;
failed:
    Py_DECREF((PyObject *)before);
    free_open_columns(columns, column_count(w));
    Py_XDECREF(given);
    Py_XDECREF((PyObject *)closed);
    Py_XDECREF((PyObject *)opened);
    return NULL;
}

/* Count the transitions of held ticks before `end_tick`. Invalid entries are not transitions. */
static int64_t count_transitions(const Catalog *catalog, int64_t end_tick) {
    const int64_t first_tick = catalog_first_tick(catalog);
    int64_t count = (end_tick - first_tick) * catalog->lanes;
    for (Py_ssize_t i = 0; i < catalog->segment_count; i++) {
        const Segment *const segment = catalog->segments[i];
        const int64_t from = first_tick > segment->first_tick ? first_tick - segment->first_tick : 0;
        int64_t end = end_tick - segment->first_tick;
        if (end > segment->ticks) end = segment->ticks;
        if (end > from) count -= segment_count_invalid(segment, (Py_ssize_t)from, (Py_ssize_t)end);
    }
    return count;
}

/* evict(before_tick, is_early=False) */
static PyObject *writer_evict(PyObject *self, PyObject *arguments) {
    Writer *const w = (Writer *)self;
    long long before_tick;
    int is_early = 0;
    if (!PyArg_ParseTuple(arguments, "L|p", &before_tick, &is_early)) return NULL;
    const int64_t next_tick = catalog_next_tick(w->catalog);
    if (before_tick > next_tick) before_tick = next_tick;
    if (before_tick <= catalog_first_tick(w->catalog)) Py_RETURN_NONE;
    const Py_ssize_t dropped = count_before(w->catalog, before_tick);
    Catalog *const catalog = catalog_new(w->catalog, w->catalog->segment_count - dropped);
    if (!catalog) return NULL;
    catalog->floor_tick = before_tick;
    for (Py_ssize_t i = 0; i < catalog->segment_count; i++) put_segment(catalog, i, w->catalog->segments[dropped + i]);
    if (is_early) w->dropped_early += count_transitions(w->catalog, before_tick);
    publish(w, catalog);
    Py_RETURN_NONE;
}

/* Return the place of a closed segment in the catalog, or -1. */
static Py_ssize_t find_place(const Catalog *catalog, const Segment *segment) {
    if (catalog->segment_count < 2) return -1;
    const Py_ssize_t i = catalog_find(catalog, segment->first_tick);
    return i < catalog->segment_count - 1 && catalog->segments[i] == segment ? i : -1;
}

/* Return a copy of a segment whose parts are shared. NULL with an exception set. */
static Segment *segment_copy(const Segment *segment) {
    Segment *const copy = segment_new(segment->first_tick, segment->lanes, segment->part_count);
    if (!copy) return NULL;
    copy->ticks = segment->ticks;
    copy->invalid_count = segment->invalid_count;
    for (int i = 0; i < segment->part_count; i++) copy->parts[i] = (Part *)Py_NewRef((PyObject *)segment->parts[i]);
    return copy;
}

/* Return a copy of the catalog with all its segments. NULL with an exception set. */
static Catalog *catalog_copy(const Catalog *catalog) {
    Catalog *const copy = catalog_new(catalog, catalog->segment_count);
    for (Py_ssize_t i = 0; copy && i < copy->segment_count; i++) put_segment(copy, i, catalog->segments[i]);
    return copy;
}

/* Whether a segment of `ticks` ticks may have a part for column `i`. */
static int part_fits(const Writer *w, int i, const Part *part, Py_ssize_t ticks) {
    const column *const c = &w->catalog->columns[i];
    if (part->capacity != ticks || part->lanes != w->lanes || part->row_bytes != c->row_bytes) return 0;
    if (is_narrow(part->kind)) return may_be_narrow(w, i);
    return (c->role == ROLE_OBSERVATION) == (part->kind != PART_ROWS);
}

/* replace(segment, parts) -> bool */
static PyObject *writer_replace(PyObject *self, PyObject *arguments) {
    Writer *const w = (Writer *)self;
    PyObject *segment, *parts, *key, *value;
    if (!PyArg_ParseTuple(arguments, "O!O!", segment_type, &segment, &PyDict_Type, &parts)) return NULL;
    Segment *const replaced = segment_copy((Segment *)segment);
    if (!replaced) return NULL;
    Py_ssize_t position = 0;
    while (PyDict_Next(parts, &position, &key, &value)) {
        const long i = PyLong_AsLong(key);
        if (i == -1 && PyErr_Occurred()) goto failed;
        if (i < 0 || i >= column_count(w) || replaced->part_count != column_count(w) || Py_TYPE(value) != part_type ||
            !part_fits(w, (int)i, (Part *)value, replaced->ticks)) {
            PyErr_Format(PyExc_ValueError, "a part does not fit column %ld of a segment of %zd ticks", i, replaced->ticks);
            goto failed;
        }
        Py_DECREF((PyObject *)replaced->parts[i]);
        replaced->parts[i] = (Part *)Py_NewRef(value);
    }
    const Py_ssize_t place = find_place(w->catalog, (Segment *)segment);
    if (place >= 0) {
        Catalog *const catalog = catalog_copy(w->catalog);
        if (!catalog) goto failed;
        Segment *const old = catalog->segments[place];
        catalog->segments[place] = (Segment *)Py_NewRef((PyObject *)replaced);
        publish(w, catalog);
        Py_DECREF((PyObject *)old);
    }
    Py_DECREF((PyObject *)replaced);
    return PyBool_FromLong(place >= 0);
failed:
    Py_DECREF((PyObject *)replaced);
    return NULL;
}

/* adopt(segment) -> int */
static PyObject *writer_adopt(PyObject *self, PyObject *arguments) {
    Writer *const w = (Writer *)self;
    PyObject *given;
    if (!PyArg_ParseTuple(arguments, "O!", segment_type, &given)) return NULL;
    const Segment *const segment = (Segment *)given, *const open = open_segment(w);
    if (open->ticks > 0) {
        PyErr_SetString(PyExc_ValueError, "the open segment has ticks; call roll first");
        return NULL;
    }
    int fits = segment->part_count == column_count(w) && segment->lanes == w->lanes && segment->ticks > 0;
    for (int i = 0; fits && i < segment->part_count; i++) fits = part_fits(w, i, segment->parts[i], segment->ticks);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "the segment has other columns or lanes than this writer");
        return NULL;
    }
    Segment *const adopted = segment_copy(segment), *const reopened = segment_copy(open);
    /* Segments that the capacity evicts with this one are dropped at once. */
    const int64_t next_tick = open->first_tick + segment->ticks, first_tick = next_tick - w->catalog->capacity_ticks;
    const Py_ssize_t dropped = count_before(w->catalog, first_tick), kept = w->catalog->segment_count - 1 - dropped;
    Catalog *const catalog = adopted && reopened ? catalog_new(w->catalog, kept + 2) : NULL;
    if (catalog) {
        adopted->first_tick = open->first_tick;
        reopened->first_tick = next_tick;
        for (Py_ssize_t i = 0; i < kept; i++) put_segment(catalog, i, w->catalog->segments[dropped + i]);
        put_segment(catalog, kept, adopted);
        put_segment(catalog, kept + 1, reopened);
        publish(w, catalog);
    }
    PyObject *const result = catalog ? PyLong_FromLongLong(adopted->first_tick) : NULL;
    Py_XDECREF((PyObject *)adopted);
    Py_XDECREF((PyObject *)reopened);
    return result;
}

/* snapshot() -> Catalog */
static PyObject *writer_snapshot(PyObject *self, PyObject *Py_UNUSED(none)) {
    const Writer *const w = (Writer *)self;
    const Py_ssize_t kept = w->catalog->segment_count - 1;
    const int has_open = open_segment(w)->ticks > 0;
    Segment *const closed = has_open ? close_copy(w) : NULL;
    if (has_open && !closed) return NULL;
    Catalog *const catalog = catalog_new(w->catalog, kept + has_open);
    if (catalog) {
        for (Py_ssize_t i = 0; i < kept; i++) {
            Segment *const segment = w->catalog->segments[i];
            for (int k = 0; k < segment->part_count; k++) segment->parts[k]->is_frozen = 1;
            put_segment(catalog, i, segment);
        }
        for (int k = 0; closed && k < closed->part_count; k++) closed->parts[k]->is_frozen = 1;
        if (closed) put_segment(catalog, kept, closed);
        /* Without segments, the floor is the number of the next tick. */
        if (catalog->segment_count == 0) catalog->floor_tick = catalog_next_tick(w->catalog);
    }
    Py_XDECREF((PyObject *)closed);
    return (PyObject *)catalog;
}

/* ---- rewrite --------------------------------------------------------------------------- */

/* Return the place of the first id that is not held, or -1. */
static Py_ssize_t find_missing(const Catalog *catalog, const int64_t *ids, Py_ssize_t count) {
    const int64_t first_id = catalog_first_tick(catalog) * catalog->lanes;
    const int64_t next_id = catalog_next_tick(catalog) * catalog->lanes;
    for (Py_ssize_t i = 0; i < count; i++)
        if (ids[i] < first_id || ids[i] >= next_id) return i;
    return -1;
}

/* Return the kind that a part must have so that it can also store `row`: its own kind, or a wider one. */
static int find_kind(const Part *part, const uint8_t *row) {
    if (!is_narrow(part->kind)) return part->kind;
    const int needed = narrow_find_kind(row, part->row_bytes);
    return needed < part->kind ? needed : part->kind;
}

/* Replace the parts of a column that a snapshot refers to, or that are too narrow for one of `rows`, by copies, in all
 * segments that hold `ids`. -1 with an exception set. `*old` gets the catalog that was replaced, or NULL. Releasing it can
 * run any code, so the caller does that last. `*has_grown` is set if a part was widened. */
static int thaw_column(Writer *w, int column, const int64_t *ids, Py_ssize_t count, const uint8_t *rows, Catalog **old,
                       int *has_grown) {
    Catalog *catalog = NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        const Py_ssize_t place = catalog_find(w->catalog, ids[i] / w->lanes);
        const Segment *const segment = (catalog ? catalog : w->catalog)->segments[place];
        const Part *const before = segment->parts[column];
        const int kind = find_kind(before, rows + i * before->row_bytes);
        if (!before->is_frozen && kind == before->kind) continue;
        if (!catalog && !(catalog = catalog_copy(w->catalog))) return -1;
        Segment *const copy = segment_copy(segment);
        Part *part = NULL;
        if (copy) part = kind == before->kind ? part_trim(before, segment->ticks, 0) : narrow_widen(before, kind);
        if (!part) {
            Py_XDECREF((PyObject *)copy);
            Py_DECREF((PyObject *)catalog);
            return -1;
        }
        if (kind != before->kind) *has_grown = 1;
        Py_DECREF((PyObject *)copy->parts[column]); /* the old segment still has it */
        copy->parts[column] = part;
        Py_DECREF((PyObject *)catalog->segments[place]); /* the old catalog, or its copy, still has it */
        catalog->segments[place] = copy;
    }
    *old = catalog ? w->catalog : NULL;
    if (catalog) w->catalog = catalog;
    return 0;
}

/* Check that `rows` has one row of column `number` per id. -1 with an exception set. */
static int check_rewrite(const Writer *w, PyObject *number_object, PyObject *rows, Py_ssize_t count) {
    const long number = PyLong_AsLong(number_object);
    if (number == -1 && PyErr_Occurred()) return -1;
    if (number < 0 || number >= column_count(w) || is_observation(w, (int)number)) {
        PyErr_Format(PyExc_ValueError, "column %ld cannot be rewritten", number);
        return -1;
    }
    if (!PyArray_CheckExact(rows) || !fits_column(&w->catalog->columns[number], (PyArrayObject *)rows, 1, &count) ||
        !PyArray_IS_C_CONTIGUOUS((PyArrayObject *)rows)) {
        PyErr_Format(PyExc_ValueError, "rows do not have the dtype and shape of column %ld", number);
        return -1;
    }
    return (int)number;
}

/* Overwrite rows of one column in parts that no snapshot refers to and that can represent the rows. */
static void rewrite_column(const Writer *w, int number, const int64_t *ids, Py_ssize_t count, const uint8_t *from) {
    const Py_ssize_t row_bytes = w->catalog->columns[number].row_bytes;
    for (Py_ssize_t i = 0; i < count; i++, from += row_bytes) {
        const int64_t at = ids[i] / w->lanes, lane = ids[i] - at * w->lanes;
        const Segment *const segment = w->catalog->segments[catalog_find(w->catalog, at)];
        const Part *const part = segment->parts[number];
        const Py_ssize_t row = (at - segment->first_tick) * w->lanes + lane;
        uint8_t *const to = part->rows + row * part->stored_bytes;
        if (is_narrow(part->kind)) narrow_write(part, row, from);
        else if (number == w->flags) *to = (uint8_t)((*from & (FLAG_TERMINATED | FLAG_TRUNCATED)) | (*to & FLAG_INVALID));
        else memcpy(to, from, (size_t)row_bytes);
    }
}

/* rewrite(ids, columns, rows) -> bool: whether a part was widened */
static PyObject *writer_rewrite(PyObject *self, PyObject *arguments) {
    Writer *const w = (Writer *)self;
    PyArrayObject *ids;
    PyObject *columns, *rows;
    if (!PyArg_ParseTuple(arguments, "O!O!O!", &PyArray_Type, &ids, &PyTuple_Type, &columns, &PyTuple_Type, &rows)) return NULL;
    if (PyArray_TYPE(ids) != NPY_INT64 || PyArray_NDIM(ids) != 1 || !PyArray_IS_C_CONTIGUOUS(ids)) {
        PyErr_SetString(PyExc_ValueError, "ids must be a contiguous array of int64");
        return NULL;
    }
    const Py_ssize_t count = PyArray_SIZE(ids), changed_count = PyTuple_Size(columns);
    int numbers[MAX_COLUMNS];
    if (changed_count > column_count(w) || changed_count != PyTuple_Size(rows)) {
        PyErr_Format(PyExc_ValueError, "%zd columns cannot be rewritten with %zd arrays", changed_count, PyTuple_Size(rows));
        return NULL;
    }
    for (Py_ssize_t k = 0; k < changed_count; k++) {
        numbers[k] = check_rewrite(w, PyTuple_GetItem(columns, k), PyTuple_GetItem(rows, k), count);
        if (numbers[k] < 0) return NULL;
    }
    const int64_t *const named = PyArray_DATA(ids);
    const Py_ssize_t missing = find_missing(w->catalog, named, count);
    if (missing >= 0) {
        PyErr_Format(PyExc_IndexError, "id %lld is not held", (long long)named[missing]);
        return NULL;
    }
    /* Copies of parts change nothing that is held, so it does not matter if only some of them can be made. */
    Catalog *old[MAX_COLUMNS];
    Py_ssize_t thawed_count = 0;
    int has_grown = 0;
    while (thawed_count < changed_count) {
        const uint8_t *const from = PyArray_DATA((PyArrayObject *)PyTuple_GetItem(rows, thawed_count));
        if (thaw_column(w, numbers[thawed_count], named, count, from, &old[thawed_count], &has_grown) < 0) break;
        thawed_count++;
    }
    const int has_failed = thawed_count < changed_count;
    for (Py_ssize_t k = 0; !has_failed && k < changed_count; k++)
        rewrite_column(w, numbers[k], named, count, PyArray_DATA((PyArrayObject *)PyTuple_GetItem(rows, k)));
    for (Py_ssize_t k = 0; !has_failed && k < changed_count; k++) w->catalog->flags_changed += numbers[k] == w->flags;
    for (Py_ssize_t k = 0; k < thawed_count; k++) Py_XDECREF((PyObject *)old[k]);
    if (has_failed) return NULL;
    return PyBool_FromLong(has_grown);
}

/* ---- construction ---------------------------------------------------------------------- */

/* Set the dtype of a column, and with it the bytes of its rows. -1 with an exception set. */
static int set_column_type(column *c, int type_number) {
    c->type_number = type_number;
    c->row_bytes = 0;
    if (type_number < 0) return 0;
    PyArray_Descr *const descr = PyArray_DescrFromType(type_number);
    if (!descr) return -1;
    c->row_bytes = PyDataType_ELSIZE(descr);
    Py_DECREF(descr);
    for (int i = 0; i < c->ndim; i++) {
        if (c->shape[i] < 0 || (c->shape[i] > 0 && c->row_bytes > INT32_MAX / c->shape[i])) {
            PyErr_SetString(PyExc_ValueError, "no length of a column may be negative, and a row must be smaller than 2 GiB");
            return -1;
        }
        c->row_bytes *= c->shape[i];
    }
    return 0;
}

/* Parse (role, type_number, shape). -1 with an exception set. */
static int parse_column(PyObject *given, column *c) {
    PyObject *shape;
    int type_number;
    if (!PyArg_ParseTuple(given, "iiO!", &c->role, &type_number, &PyTuple_Type, &shape)) return -1;
    if (PyTuple_Size(shape) > MAX_NDIM || c->role < ROLE_OBSERVATION || c->role > ROLE_FLAGS) {
        PyErr_Format(PyExc_ValueError, "column %R has an unknown role or more than %d dimensions", given, MAX_NDIM);
        return -1;
    }
    c->ndim = (int)PyTuple_Size(shape);
    for (int i = 0; i < c->ndim; i++) {
        c->shape[i] = PyLong_AsSsize_t(PyTuple_GetItem(shape, i));
        if (c->shape[i] == -1 && PyErr_Occurred()) return -1;
    }
    return set_column_type(c, type_number);
}

/* Parse ((count, keys | None), ...) for observations, actions and extras, and check them against the columns. -1 with an
 * exception set. */
static int parse_groups(Writer *w, PyObject *given) {
    int counts[GROUP_COUNT];
    PyObject *keys[GROUP_COUNT];
    if (!PyArg_ParseTuple(given, "(iO)(iO)(iO)", &counts[0], &keys[0], &counts[1], &keys[1], &counts[2], &keys[2])) return -1;
    for (int g = 0; g < GROUP_COUNT; g++) {
        if (counts[g] < 0 || counts[g] > MAX_COLUMNS || (keys[g] != Py_None && !PyTuple_Check(keys[g])) ||
            (keys[g] != Py_None && PyTuple_Size(keys[g]) != counts[g])) {
            PyErr_Format(PyExc_ValueError, "groups %R do not have one key per leaf", given);
            return -1;
        }
        w->groups[g].count = counts[g];
        w->groups[g].keys = keys[g] == Py_None ? NULL : Py_NewRef(keys[g]);
    }
    w->groups[GROUP_ACTION].first = counts[GROUP_OBS];
    w->reward = counts[GROUP_OBS] + counts[GROUP_ACTION];
    w->groups[GROUP_EXTRAS].first = w->reward + 1;
    w->flags = w->reward + 1 + counts[GROUP_EXTRAS];
    int fits = column_count(w) == w->flags + 1;
    for (int i = 0; fits && i < column_count(w); i++) {
        int role = ROLE_ROW;
        if (i < counts[GROUP_OBS]) role = ROLE_OBSERVATION;
        else if (i == w->flags) role = ROLE_FLAGS;
        fits = w->catalog->columns[i].role == role;
    }
    if (!fits || w->catalog->columns[w->flags].row_bytes != 1) {
        PyErr_SetString(PyExc_ValueError, "columns must be observations, actions, the reward, extras, and uint8 flags");
        return -1;
    }
    return 0;
}

/* Make the first catalog, without segments. -1 with an exception set. */
static int make_catalog(Writer *w, PyObject *columns, long long capacity_ticks, long long first_tick) {
    Catalog like = {0};
    column *const parsed = calloc(MAX_COLUMNS, sizeof *parsed);
    const Py_ssize_t count = PyTuple_Size(columns);
    if (!parsed) {
        PyErr_NoMemory();
        return -1;
    }
    int failed = count < 1 || count > MAX_COLUMNS;
    if (failed) PyErr_Format(PyExc_ValueError, "there must be 1 to %d columns, not %zd", MAX_COLUMNS, count);
    for (Py_ssize_t i = 0; !failed && i < count; i++) failed = parse_column(PyTuple_GetItem(columns, i), &parsed[i]) < 0;
    like.column_count = (int)count;
    like.columns = parsed;
    like.lanes = w->lanes;
    like.floor_tick = first_tick;
    like.capacity_ticks = capacity_ticks;
    if (!failed) failed = !(w->catalog = catalog_new(&like, 0));
    free(parsed);
    return failed ? -1 : 0;
}

/* Put an open segment without ticks into an empty catalog, or replace it. -1 with an exception set. */
static int reopen(Writer *w, int64_t first_tick, PyObject *layouts) {
    open_column *columns = NULL;
    Segment *const opened = open_new(w, first_tick, layouts, &columns);
    if (!opened) return -1;
    Catalog *const catalog = catalog_new(w->catalog, 1);
    if (!catalog) {
        free_open_columns(columns, column_count(w));
        Py_DECREF((PyObject *)opened);
        return -1;
    }
    put_segment(catalog, 0, opened);
    free_open_columns(w->columns, column_count(w));
    w->columns = columns;
    publish(w, catalog);
    Py_DECREF((PyObject *)opened);
    return 0;
}

/* Writer(columns, groups, lanes, capacity_ticks, segment_ticks, block_bytes, layouts, first_tick=0) */
static int writer_init(PyObject *self, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"columns",     "groups",  "lanes",      "capacity_ticks", "segment_ticks",
                            "block_bytes", "layouts", "first_tick", NULL};
    Writer *const w = (Writer *)self;
    PyObject *columns, *groups, *layouts;
    long long capacity_ticks, first_tick = 0;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!O!nLnnO!|L", names, &PyTuple_Type, &columns, &PyTuple_Type,
                                     &groups, &w->lanes, &capacity_ticks, &w->segment_ticks, &w->block_bytes,
                                     &PyTuple_Type, &layouts, &first_tick))
        return -1;
    if (w->lanes < 1 || capacity_ticks < 1 || w->segment_ticks < 1 || w->segment_ticks > INT32_MAX / w->lanes ||
        w->block_bytes < 1 || first_tick < 0 || first_tick > MAX_ID / w->lanes || capacity_ticks > MAX_ID / w->lanes ||
        PyTuple_Size(layouts) != PyTuple_Size(columns)) {
        PyErr_SetString(PyExc_ValueError, "lanes, ticks and bytes must be positive, a segment have fewer than 2^31 rows, "
                                          "ids be at most 2^61, and every column have a layout");
        return -1;
    }
    if (make_catalog(w, columns, capacity_ticks, first_tick) < 0) return -1;
    if (parse_groups(w, groups) < 0) return -1;
    return reopen(w, first_tick, layouts);
}

static PyObject *make_writer(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    return object_make(type, arguments, keywords, writer_init);
}

static void writer_dealloc(PyObject *self) {
    Writer *const w = (Writer *)self;
    if (w->catalog) free_open_columns(w->columns, column_count(w));
    for (int g = 0; g < GROUP_COUNT; g++) Py_XDECREF(w->groups[g].keys);
    Py_XDECREF((PyObject *)w->catalog);
    spare_areas_free();
    object_free(self);
}

/* set_type(column, type_number) */
static PyObject *writer_set_type(PyObject *self, PyObject *arguments) {
    Writer *const w = (Writer *)self;
    int number, type_number;
    if (!PyArg_ParseTuple(arguments, "ii", &number, &type_number)) return NULL;
    const Segment *const open = open_segment(w);
    if (number >= 0 && number < w->flags && type_number >= 0 && w->catalog->columns[number].type_number == type_number)
        Py_RETURN_NONE;
    if (number < 0 || number >= w->flags || w->catalog->columns[number].type_number >= 0 || type_number < 0 ||
        open->ticks > 0 || w->catalog->segment_count > 1) {
        PyErr_Format(PyExc_ValueError, "the type of column %d cannot be set to %d now", number, type_number);
        return NULL;
    }
    column changed = w->catalog->columns[number];
    if (set_column_type(&changed, type_number) < 0) return NULL;
    Catalog *const catalog = catalog_copy(w->catalog);
    if (!catalog) return NULL;
    ((column *)catalog->columns)[number] = changed;
    Catalog *const before = w->catalog;
    w->catalog = catalog;
    if (reopen(w, open->first_tick, NULL) < 0) {
        w->catalog = before;
        Py_DECREF((PyObject *)catalog);
        return NULL;
    }
    Py_DECREF((PyObject *)before);
    Py_RETURN_NONE;
}

static PyObject *writer_catalog(PyObject *self, void *Py_UNUSED(closure)) {
    return Py_NewRef((PyObject *)((Writer *)self)->catalog);
}
static PyObject *writer_next_tick(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromLongLong(catalog_next_tick(((Writer *)self)->catalog));
}
static PyObject *writer_first_tick(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromLongLong(catalog_first_tick(((Writer *)self)->catalog));
}

static PyObject *writer_dropped_early(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromLongLong(((Writer *)self)->dropped_early);
}

static PyMethodDef writer_methods[] = {
    {"append", (PyCFunction)(void (*)(void))writer_append, METH_FASTCALL, "Write one tick, or nothing."},
    {"extend", writer_extend, METH_VARARGS, "Write steps until the open segment is full."},
    {"roll", writer_roll, METH_VARARGS, "Close the open segment and start the next one."},
    {"evict", writer_evict, METH_VARARGS, "Publish a catalog without older ticks."},
    {"replace", writer_replace, METH_VARARGS, "Publish a catalog in which a segment has other parts."},
    {"adopt", writer_adopt, METH_VARARGS, "Append a closed segment that was built elsewhere."},
    {"snapshot", writer_snapshot, METH_NOARGS, "Return a catalog that never changes."},
    {"rewrite", writer_rewrite, METH_VARARGS, "Overwrite rows of columns that are not observations."},
    {"set_type", writer_set_type, METH_VARARGS, "Set the dtype of a column whose type was not known."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef writer_properties[] = {
    {"catalog", writer_catalog, NULL, "What is held right now.", NULL},
    {"next_tick", writer_next_tick, NULL, "The tick that is written next.", NULL},
    {"first_tick", writer_first_tick, NULL, "The oldest tick that is held.", NULL},
    {"dropped_early", writer_dropped_early, NULL, "Transitions that were evicted early.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot writer_slots[] = {
    {Py_tp_doc, "Owner of the open segment and the catalog."},
    {Py_tp_new, (void *)make_writer},
    {Py_tp_dealloc, (void *)writer_dealloc},
    {Py_tp_methods, writer_methods},
    {Py_tp_getset, writer_properties},
    {0, NULL},
};
static PyType_Spec writer_spec = {"holdall._native.Writer", sizeof(Writer), 0, Py_TPFLAGS_DEFAULT, writer_slots};

int add_writer(PyObject *module) {
    static const struct {
        const char *name;
        int value;
    } constants[] = {
        {"WRITTEN", WRITTEN},
        {"FULL", FULL},
        {"UNCHECKED", UNCHECKED},
        {"ROLE_OBSERVATION", ROLE_OBSERVATION},
        {"ROLE_ROW", ROLE_ROW},
        {"ROLE_FLAGS", ROLE_FLAGS},
        {"FLAG_TERMINATED", FLAG_TERMINATED},
        {"FLAG_TRUNCATED", FLAG_TRUNCATED},
        {"FLAG_INVALID", FLAG_INVALID},
        {"MAX_COLUMNS", MAX_COLUMNS},
        {"MAX_NDIM", MAX_NDIM},
    };
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0) return -1;
    PyTypeObject *const type = type_add(module, &writer_spec, "Writer");
    Py_XDECREF((PyObject *)type);
    return type ? 0 : -1;
}
