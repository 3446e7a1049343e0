// latent_ops.kv_rows: the rows of a sequence's first tokens from blocked storage of one KV head, in Half. A thread has
// eight elements, which are neighbours as they are stored, too.
//
// DIM: D, a multiple of 32. STORED: storage type (StorageType). LM_BF16: the result is bfloat16.
#include "kv.cuh"
#include "rows.cuh"

using S = Storage<STORED, DIM>;
constexpr int PIECES = DIM / 8;

// Eight codes as numbers.
DEVICE void decode(float (&x)[8], const u8* codes, bool high) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        if constexpr (STORED == KV_FP8)
            x[e] = F16::lo(e4m3_to_f16(codes[e]));
        else
            x[e] = static_cast<float>(STORED == KV_INT8 ? codes[e] : high ? codes[e] >> 4 : codes[e] & 15);
    }
}

extern "C" __global__ void __launch_bounds__(256)
read_rows(const u8* data, const u32* params, const i32* table, int block_size, int length, u16* out) {
    begin_kernel();
    const i64 index = blockIdx.x * 256ll + threadIdx.x;
    if (index >= static_cast<i64>(length) * PIECES) return;
    const int token = static_cast<int>(index / PIECES), first = static_cast<int>(index % PIECES) * 8;
    const i64 row = static_cast<i64>(table[token / block_size]) * block_size + token % block_size;
    float x[8];
    if constexpr (S::PACKED) {
        const uint4 unit = S::unpacked(reinterpret_cast<const u32*>(data + row * S::ROW) + first / 32 * S::BITS);
        const bool second = first & 8, high = first & 16;  // of the unit's bytes, and of their nibbles
        const u32 codes[2] = {second ? unit.z : unit.x, second ? unit.w : unit.y};
        const u32 scale = reinterpret_cast<const u16*>(params)[row];
        const float2 of_row = S::scale_and_minimum(scale, 0);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const u32 code = codes[e / 4] >> (8 * (e % 4) + 4 * high) & 15;
            x[e] = static_cast<float>(S::levels(code) & 255) * of_row.x + of_row.y;
        }
    } else if constexpr (S::CODED) {
        const bool high = STORED == KV_INT4 && first >= DIM / 2;
        alignas(8) u8 codes[8];
        *reinterpret_cast<uint2*>(codes) =
            *reinterpret_cast<const uint2*>(data + row * S::ROW + first - (high ? DIM / 2 : 0));
        decode(x, codes, high);
        const float scale = F16::lo(params[row]), minimum = F16::hi(params[row]);
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = x[e] * scale + minimum;
    } else {
        const uint4 bits = *reinterpret_cast<const uint4*>(data + row * S::ROW + first * 2);
        const u32 pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = e & 1 ? S::Float::hi(pairs[e / 2]) : S::Float::lo(pairs[e / 2]);
    }
    *reinterpret_cast<uint4*>(out + index * 8) = pack8(x);
}
EXPORT(read_rows)
