// y [M, N] = x [M, K] W [N, K]^T for M <= 8 and 16-bit weights: a stream of weights, each read once, through tensor cores.
//
// Weights are operand A (16 outputs), activations operand B (8 columns, of which M count). A block has 16 outputs and 8
// warps, which take chunks of 64 inputs in turn: together they read 1 KB of each row at a time. Nothing goes through
// shared memory: inside 32 inputs, mma's order of k is chosen so that the 16 bytes that lane 4 g + t loads of a row are its
// operands of two mma, and likewise for x:
//
//     k of the row:      8t  8t+1 | 8t+2  8t+3 | 8t+4  8t+5 | 8t+6  8t+7
//     first mma's k:     2t  2t+1 | 2t+8  2t+9 |
//     second mma's:                            | 2t    2t+1 | 2t+8  2t+9
//
// DEPTH chunks are under way in registers; one is loaded again as soon as it is used. At the end the warps' sums are added
// in the order of warps. The last chunk may have fewer inputs (a multiple of 8), the last block fewer outputs.
#include "ptx.cuh"

constexpr int WARPS = 8, OUTPUTS = 16, CHUNK = 64, DEPTH = 4, COLUMNS = 8;

// A lane's part of a chunk: rows g and g + 8, inputs 8t.. and 8t + 32..
struct Weights {
    uint4 v[2][2];

    DEVICE void load(const u16* row0, const u16* row1, int k, int inputs) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool inside = k + 32 * half < inputs;
            v[0][half] = inside ? load_stream(row0 + k + 32 * half) : make_uint4(0, 0, 0, 0);
            v[1][half] = inside ? load_stream(row1 + k + 32 * half) : make_uint4(0, 0, 0, 0);
        }
    }

    DEVICE void multiply(float (&sums)[4], const u16* x, int k, int inputs) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint4 b = make_uint4(0, 0, 0, 0);
            if (k + 32 * half < inputs) b = __ldg(reinterpret_cast<const uint4*>(x + k + 32 * half));
            const u32 first[4] = {v[0][half].x, v[1][half].x, v[0][half].y, v[1][half].y};
            const u32 second[4] = {v[0][half].z, v[1][half].z, v[0][half].w, v[1][half].w};
            Half::mma(sums, first, b.x, b.y);
            Half::mma(sums, second, b.z, b.w);
        }
    }
};

// `out`: float32 or Half [M, outputs]; or float32, rows `out_stride` apart, to which y is added.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) dense_gemv(
    const u16* x, i64 x_stride, const u16* weight, const float* bias, void* out, i64 out_stride, int tokens, int outputs,
    int inputs, int out_half, int add
) {
    const int g = lane_id() / 4, t = lane_id() % 4, first = blockIdx.x * OUTPUTS;
    const u16* row0 = weight + static_cast<i64>(min(first + g, outputs - 1)) * inputs;  // past the end: any row
    const u16* row1 = weight + static_cast<i64>(min(first + g + 8, outputs - 1)) * inputs;
    const u16* x_row = x + min(g, tokens - 1) * x_stride;

    constexpr int STEP = WARPS * CHUNK;
    const int begin = warp_id() * CHUNK + 8 * t;
    Weights ring[DEPTH];
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) ring[i].load(row0, row1, begin + i * STEP, inputs);
    for (int k = begin; k - 8 * t < inputs; k += DEPTH * STEP) {
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            ring[i].multiply(sums, x_row, k + i * STEP, inputs);
            ring[i].load(row0, row1, k + (i + DEPTH) * STEP, inputs);
        }
    }

    auto* partial = reinterpret_cast<float*>(shared_memory);  // [WARPS][COLUMNS][OUTPUTS]
#pragma unroll
    for (int i = 0; i < 4; ++i)
        partial[(warp_id() * COLUMNS + 2 * t + i % 2) * OUTPUTS + g + 8 * (i / 2)] = sums[i];
    __syncthreads();
    const int token = threadIdx.x / OUTPUTS, output = first + threadIdx.x % OUTPUTS;
    if (token >= tokens || output >= outputs) return;
    float y = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) y += partial[warp * COLUMNS * OUTPUTS + threadIdx.x];
    if (bias) y += bias[output];
    const i64 at = token * out_stride + output;
    if (out_half) static_cast<u16*>(out)[at] = Half::from_float(y);
    else static_cast<float*>(out)[at] = add ? static_cast<float*>(out)[at] + y : y;
}
EXPORT(dense_gemv)
