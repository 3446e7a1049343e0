// Eight neighbouring values of a row, as float32. Elementwise kernels work on these.
//
// Rows are float32 or Half. `aligned`: every row begins at a multiple of 16 bytes and has a multiple of 8 columns, so
// that eight values are one or two accesses of 16 bytes. Otherwise `count` values are read one at a time, and the
// others are 0.
#pragma once
#include "ptx.cuh"

constexpr int WIDTH = 8;

DEVICE void unpack8(float (&v)[WIDTH], uint4 bits) {
    v[0] = Half::lo(bits.x), v[1] = Half::hi(bits.x), v[2] = Half::lo(bits.y), v[3] = Half::hi(bits.y);
    v[4] = Half::lo(bits.z), v[5] = Half::hi(bits.z), v[6] = Half::lo(bits.w), v[7] = Half::hi(bits.w);
}

DEVICE uint4 pack8(const float (&v)[WIDTH]) {
    return make_uint4(Half::pack(v[0], v[1]), Half::pack(v[2], v[3]), Half::pack(v[4], v[5]), Half::pack(v[6], v[7]));
}

DEVICE void load8(float (&v)[WIDTH], const void* values, i64 at, bool half, bool aligned, int count) {
    const auto* narrow = static_cast<const u16*>(values) + at;
    const auto* wide = static_cast<const float*>(values) + at;
    if (aligned && count > 0) {
        if (half) return unpack8(v, *reinterpret_cast<const uint4*>(narrow));
        const float4 a = reinterpret_cast<const float4*>(wide)[0], b = reinterpret_cast<const float4*>(wide)[1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        return;
    }
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) v[i] = i >= count ? 0.0f : half ? Half::to_float(narrow[i]) : wide[i];
}

DEVICE void store8(void* values, i64 at, const float (&v)[WIDTH], bool half, bool aligned, int count) {
    auto* narrow = static_cast<u16*>(values) + at;
    auto* wide = static_cast<float*>(values) + at;
    if (aligned && count > 0) {
        if (half) {
            *reinterpret_cast<uint4*>(narrow) = pack8(v);
        } else {
            reinterpret_cast<float4*>(wide)[0] = make_float4(v[0], v[1], v[2], v[3]);
            reinterpret_cast<float4*>(wide)[1] = make_float4(v[4], v[5], v[6], v[7]);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < WIDTH; ++i)
        if (i < count) {
            if (half) narrow[i] = Half::from_float(v[i]);
            else wide[i] = v[i];
        }
}
