// y = x W^T for 48 tokens and more and a packed weight (gemm.cuh), with the tensor cores' full rate: wgmma.cuh.
//
// The kernel computes Y^T = W X^T. A warpgroup has TALL times 64 outputs, and N_TOKENS tokens. Warp w of it has tile
// 4 q + w of the q-th 64 outputs: its fragments of codes are operand A as they are packed, in registers. x is operand B.
// `arrange` first brings x into the order in which wgmma reads it, so that a stage of x is one piece of memory:
//
//     arranged x     [blocks of N_TOKENS tokens][chunks of 8 inputs][N_TOKENS][8]; within 32 inputs, chunk 2 i + e has
//                    inputs 8 t + 4 i + 2 e + l at 2 t + l (gemm.cuh). Zeros beyond the last token and the last input
//
//     grid    (blocks of tokens, ranges of K, blocks of BLOCK_TILES tiles)
//     block   WARPGROUPS * 128 threads
//
// Codes and x come by cp.async into rings of DEPTH stages. A lane reads back the codes that it copied; x and scales are
// everybody's, so each stage has a barrier. Products of one stage are still under way at the next barrier: the slot that
// is filled after it is that of the stage before the last. DEPTH - 2 stages are in flight.
//
// A part of a stage is 64 inputs (32 with groups of 32) of 64 outputs. While the tensor cores multiply one part, the
// warps dequantize the next one. Codes minus zeros are exact in Half. Their products are summed in float32 over a group
// (at most a stage of it), scaled in float32 and added to the sums, as in gemm.cu.
//
// For 128 outputs and 128 tokens a stage is 8 * 2 * 64 = 1024 cycles of the tensor cores, 2 * 72 instructions of a
// scheduler to dequantize and 2 * 64 to scale. A block reads 32 KB of x for them, 56 bytes per ns at full rate: twice as
// many outputs a block (TALL 2) halve that.
//
// With ranges of K, blocks write their sums to `partial`, and the kernel `merge` adds them in order.
//
// Defines besides gemm.cuh's: N_TOKENS (48, 64, 96, 128), TALL, WARPGROUPS, DEPTH.
#include "activation.cuh"
#include "gemm.cuh"
#include "wgmma.cuh"

constexpr int THREADS = 128 * WARPGROUPS, WARPS = 4 * WARPGROUPS;
constexpr int BLOCK_TILES = 4 * TALL * WARPGROUPS, BLOCK_ROWS = TILE * BLOCK_TILES;
constexpr int SLOT_BYTES = TALL * (STAGE_BYTES + STAGE_PARAM_BYTES);  // of a warp
constexpr int CHUNK_BYTES = N_TOKENS * 16;                            // 8 inputs of x
constexpr int X_BYTES = STAGE / 8 * CHUNK_BYTES;                      // a stage of x
constexpr int STEPS = SCALES == 4 ? 2 : 4;                            // of 16 inputs, in a part
constexpr int PARTS = STAGE / 16 / STEPS;                             // of a stage, for 64 outputs
constexpr int GROUP_PARTS = SCALES > 1 ? 1 : PARTS;                   // with one scale
constexpr int SLICE = 32;                                             // tokens whose results are written at a time
constexpr int SUM_STRIDE = BLOCK_ROWS + 4;

enum Kind { HALF, FLOAT, ADD };

struct Results {
    const float* bias;  // [rows of the weight] or null
    void* y;            // [tokens, outputs]
    int outputs, activation, kind;
};

DEVICE float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

DEVICE float fast_gated(float x, float y, int activation) {
    const float t = gate_exponent(x, y, activation);
    return __fdividef(x, 1.0f + __expf(-t)) * y;
}

// The row of a column's sum within its block. Gated tiles have 8 gates, then the 8 values that they multiply.
DEVICE int sum_row(int column, int activation) {
    return activation ? (column >> 3) * TILE + (column & 7) : column;
}

// Stores the results of outputs n .. n + 3 of a token. `up`: what gates multiply.
DEVICE void store_results(const Results& r, i64 token, int n, float4 sum, float4 up) {
    if (r.bias) sum = add4(sum, *reinterpret_cast<const float4*>(r.bias + n));
    if (r.activation) {
        if (r.bias) up = add4(up, *reinterpret_cast<const float4*>(r.bias + r.outputs + n));
        sum = make_float4(fast_gated(sum.x, up.x, r.activation), fast_gated(sum.y, up.y, r.activation),
                          fast_gated(sum.z, up.z, r.activation), fast_gated(sum.w, up.w, r.activation));
    }
    const i64 at = token * r.outputs + n;
    if (r.kind == HALF) {
        *reinterpret_cast<uint2*>(static_cast<u16*>(r.y) + at) = make_uint2(Half::pack(sum.x, sum.y), Half::pack(sum.z, sum.w));
        return;
    }
    auto* to = reinterpret_cast<float4*>(static_cast<float*>(r.y) + at);
    *to = r.kind == ADD ? add4(*to, sum) : sum;
}

// x [tokens, inputs] in the order above. Four lanes have 32 inputs of a token: each loads 8 of them and stores one chunk,
// so loads and stores are whole sectors. Between, they transpose 4 x 4 pairs: the pair that lane t has of chunk c goes to
// lane c, as its t-th.
extern "C" __global__ void __launch_bounds__(256) arrange(const u16* x, u16* to, int tokens, int inputs, int chunks) {
    begin_kernel();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, mine = i % 4, in_block = i / 4 % N_TOKENS;
    const int chunk = i / 4 / N_TOKENS * 4 + mine, token = blockIdx.y * N_TOKENS + in_block;
    if (chunk >= chunks) return;  // all lanes of a warp, or none
    uint4 loaded = make_uint4(0, 0, 0, 0);
    if (token < tokens && 8 * chunk < inputs)
        loaded = *reinterpret_cast<const uint4*>(x + static_cast<i64>(token) * inputs + 8 * chunk);
    u32 pairs[4] = {};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        const int other = mine ^ step;
        const u32 pair = __shfl_xor_sync(0xffffffffu, component(loaded, other), step);
#pragma unroll
        for (int t = 0; t < 4; ++t) pairs[t] = t == other ? pair : pairs[t];
    }
    const i64 at = (static_cast<i64>(blockIdx.y) * chunks + chunk) * N_TOKENS + in_block;
    reinterpret_cast<uint4*>(to)[at] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
EXPORT(arrange)

// Adds up the ranges' sums [ranges, tokens, padded_rows] and stores the results. A thread has four outputs of a token.
extern "C" __global__ void __launch_bounds__(256) merge(const float* partial, const float* bias, void* y, int ranges,
                                                        int tokens, int padded_rows, int outputs, int activation, int kind) {
    begin_kernel();
    const int n = 4 * (blockIdx.x * blockDim.x + threadIdx.x), token = blockIdx.y;
    if (n >= outputs) return;
    const float* from = partial + static_cast<i64>(token) * padded_rows + sum_row(n, activation);
    float4 sum = make_float4(0, 0, 0, 0), up = sum;
#pragma unroll 4
    for (int range = 0; range < ranges; ++range) {
        const float* at = from + static_cast<i64>(range) * tokens * padded_rows;
        sum = add4(sum, *reinterpret_cast<const float4*>(at));
        if (activation) up = add4(up, *reinterpret_cast<const float4*>(at + 8));
    }
    store_results({bias, y, outputs, activation, kind}, token, n, sum, up);
}
EXPORT(merge)

// The weights of a warp, by stage: pointers of each lane, which advance.
struct Stream {
    const u8 *codes, *params;  // of the next stage, but with SCALES 0 the params of the first group
    i64 tile_codes, tile_params;  // from one 64 outputs to the next
    int stage, stages, stages_per_group, tile, tiles;

    DEVICE void copy(u8* slot, int lane, bool valid) {
        const u8* group = SCALES == 0 ? params + stage / stages_per_group * PARAM_BYTES : params;
#pragma unroll
        for (int m = 0; m < TALL; ++m) {
            const bool there = valid && tile + 4 * m < tiles;
#pragma unroll
            for (int load = 0; load < LOADS; ++load)
                cp_async16_stream(slot + m * STAGE_BYTES + load * LOAD_BYTES + lane * 16,
                                  codes + m * tile_codes + load * LOAD_BYTES, there);
            if (lane < STAGE_PARAM_BYTES / 16)
                cp_async16(slot + TALL * STAGE_BYTES + m * STAGE_PARAM_BYTES + lane * 16, group + m * tile_params, there);
        }
        ++stage;
        codes += STAGE_BYTES;
        params += SCALES * PARAM_BYTES;
    }
};

// Writes the sums of SLICE tokens from FIRST on to shared memory, as [token][row].
template <int FIRST>
DEVICE void put_sums(float* to, const float (&sums)[TALL][N_TOKENS / 2], int first_row) {
    const int lane = lane_id(), g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int m = 0; m < TALL; ++m)
#pragma unroll
        for (int i = 0; i < SLICE / 2; ++i)
            if (FIRST / 2 + i < N_TOKENS / 2) {
                const int token = i / 4 * 8 + 2 * t + (i & 1), row = first_row + 64 * m + (i >> 1 & 1) * 8 + g;
                to[token * SUM_STRIDE + row] = sums[m][FIRST / 2 + i < N_TOKENS / 2 ? FIRST / 2 + i : 0];
            }
}

// Turns SLICE tokens of the block's sums into results, or into this range's share of them.
template <int FIRST>
DEVICE void give(const Results& r, float* partial, const float (&sums)[TALL][N_TOKENS / 2], int first_row, int token,
                 int count, int tokens) {
    if (FIRST >= count) return;
    auto* all = reinterpret_cast<float*>(shared_memory);
    __syncthreads();
    put_sums<FIRST>(all, sums, first_row);
    __syncthreads();
    const bool splits = gridDim.y > 1;
    const int here = min(count - FIRST, SLICE), log_columns = r.activation && !splits ? 1 : 0;
    const int quads = BLOCK_ROWS / 4 >> log_columns, width = 4 * quads;
#pragma unroll 1
    for (int i = threadIdx.x; i < here * quads; i += THREADS) {
        const int t = i / quads, column = i % quads * 4;
        const i64 row_token = token + FIRST + t;
        if (splits) {
            const i64 padded = static_cast<i64>(gridDim.z) * BLOCK_ROWS;
            float* to = partial + (static_cast<i64>(blockIdx.y) * tokens + row_token) * padded + blockIdx.z * BLOCK_ROWS;
            *reinterpret_cast<float4*>(to + column) = *reinterpret_cast<const float4*>(all + t * SUM_STRIDE + column);
            continue;
        }
        const int n = blockIdx.z * width + column;
        if (n >= r.outputs) continue;
        const float* from = all + t * SUM_STRIDE + sum_row(column, r.activation);
        store_results(r, row_token, n, *reinterpret_cast<const float4*>(from), *reinterpret_cast<const float4*>(from + (r.activation ? 8 : 0)));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_wide(const u8* x, const u8* codes, const u8* params, const float* bias, void* y, float* partial, int tokens,
              int outputs, int tiles, int stages, int groups, int stages_per_group, int range_stages, int activation,
              int kind, int early) {
    launch_next();
    const int lane = lane_id(), warp = __shfl_sync(0xffffffffu, warp_id(), 0), warpgroup = warp / 4;
    const int first_stage = blockIdx.y * range_stages, mine = min(stages - first_stage, range_stages);
    const int token = blockIdx.x * N_TOKENS, first_row = warpgroup * TALL * 64 + warp % 4 * TILE;
    const int first_tile = blockIdx.z * BLOCK_TILES + first_row / TILE;
    u8* const ring = shared_memory + DEPTH * X_BYTES + warp * DEPTH * SLOT_BYTES;
    const u8* x_next = x + (static_cast<i64>(blockIdx.x) * stages + first_stage) * X_BYTES;
    Stream stream{
        codes + (static_cast<i64>(first_tile) * stages + first_stage) * STAGE_BYTES + lane * 16,
        params + (static_cast<i64>(first_tile) * groups + first_stage * SCALES) * PARAM_BYTES + lane * 16,
        4 * static_cast<i64>(stages) * STAGE_BYTES, 4 * static_cast<i64>(groups) * PARAM_BYTES,
        first_stage, stages, stages_per_group, first_tile, tiles
    };
    int x_copied = 0, codes_copied = 0;  // stages
    const auto copy_codes = [&] {
        stream.copy(ring + codes_copied % DEPTH * SLOT_BYTES, lane, codes_copied < mine);
        ++codes_copied;
    };
    const auto copy_x = [&] {
        if (x_copied < mine)
            for (int i = threadIdx.x; i < X_BYTES / 16; i += THREADS)
                cp_async16(shared_memory + x_copied % DEPTH * X_BYTES + i * 16, x_next + i * 16);
        ++x_copied;
        x_next += X_BYTES;
    };
    if (early) {
#pragma unroll 1
        for (int i = 0; i < DEPTH - 2; ++i) copy_codes();
    }
    wait_for_previous();
#pragma unroll 1
    for (int i = 0; i < DEPTH - 2; ++i) {  // with `early` the first group has all codes so far: it is waited for first
        if (!early) copy_codes();
        copy_x();
        cp_async_commit();
    }

    float sums[TALL][N_TOKENS / 2] = {}, group[N_TOKENS / 2] = {}, scale[2] = {};
    u32 a[2][STEPS][4];
    uint4 words;
    Params p;
    for (int stage = 0; stage < mine; ++stage) {
        cp_async_wait<DEPTH - 3>();
        fence_for_wgmma();
        __syncthreads();  // the stage has arrived, and all have ended the products of the stage before the last
        copy_codes();
        copy_x();
        cp_async_commit();
        const u8* const slot = ring + stage % DEPTH * SLOT_BYTES;
        const SharedMatrix b = shared_matrix(shared_memory + stage % DEPTH * X_BYTES, CHUNK_BYTES, 128);
#pragma unroll
        for (int m = 0; m < TALL; ++m)
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                wgmma_wait<1>();  // the registers of the part before the last are free
                u32 (&fragments)[STEPS][4] = a[(m * PARTS + part) & 1];
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    const int k32 = (part * STEPS + step) / 2;
                    if (step % 2 == 0) {
                        const u8* load = slot + m * STAGE_BYTES + k32 / HALVES * LOAD_BYTES;
                        if (k32 % HALVES == 0) words = reinterpret_cast<const uint4*>(load)[lane];
                        if (k32 % SCALE_STRIDE == 0)
                            p = load_params(slot + TALL * STAGE_BYTES + m * STAGE_PARAM_BYTES, k32 / SCALE_STRIDE, lane >> 2);
                    }
                    fragment(fragments[step], words, k32 % HALVES, step % 2, p.excess);
                }
                if (part % GROUP_PARTS == 0) {
                    constexpr int LAST = TALL - 1;
                    wgmma_wait_for(group);
#pragma unroll
                    for (int i = 0; i < N_TOKENS / 2; ++i)
                        sums[part > 0 ? m : m > 0 ? m - 1 : LAST][i] += scale[i >> 1 & 1] * group[i];
                    scale[0] = p.scale[0], scale[1] = p.scale[1];
                }
                wgmma_fence();
#pragma unroll
                for (int step = 0; step < STEPS; ++step)
                    wgmma<N_TOKENS>(group, fragments[step], shared_matrix_behind(b, 2 * (part * STEPS + step) * CHUNK_BYTES),
                                    step > 0 || part % GROUP_PARTS > 0);
                wgmma_commit();
            }
    }
    wgmma_wait_for(group);
#pragma unroll
    for (int i = 0; i < N_TOKENS / 2; ++i) sums[TALL - 1][i] += scale[i >> 1 & 1] * group[i];
    cp_async_wait<0>();

    const int count = min(tokens - token, N_TOKENS);
    const Results results{bias, y, outputs, activation, kind};
    give<0>(results, partial, sums, first_row, token, count, tokens);
    give<SLICE>(results, partial, sums, first_row, token, count, tokens);
    if (N_TOKENS > 2 * SLICE) give<2 * SLICE>(results, partial, sums, first_row, token, count, tokens);
    if (N_TOKENS > 3 * SLICE) give<3 * SLICE>(results, partial, sums, first_row, token, count, tokens);
}
EXPORT(gemm_wide)
