/* A batch for the host in one call: rows are drawn as Stable-Baselines3 draws them, looked up and copied, and returned as
 * arrays of NumPy's.
 *
 * Its functions are built-in functions of Python, as those of arguments.c are: they keep the GIL, so nobody can take the
 * memory's lock meanwhile, and it is enough to see that nobody has it. The GIL is given up while large fields are copied,
 * which needs no lock: what they are read from is referred to until then.
 * Whatever is not as it must be is noticed before anything is drawn: then 0 is returned, and Python goes the general way.
 */
#include "batch_structs.h"
#include "objects.h"
#include "reading.h"
#include "threads.h"

#include <string.h>

/* Four threads use up the bandwidth of memory: more of them copy raw slices no faster. */
enum { RAW_HELPERS = 3 };
enum { ALIGNMENT_BYTES = 64, WRITEABLE_C_ARRAY = 0x501, MOST_COLUMNS = 160 };
enum { KEPT_ALIKE = 4 }; /* memories of one size: one in use, one being filled, two for latecomers */

void holdall_draw(uint32_t (*next_uint32)(void *), void *state, int64_t filled, int64_t slots, int64_t newest,
                  int64_t lanes, int64_t rows, int64_t *ids, int64_t *lane);
void holdall_find(const int64_t *first_ticks, int64_t segments, const int64_t *ids, int64_t rows, int64_t lanes,
                  int32_t *segment, int32_t *lane);
int64_t holdall_gather(const part *parts, int64_t part_count, const int32_t *segment, const uint32_t *cursor,
                       const int32_t *lane, int64_t lanes, int64_t rows, const int64_t *to, int64_t to_rows,
                       int64_t obs_bytes, uint8_t *obs, uint8_t *next_obs, decoder *const *decoders, int64_t pieces,
                       thread_pool *pool, int64_t helpers, int64_t *error);

/* Memory that arrays of a batch share. */
typedef struct {
    void *owner; /* an array of bytes, referred to once for the caller of this file */
    uint8_t *first;
} batch_memory;

static int64_t aligned(int64_t bytes) { return (bytes + ALIGNMENT_BYTES - 1) / ALIGNMENT_BYTES * ALIGNMENT_BYTES; }

/* Keep new memory for the next batches, in a place that is free: -1 if there is none. */
static void keep_memory(batch_reader *f, int64_t place, void *owner, int64_t length) {
    if (place < 0 || f->kept_bytes - f->kept_length[place] + length > f->most_kept_bytes) return;
    if (f->kept_owner[place]) f->maker->drop(f->kept_owner[place]);
    f->maker->take(owner);
    f->kept_bytes += length - f->kept_length[place];
    f->kept_owner[place] = owner;
    f->kept_length[place] = length;
}

/* Refer to memory of so many bytes that no batch uses: kept memory that nobody else refers to, or new memory. */
static batch_memory take_memory(batch_reader *f, int64_t bytes) {
    const array_maker *const p = f->maker;
    const int64_t length = bytes + ALIGNMENT_BYTES;
    void *owner = NULL;
    int64_t free_place = -1, alike = 0;
    for (int64_t i = 0; i < KEPT_MEMORIES && bytes >= f->least_kept_bytes && !owner; i++) {
        void *const kept = f->kept_owner[i];
        alike += kept && f->kept_length[i] == length;
        if (kept && ((const object *)kept)->references != 1) continue;
        if (kept && f->kept_length[i] == length) owner = kept;
        else if (free_place < 0 || !kept) free_place = i;
    }
    if (owner) {
        p->take(owner);
    } else {
        p->take(p->byte_dtype);
        owner = p->new_array(p->array_type, p->byte_dtype, 1, &length, NULL, NULL, 0, NULL);
        if (owner && alike < KEPT_ALIKE) keep_memory(f, free_place, owner, length);
    }
    uint8_t *const data = owner ? ((const array *)owner)->data : NULL;
    return (batch_memory){owner, data + (-(uintptr_t)data & (ALIGNMENT_BYTES - 1))};
}

/* Make an array of `rows` rows at `data` in some memory. */
static void *view(const batch_reader *f, const batch_array *a, int64_t rows, const batch_memory *m, uint8_t *data) {
    const array_maker *const p = f->maker;
    int64_t lengths[MOST_DIMENSIONS];
    memcpy(lengths, a->lengths, sizeof lengths);
    lengths[0] = rows;
    p->take(a->dtype);
    void *const made =
        p->new_array(p->array_type, a->dtype, (int)a->dimensions, lengths, NULL, data, WRITEABLE_C_ARRAY, NULL);
    if (!made) return NULL;
    p->take(m->owner);
    if (p->set_base(made, m->owner) == 0) return made;
    p->drop(made);
    return NULL;
}

/* Memory of a batch: of short observations, of everything else that is short, and of each large field. */
typedef struct {
    int64_t offset[MOST_COLUMNS]; /* of every column in its memory */
    batch_memory part[2 + MOST_BATCH_FIELDS];
    int64_t parts;
} batch_memories;

static void drop_memories(const batch_reader *f, batch_memories *m) {
    for (int64_t i = 0; i < m->parts; i++)
        if (m->part[i].owner) f->maker->drop(m->part[i].owner);
}

/* Take memory for a batch; 0 if there is none. */
static int take_memories(batch_reader *f, int64_t rows, batch_memories *m) {
    int64_t sizes[2] = {0, 0};
    for (int64_t i = 0; i < f->column_count; i++) {
        int64_t *const size = &sizes[f->columns[i].block != 0];
        m->offset[i] = *size;
        *size += aligned(rows * f->columns[i].row_bytes);
    }
    m->parts = 2;
    const int is_one = sizes[0] + sizes[1] <= f->one_memory_bytes;
    m->part[0] = take_memory(f, is_one ? sizes[0] + sizes[1] : sizes[0]);
    if (is_one) {
        m->part[1] = (batch_memory){m->part[0].owner, m->part[0].first + sizes[0]};
        if (m->part[0].owner) f->maker->take(m->part[0].owner);
    } else {
        m->part[1] = take_memory(f, sizes[1]);
    }
    for (int64_t k = 0; k < f->field_count; k++) m->part[m->parts++] = take_memory(f, 2 * aligned(rows * f->field[k].obs_bytes));
    for (int64_t i = 0; i < m->parts; i++)
        if (!m->part[i].owner) {
            drop_memories(f, m);
            return 0;
        }
    return 1;
}

/* What a batch consists of. */
typedef struct {
    const batch_array *first;
    int64_t count;
} batch_arrays;

/* Return a tuple of arrays over the memory; NULL after an exception. */
static void *arrays_of(const batch_reader *f, batch_arrays wanted, int64_t rows, const batch_memories *m) {
    void *const made = f->maker->new_tuple(wanted.count);
    for (int64_t i = 0; made && i < wanted.count; i++) {
        const batch_array *const a = &wanted.first[i];
        const batch_memory *const memory = &m->part[a->column < 0 ? 2 + a->field : f->columns[a->column].block != 0];
        const int64_t offset =
            a->column >= 0 ? m->offset[a->column] : a->is_next ? aligned(rows * f->field[a->field].obs_bytes) : 0;
        void *const one = view(f, a, rows, memory, memory->first + offset);
        if (!one || f->maker->set_item(made, i, one) != 0) {
            f->maker->drop(made);
            return NULL;
        }
    }
    return made;
}

/* Copy one large field, without the GIL; 0 if a place is damaged. */
static int copy_field(const batch_reader *f, const batch_field *b, int64_t rows, const uint32_t *cursor, uint8_t *to) {
    const int64_t bytes = 2 * rows * b->obs_bytes, least = b->is_sealed ? f->sealed_bytes_per_thread : f->bytes_per_thread;
    int64_t helpers = bytes / least - 1, pieces = 1 + bytes / f->piece_bytes, error;
    if (helpers > f->most_helpers) helpers = f->most_helpers;
    if (!b->is_sealed && helpers > RAW_HELPERS) helpers = RAW_HELPERS;
    if (helpers < 1 || !f->pool) helpers = 0, pieces = 1;
    if (pieces > rows) pieces = rows;
    return holdall_gather(b->parts, b->part_count, f->segment, cursor, f->lane, f->lanes, rows, NULL, rows,
                          b->obs_bytes, to, to + aligned(rows * b->obs_bytes), f->decoders, pieces,
                          helpers ? f->pool : NULL, helpers, &error) < 0;
}

/* Copy all large fields; 0 if a place is damaged. The GIL is given up meanwhile if that is worth it. */
static int copy_fields(batch_reader *f, int64_t rows, const batch_memories *m) {
    const array_maker *const p = f->maker;
    int64_t bytes = 0;
    int is_done = 1;
    holdall_find(f->first_ticks, f->segments, f->ids, rows, f->lanes, f->segment, f->lane);
    for (int64_t k = 0; k < f->field_count; k++) bytes += 2 * rows * f->field[k].obs_bytes;
    void *const state = bytes > f->bytes_without_gil ? p->save_thread() : NULL;
    for (int64_t k = 0; k < f->field_count && is_done; k++) {
        const batch_field *const b = &f->field[k];
        const uint32_t *const cursor = (const uint32_t *)(m->part[1].first + m->offset[b->cursor_column]);
        is_done = copy_field(f, b, rows, cursor, m->part[2 + k].first);
    }
    if (state) p->restore_thread(state);
    return is_done;
}

/* Return the ids that were drawn as an array: for the general way, which says what is wrong with them. */
static void *drawn_ids(batch_reader *f, int64_t rows) {
    const array_maker *const p = f->maker;
    p->take(p->id_dtype);
    void *const ids = p->new_array(p->array_type, p->id_dtype, 1, &rows, NULL, NULL, 0, NULL);
    if (ids) memcpy(((const array *)ids)->data, f->ids, (size_t)rows * sizeof *f->ids);
    return ids;
}

/* Whether batches can be made this way now: nobody is at work, and fields lie where they were. */
static int is_ready(const batch_reader *f) {
    return f->is_open && !*f->lock_owner && !*f->is_pending && !*f->is_changed && !f->is_busy;
}

/* Return the oldest tick that is held. */
static int64_t oldest_tick(const batch_reader *f) {
    const int64_t by_capacity = f->writer->next_tick - f->capacity_ticks;
    return by_capacity > f->first_tick ? by_capacity : f->first_tick;
}

/* Make the batch of the ids in `f->ids`. */
static void *make_batch(batch_reader *f, batch_arrays wanted, int64_t rows) {
    const array_maker *const p = f->maker;
    const int64_t first_id = oldest_tick(f) * f->lanes, next_id = f->writer->next_tick * f->lanes;
    batch_memories m;
    if (!take_memories(f, rows, &m)) return NULL;
    int is_done = holdall_read_rows(f->columns, f->column_count, f->ids, rows, first_id, next_id, f->ring_rows,
                                    m.part[0].first, m.part[1].first) < 0;
    void *made = is_done ? arrays_of(f, wanted, rows, &m) : NULL;
    if (made && f->field_count) is_done = copy_fields(f, rows, &m);
    drop_memories(f, &m);
    if (is_done) return made;
    if (made) p->drop(made);
    return drawn_ids(f, rows);
}

/* The same, while nobody else draws and nothing that is read is freed: making a tuple may start the collector, which runs
 * any code, and lets other threads run. */
static void *batch_of(batch_reader *f, batch_arrays wanted, int64_t rows) {
    void *const kept = f->kept;
    f->maker->take(kept);
    f->is_busy = f->maker->own_thread();
    void *const made = make_batch(f, wanted, rows);
    f->is_busy = 0;
    f->maker->drop(kept);
    return made;
}

/* draw(generator, rows, filled, slots) -> a tuple of arrays; 0, and nothing was drawn, if they cannot be made this way;
 * the ids that were drawn if one of them is damaged. Rows are drawn from the first `filled` of `slots` slots. */
EXPORT void *holdall_fast_draw(void *self, void *const *given, int64_t count) {
    batch_reader *const f = own_struct(self);
    const array_maker *const p = f->maker;
    if (count != 4) return p->number(0);
    int64_t number[3];
    for (int i = 0; i < 3; i++) {
        number[i] = p->as_number(given[i + 1]);
        if (number[i] < 0) p->clear_error(); /* of what is no number, too: the general way says so */
    }
    const int64_t rows = number[0], filled = number[1], slots = number[2];
    if (!is_ready(f) || given[0] != f->generator || *f->generator_is_locked) return p->number(0);
    const int64_t next_tick = f->writer->next_tick, first_tick = oldest_tick(f);
    /* Every slot that may be drawn was written to, and what was written last is still held. */
    const int is_filled = filled == slots ? next_tick - first_tick >= slots : first_tick == 0 && filled == next_tick;
    if (rows < 1 || rows > f->most_rows || filled < 1 || filled > slots || filled > UINT32_MAX || !is_filled)
        return p->number(0);
    holdall_draw(f->next_uint32, f->generator_state, filled, slots, next_tick - 1, f->lanes, rows, f->ids,
                 f->lanes == 1 ? NULL : f->drawn_lanes);
    return batch_of(f, (batch_arrays){f->arrays, f->array_count}, rows);
}

/* gather(ids) -> a tuple of arrays; 0 if they cannot be made this way; the ids again if one of them is not held, or
 * damaged. */
EXPORT void *holdall_fast_gather(void *self, void *const *given, int64_t count) {
    batch_reader *const f = own_struct(self);
    const array_maker *const p = f->maker;
    const array *const ids = count == 1 ? given[0] : NULL;
    if (!ids || !is_ready(f) || ids->head.type != p->array_type || ids->dtype != p->id_dtype || ids->dimensions != 1 ||
        !(ids->flags & C_CONTIGUOUS) || ids->lengths[0] < 1 || ids->lengths[0] > f->most_rows)
        return p->number(0);
    memcpy(f->ids, ids->data, (size_t)ids->lengths[0] * sizeof *f->ids);
    return batch_of(f, (batch_arrays){f->gathered, f->gathered_count}, ids->lengths[0]);
}
