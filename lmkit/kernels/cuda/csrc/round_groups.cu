// Rounds rows to codes of 8 bits for gemm.cu with INT8, with a scale for each group of inputs:
//
//     scale = max|x| of the group / 127, code = x / scale to the nearest, halves to even
//
//     codes    [tokens][stages * 128]; input 64 k + 32 h + 8 t + 4 i + (0, 2, 1, 3)[j] at 64 k + 16 t + 8 h + 4 i + j:
//              16 bytes are a lane's operand B of two mma (gemm.cuh). Zeros beyond the last input
//     scales   [stages * STAGE_SCALES][padded_tokens]; a group that is longer than a stage has its scale in each one
//
// With FLOAT8_X codes are float8 e4m3: the largest is 448, not 127, and the inputs of a lane lie in their order.
//
// With `rounded` it writes code * scale there instead, as Half or float32 like x: a library multiplies that.
//
// A block has `span` inputs of a token: 2048, of several groups, or a group that is longer than a stage. Reading them
// twice costs little, because they stay in L1. x is 16-byte aligned, and `inputs` a multiple of 8.
//
// Defines: SCALES (gemm.cuh); FLOAT8_X.
#include "rows.cuh"

constexpr int THREADS = 256, STAGE = 128, STAGE_SCALES = SCALES > 0 ? SCALES : 1;

#ifdef FLOAT8_X
constexpr float LARGEST = 448.0f;
DEVICE u32 code_of(float x) { return float_to_e4m3(x); }
DEVICE float number_of(u32 code) { return F16::lo(e4m3_to_f16(code)); }
DEVICE int place_of(int i) { return i % 4; }
#else
constexpr float LARGEST = 127.0f;
DEVICE u32 code_of(float x) { return static_cast<u32>(__float2int_rn(fminf(fmaxf(x, -LARGEST), LARGEST))) & 0xffu; }
DEVICE float number_of(u32 code) { return static_cast<float>(static_cast<i32>(code << 24) >> 24); }
DEVICE int place_of(int i) { return i % 4 == 1 ? 2 : i % 4 == 2 ? 1 : i % 4; }
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    round_groups(const void* x, u8* codes, float* scales, void* rounded, int inputs, int stages, int padded_tokens, int span,
                 int half) {
    begin_kernel();
    auto* largest_of_warp = reinterpret_cast<float*>(shared_memory);
    const int token = blockIdx.x, first = blockIdx.y * span, end = min(first + span, stages * STAGE);
    const i64 row = static_cast<i64>(token) * inputs;
    float v[WIDTH], largest = 0.0f;
    for (int k = first + WIDTH * threadIdx.x; k < end; k += WIDTH * THREADS) {
        load8(v, x, row + k, half, true, inputs - k);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) largest = fmaxf(largest, fabsf(v[i]));
    }
    if (SCALES > 0) {
#pragma unroll
        for (int step = STAGE / WIDTH / STAGE_SCALES / 2; step > 0; step >>= 1)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    } else {
        largest = warp_max(largest);
        if (lane_id() == 0) largest_of_warp[warp_id()] = largest;
        __syncthreads();
        largest = warp_max(largest_of_warp[lane_id() % (THREADS / 32)]);
    }
    const float scale = largest / LARGEST;
    for (int k = first + WIDTH * threadIdx.x; k < end; k += WIDTH * THREADS) {
        load8(v, x, row + k, half, true, inputs - k);
        u32 words[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const u32 code = scale > 0.0f ? code_of(v[i] / scale) : 0;
            words[i / 4] |= code << (8 * place_of(i));
            v[i] = number_of(code) * scale;
        }
        if (rounded) {
            store8(rounded, row + k, v, half, true, inputs - k);
            continue;
        }
        const i64 at = static_cast<i64>(token) * stages * STAGE + k / 64 * 64 + k / 8 % 4 * 16 + k / 32 % 2 * 8;
        *reinterpret_cast<uint2*>(codes + at) = make_uint2(words[0], words[1]);
        if (SCALES > 0 ? k % (STAGE / STAGE_SCALES) == 0 : k % STAGE == 0)
            scales[static_cast<i64>(k / (STAGE / STAGE_SCALES)) * padded_tokens + token] = scale;
    }
}
EXPORT(round_groups)
