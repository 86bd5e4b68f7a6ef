/* The structs that C and Python share, declared here and in batch_structs.h, and mirrored in library.py.
 *
 * struct_table.c exports the size and the offsets of each of them; Python compares them when it loads the library, and
 * refuses one that was built from other declarations. Addresses that a table of integers holds are int64_t.
 */
#ifndef HOLDALL_STRUCTS_H
#define HOLDALL_STRUCTS_H

#include <stddef.h>
#include <stdint.h>

/* ---- compressed slices ------------------------------------------------------------- */

/* What is done to a slice before it is compressed, in this order: words -> palette indices,
 * bytes -> planes of differences, bytes -> shuffled. */
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

/* A sealed block. Its slices are compressed in units of `group` neighbours, which lie one after another in memory
 * or in a file. */
typedef struct {
    const uint8_t *data;     /* NULL: in a file */
    const uint32_t *offsets; /* unit i lies in [offsets[i], offsets[i + 1]) */
    const uint32_t *checks;  /* checksums of the units in a file */
    const uint8_t *palette;  /* 256 words */
    const void *places;      /* of slices among those of the units; NULL: in the order of their numbers */
    const void *ddict;       /* ZSTD_DDict *, or NULL */
    const uint8_t *common;   /* the dictionary's bytes, for LZ4, or NULL */
    int64_t common_bytes;
    int64_t place_bytes; /* of one: 2 or 4 */
    int64_t data_bytes;
    int64_t slice_count;
    int64_t group;
    int64_t method;
    int64_t file;       /* descriptor */
    int64_t file_start; /* where the first unit lies in it */
    transform form;
} sealed_block;

/* Where a slice that was decoded for a batch stands already. */
typedef struct {
    uint64_t batch;
    int64_t sealed;
    int64_t number;
    const uint8_t *slice;
} decoded_slice;

/* The memory of one thread that decodes. */
typedef struct {
    void *dctx;       /* ZSTD_DCtx * */
    uint8_t *scratch; /* two coded slices, and one decoded */
    int64_t scratch_bytes;
    uint8_t *unit; /* the last unit of several slices that was decompressed: unit `unit_number` of `unit_of`; 64 KiB of
                    * memory stand in front of it */
    int64_t unit_bytes;
    const uint8_t *unit_behind; /* the dictionary whose last 64 KiB stand in front of it, or NULL */
    const sealed_block *unit_of;
    int64_t unit_number;
    int64_t unit_filled; /* its bytes: fewer than its slices have if it holds their changes; then the last slice that was
                          * made of these, number `changed`, stands at the end of the memory for it */
    int64_t changed;
    const uint8_t *next_change; /* where those of the next slice begin */
    uint8_t *read; /* units [read_first, read_end) of the block `read_of`, as they stand in a file */
    int64_t read_bytes;
    const sealed_block *read_of;
    int64_t read_first;
    int64_t read_end;
    const uint8_t *unit_palette; /* the colours of the last unit that was decompressed: its block's, or ... */
    uint8_t *colours;            /* ... those with the unit's own among them */
    int64_t error; /* of the last read from a file that failed: errno, or 0 */
    uint64_t batch; /* counts those that it filled, the one that is being filled too; entries of `decoded` that name another one are void */
    int64_t decoded_places; /* a power of two */
    decoded_slice *decoded; /* a place is overwritten by the next slice that hashes to it: a miss only costs time */
} decoder;

/* The memory of one thread that encodes. */
typedef struct {
    void *cctx;       /* ZSTD_CCtx * with its level and dictionary */
    void *stream;     /* LZ4_streamHC_t *, where LZ4 compresses with a dictionary */
    void *loaded;     /* the same, after it read the dictionary */
    uint8_t *scratch; /* two coded slices, a unit of coded ones, its changes and a compressed unit */
    int64_t scratch_bytes;
    const uint8_t *common; /* a dictionary's bytes, for LZ4, or NULL */
    int64_t common_bytes;
    int64_t group; /* slices of a unit */
    int64_t method;
    int64_t level; /* of LZ4: 0 the fast one, above 0 the high compression */
} encoder;

/* ---- slices that are written ------------------------------------------------------- */

/* A block of unique slices and the open-addressing table that finds them by their bytes.
 * A slot holds a slice number + 1, or 0. */
typedef struct {
    uint8_t *arena;
    uint64_t *hashes;
    uint32_t *slots;
    int64_t mask; /* slots - 1, a power of two less one, at least twice the capacity */
    int64_t capacity;
    int64_t used;
    int64_t slice_bytes;
} slice_block;

enum { MOST_DIMENSIONS = 8 };

/* How a tick lies in the caller's memory, if not as it is stored: dimensions and byte strides of the whole tick,
 * outermost first, down to runs of `run_bytes`. */
typedef struct {
    int64_t dimensions;
    int64_t lengths[MOST_DIMENSIONS];
    int64_t strides[MOST_DIMENSIONS];
    int64_t run_bytes;
} layout;

/* One field of the open segment. */
typedef struct {
    slice_block *block; /* NULL: slices lie in log order, in `direct` */
    uint8_t *direct;
    uint32_t *log;
    uint8_t *last;     /* the newest observation of each lane, where its slices cannot be compared */
    uint8_t *last_raw; /* the same as the caller passed it, if that was in another layout */
    uint8_t *packed;   /* room for two ticks: observations and next observations as they are stored */
    const layout *last_layout;
    int64_t *end;     /* log entries of each lane */
    uint8_t *scratch; /* room for one slice */
    int64_t log_rows;
    int64_t lanes;
    int64_t outer;
    int64_t run_bytes;
    int64_t window;
    int64_t shift;
    int64_t longest; /* the largest of `end` */
    int64_t steps;
    int64_t broken_steps; /* steps that did not shift as the window says */
    int64_t pushed;       /* slices passed in, known or new */
} open_part;

/* Next observations that no ring shows, and room for more: numbers that Python names APART_FIELDS. */
typedef struct {
    int64_t ids;  /* address of their ids, ascending ... */
    int64_t rows; /* ... and of the rows */
    int64_t end;  /* how many stand there */
    int64_t room; /* how many may, before Python has to look at them */
} apart_rows;

/* A field of a tick that lies in a flat ring. A packed tick holds its rows, and the next observations behind them. */
typedef struct {
    uint8_t *rows; /* (ring ticks, lanes, ...) */
    uint8_t *next; /* the ring of next observations; NULL: they stand where the next tick's observations will */
    apart_rows *apart; /* where they are saved that others are about to be written over; NULL: Python does that */
    int64_t tick_bytes;
    int64_t is_observation;
} flat_field;

/* A field of a tick that is cut into slices, and the tick to come. */
typedef struct {
    open_part *part;
    uint32_t *cursors; /* (ring ticks, lanes) */
    const uint8_t *obs;
    const uint8_t *next_obs;
    const layout *order;   /* of both in memory; NULL: as they are stored */
    const layout *known;   /* the last order other than NULL, or NULL ... */
    const int64_t *strides; /* ... and the MOST_DIMENSIONS strides of arrays that lie so */
} sliced_field;

/* All fields of a memory, and how many ticks were written: this number alone says what is held. */
typedef struct {
    int64_t next_tick;
    int64_t first_tick; /* the first one ever written continues nothing */
    int64_t ring_ticks;
    int64_t packed_bytes;
    flat_field *flat;
    sliced_field *sliced;
    int64_t flat_count;
    int64_t sliced_count;
    int64_t pause_tick;        /* before this tick is written, there is more to do ... */
    int64_t blocks_pause_tick; /* ... and before this one, if fields are cut into slices */
    const int64_t *sealed_bytes; /* that a worker has sealed so far: it counts on at any time. Slices of the open segment ... */
    int64_t most_ahead;          /* ... may take so many bytes more when a tick comes */
    int64_t lanes;
    uint8_t *is_changed; /* set when next observations were saved: batches are described again then */
} tick_writer;

/* ---- arguments as Python passes them ----------------------------------------------- */

/* Functions of Python's stable interface, and objects that are known by their addresses. */
typedef struct {
    const void *array_type;
    const void *dict_type;
    const void *ordered_dict_type;
    const void *list_type;
    const void *str_type;
    const void *is_false;
    const void *is_true;
    const void *is_none;
    void *(*number)(long long);
    void *(*bytes)(const char *, int64_t);
    int64_t (*dict_size)(void *);
    int (*dict_next)(void *, int64_t *, void **, void **);
    void *(*dict_item)(void *, void *);
    int64_t (*list_size)(void *);
    void *(*list_item)(void *, int64_t);
    int (*str_compare)(void *, void *);
    void *(*error)(void);
    void (*take)(void *);
    void (*drop)(void *);
} python;

/* What an argument must be to be written as it is. */
typedef struct {
    void *key; /* of a field of a Dict */
    const void *dtype;
    int64_t dimensions;
    int64_t lengths[8];
    int64_t bytes;
} argument_form;

/* Ticks whose arguments need no change. */
typedef struct {
    const python *python;
    tick_writer *writer;
    const argument_form *observed; /* those in rings first */
    int64_t observed_count;
    int64_t small_count; /* of those in rings */
    int64_t large_bytes; /* of a tick's observations that are cut into slices */
    int64_t is_dict;
    argument_form rest[4]; /* action, reward, terminated, truncated */
    uint8_t *packed;
    int64_t packed_bytes;
    int64_t is_open; /* 0: ticks are written another way now */
    void *cut_key;   /* of an info that says that a time limit cut an episode */
    const uint64_t *lock_owner; /* the thread that holds the memory's lock, or 0 */
    const uint8_t *is_pending;  /* whether an interrupted call left anything to repair */
} fast_tick;

/* ---- slices that are read ---------------------------------------------------------- */

/* What one segment holds of one field: a row of a table of int64_t, whose columns Python names RECORD_FIELDS. */
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

/* A column of a batch that is copied from a ring of short rows: a row of a table of int64_t, whose columns Python names
 * COLUMN_FIELDS. */
typedef struct {
    int64_t ring;        /* address of the rows */
    int64_t row_bytes;
    int64_t later;       /* rows by which a transition's row stands behind the transition's own place */
    int64_t block;       /* which of two blocks the column goes to */
    int64_t apart_count; /* rows that do not stand in the ring ... */
    int64_t apart_ids;   /* ... the address of their ids, ascending ... */
    int64_t apart_rows;  /* ... and of the rows */
    int64_t unless;      /* address of a second ring of flags: 1.0f where the first flag is set and this one is not; or 0 */
    int64_t runs;        /* address of the column_runs that hold ticks whose rows are not in the ring, or 0 ... */
    int64_t leaf;        /* ... and which leaf of theirs this is */
} row_column;

/* ---- short observations without what repeats in them, see columns.c ----------------- */

/* All of these are tables of int64_t that Python writes: GROUP_FIELDS, PIECE_FIELDS and so on in storage/columns.py. */

/* Columns that share a log of frames. */
typedef struct {
    int64_t window;       /* frames that a row shows */
    int64_t frame_bytes;
    int64_t is_dense;     /* there is no log: a row's frame stands in its record */
    int64_t home;         /* address of a frame that is expected often and begins the log, or 0 */
    int64_t first_source; /* of the pieces that a frame is collected from */
    int64_t end_source;
} column_group;

/* Bytes that lie in one piece in an observation: `count` times `bytes` from `offset` on. */
typedef struct {
    int64_t leaf;
    int64_t group;
    int64_t at; /* behind the first frame that a row shows */
    int64_t offset;
    int64_t bytes;
    int64_t count;
    int64_t at_step;
} column_piece;

/* How the short observations of a transition are shared out. */
typedef struct {
    int64_t groups;
    int64_t group_count;
    int64_t pieces;      /* leaf by leaf: all of an observation */
    int64_t piece_ends;  /* address of numbers: leaf i has pieces [i] to [i + 1] */
    int64_t sources;     /* group by group: the pieces that are kept */
    int64_t leaf_bytes;  /* addresses of numbers, by leaf: bytes, ... */
    int64_t leaf_starts; /* ... and where a leaf stands in a row that is kept whole */
    int64_t leaves;
    int64_t row_bytes;
} column_plan;

/* A group's log in a run. */
typedef struct {
    int64_t first; /* byte of the data */
    int64_t count;
    int64_t cursor_at; /* byte of a record; -1: every cursor is 0 */
} column_log;

/* The short observations of a run of ticks, lane after lane. */
typedef struct {
    int64_t plan;
    int64_t first_tick;
    int64_t ticks;
    int64_t data; /* address */
    int64_t logs;
    int64_t records; /* byte of the data, as are `numbers` and `wholes` */
    int64_t record_bytes;
    int64_t cursor_bytes;
    int64_t dense_at;
    int64_t exceptions; /* rows that are kept whole: their numbers, ascending, and they */
    int64_t numbers;
    int64_t wholes;
} column_run;

/* Where the runs are: run n holds the ticks from n << shift on. */
typedef struct {
    int64_t runs; /* address of addresses, by n & mask; 0: those ticks lie in rings */
    int64_t mask;
    int64_t shift;
    int64_t lanes;
} column_runs;

/* The slices of a batch, each named once, and the table that finds them. */
typedef struct {
    int32_t *part;    /* of each slice named, and ... */
    int32_t *number;  /* ... its number there */
    uint32_t *slots;  /* open addressing: a name + 1, or 0 */
    int64_t mask;     /* slots - 1, at least twice the names there is room for */
    int64_t room;
    int64_t count;
} names;

/* Set in a cursor whose next observation does not continue the window but follows it. */
static const uint32_t NEXT_IS_WHOLE = UINT32_C(1) << 31;

#endif
