// The computation after a product of a library. For each row of `product` [rows, N], int32 or float32:
//
//     y = (product - zero[n] * sum[row]) * row_scale[row] * scale[n] + bias[n]      (null terms are left out)
//     y = f(y[n]) * y[n + N/2]                                                      (with an activation: N/2 columns)
//
// The result is stored as float32 or Half, or added to a float32 stream. A thread has eight columns.
#include "activation.cuh"
#include "rows.cuh"

struct Product {
    const void* values;  // of one row
    const float *row_scale, *scales, *bias;
    const i32 *sum, *zeros;
    bool integers, aligned;

    DEVICE void load(float (&y)[WIDTH], int column, int count) const {
        load8(y, values, column, false, aligned, count);
        float scale[WIDTH], zero[WIDTH], b[WIDTH];
        if (scales) load8(scale, scales, column, false, aligned, count);
        if (zeros) load8(zero, zeros, column, false, aligned, count);
        if (bias) load8(b, bias, column, false, aligned, count);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            if (integers) {
                const i32 less = zeros ? __float_as_int(zero[i]) * *sum : 0;
                y[i] = static_cast<float>(__float_as_int(y[i]) - less);
            }
            if (row_scale) y[i] = y[i] * *row_scale * scale[i];
            if (bias) y[i] += b[i];
        }
    }
};

extern "C" __global__ void __launch_bounds__(256) epilogue(
    const void* product, const float* row_scales, const float* scales, const i32* sums, const i32* zeros,
    const float* bias, void* out, i64 out_stride, int outputs, int integers, int activation, int out_half, int add,
    int aligned
) {
    begin_kernel();
    const int columns = activation ? outputs / 2 : outputs, column = WIDTH * (blockIdx.y * blockDim.x + threadIdx.x);
    const int count = columns - column;
    if (count <= 0) return;
    const i64 row = blockIdx.x;
    const Product input{
        static_cast<const float*>(product) + row * outputs, row_scales ? row_scales + row : nullptr, scales, bias,
        sums ? sums + row : nullptr, zeros, static_cast<bool>(integers), static_cast<bool>(aligned)
    };
    float y[WIDTH], other[WIDTH];
    input.load(y, column, count);
    if (activation) {
        input.load(other, columns + column, count);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) y[i] = gated(y[i], other[i], activation);
    }
    const i64 at = row * out_stride + column;
    if (add) {
        load8(other, out, at, false, aligned, count);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) y[i] += other[i];
    }
    store8(out, at, y, out_half, aligned, count);
}
EXPORT(epilogue)
