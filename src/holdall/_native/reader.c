/* Reader: copies rows out of a catalog.
 *
 * `gather` has two steps. With the GIL held, it copies small rows, and lists the slices of every large observation. Then it
 * copies or decodes these slices without the GIL, shared among threads. It owns references to the forms of the blocks that it
 * reads, so that they stay alive when a block is compressed, moved or evicted meanwhile.
 */
#include "coded.h"
#include "module.h"
#include "packed.h"
#include "recycler.h"
#include "threads.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_THREADS = 16,
    KNOWN_SLOTS = 4096,           /* slices that a thread remembers to have decoded in this batch; a power of two */
    BYTES_PER_THREAD = 1 << 19,   /* default of the bytes of a batch for which another thread is woken */
    PIECES_PER_THREAD = 8,        /* a thread takes the bytes above divided by this number at once */
    CACHE_LINE = 64,
    PAGE_BYTES = 4096,
    PIECE_ROWS = 64,              /* packed rows that are loaded into the cache before they are copied */
    ROWS_AHEAD = 8,               /* rows that are loaded into the cache while one is copied */
    UNITS_AHEAD = 4,              /* observations whose compressed data is loaded into the cache while one is decoded */
    MAX_UNIT_FETCH = 4096,        /* bytes of a compressed unit that are loaded ahead; the processor loads the rest */
    MIN_OWN_BYTES = 1 << 17,      /* smaller arrays of a batch share one area */
};

/* Further outputs, after two for each column: the flags as they are stored, and whether a transition ended its episode by
 * termination alone, as a float32 of shape (1,). */
enum { OUTPUT_FLAGS = 0, OUTPUT_ENDED = 1, EXTRA_OUTPUTS = 2 };

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

typedef struct {
    PyObject_HEAD
    recycler *recycler;
    thread_pool *pool;
    Py_ssize_t bytes_per_thread;
    int helpers; /* calls of `help` that have not returned */
    int wanted;  /* the most helpers that a gather could have used */
    int is_busy; /* a gather uses the pool and the workspaces */
    workspace *workspaces[MAX_THREADS];
} Reader;

/* ---- slices, without the GIL ------------------------------------------------------------ */

/* An observation and its next observation in one column, or one of the two. */
typedef struct {
    PyObject *form; /* owned: Raw or Coded */
    const window *cut;
    Py_ssize_t slice_bytes;
    uint8_t *obs;      /* destination of the observation, or NULL */
    uint8_t *next_obs; /* destination of the next observation, or NULL */
    Py_ssize_t first;  /* index of its first slice number in `numbers` */
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

/* Copy slice `s` of an observation to its places in `out`. */
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

/* Copy the uncompressed slices of an observation to `out`. */
static void copy_slices(const observation *v, const uint32_t *numbers, uint8_t *out) {
    const uint8_t *const slices = ((const Raw *)v->form)->data;
    for (Py_ssize_t s = 0; s < v->cut->count; s++) place_slice(v->cut, slices + numbers[s] * v->slice_bytes, s, out);
}

/* Copy the uncompressed slices of an observation, and of its next observation. */
static void copy_raw(const observation *v, const uint32_t *numbers) {
    if (v->obs) copy_slices(v, numbers, v->obs);
    if (v->next_obs) copy_slices(v, numbers + v->step, v->next_obs);
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

/* Return how many of the first of `count` numbers ascend by 1. */
static Py_ssize_t run_length(const uint32_t *numbers, Py_ssize_t count) {
    Py_ssize_t run = 1;
    while (run < count && numbers[run] == numbers[0] + (uint32_t)run) run++;
    return run;
}

/* Decode an observation and its next observation. A slice that both share is decoded once. Return 0 if a slice is damaged. */
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

/* The compressed block that has observation `i` of a job, or NULL. */
static inline const coded_block *block_ahead(const gather_job *job, Py_ssize_t i) {
    if (i >= job->count || Py_TYPE(job->observations[i].form) == raw_type) return NULL;
    return &((const Coded *)job->observations[i].form)->block;
}

/* The unit that has the first slice of observation `i` of a job, or -1 if it is not known without decoding a place. */
static inline int64_t unit_ahead(const gather_job *job, Py_ssize_t i, const coded_block *b) {
    const uint32_t number = job->numbers[job->observations[i].first];
    return number < b->slice_count && !b->places ? number / b->group : -1;
}

/* Load the header of the compressed block of observation `i` of a job. */
PREFETCHER void prefetch_block(const gather_job *job, Py_ssize_t i) {
    const coded_block *const b = block_ahead(job, i);
    if (!b) return;
    for (size_t at = 0; at < sizeof *b; at += CACHE_LINE) FETCH_SOON((const uint8_t *)b + at);
}

/* Load the offsets of the first unit of observation `i`. Reads what `prefetch_block` loaded. */
PREFETCHER void prefetch_offsets(const gather_job *job, Py_ssize_t i) {
    const coded_block *const b = block_ahead(job, i);
    const int64_t unit = b ? unit_ahead(job, i, b) : -1;
    if (unit >= 0) FETCH_SOON(&b->offsets[unit]);
}

/* Load the start of the first unit of observation `i`. Reads what `prefetch_offsets` loaded. */
PREFETCHER void prefetch_unit(const gather_job *job, Py_ssize_t i) {
    const coded_block *const b = block_ahead(job, i);
    const int64_t unit = b && b->data ? unit_ahead(job, i, b) : -1;
    if (unit < 0) return;
    const int64_t start = b->offsets[unit];
    int64_t end = b->offsets[unit + 1];
    if (end > b->data_bytes) return; /* The block is damaged, and decoding it reports that. */
    if (end > start + MAX_UNIT_FETCH) end = start + MAX_UNIT_FETCH;
    for (int64_t at = start; at < end; at += CACHE_LINE) FETCH_SOON(b->data + at);
}

/* Load the start of every page of the uncompressed slices of observation `i`. The processor loads the rest by itself, but
 * only within a page. */
PREFETCHER void prefetch_raw(const gather_job *job, Py_ssize_t i) {
    if (i >= job->count || Py_TYPE(job->observations[i].form) != raw_type) return;
    const observation *const v = &job->observations[i];
    const uint8_t *const slices = ((const Raw *)v->form)->data;
    for (Py_ssize_t s = 0; s < v->cut->count + v->step; s++) {
        const uint8_t *const slice = slices + job->numbers[v->first + s] * v->slice_bytes;
        for (Py_ssize_t at = 0; at < v->slice_bytes; at += PAGE_BYTES) FETCH_SOON(slice + at);
    }
}

/* Record the first failure, and make all threads stop. */
static void fail(gather_job *job, int state, int error) {
    int none = OK;
    if (atomic_compare_exchange_strong(&job->state, &none, state)) job->error = error;
    atomic_store(&job->taken, job->count);
}

/* Take pieces and copy or decode their observations, until none are left. Each thread calls this. */
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
            prefetch_block(job, i + 3 * UNITS_AHEAD);
            prefetch_offsets(job, i + 2 * UNITS_AHEAD);
            prefetch_unit(job, i + UNITS_AHEAD);
            if (Py_TYPE(v->form) == raw_type) {
                prefetch_raw(job, i + 1);
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

/* Ask the system to fetch all slices that are in files, so that the disk serves several requests at once. */
static void announce_files(const gather_job *job) {
    for (Py_ssize_t i = 0; i < job->count; i++) {
        const observation *const v = &job->observations[i];
        if (Py_TYPE(v->form) == raw_type || ((const Coded *)v->form)->block.data) continue;
        const uint32_t *const numbers = job->numbers + v->first;
        const Py_ssize_t entries = v->cut->count + v->step;
        for (Py_ssize_t s = 0, run; s < entries; s += run) {
            run = run_length(numbers + s, entries - s);
            announce_slices(&((const Coded *)v->form)->block, numbers[s], (int64_t)numbers[s] + run);
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

/* Return how many helpers share a job of `bytes` bytes. */
static int choose_helpers(Reader *self, Py_ssize_t bytes) {
    const Py_ssize_t useful = bytes / self->bytes_per_thread;
    const int helpers = useful < MAX_THREADS - 1 ? (int)useful : MAX_THREADS - 1;
    if (helpers > self->wanted) self->wanted = helpers;
    return helpers < self->helpers ? helpers : self->helpers;
}

/* Begin a batch in the workspaces of `threads` threads, which are made if they do not exist. -1 with a MemoryError. */
static int begin_workspaces(workspace **workspaces, int threads) {
    for (int i = 0; i < threads; i++) {
        if (!workspaces[i] && !(workspaces[i] = workspace_new())) {
            PyErr_NoMemory();
            return -1;
        }
        decoder_begin_batch(workspaces[i]->decoder);
        workspaces[i]->batch++;
    }
    return 0;
}

/* Return 0 if a job succeeded, or -1 with the exception of its first failure. */
static int check_job(const gather_job *job) {
    if (job->state == OK) return 0;
    if (job->state == NO_MEMORY) {
        PyErr_NoMemory();
    } else if (job->error) {
        PyObject *const error = PyObject_CallFunction(PyExc_OSError, "is", job->error, strerror(job->error));
        if (error) PyErr_SetObject(PyExc_OSError, error);
        Py_XDECREF(error);
    } else {
        PyErr_SetString(PyExc_ValueError, "compressed data is damaged");
    }
    return -1;
}

/* Copy and decode all observations of a job. -1 with an exception set. The GIL is released meanwhile, so another gather may
 * begin. It then has a workspace of its own, and works alone. */
static int run_job(Reader *self, gather_job *job, Py_ssize_t bytes) {
    workspace *own[1] = {NULL};
    const int has_pool = !self->is_busy;
    const int helpers = has_pool ? choose_helpers(self, bytes) : 0;
    workspace **const workspaces = has_pool ? self->workspaces : own;
    if (begin_workspaces(workspaces, helpers + 1) < 0) return -1;
    job->workspaces = workspaces;
    const Py_ssize_t piece_bytes = self->bytes_per_thread / PIECES_PER_THREAD;
    job->piece = bytes > 0 ? (Py_ssize_t)((double)job->count * (double)piece_bytes / (double)bytes) + 1 : 1;
    if (has_pool) self->is_busy = 1;
    Py_BEGIN_ALLOW_THREADS
    announce_files(job);
    threads_begin(helpers ? self->pool : NULL, gather_pieces, job, helpers);
    gather_pieces(job, 0);
    threads_end(helpers ? self->pool : NULL);
    Py_END_ALLOW_THREADS
    if (has_pool) self->is_busy = 0;
    workspace_free(own[0]);
    return check_job(job);
}

/* ---- rows, with the GIL ----------------------------------------------------------------- */

/* Where a transition is stored. */
typedef struct {
    const Segment *segment;
    Py_ssize_t row; /* number of the transition in the segment */
    Py_ssize_t lane;
} location;

/* Segments per tick, so that a tick multiplied by it gives the number of its segment if all segments are of equal length. */
static double estimate_density(const Catalog *catalog) {
    const Py_ssize_t last = catalog->segment_count - 1;
    if (last < 1) return 0;
    return (double)last / (double)(catalog->first_ticks[last] - catalog->first_ticks[0]);
}

/* The segment that holds `tick`, which must be held. Most segments are of equal length, so a guess is usually right, and
 * it takes a third of the time of a search. */
static inline const Segment *find_segment(const Catalog *catalog, double density, int64_t tick) {
    const Py_ssize_t guess = (Py_ssize_t)((double)(tick - catalog->first_ticks[0]) * density);
    if (guess >= 0 && guess < catalog->segment_count) {
        const Segment *const segment = catalog->segments[guess];
        if (tick >= segment->first_tick && tick < segment->first_tick + segment->ticks) return segment;
    }
    return catalog->segments[catalog_find(catalog, tick)];
}

/* Find all transitions from `first_tick` on. -1 with an IndexError if one is older, or not in the catalog. */
static int locate(const Catalog *catalog, int64_t first_tick, const int64_t *ids, Py_ssize_t count, location *locations) {
    const int64_t lanes = catalog->lanes;
    const int64_t first_id = first_tick * lanes, next_id = catalog_next_tick(catalog) * lanes;
    const double density = estimate_density(catalog);
    for (Py_ssize_t i = 0; i < count; i++) {
        const int64_t id = ids[i]; /* read once, because another thread may write to the array */
        if (id < first_id || id >= next_id) {
            PyErr_Format(PyExc_IndexError, "id %lld is not held; ids %lld to %lld are", (long long)id, (long long)first_id,
                         (long long)next_id - 1);
            return -1;
        }
        const int64_t tick = lanes == 1 ? id : id / lanes;
        const Segment *const segment = find_segment(catalog, density, tick);
        locations[i].segment = segment;
        locations[i].row = (Py_ssize_t)(id - segment->first_tick * lanes);
        locations[i].lane = (Py_ssize_t)(id - tick * lanes);
    }
    return 0;
}

/* The row of a part of rows or shared rows, or the observation of a paired one. */
static inline const uint8_t *row_at(const Part *part, Py_ssize_t row) {
    return part->rows + (part->kind == PART_PAIRED ? 2 * row : row) * part->stored_bytes;
}

/* The next observation of a shared, paired or packed part; NULL if it must be read from the packed run. */
static inline const uint8_t *next_row_at(const Part *part, Py_ssize_t row) {
    if (part->kind == PART_PAIRED) return part->rows + (2 * row + 1) * part->row_bytes;
    const uint8_t *const exception = find_exception(part, row);
    if (exception || part->kind == PART_PACKED) return exception;
    return part->rows + (row + part->lanes) * part->row_bytes;
}

static void copy_packed_row(const Part *part, Py_ssize_t row, int is_next, uint8_t *out) {
    const uint8_t *const exception = is_next ? next_row_at(part, row) : NULL;
    if (exception) memcpy(out, exception, (size_t)part->row_bytes);
    else packed_read((const PackedRun *)part->packed, part->packed_leaf, row + (is_next ? part->lanes : 0), out);
}

/* Load a row that is copied soon, and the observation after it. */
PREFETCHER void prefetch_row(const Part *part, Py_ssize_t row) {
    if (part->rows) {
        const uint8_t *const from = row_at(part, row);
        FETCH_SOON(from);
        if (part->stored_bytes > 1) FETCH_SOON(from + part->stored_bytes - 1);
        if (part->kind == PART_SHARED) FETCH_SOON(from + (part->lanes + 1) * part->row_bytes - 1);
    } else if (part->cursors) {
        FETCH_SOON(&part->cursors[row]);
    }
}

/* Load the row of a column that is copied `ROWS_AHEAD` rows after row `i`. */
PREFETCHER void prefetch_ahead(int column, const location *locations, Py_ssize_t count, Py_ssize_t i) {
    if (i + ROWS_AHEAD >= count) return;
    const location *const ahead = &locations[i + ROWS_AHEAD];
    prefetch_row(ahead->segment->parts[column], ahead->row);
}

/* Load the packed rows of all wanted columns, and then the frames that they refer to. The packed columns of a segment share a
 * run, so it is enough to load the rows of the first one. */
static void prefetch_packed(const Catalog *catalog, const location *locations, Py_ssize_t count, const Py_ssize_t *wanted) {
    int first = -1, has_obs = 0, has_next = 0;
    for (int column = 0; column < catalog->column_count - 1; column++) {
        if (locations[0].segment->parts[column]->kind != PART_PACKED) continue;
        if (first < 0) first = column;
        has_obs |= wanted[2 * column] != 0;
        has_next |= wanted[2 * column + 1] != 0;
    }
    if (!has_obs && !has_next) return;
    for (Py_ssize_t i = 0; i < count; i++) {
        const Part *const part = locations[i].segment->parts[first];
        if (part->kind == PART_PACKED) packed_prefetch((const PackedRun *)part->packed, locations[i].row);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        const Part *const part = locations[i].segment->parts[first];
        if (part->kind != PART_PACKED) continue;
        if (has_obs) packed_prefetch_frames((const PackedRun *)part->packed, locations[i].row);
        if (has_next) packed_prefetch_frames((const PackedRun *)part->packed, locations[i].row + part->lanes);
    }
}

/* The part of a column that a transition's segment stores as slices, or NULL. */
static inline const Part *sliced_part(const location *where, int column) {
    const Part *const part = where->segment->parts[column];
    return part->kind == PART_SLICED ? part : NULL;
}

/* Load the parts of all columns. Where observations are slices, load also the header of their compressed block and the
 * entries of the log that name the slices. Each loop reads what the loop before it loaded, so that a loop waits for memory
 * once and not for every row. */
PREFETCHER void prefetch_parts(const Catalog *catalog, const location *locations, Py_ssize_t count, const Py_ssize_t *wanted) {
    int sliced[MAX_COLUMNS], sliced_count = 0;
    for (int column = 0; column < catalog->column_count; column++) {
        const int is_wanted = wanted[2 * column] != 0 || wanted[2 * column + 1] != 0;
        if (is_wanted && sliced_part(&locations[0], column)) sliced[sliced_count++] = column;
    }
    if (sliced_count == 0) return; /* Other functions load plain and packed rows ahead. */
    for (Py_ssize_t i = 0; i < count; i++) FETCH_SOON(locations[i].segment->parts);
    for (Py_ssize_t i = 0; i < count; i++)
        for (int column = 0; column < catalog->column_count; column++)
            for (size_t at = 0; at < sizeof(Part); at += CACHE_LINE)
                FETCH_SOON((const uint8_t *)locations[i].segment->parts[column] + at);
    for (Py_ssize_t i = 0; i < count; i++)
        for (int k = 0; k < sliced_count; k++) {
            const Part *const part = sliced_part(&locations[i], sliced[k]);
            if (!part) continue;
            FETCH_SOON(&part->cursors[locations[i].row]);
            FETCH_SOON(&part->block->form);
        }
    for (Py_ssize_t i = 0; i < count; i++)
        for (int k = 0; k < sliced_count; k++) {
            const Part *const part = sliced_part(&locations[i], sliced[k]);
            if (!part) continue;
            const Py_ssize_t start = part->cursors[locations[i].row] & ~NEXT_FOLLOWS;
            FETCH_SOON((const uint8_t *)part->log + (start * part->lanes + locations[i].lane) * part->log_width);
            FETCH_SOON(part->block->form);
        }
}

/* Copy the rows of a column, except those in sliced parts. */
static void copy_rows(int column, const location *locations, Py_ssize_t count, int is_next, uint8_t *out) {
    for (Py_ssize_t i = 0; i < count; i++) {
        prefetch_ahead(column, locations, count, i);
        const Part *const part = locations[i].segment->parts[column];
        const Py_ssize_t row_bytes = part->row_bytes;
        uint8_t *const to = out + i * row_bytes;
        if (part->kind == PART_SLICED) continue;
        if (part->kind == PART_PACKED) copy_packed_row(part, locations[i].row, is_next, to);
        else if (is_narrow(part->kind)) narrow_read(part, locations[i].row, to);
        else copy_bytes(to, is_next ? next_row_at(part, locations[i].row) : row_at(part, locations[i].row), (size_t)row_bytes);
    }
}

static void copy_flags(int column, const location *locations, Py_ssize_t count, int flag, uint8_t *out) {
    for (Py_ssize_t i = 0; i < count; i++) {
        prefetch_ahead(column, locations, count, i);
        out[i] = (locations[i].segment->parts[column]->rows[locations[i].row] & flag) != 0;
    }
}

static void copy_ended(int column, const location *locations, Py_ssize_t count, float *out) {
    for (Py_ssize_t i = 0; i < count; i++) {
        prefetch_ahead(column, locations, count, i);
        const uint8_t flags = locations[i].segment->parts[column]->rows[locations[i].row];
        out[i] = (flags & (FLAG_TERMINATED | FLAG_TRUNCATED)) == FLAG_TERMINATED ? 1.0F : 0.0F;
    }
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

/* List the slices of all sliced observations of a column in the job, whose first `used` numbers are in use. Return how many
 * are in use then. */
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

/* ---- gather ------------------------------------------------------------------------------ */

/* What an output looks like: (count, *shape) of a dtype. */
typedef struct {
    int type_number;
    int ndim; /* without the first axis */
    const Py_ssize_t *shape;
    Py_ssize_t row_bytes;
} output_form;

/* Find the form of output `number`. -1 with an exception set if there is no such output. */
static int find_output(const Catalog *catalog, long number, output_form *form) {
    static const Py_ssize_t one[1] = {1};
    const int columns = catalog->column_count;
    if (number == 2 * columns + OUTPUT_FLAGS) {
        *form = (output_form){NPY_UINT8, 0, NULL, 1};
        return 0;
    }
    if (number == 2 * columns + OUTPUT_ENDED) {
        *form = (output_form){NPY_FLOAT32, 1, one, (Py_ssize_t)sizeof(float)};
        return 0;
    }
    const column *const c = number >= 0 && number < 2 * columns ? &catalog->columns[number / 2] : NULL;
    if (!c || (number % 2 == 1 && c->role == ROLE_ROW)) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "output %ld does not exist", number);
        return -1;
    }
    /* Before the first reward, whose dtype is not known, a batch can only have no rows. */
    const int type_number = c->type_number < 0 ? NPY_FLOAT64 : c->type_number;
    *form = (output_form){c->role == ROLE_FLAGS ? NPY_BOOL : type_number, c->ndim, c->shape, c->row_bytes};
    return 0;
}

/* Return an array of `count` rows at `data`, which `owner` keeps alive. NULL with an exception set. */
static PyObject *output_array(const output_form *form, Py_ssize_t count, uint8_t *data, PyObject *owner) {
    npy_intp shape[MAX_NDIM + 1] = {count};
    for (int i = 0; i < form->ndim; i++) shape[i + 1] = form->shape[i];
    PyObject *const array = PyArray_SimpleNewFromData(form->ndim + 1, shape, form->type_number, data);
    if (array) PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(owner)); /* takes the reference */
    return array;
}

/* Bytes of `count` rows, rounded up so that the next array is aligned. */
static Py_ssize_t output_bytes(const output_form *form, Py_ssize_t count) {
    return (count * form->row_bytes + RECYCLED_ALIGNMENT - 1) / RECYCLED_ALIGNMENT * RECYCLED_ALIGNMENT;
}

/* Check the numbers of all outputs. `wanted` gets the place of each output in the tuple, plus 1. Return the bytes of all
 * small arrays together, or -1 with an exception set. */
static Py_ssize_t check_outputs(const Catalog *catalog, PyObject *outputs, Py_ssize_t count, Py_ssize_t *wanted,
                                output_form *forms) {
    Py_ssize_t small_bytes = 0;
    for (Py_ssize_t k = 0; k < PyTuple_Size(outputs); k++) {
        const long number = PyLong_AsLong(PyTuple_GetItem(outputs, k));
        if (find_output(catalog, number, &forms[k]) < 0) return -1;
        if (wanted[number]) {
            PyErr_Format(PyExc_ValueError, "output %ld is asked for twice", number);
            return -1;
        }
        wanted[number] = k + 1;
        const Py_ssize_t bytes = output_bytes(&forms[k], count);
        if (bytes < MIN_OWN_BYTES) small_bytes += bytes;
    }
    return small_bytes;
}

/* Make the arrays of all outputs in the memory of `into`, one after another. NULL with an exception set. */
static PyObject *place_outputs(PyArrayObject *into, const output_form *forms, Py_ssize_t output_count, Py_ssize_t count) {
    Py_ssize_t bytes = 0;
    for (Py_ssize_t k = 0; k < output_count; k++) bytes += output_bytes(&forms[k], count);
    uint8_t *next = PyArray_DATA(into);
    if (PyArray_TYPE(into) != NPY_UINT8 || !PyArray_ISCARRAY(into) || PyArray_NBYTES(into) < bytes ||
        (uintptr_t)next % RECYCLED_ALIGNMENT != 0) {
        PyErr_Format(PyExc_ValueError, "into must be a writable array of at least %zd bytes at a multiple of %d", bytes,
                     (int)RECYCLED_ALIGNMENT);
        return NULL;
    }
    PyObject *const arrays = PyTuple_New(output_count);
    for (Py_ssize_t k = 0; arrays && k < output_count; k++) {
        PyObject *const array = output_array(&forms[k], count, next, (PyObject *)into);
        if (!array) {
            Py_DECREF(arrays);
            return NULL;
        }
        PyTuple_SetItem(arrays, k, array);
        next += output_bytes(&forms[k], count);
    }
    return arrays;
}

/* Make the arrays of all outputs, in the memory of `into` if that is not NULL. `wanted` gets the place of each output in
 * the tuple, plus 1. NULL with an exception. */
static PyObject *make_outputs(recycler *r, const Catalog *catalog, PyObject *outputs, Py_ssize_t count,
                              PyArrayObject *into, Py_ssize_t *wanted) {
    output_form forms[2 * MAX_COLUMNS + EXTRA_OUTPUTS];
    const Py_ssize_t output_count = PyTuple_Size(outputs);
    if (output_count > 2 * catalog->column_count + EXTRA_OUTPUTS) {
        PyErr_SetString(PyExc_ValueError, "an output is asked for twice");
        return NULL;
    }
    const Py_ssize_t small_bytes = check_outputs(catalog, outputs, count, wanted, forms);
    if (small_bytes < 0) return NULL;
    if (into) return place_outputs(into, forms, output_count, count);
    Recycled *const shared = recycled_new(r, small_bytes);
    PyObject *const arrays = shared ? PyTuple_New(output_count) : NULL;
    uint8_t *next = shared ? recycled_start(shared) : NULL;
    int failed = !arrays;
    for (Py_ssize_t k = 0; !failed && k < output_count; k++) {
        const Py_ssize_t bytes = output_bytes(&forms[k], count);
        PyObject *array = NULL;
        if (bytes < MIN_OWN_BYTES) {
            array = output_array(&forms[k], count, next, (PyObject *)shared);
            next += bytes;
        } else {
            Recycled *const own = recycled_new(r, bytes);
            if (own) array = output_array(&forms[k], count, recycled_start(own), (PyObject *)own);
            Py_XDECREF((PyObject *)own);
        }
        failed = !array;
        if (array) PyTuple_SetItem(arrays, k, array);
    }
    Py_XDECREF((PyObject *)shared);
    if (failed) {
        Py_XDECREF(arrays);
        return NULL;
    }
    return arrays;
}

static uint8_t *output_data(PyObject *arrays, Py_ssize_t place) {
    return place ? PyArray_DATA((PyArrayObject *)PyTuple_GetItem(arrays, place - 1)) : NULL;
}

/* Copy the rows `from` to `end` - 1 of everything that is not sliced. */
static void copy_piece(const Catalog *catalog, const location *locations, Py_ssize_t from, Py_ssize_t end,
                       PyObject *arrays, const Py_ssize_t *wanted) {
    const location *const some = locations + from;
    const Py_ssize_t count = end - from;
    const int flags = catalog->column_count - 1;
    for (int i = 0; i < flags; i++) {
        const Py_ssize_t skipped = from * catalog->columns[i].row_bytes;
        uint8_t *const first = output_data(arrays, wanted[2 * i]), *const second = output_data(arrays, wanted[2 * i + 1]);
        if (first) copy_rows(i, some, count, 0, first + skipped);
        if (second) copy_rows(i, some, count, 1, second + skipped);
    }
    const Py_ssize_t *const others = wanted + 2 * catalog->column_count;
    uint8_t *const terminated = output_data(arrays, wanted[2 * flags]);
    uint8_t *const truncated = output_data(arrays, wanted[2 * flags + 1]);
    uint8_t *const stored = output_data(arrays, others[OUTPUT_FLAGS]);
    float *const ended = (float *)output_data(arrays, others[OUTPUT_ENDED]);
    if (terminated) copy_flags(flags, some, count, FLAG_TERMINATED, terminated + from);
    if (truncated) copy_flags(flags, some, count, FLAG_TRUNCATED, truncated + from);
    if (stored) copy_rows(flags, some, count, 0, stored + from);
    if (ended) copy_ended(flags, some, count, ended + from);
}

/* Copy everything that is not sliced, and list the slices of the rest in the job. Return the bytes of these slices in the
 * batch, -1 with an exception set. */
static Py_ssize_t copy_small(const Catalog *catalog, const location *locations, Py_ssize_t count, PyObject *arrays,
                             const Py_ssize_t *wanted, gather_job *job) {
    Py_ssize_t observations = 0, numbers = 0, used = 0, bytes = 0;
    for (Py_ssize_t from = 0; from < count; from += PIECE_ROWS) {
        const Py_ssize_t end = from + PIECE_ROWS < count ? from + PIECE_ROWS : count;
        prefetch_parts(catalog, locations + from, end - from, wanted);
        prefetch_packed(catalog, locations + from, end - from, wanted);
        copy_piece(catalog, locations, from, end, arrays, wanted);
    }
    for (int i = 0; i < catalog->column_count; i++) {
        const column *const c = &catalog->columns[i];
        const int outputs = (wanted[2 * i] != 0) + (wanted[2 * i + 1] != 0);
        if (c->role != ROLE_OBSERVATION || outputs == 0) continue;
        const Py_ssize_t sliced = count_sliced(i, locations, count, &numbers);
        observations += sliced;
        bytes += sliced * c->row_bytes * outputs;
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

/* Find the first tick that `gather` may read: the first one that is held, or an older one if `given` names it and its
 * segment is in the catalog. -1 with an exception set. */
static int64_t find_first_tick(const Catalog *catalog, PyObject *given) {
    if (!given) return catalog_first_tick(catalog);
    const int64_t first_tick = PyLong_AsLongLong(given);
    if (first_tick == -1 && PyErr_Occurred()) return -1;
    const int64_t oldest = catalog->segment_count > 0 ? catalog->first_ticks[0] : catalog->floor_tick;
    return first_tick > oldest ? first_tick : oldest;
}

/* gather(catalog, ids, outputs, first_tick=catalog.first_tick, into=None) -> tuple of arrays */
static PyObject *reader_gather(PyObject *self, PyObject *const *arguments, Py_ssize_t argument_count) {
    PyObject *const into = argument_count == 5 && arguments[4] != Py_None ? arguments[4] : NULL;
    if (argument_count < 3 || argument_count > 5 || Py_TYPE(arguments[0]) != catalog_type ||
        !PyArray_Check(arguments[1]) || !PyTuple_Check(arguments[2]) || (into && !PyArray_Check(into))) {
        PyErr_SetString(PyExc_TypeError, "gather takes a catalog, an array of ids, a tuple of outputs, a tick and an array");
        return NULL;
    }
    Catalog *const catalog = (Catalog *)arguments[0];
    PyObject *const given_tick = argument_count > 3 ? arguments[3] : NULL;
    PyArrayObject *const ids = (PyArrayObject *)arguments[1];
    if (PyArray_TYPE(ids) != NPY_INT64 || PyArray_NDIM(ids) != 1 || !PyArray_IS_C_CONTIGUOUS(ids)) {
        PyErr_SetString(PyExc_TypeError, "ids must be a contiguous array of int64");
        return NULL;
    }
    const Py_ssize_t count = PyArray_SIZE(ids);
    Py_ssize_t wanted[2 * MAX_COLUMNS + EXTRA_OUTPUTS] = {0};
    gather_job job = {0};
    Py_INCREF((PyObject *)catalog); /* keeps segments and parts alive without the GIL */
    PyObject *arrays =
        make_outputs(((Reader *)self)->recycler, catalog, arguments[2], count, (PyArrayObject *)into, wanted);
    location *const locations = malloc(((size_t)count + 1) * sizeof *locations);
    int failed = !arrays;
    if (!failed && !locations) {
        PyErr_NoMemory();
        failed = 1;
    }
    /* Allocating arrays can run the garbage collector and with it any code, so ids are checked after that. */
    const int64_t first_tick = failed ? -1 : find_first_tick(catalog, given_tick);
    if (!failed) failed = first_tick < 0 || locate(catalog, first_tick, PyArray_DATA(ids), count, locations) < 0;
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

/* ---- slices of windows -------------------------------------------------------------------- */

static int is_same_window(const window *a, const window *b) {
    return a->count == b->count && a->outer == b->outer && a->run_bytes == b->run_bytes && a->shift == b->shift;
}

/* Return the part of the first transition that is stored as slices of a window. If there is none, and `with_whole` is
 * true, return that of the first observation of one slice. NULL if there is none, either. */
static const Part *find_windowed(int column, const location *locations, Py_ssize_t count, int with_whole) {
    const Part *whole = NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        const Part *const part = locations[i].segment->parts[column];
        if (part->kind != PART_SLICED) continue;
        if (part->cut.count > 1) return part;
        if (!whole) whole = part;
    }
    return with_whole ? whole : NULL;
}

/* List the slices of all transitions, one transition after another, to be written to `out`. A slice is listed once if an
 * observation and the next one share it, or a transition and the one before it in the batch. `starts` gets the number of
 * the first slice of every observation, and then of every next observation; -1 for transitions that are stored in another
 * form. `cuts` has windows of 0, 1, 2 and so on slices. Return the number of slices. */
static Py_ssize_t list_windows(int column, const location *locations, Py_ssize_t count, const window *cut,
                               const window *cuts, uint8_t *out, int32_t *starts, gather_job *job) {
    const Part *listed = NULL; /* whose entries from `first` to `end` - 1 of the log of `lane` were listed last */
    Py_ssize_t lane = 0, first = 0, end = 0, used = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const Part *const part = locations[i].segment->parts[column];
        if (part->kind != PART_SLICED || !is_same_window(&part->cut, cut)) {
            starts[i] = starts[count + i] = -1;
            continue;
        }
        const uint32_t cursor = part->cursors[locations[i].row];
        const Py_ssize_t start = cursor & ~NEXT_FOLLOWS;
        const Py_ssize_t step = cursor & NEXT_FOLLOWS ? cut->count : cut->shift;
        if (part != listed || locations[i].lane != lane || start < first || start > end) {
            listed = part;
            lane = locations[i].lane;
            first = end = start;
        }
        starts[i] = (int32_t)(used - (end - start));
        starts[count + i] = (int32_t)(used - (end - start) + step);
        const Py_ssize_t added = start + step + cut->count - end;
        if (added <= 0) continue;
        observation *const v = &job->observations[job->count++];
        *v = (observation){.form = Py_NewRef(part->block->form), .cut = &cuts[added], .slice_bytes = part->block->slice_bytes};
        v->obs = out + used * v->slice_bytes;
        v->first = used;
        for (Py_ssize_t s = 0; s < added; s++) job->numbers[used + s] = log_entry(part, end + s, lane);
        used += added;
        end += added;
    }
    return used;
}

/* Copy or decode the slices of windows. Return the number of slices, or -1 with an exception set. */
static Py_ssize_t copy_windows(Reader *self, int column, const location *locations, Py_ssize_t count, const window *cut,
                               uint8_t *out, int32_t *starts) {
    const Py_ssize_t slice_bytes = cut->outer * cut->run_bytes, max_added = 2 * cut->count; /* slices of one transition */
    gather_job job = {0};
    if (max_added > INT32_MAX / (count + 1)) { /* `starts` has numbers of 32 bits. */
        PyErr_Format(PyExc_ValueError, "%zd observations of %zd slices are too many for one call", count, cut->count);
        return -1;
    }
    job.observations = malloc((size_t)count * sizeof *job.observations);
    job.numbers = malloc((size_t)(count * max_added) * sizeof *job.numbers);
    window *const cuts = malloc((size_t)(max_added + 1) * sizeof *cuts);
    Py_ssize_t used = -1;
    if (!job.observations || !job.numbers || !cuts) {
        PyErr_NoMemory();
    } else {
        for (Py_ssize_t n = 0; n <= max_added; n++)
            cuts[n] = (window){.count = n, .outer = 1, .run_bytes = slice_bytes, .shift = 1};
        used = list_windows(column, locations, count, cut, cuts, out, starts, &job);
        if (used > 0 && run_job(self, &job, used * slice_bytes) < 0) used = -1;
    }
    for (Py_ssize_t i = 0; i < job.count; i++) Py_DECREF(job.observations[i].form);
    free(job.observations);
    free(job.numbers);
    free(cuts);
    return used;
}

/* Write the slices of all located transitions to `into`. Return what `gather_windows` returns. NULL with an exception set. */
static PyObject *gather_located(Reader *self, int column, const location *locations, Py_ssize_t count, PyArrayObject *into,
                                int with_whole) {
    const Part *const part = find_windowed(column, locations, count, with_whole);
    if (!part) Py_RETURN_NONE;
    npy_intp shape[2] = {2, count};
    PyObject *const starts = PyArray_SimpleNew(2, shape, NPY_INT32);
    if (!starts) return NULL;
    const window cut = part->cut;
    const Py_ssize_t slices =
        copy_windows(self, column, locations, count, &cut, PyArray_DATA(into), PyArray_DATA((PyArrayObject *)starts));
    if (slices >= 0) return Py_BuildValue("nNnnn", slices, starts, cut.count, cut.outer, cut.run_bytes);
    Py_DECREF(starts);
    return NULL;
}

/* gather_windows(catalog, ids, column, first_tick, into, with_whole) -> (slices, starts, count, outer, run_bytes) or None */
static PyObject *reader_gather_windows(PyObject *self, PyObject *const *arguments, Py_ssize_t argument_count) {
    if (argument_count != 6 || Py_TYPE(arguments[0]) != catalog_type || !PyArray_Check(arguments[1]) ||
        !PyArray_Check(arguments[4])) {
        PyErr_SetString(PyExc_TypeError, "gather_windows takes a catalog, an array of ids, a column, a tick, an array and a bool");
        return NULL;
    }
    Catalog *const catalog = (Catalog *)arguments[0];
    PyArrayObject *const ids = (PyArrayObject *)arguments[1], *const into = (PyArrayObject *)arguments[4];
    const long column = PyLong_AsLong(arguments[2]);
    if (column == -1 && PyErr_Occurred()) return NULL;
    if (PyArray_TYPE(ids) != NPY_INT64 || PyArray_NDIM(ids) != 1 || !PyArray_IS_C_CONTIGUOUS(ids) || column < 0 ||
        column >= catalog->column_count || catalog->columns[column].role != ROLE_OBSERVATION) {
        PyErr_SetString(PyExc_ValueError, "ids must be a contiguous array of int64, and column the number of an observation");
        return NULL;
    }
    const Py_ssize_t count = PyArray_SIZE(ids);
    if (PyArray_TYPE(into) != NPY_UINT8 || !PyArray_ISCARRAY(into) ||
        PyArray_NBYTES(into) < 2 * count * catalog->columns[column].row_bytes) {
        PyErr_SetString(PyExc_ValueError, "into must be a writable array with room for all observations");
        return NULL;
    }
    if (count == 0) Py_RETURN_NONE;
    location *const locations = malloc((size_t)count * sizeof *locations);
    if (!locations) return PyErr_NoMemory();
    Py_INCREF((PyObject *)catalog); /* keeps segments and parts alive without the GIL */
    PyObject *result = NULL;
    const int64_t first_tick = find_first_tick(catalog, arguments[3]);
    if (first_tick >= 0 && locate(catalog, first_tick, PyArray_DATA(ids), count, locations) == 0)
        result = gather_located((Reader *)self, (int)column, locations, count, into, arguments[5] == Py_True);
    free(locations);
    Py_DECREF((PyObject *)catalog);
    return result;
}

/* ---- threads ----------------------------------------------------------------------------- */

static PyObject *reader_help(PyObject *object, PyObject *Py_UNUSED(none)) {
    Reader *const self = (Reader *)object;
    self->helpers++;
    Py_BEGIN_ALLOW_THREADS
    threads_help(self->pool);
    Py_END_ALLOW_THREADS
    self->helpers--;
    Py_RETURN_NONE;
}

static PyObject *reader_dismiss(PyObject *object, PyObject *Py_UNUSED(none)) {
    threads_dismiss(((Reader *)object)->pool);
    Py_RETURN_NONE;
}

/* Reader(max_kept_bytes=0, bytes_per_thread=BYTES_PER_THREAD) */
static int reader_init(PyObject *object, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"max_kept_bytes", "bytes_per_thread", NULL};
    Reader *const self = (Reader *)object;
    Py_ssize_t max_kept_bytes = 0, bytes_per_thread = BYTES_PER_THREAD;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|nn", names, &max_kept_bytes, &bytes_per_thread)) return -1;
    if (max_kept_bytes < 0 || bytes_per_thread < 1) {
        PyErr_SetString(PyExc_ValueError, "max_kept_bytes must be at least 0, and bytes_per_thread at least 1");
        return -1;
    }
    self->bytes_per_thread = bytes_per_thread;
    self->recycler = recycler_new(max_kept_bytes);
    self->pool = threads_new();
    if (!self->pool || !self->recycler) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static PyObject *make_reader(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    return object_make(type, arguments, keywords, reader_init);
}

static void reader_dealloc(PyObject *object) {
    Reader *const self = (Reader *)object;
    for (int i = 0; i < MAX_THREADS; i++) workspace_free(self->workspaces[i]);
    if (self->pool) threads_free(self->pool);
    recycler_release(self->recycler);
    object_free(object);
}

static PyMethodDef reader_methods[] = {
    {"gather", (PyCFunction)(void (*)(void))reader_gather, METH_FASTCALL, "Return one array per output."},
    {"gather_windows", (PyCFunction)(void (*)(void))reader_gather_windows, METH_FASTCALL, "Return the slices of observations."},
    {"help", reader_help, METH_NOARGS, "Work on the gathers of other threads until `dismiss` is called."},
    {"dismiss", reader_dismiss, METH_NOARGS, "Make all calls of `help` return."},
    {NULL, NULL, 0, NULL},
};
static PyObject *reader_kept_bytes(PyObject *object, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(((Reader *)object)->recycler->kept_bytes);
}

static PyObject *reader_wanted_helpers(PyObject *object, void *Py_UNUSED(closure)) {
    return PyLong_FromLong(((Reader *)object)->wanted);
}

static PyGetSetDef reader_properties[] = {
    {"wanted_helpers", reader_wanted_helpers, NULL, "The most helpers that a gather could have used.", NULL},
    {"kept_bytes", reader_kept_bytes, NULL, "Memory of freed arrays that is kept for the next ones.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot reader_slots[] = {
    {Py_tp_doc, "Copies rows out of a catalog."},
    {Py_tp_new, (void *)make_reader},
    {Py_tp_dealloc, (void *)reader_dealloc},
    {Py_tp_methods, reader_methods},
    {Py_tp_getset, reader_properties},
    {0, NULL},
};
static PyType_Spec reader_spec = {"holdall._native.Reader", sizeof(Reader), 0, Py_TPFLAGS_DEFAULT, reader_slots};

int add_reader(PyObject *module) {
    PyTypeObject *const type = type_add(module, &reader_spec, "Reader");
    Py_XDECREF((PyObject *)type);
    return type ? 0 : -1;
}
