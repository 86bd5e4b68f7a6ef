/* The parts of the module. Each function adds the functions and types of one C file, and returns -1 with an exception set
 * if that fails. */
#ifndef HOLDALL_MODULE_H
#define HOLDALL_MODULE_H

#include "python_api.h"

int add_contexts(PyObject *module);

#endif
