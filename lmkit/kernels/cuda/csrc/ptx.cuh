// Everything that is not plain CUDA C++: PTX, and the types of its operands. Kernels use only these wrappers and CUDA's
// own built-ins (__syncthreads, __shfl_xor_sync, atomicAdd ...). A .cu file therefore also compiles with g++ and runs
// without a GPU: LMKIT_HOST names a header that puts a model of a GPU behind the same names.
//
// Fragments of mma.m16n8k16 (PTX ISA, "Matrix Fragments"), lane = 4 g + t, g in 0..7, t in 0..3:
//   A 16x16, u32[4]   a[0] = (g, 2t..2t+1)  a[1] = (g+8, 2t..)  a[2] = (g, 2t+8..)  a[3] = (g+8, 2t+8..)   (row, k)
//   B 16x8,  u32[2]   b[0] = (k 2t..2t+1, g)  b[1] = (k 2t+8.., g)                                         (k, column)
//   C 16x8,  f32[4]   c[0..1] = (g, 2t..2t+1)  c[2..3] = (g+8, 2t..)                                      (row, column)
// Two 16-bit values in a u32: the lower bits have the lower address.
#pragma once

#include "types.cuh"

#define DEVICE __device__ __forceinline__

#ifdef LMKIT_HOST
#include LMKIT_HOST
#else

// Dynamic shared memory, the only kind that kernels use: 16-byte aligned, with its size given at the launch.
extern __shared__ __align__(128) u8 shared_memory[];

// Marks a kernel for LMKIT_HOST; nothing on a device.
#define EXPORT(kernel)

DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// ---- kernels that overlap (launcher.py). Nothing on GPUs that cannot.

// Lets the next kernel begin as soon as all blocks have called this. It then runs beside this one, up to its own wait.
DEVICE void launch_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernels before this one have ended and their writes are visible. Every thread calls this, also one
// that has nothing to do: the kernel after this one relies on it. Before it, a thread reads nothing that a kernel of
// this step writes, and writes nothing but shared memory.
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- memory

// Loads 16 bytes that are read once: not kept in L1, first to leave L2.
DEVICE uint4 load_stream(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// Asks for bytes to be brought to L2, a multiple of 16. Nothing waits for them. Nothing before compute capability 9.0.
DEVICE void prefetch_l2(const void* p, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
#endif
}

// An asynchronous copy of 16 bytes to shared memory, past L1. If not `valid`, zeros replace the source. Both addresses
// are 16-byte aligned.
DEVICE void cp_async16(void* shared, const void* global, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}

// As cp_async16, for bytes that are read once: first to leave L2.
DEVICE void cp_async16_stream(void* shared, const void* global, bool valid = true) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0), "l"(policy)
                 : "memory");
}

// An asynchronous copy of 4 or 8 bytes, of which the first `given` are read and the others become zeros.
template <int BYTES>
DEVICE void cp_async_part(void* shared, const void* global, int given) {
    static_assert(BYTES == 4 || BYTES == 8, "16 bytes have cp_async16");
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(global), "n"(BYTES),
                 "r"(given)
                 : "memory");
}

// An asynchronous copy of 4, 8 or 16 bytes.
template <int BYTES>
DEVICE void cp_async(void* shared, const void* global, bool valid) {
    if constexpr (BYTES == 16)
        cp_async16(shared, global, valid);
    else
        cp_async_part<BYTES>(shared, global, valid ? BYTES : 0);
}

DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N of this thread's last groups are in flight. Other threads see the bytes after a barrier.
template <int N>
DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- other GPUs, whose memory is mapped here

// Stores a word that other GPUs wait for. They also see what this block wrote before its last barrier.
DEVICE void store_release(u32* p, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

DEVICE u32 load_acquire(const u32* p) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

DEVICE u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// Waits until *flag has come to `value` (they may wrap around), or *lost is not 0. After `limit` nanoseconds *lost
// becomes 1. `lost` is host memory, which is looked at now and then.
DEVICE void wait_for_peer(const u32* flag, u32 value, u32* lost, u64 limit) {
    const u64 begin = nanoseconds();
    for (u32 tries = 1; static_cast<i32>(load_acquire(flag) - value) < 0; ++tries) {
        if (tries % 1024) continue;
        if (load_acquire(lost)) return;
        if (nanoseconds() - begin > limit) return store_release(lost, 1);
    }
}

// ---- matrices. Each lane gives the address of a 16-byte row: lanes 0-7 of the first 8x8 matrix, 8-15 of the second ...

DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

DEVICE void ldmatrix_x2(u32 (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}

DEVICE void ldmatrix_x2_trans(u32 (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}

// The transpose of an 8x8 matrix of 16-bit values. Lane 4 g + t has (g, 2t..2t+1).
DEVICE u32 movmatrix_trans(u32 r) {
    u32 out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(r));
    return out;
}

// c += a b, signed 8-bit integers, m16n8k32. Row or column g, k 4t..4t+3 (a[0], a[1] = g+8, b[0]) and 4t+16..
// (a[2], a[3], b[1]).
DEVICE void mma_s8(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += a b, float8 e4m3 numbers summed in float32, m16n8k32; a, b and c lie as those of mma_s8. It needs compute capability
// 8.9. 9.0 and 10.x turn the numbers into float16 and multiply those.
DEVICE void mma_e4m3(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- bits

// Any function of three bits, bit by bit: LUT = the function of (0xf0, 0xcc, 0xaa).
template <u32 LUT>
DEVICE u32 lop3(u32 a, u32 b, u32 c) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(out) : "r"(a), "r"(b), "r"(c), "n"(LUT));
    return out;
}

// (a & b) | c
DEVICE u32 and_or(u32 a, u32 b, u32 c) { return lop3<(0xf0 & 0xcc) | 0xaa>(a, b, c); }

// Bytes of b:a (a = bytes 0-3), chosen by the nibbles of `selector`.
DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
    u32 out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
    return out;
}

// ---- numbers

// 2^x, to about 2 units in the last place; results below 2^-126 become 0.
DEVICE float ex2(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// The two 16-bit float types. `pack` and `from_float` round to nearest, halves to even.
struct F16 {
    static constexpr bool is_bf16 = false;

    static DEVICE u32 pack(float lo, float hi) {
        u32 out;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
        return out;
    }
    static DEVICE u16 from_float(float x) {
        u16 out;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(x));
        return out;
    }
    static DEVICE float to_float(u16 x) {
        float out;
        asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x));
        return out;
    }
    static DEVICE float lo(u32 x) { return to_float(static_cast<u16>(x)); }
    static DEVICE float hi(u32 x) { return to_float(static_cast<u16>(x >> 16)); }
    static DEVICE u32 add(u32 a, u32 b) {
        u32 out;
        asm("add.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
        return out;
    }
    static DEVICE u32 sub(u32 a, u32 b) {
        u32 out;
        asm("sub.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
        return out;
    }
    static DEVICE u32 mul(u32 a, u32 b) {
        u32 out;
        asm("mul.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
        return out;
    }
    static DEVICE u32 fma(u32 a, u32 b, u32 c) {
        u32 out;
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
        return out;
    }
    static DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

struct BF16 {
    static constexpr bool is_bf16 = true;

    static DEVICE u32 pack(float lo, float hi) {
        u32 out;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
        return out;
    }
    static DEVICE u16 from_float(float x) {
        u16 out;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(x));
        return out;
    }
    static DEVICE float to_float(u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }
    static DEVICE float lo(u32 x) { return __uint_as_float(x << 16); }
    static DEVICE float hi(u32 x) { return __uint_as_float(x & 0xffff0000u); }
    static DEVICE u32 fma(u32 a, u32 b, u32 c) {
        u32 out;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
        return out;
    }
    // sm_80 has no addition of bf16 pairs: a * 1 + b rounds once, as an addition does.
    static DEVICE u32 add(u32 a, u32 b) { return fma(a, 0x3f803f80u, b); }
    static DEVICE u32 sub(u32 a, u32 b) { return fma(b, 0xbf80bf80u, a); }
    static DEVICE u32 mul(u32 a, u32 b) { return fma(a, b, 0x80008000u); }
    static DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

#endif

// ---- for both

// The first statement of a kernel with nothing to do before the wait.
DEVICE void begin_kernel() {
    launch_next();
    wait_for_previous();
}

// x, which the compiler takes for unknown here: it cannot compute addresses from it ahead, and keep them in registers.
DEVICE int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

DEVICE int lane_id() { return threadIdx.x & 31; }
DEVICE int warp_id() { return threadIdx.x >> 5; }

DEVICE float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

DEVICE float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// Two float8 e4m3 codes (low byte, high byte) as a pair of F16, exactly. The exponent's bias is 8 less.
DEVICE u32 e4m3_to_f16(u32 two) {
    const u32 spread = prmt(two, 0, 0x1404);  // 00 b1 00 b0 with each byte on top of its half
    const u32 bits = (spread & 0x80008000u) | ((spread & 0x7f007f00u) >> 1);
    return F16::mul(bits, 0x5c005c00u);  // times 2^8
}

// The float8 e4m3 code nearest to x, halves to even. Beyond 448 it is the largest (finite only, no infinities).
DEVICE u32 float_to_e4m3(float x) {
    const u32 sign = (__float_as_uint(x) >> 24) & 0x80u;
    const float size = fminf(fabsf(x), 448.0f);
    if (size < 0.015625f) return sign | __float2uint_rn(size * 512.0f);  // subnormal: steps of 2^-9; 8 of them are 2^-6
    const u32 bits = __float_as_uint(size);
    const u32 rounded = bits + 0x7ffffu + ((bits >> 20) & 1u);  // 3 bits of the fraction stay
    return sign | ((rounded >> 20) - (120u << 3));
}

#ifdef LM_BF16
using Half = BF16;
#else
using Half = F16;
#endif
