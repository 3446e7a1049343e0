// Additions of low rank to linears (adapters), and the gated activation of columns that stand in turns. Rows are taken in
// the order of their adapters, ROWS to a block. Of neighbours with the same adapter, each number of A and B is read once.
// All that depends on the adapters stays on the device, so these launches are the same for any choice of them. A row's
// sums do not depend on the rows beside it. lmkit.kernels.ops has the formulas.
#include "activation.cuh"
#include "rows.cuh"

constexpr int ROWS = 8;       // of a block
constexpr int FIELDS = 5;     // of an entry: A or 0, B, rank, kind, bits of the scale (lmkit.low_rank)
constexpr int MAX_RANK = 512; // row stride of `factors`

// Rows of a step by their adapter: numbers [tokens], -1 = none, which come last. One block; shared memory: i32 [count + 1].
extern "C" __global__ void __launch_bounds__(1024) rows_by_adapter(
    const i32* numbers, i32* order, int tokens, int count
) {
    begin_kernel();
    i32* starts = reinterpret_cast<i32*>(shared_memory);
    for (int i = threadIdx.x; i <= count; i += blockDim.x) starts[i] = 0;
    __syncthreads();
    for (int t = threadIdx.x; t < tokens; t += blockDim.x) atomicAdd(starts + (numbers[t] < 0 ? count : numbers[t]), 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        int end = 0;
        for (int i = 0; i <= count; ++i) {
            const int mine = starts[i];
            starts[i] = end;
            end += mine;
        }
    }
    __syncthreads();
    for (int t = threadIdx.x; t < tokens; t += blockDim.x)
        order[atomicAdd(starts + (numbers[t] < 0 ? count : numbers[t]), 1)] = t;
}
EXPORT(rows_by_adapter)

// The end of the neighbours in order[at .. end) that have the adapter of the first.
DEVICE int end_of_group(const i32* numbers, const i32* order, int at, int end) {
    const int number = numbers[order[at]];
    while (++at < end && numbers[order[at]] == number) {}
    return at;
}

// factors[place][r] = scale * x[order[place]] . A[r]. A warp has a row of A. Grid: (groups of ROWS places, parts of ranks).
extern "C" __global__ void __launch_bounds__(128) low_rank_factors(
    const void* x, i64 x_stride, const i32* numbers, const i32* order, const i64* entries, float* factors, int tokens,
    int inputs, int half, int aligned
) {
    begin_kernel();
    const int end = min(static_cast<int>(ROWS * (blockIdx.x + 1)), tokens), warps = blockDim.x / 32;
    for (int at = ROWS * blockIdx.x, next; at < end; at = next) {
        next = end_of_group(numbers, order, at, end);
        const int number = numbers[order[at]], count = next - at;
        if (number < 0) return;
        const i64* entry = entries + FIELDS * number;
        const void* a = reinterpret_cast<const void*>(entry[0]);
        if (!a) continue;
        const int rank = static_cast<int>(entry[2]), narrow = entry[3] != 0;
        const float scale = __uint_as_float(static_cast<u32>(entry[4]));
        const int whole = inputs % WIDTH == 0 && entry[0] % 16 == 0;
        for (int r = warp_id() + warps * blockIdx.y; r < rank; r += warps * gridDim.y) {
            float total[ROWS] = {};
            for (int i = WIDTH * lane_id(); i < inputs; i += 32 * WIDTH) {
                float row[WIDTH], v[WIDTH];
                load8(row, a, static_cast<i64>(r) * inputs + i, narrow, whole, inputs - i);
#pragma unroll
                for (int k = 0; k < ROWS; ++k) {
                    if (k >= count) break;
                    load8(v, x, order[at + k] * x_stride + i, half, aligned, inputs - i);
#pragma unroll
                    for (int j = 0; j < WIDTH; ++j) total[k] += v[j] * row[j];
                }
            }
#pragma unroll
            for (int k = 0; k < ROWS; ++k) {
                const float sum = warp_sum(total[k]);
                if (k < count && lane_id() == 0) factors[static_cast<i64>(at + k) * MAX_RANK + r] = scale * sum;
            }
        }
    }
}
EXPORT(low_rank_factors)

// y[order[place]][column of j] += factors[place] . B[.][j]. A thread has an output j. Grid: (groups of ROWS places, blocks of
// outputs). Outputs lie in groups of `width` columns whose starts are `stride` apart.
extern "C" __global__ void __launch_bounds__(256) low_rank_outputs(
    void* y, i64 y_stride, const i32* numbers, const i32* order, const i64* entries, const float* factors, int tokens,
    int outputs, int start, int width, int stride, int half
) {
    begin_kernel();
    const int end = min(static_cast<int>(ROWS * (blockIdx.x + 1)), tokens);
    const int j = blockIdx.y * blockDim.x + threadIdx.x;
    if (j >= outputs) return;
    const i64 column = start + static_cast<i64>(j / width) * stride + j % width;
    for (int at = ROWS * blockIdx.x, next; at < end; at = next) {
        next = end_of_group(numbers, order, at, end);
        const int number = numbers[order[at]], count = next - at;
        if (number < 0) return;
        const i64* entry = entries + FIELDS * number;
        if (!entry[0]) continue;
        const auto* wide = reinterpret_cast<const float*>(entry[1]);
        const auto* narrow = reinterpret_cast<const u16*>(entry[1]);
        float total[ROWS] = {};
        for (int r = 0; r < entry[2]; ++r) {
            const i64 place = static_cast<i64>(r) * outputs + j;
            const float b = entry[3] ? Half::to_float(narrow[place]) : wide[place];
#pragma unroll
            for (int k = 0; k < ROWS; ++k)
                if (k < count) total[k] += factors[static_cast<i64>(at + k) * MAX_RANK + r] * b;
        }
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            if (k >= count) break;
            const i64 to = order[at + k] * y_stride + column;
            if (half) {
                u16* value = static_cast<u16*>(y) + to;
                *value = Half::from_float(Half::to_float(*value) + total[k]);
            } else {
                static_cast<float*>(y)[to] += total[k];
            }
        }
    }
}
EXPORT(low_rank_outputs)

// out = f(gate) * up of rows with gate and up in turns of `width` columns. Grid: (rows, blocks of columns).
extern "C" __global__ void __launch_bounds__(256) gated_panels(
    const void* gate_up, i64 row_stride, void* out, int columns, int width, int activation, int half, int half_out
) {
    begin_kernel();
    const int j = blockIdx.y * blockDim.x + threadIdx.x;
    if (j >= columns) return;
    const i64 row = blockIdx.x, at = row * row_stride + static_cast<i64>(j / width) * 2 * width + j % width;
    const auto* narrow = static_cast<const u16*>(gate_up);
    const auto* wide = static_cast<const float*>(gate_up);
    const float gate = half ? Half::to_float(narrow[at]) : wide[at];
    const float up = half ? Half::to_float(narrow[at + width]) : wide[at + width];
    const float value = gated(gate, up, activation);
    if (half_out) static_cast<u16*>(out)[row * columns + j] = Half::from_float(value);
    else static_cast<float*>(out)[row * columns + j] = value;
}
EXPORT(gated_panels)
