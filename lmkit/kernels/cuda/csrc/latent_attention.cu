// Attention over blocked rows that are keys and values at once, of one KV head for all query heads: what latent attention
// is after each head's linears have moved to its queries and behind the sum (layers/latent.py; arXiv 2405.04434). Prompts,
// chunks of them and new tokens alike: ops.paged_attention in one pass over the rows, with an online softmax.
//
// A block of threads computes ROWS rows of one sequence. A row is one head of one query token; the heads follow each
// other, then comes the next token. A tile of KEYS stored rows is copied once, by cp.async, one ahead of the computation,
// and is used twice as it lies:
//
//   S [ROWS, KEYS] = Q K^T     a warp has 16 x 16 scores over one of PARTS parts of the columns; the parts meet in shared
//   P = 2^(S - maximum)        a row has LANES lanes
//   O [ROWS, DIM] += P K       a warp has all rows, and each WARPS-th load (kv.cuh) of the columns, transposed by ldmatrix
//
// Codes are multiplied as they are (kv.cuh). A token's scale s and minimum z enter its score, S = s (q . code) + z sum(q),
// and its weight, O = sum (P s) code + sum P z. P s is rounded to F16 relative to the greatest s so far ("top"). LIFT
// keeps small weights exact, as in decode_attention.cu.
//
// Each tile of rows may have its keys split into ranges. The block that finishes last adds the ranges up in order.
//
// DIM: width of a row, a multiple of 32. STORED: its storage. ROWS: 16 or 32. KEYS: 16 or 32. LM_BF16: q and the result are
// bfloat16.
#include "kv.cuh"
#include "sequence.cuh"

using Row = Storage<STORED, DIM>;
using Float = Row::Float;

constexpr int WARPS = 8, THREADS = 32 * WARPS, LANES = THREADS / ROWS, COPIERS = THREADS / KEYS;
constexpr int M_TILES = ROWS / 16, N_TILES = KEYS / 16, PARTS = WARPS / (M_TILES * N_TILES);
constexpr int EACH = Row::STEPS_PER_LOAD, LOADS = (Row::LOADS + WARPS - 1) / WARPS;  // of a warp's columns
constexpr int Q_STRIDE = Row::STEPS * 32 + 16, P_STRIDE = KEYS * 2 + 16;  // bytes, odd numbers of 16
constexpr int RECORD = ROWS * (DIM + 2);  // of a range: sums [ROWS][DIM], maxima [ROWS], totals [ROWS]
constexpr int MIN_TILES = 4;              // of keys, for a range of its own
constexpr float LIFT = 11.0f;
static_assert(DIM % 32 == 0 && M_TILES * N_TILES * PARTS == WARPS, "");
#define NOTHING __int_as_float(0xff800000)  // minus infinity

struct Stage {
    alignas(16) u8 rows[KEYS * Row::STRIDE];
    u32 params[KEYS];
};

struct Shared {
    alignas(16) u8 queries[ROWS * Q_STRIDE];  // Float, in the order of the steps' k
    Stage stages[2];
    float scores[PARTS][ROWS][KEYS + 4];
    alignas(16) u8 weights[ROWS * P_STRIDE];  // Float
    float factors[ROWS], maxima[ROWS], totals[ROWS], minima[ROWS];
    float top;
    int is_last;
};

using Out = float[M_TILES][LOADS * EACH][2][4];  // a warp's sums: the second index counts its steps, the third 8 columns

// The rows of a block of threads. Positions count tokens of the sequence.
struct Tile {
    int sequence, token, tokens, length;  // the number of the sequence, its first query's row of q, its queries, its keys
    int first, heads;                     // the first row; of the sequence's tokens x heads

    DEVICE int rows() const { return min(tokens * heads - first, ROWS); }
    DEVICE int position(int row) const { return length - tokens + (first + min(row, rows() - 1)) / heads; }
    DEVICE i64 flat(int row) const { return static_cast<i64>(token) * heads + first + row; }  // of q and of the result
};

// Copies stored rows from token `first` on. Those behind `last` become zeros.
DEVICE void copy_tile(Stage& to, const u8* data, const u8* params, const i32* table, int block_size, int first, int last) {
    const int key = threadIdx.x / COPIERS, token = first + key;
    const bool valid = token <= last;
    const i64 row = valid ? static_cast<i64>(table[token / block_size]) * block_size + token % block_size : 0;
#pragma unroll
    for (int piece = threadIdx.x % COPIERS; piece < Row::ROW / 16; piece += COPIERS)
        cp_async16(to.rows + key * Row::STRIDE + piece * 16, data + row * Row::ROW + piece * 16, valid);
    if (Row::CODED && threadIdx.x % COPIERS == 0) cp_async_small<4>(to.params + key, params + row * 4, valid);
}

// Stores the queries, as Float. Rows behind the sequence's last become zeros.
DEVICE void load_queries(Shared& shared, const u16* q, const Tile& tile) {
    for (int i = threadIdx.x; i < ROWS * (DIM / 8); i += THREADS) {
        const int row = i / (DIM / 8), first = i % (DIM / 8) * 8;
        alignas(16) u16 bits[8] = {};
        if (row < tile.rows())
            *reinterpret_cast<uint4*>(bits) = *reinterpret_cast<const uint4*>(q + tile.flat(row) * DIM + first);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            float x = Half::to_float(bits[e]);
            if (!Float::is_bf16) x = fminf(fmaxf(x, -65504.0f), 65504.0f);
            reinterpret_cast<u16*>(shared.queries + row * Q_STRIDE)[Row::key_place(first + e)] = Float::from_float(x);
        }
    }
}

DEVICE void multiply_queries(Shared& shared, const Stage& stage) {
    const int m = warp_id() % M_TILES, n = warp_id() / M_TILES % N_TILES, part = warp_id() / (M_TILES * N_TILES);
    const u8* a_row = shared.queries + (16 * m + (lane_id() & 15)) * Q_STRIDE + (lane_id() >> 4) * 16;
    float c[2][4] = {};
#pragma unroll 2
    for (int load = part; load < Row::LOADS; load += PARTS) {
        u32 b[EACH][4];
        Row::load_keys(b, stage.rows + 16 * n * Row::STRIDE, load);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int step = load * EACH + i;
            if (step >= Row::STEPS) continue;
            u32 a[4];
            ldmatrix_x4(a, a_row + step * 32);
            Float::mma(c[0], a, b[i][0], b[i][2]);
            Float::mma(c[1], a, b[i][1], b[i][3]);
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
        if constexpr (Row::CODED) {
            const u16* x = reinterpret_cast<const u16*>(shared.queries + row * Q_STRIDE);
            for (int i = lane; i < DIM; i += LANES) {
                const float value = Float::to_float(x[i]);
                query_sum += value, start -= Row::bias(i / 16) * value;
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
            if constexpr (Row::CODED) {
                scale[j] = F16::lo(stage.params[key]), minimum[j] = F16::hi(stage.params[key]);
                x[j] = x[j] * (scale[j] * Row::UNIT) + minimum[j] * query_sum;
            }
            x[j] = key <= visible ? x[j] * to_logits : NOTHING;
            greatest = fmaxf(greatest, x[j]), widest = fmaxf(widest, scale[j]);
        }
        greatest = over_lanes(greatest, fmaxf), widest = over_lanes(widest, fmaxf);
        const float base = greatest == NOTHING ? 0.0f : greatest;  // no key has been seen yet
        const float factor = ex2(maximum - base), inverse = Row::CODED && widest > 0.0f ? 1.0f / widest : 1.0f;
        if (lane == 0) shared.factors[row] = Row::CODED ? factor * (top * inverse) : factor;
        maximum = greatest, top = widest, total *= factor, minima *= factor;
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
            const float p = ex2(x[j] - base + LIFT);
            const u16 bits = Float::from_float(Row::CODED ? p * (scale[j] * inverse) : p);
            total += Row::CODED ? p : Float::to_float(bits);  // rounded as in the product: its rounding cancels
            minima += p * minimum[j];
            reinterpret_cast<u16*>(shared.weights + row * P_STRIDE)[lane + j * LANES] = bits;
        }
    }

    DEVICE void finish(Shared& shared) {
        total = over_lanes(total, add), minima = over_lanes(minima, add);
        if (lane == 0) shared.maxima[row] = maximum, shared.totals[row] = total, shared.minima[row] = minima;
        if (threadIdx.x == 0) shared.top = Row::CODED ? top * Row::UNIT : 1.0f;
    }
};

DEVICE void multiply_weights(Out& out, const Shared& shared, const Stage& stage) {
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
            if (load >= Row::LOADS) continue;
            u32 b[EACH][4];
            Row::load_values(b, stage.rows + 16 * k * Row::STRIDE, load);
#pragma unroll
            for (int i = 0; i < EACH; ++i)
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    Float::mma(out[m][l * EACH + i][0], a[m], b[i][0], b[i][2]);
                    Float::mma(out[m][l * EACH + i][1], a[m], b[i][1], b[i][3]);
                }
        }
    }
}

// Writes the results to `to` [rows][DIM], or unnormalized into a record.
DEVICE void write_rows(const Out& out, const Shared& shared, int rows, u16* to, float* record) {
#pragma unroll
    for (int i = 0; i < M_TILES * LOADS * EACH * 8; ++i) {
        const int m = i / (LOADS * EACH * 8), own = i / 8 % (LOADS * EACH);
        const int step = (warp_id() + own / EACH * WARPS) * EACH + own % EACH;
        const int row = 16 * m + lane_id() / 4 + (i & 2) * 4;
        if (step >= Row::STEPS || row >= rows) continue;
        const int element = Row::value_element(step, (i & 4) * 2 + 2 * (lane_id() & 3) + (i & 1));
        const float value = out[m][own][i >> 2 & 1][i & 3] * shared.top + shared.minima[row];
        if (record)
            record[row * DIM + element] = value;
        else
            to[row * DIM + element] = Half::from_float(value / shared.totals[row]);
    }
    if (record && threadIdx.x < ROWS) {
        record[ROWS * DIM + threadIdx.x] = shared.maxima[threadIdx.x];
        record[ROWS * (DIM + 1) + threadIdx.x] = shared.totals[threadIdx.x];
    }
}

// Merges the records of all ranges.
DEVICE void merge(const float* records, int count, int rows, u16* to) {
    for (int i = threadIdx.x; i < rows * (DIM / 4); i += THREADS) {
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
        *reinterpret_cast<uint2*>(to + 4 * i) =
            make_uint2(Half::pack(sum.x * inverse, sum.y * inverse), Half::pack(sum.z * inverse, sum.w * inverse));
    }
}

// Grid (tiles of rows, ranges). The last tiles, the heaviest, run first. to_logits is the scale of scores times log2(e).
// records: float [tiles][ranges][RECORD], if there are several ranges. Rows of a sequence without keys become 0.
extern "C" __global__ void __launch_bounds__(THREADS, ROWS > 16 ? 1 : 2)
latent_attention(const u16* q, const u8* data, const u8* params, const i32* block_tables, int max_blocks,
                 const i32* query_start, const i32* context_lens, int sequences, int heads, int block_size,
                 float to_logits, u16* out, float* records, i32* counters) {
    begin_kernel();
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
    const int index = gridDim.x - 1 - blockIdx.x, range = blockIdx.y;
    Tile tile;
    tile.heads = heads;
    tile.sequence = sequence_of<ROWS>(index, query_start, sequences, heads, tile.first);
    tile.token = query_start[tile.sequence], tile.tokens = query_start[tile.sequence + 1] - tile.token;
    tile.length = context_lens[tile.sequence];
    if (tile.rows() <= 0) return;
    u16* const result = out + tile.flat(0) * DIM;
    if (tile.length < tile.tokens) {  // an unused place in the batch
        for (int i = threadIdx.x; range == 0 && i < tile.rows() * DIM; i += THREADS) result[i] = 0;
        return;
    }
    const int last = tile.position(ROWS - 1), num_tiles = last / KEYS + 1;
    const int ranges = max(1, min(static_cast<int>(gridDim.y), num_tiles / MIN_TILES));
    if (range >= ranges) return;
    const int begin = static_cast<i64>(num_tiles) * range / ranges, end = static_cast<i64>(num_tiles) * (range + 1) / ranges;
    const i32* table = block_tables + static_cast<i64>(tile.sequence) * max_blocks;
    const auto copy = [&](int i) {
        if (i < end) copy_tile(shared.stages[(i - begin) & 1], data, params, table, block_size, i * KEYS, last);
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
        multiply_queries(shared, stage);
        __syncthreads();
        softmax.step(shared, stage, position - i * KEYS, to_logits);
        __syncthreads();
        multiply_weights(sums, shared, stage);
    }
    cp_async_wait<0>();
    softmax.finish(shared);
    __syncthreads();
    if (ranges == 1) return write_rows(sums, shared, tile.rows(), result, nullptr);

    records += static_cast<i64>(index) * gridDim.y * RECORD;
    write_rows(sums, shared, tile.rows(), nullptr, records + range * static_cast<i64>(RECORD));
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.is_last = atomicAdd(counters + index, 1) == ranges - 1;
        if (shared.is_last) counters[index] = 0;
    }
    __syncthreads();
    if (!shared.is_last) return;
    __threadfence();
    merge(records, ranges, tile.rows(), result);
}
EXPORT(latent_attention)
