// A GPU made of one CPU thread, behind the names that kernels use: for tests of kernels where there is no GPU.
//
// Each CUDA thread is a fiber (emulator.cpp). Fibers are switched only where threads may wait for each other, and in
// random order, so a barrier that is missing shows up as a wrong result. cp.async copies when it is waited for, at the
// last moment; shared memory starts as NaN; a warp operation that its lanes reach at different lines is an error.
// Kernels run one after the other, as if each waited for the one before. If they are compiled with instrumented accesses
// (overlap), it is an error if a thread, before its wait, reads what an earlier kernel has written since the last
// barrier, or writes anything but shared memory; or if it ends without a wait.
// mma sums products in float32, one after the other: a GPU's order is another, and its products may be cut off.
#pragma once
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS  // C's own math.h: g++ reads C++'s <cmath> for a quarter of a kernel's time
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <cstring>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __constant__ static const

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct int2 { i32 x, y; };
struct alignas(16) int4 { i32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline int2 make_int2(i32 x, i32 y) { return {x, y}; }
inline int4 make_int4(i32 x, i32 y, i32 z, i32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace lm {
struct Index { u32 x, y, z; };
struct Thread {
    Index thread, block, block_size, grid_size;
    u8* shared;
    bool waited;  // for the kernels before
};
extern __thread Thread* current;  // of this rank: every thread of the CPU is a GPU of its own

[[noreturn]] void fail(const char* format, ...);
void barrier(int id, int count, int line);
// All lanes of `mask` meet; the last one carries out `op` on what every lane brought (null: not in the mask).
void collective(u32 mask, int line, void* mine, void (*op)(void** lanes));
void wait_for_previous();
void store_release(u32* p, u32 value);
void wait_for_peer(const u32* flag, u32 value, u32* lost, u64 limit);
void copy_later(void* shared, const void* global, int bytes, int given);
void commit_copies();
void wait_copies(int groups);
void prefetch(const void* global, int bytes);
struct SharedMatrix { const u8* first; int next_k, next_n; };
void fence_copies();
void warpgroup_fence();
void warpgroup_commit();
void warpgroup_wait(int pending);
void warpgroup_multiply(float* d, int columns, const u32* a, SharedMatrix b, bool add, float (*to_float)(u16), int line);

// What a launch hands over, as cuLaunchKernel does: the address of each argument.
template <class... A, size_t... I>
void apply(void (*kernel)(A...), void** args, std::index_sequence<I...>) { kernel(*static_cast<std::remove_cv_t<A>*>(args[I])...); }
template <class... A>
void apply(void (*kernel)(A...), void** args) { apply(kernel, args, std::index_sequence_for<A...>{}); }
template <class... A>
constexpr int count_arguments(void (*)(A...)) { return sizeof...(A); }
template <class... A>
void argument_sizes(void (*)(A...), int* sizes) { int i = 0; ((sizes[i++] = sizeof(A)), ...); }
}  // namespace lm

#define EXPORT(kernel)                                                                             \
    extern "C" void kernel##_apply(void** args) { lm::apply(kernel, args); }                       \
    extern "C" int kernel##_arguments(int* sizes) {                                                \
        if (sizes) lm::argument_sizes(kernel, sizes);                                              \
        return lm::count_arguments(kernel);                                                        \
    }

#define threadIdx (lm::current->thread)
#define blockIdx (lm::current->block)
#define blockDim (lm::current->block_size)
#define gridDim (lm::current->grid_size)
#define shared_memory (lm::current->shared)

// ---- kernels that overlap: the accesses before the wait are checked if the kernel is compiled for that (emulator.cpp)

inline void launch_next() {}
inline void wait_for_previous() { lm::wait_for_previous(); }

// ---- CUDA's own functions

inline void __syncthreads(int line = __builtin_LINE()) { lm::barrier(0, 0, line); }
inline void __syncwarp(u32 mask = 0xffffffffu, int line = __builtin_LINE()) { lm::collective(mask, line, nullptr, nullptr); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline float __uint_as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
inline u32 __float_as_uint(float x) { u32 y; memcpy(&y, &x, 4); return y; }
inline float __int_as_float(i32 x) { float y; memcpy(&y, &x, 4); return y; }
inline i32 __float_as_int(float x) { i32 y; memcpy(&y, &x, 4); return y; }
inline double __longlong_as_double(i64 x) { double y; memcpy(&y, &x, 8); return y; }
inline i64 __double_as_longlong(double x) { i64 y; memcpy(&y, &x, 8); return y; }
inline u32 __float2uint_rn(float x) { return static_cast<u32>(nearbyintf(x)); }
inline i32 __float2int_rn(float x) { return static_cast<i32>(nearbyintf(x)); }
inline float __fdividef(float a, float b) { return a / b; }
inline float lm_unfused(float x) { asm("" : "+x"(x)); return x; }  // g++ would make one operation of a product and a sum
inline float __fadd_rn(float a, float b) { return lm_unfused(a + b); }
inline float __fsub_rn(float a, float b) { return lm_unfused(a - b); }
inline float __fmul_rn(float a, float b) { volatile float product = a * b; return product; }  // no part of an FMA
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __popcll(u64 x) { return __builtin_popcountll(x); }
inline int __clz(i32 x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(i32 x) { return __builtin_ffs(x); }
inline u32 __umulhi(u32 a, u32 b) { return static_cast<u32>(static_cast<u64>(a) * b >> 32); }
inline u64 __umul64hi(u64 a, u64 b) { return static_cast<u64>(static_cast<unsigned __int128>(a) * b >> 64); }
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
template <class T> inline T atomicAdd(T* p, T x) { T old = *p; *p = old + x; return old; }
template <class T> inline T atomicMin(T* p, T x) { T old = *p; *p = x < old ? x : old; return old; }
template <class T> inline T atomicMax(T* p, T x) { T old = *p; *p = x > old ? x : old; return old; }
template <class T> inline T atomicOr(T* p, T x) { T old = *p; *p = old | x; return old; }
template <class T> inline T atomicExch(T* p, T x) { T old = *p; *p = x; return old; }
template <class T> inline T atomicCAS(T* p, T expected, T x) { T old = *p; if (old == expected) *p = x; return old; }

namespace lm {
template <class T> struct Shuffle { T mine, theirs; int source; };

template <class T>
T shuffle(u32 mask, T x, int source, int line) {
    Shuffle<T> args{x, x, source};
    collective(mask, line, &args, [](void** lanes) {
        for (int i = 0; i < 32; ++i)
            if (auto* lane = static_cast<Shuffle<T>*>(lanes[i])) {
                if (!lanes[lane->source]) fail("a shuffle reads lane %d, which takes no part", lane->source);
                lane->theirs = static_cast<Shuffle<T>*>(lanes[lane->source])->mine;
            }
    });
    return args.theirs;
}
}  // namespace lm

template <class T>
T __shfl_sync(u32 mask, T x, int source, int width = 32, int line = __builtin_LINE()) {
    const int lane = lm::current->thread.x & 31;
    return lm::shuffle(mask, x, (lane & ~(width - 1)) | (source & (width - 1)), line);
}
template <class T>
T __shfl_xor_sync(u32 mask, T x, int other, int width = 32, int line = __builtin_LINE()) {
    const int lane = lm::current->thread.x & 31, source = lane ^ other;
    return lm::shuffle(mask, x, (source | (width - 1)) > (lane | (width - 1)) ? lane : source, line);
}
template <class T>
T __shfl_up_sync(u32 mask, T x, int delta, int width = 32, int line = __builtin_LINE()) {
    const int lane = lm::current->thread.x & 31;
    return lm::shuffle(mask, x, (lane & (width - 1)) < delta ? lane : lane - delta, line);
}
template <class T>
T __shfl_down_sync(u32 mask, T x, int delta, int width = 32, int line = __builtin_LINE()) {
    const int lane = lm::current->thread.x & 31;
    return lm::shuffle(mask, x, (lane & (width - 1)) + delta >= width ? lane : lane + delta, line);
}

namespace lm {
struct Vote { bool yes; u32 votes; };

inline u32 ballot(u32 mask, bool yes, int line) {
    Vote args{yes, 0};
    collective(mask, line, &args, [](void** lanes) {
        u32 votes = 0;
        for (int i = 0; i < 32; ++i)
            if (lanes[i] && static_cast<Vote*>(lanes[i])->yes) votes |= 1u << i;
        for (int i = 0; i < 32; ++i)
            if (lanes[i]) static_cast<Vote*>(lanes[i])->votes = votes;
    });
    return args.votes;
}

template <class T, class Op>
T reduce(u32 mask, T x, int line, Op) {
    struct Args { T value; } args{x};
    collective(mask, line, &args, [](void** lanes) {
        bool first = true;
        T total{};
        for (int i = 0; i < 32; ++i)
            if (auto* lane = static_cast<Args*>(lanes[i])) {
                total = first ? lane->value : Op{}(total, lane->value);
                first = false;
            }
        for (int i = 0; i < 32; ++i)
            if (lanes[i]) static_cast<Args*>(lanes[i])->value = total;
    });
    return args.value;
}
struct Sum { template <class T> T operator()(T a, T b) { return a + b; } };
struct Least { template <class T> T operator()(T a, T b) { return a < b ? a : b; } };
struct Greatest { template <class T> T operator()(T a, T b) { return a < b ? b : a; } };
}  // namespace lm

inline u32 __ballot_sync(u32 mask, bool yes, int line = __builtin_LINE()) { return lm::ballot(mask, yes, line); }
inline bool __any_sync(u32 mask, bool yes, int line = __builtin_LINE()) { return lm::ballot(mask, yes, line) != 0; }
inline bool __all_sync(u32 mask, bool yes, int line = __builtin_LINE()) { return lm::ballot(mask, yes, line) == mask; }
template <class T> T __reduce_add_sync(u32 mask, T x, int line = __builtin_LINE()) { return lm::reduce(mask, x, line, lm::Sum{}); }
template <class T> T __reduce_min_sync(u32 mask, T x, int line = __builtin_LINE()) { return lm::reduce(mask, x, line, lm::Least{}); }
template <class T> T __reduce_max_sync(u32 mask, T x, int line = __builtin_LINE()) { return lm::reduce(mask, x, line, lm::Greatest{}); }

// ---- the wrappers of ptx.cuh

inline uint4 load_stream(const void* p) { return *static_cast<const uint4*>(p); }
inline void cp_async16(void* shared, const void* global, bool valid = true) { lm::copy_later(shared, global, 16, valid ? 16 : 0); }
inline void cp_async16_stream(void* shared, const void* global, bool valid = true) { lm::copy_later(shared, global, 16, valid ? 16 : 0); }
template <int BYTES>
inline void cp_async_part(void* shared, const void* global, int given) { lm::copy_later(shared, global, BYTES, given); }
template <int BYTES>
inline void cp_async(void* shared, const void* global, bool valid) { cp_async_part<BYTES>(shared, global, valid ? BYTES : 0); }
inline void prefetch_l2(const void* global, int bytes) { lm::prefetch(global, bytes); }
inline void cp_async_commit() { lm::commit_copies(); }
template <int N> inline void cp_async_wait() { lm::wait_copies(N); }

using lm::store_release;
using lm::wait_for_peer;

namespace lm {
struct LoadMatrix { u32* r; const u8* row; };

template <int COUNT, bool TRANS>
void load_matrix(u32* r, const void* row, int line) {
    LoadMatrix args{r, static_cast<const u8*>(row)};
    if (COUNT == 4 || (current->thread.x & 31) < 8 * COUNT)
        if (reinterpret_cast<u64>(row) % 16) fail("line %d: ldmatrix of a row that is not 16-byte aligned", line);
    collective(0xffffffffu, line, &args, [](void** lanes) {
        for (int m = 0; m < COUNT; ++m)
            for (int i = 0; i < 32; ++i) {
                u16 pair[2];
                for (int h = 0; h < 2; ++h) {
                    const int row = TRANS ? 2 * (i % 4) + h : i / 4, column = TRANS ? i / 4 : 2 * (i % 4) + h;
                    memcpy(&pair[h], static_cast<LoadMatrix*>(lanes[8 * m + row])->row + 2 * column, 2);
                }
                memcpy(&static_cast<LoadMatrix*>(lanes[i])->r[m], pair, 4);
            }
    });
}
}  // namespace lm

inline void ldmatrix_x4(u32 (&r)[4], const void* row, int line = __builtin_LINE()) { lm::load_matrix<4, false>(r, row, line); }
inline void ldmatrix_x4_trans(u32 (&r)[4], const void* row, int line = __builtin_LINE()) { lm::load_matrix<4, true>(r, row, line); }
inline void ldmatrix_x2(u32 (&r)[2], const void* row, int line = __builtin_LINE()) { lm::load_matrix<2, false>(r, row, line); }
inline void ldmatrix_x2_trans(u32 (&r)[2], const void* row, int line = __builtin_LINE()) { lm::load_matrix<2, true>(r, row, line); }

inline u32 movmatrix_trans(u32 r, int line = __builtin_LINE()) {
    u32 args = r;
    lm::collective(0xffffffffu, line, &args, [](void** lanes) {
        u16 matrix[8][8];
        for (int i = 0; i < 32; ++i) memcpy(&matrix[i / 4][2 * (i % 4)], lanes[i], 4);
        for (int i = 0; i < 32; ++i) {
            const u16 pair[2] = {matrix[2 * (i % 4)][i / 4], matrix[2 * (i % 4) + 1][i / 4]};
            memcpy(lanes[i], pair, 4);
        }
    });
    return args;
}

template <u32 LUT>
u32 lop3(u32 a, u32 b, u32 c) {
    u32 out = 0;
    for (int i = 0; i < 8; ++i)
        if (LUT >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return out;
}
inline u32 and_or(u32 a, u32 b, u32 c) { return (a & b) | c; }
inline u32 prmt(u32 a, u32 b, u32 selector) {
    const u64 bytes = static_cast<u64>(b) << 32 | a;
    u32 out = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 nibble = selector >> (4 * i) & 15;
        u32 byte = bytes >> (8 * (nibble & 7)) & 255;
        if (nibble & 8) byte = byte & 128 ? 255 : 0;
        out |= byte << (8 * i);
    }
    return out;
}
inline float ex2(float x) {
    const float y = exp2f(x);
    return y < 1.17549435e-38f ? 0.0f : y;
}

namespace lm {
struct Mma { void* c; const u32* a; u32 b[2]; };

template <class Format>
void mma_16(void** lanes) {
    float a[16][16], b[16][8], c[16][8];
    for (int i = 0; i < 32; ++i) {
        const auto* lane = static_cast<Mma*>(lanes[i]);
        const int g = i / 4, t = i % 4;
        for (int part = 0; part < 4; ++part) {
            float* row = &a[g + 8 * (part & 1)][2 * t + 8 * (part >> 1)];
            row[0] = Format::lo(lane->a[part]), row[1] = Format::hi(lane->a[part]);
        }
        for (int part = 0; part < 2; ++part) {
            b[2 * t + 8 * part][g] = Format::lo(lane->b[part]), b[2 * t + 8 * part + 1][g] = Format::hi(lane->b[part]);
        }
        for (int part = 0; part < 4; ++part) c[g + 8 * (part >> 1)][2 * t + (part & 1)] = static_cast<float*>(lane->c)[part];
    }
    for (int k = 0; k < 16; ++k)
        for (int row = 0; row < 16; ++row)
            for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
    for (int i = 0; i < 32; ++i)
        for (int part = 0; part < 4; ++part)
            static_cast<float*>(static_cast<Mma*>(lanes[i])->c)[part] = c[i / 4 + 8 * (part >> 1)][2 * (i % 4) + (part & 1)];
}

template <class Sum, class Number>
void mma_bytes(void** lanes, Number number) {
    Sum a[16][32], b[32][8], c[16][8];
    for (int i = 0; i < 32; ++i) {
        const auto* lane = static_cast<Mma*>(lanes[i]);
        const int g = i / 4, t = i % 4;
        for (int byte = 0; byte < 4; ++byte) {
            for (int part = 0; part < 4; ++part)
                a[g + 8 * (part & 1)][4 * t + byte + 16 * (part >> 1)] = number(lane->a[part] >> (8 * byte) & 255);
            for (int part = 0; part < 2; ++part) b[4 * t + byte + 16 * part][g] = number(lane->b[part] >> (8 * byte) & 255);
        }
        for (int part = 0; part < 4; ++part) c[g + 8 * (part >> 1)][2 * t + (part & 1)] = static_cast<Sum*>(lane->c)[part];
    }
    for (int k = 0; k < 32; ++k)
        for (int row = 0; row < 16; ++row)
            for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
    for (int i = 0; i < 32; ++i)
        for (int part = 0; part < 4; ++part)
            static_cast<Sum*>(static_cast<Mma*>(lanes[i])->c)[part] = c[i / 4 + 8 * (part >> 1)][2 * (i % 4) + (part & 1)];
}
inline void mma_s8(void** lanes) { mma_bytes<i32>(lanes, [](u32 byte) { return static_cast<i8>(byte); }); }
inline float e4m3(u32 code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float size = exponent ? ldexpf(1 + fraction / 8.0f, exponent - 7) : fraction / 512.0f;
    return (code & 127) == 127 ? NAN : code & 128 ? -size : size;
}
inline void mma_e4m3(void** lanes) { mma_bytes<float>(lanes, e4m3); }
}  // namespace lm

inline void mma_s8(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, int line = __builtin_LINE()) {
    lm::Mma args{c, a, {b0, b1}};
    lm::collective(0xffffffffu, line, &args, lm::mma_s8);
}
inline void mma_e4m3(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, int line = __builtin_LINE()) {
    lm::Mma args{c, a, {b0, b1}};
    lm::collective(0xffffffffu, line, &args, lm::mma_e4m3);
}

struct F16 {
    static constexpr bool is_bf16 = false;

    static u16 from_float(float x) { const _Float16 h = static_cast<_Float16>(x); u16 y; memcpy(&y, &h, 2); return y; }
    static float to_float(u16 x) { _Float16 h; memcpy(&h, &x, 2); return static_cast<float>(h); }
    static u32 pack(float lo, float hi) { return from_float(lo) | static_cast<u32>(from_float(hi)) << 16; }
    static float lo(u32 x) { return to_float(static_cast<u16>(x)); }
    static float hi(u32 x) { return to_float(static_cast<u16>(x >> 16)); }
    static u32 add(u32 a, u32 b) { return pack(lo(a) + lo(b), hi(a) + hi(b)); }
    static u32 sub(u32 a, u32 b) { return pack(lo(a) - lo(b), hi(a) - hi(b)); }
    static u32 mul(u32 a, u32 b) { return pack(lo(a) * lo(b), hi(a) * hi(b)); }
    static u32 fma(u32 a, u32 b, u32 c) {  // a double holds the product and, but for rare ties, the sum
        return pack(static_cast<float>(static_cast<double>(lo(a)) * lo(b) + lo(c)), static_cast<float>(static_cast<double>(hi(a)) * hi(b) + hi(c)));
    }
    static void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, int line = __builtin_LINE()) {
        lm::Mma args{c, a, {b0, b1}};
        lm::collective(0xffffffffu, line, &args, lm::mma_16<F16>);
    }
};

struct BF16 {
    static constexpr bool is_bf16 = true;

    static u16 from_float(float x) {
        u32 bits = __float_as_uint(x);
        if (x != x) return 0x7fff;
        return static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
    }
    static float to_float(u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }
    static u32 pack(float lo, float hi) { return from_float(lo) | static_cast<u32>(from_float(hi)) << 16; }
    static float lo(u32 x) { return __uint_as_float(x << 16); }
    static float hi(u32 x) { return __uint_as_float(x & 0xffff0000u); }
    static u32 add(u32 a, u32 b) { return pack(lo(a) + lo(b), hi(a) + hi(b)); }
    static u32 sub(u32 a, u32 b) { return pack(lo(a) - lo(b), hi(a) - hi(b)); }
    static u32 mul(u32 a, u32 b) { return pack(lo(a) * lo(b), hi(a) * hi(b)); }
    static u32 fma(u32 a, u32 b, u32 c) { return pack(lo(a) * lo(b) + lo(c), hi(a) * hi(b) + hi(c)); }
    static void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, int line = __builtin_LINE()) {
        lm::Mma args{c, a, {b0, b1}};
        lm::collective(0xffffffffu, line, &args, lm::mma_16<BF16>);
    }
};

// ---- the wrappers of wgmma.cuh

using lm::SharedMatrix;
inline SharedMatrix shared_matrix(const void* first, int next_k, int next_n) { return {static_cast<const u8*>(first), next_k, next_n}; }
inline SharedMatrix shared_matrix_behind(SharedMatrix m, int bytes) { return {m.first + bytes, m.next_k, m.next_n}; }
inline void fence_for_wgmma() { lm::fence_copies(); }
inline void wgmma_fence() { lm::warpgroup_fence(); }
inline void wgmma_commit() { lm::warpgroup_commit(); }
template <int PENDING> inline void wgmma_wait() { lm::warpgroup_wait(PENDING); }
template <int COUNT> inline void wgmma_wait_for(float (&)[COUNT]) { lm::warpgroup_wait(0); }
template <int N>
inline void wgmma(float (&d)[N / 2], const u32 (&a)[4], SharedMatrix b, bool add, int line = __builtin_LINE()) {
#ifdef LM_BF16
    lm::warpgroup_multiply(d, N, a, b, add, BF16::to_float, line);
#else
    lm::warpgroup_multiply(d, N, a, b, add, F16::to_float, line);
#endif
}
