// The residual stream on its way through the SIZE stages of an engine, which stand in a ring. Each stage has memory
// that its neighbours have mapped:
//
//     arrived, taken, sent, received u32 [BLOCKS] each | buffers float [DEPTH][most]
//
// A message is the stream of one step. Number `turn` goes through buffer turn % DEPTH of the stage that receives it:
//
//     send       wait until taken > turn - DEPTH | write to the next stage's buffer | its arrived = turn + 1, released
//     receive    wait until arrived > turn | read from my buffer | the stage before's taken = turn + 1, released
//
// So a stage goes on with later steps while the next one is busy, and graphs can be replayed without end. Flags lie
// where they are waited for. A block alone writes and reads its pieces of PIECE numbers, whatever the number of rows
// is: the sender's step may be padded, and the receiver's not. Blocks of one launch do not wait for each other.
//
// A wait ends when `lost` (host memory) is set, or after `limit` nanoseconds, and sets it. Results mean nothing then.
#include "peers.cuh"

enum Flag { ARRIVED, TAKEN, SENT, RECEIVED, FLAGS };

struct Stage {
    const u64* memories;  // addresses here
    i64 most;             // numbers of a message, a multiple of 4
    int index;

    DEVICE u32* flag(int of, Flag kind) const {
        return reinterpret_cast<u32*>(memories[of]) + kind * BLOCKS + blockIdx.x;
    }
    DEVICE float* buffer(int of, u32 turn) const {
        return reinterpret_cast<float*>(memories[of] + 4 * FLAGS * BLOCKS) + turn % DEPTH * most;
    }
    DEVICE int next() const { return (index + 1) % SIZE; }
    DEVICE int before() const { return (index + SIZE - 1) % SIZE; }

    // Between `begin` and `end` a block may read a message that arrived, or write one where there is room.
    DEVICE void begin(Flag awaited, u32 value, u32* lost, u64 limit) const {
        if (threadIdx.x == 0) wait_for_peer(flag(index, awaited), value, lost, limit);
        __syncthreads();
    }
    DEVICE void end(int other, Flag told, Flag counted, u32 turn) const {
        __syncthreads();
        if (threadIdx.x == 0) {
            store_release(flag(other, told), turn + 1);
            *flag(index, counted) = turn + 1;
        }
    }
};

DEVICE void copy_pieces(float* to, const float* from, i64 count) {
    for (i64 at = static_cast<i64>(blockIdx.x) * PIECE; at < count; at += static_cast<i64>(BLOCKS) * PIECE)
        copy(to + at, from + at, static_cast<int>(min(static_cast<i64>(PIECE), count - at)), true);
}

// x [count] goes to the next stage. BLOCKS blocks.
extern "C" __global__ void __launch_bounds__(512, 2) send_rows(
    const float* x, i64 count, i64 most, const u64* memories, u32* lost, i64 limit, int index
) {
    begin_kernel();
    const Stage stage{memories, most, index};
    const u32 turn = *stage.flag(index, SENT);
    stage.begin(TAKEN, turn + 1 - DEPTH, lost, static_cast<u64>(limit));
    copy_pieces(stage.buffer(stage.next(), turn), x, count);
    stage.end(stage.next(), ARRIVED, SENT, turn);
}
EXPORT(send_rows)

// x [count] = what the stage before has sent, or the first part of it. BLOCKS blocks.
extern "C" __global__ void __launch_bounds__(512, 2) receive_rows(
    float* x, i64 count, i64 most, const u64* memories, u32* lost, i64 limit, int index
) {
    begin_kernel();
    const Stage stage{memories, most, index};
    const u32 turn = *stage.flag(index, RECEIVED);
    stage.begin(ARRIVED, turn + 1, lost, static_cast<u64>(limit));
    copy_pieces(x, stage.buffer(index, turn), count);
    stage.end(stage.before(), TAKEN, RECEIVED, turn);
}
EXPORT(receive_rows)
