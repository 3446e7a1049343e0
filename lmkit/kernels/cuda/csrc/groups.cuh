// Blocks of a product of many weights: which rows of which weight a block has.
#pragma once
#include "ptx.cuh"

// Rows first .. first + count - 1, of one group. A count of 0: there is nothing left for this block.
struct Share {
    int group, first, count;
};

// The share of block `index` if each has at most `width` rows. `active` is that of ops.Places: n, then group, first row
// and end of each of n groups. The lanes of a warp look at 32 groups at a time.
DEVICE Share find_share(const i64* active, int index, int width) {
    const int groups = static_cast<int>(active[0]), lane = lane_id();
    int before = 0;  // blocks of earlier groups
    for (int base = 0; base < groups; base += 32) {
        int group = 0, first = 0, end = 0;
        if (base + lane < groups) {
            const i64* entry = active + 1 + 3 * (base + lane);
            group = static_cast<int>(entry[0]), first = static_cast<int>(entry[1]), end = static_cast<int>(entry[2]);
        }
        const int mine = (end - first + width - 1) / width;
        int last = before + mine;  // the block after the last of this lane's group
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const int other = __shfl_up_sync(0xffffffffu, last, step);
            if (lane >= step) last += other - before;
        }
        const u32 found = __ballot_sync(0xffffffffu, last - mine <= index && index < last);
        if (found) {
            const int from = __ffs(static_cast<i32>(found)) - 1;
            first += (index - (last - mine)) * width;
            const int count = min(width, end - first);
            return {__shfl_sync(0xffffffffu, group, from), __shfl_sync(0xffffffffu, first, from),
                    __shfl_sync(0xffffffffu, count, from)};
        }
        before = __shfl_sync(0xffffffffu, last, 31);
    }
    return {0, 0, 0};
}
