/* The extension module holdall._native: its initialisation. */
#define HOLDALL_IMPORTS_NUMPY
#include "engine.h"
#include "module.h"

static int module_exec(PyObject *module) {
    if (PyArray_ImportNumPyAPI() < 0) return -1;
    if (add_objects(module) < 0) return -1;
    if (add_coded(module) < 0) return -1;
    if (add_packed(module) < 0) return -1;
    if (add_writer(module) < 0) return -1;
    if (add_recycler(module) < 0) return -1;
    if (add_reader(module) < 0) return -1;
    if (add_sum_tree(module) < 0) return -1;
    if (add_drawing(module) < 0) return -1;
    if (add_advantages(module) < 0) return -1;
    return add_observation_log(module);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, (void *)module_exec},
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "holdall._native",
    .m_doc = "The parts of holdall that are written in C.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module_definition); }
