/* Compressed slices as Python objects, and the memory of a thread that decodes them. */
#ifndef HOLDALL_CODED_H
#define HOLDALL_CODED_H

#include "engine.h"

/* ---- decoding, see decoder.c ----------------------------------------------------------
 *
 * None of these functions calls Python. All of them may be called without the GIL. One thread at a time uses a decoder:
 *
 *   decoder *d = decoder_new();
 *   decoder_begin_batch(d);
 *   if (decoder_fit(d, &coded->block)) ok = decode_slice(d, &coded->block, number, out);
 *   decoder_free(d);
 */

/* Return a decoder whose buffers are empty, or NULL if there is no memory. */
decoder *decoder_new(void);
/* Free a decoder and its buffers. NULL is allowed. */
void decoder_free(decoder *d);
/* Grow the buffers as far as decoding `b` needs. Return 0 if there is no memory; the decoder then stays usable for the
 * blocks that it was fitted to before. */
int decoder_fit(decoder *d, const coded_block *b);
/* Forget which units are in the buffers. Required before the first slice of a batch, because blocks of earlier batches
 * may have been freed and their addresses reused. */
void decoder_begin_batch(decoder *d);

/* ---- dictionaries, see coded.c -------------------------------------------------------- */

/* Bytes that the slices of a field have in common. Immutable, shared by many Coded objects. */
typedef struct {
    PyObject_HEAD
    PyObject *content; /* bytes */
    PyObject *palette; /* bytes: empty, or the PALETTE_BYTES of the colours that `content` numbers */
    void *ddict;       /* ZSTD_DDict *, which refers to `content` */
} Dictionary;

extern PyTypeObject *dictionary_type;

#endif
