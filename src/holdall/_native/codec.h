/* Compressed slices: what they consist of, and the functions that write and read them. Nothing here uses Python. */
#ifndef HOLDALL_CODEC_H
#define HOLDALL_CODEC_H

#include "processor.h"

#include <stddef.h>
#include <stdint.h>

/* The transform of a slice before compression, in this order: words become numbers in a palette, the image is transformed by
 * `kind`, and the bytes of words are shuffled. */
typedef struct {
    int64_t slice_bytes;
    int64_t word_bytes;  /* size of the words that become numbers in a palette; 0: no palette */
    int64_t kind;        /* TRANSFORM_... */
    int64_t planes;      /* planes, rows and columns of the image */
    int64_t rows;
    int64_t columns;
    int64_t interleaved; /* the planes are stored pixel by pixel */
    int64_t green;       /* planes 0 and 2 are stored as differences to plane 1 */
    int64_t shuffle;     /* size of the words whose bytes are shuffled; 0: none */
} transform;

/* The kinds of transforms. `holdall.codec.codec.Transform` has the same numbers. */
enum {
    TRANSFORM_NONE = 0,
    TRANSFORM_LEFT = 1,           /* differences to the left neighbour */
    TRANSFORM_PIXELS = 3,         /* separate planes become interleaved pixels */
    TRANSFORM_COLOURS = 4,        /* pixels become numbers of their colours, row by row, see colours.c */
    TRANSFORM_COLOUR_COLUMNS = 5, /* the same, column by column */
    TRANSFORM_CHANGES = 6,        /* a unit becomes its first slice and the changes of the others */
};

/* The compressors. `holdall.codec.codec.Method` has the same numbers. */
enum { METHOD_STORED = 0, METHOD_LZ4 = 1, METHOD_ZSTD = 2 };

enum {
    MAX_UNIT_SLICES = 64,
    LOOK_BACK_BYTES = 1 << 16,     /* room before the buffer of a unit, where LZ4 finds the end of the dictionary */
    PALETTE_BYTES = 1024,          /* a palette of 256 colours, four bytes each, of which three are used */
    MAX_UNIT_COLOURS = 255,        /* colours of a unit that are not in the palette of its block */
    WORD_TABLE_BYTES = 2 * 1024,   /* the table of words while a block is encoded, see encode.c */
    COLOUR_TABLE_BYTES = 16 << 16, /* the table of colours while a block is encoded, see colours.c */
};

/* Compressed slices, in units of `group` neighbours. The units are stored one after another, in memory or in a file. */
typedef struct {
    const uint8_t *data;     /* NULL: in a file */
    const uint32_t *offsets; /* unit i is stored in [offsets[i], offsets[i + 1]) */
    const uint32_t *checks;  /* checksums of the units in a file */
    const uint8_t *palette;  /* 256 words or colours, or NULL */
    const void *places;      /* place of every slice in the units; NULL: in the order of their numbers */
    const void *ddict;       /* ZSTD_DDict *, or NULL */
    const uint8_t *common;   /* bytes of the dictionary, for LZ4, or NULL */
    int64_t common_bytes;
    int64_t place_bytes; /* of one place: 2 or 4 */
    int64_t data_bytes;
    int64_t slice_count;
    int64_t group;
    int64_t method;
    int64_t file;       /* descriptor */
    int64_t file_start; /* position of the first unit in the file */
    transform form;
} coded_block;

/* The memory of one thread that decodes. */
typedef struct {
    void *dctx;       /* ZSTD_DCtx * */
    uint8_t *scratch; /* two coded slices and a decoded one */
    int64_t scratch_bytes;

    /* The last unit of several slices that was decompressed: unit `unit_number` of `unit_block`. */
    uint8_t *unit; /* LOOK_BACK_BYTES of memory precede it */
    int64_t unit_bytes;
    const uint8_t *unit_dictionary; /* the dictionary whose end is stored in the bytes before `unit`, or NULL */
    const coded_block *unit_block;
    int64_t unit_number;
    int64_t unit_filled; /* bytes of the unit: fewer than its slices have if it consists of changes */
    int64_t changed_number;     /* number in the unit of the slice at the end of `unit`, made of changes; -1: none yet */
    const uint8_t *next_change; /* the changes of the slice after `changed_number` */

    /* Units [read_first, read_end) of `read_block`, as they are stored in the file. */
    uint8_t *read;
    int64_t read_bytes;
    const coded_block *read_block;
    int64_t read_first;
    int64_t read_end;

    const uint8_t *unit_palette; /* colours of the last unit that was decompressed: those of its block, or `colours` */
    uint8_t *colours;            /* colours of the block, and of the unit itself */
    int64_t error;               /* errno of the last read that failed, or 0 */
} decoder;

/* The memory of one thread that encodes. */
typedef struct {
    void *cctx;       /* ZSTD_CCtx * with its level and dictionary */
    void *stream;     /* LZ4_streamHC_t *, where LZ4 compresses with a dictionary */
    void *loaded;     /* the state of such a stream after it has read the dictionary */
    uint8_t *scratch; /* two coded slices, a unit of coded slices, its changes, and a compressed unit */
    int64_t scratch_bytes;
    const uint8_t *common; /* bytes of a dictionary, for LZ4, or NULL */
    int64_t common_bytes;
    int64_t group; /* slices of a unit */
    int64_t method;
    int64_t level; /* of LZ4: 0 is the fast compression, above 0 the high compression */
} encoder;

/* Whether pixels become numbers of their colours. */
static inline int is_of_colours(const transform *form) {
    return form->kind == TRANSFORM_COLOURS || form->kind == TRANSFORM_COLOUR_COLUMNS;
}

/* Bytes of a slice after its transform: one per word or pixel if these become numbers. */
static inline int64_t coded_bytes(const transform *form) {
    if (is_of_colours(form)) return form->slice_bytes / 3;
    return form->word_bytes > 0 ? form->slice_bytes / form->word_bytes : form->slice_bytes;
}

/* The most bytes that precede a compressed unit: the colours that its block's palette lacks. */
static inline int64_t max_head_bytes(const transform *form) { return is_of_colours(form) ? 1 + 4 * MAX_UNIT_COLOURS : 0; }

/* Whether unit `u` is inside the data of its block, and is not longer than uncompressed slices. */
static inline int is_inside(const coded_block *b, int64_t u) {
    const int64_t start = b->offsets[u], end = b->offsets[u + 1];
    return start <= end && end <= b->data_bytes && end - start <= b->group * coded_bytes(&b->form) + max_head_bytes(&b->form);
}

/* The place of a slice in the units of a block that has `places`. */
static inline int64_t place_of_slice(const coded_block *b, int64_t number) {
    return b->place_bytes == 2 ? ((const uint16_t *)b->places)[number] : ((const uint32_t *)b->places)[number];
}

/* The transformed bytes of unit `u`. The last unit may have fewer slices than the others. */
static inline int64_t count_unit_bytes(const coded_block *b, int64_t u) {
    const int64_t left = b->slice_count - u * b->group;
    return (left < b->group ? left : b->group) * coded_bytes(&b->form);
}

/* ---- transforms, see transforms.c -------------------------------------------------- */

/* Turn separate planes into interleaved pixels, and pixels into planes. */
void interleave(const transform *form, const uint8_t *planes, uint8_t *out);
void separate_planes(const transform *form, const uint8_t *in, uint8_t *planes);

/* Turn planes of differences into planes of values at `out`, which may be `planes`. */
void undo_differences(const transform *form, const uint8_t *planes, uint8_t *out);

/* Undo a shuffle of the bytes of words. */
void unshuffle(int64_t word_bytes, int64_t bytes, const uint8_t *in, uint8_t *out);
/* Turn numbers into the words of a palette. */
void look_up_words(const transform *form, const uint8_t *palette, const uint8_t *in, uint8_t *out);

/* Turn a slice into the next slice of its unit, by the changes at `p`. Return the end of these changes, NULL if they are
 * damaged: they must end before `end` and stay within the slice. */
const uint8_t *apply_changes(const uint8_t *p, const uint8_t *end, uint8_t *slice, int64_t bytes);

/* ---- images of few colours, see colours.c ------------------------------------------ */

typedef struct known_colour known_colour;

/* Collect the colours of all slices in a zeroed table, and number them. Colours of the given palette keep their numbers.
 * Other colours get free numbers, and the numbers of palette colours that no slice shows. Return 0 if there are too many. */
int collect_colours(const transform *form, const uint8_t *slices, int64_t count, uint8_t *palette, known_colour *table);

/* Number the colours of unit `unit`, and write those that the palette lacks to `head`. Return the bytes written, -1 if
 * there are too many colours. */
int64_t begin_unit(const transform *form, const uint8_t *const *slices, int64_t count, int64_t unit, known_colour *table,
                   uint8_t *head);

/* Turn the pixels of a slice of the unit that `begin_unit` began into numbers. Return the numbers, which are in `a` or `b`. */
const uint8_t *number_colours(const transform *form, const uint8_t *slice, known_colour *table, uint8_t *a, uint8_t *b);

/* Read the colours that precede a unit, and set the palette of the decoder. Return the bytes read, -1 if they are damaged. */
int64_t read_unit_colours(decoder *d, const coded_block *b, const uint8_t *from, int64_t length);

/* Turn numbers into pixels. `scratch` is room for as many numbers. */
void look_up_colours(const transform *form, const uint8_t *palette, const uint8_t *in, uint8_t *scratch, uint8_t *out);

/* ---- whole blocks ------------------------------------------------------------------ */

/* Encode `count` slices into `data`, which has `room` bytes, and write the ends of their units to `offsets`.
 *
 * `order` is the slice number by place, a permutation that the caller checked, or NULL. `palette` is filled. `table` is
 * zeroed memory of WORD_TABLE_BYTES or COLOUR_TABLE_BYTES. Return the bytes written; -1 if there are too many words or
 * colours; -2 if the units do not fit into `room`, the scratch memory or the offsets. */
int64_t encode_units(const encoder *e, const transform *form, const uint8_t *slices, const uint32_t *order,
                     int64_t count, uint8_t *data, int64_t room, uint32_t *offsets, uint8_t *palette, void *table);

/* Whether the fields of a transform fit together. They may come from a file. */
int is_sound_transform(const transform *form);

/* Whether the numbers of a block fit together, so that no sum or product of them overflows. They may come from a file.
 * The transform was checked before. */
int is_sound_block(const coded_block *b);

/* Decode a slice to `out`. Return 0 if the block does not have the slice, or if its bytes are damaged. */
int decode_slice(decoder *d, const coded_block *b, int64_t number, uint8_t *out);

/* ---- files ------------------------------------------------------------------------- */

/* The low half of XXH64 with seed 0. */
uint32_t checksum(const uint8_t *p, int64_t bytes);

/* Read `bytes` bytes of the data of a block in a file, from byte `start` of the data on. Return 0 if the file does not
 * have them; `*error` is then errno, or 0 at the end of the file. */
int read_file(const coded_block *b, int64_t start, int64_t bytes, uint8_t *to, int64_t *error);

/* Read the units of slices [first, end) of a block in a file with one call, as many as the decoder has room for. If that
 * fails, `decode_slice` reads the unit again and reports the failure. */
void read_slices(decoder *d, const coded_block *b, int64_t first, int64_t end);

/* Tell the system that slices [first, end) of a block in a file will be read soon. */
void announce_slices(const coded_block *b, int64_t first, int64_t end);

#endif
