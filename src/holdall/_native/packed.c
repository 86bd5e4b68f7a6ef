/* Packed runs: see packed.h for what they are and how their image is laid out.
 *
 * Images that are loaded are not trusted: `lay_out` and the functions named check_* together guarantee that
 * `packed_read` stays inside the image and fills every byte of its output. Plans are checked by the same functions. */
#include "module.h"
#include "packed.h"

#include <stdlib.h>

static const uint32_t MAGIC = UINT32_C(0x314b5048); /* "HPK1" on little-endian machines */

/* A run is not packed if more than one in MIN_ROWS_PER_EXCEPTION of its rows does not follow the plan. */
enum { MIN_ROWS_PER_EXCEPTION = 8 };

/* `PackedRun.read` loads the record 2 * PREFETCH_ROWS rows, and the frames PREFETCH_ROWS rows, before it reads a
 * row. */
enum { PREFETCH_ROWS = 4 };

/* By default a run must be at most this share of the plain rows: a smaller saving is not worth the slower reads. */
static const double DEFAULT_MAX_SHARE = 0.875, MAX_MAX_SHARE = 1000;

PyTypeObject *packed_run_type;

/* ---- reading ------------------------------------------------------------------------ */

/* Copy the stretches of a piece. For 1, 2, 4 and 8 bytes the size is a constant, so that the compiler replaces memcpy
 * by moves. */
static inline void copy_stretches(uint8_t *to, Py_ssize_t to_step, const uint8_t *from, Py_ssize_t from_step,
                                  size_t bytes, Py_ssize_t count) {
#define COPY(n)                                                                                                        \
    case n:                                                                                                            \
        for (Py_ssize_t i = 0; i < count; i++) memcpy(to + i * to_step, from + i * from_step, n);                      \
        break
    switch (bytes) {
        COPY(1);
        COPY(2);
        COPY(4);
        COPY(8);
    default:
        for (Py_ssize_t i = 0; i < count; i++) copy_bytes(to + i * to_step, from + i * from_step, bytes);
    }
#undef COPY
}

static inline uint32_t load_cursor(const packed_group *group, const uint8_t *record) {
    uint16_t narrow;
    uint32_t wide;
    switch (group->cursor_bytes) {
    case 1:
        return record[group->record_at];
    case 2:
        memcpy(&narrow, record + group->record_at, sizeof narrow);
        return narrow;
    case 4:
        memcpy(&wide, record + group->record_at, sizeof wide);
        return wide;
    default:
        return 0;
    }
}

/* Return the first frame of a group in the row that `record` belongs to. */
static inline const uint8_t *first_frame(const PackedRun *run, const packed_group *group, const uint8_t *record) {
    if (group->is_dense) return record + group->record_at;
    return run->image + group->log_at + (size_t)load_cursor(group, record) * group->frame_bytes;
}

/* Return the number of the exception that stores `row`, or -1 if the row has a valid record. */
static Py_ssize_t find_exception_number(const PackedRun *run, uint32_t row) {
    size_t low = 0, high = run->header->exception_count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (run->exception_rows[middle] < row) low = middle + 1;
        else high = middle;
    }
    if (low == run->header->exception_count || run->exception_rows[low] != row) return -1;
    return (Py_ssize_t)low;
}

void packed_read(const PackedRun *run, int leaf_number, Py_ssize_t row, uint8_t *out) {
    const packed_leaf *const leaf = run->leaves + leaf_number;
    const Py_ssize_t exception = run->header->exception_count ? find_exception_number(run, (uint32_t)row) : -1;
    if (exception >= 0) {
        memcpy(out, run->exceptions + (size_t)exception * run->row_bytes + leaf->start, leaf->bytes);
        return;
    }
    const uint8_t *const record = run->records + (size_t)row * run->record_bytes;
    const packed_piece *piece = run->pieces + leaf->first_piece, *const end = piece + leaf->piece_count;
    const uint8_t *frames = NULL;
    uint32_t group = UINT32_MAX;
    for (; piece < end; piece++) {
        if (piece->group != group) {
            group = piece->group;
            frames = first_frame(run, run->groups + group, record);
        }
        copy_stretches(out + piece->offset, piece->bytes, frames + piece->at, piece->step, piece->bytes, piece->count);
    }
}

PREFETCHER void prefetch_frames(const PackedRun *run, Py_ssize_t row) {
    const uint8_t *const record = run->records + (size_t)row * run->record_bytes;
    const packed_group *group = run->groups, *const end = group + run->header->group_count;
    for (; group < end; group++) {
        if (group->cursor_bytes == 0) continue;
        const uint8_t *const frames = first_frame(run, group, record);
        const size_t bytes = (size_t)group->window * group->frame_bytes;
        for (size_t at = 0; at < bytes; at += PACKED_CACHE_LINE) FETCH_SOON(frames + at);
    }
}

void packed_prefetch_frames(const PackedRun *run, Py_ssize_t row) { prefetch_frames(run, row); }

/* Count the bytes of each group that a list of pieces names. */
static void count_named_bytes(const packed_piece *pieces, uint32_t count, uint64_t *by_group) {
    for (uint32_t i = 0; i < count; i++) by_group[pieces[i].group] += (uint64_t)pieces[i].bytes * pieces[i].count;
}

Py_ssize_t packed_leaf_bytes(const PackedRun *run, int leaf_number) {
    const packed_leaf *const leaf = run->leaves + leaf_number;
    uint64_t all[MAX_PACKED_GROUPS] = {0}, own[MAX_PACKED_GROUPS] = {0};
    double unassigned = (double)run->image_bytes, share = 0;
    count_named_bytes(run->pieces, run->header->piece_count, all);
    count_named_bytes(run->pieces + leaf->first_piece, leaf->piece_count, own);
    for (uint32_t g = 0; g < run->header->group_count; g++) {
        const packed_group *const group = run->groups + g;
        const uint32_t record_share = group->is_dense ? group->frame_bytes : group->cursor_bytes;
        const double bytes = (double)group->frame_count * group->frame_bytes + (double)record_share * (double)run->rows;
        if (all[g] == 0) continue;
        unassigned -= bytes;
        share += bytes * (double)own[g] / (double)all[g];
    }
    return (Py_ssize_t)(share + unassigned * leaf->bytes / (double)run->row_bytes);
}

/* ---- checks ------------------------------------------------------------------------- */

static inline size_t tables_bytes(const packed_header *header) {
    return sizeof *header + header->leaf_count * sizeof(packed_leaf) + header->group_count * sizeof(packed_group) +
           header->piece_count * sizeof(packed_piece);
}

static const char *check_header(const packed_header *header) {
    if (header->magic != MAGIC) return "the magic number is wrong";
    if (header->ticks == 0 || header->lanes == 0) return "there are no rows";
    if ((uint64_t)header->ticks * header->lanes > UINT32_MAX) return "there are too many rows";
    if (header->leaf_count == 0 || header->leaf_count > MAX_COLUMNS) return "the number of leaves is out of range";
    if (header->group_count == 0 || header->group_count > MAX_PACKED_GROUPS) return "the number of groups is out of range";
    if (header->piece_count > header->leaf_count * MAX_PACKED_LEAF_BYTES) return "there are too many pieces";
    if (header->exception_count > (uint64_t)header->ticks * header->lanes) return "there are too many exceptions";
    if (header->reserved != 0) return "the reserved bytes are not zero";
    return NULL;
}

/* Compute the offsets of leaves, and the bytes of a row. */
static const char *lay_out_leaves(PackedRun *run, packed_leaf *leaves) {
    uint64_t pieces = 0, start = 0;
    for (uint32_t i = 0; i < run->header->leaf_count; i++) {
        if (leaves[i].bytes > MAX_PACKED_LEAF_BYTES) return "a leaf is too large";
        leaves[i].first_piece = (uint32_t)pieces;
        leaves[i].start = (uint32_t)start;
        pieces += leaves[i].piece_count;
        start += leaves[i].bytes;
        if (pieces > run->header->piece_count) return "a leaf has pieces outside of the table";
    }
    if (pieces != run->header->piece_count) return "pieces belong to no leaf";
    if (start == 0) return "the leaves are empty";
    run->row_bytes = start;
    return NULL;
}

/* Compute the offsets of logs and cursors, and the bytes of a record. `log_at` is the offset of the first log. */
static const char *lay_out_groups(PackedRun *run, packed_group *groups, uint64_t *log_at) {
    uint32_t record_at = 0;
    for (packed_group *group = groups; group < groups + run->header->group_count; group++) {
        const uint64_t shown_bytes = (uint64_t)group->window * group->frame_bytes;
        if (shown_bytes == 0 || shown_bytes > run->row_bytes) return "a group has frames that do not fit a row";
        if (group->is_dense > 1) return "a flag is neither 0 nor 1";
        if (group->is_dense && (group->window != 1 || group->frame_count != 0)) return "a dense group has a log";
        if (!group->is_dense && group->frame_count < group->window) return "a log is too short";
        const uint32_t max_cursor = group->is_dense ? 0 : group->frame_count - group->window;
        if (max_cursor == 0) group->cursor_bytes = 0;
        else if (max_cursor <= UINT8_MAX) group->cursor_bytes = 1;
        else if (max_cursor <= UINT16_MAX) group->cursor_bytes = 2;
        else group->cursor_bytes = 4;
        group->record_at = record_at;
        group->log_at = *log_at;
        record_at += group->is_dense ? group->frame_bytes : group->cursor_bytes;
        *log_at += (uint64_t)group->frame_count * group->frame_bytes;
    }
    run->record_bytes = record_at;
    return NULL;
}

/* Fill the fields of `run`, and the computed fields of the tables, from the header and the tables of `image`.
 * `available` bytes of it exist. `needed` gets the length that the image should have. Return NULL, or a message.
 * No sum overflows: counts are below 2^32, and the bytes of a row at most 2^20. */
static const char *lay_out(PackedRun *run, uint8_t *image, size_t available, uint64_t *needed) {
    packed_header *const header = (packed_header *)image;
    if (available < sizeof *header) return "the header is incomplete";
    const char *error = check_header(header);
    if (error) return error;
    if (available < tables_bytes(header)) return "the tables are incomplete";
    packed_leaf *const leaves = (packed_leaf *)(header + 1);
    packed_group *const groups = (packed_group *)(leaves + header->leaf_count);
    run->header = header;
    run->leaves = leaves;
    run->groups = groups;
    run->pieces = (packed_piece *)(groups + header->group_count);
    run->rows = (Py_ssize_t)header->ticks * header->lanes;
    uint64_t at = tables_bytes(header);
    if ((error = lay_out_leaves(run, leaves))) return error;
    if ((error = lay_out_groups(run, groups, &at))) return error;
    const uint64_t records_at = at, records_bytes = (uint64_t)run->rows * run->record_bytes;
    const uint64_t exception_rows_at = (records_at + records_bytes + 3) / 4 * 4;
    const uint64_t exceptions_at = exception_rows_at + (uint64_t)header->exception_count * sizeof(uint32_t);
    *needed = exceptions_at + (uint64_t)header->exception_count * run->row_bytes;
    if (*needed > PY_SSIZE_T_MAX) return "the run is too large";
    run->image = image;
    run->image_bytes = available;
    run->records = image + records_at;
    run->exception_rows = (uint32_t *)(image + exception_rows_at);
    run->exceptions = image + exceptions_at;
    return NULL;
}

/* Check that pieces stay inside their frames, and that the pieces of a leaf write every byte of it once. */
static const char *check_pieces(const PackedRun *run) {
    uint8_t is_written[MAX_PACKED_LEAF_BYTES];
    for (const packed_leaf *leaf = run->leaves; leaf < run->leaves + run->header->leaf_count; leaf++) {
        memset(is_written, 0, sizeof is_written);
        size_t written = 0;
        const packed_piece *piece = run->pieces + leaf->first_piece, *const end = piece + leaf->piece_count;
        for (; piece < end; piece++) {
            if (piece->group >= run->header->group_count) return "a piece has no group";
            const packed_group *const group = run->groups + piece->group;
            const int64_t shown_bytes = (int64_t)group->window * group->frame_bytes;
            const size_t bytes = (size_t)piece->bytes * piece->count;
            const int64_t first = piece->at, last = first + (piece->count - (int64_t)1) * piece->step;
            if (bytes == 0 || piece->offset + bytes > leaf->bytes) return "a piece is outside of its leaf";
            if (first < 0 || first + piece->bytes > shown_bytes || last < 0 || last + piece->bytes > shown_bytes)
                return "a piece is outside of its frames";
            for (size_t i = 0; i < bytes; i++) {
                if (is_written[piece->offset + i]) return "pieces overlap";
                is_written[piece->offset + i] = 1;
            }
            written += bytes;
        }
        if (written != leaf->bytes) return "a leaf is not covered by its pieces";
    }
    return NULL;
}

static const char *check_cursors(const PackedRun *run) {
    for (const packed_group *group = run->groups; group < run->groups + run->header->group_count; group++) {
        if (group->cursor_bytes == 0) continue;
        const uint8_t *record = run->records;
        const uint32_t max_cursor = group->frame_count - group->window;
        for (Py_ssize_t row = 0; row < run->rows; row++, record += run->record_bytes)
            if (load_cursor(group, record) > max_cursor) return "a cursor is outside of its log";
    }
    return NULL;
}

static const char *check_exception_rows(const PackedRun *run) {
    for (uint32_t i = 0; i < run->header->exception_count; i++) {
        if (run->exception_rows[i] >= (uint64_t)run->rows) return "an exception is outside of the run";
        if (i > 0 && run->exception_rows[i] <= run->exception_rows[i - 1]) return "exceptions are not in order";
    }
    return NULL;
}

/* ---- packing ------------------------------------------------------------------------ */

/* A piece from which a group's frames are collected. */
typedef struct {
    const packed_piece *piece;
    const uint8_t *rows; /* of the piece's leaf */
    size_t row_bytes;
} source;

/* Everything that packing one run needs. */
typedef struct {
    PackedRun *run;
    size_t max_bytes;       /* the image must not be larger */
    const uint8_t **rows;   /* rows of each leaf */
    const uint8_t *is_copy; /* whether each piece reads bytes of a frame that another piece stores */
    source *sources;        /* ordered by group */
    uint32_t first_source[MAX_PACKED_GROUPS + 1];
    uint32_t *cursors;      /* of group g and row r: g * rows + r */
    uint32_t *slots;        /* hash table of the frames of one log: frame number + 1, or 0 */
    size_t slot_mask;
    uint8_t *scratch;       /* room for one row */
} packer;

enum { PACKED = 0, NOT_WORTH_IT = 1, OUT_OF_MEMORY = 2 };

/* List the pieces that are not copies, group by group. */
static void list_sources(packer *p) {
    const PackedRun *const run = p->run;
    uint32_t count = 0;
    for (uint32_t g = 0; g < run->header->group_count; g++) {
        p->first_source[g] = count;
        for (uint32_t i = 0; i < run->header->leaf_count; i++)
            for (uint32_t k = 0; k < run->leaves[i].piece_count; k++) {
                const uint32_t number = run->leaves[i].first_piece + k;
                if (run->pieces[number].group != g || p->is_copy[number]) continue;
                p->sources[count++] = (source){run->pieces + number, p->rows[i], run->leaves[i].bytes};
            }
    }
    p->first_source[run->header->group_count] = count;
}

/* Write the frames of one group in one row to `frames`. */
static void collect_frames(const packer *p, uint32_t group, size_t row, uint8_t *frames) {
    const source *s = p->sources + p->first_source[group], *const end = p->sources + p->first_source[group + 1];
    for (; s < end; s++) {
        const uint8_t *const from = s->rows + row * s->row_bytes + s->piece->offset;
        copy_stretches(frames + s->piece->at, s->piece->step, from, s->piece->bytes, s->piece->bytes, s->piece->count);
    }
}

static uint64_t hash_frame(const uint8_t *frame, size_t bytes) {
    const uint64_t factor = UINT64_C(0x9e3779b97f4a7c15);
    uint64_t hash = bytes, word;
    for (; bytes >= sizeof word; bytes -= sizeof word, frame += sizeof word) {
        memcpy(&word, frame, sizeof word);
        hash = (hash ^ word) * factor;
        hash ^= hash >> 32;
    }
    word = 0;
    memcpy(&word, frame, bytes);
    hash = (hash ^ word) * factor;
    return hash ^ hash >> 32;
}

/* Return the slot of the frame in `scratch`, or the empty slot where it belongs if the log does not have the frame. */
static uint32_t *find_slot(const packer *p, const uint8_t *log, size_t frame_bytes) {
    size_t slot = hash_frame(p->scratch, frame_bytes) & p->slot_mask;
    while (p->slots[slot] && memcmp(log + (size_t)(p->slots[slot] - 1) * frame_bytes, p->scratch, frame_bytes) != 0)
        slot = (slot + 1) & p->slot_mask;
    return p->slots + slot;
}

/* Write the log of one group to `log` (`room` bytes), and the cursor of every row to `p->cursors`. Rows are visited
 * lane by lane, so that neighbours in time are neighbours in the log. Return the number of frames, or -1 if they do
 * not fit. */
static Py_ssize_t write_log(packer *p, uint32_t number, uint8_t *log, size_t room) {
    const packed_header *const header = p->run->header;
    const packed_group *const group = p->run->groups + number;
    const size_t frame_bytes = group->frame_bytes, window = group->window, max_frames = room / frame_bytes;
    uint32_t *const cursors = p->cursors + (size_t)number * (size_t)p->run->rows;
    size_t count = 0, last = 0; /* `last` is the cursor of the previous row */
    if (window == 1) memset(p->slots, 0, (p->slot_mask + 1) * sizeof *p->slots);
    memset(p->scratch, 0, p->run->row_bytes);
    for (size_t lane = 0; lane < header->lanes; lane++)
        for (size_t tick = 0; tick < header->ticks; tick++) {
            const size_t row = tick * header->lanes + lane;
            size_t new_frames = window;
            collect_frames(p, number, row, p->scratch);
            if (count && memcmp(p->scratch, log + last * frame_bytes, window * frame_bytes) == 0) {
                cursors[row] = (uint32_t)last;
                continue;
            }
            if (window == 1) {
                uint32_t *const slot = find_slot(p, log, frame_bytes);
                if (*slot) {
                    last = cursors[row] = *slot - 1;
                    continue;
                }
                *slot = (uint32_t)count + 1;
            } else if (count && memcmp(p->scratch, log + (last + 1) * frame_bytes, (window - 1) * frame_bytes) == 0) {
                new_frames = 1;
            }
            if (count + new_frames > max_frames || count + new_frames > UINT32_MAX) return -1;
            memcpy(log + count * frame_bytes, p->scratch + (window - new_frames) * frame_bytes, new_frames * frame_bytes);
            count += new_frames;
            last = cursors[row] = (uint32_t)(count - window);
        }
    return (Py_ssize_t)count;
}

/* Write the records of all rows: the cursors, and the frames of dense groups. */
static void write_records(const packer *p) {
    const PackedRun *const run = p->run;
    uint8_t *record = run->records;
    memset(record, 0, (size_t)run->rows * run->record_bytes);
    for (size_t row = 0; row < (size_t)run->rows; row++, record += run->record_bytes)
        for (uint32_t g = 0; g < run->header->group_count; g++) {
            const packed_group *const group = run->groups + g;
            const uint32_t wide = p->cursors[g * (size_t)run->rows + row];
            const uint16_t narrow = (uint16_t)wide;
            if (group->is_dense) collect_frames(p, g, row, record + group->record_at);
            else if (group->cursor_bytes == 1) record[group->record_at] = (uint8_t)wide;
            else if (group->cursor_bytes == 2) memcpy(record + group->record_at, &narrow, sizeof narrow);
            else if (group->cursor_bytes == 4) memcpy(record + group->record_at, &wide, sizeof wide);
        }
}

/* Read all rows back. Write the numbers of the rows that differ to `wrong`, at most `max_count`. Return how many
 * differ; counting stops at `max_count` + 1. */
static size_t compare_rows(const packer *p, size_t max_count, uint32_t *wrong) {
    const PackedRun *const run = p->run;
    size_t count = 0;
    for (size_t row = 0; row < (size_t)run->rows && count <= max_count; row++)
        for (uint32_t leaf = 0; leaf < run->header->leaf_count; leaf++) {
            const size_t bytes = run->leaves[leaf].bytes;
            packed_read(run, (int)leaf, (Py_ssize_t)row, p->scratch);
            if (memcmp(p->scratch, p->rows[leaf] + row * bytes, bytes) == 0) continue;
            if (count < max_count) wrong[count] = (uint32_t)row;
            count++;
            break;
        }
    return count;
}

/* Store the rows that are listed in `wrong` as exceptions. Return PACKED, or NOT_WORTH_IT if they do not fit. */
static int add_exceptions(packer *p, const uint32_t *wrong, size_t count) {
    PackedRun *const run = p->run;
    uint64_t needed;
    uint8_t *const end_of_records = run->records + (size_t)run->rows * run->record_bytes;
    run->header->exception_count = (uint32_t)count;
    if (lay_out(run, run->image, p->max_bytes, &needed) || needed > p->max_bytes) return NOT_WORTH_IT;
    uint8_t *to = run->exceptions;
    memset(end_of_records, 0, (size_t)((uint8_t *)run->exception_rows - end_of_records)); /* padding */
    memcpy(run->exception_rows, wrong, count * sizeof *wrong);
    for (size_t i = 0; i < count; i++)
        for (uint32_t leaf = 0; leaf < run->header->leaf_count; leaf++) {
            const size_t bytes = run->leaves[leaf].bytes;
            memcpy(to, p->rows[leaf] + wrong[i] * bytes, bytes);
            to += bytes;
        }
    run->image_bytes = needed;
    return PACKED;
}

/* Fill the image, which has room for `max_bytes` bytes. Its tables are complete except for the numbers of frames. Return PACKED
 * or NOT_WORTH_IT. */
static int fill_image(packer *p) {
    PackedRun *const run = p->run;
    packed_group *const groups = run->groups;
    size_t used = tables_bytes(run->header);
    uint64_t needed;
    list_sources(p);
    for (uint32_t g = 0; g < run->header->group_count; g++) {
        if (groups[g].is_dense) continue;
        const Py_ssize_t frames = write_log(p, g, run->image + used, p->max_bytes - used);
        if (frames < 0) return NOT_WORTH_IT;
        groups[g].frame_count = (uint32_t)frames;
        used += (size_t)frames * groups[g].frame_bytes;
    }
    if (lay_out(run, run->image, p->max_bytes, &needed) || needed > p->max_bytes) return NOT_WORTH_IT;
    write_records(p);
    const size_t max_exceptions = (size_t)run->rows / MIN_ROWS_PER_EXCEPTION;
    uint32_t *const wrong = p->cursors; /* the cursors are in the records now */
    const size_t count = compare_rows(p, max_exceptions, wrong);
    return count > max_exceptions ? NOT_WORTH_IT : add_exceptions(p, wrong, count);
}

/* Pack the rows of `p` into a new image. Return PACKED, NOT_WORTH_IT or OUT_OF_MEMORY. Needs no GIL. */
static int pack_rows(packer *p) {
    PackedRun *const run = p->run;
    uint8_t *const tables = run->image;
    const size_t bytes = tables_bytes(run->header), rows = (size_t)run->rows;
    uint64_t needed;
    if (p->max_bytes < bytes) return NOT_WORTH_IT;
    uint8_t *const image = malloc(p->max_bytes);
    p->slot_mask = 1;
    while (p->slot_mask < 2 * rows) p->slot_mask = 2 * p->slot_mask + 1;
    p->sources = malloc((run->header->piece_count + 1) * sizeof *p->sources);
    p->cursors = malloc(run->header->group_count * rows * sizeof *p->cursors);
    p->slots = malloc((p->slot_mask + 1) * sizeof *p->slots);
    p->scratch = malloc(run->row_bytes);
    int status = OUT_OF_MEMORY;
    if (image && p->sources && p->cursors && p->slots && p->scratch) {
        memcpy(image, tables, bytes);
        lay_out(run, image, p->max_bytes, &needed);
        free(tables);
        status = fill_image(p);
    } else {
        free(image);
    }
    free(p->sources);
    free(p->cursors);
    free(p->slots);
    free(p->scratch);
    if (status != PACKED) return status;
    uint8_t *const exact = realloc(run->image, run->image_bytes);
    return lay_out(run, exact ? exact : run->image, run->image_bytes, &needed) ? OUT_OF_MEMORY : PACKED;
}

/* ---- plans -------------------------------------------------------------------------- */

/* Return an attribute of a plan as a tuple, or NULL with an exception set. */
static PyObject *get_tuple(PyObject *plan, const char *name) {
    PyObject *const value = PyObject_GetAttrString(plan, name);
    if (!value) return NULL;
    PyObject *const tuple = PySequence_Tuple(value);
    Py_DECREF(value);
    return tuple;
}

static int refuse(const char *what, const char *error) {
    PyErr_Format(PyExc_ValueError, "The %s is not valid: %s.", what, error);
    return -1;
}

static int parse_leaf(PyObject *leaf_bytes, PyObject *pieces, packed_leaf *to) {
    const long bytes = PyLong_AsLong(leaf_bytes);
    if (bytes == -1 && PyErr_Occurred()) return -1;
    if (bytes < 0 || bytes > MAX_PACKED_LEAF_BYTES) return refuse("plan", "a leaf is too large");
    if (!PyTuple_Check(pieces)) return refuse("plan", "the pieces of a leaf are not a tuple");
    *to = (packed_leaf){.bytes = (uint32_t)bytes, .piece_count = (uint32_t)PyTuple_Size(pieces)};
    return 0;
}

static int parse_group(PyObject *group, packed_group *to) {
    int frame_bytes, window, is_dense;
    if (!PyTuple_Check(group)) return refuse("plan", "a group is not a tuple");
    if (!PyArg_ParseTuple(group, "iip;a group is (frame_bytes, window, is_dense)", &frame_bytes, &window, &is_dense)) return -1;
    if (frame_bytes < 1 || window < 1) return refuse("plan", "a group has no frames");
    *to = (packed_group){.frame_bytes = (uint32_t)frame_bytes, .window = (uint32_t)window, .is_dense = (uint32_t)is_dense};
    to->frame_count = is_dense ? 0 : to->window; /* until the log is written */
    return 0;
}

static int parse_piece(PyObject *piece, packed_piece *to, uint8_t *is_copy) {
    int group, offset, bytes, count, at, step, copy;
    if (!PyTuple_Check(piece)) return refuse("plan", "a piece is not a tuple");
    if (!PyArg_ParseTuple(piece, "iiiiiip;a piece is (group, offset, bytes, count, at, step, is_copy)", &group, &offset,
                          &bytes, &count, &at, &step, &copy))
        return -1;
    const int unsigned_fields[] = {group, offset, bytes, count};
    for (int i = 0; i < 4; i++)
        if (unsigned_fields[i] < 0 || unsigned_fields[i] > UINT16_MAX) return refuse("plan", "a piece is out of range");
    *to = (packed_piece){(uint16_t)group, (uint16_t)offset, (uint16_t)bytes, (uint16_t)count, at, step};
    *is_copy = (uint8_t)copy;
    return 0;
}

/* Fill the tables of `image`, whose header is complete, and the flags of pieces. */
static int parse_tables(PyObject *leaf_bytes, PyObject *groups, PyObject *pieces, uint8_t *image, uint8_t *is_copy) {
    const packed_header *const header = (packed_header *)image;
    packed_leaf *const leaves = (packed_leaf *)(image + sizeof *header);
    packed_group *const to_groups = (packed_group *)(leaves + header->leaf_count);
    packed_piece *to = (packed_piece *)(to_groups + header->group_count);
    for (uint32_t i = 0; i < header->group_count; i++)
        if (parse_group(PyTuple_GetItem(groups, i), to_groups + i) < 0) return -1;
    for (uint32_t i = 0; i < header->leaf_count; i++) {
        PyObject *const own = PyTuple_GetItem(pieces, i);
        if (parse_leaf(PyTuple_GetItem(leaf_bytes, i), own, leaves + i) < 0) return -1;
        for (Py_ssize_t k = 0; k < PyTuple_Size(own); k++)
            if (parse_piece(PyTuple_GetItem(own, k), to++, is_copy++) < 0) return -1;
    }
    return 0;
}

/* Count the pieces of all leaves. Return -1 with an exception set if an entry is not a tuple. */
static Py_ssize_t count_pieces(PyObject *pieces) {
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(pieces); i++) {
        PyObject *const own = PyTuple_GetItem(pieces, i);
        if (!PyTuple_Check(own)) return refuse("plan", "the pieces of a leaf are not a tuple");
        count += PyTuple_Size(own);
    }
    return count;
}

/* Parse a plan into the image of `run`, which then has tables only, and allocate the flags of its pieces. */
static int parse_plan(PackedRun *run, PyObject *plan, packed_header header, uint8_t **is_copy) {
    PyObject *const leaf_bytes = get_tuple(plan, "leaf_bytes");
    PyObject *const groups = leaf_bytes ? get_tuple(plan, "groups") : NULL;
    PyObject *const pieces = groups ? get_tuple(plan, "pieces") : NULL;
    int result = -1;
    if (!pieces) goto done;
    const Py_ssize_t leaf_count = PyTuple_Size(leaf_bytes), group_count = PyTuple_Size(groups);
    const Py_ssize_t piece_count = count_pieces(pieces);
    if (piece_count < 0) goto done;
    if (leaf_count > MAX_COLUMNS || group_count > MAX_PACKED_GROUPS || PyTuple_Size(pieces) != leaf_count ||
        piece_count > leaf_count * MAX_PACKED_LEAF_BYTES) {
        refuse("plan", "the number of leaves, groups or pieces is out of range");
        goto done;
    }
    header.leaf_count = (uint32_t)leaf_count;
    header.group_count = (uint32_t)group_count;
    header.piece_count = (uint32_t)piece_count;
    const size_t bytes = tables_bytes(&header);
    run->image = calloc(1, bytes);
    *is_copy = calloc(1, (size_t)piece_count + 1);
    if (!run->image || !*is_copy) {
        PyErr_NoMemory();
        goto done;
    }
    memcpy(run->image, &header, sizeof header);
    if (parse_tables(leaf_bytes, groups, pieces, run->image, *is_copy) < 0) goto done;
    uint64_t needed;
    const char *error = lay_out(run, run->image, bytes, &needed);
    if (!error) error = check_pieces(run);
    result = error ? refuse("plan", error) : 0;
done:
    Py_XDECREF(leaf_bytes);
    Py_XDECREF(groups);
    Py_XDECREF(pieces);
    return result;
}

/* ---- the type ----------------------------------------------------------------------- */

/* Count the memory of a complete run in `heap_count`, until the run is freed. */
static void count_image(PackedRun *run) {
    run->counted_bytes = run->image_bytes;
    heap_count((long long)run->counted_bytes);
}

static void run_dealloc(PyObject *self) {
    heap_count(-(long long)((PackedRun *)self)->counted_bytes);
    free(((PackedRun *)self)->image);
    object_free(self);
}

/* Acquire the buffers of all leaves and check their sizes. Return -1 with an exception set if one does not fit. The
 * caller releases the buffers in either case. */
static int acquire_rows(const PackedRun *run, PyObject *list, Py_buffer *buffers, const uint8_t **rows) {
    const uint32_t leaf_count = run->header->leaf_count;
    if (PyTuple_Size(list) != (Py_ssize_t)leaf_count) {
        PyErr_Format(PyExc_ValueError, "The plan has %u leaves, but %zd buffers were passed.", leaf_count,
                     PyTuple_Size(list));
        return -1;
    }
    for (uint32_t i = 0; i < leaf_count; i++) {
        const Py_ssize_t expected = run->rows * (Py_ssize_t)run->leaves[i].bytes;
        if (PyObject_GetBuffer(PyTuple_GetItem(list, i), buffers + i, PyBUF_SIMPLE) < 0) return -1;
        if (buffers[i].len != expected) {
            PyErr_Format(PyExc_ValueError, "The rows of leaf %u have %zd bytes, but %zd are expected.", i,
                         buffers[i].len, expected);
            return -1;
        }
        rows[i] = buffers[i].buf;
    }
    return 0;
}

/* Pack the rows in `list`, and return `run`, or None if that does not save enough. Steals the reference to `run`. */
static PyObject *pack_list(PackedRun *run, PyObject *list, const uint8_t *is_copy, double max_share) {
    const uint8_t *rows[MAX_COLUMNS] = {NULL};
    const uint32_t leaf_count = run->header->leaf_count;
    Py_buffer *const buffers = calloc(leaf_count, sizeof *buffers);
    PyObject *result = NULL;
    int status = OUT_OF_MEMORY;
    if (!buffers) {
        PyErr_NoMemory();
        goto done;
    }
    if (acquire_rows(run, list, buffers, rows) < 0) goto release;
    packer p = {.run = run, .rows = rows, .is_copy = is_copy};
    p.max_bytes = (size_t)(max_share * (double)run->rows * (double)run->row_bytes);
    Py_BEGIN_ALLOW_THREADS
    status = pack_rows(&p);
    Py_END_ALLOW_THREADS
    if (status == PACKED) count_image(run);
    if (status == OUT_OF_MEMORY) PyErr_NoMemory();
    else result = Py_NewRef(status == PACKED ? (PyObject *)run : Py_None);
release:
    for (uint32_t i = 0; i < leaf_count; i++) PyBuffer_Release(buffers + i);
    free(buffers);
done:
    Py_DECREF((PyObject *)run);
    return result;
}

static PyObject *run_pack(PyObject *Py_UNUSED(none), PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"plan", "rows", "ticks", "lanes", "max_share", NULL};
    PyObject *plan, *rows;
    Py_ssize_t ticks, lanes;
    double max_share = DEFAULT_MAX_SHARE;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OOnn|$d", names, &plan, &rows, &ticks, &lanes, &max_share))
        return NULL;
    if (ticks < 1 || lanes < 1 || ticks > UINT32_MAX / lanes) {
        PyErr_Format(PyExc_ValueError, "%zd ticks of %zd lanes cannot be packed.", ticks, lanes);
        return NULL;
    }
    if (!(max_share > 0 && max_share <= MAX_MAX_SHARE)) {
        PyErr_SetString(PyExc_ValueError, "max_share must be above 0 and at most 1000.");
        return NULL;
    }
    const packed_header header = {.magic = MAGIC, .ticks = (uint32_t)ticks, .lanes = (uint32_t)lanes};
    uint8_t *is_copy = NULL;
    PyObject *const list = PySequence_Tuple(rows);
    PackedRun *const run = list ? object_new(packed_run_type) : NULL;
    PyObject *result = NULL;
    if (run) {
        if (parse_plan(run, plan, header, &is_copy) == 0) result = pack_list(run, list, is_copy, max_share);
        else Py_DECREF((PyObject *)run);
    }
    free(is_copy);
    Py_XDECREF(list);
    return result;
}

/* Check an image that was read from a file or received. Return NULL, or a message. */
static const char *check_image(PackedRun *run, uint8_t *image, size_t bytes) {
    uint64_t needed;
    const char *error = lay_out(run, image, bytes, &needed);
    if (!error && needed != bytes) error = "its length is wrong";
    if (!error) error = check_pieces(run);
    if (!error) error = check_cursors(run);
    if (!error) error = check_exception_rows(run);
    return error;
}

PyObject *packed_from_bytes(PyObject *data) {
    Py_buffer buffer;
    const char *error = NULL;
    PackedRun *const run = object_new(packed_run_type);
    if (!run) return NULL;
    if (PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE) < 0) goto failed;
    run->image = malloc((size_t)buffer.len + 1);
    if (!run->image) {
        PyErr_NoMemory();
        PyBuffer_Release(&buffer);
        goto failed;
    }
    Py_BEGIN_ALLOW_THREADS
    memcpy(run->image, buffer.buf, (size_t)buffer.len);
    error = check_image(run, run->image, (size_t)buffer.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&buffer);
    if (!error) {
        count_image(run);
        return (PyObject *)run;
    }
    refuse("packed run", error);
failed:
    Py_DECREF((PyObject *)run);
    return NULL;
}

static PyObject *run_from_bytes(PyObject *Py_UNUSED(none), PyObject *data) { return packed_from_bytes(data); }

static PyObject *run_to_bytes(PyObject *self, PyObject *Py_UNUSED(none)) {
    const PackedRun *const run = (PackedRun *)self;
    return PyBytes_FromStringAndSize((const char *)run->image, (Py_ssize_t)run->image_bytes);
}

/* Copy rows as a batch does: every row is prefetched in two steps. */
static void read_rows(const PackedRun *run, int leaf, const int64_t *rows, Py_ssize_t count, uint8_t *out) {
    const size_t bytes = run->leaves[leaf].bytes;
    for (Py_ssize_t i = -2 * PREFETCH_ROWS; i < count; i++) {
        if (i + 2 * PREFETCH_ROWS < count) packed_prefetch(run, rows[i + 2 * PREFETCH_ROWS]);
        if (i + PREFETCH_ROWS >= 0 && i + PREFETCH_ROWS < count) prefetch_frames(run, rows[i + PREFETCH_ROWS]);
        if (i >= 0) packed_read(run, leaf, rows[i], out + (size_t)i * bytes);
    }
}

static PyObject *run_read(PyObject *self, PyObject *arguments) {
    const PackedRun *const run = (PackedRun *)self;
    int leaf;
    PyObject *numbers;
    if (!PyArg_ParseTuple(arguments, "iO", &leaf, &numbers)) return NULL;
    if (leaf < 0 || (uint32_t)leaf >= run->header->leaf_count)
        return PyErr_Format(PyExc_IndexError, "Leaf %d is not one of %u.", leaf, run->header->leaf_count);
    PyArrayObject *const rows = (PyArrayObject *)PyArray_FROMANY(numbers, NPY_INT64, 1, 1, NPY_ARRAY_IN_ARRAY);
    if (!rows) return NULL;
    const npy_intp shape[] = {PyArray_DIM(rows, 0), run->leaves[leaf].bytes};
    const int64_t *const wanted = PyArray_DATA(rows);
    PyObject *out = NULL;
    for (npy_intp i = 0; i < shape[0]; i++)
        if (wanted[i] < 0 || wanted[i] >= run->rows) {
            PyErr_Format(PyExc_IndexError, "Row %lld is not one of %zd.", (long long)wanted[i], run->rows);
            goto done;
        }
    out = PyArray_SimpleNew(2, shape, NPY_UINT8);
    if (out) read_rows(run, leaf, wanted, shape[0], PyArray_DATA((PyArrayObject *)out));
done:
    Py_DECREF((PyObject *)rows);
    return out;
}

static PyObject *get_nbytes(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSize_t(((PackedRun *)self)->image_bytes);
}

static PyObject *get_ticks(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLong(((PackedRun *)self)->header->ticks);
}

static PyObject *get_lanes(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLong(((PackedRun *)self)->header->lanes);
}

static PyObject *get_exceptions(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLong(((PackedRun *)self)->header->exception_count);
}

/* Return a tuple with one number per leaf. */
static PyObject *leaf_numbers(const PackedRun *run, Py_ssize_t (*number_of)(const PackedRun *, int)) {
    PyObject *const tuple = PyTuple_New(run->header->leaf_count);
    for (uint32_t i = 0; tuple && i < run->header->leaf_count; i++) {
        PyObject *const number = PyLong_FromSsize_t(number_of(run, (int)i));
        if (!number || PyTuple_SetItem(tuple, i, number) < 0) {
            Py_DECREF(tuple);
            return NULL;
        }
    }
    return tuple;
}

static Py_ssize_t plain_leaf_bytes(const PackedRun *run, int leaf) { return run->leaves[leaf].bytes; }

static PyObject *get_leaf_bytes(PyObject *self, void *Py_UNUSED(closure)) {
    return leaf_numbers((PackedRun *)self, plain_leaf_bytes);
}

static PyObject *get_leaf_nbytes(PyObject *self, void *Py_UNUSED(closure)) {
    return leaf_numbers((PackedRun *)self, packed_leaf_bytes);
}

static PyMethodDef run_methods[] = {
    {"pack", (PyCFunction)(void (*)(void))run_pack, METH_VARARGS | METH_KEYWORDS | METH_STATIC,
     "Pack the rows of all leaves, or return None if that does not save enough."},
    {"from_bytes", run_from_bytes, METH_O | METH_STATIC, "Return the run whose `to_bytes` returned these bytes."},
    {"to_bytes", run_to_bytes, METH_NOARGS, "Return the run as bytes."},
    {"read", run_read, METH_VARARGS, "Return rows of one leaf, (rows, leaf bytes)."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef run_properties[] = {
    {"nbytes", get_nbytes, NULL, "Bytes in memory.", NULL},
    {"ticks", get_ticks, NULL, "Observations per lane.", NULL},
    {"lanes", get_lanes, NULL, "Number of lanes.", NULL},
    {"exceptions", get_exceptions, NULL, "Number of rows that are stored whole.", NULL},
    {"leaf_bytes", get_leaf_bytes, NULL, "Bytes of a row of each leaf.", NULL},
    {"leaf_nbytes", get_leaf_nbytes, NULL, "Each leaf's share of `nbytes`, rounded down.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot run_slots[] = {
    {Py_tp_doc, "The small observations of one segment, without the values that repeat. Immutable."},
    {Py_tp_dealloc, (void *)run_dealloc},
    {Py_tp_methods, run_methods},
    {Py_tp_getset, run_properties},
    {0, NULL},
};

static PyType_Spec run_spec = {
    "holdall._native.PackedRun", sizeof(PackedRun), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, run_slots,
};

int add_packed(PyObject *module) {
    packed_run_type = type_add(module, &run_spec, "PackedRun");
    return packed_run_type ? 0 : -1;
}
