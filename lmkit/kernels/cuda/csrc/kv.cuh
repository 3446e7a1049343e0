// Blocked KV storage on the device: writing a head, and turning stored bytes into fragments of an mma.
//
// One layer's keys (or values), of any storage type (ops.py): data [blocks][kv_heads][BLOCK tokens][row], so the rows
// of 16 consecutive tokens of a head are contiguous; params float16 [blocks][kv_heads][BLOCK][2] = scale, minimum, or
// [1] = scale of types with levels (int3, int2).
//
// Tensor cores get the stored values: 16-bit floats as they are, codes as F16, which represents every code exactly.
// Scale and minimum are applied to a token's score (keys) or weight (values), never to an element.
#pragma once
#include "ptx.cuh"

enum StorageType { KV_FLOAT16, KV_BFLOAT16, KV_INT8, KV_FP8, KV_INT4, KV_INT3, KV_INT2 };

template <bool CONDITION, class A, class B> struct Choice { using Type = A; };
template <class A, class B> struct Choice<false, A, B> { using Type = B; };

// The layout of a token's row, and the role of its parts in fragments.
//
// A row is cut into chunks of 16 bytes. ldmatrix loads chunks 2i and 2i+1 of 16 tokens at once ("load" i), as matrices
// (tokens 0-7, chunk 2i), (8-15, 2i), (0-7, 2i+1), (8-15, 2i+1). It only moves bytes: an mma's k or row may stand for
// any element, if the other operand or the result is read the same way. A "step" is the input of one mma: 16
// elements of 16 tokens.
//
//   16-bit   step s = elements 16 s + 0..15 = load s, as in ptx.cuh
//   8-bit    step s = elements 16 s + 0..15 = chunk s
//   int4     steps 2c and 2c+1 = the low and the high nibbles of chunk c: elements 16 c + 0..15, D/2 + 16 c + 0..15
//   int3/2   are unpacked first, a unit of 32 to a chunk: steps 2c and 2c+1 = elements 32 c + 0..15, 32 c + 16..31
//
// Keys: for lane 4g + t, a 32-bit register of codes holds bytes 4t..4t+3 of one token's chunk. Its pairs are bytes (0,
// 2) and (1, 3), since masks alone separate those: k 2t, 2t+1 are bytes 4t, 4t+2 and k 2t+8, 2t+9 are bytes 4t+1, 4t+3.
// Values are loaded transposed: bytes 2g and 2g+1 of token 2t, then of token 2t+1. Bytes (0, 2) are the row g of a
// fragment whose row is the element and whose k is the token, bytes (1, 3) are its row g+8.
//
// Chunks beyond the row's end (int4 rows of 8 bytes more than a multiple of 16, and odd numbers of chunks) are read too
// and hold arbitrary numbers. Their elements are -1 below; multiply them by 0 or drop them.
template <int TYPE, int D>
struct Storage {
    static_assert(D % 16 == 0, "steps are 16 elements");
    static constexpr bool PACKED = TYPE == KV_INT3 || TYPE == KV_INT2;  // codes of levels
    static constexpr bool NIBBLES = TYPE == KV_INT4 || PACKED;
    static constexpr bool CODED = TYPE == KV_INT8 || TYPE == KV_FP8 || NIBBLES;
    static constexpr bool HAS_MINIMUM = TYPE == KV_INT8 || NIBBLES;
    static_assert(!PACKED || D % 32 == 0, "units are 32 elements");
    using Float = typename Choice<TYPE == KV_BFLOAT16, BF16, F16>::Type;  // the mma's type
    static constexpr int BITS = TYPE == KV_INT3 ? 3 : TYPE == KV_INT2 ? 2 : NIBBLES ? 4 : CODED ? 8 : 16;
    static constexpr int ROW = D * BITS / 8;                       // bytes of a token
    static constexpr int PARAM_BYTES = PACKED ? 2 : CODED ? 4 : 0;  // of a token
    static constexpr int PIECE = ROW % 16 == 0 ? 16 : ROW % 8 == 0 ? 8 : 4;  // of a row, that is copied at once
    static constexpr int CHUNKS = PACKED ? D / 32 : (ROW + 15) / 16;
    static constexpr int LOADS = (CHUNKS + 1) / 2;
    static constexpr int STEPS_PER_LOAD = NIBBLES ? 4 : CODED ? 2 : 1;
    static constexpr int STEPS = CODED ? CHUNKS * STEPS_PER_LOAD / 2 : LOADS;
    // In shared memory: an odd number of chunks, so that the chunks of 8 rows lie in different banks.
    static constexpr int STRIDE = (2 * LOADS + 1) * 16;
    static constexpr int STORED_STRIDE = PACKED ? ROW : STRIDE;  // of a row that is not unpacked yet
    // The F16 numbers of codes are `code + bias` for keys (undone in a score: bias * sum of the query) and `code` for
    // values. For fp8 they are the number / 256, for both.
    static constexpr float UNIT = TYPE == KV_FP8 ? 256.0f : 1.0f;

    // The element of number j (0..3: k 2t, 2t+1, 2t+8, 2t+9) of lane t in a step of keys, or -1.
    static DEVICE int key_element(int step, int t, int j) {
        if constexpr (!CODED) return 16 * step + 2 * t + (j & 1) + (j & 2) * 4;
        return element(step, 4 * t + (j & 1) * 2 + (j >> 1));
    }

    // Where an element is in the steps of keys: 16 step + k.
    static DEVICE int key_place(int element) {
        if constexpr (!CODED) return element;
        const int high = TYPE == KV_INT4 && element >= D / 2, byte = element - high * (D / 2);
        const int step = TYPE == KV_INT4 ? (byte >> 4) * 2 + high : byte >> 4;
        return 16 * step + (byte >> 1 & 6) + (byte >> 1 & 1) + (byte & 1) * 8;
    }

    // The element of row `row` (0..15) of a step of values, or -1.
    static DEVICE int value_element(int step, int row) {
        if constexpr (!CODED) return 16 * step + row;
        return element(step, 2 * (row & 7) + (row >> 3));
    }

    // The bias on the codes of a step of keys.
    static DEVICE float bias(int step) {
        return TYPE == KV_INT8 || PACKED ? 1024.0f : TYPE != KV_INT4 ? 0.0f : step & 1 ? 64.0f : 1024.0f;
    }

    // Starts to copy the parameters of row `row` of all to a word, and reads them there. Of two rows that share a word of
    // the storage, the second one has its high half; the first one is copied alone, since the second may not be written.
    static DEVICE void copy_params(u8* word, const u8* params, i64 row, bool valid) {
        if constexpr (PACKED)
            cp_async_part<4>(word, params + (row & ~1ll) * 2, valid ? 2 + 2 * static_cast<int>(row & 1) : 0);
        else
            cp_async<4>(word, params + row * 4, valid);
    }
    static DEVICE float2 scale_and_minimum(u32 word, int row) {
        if constexpr (!PACKED) return make_float2(F16::lo(word), F16::hi(word));
        const float scale = row & 1 ? F16::hi(word) : F16::lo(word);
        return make_float2(scale, scale * (TYPE == KV_INT3 ? -8.0f : -10.0f));
    }

    // A unit of 32 codes, as it is stored -> 16 bytes. Byte b has code b in its low nibble, 16 + b in its high one.
    static DEVICE uint4 unpacked(const u32* unit) {
        const u32 a = unit[0], b = unit[1], high = TYPE == KV_INT3 ? unit[2] : 0;
        return make_uint4((a & 0x33333333u) | third(high), (b & 0x33333333u) | third(high >> 4),
                          (a >> 2 & 0x33333333u) | third(high >> 8), (b >> 2 & 0x33333333u) | third(high >> 12));
    }

    // The same for all units of `count` rows: thread `thread` of `threads`.
    static DEVICE void unpack(u8* to, const u8* rows, int count, int thread, int threads) {
        if constexpr (PACKED)
            for (int i = thread; i < count * CHUNKS; i += threads)
                *reinterpret_cast<uint4*>(to + i / CHUNKS * STRIDE + i % CHUNKS * 16) =
                    unpacked(reinterpret_cast<const u32*>(rows) + i * BITS);
    }

    // The levels of the four codes in the low half of `codes`, a byte each.
    static DEVICE u32 levels(u32 codes) {
        return TYPE == KV_INT3 ? prmt(0x07050300u, 0x100d0b09u, codes) : prmt(0x140d0700u, 0, codes);
    }

    // Loads fragments (a of ptx.cuh: rows are tokens, k are elements) of 16 tokens' keys. Their rows lie at `rows` in
    // shared memory, STRIDE bytes apart. a[s] is step load * STEPS_PER_LOAD + s. They can be b of a product whose
    // columns are tokens: a[s][0], [2] for tokens 0-7; a[s][1], [3] for 8-15.
    static DEVICE void load_keys(u32 (&a)[STEPS_PER_LOAD][4], const u8* rows, int load) {
        u32 r[4];
        ldmatrix_x4(r, rows + (lane_id() & 15) * STRIDE + load * 32 + (lane_id() >> 4) * 16);
        if constexpr (!CODED) {
            a[0][0] = r[0], a[0][1] = r[1], a[0][2] = r[2], a[0][3] = r[3];
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 pairs[STEPS_PER_LOAD];
                widen<false>(pairs, r[i]);
#pragma unroll
                for (int p = 0; p < STEPS_PER_LOAD; ++p)
                    a[(i >> 1) * (STEPS_PER_LOAD / 2) + (p >> 1)][(i & 1) + (p & 1) * 2] = pairs[p];
            }
        }
    }

    // The same for values: rows are elements, k are tokens. They can be b of a product whose columns are elements:
    // a[s][0], [2] for rows 0-7 of the step, a[s][1], [3] for 8-15.
    static DEVICE void load_values(u32 (&a)[STEPS_PER_LOAD][4], const u8* rows, int load) {
        u32 r[4];
        ldmatrix_x4_trans(r, rows + (lane_id() & 15) * STRIDE + load * 32 + (lane_id() >> 4) * 16);
        if constexpr (!CODED) {
            a[0][0] = r[0], a[0][1] = r[2], a[0][2] = r[1], a[0][3] = r[3];
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 pairs[STEPS_PER_LOAD];
                widen<true>(pairs, r[i]);
#pragma unroll
                for (int p = 0; p < STEPS_PER_LOAD; ++p)
                    a[(i >> 1) * (STEPS_PER_LOAD / 2) + (p >> 1)][(i & 1) * 2 + (p & 1)] = pairs[p];
            }
        }
    }

   private:
    static DEVICE int element(int step, int byte_of_chunk) {
        if constexpr (TYPE == KV_INT4) {
            const int byte = (step >> 1) * 16 + byte_of_chunk;
            return byte < ROW ? byte + (step & 1) * (D / 2) : -1;
        }
        return step * 16 + byte_of_chunk;
    }

    // Bits 0-3 and 16-19 -> bit 2 of the low nibbles, and of the high ones.
    static DEVICE u32 third(u32 bits) {
        if constexpr (TYPE == KV_INT2) return 0;
        return ((bits & 15) * 0x00810204u & 0x04040404u) | ((bits >> 16 & 15) * 0x08102040u & 0x40404040u);
    }

    // Bytes (0, 2) and (1, 3) as pairs of F16; of nibbles the low ones, then the high ones. `EXACT`: without the bias.
    // 0x6400 is 1024, whose last bit is worth 1. 0x5400 is 64, where bit 4 is worth 1.
    template <bool EXACT>
    static DEVICE void widen(u32 (&pairs)[STEPS_PER_LOAD], u32 r) {
        if constexpr (TYPE == KV_FP8) {  // exponent and fraction one bit lower: the number / 256, even if subnormal
            const u32 even = r << 8;
            pairs[0] = and_or(even >> 1, 0x3f803f80u, even & 0x80008000u);
            pairs[1] = and_or(r >> 1, 0x3f803f80u, r & 0x80008000u);
        } else {
            if constexpr (PACKED) {
                const u32 ordered = prmt(r, 0, 0x3120), even = levels(ordered), odd = levels(ordered >> 16);
                pairs[0] = prmt(even, 0x64006400u, 0x5250), pairs[2] = prmt(even, 0x64006400u, 0x5351);
                pairs[1] = prmt(odd, 0x64006400u, 0x5250), pairs[3] = prmt(odd, 0x64006400u, 0x5351);
            } else if constexpr (TYPE == KV_INT8) {
                pairs[0] = prmt(r, 0x64006400u, 0x5250);
                pairs[1] = prmt(r, 0x64006400u, 0x5351);
            } else {
                pairs[0] = and_or(r, 0x000f000fu, 0x64006400u);
                pairs[1] = and_or(r >> 8, 0x000f000fu, 0x64006400u);
                pairs[2] = and_or(r, 0x00f000f0u, 0x54005400u);
                pairs[3] = and_or(r >> 8, 0x00f000f0u, 0x54005400u);
            }
            if constexpr (EXACT) {
#pragma unroll
                for (int p = 0; p < STEPS_PER_LOAD; ++p)
                    pairs[p] = F16::sub(pairs[p], PACKED || p < 2 ? 0x64006400u : 0x54005400u);
            }
        }
    }
};

// ---- one head in 16 lanes: lane l has elements l E .. l E + E - 1, E = D / 16. All lanes of a warp take part.

template <class T, int E>
DEVICE void load_span(T (&out)[E], const T* from) {
    constexpr int BYTES = E * sizeof(T);
    using Word = typename Choice<BYTES % 16 == 0, uint4, typename Choice<BYTES % 8 == 0, u64, T>::Type>::Type;
#pragma unroll
    for (int i = 0; i < BYTES / int(sizeof(Word)); ++i)
        reinterpret_cast<Word*>(out)[i] = reinterpret_cast<const Word*>(from)[i];
}

template <class T, int E>
DEVICE void store_span(T* to, const T (&in)[E]) {
    constexpr int BYTES = E * sizeof(T);
    using Word = typename Choice<BYTES % 16 == 0, uint4, typename Choice<BYTES % 8 == 0, u64, T>::Type>::Type;
#pragma unroll
    for (int i = 0; i < BYTES / int(sizeof(Word)); ++i)
        reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(in)[i];
}

DEVICE float rounded(float x) { return Half::to_float(Half::from_float(x)); }

template <int E>
DEVICE void load_floats(float (&x)[E], const u16* row, const float* mean) {
    alignas(16) u16 bits[E];
    load_span(bits, row);
#pragma unroll
    for (int e = 0; e < E; ++e) x[e] = mean ? rounded(Half::to_float(bits[e]) - mean[e]) : Half::to_float(bits[e]);
}

// A token's row of ops.rope_angles. `half` = R/2, 0 = no rotation.
struct Angles {
    const float *cosines, *sines;
    int half;
};

// Loads a head's row of Half, subtracts `mean` (unless null) and applies RoPE. The result of each of the two is rounded
// to Half, as ops.rope_append does by writing it back. The row's address is a multiple of 16 bytes.
template <int D>
DEVICE void load_head(float (&x)[D / 16], const u16* row, const float* mean, Angles angles) {
    constexpr int E = D / 16;
    const int first = (lane_id() & 15) * E, half = angles.half;
    load_floats(x, row + first, mean ? mean + first : nullptr);
    if (half % E == 0) {
        if (first < 2 * half) {
            const int way = first < half ? half : -half, angle = first < half ? first : first - half;
            float other[E];
            alignas(16) float c[E], s[E];
            load_floats(other, row + first + way, mean ? mean + first + way : nullptr);
            load_span(c, angles.cosines + angle);
            load_span(s, angles.sines + angle);
#pragma unroll
            for (int e = 0; e < E; ++e) {
                const float a = __fmul_rn(x[e], c[e]), b = __fmul_rn(other[e], s[e]);
                x[e] = rounded(first < half ? __fsub_rn(a, b) : __fadd_rn(a, b));
            }
        }
    } else {
#pragma unroll
        for (int e = 0; e < E; ++e) {
            const int i = first + e;
            if (i >= 2 * half) break;
            const int pair = i < half ? i + half : i - half, angle = i < half ? i : pair;
            float other = Half::to_float(row[pair]);
            if (mean) other = rounded(other - mean[pair]);
            const float a = __fmul_rn(x[e], angles.cosines[angle]), b = __fmul_rn(other, angles.sines[angle]);
            x[e] = rounded(i < half ? __fsub_rn(a, b) : __fadd_rn(a, b));
        }
    }
}

// x H / sqrt(D), D a power of two. Additions have the order of the reference, so that codes are the same.
template <int D>
DEVICE void hadamard(float (&x)[D / 16]) {
    static_assert((D & (D - 1)) == 0 && D <= 256, "Hadamard's matrix");
    constexpr int E = D / 16;
    constexpr float EVEN_ROOT = D <= 32 ? 0.25f : D <= 128 ? 0.125f : 0.0625f;
    constexpr float INVERSE_ROOT = D == 32 || D == 128 ? EVEN_ROOT * 0.70710678118654752f : EVEN_ROOT;
#pragma unroll
    for (int step = 1; step < E; step *= 2)
#pragma unroll
        for (int e = 0; e < E; ++e)
            if (!(e & step)) {
                const float a = x[e], b = x[e + step];
                x[e] = a + b, x[e + step] = a - b;
            }
#pragma unroll
    for (int step = 1; step < 16; step *= 2)
#pragma unroll
        for (int e = 0; e < E; ++e) {
            const float other = __shfl_xor_sync(0xffffffffu, x[e], step);
            x[e] = lane_id() & step ? other - x[e] : x[e] + other;
        }
#pragma unroll
    for (int e = 0; e < E; ++e) x[e] = __fmul_rn(x[e], INVERSE_ROOT);
}

// The maximum and the sum over 16 lanes.
DEVICE float head_max(float x) {
#pragma unroll
    for (int step = 8; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}
DEVICE float head_sum(float x) {
#pragma unroll
    for (int step = 8; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// The codes of a head as ops.kv_append defines them, for types without levels. The result is scale | minimum << 16, both float16. `fixed` is the
// head's scale, or null to use the vector's own.
template <int TYPE, int E>
DEVICE u32 quantize(u8 (&codes)[E], const float (&x)[E], const float* fixed) {
    constexpr float LEVELS = TYPE == KV_INT8 ? 255.0f : 15.0f, LARGEST = 65504.0f;
    float wide[E], low = LARGEST, high = -LARGEST;
#pragma unroll
    for (int e = 0; e < E; ++e) {
        wide[e] = fminf(fmaxf(x[e], -LARGEST), LARGEST);
        low = fminf(low, wide[e]), high = fmaxf(high, wide[e]);
    }
    high = head_max(high), low = -head_max(-low);
    u16 minimum_bits = 0, scale_bits;
    if (fixed) {
        scale_bits = F16::from_float(*fixed);
        if (TYPE != KV_FP8) minimum_bits = F16::from_float(*fixed * (TYPE == KV_INT8 ? -128.0f : -8.0f));
    } else if (TYPE == KV_FP8) {
        scale_bits = F16::from_float(fmaxf(high, -low) / 448.0f);
    } else {
        minimum_bits = F16::from_float(low);
        const float span = fmaxf(high - F16::to_float(minimum_bits), 0.0f);
        scale_bits = high > low ? F16::from_float(span / LEVELS) : 0;
    }
    const float minimum = F16::to_float(minimum_bits), scale = F16::to_float(scale_bits);
#pragma unroll
    for (int e = 0; e < E; ++e) {
        if (!(scale > 0.0f))
            codes[e] = 0;
        else if (TYPE == KV_FP8)
            codes[e] = static_cast<u8>(float_to_e4m3(wide[e] / scale));
        else
            codes[e] = static_cast<u8>(__float2uint_rn(fminf(fmaxf((wide[e] - minimum) / scale, 0.0f), LEVELS)));
    }
    return scale_bits | static_cast<u32>(minimum_bits) << 16;
}

// The nearest levels of a head (kernels/reference/kv.py). The result is the scale with the least error, float16: NaN if x
// has one.
template <int TYPE, int E>
DEVICE u16 nearest_levels(u8 (&codes)[E], const float (&x)[E]) {
    constexpr int COUNT = TYPE == KV_INT3 ? 8 : 4, UNITS = 5;
    constexpr float LARGEST = 65504.0f, LEVELS[2][8] = {{-10, -3, 3, 10}, {-8, -5, -3, -1, 1, 3, 5, 8}};
    constexpr double AROUND[UNITS] = {0.8, 0.9, 1.0, 1.1, 1.2};
    const float(&levels)[8] = LEVELS[TYPE == KV_INT3];
    float wide[E], power = 0.0f, is_nan = 0.0f;
#pragma unroll
    for (int e = 0; e < E; ++e) {
        is_nan = x[e] == x[e] ? is_nan : 1.0f;
        wide[e] = fminf(fmaxf(x[e], -LARGEST), LARGEST), power += wide[e] * wide[e];
    }
    const float deviation = sqrtf(head_sum(power) / (16 * E));
    float best = -1.0f, scale = 0.0f;
#pragma unroll
    for (int e = 0; e < E; ++e) codes[e] = 0;
#pragma unroll 1
    for (int unit = 0; unit < UNITS; ++unit) {
        const float step = static_cast<float>((TYPE == KV_INT3 ? 0.2675 : 0.151) * AROUND[unit]);
        u8 found[E];
        float product = 0.0f, square = 0.0f;
#pragma unroll
        for (int e = 0; e < E; ++e) {
            float level = levels[0];
            found[e] = 0;
#pragma unroll
            for (int c = 1; c < COUNT; ++c)
                if (wide[e] > __fmul_rn(deviation, __fmul_rn((levels[c] + levels[c - 1]) / 2, step)))
                    level = levels[c], found[e] = static_cast<u8>(c);
            product += wide[e] * level, square += level * level;
        }
        product = head_sum(product), square = head_sum(square);
        const float gain = product * product / square;
        if (!(gain > best)) continue;
        best = gain, scale = product / square;
#pragma unroll
        for (int e = 0; e < E; ++e) codes[e] = found[e];
    }
    return head_max(is_nan) > 0.0f ? 0x7e00 : F16::from_float(scale);
}

// A lane's words of a row of levels, from the codes of all, a byte each.
template <int TYPE, int D>
DEVICE void pack_levels(u8* row, const u32* codes, int lane) {
    constexpr int WORDS = Storage<TYPE, D>::BITS;  // of a unit
    for (int i = lane; i < D / 32 * WORDS; i += 16) {
        const u32* unit = codes + i / WORDS * 8;
        const int part = i % WORDS;
        u32 word = 0;
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            if (part < 2) {
                word |= (unit[2 * group + part] & 0x03030303u) << 2 * group;
            } else {  // the last bits of four bytes meet in bits 24-27 of a product
                const u32 first = unit[2 * group] >> 2 & 0x01010101u, second = unit[2 * group + 1] >> 2 & 0x01010101u;
                word |= ((first * 0x01020408u >> 24 & 15) | (second * 0x01020408u >> 20 & 0xf0)) << 8 * group;
            }
        }
        reinterpret_cast<u32*>(row)[i] = word;
    }
}

// Stores a head: its row's ROW bytes and, for codes, its params. Lanes that are not `active` store nothing. `scratch`: D
// bytes of shared memory, a multiple of 4, for levels; of each head its own.
template <int TYPE, int D>
DEVICE void store_head(u8* row, u8* params, const float (&x)[D / 16], const float* fixed, bool active, u8* scratch) {
    using S = Storage<TYPE, D>;
    constexpr int E = D / 16;
    const int lane = lane_id() & 15;
    if constexpr (!S::CODED) {
        alignas(16) u16 bits[E];
#pragma unroll
        for (int e = 0; e < E; ++e) bits[e] = S::Float::from_float(x[e]);
        if (active) store_span(reinterpret_cast<u16*>(row) + lane * E, bits);
    } else {
        alignas(16) u8 codes[E];
        if constexpr (S::PACKED) {
            const u16 scale = nearest_levels<TYPE>(codes, x);
            __syncwarp();  // others have read what is overwritten
            store_span(scratch + lane * E, codes);
            __syncwarp();
            if (active) pack_levels<TYPE, D>(row, reinterpret_cast<const u32*>(scratch), lane);
            if (active && lane == 0) *reinterpret_cast<u16*>(params) = scale;
            return;
        }
        const u32 pair = quantize<TYPE>(codes, x, fixed);
        if constexpr (TYPE == KV_INT4) {
#pragma unroll
            for (int e = 0; e < E; ++e)
                codes[e] |= static_cast<u8>(__shfl_xor_sync(0xffffffffu, static_cast<u32>(codes[e]), 8) << 4);
            active = active && lane < 8;
        }
        if (active) store_span(row + lane * E, codes);
        if (active && lane == 0) *reinterpret_cast<u32*>(params) = pair;
    }
}

// The place of a token's row, counted in rows: slot = block * block_size + offset.
DEVICE i64 row_of_slot(int slot, int block_size, int kv_heads, int head) {
    const int block = slot / block_size;
    return (static_cast<i64>(block) * kv_heads + head) * block_size + (slot - block * block_size);
}
