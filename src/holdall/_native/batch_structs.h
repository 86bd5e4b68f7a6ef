/* The structs of batches that C makes in one call: arrays of the host, and blocks on a device. See structs.h. */
#ifndef HOLDALL_BATCH_STRUCTS_H
#define HOLDALL_BATCH_STRUCTS_H

#include "structs.h"

/* ---- batches for the host ---------------------------------------------------------- */

enum { MOST_BATCH_FIELDS = 16, KEPT_MEMORIES = 16 };

/* Functions of Python's stable interface and of NumPy's binary interface that make arrays. */
typedef struct {
    void *array_type;
    void *byte_dtype;
    void *id_dtype;
    /* PyArray_NewFromDescr, which takes the dtype over, and PyArray_SetBaseObject, which takes the base over. */
    void *(*new_array)(void *, void *, int, const int64_t *, const int64_t *, void *, int, void *);
    int (*set_base)(void *, void *);
    void *(*new_tuple)(int64_t);
    int (*set_item)(void *, int64_t, void *);
    long long (*as_number)(void *);
    void *(*number)(long long);
    void (*clear_error)(void);
    void *(*save_thread)(void);
    void (*restore_thread)(void *);
    unsigned long (*own_thread)(void);
    void (*take)(void *);
    void (*drop)(void *);
} array_maker;

/* An array of a batch: a column of a table of rows, or a large field. */
typedef struct {
    void *dtype;
    int64_t dimensions;
    int64_t lengths[MOST_DIMENSIONS]; /* the first one is the batch's */
    int64_t column;                   /* -1: of a large field, ... */
    int64_t field;                    /* ... this one, ... */
    int64_t is_next;                  /* ... its next observations */
} batch_array;

/* A large field. */
typedef struct {
    const part *parts;
    int64_t part_count;
    int64_t obs_bytes;
    int64_t cursor_column; /* of the table of rows */
    int64_t is_sealed;     /* whether slices of it are */
} batch_field;

/* What batches are read from, and what they are made with. */
typedef struct {
    const array_maker *maker;
    const tick_writer *writer;
    const row_column *columns;
    int64_t column_count;
    const batch_array *arrays; /* of batches that are drawn, ... */
    int64_t array_count;
    const batch_array *gathered; /* ... and of those whose ids are given */
    int64_t gathered_count;
    batch_field field[MOST_BATCH_FIELDS];
    int64_t field_count;
    const int64_t *first_ticks;
    int64_t segments;
    void *kept; /* an object that refers to all that large fields are read from */
    int64_t first_tick, capacity_ticks, lanes, ring_rows;
    int64_t most_rows; /* that there is scratch memory for, in the five arrays that follow */
    int64_t *ids;
    int64_t *drawn_lanes;
    int32_t *segment;
    int32_t *lane;
    decoder *const *decoders; /* one a thread, or NULL */
    void *pool;
    int64_t most_helpers, bytes_per_thread, sealed_bytes_per_thread, piece_bytes, bytes_without_gil;
    int64_t one_memory_bytes; /* short fields share one memory up to this size */
    int64_t least_kept_bytes, most_kept_bytes, kept_bytes;
    void *kept_owner[KEPT_MEMORIES]; /* arrays of bytes, or NULL, ... */
    int64_t kept_length[KEPT_MEMORIES]; /* ... and their lengths */
    const void *generator;
    uint32_t (*next_uint32)(void *);
    void *generator_state;
    const uint8_t *generator_is_locked;
    const uint64_t *lock_owner; /* the thread that holds the memory's lock, or 0 */
    const uint8_t *is_pending;  /* whether an interrupted call left anything to repair */
    const uint8_t *is_changed;  /* whether segments or their blocks are others than when this was described */
    int64_t is_open;            /* 0: batches are made another way now */
    uint64_t is_busy;           /* the thread that makes a batch, or 0 */
} batch_reader;

/* ---- batches that a device puts together ------------------------------------------- */

enum { MOST_DEVICE_FIELDS = 16, MOST_COPIED = 4 };

/* A field of a batch in slices, as device.cu declares it, too. Observations of all rows, then all next ones, lie at
 * `to`; a position counts slices there. */
typedef struct {
    const int64_t *places;    /* of slices that are brought: the byte after `base`, ... */
    const int32_t *positions; /* ... and where each goes */
    const int32_t *repeats;   /* pairs of positions: where a slice goes once more, and where it stands already */
    const uint8_t *base;
    uint8_t *to;
    int64_t first, end; /* of the places of one launch */
    int64_t end_repeat; /* number of the pairs */
    int64_t window, outer, run_bytes;
} device_field;

/* What one launch does. It is passed by value, and read nowhere else. */
typedef struct {
    const uint8_t *head_from; /* pinned memory: short fields */
    uint8_t *head_to;
    int64_t head_bytes;
    int64_t fields;
    device_field field[MOST_DEVICE_FIELDS];
} assembly;

/* Where a field of a batch lies on the host, and where in the pinned memory its places are written. */
typedef struct {
    const part *parts;
    int64_t part_count;
    const uint32_t *cursors; /* ring */
    const int64_t *starts;   /* by part: the byte after `base` where its slices begin, or -1 */
    int64_t are_named;       /* every slice is brought once; 0: it is on the device, where it is read as often as needed */
    int64_t places, positions, repeats; /* offsets in pinned memory */
    int64_t to;                         /* offset in the block on the device */
} sliced_source;

typedef struct {
    const void *source;
    int64_t offset;
    int64_t bytes;
} copied_array;

/* Where a row's observation lies. */
typedef struct {
    int32_t segment;
    int32_t lane;
    uint32_t cursor;
    uint32_t unused;
} row_place;

/* A batch that a device is to put together, and all that is needed for it. */
typedef struct {
    int64_t *ids;
    const int64_t *last_ids; /* where next observations are read; NULL: under `ids` */
    int64_t rows;
    uint32_t (*next_uint32)(void *); /* ids are drawn with it first, see holdall_draw; NULL: they are there */
    void *generator_state;
    int64_t filled, drawn_slots, newest;
    int64_t *drawn_lanes;
    int64_t first_id, next_id; /* held */
    int64_t ring_rows, lanes;
    const row_column *columns;
    int64_t column_count;
    const int64_t *first_ticks;
    int64_t segments;
    uint8_t *head;  /* pinned memory, which begins with short fields */
    uint8_t *block; /* of the device, which begins with the same */
    int64_t observed, rest, last_observed, last_rest; /* offsets of blocks of short fields */
    copied_array copied[MOST_COPIED];
    int64_t copied_count;
    sliced_source source[MOST_DEVICE_FIELDS];
    uint32_t *slots;    /* scratch memory: open addressing, the number of a place + 1, or 0; a table a field */
    int64_t slot_count; /* of a field: a power of two, at least twice the slices of both observations */
    row_place *found;   /* scratch memory: one a row */
    int64_t first_rows; /* rows whose slices are sent for before the rest is looked up */
    void *launch;       /* the address of cuLaunchKernel */
    void *bring, *finish; /* kernels */
    void *stream;
    void *record; /* the address of cuEventRecord, ... */
    void *event;  /* ... and what is recorded behind all launches; NULL: nothing */
    int64_t most_blocks;
    int64_t wrong; /* a row, or the driver's error */
    assembly task;
} batch_request;

#endif
