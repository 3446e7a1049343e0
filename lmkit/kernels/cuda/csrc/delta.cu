// The gated delta rule. lmkit.kernels.delta has the formulas, and kernels.recurrent says what `rows`, states
// and draft tokens are. Three kernels:
//
//     delta_inputs   a thread has a channel, and its last inputs in registers: q, k and v after the convolution and SiLU,
//                    mixed [R, C]. Or it has a decay of a value head, the first one beta, too: factors [R, Hv, 1 + D]
//     delta_rule     a block has COLUMNS columns of a value head's state, in registers: o [T, Hv, Dv]
//     delta_outputs  a warp has the head of a token: rms_norm(o) * norm * silu(z), or sigmoid(z)
//
// Rows R of `mixed` and `factors` are those of the tokens, then those of draft tokens: recurrent.cuh.
#include "recurrent.cuh"

constexpr float LINEAR = 20.0f, UNIT_EPS = 1e-6f;  // softplus(x) is x from here on; of unit vectors

struct Sizes {
    int key_heads, value_heads, key_dim, value_dim, decays;

    DEVICE int shared() const { return value_heads / key_heads; }  // value heads for a key head
    DEVICE int channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
    DEVICE int kept() const { return channels() + (1 + decays) * value_heads; }  // numbers of a draft token
};

// Where q, k or v channel `c` of a token is in its row of y. A row has q of all heads, then k, v and z, or these for each
// key head.
DEVICE int place_of(const Sizes& n, int c, bool flat) {
    if (flat) return c;
    const int keys = n.key_heads * n.key_dim, values = n.shared() * n.value_dim, span = 2 * (n.key_dim + values);
    if (c < 2 * keys) return c % keys / n.key_dim * span + c / keys * n.key_dim + c % n.key_dim;
    return (c - 2 * keys) / values * span + 2 * n.key_dim + (c - 2 * keys) % values;
}

#ifdef KERNEL
// The tokens of decay `which` of all heads, and of its head's b if it is the head's first one.
DEVICE void gate(
    const Sequence& seq, const Sizes& n, int which, const float* gates, i64 gate_stride, float a_log, float dt_bias,
    float rate, float floor, float* drafted, float* factors, int room, bool flat
) {
    const int shared = n.shared(), head = which / n.decays, row = which % n.decays;
    const int b_at = flat ? head : head + head / shared * shared, a_at = flat ? n.value_heads + which : b_at + shared;
    const float speed = expf(a_log);
    for (int t = seq.first; t < seq.end; ++t) {
        const auto kept = [&](int draft) {
            return drafted + (static_cast<i64>(seq.row) * room + draft) * n.kept() + n.channels();
        };
        const bool again = t < seq.start;
        const float* given = again ? kept(t - seq.first) : gates + t * gate_stride;
        const float b = given[again ? head : b_at], a = given[again ? n.value_heads + which : a_at];
        if (t >= seq.drafted && row == 0) kept(t - seq.drafted)[head] = b;
        if (t >= seq.drafted) kept(t - seq.drafted)[n.value_heads + which] = a;
        const float step = a + dt_bias, positive = step < LINEAR ? log1pf(expf(step)) : step;
        float* factor = factors + (seq.at(t) * n.value_heads + head) * (1 + n.decays);
        if (row == 0) factor[0] = rate / (1.0f + expf(-b));
        factor[1 + row] = expf(floor < 0.0f ? floor / (1.0f + expf(-speed * step)) : -speed * positive);
    }
}

// Grid: (sequences, blocks of channels and decays).
extern "C" __global__ void __launch_bounds__(128) delta_inputs(
    const void* y, i64 y_stride, const float* gates, i64 gate_stride, const i32* query_start, const i32* rows,
    const float* weights, const float* a_log, const float* dt_bias, float rate, float floor, float* windows, float* drafted,
    float* mixed, float* factors, int tokens, int room, int key_heads, int value_heads, int key_dim, int value_dim, int decays,
    int flat, int half
) {
    begin_kernel();
    const Sizes n{key_heads, value_heads, key_dim, value_dim, decays};
    const Sequence seq(rows, query_start, blockIdx.x, tokens, room);
    const int c = blockIdx.y * blockDim.x + threadIdx.x, which = c - n.channels();
    if (seq.row < 0 || which >= value_heads * decays) return;
    if (which < 0) {
        const int channels = n.channels(), place = place_of(n, c, flat);
        convolve(
            seq, c, channels, n.kept(), room, weights, 0.0f, windows, drafted,
            [&](int t) { return load(y, t * y_stride + place, half); },
            [&](int t, float total) { mixed[seq.at(t) * channels + c] = silu(total); }
        );
    } else {
        const float speed = a_log[which / decays];
        gate(seq, n, which, gates, gate_stride, speed, dt_bias[which], rate, floor, drafted, factors, room, flat);
    }
}
EXPORT(delta_inputs)
#endif

#ifdef ROWS
constexpr int KEYS = LANES * ROWS;  // rows of a state, padded

struct Tile {
    float unit[TILE][2][KEYS];  // q, which is scaled, and k
    float v[TILE][COLUMNS], factors[TILE][2];  // beta, and the decay if there is one
#if BY_ROW
    float decay[TILE][KEYS];
#endif
};

// Loads tokens t .. t + TILE - 1, and scales q and k of each. All threads.
DEVICE void load_tile(
    Tile& tile, const Sequence& seq, const Sizes& n, int t, int head, int column, const float* mixed, const float* factors
) {
    const int count = min(TILE, seq.end - t), keys = n.key_heads * n.key_dim, key_head = head / n.shared();
    __syncthreads();
    for (int i = threadIdx.x; i < count * COLUMNS; i += THREADS) {
        const int at = column + i % COLUMNS;
        const float* values = mixed + seq.at(t + i / COLUMNS) * n.channels() + 2 * keys + head * n.value_dim;
        tile.v[i / COLUMNS][i % COLUMNS] = at < n.value_dim ? values[at] : 0.0f;
    }
    const auto factors_of = [&](int i) { return factors + (seq.at(t + i) * n.value_heads + head) * (1 + n.decays); };
    for (int i = threadIdx.x; i < 2 * count; i += THREADS) tile.factors[i / 2][i % 2] = factors_of(i / 2)[i % 2];
#if BY_ROW
    for (int i = threadIdx.x; i < count * KEYS; i += THREADS) {
        const int row = i % KEYS;
        tile.decay[i / KEYS][row] = row < n.key_dim ? factors_of(i / KEYS)[1 + row] : 0.0f;
    }
#endif
    for (int i = warp_id(); i < 2 * count; i += THREADS / 32) {
        const float* values = mixed + seq.at(t + i / 2) * n.channels() + i % 2 * keys + key_head * n.key_dim;
        float x[(KEYS + 31) / 32], total = 0.0f;
#pragma unroll
        for (int j = 0; j < (KEYS + 31) / 32; ++j) {
            const int at = 32 * j + lane_id();
            x[j] = at < n.key_dim ? values[at] : 0.0f;
            total += x[j] * x[j];
        }
        const float scale = rsqrtf(warp_sum(total) + UNIT_EPS) * (i % 2 ? 1.0f : rsqrtf(static_cast<float>(n.key_dim)));
#pragma unroll
        for (int j = 0; j < (KEYS + 31) / 32; ++j)
            if (32 * j + lane_id() < KEYS) tile.unit[i / 2][i % 2][32 * j + lane_id()] = x[j] * scale;
    }
    __syncthreads();
}

// The decays of all rows for a token of the tile.
DEVICE const float* decays_of(const Tile& tile, int i) {
#if BY_ROW
    return tile.decay[i];
#else
    return tile.unit[i][1];  // not read
#endif
}

// This lane's part of a state's product with q or k.
DEVICE float product(const float (&state)[ROWS], const float* with) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < ROWS; i += 4) {
        const float4 x = *reinterpret_cast<const float4*>(with + LANES * i);
        sum += state[i] * x.x + state[i + 1] * x.y + state[i + 2] * x.z + state[i + 3] * x.w;
    }
    return sum;
}

// One token of a column: its state moves on. Returns o of the token before, from the state that this one finds: the two
// products with it are added up side by side, because a token waits for nothing else as long. `decays`: of the lane's rows,
// if each has its own; `decay` is 1 then.
DEVICE float advance(
    float (&state)[ROWS], const float* last_q, const float* k, float v, float beta, float decay, const float* decays
) {
    const float out_of_lane = product(state, last_q);
#if BY_ROW
#pragma unroll
    for (int i = 0; i < ROWS; i += 4) {
        const float4 x = *reinterpret_cast<const float4*>(decays + LANES * i);
        state[i] *= x.x, state[i + 1] *= x.y, state[i + 2] *= x.z, state[i + 3] *= x.w;
    }
#endif
    float seen = product(state, k), out = out_of_lane;
#pragma unroll
    for (int step = 8; step < 32; step <<= 1) {  // sum_of_lanes of both
        const float of_seen = __shfl_xor_sync(0xffffffffu, seen, step), of_out = __shfl_xor_sync(0xffffffffu, out, step);
        seen += of_seen, out += of_out;
    }
    const float change = (v - decay * seen) * beta;
#pragma unroll
    for (int i = 0; i < ROWS; i += 4) {
        const float4 x = *reinterpret_cast<const float4*>(k + LANES * i);
        state[i] = decay * state[i] + x.x * change, state[i + 1] = decay * state[i + 1] + x.y * change;
        state[i + 2] = decay * state[i + 2] + x.z * change, state[i + 3] = decay * state[i + 3] + x.w * change;
    }
    return out;
}

// Grid: (sequences, value heads, blocks of columns). A state is read before the kernels before this one have ended: in a
// step no other kernel writes it.
extern "C" __global__ void __launch_bounds__(THREADS, ROWS > 32 ? 2 : 4) delta_rule(
    const i32* query_start, const i32* rows, const float* mixed, const float* factors, float* matrices, float* out,
    int tokens, int room, int key_heads, int value_heads, int key_dim, int value_dim, int decays
) {
    launch_next();
    auto& tile = *reinterpret_cast<Tile*>(shared_memory);
    const Sizes n{key_heads, value_heads, key_dim, value_dim, decays};
    const Sequence seq(rows, query_start, blockIdx.x, tokens, room);
    const int head = blockIdx.y, begin = COLUMNS * blockIdx.z, lane = lane_id() / 8;
    const int mine = 8 * warp_id() + lane_id() % 8, column = begin + mine;
    const auto row_of = [&](int i) { return i / 4 * 4 * LANES + 4 * lane + i % 4; };
    const auto state_of = [&](int row) {
        return matrices + (static_cast<i64>(row) * value_heads + head) * key_dim * value_dim + column;
    };
    float state[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const bool is_there = seq.row >= 0 && seq.source >= 0 && row_of(i) < key_dim && column < value_dim;
        state[i] = is_there ? state_of(seq.source)[row_of(i) * value_dim] : 0.0f;
    }
    wait_for_previous();
    if (seq.row < 0) return;
    const auto store = [&](int row) {
        float* to = state_of(opaque(row));
        const int keys = opaque(key_dim), width = opaque(value_dim);
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            if (row_of(i) < keys && column < value_dim) to[row_of(i) * width] = state[i];
    };
    const auto give = [&](int t, float o) {
        if (t >= seq.start && lane == 0 && column < value_dim)
            out[(static_cast<i64>(t) * value_heads + head) * value_dim + column] = o;
    };
#pragma unroll 1
    for (int begin_tile = seq.first; begin_tile < seq.end; begin_tile += TILE) {
        load_tile(tile, seq, n, begin_tile, head, begin, mixed, factors);
        const int count = min(TILE, seq.end - begin_tile);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const int t = begin_tile + i;
            if (t == seq.drafted) store(seq.row);
            const float o = advance(
                state, tile.unit[max(i - 1, 0)][0] + 4 * lane, tile.unit[i][1] + 4 * lane, tile.v[i][mine],
                tile.factors[i][0], BY_ROW ? 1.0f : tile.factors[i][1], decays_of(tile, i) + 4 * lane
            );
            if (i > 0) give(t - 1, o);
            if (t + 1 == seq.snapshot_at) store(seq.snapshot);
        }
        give(begin_tile + count - 1, sum_of_lanes(product(state, tile.unit[count - 1][0] + 4 * lane)));
    }
    if (seq.drafted == seq.end) store(seq.row);
}
EXPORT(delta_rule)
#endif

// Grid: (blocks of WARPS heads of tokens). `heads`: of all tokens.
constexpr int WARPS = 4;

extern "C" __global__ void __launch_bounds__(32 * WARPS) delta_outputs(
    const float* o, const void* y, i64 y_stride, const float* norm, float eps, void* out, int heads, int key_heads,
    int value_heads, int key_dim, int value_dim, int decays, int sigmoid, int flat, int half
) {
    begin_kernel();
    const Sizes n{key_heads, value_heads, key_dim, value_dim, decays};
    const int pair = blockIdx.x * WARPS + warp_id(), t = pair / value_heads, head = pair % value_heads;
    if (pair >= heads) return;
    const i64 from = static_cast<i64>(pair) * value_dim;
    float total = 0.0f;
    for (int i = lane_id(); i < value_dim; i += 32) total += o[from + i] * o[from + i];
    const float factor = rsqrtf(warp_sum(total) / value_dim + eps);
    // z stands after all of v, or after v of the key head.
    const int values = n.shared() * value_dim, v = 2 * key_heads * key_dim + head * value_dim;
    const i64 z = t * y_stride + (flat ? v + value_heads * value_dim : place_of(n, v, false) + values);
    for (int i = lane_id(); i < value_dim; i += 32) {
        const float gate = load(y, z + i, half);
        const float result = o[from + i] * factor * norm[i] * (sigmoid ? 1.0f / (1.0f + expf(-gate)) : silu(gate));
        if (half) static_cast<u16*>(out)[from + i] = Half::from_float(result);
        else static_cast<float*>(out)[from + i] = result;
    }
}
EXPORT(delta_outputs)
