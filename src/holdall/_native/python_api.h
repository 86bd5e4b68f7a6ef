/* The C APIs of Python and NumPy. Every C file that uses them includes this header before all others.
 *
 * One build runs on CPython 3.11 and later, because only the Limited API of 3.11 is used, and on NumPy 2.0 and later. */
#ifndef HOLDALL_PYTHON_API_H
#define HOLDALL_PYTHON_API_H

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdio.h> /* NumPy's headers use FILE, which Python.h does not declare under the Limited API. */

/* All files share the table of NumPy's functions that module.c imports. */
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL holdall_numpy_api
#ifndef HOLDALL_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#endif
