/* Compressed slices: the calls that read them, for the files that gather and name slices. */
#ifndef HOLDALL_CODEC_H
#define HOLDALL_CODEC_H

#include "holdall.h"
#include "structs.h"

enum { MOST_IN_A_UNIT = 64 };
/* Room before the buffer for a unit, where LZ4 finds the end of a dictionary. As in reading.py. */
enum { LOOK_BACK_BYTES = 1 << 16 };
/* Bytes of the tables that find words and colours while a block is encoded, see encode.c and colours.c. */
enum { WORD_TABLE_BYTES = 2 * 1024, COLOUR_TABLE_BYTES = 16 << 16 };
enum { METHOD_STORED = 0, METHOD_LZ4 = 1, METHOD_ZSTD = 2 };
/* By PIXELS nothing is predicted: planes are coded pixel by pixel. By COLOURS a pixel becomes a number, row by
 * row, and by COLUMNS column by column, see colours.c. By CHANGES a unit is its first slice, and how each of the others
 * differs from the one before. */
enum { PREDICT_NOTHING = 0, PREDICT_LEFT = 1, PREDICT_UP = 2, PIXELS = 3, COLOURS = 4, COLUMNS = 5, CHANGES = 6 };
/* A palette of colours has 256 of four bytes, the last of which says nothing; a unit brings at most so many more. */
enum { PALETTE_BYTES = 1024, MOST_NEW_COLOURS = 255 };

/* Whether pixels become numbers of their colours. */
static inline int is_of_colours(const transform *form) {
    return form->predictor == COLOURS || form->predictor == COLUMNS;
}

/* Bytes of a slice before it is compressed: a palette makes one byte of each word, or of each pixel. */
static inline int64_t coded_bytes(const transform *form) {
    if (is_of_colours(form)) return form->slice_bytes / 3;
    return form->word_bytes > 0 ? form->slice_bytes / form->word_bytes : form->slice_bytes;
}

/* The most bytes that stand in front of a unit. */
static inline int64_t head_bytes(const transform *form) { return is_of_colours(form) ? 1 + 4 * MOST_NEW_COLOURS : 0; }

/* Whether unit `u` lies inside its block, and is no longer than if it had been stored as it was. */
static inline int is_inside(const sealed_block *b, int64_t u) {
    const int64_t start = b->offsets[u], end = b->offsets[u + 1];
    return start <= end && end <= b->data_bytes && end - start <= b->group * coded_bytes(&b->form) + head_bytes(&b->form);
}

/* The bytes that unit `u` is decompressed to: the last unit may have fewer slices. */
static inline int64_t bytes_of_unit(const sealed_block *b, int64_t u) {
    const int64_t left = b->slice_count - u * b->group;
    return (left < b->group ? left : b->group) * coded_bytes(&b->form);
}

/* Make pixels of planes, and planes of pixels. */
void interleave(const transform *form, const uint8_t *planes, uint8_t *out);
void part_pixels(const transform *form, const uint8_t *in, uint8_t *planes);

/* Turn planes of differences back into planes of values, in place. */
void undo_differences(const transform *form, uint8_t *planes);

/* Put the bytes of words together again, and look up words in a palette. */
void unshuffle(int64_t word, int64_t bytes, const uint8_t *in, uint8_t *out);
void look_up_words(const transform *form, const uint8_t *palette, const uint8_t *in, uint8_t *out);

/* Make the next slice of the one before, by the changes at `p`; returns where those of the slice behind it begin, NULL if
 * they do not end before `end` or leave the slice. */
const uint8_t *apply_changes(const uint8_t *p, const uint8_t *end, uint8_t *slice, int64_t bytes);

/* Images of few colours, see colours.c. */
typedef struct known_colour known_colour;

/* Collect the colours of all slices in a table, zeroed, and number them: those of the palette that is passed in as they
 * stand there, others where it is free or has colours that are not shown. 0 if there are too many. */
int collect_colours(const transform *form, const uint8_t *slices, int64_t count, uint8_t *palette, known_colour *table);

/* Number the colours of a unit, and write what stands in front of it to `head`; returns the bytes of that, -1 if there are
 * too many colours. Units are numbered from 0 on. */
int64_t begin_unit(const transform *form, const uint8_t *const *slices, int64_t count, int64_t unit, known_colour *table,
                   uint8_t *head);

/* Turn the pixels of a slice of that unit into numbers, in `a` or `b`; returns where. */
const uint8_t *number_colours(const transform *form, const uint8_t *slice, known_colour *table, uint8_t *a, uint8_t *b);

/* Read what stands in front of a unit, and keep the palette that it has; returns the bytes of that, -1 if it is damaged. */
int64_t read_unit_colours(decoder *d, const sealed_block *b, const uint8_t *from, int64_t length);

/* Turn numbers into pixels again; `scratch` is room for as many numbers. */
void look_up_colours(const transform *form, const uint8_t *palette, const uint8_t *in, uint8_t *scratch, uint8_t *out);

/* See encode.c. */
EXPORT int64_t holdall_encode(const encoder *e, const transform *form, const uint8_t *slices, const uint32_t *order,
                              int64_t count, int64_t first, int64_t end, uint8_t *data, int64_t room,
                              uint32_t *offsets, uint8_t *palette, uint16_t *slots);

/* The low half of XXH64 with seed 0. */
uint32_t checksum(const uint8_t *p, int64_t bytes);

/* Whether the fields of a transform agree with each other. They may come from a file. */
int is_sound(const transform *form);

/* Whether the numbers of a block agree with each other, so that no sum or product of them overflows. They may come from a
 * file. The transform was checked before. */
int is_cut_soundly(const sealed_block *b);

/* Decode a slice to `out`; 0 if the block does not hold it or its bytes are damaged. */
int decode_slice(decoder *d, const sealed_block *b, int64_t number, uint8_t *out);

/* Read `bytes` bytes of the units of a block in a file, from byte `start` of them on. Return 0 if the file does not have
 * them; `*error` is then errno, or 0 at the end of the file. */
int read_file(const sealed_block *b, int64_t start, int64_t bytes, uint8_t *to, int64_t *error);

/* Read the units of slices [first, end) of a block in a file at once, as many as there is room for. */
void read_slices(decoder *d, const sealed_block *b, int64_t first, int64_t end);

/* Advise the system that they will be read soon. */
void expect_slices(const sealed_block *b, int64_t first, int64_t end);

#endif
