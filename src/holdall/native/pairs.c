/* Differences of camera images, two by two: tANS, with tables that know what stands above a pair and in the first plane.
 *
 * Each difference is 0, 1, -1 or marked, so that a pair is one of 16 symbols. Its table goes by the four differences above
 * it and by the pair at the same place of the first plane; none goes by what stands to its left, so that nothing waits for
 * the pair before. Blocks of 16 pairs that are all zero are left out. What is marked follows behind the pairs of its
 * plane: its size and sign, by a table that goes by the difference at the same place of the first plane, and more bits.
 *
 * A unit: the four states, of 9 bits, that decoding begins with; then for each plane: whether the first plane was
 * subtracted from it (a bit; not for the first plane), which blocks are there (four of them are a symbol), pairs, values.
 * Symbols take turns with the states. Bits are read from the lowest of the first byte on; the last states are all 0.
 *
 * Tables are trained, see pairs.py, which also does all of this with NumPy. */
#include "codec.h"

#include <string.h>

enum { STATE_BITS = 9, STATES = 1 << STATE_BITS, SPREAD = STATES / 2 + STATES / 8 + 3, CHAINS = 4 };
enum { PAIR_SYMBOLS = 16, VALUE_SYMBOLS = 32, ANY_VALUE = 31, MARKED = 3, BLOCK = 16 };
/* Planes of an image: the first, the second, all others. Behind what may stand around a pair, a case for blocks. */
enum { KINDS = 3, ABOVE = 1 << 12, BLOCK_CASES = KINDS * ABOVE, PAIR_CASES = BLOCK_CASES + KINDS };
enum { VALUE_CASES = KINDS * VALUE_SYMBOLS, MOST_TABLES = 127 };
enum { FEWEST_PIXELS = 64, MOST_PIXELS = 1 << 16 }; /* of a plane; as in codec.py */
enum { UNKNOWN = 255 }; /* what marked differences are while their plane has no values yet */
enum { PADDING = 64 }; /* bytes behind a unit that may be read before its end is noticed */

typedef struct {
    uint16_t of_pairs[PAIR_CASES];   /* the table of each case: where it begins in `entry` */
    uint16_t of_values[KINDS * 256]; /* the same, by the difference in the first plane */
    uint16_t places[256][8];         /* of the bits that are set in a byte, doubled; and ... */
    uint8_t bits_set[256];           /* ... how many there are */
    uint16_t share[MOST_TABLES][VALUE_SYMBOLS], first[MOST_TABLES][VALUE_SYMBOLS];
    uint16_t state_of[MOST_TABLES][STATES]; /* by symbol: the states that stand for it */
    /* Of a pair: 8 bits for how many are read, 8 for the symbol, 16 for the state that they are added to. Of a value: 8 for
     * how many more there are, 8 for what these are added to, 9 for the state, 7 for how many bits are added to that. */
    uint32_t entry[MOST_TABLES * STATES];
} pair_tables;

/* ---- tables ------------------------------------------------------------------------ */

/* Sizes that share a symbol with their sign: from SMALLEST[i] on, with EXTRA_BITS[i] bits for which of them it is. */
static const int16_t SMALLEST[17] = {0, 1, 2, 3, 4, 5, 6, 8, 10, 14, 18, 26, 34, 50, 66, 98, 130};
static const uint8_t EXTRA_BITS[16] = {0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5};

static int symbol_of(uint8_t value) {
    const int size = (int8_t)value < 0 ? -(int8_t)value : (int8_t)value;
    int i = 0;
    while (size >= SMALLEST[i + 1]) i++;
    return 2 * i + ((int8_t)value < 0);
}

/* The smallest value of a symbol: what its extra bits are added to. */
static int least_of(int symbol) { return symbol & 1 ? 1 - SMALLEST[(symbol >> 1) + 1] : SMALLEST[symbol >> 1]; }

static uint32_t entry_of(int is_value, int symbol, uint32_t bits, uint32_t state) {
    if (!is_value) return bits | (uint32_t)symbol << 8 | state << 16;
    if (symbol == ANY_VALUE) return 8 | state << 16 | bits << 25;
    return EXTRA_BITS[symbol >> 1] | (uint32_t)(uint8_t)least_of(symbol) << 8 | state << 16 | bits << 25;
}

/* Make one table of the shares of its symbols; 0 if they are no shares. */
static int make_table(pair_tables *t, int number, int is_value, const uint8_t *from) {
    const int symbols = is_value ? VALUE_SYMBOLS : PAIR_SYMBOLS;
    uint8_t symbol_at[STATES];
    uint32_t next[VALUE_SYMBOLS], place = 0, sum = 0;
    for (int s = 0; s < symbols; s++) {
        const uint32_t share = from[2 * s] | (uint32_t)from[2 * s + 1] << 8;
        if (share > STATES - sum || (share == 0 && (!is_value || s == ANY_VALUE))) return 0;
        t->share[number][s] = (uint16_t)share;
        t->first[number][s] = (uint16_t)sum;
        next[s] = share;
        sum += share;
        for (uint32_t i = 0; i < share; i++, place = (place + SPREAD) % STATES) symbol_at[place] = (uint8_t)s;
    }
    if (sum != STATES) return 0;
    for (uint32_t state = 0; state < STATES; state++) {
        const int s = symbol_at[state];
        const uint32_t x = next[s]++;
        uint32_t bits = 0;
        while (x << bits < STATES) bits++;
        t->state_of[number][t->first[number][s] + x - t->share[number][s]] = (uint16_t)state;
        t->entry[number * STATES + (int)state] = entry_of(is_value, s, bits, (x << bits) - STATES);
    }
    return 1;
}

static void fill_places(pair_tables *t) {
    memset(t->places, 0, sizeof t->places);
    for (int byte = 0; byte < 256; byte++) {
        int set = 0;
        for (int b = 0; b < 8; b++)
            if (byte >> b & 1) t->places[byte][set++] = (uint16_t)(2 * b);
        t->bits_set[byte] = (uint8_t)set;
    }
}

/* Make tables of what was trained, in `room` bytes. Returns the bytes that they take; 0 if they are damaged. */
EXPORT int64_t holdall_pair_tables(const uint8_t *trained, int64_t bytes, void *out, int64_t room) {
    pair_tables *const t = out;
    if (room < (int64_t)sizeof *t) return (int64_t)sizeof *t;
    if (bytes < 2) return 0;
    const int pairs = trained[0], values = trained[1];
    const uint8_t *const of_pairs = trained + 2, *const of_values = of_pairs + PAIR_CASES, *at = of_values + VALUE_CASES;
    if (pairs + values > MOST_TABLES) return 0;
    if (bytes != 2 + PAIR_CASES + VALUE_CASES + 2 * (PAIR_SYMBOLS * pairs + VALUE_SYMBOLS * values)) return 0;
    for (int i = 0; i < PAIR_CASES; i++) {
        if (of_pairs[i] >= pairs) return 0;
        t->of_pairs[i] = (uint16_t)(of_pairs[i] * STATES);
    }
    for (int i = 0; i < KINDS * 256; i++) {
        const int number = of_values[i / 256 * VALUE_SYMBOLS + symbol_of((uint8_t)i)];
        if (number >= values) return 0;
        t->of_values[i] = (uint16_t)((pairs + number) * STATES);
    }
    for (int n = 0; n < pairs + values; n++) {
        if (!make_table(t, n, n >= pairs, at)) return 0;
        at += 2 * (n < pairs ? PAIR_SYMBOLS : VALUE_SYMBOLS);
    }
    fill_places(t);
    return (int64_t)sizeof *t;
}

/* ---- what both ways share ---------------------------------------------------------- */

typedef struct {
    int64_t plane;  /* pixels */
    int64_t blocks; /* of 16 pairs, the last of which may lie behind the plane */
    int64_t above;  /* pairs from one to the one above it; rows of narrow images are skipped, so that it is no block's */
    int64_t before; /* room in front of a plane's symbols: nothing stands above the first row */
} pair_form;

static pair_form form_of_pairs(const transform *form) {
    const int64_t plane = form->rows * form->columns, half = form->columns > 1 ? form->columns / 2 : 1;
    const int64_t above = (BLOCK + half) / half * half;
    return (pair_form){plane, (plane + 2 * BLOCK - 1) / (2 * BLOCK), above, above + 1};
}

static int kind_of(int64_t plane) { return plane < KINDS ? (int)plane : KINDS - 1; }

static int is_there(const uint8_t *blocks, int64_t b) { return blocks[b >> 2] >> (b & 3) & 1; }

int is_sound_for_pairs(const transform *form) {
    const int64_t rows = form->rows, columns = form->columns;
    if (rows < 1 || columns < 1 || rows > MOST_PIXELS || columns > MOST_PIXELS || form->planes < 1) return 0;
    if (form->predictor != PREDICT_LEFT && form->predictor != PREDICT_UP) return 0;
    return rows * columns >= FEWEST_PIXELS && rows * columns <= MOST_PIXELS;
}

/* ---- encoding ---------------------------------------------------------------------- */

/* Symbols in the order of decoding, a word each: a table in 7 bits, a symbol in 5, 4 for how many bits follow it and 8 for
 * these, the state in 2. What has no symbol, but bits, has no table either. */
typedef struct {
    uint32_t *word;
    int64_t count;
} symbol_list;

enum { NO_TABLE = 127 };

static void put(symbol_list *to, int table, int symbol, int64_t turn, int bits, int rest) {
    to->word[to->count++] =
        (uint32_t)(table | symbol << 7 | bits << 12 | (rest & 255) << 16 | (int)(turn % CHAINS) << 24);
}

static void put_blocks(const pair_tables *t, int kind, const uint8_t *d, const pair_form *f, uint8_t *blocks,
                       symbol_list *to) {
    const int64_t fours = (f->blocks + 3) / 4;
    memset(blocks, 0, (size_t)fours);
    for (int64_t i = 0; i < f->plane; i++)
        if (d[i]) blocks[i / (8 * BLOCK)] |= (uint8_t)(1 << (i / (2 * BLOCK) % 4));
    for (int64_t i = 0; i < fours; i++) put(to, t->of_pairs[BLOCK_CASES + kind] / STATES, blocks[i], i, 0, 0);
}

static int class_of(uint8_t difference) {
    return difference == 0 ? 0 : difference == 1 ? 1 : difference == 255 ? 2 : MARKED;
}

static void put_pairs(const pair_tables *t, int kind, const uint8_t *d, const pair_form *f, const uint8_t *blocks,
                      const uint8_t *first_plane, uint8_t *q, symbol_list *to) {
    for (int64_t i = 0; i < f->blocks * BLOCK; i++) {
        const uint8_t *const above = q + i - f->above;
        q[i] = 0;
        if (!is_there(blocks, i / BLOCK)) continue;
        if (2 * i < f->plane) q[i] = (uint8_t)class_of(d[2 * i]);
        if (2 * i + 1 < f->plane) q[i] |= (uint8_t)(class_of(d[2 * i + 1]) << 2);
        const int around = above[-1] >> 2 | above[0] << 2 | (above[1] & 3) << 6 | (first_plane ? first_plane[i] << 8 : 0);
        put(to, t->of_pairs[kind * ABOVE + around] / STATES, q[i], i, 0, 0);
    }
}

static void put_value(const pair_tables *t, int kind, uint8_t value, uint8_t in_first, int64_t turn, symbol_list *to) {
    const int table = t->of_values[kind * 256 + in_first] / STATES, s = symbol_of(value);
    if (s >= 2 * 15 || t->share[table][s] == 0) put(to, table, ANY_VALUE, turn, 8, value);
    else put(to, table, s, turn, EXTRA_BITS[s >> 1], (int8_t)value - least_of(s));
}

/* Those of each block that stand first in a pair, then the others. */
static void put_values(const pair_tables *t, int kind, const uint8_t *d, const pair_form *f, const uint8_t *first_plane,
                       const uint8_t *q, symbol_list *to) {
    int64_t turn = 0;
    for (int64_t b = 0; b < f->plane; b += 2 * BLOCK)
        for (int64_t i = b; i < b + 2 * BLOCK; i++) {
            const int64_t pair = b / 2 + i % BLOCK, second = (i - b) / BLOCK, x = 2 * pair + second;
            if ((q[pair] >> (2 * second) & 3) == MARKED)
                put_value(t, kind, d[x], first_plane ? first_plane[x] : UNKNOWN, turn++, to);
        }
}

/* Whether fewer differences are left of a plane if those of the first one are subtracted; `less` becomes that. */
static int is_less_without(const uint8_t *first_plane, const uint8_t *d, int64_t plane, uint8_t *less) {
    int64_t before = 0, after = 0;
    for (int64_t i = 0; i < plane; i++) {
        less[i] = (uint8_t)(d[i] - first_plane[i]);
        before += d[i] != 0;
        after += less[i] != 0;
    }
    return after < before;
}

/* Replace each symbol by the bits that are read for it, a count in 8 bits and they, from the last one on. */
static void count_back(const pair_tables *t, const symbol_list *list, uint32_t *state) {
    for (int64_t i = list->count - 1; i >= 0; i--) {
        const uint32_t word = list->word[i], table = word & 127, s = word >> 7 & 31, chain = word >> 24 & 3;
        uint32_t bits = word >> 12 & 15, read = word >> 16 & 255;
        if (table != NO_TABLE) {
            const uint32_t share = t->share[table][s], x = state[chain] + STATES;
            uint32_t low = 0;
            while (x >> low >= 2 * share) low++;
            read |= (x & ((UINT32_C(1) << low) - 1)) << bits;
            bits += low;
            state[chain] = t->state_of[table][t->first[table][s] + (x >> low) - share];
        }
        list->word[i] = bits | read << 8;
    }
}

/* Write states and bits one after another; returns the bytes of that, `most` if there are no fewer. */
static int64_t write_bits(const symbol_list *list, const uint32_t *state, uint8_t *out, int64_t most) {
    uint64_t waiting = 0;
    int64_t count = 0, used = 0;
    for (int k = 0; k < CHAINS; k++, count += STATE_BITS) waiting |= (uint64_t)state[k] << count;
    for (int64_t i = 0; i < list->count; i++) {
        for (; count >= 8; count -= 8, waiting >>= 8) {
            if (used + 1 >= most) return most;
            out[used++] = (uint8_t)waiting;
        }
        waiting |= (uint64_t)(list->word[i] >> 8) << count;
        count += list->word[i] & 255;
    }
    for (; count > 0; count -= 8, waiting >>= 8) {
        if (used + 1 >= most) return most;
        out[used++] = (uint8_t)waiting;
    }
    return used;
}

int64_t encode_pairs(const void *tables, const transform *form, const uint8_t *in, uint8_t *out, int64_t room) {
    const pair_tables *const t = tables;
    const pair_form f = form_of_pairs(form);
    const int64_t bytes = form->planes * f.plane, of_symbols = f.before + f.blocks * BLOCK;
    const int64_t most_symbols = form->planes * (f.plane + f.blocks * BLOCK + f.blocks / 4 + 2);
    uint8_t *const words = out + bytes + (-(uintptr_t)(out + bytes) & 3), *const blocks = words + 4 * most_symbols;
    uint8_t *const first_q = blocks + f.blocks / 4 + 1, *const later_q = first_q + of_symbols, *const less = later_q + of_symbols;
    symbol_list list = {(uint32_t *)(void *)words, 0};
    uint32_t state[CHAINS] = {0};
    if (less + f.plane - out > room) return bytes;
    memset(first_q, 0, (size_t)f.before);
    memset(later_q, 0, (size_t)f.before);
    for (int64_t p = 0; p < form->planes; p++) {
        const int kind = kind_of(p);
        const uint8_t *d = in + p * f.plane;
        uint8_t *const q = (p ? later_q : first_q) + f.before;
        if (p) {
            const int is_less = is_less_without(in, d, f.plane, less);
            put(&list, NO_TABLE, 0, 0, 1, is_less);
            if (is_less) d = less;
        }
        put_blocks(t, kind, d, &f, blocks, &list);
        put_pairs(t, kind, d, &f, blocks, p ? first_q + f.before : NULL, q, &list);
        put_values(t, kind, d, &f, p ? in : NULL, q, &list);
    }
    count_back(t, &list, state);
    return write_bits(&list, state, out, bytes);
}

/* ---- decoding ---------------------------------------------------------------------- */

/* A unit with memory behind it that may be read, and the states. */
typedef struct {
    const uint8_t *bytes;
    uint64_t at, end; /* in bits */
    uint64_t state[CHAINS];
} bit_reader;

static inline uint64_t bits_at(const uint8_t *bytes, uint64_t at) {
    uint64_t word;
    memcpy(&word, bytes + (at >> 3), 8);
    return word >> (at & 7);
}

/* The lowest bits of a word: as many as the lowest byte of `count` says. */
static inline uint64_t low_bits(uint64_t word, uint64_t count) { return word & ~(UINT64_MAX << (count & 63)); }

static void read_blocks(const uint32_t *entry, bit_reader *r, int64_t fours, uint8_t *blocks) {
    for (int64_t i = 0; i < fours && r->at <= r->end; i++) {
        const uint32_t e = entry[r->state[i % CHAINS]];
        r->state[i % CHAINS] = (e >> 16) + low_bits(bits_at(r->bytes, r->at), e);
        r->at += e & 255;
        blocks[i] = (uint8_t)(e >> 8);
    }
}

/* Read the pairs of a plane, four at once: they take at most 36 bits. Both loops are made twice: where the processor has
 * BMI2, it takes the lowest bits of a word by one instruction. */
#define ONE_PAIR(k, LOW_BITS)                                                                                          \
    const uint32_t e##k = t->entry[t->of_pairs[around[j + k]] + s##k];                                                 \
    q[j + k] = (uint8_t)(e##k >> 8);                                                                                   \
    s##k = (e##k >> 16) + LOW_BITS(w, e##k);                                                                           \
    w >>= e##k & 63;
#define READ_PAIRS(name, LOW_BITS)                                                                                     \
    static void name(const pair_tables *t, int kind, bit_reader *r, const pair_form *f, const uint8_t *blocks,         \
                     const uint8_t *first_plane, int64_t step, uint8_t *q) {                                           \
        uint64_t s0 = r->state[0], s1 = r->state[1], s2 = r->state[2], s3 = r->state[3], at = r->at;                   \
        const uint8_t *const bytes = r->bytes;                                                                         \
        const uint64_t end = r->end;                                                                                   \
        const int64_t count = f->blocks, up = f->above;                                                                \
        for (int64_t b = 0; b < count; b++, q += BLOCK, first_plane += step) {                                         \
            if (!is_there(blocks, b)) {                                                                                \
                memset(q, 0, BLOCK);                                                                                   \
                continue;                                                                                              \
            }                                                                                                          \
            if (at > end) break;                                                                                       \
            uint16_t around[BLOCK];                                                                                    \
            const uint8_t *const above = q - up;                                                                       \
            for (int i = 0; i < BLOCK; i++)                                                                            \
                around[i] = (uint16_t)(above[i - 1] >> 2 | above[i] << 2 | (above[i + 1] & 3) << 6 |                   \
                                       first_plane[i] << 8 | kind << 12);                                              \
            _Pragma("GCC unroll 4") for (int j = 0; j < BLOCK; j += 4) {                                               \
                uint64_t w = bits_at(bytes, at);                                                                       \
                ONE_PAIR(0, LOW_BITS)                                                                                  \
                ONE_PAIR(1, LOW_BITS)                                                                                  \
                ONE_PAIR(2, LOW_BITS)                                                                                  \
                ONE_PAIR(3, LOW_BITS)                                                                                  \
                at += (e0 + e1 + e2 + e3) & 255;                                                                       \
            }                                                                                                          \
        }                                                                                                              \
        r->state[0] = s0, r->state[1] = s1, r->state[2] = s2, r->state[3] = s3, r->at = at;                            \
    }

/* Read the values that are marked in a plane, two at once: they take at most 34 bits. */
#define ONE_VALUE(k, LOW_BITS)                                                                                         \
    const uint32_t e##k = t->entry[t->of_values[first_plane[places[k]] | kind << 8] + s##k], n##k = e##k >> 25;        \
    d[places[k]] = (uint8_t)((e##k >> 8) + LOW_BITS(w, e##k));                                                         \
    w >>= e##k & 15;                                                                                                   \
    s##k = (e##k >> 16 & (STATES - 1)) + LOW_BITS(w, n##k);                                                            \
    w >>= n##k;                                                                                                        \
    at += (e##k & 15) + n##k;
#define READ_VALUES(name, LOW_BITS)                                                                                    \
    static void name(const pair_tables *t, int kind, bit_reader *r, const uint16_t *places, int64_t count,             \
                     const uint8_t *first_plane, uint8_t *d) {                                                         \
        uint64_t s0 = r->state[0], s1 = r->state[1], s2 = r->state[2], s3 = r->state[3], at = r->at, w;                \
        const uint8_t *const bytes = r->bytes;                                                                         \
        const uint64_t end = r->end;                                                                                   \
        const uint16_t *const stop = places + count / 4 * 4;                                                           \
        for (; places < stop && at <= end; places += 4) {                                                           \
            w = bits_at(bytes, at);                                                                                    \
            ONE_VALUE(0, LOW_BITS)                                                                                     \
            ONE_VALUE(1, LOW_BITS)                                                                                     \
            w = bits_at(bytes, at);                                                                                    \
            ONE_VALUE(2, LOW_BITS)                                                                                     \
            ONE_VALUE(3, LOW_BITS)                                                                                     \
        }                                                                                                              \
        if (at <= end) {                                                                                            \
            w = bits_at(bytes, at);                                                                                    \
            if (count % 4 > 0) { ONE_VALUE(0, LOW_BITS) }                                                              \
            if (count % 4 > 1) { ONE_VALUE(1, LOW_BITS) }                                                              \
            if (count % 4 > 2) { ONE_VALUE(2, LOW_BITS) }                                                              \
        }                                                                                                              \
        r->state[0] = s0, r->state[1] = s1, r->state[2] = s2, r->state[3] = s3, r->at = at;                            \
    }

READ_PAIRS(read_pairs, low_bits)
READ_VALUES(read_values, low_bits)
#ifdef HAVE_X86
__attribute__((target("avx2,bmi2"))) READ_PAIRS(read_pairs_fast, _bzhi_u64)
__attribute__((target("avx2,bmi2"))) READ_VALUES(read_values_fast, _bzhi_u64)
#endif

/* Which of 16 pairs have a mark in their first place, and which in their second: a bit each. */
static inline void find_marks(const uint8_t *q, uint32_t *first, uint32_t *second) {
#ifdef HAVE_X86
    const __m128i v = _mm_loadu_si128((const __m128i *)q), low = _mm_set1_epi8(3), high = _mm_set1_epi8(12);
    *first = (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_and_si128(v, low), low));
    *second = (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_and_si128(v, high), high));
#else
    *first = *second = 0;
    for (int i = 0; i < BLOCK; i++) {
        *first |= (uint32_t)((q[i] & 3) == 3) << i;
        *second |= (uint32_t)(q[i] >> 2 == 3) << i;
    }
#endif
}

static inline int64_t list_places(const pair_tables *t, uint32_t marks, int64_t from, uint16_t *places) {
    uint16_t eight[8];
    memcpy(eight, t->places[marks], sizeof eight);
    for (int i = 0; i < 8; i++) eight[i] = (uint16_t)(eight[i] + from);
    memcpy(places, eight, sizeof eight);
    return t->bits_set[marks];
}

/* List the pixels that are marked; returns how many there are. Up to 8 more are written. */
static int64_t list_marked(const pair_tables *t, const pair_form *f, const uint8_t *blocks, const uint8_t *q,
                           uint16_t *places) {
    int64_t count = 0;
    for (int64_t b = 0; b < f->blocks; b++) {
        if (!is_there(blocks, b)) continue;
        uint32_t first, second;
        find_marks(q + b * BLOCK, &first, &second);
        count += list_places(t, first & 255, 2 * b * BLOCK, places + count);
        count += list_places(t, first >> 8, 2 * b * BLOCK + BLOCK, places + count);
        count += list_places(t, second & 255, 2 * b * BLOCK + 1, places + count);
        count += list_places(t, second >> 8, 2 * b * BLOCK + BLOCK + 1, places + count);
    }
    return count;
}

/* Turn pairs into differences, with UNKNOWN for those that are marked. */
static void show_pairs(const uint8_t *restrict q, int64_t plane, uint8_t *restrict d) {
    for (int64_t i = 0; i < plane / 2; i++) {
        uint16_t two = q[i];
        two = (uint16_t)((two | two << 6) & 0x0303);
        const uint16_t are_less = two >> 1 & 0x0101;
        two = (uint16_t)((two & 0x0101) | ((are_less << 8) - are_less));
        memcpy(d + 2 * i, &two, 2);
    }
    if (plane % 2) d[plane - 1] = (uint8_t)(q[plane / 2] & 2 ? 255 : q[plane / 2] & 1);
}

/* Leave out pairs behind a plane: damaged ones could be marked. */
static void end_pairs(uint8_t *q, const pair_form *f) {
    const int64_t pairs = (f->plane + 1) / 2;
    if (f->plane % 2) q[pairs - 1] &= 3;
    memset(q + pairs, 0, (size_t)(f->blocks * BLOCK - pairs));
}

int decode_pairs(const void *tables, const transform *form, const uint8_t *from, int64_t length, uint8_t *room,
                 int64_t room_bytes, uint8_t *to) {
    static const uint8_t nothing[BLOCK];
    const pair_tables *const t = tables;
    const pair_form f = form_of_pairs(form);
    const int64_t of_symbols = f.before + f.blocks * BLOCK, fours = (f.blocks + 3) / 4;
    uint8_t *const list = room + (-(uintptr_t)room & 1), *const unit = list + 2 * (f.plane + 8); /* 8 more than pixels */
    uint16_t *const places = (uint16_t *)(void *)list;
    uint8_t *const blocks = unit + length + PADDING, *const first_q = blocks + fours;
    uint8_t *const later_q = first_q + of_symbols;
    bit_reader r = {unit, CHAINS * STATE_BITS, 8 * (uint64_t)length, {0}};
    if (!t || later_q + of_symbols - room > room_bytes) return 0;
    memcpy(unit, from, (size_t)length);
    memset(unit + length, 0, PADDING);
    memset(first_q, 0, (size_t)f.before);
    memset(later_q, 0, (size_t)f.before);
    for (int k = 0; k < CHAINS; k++) r.state[k] = bits_at(unit, 0) >> (k * STATE_BITS) & (STATES - 1);
    for (int64_t p = 0; p < form->planes; p++) {
        const int kind = kind_of(p);
        uint8_t *const q = (p ? later_q : first_q) + f.before, *const d = to + p * f.plane;
        const uint8_t *const in_first = p ? first_q + f.before : nothing;
        if (r.at > r.end) return 0;
        const int is_less = p && (bits_at(unit, r.at++) & 1);
        read_blocks(t->entry + t->of_pairs[BLOCK_CASES + kind], &r, fours, blocks);
        if (r.at > r.end) return 0;
#ifdef HAVE_X86
        const int is_fast = has_avx2();
        (is_fast ? read_pairs_fast : read_pairs)(t, kind, &r, &f, blocks, in_first, p ? BLOCK : 0, q);
#else
        read_pairs(t, kind, &r, &f, blocks, in_first, p ? BLOCK : 0, q);
#endif
        if (r.at > r.end) return 0;
        end_pairs(q, &f);
        show_pairs(q, f.plane, d);
        const int64_t count = list_marked(t, &f, blocks, q, places);
#ifdef HAVE_X86
        (is_fast ? read_values_fast : read_values)(t, kind, &r, places, count, to, d);
#else
        read_values(t, kind, &r, places, count, to, d);
#endif
        if (r.at > r.end) return 0;
        if (is_less)
            for (int64_t i = 0; i < f.plane; i++) d[i] = (uint8_t)(d[i] + to[i]);
    }
    return (r.state[0] | r.state[1] | r.state[2] | r.state[3]) == 0 && (r.at + 7) / 8 == (uint64_t)length;
}
