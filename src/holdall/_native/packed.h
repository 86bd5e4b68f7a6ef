/* Packed runs: the small observations of one closed segment, stored without the values that repeat in them.
 *
 * A plan divides the bytes of an observation among groups. Each group has a log of frames, which are pieces of
 * `frame_bytes` bytes. The record of a row has one cursor per group: the number of the first of the `window` consecutive
 * frames that have the row's bytes of the group. Examples of groups:
 *
 *   - Values that rarely change: many cursors point at one frame, and each distinct frame is stored once.
 *   - A history of the last H values: H frames in a row, of which the next row shares H - 1.
 *   - Values that always change: one group is dense. Its frame is stored in the record itself.
 *
 * Pieces name the bytes of a frame that belong to a leaf. Two pieces may name the same bytes, so columns that are equal
 * are stored once. A plan is a guess. `PackedRun.pack` reads every row back, and stores the rows that differ whole.
 *
 * A run is one allocation, its image, which is also what `to_bytes` returns:
 *
 *   packed_header | packed_leaf[] | packed_group[] | packed_piece[] | logs | records | exception rows | exceptions
 *
 * Integers are in the byte order of the machine. The magic number detects the other byte order. */
#ifndef HOLDALL_PACKED_H
#define HOLDALL_PACKED_H

#include "python_api.h"
#include "engine.h"

#include <string.h>

enum {
    MAX_PACKED_LEAF_BYTES = 4096,
    MAX_PACKED_GROUPS = 256,
    PACKED_CACHE_LINE = 64,
};

/* The start of an image. All other sizes follow from it and from the tables. */
typedef struct {
    uint32_t magic;
    uint32_t ticks; /* observations per lane: one more than the segment has transitions */
    uint32_t lanes;
    uint32_t leaf_count;
    uint32_t group_count;
    uint32_t piece_count;
    uint32_t exception_count;
    uint32_t reserved; /* 0 */
} packed_header;

/* One observation column. The fields marked * are computed from the others, and ignored in an image that is loaded. */
typedef struct {
    uint32_t bytes;
    uint32_t piece_count;
    uint32_t first_piece; /* * */
    uint32_t start;       /* * offset in a row that is stored whole */
} packed_leaf;

/* Columns that share a log, or the dense columns. */
typedef struct {
    uint32_t frame_bytes;
    uint32_t window;       /* frames of a row */
    uint32_t frame_count;  /* frames in the log; 0 for the dense group */
    uint32_t is_dense;
    uint32_t cursor_bytes; /* * 1, 2 or 4; 0: every row has the first frames, or the group is dense */
    uint32_t record_at;    /* * offset of the cursor, or of the dense frame, in a record */
    uint64_t log_at;       /* * offset of the log in the image */
} packed_group;

/* `count` stretches of `bytes` bytes. They are adjacent in the leaf, and `step` bytes apart in the frames. */
typedef struct {
    uint16_t group;
    uint16_t offset; /* in the leaf */
    uint16_t bytes;
    uint16_t count;
    int32_t at; /* offset of the first stretch from the row's first frame */
    int32_t step;
} packed_piece;

/* The observations of one segment. Immutable; safe to read from several threads. */
typedef struct {
    PyObject_HEAD
    uint8_t *image;       /* allocated with malloc */
    size_t counted_bytes; /* bytes of the image that `heap_count` counted */
    size_t image_bytes;
    packed_header *header;
    packed_leaf *leaves;
    packed_group *groups;
    packed_piece *pieces;
    Py_ssize_t rows; /* ticks * lanes */
    size_t row_bytes; /* bytes of a row of all leaves */
    uint8_t *records;
    size_t record_bytes;
    uint32_t *exception_rows; /* ascending */
    uint8_t *exceptions;
} PackedRun;

extern PyTypeObject *packed_run_type;

/* Copy the observation `row` = tick * lanes + lane of one leaf to `out`. The caller checks `leaf` and `row`. Needs no
 * GIL. */
void packed_read(const PackedRun *run, int leaf, Py_ssize_t row, uint8_t *out);

/* Load a record into the cache. Call this some rows before `packed_read`. */
PREFETCHER void packed_prefetch(const PackedRun *run, Py_ssize_t row) {
    const uint8_t *const record = run->records + (size_t)row * run->record_bytes;
    for (size_t at = 0; at < run->record_bytes; at += PACKED_CACHE_LINE) FETCH_SOON(record + at);
}

/* Load the frames that the cursors of a record refer to. Call this between `packed_prefetch` and `packed_read`. */
void packed_prefetch_frames(const PackedRun *run, Py_ssize_t row);

/* Return one leaf's share of the bytes of a run, rounded down. Leaves that are copies of each other share the cost. */
Py_ssize_t packed_leaf_bytes(const PackedRun *run, int leaf);

/* Return the run whose image is in the buffer `data`. NULL with a ValueError if the image is damaged. */
PyObject *packed_from_bytes(PyObject *data);

#endif
