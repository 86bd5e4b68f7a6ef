/* A sum tree of doubles: node 1 is the root, the children of i are 2 i and 2 i + 1, and the leaves stand last.
 * SumTree in prioritized.py computes the same bits with NumPy. */
#include "holdall.h"

#include <math.h>

enum {
    AT_ONCE = 128, /* walks side by side: each waits for memory at every level */
    TOP = 128,     /* a level of so many nodes is added up faster as a whole than along every walk */
};

/* Put numbers into some slots, one for all if `step` is 0, and add up the nodes above them again. */
EXPORT void holdall_tree_put(double *nodes, int64_t leaves, const int64_t *slots, const double *values, int64_t step,
                             int64_t count) {
    for (int64_t i = 0; i < count; i++) nodes[leaves + slots[i]] = values[i * step];
    int64_t shift = 1;
    for (int64_t level = leaves; level > 1; level /= 2, shift++)
        for (int64_t i = 0; i < count; i++) {
            const int64_t node = (leaves + slots[i]) >> shift;
            nodes[node] = nodes[2 * node] + nodes[2 * node + 1];
        }
}

/* Put numbers under ids, which stand in slots modulo `capacity`; ids below `first_id` are ignored, and of equal
 * ones the last counts. Returns -1 and the largest number put, or, with nothing changed, the first entry whose id is
 * not below `next_id` or whose number is not above 0 and at most `most`. */
EXPORT int64_t holdall_tree_update(double *nodes, int64_t leaves, const int64_t *ids, const double *values, int64_t count,
                                 int64_t first_id, int64_t next_id, int64_t capacity, double most, double *largest) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] >= next_id || !(values[i] > 0 && values[i] <= most)) return i;
    const int64_t top = leaves < TOP ? leaves : TOP;
    for (int64_t begin = 0; begin < count; begin += AT_ONCE) {
        const int64_t end = begin + AT_ONCE < count ? begin + AT_ONCE : count;
        int64_t node[AT_ONCE], some = 0;
        for (int64_t i = begin; i < end; i++) {
            if (ids[i] < first_id) continue;
            node[some] = leaves + (next_id <= capacity ? ids[i] : ids[i] % capacity);
            nodes[node[some++]] = values[i];
            if (values[i] > *largest) *largest = values[i];
        }
        for (int64_t level = leaves; level > top; level /= 2)
            for (int64_t i = 0; i < some; i++) {
                node[i] /= 2;
                nodes[node[i]] = nodes[2 * node[i]] + nodes[2 * node[i] + 1];
            }
    }
    for (int64_t node = top - 1; node > 0; node--) nodes[node] = nodes[2 * node] + nodes[2 * node + 1];
    return -1;
}

/* Find the slots that points of [0, 1) times the root fall on, and for each the lowest number found over its own. */
EXPORT void holdall_tree_find(const double *nodes, int64_t leaves, const double *points, int64_t count, int64_t *slots,
                              float *shares) {
    double lowest = INFINITY;
    for (int64_t begin = 0; begin < count; begin += AT_ONCE) {
        const int64_t some = begin + AT_ONCE < count ? AT_ONCE : count - begin;
        int64_t node[AT_ONCE];
        double left_over[AT_ONCE];
        for (int64_t i = 0; i < some; i++) node[i] = 1, left_over[i] = points[begin + i] * nodes[1];
        for (int64_t level = 1; level < leaves; level *= 2)
            for (int64_t i = 0; i < some; i++) {
                const double in_left = nodes[2 * node[i]], in_right = nodes[2 * node[i] + 1];
                /* Rounding may leave a point just beyond the last number: it stays on a side that holds one. */
                const int64_t right = ((left_over[i] >= in_left) & (in_right > 0)) | (in_left == 0);
                left_over[i] -= (double)right * in_left; /* no branch: half of them would be predicted wrongly */
                node[i] = 2 * node[i] + right;
                FETCH_SOON(nodes + (2 * level < leaves ? 2 * node[i] : 1));
            }
        for (int64_t i = 0; i < some; i++) {
            slots[begin + i] = node[i] - leaves;
            lowest = nodes[node[i]] < lowest ? nodes[node[i]] : lowest;
        }
    }
    for (int64_t i = 0; i < count; i++) shares[i] = (float)(lowest / nodes[leaves + slots[i]]);
}
