// Attention over blocked KV whose rows are too wide for one warp's registers: heads of more than 256 elements, and rows
// that are keys and values at once (SHARED), of one KV head for all query heads. The latter is what latent attention is
// after each head's linears have moved to its queries and after the sum (layers/latent.py; arXiv 2405.04434). Prompts,
// chunks of them and new tokens alike: ops.paged_attention in one pass over the keys, with an online softmax.
//
// A block of threads computes ROWS rows of one sequence and KV head. A row is one head of one query token; the heads that
// share the KV head follow each other, then comes the next token. A tile of KEYS stored rows is copied by cp.async, one
// ahead of the computation, and is multiplied as it lies (int3, int2: unpacked); if SHARED, twice:
//
//   S [ROWS, KEYS] = Q K^T     a warp has 16 x 16 scores over one of PARTS parts of the columns; the parts meet in shared
//   P = 2^(S - maximum)        a row has LANES lanes
//   O [ROWS, DIM] += P V       a warp has all rows, and each WARPS-th load (kv.cuh) of the columns, transposed by ldmatrix
//
// Codes are multiplied as they are (kv.cuh). A key's scale s and minimum z enter its score, S = s (q . code) + z sum(q),
// and a value's its weight, O = sum (P s) code + sum P z. P s is rounded to F16 relative to the greatest s so far ("top").
// LIFT keeps small weights exact, as in decode_attention.cu.
//
// Each tile of rows may have its keys split into ranges. The block that finishes last adds the ranges up in order.
//
// DIM: width of a row, a multiple of 32. K_STORED, V_STORED: storage types. SHARED: values are the keys' rows. ROWS: 16 or
// 32. KEYS: 16 or 32. LM_BF16: q and the result are bfloat16.
#include "kv.cuh"
#include "sequence.cuh"

using Keys = Storage<K_STORED, DIM>;
using Values = Storage<V_STORED, DIM>;

constexpr int WARPS = 8, THREADS = 32 * WARPS, LANES = THREADS / ROWS, COPIERS = THREADS / KEYS;
constexpr int M_TILES = ROWS / 16, N_TILES = KEYS / 16, PARTS = WARPS / (M_TILES * N_TILES);
constexpr int EACH = Values::STEPS_PER_LOAD, LOADS = (Values::LOADS + WARPS - 1) / WARPS;  // of a warp's columns
constexpr int Q_STRIDE = Keys::STEPS * 32 + 16, P_STRIDE = KEYS * 2 + 16;  // bytes, odd numbers of 16
constexpr int RECORD = ROWS * (DIM + 2);  // of a range: sums [ROWS][DIM], maxima [ROWS], totals [ROWS]
constexpr int MIN_TILES = 4;              // of keys, for a range of its own
constexpr float LIFT = 11.0f;
static_assert(DIM % 32 == 0 && M_TILES * N_TILES * PARTS == WARPS, "");
#define NOTHING __int_as_float(0xff800000)  // minus infinity

// Rows of a tile, as they are stored, and their scales and minima.
template <class S>
struct Rows {
    alignas(16) u8 rows[KEYS * S::STORED_STRIDE];
    u32 params[KEYS];

    DEVICE void copy(const u8* data, const u8* of_data, i64 row, int key, bool valid) {
#pragma unroll 3
        for (int piece = threadIdx.x % COPIERS; piece < S::ROW / S::PIECE; piece += COPIERS) {
            u8* to = rows + key * S::STORED_STRIDE + piece * S::PIECE;
            cp_async<S::PIECE>(to, data + row * S::ROW + piece * S::PIECE, valid);
        }
        if (S::CODED && threadIdx.x % COPIERS == 0)
            S::copy_params(reinterpret_cast<u8*>(params + key), of_data, row, valid);
    }
};

struct Stage {
    Rows<Keys> keys;
#if SHARED
    DEVICE const Rows<Keys>& values() const { return keys; }
#else
    Rows<Values> own_values;
    DEVICE const Rows<Values>& values() const { return own_values; }
#endif
};

struct Shared {
    alignas(16) u8 queries[ROWS * Q_STRIDE];  // Keys::Float, in the order of the steps' k
    Stage stages[2];
    float scores[PARTS][ROWS][KEYS + 4];
    alignas(16) u8 weights[ROWS * P_STRIDE];  // Values::Float
    float factors[ROWS], maxima[ROWS], totals[ROWS], minima[ROWS];
    float top;
    int is_last;
};

using Out = float[M_TILES][LOADS * EACH][2][4];  // a warp's sums: the second index counts its steps, the third 8 columns

// The rows of a block of threads. Positions count tokens of the sequence.
struct Tile {
    int sequence, token, tokens, length;  // the number of the sequence, its first query's row of q, its queries, its keys
    int first, group, head, kv_heads;     // the first row; of the sequence's tokens x group; the KV head

    DEVICE int rows() const { return min(tokens * group - first, ROWS); }
    DEVICE int position(int row) const { return length - tokens + (first + min(row, rows() - 1)) / group; }
    // A row's place in q and in the result.
    DEVICE i64 place(int row) const {
        const int at = first + row;
        return ((token + at / group) * static_cast<i64>(kv_heads) + head) * group + at % group;
    }
};

struct Stored {
    const u8 *keys, *key_params, *values, *value_params;
    const i32* table;  // the sequence's blocks
    int block_size;
};

// Copies the rows of tokens from `first` on. Those after `last` become zeros.
DEVICE void copy_tile(Stage& to, const Stored& stored, const Tile& tile, int first, int last) {
    const int key = threadIdx.x / COPIERS, token = first + key, size = stored.block_size;
    const bool valid = token <= last;
    const i64 block = valid ? stored.table[token / size] : 0;
    const i64 row = valid ? (block * tile.kv_heads + tile.head) * size + token % size : 0;
    to.keys.copy(stored.keys, stored.key_params, row, key, valid);
#if !SHARED
    to.own_values.copy(stored.values, stored.value_params, row, key, valid);
#endif
}

// Stores the queries, as Keys::Float. Rows after the sequence's last become zeros.
DEVICE void load_queries(Shared& shared, const u16* q, const Tile& tile) {
    for (int i = threadIdx.x; i < ROWS * (DIM / 8); i += THREADS) {
        const int row = i / (DIM / 8), first = i % (DIM / 8) * 8;
        alignas(16) u16 bits[8] = {};
        if (row < tile.rows())
            *reinterpret_cast<uint4*>(bits) = *reinterpret_cast<const uint4*>(q + tile.place(row) * DIM + first);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            float x = Half::to_float(bits[e]);
            if (!Keys::Float::is_bf16) x = fminf(fmaxf(x, -65504.0f), 65504.0f);
            u16* to = reinterpret_cast<u16*>(shared.queries + row * Q_STRIDE);
            to[Keys::key_place(first + e)] = Keys::Float::from_float(x);
        }
    }
}

DEVICE void multiply_queries(Shared& shared, const u8* keys) {
    const int m = warp_id() % M_TILES, n = warp_id() / M_TILES % N_TILES, part = warp_id() / (M_TILES * N_TILES);
    const u8* a_row = shared.queries + (16 * m + (lane_id() & 15)) * Q_STRIDE + (lane_id() >> 4) * 16;
    float c[2][4] = {};
#pragma unroll 2
    for (int load = part; load < Keys::LOADS; load += PARTS) {
        u32 b[Keys::STEPS_PER_LOAD][4];
        Keys::load_keys(b, keys + 16 * n * Keys::STRIDE, load);
#pragma unroll
        for (int i = 0; i < Keys::STEPS_PER_LOAD; ++i) {
            const int step = load * Keys::STEPS_PER_LOAD + i;
            if (step >= Keys::STEPS) continue;
            u32 a[4];
            ldmatrix_x4(a, a_row + step * 32);
            Keys::Float::mma(c[0], a, b[i][0], b[i][2]);
            Keys::Float::mma(c[1], a, b[i][1], b[i][3]);
        }
    }
    const int row = 16 * m + lane_id() / 4, column = 16 * n + 2 * (lane_id() & 3);
#pragma unroll
    for (int i = 0; i < 8; ++i)
        shared.scores[part][row + (i & 2) * 4][column + (i >> 2) * 8 + (i & 1)] = c[i >> 2][i & 3];
}

template <class F>
DEVICE float over_lanes(float x, F join) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step >>= 1) x = join(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}
DEVICE float add(float x, float y) { return x + y; }

// A lane's state of its row. `total` and `minima` are over this lane's keys only.
struct Softmax {
    int row, lane;
    float query_sum, start;  // sum(q), and what takes off the bias of codes
    float maximum, total, minima, top;

    DEVICE void begin(const Shared& shared) {
        row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        maximum = NOTHING, total = minima = top = query_sum = start = 0.0f;
        if constexpr (Keys::CODED) {
            const u16* x = reinterpret_cast<const u16*>(shared.queries + row * Q_STRIDE);
            for (int i = lane; i < DIM; i += LANES) {
                const float value = Keys::Float::to_float(x[i]);
                query_sum += value, start -= Keys::bias(i / 16) * value;
            }
            query_sum = over_lanes(query_sum, add), start = over_lanes(start, add);
        }
    }

    // Scores -> weights, relative to the greatest score and scale so far; the factors that earlier sums take.
    DEVICE void step(Shared& shared, const Stage& stage, int visible, float to_logits) {
        constexpr int MINE = KEYS / LANES;
        float x[MINE], scale[MINE], minimum[MINE], greatest = maximum, widest = top;
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
            const int key = lane + j * LANES;
            x[j] = start, scale[j] = 1.0f, minimum[j] = 0.0f;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) x[j] += shared.scores[part][row][key];
            if constexpr (Keys::CODED) {
                const float2 params = Keys::scale_and_minimum(stage.keys.params[key], key);
                x[j] = x[j] * (params.x * Keys::UNIT) + params.y * query_sum;
            }
            if constexpr (Values::CODED) {
                const float2 params = Values::scale_and_minimum(stage.values().params[key], key);
                scale[j] = params.x, minimum[j] = params.y;
            }
            x[j] = key <= visible ? x[j] * to_logits : NOTHING;
            greatest = fmaxf(greatest, x[j]), widest = fmaxf(widest, scale[j]);
        }
        greatest = over_lanes(greatest, fmaxf), widest = over_lanes(widest, fmaxf);
        const float base = greatest == NOTHING ? 0.0f : greatest;  // no key has been seen yet
        const float factor = ex2(maximum - base), inverse = Values::CODED && widest > 0.0f ? 1.0f / widest : 1.0f;
        if (lane == 0) shared.factors[row] = Values::CODED ? factor * (top * inverse) : factor;
        maximum = greatest, top = widest, total *= factor, minima *= factor;
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
            const float p = ex2(x[j] - base + LIFT);
            const u16 bits = Values::Float::from_float(Values::CODED ? p * (scale[j] * inverse) : p);
            total += Values::CODED ? p : Values::Float::to_float(bits);  // rounded as in the product: its rounding cancels
            minima += p * minimum[j];
            reinterpret_cast<u16*>(shared.weights + row * P_STRIDE)[lane + j * LANES] = bits;
        }
    }

    DEVICE void finish(Shared& shared) {
        total = over_lanes(total, add), minima = over_lanes(minima, add);
        if (lane == 0) shared.maxima[row] = maximum, shared.totals[row] = total, shared.minima[row] = minima;
        if (threadIdx.x == 0) shared.top = Values::CODED ? top * Values::UNIT : 1.0f;
    }
};

DEVICE void multiply_weights(Out& out, const Shared& shared, const u8* values) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        const float* factors = shared.factors + 16 * m + lane_id() / 4;
        if (__any_sync(0xffffffffu, factors[0] != 1.0f || factors[8] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < LOADS * EACH * 8; ++i) out[m][i / 8][i >> 2 & 1][i & 3] *= factors[(i & 2) * 4];
        }
    }
#pragma unroll
    for (int k = 0; k < N_TILES; ++k) {
        u32 a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
            ldmatrix_x4(a[m], shared.weights + (16 * m + (lane_id() & 15)) * P_STRIDE + k * 32 + (lane_id() >> 4) * 16);
#pragma unroll
        for (int l = 0; l < LOADS; ++l) {
            const int load = warp_id() + l * WARPS;
            if (load >= Values::LOADS) continue;
            u32 b[EACH][4];
            Values::load_values(b, values + 16 * k * Values::STRIDE, load);
#pragma unroll
            for (int i = 0; i < EACH; ++i)
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    Values::Float::mma(out[m][l * EACH + i][0], a[m], b[i][0], b[i][2]);
                    Values::Float::mma(out[m][l * EACH + i][1], a[m], b[i][1], b[i][3]);
                }
        }
    }
}

// Writes the results to `to`, or unnormalized into a record.
DEVICE void write_rows(const Out& out, const Shared& shared, const Tile& tile, u16* to, float* record) {
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) {
        const int row = 8 * i + lane_id() / 4;
        if (row >= tile.rows()) continue;
        const float factor = record ? shared.top : shared.top / shared.totals[row];
        const float minimum = record ? shared.minima[row] : shared.minima[row] / shared.totals[row];
        const i64 first = tile.place(row) * DIM;
#pragma unroll
        for (int j = 0; j < LOADS * EACH * 4; ++j) {
            const int own = j / 4, step = (warp_id() + own / EACH * WARPS) * EACH + own % EACH;
            if (step >= Values::STEPS) continue;
            const int element = Values::value_element(step, (j & 2) * 4 + 2 * (lane_id() & 3) + (j & 1));
            const float value = out[i / 2][own][j >> 1 & 1][(i & 1) * 2 + (j & 1)] * factor + minimum;
            if (record)
                record[row * DIM + element] = value;
            else
                to[first + element] = Half::from_float(value);
        }
    }
    if (record && threadIdx.x < ROWS) {
        record[ROWS * DIM + threadIdx.x] = shared.maxima[threadIdx.x];
        record[ROWS * (DIM + 1) + threadIdx.x] = shared.totals[threadIdx.x];
    }
}

// Merges the records of all ranges.
DEVICE void merge(const float* records, int count, const Tile& tile, u16* to) {
    for (int i = threadIdx.x; i < tile.rows() * (DIM / 4); i += THREADS) {
        const int row = i / (DIM / 4);
        float greatest = NOTHING, total = 0.0f;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int s = 0; s < count; ++s)
            greatest = fmaxf(greatest, __ldcg(records + s * static_cast<i64>(RECORD) + ROWS * DIM + row));
#pragma unroll 4
        for (int s = 0; s < count; ++s) {
            const float* record = records + s * static_cast<i64>(RECORD);
            const float4 part = __ldcg(reinterpret_cast<const float4*>(record + 4 * i));
            const float weight = ex2(__ldcg(record + ROWS * DIM + row) - greatest);
            total += weight * __ldcg(record + ROWS * (DIM + 1) + row);
            sum.x += weight * part.x, sum.y += weight * part.y, sum.z += weight * part.z, sum.w += weight * part.w;
        }
        const float inverse = 1.0f / total;
        *reinterpret_cast<uint2*>(to + tile.place(row) * DIM + i % (DIM / 4) * 4) =
            make_uint2(Half::pack(sum.x * inverse, sum.y * inverse), Half::pack(sum.z * inverse, sum.w * inverse));
    }
}

// Grid (tiles of rows, ranges, KV heads). The last tiles, the heaviest, run first. to_logits is the scale of scores times
// log2(e). records: float [KV heads][tiles][ranges][RECORD], if there are several ranges. Rows of a sequence without keys
// become 0.
extern "C" __global__ void __launch_bounds__(THREADS, ROWS > 16 ? 1 : 2)
wide_attention(const u16* q, const u8* keys, const u8* key_params, const u8* values, const u8* value_params,
               const i32* block_tables, int max_blocks, const i32* query_start, const i32* context_lens, int sequences,
               int group, int block_size, float to_logits, u16* out, float* records, i32* counters) {
    begin_kernel();
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
    u8* const unpacked_keys = shared_memory + sizeof(Shared);  // rows of levels
    u8* const unpacked_values = unpacked_keys + (SHARED || !Keys::PACKED ? 0 : KEYS * Keys::STRIDE);
    const int index = gridDim.x - 1 - blockIdx.x, range = blockIdx.y;
    Tile tile;
    tile.group = group, tile.head = blockIdx.z, tile.kv_heads = gridDim.z;
    tile.sequence = sequence_of<ROWS>(index, query_start, sequences, group, tile.first);
    tile.token = query_start[tile.sequence], tile.tokens = query_start[tile.sequence + 1] - tile.token;
    tile.length = context_lens[tile.sequence];
    if (tile.rows() <= 0) return;
    if (tile.length < tile.tokens) {  // an unused place in the batch
        for (int i = threadIdx.x; range == 0 && i < tile.rows() * DIM; i += THREADS)
            out[tile.place(i / DIM) * DIM + i % DIM] = 0;
        return;
    }
    const int last = tile.position(ROWS - 1), num_tiles = last / KEYS + 1;
    const int ranges = max(1, min(static_cast<int>(gridDim.y), num_tiles / MIN_TILES));
    if (range >= ranges) return;
    const int begin = static_cast<i64>(num_tiles) * range / ranges;
    const int end = static_cast<i64>(num_tiles) * (range + 1) / ranges;
    const i32* table = block_tables + static_cast<i64>(tile.sequence) * max_blocks;
    const Stored stored{keys, key_params, values, value_params, table, block_size};
    const auto copy = [&](int i) {
        if (i < end) copy_tile(shared.stages[(i - begin) & 1], stored, tile, i * KEYS, last);
        cp_async_commit();
    };
    copy(begin);
    load_queries(shared, q, tile);
    __syncthreads();

    Softmax softmax;
    softmax.begin(shared);
    const int position = tile.position(softmax.row);
    Out sums = {};
    for (int i = begin; i < end; ++i) {
        const Stage& stage = shared.stages[(i - begin) & 1];
        cp_async_wait<0>();
        __syncthreads();
        copy(i + 1);
        if constexpr (Keys::PACKED || Values::PACKED) {
            Keys::unpack(unpacked_keys, stage.keys.rows, KEYS, threadIdx.x, THREADS);
            if (!SHARED) Values::unpack(unpacked_values, stage.values().rows, KEYS, threadIdx.x, THREADS);
            __syncthreads();
        }
        multiply_queries(shared, Keys::PACKED ? unpacked_keys : stage.keys.rows);
        __syncthreads();
        softmax.step(shared, stage, position - i * KEYS, to_logits);
        __syncthreads();
        multiply_weights(sums, shared, Values::PACKED ? unpacked_values : stage.values().rows);
    }
    cp_async_wait<0>();
    softmax.finish(shared);
    __syncthreads();
    if (ranges == 1) return write_rows(sums, shared, tile, out, nullptr);

    const int all = tile.head * gridDim.x + index;
    records += static_cast<i64>(all) * gridDim.y * RECORD;
    write_rows(sums, shared, tile, nullptr, records + range * static_cast<i64>(RECORD));
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.is_last = atomicAdd(counters + all, 1) == ranges - 1;
        if (shared.is_last) counters[all] = 0;
    }
    __syncthreads();
    if (!shared.is_last) return;
    __threadfence();
    merge(records, ranges, tile, out);
}
EXPORT(wide_attention)
