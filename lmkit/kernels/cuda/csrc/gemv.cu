// y [M, N] = x [M, K] W [N, K]^T for M <= 8: a stream of weights, each read once, through tensor cores.
//
//     FORMAT 0   x and W are Half, y = x W^T + bias[n]
//     FORMAT 1   both are int8    y = (x W^T - zero[n] * sum of row m of x) * row_scale[m] * scale[n] + bias[n], exact
//     FORMAT 2   both are e4m3    y = x W^T * row_scale[m] * scale[n] + bias[n]     up to the scales, or in float32
//
// Weights are operand A (16 outputs), activations operand B (8 columns; M of them are used). A block has 16 outputs and
// 8 warps, which take chunks of 128 bytes in turn: together they read 1 KB of each row at a time. Nothing goes through
// shared memory. Inside 64 bytes, mma's order of k is chosen so that the 16 bytes (words 0 to 3) that lane 4 g + t
// loads of a row are its operands of two mma. The same holds for x. For FORMAT 0:
//
//     k of the row:      8t  8t+1 | 8t+2  8t+3 | 8t+4  8t+5 | 8t+6  8t+7
//     first mma's k:     2t  2t+1 | 2t+8  2t+9 |
//     second mma's:                            | 2t    2t+1 | 2t+8  2t+9
//
// int8 has four inputs in a word. e4m3 becomes F16, exactly: a word makes the operands of an mma.
//
// DEPTH chunks are in flight in registers; each is loaded again once it is used. At the end the warps' sums are added
// in the order of warps. The last chunk may be short (a multiple of 16 bytes), the last block may have fewer outputs.
#include "ptx.cuh"

enum Format { HALF = 0, INT8 = 1, E4M3 = 2 };
constexpr int WARPS = 8, OUTPUTS = 16, CHUNK = 128, DEPTH = FORMAT == E4M3 ? 2 : 4, COLUMNS = 8;

#if FORMAT == 1
using Sum = i32;
#else
using Sum = float;
#endif

// Two words of row g, of row g + 8, and of x.
DEVICE void multiply_words(Sum (&sums)[4], u32 g0, u32 g1, u32 h0, u32 h1, u32 b0, u32 b1) {
#if FORMAT == 0
    Half::mma(sums, {g0, h0, g1, h1}, b0, b1);
#elif FORMAT == 1
    mma_s8(sums, {g0, h0, g1, h1}, b0, b1);
#else
    F16::mma(sums, {e4m3_to_f16(g0), e4m3_to_f16(h0), e4m3_to_f16(g0 >> 16), e4m3_to_f16(h0 >> 16)}, e4m3_to_f16(b0), e4m3_to_f16(b0 >> 16));
    F16::mma(sums, {e4m3_to_f16(g1), e4m3_to_f16(h1), e4m3_to_f16(g1 >> 16), e4m3_to_f16(h1 >> 16)}, e4m3_to_f16(b1), e4m3_to_f16(b1 >> 16));
#endif
}

// A lane's part of a chunk: of rows g and g + 8, the bytes 16t.. and 16t + 64..
struct Weights {
    uint4 v[2][2];

    DEVICE void load(const u8* row0, const u8* row1, int at, int row_bytes) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool inside = at + 64 * half < row_bytes;
            v[0][half] = inside ? load_stream(row0 + at + 64 * half) : make_uint4(0, 0, 0, 0);
            v[1][half] = inside ? load_stream(row1 + at + 64 * half) : make_uint4(0, 0, 0, 0);
        }
    }

    DEVICE void multiply(Sum (&sums)[4], const u8* x, int at, int row_bytes) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint4 b = make_uint4(0, 0, 0, 0);
            if (at + 64 * half < row_bytes) b = *reinterpret_cast<const uint4*>(x + at + 64 * half);
            const uint4 g = v[0][half], h = v[1][half];
            multiply_words(sums, g.x, g.y, h.x, h.y, b.x, b.y);
            multiply_words(sums, g.z, g.w, h.z, h.w, b.z, b.w);
        }
    }
};

// Rows of x are `x_stride` bytes apart. Rows of W have `row_bytes`, which is a multiple of 16, as are all addresses.
// `out` is float32 or Half with rows `out_stride` elements apart, or float32 to which y is added.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) gemv(
    const u8* x, i64 x_stride, const u8* weight, const float* row_scales, const float* scales, const i32* sums_x,
    const i32* zeros, const float* bias, void* out, i64 out_stride, int tokens, int outputs, int row_bytes, int out_half,
    int add
) {
    launch_next();
    const int g = lane_id() / 4, t = lane_id() % 4, first = blockIdx.x * OUTPUTS;
    const u8* row0 = weight + static_cast<i64>(min(first + g, outputs - 1)) * row_bytes;  // past the end: any row
    const u8* row1 = weight + static_cast<i64>(min(first + g + 8, outputs - 1)) * row_bytes;
    const u8* x_row = x + min(g, tokens - 1) * x_stride;

    constexpr int STEP = WARPS * CHUNK;
    const int begin = warp_id() * CHUNK + 16 * t;
    Weights ring[DEPTH];
    Sum sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) ring[i].load(row0, row1, begin + i * STEP, row_bytes);
    wait_for_previous();
    for (int at = begin; at - 16 * t < row_bytes; at += DEPTH * STEP) {
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            ring[i].multiply(sums, x_row, at + i * STEP, row_bytes);
            ring[i].load(row0, row1, at + (i + DEPTH) * STEP, row_bytes);
        }
    }

    auto* partial = reinterpret_cast<Sum*>(shared_memory);  // [WARPS][COLUMNS][OUTPUTS]
#pragma unroll
    for (int i = 0; i < 4; ++i) partial[(warp_id() * COLUMNS + 2 * t + i % 2) * OUTPUTS + g + 8 * (i / 2)] = sums[i];
    __syncthreads();
    const int token = threadIdx.x / OUTPUTS, output = first + threadIdx.x % OUTPUTS;
    if (token >= tokens || output >= outputs) return;
    Sum total = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += partial[warp * COLUMNS * OUTPUTS + threadIdx.x];
    if (FORMAT == INT8 && zeros) total -= static_cast<Sum>(zeros[output] * sums_x[token]);
    float y = static_cast<float>(total);
    if (FORMAT != HALF) y = y * row_scales[token] * scales[output];
    if (bias) y += bias[output];
    const i64 at = token * out_stride + output;
    if (out_half) static_cast<u16*>(out)[at] = Half::from_float(y);
    else static_cast<float*>(out)[at] = add ? static_cast<float*>(out)[at] + y : y;
}
EXPORT(gemv)
