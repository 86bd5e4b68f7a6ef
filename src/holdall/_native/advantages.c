/* The function `estimate_advantages`: generalised advantage estimation. */
#include "python_api.h"
#include "module.h"

/* The advantage of one step in one lane. `later` is the advantage of the next step. Every product and sum is a statement of
 * its own, in single precision, so that no compiler fuses two of them into one rounding. Stable-Baselines3 computes the
 * same bits. */
static inline float compute_advantage(float reward, float value, float end, float next_value, float later, float gamma,
                                      float decay) {
    const float continues = 1.0f - end;
    float ahead = gamma * next_value;
    ahead = ahead * continues;
    float delta = reward + ahead;
    delta = delta - value;
    float carried = decay * continues;
    carried = carried * later;
    return delta + carried;
}

/* Estimate one step of all lanes. `later` has the advantages of the next step, or is NULL for the last one. `restrict` lets
 * the compiler compute several lanes at once, so rewards that are stored where advantages are written are passed as NULL. */
static void estimate_step(npy_intp lanes, const float *restrict rewards, const float *restrict values,
                          const float *restrict ends, const float *restrict next_values, const float *restrict later,
                          float gamma, float decay, float *restrict advantages, float *restrict returns) {
    for (npy_intp i = 0; i < lanes; i++) {
        const float reward = rewards ? rewards[i] : advantages[i];
        const float after = later ? later[i] : 0.0f;
        const float advantage = compute_advantage(reward, values[i], ends[i], next_values[i], after, gamma, decay);
        advantages[i] = advantage;
        returns[i] = advantage + values[i];
    }
}

/* The arguments of estimate_advantages that are arrays, in order. */
enum { REWARDS, VALUES, ENDS, LAST_VALUES, ADVANTAGES, RETURNS, ARRAY_COUNT };

static const char *const array_names[] = {"rewards", "values", "ends", "last_values", "advantages", "returns"};

/* Return -1 with an exception set unless the arrays are contiguous float32 of matching shapes, and the outputs writable. */
static int require_arrays(PyObject *const *given, npy_intp *steps, npy_intp *lanes) {
    for (int i = 0; i < ARRAY_COUNT; i++) {
        PyArrayObject *const array = (PyArrayObject *)given[i];
        const int ndim = i == LAST_VALUES ? 1 : 2;
        if (!PyArray_Check(given[i]) || PyArray_TYPE(array) != NPY_FLOAT32 || PyArray_NDIM(array) != ndim ||
            !PyArray_ISCARRAY_RO(array) || (i >= ADVANTAGES && !PyArray_ISWRITEABLE(array))) {
            PyErr_Format(PyExc_TypeError, "%s must be a contiguous float32 array with %d axes", array_names[i], ndim);
            return -1;
        }
    }
    *steps = PyArray_DIM((PyArrayObject *)given[VALUES], 0);
    *lanes = PyArray_DIM((PyArrayObject *)given[VALUES], 1);
    for (int i = 0; i < ARRAY_COUNT; i++) {
        const npy_intp *const shape = PyArray_DIMS((PyArrayObject *)given[i]);
        const int fits = i == LAST_VALUES ? shape[0] == *lanes : shape[0] == *steps && shape[1] == *lanes;
        if (!fits) {
            PyErr_Format(PyExc_ValueError, "%s does not have the shape of values (%zd steps, %zd lanes)",
                         array_names[i], (Py_ssize_t)*steps, (Py_ssize_t)*lanes);
            return -1;
        }
    }
    return 0;
}

static PyObject *estimate_advantages(PyObject *Py_UNUSED(module), PyObject *arguments) {
    PyObject *given[ARRAY_COUNT];
    double gamma, gae_lambda;
    if (!PyArg_ParseTuple(arguments, "OOOOddOO:estimate_advantages", &given[REWARDS], &given[VALUES], &given[ENDS],
                          &given[LAST_VALUES], &gamma, &gae_lambda, &given[ADVANTAGES], &given[RETURNS]))
        return NULL;
    npy_intp steps, lanes;
    if (require_arrays(given, &steps, &lanes) < 0) return NULL;
    float *data[ARRAY_COUNT];
    for (int i = 0; i < ARRAY_COUNT; i++) data[i] = PyArray_DATA((PyArrayObject *)given[i]);
    const int is_in_place = data[REWARDS] == data[ADVANTAGES];
    const float decay = (float)(gamma * gae_lambda);
    Py_BEGIN_ALLOW_THREADS
    for (npy_intp step = steps - 1; step >= 0; step--) {
        const npy_intp at = step * lanes;
        const int is_last = step == steps - 1;
        estimate_step(lanes, is_in_place ? NULL : data[REWARDS] + at, data[VALUES] + at, data[ENDS] + at,
                      is_last ? data[LAST_VALUES] : data[VALUES] + at + lanes,
                      is_last ? NULL : data[ADVANTAGES] + at + lanes, (float)gamma, decay, data[ADVANTAGES] + at,
                      data[RETURNS] + at);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"estimate_advantages", estimate_advantages, METH_VARARGS,
     "estimate_advantages(rewards, values, ends, last_values, gamma, gae_lambda, advantages, returns, /)\n--\n\n"
     "Write the advantages and returns of a rollout to the last two arrays. Releases the GIL."},
    {NULL, NULL, 0, NULL},
};

int add_advantages(PyObject *module) { return PyModule_AddFunctions(module, functions); }
