// Mixtures of experts, beside their products (gemm.cu with GROUPED): which experts a token has, the pairs of token and
// expert sorted by expert, and the sums over a token's experts. lmkit.kernels.ops has the formulas and the shapes. All
// that depends on the data stays on the device, so these launches are the same for any choice of experts.
#include "rows.cuh"

#define LEAST __uint_as_float(0xff800000u)  // minus infinity
constexpr float TINY = 1e-20f;
constexpr int NONE = 0x7fffffff;

// The greatest value of a warp and its index; of equal values the lowest index.
DEVICE void greatest(float& value, int& index) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        const float other = __shfl_xor_sync(0xffffffffu, value, step);
        const int at = __shfl_xor_sync(0xffffffffu, index, step);
        if (other > value || (other == value && at < index)) value = other, index = at;
    }
}

// Marks the `wanted` greatest of values [count <= 1024]. Value lane + 32 j is bit j of the lane's result.
DEVICE u32 choose(const float* values, int count, int wanted) {
    u32 chosen = 0;
    for (int n = 0; n < wanted; ++n) {
        float best = LEAST;
        int at = NONE;
        for (int i = lane_id(); i < count; i += 32) {
            const bool is_free = !(chosen >> (i / 32) & 1u);
            if (is_free && (at == NONE || values[i] > best)) best = values[i], at = i;
        }
        greatest(best, at);
        if (at % 32 == lane_id() && at < count) chosen |= 1u << (at / 32);
    }
    return chosen;
}

struct Routing {
    int experts, per_token, normalize, sigmoid, groups, groups_per_token, group_top;
    float scale;
};

DEVICE float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }

// wanted[i] = -inf for experts outside of the token's best groups. `sums` [groups] is the warp's own.
DEVICE void keep_groups(const Routing& r, float* wanted, float* sums) {
    const int size = r.experts / r.groups;
    for (int g = lane_id(); g < r.groups; g += 32) {
        float first = LEAST, second = LEAST;
        for (int i = g * size; i < (g + 1) * size; ++i) {
            const float value = wanted[i];
            if (value > first) second = first, first = value;
            else if (value > second) second = value;
        }
        sums[g] = r.group_top == 2 ? first + second : first;
    }
    __syncwarp();
    const u32 kept = choose(sums, r.groups, r.groups_per_token);
    __syncwarp();
    for (int g = lane_id(); g < r.groups; g += 32) sums[g] = kept >> (g / 32) & 1u ? 1.0f : 0.0f;
    __syncwarp();
    for (int i = lane_id(); i < r.experts; i += 32)
        if (sums[i / size] == 0.0f) wanted[i] = LEAST;
    __syncwarp();
}

// A warp has a token. Its shared memory: scores [experts], the values by which it chooses [experts], groups. A score
// that is not a number is chosen last: tokens that pad a captured step may have any.
extern "C" __global__ void __launch_bounds__(128) route(
    const float* logits, i64 stride, const float* bias, float* weights, i64* experts_out, int tokens, int experts,
    int per_token, int normalize, int sigmoid, int groups, int groups_per_token, int group_top, float scale
) {
    begin_kernel();
    const Routing r{experts, per_token, normalize, sigmoid, groups, groups_per_token, group_top, scale};
    const int token = blockIdx.x * (blockDim.x / 32) + warp_id(), lane = lane_id();
    if (token >= tokens) return;
    float* scores = reinterpret_cast<float*>(shared_memory) + warp_id() * (2 * experts + groups);
    float* wanted = scores + experts;
    const float* mine = logits + token * stride;
    if (r.sigmoid) {
        for (int i = lane; i < experts; i += 32) scores[i] = sigmoid_of(mine[i]);
    } else {
        float peak = LEAST, total = 0.0f;
        for (int i = lane; i < experts; i += 32) peak = fmaxf(peak, mine[i]);
        peak = warp_max(peak);
        for (int i = lane; i < experts; i += 32) total += scores[i] = expf(mine[i] - peak);
        total = warp_sum(total);
        for (int i = lane; i < experts; i += 32) scores[i] /= total;
    }
    for (int i = lane; i < experts; i += 32) {
        const float value = scores[i] + (bias ? bias[i] : 0.0f);
        wanted[i] = value == value ? value : LEAST;
    }
    __syncwarp();
    if (groups > 1) keep_groups(r, wanted, wanted + experts);
    const u32 chosen = choose(wanted, experts, per_token);
    float sum = 0.0f;
    for (int i = lane; i < experts; i += 32)
        if (chosen >> (i / 32) & 1u) sum += scores[i];
    sum = warp_sum(sum);
    i64 place = static_cast<i64>(token) * per_token;
    for (int j = 0; j * 32 < experts; ++j) {
        const bool is_mine = chosen >> j & 1u;
        const u32 all = __ballot_sync(0xffffffffu, is_mine);
        if (is_mine) {
            const i64 at = place + __popc(all & ((1u << lane) - 1));
            const float score = scores[lane + 32 * j];
            weights[at] = (normalize ? score / (sum + TINY) : score) * scale;
            experts_out[at] = lane + 32 * j;
        }
        place += __popc(all);
    }
}
EXPORT(route)

// Places (ops.Places) of chosen [count], by counting: one block. Shared memory: numbers and starts of each expert, then
// the experts as 16-bit numbers, which every warp reads once for each of its experts.
extern "C" __global__ void __launch_bounds__(1024) expert_places(
    const i64* chosen, i64* tokens, i64* of_token, i64* active, int count, int per_token, int experts,
    int held, int held_end
) {
    begin_kernel();
    i32* counts = reinterpret_cast<i32*>(shared_memory);
    i32* starts = counts + experts;
    u16* ids = reinterpret_cast<u16*>(starts + experts);
    const int lane = lane_id();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < count; p += blockDim.x) {
        ids[p] = static_cast<u16>(chosen[p]);
        atomicAdd(counts + ids[p], 1);
    }
    __syncthreads();
    if (warp_id() == 0) {
        int first = 0, number = 0;
        for (int e = lane; e - lane < experts; e += 32) {
            const int mine = e < experts ? counts[e] : 0;
            int end = mine;
#pragma unroll
            for (int step = 1; step < 32; step <<= 1) {
                const int before = __shfl_up_sync(0xffffffffu, end, step);
                if (lane >= step) end += before;
            }
            end += first;
            if (e < experts) starts[e] = end - mine;
            const bool is_active = mine > 0 && held <= e && e < held_end;
            const u32 used = __ballot_sync(0xffffffffu, is_active);
            if (is_active) {
                i64* entry = active + 1 + 3 * (number + __popc(used & ((1u << lane) - 1)));
                entry[0] = e - held, entry[1] = end - mine, entry[2] = end;
            }
            number += __popc(used);
            first = __shfl_sync(0xffffffffu, end, 31);
        }
        if (lane == 0) active[0] = number;
    }
    __syncthreads();
    for (int e = warp_id(); e < experts; e += blockDim.x / 32) {
        int at = starts[e], left = counts[e];
        for (int p = lane; left > 0; p += 32) {
            const bool is_mine = p < count && ids[p] == e;
            const u32 all = __ballot_sync(0xffffffffu, is_mine);
            if (is_mine) {
                const int place = at + __popc(all & ((1u << lane) - 1));
                tokens[place] = p / per_token;
                of_token[p] = place;
            }
            at += __popc(all), left -= __popc(all);
        }
    }
}
EXPORT(expert_places)

// out[token] = the sum of weight * y[place] over a token's places, ascending. Grid: (tokens, blocks of columns).
extern "C" __global__ void __launch_bounds__(256) sum_places(
    const float* y, const float* weights, const i64* of_token, float* out, int per_token, int columns, int aligned
) {
    begin_kernel();
    const int column = WIDTH * (blockIdx.y * blockDim.x + threadIdx.x), count = columns - column;
    if (count <= 0) return;
    const i64 token = blockIdx.x;
    float total[WIDTH] = {};
    for (int j = 0; j < per_token; ++j) {
        const float factor = weights[token * per_token + j];
        float v[WIDTH];
        load8(v, y, of_token[token * per_token + j] * columns + column, false, aligned, count);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) total[i] += v[i] * factor;
    }
    store8(out, token * columns + column, total, false, aligned, count);
}
EXPORT(sum_places)

// out[token] += y[token] * sigmoid(logits[token]), or y[token] if there are none. Grid: (tokens, blocks of columns).
extern "C" __global__ void __launch_bounds__(256) add_shared(
    float* out, const void* y, const float* logits, i64 stride, int columns, int half, int aligned
) {
    begin_kernel();
    const int column = WIDTH * (blockIdx.y * blockDim.x + threadIdx.x), count = columns - column;
    if (count <= 0) return;
    const i64 token = blockIdx.x, at = token * columns + column;
    const float factor = logits ? sigmoid_of(logits[token * stride]) : 1.0f;
    float total[WIDTH], v[WIDTH];
    load8(total, out, at, false, aligned, count);
    load8(v, y, at, half, aligned, count);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) total[i] += v[i] * factor;
    store8(out, at, total, false, aligned, count);
}
EXPORT(add_shared)
