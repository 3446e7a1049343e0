// Products of warpgroups (PTX ISA, "wgmma"): four warps multiply together, from shared memory, and go on meanwhile.
// Compute capability 9.0 only, compiled for sm_90a.
//
//     D [64, N] = A [64, 16] B [16, N] + D          warp w of the four has rows 16 w .. 16 w + 15
//     A  registers, the fragment of mma.m16n8k16 (ptx.cuh)
//     D  float32 registers: d[4 j + 2 r + c] is (row g + 8 r, column 8 j + 2 t + c)
//     B  shared memory: matrices of 8 columns x 8 k, each 128 bytes, with the 16 bytes of a column in one piece
//
// The order is: write registers and shared memory; fence; multiply, any number of times; commit; wait. Between the
// first multiply and its wait, nothing touches its registers, or writes its shared memory.
#pragma once
#include "ptx.cuh"

#ifndef LMKIT_HOST

using SharedMatrix = u64;  // a descriptor of B

// B begins at `first`. The matrix with the next 8 k is next_k bytes after, that with the next 8 columns next_n.
DEVICE SharedMatrix shared_matrix(const void* first, int next_k, int next_n) {
    return (shared_address(first) & 0x3ffffu) >> 4 | static_cast<u64>(next_k >> 4) << 16 | static_cast<u64>(next_n >> 4) << 32;
}

// The same, `bytes` after.
DEVICE SharedMatrix shared_matrix_behind(SharedMatrix matrix, int bytes) { return matrix + (bytes >> 4); }

// Makes this thread's writes to shared memory, copies that it has waited for among them, visible to wgmma of all
// threads that then meet at a barrier.
DEVICE void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the last committed groups are under way.
template <int PENDING>
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// Waits for all, which end in `d`.
template <int COUNT>
DEVICE void wgmma_wait_for(float (&d)[COUNT]) {
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");  // no use of d moves before the wait
}

#ifdef LM_BF16
#define WGMMA_TYPES "bf16.bf16"
#else
#define WGMMA_TYPES "f16.f16"
#endif
#define WGMMA_SUMS(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA(N, SUMS, A, B, ADDS, ...)                                                                              \
    template <>                                                                                                      \
    DEVICE void wgmma<N>(float (&d)[N / 2], const u32 (&a)[4], SharedMatrix b, bool add) {                           \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADDS ", 0;\n"                                               \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." WGMMA_TYPES " {" SUMS "}, {" A "}, " B       \
                     ", p, 1, 1, 0;\n}\n"                                                                            \
                     : __VA_ARGS__                                                                                   \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));              \
    }
#define WGMMA_24 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23"
#define WGMMA_32 WGMMA_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_48 WGMMA_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_64 WGMMA_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_SUMS_24 WGMMA_SUMS(0), WGMMA_SUMS(8), WGMMA_SUMS(16)
#define WGMMA_SUMS_48 WGMMA_SUMS_24, WGMMA_SUMS(24), WGMMA_SUMS(32), WGMMA_SUMS(40)

// Begins d = A b + d, or A b if not `add`.
template <int N>
DEVICE void wgmma(float (&d)[N / 2], const u32 (&a)[4], SharedMatrix b, bool add);
WGMMA(48, WGMMA_24, "%24,%25,%26,%27", "%28", "%29", WGMMA_SUMS_24)
WGMMA(64, WGMMA_32, "%32,%33,%34,%35", "%36", "%37", WGMMA_SUMS_24, WGMMA_SUMS(24))
WGMMA(96, WGMMA_48, "%48,%49,%50,%51", "%52", "%53", WGMMA_SUMS_48)
WGMMA(128, WGMMA_64, "%64,%65,%66,%67", "%68", "%69", WGMMA_SUMS_48, WGMMA_SUMS(48), WGMMA_SUMS(56))

#endif
