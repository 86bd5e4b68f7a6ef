/* The parts of the module. Each function adds the functions and types of one C file, and returns -1 with an exception set
 * if that fails. */
#ifndef HOLDALL_MODULE_H
#define HOLDALL_MODULE_H

#include "python_api.h"

int add_objects(PyObject *module);
int add_coded(PyObject *module);
int add_packed(PyObject *module);
int add_writer(PyObject *module);
int add_reader(PyObject *module);
int add_recycler(PyObject *module);
int add_sum_tree(PyObject *module);
int add_drawing(PyObject *module);
int add_advantages(PyObject *module);
int add_observation_log(PyObject *module);

#endif
