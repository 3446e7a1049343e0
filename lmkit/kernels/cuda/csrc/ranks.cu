// Exchanges between the SIZE ranks of an engine, through memory of every rank that the others have mapped.
//
//     memory of a rank    flags u32 [SIZE][BLOCKS] | turns u32 [BLOCKS] | buffers float [2][BLOCKS][PIECE]
//
// Block b of every rank exchanges with block b of the others alone, in turns, whose number its rank keeps:
//
//     write my part to my buffer b of this turn | flag b of the others = turn + 1, released
//     wait until my flags b are turn + 1, acquired | read the buffers b of all ranks, in the order of ranks
//
// So all ranks get the same bits, in every run. Turns take the two buffers in turns. A rank writes to a buffer again
// only after the turn in between, at which the others began after they had read it: graphs can be replayed without end.
// The same holds if the others write to the buffers of a rank, which alone reads them (exchange_rows).
// Flags lie where they are waited for. All ranks launch the same kernels with the same sizes.
//
// All blocks of a launch must be able to run at once, or ranks would wait for blocks that have not begun. A wait ends
// when `lost` (host memory) is set, or after `limit` nanoseconds, and sets it. Results mean nothing then.
#include "peers.cuh"

constexpr i64 BUFFERS = 4 * (SIZE + 1) * BLOCKS;  // bytes before the buffers

struct Ranks {
    const u64* memories;  // addresses here
    u32* lost;
    u64 limit;
    int rank;

    DEVICE u32* flag(int of, int from) const { return reinterpret_cast<u32*>(memories[of]) + from * BLOCKS + blockIdx.x; }
    DEVICE u32* turn() const { return flag(rank, SIZE); }
    DEVICE float* buffer(int of, u32 turn) const {
        return reinterpret_cast<float*>(memories[of] + BUFFERS) + ((turn & 1) * BLOCKS + blockIdx.x) * static_cast<i64>(PIECE);
    }
};

// Ends the writes to the buffer of a turn and begins the reads.
DEVICE void meet(const Ranks& ranks, u32 turn) {
    __syncthreads();
    const int other = threadIdx.x;
    if (other < SIZE && other != ranks.rank) {
        store_release(ranks.flag(other, ranks.rank), turn + 1);
        wait_for_peer(ranks.flag(ranks.rank, other), turn + 1, ranks.lost, ranks.limit);
    }
    __syncthreads();
}

// The next launch begins with this turn.
DEVICE void end_turns(const Ranks& ranks, u32 turn) {
    __syncthreads();
    if (threadIdx.x == 0) *ranks.turn() = turn;
}

// to[i] = the sum of the ranks' numbers begin + i of a turn, for i < count. `begin` is a multiple of 4.
DEVICE void add_up(const Ranks& ranks, u32 turn, int begin, float* to, int count, bool aligned) {
    const float* parts[SIZE];
#pragma unroll
    for (int r = 0; r < SIZE; ++r) parts[r] = ranks.buffer(r, turn) + begin;
    const int vectors = aligned ? count / 4 : 0;
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        float4 v[SIZE];
#pragma unroll
        for (int r = 0; r < SIZE; ++r) v[r] = reinterpret_cast<const float4*>(parts[r])[i];
#pragma unroll
        for (int r = 1; r < SIZE; ++r) v[0].x += v[r].x, v[0].y += v[r].y, v[0].z += v[r].z, v[0].w += v[r].w;
        reinterpret_cast<float4*>(to)[i] = v[0];
    }
    for (int i = 4 * vectors + threadIdx.x; i < count; i += blockDim.x) {
        float sum = parts[0][i];
#pragma unroll
        for (int r = 1; r < SIZE; ++r) sum += parts[r][i];
        to[i] = sum;
    }
}

// x [count] = the sum of all ranks' x. A block has pieces of `piece` numbers, a multiple of 4 and at most PIECE. One
// shot: every rank adds up whole pieces. Two shots: each adds up its part of a piece, and a second turn exchanges sums.
extern "C" __global__ void __launch_bounds__(512, 2) sum_ranks(
    float* x, i64 count, int piece, int two_shots, int aligned, const u64* memories, u32* lost, i64 limit, int rank
) {
    begin_kernel();
    const Ranks ranks{memories, lost, static_cast<u64>(limit), rank};
    u32 turn = *ranks.turn();
    for (i64 at = static_cast<i64>(blockIdx.x) * piece; at < count; at += static_cast<i64>(gridDim.x) * piece) {
        const int here = static_cast<int>(min(static_cast<i64>(piece), count - at));
        copy(ranks.buffer(rank, turn), x + at, here, aligned);
        meet(ranks, turn);
        if (!two_shots) {
            add_up(ranks, turn++, 0, x + at, here, aligned);
            continue;
        }
        const int width = (here + 4 * SIZE - 1) / (4 * SIZE) * 4;  // of a rank's part; the last parts may be smaller
        add_up(ranks, turn, rank * width, ranks.buffer(rank, turn + 1), max(0, min(width, here - rank * width)), true);
        meet(ranks, ++turn);
        for (int r = 0; r < SIZE; ++r)
            copy(x + at + r * width, ranks.buffer(r, turn), max(0, min(width, here - r * width)), aligned);
        ++turn;
    }
    end_turns(ranks, turn);
}
EXPORT(sum_ranks)

// out [rows, columns] = the ranks' x side by side. Rank r has the columns from columns * r / SIZE on. `out` may be null.
extern "C" __global__ void __launch_bounds__(512, 2) side_by_side(
    const float* x, float* out, int rows, int columns, int piece, const u64* memories, u32* lost, i64 limit, int rank
) {
    begin_kernel();
    const Ranks ranks{memories, lost, static_cast<u64>(limit), rank};
    const int widest = (columns + SIZE - 1) / SIZE, own = columns * (rank + 1) / SIZE - columns * rank / SIZE;
    const i64 count = static_cast<i64>(rows) * widest;
    u32 turn = *ranks.turn();
    for (i64 at = static_cast<i64>(blockIdx.x) * piece; at < count; at += static_cast<i64>(gridDim.x) * piece, ++turn) {
        const int here = static_cast<int>(min(static_cast<i64>(piece), count - at));
        float* mine = ranks.buffer(rank, turn);
        for (int i = threadIdx.x; i < here; i += blockDim.x) {
            const i64 row = (at + i) / widest, column = (at + i) % widest;
            if (column < own) mine[i] = x[row * own + column];
        }
        meet(ranks, turn);
        if (!out) continue;
        for (int r = 0; r < SIZE; ++r) {
            const int begin = columns * r / SIZE, end = columns * (r + 1) / SIZE;
            const float* part = ranks.buffer(r, turn);
            for (int i = threadIdx.x; i < here; i += blockDim.x) {
                const i64 row = (at + i) / widest, column = begin + (at + i) % widest;
                if (column < end) out[row * columns + column] = part[i];
            }
        }
    }
    end_turns(ranks, turn);
}
EXPORT(side_by_side)

// x [count] = rank 0's x, of any 32 bits. One block, count <= PIECE.
extern "C" __global__ void __launch_bounds__(512, 2) from_first(
    float* x, int count, const u64* memories, u32* lost, i64 limit, int rank
) {
    begin_kernel();
    const Ranks ranks{memories, lost, static_cast<u64>(limit), rank};
    const u32 turn = *ranks.turn();
    if (rank == 0) copy(ranks.buffer(0, turn), x, count, false);
    meet(ranks, turn);
    if (rank != 0) copy(x, ranks.buffer(0, turn), count, false);
    end_turns(ranks, turn + 1);
}
EXPORT(from_first)

// Fills in the rows of y [count / width, width] that belong to experts of other ranks. Each rank writes its own rows to
// the buffers of all others, in place of its own. Those of a rank are neighbours. active: see ops.Places.
extern "C" __global__ void __launch_bounds__(512, 2) exchange_rows(
    float* y, i64 count, int width, int piece, int aligned, const i64* active, const u64* memories, u32* lost, i64 limit,
    int rank
) {
    begin_kernel();
    const Ranks ranks{memories, lost, static_cast<u64>(limit), rank};
    const i64 number = active[0], first = number ? active[2] * width : 0, last = number ? active[3 * number] * width : 0;
    u32 turn = *ranks.turn();
    for (i64 at = static_cast<i64>(blockIdx.x) * piece; at < count; at += static_cast<i64>(gridDim.x) * piece, ++turn) {
        const i64 here = min(static_cast<i64>(piece), count - at);
        const int begin = static_cast<int>(max(i64(0), min(first - at, here)));
        const int end = static_cast<int>(max(i64(0), min(last - at, here)));
        for (int r = 0; r < SIZE; ++r)
            if (r != rank) copy(ranks.buffer(r, turn) + begin, y + at + begin, end - begin, aligned);
        meet(ranks, turn);
        copy(y + at, ranks.buffer(rank, turn), begin, aligned);
        copy(y + at + end, ranks.buffer(rank, turn) + end, static_cast<int>(here) - end, aligned);
    }
    end_turns(ranks, turn);
}
EXPORT(exchange_rows)
