// Queries of keys that are balanced (ops.Balance) or lack a vector at position 0 (KVTensor.first), before attention.
//
// q [tokens][heads][DIM] becomes rows [tokens][heads][DIM], q times its KV head's matrix [DIM][DIM], in the type that
// meets the stored keys (Storage::Float). shares, float [tokens][heads][2 num_pairs + 1], are q's products with what
// those keys lack: for each pair of the mean the factors of the cosine and of the sine (ops.KeyMean), then q . first.
//
// Grid (tiles of rows, KV heads, DIM / COLUMNS). A row is one head of one token; the heads of a KV head follow each
// other, then comes the next token. A block multiplies ROWS rows, which lie in shared memory as float32, by COLUMNS
// columns of the matrix. A thread has four columns of every GROUPS-th row, and reads its part of the matrix once for
// all of them: with 4 heads of 128 for each KV head, 2048 tokens read 16 MB from L2 for a KV head, not 128 MB.
//
// DIM: D. BF16_KEYS: keys are stored as bfloat16. LM_BF16: q is bfloat16.
#include "kv.cuh"

using Key = Choice<BF16_KEYS, BF16, F16>::Type;

constexpr int THREADS = 128, ROWS = 32, STRIDE = DIM + 4;  // of a row in shared memory: the next one's banks are others
constexpr int COLUMNS = DIM % 64 == 0 ? 64 : DIM % 32 == 0 ? 32 : 16;
constexpr int LANES = COLUMNS / 4, GROUPS = THREADS / LANES, EACH = ROWS / GROUPS;  // rows of a thread
static_assert(ROWS % GROUPS == 0, "threads have equally many rows");

struct Mean {
    const float* vector;  // of the KV head
    const i32* pairs;
    int half, num_pairs;
};

// Rows first .. first + count - 1 of a KV head, and where they are.
struct Rows {
    int first, count, group, head, heads;  // head: the KV head's first; heads: of all

    DEVICE i64 token(int row) const { return (first + row) / group; }
    DEVICE int head_of(int row) const { return head + (first + row) % group; }
    DEVICE i64 index(int row) const { return token(row) * heads + head_of(row); }
};

DEVICE void load_rows(float* shared, const u16* q, i64 q_token, i64 q_head, const Rows& rows) {
    constexpr int PIECES = DIM / 8;
    for (int i = threadIdx.x; i < rows.count * PIECES; i += THREADS) {
        const int row = i / PIECES, column = i % PIECES * 8;
        alignas(16) u16 bits[8];
        alignas(16) float x[8];
        load_span(bits, q + rows.token(row) * q_token + rows.head_of(row) * q_head + column);
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = Half::to_float(bits[e]);
        store_span(shared + row * STRIDE + column, x);
    }
}

DEVICE void write_shares(float* shares, const float* shared, const Rows& rows, const Mean& mean, const float* first) {
    const int size = 2 * mean.num_pairs + 1, half = mean.half;
    for (int i = threadIdx.x; i < rows.count * mean.num_pairs; i += THREADS) {
        const int row = i / mean.num_pairs, p = i % mean.num_pairs, pair = mean.pairs[p];
        const float *b = mean.vector + pair, *x = shared + row * STRIDE + pair;
        float* to = shares + rows.index(row) * size + 2 * p;
        to[0] = x[0] * b[0] + x[half] * b[half], to[1] = x[half] * b[0] - x[0] * b[half];
    }
    for (int row = warp_id(); row < rows.count; row += THREADS / 32) {
        float sum = 0.0f;
        if (first)
            for (int i = lane_id(); i < DIM; i += 32) sum = fmaf(shared[row * STRIDE + i], first[i], sum);
        sum = warp_sum(sum);
        if (lane_id() == 0) shares[rows.index(row) * size + size - 1] = sum;
    }
}

// Multiplies a thread's rows by four columns of the matrix.
DEVICE void multiply(float (&y)[EACH][4], const float* shared, const float* matrix, int row, int count) {
#pragma unroll 2
    for (int i = 0; i < DIM; i += 4) {
        float4 m[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) m[j] = __ldg(reinterpret_cast<const float4*>(matrix + (i + j) * DIM));
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            if (row + e * GROUPS >= count) break;
            alignas(16) float x[4];
            load_span(x, shared + (row + e * GROUPS) * STRIDE + i);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                y[e][0] = fmaf(x[j], m[j].x, y[e][0]), y[e][1] = fmaf(x[j], m[j].y, y[e][1]);
                y[e][2] = fmaf(x[j], m[j].z, y[e][2]), y[e][3] = fmaf(x[j], m[j].w, y[e][3]);
            }
        }
    }
}

// Null: matrices (rows are q), mean_vector (with num_pairs 0), first.
extern "C" __global__ void __launch_bounds__(THREADS)
turn(const u16* q, i64 q_token, i64 q_head, const float* matrices, const float* mean_vector, const i32* mean_pairs,
     int mean_half, int num_pairs, const float* first, u16* out, float* shares, int tokens, int group) {
    begin_kernel();
    float* const shared = reinterpret_cast<float*>(shared_memory);
    const int kv_head = blockIdx.y, begin = blockIdx.x * ROWS;
    const Rows rows{begin, min(ROWS, tokens * group - begin), group, kv_head * group, static_cast<int>(gridDim.y) * group};
    load_rows(shared, q, q_token, q_head, rows);
    __syncthreads();
    if (blockIdx.z == 0) {
        const Mean mean{mean_vector + kv_head * DIM, mean_pairs + kv_head * num_pairs, mean_half, num_pairs};
        write_shares(shares, shared, rows, mean, first ? first + kv_head * DIM : nullptr);
    }
    const int row = threadIdx.x / LANES, column = blockIdx.z * COLUMNS + threadIdx.x % LANES * 4;
    float y[EACH][4] = {};
    if (matrices) multiply(y, shared, matrices + static_cast<i64>(kv_head) * DIM * DIM + column, row, rows.count);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int mine = row + e * GROUPS;
        if (mine >= rows.count) break;
        alignas(8) u16 bits[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float x = matrices ? y[e][j] : shared[mine * STRIDE + column + j];
            bits[j] = Key::from_float(Key::is_bf16 ? x : fminf(fmaxf(x, -65504.0f), 65504.0f));
        }
        store_span(out + rows.index(mine) * DIM + column, bits);
    }
}
EXPORT(turn)
