// Dequantizes a packed weight (gemm.cuh) to [outputs, inputs] in Half, or in float32 with OUT32: (code - zero) * scale
// in float32, rounded once. A library computes products with many tokens from it.
//
// A warp computes one stage of one tile. A lane has 8 consecutive inputs of two rows at a time: stores of 16 bytes.
#include "gemm.cuh"

DEVICE void store8(u8* at, const float (&v)[8]) {
    uint4* out = reinterpret_cast<uint4*>(at);
    if (OUT32) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            out[i] = make_uint4(__float_as_uint(v[4 * i]), __float_as_uint(v[4 * i + 1]), __float_as_uint(v[4 * i + 2]),
                                __float_as_uint(v[4 * i + 3]));
    } else {
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = Half::pack(v[2 * i], v[2 * i + 1]);
        *out = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
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
        const int k = stage * STAGE + 32 * k32 + 8 * t;
        const Params p = load_params(param + k32 / SCALE_STRIDE * PARAM_BYTES, g);
        const uint4 words = load[k32 / HALVES * 32];
        float values[2][8];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 a[4];
            fragment(a, words, k32 % HALVES, i, p.excess);
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                float* v = &values[part & 1][4 * i + 2 * (part >> 1)];
                v[0] = Half::lo(a[part]) * p.scale[part & 1], v[1] = Half::hi(a[part]) * p.scale[part & 1];
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = gated ? tile * 8 + g : tile * TILE + 8 * r + g;
            if (row < (gated ? half : outputs) && k < inputs)
                store8(out + (static_cast<i64>(row + (gated ? r * half : 0)) * inputs + k) * element, values[r]);
        }
    }
}
EXPORT(dequantize)
