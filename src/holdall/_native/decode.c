/* Decoding of slices: LZ4 and Zstandard, then what transforms.c undoes; from memory or from a file.
 *
 * What is read from a block is treated as if a stranger had written it: offsets are checked
 * against the block, and a slice that does not decode to exactly its size is an error.
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

/* ---- one unit ---------------------------------------------------------------------- */

int is_cut_soundly(const sealed_block *b) {
    if (b->form.slice_bytes < 1 || b->form.slice_bytes > INT32_MAX) return 0;
    if (b->group < 1 || b->group > MOST_IN_A_UNIT || b->slice_count < 0 || b->slice_count > UINT32_MAX) return 0;
    if (b->common_bytes < 0 || b->common_bytes > INT32_MAX) return 0;
    if (b->data_bytes < 0 || b->file_start < 0 || b->file_start > INT64_MAX - b->data_bytes) return 0;
    return b->group * coded_bytes(&b->form) <= INT32_MAX;
}

/* The place of a slice among those of the units; -1 if the block does not have it. */
static inline int64_t place_of_slice(const sealed_block *b, int64_t number) {
    if (number < 0 || number >= b->slice_count) return -1;
    if (!b->places) return number;
    const int64_t place =
        b->place_bytes == 2 ? ((const uint16_t *)b->places)[number] : ((const uint32_t *)b->places)[number];
    return place < b->slice_count ? place : -1;
}

#ifdef _WIN32
int read_file(const sealed_block *b, int64_t start, int64_t bytes, uint8_t *to, int64_t *error) {
    (void)b, (void)start, (void)bytes, (void)to;
    *error = ENOSYS;
    return 0;
}
void expect_slices(const sealed_block *b, int64_t first, int64_t end) { (void)b, (void)first, (void)end; }
#else
int read_file(const sealed_block *b, int64_t start, int64_t bytes, uint8_t *to, int64_t *error) {
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
static void expect_units(const sealed_block *b, int64_t first, int64_t end) {
    const int64_t start = b->offsets[first], stop = b->offsets[end];
    if (start < stop && stop <= b->data_bytes)
        posix_fadvise((int)b->file, (off_t)(b->file_start + start), (off_t)(stop - start), POSIX_FADV_WILLNEED);
}
#endif

void expect_slices(const sealed_block *b, int64_t first, int64_t end) {
#ifdef POSIX_FADV_WILLNEED
    if (!is_cut_soundly(b) || first < 0 || end > b->slice_count || first >= end) return;
    for (int64_t number = first; number < end;) {
        /* Slices that are in order lie side by side; of others each is looked up. */
        const int64_t stop = b->places ? number + 1 : end, place = place_of_slice(b, number);
        if (place >= 0) expect_units(b, place / b->group, (place + stop - 1 - number) / b->group + 1);
        number = stop;
    }
#else
    (void)b, (void)first, (void)end;
#endif
}
#endif

/* Whether so many bytes are a unit that is stored as it was, with nothing in front of it. */
static int is_stored(const sealed_block *b, int64_t length, int64_t expected) {
    return length == expected && !is_of_colours(&b->form);
}

/* Read units [unit, stop) of a block in a file at once, as many as there is room for. */
static void read_units(decoder *d, const sealed_block *b, int64_t unit, int64_t stop) {
    if (d->read_of == b && unit >= d->read_first && stop <= d->read_end) return;
    d->read_of = NULL;
    for (int64_t u = unit; u < stop; u++) {
        if (is_inside(b, u) && (int64_t)b->offsets[u + 1] - b->offsets[unit] <= d->read_bytes) continue;
        stop = u;
    }
    /* A unit that did not shrink is read straight to where it belongs. */
    if (stop <= unit) return;
    if (is_stored(b, (int64_t)b->offsets[unit + 1] - b->offsets[unit], bytes_of_unit(b, unit))) return;
    if (!read_file(b, b->offsets[unit], (int64_t)b->offsets[stop] - b->offsets[unit], d->read, &d->error)) return;
    for (int64_t u = unit; u < stop; u++) {
        const int64_t length = (int64_t)b->offsets[u + 1] - b->offsets[u];
        if (checksum(d->read + (b->offsets[u] - b->offsets[unit]), length) != b->checks[u]) stop = u;
    }
    d->read_of = b, d->read_first = unit, d->read_end = stop;
}

/* Put the end of a dictionary in front of the memory for a unit, where LZ4 finds what it looks back to without asking in
 * which of two places that is. */
static void place_dictionary(decoder *d, const sealed_block *b) {
    const int64_t bytes = b->common_bytes < LOOK_BACK_BYTES ? b->common_bytes : LOOK_BACK_BYTES;
    if (d->unit_behind == b->common) return;
    memcpy(d->unit - bytes, b->common + (b->common_bytes - bytes), (size_t)bytes);
    d->unit_behind = b->common;
}

/* Decompress a unit to at most `most` bytes; returns how many came of it, -1 if it is damaged. */
static int64_t decompress(decoder *d, const sealed_block *b, const uint8_t *from, int64_t length, uint8_t *to,
                          int64_t most) {
    if (is_of_colours(&b->form)) {
        const int64_t head = read_unit_colours(d, b, from, length);
        if (head < 0) return -1;
        from += head, length -= head;
    }
    if (length == most || (b->method == METHOD_STORED && length < most)) { /* did not shrink, so it was stored */
        memcpy(to, from, (size_t)length);
        return length;
    }
    if (b->method == METHOD_LZ4) {
        const char *known = (const char *)b->common;
        int64_t bytes = b->common_bytes;
        if (to == d->unit && known) {
            place_dictionary(d, b);
            if (bytes > LOOK_BACK_BYTES) bytes = LOOK_BACK_BYTES;
            known = (const char *)to - bytes;
        }
        return LZ4_decompress_safe_usingDict((const char *)from, (char *)to, (int)length, (int)most, known, (int)bytes);
    }
    if (b->method != METHOD_ZSTD) return -1;
    const size_t came = ZSTD_decompress_usingDDict(d->dctx, to, (size_t)most, from, (size_t)length, b->ddict);
    return came <= (size_t)most ? (int64_t)came : -1; /* errors are numbers beyond */
}

/* Decompress unit `u` to at most `most` bytes at `to`; returns how many came of it, -1 if it is damaged. */
static int64_t decompress_unit(decoder *d, const sealed_block *b, int64_t u, uint8_t *to, int64_t most) {
    if (!is_inside(b, u)) return -1;
    const int64_t length = (int64_t)b->offsets[u + 1] - b->offsets[u];
    if (b->data) return decompress(d, b, b->data + b->offsets[u], length, to, most);
    if (is_stored(b, length, most))
        return read_file(b, b->offsets[u], length, to, &d->error) && checksum(to, length) == b->checks[u] ? length : -1;
    if (d->read_of != b || u < d->read_first || u >= d->read_end) {
        read_units(d, b, u, u + 1);
        if (d->read_of != b || u < d->read_first || u >= d->read_end) return -1;
    }
    return decompress(d, b, d->read + (b->offsets[u] - b->offsets[d->read_first]), length, to, most);
}

void read_slices(decoder *d, const sealed_block *b, int64_t first, int64_t end) {
    if (!is_cut_soundly(b) || first < 0 || end > b->slice_count || first >= end) return;
    const int64_t place = place_of_slice(b, first), last = b->places ? place : end - 1;
    if (place < 0) return;
    read_units(d, b, place / b->group, last / b->group + 1);
}

/* Whether a single slice is decompressed faster behind its dictionary, although it has to be copied from there: that takes
 * as long as looking in two places for a match in 200 bytes or so. */
static int wants_window(const decoder *d, const sealed_block *b, int64_t u) {
    if (b->method != METHOD_LZ4 || !b->common || !is_inside(b, u)) return 0;
    const int64_t coded = coded_bytes(&b->form), length = (int64_t)b->offsets[u + 1] - b->offsets[u];
    return coded <= d->unit_bytes && length < coded && length > coded / 32;
}

/* Whether a unit that came to fewer bytes than its slices have holds a slice and the changes of others: these leave room
 * for the slice that is made of them. */
static int holds_changes(const decoder *d, const sealed_block *b, int64_t bytes) {
    const int64_t coded = coded_bytes(&b->form);
    return b->form.predictor == CHANGES && d->unit_filled >= coded && d->unit_filled <= bytes - coded;
}

/* Make slice `number` of the unit that was decompressed last: from the last one that was made, or from the first. */
static const uint8_t *changed_slice(decoder *d, const sealed_block *b, int64_t number) {
    const int64_t coded = coded_bytes(&b->form);
    uint8_t *const slice = d->unit + (b->group - 1) * coded;
    if (d->changed < 0 || number < d->changed) {
        memcpy(slice, d->unit, (size_t)coded);
        d->changed = 0, d->next_change = d->unit + coded;
    }
    for (; d->changed < number; d->changed++) {
        d->next_change = apply_changes(d->next_change, d->unit + d->unit_filled, slice, coded);
        if (!d->next_change) {
            d->unit_of = NULL;
            return NULL;
        }
    }
    return slice;
}

/* Decompress the slice in a place of the units, to `to` or to where its unit stands; returns where, NULL if it is damaged. */
static const uint8_t *fetch_coded(decoder *d, const sealed_block *b, int64_t place, uint8_t *to) {
    const int64_t coded = coded_bytes(&b->form), u = place / b->group;
    if (b->group == 1) {
        const int has_window = wants_window(d, b, u);
        /* Its memory, or its palette, is used. */
        if (has_window || is_of_colours(&b->form)) d->unit_of = NULL;
        if (has_window) to = d->unit;
        return decompress_unit(d, b, u, to, coded) == coded ? to : NULL;
    }
    const int64_t bytes = bytes_of_unit(b, u);
    if (d->unit_of != b || d->unit_number != u) {
        d->unit_of = NULL;
        if (b->group * coded > d->unit_bytes) return NULL;
        d->unit_filled = decompress_unit(d, b, u, d->unit, bytes);
        if (d->unit_filled != bytes && !holds_changes(d, b, bytes)) return NULL;
        d->unit_of = b, d->unit_number = u, d->changed = -1;
    }
    if (d->unit_filled < bytes) return changed_slice(d, b, place - u * b->group);
    return d->unit + (place - u * b->group) * coded;
}

/* ---- one slice --------------------------------------------------------------------- */

int is_sound(const transform *form) {
    const int64_t word = form->word_bytes;
    if (form->slice_bytes <= 0 || form->slice_bytes > INT32_MAX || form->shuffle < 0) return 0;
    if (word != 0 && word != 2 && word != 4 && word != 8) return 0;
    if (word != 0 && form->slice_bytes % word != 0) return 0;
    if (form->predictor == PREDICT_NOTHING || form->predictor == CHANGES) return 1;
    if (form->predictor == PIXELS) {
        if (form->interleaved || form->green) return 0;
    } else if (is_of_colours(form)) {
        if (form->green || form->planes != 3 || word != 0) return 0;
    } else if (form->predictor != PREDICT_LEFT && form->predictor != PREDICT_UP) {
        return 0;
    }
    if (form->planes < 1 || form->rows < 1 || form->columns < 1 || (form->green && form->planes < 3)) return 0;
    /* Each is at most the whole, so that the product cannot overflow. */
    const int64_t coded = is_of_colours(form) ? form->slice_bytes : coded_bytes(form);
    if (form->planes > coded || form->rows > coded || form->columns > coded) return 0;
    return form->shuffle == 0 && form->planes * form->rows <= coded && form->planes * form->rows * form->columns == coded;
}

int decode_slice(decoder *d, const sealed_block *b, int64_t number, uint8_t *out) {
    const transform *const form = &b->form;
    if (!is_sound(form) || !is_cut_soundly(b)) return 0;
    const int64_t coded = coded_bytes(form);
    const int64_t place = place_of_slice(b, number);
    if (place < 0 || 2 * coded > d->scratch_bytes) return 0;
    const int last_is_words = form->word_bytes > 0;
    const int is_pixels = form->predictor == PIXELS, is_colours = is_of_colours(form);
    const int is_predicted = form->predictor == PREDICT_LEFT || form->predictor == PREDICT_UP;
    const int moves = form->shuffle > 0 || is_pixels || is_colours || (is_predicted && form->interleaved);
    uint8_t *const own = last_is_words || moves ? d->scratch : out;
    const uint8_t *stage = fetch_coded(d, b, place, own);
    if (!stage) return 0;
    if (stage != own && (is_predicted || own == out)) {
        memcpy(own, stage, (size_t)coded);
        stage = own;
    }
    if (is_predicted) undo_differences(form, own);
    if (moves) {
        uint8_t *const to = last_is_words ? d->scratch + coded : out;
        if (form->shuffle > 0) unshuffle(form->shuffle, coded, stage, to);
        else if (is_pixels) part_pixels(form, stage, to);
        else if (is_colours) look_up_colours(form, d->unit_palette, stage, d->scratch + coded, to);
        else interleave(form, stage, to);
        stage = to;
    }
    if (last_is_words) look_up_words(form, b->palette, stage, out);
    return 1;
}

/* ---- a whole block ----------------------------------------------------------------- */

/* Decode slices of a block, given by their numbers, one after another. Returns -1, or the position of the first one that
 * cannot be decoded. */
EXPORT int64_t holdall_decode(decoder *d, const sealed_block *b, const int64_t *numbers, int64_t count, uint8_t *out) {
    for (int64_t i = 0; i < count; i++)
        if (!decode_slice(d, b, numbers[i], out + i * b->form.slice_bytes)) return i;
    return -1;
}
