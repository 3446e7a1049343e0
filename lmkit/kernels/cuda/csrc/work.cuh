// A step's work list for attention of one new token a sequence. No kernel writes it: every block works out its item from
// the lengths, while the kernel before still runs, so that it may fetch keys and values before it waits. The warps of a
// block share the sequences; what each has found meets in shared memory.
//
// All sequences are cut into items of at most `step` tiles. Each lane has one of 32 values of `step` and estimates the
// time: the waves of all items times the tiles of an item, with `cost` tiles to begin and to end. The best one is taken.
// The items of a sequence are neighbours, and it has as equal ones as possible.
#pragma once
#include "ptx.cuh"

constexpr int MOST_SPLITS = 64;  // of a sequence: its merge has a limit

struct Work {
    int sequence;  // -1: nothing is left for this block
    int split, splits;
};

// The number of items of at most `step` tiles, or one more tile by rounding.
DEVICE int num_items(int tiles, int step, float per_step) {
    return tiles > 0 ? max(1, static_cast<int>(static_cast<float>(tiles + step - 1) * per_step)) : 0;
}

// The work of item `index` of at most `most` items. `tiles_of(sequence)`: its tiles, 0 if it is left out. A step runs
// `places` blocks at a time, of which each item has `heads`. All threads of a block call this. The first 8 bytes of
// shared memory for each of them are used, and free again afterwards.
template <class TilesOf>
DEVICE Work find_work(const TilesOf& tiles_of, int sequences, int index, int most, int heads, int places, int cost) {
    const int lane = lane_id();
    const int step = lane < 8 ? lane + 1 : lane < 31 ? (5 + (lane & 3)) << (lane / 4 - 1) : 1 << 30;
    const float per_step = 1.0f / static_cast<float>(step);
    int items = 0, longest = 0;
    for (int base = threadIdx.x - lane; base < sequences; base += blockDim.x) {
        const int mine = base + lane < sequences ? tiles_of(base + lane) : 0;
#pragma unroll 4
        for (int i = 0; i < min(sequences - base, 32); ++i) {
            const int tiles = __shfl_sync(0xffffffffu, mine, i);
            items += num_items(tiles, step, per_step), longest = max(longest, tiles);
        }
    }
    int2* const found = reinterpret_cast<int2*>(shared_memory);
    found[threadIdx.x] = make_int2(items, longest);
    __syncthreads();
    items = 0, longest = 0;
    for (int i = lane; i < blockDim.x; i += 32) items += found[i].x, longest = max(longest, found[i].y);
    __syncthreads();
    const u32 time = static_cast<u32>((items * heads + places - 1) / places) * (min(step, longest) + cost);
    const bool fits = lane == 31 || (items <= most && longest <= MOST_SPLITS * step);
    const u32 key = (fits ? min(time, 0x3fffffeu) : 0x3ffffffu) * 32 + 31 - lane;  // few items, if times are equal
    const int best = 31 - static_cast<int>(__reduce_min_sync(0xffffffffu, key) & 31u);
    const int chosen = __shfl_sync(0xffffffffu, step, best);
    const float per_chosen = __shfl_sync(0xffffffffu, per_step, best);
    int before = 0;
    for (int base = 0; base < sequences; base += 32) {
        const int mine = base + lane < sequences ? num_items(tiles_of(base + lane), chosen, per_chosen) : 0;
        int last = mine;
#pragma unroll
        for (int shift = 1; shift < 32; shift <<= 1) {
            const int other = __shfl_up_sync(0xffffffffu, last, shift);
            if (lane >= shift) last += other;
        }
        last += before;  // the item after the last of this lane's sequence
        const u32 here = __ballot_sync(0xffffffffu, last - mine <= index && index < last);
        if (here) {
            const int from = __ffs(static_cast<i32>(here)) - 1;
            return {base + from, index - __shfl_sync(0xffffffffu, last - mine, from), __shfl_sync(0xffffffffu, mine, from)};
        }
        before = __shfl_sync(0xffffffffu, last, 31);
    }
    return {-1, 0, 0};
}
