// Dequantizes a packed weight (gemm.cuh) to [outputs, inputs] in Half, or in float32 with OUT32: (code - zero) * scale
// or code * scale - offset in float32, rounded once. A library computes products with many tokens from it.
//
// A warp computes one stage of one tile. A lane has 8 consecutive inputs of two rows at a time: stores of 16 bytes. With
// groups of 16 it has 4 inputs of each.
#include "gemm.cuh"

DEVICE void store4(u8* at, const float* v) {
    if (OUT32)
        *reinterpret_cast<float4*>(at) = make_float4(v[0], v[1], v[2], v[3]);
    else
        *reinterpret_cast<uint2*>(at) = make_uint2(Half::pack(v[0], v[1]), Half::pack(v[2], v[3]));
}

DEVICE void store8(u8* at, const float* v) {
    if (OUT32)
        store4(at, v), store4(at + 16, v + 4);
    else
        *reinterpret_cast<uint4*>(at) = make_uint4(Half::pack(v[0], v[1]), Half::pack(v[2], v[3]), Half::pack(v[4], v[5]),
                                                   Half::pack(v[6], v[7]));
}

// Gated: a tile is 8 rows of the first half of the outputs and 8 of the second.
extern "C" __global__ void __launch_bounds__(256) dequantize(const u8* codes, const u8* params, u8* out, int tiles,
                                                             int stages, int groups, int stages_per_group, int outputs,
                                                             int inputs, int gated) {
    begin_kernel();
    const int lane = lane_id(), g = lane >> 2, t = lane & 3;
    const i64 index = static_cast<i64>(blockIdx.x) * (blockDim.x / 32) + warp_id();
    if (index >= static_cast<i64>(tiles) * stages) return;
    const int tile = static_cast<int>(index / stages), stage = static_cast<int>(index % stages);
    const int group = SCALES > 0 ? stage * SCALES : stage / stages_per_group;
    const uint4* load = reinterpret_cast<const uint4*>(codes + index * STAGE_BYTES) + lane;
    const u8* param = params + (static_cast<i64>(tile) * groups + group) * PARAM_BYTES;
    const int element = OUT32 ? 4 : 2, half = outputs / 2;

#pragma unroll
    for (int k32 = 0; k32 < STAGE / 32; ++k32) {
        const int k = stage * STAGE + 32 * k32 + (SPLIT ? 4 : 8) * t;
        Params p = load_params(param, k32 / SCALE_STRIDE * (SPLIT ? 2 : 1), g);
        const uint4 words = load[k32 / HALVES * 32];
        const u32 high = CODE_BITS == 6 ? component(load[2 * 32], k32) : 0;
        float values[2][8];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 a[4];
            if (SPLIT && i == 1) p = load_params(param, 2 * k32 + 1, g);
            fragment(a, words, k32 % HALVES, i, p.excess, high);
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                float* v = &values[part & 1][4 * i + 2 * (part >> 1)];
                v[0] = __fmul_rn(Half::lo(a[part]), p.scale[part & 1]), v[1] = __fmul_rn(Half::hi(a[part]), p.scale[part & 1]);
                if (SHIFTED) v[0] -= p.offset[part & 1], v[1] -= p.offset[part & 1];
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = gated ? tile * 8 + g : tile * TILE + 8 * r + g;
            if (row >= (gated ? half : outputs)) continue;
            u8* const at = out + (static_cast<i64>(row + (gated ? r * half : 0)) * inputs + k) * element;
            if (!SPLIT && k < inputs) store8(at, values[r]);
            if (SPLIT && k < inputs) store4(at, values[r]);
            if (SPLIT && k + 16 < inputs) store4(at + 16 * element, values[r] + 4);
        }
    }
}
EXPORT(dequantize)
