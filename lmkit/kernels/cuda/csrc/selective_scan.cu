// The scan of Mamba-2. lmkit.kernels.selective_scan has the formulas. Three kernels:
//
//     scan_inputs    a thread has a channel, and its last inputs in registers: x, B and C after the convolution and SiLU,
//                    mixed [R, C]. Or it has the steps of a head: factors [R, H, 2] = dt, decay
//     scan_states    a block has COLUMNS columns of a head's state, in registers: o [T, H, P]
//     scan_outputs   a block has a group of a token: o silu(z), normalized
//
// Rows R of `mixed` and `factors` are those of the tokens, then those of draft tokens: recurrent.cuh.
#include "recurrent.cuh"

constexpr float LINEAR = 20.0f;  // softplus(x) is x from here on

struct Sizes {
    int heads, groups, size, dim;  // rows and columns of a head's state

    DEVICE int inner() const { return heads * dim; }
    DEVICE int channels() const { return inner() + 2 * groups * size; }
    DEVICE int kept() const { return channels() + heads; }  // numbers of a draft token
};

#ifdef KERNEL
// The tokens of a head's steps. Those of y begin at `steps` in a row.
DEVICE void step(
    const Sequence& seq, const Sizes& n, int head, const void* y, i64 y_stride, int steps, float a_log, float dt_bias,
    float low, float high, float* drafted, float* factors, int room, bool half
) {
    for (int t = seq.first; t < seq.end; ++t) {
        const auto kept = [&](int draft) -> float& {
            return drafted[(static_cast<i64>(seq.row) * room + draft) * n.kept() + n.channels() + head];
        };
        const float given = t < seq.start ? kept(t - seq.first) : load(y, t * y_stride + steps + head, half);
        if (t >= seq.drafted) kept(t - seq.drafted) = given;
        const float x = given + dt_bias, positive = x < LINEAR ? log1pf(expf(x)) : x;
        const float dt = fminf(fmaxf(positive, low), high);
        float* factor = factors + 2 * (seq.at(t) * n.heads + head);
        factor[0] = dt, factor[1] = expf(-expf(a_log) * dt);
    }
}

// Grid: (sequences, blocks of channels and heads).
extern "C" __global__ void __launch_bounds__(128) scan_inputs(
    const void* y, i64 y_stride, const i32* query_start, const i32* rows, const float* weights, const float* bias,
    const float* a_log, const float* dt_bias, float low, float high, float* windows, float* drafted, float* mixed,
    float* factors, int tokens, int room, int heads, int groups, int size, int dim, int half
) {
    begin_kernel();
    const Sizes n{heads, groups, size, dim};
    const Sequence seq(rows, query_start, blockIdx.x, tokens, room);
    const int c = blockIdx.y * blockDim.x + threadIdx.x, channels = n.channels(), head = c - channels;
    if (seq.row < 0 || head >= heads) return;
    if (head >= 0) {
        const int steps = n.inner() + channels;
        step(seq, n, head, y, y_stride, steps, a_log[head], dt_bias[head], low, high, drafted, factors, room, half);
        return;
    }
    convolve(
        seq, c, channels, n.kept(), room, weights, bias ? bias[c] : 0.0f, windows, drafted,
        [&](int t) { return load(y, t * y_stride + n.inner() + c, half); },
        [&](int t, float total) { mixed[seq.at(t) * channels + c] = silu(total); }
    );
}
EXPORT(scan_inputs)
#endif

#ifdef ROWS
constexpr int SIZE = LANES * ROWS;  // rows of a state, padded

struct Tile {
    float bc[TILE][2][SIZE];
    float x[TILE][COLUMNS], factors[TILE][2];
};

// Loads tokens t .. t + TILE - 1. All threads.
DEVICE void load_tile(
    Tile& tile, const Sequence& seq, const Sizes& n, int t, int head, int column, const float* mixed, const float* factors
) {
    const int count = min(TILE, seq.end - t), group = head / (n.heads / n.groups);
    __syncthreads();
    for (int i = threadIdx.x; i < count * COLUMNS; i += THREADS) {
        const int at = column + i % COLUMNS;
        const float* values = mixed + seq.at(t + i / COLUMNS) * n.channels() + head * n.dim;
        tile.x[i / COLUMNS][i % COLUMNS] = at < n.dim ? values[at] : 0.0f;
    }
    for (int i = threadIdx.x; i < 2 * count; i += THREADS)
        tile.factors[i / 2][i % 2] = factors[2 * (seq.at(t + i / 2) * n.heads + head) + i % 2];
    for (int i = threadIdx.x; i < 2 * count * SIZE; i += THREADS) {
        const int token = i / (2 * SIZE), part = i / SIZE % 2, at = i % SIZE;
        const float* values = mixed + seq.at(t + token) * n.channels() + n.inner() + (part * n.groups + group) * n.size;
        tile.bc[token][part][at] = at < n.size ? values[at] : 0.0f;
    }
    __syncthreads();
}

// One token of a column: its state moves on. Returns S^T C.
DEVICE float advance(float (&state)[ROWS], const float* b, const float* c, float given, float decay) {
    float out = 0.0f;
#pragma unroll
    for (int i = 0; i < ROWS; i += 4) {
        const float4 x = *reinterpret_cast<const float4*>(b + LANES * i);
        const float4 y = *reinterpret_cast<const float4*>(c + LANES * i);
        state[i] = decay * state[i] + x.x * given, state[i + 1] = decay * state[i + 1] + x.y * given;
        state[i + 2] = decay * state[i + 2] + x.z * given, state[i + 3] = decay * state[i + 3] + x.w * given;
        out += state[i] * y.x + state[i + 1] * y.y + state[i + 2] * y.z + state[i + 3] * y.w;
    }
    return sum_of_lanes(out);
}

// Grid: (sequences, heads, blocks of columns). A state is read before the kernels before this one have ended: in a step no
// other kernel writes it.
extern "C" __global__ void __launch_bounds__(THREADS, ROWS > 32 ? 2 : 4) scan_states(
    const i32* query_start, const i32* rows, const float* mixed, const float* factors, const float* d, float* matrices,
    float* out, int tokens, int room, int heads, int groups, int size, int dim
) {
    launch_next();
    auto& tile = *reinterpret_cast<Tile*>(shared_memory);
    const Sizes n{heads, groups, size, dim};
    const Sequence seq(rows, query_start, blockIdx.x, tokens, room);
    const int head = blockIdx.y, begin = COLUMNS * blockIdx.z, lane = lane_id() / 8;
    const int mine = 8 * warp_id() + lane_id() % 8, column = begin + mine;
    const auto row_of = [&](int i) { return i / 4 * 4 * LANES + 4 * lane + i % 4; };
    const auto state_of = [&](int row) {
        return matrices + (static_cast<i64>(row) * heads + head) * size * dim + column;
    };
    float state[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const bool is_there = seq.row >= 0 && seq.source >= 0 && row_of(i) < size && column < dim;
        state[i] = is_there ? state_of(seq.source)[row_of(i) * dim] : 0.0f;
    }
    wait_for_previous();
    if (seq.row < 0) return;
    const auto store = [&](int row) {
        float* to = state_of(opaque(row));
        const int keys = opaque(size), width = opaque(dim);
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            if (row_of(i) < keys && column < width) to[row_of(i) * width] = state[i];
    };
    const float direct = d[head];
#pragma unroll 1
    for (int t = seq.first; t < seq.end; ++t) {
        const int i = (t - seq.first) % TILE;
        if (i == 0) load_tile(tile, seq, n, t, head, begin, mixed, factors);
        if (t == seq.drafted) store(seq.row);
        const float x = tile.x[i][mine];
        const float o = advance(
            state, tile.bc[i][0] + 4 * lane, tile.bc[i][1] + 4 * lane, tile.factors[i][0] * x, tile.factors[i][1]
        );
        if (t >= seq.start && lane == 0 && column < dim)
            out[(static_cast<i64>(t) * heads + head) * dim + column] = o + direct * x;
        if (t + 1 == seq.snapshot_at) store(seq.snapshot);
    }
    if (seq.drafted == seq.end) store(seq.row);
}
EXPORT(scan_states)
#endif

// Grid: (tokens, groups). z stands first in a row of y. o is overwritten.
constexpr int WARPS = 8;

extern "C" __global__ void __launch_bounds__(32 * WARPS) scan_outputs(
    float* o, const void* y, i64 y_stride, const float* norm, float eps, void* out, int inner, int half
) {
    begin_kernel();
    auto* sums = reinterpret_cast<float*>(shared_memory);  // of WARPS warps
    const int width = inner / gridDim.y, first = blockIdx.y * width;
    const i64 from = static_cast<i64>(blockIdx.x) * inner + first, z = blockIdx.x * y_stride + first;
    float total = 0.0f;
    for (int i = threadIdx.x; i < width; i += 32 * WARPS) {
        const float x = o[from + i] * silu(load(y, z + i, half));
        o[from + i] = x;
        total += x * x;
    }
    total = warp_sum(total);
    if (lane_id() == 0) sums[warp_id()] = total;
    __syncthreads();
    total = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) total += sums[i];
    const float factor = rsqrtf(total / width + eps);
    for (int i = threadIdx.x; i < width; i += 32 * WARPS) {
        const float result = o[from + i] * factor * norm[first + i];
        if (half) static_cast<u16*>(out)[from + i] = Half::from_float(result);
        else static_cast<float*>(out)[from + i] = result;
    }
}
EXPORT(scan_outputs)
