/* Where observations lie: what every file that reads slices of segments needs. */
#ifndef HOLDALL_READING_H
#define HOLDALL_READING_H

#include "holdall.h"
#include "structs.h"

/* The slice number at `position` of a lane's log; -1 if the part has no such slice. */
static inline int64_t number_at(const part *p, int64_t position, int64_t lane, int64_t lanes) {
    const int64_t entry = position * lanes + lane;
    int64_t number = entry;
    if (p->log_width == 2) number = ((const uint16_t *)(intptr_t)p->log)[entry];
    else if (p->log_width == 4) number = ((const uint32_t *)(intptr_t)p->log)[entry];
    return number < p->slice_count ? number : -1;
}

/* The last segment that begins at `tick` or before; -1 if there is none. Segments begin at ascending ticks. */
static inline int32_t segment_of(int64_t tick, const int64_t *first_ticks, int64_t segments) {
    int64_t low = 0, length = segments;
    while (length > 1) {
        const int64_t half = length / 2;
        if (first_ticks[low + half] <= tick) low += half;
        length -= half;
    }
    return (int32_t)(segments && first_ticks[low] <= tick ? low : -1);
}

/* See columns.c. */
void copy_from_runs(const row_column *c, const int64_t *ids, int64_t rows, int64_t ring_rows, uint8_t *out);

/* See gather.c. */
EXPORT int64_t holdall_read_rows(const row_column *columns, int64_t count, const int64_t *ids, int64_t rows,
                                 int64_t first_id, int64_t next_id, int64_t ring_rows, uint8_t *observed, uint8_t *rest);

#endif
