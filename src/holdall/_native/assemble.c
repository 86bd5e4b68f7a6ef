/* A batch for a device in one call: rows are looked up, every slice that they need is named once, short fields are
 * copied into pinned memory, and the device is told to fetch all of it.
 *
 * Every index is checked, as in gather.c. A batch that fails leaves nothing but launches whose results nobody sees.
 */
#include "batch_structs.h"
#include "reading.h"

#include <string.h>

enum { DONE = 0, NOT_HELD = 1, DAMAGED = 2, NOT_THERE = 3, REFUSED = 4 };
enum { LARGE_SLICE_BYTES = 1024, WARP = 32, BLOCK = 256, HEAD_BLOCKS = 64, ROWS_AHEAD = 16 };
/* Up to so many rows are named in two pieces; more of them in pieces that grow so, since to fetch takes longer. */
enum { FEW_ROWS = 512, PIECE_GROWTH = 2 };
/* Of so many times more rows, two drawn ones seldom show the same slice, and one launch less is worth more. */
enum { SELDOM = 64 };

void holdall_draw(uint32_t (*next_uint32)(void *), void *state, int64_t filled, int64_t slots, int64_t newest,
                  int64_t lanes, int64_t rows, int64_t *ids, int64_t *lane);

/* The signatures of cuLaunchKernel and cuEventRecord. */
typedef int (*launcher)(void *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **arguments,
                        void **extra);
typedef int (*recorder)(void *event, void *stream);

/* Find where observations [from, to) of a field begin: rows of `ids`, all of them held. */
static int64_t find_rows(batch_request *r, const sliced_source *s, const int64_t *ids, int64_t from, int64_t to) {
    const int64_t ring_rows = r->ring_rows, offset = r->first_id % ring_rows - r->first_id;
#define CURSOR_OF(i) (s->cursors + (ids[i] + offset - (ids[i] + offset >= ring_rows ? ring_rows : 0)))
    for (int64_t i = from; i < to && i < from + ROWS_AHEAD; i++) FETCH_SOON(CURSOR_OF(i));
    for (int64_t i = from; i < to; i++) {
        if (i + ROWS_AHEAD < to) FETCH_SOON(CURSOR_OF(i + ROWS_AHEAD));
        const int64_t tick = r->lanes == 1 ? ids[i] : ids[i] / r->lanes;
        const int32_t segment = segment_of(tick, r->first_ticks, r->segments);
        if (segment < 0 || segment >= s->part_count) return i;
        const int32_t lane = (int32_t)(ids[i] - tick * r->lanes);
        const part *const p = &s->parts[segment];
        const uint32_t cursor = *CURSOR_OF(i);
        r->found[i] = (row_place){segment, lane, cursor, 0};
        const int64_t entry = (int64_t)(cursor & ~NEXT_IS_WHOLE) * r->lanes + lane;
        if (p->log_width) FETCH_SOON((const uint8_t *)(intptr_t)p->log + entry * p->log_width);
    }
#undef CURSOR_OF
    return -1;
}

/* Have the slice at `place` brought to `position`, or repeated from where it is brought to. */
static void bring(batch_request *r, const sliced_source *s, device_field *f, int64_t place, int32_t position) {
    int64_t *const places = (int64_t *)(r->head + s->places);
    int32_t *const positions = (int32_t *)(r->head + s->positions), *const repeats = (int32_t *)(r->head + s->repeats);
    if (s->are_named && (f->window > 1 || r->rows * SELDOM >= r->next_id - r->first_id)) {
        uint32_t *const slots = r->slots + (s - r->source) * r->slot_count;
        const uint64_t mask = (uint64_t)r->slot_count - 1;
        uint64_t slot = ((uint64_t)place * UINT64_C(0x9E3779B97F4A7C15) >> 32) & mask;
        for (; slots[slot] != 0; slot = (slot + 1) & mask) {
            const int64_t known = slots[slot] - 1;
            if (places[known] != place) continue;
            repeats[2 * f->end_repeat] = position;
            repeats[2 * f->end_repeat++ + 1] = positions[known];
            return;
        }
        slots[slot] = (uint32_t)f->end + 1;
    }
    places[f->end] = place;
    positions[f->end++] = position;
}

/* Name the slices of the observations, of the next ones, or of both, of rows that were found. Returns DONE or why not. */
static int name_rows(batch_request *r, const sliced_source *s, device_field *f, int64_t from, int64_t to, int obs,
                     int next_obs) {
    const int64_t window = f->window, slice_bytes = f->outer * f->run_bytes, later = r->rows * window;
    for (int64_t i = from; i < to; i++) {
        const row_place at = r->found[i];
        const part *const p = &s->parts[at.segment];
        r->wrong = i;
        if (at.lane < 0 || at.lane >= r->lanes) return DAMAGED;
        if (p->window != window || p->outer != f->outer || p->run_bytes != f->run_bytes) return DAMAGED;
        if (s->starts[at.segment] < 0) return NOT_THERE;
        const int64_t start = (int64_t)(at.cursor & ~NEXT_IS_WHOLE);
        const int64_t step = (at.cursor & NEXT_IS_WHOLE) != 0 ? window : p->shift;
        const int64_t end = next_obs ? step + window : window;
        if (start + end > p->log_rows) return DAMAGED;
        for (int64_t w = obs ? 0 : step; w < end; w++) {
            const int in_obs = obs && w < window, in_next = next_obs && w >= step;
            if (!in_obs && !in_next) continue;
            const int64_t number = number_at(p, start + w, at.lane, r->lanes);
            if (number < 0) return DAMAGED;
            const int64_t place = s->starts[at.segment] + number * slice_bytes;
            if (in_obs) bring(r, s, f, place, (int32_t)(i * window + w));
            if (in_next) bring(r, s, f, place, (int32_t)(later + i * window + w - step));
        }
    }
    return DONE;
}

/* Look rows [from, to) of a field up, and name its slices. */
static int look_up(batch_request *r, int64_t field, int64_t from, int64_t to) {
    const sliced_source *const s = &r->source[field];
    device_field *const f = &r->task.field[field];
    f->first = f->end;
    r->wrong = find_rows(r, s, r->ids, from, to);
    if (r->wrong >= 0) return DAMAGED;
    const int failed = name_rows(r, s, f, from, to, 1, r->last_ids == NULL);
    if (failed || !r->last_ids) return failed;
    r->wrong = find_rows(r, s, r->last_ids, from, to);
    return r->wrong >= 0 ? DAMAGED : name_rows(r, s, f, from, to, 0, 1);
}

/* Copy all short fields into pinned memory. */
static int pack(batch_request *r) {
    const int64_t *ids[] = {r->ids, r->last_ids}, at[][2] = {{r->observed, r->rest}, {r->last_observed, r->last_rest}};
    for (int k = 0; k < 2 && ids[k]; k++) {
        r->wrong = holdall_read_rows(r->columns, r->column_count, ids[k], r->rows, r->first_id, r->next_id, r->ring_rows,
                                     r->head + at[k][0], r->head + at[k][1]);
        if (r->wrong >= 0) return NOT_HELD;
    }
    for (int64_t k = 0; k < r->copied_count; k++)
        memcpy(r->head + r->copied[k].offset, r->copied[k].source, (size_t)r->copied[k].bytes);
    return DONE;
}

/* Launch a kernel over `items` slices of each field, and over the short fields if the last of `fields` is theirs. */
static int launch(batch_request *r, void *kernel, int64_t items, int64_t fields) {
    int64_t most = 0;
    for (int64_t k = 0; k < r->task.fields; k++) {
        const device_field *const f = &r->task.field[k];
        if (f->outer * f->run_bytes > most) most = f->outer * f->run_bytes;
    }
    const unsigned wide = most > LARGE_SLICE_BYTES, rows = wide ? 1 : BLOCK / WARP;
    int64_t blocks = (items + rows - 1) / rows;
    if (blocks > r->most_blocks) blocks = r->most_blocks;
    if (fields > r->task.fields && blocks < HEAD_BLOCKS) blocks = HEAD_BLOCKS;
    void *arguments[] = {&r->task};
    launcher call; /* C does not convert the address of an object to that of a function */
    memcpy(&call, &r->launch, sizeof call);
    r->wrong = call(kernel, (unsigned)blocks, (unsigned)fields, 1, wide ? BLOCK : WARP, rows, 1, 0, r->stream, arguments,
                    NULL);
    return r->wrong ? REFUSED : DONE;
}

/* Have the device fetch the slices that were named since the last time, and the short fields if they are there. */
static int bring_named(batch_request *r, int with_head) {
    int64_t brought = 0;
    for (int64_t k = 0; k < r->task.fields; k++) {
        const device_field *const f = &r->task.field[k];
        if (f->end - f->first > brought) brought = f->end - f->first;
    }
    return brought || with_head ? launch(r, r->bring, brought, r->task.fields + with_head) : DONE;
}

/* Count the slices of the field with most that several observations show. */
static int64_t most_repeated(const batch_request *r) {
    int64_t repeated = 0;
    for (int64_t k = 0; k < r->task.fields; k++)
        if (r->task.field[k].end_repeat > repeated) repeated = r->task.field[k].end_repeat;
    return repeated;
}

static int ids_are_held(batch_request *r, const int64_t *ids) {
    for (int64_t i = 0; ids && i < r->rows; i++)
        if (ids[i] < r->first_id || ids[i] >= r->next_id) {
            r->wrong = i;
            return 0;
        }
    return 1;
}

/* Begin with no slice named, and say where in pinned memory and on the device everything goes. */
static void begin(batch_request *r) {
    const int64_t fields = r->task.fields;
    if (fields) memset(r->slots, 0, (size_t)(fields * r->slot_count) * sizeof *r->slots);
    for (int64_t k = 0; k < fields; k++) {
        const sliced_source *const s = &r->source[k];
        device_field *const f = &r->task.field[k];
        f->end = f->end_repeat = 0;
        f->places = (const int64_t *)(r->head + s->places);
        f->positions = (const int32_t *)(r->head + s->positions);
        f->repeats = (const int32_t *)(r->head + s->repeats);
        f->to = r->block + s->to;
    }
    r->task.head_from = r->head, r->task.head_to = r->block;
}

/* Name and send for everything. Slices come first, so that the device fetches them while the short fields are copied.
 * Where no slice is repeated, the last launch brings these, too. */
static int put_together(batch_request *r) {
    const int64_t fields = r->task.fields;
    int failed = DONE, with_head = 0;
    begin(r);
    for (int64_t from = 0, to, piece = r->first_rows; from < r->rows && fields && !failed; from = to) {
        to = piece < r->rows - from ? from + piece : r->rows;
        for (int64_t k = 0; k < fields && !failed; k++) failed = look_up(r, k, from, to);
        with_head = !failed && to == r->rows && most_repeated(r) == 0;
        if (with_head) failed = pack(r);
        if (!failed) failed = bring_named(r, with_head);
        piece = r->rows <= FEW_ROWS ? r->rows : PIECE_GROWTH * piece;
    }
    if (failed || with_head) return failed;
    failed = pack(r);
    return failed ? failed : launch(r, r->finish, most_repeated(r), fields + 1);
}

/* Record the event behind whatever was launched. */
static int record(batch_request *r) {
    if (!r->event) return DONE;
    recorder call;
    memcpy(&call, &r->record, sizeof call);
    const int error = call(r->event, r->stream);
    if (error) r->wrong = error;
    return error ? REFUSED : DONE;
}

/* Draw a batch, if that is asked for, and put it together. Returns DONE, or why it cannot be: `wrong` is then a row, or
 * the error of the driver. The event stands behind all launches in any case. */
EXPORT int64_t holdall_assemble(batch_request *r) {
    if (r->next_uint32)
        holdall_draw(r->next_uint32, r->generator_state, r->filled, r->drawn_slots, r->newest, r->lanes, r->rows, r->ids,
                     r->lanes == 1 ? NULL : r->drawn_lanes);
    if (!ids_are_held(r, r->ids) || !ids_are_held(r, r->last_ids)) return NOT_HELD;
    const int failed = put_together(r);
    const int64_t wrong = r->wrong;
    const int unrecorded = record(r);
    if (!failed) return unrecorded;
    r->wrong = wrong;
    return failed;
}

/* ---- where the device is the host -------------------------------------------------- */

/* Copy a slice that lies in one piece, or in runs `from_step` apart, to runs that are `to_step` apart. */
static void copy_runs(uint8_t *to, int64_t to_step, const uint8_t *from, int64_t from_step, const device_field *f) {
    for (int64_t o = 0; o < f->outer; o++) memcpy(to + o * to_step, from + o * from_step, (size_t)f->run_bytes);
}

static uint8_t *slice_at(const device_field *f, int64_t position) {
    return f->to + position / f->window * f->window * f->outer * f->run_bytes + position % f->window * f->run_bytes;
}

/* Does what the kernels bring_slices (1) and finish_batch (2) do; takes what cuLaunchKernel takes. */
EXPORT int holdall_launch_here(void *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream,
                               void **arguments, void **extra) {
    const assembly *const a = arguments[0];
    (void)grid_x, (void)grid_z, (void)block_x, (void)block_y, (void)block_z, (void)shared_bytes, (void)stream, (void)extra;
    for (int64_t k = 0; k < a->fields; k++) {
        const device_field *const f = &a->field[k];
        const int64_t step = f->window * f->run_bytes;
        for (int64_t i = f->first; i < f->end && (intptr_t)kernel == 1; i++)
            copy_runs(slice_at(f, f->positions[i]), step, f->base + f->places[i], f->run_bytes, f);
        for (int64_t i = 0; i < f->end_repeat && (intptr_t)kernel == 2; i++)
            copy_runs(slice_at(f, f->repeats[2 * i]), step, slice_at(f, f->repeats[2 * i + 1]), step, f);
    }
    if (grid_y > a->fields) memcpy(a->head_to, a->head_from, (size_t)a->head_bytes);
    return 0;
}
