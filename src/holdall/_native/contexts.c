/* Contexts and dictionaries of Zstandard and LZ4, owned by Python objects. */
#include "module.h"

#include <lz4hc.h>
#include <zstd.h>

/* A context or a dictionary, which is freed with this object. */
typedef struct {
    PyObject_HEAD
    void *object;
    void (*release)(void *object);
    PyObject *dictionary; /* a handle that `object` refers to, or NULL */
} handle;

static PyTypeObject *handle_type;

static void handle_dealloc(PyObject *self) {
    handle *const h = (handle *)self;
    PyTypeObject *const type = Py_TYPE(self);
    if (h->object) h->release(h->object);
    Py_XDECREF(h->dictionary);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *handle_address(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromVoidPtr(((handle *)self)->object);
}

/* Return a handle that owns `object`; NULL with a MemoryError if `object` is NULL. */
static PyObject *new_handle(void *object, void (*release)(void *)) {
    if (!object) return PyErr_NoMemory();
    handle *const h = (handle *)((allocfunc)PyType_GetSlot(handle_type, Py_tp_alloc))(handle_type, 0);
    if (!h) {
        release(object);
        return NULL;
    }
    h->object = object;
    h->release = release;
    h->dictionary = NULL;
    return (PyObject *)h;
}

/* ---- Zstandard --------------------------------------------------------------------- */

static void release_decompressor(void *object) { ZSTD_freeDCtx(object); }
static void release_compressor(void *object) { ZSTD_freeCCtx(object); }
static void release_decompression_dictionary(void *object) { ZSTD_freeDDict(object); }
static void release_compression_dictionary(void *object) { ZSTD_freeCDict(object); }

static PyObject *new_decompressor(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    return new_handle(ZSTD_createDCtx(), release_decompressor);
}

static PyObject *new_decompression_dictionary(PyObject *Py_UNUSED(module), PyObject *arguments) {
    const char *content;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(arguments, "y#", &content, &bytes)) return NULL;
    ZSTD_DDict *const dictionary = ZSTD_createDDict(content, (size_t)bytes);
    if (!dictionary) {
        PyErr_Format(PyExc_ValueError, "%zd bytes are no dictionary of Zstandard", bytes);
        return NULL;
    }
    return new_handle(dictionary, release_decompression_dictionary);
}

/* Set parameters, given as pairs, until one is refused. Returns -1 with a ValueError set in that case. */
static int set_parameters(ZSTD_CCtx *context, const int (*parameters)[2], int count) {
    for (int i = 0; i < count; i++) {
        const size_t result = ZSTD_CCtx_setParameter(context, (ZSTD_cParameter)parameters[i][0], parameters[i][1]);
        if (ZSTD_isError(result)) {
            PyErr_Format(PyExc_ValueError, "Zstandard refuses the value %d: %s", parameters[i][1],
                         ZSTD_getErrorName(result));
            return -1;
        }
    }
    return 0;
}

static PyObject *new_compressor(PyObject *Py_UNUSED(module), PyObject *arguments) {
    const char *content = NULL;
    Py_ssize_t content_bytes = 0;
    int level, shortest_match, table_log;
    if (!PyArg_ParseTuple(arguments, "iiiz#", &level, &shortest_match, &table_log, &content, &content_bytes)) return NULL;
    ZSTD_CCtx *const context = ZSTD_createCCtx();
    PyObject *const self = new_handle(context, release_compressor);
    if (!self) return NULL;
    /* Sizes are known from the schema, and damage is found by the checksums of segments. 0 stands for the default. */
    const int parameters[][2] = {
        {ZSTD_c_compressionLevel, level},    {ZSTD_c_contentSizeFlag, 0},   {ZSTD_c_checksumFlag, 0},
        {ZSTD_c_dictIDFlag, 0},              {ZSTD_c_hashLog, table_log},   {ZSTD_c_chainLog, table_log},
        {ZSTD_c_minMatch, shortest_match},
    };
    if (set_parameters(context, parameters, (int)(sizeof parameters / sizeof *parameters)) < 0) goto failed;
    if (content) {
        ZSTD_CDict *const dictionary = ZSTD_createCDict(content, (size_t)content_bytes, level);
        ((handle *)self)->dictionary = new_handle(dictionary, release_compression_dictionary);
        if (!((handle *)self)->dictionary) goto failed;
        ZSTD_CCtx_refCDict(context, dictionary);
    }
    return self;
failed:
    Py_DECREF(self);
    return NULL;
}

/* ---- LZ4 --------------------------------------------------------------------------- */

static void release_lz4_stream(void *object) { LZ4_freeStreamHC(object); }

static PyObject *new_lz4_stream(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    return new_handle(LZ4_createStreamHC(), release_lz4_stream);
}

/* ---- the module -------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    {"new_decompressor", new_decompressor, METH_NOARGS, "Return a context of Zstandard that decompresses."},
    {"new_decompression_dictionary", new_decompression_dictionary, METH_VARARGS, "Return a dictionary to decompress with."},
    {"new_compressor", new_compressor, METH_VARARGS, "Return a context of Zstandard that compresses."},
    {"new_lz4_stream", new_lz4_stream, METH_NOARGS, "Return a state of LZ4 that compresses against other bytes."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef handle_properties[] = {
    {"address", handle_address, NULL, "The address of the context or dictionary.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot handle_slots[] = {
    {Py_tp_doc, "A context or a dictionary of Zstandard or LZ4, which is freed with this object."},
    {Py_tp_dealloc, (void *)handle_dealloc},
    {Py_tp_getset, handle_properties},
    {0, NULL},
};

static PyType_Spec handle_spec = {
    "holdall._native.Handle", sizeof(handle), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, handle_slots,
};

int add_contexts(PyObject *module) {
    PyObject *const type = PyType_FromSpec(&handle_spec);
    if (!type) return -1;
    handle_type = (PyTypeObject *)type;
    if (PyModule_AddObjectRef(module, "Handle", type) < 0) return -1;
    return PyModule_AddFunctions(module, functions);
}
