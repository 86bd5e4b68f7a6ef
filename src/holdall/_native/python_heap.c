/* The function `describe_python_heap`: the statistics of Python's own allocator for objects of up to 512 bytes. */
#include "python_api.h"
#include "module.h"

#ifndef _WIN32
#include <dlfcn.h>
#include <stdlib.h>

/* Python exports this function for memory profilers. The Limited API does not declare it, so it is looked up by name,
 * and a Python without it loads this module, too. */
typedef int (*describe_function)(FILE *);

static PyObject *describe_python_heap(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    describe_function describe = NULL;
    *(void **)&describe = dlsym(RTLD_DEFAULT, "_PyObject_DebugMallocStats");
    if (!describe) Py_RETURN_NONE;
    char *text = NULL;
    size_t bytes = 0;
    FILE *const stream = open_memstream(&text, &bytes);
    if (!stream) return PyErr_NoMemory();
    describe(stream); /* The GIL is held, so no object is freed while pools are counted. */
    PyObject *found = fclose(stream) == 0 ? PyBytes_FromStringAndSize(text, (Py_ssize_t)bytes) : PyErr_NoMemory();
    free(text);
    return found;
}
#else
static PyObject *describe_python_heap(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) { Py_RETURN_NONE; }
#endif

static PyMethodDef functions[] = {
    {"describe_python_heap", describe_python_heap, METH_NOARGS,
     "describe_python_heap()\n--\n\n"
     "Return the text that sys._debugmallocstats() prints, or None where Python cannot provide it."},
    {NULL, NULL, 0, NULL},
};

int add_python_heap(PyObject *module) { return PyModule_AddFunctions(module, functions); }
