/* Reader: copies rows out of a catalog.
 *
 * `gather` has two steps. With the GIL held, it copies small rows, and writes down which slices every large observation
 * consists of. Then it copies or decodes these slices without the GIL, shared among threads. It owns references to the
 * forms of the blocks that it reads, so that they stay alive when a block is compressed, moved or evicted meanwhile.
 */
#include "coded.h"
#include "packed.h"
#include "threads.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

thread_pool *holdall_threads_new(void);
void holdall_threads_help(thread_pool *pool);
void holdall_threads_dismiss(thread_pool *pool);
void holdall_threads_free(thread_pool *pool);

enum {
    MAX_THREADS = 16,
    KNOWN_SLOTS = 4096,           /* slices that a thread remembers to have decoded in this batch; a power of two */
    PIECE_BYTES = 1 << 16,        /* what a thread takes at once, about */
    BYTES_PER_THREAD = 1 << 19,   /* a thread is woken for at least this much work */
    ROWS_AHEAD = 8,
    MAX_KEPT = 16,                /* arrays whose memory is kept for the next ones */
    MIN_RECYCLED_BYTES = 1 << 17, /* smaller arrays are left to NumPy */
};

/* A slice that was decoded for the batch with number `batch`. */
typedef struct {
    uint64_t batch;
    const Coded *coded;
    uint32_t number;
    const uint8_t *slice;
} known_slice;

/* The memory of one thread. */
typedef struct {
    decoder *decoder;
    uint64_t batch;
    known_slice known[KNOWN_SLOTS];
} workspace;

/* Memory of large arrays whose last reference was dropped, for the next ones. Fresh memory would cost a page fault for
 * every 4 KiB, which takes longer than copying the rows. Owned by the reader and by all arrays in such memory. */
typedef struct {
    Py_ssize_t references;
    Py_ssize_t max_kept_bytes;
    Py_ssize_t kept_bytes;
    int kept_count;
    struct {
        void *data;
        Py_ssize_t bytes;
    } kept[MAX_KEPT];
} recycler;

/* The memory of one large array. */
typedef struct {
    PyObject_HEAD
    recycler *recycler;
    void *data;
    Py_ssize_t bytes;
} Recycled;

static PyTypeObject *recycled_type;

typedef struct {
    PyObject_HEAD
    recycler *recycler;
    thread_pool *pool;
    int helpers; /* calls of `help` that are waiting for work */
    int is_busy; /* a gather uses the pool and the workspaces */
    workspace *workspaces[MAX_THREADS];
} Reader;

/* ---- slices, without the GIL ------------------------------------------------------------ */

/* One observation and the next one of one column, or one of them. */
typedef struct {
    PyObject *form; /* owned: Raw or Coded */
    const window *cut;
    Py_ssize_t slice_bytes;
    uint8_t *obs;      /* where the observation goes, or NULL */
    uint8_t *next_obs; /* where the next observation goes, or NULL */
    Py_ssize_t first;  /* of its slice numbers in `numbers` */
    Py_ssize_t step;   /* slices by which the next observation starts later */
} observation;

typedef struct {
    observation *observations;
    uint32_t *numbers;
    Py_ssize_t count;
    Py_ssize_t piece; /* observations that a thread takes at once */
    workspace *const *workspaces;
    int error; /* errno of the first read that failed, or 0 */
    _Atomic Py_ssize_t taken;
    _Atomic int state; /* what went wrong, or 0 */
} gather_job;

enum { OK = 0, DAMAGED = 1, NO_MEMORY = 2 };

/* Put slice `s` of an observation where it belongs. */
static void place_slice(const window *cut, const uint8_t *slice, Py_ssize_t s, uint8_t *out) {
    const Py_ssize_t stretch = cut->count * cut->run_bytes;
    out += s * cut->run_bytes;
    if (cut->run_bytes == 1) {
        for (Py_ssize_t o = 0; o < cut->outer; o++) out[o * stretch] = slice[o];
        return;
    }
    for (Py_ssize_t o = 0; o < cut->outer; o++)
        memcpy(out + o * stretch, slice + o * cut->run_bytes, (size_t)cut->run_bytes);
}

static void copy_raw(const observation *v, const uint32_t *numbers) {
    const window *const cut = v->cut;
    const uint8_t *const slices = ((const Raw *)v->form)->data;
    for (Py_ssize_t s = 0; s < cut->count + v->step; s++) {
        const uint8_t *const slice = slices + numbers[s] * v->slice_bytes;
        if (v->obs && s < cut->count) place_slice(cut, slice, s, v->obs);
        if (v->next_obs && s >= v->step) place_slice(cut, slice, s - v->step, v->next_obs);
    }
}

/* Decode a slice to `out`, or copy it if this thread decoded it for the same batch before. Return 0 if it is damaged. */
static int decode_or_copy(workspace *space, const Coded *coded, uint32_t number, uint8_t *out) {
    const uint64_t hash = ((uint64_t)number ^ ((uint64_t)(uintptr_t)coded >> 4)) * UINT64_C(0x9E3779B97F4A7C15);
    known_slice *const known = &space->known[(hash >> 32) & (KNOWN_SLOTS - 1)];
    if (known->batch == space->batch && known->coded == coded && known->number == number) {
        memcpy(out, known->slice, (size_t)coded->block.form.slice_bytes);
        return 1;
    }
    if (!decode_slice(space->decoder, &coded->block, number, out)) return 0;
    *known = (known_slice){space->batch, coded, number, out};
    return 1;
}

/* How many of `count` numbers follow each other. */
static Py_ssize_t run_length(const uint32_t *numbers, Py_ssize_t count) {
    Py_ssize_t run = 1;
    while (run < count && numbers[run] == numbers[0] + (uint32_t)run) run++;
    return run;
}

/* Decode an observation and the next one. A slice that both share is decoded once. Return 0 if a slice is damaged. */
static int decode_observation(workspace *space, const observation *v, const uint32_t *numbers) {
    const Coded *const coded = (const Coded *)v->form;
    const window *const cut = v->cut;
    const Py_ssize_t entries = cut->count + v->step;
    Py_ssize_t read_end = 0;
    for (Py_ssize_t s = 0; s < entries; s++) {
        const int in_obs = v->obs && s < cut->count, in_next = v->next_obs && s >= v->step;
        if (!in_obs && !in_next) continue;
        if (!coded->block.data && s >= read_end) {
            const Py_ssize_t run = run_length(numbers + s, entries - s);
            read_slices(space->decoder, &coded->block, numbers[s], (int64_t)numbers[s] + run);
            read_end = s + run;
        }
        if (cut->outer == 1) {
            uint8_t *const to = in_obs ? v->obs + s * v->slice_bytes : v->next_obs + (s - v->step) * v->slice_bytes;
            if (!decode_or_copy(space, coded, numbers[s], to)) return 0;
            if (in_obs && in_next) memcpy(v->next_obs + (s - v->step) * v->slice_bytes, to, (size_t)v->slice_bytes);
        } else {
            uint8_t *const slice = space->decoder->scratch + 2 * coded_bytes(&coded->block.form);
            if (!decode_slice(space->decoder, &coded->block, numbers[s], slice)) return 0;
            if (in_obs) place_slice(cut, slice, s, v->obs);
            if (in_next) place_slice(cut, slice, s - v->step, v->next_obs);
        }
    }
    return 1;
}

/* Note the first failure, and let all threads stop. */
static void fail(gather_job *job, int state, int error) {
    int none = OK;
    if (atomic_compare_exchange_strong(&job->state, &none, state)) job->error = error;
    atomic_store(&job->taken, job->count);
}

/* What a thread does: take pieces until none are left. */
static void gather_pieces(void *given, int64_t thread) {
    gather_job *const job = given;
    workspace *const space = job->workspaces[thread];
    for (;;) {
        const Py_ssize_t first = atomic_fetch_add_explicit(&job->taken, job->piece, memory_order_relaxed);
        const Py_ssize_t end = first + job->piece < job->count ? first + job->piece : job->count;
        if (first >= job->count) return;
        for (Py_ssize_t i = first; i < end; i++) {
            const observation *const v = &job->observations[i];
            const uint32_t *const numbers = job->numbers + v->first;
            if (Py_TYPE(v->form) == raw_type) {
                copy_raw(v, numbers);
            } else if (!decoder_fit(space->decoder, &((Coded *)v->form)->block)) {
                fail(job, NO_MEMORY, 0);
                return;
            } else if (!decode_observation(space, v, numbers)) {
                fail(job, DAMAGED, (int)space->decoder->error);
                return;
            }
        }
    }
}

/* ---- workspaces ------------------------------------------------------------------------- */

static void workspace_free(workspace *space) {
    if (!space) return;
    decoder_free(space->decoder);
    free(space);
}

static workspace *workspace_new(void) {
    workspace *const space = calloc(1, sizeof *space);
    if (!space) return NULL;
    space->decoder = decoder_new();
    if (!space->decoder) {
        free(space);
        return NULL;
    }
    return space;
}

/* Copy and decode all observations of a job. -1 with an exception set. The GIL is released meanwhile. */
static int run_job(Reader *self, gather_job *job, Py_ssize_t bytes) {
    workspace *own[1] = {NULL};
    const int has_pool = !self->is_busy;
    int helpers = 0;
    if (has_pool) {
        helpers = (int)(bytes / BYTES_PER_THREAD);
        if (helpers > self->helpers) helpers = self->helpers;
        if (helpers > MAX_THREADS - 1) helpers = MAX_THREADS - 1;
    }
    workspace **const workspaces = has_pool ? self->workspaces : own;
    for (int i = 0; i <= helpers; i++) {
        if (!workspaces[i] && !(workspaces[i] = workspace_new())) {
            PyErr_NoMemory();
            return -1;
        }
        decoder_begin_batch(workspaces[i]->decoder);
        workspaces[i]->batch++;
    }
    job->workspaces = workspaces;
    job->piece = bytes > 0 ? job->count * PIECE_BYTES / bytes + 1 : 1;
    if (has_pool) self->is_busy = 1;
    Py_BEGIN_ALLOW_THREADS
    threads_begin(helpers ? self->pool : NULL, gather_pieces, job, helpers);
    gather_pieces(job, 0);
    threads_end(helpers ? self->pool : NULL);
    Py_END_ALLOW_THREADS
    if (has_pool) self->is_busy = 0;
    workspace_free(own[0]);
    if (job->state == NO_MEMORY) {
        PyErr_NoMemory();
        return -1;
    }
    if (job->state == DAMAGED && job->error) {
        PyObject *const error = PyObject_CallFunction(PyExc_OSError, "is", job->error, strerror(job->error));
        if (error) PyErr_SetObject(PyExc_OSError, error);
        Py_XDECREF(error);
        return -1;
    }
    if (job->state == DAMAGED) {
        PyErr_SetString(PyExc_ValueError, "compressed data is damaged");
        return -1;
    }
    return 0;
}

/* ---- rows, with the GIL ----------------------------------------------------------------- */

/* Where a transition is stored. */
typedef struct {
    const Segment *segment;
    Py_ssize_t row; /* number of the transition in the segment */
    Py_ssize_t lane;
} location;

/* Find all transitions. -1 with an IndexError if one is not held. */
static int locate(const Catalog *catalog, const int64_t *ids, Py_ssize_t count, location *locations) {
    const int64_t lanes = catalog->lanes;
    const int64_t first_id = catalog_first_tick(catalog) * lanes, next_id = catalog_next_tick(catalog) * lanes;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (ids[i] < first_id || ids[i] >= next_id) {
            PyErr_Format(PyExc_IndexError, "id %lld is not held; ids %lld to %lld are", (long long)ids[i],
                         (long long)first_id, (long long)next_id - 1);
            return -1;
        }
        const int64_t tick = lanes == 1 ? ids[i] : ids[i] / lanes;
        const Segment *const segment = catalog->segments[catalog_find(catalog, tick)];
        locations[i].segment = segment;
        locations[i].row = (Py_ssize_t)(ids[i] - segment->first_tick * lanes);
        locations[i].lane = (Py_ssize_t)(ids[i] - tick * lanes);
    }
    return 0;
}

/* The row of a part of rows or shared rows, or the observation of a paired one. */
static inline const uint8_t *row_at(const Part *part, Py_ssize_t row) {
    return part->rows + (part->kind == PART_PAIRED ? 2 * row : row) * part->row_bytes;
}

/* The next observation of a shared, paired or packed part; NULL if it must be read from the packed run. */
static const uint8_t *next_row_at(const Part *part, Py_ssize_t row) {
    if (part->kind == PART_PAIRED) return part->rows + (2 * row + 1) * part->row_bytes;
    const uint8_t *const exception = part->exception_count ? find_exception(part, row) : NULL;
    if (exception || part->kind == PART_PACKED) return exception;
    return part->rows + (row + part->lanes) * part->row_bytes;
}

static void copy_row(const Part *part, Py_ssize_t row, int is_next, uint8_t *out) {
    if (part->kind == PART_PACKED) {
        const uint8_t *const exception = is_next ? next_row_at(part, row) : NULL;
        if (exception) memcpy(out, exception, (size_t)part->row_bytes);
        else packed_read((const PackedRun *)part->packed, part->packed_leaf, row + (is_next ? part->lanes : 0), out);
        return;
    }
    memcpy(out, is_next ? next_row_at(part, row) : row_at(part, row), (size_t)part->row_bytes);
}

/* Load the row that is copied soon. */
static inline void prefetch_row(const Part *part, Py_ssize_t row) {
    if (part->kind == PART_PACKED) packed_prefetch((const PackedRun *)part->packed, row);
    else if (part->rows) FETCH_SOON(row_at(part, row));
}

static void copy_rows(int column, const location *locations, Py_ssize_t count, int is_next, uint8_t *out) {
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i + ROWS_AHEAD < count) {
            const location *const ahead = &locations[i + ROWS_AHEAD];
            prefetch_row(ahead->segment->parts[column], ahead->row);
        }
        const Part *const part = locations[i].segment->parts[column];
        if (part->kind == PART_SLICED) continue;
        copy_row(part, locations[i].row, is_next, out + i * part->row_bytes);
    }
}

static void copy_flags(int column, const location *locations, Py_ssize_t count, int flag, uint8_t *out) {
    for (Py_ssize_t i = 0; i < count; i++)
        out[i] = (locations[i].segment->parts[column]->rows[locations[i].row] & flag) != 0;
}

/* Return how many observations of a column are sliced, and add their slices to `*numbers`. */
static Py_ssize_t count_sliced(int column, const location *locations, Py_ssize_t count, Py_ssize_t *numbers) {
    Py_ssize_t sliced = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const Part *const part = locations[i].segment->parts[column];
        if (part->kind != PART_SLICED) continue;
        sliced++;
        *numbers += 2 * part->cut.count;
    }
    return sliced;
}

/* Write down the slices of all sliced observations of a column. Return the end of `numbers` that is used. */
static Py_ssize_t list_slices(int column, const location *locations, Py_ssize_t count, uint8_t *obs, uint8_t *next_obs,
                              gather_job *job, Py_ssize_t used) {
    for (Py_ssize_t i = 0; i < count; i++) {
        const Part *const part = locations[i].segment->parts[column];
        if (part->kind != PART_SLICED) continue;
        const uint32_t cursor = part->cursors[locations[i].row];
        const Py_ssize_t start = cursor & ~NEXT_FOLLOWS;
        observation *const v = &job->observations[job->count++];
        v->form = Py_NewRef(part->block->form);
        v->cut = &part->cut;
        v->slice_bytes = part->block->slice_bytes;
        v->obs = obs ? obs + i * part->row_bytes : NULL;
        v->next_obs = next_obs ? next_obs + i * part->row_bytes : NULL;
        v->step = cursor & NEXT_FOLLOWS ? part->cut.count : part->cut.shift;
        v->first = used;
        const Py_ssize_t entries = part->cut.count + (next_obs ? v->step : 0);
        for (Py_ssize_t s = 0; s < entries; s++) job->numbers[used + s] = log_entry(part, start + s, locations[i].lane);
        if (!next_obs) v->step = 0;
        used += entries;
    }
    return used;
}

/* ---- recycled memory --------------------------------------------------------------------- */

static void recycler_release(recycler *r) {
    if (!r || --r->references > 0) return;
    for (int i = 0; i < r->kept_count; i++) area_free(r->kept[i].data, (size_t)r->kept[i].bytes);
    free(r);
}

/* Take out kept memory of at least `bytes` bytes, but not far more; NULL if there is none. */
static void *recycler_take(recycler *r, Py_ssize_t *bytes) {
    for (int i = 0; i < r->kept_count; i++) {
        if (r->kept[i].bytes < *bytes || r->kept[i].bytes / 2 > *bytes) continue;
        void *const data = r->kept[i].data;
        *bytes = r->kept[i].bytes;
        r->kept_bytes -= r->kept[i].bytes;
        r->kept[i] = r->kept[--r->kept_count];
        return data;
    }
    return NULL;
}

static void recycled_dealloc(PyObject *self) {
    Recycled *const memory = (Recycled *)self;
    recycler *const r = memory->recycler;
    if (memory->data && r->kept_count < MAX_KEPT && r->kept_bytes + memory->bytes <= r->max_kept_bytes) {
        r->kept[r->kept_count].data = memory->data;
        r->kept[r->kept_count++].bytes = memory->bytes;
        r->kept_bytes += memory->bytes;
    } else {
        area_free(memory->data, (size_t)memory->bytes);
    }
    recycler_release(r);
    object_free(self);
}

static PyType_Slot recycled_slots[] = {
    {Py_tp_doc, "The memory of a large array, which is used again when the array is freed."},
    {Py_tp_dealloc, (void *)recycled_dealloc},
    {0, NULL},
};
static PyType_Spec recycled_spec = {
    "holdall._native.Recycled", sizeof(Recycled), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, recycled_slots,
};

/* Return memory for an array, kept or new. NULL with an exception set. */
static Recycled *recycled_new(recycler *r, Py_ssize_t bytes) {
    Recycled *const memory = object_new(recycled_type);
    if (!memory) return NULL;
    memory->recycler = r;
    r->references++;
    memory->bytes = bytes;
    memory->data = recycler_take(r, &memory->bytes);
    if (!memory->data) {
        memory->data = area_new((size_t)bytes);
        if (memory->data) area_use_huge_pages(memory->data, (size_t)bytes);
    }
    if (!memory->data) {
        Py_DECREF((PyObject *)memory);
        PyErr_NoMemory();
        return NULL;
    }
    return memory;
}

/* ---- gather ------------------------------------------------------------------------------ */

/* Return a new array for an output: (count, *shape) of the column's dtype, or bool for flags. */
static PyObject *output_array(recycler *r, const column *c, Py_ssize_t count) {
    npy_intp shape[MAX_NDIM + 1] = {count};
    const int type_number = c->role == ROLE_FLAGS ? NPY_BOOL : c->type_number;
    for (int i = 0; i < c->ndim; i++) shape[i + 1] = c->shape[i];
    if (count * c->row_bytes < MIN_RECYCLED_BYTES) return PyArray_SimpleNew(c->ndim + 1, shape, type_number);
    Recycled *const memory = recycled_new(r, count * c->row_bytes);
    if (!memory) return NULL;
    PyObject *const array = PyArray_SimpleNewFromData(c->ndim + 1, shape, type_number, memory->data);
    if (!array) {
        Py_DECREF((PyObject *)memory);
        return NULL;
    }
    PyArray_SetBaseObject((PyArrayObject *)array, (PyObject *)memory); /* takes the reference over */
    return array;
}

/* Make the arrays of all outputs. `wanted` gets the place of each output in the tuple, plus 1. NULL with an exception. */
static PyObject *make_outputs(recycler *r, const Catalog *catalog, PyObject *outputs, Py_ssize_t count, Py_ssize_t *wanted) {
    const Py_ssize_t output_count = PyTuple_Size(outputs);
    PyObject *const arrays = PyTuple_New(output_count);
    if (!arrays) return NULL;
    for (Py_ssize_t k = 0; k < output_count; k++) {
        const long number = PyLong_AsLong(PyTuple_GetItem(outputs, k));
        const column *const c = number >= 0 && number < 2 * catalog->column_count ? &catalog->columns[number / 2] : NULL;
        if (!c || wanted[number] || c->type_number < 0 || (number % 2 == 1 && c->role == ROLE_ROW)) {
            if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "output %ld does not exist, or is asked for twice", number);
            Py_DECREF(arrays);
            return NULL;
        }
        PyObject *const array = output_array(r, c, count);
        if (!array) {
            Py_DECREF(arrays);
            return NULL;
        }
        PyTuple_SetItem(arrays, k, array);
        wanted[number] = k + 1;
    }
    return arrays;
}

static uint8_t *output_data(PyObject *arrays, Py_ssize_t place) {
    return place ? PyArray_DATA((PyArrayObject *)PyTuple_GetItem(arrays, place - 1)) : NULL;
}

/* Copy everything that is not sliced, and list the slices of the rest. Return the bytes to copy and decode, -1 with an
 * exception set. */
static Py_ssize_t copy_small(const Catalog *catalog, const location *locations, Py_ssize_t count, PyObject *arrays,
                             const Py_ssize_t *wanted, gather_job *job) {
    Py_ssize_t observations = 0, numbers = 0, used = 0, bytes = 0;
    for (int i = 0; i < catalog->column_count; i++) {
        const column *const c = &catalog->columns[i];
        uint8_t *const first = output_data(arrays, wanted[2 * i]), *const second = output_data(arrays, wanted[2 * i + 1]);
        if (c->role == ROLE_FLAGS) {
            if (first) copy_flags(i, locations, count, FLAG_TERMINATED, first);
            if (second) copy_flags(i, locations, count, FLAG_TRUNCATED, second);
            continue;
        }
        if (first) copy_rows(i, locations, count, 0, first);
        if (second) copy_rows(i, locations, count, 1, second);
        if (c->role == ROLE_OBSERVATION && (first || second)) {
            const Py_ssize_t sliced = count_sliced(i, locations, count, &numbers);
            observations += sliced;
            bytes += sliced * c->row_bytes * ((first != NULL) + (second != NULL));
        }
    }
    if (observations == 0) return 0;
    job->observations = malloc((size_t)observations * sizeof *job->observations);
    job->numbers = malloc((size_t)numbers * sizeof *job->numbers);
    if (!job->observations || !job->numbers) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < catalog->column_count; i++) {
        uint8_t *const first = output_data(arrays, wanted[2 * i]), *const second = output_data(arrays, wanted[2 * i + 1]);
        if (catalog->columns[i].role == ROLE_OBSERVATION && (first || second))
            used = list_slices(i, locations, count, first, second, job, used);
    }
    return bytes;
}

/* gather(catalog, ids, outputs) -> tuple of arrays */
static PyObject *reader_gather(PyObject *self, PyObject *const *arguments, Py_ssize_t argument_count) {
    if (argument_count != 3 || Py_TYPE(arguments[0]) != catalog_type || !PyArray_Check(arguments[1]) ||
        !PyTuple_Check(arguments[2])) {
        PyErr_SetString(PyExc_TypeError, "gather takes a catalog, an array of ids and a tuple of outputs");
        return NULL;
    }
    Catalog *const catalog = (Catalog *)arguments[0];
    PyArrayObject *const ids = (PyArrayObject *)arguments[1];
    if (PyArray_TYPE(ids) != NPY_INT64 || PyArray_NDIM(ids) != 1 || !PyArray_IS_C_CONTIGUOUS(ids)) {
        PyErr_SetString(PyExc_TypeError, "ids must be a contiguous array of int64");
        return NULL;
    }
    const Py_ssize_t count = PyArray_SIZE(ids);
    Py_ssize_t wanted[2 * MAX_COLUMNS] = {0};
    gather_job job = {0};
    Py_INCREF((PyObject *)catalog); /* keeps segments and parts alive without the GIL */
    PyObject *arrays = make_outputs(((Reader *)self)->recycler, catalog, arguments[2], count, wanted);
    location *const locations = malloc(((size_t)count + 1) * sizeof *locations);
    int failed = !arrays;
    if (!failed && !locations) {
        PyErr_NoMemory();
        failed = 1;
    }
    /* Allocating arrays can run the garbage collector and with it any code, so ids are checked after that. */
    if (!failed) failed = locate(catalog, PyArray_DATA(ids), count, locations) < 0;
    const Py_ssize_t bytes = failed ? -1 : copy_small(catalog, locations, count, arrays, wanted, &job);
    if (bytes < 0) failed = 1;
    if (!failed && job.count > 0) failed = run_job((Reader *)self, &job, bytes) < 0;
    for (Py_ssize_t i = 0; i < job.count; i++) Py_DECREF(job.observations[i].form);
    free(job.observations);
    free(job.numbers);
    free(locations);
    Py_DECREF((PyObject *)catalog);
    if (failed) {
        Py_XDECREF(arrays);
        return NULL;
    }
    return arrays;
}

/* ---- threads ----------------------------------------------------------------------------- */

static PyObject *reader_help(PyObject *object, PyObject *Py_UNUSED(none)) {
    Reader *const self = (Reader *)object;
    self->helpers++;
    Py_BEGIN_ALLOW_THREADS
    holdall_threads_help(self->pool);
    Py_END_ALLOW_THREADS
    self->helpers--;
    Py_RETURN_NONE;
}

static PyObject *reader_dismiss(PyObject *object, PyObject *Py_UNUSED(none)) {
    holdall_threads_dismiss(((Reader *)object)->pool);
    Py_RETURN_NONE;
}

/* Reader(max_kept_bytes=0) */
static int reader_init(PyObject *object, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"max_kept_bytes", NULL};
    Reader *const self = (Reader *)object;
    Py_ssize_t max_kept_bytes = 0;
    if (self->pool) {
        PyErr_SetString(PyExc_TypeError, "a reader is initialised once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|n", names, &max_kept_bytes)) return -1;
    self->recycler = calloc(1, sizeof *self->recycler);
    self->pool = holdall_threads_new();
    if (!self->pool || !self->recycler) {
        PyErr_NoMemory();
        return -1;
    }
    self->recycler->references = 1;
    self->recycler->max_kept_bytes = max_kept_bytes;
    return 0;
}

static void reader_dealloc(PyObject *object) {
    Reader *const self = (Reader *)object;
    for (int i = 0; i < MAX_THREADS; i++) workspace_free(self->workspaces[i]);
    if (self->pool) holdall_threads_free(self->pool);
    recycler_release(self->recycler);
    object_free(object);
}

static PyMethodDef reader_methods[] = {
    {"gather", (PyCFunction)(void (*)(void))reader_gather, METH_FASTCALL, "Return one array per output."},
    {"help", reader_help, METH_NOARGS, "Work on the gathers of other threads until `dismiss` is called."},
    {"dismiss", reader_dismiss, METH_NOARGS, "Make all calls of `help` return."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot reader_slots[] = {
    {Py_tp_doc, "Copies rows out of a catalog."},
    {Py_tp_init, (void *)reader_init},
    {Py_tp_dealloc, (void *)reader_dealloc},
    {Py_tp_methods, reader_methods},
    {0, NULL},
};
static PyType_Spec reader_spec = {"holdall._native.Reader", sizeof(Reader), 0, Py_TPFLAGS_DEFAULT, reader_slots};

int add_reader(PyObject *module) {
    if (!(recycled_type = (PyTypeObject *)PyType_FromSpec(&recycled_spec))) return -1;
    PyTypeObject *const type = type_add(module, &reader_spec, "Reader");
    Py_XDECREF((PyObject *)type);
    return type ? 0 : -1;
}
