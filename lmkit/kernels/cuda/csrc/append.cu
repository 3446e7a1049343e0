// ops.rope_append and ops.kv_append: 16 lanes compute a head of a token (D / 16 elements a lane), 8 heads a block.
//
// A token's heads are ordered: query heads, key heads, value heads; index = (token, head). Queries and keys are rotated
// and written back. Keys and values are quantized and stored. With null angles nothing is rotated (kv_append, without
// query heads). With null values there are no value heads: the key's row is the value too.
//
// BALANCED: from the vectors of position 0 `first` is subtracted, and keys are multiplied by a matrix of their head. The
// tokens of a head then follow each other, so that a block reads few matrices, from L1 for most of its tokens.
//
// DIM: D. KEYS, VALUES: storage types (StorageType). LM_BF16: q, k, v are bfloat16.
#include "kv.cuh"

#ifndef BALANCED
#define BALANCED 0
#endif

struct Store {  // one layer's keys or values
    u8 *data, *params;
    const float* scales;
    int hadamard;
};

DEVICE void write_back(u16* row, const float (&x)[DIM / 16], bool active) {
    alignas(16) u16 bits[DIM / 16];
#pragma unroll
    for (int e = 0; e < DIM / 16; ++e) bits[e] = Half::from_float(x[e]);
    if (active) store_span(row + (lane_id() & 15) * (DIM / 16), bits);
}

// What is stored in place of a head: without `first` [DIM], times `matrix` [DIM][DIM], each unless it is null. Sums are in
// the order of the matrix's rows.
DEVICE void balance(float (&x)[DIM / 16], const float* matrix, const float* first) {
    constexpr int E = DIM / 16;
    const int column = (lane_id() & 15) * E;
    if (first) {
#pragma unroll
        for (int e = 0; e < E; ++e) x[e] -= first[column + e];
    }
    if (!__any_sync(0xffffffffu, matrix != nullptr)) return;
    float y[E] = {};
#pragma unroll(E <= 4 ? 4 : 1)
    for (int lane = 0; lane < 16; ++lane)
#pragma unroll
        for (int e = 0; e < E; ++e) {
            const float value = __shfl_sync(0xffffffffu, x[e], (lane_id() & 16) + lane);
            alignas(16) float m[E] = {};
            if (matrix) load_span(m, matrix + (lane * E + e) * DIM + column);
#pragma unroll
            for (int j = 0; j < E; ++j) y[j] = fmaf(value, m[j], y[j]);
        }
#pragma unroll
    for (int e = 0; e < E; ++e) x[e] = matrix ? y[e] : x[e];
}

template <int TYPE>
DEVICE void store(const Store& to, i64 row, int head, const float (&head_of_token)[DIM / 16], bool active, u8* scratch) {
    float x[DIM / 16];
#pragma unroll
    for (int e = 0; e < DIM / 16; ++e) x[e] = head_of_token[e];
    if constexpr ((DIM & (DIM - 1)) == 0 && DIM <= 256) {
        if (to.hadamard) hadamard<DIM>(x);
    }
    const float* scale = to.scales ? to.scales + head : nullptr;
    using S = Storage<TYPE, DIM>;
    store_head<TYPE, DIM>(to.data + row * S::ROW, to.params + row * S::PARAM_BYTES, x, scale, active, scratch);
}

extern "C" __global__ void __launch_bounds__(128)
append(u16* q, i64 q_token, i64 q_head, u16* k, i64 k_token, i64 k_head, u16* v, i64 v_token, i64 v_head,
       const float* cosines, const float* sines, int half, const float* mean, u8* k_data, u8* k_params,
       const float* k_scales, int k_hadamard, u8* v_data, u8* v_params, const float* v_scales, int v_hadamard,
       const i32* slots, int tokens, int q_heads, int kv_heads, int block_size
#if BALANCED
       , const i32* positions, const float* matrices, const float* k_first, const float* v_first
#endif
) {
    begin_kernel();
    const int heads = q_heads + (v ? 2 : 1) * kv_heads;
    const i64 index = blockIdx.x * 8ll + threadIdx.x / 16, count = static_cast<i64>(tokens) * heads;
    // The two halves of a warp may have different kinds of heads. All lanes take part in the warp operations of each
    // path. A half that has another kind of head, or nothing to do, takes part with `mine` false.
    // What it reads is the last head, which no other block writes meanwhile.
    const bool active = index < count;
    const i64 read = active ? index : count - 1;
#if BALANCED
    const i64 token = read % tokens;
    const int head = static_cast<int>(read / tokens);
#else
    const i64 token = read / heads;
    const int head = static_cast<int>(read - token * heads);
#endif
    const int kind = head < q_heads ? 0 : head < q_heads + kv_heads ? 1 : 2;
    const int kv_head = kind == 0 ? 0 : (head - q_heads) % kv_heads;

    u16* row = kind == 0   ? q + token * q_token + head * q_head
               : kind == 1 ? k + token * k_token + kv_head * k_head
                           : v + token * v_token + kv_head * v_head;
    const Angles angles{cosines + token * half, sines + token * half, kind == 2 ? 0 : half};
    float x[DIM / 16];
    load_head<DIM>(x, row, mean && kind == 1 ? mean + kv_head * DIM : nullptr, angles);
    __syncwarp();  // another lane may write back the values that a lane reads
    if (half > 0 && kind < 2) write_back(row, x, active);

    const int slot = kind > 0 && active ? slots[token] : -1;
#if BALANCED
    const float* first = kind == 1 ? k_first : kind == 2 ? v_first : nullptr;
    const bool lacks = slot >= 0 && first && positions && positions[token] == 0;
    balance(x, kind == 1 && matrices ? matrices + static_cast<i64>(kv_head) * DIM * DIM : nullptr,
            lacks ? first + kv_head * DIM : nullptr);
#endif
    const i64 where = slot < 0 ? 0 : row_of_slot(slot, block_size, kv_heads, kv_head);
    u8* const scratch = shared_memory + threadIdx.x / 16 * DIM;  // there with levels
    if (__any_sync(0xffffffffu, kind == 1))
        store<KEYS>({k_data, k_params, k_scales, k_hadamard}, where, kv_head, x, kind == 1 && slot >= 0, scratch);
    if (__any_sync(0xffffffffu, kind == 2))
        store<VALUES>({v_data, v_params, v_scales, v_hadamard}, where, kv_head, x, kind == 2 && slot >= 0, scratch);
}
EXPORT(append)
