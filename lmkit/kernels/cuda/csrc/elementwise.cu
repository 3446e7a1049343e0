// Ops that treat every element by itself: embedding, added positions, gathered columns, activations, cosines and sines
// of positions. A thread computes eight neighbouring values of a row (rows.cuh), one gathered value, or one angle.
#include "activation.cuh"
#include "rows.cuh"

// out[i] = scale * table[rows[i]] as float32. Grid: (rows, blocks of columns).
extern "C" __global__ void __launch_bounds__(256) embedding(
    const void* table, i64 row_stride, const i64* rows, float* out, int columns, float scale, int half, int aligned
) {
    begin_kernel();
    const int column = WIDTH * (blockIdx.y * blockDim.x + threadIdx.x);
    const int count = columns - column;
    if (count <= 0) return;
    float v[WIDTH];
    load8(v, table, rows[blockIdx.x] * row_stride + column, half, aligned, count);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) v[i] *= scale;
    store8(out, static_cast<i64>(blockIdx.x) * columns + column, v, false, aligned, count);
}
EXPORT(embedding)

// out[row][j] = x[row][order[j]]: values of 16 bits if `half`, else of 32. Grid: (rows, blocks of columns).
extern "C" __global__ void __launch_bounds__(256) gather_columns(
    const void* x, i64 row_stride, const i32* order, void* out, int columns, int half
) {
    begin_kernel();
    const int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    const i64 from = blockIdx.x * row_stride + order[column], to = static_cast<i64>(blockIdx.x) * columns + column;
    if (half) {
        static_cast<u16*>(out)[to] = static_cast<const u16*>(x)[from];
    } else {
        static_cast<u32*>(out)[to] = static_cast<const u32*>(x)[from];
    }
}
EXPORT(gather_columns)

// x[i] += table[positions[i]], float32. Grid: (rows, blocks of columns).
extern "C" __global__ void __launch_bounds__(256) add_positions(
    float* x, i64 row_stride, const float* table, const i32* positions, int columns, int aligned
) {
    begin_kernel();
    const int column = WIDTH * (blockIdx.y * blockDim.x + threadIdx.x);
    const int count = columns - column;
    if (count <= 0) return;
    const i64 at = blockIdx.x * row_stride + column;
    float v[WIDTH], added[WIDTH];
    load8(v, x, at, false, aligned, count);
    load8(added, table, static_cast<i64>(positions[blockIdx.x]) * columns + column, false, aligned, count);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) v[i] += added[i];
    store8(x, at, v, false, aligned, count);
}
EXPORT(add_positions)

// x[i] = f(x[i]), in place: max(x, 0), GELU, or the square of max(x, 0) (ops.UNGATED). NaN stays. A thread has WIDTH
// values.
extern "C" __global__ void __launch_bounds__(256) ungated_activation(
    void* x, i64 count, int activation, int half, int aligned
) {
    begin_kernel();
    const i64 at = WIDTH * (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x);
    const int left = count - at < WIDTH ? static_cast<int>(count - at) : WIDTH;
    if (left <= 0) return;
    float v[WIDTH];
    load8(v, x, at, half, aligned && left == WIDTH, left);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        const float above = v[i] < 0.0f ? 0.0f : v[i];
        v[i] = activation == 0   ? above
               : activation == 1 ? 0.5f * v[i] * (1.0f + erff(v[i] * 0.70710678f))
                                 : above * above;
    }
    store8(x, at, v, half, aligned && left == WIDTH, left);
}
EXPORT(ungated_activation)

// out = q * (1 + rate ln(1 + (position + shift) / length)), division of whole numbers. Grid: (rows, blocks of columns).
extern "C" __global__ void __launch_bounds__(256) grown_queries(
    const void* q, i64 row_stride, const i32* positions, void* out, int columns, float rate, int length, int shift,
    int half, int aligned
) {
    begin_kernel();
    const int column = WIDTH * (blockIdx.y * blockDim.x + threadIdx.x);
    const int count = columns - column;
    if (count <= 0) return;
    const float factor = 1.0f + rate * log1pf(static_cast<float>((positions[blockIdx.x] + shift) / length));
    float v[WIDTH];
    load8(v, q, blockIdx.x * row_stride + column, half, aligned, count);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) v[i] *= factor;
    store8(out, static_cast<i64>(blockIdx.x) * columns + column, v, half, aligned, count);
}
EXPORT(grown_queries)

// x[i] = cap * tanh(x[i] / cap), in place. A thread has one value.
extern "C" __global__ void __launch_bounds__(256) softcap(float* x, float cap, i64 count) {
    begin_kernel();
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) x[i] = cap * tanhf(x[i] / cap);
}
EXPORT(softcap)

// out = f(gate) * up of rows gate | up, each of `columns`.
extern "C" __global__ void __launch_bounds__(256) gated_activation(
    const void* gate_up, i64 row_stride, void* out, int columns, int activation, int half, int aligned
) {
    begin_kernel();
    const int column = WIDTH * (blockIdx.y * blockDim.x + threadIdx.x);
    const int count = columns - column;
    if (count <= 0) return;
    const i64 row = blockIdx.x, gate_at = row * row_stride + column;
    float gates[WIDTH], up[WIDTH];
    load8(gates, gate_up, gate_at, half, aligned, count);
    load8(up, gate_up, gate_at + columns, half, aligned, count);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) gates[i] = gated(gates[i], up[i], activation);
    store8(out, row * columns + column, gates, half, aligned, count);
}
EXPORT(gated_activation)

// cos and sin of positions[i] * inv_freq[j], with the product rounded to float32, times `magnitude`. Angles are up to
// some 10^6 radians: sincosf reduces them exactly, __sincosf would not.
extern "C" __global__ void __launch_bounds__(256) rope_angles(
    const i32* positions, const float* inv_freq, float magnitude, float* cos, float* sin, int tokens, int half_dim
) {
    begin_kernel();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= tokens * half_dim) return;
    float s, c;
    sincosf(__fmul_rn(static_cast<float>(positions[i / half_dim]), inv_freq[i % half_dim]), &s, &c);
    cos[i] = c * magnitude;
    sin[i] = s * magnitude;
}
EXPORT(rope_angles)
