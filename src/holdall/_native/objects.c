/* The types Raw, Block, Part, Segment and Catalog: memory, construction, and what Python sees of them. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, madvise */
#include "engine.h"
#include "module.h"
#include "packed.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#ifndef _WIN32
#include <sys/mman.h>
#include <unistd.h>
#endif

PyTypeObject *raw_type, *block_type, *part_type, *segment_type, *catalog_type;

/* ---- memory -------------------------------------------------------------------------- */

enum {
    MAPPED_BYTES = 1 << 18, /* Larger areas are mapped, so that freeing them returns them to the system. */
    HUGE_BYTES = 1 << 21,   /* The size of a huge page. Larger areas begin at a multiple of it, to use such pages. */
};

/* Bytes of stored data that were allocated with malloc or calloc: small areas, and packed runs. */
static atomic_llong heap_bytes;

void heap_count(long long bytes) { atomic_fetch_add_explicit(&heap_bytes, bytes, memory_order_relaxed); }

#ifndef _WIN32
/* Map `bytes` bytes. NULL if the system has no memory. */
static void *map_pages(size_t bytes) {
    void *const area = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return area == MAP_FAILED ? NULL : area;
}

/* Map `bytes` bytes that begin at a multiple of HUGE_BYTES, if there is room for that. NULL if the system has no memory. */
static void *map_aligned(size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    bytes = (bytes + page - 1) / page * page;
    uint8_t *const area = map_pages(bytes + HUGE_BYTES);
    if (!area) return map_pages(bytes);
    const size_t before = (HUGE_BYTES - (uintptr_t)area % HUGE_BYTES) % HUGE_BYTES;
    if (before > 0) (void)munmap(area, before);
    if (before < HUGE_BYTES) (void)munmap(area + before + bytes, HUGE_BYTES - before);
    return area + before;
}
#endif

void *area_new(size_t bytes) {
    if (bytes == 0) bytes = 1;
#ifndef _WIN32
    if (bytes >= HUGE_BYTES) return map_aligned(bytes);
    if (bytes >= MAPPED_BYTES) return map_pages(bytes);
#endif
    void *const area = calloc(1, bytes);
    if (area) heap_count((long long)bytes);
    return area;
}

void area_free(void *area, size_t bytes) {
    if (!area) return;
#ifndef _WIN32
    if (bytes >= MAPPED_BYTES) {
        (void)munmap(area, bytes);
        return;
    }
#endif
    heap_count(-(long long)(bytes == 0 ? 1 : bytes));
    free(area);
}

void area_use_huge_pages(void *area, size_t bytes) {
#ifdef MADV_HUGEPAGE
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (bytes >= HUGE_BYTES) (void)madvise(area, bytes / page * page, MADV_HUGEPAGE);
#else
    (void)area, (void)bytes;
#endif
}

void area_release_tail(void *area, size_t used, size_t bytes) {
#ifdef __linux__
    if (bytes < MAPPED_BYTES) return;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t start = (used + page - 1) / page * page;
    if (start < bytes) (void)madvise((uint8_t *)area + start, bytes - start, MADV_DONTNEED);
#else
    (void)area, (void)used, (void)bytes;
#endif
}

/* ---- objects ------------------------------------------------------------------------- */

void *object_new(PyTypeObject *type) {
    return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

PyObject *object_make(PyTypeObject *type, PyObject *arguments, PyObject *keywords, initproc init) {
    PyObject *const object = object_new(type);
    if (!object || init(object, arguments, keywords) == 0) return object;
    Py_DECREF(object);
    return NULL;
}

void object_free(void *object) {
    PyTypeObject *const type = Py_TYPE((PyObject *)object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

PyTypeObject *type_add(PyObject *module, PyType_Spec *spec, const char *name) {
    PyObject *const type = PyType_FromSpec(spec);
    if (!type) return NULL;
    if (PyModule_AddObjectRef(module, name, type) < 0) {
        Py_DECREF(type);
        return NULL;
    }
    return (PyTypeObject *)type;
}

/* Return a number that no other object has. The GIL is held. */
static uint64_t next_serial(void) {
    static uint64_t last;
    return ++last;
}

/* Return a new uint8 or other array with a copy of `count` items; NULL with an exception set. `is_frozen` says that the
 * data never changes or moves while the caller keeps its owner alive, so that large copies can release the GIL. */
static PyObject *array_copy(const void *data, Py_ssize_t count, int type_number, int is_frozen) {
    npy_intp shape[1] = {count};
    PyObject *const array = PyArray_SimpleNew(1, shape, type_number);
    if (!array || count == 0) return array;
    void *const to = PyArray_DATA((PyArrayObject *)array);
    const size_t bytes = (size_t)PyArray_NBYTES((PyArrayObject *)array);
    if (is_frozen && bytes >= MAPPED_BYTES) {
        Py_BEGIN_ALLOW_THREADS
        memcpy(to, data, bytes);
        Py_END_ALLOW_THREADS
    } else {
        memcpy(to, data, bytes);
    }
    return array;
}

/* ---- Raw ----------------------------------------------------------------------------- */

/* Areas of freed Raw objects, for the next ones. A memory that is full frees one block for every block that it fills, and
 * fresh memory would cost a page fault for every 4 KiB. Guarded by the GIL. */
enum { MAX_SPARE_AREAS = 2 };
static struct {
    uint8_t *data;
    Py_ssize_t bytes;
} spare_areas[MAX_SPARE_AREAS];

/* Return a spare area of exactly `bytes` bytes with undefined content, or NULL. */
static uint8_t *spare_take(Py_ssize_t bytes) {
    for (int i = 0; i < MAX_SPARE_AREAS; i++) {
        if (!spare_areas[i].data || spare_areas[i].bytes != bytes) continue;
        uint8_t *const data = spare_areas[i].data;
        spare_areas[i].data = NULL;
        return data;
    }
    return NULL;
}

/* Keep an area if there is room for it. Return whether it was kept. */
static int spare_keep(uint8_t *data, Py_ssize_t bytes) {
    if (bytes < MAPPED_BYTES) return 0;
    for (int i = 0; i < MAX_SPARE_AREAS; i++) {
        if (spare_areas[i].data) continue;
        spare_areas[i].data = data;
        spare_areas[i].bytes = bytes;
        return 1;
    }
    return 0;
}

void spare_areas_free(void) {
    for (int i = 0; i < MAX_SPARE_AREAS; i++) {
        area_free(spare_areas[i].data, (size_t)spare_areas[i].bytes);
        spare_areas[i].data = NULL;
    }
}

Raw *raw_new(Py_ssize_t bytes) {
    Raw *const raw = object_new(raw_type);
    if (!raw) return NULL;
    raw->data = spare_take(bytes);
    if (!raw->data) raw->data = area_new((size_t)bytes);
    raw->capacity_bytes = bytes;
    if (!raw->data) {
        Py_DECREF(raw);
        PyErr_NoMemory();
        return NULL;
    }
    return raw;
}

/* Return slices in the memory of another object. `view` is taken over. NULL with an exception set. */
static Raw *raw_share(Py_buffer *view) {
    Raw *const raw = object_new(raw_type);
    if (raw) raw->source = malloc(sizeof *raw->source);
    if (!raw || !raw->source) {
        PyBuffer_Release(view);
        Py_XDECREF((PyObject *)raw);
        PyErr_NoMemory();
        return NULL;
    }
    *raw->source = *view;
    raw->data = view->buf;
    raw->capacity_bytes = view->len;
    return raw;
}

static void raw_dealloc(PyObject *self) {
    Raw *const raw = (Raw *)self;
    if (raw->source) {
        PyBuffer_Release(raw->source);
        free(raw->source);
        object_free(self);
        return;
    }
    if (!raw->data || !spare_keep(raw->data, raw->capacity_bytes)) area_free(raw->data, (size_t)raw->capacity_bytes);
    object_free(self);
}

static PyObject *raw_nbytes(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(((Raw *)self)->capacity_bytes);
}

static PyGetSetDef raw_properties[] = {
    {"nbytes", raw_nbytes, NULL, "Bytes of slices that fit.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot raw_slots[] = {
    {Py_tp_doc, "Uncompressed slices, one after another."},
    {Py_tp_dealloc, (void *)raw_dealloc},
    {Py_tp_getset, raw_properties},
    {0, NULL},
};
static PyType_Spec raw_spec = {
    "holdall._native.Raw", sizeof(Raw), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, raw_slots,
};

/* ---- Block --------------------------------------------------------------------------- */

Block *block_new(Py_ssize_t slice_bytes, Py_ssize_t capacity, Py_ssize_t lanes) {
    Block *const block = object_new(block_type);
    if (!block) return NULL;
    uint64_t slots = 16;
    while (slots < 2 * (uint64_t)capacity) slots *= 2;
    block->serial = next_serial();
    block->slice_bytes = slice_bytes;
    block->capacity = capacity;
    block->mask = slots - 1;
    block->form = (PyObject *)raw_new(slice_bytes * capacity);
    block->hashes = area_new((size_t)capacity * sizeof *block->hashes);
    block->slots = area_new(slots * sizeof *block->slots);
    if (lanes > 1) block->lanes = area_new((size_t)capacity * sizeof *block->lanes);
    if (!block->form || !block->hashes || !block->slots || (lanes > 1 && !block->lanes)) {
        if (!PyErr_Occurred()) PyErr_NoMemory();
        Py_DECREF(block);
        return NULL;
    }
    return block;
}

static void block_free_index(Block *block) {
    area_free(block->hashes, (size_t)block->capacity * sizeof *block->hashes);
    area_free(block->slots, (size_t)(block->mask + 1) * sizeof *block->slots);
    block->hashes = NULL;
    block->slots = NULL;
}

static void block_free_lanes(Block *block) {
    if (block->lanes) area_free(block->lanes, (size_t)block->capacity * sizeof *block->lanes);
    block->lanes = NULL;
}

void block_close(Block *block) {
    if (!block->hashes) return;
    block_free_index(block);
    Raw *const raw = (Raw *)block->form;
    area_release_tail(raw->data, (size_t)(block->used * block->slice_bytes), (size_t)raw->capacity_bytes);
}

static inline uint64_t word_at(const uint8_t *p) {
    uint64_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

static inline uint64_t stir(uint64_t state, uint64_t word) {
    state = (state ^ word) * UINT64_C(0x9E3779B97F4A7C15);
    return state ^ (state >> 29);
}

/* Hash a slice. The hash only has to spread well, because every hit is compared byte for byte. Eight independent sums
 * let the processor overlap their multiplications. */
static uint64_t hash_slice(const uint8_t *p, Py_ssize_t bytes) {
    uint64_t sums[8];
    for (uint64_t k = 0; k < 8; k++) sums[k] = (uint64_t)bytes + k * UINT64_C(0xD1B54A32D192ED03);
    Py_ssize_t i = 0;
    for (; i + 64 <= bytes; i += 64)
        for (Py_ssize_t k = 0; k < 8; k++) sums[k] = stir(sums[k], word_at(p + i + 8 * k));
    for (; i + 8 <= bytes; i += 8) sums[0] = stir(sums[0], word_at(p + i));
    if (i < bytes) {
        uint64_t tail = 0;
        memcpy(&tail, p + i, (size_t)(bytes - i));
        sums[1] = stir(sums[1], tail);
    }
    for (Py_ssize_t k = 1; k < 8; k++) sums[0] = stir(sums[0], sums[k]);
    return sums[0];
}

uint32_t block_intern(Block *block, const uint8_t *slice, Py_ssize_t lane) {
    uint8_t *const slices = ((Raw *)block->form)->data;
    const uint64_t hash = hash_slice(slice, block->slice_bytes);
    uint64_t slot = hash & block->mask;
    for (; block->slots[slot] != 0; slot = (slot + 1) & block->mask) {
        const uint32_t known = block->slots[slot] - 1;
        if (block->hashes[known] == hash &&
            memcmp(slices + known * block->slice_bytes, slice, (size_t)block->slice_bytes) == 0)
            return known;
    }
    const uint32_t number = (uint32_t)block->used;
    memcpy(slices + block->used * block->slice_bytes, slice, (size_t)block->slice_bytes);
    block->hashes[number] = hash;
    block->slots[slot] = number + 1;
    if (block->lanes) block->lanes[number] = (uint32_t)lane;
    block->used++;
    return number;
}

/* Return -1 with a ValueError unless `form` has at least `used` slices of `slice_bytes` bytes. */
static int check_form(PyObject *form, Py_ssize_t slice_bytes, Py_ssize_t used) {
    if (Py_TYPE(form) == raw_type) {
        if (((Raw *)form)->capacity_bytes / slice_bytes >= used) return 0;
    } else if (Py_TYPE(form) == coded_type) {
        const coded_block *const coded = &((Coded *)form)->block;
        if (coded->form.slice_bytes == slice_bytes && coded->slice_count == used) return 0;
    } else {
        PyErr_Format(PyExc_TypeError, "form must be Raw or Coded, not %R", Py_TYPE(form));
        return -1;
    }
    PyErr_Format(PyExc_ValueError, "form does not have %zd slices of %zd bytes", used, slice_bytes);
    return -1;
}

/* Block(slice_bytes, slice_count, form, is_shared=False): a closed block. */
static int block_init(PyObject *self, PyObject *arguments, PyObject *Py_UNUSED(keywords)) {
    Block *const block = (Block *)self;
    Py_ssize_t slice_bytes, slice_count;
    PyObject *form;
    int is_shared = 0;
    if (!PyArg_ParseTuple(arguments, "nnO|p", &slice_bytes, &slice_count, &form, &is_shared)) return -1;
    if (slice_bytes < 1 || slice_count < 0 || slice_count > UINT32_MAX || slice_count > PY_SSIZE_T_MAX / slice_bytes) {
        PyErr_Format(PyExc_ValueError, "a block cannot have %zd slices of %zd bytes", slice_count, slice_bytes);
        return -1;
    }
    if (Py_TYPE(form) == raw_type || Py_TYPE(form) == coded_type) {
        if (check_form(form, slice_bytes, slice_count) < 0) return -1;
        Py_INCREF(form);
    } else {
        Py_buffer view;
        if (PyObject_GetBuffer(form, &view, PyBUF_SIMPLE) < 0) return -1;
        if (view.len != slice_bytes * slice_count) {
            PyErr_Format(PyExc_ValueError, "%zd bytes are not %zd slices of %zd bytes", view.len, slice_count, slice_bytes);
            PyBuffer_Release(&view);
            return -1;
        }
        Raw *const raw = is_shared ? raw_share(&view) : raw_new(view.len);
        if (raw && !is_shared) memcpy(raw->data, view.buf, (size_t)view.len);
        if (!is_shared) PyBuffer_Release(&view);
        if (!raw) return -1;
        form = (PyObject *)raw;
    }
    block->serial = next_serial();
    block->slice_bytes = slice_bytes;
    block->capacity = slice_count;
    block->used = slice_count;
    block->form = form;
    return 0;
}

static PyObject *make_block(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    return object_make(type, arguments, keywords, block_init);
}

static void block_dealloc(PyObject *self) {
    Block *const block = (Block *)self;
    if (block->hashes || block->slots) block_free_index(block);
    block_free_lanes(block);
    Py_XDECREF(block->form);
    object_free(self);
}

static PyObject *block_serial(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(((Block *)self)->serial);
}
static PyObject *block_slice_bytes(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(((Block *)self)->slice_bytes);
}
static PyObject *block_slice_count(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(((Block *)self)->used);
}
static PyObject *block_is_open(PyObject *self, void *Py_UNUSED(closure)) {
    return PyBool_FromLong(((Block *)self)->hashes != NULL);
}
static PyObject *block_get_form(PyObject *self, void *Py_UNUSED(closure)) {
    return Py_NewRef(((Block *)self)->form);
}

static int block_set_form(PyObject *self, PyObject *form, void *Py_UNUSED(closure)) {
    Block *const block = (Block *)self;
    if (!form) {
        PyErr_SetString(PyExc_TypeError, "form cannot be deleted");
        return -1;
    }
    if (block->hashes) {
        PyErr_SetString(PyExc_ValueError, "the form of an open block cannot be replaced");
        return -1;
    }
    if (check_form(form, block->slice_bytes, block->used) < 0) return -1;
    PyObject *const old = block->form;
    block->form = Py_NewRef(form);
    if (Py_TYPE(form) == coded_type) block_free_lanes(block);
    Py_DECREF(old);
    return 0;
}

static PyObject *refuse_compressed(void) {
    PyErr_SetString(PyExc_ValueError, "the block is compressed; decode its form instead");
    return NULL;
}

/* share() -> uint8 array (slice_count, slice_bytes) in the memory of the form, which the array keeps alive. */
static PyObject *block_share(PyObject *self, PyObject *Py_UNUSED(none)) {
    const Block *const block = (Block *)self;
    if (Py_TYPE(block->form) != raw_type) return refuse_compressed();
    npy_intp shape[2] = {block->used, block->slice_bytes};
    PyObject *const array = PyArray_SimpleNewFromData(2, shape, NPY_UINT8, ((Raw *)block->form)->data);
    if (!array) return NULL;
    PyArray_CLEARFLAGS((PyArrayObject *)array, NPY_ARRAY_WRITEABLE);
    PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(block->form)); /* takes the reference over */
    return array;
}

/* read(first, count) -> uint8 array (count, slice_bytes) */
static PyObject *block_read(PyObject *self, PyObject *arguments) {
    const Block *const block = (Block *)self;
    Py_ssize_t first, count;
    if (!PyArg_ParseTuple(arguments, "nn", &first, &count)) return NULL;
    if (Py_TYPE(block->form) != raw_type) return refuse_compressed();
    if (first < 0 || count < 0 || first > block->used - count) {
        PyErr_Format(PyExc_ValueError, "slices %zd to %zd are not in a block of %zd", first, first + count, block->used);
        return NULL;
    }
    npy_intp shape[2] = {count, block->slice_bytes};
    PyObject *const array = PyArray_SimpleNew(2, shape, NPY_UINT8);
    if (array)
        memcpy(PyArray_DATA((PyArrayObject *)array), ((Raw *)block->form)->data + first * block->slice_bytes,
               (size_t)(count * block->slice_bytes));
    return array;
}

/* Sort the slices of a block by lane, and by number within a lane. Return 0 if there is no memory. */
static int sort_by_lane(const Block *block, uint32_t *order) {
    uint32_t max_lane = 0;
    for (Py_ssize_t i = 0; i < block->used; i++)
        if (block->lanes[i] > max_lane) max_lane = block->lanes[i];
    uint32_t *const starts = calloc((size_t)max_lane + 2, sizeof *starts);
    if (!starts) return 0;
    for (Py_ssize_t i = 0; i < block->used; i++) starts[block->lanes[i] + 1]++;
    for (uint32_t lane = 1; lane <= max_lane; lane++) starts[lane] += starts[lane - 1];
    for (Py_ssize_t i = 0; i < block->used; i++) order[starts[block->lanes[i]]++] = (uint32_t)i;
    free(starts);
    return 1;
}

/* lane_order() -> uint32 array (slice_count,) or None */
static PyObject *block_lane_order(PyObject *self, PyObject *Py_UNUSED(none)) {
    const Block *const block = (Block *)self;
    if (!block->lanes || block->used == 0) Py_RETURN_NONE;
    npy_intp shape[1] = {block->used};
    PyObject *const order = PyArray_SimpleNew(1, shape, NPY_UINT32);
    if (!order || sort_by_lane(block, PyArray_DATA((PyArrayObject *)order))) return order;
    Py_DECREF(order);
    return PyErr_NoMemory();
}

static PyMethodDef block_methods[] = {
    {"read", block_read, METH_VARARGS, "Return a copy of raw slices."},
    {"share", block_share, METH_NOARGS, "Return all raw slices as a read-only array that shares their memory."},
    {"lane_order", block_lane_order, METH_NOARGS, "Return the numbers of the slices, sorted by lane, or None."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef block_properties[] = {
    {"serial", block_serial, NULL, "A number that no other block has, even after this one is gone.", NULL},
    {"slice_bytes", block_slice_bytes, NULL, "Bytes of one slice.", NULL},
    {"slice_count", block_slice_count, NULL, "Slices stored.", NULL},
    {"is_open", block_is_open, NULL, "Whether slices may still be added.", NULL},
    {"form", block_get_form, block_set_form, "Raw or Coded slices.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot block_slots[] = {
    {Py_tp_doc, "The unique slices of one field."},
    {Py_tp_new, (void *)make_block},
    {Py_tp_dealloc, (void *)block_dealloc},
    {Py_tp_methods, block_methods},
    {Py_tp_getset, block_properties},
    {0, NULL},
};
static PyType_Spec block_spec = {"holdall._native.Block", sizeof(Block), 0, Py_TPFLAGS_DEFAULT, block_slots};

/* ---- Part ---------------------------------------------------------------------------- */

static const char *const kind_names[] = {"rows", "shared", "paired", "sliced", "packed", "halves", "bits"};

static int kind_of_name(const char *name) {
    for (int kind = 0; kind <= PART_BITS; kind++)
        if (strcmp(name, kind_names[kind]) == 0) return kind;
    return -1;
}

Py_ssize_t part_row_count(const Part *part, Py_ssize_t ticks) {
    if (part->kind == PART_ROWS || is_narrow(part->kind)) return ticks * part->lanes;
    if (part->kind == PART_SHARED) return (ticks + 1) * part->lanes;
    if (part->kind == PART_PAIRED) return 2 * ticks * part->lanes;
    return 0;
}

static size_t rows_bytes(const Part *part) {
    return (size_t)(part_row_count(part, part->capacity) * part->stored_bytes);
}
static size_t cursors_bytes(const Part *part) {
    return (size_t)(part->capacity * part->lanes) * sizeof *part->cursors;
}
static size_t log_bytes(const Part *part) { return (size_t)(part->log_rows * part->lanes * part->log_width); }

Part *part_new(int kind, Py_ssize_t lanes, Py_ssize_t row_bytes, Py_ssize_t capacity, const window *cut, Block *block) {
    Part *const part = object_new(part_type);
    if (!part) return NULL;
    part->serial = next_serial();
    part->kind = kind;
    part->lanes = lanes;
    part->row_bytes = row_bytes;
    part->stored_bytes = narrow_row_bytes(kind, row_bytes);
    part->capacity = capacity;
    if (kind == PART_SLICED) {
        part->cut = *cut;
        part->block = (Block *)Py_NewRef((PyObject *)block);
        part->log_width = 4;
        part->cursors = area_new(cursors_bytes(part));
        if (!part->cursors) goto no_memory;
    } else if (kind != PART_PACKED) {
        part->rows = area_new(rows_bytes(part));
        if (!part->rows) goto no_memory;
    }
    return part;
no_memory:
    Py_DECREF(part);
    PyErr_NoMemory();
    return NULL;
}

static void part_dealloc(PyObject *self) {
    Part *const part = (Part *)self;
    area_free(part->rows, rows_bytes(part));
    free(part->exception_rows);
    free(part->exceptions);
    if (part->kind == PART_SLICED) {
        area_free(part->cursors, cursors_bytes(part));
        area_free(part->log, log_bytes(part));
    }
    Py_XDECREF((PyObject *)part->block);
    Py_XDECREF(part->packed);
    object_free(self);
}

Py_ssize_t part_bytes(const Part *part) {
    Py_ssize_t bytes = (Py_ssize_t)sizeof *part + (Py_ssize_t)rows_bytes(part);
    bytes += part->exception_count * (part->row_bytes + (Py_ssize_t)sizeof *part->exception_rows);
    if (part->kind == PART_SLICED) bytes += (Py_ssize_t)(cursors_bytes(part) + log_bytes(part));
    if (part->kind == PART_PACKED) bytes += packed_leaf_bytes((const PackedRun *)part->packed, part->packed_leaf);
    return bytes;
}

int part_copy_exceptions(const Part *from, Part *to) {
    const size_t count = (size_t)from->exception_count, row_bytes = (size_t)from->row_bytes;
    if (count == 0) return 0;
    to->exception_rows = malloc(count * sizeof *to->exception_rows);
    to->exceptions = malloc(count * row_bytes);
    if (!to->exception_rows || !to->exceptions) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(to->exception_rows, from->exception_rows, count * sizeof *to->exception_rows);
    memcpy(to->exceptions, from->exceptions, count * row_bytes);
    to->exception_count = from->exception_count;
    to->exception_capacity = from->exception_count;
    return 0;
}

/* Copy a log, with entries of two bytes if all slice numbers fit. -1 with an exception set. */
static int copy_log(const Part *from, Part *to, Py_ssize_t log_rows) {
    const Py_ssize_t entries = log_rows * from->lanes;
    to->log_rows = log_rows;
    to->log_width = to->slice_count <= 1 << 16 ? 2 : 4;
    to->log = area_new(log_bytes(to));
    if (!to->log) {
        PyErr_NoMemory();
        return -1;
    }
    if (from->log_width == to->log_width) {
        memcpy(to->log, from->log, log_bytes(to));
    } else {
        for (Py_ssize_t i = 0; i < entries; i++) {
            const uint32_t number = log_number(from, i);
            if (to->log_width == 4) ((uint32_t *)to->log)[i] = number;
            else ((uint16_t *)to->log)[i] = (uint16_t)number;
        }
    }
    return 0;
}

Part *part_trim(const Part *part, Py_ssize_t ticks, Py_ssize_t log_rows) {
    Part *const copy = part_new(part->kind, part->lanes, part->row_bytes, ticks, &part->cut, part->block);
    if (!copy) return NULL;
    int failed = 0;
    if (part->kind == PART_SLICED) {
        memcpy(copy->cursors, part->cursors, cursors_bytes(copy));
        copy->slice_count = part->block->hashes ? part->block->used : part->slice_count;
        copy->broken = part->broken;
        failed = copy_log(part, copy, log_rows);
    } else if (part->kind == PART_PACKED) {
        copy->packed = Py_NewRef(part->packed);
        copy->packed_leaf = part->packed_leaf;
        failed = part_copy_exceptions(part, copy);
    } else {
        area_use_huge_pages(copy->rows, rows_bytes(copy));
        memcpy(copy->rows, part->rows, rows_bytes(copy));
        failed = part_copy_exceptions(part, copy);
    }
    if (failed) {
        Py_DECREF(copy);
        return NULL;
    }
    return copy;
}

static PyObject *part_layout(PyObject *self, void *Py_UNUSED(closure)) {
    const Part *const part = (Part *)self;
    const window *const cut = &part->cut;
    if (part->kind == PART_SHARED || part->kind == PART_PAIRED) return Py_BuildValue("(s)", kind_names[part->kind]);
    if (part->kind != PART_SLICED) Py_RETURN_NONE;
    return Py_BuildValue("(snnnn)", "sliced", cut->count, cut->outer, cut->run_bytes, cut->shift);
}

static PyObject *part_serial(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(((Part *)self)->serial);
}
static PyObject *part_row_bytes(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(((Part *)self)->row_bytes);
}
static PyObject *part_kind(PyObject *self, void *Py_UNUSED(closure)) {
    return PyUnicode_FromString(kind_names[((Part *)self)->kind]);
}
static PyObject *part_nbytes(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(part_bytes((Part *)self));
}
static PyObject *part_block(PyObject *self, void *Py_UNUSED(closure)) {
    Block *const block = ((Part *)self)->block;
    if (!block) Py_RETURN_NONE;
    return Py_NewRef((PyObject *)block);
}
static PyObject *part_slice_count(PyObject *self, void *Py_UNUSED(closure)) {
    const Part *const part = (Part *)self;
    if (!part->block) return PyLong_FromLong(0);
    return PyLong_FromSsize_t(part->slice_count ? part->slice_count : part->block->used);
}
static PyObject *part_exceptions(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(((Part *)self)->exception_count);
}
static PyObject *part_broken(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(((Part *)self)->broken);
}
static PyObject *part_packed_run(PyObject *self, void *Py_UNUSED(closure)) {
    const Part *const part = (Part *)self;
    if (!part->packed) Py_RETURN_NONE;
    return Py_BuildValue("(Oi)", part->packed, part->packed_leaf);
}

/* Put `array` under a name, and release the caller's reference to it. -1 with an exception set. */
static int put_array(PyObject *arrays, const char *name, PyObject *array) {
    if (!array) return -1;
    const int failed = PyDict_SetItemString(arrays, name, array);
    Py_DECREF(array);
    return failed;
}

/* Put the image of a packed part's run, and the number of its leaf. -1 with an exception set. */
static int put_run(PyObject *arrays, const Part *part) {
    const PackedRun *const run = (const PackedRun *)part->packed;
    const uint32_t leaf = (uint32_t)part->packed_leaf;
    return put_array(arrays, "run", array_copy(run->image, (Py_ssize_t)run->image_bytes, NPY_UINT8, 1)) ||
           put_array(arrays, "leaf", array_copy(&leaf, 1, NPY_UINT32, 1));
}

/* arrays() -> {"rows": ..., "exception_rows": ..., "exceptions": ...} or {"cursors": ..., "log": ...}. Packed parts have
 * "run" and "leaf" instead of "rows". */
static PyObject *part_arrays(PyObject *self, PyObject *Py_UNUSED(none)) {
    const Part *const part = (Part *)self;
    const int frozen = part->is_frozen;
    PyObject *const arrays = PyDict_New();
    if (!arrays) return NULL;
    int failed = 0;
    if (part->kind == PART_SLICED) {
        const int type_number = part->log_width == 2 ? NPY_UINT16 : NPY_UINT32;
        failed = put_array(arrays, "cursors", array_copy(part->cursors, part->capacity * part->lanes, NPY_UINT32, frozen)) ||
                 put_array(arrays, "log", array_copy(part->log, part->log_rows * part->lanes, type_number, frozen));
    } else {
        const Py_ssize_t exceptions = part->exception_count;
        if (part->kind == PART_PACKED) failed = put_run(arrays, part);
        else failed = put_array(arrays, "rows", array_copy(part->rows, (Py_ssize_t)rows_bytes(part), NPY_UINT8, frozen));
        if (!failed && exceptions)
            failed = put_array(arrays, "exception_rows", array_copy(part->exception_rows, exceptions, NPY_UINT32, frozen)) ||
                     put_array(arrays, "exceptions", array_copy(part->exceptions, exceptions * part->row_bytes, NPY_UINT8, frozen));
    }
    if (failed) {
        Py_DECREF(arrays);
        return NULL;
    }
    return arrays;
}

/* Return a borrowed array of `arrays`, which must have `type_number` and, unless `count` is -1, `count` items. NULL with a
 * ValueError. */
static PyArrayObject *take_array(PyObject *arrays, const char *name, int type_number, Py_ssize_t count) {
    PyObject *const array = PyDict_GetItemString(arrays, name);
    if (!array || !PyArray_Check(array) || PyArray_TYPE((PyArrayObject *)array) != type_number ||
        PyArray_NDIM((PyArrayObject *)array) != 1 || !PyArray_IS_C_CONTIGUOUS((PyArrayObject *)array) ||
        !PyArray_ISNOTSWAPPED((PyArrayObject *)array) || !PyArray_ISALIGNED((PyArrayObject *)array) || (count >= 0 && PyArray_SIZE((PyArrayObject *)array) != count)) {
        if (count < 0) PyErr_Format(PyExc_ValueError, "array '%s' is missing, or has another dtype or number of axes", name);
        else PyErr_Format(PyExc_ValueError, "array '%s' is missing, or has another dtype or length than %zd", name, count);
        return NULL;
    }
    return (PyArrayObject *)array;
}

static int restore_exceptions(Part *part, Py_ssize_t ticks, PyObject *arrays) {
    if (!PyDict_GetItemString(arrays, "exception_rows")) return 0;
    PyArrayObject *const rows = take_array(arrays, "exception_rows", NPY_UINT32, -1);
    if (!rows) return -1;
    const Py_ssize_t count = PyArray_SIZE(rows);
    const uint32_t *const numbers = PyArray_DATA(rows);
    for (Py_ssize_t i = 0; i < count; i++)
        if ((int64_t)numbers[i] >= ticks * part->lanes || (i > 0 && numbers[i] <= numbers[i - 1])) {
            PyErr_SetString(PyExc_ValueError, "exception_rows are not ascending numbers of the part's transitions");
            return -1;
        }
    PyArrayObject *const contents = take_array(arrays, "exceptions", NPY_UINT8, count * part->row_bytes);
    if (!contents) return -1;
    Part from = *part;
    from.exception_rows = PyArray_DATA(rows);
    from.exceptions = PyArray_DATA(contents);
    from.exception_count = count;
    return part_copy_exceptions(&from, part);
}

/* Return -1 with a ValueError unless all cursors are inside the log, and all slice numbers inside the block. */
static int check_slices(const Part *part) {
    for (Py_ssize_t i = 0; i < part->capacity * part->lanes; i++) {
        const uint32_t cursor = part->cursors[i];
        const Py_ssize_t step = cursor & NEXT_FOLLOWS ? part->cut.count : part->cut.shift;
        if ((Py_ssize_t)(cursor & ~NEXT_FOLLOWS) + step + part->cut.count > part->log_rows) {
            PyErr_Format(PyExc_ValueError, "transition %zd refers to log entries beyond the last one", i);
            return -1;
        }
    }
    for (Py_ssize_t i = 0; i < part->log_rows * part->lanes; i++) {
        const uint32_t number = log_number(part, i);
        if ((Py_ssize_t)number >= part->slice_count) {
            PyErr_Format(PyExc_ValueError, "the log names slice %u of a block with %zd slices", number, part->slice_count);
            return -1;
        }
    }
    return 0;
}

static int restore_sliced(Part *part, PyArrayObject *cursors, PyObject *arrays) {
    part->slice_count = part->block->used;
    PyObject *const given = PyDict_GetItemString(arrays, "log");
    const int is_narrow = given && PyArray_Check(given) && PyArray_TYPE((PyArrayObject *)given) == NPY_UINT16;
    PyArrayObject *const log = take_array(arrays, "log", is_narrow ? NPY_UINT16 : NPY_UINT32, -1);
    if (!log) return -1;
    if (PyArray_SIZE(log) % part->lanes != 0) {
        PyErr_SetString(PyExc_ValueError, "the log does not have the same number of entries for every lane");
        return -1;
    }
    memcpy(part->cursors, PyArray_DATA(cursors), cursors_bytes(part));
    Part from = *part;
    from.log = PyArray_DATA(log);
    from.log_width = is_narrow ? 2 : 4;
    from.log_rows = PyArray_SIZE(log) / part->lanes;
    if (check_slices(&from) < 0) return -1;
    for (Py_ssize_t i = 0; i < part->capacity * part->lanes; i++) part->broken += (part->cursors[i] & NEXT_FOLLOWS) != 0;
    return copy_log(&from, part, from.log_rows);
}

int layout_parse(PyObject *layout, Py_ssize_t row_bytes, int *kind, window *cut) {
    const char *name;
    memset(cut, 0, sizeof *cut);
    if (!PyTuple_Check(layout)) {
        PyErr_Format(PyExc_TypeError, "a layout must be a tuple, not %R", layout);
        return -1;
    }
    if (!PyArg_ParseTuple(layout, "s|nnnn", &name, &cut->count, &cut->outer, &cut->run_bytes, &cut->shift)) return -1;
    *kind = kind_of_name(name);
    if (*kind == PART_SHARED || *kind == PART_PAIRED) return 0;
    const int is_positive = cut->count > 0 && cut->outer > 0 && cut->run_bytes > 0 && cut->shift > 0;
    if (*kind != PART_SLICED || !is_positive || cut->shift > cut->count || cut->count > row_bytes ||
        cut->outer > row_bytes / cut->count || cut->count * cut->outer > row_bytes / cut->run_bytes ||
        cut->count * cut->outer * cut->run_bytes != row_bytes) {
        PyErr_Format(PyExc_ValueError, "layout %R does not fit rows of %zd bytes", layout, row_bytes);
        return -1;
    }
    return 0;
}

/* Return a packed part without exceptions. NULL with an exception set if `run` is not a PackedRun, or if the leaf does
 * not have the rows of a shared part of `ticks` ticks. */
static Part *new_packed_part(PyObject *run, Py_ssize_t leaf, Py_ssize_t ticks, Py_ssize_t lanes, Py_ssize_t row_bytes) {
    const PackedRun *const packed = (const PackedRun *)run;
    if (Py_TYPE(run) != packed_run_type) {
        PyErr_Format(PyExc_TypeError, "run must be a PackedRun, not %R", Py_TYPE(run));
        return NULL;
    }
    if (leaf < 0 || leaf >= (Py_ssize_t)packed->header->leaf_count) {
        PyErr_Format(PyExc_ValueError, "leaf %zd is not one of the %u leaves of the run", leaf, packed->header->leaf_count);
        return NULL;
    }
    const packed_header *const header = packed->header;
    const Py_ssize_t leaf_bytes = (Py_ssize_t)packed->leaves[leaf].bytes;
    if ((Py_ssize_t)header->ticks - 1 != ticks || (Py_ssize_t)header->lanes != lanes || leaf_bytes != row_bytes) {
        PyErr_Format(PyExc_ValueError, "leaf %zd has %u observations of %u lanes of %zd bytes, but the part needs %zd of %zd of %zd",
                     leaf, header->ticks, header->lanes, leaf_bytes, ticks + 1, lanes, row_bytes);
        return NULL;
    }
    Part *const part = part_new(PART_PACKED, lanes, row_bytes, ticks, NULL, NULL);
    if (!part) return NULL;
    part->packed = Py_NewRef(run);
    part->packed_leaf = (int)leaf;
    return part;
}

/* pack(run, leaf, shared) -> Part */
static PyObject *part_pack(PyObject *Py_UNUSED(type), PyObject *arguments) {
    PyObject *run, *given;
    Py_ssize_t leaf;
    if (!PyArg_ParseTuple(arguments, "OnO!", &run, &leaf, part_type, &given)) return NULL;
    const Part *const shared = (const Part *)given;
    if (shared->kind != PART_SHARED) {
        PyErr_Format(PyExc_ValueError, "a part of kind '%s' cannot be packed, only a shared one", kind_names[shared->kind]);
        return NULL;
    }
    Part *const part = new_packed_part(run, leaf, shared->capacity, shared->lanes, shared->row_bytes);
    if (!part) return NULL;
    if (part_copy_exceptions(shared, part) < 0) {
        Py_DECREF((PyObject *)part);
        return NULL;
    }
    return (PyObject *)part;
}

/* Return the packed part that `arrays` describes, where "run" is an image or a PackedRun. NULL with an exception set. */
static PyObject *restore_packed(Py_ssize_t ticks, Py_ssize_t lanes, Py_ssize_t row_bytes, PyObject *arrays) {
    PyArrayObject *const leaf = take_array(arrays, "leaf", NPY_UINT32, 1);
    if (!leaf) return NULL;
    PyObject *const given = PyDict_GetItemString(arrays, "run");
    if (!given) {
        PyErr_SetString(PyExc_ValueError, "array 'run' is missing");
        return NULL;
    }
    PyObject *const run = Py_TYPE(given) == packed_run_type ? Py_NewRef(given) : packed_from_bytes(given);
    if (!run) return NULL;
    Part *part = new_packed_part(run, (Py_ssize_t)*(const uint32_t *)PyArray_DATA(leaf), ticks, lanes, row_bytes);
    Py_DECREF(run);
    if (part && restore_exceptions(part, ticks, arrays) < 0) {
        Py_DECREF((PyObject *)part);
        return NULL;
    }
    return (PyObject *)part;
}

/* restore(kind, ticks, lanes, row_bytes, arrays, layout, block) -> Part */
static PyObject *part_restore(PyObject *Py_UNUSED(type), PyObject *arguments) {
    const char *name;
    Py_ssize_t ticks, lanes, row_bytes;
    PyObject *arrays, *layout, *block;
    if (!PyArg_ParseTuple(arguments, "snnnO!OO", &name, &ticks, &lanes, &row_bytes, &PyDict_Type, &arrays, &layout, &block))
        return NULL;
    int kind = kind_of_name(name);
    window cut = {0};
    if (kind < 0) {
        PyErr_Format(PyExc_ValueError, "there is no kind of part called '%s'", name);
        return NULL;
    }
    if (ticks < 1 || lanes < 1 || row_bytes < 0 || ticks > INT32_MAX / lanes || row_bytes > INT32_MAX ||
        ticks * lanes > PY_SSIZE_T_MAX / 4 / (row_bytes + 4)) {
        PyErr_Format(PyExc_ValueError, "a part cannot have %zd ticks of %zd lanes with rows of %zd bytes", ticks, lanes, row_bytes);
        return NULL;
    }
    if (is_narrow(kind) && row_bytes % (Py_ssize_t)sizeof(float) != 0) {
        PyErr_Format(PyExc_ValueError, "rows of %zd bytes are not float32, so a part of kind '%s' cannot store them", row_bytes, name);
        return NULL;
    }
    if (kind == PART_PACKED) return restore_packed(ticks, lanes, row_bytes, arrays);
    if (layout != Py_None) {
        int layout_kind;
        if (layout_parse(layout, row_bytes, &layout_kind, &cut) < 0) return NULL;
        if (layout_kind != kind) {
            PyErr_Format(PyExc_ValueError, "layout %R is not that of kind '%s'", layout, name);
            return NULL;
        }
    }
    const int is_sliced = kind == PART_SLICED;
    if (is_sliced && (layout == Py_None || Py_TYPE(block) != block_type || ((Block *)block)->hashes ||
                      ((Block *)block)->slice_bytes != cut.outer * cut.run_bytes)) {
        PyErr_SetString(PyExc_ValueError, "a sliced part needs a layout, and a closed block with slices of its size");
        return NULL;
    }
    /* The numbers may come from a damaged file, so the arrays must have that length before memory is allocated. */
    const Part needed = {.kind = kind, .lanes = lanes, .stored_bytes = narrow_row_bytes(kind, row_bytes), .capacity = ticks};
    PyArrayObject *const stored = is_sliced ? take_array(arrays, "cursors", NPY_UINT32, ticks * lanes)
                                            : take_array(arrays, "rows", NPY_UINT8, (Py_ssize_t)rows_bytes(&needed));
    if (!stored) return NULL;
    Part *const part = part_new(kind, lanes, row_bytes, ticks, &cut, is_sliced ? (Block *)block : NULL);
    if (!part) return NULL;
    int failed;
    if (is_sliced) {
        failed = restore_sliced(part, stored, arrays);
    } else {
        memcpy(part->rows, PyArray_DATA(stored), rows_bytes(part));
        failed = kind == PART_SHARED && restore_exceptions(part, ticks, arrays) < 0;
    }
    if (failed) {
        Py_DECREF(part);
        return NULL;
    }
    return (PyObject *)part;
}

static PyMethodDef part_methods[] = {
    {"arrays", part_arrays, METH_NOARGS, "Return copies of the part's arrays by name."},
    {"pack", part_pack, METH_VARARGS | METH_STATIC, "Make a packed part with the exceptions of a shared part."},
    {"restore", part_restore, METH_VARARGS | METH_STATIC, "Make a part of arrays that `arrays` returned."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef part_properties[] = {
    {"serial", part_serial, NULL, "A number that no other part has, even after this one is gone.", NULL},
    {"row_bytes", part_row_bytes, NULL, "Bytes of one lane's row, or observation.", NULL},
    {"kind", part_kind, NULL, "How rows are stored.", NULL},
    {"layout", part_layout, NULL, "The layout of an observation column.", NULL},
    {"nbytes", part_nbytes, NULL, "Bytes in memory, without the block.", NULL},
    {"block", part_block, NULL, "The block that has the slices, or None.", NULL},
    {"slice_count", part_slice_count, NULL, "Slices of the block that the log may name.", NULL},
    {"exceptions", part_exceptions, NULL, "Next observations that are stored apart.", NULL},
    {"broken", part_broken, NULL, "Transitions whose next observation does not overlap as the window says.", NULL},
    {"packed", part_packed_run, NULL, "The packed run and the number of the leaf in it, or None.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot part_slots[] = {
    {Py_tp_doc, "What one segment stores of one column."},
    {Py_tp_dealloc, (void *)part_dealloc},
    {Py_tp_methods, part_methods},
    {Py_tp_getset, part_properties},
    {0, NULL},
};
static PyType_Spec part_spec = {
    "holdall._native.Part", sizeof(Part), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, part_slots,
};

/* ---- Segment ------------------------------------------------------------------------- */

Segment *segment_new(int64_t first_tick, Py_ssize_t lanes, int part_count) {
    Segment *const segment = object_new(segment_type);
    if (!segment) return NULL;
    segment->first_tick = first_tick;
    segment->lanes = lanes;
    segment->part_count = part_count;
    segment->parts = calloc((size_t)part_count, sizeof *segment->parts);
    if (!segment->parts) {
        Py_DECREF(segment);
        PyErr_NoMemory();
        return NULL;
    }
    return segment;
}

static void segment_dealloc(PyObject *self) {
    Segment *const segment = (Segment *)self;
    for (int i = 0; segment->parts && i < segment->part_count; i++) Py_XDECREF((PyObject *)segment->parts[i]);
    free(segment->parts);
    object_free(self);
}

Py_ssize_t segment_count_invalid(const Segment *segment, Py_ssize_t from_tick, Py_ssize_t end_tick) {
    const uint8_t *const flags = segment->parts[segment->part_count - 1]->rows;
    Py_ssize_t count = 0;
    if (segment->invalid_count == 0) return 0;
    for (Py_ssize_t i = from_tick * segment->lanes; i < end_tick * segment->lanes; i++)
        count += (flags[i] & FLAG_INVALID) != 0;
    return count;
}

/* Return -1 with a ValueError unless all parts have `ticks` ticks of `lanes` lanes, and the last one has flags. */
static int check_parts(PyObject *parts, Py_ssize_t ticks, Py_ssize_t lanes) {
    const Py_ssize_t count = PyTuple_Size(parts);
    for (Py_ssize_t i = 0; i < count; i++) {
        const Part *const part = (Part *)PyTuple_GetItem(parts, i);
        if (Py_TYPE((PyObject *)part) != part_type || part->capacity != ticks || part->lanes != lanes) {
            PyErr_Format(PyExc_ValueError, "part %zd does not have %zd ticks of %zd lanes", i, ticks, lanes);
            return -1;
        }
    }
    const Part *const flags = (Part *)PyTuple_GetItem(parts, count - 1);
    if (flags->kind == PART_ROWS && flags->row_bytes == 1) return 0;
    PyErr_SetString(PyExc_ValueError, "the last part of a segment must be its flags, one byte per row");
    return -1;
}

/* Segment(first_tick, ticks, lanes, parts) */
static int segment_init(PyObject *self, PyObject *arguments, PyObject *Py_UNUSED(keywords)) {
    Segment *const segment = (Segment *)self;
    long long first_tick;
    Py_ssize_t ticks, lanes;
    PyObject *given;
    if (!PyArg_ParseTuple(arguments, "LnnO", &first_tick, &ticks, &lanes, &given)) return -1;
    PyObject *const parts = PySequence_Tuple(given);
    if (!parts) return -1;
    const Py_ssize_t count = PyTuple_Size(parts);
    if (ticks < 1 || lanes < 1 || first_tick < 0 || first_tick > MAX_ID / lanes || count < 1 || count > MAX_COLUMNS) {
        PyErr_SetString(PyExc_ValueError,
                        "a segment needs first_tick >= 0, ticks >= 1, lanes >= 1, ids of at most 2^61, and 1 to 256 parts");
        Py_DECREF(parts);
        return -1;
    }
    if (check_parts(parts, ticks, lanes) < 0) {
        Py_DECREF(parts);
        return -1;
    }
    segment->parts = calloc((size_t)count, sizeof *segment->parts);
    if (!segment->parts) {
        PyErr_NoMemory();
        Py_DECREF(parts);
        return -1;
    }
    segment->first_tick = first_tick;
    segment->ticks = ticks;
    segment->lanes = lanes;
    segment->part_count = (int)count;
    for (Py_ssize_t i = 0; i < count; i++) segment->parts[i] = (Part *)Py_NewRef(PyTuple_GetItem(parts, i));
    Py_DECREF(parts);
    const uint8_t *const flags = segment->parts[count - 1]->rows;
    for (Py_ssize_t i = 0; i < ticks * lanes; i++) segment->invalid_count += (flags[i] & FLAG_INVALID) != 0;
    return 0;
}

static PyObject *make_segment(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    return object_make(type, arguments, keywords, segment_init);
}

static PyObject *segment_first_tick(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromLongLong(((Segment *)self)->first_tick);
}
static PyObject *segment_ticks(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(((Segment *)self)->ticks);
}
static PyObject *segment_lanes(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(((Segment *)self)->lanes);
}
static PyObject *segment_invalid(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(((Segment *)self)->invalid_count);
}
static PyObject *segment_parts(PyObject *self, void *Py_UNUSED(closure)) {
    const Segment *const segment = (Segment *)self;
    PyObject *const parts = PyTuple_New(segment->part_count);
    for (int i = 0; parts && i < segment->part_count; i++)
        PyTuple_SetItem(parts, i, Py_NewRef((PyObject *)segment->parts[i]));
    return parts;
}

static PyGetSetDef segment_properties[] = {
    {"first_tick", segment_first_tick, NULL, "The first tick.", NULL},
    {"ticks", segment_ticks, NULL, "The number of ticks.", NULL},
    {"lanes", segment_lanes, NULL, "The number of lanes.", NULL},
    {"invalid_count", segment_invalid, NULL, "Entries that are not transitions.", NULL},
    {"parts", segment_parts, NULL, "One part per column.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot segment_slots[] = {
    {Py_tp_doc, "A run of consecutive ticks, with one part per column."},
    {Py_tp_new, (void *)make_segment},
    {Py_tp_dealloc, (void *)segment_dealloc},
    {Py_tp_getset, segment_properties},
    {0, NULL},
};
static PyType_Spec segment_spec = {"holdall._native.Segment", sizeof(Segment), 0, Py_TPFLAGS_DEFAULT, segment_slots};

/* ---- Catalog ------------------------------------------------------------------------- */

Catalog *catalog_new(const Catalog *like, Py_ssize_t segment_count) {
    Catalog *const catalog = object_new(catalog_type);
    if (!catalog) return NULL;
    column *const columns = calloc((size_t)like->column_count, sizeof *columns);
    catalog->columns = columns;
    catalog->segments = calloc((size_t)segment_count + 1, sizeof *catalog->segments);
    catalog->first_ticks = calloc((size_t)segment_count + 1, sizeof *catalog->first_ticks);
    if (!columns || !catalog->segments || !catalog->first_ticks) {
        Py_DECREF(catalog);
        PyErr_NoMemory();
        return NULL;
    }
    memcpy(columns, like->columns, (size_t)like->column_count * sizeof *columns);
    catalog->column_count = like->column_count;
    catalog->lanes = like->lanes;
    catalog->floor_tick = like->floor_tick;
    catalog->capacity_ticks = like->capacity_ticks;
    catalog->flags_changed = like->flags_changed;
    catalog->segment_count = segment_count;
    return catalog;
}

static void catalog_dealloc(PyObject *self) {
    Catalog *const catalog = (Catalog *)self;
    for (Py_ssize_t i = 0; catalog->segments && i < catalog->segment_count; i++)
        Py_XDECREF((PyObject *)catalog->segments[i]);
    free((void *)catalog->columns);
    free(catalog->segments);
    free(catalog->first_ticks);
    object_free(self);
}

static PyObject *catalog_get_first_tick(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromLongLong(catalog_first_tick((Catalog *)self));
}
static PyObject *catalog_get_next_tick(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromLongLong(catalog_next_tick((Catalog *)self));
}
static PyObject *catalog_get_lanes(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(((Catalog *)self)->lanes);
}

static PyObject *catalog_get_segments(PyObject *self, void *Py_UNUSED(closure)) {
    const Catalog *const catalog = (Catalog *)self;
    PyObject *const segments = PyTuple_New(catalog->segment_count);
    for (Py_ssize_t i = 0; segments && i < catalog->segment_count; i++)
        PyTuple_SetItem(segments, i, Py_NewRef((PyObject *)catalog->segments[i]));
    return segments;
}

static PyObject *catalog_get_last(PyObject *self, void *Py_UNUSED(closure)) {
    const Catalog *const catalog = (Catalog *)self;
    if (catalog->segment_count == 0) Py_RETURN_NONE;
    return Py_NewRef((PyObject *)catalog->segments[catalog->segment_count - 1]);
}

/* closed_segments(first_tick) -> tuple of all segments but the last that begin with this tick or later */
static PyObject *catalog_closed_segments(PyObject *self, PyObject *arguments) {
    const Catalog *const catalog = (Catalog *)self;
    long long first_tick;
    if (!PyArg_ParseTuple(arguments, "L", &first_tick)) return NULL;
    const Py_ssize_t end = catalog->segment_count > 0 ? catalog->segment_count - 1 : 0;
    Py_ssize_t first = end;
    while (first > 0 && catalog->first_ticks[first - 1] >= first_tick) first--;
    PyObject *const segments = PyTuple_New(end - first);
    for (Py_ssize_t i = first; segments && i < end; i++)
        PyTuple_SetItem(segments, i - first, Py_NewRef((PyObject *)catalog->segments[i]));
    return segments;
}

static PyObject *catalog_get_invalid(PyObject *self, void *Py_UNUSED(closure)) {
    const Catalog *const catalog = (Catalog *)self;
    const int64_t first = catalog_first_tick(catalog);
    Py_ssize_t count = 0;
    const Py_ssize_t start = catalog->has_invalid || catalog->segment_count == 0 ? 0 : catalog->segment_count - 1;
    for (Py_ssize_t i = start; i < catalog->segment_count; i++) {
        const Segment *const segment = catalog->segments[i];
        if (segment->invalid_count == 0) continue;
        if (segment->first_tick >= first) count += segment->invalid_count;
        else if (segment->first_tick + segment->ticks > first)
            count += segment_count_invalid(segment, (Py_ssize_t)(first - segment->first_tick), segment->ticks);
    }
    return PyLong_FromSsize_t(count);
}

static PyObject *catalog_get_flags_changed(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromLongLong(((Catalog *)self)->flags_changed);
}

static PyMethodDef catalog_methods[] = {
    {"closed_segments", catalog_closed_segments, METH_VARARGS, "Return all segments but the last from a tick on."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef catalog_properties[] = {
    {"last_segment", catalog_get_last, NULL, "The newest segment, or None.", NULL},
    {"first_tick", catalog_get_first_tick, NULL, "The oldest tick that is held.", NULL},
    {"next_tick", catalog_get_next_tick, NULL, "The tick after the newest one.", NULL},
    {"lanes", catalog_get_lanes, NULL, "The number of lanes.", NULL},
    {"segments", catalog_get_segments, NULL, "The segments, oldest first.", NULL},
    {"invalid_count", catalog_get_invalid, NULL, "Held entries that are not transitions.", NULL},
    {"flags_changed", catalog_get_flags_changed, NULL, "Number of rewrites of the flags column.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot catalog_slots[] = {
    {Py_tp_doc, "The segments that are held."},
    {Py_tp_dealloc, (void *)catalog_dealloc},
    {Py_tp_methods, catalog_methods},
    {Py_tp_getset, catalog_properties},
    {0, NULL},
};
static PyType_Spec catalog_spec = {
    "holdall._native.Catalog", sizeof(Catalog), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, catalog_slots,
};

/* ---- the module ---------------------------------------------------------------------- */

static PyObject *get_heap_bytes(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    return PyLong_FromLongLong(atomic_load_explicit(&heap_bytes, memory_order_relaxed));
}

static PyMethodDef memory_functions[] = {
    {"get_heap_bytes", get_heap_bytes, METH_NOARGS,
     "get_heap_bytes()\n--\n\nReturn the bytes of stored data that were allocated with malloc or calloc."},
    {NULL, NULL, 0, NULL},
};

int add_objects(PyObject *module) {
    if (PyModule_AddFunctions(module, memory_functions) < 0) return -1;
    if (!(raw_type = type_add(module, &raw_spec, "Raw"))) return -1;
    if (!(block_type = type_add(module, &block_spec, "Block"))) return -1;
    if (!(part_type = type_add(module, &part_spec, "Part"))) return -1;
    if (!(segment_type = type_add(module, &segment_spec, "Segment"))) return -1;
    if (!(catalog_type = type_add(module, &catalog_spec, "Catalog"))) return -1;
    return 0;
}
