// What the kernels of recurrent blocks share. lmkit.kernels.recurrent says what `rows`, states and draft tokens are.
//
// Rows R of inner results are those of the T tokens, then `room` for each sequence: of the draft tokens that it takes first. A
// sequence's tokens are taken in order, and every sum has a fixed order. So a state does not depend on how its sequence was
// cut into steps. A sequence without a state (row -1) pads the step.
//
// Columns of a state do not depend on each other. A block has COLUMNS of them, and LANES lanes share one: lane 8 g + c of a warp
// has column c, and of each LANES * 4 rows the four from 4 g on, so that the lanes' float4 of what rows are multiplied with lie
// side by side in shared memory.
#include "ptx.cuh"

constexpr int LANES = 4, COLUMNS = 32, THREADS = LANES * COLUMNS;
constexpr int TILE = 16;  // tokens in shared memory at a time
constexpr int AHEAD = 8;
constexpr int ROW_FIELDS = 6;  // of `rows`
constexpr int NEVER = -(1 << 30);  // no token's number; those of draft tokens may be below 0

// A sequence's tokens t = first .. end - 1. Those before `start` are draft tokens of the step before, those from `drafted` on
// are draft tokens that do not reach the state.
struct Sequence {
    int row, source, snapshot, first, start, end, drafted, extra, snapshot_at;

    DEVICE Sequence(const i32* rows, const i32* query_start, int b, int tokens, int room) {
        const i32* fields = rows + ROW_FIELDS * b;
        row = fields[0], source = fields[1], snapshot = fields[2];
        start = query_start[b], end = query_start[b + 1];
        first = start - fields[4], drafted = end - fields[5];
        snapshot_at = snapshot < 0 ? NEVER : first + fields[3];  // the token after it
        extra = tokens + b * room - first;
    }
    // Where a token is in inner results.
    DEVICE i64 at(int t) const { return t < start ? t + extra : t; }
};

DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }

DEVICE float load(const void* values, i64 at, bool half) {
    return half ? Half::to_float(static_cast<const u16*>(values)[at]) : static_cast<const float*>(values)[at];
}

DEVICE float sum_of_lanes(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 8);
    return x + __shfl_xor_sync(0xffffffffu, x, 16);
}

#ifdef KERNEL
constexpr int PAST = KERNEL - 1;

// The tokens of channel c of a convolution, whose inputs input(t) are loaded AHEAD at a time: each goes to output(t, total).
// A draft token keeps `width` numbers, and the first of them are its inputs.
template <typename Input, typename Output>
DEVICE void convolve(
    const Sequence& seq, int c, int channels, int width, int room, const float* weights, float bias, float* windows,
    float* drafted, const Input& input, const Output& output
) {
    float weight[KERNEL], window[PAST + 1] = {};
#pragma unroll
    for (int j = 0; j < KERNEL; ++j) weight[j] = weights[c * KERNEL + j];
    const auto of_row = [&](int row) { return windows + (static_cast<i64>(row) * channels + c) * PAST; };
    const auto kept = [&](int draft) -> float& { return drafted[(static_cast<i64>(seq.row) * room + draft) * width + c]; };
    const auto store = [&](int row) {
#pragma unroll
        for (int j = 0; j < PAST; ++j) of_row(row)[j] = window[j];
    };
    if (seq.source >= 0)
#pragma unroll
        for (int j = 0; j < PAST; ++j) window[j] = of_row(seq.source)[j];
#pragma unroll 1
    for (int begin = seq.first; begin < seq.end; begin += AHEAD) {
        float x[AHEAD] = {};
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int t = begin + i;
            if (t < seq.end) x[i] = t < seq.start ? kept(t - seq.first) : input(t);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int t = begin + i;
            if (t >= seq.end) break;
            if (t == seq.drafted) store(seq.row);
            if (t >= seq.drafted) kept(t - seq.drafted) = x[i];
            float total = weight[PAST] * x[i] + bias;
#pragma unroll
            for (int j = 0; j < PAST; ++j) total += weight[j] * window[j];
            output(t, total);
            window[PAST] = x[i];
#pragma unroll
            for (int j = 0; j < PAST; ++j) window[j] = window[j + 1];
            if (t + 1 == seq.snapshot_at) store(seq.snapshot);
        }
    }
    if (seq.drafted == seq.end) store(seq.row);
}
#endif
