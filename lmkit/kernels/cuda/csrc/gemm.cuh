// Packed weights, for gemm.cu to multiply and dequantize.cu to dequantize. The host packs them (gemm_pack.py).
//
// A tile is 16 outputs, a stage 128 inputs. Codes lie in operand A fragments of mma.m16n8k16, so that a lane's share of
// a load is 16 bytes that no other lane reads. Inputs are permuted within each 32. The sum does not change, because
// operand B is permuted alike. Lane (g, t) owns inputs 8t .. 8t+7 of each 32, of rows g and g+8. With i the step of the
// mma, and e, l = 0, 1 (operand register, half of it)
//
//     input = 32 h + 8 t + 4 i + 2 e + l
//
// so B's part of an activation row for two steps is also one 16-byte vector.
//
//     codes 4 bits   [tile][stage][h / 2][g][t][h % 2][i] u32: the code of row g + 8r in bits 4r + 8e + 16l
//     codes 6 bits   their low 4 bits in a stage as above, then the others: [g][t][h] u32, in bits 8r + 4i + 2e + 16l
//     codes 8 bits   [tile][stage][h]    [g][t][i][e] u32: the code of row g + 8r in byte 2r + l
//     params         [tile][group]: scales [g][r] (float16, or float32 if WIDE), zeros u8 [g][r] unless codes are floats
//
// With OFFSETS w = code * scale - offset: offsets of the scales' type stand in the place of zeros. With FACTORS scales are
// whole numbers times a factor of the stage, and so are offsets:
//
//     params         [tile][stage]: [group] {scales, offsets: u8 [g][r], 128 + the number}; then the factors float16 [g][r]
//                    of scales, and those of offsets
//
// With groups of 16 inputs (SCALES 8) a step has one group: input = 32 h + 16 i + 4 t + 2 e + l. B's part of an activation
// row is then two 8-byte vectors.
//
// Defines: CODE_BITS 4, 6 or 8; FLOAT8 (codes are e4m3); FLOAT4 (e2m1); WIDE; OFFSETS; FACTORS, how many of their units
// make 1, with ZERO, that of all codes; SCALES: groups in a stage, 1, 2, 4 or 8 (8: without zeros of their own); 0 =
// longer groups. x has codes of 8 bits (round_groups.cu) with INT8, and codes of 4 bits become fragments of mma.m16n8k32,
// or with FLOAT8_X, and e4m3 codes do. FLOAT4, OFFSETS, FACTORS, INT8 and FLOAT8_X are only defined if they hold.
#pragma once
#include "ptx.cuh"

#ifdef FLOAT4
constexpr bool FLOAT4_CODES = true;
#else
constexpr bool FLOAT4_CODES = false;
#endif
#ifdef OFFSETS
constexpr bool SHIFTED = true;
#else
constexpr bool SHIFTED = false;
#endif
#ifdef FACTORS
constexpr bool FACTORED = true;
constexpr float FACTOR_UNIT = 1.0f / FACTORS;
#else
constexpr bool FACTORED = false;
constexpr float FACTOR_UNIT = 1;
#endif
#ifndef ZERO
#define ZERO 0
#endif
constexpr int TILE = 16, STAGE = 128;
constexpr int HALVES = CODE_BITS == 8 ? 1 : 2;       // times 32 inputs in a load of 16 bytes a lane
constexpr int LOADS = CODE_BITS / 2;                 // in a stage of a tile; of 6 bits, the last has the high bits
constexpr int LOAD_BYTES = 512;
constexpr int STAGE_BYTES = LOADS * LOAD_BYTES;
constexpr bool HAS_ZEROS = !FLOAT8 && !FLOAT4_CODES && !SHIFTED && !FACTORED;
constexpr int STAGE_SCALES = SCALES > 0 ? SCALES : 1;
constexpr bool SPLIT = STAGE_SCALES == 8;  // 32 inputs have two scales
constexpr int SCALE_STRIDE = SPLIT ? 1 : STAGE / 32 / STAGE_SCALES;  // times 32 inputs with the same, within a stage
constexpr int SCALE_BYTES = TILE * (FACTORED ? 1 : WIDE ? 4 : 2);
constexpr int GROUP_BYTES = SCALE_BYTES * (SHIFTED ? 2 : 1) + (HAS_ZEROS ? TILE : 0);
constexpr int FACTOR_BYTES = FACTORED ? TILE * 2 * (SHIFTED ? 2 : 1) : 0;  // of a stage
constexpr int STAGE_PARAM_BYTES = STAGE_SCALES * GROUP_BYTES + FACTOR_BYTES;
constexpr int PARAM_BYTES = STAGE_PARAM_BYTES / STAGE_SCALES;  // of a group, with its share of factors
static_assert(!SPLIT || !HAS_ZEROS, "groups of 16 have no zeros");
static_assert(!FACTORED || SCALES > 0, "stages have factors");

#if defined(INT8) || defined(FLOAT8_X)
#define CODED_X
#endif
#ifdef INT8
constexpr bool INT8_X = true;
static_assert(CODE_BITS == 4, "codes minus zeros have 8 bits");
#else
constexpr bool INT8_X = false;
#endif

// For a lane's two rows in one group: the scales, the offsets, and the excess of its raw numbers (below).
struct Params {
    float scale[2], offset[2];
    u32 excess[2];
};

// The numbers of a lane's two rows that stand with those of 14 others: scales, or offsets.
DEVICE float2 load_pair(const u8* at, int g) {
    if (FACTORED) {
        const u32 pair = reinterpret_cast<const u16*>(at)[g];  // 2^23 + byte - (2^23 + 128)
        return make_float2(__uint_as_float(prmt(pair, 0x4b000000u, 0x7440)) - 8388736.0f,
                           __uint_as_float(prmt(pair, 0x4b000000u, 0x7441)) - 8388736.0f);
    }
    if (WIDE) return reinterpret_cast<const float2*>(at)[g];
    const u32 pair = reinterpret_cast<const u32*>(at)[g];
    return make_float2(F16::lo(pair), F16::hi(pair));
}

// A code becomes a number by its place in the fraction of a large enough number: 1024 + code in float16 (0x6400), or
// 64 + code if the code stands 4 bits higher (0x5400), 128 + code in bfloat16 (0x4300), 2^23 + code in float32. That
// offset and the zero are subtracted at once. This is exact: an integer of at most 8 bits and a sign.
DEVICE u32 excess_of(u32 zero, int r) {
    if (INT8_X) return zero * 0x01010101u;
    if (CODE_BITS == 8 && Half::is_bf16) return 0x4b000000u + zero;
    if (Half::is_bf16) return 0x43004300u + zero * 0x10001u;
    return CODE_BITS < 8 && r == 1 ? 0x54005400u + zero * 0x100010u : 0x64006400u + zero * 0x10001u;
}

// Of a group of a stage. `stage`: the params of that, or with SCALES 0 of its group.
DEVICE Params load_params(const u8* stage, int group, int g) {
    Params p;
    const u8 *own = stage + group * GROUP_BYTES, *factors = stage + STAGE_SCALES * GROUP_BYTES;
    const float2 scale = load_pair(own, g);
    p.scale[0] = scale.x, p.scale[1] = scale.y;
    if (SHIFTED) {
        const float2 offset = load_pair(own + SCALE_BYTES, g);
        p.offset[0] = offset.x, p.offset[1] = offset.y;
    }
    if (FACTORED) {
        const u32 of_scales = reinterpret_cast<const u32*>(factors)[g];
        p.scale[0] *= F16::lo(of_scales) * FACTOR_UNIT, p.scale[1] *= F16::hi(of_scales) * FACTOR_UNIT;
        if (SHIFTED) {
            const u32 of_offsets = reinterpret_cast<const u32*>(factors)[TILE / 2 + g];
            p.offset[0] *= F16::lo(of_offsets) * FACTOR_UNIT, p.offset[1] *= F16::hi(of_offsets) * FACTOR_UNIT;
        }
    }
    const u32 zeros = HAS_ZEROS ? reinterpret_cast<const u16*>(own + SCALE_BYTES)[g] : ZERO * 0x101u;
    p.excess[0] = excess_of(zeros & 0xffu, 0), p.excess[1] = excess_of(zeros >> 8, 1);
    return p;
}

DEVICE u32 component(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Two e4m3 codes (bits 0-15) as a pair of Half, exactly.
DEVICE u32 e4m3_to_half(u32 two) {
    if (!Half::is_bf16) return e4m3_to_f16(two);
    const u32 spread = prmt(two, 0, 0x1404);
    return BF16::mul((spread & 0x80008000u) | ((spread & 0x7f007f00u) >> 4), 0x7b807b80u);  // times 2^120
}

// Two 8-bit codes (bytes FIRST, FIRST + 1) minus the zero as a pair of Half, exactly.
template <int FIRST>
DEVICE u32 bytes_to_half(u32 word, u32 excess) {
    if (!Half::is_bf16) return F16::sub(prmt(word, 0x64646464u, FIRST ? 0x4342 : 0x4140), excess);
    const float lo = __uint_as_float(prmt(word, 0x4b000000u, 0x7440 | FIRST)) - __uint_as_float(excess);
    const float hi = __uint_as_float(prmt(word, 0x4b000000u, 0x7441 + FIRST)) - __uint_as_float(excess);
    return prmt(__float_as_uint(lo), __float_as_uint(hi), 0x7632);  // nothing is cut off: 8 bits fit
}

// The parts of operand A that a word has of e2m1 codes: a sign, two bits of exponent, one of fraction. They become a Half
// by their place. Its exponents begin elsewhere, which float16 leaves to the scales: numbers are 2^-14 times the codes',
// exactly, the smallest ones subnormal. bfloat16's would be too small to multiply, and grow to the same numbers.
DEVICE void float4_fragment(u32 (&a)[4], u32 word) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
        const u32 sign = word << (12 - 4 * part);
        const u32 rest = Half::is_bf16 ? sign >> 6 & 0x01c001c0u : sign >> 3 & 0x0e000e00u;
        a[part] = and_or(sign, 0x80008000u, rest);
        if (Half::is_bf16) a[part] = BF16::mul(a[part], 0x77807780u);  // times 2^112
    }
}

// Two codes of 6 bits of row g + 8R, register E of step I: their low bits are in w, the others in `high`. As raw numbers.
template <int I, int E, int R>
DEVICE u32 codes_of_6(u32 w, u32 high) {
    constexpr int AT = Half::is_bf16 ? 0 : 4 * R, TO = AT + 4 - (8 * R + 4 * I + 2 * E);  // of the code; left of its bits
    const u32 upper = TO < 0 ? high >> (-TO & 31) : high << (TO & 31);
    const u32 number = and_or(upper, 0x00300030u << AT, Half::is_bf16 ? 0x43004300u : R ? 0x54005400u : 0x64006400u);
    return and_or(w >> (8 * E + 4 * R - AT), 0x000f000fu << AT, number);
}

template <int I>
DEVICE void fragment_of_6(u32 (&a)[4], u32 w, u32 high, const u32 (&excess)[2]) {
    a[0] = Half::sub(codes_of_6<I, 0, 0>(w, high), excess[0]), a[1] = Half::sub(codes_of_6<I, 0, 1>(w, high), excess[1]);
    a[2] = Half::sub(codes_of_6<I, 1, 0>(w, high), excess[0]), a[3] = Half::sub(codes_of_6<I, 1, 1>(w, high), excess[1]);
}

// Operand A of step i of half h of a load: codes minus their zeros. `high`: of 6 bits, the word with the others.
DEVICE void fragment(u32 (&a)[4], const uint4& load, int h, int i, const u32 (&excess)[2], u32 high = 0) {
    if (FLOAT4_CODES) {
        float4_fragment(a, component(load, 2 * h + i));
    } else if (CODE_BITS == 6) {
        const u32 w = component(load, 2 * h + i);
        if (i == 0)
            fragment_of_6<0>(a, w, high, excess);
        else
            fragment_of_6<1>(a, w, high, excess);
    } else if (CODE_BITS == 4) {
        const u32 w = component(load, 2 * h + i);
        if (Half::is_bf16) {
#pragma unroll
            for (int part = 0; part < 4; ++part)
                a[part] = BF16::sub(and_or(w >> (4 * part), 0x000f000fu, 0x43004300u), excess[part & 1]);
        } else {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                a[2 * e] = F16::sub(and_or(w >> (8 * e), 0x000f000fu, 0x64006400u), excess[0]);
                a[2 * e + 1] = F16::sub(and_or(w >> (8 * e), 0x00f000f0u, 0x54005400u), excess[1]);
            }
        }
    } else {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const u32 w = component(load, 2 * i + e);
            a[2 * e] = FLOAT8 ? e4m3_to_half(w) : bytes_to_half<0>(w, excess[0]);
            a[2 * e + 1] = FLOAT8 ? e4m3_to_half(w >> 16) : bytes_to_half<2>(w, excess[1]);
        }
    }
}

#ifdef FLOAT8_X
static_assert(FLOAT8, "float8 inputs meet float8 weights");
using CodeSum = float;
constexpr CodeSum NO_SUM = 0.0f;
DEVICE void multiply_codes(CodeSum (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_e4m3(c, a, b0, b1); }
DEVICE float sum_of(CodeSum sum) { return sum; }

// Operand A of mma.m16n8k32 for a load: e4m3 codes as they are.
DEVICE void byte_fragment(u32 (&a)[4], const uint4& load, int, const u32 (&)[2]) {
    a[0] = prmt(load.x, load.y, 0x5410), a[1] = prmt(load.x, load.y, 0x7632);
    a[2] = prmt(load.z, load.w, 0x5410), a[3] = prmt(load.z, load.w, 0x7632);
}
#else
using CodeSum = i32;
constexpr CodeSum NO_SUM = 0x4b400000;  // 1.5 * 2^23: with an integer of up to 22 bits added, the float of that sum
DEVICE void multiply_codes(CodeSum (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_s8(c, a, b0, b1); }
DEVICE float sum_of(CodeSum sum) { return __uint_as_float(sum) - __uint_as_float(NO_SUM); }

// Operand A of mma.m16n8k32 for half h of a load: codes minus their zeros, as int8. 128 + code - zero borrows nothing
// from its neighbour. The 4 inputs of a register lie in the order 0, 2, 1, 3.
DEVICE void byte_fragment(u32 (&a)[4], const uint4& load, int h, const u32 (&excess)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 w = component(load, 2 * h + i);
#pragma unroll
        for (int r = 0; r < 2; ++r)
            a[2 * i + r] = (and_or(w >> (4 * r), 0x0f0f0f0fu, 0x80808080u) - excess[r]) ^ 0x80808080u;
    }
}
#endif
