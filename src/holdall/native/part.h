/* How a segment's part lies in memory, for whoever reads it. */
#ifndef HOLDALL_PART_H
#define HOLDALL_PART_H

#include <stdint.h>

/* What one segment holds of one field; mirrored by RECORD_FIELDS in part.py. */
typedef struct {
    int64_t log;         /* address of the slice numbers, 0: slices lie in log order */
    int64_t log_rows;    /* entries per lane */
    int64_t log_width;   /* bytes of an entry: 2 or 4 */
    int64_t slices;      /* address of the slices, one after another */
    int64_t slice_count;
    int64_t outer;       /* runs of a slice */
    int64_t run_bytes;   /* bytes of a run, contiguous in slice and observation */
    int64_t window;      /* slices of an observation */
    int64_t shift;       /* slices by which a shifted next observation starts later */
    int64_t sealed;      /* address of a sealed_block that holds the slices instead, or 0 */
} part;

static const uint32_t NEXT_IS_WHOLE = UINT32_C(1) << 31;

/* The slice number at `position` of a lane's log; -1 if it is none of the part's. */
static inline int64_t number_at(const part *p, int64_t position, int64_t lane, int64_t lanes) {
    const int64_t entry = position * lanes + lane;
    int64_t number = entry;
    if (p->log_width == 2) number = ((const uint16_t *)(intptr_t)p->log)[entry];
    else if (p->log_width == 4) number = ((const uint32_t *)(intptr_t)p->log)[entry];
    return number < p->slice_count ? number : -1;
}

#endif
