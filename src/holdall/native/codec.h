/* Compressed slices: how they were coded, and the calls that undo it. */
#ifndef HOLDALL_CODEC_H
#define HOLDALL_CODEC_H

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#define HAVE_X86 1
#endif

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

enum { METHOD_STORED = 0, METHOD_LZ4 = 1, METHOD_ZSTD = 2 };
enum { PREDICT_NOTHING = 0, PREDICT_LEFT = 1, PREDICT_UP = 2 };

/* What is done to a slice before it is compressed; mirrored by _Transform in native.py.
 * In this order: words -> palette indices, bytes -> planes of differences, bytes -> shuffled. */
typedef struct {
    int64_t slice_bytes;
    int64_t word_bytes;  /* size of the words that the palette numbers; 0: no palette */
    int64_t predictor;
    int64_t planes;      /* of the image that is predicted */
    int64_t rows;
    int64_t columns;
    int64_t interleaved; /* planes lie pixel by pixel */
    int64_t green;       /* planes 0 and 2 hold differences to plane 1 */
    int64_t shuffle;     /* size of the words whose bytes are sorted by place; 0: none */
} transform;

/* A sealed block; mirrored by _Sealed in native_codec.py. Its slices are compressed in units of
 * `group` neighbours, which lie one after another in memory or in a file. */
typedef struct {
    const uint8_t *data;     /* NULL: in a file */
    const uint32_t *offsets; /* unit i lies in [offsets[i], offsets[i + 1]) */
    const uint32_t *checks;  /* checksums of the units in a file */
    const uint8_t *palette;  /* 256 words */
    const void *ddict;       /* ZSTD_DDict *, or NULL */
    int64_t data_bytes;
    int64_t slice_count;
    int64_t group;
    int64_t method;
    int64_t file;       /* descriptor */
    int64_t file_start; /* where the first unit lies in it */
    transform form;
} sealed_block;

/* The libraries' functions, found by Python, and one thread's memory; mirrored by _Decoder. */
typedef struct {
    int (*lz4_decompress_safe)(const char *, char *, int, int);
    size_t (*zstd_decompress_using_ddict)(void *, void *, size_t, const void *, size_t, const void *);
    void *dctx;       /* ZSTD_DCtx * */
    uint8_t *scratch; /* two coded slices, and one decoded */
    int64_t scratch_bytes;
    uint8_t *unit; /* the last unit of several slices that was decompressed, if it is `unit_of` one */
    int64_t unit_bytes;
    const sealed_block *unit_of;
    int64_t unit_number;
    uint8_t *read; /* units [read_first, read_end) of the block `read_of`, as they stand in a file */
    int64_t read_bytes;
    const sealed_block *read_of;
    int64_t read_first;
    int64_t read_end;
    int64_t error; /* of the last read from a file that failed: errno, or 0 */
} decoder;

int64_t coded_bytes(const transform *form);
int decode_slice(decoder *d, const sealed_block *b, int64_t number, uint8_t *out);

/* Read the units of slices [first, end) of a block in a file in one go, as many as there is room for. */
void read_slices(decoder *d, const sealed_block *b, int64_t first, int64_t end);
/* Tell the system that they will be read soon. */
void expect_slices(const sealed_block *b, int64_t first, int64_t end);

#endif
