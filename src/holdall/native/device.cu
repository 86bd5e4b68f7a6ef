/* Ticks into a store on a device, and its rows into batches.

   One launch writes some ticks, one launch draws and gathers a batch. A row is copied by the threads of one x index of a
   block; y counts rows, and blockIdx.y the fields. The host compiles this with NVRTC at first use;
   delivery/device_loops.py declares the same structs.

   Slots: tick t lies in slot t % slots, and there is one slot more than ticks are held: the slot after the newest tick
   holds its next observation, until the next tick shows whether it continues from there. Where it does not, the next
   observation moves to the pool of its field, and `apart` says where.

   Windows: where an observation is the last one without its first slice, and with a new one, only the new one is kept.
   Every tick is compared with what would be read of it. One that does not continue is kept whole, in the pool, and
   `whole` says where; else `whole` says how many ticks ago there was such a one. The next observations of the newest
   tick stand in a place of their own. */

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define MOST_FIELDS 24
#define MOST_TRIALS 4096

enum { TERMINATED = 1, TRUNCATED = 2, INVALID = 4 };

struct Counts {          /* on the device: what the host cannot know without waiting */
    i64 next_tick, first_tick, calls;
};

struct Pool {            /* next observations that no tick continues, and a queue of the places that are free */
    u32 taken, given;    /* places that were taken from the queue and put into it, ever */
    u32 mask, unused;    /* length of the queue, a power of two, minus one */
};

struct Field {
    u8 *ring;            /* (slots, lanes, row_bytes); of a window the newest slice: (slots, lanes, outer, run_bytes) */
    i64 row_bytes;
    i64 is_observed;
    const u8 *source, *next_source;  /* of a tick: (lanes, row_bytes), rows `source_stride` apart */
    i64 source_stride, next_source_stride;
    u8 *target, *next_target;            /* of a batch: (rows, row_bytes); null if not wanted */
    int *apart;                  /* (slots, lanes): the place in the pool, or -1 */
    struct Pool *pool;
    int *queue;
    u8 **chunks;                 /* the first has `first_chunk` places, each later one as many as all before */
    i64 first_chunk;
    i64 slots;
    i64 window, outer, run_bytes;  /* a row is `outer` stretches, each with one run of every slice */
    int *whole;          /* (slots, lanes): a place in the pool, or minus the ticks since one, at most window - 1 */
    u8 *newest;                  /* (2, lanes, row_bytes): next observations of a tick, by its number modulo 2 */
};

struct Flags {
    u8 *ring;                    /* (slots, lanes) */
    const u8 *terminated, *truncated, *valid;  /* of a tick; valid may be null */
    u8 *to_terminated, *to_truncated;          /* of a batch */
    float *to_ones;                            /* its weights */
};

struct Task {
    struct Counts *counts;
    i64 *free;                   /* memory of the host: the tick begun, and by field how many places are free */
    i64 slots, lanes, tick, ticks, has_previous, fields, rows;
    i64 *ids, *last_ids;         /* of a batch; last_ids may be null */
    i64 draws, call;             /* whether ids are drawn here; call < 0: the number of calls on the device counts */
    u64 seed;
    struct Flags flags;
    struct Field field[MOST_FIELDS];
};

__device__ static void copy_row(u8 *to, const u8 *from, i64 nbytes)
{
    u64 all = (u64)to | (u64)from | (u64)nbytes;
    i64 i;
    if (!(all & 15))
        for (i = threadIdx.x; i < nbytes >> 4; i += blockDim.x) ((uint4 *)to)[i] = ((const uint4 *)from)[i];
    else if (!(all & 3))
        for (i = threadIdx.x; i < nbytes >> 2; i += blockDim.x) ((u32 *)to)[i] = ((const u32 *)from)[i];
    else
        for (i = threadIdx.x; i < nbytes; i += blockDim.x) to[i] = from[i];
}

__device__ static int rows_differ(const u8 *a, const u8 *b, i64 nbytes)
{
    u64 all = (u64)a | (u64)b | (u64)nbytes;
    i64 i;
    int differ = 0;
    if (!(all & 15))
        for (i = threadIdx.x; i < nbytes >> 4; i += blockDim.x) {
            uint4 x = ((const uint4 *)a)[i], y = ((const uint4 *)b)[i];
            differ |= (x.x ^ y.x) | (x.y ^ y.y) | (x.z ^ y.z) | (x.w ^ y.w);
        }
    else if (!(all & 3))
        for (i = threadIdx.x; i < nbytes >> 2; i += blockDim.x) differ |= ((const u32 *)a)[i] ^ ((const u32 *)b)[i];
    else
        for (i = threadIdx.x; i < nbytes; i += blockDim.x) differ |= a[i] ^ b[i];
    return differ;
}

/* Copy a slice whose runs lie some bytes apart. */
__device__ static void copy_runs(u8 *to, i64 to_step, const u8 *from, i64 from_step, i64 outer, i64 run_bytes)
{
    u64 all = (u64)to | (u64)from | (u64)run_bytes | (u64)to_step | (u64)from_step;
    u32 word = !(all & 15) ? 16 : !(all & 3) ? 4 : 1, words = (u32)run_bytes / word;
    for (u32 i = threadIdx.x; i < (u32)outer * words; i += blockDim.x) {
        u32 stretch = outer == 1 ? 0 : i / words;
        const u8 *source = from + stretch * from_step + (i - stretch * words) * word;
        u8 *target = to + stretch * to_step + (i - stretch * words) * word;
        if (word == 16) *(uint4 *)target = *(const uint4 *)source;
        else if (word == 4) *(u32 *)target = *(const u32 *)source;
        else *target = *source;
    }
}

__device__ static int runs_differ(const u8 *a, i64 a_step, const u8 *b, i64 b_step, i64 outer, i64 run_bytes)
{
    if (outer == 1) return rows_differ(a, b, run_bytes);
    u64 all = (u64)a | (u64)b | (u64)run_bytes | (u64)a_step | (u64)b_step;
    u32 word = !(all & 3) ? 4 : 1, words = (u32)run_bytes / word;
    int differ = 0;
    for (u32 i = threadIdx.x; i < (u32)outer * words; i += blockDim.x) {
        u32 stretch = i / words;
        const u8 *x = a + stretch * a_step + (i - stretch * words) * word;
        const u8 *y = b + stretch * b_step + (i - stretch * words) * word;
        differ |= word == 4 ? *(const u32 *)x ^ *(const u32 *)y : *x ^ *y;
    }
    return differ;
}

__device__ static u8 *pooled(const struct Field *field, i64 place)
{
    i64 chunk = 0, first = 0, length = field->first_chunk;
    while (place >= first + length) {
        first += length;
        length = field->first_chunk << chunk;
        chunk++;
    }
    return field->chunks[chunk] + (place - first) * field->row_bytes;
}

/* A row belongs to one warp, or to the whole block where a block has one row: wait for its other threads. */
__device__ static void meet(void)
{
    if (blockDim.y == 1) __syncthreads();
    else __syncwarp();
}

__device__ static int any_of_row(int mine)
{
    return blockDim.y == 1 ? __syncthreads_or(mine) : __any_sync(0xffffffffu, mine);
}

__device__ static int take_place(const struct Field *field)
{
    return field->queue[atomicAdd(&field->pool->taken, 1u) & field->pool->mask];
}

/* A tick leaves its slot: its places in the pool are free again, for later launches. */
__device__ static void leave(const struct Field *field, int *kept, i64 cell)
{
    int place = kept[cell];
    if (place >= 0) field->queue[atomicAdd(&field->pool->given, 1u) & field->pool->mask] = place;
    kept[cell] = -1;
}

/* Keep a row in a new place of the pool, and note the place. */
__device__ static void keep_row(const struct Field *field, int *kept, i64 cell, const u8 *row, int *place)
{
    if (threadIdx.x == 0) kept[cell] = *place = take_place(field);
    meet();
    copy_row(pooled(field, *place), row, field->row_bytes);
    meet();
}

__device__ static void write_observation(const struct Field *field, i64 lanes, i64 tick, i64 lane, const u8 *from,
                                         const u8 *next_from, int has_previous, int *place)
{
    i64 slots = field->slots, nbytes = field->row_bytes;
    i64 here = (tick % slots) * lanes + lane, next = ((tick + 1) % slots) * lanes + lane;
    u8 *row = field->ring + here * nbytes;
    if (any_of_row(!has_previous || rows_differ(row, from, nbytes))) {
        if (has_previous) keep_row(field, field->apart, ((tick + slots - 1) % slots) * lanes + lane, row, place);
        copy_row(row, from, nbytes);
    }
    if (threadIdx.x == 0) {
        if (!has_previous) leave(field, field->apart, here);
        leave(field, field->apart, next);
    }
    copy_row(field->ring + next * nbytes, next_from, nbytes);
    meet();
}

/* Return where a slice of the observation of a tick is kept; its runs lie `step` bytes apart. */
__device__ static const u8 *kept_slice(const struct Field *field, i64 lanes, i64 tick, i64 lane, i64 slice, i64 *step)
{
    i64 slots = field->slots, back = field->window - 1 - slice;
    int known = field->whole[tick % slots * lanes + lane];
    i64 since = known < 0 ? -(i64)known : 0;
    *step = field->run_bytes;
    if (back <= since) return field->ring + ((tick - back) % slots * lanes + lane) * field->outer * field->run_bytes;
    *step = field->window * field->run_bytes;
    known = field->whole[(tick - since) % slots * lanes + lane];
    return pooled(field, known) + (slice + since) * field->run_bytes;
}

__device__ static int continues(const struct Field *field, i64 lanes, i64 tick, i64 lane, const u8 *from)
{
    i64 run = field->run_bytes, step;
    int differ = 0;
    for (i64 slice = 0; slice + 1 < field->window; slice++) {
        const u8 *kept = kept_slice(field, lanes, tick - 1, lane, slice + 1, &step);
        differ |= runs_differ(from + slice * run, field->window * run, kept, step, field->outer, run);
    }
    return !any_of_row(differ);
}

/* The same for a window. What is taken over from elsewhere comes without next observations. */
__device__ static void write_window(const struct Field *field, i64 lanes, i64 tick, i64 lane, const u8 *from,
                                    const u8 *next_from, int has_previous, int *place)
{
    i64 slots = field->slots, nbytes = field->row_bytes, run = field->run_bytes, window = field->window;
    i64 here = tick % slots * lanes + lane, before = (tick + slots - 1) % slots * lanes + lane;
    i64 next = (tick + 1) % slots * lanes + lane;
    const u8 *standing = field->newest + ((tick & 1) * lanes + lane) * nbytes;
    int goes_on = has_previous && continues(field, lanes, tick, lane, from);
    if (has_previous && next_from && any_of_row(rows_differ(standing, from, nbytes)))
        keep_row(field, field->apart, before, standing, place);
    if (threadIdx.x == 0) {
        if (!has_previous) {
            leave(field, field->apart, here);
            leave(field, field->whole, here);
        }
        leave(field, field->apart, next);
        leave(field, field->whole, next);
        if (goes_on) {
            i64 since = field->whole[before] < 0 ? 1 - (i64)field->whole[before] : 1;
            field->whole[here] = -(int)(since < window ? since : window - 1);
        }
    }
    if (!goes_on) keep_row(field, field->whole, here, from, place);
    copy_runs(field->ring + here * field->outer * run, run, from + (window - 1) * run, window * run, field->outer, run);
    if (next_from) copy_row(field->newest + (((tick + 1) & 1) * lanes + lane) * nbytes, next_from, nbytes);
    meet();
}

/* Say how far this is, and how many places are free if every tick of this launch but the last took all that it may. */
__device__ static void write_counts(const struct Task *task)
{
    i64 newest = task->tick + task->ticks - 1, oldest = newest + 2 - task->slots;
    task->free[0] = newest;
    for (int i = 0; i < task->fields; i++) {
        const struct Field *field = &task->field[i];
        if (field->is_observed)
            task->free[1 + i] = (i64)(u32)(field->pool->given - field->pool->taken)
                                - (task->ticks - 1) * task->lanes * (field->window > 1 ? 2 : 1);
    }
    __threadfence_system();
    task->counts->next_tick = newest + 1;
    if (oldest > task->counts->first_tick) task->counts->first_tick = oldest;
}

__device__ static void write_flags(const struct Task *task, i64 lane)
{
    const struct Flags *flags = &task->flags;
    for (i64 k = 0; k < task->ticks; k++) {
        i64 from = k * task->lanes + lane;
        flags->ring[(task->tick + k) % task->slots * task->lanes + lane] =
            (flags->terminated[from] ? TERMINATED : 0) | (flags->truncated[from] ? TRUNCATED : 0)
            | (flags->valid && !flags->valid[from] ? INVALID : 0);
    }
    if (lane == 0) write_counts(task);
}

extern "C" __global__ void write_ticks(const struct Task task)
{
    __shared__ int places[32];
    i64 lane = (i64)blockIdx.x * blockDim.y + threadIdx.y, lanes = task.lanes;
    if (lane >= lanes) return;
    if (blockIdx.y == task.fields) {
        if (threadIdx.x == 0) write_flags(&task, lane);
        return;
    }
    const struct Field *field = &task.field[blockIdx.y];
    if (!field->source) return;
    int *place = places + threadIdx.y;
    for (i64 k = 0; k < task.ticks; k++) {
        i64 tick = task.tick + k, at = k * lanes + lane, nbytes = field->row_bytes;
        const u8 *from = field->source + at * field->source_stride;
        const u8 *next_from = field->next_source ? field->next_source + at * field->next_source_stride : 0;
        int has_previous = task.has_previous || k;
        if (!field->is_observed) copy_row(field->ring + (tick % task.slots * lanes + lane) * nbytes, from, nbytes);
        else if (field->window > 1) write_window(field, lanes, tick, lane, from, next_from, has_previous, place);
        else write_observation(field, lanes, tick, lane, from, next_from, has_previous, place);
    }
}

/* Philox 4x32-10: 64 random bits for a call, a row and a try. */
__device__ static u64 random_bits(u64 seed, u64 call, u32 row, u32 trial)
{
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
    u32 c0 = (u32)call, c1 = (u32)(call >> 32), c2 = row, c3 = trial;
    for (int round = 0; round < 10; round++) {
        u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (u64)c1 << 32 | c0;
}

__device__ static i64 drawn_id(const struct Task *task, u32 row)
{
    i64 first = task->counts->first_tick * task->lanes, count = task->counts->next_tick * task->lanes - first, id = first;
    u64 call = task->call < 0 ? (u64)task->counts->calls | 1ull << 63 : (u64)task->call;
    for (u32 trial = 0; trial < MOST_TRIALS; trial++) {
        id = first + (i64)__umul64hi(random_bits(task->seed, call, row, trial), (u64)count);
        if (!(task->flags.ring[(id / task->lanes % task->slots) * task->lanes + id % task->lanes] & INVALID)) break;
    }
    return id;
}

__device__ static void gather_window(const struct Field *field, i64 lanes, i64 tick, i64 lane, u8 *to)
{
    i64 run = field->run_bytes, step;
    for (i64 slice = 0; slice < field->window; slice++) {
        const u8 *from = kept_slice(field, lanes, tick, lane, slice, &step);
        copy_runs(to + slice * run, field->window * run, from, step, field->outer, run);
    }
}

/* Copy the next observation of a transition, wherever it is kept. */
__device__ static void gather_next(const struct Task *task, const struct Field *field, i64 id, u8 *to)
{
    i64 lanes = task->lanes, slots = field->slots, nbytes = field->row_bytes, tick = id / lanes, lane = id % lanes;
    int place = field->apart[tick % slots * lanes + lane];
    if (place >= 0) copy_row(to, pooled(field, place), nbytes);
    else if (field->window == 1) copy_row(to, field->ring + ((tick + 1) % slots * lanes + lane) * nbytes, nbytes);
    else if (tick + 1 == task->counts->next_tick)
        copy_row(to, field->newest + (((tick + 1) & 1) * lanes + lane) * nbytes, nbytes);
    else gather_window(field, lanes, tick + 1, lane, to);
}

extern "C" __global__ void gather_rows(const struct Task task)
{
    i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= task.rows) return;
    i64 lanes = task.lanes, id = task.draws ? drawn_id(&task, (u32)row) : task.ids[row];
    i64 last = task.last_ids ? task.last_ids[row] : id;
    if (blockIdx.y == task.fields) {
        if (threadIdx.x != 0) return;
        u8 flags = task.flags.ring[last / lanes % task.slots * lanes + last % lanes];
        if (task.draws) task.ids[row] = id;
        if (task.flags.to_terminated) task.flags.to_terminated[row] = (flags & TERMINATED) != 0;
        if (task.flags.to_truncated) task.flags.to_truncated[row] = (flags & TRUNCATED) != 0;
        if (task.flags.to_ones) task.flags.to_ones[row] = 1.0f;
        return;
    }
    const struct Field *field = &task.field[blockIdx.y];
    i64 nbytes = field->row_bytes, tick = id / lanes, lane = id % lanes;
    if (field->target) {
        u8 *to = field->target + row * nbytes;
        if (field->window > 1) gather_window(field, lanes, tick, lane, to);
        else copy_row(to, field->ring + (tick % field->slots * lanes + lane) * nbytes, nbytes);
    }
    if (field->next_target) gather_next(&task, field, last, field->next_target + row * nbytes);
}

/* Inside a CUDA graph every replay is another call, which only the device can count. */
extern "C" __global__ void count_call(struct Counts *counts)
{
    counts->calls++;
}

struct Rollout {         /* all but last_values are (steps, lanes) */
    float *advantages;   /* rewards at first */
    const float *values, *ends, *last_values;
    float *returns;
    i64 steps, lanes;
    float gamma, decay;
};

/* Generalised advantage estimation, backwards in time, a lane a thread; rounded as the loop of the host is. */
extern "C" __global__ void estimate_advantages(const struct Rollout rollout)
{
    i64 lane = (i64)blockIdx.x * blockDim.x + threadIdx.x, lanes = rollout.lanes;
    if (lane >= lanes) return;
    float next_value = rollout.last_values[lane], later = 0.0f;
    for (i64 t = rollout.steps - 1; t >= 0; t--) {
        i64 i = t * lanes + lane;
        float going = __fsub_rn(1.0f, rollout.ends[i]), value = rollout.values[i];
        float ahead = __fmul_rn(__fmul_rn(rollout.gamma, next_value), going);
        float delta = __fsub_rn(__fadd_rn(rollout.advantages[i], ahead), value);
        later = __fadd_rn(delta, __fmul_rn(__fmul_rn(rollout.decay, going), later));
        rollout.advantages[i] = later;
        rollout.returns[i] = __fadd_rn(later, value);
        next_value = value;
    }
}

/* A batch of a memory on the host: see native/batch_structs.h, which declares the same structs. */

#define MOST_SLICED_FIELDS 16

struct SlicedField {
    const i64 *places;
    const int *positions, *repeats;
    const u8 *base;
    u8 *to;
    i64 first, end, end_repeat, window, outer, run_bytes;
};

struct Assembly {
    const u8 *head_from;
    u8 *head_to;
    i64 head_bytes, fields;
    struct SlicedField field[MOST_SLICED_FIELDS];
};

/* Copy from memory that is read over the bus, where requests that begin at a multiple of 128 bytes cost least. */
__device__ static void copy_aligned(u8 *to, const u8 *from, i64 nbytes)
{
    u64 all = (u64)to | (u64)from | (u64)nbytes;
    if (all & 15) {
        copy_row(to, from, nbytes);
        return;
    }
    i64 words = nbytes >> 4, i = (i64)threadIdx.x - (i64)(((u64)from & 127) >> 4);
    for (; i < words; i += blockDim.x)
        if (i >= 0) ((uint4 *)to)[i] = ((const uint4 *)from)[i];
}

__device__ static u8 *slice_at(const struct SlicedField *field, i64 position)
{
    i64 window = field->window, run_bytes = field->run_bytes;
    return field->to + position / window * window * field->outer * run_bytes + position % window * run_bytes;
}

__device__ static void copy_head(const struct Assembly *batch)
{
    i64 step = 16 * 32 * 4, row = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    for (i64 first = row * step; first < batch->head_bytes; first += gridDim.x * blockDim.y * step)
        copy_row(batch->head_to + first, batch->head_from + first,
                 batch->head_bytes - first < step ? batch->head_bytes - first : step);
}

/* Every slice that a batch needs is brought to one of its places; and the short fields, if they are there already. */
extern "C" __global__ void bring_slices(const struct Assembly batch)
{
    if (blockIdx.y == batch.fields) {
        copy_head(&batch);
        return;
    }
    const struct SlicedField *field = &batch.field[blockIdx.y];
    i64 step = field->window * field->run_bytes;
    for (i64 i = field->first + blockIdx.x * blockDim.y + threadIdx.y; i < field->end; i += gridDim.x * blockDim.y) {
        const u8 *from = field->base + field->places[i];
        u8 *to = slice_at(field, field->positions[i]);
        if (field->outer == 1 || field->window == 1)
            copy_aligned(to, from, field->outer * field->run_bytes);
        else
            copy_runs(to, step, from, field->run_bytes, field->outer, field->run_bytes);
    }
}

/* Slices that several observations show are copied from where they were brought to; and the short fields are. */
extern "C" __global__ void finish_batch(const struct Assembly batch)
{
    if (blockIdx.y == batch.fields) {
        copy_head(&batch);
        return;
    }
    const struct SlicedField *field = &batch.field[blockIdx.y];
    i64 step = field->window * field->run_bytes, i = blockIdx.x * blockDim.y + threadIdx.y;
    for (; i < field->end_repeat; i += gridDim.x * blockDim.y) {
        u8 *to = slice_at(field, field->repeats[2 * i]);
        const u8 *from = slice_at(field, field->repeats[2 * i + 1]);
        if (field->outer == 1 || field->window == 1)
            copy_row(to, from, field->outer * field->run_bytes);
        else
            copy_runs(to, step, from, step, field->outer, field->run_bytes);
    }
}
