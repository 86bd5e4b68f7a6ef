/* Generalised advantage estimation, backwards in time, all lanes side by side.
 *
 * Every product and sum is a statement of its own, in single precision and in the order of
 * the NumPy twin (advantage.py): no compiler may then join two of them into one rounding.
 */
#include "codec.h"

#include <stdint.h>

/* `rewards`, `values`, `ends`, `advantages` and `returns` are (steps, lanes); `ends` is 1 where the episode ended with
 * the step. `rewards` may be `advantages`: a row is read before it is written. */
EXPORT void holdall_advantages(const float *rewards, const float *values, const float *ends, const float *last_values,
                               float gamma, float decay, int64_t steps, int64_t lanes, float *advantages,
                               float *returns) {
    for (int64_t t = steps - 1; t >= 0; t--) {
        const int64_t row = t * lanes;
        const int is_last = t == steps - 1;
        const float *const next_values = is_last ? last_values : values + row + lanes;
        const float *const later = advantages + row + lanes; /* not read in the last row */
        for (int64_t i = 0; i < lanes; i++) {
            const float going = 1.0f - ends[row + i];
            float ahead = gamma * next_values[i];
            ahead = ahead * going;
            float delta = rewards[row + i] + ahead;
            delta = delta - values[row + i];
            float carried = decay * going;
            carried = carried * (is_last ? 0.0f : later[i]);
            const float advantage = delta + carried;
            advantages[row + i] = advantage;
            returns[row + i] = advantage + values[row + i];
        }
    }
}
