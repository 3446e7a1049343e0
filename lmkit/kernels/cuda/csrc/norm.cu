// The computation before a linear, in one pass over rows that stay in registers. For each row of x:
//
//     s = x, or x + residual, and the residual becomes that sum
//     y = s / sqrt(mean(s^2) + eps) * weight             (weight null: y = s)
//     with a bias s - mean(s) replaces s, and the bias is added to y
//     out = y as float32 or Half; or codes of y and their scale, where y is first rounded to Half if its dtype is Half:
//         int8   scale = max|y| / 127, code = y / scale to the nearest, halves to even; and the sum of the row's codes
//         e4m3   scale = max|y| / 448
//
// A row has blockDim.x threads, a multiple of 32. Thread t has columns 8 (t + blockDim.x i) .. + 7 for i < VECTORS. If
// one warp is enough for a row, blockDim.y rows share a block. The order of sums depends only on the number of columns.
// Row r of x is at (r / inner) * outer_stride + (r % inner) * inner_stride: heads inside a wider row.
#include "rows.cuh"

enum Output { FLOAT32 = 0, HALF = 1, INT8 = 2, E4M3 = 3 };

// Combines the values of all warps of a row. `partial` is this fold's own shared memory.
template <bool MAX>
DEVICE float fold_row(float x, float* partial) {
    x = MAX ? warp_max(x) : warp_sum(x);
    if (blockDim.x == 32) return x;
    if (lane_id() == 0) partial[warp_id()] = x;
    __syncthreads();
    x = lane_id() < blockDim.x / 32 ? partial[lane_id()] : 0.0f;  // sums and magnitudes: 0 adds nothing
    return MAX ? warp_max(x) : warp_sum(x);
}

DEVICE u32 code_of(float y, float scale, bool is_int8) {
    const float scaled = scale > 0.0f ? y / scale : 0.0f;
    return is_int8 ? static_cast<u32>(__float2int_rn(fminf(fmaxf(scaled, -127.0f), 127.0f))) & 0xffu : float_to_e4m3(scaled);
}

// Stores eight codes. Returns their sum as integers.
DEVICE i32 store_codes(u8* out, const float (&y)[WIDTH], float scale, bool is_int8, bool aligned, int count) {
    u32 packed[2] = {0, 0};
    i32 sum = 0;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        const u32 code = code_of(y[i], scale, is_int8);
        packed[i / 4] |= code << (8 * (i % 4));
        sum += static_cast<i8>(code);
        if (!aligned && i < count) out[i] = static_cast<u8>(code);
    }
    if (aligned && count > 0) *reinterpret_cast<uint2*>(out) = make_uint2(packed[0], packed[1]);
    return sum;
}

extern "C" __global__ void __launch_bounds__(VECTORS > 4 ? 256 : 512) norm_rows(
    const void* x, i64 outer_stride, i64 inner_stride, int inner, void* residual, i64 residual_stride,
    const float* weight, const float* bias, float eps, void* out, float* scales, i32* sums, int rows, int columns,
    int x_half, int residual_half, int output, int round_half, int aligned
) {
    begin_kernel();
    auto* partial = reinterpret_cast<float*>(shared_memory);  // [4][32]
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const i64 x_row = (row / inner) * outer_stride + (row % inner) * inner_stride;
    float y[VECTORS][WIDTH];
    float total = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = WIDTH * (threadIdx.x + blockDim.x * i), count = columns - column;
        load8(y[i], x, x_row + column, x_half, aligned, count);
        if (residual) {
            const i64 at = row * residual_stride + column;
            float before[WIDTH];
            load8(before, residual, at, residual_half, aligned, count);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                y[i][j] += before[j];
                if (residual_half) y[i][j] = Half::to_float(Half::from_float(y[i][j]));
            }
            store8(residual, at, y[i], residual_half, aligned, count);
        }
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) total += y[i][j], squares += y[i][j] * y[i][j];
        if (VECTORS > 4 && i % 4 == 3) __syncwarp();  // limits the loads in flight to those that registers can hold
    }
    if (bias) {
        const float mean = fold_row<false>(total, partial + 96) / columns;
        squares = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                y[i][j] = WIDTH * (threadIdx.x + blockDim.x * i) + j < columns ? y[i][j] - mean : 0.0f;
                squares += y[i][j] * y[i][j];
            }
    }
    if (weight) {
        const float factor = rsqrtf(fold_row<false>(squares, partial) / columns + eps);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int column = WIDTH * (threadIdx.x + blockDim.x * i), count = columns - column;
            float w[WIDTH], b[WIDTH] = {};
            load8(w, weight, column, false, aligned, count);
            if (bias) load8(b, bias, column, false, aligned, count);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) y[i][j] = y[i][j] * factor * w[j] + b[j];
            if (VECTORS > 4 && i % 4 == 3) __syncwarp();
        }
    }
    const i64 out_row = static_cast<i64>(row) * columns;
    if (output <= HALF) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int column = WIDTH * (threadIdx.x + blockDim.x * i);
            store8(out, out_row + column, y[i], output == HALF, aligned, columns - column);
        }
        return;
    }
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            if (round_half) y[i][j] = Half::to_float(Half::from_float(y[i][j]));
            largest = fmaxf(largest, fabsf(y[i][j]));
        }
    const float scale = fold_row<true>(largest, partial + 32) / (output == INT8 ? 127.0f : 448.0f);
    i32 sum = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = WIDTH * (threadIdx.x + blockDim.x * i);
        u8* codes = static_cast<u8*>(out) + out_row + column;
        sum += store_codes(codes, y[i], scale, output == INT8, aligned, columns - column);
    }
    // The sum is exact even as float32: codes are at most 127, and there are fewer than 2^17.
    const float codes_sum = fold_row<false>(static_cast<float>(sum), partial + 64);
    if (threadIdx.x == 0) {
        scales[row] = scale;
        if (output == INT8) sums[row] = static_cast<i32>(codes_sum);
    }
}
EXPORT(norm_rows)
