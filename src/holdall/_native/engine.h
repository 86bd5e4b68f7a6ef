/* The objects that hold transitions. writer.c changes them, reader.c reads them.
 *
 *   Catalog ── Segment ── Part ── Block ── Raw | Coded
 *
 * A catalog lists the segments that are held. A segment is a run of consecutive ticks with one part per column. Most
 * parts store rows. The part of a large observation stores slice numbers, and its block stores the slices.
 *
 * All of these are ordinary Python objects without Py_TPFLAGS_HAVE_GC. They are only changed while the GIL is held, and
 * every change is made inside one native call that runs no Python code. A thread that reads slices without the GIL owns
 * a reference to the Raw or Coded object that it reads; the bytes there never move, and a slice never changes once it
 * was stored. Everything else is read with the GIL.
 */
#ifndef HOLDALL_ENGINE_H
#define HOLDALL_ENGINE_H

#include "python_api.h"

#include "codec.h"

#include <string.h>

enum { MAX_COLUMNS = 256, MAX_NDIM = 16 };
#define MAX_ID (INT64_C(1) << 61) /* Ids below this number, and their sums and differences, fit into an int64. */

/* ---- columns ------------------------------------------------------------------------ */

/* The role of a column. Rows of an observation column come in pairs: an observation and the next one. */
enum { ROLE_OBSERVATION = 0, ROLE_ROW = 1, ROLE_FLAGS = 2 };

/* The bits of a row of the flags column. */
enum { FLAG_TERMINATED = 1, FLAG_TRUNCATED = 2, FLAG_INVALID = 4 };

/* One array of a transition: an observation leaf, an action leaf, the reward, an extra, or the flags. */
typedef struct {
    int role;
    int type_number;      /* NumPy's number of the dtype; -1: not known yet (rewards before the first one) */
    int ndim;             /* axes of one lane's row */
    Py_ssize_t shape[MAX_NDIM];
    Py_ssize_t row_bytes; /* bytes of one lane's row */
} column;

/* ---- slices ------------------------------------------------------------------------- */

/* Uncompressed slices, one after another. */
typedef struct {
    PyObject_HEAD
    uint8_t *data;
    Py_ssize_t capacity_bytes;
    Py_buffer *source; /* the buffer of another object that `data` belongs to; NULL: `data` is from `area_new` */
} Raw;

/* Compressed slices. codec.h describes `block`. The object owns the tables and the data that `block` points to. */
typedef struct {
    PyObject_HEAD
    coded_block block;
    PyObject *codec;         /* the codec that encoded the slices */
    PyObject *dictionary;    /* Dictionary that `block` refers to, or NULL */
    PyObject *owner;         /* keeps the file of the data open, or NULL */
    Py_ssize_t memory_bytes; /* bytes of the tables, and of data in memory */
    Py_buffer *source;       /* the buffer of another object that the data belongs to; NULL: it is from `area_new` */
} Coded;

/* The unique slices of one field. `form` is the only thing about a closed block that changes. */
typedef struct {
    PyObject_HEAD
    uint64_t serial;     /* number that no other block gets, so checkpoints recognise a block without keeping it alive */
    Py_ssize_t slice_bytes;
    Py_ssize_t used;     /* slices that are stored */
    Py_ssize_t capacity; /* slices that fit */
    int64_t first_tick;  /* first tick of the first segment that used the block; only for open blocks */
    PyObject *form;      /* Raw or Coded */
    uint64_t *hashes;    /* hash of each slice; NULL once the block is closed */
    uint32_t *slots;     /* open addressing: slice number + 1, or 0 for an empty slot */
    uint64_t mask;       /* number of slots - 1 */
    uint32_t *lanes;     /* lane that stored each slice first; NULL: one lane, not known, or no longer needed */
} Block;

/* How an observation is cut into slices. In memory an observation is `outer` stretches; each stretch has one run of
 * `run_bytes` bytes of every slice, in order. */
typedef struct {
    Py_ssize_t count;     /* slices of an observation */
    Py_ssize_t outer;     /* stretches of an observation */
    Py_ssize_t run_bytes; /* bytes of one slice in one stretch */
    Py_ssize_t shift;     /* slices that are new in the next observation */
} window;

/* The bit of a cursor that is set if the next observation does not overlap the observation, but follows it in the log. */
#define NEXT_FOLLOWS UINT32_C(0x80000000)

/* ---- parts -------------------------------------------------------------------------- */

enum {
    PART_ROWS = 0,   /* one row per transition */
    PART_SHARED = 1, /* one row per observation: the next observation is the row of the following tick */
    PART_PAIRED = 2, /* the observation and the next observation, both in full */
    PART_SLICED = 3, /* log and block */
    PART_PACKED = 4, /* a packed run, see packed.h */
    PART_HALVES = 5, /* the upper halves of float32 rows whose lower halves are zero */
    PART_BITS = 6,   /* one bit for each value of float32 rows of zeros and ones */
};

/* Whether the rows of a part of this kind are narrower than those of the column. A larger kind is narrower. */
static inline int is_narrow(int kind) { return kind >= PART_HALVES; }

/* What one segment stores of one column. */
typedef struct {
    PyObject_HEAD
    uint64_t serial;          /* number that no other part gets */
    int kind;
    int is_frozen;            /* a snapshot refers to this part, so a rewrite must copy it first */
    Py_ssize_t lanes;
    Py_ssize_t row_bytes;     /* bytes of one lane's row or observation */
    Py_ssize_t stored_bytes;  /* bytes of a row in `rows`; fewer than `row_bytes` if the part is narrow */
    Py_ssize_t capacity;      /* ticks that fit */

    /* Rows. Transition (tick, lane) has row tick * lanes + lane; ticks count from the segment's first. Shared parts
     * have one tick more than the segment, and paired ones store the next observation after each observation. */
    uint8_t *rows;

    /* Exceptions of a shared part: next observations that are not the following tick's observation. */
    uint32_t *exception_rows; /* transition numbers in the segment, ascending */
    uint8_t *exceptions;
    Py_ssize_t exception_count;
    Py_ssize_t exception_capacity;

    /* Sliced parts. A lane's log is a list of slice numbers. Entry e of lane l is log[e * lanes + l]. */
    window cut;
    Block *block;
    Py_ssize_t slice_count; /* slices of the block that the log may name; 0 while the part is open: see block->used */
    uint32_t *cursors;      /* by transition: the first log entry of its observation, and NEXT_FOLLOWS */
    void *log;
    int log_width;          /* bytes of an entry: 2 or 4; 4 while open */
    Py_ssize_t log_rows;    /* entries per lane that are allocated; once closed: the longest lane's */
    Py_ssize_t broken;      /* transitions whose next observation does not overlap as the window says */

    /* Packed parts. */
    PyObject *packed;       /* PackedRun */
    int packed_leaf;        /* number of the column's leaf in the run */
} Part;

/* ---- segments and catalogs ---------------------------------------------------------- */

/* A run of consecutive ticks. The last segment of a writer's catalog is open: `ticks` grows with every append. */
typedef struct {
    PyObject_HEAD
    int64_t first_tick;
    Py_ssize_t ticks;
    Py_ssize_t lanes;
    Py_ssize_t invalid_count; /* entries that are not transitions */
    int part_count;
    Part **parts; /* owned */
} Segment;

/* The segments that are held, oldest first, without gaps. Immutable, except that the last segment may be open and that a
 * rewrite changes rows and `flags_changed`. */
typedef struct {
    PyObject_HEAD
    int column_count;
    const column *columns; /* owned */
    Py_ssize_t lanes;
    int64_t floor_tick;       /* older ticks are not held, even if their segment is */
    int64_t capacity_ticks;   /* the most ticks that are held */
    Py_ssize_t segment_count;
    Segment **segments;       /* owned */
    int64_t *first_ticks;     /* of each segment, for binary search */
    int has_invalid;          /* whether a segment other than the last has entries that are not transitions */
    int64_t flags_changed;    /* rewrites of the flags column; final once the catalog was replaced */
} Catalog;

extern PyTypeObject *raw_type, *coded_type, *block_type, *part_type, *segment_type, *catalog_type;

/* The tick after the newest one. */
static inline int64_t catalog_next_tick(const Catalog *c) {
    if (c->segment_count == 0) return c->floor_tick;
    const Segment *const last = c->segments[c->segment_count - 1];
    return last->first_tick + last->ticks;
}

/* The oldest tick that is held. */
static inline int64_t catalog_first_tick(const Catalog *c) {
    int64_t first = c->floor_tick;
    const int64_t next = catalog_next_tick(c);
    if (c->segment_count > 0 && c->first_ticks[0] > first) first = c->first_ticks[0];
    if (next - c->capacity_ticks > first) first = next - c->capacity_ticks;
    return first < next ? first : next;
}

/* The index of the segment that holds `tick`, which must be held. The loop has no branch that depends on the data, because
 * ids are drawn at random and the processor could not predict it. */
static inline Py_ssize_t catalog_find(const Catalog *c, int64_t tick) {
    const int64_t *first = c->first_ticks;
    for (Py_ssize_t count = c->segment_count; count > 1;) {
        const Py_ssize_t half = count / 2;
        first += first[half] <= tick ? half : 0;
        count -= half;
    }
    return first - c->first_ticks;
}

/* The slice number at index `i` of a log, which has the entries of all lanes. */
static inline uint32_t log_number(const Part *p, Py_ssize_t i) {
    return p->log_width == 2 ? ((const uint16_t *)p->log)[i] : ((const uint32_t *)p->log)[i];
}

/* The slice number in entry `e` of the log of `lane`. */
static inline uint32_t log_entry(const Part *p, Py_ssize_t e, Py_ssize_t lane) {
    return log_number(p, e * p->lanes + lane);
}

/* The exception of transition `row` of a shared part, or NULL if its next observation is the following row. Searches
 * without a branch that depends on the data, like `catalog_find`. */
static inline const uint8_t *find_exception(const Part *p, Py_ssize_t row) {
    if (p->exception_count == 0) return NULL;
    const uint32_t *found = p->exception_rows;
    for (Py_ssize_t count = p->exception_count; count > 1;) {
        const Py_ssize_t half = count / 2;
        found += found[half] <= (uint32_t)row ? half : 0;
        count -= half;
    }
    if (*found != (uint32_t)row) return NULL;
    return p->exceptions + (found - p->exception_rows) * p->row_bytes;
}

/* Copy `bytes` bytes. Most rows are short, and a call of memcpy takes longer than copying them. Two copies that overlap
 * cover every length from one size to twice that size. */
static inline void copy_bytes(uint8_t *to, const uint8_t *from, size_t bytes) {
    if (bytes >= 16 && bytes <= 128) {
        size_t done = 0;
        for (; done + 32 <= bytes; done += 32) memcpy(to + done, from + done, 32);
        if (done + 16 <= bytes) memcpy(to + done, from + done, 16);
        memcpy(to + bytes - 16, from + bytes - 16, 16);
    } else if (bytes >= 8 && bytes < 16) {
        memcpy(to, from, 8);
        memcpy(to + bytes - 8, from + bytes - 8, 8);
    } else if (bytes >= 4 && bytes < 8) {
        memcpy(to, from, 4);
        memcpy(to + bytes - 4, from + bytes - 4, 4);
    } else memcpy(to, from, bytes);
}

/* ---- memory ------------------------------------------------------------------------- */

/* Zeroed memory of `bytes` bytes. Large areas take RAM only as they are written to. NULL without an exception if
 * the system has no memory. Thread-safe. */
void *area_new(size_t bytes);
void area_free(void *area, size_t bytes);
/* Add `bytes`, which may be negative, to the count of stored data that was allocated with malloc. Thread-safe. */
void heap_count(long long bytes);
/* Ask the system for huge pages for an area that is about to be filled completely. */
void area_use_huge_pages(void *area, size_t bytes);
/* Give the whole pages after the first `used` bytes back to the system. */
void area_release_tail(void *area, size_t used, size_t bytes);

/* ---- objects, see objects.c --------------------------------------------------------- */

/* Allocate an object of a type of this module, zeroed. */
void *object_new(PyTypeObject *type);
/* Allocate an object and initialise it with `init`. So no Python code ever sees an object that is not initialised. NULL with
 * an exception set. */
PyObject *object_make(PyTypeObject *type, PyObject *arguments, PyObject *keywords, initproc init);
/* Free the memory of an object whose contents were freed. */
void object_free(void *object);

/* A type of this module from its description, added to the module. NULL with an exception set. */
PyTypeObject *type_add(PyObject *module, PyType_Spec *spec, const char *name);

/* Room for `bytes` bytes of slices, with undefined content. */
Raw *raw_new(Py_ssize_t bytes);
/* Return the memory of freed Raw objects, which is kept for the next ones, to the system. */
void spare_areas_free(void);
/* Make an open block for slices of `lanes` lanes. NULL with an exception set. */
Block *block_new(Py_ssize_t slice_bytes, Py_ssize_t capacity, Py_ssize_t lanes);
/* Free the index of a block: no slice will be added. */
void block_close(Block *block);
/* Return the number of a slice of `lane`, and store it if it is new. The caller made sure that one more slice fits. */
uint32_t block_intern(Block *block, const uint8_t *slice, Py_ssize_t lane);

/* A part with room for `capacity` ticks. `cut` and `block` are those of a sliced part; a reference to `block` is taken.
 * NULL with an exception set. */
Part *part_new(int kind, Py_ssize_t lanes, Py_ssize_t row_bytes, Py_ssize_t capacity, const window *cut, Block *block);
/* Return a copy of the first `ticks` ticks of a part, with exactly the memory that it needs. The block is shared. A
 * sliced part is cut after `log_rows` entries. NULL with an exception set. */
Part *part_trim(const Part *part, Py_ssize_t ticks, Py_ssize_t log_rows);
/* Copy the exceptions of a part to a part that has none. -1 with a MemoryError. */
int part_copy_exceptions(const Part *from, Part *to);
/* Rows that a part of this kind stores for `ticks` ticks. */
Py_ssize_t part_row_count(const Part *part, Py_ssize_t ticks);
/* Bytes in memory, without the block. */
Py_ssize_t part_bytes(const Part *part);

/* ---- narrow parts, see narrow.c ------------------------------------------------------ */

/* Bytes in which a part of `kind` stores a row. */
Py_ssize_t narrow_row_bytes(int kind, Py_ssize_t row_bytes);
/* Return the narrowest kind that represents float32 values: PART_BITS, PART_HALVES or PART_ROWS. */
int narrow_find_kind(const uint8_t *values, Py_ssize_t bytes);
/* Write a row to a narrow part that can represent it. */
void narrow_write(const Part *part, Py_ssize_t row, const uint8_t *values);
/* Read a row of a narrow part. */
void narrow_read(const Part *part, Py_ssize_t row, uint8_t *out);
/* Return a closed copy of the first `ticks` ticks of float32 rows, in the narrowest kind. NULL with an exception set. */
Part *narrow_close(const Part *part, Py_ssize_t ticks);
/* Return a copy of a closed narrow part as a part of a wider kind. NULL with an exception set. */
Part *narrow_widen(const Part *part, int kind);

/* A segment without ticks, whose parts are still NULL. */
Segment *segment_new(int64_t first_tick, Py_ssize_t lanes, int part_count);
/* Count the invalid entries of the ticks `from_tick` to `end_tick` - 1 of a segment, counted from its first. */
Py_ssize_t segment_count_invalid(const Segment *segment, Py_ssize_t from_tick, Py_ssize_t end_tick);

/* A catalog of the same columns, with room for `segment_count` segments, all NULL. */
Catalog *catalog_new(const Catalog *like, Py_ssize_t segment_count);
/* Parse a layout: ("shared",), ("paired",) or ("sliced", count, outer, run_bytes, shift). -1 with an exception set. */
int layout_parse(PyObject *layout, Py_ssize_t row_bytes, int *kind, window *cut);

#endif
