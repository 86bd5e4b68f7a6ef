/* Arguments of an `add`, as Python passes them: arrays are checked and written without another object being made.
 *
 * These functions are built-in functions of Python: one_call.py makes them with PyCFunction_NewEx. They keep the GIL,
 * and nothing that they call once a first array was looked at gives it up, so no signal handler and no other thread comes
 * in between. There are no Python headers: functions of the stable interface are passed in by address. Where the fields of
 * objects and of NumPy's arrays lie is part of the interface of both; one_call.py compares it with real ones first.
 */
#include "holdall.h"
#include "objects.h"
#include "structs.h"

#include <string.h>

int64_t holdall_write_tick(tick_writer *t, const uint8_t *packed, int64_t packed_bytes, int64_t is_kept);

enum { MOST_FIELDS = 32, OBS = 0, ACTION, REWARD, NEXT_OBS, TERMINATED, TRUNCATED, INFOS };
/* Longer ticks take so long to write that other threads should not wait for the GIL meanwhile. */
enum { MOST_BYTES_WITH_GIL = 1 << 18 };
/* Lanes of which each has a bit. */
enum { MOST_CUT = 64 };

/* Return an argument as the array that it is; NULL if it has not exactly this form, however its elements lie. */
static const array *array_of(const python *p, const argument_form *form, const void *value) {
    const array *a = value;
    if (a->head.type != p->array_type || a->dtype != form->dtype || a->dimensions != form->dimensions ||
        memcmp(a->lengths, form->lengths, (size_t)form->dimensions * sizeof *form->lengths) != 0)
        return NULL;
    return a;
}

/* Return where the elements of an array lie, one after another; NULL if they do not, or it has not this form. */
static const uint8_t *rows_of(const python *p, const argument_form *form, const void *value) {
    const array *const a = array_of(p, form, value);
    return a && a->flags & C_CONTIGUOUS ? a->data : NULL;
}

/* Return which of the fields a key of a Dict names, most likely the next one; -1 if none. */
static int64_t field_of(const fast_tick *f, void *key, int64_t likely) {
    if (f->observed[likely].key == key) return likely;
    for (int64_t i = 0; i < f->observed_count; i++)
        if (f->observed[i].key == key) return i;
    if (((const object *)key)->type != f->python->str_type) return -1;
    for (int64_t i = 0; i < f->observed_count; i++)
        if (f->python->str_compare(f->observed[i].key, key) == 0) return i;
    return -1;
}

/* Find the arrays of one observation, field by field; 0 if one is not as it must be. */
static int find_observed(const fast_tick *f, void *value, const array **arrays) {
    const python *const p = f->python;
    if (!f->is_dict) return (arrays[0] = array_of(p, f->observed, value)) != NULL;
    const void *const type = ((const object *)value)->type;
    if ((type != p->dict_type && type != p->ordered_dict_type) || p->dict_size(value) != f->observed_count) return 0;
    int64_t place = 0;
    void *key, *item;
    for (int64_t n = 0; n < f->observed_count && p->dict_next(value, &place, &key, &item); n++) {
        const int64_t i = field_of(f, key, n);
        if (i < 0 || !(arrays[i] = array_of(p, &f->observed[i], item))) return 0;
    }
    return 1;
}

/* Find the lanes whose infos say that a time limit cut their episode, a bit each. 0 if infos are not as they must be, or
 * there are too many lanes; -1 if an exception was raised. */
static int find_cuts(const fast_tick *f, void *infos, uint64_t *cuts) {
    const python *const p = f->python;
    const int64_t lanes = f->rest[3].bytes;
    if (((const object *)infos)->type != p->list_type) return 0;
    for (int64_t i = 0; i < p->list_size(infos); i++) {
        void *const info = p->list_item(infos, i);
        if (((const object *)info)->type != p->dict_type) return 0;
        p->take(info); /* a key's own comparison may run, and drop it */
        void *const cut = p->dict_item(info, f->cut_key);
        const int is_set = cut && cut != p->is_false && cut != p->is_none, is_true = cut == p->is_true;
        p->drop(info);
        if (!cut && p->error()) return -1;
        if (!is_set) continue;
        if (!is_true || lanes > MOST_CUT || p->list_size(infos) != lanes || i >= lanes) return 0;
        *cuts |= UINT64_C(1) << i;
    }
    return 1;
}

/* The observations of a tick, those in rings first. */
typedef struct {
    const array *obs[MOST_FIELDS], *next_obs[MOST_FIELDS];
} observations;

/* Copy the fields that lie in rings to `f->packed`; 0 if an argument is not as it must be, -1 after an exception. */
static int pack(const fast_tick *f, void *const *given, int64_t count, observations *o) {
    const uint8_t *rest[4];
    const int order[4] = {ACTION, REWARD, TERMINATED, TRUNCATED};
    uint64_t cuts = 0;
    if (count != INFOS && count != INFOS + 1) return 0;
    const int goes_on = count == INFOS || given[INFOS] == f->python->is_none ? 1 : find_cuts(f, given[INFOS], &cuts);
    if (goes_on != 1) return goes_on;
    if (!f->is_open) return 0; /* a key's own comparison closed the memory: what follows is freed */
    for (int i = 0; i < 4; i++)
        if (!(rest[i] = rows_of(f->python, &f->rest[i], given[order[i]]))) return 0;
    if (!find_observed(f, given[OBS], o->obs) || !find_observed(f, given[NEXT_OBS], o->next_obs)) return 0;
    uint8_t *to = f->packed;
    for (int64_t i = 0; i < f->small_count; i++) {
        const int64_t bytes = f->observed[i].bytes;
        if (!(o->obs[i]->flags & o->next_obs[i]->flags & C_CONTIGUOUS)) return 0;
        memcpy(to, o->obs[i]->data, (size_t)bytes);
        memcpy(to + bytes, o->next_obs[i]->data, (size_t)bytes);
        to += 2 * bytes;
    }
    for (int i = 0; i < 4; to += f->rest[i++].bytes) memcpy(to, rest[i], (size_t)f->rest[i].bytes);
    /* An episode that was cut has ended, and was not terminated. */
    for (uint8_t *truncated = to - f->rest[3].bytes; cuts; cuts >>= 1, truncated++) {
        if (!(cuts & 1)) continue;
        uint8_t *const terminated = truncated - f->rest[2].bytes;
        *terminated = !*terminated;
        *truncated = 1;
    }
    return 1;
}

/* Point the writer to the observations that are cut into slices; 0 if they lie in an order that it does not know. */
static int aim(const fast_tick *f, const observations *o) {
    sliced_field *s = f->writer->sliced;
    if (f->writer->sliced_count != f->observed_count - f->small_count) return 0;
    for (int64_t i = f->small_count; i < f->observed_count; i++, s++) {
        const array *const obs = o->obs[i], *const next_obs = o->next_obs[i];
        const size_t strides_bytes = (size_t)obs->dimensions * sizeof *obs->strides;
        const int is_plain = obs->flags & next_obs->flags & C_CONTIGUOUS;
        if (!is_plain && (!s->known || memcmp(obs->strides, s->strides, strides_bytes) != 0 ||
                          memcmp(next_obs->strides, s->strides, strides_bytes) != 0))
            return 0;
        s->obs = obs->data;
        s->next_obs = next_obs->data;
        s->order = is_plain ? NULL : s->known;
    }
    return 1;
}

/* Whether the worker that seals blocks is not so late that the tick to come would have to wait for it. */
static int may_come(const tick_writer *t) {
    int64_t open_bytes = 0;
    for (const sliced_field *s = t->sliced; s < t->sliced + t->sliced_count; s++) {
        const open_part *const p = s->part;
        open_bytes += p->block ? p->block->used * p->block->slice_bytes : p->longest * p->lanes * p->outer * p->run_bytes;
    }
    const int64_t sealed_bytes = t->sealed_bytes ? *(const volatile int64_t *)t->sealed_bytes : 0;
    return open_bytes <= t->most_ahead + sealed_bytes;
}

/* Whether the tick to come can be written in one step, as far as its arguments do not matter. */
static int is_ready(const fast_tick *f) {
    const tick_writer *const t = f->writer;
    return f->is_open && t->next_tick < t->pause_tick &&
           (f->small_count == f->observed_count ||
            (t->next_tick < t->blocks_pause_tick && f->large_bytes <= MOST_BYTES_WITH_GIL && may_come(t)));
}

/* Load what a tick is written to while its arguments are looked at. */
static void fetch_soon(const tick_writer *t) {
    const int64_t slot = t->next_tick % t->ring_ticks;
    for (const flat_field *f = t->flat; f < t->flat + t->flat_count; f++) FETCH_SOON(f->rows + slot * f->tick_bytes);
}

/* add(obs, action, reward, next_obs, terminated, truncated, infos=None) -> how many ticks were written in all, or 0 if
 * nothing was written: an argument is not as it must be, more than this step is needed, or somebody has the lock. Nobody
 * can take the lock meanwhile, since that needs the GIL. */
EXPORT void *holdall_fast_add(void *self, void *const *given, int64_t count) {
    const fast_tick *const f = own_struct(self);
    observations observed;
    int64_t ticks = 0;
    if (is_ready(f)) {
        fetch_soon(f->writer);
        ticks = pack(f, given, count, &observed);
        if (ticks < 0) return NULL;
        if (ticks && is_ready(f) && !*f->lock_owner && !*f->is_pending && aim(f, &observed))
            ticks = holdall_write_tick(f->writer, f->packed, f->packed_bytes, 0);
        else
            ticks = 0;
    }
    return f->python->number(ticks < 0 ? 0 : ticks);
}

/* pack(obs, action, reward, next_obs, terminated, truncated) -> bytes: the fields in rings one after another; or 0. */
EXPORT void *holdall_fast_pack(void *self, void *const *given, int64_t count) {
    const fast_tick *const f = own_struct(self);
    observations observed;
    const int is_packed = f->is_open ? pack(f, given, count, &observed) : 0;
    if (is_packed < 0) return NULL;
    return is_packed ? f->python->bytes((const char *)f->packed, f->packed_bytes) : f->python->number(0);
}
