// What emulator.cpp offers to translated PTX. types.cuh comes before.
#pragma once

namespace lm {

constexpr u64 SHARED_BASE = 1024;  // as on sm_90, whose first KiB of shared memory is the driver's

// COUNTS: an atomic. TELLS: an acquire or a release. COPIES: the target of a copy that lands later. MULTIPLIES: read by
// a product of a warpgroup until it is waited for. TOUCHES: neither read nor written now, but it must exist.
enum Use : u8 { READS, WRITES, COUNTS, TELLS, COPIES, MULTIPLIES, TOUCHES };

// The memory of an access, which fails unless it is aligned, within bounds, and ordered with those of other threads.
// `value`: the bytes to write: two threads may write the same ones.
u8* shared_access(u64 address, int bytes, Use use, const void* value, int line);
u8* global_access(u64 address, int bytes, Use use, const void* value, int line);
u8* local_access(u64 address, int bytes, int line);
bool is_local(u64 address);

void warp_barrier(u32 mask, int line);  // bar.warp.sync, which orders memory of its lanes
void fence_memory();  // membar.gl
void yield();  // lets other threads go on
u64 nanoseconds();

}  // namespace lm
