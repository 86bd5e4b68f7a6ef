/* The memory of one thread that decodes slices: buffers that grow with the blocks that are decoded. */
#include "coded.h"

#include <stdlib.h>
#include <zstd.h>

enum { MAX_READ_BYTES = 1 << 20 }; /* The most bytes of one read from a file, unless a unit has more. */
enum { SPARE_BYTES = 64 };         /* Bytes after a buffer, for loops that load whole registers. */

decoder *decoder_new(void) { return calloc(1, sizeof(decoder)); }

void decoder_free(decoder *d) {
    if (!d) return;
    ZSTD_freeDCtx(d->dctx);
    free(d->scratch);
    if (d->unit) free(d->unit - LOOK_BACK_BYTES);
    free(d->read);
    free(d->colours);
    free(d);
}

void decoder_begin_batch(decoder *d) {
    d->unit_block = NULL;
    d->unit_dictionary = NULL;
    d->read_block = NULL;
    d->error = 0;
}

/* Replace a buffer by one of `wanted` bytes, whose contents are undefined. Return 0 if there is no memory; the buffer is
 * then unchanged. */
static int grow(uint8_t **buffer, int64_t *bytes, int64_t wanted) {
    if (*bytes >= wanted) return 1;
    uint8_t *const grown = malloc((size_t)wanted + SPARE_BYTES);
    if (!grown) return 0;
    free(*buffer);
    *buffer = grown;
    *bytes = wanted;
    return 1;
}

/* Grow the buffer for a unit, which has LOOK_BACK_BYTES before it. */
static int grow_unit(decoder *d, int64_t wanted) {
    if (d->unit_bytes >= wanted) return 1;
    uint8_t *const grown = malloc((size_t)(LOOK_BACK_BYTES + wanted + SPARE_BYTES));
    if (!grown) return 0;
    if (d->unit) free(d->unit - LOOK_BACK_BYTES);
    d->unit = grown + LOOK_BACK_BYTES;
    d->unit_bytes = wanted;
    d->unit_block = NULL;
    d->unit_dictionary = NULL;
    return 1;
}

/* Grow the buffer for units that are read from a file. */
static int grow_read(decoder *d, int64_t wanted) {
    if (d->read_bytes >= wanted) return 1;
    d->read_block = NULL;
    return grow(&d->read, &d->read_bytes, wanted);
}

int decoder_fit(decoder *d, const coded_block *b) {
    const int64_t coded = coded_bytes(&b->form);
    const int64_t unit_bytes = b->group * coded + max_head_bytes(&b->form);
    const int64_t scratch_bytes = 2 * coded + b->form.slice_bytes;
    const int has_lz4_dictionary = b->method == METHOD_LZ4 && b->common;
    if (!grow(&d->scratch, &d->scratch_bytes, scratch_bytes)) return 0;
    if ((b->group > 1 || has_lz4_dictionary) && !grow_unit(d, unit_bytes)) return 0;
    if (!b->data) {
        const int64_t at_once = scratch_bytes < MAX_READ_BYTES ? scratch_bytes : MAX_READ_BYTES;
        if (!grow_read(d, unit_bytes > at_once ? unit_bytes : at_once)) return 0;
    }
    if (is_of_colours(&b->form) && !d->colours) {
        d->colours = malloc(PALETTE_BYTES + SPARE_BYTES);
        if (!d->colours) return 0;
    }
    if (b->method == METHOD_ZSTD && !d->dctx) {
        d->dctx = ZSTD_createDCtx();
        if (!d->dctx) return 0;
    }
    return 1;
}
