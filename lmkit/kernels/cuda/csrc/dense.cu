// y [M, N] = x [M, K] W [N, K]^T (+ bias[n]), where x and W are Half and the bits of a row of y depend on that row of x
// alone. Sums are float32.
//
// An output is one chain of mma.m16n8k16 over k = 0, 16, 32 ...: K is never split, and the weight is operand A in every
// variant. So the tiles below, which the host chooses by M, do not change a bit.
//
//     grid    (blocks of tokens, blocks of outputs); neighbours share weights, which L2 then has
//     block   WARPS_N x WARPS_M warps, each with 16 ROWS outputs and 8 N_TILES tokens
//     stage   STEP inputs of the block's rows of W and of x, by cp.async into a ring of STAGES
//
// Rows in shared memory are an odd number of 16-byte pieces apart, so the eight rows of an ldmatrix are in different
// banks. Outputs, tokens and inputs beyond the last become zeros. K is a multiple of 8, and rows are 16-byte aligned.
//
// Defines: N_TILES, ROWS, WARPS_N, WARPS_M, STEP, STAGES; LM_BF16.
#include "ptx.cuh"

constexpr int THREADS = 32 * WARPS_N * WARPS_M, OUTPUTS = 16 * ROWS * WARPS_N, TOKENS = 8 * N_TILES * WARPS_M;
constexpr int PIECES = STEP / 8, STRIDE = 16 * (PIECES | 1);  // of a row in shared memory
constexpr int X_AT = OUTPUTS * STRIDE, STAGE_BYTES = (OUTPUTS + TOKENS) * STRIDE;
static_assert(STEP % 16 == 0 && PIECES % 2 == 0, "whole mma, and rows that are padded");

// Starts to copy inputs k .. k + STEP - 1 of COUNT rows from `first` on, of `rows` there are, `stride` elements apart.
template <int COUNT>
DEVICE void copy(u8* to, const u16* from, i64 stride, int first, int rows, int k, int inputs) {
#pragma unroll
    for (int i = threadIdx.x; i < COUNT * PIECES; i += THREADS) {
        const int row = i / PIECES, piece = i % PIECES, at = k + 8 * piece;
        const bool valid = first + row < rows && at < inputs;
        cp_async16(to + row * STRIDE + 16 * piece, from + (valid ? (first + row) * stride + at : 0), valid);
    }
}

DEVICE void multiply(float (&sums)[ROWS][N_TILES][4], const u8* weights, const u8* x) {
    const int lane = lane_id();
    weights += (lane & 15) * STRIDE + (lane >> 4) * 16;
    x += (N_TILES > 1 ? (lane & 7) + (lane >> 4) * 8 : lane & 7) * STRIDE + (lane >> 3 & 1) * 16;
#pragma unroll
    for (int k = 0; k < STEP / 16; ++k) {
        u32 a[ROWS][4], b[N_TILES][2];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) ldmatrix_x4(a[r], weights + r * 16 * STRIDE + k * 32);
#pragma unroll
        for (int n = 0; n < N_TILES; n += 2) {
            if (N_TILES == 1) {
                ldmatrix_x2(b[0], x + k * 32);
                continue;
            }
            u32 two[4];
            ldmatrix_x4(two, x + n * 8 * STRIDE + k * 32);
            b[n][0] = two[0], b[n][1] = two[1], b[n + 1 < N_TILES ? n + 1 : n][0] = two[2];
            b[n + 1 < N_TILES ? n + 1 : n][1] = two[3];
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) Half::mma(sums[r][n], a[r], b[n][0], b[n][1]);
    }
}

// `out` is float32 or Half with rows `out_stride` elements apart, or float32 to which y is added.
extern "C" __global__ void __launch_bounds__(THREADS) dense(
    const u16* x, i64 x_stride, const u16* weight, const float* bias, void* out, i64 out_stride, int tokens, int outputs,
    int inputs, int out_half, int add
) {
    launch_next();
    const int token = blockIdx.x * TOKENS, output = blockIdx.y * OUTPUTS;
    const int warp_n = warp_id() % WARPS_N, warp_m = warp_id() / WARPS_N, steps = (inputs + STEP - 1) / STEP;
    const auto stage = [](int i) { return shared_memory + i % STAGES * STAGE_BYTES; };
    const auto copy_weights = [&](int i) {
        copy<OUTPUTS>(stage(i), weight, inputs, output, outputs, i * STEP, inputs);
    };
    const auto copy_x = [&](int i) {
        copy<TOKENS>(stage(i) + X_AT, x, x_stride, token, tokens, i * STEP, inputs);
        cp_async_commit();
    };
    for (int i = 0; i < STAGES - 1; ++i) copy_weights(i);  // they belong to the first group: no kernel writes weights
    wait_for_previous();
    for (int i = 0; i < STAGES - 1; ++i) copy_x(i);

    float sums[ROWS][N_TILES][4] = {};
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // stage i has arrived, and all have left the one that is filled next
        copy_weights(i + STAGES - 1);
        copy_x(i + STAGES - 1);
        multiply(sums, stage(i) + warp_n * 16 * ROWS * STRIDE, stage(i) + X_AT + warp_m * 8 * N_TILES * STRIDE);
    }
    cp_async_wait<0>();

    const int g = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int row = token + (warp_m * N_TILES + n) * 8 + 2 * t + (c & 1);
                const int column = output + (warp_n * ROWS + r) * 16 + (c >> 1) * 8 + g;
                if (row >= tokens || column >= outputs) continue;
                const float y = sums[r][n][c] + (bias ? bias[column] : 0.0f);
                const i64 at = row * out_stride + column;
                if (out_half) static_cast<u16*>(out)[at] = Half::from_float(y);
                else static_cast<float*>(out)[at] = add ? static_cast<float*>(out)[at] + y : y;
            }
}
EXPORT(dense)
