/* The Python types Coded and Dictionary, and the functions `encode`, `decode` and `checksums`.
 *
 * Everything that a Coded object refers to is checked when the object is made, because it may come from a file or from
 * another machine. A slice can still turn out to be damaged when it is decoded, which is a ValueError and never a crash.
 */
#include "coded.h"
#include "module.h"

#include <errno.h>
#include <lz4hc.h>
#include <stdlib.h>
#include <string.h>
#define ZSTD_STATIC_LINKING_ONLY /* for dictionaries that are not copied */
#include <zstd.h>

PyTypeObject *coded_type;
PyTypeObject *dictionary_type;

/* ---- dictionaries -------------------------------------------------------------------- */

static void dictionary_dealloc(PyObject *self) {
    Dictionary *const d = (Dictionary *)self;
    ZSTD_freeDDict(d->ddict);
    Py_XDECREF(d->content);
    Py_XDECREF(d->palette);
    object_free(self);
}

static PyObject *dictionary_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"content", "palette", NULL};
    PyObject *content, *palette = NULL;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "S|S:Dictionary", names, &content, &palette)) return NULL;
    const Py_ssize_t palette_bytes = palette ? PyBytes_Size(palette) : 0;
    if (palette_bytes != 0 && palette_bytes != PALETTE_BYTES)
        return PyErr_Format(PyExc_ValueError, "palette has %zd bytes, but must have 0 or %d", palette_bytes, PALETTE_BYTES);
    if (PyBytes_Size(content) < 1 || PyBytes_Size(content) > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "content has %zd bytes, but must have 1 to %d", PyBytes_Size(content), INT32_MAX);
    Dictionary *const d = object_new(type);
    if (!d) return NULL;
    d->content = Py_NewRef(content);
    d->palette = palette ? Py_NewRef(palette) : PyBytes_FromStringAndSize("", 0);
    d->ddict = ZSTD_createDDict_byReference(PyBytes_AsString(content), (size_t)PyBytes_Size(content));
    if (!d->palette || !d->ddict) {
        if (d->palette) PyErr_Format(PyExc_ValueError, "content (%zd bytes) is a damaged Zstandard dictionary", PyBytes_Size(content));
        Py_DECREF(d);
        return NULL;
    }
    return (PyObject *)d;
}

static PyObject *dictionary_compare(PyObject *self, PyObject *other, int operation) {
    if ((operation != Py_EQ && operation != Py_NE) || Py_TYPE(other) != dictionary_type) Py_RETURN_NOTIMPLEMENTED;
    const Dictionary *const a = (Dictionary *)self, *const b = (Dictionary *)other;
    int is_equal = PyObject_RichCompareBool(a->content, b->content, Py_EQ);
    if (is_equal > 0) is_equal = PyObject_RichCompareBool(a->palette, b->palette, Py_EQ);
    if (is_equal < 0) return NULL;
    return PyBool_FromLong(is_equal == (operation == Py_EQ));
}

static Py_hash_t dictionary_hash(PyObject *self) { return PyObject_Hash(((Dictionary *)self)->content); }

static PyObject *dictionary_reduce(PyObject *self, PyObject *Py_UNUSED(none)) {
    const Dictionary *const d = (Dictionary *)self;
    return Py_BuildValue("O(OO)", Py_TYPE(self), d->content, d->palette);
}

static PyObject *dictionary_content(PyObject *self, void *Py_UNUSED(closure)) {
    return Py_NewRef(((Dictionary *)self)->content);
}

static PyObject *dictionary_palette(PyObject *self, void *Py_UNUSED(closure)) {
    return Py_NewRef(((Dictionary *)self)->palette);
}

static PyMethodDef dictionary_methods[] = {
    {"__reduce__", dictionary_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef dictionary_properties[] = {
    {"content", dictionary_content, NULL, "Bytes that the compressor knows before it reads a slice.", NULL},
    {"palette", dictionary_palette, NULL, "Colours that `content` numbers, or no bytes.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot dictionary_slots[] = {
    {Py_tp_doc, "Dictionary(content, palette=b'')\n--\n\nBytes that the slices of a field have in common. Immutable."},
    {Py_tp_new, (void *)dictionary_new},
    {Py_tp_dealloc, (void *)dictionary_dealloc},
    {Py_tp_richcompare, (void *)dictionary_compare},
    {Py_tp_hash, (void *)dictionary_hash},
    {Py_tp_methods, dictionary_methods},
    {Py_tp_getset, dictionary_properties},
    {0, NULL},
};

static PyType_Spec dictionary_spec = {
    "holdall._native.Dictionary", sizeof(Dictionary), 0, Py_TPFLAGS_DEFAULT, dictionary_slots,
};

/* ---- codecs -------------------------------------------------------------------------- */

/* The numbers of `Codec.parameters`, in this order. The first nine are the fields of `transform`. */
enum { PARAMETER_METHOD = 9, PARAMETER_LEVEL, PARAMETER_MIN_MATCH, PARAMETER_GROUP, PARAMETER_COUNT };

/* A codec as C needs it. */
typedef struct {
    transform form;
    int64_t method;
    int64_t level;
    int64_t min_match;      /* shortest match that Zstandard looks for; 0: the default of the level */
    int64_t group;          /* slices of a unit */
    Dictionary *dictionary; /* or NULL; a reference that the reader of the codec drops */
} codec_parameters;

/* Read a tuple of integers. Return -1 with an exception set unless it has exactly `count`. */
static int read_numbers(PyObject *tuple, int64_t *numbers, Py_ssize_t count) {
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != count) {
        PyErr_Format(PyExc_TypeError, "Codec.parameters must be a tuple of %zd integers, not %R", count, tuple);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        numbers[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (numbers[i] == -1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

/* Whether the parameters describe a codec that encode.c and decode.c know. */
static int is_sound_codec(const codec_parameters *c) {
    const transform *const form = &c->form;
    if (!is_sound_transform(form) || (form->shuffle > 0 && coded_bytes(form) % form->shuffle != 0)) return 0;
    if (c->method < METHOD_STORED || c->method > METHOD_ZSTD || c->level < 0 || c->level > 22) return 0;
    if (c->min_match != 0 && (c->min_match < 3 || c->min_match > 7)) return 0;
    return c->group >= 1 && c->group <= MAX_UNIT_SLICES && c->group * coded_bytes(form) <= INT32_MAX / 4;
}

/* Read the dictionary of a codec. Return -1 with an exception set if the attribute is neither a Dictionary nor None. */
static int read_dictionary(PyObject *codec, codec_parameters *out) {
    PyObject *const dictionary = PyObject_GetAttrString(codec, "dictionary");
    if (!dictionary) return -1;
    out->dictionary = Py_TYPE(dictionary) == dictionary_type ? (Dictionary *)dictionary : NULL;
    if (out->dictionary) return 0;
    const int is_none = dictionary == Py_None;
    if (!is_none) PyErr_Format(PyExc_TypeError, "Codec.dictionary must be a Dictionary or None, not %R", Py_TYPE(dictionary));
    Py_DECREF(dictionary);
    return is_none ? 0 : -1;
}

/* Read a codec: an object with the attributes `parameters` and `dictionary`. The caller drops `out->dictionary`. Return -1
 * with an exception set if the attributes do not fit together; then there is nothing to drop. */
static int read_codec(PyObject *codec, codec_parameters *out) {
    int64_t numbers[PARAMETER_COUNT];
    PyObject *const parameters = PyObject_GetAttrString(codec, "parameters");
    if (!parameters) return -1;
    const int result = read_numbers(parameters, numbers, PARAMETER_COUNT);
    Py_DECREF(parameters);
    if (result < 0) return -1;
    out->form = (transform){
        .slice_bytes = numbers[0], .word_bytes = numbers[1], .kind = numbers[2], .planes = numbers[3],
        .rows = numbers[4], .columns = numbers[5], .interleaved = numbers[6], .green = numbers[7], .shuffle = numbers[8],
    };
    out->method = numbers[PARAMETER_METHOD];
    out->level = numbers[PARAMETER_LEVEL];
    out->min_match = numbers[PARAMETER_MIN_MATCH];
    out->group = numbers[PARAMETER_GROUP];
    if (read_dictionary(codec, out) < 0) return -1;
    if (is_sound_codec(out)) return 0;
    Py_XDECREF((PyObject *)out->dictionary);
    PyErr_Format(PyExc_ValueError, "The numbers of the codec do not fit together: %R", codec);
    return -1;
}

/* Bytes of the palette of a block. */
static int64_t palette_bytes(const transform *form) {
    return is_of_colours(form) ? PALETTE_BYTES : 256 * form->word_bytes;
}

static int64_t unit_count(int64_t slice_count, int64_t group) { return (slice_count + group - 1) / group; }

/* Bytes of the place of a slice. */
static int64_t place_width(int64_t slice_count) { return slice_count <= 1 << 16 ? 2 : 4; }

/* ---- making a Coded object ------------------------------------------------------------ */

static void coded_dealloc(PyObject *self) {
    Coded *const c = (Coded *)self;
    if (c->source) {
        PyBuffer_Release(c->source);
        free(c->source);
    } else {
        area_free((void *)(uintptr_t)c->block.data, (size_t)c->block.data_bytes);
    }
    free((void *)(uintptr_t)c->block.offsets);
    Py_XDECREF(c->codec);
    Py_XDECREF(c->dictionary);
    Py_XDECREF(c->owner);
    object_free(self);
}

/* Return an object for `slice_count` slices. Its tables (offsets, checks, palette, places) are allocated and zeroed; its
 * data is not set. One allocation holds all tables and begins with the offsets. `owner` may be NULL. NULL with an
 * exception set if there is no memory. */
static Coded *coded_allocate(PyObject *codec, const codec_parameters *c, int64_t slice_count, int has_checks,
                             int has_places, PyObject *owner) {
    const int64_t units = unit_count(slice_count, c->group);
    const size_t offsets_bytes = 4 * (size_t)(units + 1);
    const size_t checks_bytes = has_checks ? 4 * (size_t)units : 0;
    const size_t colours_bytes = (size_t)palette_bytes(&c->form);
    const size_t places_bytes = has_places ? (size_t)(slice_count * place_width(slice_count)) : 0;
    const size_t total = offsets_bytes + checks_bytes + colours_bytes + places_bytes;
    uint8_t *const tables = calloc(1, total);
    Coded *const self = tables ? object_new(coded_type) : NULL;
    if (!self) {
        free(tables);
        PyErr_NoMemory();
        return NULL;
    }
    coded_block *const b = &self->block;
    b->offsets = (const uint32_t *)(const void *)tables;
    b->checks = has_checks ? (const uint32_t *)(const void *)(tables + offsets_bytes) : NULL;
    b->palette = colours_bytes ? tables + offsets_bytes + checks_bytes : NULL;
    b->places = has_places ? tables + offsets_bytes + checks_bytes + colours_bytes : NULL;
    b->place_bytes = place_width(slice_count);
    b->slice_count = slice_count;
    b->group = c->group;
    b->method = c->method;
    b->file = -1;
    b->form = c->form;
    if (c->dictionary) {
        b->ddict = c->dictionary->ddict;
        b->common = (const uint8_t *)PyBytes_AsString(c->dictionary->content);
        b->common_bytes = PyBytes_Size(c->dictionary->content);
    }
    self->codec = Py_NewRef(codec);
    self->dictionary = Py_XNewRef((PyObject *)c->dictionary);
    self->owner = owner ? Py_NewRef(owner) : NULL;
    self->memory_bytes = (Py_ssize_t)total;
    return self;
}

/* The tables of an object that is being made. */
static uint32_t *offsets_of(Coded *c) { return (uint32_t *)(uintptr_t)c->block.offsets; }
static uint32_t *checks_of(Coded *c) { return (uint32_t *)(uintptr_t)c->block.checks; }
static uint8_t *palette_of(Coded *c) { return (uint8_t *)(uintptr_t)c->block.palette; }
static void *places_of(Coded *c) { return (void *)(uintptr_t)c->block.places; }

/* Give an object data in memory: an area of exactly `bytes` bytes that the object frees. */
static void coded_set_data(Coded *c, uint8_t *area, int64_t bytes) {
    c->block.data = area;
    c->block.data_bytes = bytes;
    c->memory_bytes += (Py_ssize_t)bytes;
}

/* Set the place of every slice: the inverse of `order`. Return 0 if `order` is not a permutation of the slice numbers. */
static int places_set(Coded *c, const uint32_t *order) {
    const int64_t count = c->block.slice_count;
    uint8_t *const is_seen = calloc((size_t)count + 1, 1);
    int64_t place = 0;
    if (!is_seen) return 0;
    for (; place < count && order[place] < count && !is_seen[order[place]]; place++) {
        is_seen[order[place]] = 1;
        if (c->block.place_bytes == 2) ((uint16_t *)places_of(c))[order[place]] = (uint16_t)place;
        else ((uint32_t *)places_of(c))[order[place]] = (uint32_t)place;
    }
    free(is_seen);
    return place == count;
}

/* Whether every place occurs exactly once. */
static int is_permutation(const coded_block *b) {
    uint8_t *const is_seen = calloc((size_t)b->slice_count + 1, 1);
    int64_t number = 0;
    if (!is_seen) return 0;
    for (; number < b->slice_count; number++) {
        const int64_t place = place_of_slice(b, number);
        if (place >= b->slice_count || is_seen[place]) break;
        is_seen[place] = 1;
    }
    free(is_seen);
    return number == b->slice_count;
}

/* Whether the units follow each other, fill the data exactly and are not longer than uncompressed ones. */
static int has_sound_offsets(const coded_block *b) {
    const int64_t units = unit_count(b->slice_count, b->group);
    if (b->offsets[0] != 0 || b->offsets[units] != b->data_bytes) return 0;
    for (int64_t u = 0; u < units; u++)
        if (!is_inside(b, u)) return 0;
    return 1;
}

/* Check the tables of an object that came from outside. Return -1 with a ValueError if something does not fit. */
static int coded_check(const Coded *c) {
    const coded_block *const b = &c->block;
    if (!is_sound_block(b))
        PyErr_Format(PyExc_ValueError, "data must be inside its file: %lld bytes from byte %lld on", (long long)b->data_bytes,
                     (long long)b->file_start);
    else if (!has_sound_offsets(b))
        PyErr_Format(PyExc_ValueError,
                     "offsets must ascend from 0 to the length of data (%lld), by at most the bytes of an uncompressed unit",
                     (long long)b->data_bytes);
    else if (b->places && !is_permutation(b))
        PyErr_Format(PyExc_ValueError, "places must hold every number from 0 to %lld once", (long long)b->slice_count - 1);
    else return 0;
    return -1;
}

/* ---- Coded(...) ------------------------------------------------------------------------ */

/* The arguments of Coded(...). Buffers that were not given have a NULL `obj`. */
typedef struct {
    Py_buffer offsets, palette, places, checks, data;
    int64_t file_start, file_bytes;
    int file; /* descriptor, or -1 */
} coded_arguments;

static void release_arguments(coded_arguments *a) {
    Py_buffer *const all[] = {&a->offsets, &a->palette, &a->places, &a->checks, &a->data};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]->obj) PyBuffer_Release(all[i]);
}

/* Get the buffer of an argument, unless the argument is missing or None. Return -1 with an exception set. */
static int get_buffer(PyObject *argument, Py_buffer *buffer) {
    if (!argument || argument == Py_None) return 0;
    if (PyObject_GetBuffer(argument, buffer, PyBUF_SIMPLE) == 0) return 0;
    buffer->obj = NULL;
    return -1;
}

/* Read `data`: a buffer, or (descriptor, start, nbytes) of a file. Return -1 with an exception set. */
static int get_data(PyObject *data, coded_arguments *a) {
    long long start, bytes;
    a->file = -1;
    if (!PyTuple_Check(data)) return PyObject_GetBuffer(data, &a->data, PyBUF_SIMPLE);
    if (!PyArg_ParseTuple(data, "iLL;data must be a buffer or (descriptor, start, nbytes)", &a->file, &start, &bytes)) return -1;
    if (a->file < 0 || start < 0 || bytes < 0) {
        PyErr_Format(PyExc_ValueError, "data in a file must be (descriptor, start, nbytes), not %R", data);
        return -1;
    }
    a->file_start = start;
    a->file_bytes = bytes;
    return 0;
}

/* Return -1 with a ValueError unless a buffer has `expected` bytes. */
static int require_bytes(const char *name, const Py_buffer *buffer, int64_t expected) {
    const long long bytes = buffer->obj ? (long long)buffer->len : 0;
    if (bytes == expected) return 0;
    PyErr_Format(PyExc_ValueError, "%s must have %lld bytes, not %lld", name, (long long)expected, bytes);
    return -1;
}

/* Check the lengths of all arguments. Return -1 with a ValueError that names the one that does not fit. */
static int check_lengths(const coded_arguments *a, const codec_parameters *c, long long slice_count) {
    if (slice_count < 0 || slice_count > UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "slice_count must be from 0 to 4294967295, not %lld", slice_count);
        return -1;
    }
    const int64_t units = unit_count(slice_count, c->group);
    if (require_bytes("offsets", &a->offsets, 4 * (units + 1)) < 0) return -1;
    if (require_bytes("palette", &a->palette, palette_bytes(&c->form)) < 0) return -1;
    if (a->places.obj && require_bytes("places", &a->places, slice_count * place_width(slice_count)) < 0) return -1;
    if ((a->file >= 0 || a->checks.obj) && require_bytes("checks", &a->checks, 4 * units) < 0) return -1;
    return 0;
}

/* Copy the data of an object that is being made. Return -1 if there is no memory. */
static int copy_data(Coded *self, const coded_arguments *a) {
    uint8_t *const area = area_new((size_t)a->data.len);
    if (!area) return -1;
    if (a->data.len) memcpy(area, a->data.buf, (size_t)a->data.len);
    coded_set_data(self, area, a->data.len);
    return 0;
}

/* Keep the buffer of the data of an object that is being made. Return -1 if there is no memory. */
static int share_data(Coded *self, coded_arguments *a) {
    self->source = malloc(sizeof *self->source);
    if (!self->source) return -1;
    *self->source = a->data;
    memset(&a->data, 0, sizeof a->data);
    coded_set_data(self, self->source->buf, self->source->len);
    return 0;
}

/* Make the object from arguments whose lengths were checked. NULL with an exception set. */
static Coded *coded_from_arguments(PyObject *codec, const codec_parameters *c, int64_t slice_count, PyObject *file,
                                   coded_arguments *a, int is_shared) {
    Coded *const self = coded_allocate(codec, c, slice_count, a->file >= 0, a->places.obj != NULL, file);
    if (!self) return NULL;
    memcpy(offsets_of(self), a->offsets.buf, (size_t)a->offsets.len);
    if (a->palette.len) memcpy(palette_of(self), a->palette.buf, (size_t)a->palette.len);
    if (a->places.len) memcpy(places_of(self), a->places.buf, (size_t)a->places.len);
    if (a->file >= 0) {
        if (a->checks.len) memcpy(checks_of(self), a->checks.buf, (size_t)a->checks.len);
        self->block.file = a->file;
        self->block.file_start = a->file_start;
        self->block.data_bytes = a->file_bytes;
    } else if ((is_shared ? share_data(self, a) : copy_data(self, a)) < 0) {
        Py_DECREF(self);
        PyErr_NoMemory();
        return NULL;
    }
    if (coded_check(self) == 0) return self;
    Py_DECREF(self);
    return NULL;
}

static PyObject *coded_new(PyTypeObject *Py_UNUSED(type), PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"codec", "slice_count", "offsets",   "palette", "data", "places",
                            "checks", "file",       "is_shared", NULL};
    PyObject *codec, *offsets, *palette, *data, *places = NULL, *checks = NULL, *file = NULL;
    long long slice_count;
    int is_shared = 0;
    codec_parameters c;
    coded_arguments a;
    Coded *self = NULL;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OLOOO|OOOp:Coded", names, &codec, &slice_count, &offsets,
                                     &palette, &data, &places, &checks, &file, &is_shared))
        return NULL;
    if (read_codec(codec, &c) < 0) return NULL;
    memset(&a, 0, sizeof a);
    if (get_buffer(offsets, &a.offsets) == 0 && get_buffer(palette, &a.palette) == 0 &&
        get_buffer(places, &a.places) == 0 && get_buffer(checks, &a.checks) == 0 && get_data(data, &a) == 0 &&
        check_lengths(&a, &c, slice_count) == 0)
        self = coded_from_arguments(codec, &c, slice_count, file, &a, is_shared);
    release_arguments(&a);
    Py_XDECREF((PyObject *)c.dictionary);
    return (PyObject *)self;
}

/* ---- memory and files ------------------------------------------------------------------ */

/* Return a copy of the tables of an object, without data. NULL with an exception set. */
static Coded *copy_tables(const Coded *c, int has_checks, PyObject *owner) {
    const coded_block *const b = &c->block;
    const codec_parameters parameters = {
        .form = b->form, .method = b->method, .group = b->group, .dictionary = (Dictionary *)c->dictionary,
    };
    Coded *const copy = coded_allocate(c->codec, &parameters, b->slice_count, has_checks, b->places != NULL, owner);
    if (!copy) return NULL;
    memcpy(offsets_of(copy), b->offsets, 4 * (size_t)(unit_count(b->slice_count, b->group) + 1));
    if (b->palette) memcpy(palette_of(copy), b->palette, (size_t)palette_bytes(&b->form));
    if (b->places) memcpy(places_of(copy), b->places, (size_t)(b->slice_count * b->place_bytes));
    return copy;
}

/* Write the checksum of every unit to `checks`. */
static void fill_checks(const coded_block *b, uint32_t *checks) {
    const int64_t units = unit_count(b->slice_count, b->group);
    for (int64_t u = 0; u < units; u++) {
        if (b->data) checks[u] = checksum(b->data + b->offsets[u], (int64_t)b->offsets[u + 1] - b->offsets[u]);
        else checks[u] = b->checks[u];
    }
}

static PyObject *coded_in_file(PyObject *self, PyObject *arguments) {
    int descriptor;
    long long start;
    PyObject *owner;
    if (!PyArg_ParseTuple(arguments, "iLO:in_file", &descriptor, &start, &owner)) return NULL;
    if (descriptor < 0 || start < 0)
        return PyErr_Format(PyExc_ValueError, "descriptor and start must not be negative, but are %d and %lld", descriptor, start);
    const Coded *const c = (Coded *)self;
    Coded *const copy = copy_tables(c, 1, owner);
    if (!copy) return NULL;
    Py_BEGIN_ALLOW_THREADS
    fill_checks(&c->block, checks_of(copy));
    Py_END_ALLOW_THREADS
    copy->block.file = descriptor;
    copy->block.file_start = start;
    copy->block.data_bytes = c->block.data_bytes;
    if (coded_check(copy) == 0) return (PyObject *)copy;
    Py_DECREF(copy);
    return NULL;
}

/* Raise what a failed read means: the error of the system, or the ValueError `damage`. Return NULL. */
static PyObject *raise_unreadable(int64_t error, const char *damage, long long number) {
    if (error == 0) return PyErr_Format(PyExc_ValueError, damage, number);
    errno = (int)error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *coded_in_memory(PyObject *self, PyObject *Py_UNUSED(none)) {
    const Coded *const c = (Coded *)self;
    const coded_block *const b = &c->block;
    if (b->data) return Py_NewRef(self);
    uint8_t *const area = area_new((size_t)b->data_bytes);
    if (!area) return PyErr_NoMemory();
    const int64_t units = unit_count(b->slice_count, b->group);
    int64_t error = 0, damaged = -1;
    Py_BEGIN_ALLOW_THREADS
    if (!read_file(b, 0, b->data_bytes, area, &error)) damaged = 0;
    for (int64_t u = 0; damaged < 0 && u < units; u++)
        if (checksum(area + b->offsets[u], (int64_t)b->offsets[u + 1] - b->offsets[u]) != b->checks[u]) damaged = u;
    Py_END_ALLOW_THREADS
    Coded *const copy = damaged < 0 ? copy_tables(c, 0, NULL) : NULL;
    if (copy) coded_set_data(copy, area, b->data_bytes);
    else area_free(area, (size_t)b->data_bytes);
    if (damaged >= 0) return raise_unreadable(error, "Unit %lld cannot be read: its bytes in the file are damaged.", damaged);
    return (PyObject *)copy;
}

/* ---- attributes ------------------------------------------------------------------------ */

/* Return a read-only array over memory that the object owns. NULL with an exception set. */
static PyObject *make_view(PyObject *self, const void *memory, int64_t count, int type_number) {
    npy_intp shape[1] = {(npy_intp)count};
    if (count == 0) return PyArray_SimpleNew(1, shape, type_number);
    PyObject *const array = PyArray_SimpleNewFromData(1, shape, type_number, (void *)(uintptr_t)memory);
    if (!array) return NULL;
    PyArray_CLEARFLAGS((PyArrayObject *)array, NPY_ARRAY_WRITEABLE);
    if (PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(self)) == 0) return array;
    Py_DECREF(array);
    return NULL;
}

static PyObject *get_codec(PyObject *self, void *Py_UNUSED(closure)) { return Py_NewRef(((Coded *)self)->codec); }

static PyObject *get_file(PyObject *self, void *Py_UNUSED(closure)) {
    PyObject *const owner = ((Coded *)self)->owner;
    return Py_NewRef(owner ? owner : Py_None);
}

static PyObject *get_slice_bytes(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromLongLong(((Coded *)self)->block.form.slice_bytes);
}

static PyObject *get_slice_count(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromLongLong(((Coded *)self)->block.slice_count);
}

static PyObject *get_nbytes(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(((Coded *)self)->memory_bytes);
}

static PyObject *get_disk_bytes(PyObject *self, void *Py_UNUSED(closure)) {
    const coded_block *const b = &((Coded *)self)->block;
    return PyLong_FromLongLong(b->data ? 0 : b->data_bytes);
}

static PyObject *get_location(PyObject *self, void *Py_UNUSED(closure)) {
    const coded_block *const b = &((Coded *)self)->block;
    if (b->data) Py_RETURN_NONE;
    return Py_BuildValue("iLL", (int)b->file, (long long)b->file_start, (long long)b->data_bytes);
}

static PyObject *get_data_view(PyObject *self, void *Py_UNUSED(closure)) {
    const coded_block *const b = &((Coded *)self)->block;
    if (!b->data) Py_RETURN_NONE;
    return make_view(self, b->data, b->data_bytes, NPY_UINT8);
}

static PyObject *get_offsets(PyObject *self, void *Py_UNUSED(closure)) {
    const coded_block *const b = &((Coded *)self)->block;
    return make_view(self, b->offsets, unit_count(b->slice_count, b->group) + 1, NPY_UINT32);
}

static PyObject *get_checks(PyObject *self, void *Py_UNUSED(closure)) {
    const coded_block *const b = &((Coded *)self)->block;
    if (b->data) Py_RETURN_NONE;
    return make_view(self, b->checks, unit_count(b->slice_count, b->group), NPY_UINT32);
}

static PyObject *get_palette(PyObject *self, void *Py_UNUSED(closure)) {
    const coded_block *const b = &((Coded *)self)->block;
    return make_view(self, b->palette, palette_bytes(&b->form), NPY_UINT8);
}

static PyObject *get_places(PyObject *self, void *Py_UNUSED(closure)) {
    const coded_block *const b = &((Coded *)self)->block;
    if (!b->places) Py_RETURN_NONE;
    return make_view(self, b->places, b->slice_count, b->place_bytes == 2 ? NPY_UINT16 : NPY_UINT32);
}

static PyObject *coded_reduce(PyObject *self, PyObject *Py_UNUSED(none)) {
    PyObject *const c = coded_in_memory(self, NULL);
    if (!c) return NULL;
    const coded_block *const b = &((Coded *)c)->block;
    PyObject *const offsets = get_offsets(c, NULL), *const palette = get_palette(c, NULL);
    PyObject *const places = get_places(c, NULL);
    /* Pickle writes an array that shares the memory without a copy, and the loaded object keeps the array. */
    PyObject *const data = get_data_view(c, NULL);
    PyObject *result = NULL;
    if (offsets && palette && places && data)
        result = Py_BuildValue("O(OLOOOOOOO)", coded_type, ((Coded *)c)->codec, (long long)b->slice_count, offsets,
                               palette, data, places, Py_None, Py_None, Py_True);
    Py_XDECREF(offsets);
    Py_XDECREF(palette);
    Py_XDECREF(places);
    Py_XDECREF(data);
    Py_DECREF(c);
    return result;
}

static PyMethodDef coded_methods[] = {
    {"in_file", coded_in_file, METH_VARARGS,
     "in_file(descriptor, start, owner, /)\n--\n\n"
     "Return a copy whose data is read from byte `start` of a file. The copy keeps `owner` alive."},
    {"in_memory", coded_in_memory, METH_NOARGS,
     "in_memory()\n--\n\nRead the data into memory, check it, and return the same slices with it."},
    {"__reduce__", coded_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef coded_properties[] = {
    {"codec", get_codec, NULL, "The codec that encoded the slices.", NULL},
    {"slice_bytes", get_slice_bytes, NULL, "Bytes of one slice, decoded.", NULL},
    {"slice_count", get_slice_count, NULL, "Number of slices.", NULL},
    {"nbytes", get_nbytes, NULL, "Bytes in memory, without the dictionary.", NULL},
    {"disk_bytes", get_disk_bytes, NULL, "Bytes in a file.", NULL},
    {"location", get_location, NULL, "(descriptor, start, nbytes) of data in a file, or None.", NULL},
    {"file", get_file, NULL, "The owner of the file, or None.", NULL},
    {"data", get_data_view, NULL, "Compressed units, one after another, or None if they are in a file.", NULL},
    {"offsets", get_offsets, NULL, "Where each unit starts in `data`, and the end of the last one.", NULL},
    {"checks", get_checks, NULL, "Checksum of each unit in a file, or None if the data is in memory.", NULL},
    {"palette", get_palette, NULL, "256 words or colours, or nothing.", NULL},
    {"places", get_places, NULL, "Place of each slice among the units, or None if they are in order.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot coded_slots[] = {
    {Py_tp_doc, "Coded(codec, slice_count, offsets, palette, data, places=None, checks=None, file=None, is_shared=False)"
                "\n--\n\n"
                "Compressed slices, in memory or in a file. Immutable."},
    {Py_tp_new, (void *)coded_new},
    {Py_tp_dealloc, (void *)coded_dealloc},
    {Py_tp_methods, coded_methods},
    {Py_tp_getset, coded_properties},
    {0, NULL},
};

static PyType_Spec coded_spec = {
    "holdall._native.Coded", sizeof(Coded), 0, Py_TPFLAGS_DEFAULT, coded_slots,
};

/* ---- encoding -------------------------------------------------------------------------- */

/* Units longer than this get hash tables of 2^LONG_UNIT_TABLE_LOG entries. Zstandard's own choice would take 10 to
 * 30 MiB and compress no better. */
enum { LONG_UNIT_BYTES = 1 << 18, LONG_UNIT_TABLE_LOG = 17 };

/* Contexts and scratch memory of one call of `encode`. */
typedef struct {
    encoder coder;
    ZSTD_CDict *cdict;
    void *table;   /* table of words or colours */
    uint8_t *room; /* area for the units */
    size_t room_bytes;
} encode_workspace;

static void workspace_free(encode_workspace *w) {
    ZSTD_freeCCtx(w->coder.cctx);
    ZSTD_freeCDict(w->cdict);
    LZ4_freeStreamHC(w->coder.stream);
    LZ4_freeStreamHC(w->coder.loaded);
    free(w->coder.scratch);
    free(w->table);
    area_free(w->room, w->room_bytes);
}

/* Make a compression context of Zstandard, with the dictionary. Return 0 if there is no memory. */
static int make_zstd_context(encode_workspace *w, const codec_parameters *c) {
    ZSTD_CCtx *const context = ZSTD_createCCtx();
    const int table_log = c->group * coded_bytes(&c->form) > LONG_UNIT_BYTES ? LONG_UNIT_TABLE_LOG : 0;
    w->coder.cctx = context;
    if (!context) return 0;
    /* Readers know the sizes of slices, and files have checksums of their own. 0 stands for the default. */
    ZSTD_CCtx_setParameter(context, ZSTD_c_compressionLevel, (int)c->level);
    ZSTD_CCtx_setParameter(context, ZSTD_c_contentSizeFlag, 0);
    ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 0);
    ZSTD_CCtx_setParameter(context, ZSTD_c_dictIDFlag, 0);
    ZSTD_CCtx_setParameter(context, ZSTD_c_hashLog, table_log);
    ZSTD_CCtx_setParameter(context, ZSTD_c_chainLog, table_log);
    ZSTD_CCtx_setParameter(context, ZSTD_c_minMatch, (int)c->min_match);
    if (!c->dictionary) return 1;
    const void *const content = PyBytes_AsString(c->dictionary->content);
    w->cdict = ZSTD_createCDict(content, (size_t)PyBytes_Size(c->dictionary->content), (int)c->level);
    return w->cdict && !ZSTD_isError(ZSTD_CCtx_refCDict(context, w->cdict));
}

/* Make the streams with which LZ4 compresses after a dictionary, if there is one. Return 0 if there is no memory. */
static int make_lz4_streams(encode_workspace *w, const codec_parameters *c) {
    if (!c->dictionary) return 1;
    w->coder.stream = LZ4_createStreamHC();
    w->coder.loaded = LZ4_createStreamHC();
    w->coder.common = (const uint8_t *)PyBytes_AsString(c->dictionary->content);
    w->coder.common_bytes = PyBytes_Size(c->dictionary->content);
    return w->coder.stream && w->coder.loaded;
}

/* Allocate all memory for encoding `slice_count` slices. Return 0 if there is not enough. The caller frees the workspace in
 * either case. */
static int workspace_make(encode_workspace *w, const codec_parameters *c, int64_t slice_count) {
    const int64_t coded = coded_bytes(&c->form);
    memset(w, 0, sizeof *w);
    w->coder.group = c->group;
    w->coder.method = c->method;
    w->coder.level = c->level;
    w->coder.scratch_bytes = (2 + 3 * c->group) * coded + 4096;
    w->coder.scratch = malloc((size_t)w->coder.scratch_bytes);
    w->table = calloc(1, is_of_colours(&c->form) ? COLOUR_TABLE_BYTES : WORD_TABLE_BYTES);
    w->room_bytes = (size_t)(slice_count * coded + unit_count(slice_count, c->group) * max_head_bytes(&c->form));
    w->room = area_new(w->room_bytes);
    if (!w->coder.scratch || !w->table || !w->room) return 0;
    if (c->method == METHOD_ZSTD) return make_zstd_context(w, c);
    return c->method == METHOD_LZ4 ? make_lz4_streams(w, c) : 1;
}

/* Begin the palette of a block, to which colours are added: with the colours of the dictionary, or without any. */
static void begin_palette(Coded *self, const codec_parameters *c) {
    if (!is_of_colours(&c->form)) return;
    memset(palette_of(self), 0xFF, PALETTE_BYTES);
    if (c->dictionary && PyBytes_Size(c->dictionary->palette) == PALETTE_BYTES)
        memcpy(palette_of(self), PyBytes_AsString(c->dictionary->palette), PALETTE_BYTES);
}

/* Encode slices into `self`, whose tables are allocated. `order` may be NULL. Return 1; 0 if the codec cannot represent
 * the slices; -1 with an exception set. Releases the GIL: the caller keeps `slices` and `order` alive and unchanged. */
static int encode_slices(Coded *self, const codec_parameters *c, const uint8_t *slices, const uint32_t *order) {
    const int64_t count = self->block.slice_count;
    encode_workspace w;
    int64_t used = -3; /* no memory */
    uint8_t *area = NULL;
    begin_palette(self, c);
    Py_BEGIN_ALLOW_THREADS
    if (workspace_make(&w, c, count)) {
        used = encode_units(&w.coder, &c->form, slices, order, count, w.room, (int64_t)w.room_bytes, offsets_of(self),
                            palette_of(self), w.table);
        if (used >= 0) area = area_new((size_t)used);
        if (area) memcpy(area, w.room, (size_t)used);
    }
    workspace_free(&w);
    Py_END_ALLOW_THREADS
    if (used == -1) return 0;
    if (used == -2) PyErr_SetString(PyExc_ValueError, "Slices that take 4 GiB or more compressed do not fit into one block.");
    else if (!area) PyErr_NoMemory();
    else coded_set_data(self, area, used);
    return area ? 1 : -1;
}

/* Slices to encode, and what keeps them alive. */
typedef struct {
    const uint8_t *slices;
    int64_t nbytes;
    PyObject *raw; /* or NULL */
    Py_buffer buffer;
} encode_source;

/* Find the slices of a Block or a buffer. Return -1 with an exception set. */
static int source_open(encode_source *source, PyObject *object) {
    memset(source, 0, sizeof *source);
    if (Py_TYPE(object) != block_type) {
        if (PyObject_GetBuffer(object, &source->buffer, PyBUF_SIMPLE) < 0) return -1;
        source->slices = source->buffer.buf;
        source->nbytes = source->buffer.len;
        return 0;
    }
    const Block *const block = (Block *)object;
    if (Py_TYPE(block->form) != raw_type) {
        PyErr_SetString(PyExc_ValueError, "The block is compressed already.");
        return -1;
    }
    source->raw = Py_NewRef(block->form);
    source->slices = ((Raw *)block->form)->data;
    source->nbytes = (int64_t)block->used * block->slice_bytes;
    return 0;
}

static void source_close(encode_source *source) {
    Py_XDECREF(source->raw);
    if (source->buffer.obj) PyBuffer_Release(&source->buffer);
}

/* Encode slices in the order of their numbers, or in `order`. Return a new Coded object or None. */
static PyObject *encode_source_slices(const encode_source *source, PyObject *codec, const codec_parameters *c,
                                      const Py_buffer *order) {
    const int64_t count = source->nbytes / c->form.slice_bytes;
    if (source->nbytes % c->form.slice_bytes != 0 || count > UINT32_MAX)
        return PyErr_Format(PyExc_ValueError, "%lld bytes are not a whole number of slices of %lld bytes",
                            (long long)source->nbytes, (long long)c->form.slice_bytes);
    if (order->obj && order->len != 4 * count)
        return PyErr_Format(PyExc_ValueError, "order must be %lld numbers of dtype uint32, but has %zd bytes",
                            (long long)count, order->len);
    Coded *const self = coded_allocate(codec, c, count, 0, order->obj != NULL, NULL);
    if (!self) return NULL;
    uint32_t *own_order = NULL; /* A copy, because other threads may write to the buffer while the slices are encoded. */
    if (order->obj) {
        own_order = malloc((size_t)order->len + 1);
        if (!own_order) {
            Py_DECREF(self);
            return PyErr_NoMemory();
        }
        memcpy(own_order, order->buf, (size_t)order->len);
        if (!places_set(self, own_order)) {
            Py_DECREF(self);
            free(own_order);
            return PyErr_Format(PyExc_ValueError, "order must hold every number from 0 to %lld once", (long long)count - 1);
        }
    }
    const int result = encode_slices(self, c, source->slices, own_order);
    free(own_order);
    if (result > 0) return (PyObject *)self;
    Py_DECREF(self);
    if (result < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *encode(PyObject *Py_UNUSED(module), PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"source", "codec", "order", NULL};
    PyObject *object, *codec, *order = NULL, *result = NULL;
    codec_parameters c;
    encode_source source;
    Py_buffer order_buffer;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO|O:encode", names, &object, &codec, &order)) return NULL;
    if (read_codec(codec, &c) < 0) return NULL;
    memset(&order_buffer, 0, sizeof order_buffer);
    if (get_buffer(order, &order_buffer) == 0 && source_open(&source, object) == 0) {
        result = encode_source_slices(&source, codec, &c, &order_buffer);
        source_close(&source);
    }
    if (order_buffer.obj) PyBuffer_Release(&order_buffer);
    Py_XDECREF((PyObject *)c.dictionary);
    return result;
}

/* ---- decoding -------------------------------------------------------------------------- */

/* Return `object` as a Coded object; NULL with a TypeError if it is something else. */
static Coded *require_coded(PyObject *object) {
    if (Py_TYPE(object) == coded_type) return (Coded *)object;
    PyErr_Format(PyExc_TypeError, "expected Coded, not %R", Py_TYPE(object));
    return NULL;
}

static PyObject *decode(PyObject *Py_UNUSED(module), PyObject *arguments) {
    PyObject *object;
    Py_ssize_t first, count;
    if (!PyArg_ParseTuple(arguments, "Onn:decode", &object, &first, &count)) return NULL;
    const Coded *const coded = require_coded(object);
    if (!coded) return NULL;
    const coded_block *const b = &coded->block;
    if (first < 0 || count < 0 || first > b->slice_count || count > b->slice_count - first)
        return PyErr_Format(PyExc_IndexError, "first is %lld and count is %lld, but the block has %lld slices.",
                            (long long)first, (long long)count, (long long)b->slice_count);
    npy_intp shape[2] = {(npy_intp)count, (npy_intp)b->form.slice_bytes};
    PyObject *const out = PyArray_SimpleNew(2, shape, NPY_UINT8);
    if (!out) return NULL;
    uint8_t *const to = PyArray_DATA((PyArrayObject *)out);
    long long number = first;
    int64_t error = 0;
    int has_memory;
    Py_BEGIN_ALLOW_THREADS
    decoder *const d = decoder_new();
    has_memory = d && decoder_fit(d, b);
    while (has_memory && number < first + count &&
           decode_slice(d, b, number, to + (number - first) * b->form.slice_bytes))
        number++;
    if (d) error = d->error;
    decoder_free(d);
    Py_END_ALLOW_THREADS
    if (has_memory && number == first + count) return out;
    Py_DECREF(out);
    if (!has_memory) return PyErr_NoMemory();
    return raise_unreadable(error, "Slice %lld cannot be decoded: its compressed bytes are damaged.", number);
}

static PyObject *checksums(PyObject *Py_UNUSED(module), PyObject *object) {
    const Coded *const coded = require_coded(object);
    if (!coded) return NULL;
    npy_intp shape[1] = {(npy_intp)unit_count(coded->block.slice_count, coded->block.group)};
    PyObject *const out = PyArray_SimpleNew(1, shape, NPY_UINT32);
    if (!out) return NULL;
    uint32_t *const checks = PyArray_DATA((PyArrayObject *)out);
    Py_BEGIN_ALLOW_THREADS
    fill_checks(&coded->block, checks);
    Py_END_ALLOW_THREADS
    return out;
}

/* ---- the module ------------------------------------------------------------------------ */

static PyMethodDef functions[] = {
    {"encode", (PyCFunction)(void (*)(void))encode, METH_VARARGS | METH_KEYWORDS,
     "encode(source, codec, order=None)\n--\n\n"
     "Compress all slices of a block or buffer. Return None if the codec cannot represent them."},
    {"decode", decode, METH_VARARGS, "decode(coded, first, count, /)\n--\n\nReturn slices as (count, slice_bytes)."},
    {"checksums", checksums, METH_O, "checksums(coded, /)\n--\n\nReturn the checksum of every unit."},
    {NULL, NULL, 0, NULL},
};

int add_coded(PyObject *module) {
    if (!(dictionary_type = type_add(module, &dictionary_spec, "Dictionary"))) return -1;
    if (!(coded_type = type_add(module, &coded_spec, "Coded"))) return -1;
    return PyModule_AddFunctions(module, functions);
}
