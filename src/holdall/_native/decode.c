/* Decoding of slices, from memory or from a file: LZ4 or Zstandard first, then the transforms are undone.
 *
 * Blocks may come from damaged or malicious files. Offsets are checked against the data, and a slice that does not decode
 * to exactly its size is an error.
 */
#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64

#include "codec.h"

#include <errno.h>
#include <lz4.h>
#include <string.h>
#include <zstd.h>
#ifndef _WIN32
#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>
#endif

/* ---- checks ------------------------------------------------------------------------ */

/* Return whether the numbers of a transform fit together. Numbers that a transform does not use may have any value. */
int is_sound_transform(const transform *form) {
    const int64_t word = form->word_bytes;
    if (form->slice_bytes <= 0 || form->slice_bytes > INT32_MAX || form->shuffle < 0) return 0;
    if (word != 0 && word != 2 && word != 4 && word != 8) return 0;
    if (word != 0 && form->slice_bytes % word != 0) return 0;
    if (form->kind == TRANSFORM_NONE || form->kind == TRANSFORM_CHANGES) return 1;
    if (form->kind == TRANSFORM_PIXELS) {
        if (form->interleaved || form->green) return 0;
    } else if (is_of_colours(form)) {
        if (form->green || form->planes != 3 || word != 0) return 0;
    } else if (form->kind != TRANSFORM_LEFT) {
        return 0;
    }
    if (form->planes < 1 || form->rows < 1 || form->columns < 1 || (form->green && form->planes < 3)) return 0;
    /* Each factor is at most the whole, so the product cannot overflow. */
    const int64_t coded = is_of_colours(form) ? form->slice_bytes : coded_bytes(form);
    if (form->planes > coded || form->rows > coded || form->columns > coded) return 0;
    return form->shuffle == 0 && form->planes * form->rows <= coded && form->planes * form->rows * form->columns == coded;
}

int is_sound_block(const coded_block *b) {
    if (b->form.slice_bytes < 1 || b->form.slice_bytes > INT32_MAX) return 0;
    if (b->group < 1 || b->group > MAX_UNIT_SLICES || b->slice_count < 0 || b->slice_count > UINT32_MAX) return 0;
    if (b->common_bytes < 0 || b->common_bytes > INT32_MAX) return 0;
    if (b->data_bytes < 0 || b->file_start < 0 || b->file_start > INT64_MAX - b->data_bytes) return 0;
    return b->group * coded_bytes(&b->form) <= INT32_MAX;
}

/* Return the place of a slice in the units, -1 if the block does not have the slice. */
static inline int64_t find_place(const coded_block *b, int64_t number) {
    if (number < 0 || number >= b->slice_count) return -1;
    if (!b->places) return number;
    const int64_t place = place_of_slice(b, number);
    return place < b->slice_count ? place : -1;
}

#ifdef _WIN32
int read_file(const coded_block *b, int64_t start, int64_t bytes, uint8_t *to, int64_t *error) {
    (void)b, (void)start, (void)bytes, (void)to;
    *error = ENOSYS;
    return 0;
}
void announce_slices(const coded_block *b, int64_t first, int64_t end) { (void)b, (void)first, (void)end; }
#else
int read_file(const coded_block *b, int64_t start, int64_t bytes, uint8_t *to, int64_t *error) {
    *error = 0;
    for (int64_t done = 0; done < bytes;) {
        const ssize_t got =
            pread((int)b->file, to + done, (size_t)(bytes - done), (off_t)(b->file_start + start + done));
        if (got <= 0) {
            if (got < 0 && errno == EINTR) continue;
            *error = got < 0 ? errno : 0;
            return 0;
        }
        done += got;
    }
    return 1;
}

#ifdef POSIX_FADV_WILLNEED
static void announce_units(const coded_block *b, int64_t first, int64_t end) {
    const int64_t start = b->offsets[first], stop = b->offsets[end];
    if (start < stop && stop <= b->data_bytes)
        posix_fadvise((int)b->file, (off_t)(b->file_start + start), (off_t)(stop - start), POSIX_FADV_WILLNEED);
}
#endif

void announce_slices(const coded_block *b, int64_t first, int64_t end) {
#ifdef POSIX_FADV_WILLNEED
    if (!is_sound_block(b) || first < 0 || end > b->slice_count || first >= end) return;
    for (int64_t number = first; number < end;) {
        /* Without `places`, consecutive slices have consecutive places. */
        const int64_t stop = b->places ? number + 1 : end, place = find_place(b, number);
        if (place >= 0) announce_units(b, place / b->group, (place + stop - 1 - number) / b->group + 1);
        number = stop;
    }
#else
    (void)b, (void)first, (void)end;
#endif
}
#endif

/* Whether a unit of `length` bytes is stored uncompressed and without colours before it. */
static int is_stored(const coded_block *b, int64_t length, int64_t expected) {
    return length == expected && !is_of_colours(&b->form);
}

/* Read units [unit, stop) of a block in a file with one call, as many as there is room for. Units with a wrong checksum
 * and those after them are left out. */
static void read_units(decoder *d, const coded_block *b, int64_t unit, int64_t stop) {
    if (d->read_block == b && unit >= d->read_first && stop <= d->read_end) return;
    d->read_block = NULL;
    for (int64_t u = unit; u < stop; u++) {
        if (is_inside(b, u) && (int64_t)b->offsets[u + 1] - b->offsets[unit] <= d->read_bytes) continue;
        stop = u;
    }
    /* An uncompressed unit is read to its destination directly, by the caller. */
    if (stop <= unit) return;
    if (is_stored(b, (int64_t)b->offsets[unit + 1] - b->offsets[unit], count_unit_bytes(b, unit))) return;
    if (!read_file(b, b->offsets[unit], (int64_t)b->offsets[stop] - b->offsets[unit], d->read, &d->error)) return;
    for (int64_t u = unit; u < stop; u++) {
        const int64_t length = (int64_t)b->offsets[u + 1] - b->offsets[u];
        if (checksum(d->read + (b->offsets[u] - b->offsets[unit]), length) != b->checks[u]) stop = u;
    }
    d->read_block = b;
    d->read_first = unit;
    d->read_end = stop;
}

/* Copy the end of the dictionary to the bytes before the buffer of a unit. LZ4 then finds all that it refers to in one
 * contiguous piece of memory, which is faster than a choice between two pieces. */
static void place_dictionary(decoder *d, const coded_block *b) {
    const int64_t bytes = b->common_bytes < LOOK_BACK_BYTES ? b->common_bytes : LOOK_BACK_BYTES;
    if (d->unit_dictionary == b->common) return;
    memcpy(d->unit - bytes, b->common + (b->common_bytes - bytes), (size_t)bytes);
    d->unit_dictionary = b->common;
}

/* Decompress a unit to at most `most` bytes. Return the number of bytes, -1 if the unit is damaged. */
static int64_t decompress(decoder *d, const coded_block *b, const uint8_t *from, int64_t length, uint8_t *to,
                          int64_t most) {
    if (is_of_colours(&b->form)) {
        const int64_t head = read_unit_colours(d, b, from, length);
        if (head < 0) return -1;
        from += head;
        length -= head;
    }
    if (length == most || (b->method == METHOD_STORED && length < most)) { /* stored uncompressed */
        memcpy(to, from, (size_t)length);
        return length;
    }
    if (b->method == METHOD_LZ4) {
        const char *dictionary = (const char *)b->common;
        int64_t bytes = b->common_bytes;
        if (to == d->unit && dictionary) {
            place_dictionary(d, b);
            if (bytes > LOOK_BACK_BYTES) bytes = LOOK_BACK_BYTES;
            dictionary = (const char *)to - bytes;
        }
        return LZ4_decompress_safe_usingDict((const char *)from, (char *)to, (int)length, (int)most, dictionary, (int)bytes);
    }
    if (b->method != METHOD_ZSTD) return -1;
    const size_t bytes = ZSTD_decompress_usingDDict(d->dctx, to, (size_t)most, from, (size_t)length, b->ddict);
    return bytes <= (size_t)most ? (int64_t)bytes : -1; /* Errors are larger numbers. */
}

/* Decompress unit `u` to at most `most` bytes at `to`. Return the number of bytes, -1 if the unit is damaged. */
static int64_t decompress_unit(decoder *d, const coded_block *b, int64_t u, uint8_t *to, int64_t most) {
    if (!is_inside(b, u)) return -1;
    const int64_t length = (int64_t)b->offsets[u + 1] - b->offsets[u];
    if (b->data) return decompress(d, b, b->data + b->offsets[u], length, to, most);
    if (is_stored(b, length, most))
        return read_file(b, b->offsets[u], length, to, &d->error) && checksum(to, length) == b->checks[u] ? length : -1;
    if (d->read_block != b || u < d->read_first || u >= d->read_end) {
        read_units(d, b, u, u + 1);
        if (d->read_block != b || u < d->read_first || u >= d->read_end) return -1;
    }
    return decompress(d, b, d->read + (b->offsets[u] - b->offsets[d->read_first]), length, to, most);
}

void read_slices(decoder *d, const coded_block *b, int64_t first, int64_t end) {
    if (!is_sound_block(b) || first < 0 || end > b->slice_count || first >= end) return;
    const int64_t place = find_place(b, first), last = b->places ? place : end - 1;
    if (place < 0) return;
    read_units(d, b, place / b->group, last / b->group + 1);
}

/* Whether to decompress a single slice right after its dictionary, in the buffer of a unit, and then to copy it. LZ4 then need
 * not choose between two pieces of memory. About one choice per 200 bytes takes as long as the copy. */
static int uses_unit_buffer(const decoder *d, const coded_block *b, int64_t u) {
    if (b->method != METHOD_LZ4 || !b->common || !is_inside(b, u)) return 0;
    const int64_t coded = coded_bytes(&b->form), length = (int64_t)b->offsets[u + 1] - b->offsets[u];
    return coded <= d->unit_bytes && length < coded && length > coded / 32;
}

/* Whether the last unit, which was decompressed to fewer than `bytes` bytes, may consist of a slice and changes. They must
 * leave room for one slice at the end of the buffer, where `make_changed_slice` writes. */
static int has_changes(const decoder *d, const coded_block *b, int64_t bytes) {
    const int64_t coded = coded_bytes(&b->form);
    return b->form.kind == TRANSFORM_CHANGES && d->unit_filled >= coded && d->unit_filled <= bytes - coded;
}

/* Make slice `number` of the unit that was decompressed last, from the slice that was made last or from the first one.
 * Return NULL if its changes are damaged. */
static const uint8_t *make_changed_slice(decoder *d, const coded_block *b, int64_t number) {
    const int64_t coded = coded_bytes(&b->form);
    uint8_t *const slice = d->unit + (b->group - 1) * coded;
    if (d->changed_number < 0 || number < d->changed_number) {
        memcpy(slice, d->unit, (size_t)coded);
        d->changed_number = 0;
        d->next_change = d->unit + coded;
    }
    for (; d->changed_number < number; d->changed_number++) {
        d->next_change = apply_changes(d->next_change, d->unit + d->unit_filled, slice, coded);
        if (!d->next_change) {
            d->unit_block = NULL;
            return NULL;
        }
    }
    return slice;
}

/* Decompress the slice in `place`. Return its transformed bytes, in `to` or in the buffer of its unit. NULL if it is
 * damaged. */
static const uint8_t *unpack_slice(decoder *d, const coded_block *b, int64_t place, uint8_t *to) {
    const int64_t coded = coded_bytes(&b->form), u = place / b->group;
    if (b->group == 1) {
        const int is_buffered = uses_unit_buffer(d, b, u);
        /* The buffer of the last unit, or its palette, is overwritten. */
        if (is_buffered || is_of_colours(&b->form)) d->unit_block = NULL;
        if (is_buffered) to = d->unit;
        return decompress_unit(d, b, u, to, coded) == coded ? to : NULL;
    }
    const int64_t bytes = count_unit_bytes(b, u);
    if (d->unit_block != b || d->unit_number != u) {
        d->unit_block = NULL;
        if (b->group * coded > d->unit_bytes) return NULL;
        d->unit_filled = decompress_unit(d, b, u, d->unit, bytes);
        if (d->unit_filled != bytes && !has_changes(d, b, bytes)) return NULL;
        d->unit_block = b;
        d->unit_number = u;
        d->changed_number = -1;
    }
    if (d->unit_filled < bytes) return make_changed_slice(d, b, place - u * b->group);
    return d->unit + (place - u * b->group) * coded;
}

/* ---- one slice --------------------------------------------------------------------- */

/* Undo the transform of one slice. `stage` has the decompressed bytes. Differences are undone in `own`, which may be
 * `stage`. */
static void undo_transform(decoder *d, const coded_block *b, const uint8_t *stage, uint8_t *own, uint8_t *out) {
    const transform *const form = &b->form;
    const int64_t coded = coded_bytes(form);
    uint8_t *const to = form->word_bytes > 0 ? d->scratch + coded : out;
    if (form->kind == TRANSFORM_LEFT) {
        undo_differences(form, stage, own);
        stage = own;
    }
    if (form->shuffle > 0) unshuffle(form->shuffle, coded, stage, to);
    else if (form->kind == TRANSFORM_PIXELS) separate_planes(form, stage, to);
    else if (is_of_colours(form)) look_up_colours(form, d->unit_palette, stage, d->scratch + coded, to);
    else if (form->kind == TRANSFORM_LEFT && form->interleaved) interleave(form, stage, to);
    else {
        if (form->word_bytes > 0) look_up_words(form, b->palette, stage, out);
        return;
    }
    if (form->word_bytes > 0) look_up_words(form, b->palette, to, out);
}

int decode_slice(decoder *d, const coded_block *b, int64_t number, uint8_t *out) {
    const transform *const form = &b->form;
    if (!is_sound_transform(form) || !is_sound_block(b)) return 0;
    const int64_t coded = coded_bytes(form), place = find_place(b, number);
    if (place < 0 || 2 * coded > d->scratch_bytes) return 0;
    const int is_left = form->kind == TRANSFORM_LEFT;
    /* Whether undoing the transform moves bytes, so that it cannot work in place. */
    const int moves_bytes = form->word_bytes > 0 || form->shuffle > 0 || form->kind == TRANSFORM_PIXELS ||
                            is_of_colours(form) || (is_left && form->interleaved);
    /* Transforms that move bytes write to `out`, so the slice is decompressed to other memory. */
    uint8_t *const own = moves_bytes ? d->scratch : out;
    const uint8_t *const stage = unpack_slice(d, b, place, own);
    if (!stage) return 0;
    if (stage != own && !is_left && !moves_bytes) memcpy(out, stage, (size_t)coded);
    else undo_transform(d, b, stage, own, out);
    return 1;
}
