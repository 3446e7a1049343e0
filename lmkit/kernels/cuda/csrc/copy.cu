// Copies whole blocks within a KV cache, in all its parts (the keys, values and parameters of every layer), one pair
// (from, to) after the other: a later pair may read a block that an earlier one wrote.
//
// Block b of part p is the `sizes[p]` bytes at bases[p] + b * sizes[p]. A thread has the same bytes of every block. It
// copies them for all pairs in order, and waits for no other thread. Grid: (pieces of a block, parts).
#include "ptx.cuh"

template <class T>
DEVICE void copy_unit(u8* base, u64 size, const int2* pairs, int num_pairs) {
    const u64 at = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) * 16;  // 16 bytes a thread for any T
    for (int i = 0; i < num_pairs; ++i) {
        const u8* from = base + pairs[i].x * size + at;
        u8* to = base + pairs[i].y * size + at;
#pragma unroll
        for (u64 j = 0; j < 16; j += sizeof(T))
            if (at + j < size) *reinterpret_cast<T*>(to + j) = *reinterpret_cast<const T*>(from + j);
    }
}

extern "C" __global__ void __launch_bounds__(256) copy_blocks(const u64* bases, const u64* sizes, const int2* pairs, int num_pairs) {
    begin_kernel();
    auto* base = reinterpret_cast<u8*>(bases[blockIdx.y]);
    const u64 size = sizes[blockIdx.y], bits = bases[blockIdx.y] | size;
    if (bits % 16 == 0) copy_unit<uint4>(base, size, pairs, num_pairs);
    else if (bits % 4 == 0) copy_unit<u32>(base, size, pairs, num_pairs);
    else copy_unit<u8>(base, size, pairs, num_pairs);
}
EXPORT(copy_blocks)
