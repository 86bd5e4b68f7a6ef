/* Ticks into a store on a device, and its rows into batches.

   One launch writes a tick, one launch draws and gathers a batch. A row is copied by the threads of one x index of a
   block; y counts rows, and blockIdx.y the fields. The host compiles this with NVRTC at first use;
   delivery/device_loops.py declares the same structs.

   Slots: tick t lies in slot t % slots, and there is one slot more than ticks are held: the slot after the newest tick
   holds its next observation, until the next tick shows whether it continues from there. Where it does not, the next
   observation moves to the pool of its field, and `apart` says where. */

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
    u8 *ring;            /* (slots, lanes, row_bytes) */
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
};

struct Flags {
    u8 *ring;                    /* (slots, lanes) */
    const u8 *terminated, *truncated, *valid;  /* of a tick; valid may be null */
    u8 *to_terminated, *to_truncated;          /* of a batch */
};

struct Task {
    struct Counts *counts;
    i64 *free;                   /* memory of the host: the tick begun, and by field how many places are free */
    i64 slots, lanes, tick, has_previous, fields, rows;
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

__device__ static void write_observation(const struct Task *task, const struct Field *field, i64 lane, int *place)
{
    i64 slots = task->slots, lanes = task->lanes, tick = task->tick, nbytes = field->row_bytes;
    i64 here = (tick % slots) * lanes + lane, next = ((tick + 1) % slots) * lanes + lane;
    u8 *row = field->ring + here * nbytes;
    const u8 *from = field->source + lane * field->source_stride;
    if (any_of_row(!task->has_previous || rows_differ(row, from, nbytes))) {
        if (task->has_previous) {
            if (threadIdx.x == 0) {
                *place = field->queue[atomicAdd(&field->pool->taken, 1u) & field->pool->mask];
                field->apart[((tick + slots - 1) % slots) * lanes + lane] = *place;
            }
            meet();
            copy_row(pooled(field, *place), row, nbytes);
            meet();
        }
        copy_row(row, from, nbytes);
    }
    if (threadIdx.x == 0) { /* a tick leaves: its place in the pool is free again, for later launches */
        int left = field->apart[next];
        if (left >= 0) field->queue[atomicAdd(&field->pool->given, 1u) & field->pool->mask] = left;
        field->apart[next] = -1;
    }
    copy_row(field->ring + next * nbytes, field->next_source + lane * field->next_source_stride, nbytes);
}

__device__ static void write_counts(const struct Task *task)
{
    i64 oldest = task->tick + 2 - task->slots;
    task->free[0] = task->tick;
    for (int i = 0; i < task->fields; i++)
        if (task->field[i].is_observed)
            task->free[1 + i] = (i64)(u32)(task->field[i].pool->given - task->field[i].pool->taken);
    __threadfence_system();
    task->counts->next_tick = task->tick + 1;
    if (oldest > task->counts->first_tick) task->counts->first_tick = oldest;
}

extern "C" __global__ void write_tick(const struct Task task)
{
    __shared__ int places[32];
    i64 lane = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    if (lane >= task.lanes) return;
    i64 here = (task.tick % task.slots) * task.lanes + lane;
    if (blockIdx.y == task.fields) {
        const struct Flags *flags = &task.flags;
        if (threadIdx.x != 0) return;
        flags->ring[here] = (flags->terminated[lane] ? TERMINATED : 0) | (flags->truncated[lane] ? TRUNCATED : 0)
                            | (flags->valid && !flags->valid[lane] ? INVALID : 0);
        if (lane == 0) write_counts(&task);
        return;
    }
    const struct Field *field = &task.field[blockIdx.y];
    if (field->is_observed)
        write_observation(&task, field, lane, places + threadIdx.y);
    else
        copy_row(field->ring + here * field->row_bytes, field->source + lane * field->source_stride, field->row_bytes);
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

extern "C" __global__ void gather_rows(const struct Task task)
{
    i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= task.rows) return;
    i64 lanes = task.lanes, slots = task.slots, id = task.draws ? drawn_id(&task, (u32)row) : task.ids[row];
    i64 lane = id % lanes, here = id / lanes % slots * lanes + lane, there = here;
    if (task.last_ids) there = task.last_ids[row] / lanes % slots * lanes + task.last_ids[row] % lanes;
    if (blockIdx.y == task.fields) {
        if (threadIdx.x != 0) return;
        if (task.draws) task.ids[row] = id;
        if (task.flags.to_terminated) task.flags.to_terminated[row] = (task.flags.ring[there] & TERMINATED) != 0;
        if (task.flags.to_truncated) task.flags.to_truncated[row] = (task.flags.ring[there] & TRUNCATED) != 0;
        return;
    }
    const struct Field *field = &task.field[blockIdx.y];
    i64 nbytes = field->row_bytes;
    if (field->target) copy_row(field->target + row * nbytes, field->ring + here * nbytes, nbytes);
    if (field->next_target) {
        int place = field->apart[there];
        i64 next = (there + lanes) % (slots * lanes);
        copy_row(field->next_target + row * nbytes, place < 0 ? field->ring + next * nbytes : pooled(field, place), nbytes);
    }
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

/* A batch of a memory on the host: see native/structs.h, which declares the same structs. */

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

__device__ static void copy_runs(u8 *to, i64 to_step, const u8 *from, i64 from_step, const struct SlicedField *field)
{
    i64 run_bytes = field->run_bytes;
    u64 all = (u64)to | (u64)from | (u64)run_bytes | (u64)to_step | (u64)from_step;
    i64 word = !(all & 15) ? 16 : !(all & 3) ? 4 : 1, words = run_bytes / word;
    for (i64 i = threadIdx.x; i < field->outer * words; i += blockDim.x) {
        const u8 *source = from + (i / words) * from_step + (i % words) * word;
        u8 *target = to + (i / words) * to_step + (i % words) * word;
        if (word == 16) *(uint4 *)target = *(const uint4 *)source;
        else if (word == 4) *(u32 *)target = *(const u32 *)source;
        else *target = *source;
    }
}

__device__ static u8 *slice_at(const struct SlicedField *field, i64 position)
{
    i64 window = field->window, run_bytes = field->run_bytes;
    return field->to + position / window * window * field->outer * run_bytes + position % window * run_bytes;
}

/* Every slice that a batch needs is brought to one of its places. */
extern "C" __global__ void bring_slices(const struct Assembly batch)
{
    const struct SlicedField *field = &batch.field[blockIdx.y];
    i64 step = field->window * field->run_bytes;
    for (i64 i = field->first + blockIdx.x * blockDim.y + threadIdx.y; i < field->end; i += gridDim.x * blockDim.y) {
        const u8 *from = field->base + field->places[i];
        u8 *to = slice_at(field, field->positions[i]);
        if (field->outer == 1 || field->window == 1)
            copy_aligned(to, from, field->outer * field->run_bytes);
        else
            copy_runs(to, step, from, field->run_bytes, field);
    }
}

/* Slices that several observations show are copied from where they were brought to; and the short fields. */
extern "C" __global__ void finish_batch(const struct Assembly batch)
{
    if (blockIdx.y == batch.fields) {
        i64 step = 16 * 32 * 4, row = (i64)blockIdx.x * blockDim.y + threadIdx.y;
        for (i64 first = row * step; first < batch.head_bytes; first += gridDim.x * blockDim.y * step)
            copy_row(batch.head_to + first, batch.head_from + first,
                     batch.head_bytes - first < step ? batch.head_bytes - first : step);
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
            copy_runs(to, step, from, step, field);
    }
}
