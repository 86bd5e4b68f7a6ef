/* Columns: short observations of a run of ticks, without what repeats in them.
 *
 * A plan shares the bytes of a transition's short observations out among groups. A group keeps a log of frames, and a
 * transition's record has a cursor to the first of the `window` frames that it shows: values that hold are one frame
 * under many cursors, and a history of H values is H frames in a row, of which one is new a tick. One group is dense: its
 * frame stands in the record. Pieces say which bytes of which frame belong where in an observation, so columns that are
 * equal are two pieces of one place.
 *
 * A plan is a proposal. Every row is read back when a run is packed, and one that does not come out as it went in is kept
 * whole. Runs never leave memory; they are read by the same function that compared them.
 */
#define _DEFAULT_SOURCE /* madvise */
#include "reading.h"

#include <string.h>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

enum { ROWS_AHEAD = 8, LINE = 64, NARROW = 2, WIDE = 4, MOST_WRONG = 8 };

#define AT(type, address) ((const type *)(intptr_t)(address))

/* The ticks that a run is made of, as they lie in rings. */
typedef struct {
    const int64_t *rings;   /* addresses, by leaf */
    const uint32_t *places; /* by row: where it stands in every ring */
    int64_t rows;
} raw_rows;

static inline void copy_piece(uint8_t *to, int64_t to_step, const uint8_t *from, int64_t from_step, int64_t bytes,
                              int64_t count) {
#define COPY(n)                                                                                                      \
    case n:                                                                                                          \
        for (int64_t i = 0; i < count; i++) memcpy(to + i * to_step, from + i * from_step, n);                       \
        break
    switch (bytes) {
        COPY(4);
        COPY(8);
        COPY(12);
        COPY(16);
        COPY(24);
        COPY(48);
    default:
        for (int64_t i = 0; i < count; i++) memcpy(to + i * to_step, from + i * from_step, (size_t)bytes);
    }
#undef COPY
}

/* Collect a group's frames of one row. */
static void collect(const column_plan *p, const column_group *g, const raw_rows *raw, int64_t row, uint8_t *frames) {
    const column_piece *const sources = AT(column_piece, p->sources);
    for (const column_piece *s = sources + g->first_source; s < sources + g->end_source; s++) {
        const uint8_t *const from =
            AT(uint8_t, raw->rings[s->leaf]) + raw->places[row] * AT(int64_t, p->leaf_bytes)[s->leaf] + s->offset;
        copy_piece(frames + s->at, s->at_step, from, s->bytes, s->bytes, s->count);
    }
}

/* Write one group's log to `log`, and every row's cursor; returns the frames written, or -1 if there is no room. */
static int64_t write_log(const column_plan *p, const column_group *g, const raw_rows *raw, uint8_t *log, int64_t room,
                         uint32_t *cursors, uint8_t *scratch) {
    const int64_t window = g->window, bytes = g->frame_bytes;
    int64_t count = 0;
    if (g->home) {
        if (room < bytes) return -1;
        memcpy(log, AT(uint8_t, g->home), (size_t)bytes);
        count = 1;
    }
    for (int64_t row = 0; row < raw->rows; row++) {
        const uint8_t *const last = log + (row ? cursors[row - 1] : 0) * bytes;
        int64_t pushed = window;
        collect(p, g, raw, row, scratch);
        if (count && memcmp(scratch, last, (size_t)(window * bytes)) == 0) {
            cursors[row] = row ? cursors[row - 1] : 0;
            continue;
        }
        if (g->home && memcmp(scratch, log, (size_t)bytes) == 0) {
            cursors[row] = 0;
            continue;
        }
        if (count && window > 1 && memcmp(scratch, last + bytes, (size_t)((window - 1) * bytes)) == 0) pushed = 1;
        if ((count + pushed) * bytes > room) return -1;
        memcpy(log + count * bytes, scratch + (window - pushed) * bytes, (size_t)(pushed * bytes));
        count += pushed;
        cursors[row] = (uint32_t)(count - window);
    }
    return count;
}

/* Write the records of all rows: cursors, and the dense group's frame. */
static void write_records(const column_plan *p, const column_run *r, const raw_rows *raw, const uint32_t *cursors,
                          uint8_t *to) {
    const column_group *const groups = AT(column_group, p->groups);
    const column_log *const logs = AT(column_log, r->logs);
    for (int64_t row = 0; row < raw->rows; row++, to += r->record_bytes)
        for (int64_t g = 0; g < p->group_count; g++) {
            if (groups[g].is_dense) {
                collect(p, &groups[g], raw, row, to + r->dense_at);
                continue;
            }
            if (logs[g].cursor_at < 0) continue;
            const uint32_t wide = cursors[g * raw->rows + row];
            const uint16_t narrow = (uint16_t)wide;
            memcpy(to + logs[g].cursor_at, r->cursor_bytes == WIDE ? (const void *)&wide : (const void *)&narrow,
                   (size_t)r->cursor_bytes);
        }
}

/* Where the frames of a group begin that a record shows. */
static inline const uint8_t *frames_of(const column_run *r, const column_group *g, const column_log *log,
                                       const uint8_t *record) {
    if (g->is_dense) return record + r->dense_at;
    uint32_t cursor = 0;
    if (log->cursor_at >= 0 && r->cursor_bytes == WIDE) memcpy(&cursor, record + log->cursor_at, WIDE);
    if (log->cursor_at >= 0 && r->cursor_bytes == NARROW) {
        uint16_t narrow;
        memcpy(&narrow, record + log->cursor_at, NARROW);
        cursor = narrow;
    }
    return AT(uint8_t, r->data) + log->first + cursor * g->frame_bytes;
}

/* Which of the rows that are kept whole is `row`; -1 if it is none. */
static int64_t whole_of(const column_run *r, uint32_t row) {
    const uint8_t *const numbers = AT(uint8_t, r->data) + r->numbers;
    int64_t low = 0, end = r->exceptions;
    while (low < end) {
        const int64_t half = low + (end - low) / 2;
        uint32_t number;
        memcpy(&number, numbers + half * (int64_t)sizeof number, sizeof number);
        if (number == row) return half;
        if (number < row) low = half + 1;
        else end = half;
    }
    return -1;
}

/* Put one leaf of one row together. */
static void unpack(const column_run *r, int64_t leaf, int64_t row, uint8_t *out) {
    const column_plan *const p = AT(column_plan, r->plan);
    const int64_t whole = r->exceptions ? whole_of(r, (uint32_t)row) : -1;
    if (whole >= 0) {
        const uint8_t *const from = AT(uint8_t, r->data) + r->wholes + whole * p->row_bytes;
        memcpy(out, from + AT(int64_t, p->leaf_starts)[leaf], (size_t)AT(int64_t, p->leaf_bytes)[leaf]);
        return;
    }
    const int64_t *const ends = AT(int64_t, p->piece_ends);
    const column_piece *const pieces = AT(column_piece, p->pieces), *const end = pieces + ends[leaf + 1];
    const uint8_t *const record = AT(uint8_t, r->data) + r->records + row * r->record_bytes, *frames = NULL;
    int64_t group = -1;
    for (const column_piece *s = pieces + ends[leaf]; s < end; s++) {
        if (s->group != group) {
            group = s->group;
            frames = frames_of(r, AT(column_group, p->groups) + group, AT(column_log, r->logs) + group, record);
        }
        copy_piece(out + s->offset, s->bytes, frames + s->at, s->at_step, s->bytes, s->count);
    }
}

/* Read all rows back, and list those that come out otherwise; returns how many, or more than `most`. */
static int64_t compare(const column_plan *p, const column_run *r, const raw_rows *raw, int64_t most, uint32_t *wrong,
                       uint8_t *scratch) {
    int64_t count = 0;
    for (int64_t row = 0; row < raw->rows && count <= most; row++)
        for (int64_t leaf = 0; leaf < p->leaves; leaf++) {
            const int64_t bytes = AT(int64_t, p->leaf_bytes)[leaf];
            unpack(r, leaf, row, scratch);
            if (memcmp(scratch, AT(uint8_t, raw->rings[leaf]) + raw->places[row] * bytes, (size_t)bytes) == 0) continue;
            if (count < most) wrong[count] = (uint32_t)row;
            count++;
            break;
        }
    return count;
}

/* Decide how wide cursors are and where they stand in a record. */
static void lay_out_records(const column_plan *p, column_run *r, column_log *logs) {
    const column_group *const groups = AT(column_group, p->groups);
    int64_t at = 0, dense = 0;
    r->cursor_bytes = NARROW;
    for (int64_t g = 0; g < p->group_count; g++)
        if (!groups[g].is_dense && logs[g].count > UINT16_MAX + 1) r->cursor_bytes = WIDE;
    for (int64_t g = 0; g < p->group_count; g++) {
        if (groups[g].is_dense) dense = groups[g].frame_bytes;
        logs[g].cursor_at = -1;
        if (groups[g].is_dense || logs[g].count == groups[g].window) continue; /* all cursors are 0 */
        logs[g].cursor_at = at;
        at += r->cursor_bytes;
    }
    r->dense_at = at;
    r->record_bytes = at + dense;
}

/* Pack the ticks that `r` names, which lie in rings, into `out`, and describe it. `numbers` has room for (groups + 2)
 * numbers a row, and `scratch` for a row. Returns the bytes used, or -1 if they would be more than `room`, or if too many
 * rows do not follow the plan. The caller moves them to where they stay and sets `data`. */
EXPORT int64_t holdall_pack_columns(column_run *r, const int64_t *rings, int64_t ring_ticks, int64_t lanes, uint8_t *out,
                                    int64_t room, uint32_t *numbers, uint8_t *scratch) {
    const column_plan *const p = AT(column_plan, r->plan);
    const column_group *const groups = AT(column_group, p->groups);
    column_log *const logs = (column_log *)(intptr_t)r->logs;
    const int64_t rows = r->ticks * lanes;
    uint32_t *const places = numbers + p->group_count * rows, *const wrong = places + rows;
    const raw_rows raw = {rings, places, rows};
    int64_t used = 0;
    for (int64_t lane = 0, row = 0; lane < lanes; lane++)
        for (int64_t t = 0; t < r->ticks; t++, row++)
            places[row] = (uint32_t)((r->first_tick + t) % ring_ticks * lanes + lane);
    for (int64_t g = 0; g < p->group_count; g++) {
        logs[g] = (column_log){used, 0, -1};
        if (groups[g].is_dense) continue;
        logs[g].count = write_log(p, &groups[g], &raw, out + used, room - used, numbers + g * rows, scratch);
        if (logs[g].count < 0) return -1;
        used += logs[g].count * groups[g].frame_bytes;
    }
    lay_out_records(p, r, logs);
    r->records = used;
    r->exceptions = 0;
    r->data = (int64_t)(intptr_t)out;
    used += rows * r->record_bytes;
    if (used > room) return -1;
    write_records(p, r, &raw, numbers, out + r->records);
    const int64_t most = rows / MOST_WRONG, count = compare(p, r, &raw, most, wrong, scratch);
    const int64_t whole_bytes = (int64_t)sizeof *wrong + p->row_bytes;
    if (count > most || used + count * whole_bytes > room) return -1;
    r->numbers = used;
    r->wholes = used + count * (int64_t)sizeof *wrong;
    memcpy(out + r->numbers, wrong, (size_t)count * sizeof *wrong);
    for (int64_t i = 0; i < count; i++)
        for (int64_t leaf = 0; leaf < p->leaves; leaf++) {
            const int64_t bytes = AT(int64_t, p->leaf_bytes)[leaf];
            memcpy(out + r->wholes + i * p->row_bytes + AT(int64_t, p->leaf_starts)[leaf],
                   AT(uint8_t, rings[leaf]) + places[wrong[i]] * bytes, (size_t)bytes);
        }
    r->exceptions = count;
    return used + count * whole_bytes;
}

/* The run that holds a tick; NULL if it lies in the rings. */
static inline const column_run *run_of(const column_runs *all, int64_t tick) {
    const int64_t number = tick >> all->shift;
    const column_run *const run = AT(column_run, AT(int64_t, all->runs)[number & all->mask]);
    return run && run->first_tick == number << all->shift ? run : NULL;
}

/* See gather.c: copy the rows `later` behind those of `ids` of one leaf, from runs and from its ring. */
void copy_from_runs(const row_column *c, const int64_t *ids, int64_t rows, int64_t ring_rows, uint8_t *out) {
    const column_runs *const all = AT(column_runs, c->runs);
    const column_run *found[ROWS_AHEAD] = {NULL};
    int64_t places[ROWS_AHEAD] = {0};
    for (int64_t i = 0; i < rows + ROWS_AHEAD; i++) {
        const int64_t k = i % ROWS_AHEAD; /* of the row that is copied now, and then of the one that is looked up */
        if (i >= ROWS_AHEAD) {
            uint8_t *const to = out + (i - ROWS_AHEAD) * c->row_bytes;
            if (found[k]) unpack(found[k], c->leaf, places[k], to);
            else memcpy(to, AT(uint8_t, c->ring) + places[k] * c->row_bytes, (size_t)c->row_bytes);
        }
        if (i >= rows) continue;
        const int64_t id = ids[i] + c->later, tick = all->lanes == 1 ? id : id / all->lanes;
        const column_run *const r = found[k] = run_of(all, tick);
        places[k] = r ? (id - tick * all->lanes) * r->ticks + tick - r->first_tick : id % ring_rows;
        if (!r) continue;
        const uint8_t *const record = AT(uint8_t, r->data) + r->records + places[k] * r->record_bytes;
        for (int64_t b = 0; b < r->record_bytes; b += LINE) FETCH_SOON(record + b);
    }
}

/* Give the whole pages of a range back to the system; they read as zeros from then on. Returns 0 where that cannot be. */
EXPORT int64_t holdall_release(uint8_t *from, int64_t bytes) {
#ifdef __linux__
    const intptr_t page = (intptr_t)sysconf(_SC_PAGESIZE);
    const intptr_t start = ((intptr_t)from + page - 1) / page * page, end = ((intptr_t)from + bytes) / page * page;
    if (end > start) (void)madvise((void *)start, (size_t)(end - start), MADV_DONTNEED);
    return 1;
#else
    (void)from, (void)bytes;
    return 0;
#endif
}
