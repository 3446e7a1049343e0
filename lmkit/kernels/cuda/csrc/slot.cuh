// A sampler's state of each sequence on the device: 17 words of 8 bytes. The host writes them when a sequence takes
// the slot (kernels/cuda/sampling.py lists the same words). From then on kernels update it; the host may run ahead.
#pragma once
#include "ptx.cuh"

struct Slot {
    double temperature;  // 0 = greedy
    double top_p, min_p;
    i64 top_k;  // 0 = all
    u64 seed;
    i64 num_outputs;  // tokens generated so far
    i64 min_tokens;
    const i32* held;  // ids that are suppressed before that
    i64 num_held;
    const i32* bias_ids;  // all different
    const float* bias;
    i64 num_bias;
    i32* seen;  // [vocab], null without penalties: 0 = not in the context, else 1 + the times it was generated
    double presence;
    float repetition, frequency;
    i64 num_top;  // most likely tokens to report
    const u32* mask;  // [ceil(vocab / 32)], a bit for each token that may come next; null = all
};
static_assert(sizeof(Slot) == 136, "");

constexpr i64 FAILED_TOKEN = -2;

// A token was sampled. The next step computes `last_token`, so a row that failed gets an id that exists.
DEVICE void commit(Slot* table, i32 slot, i64 token, i64* last_token) {
    last_token[slot] = token < 0 ? 0 : token;
    if (token < 0) return;
    ++table[slot].num_outputs;
    if (i32* seen = table[slot].seen) seen[token] = max(seen[token], 1) + 1;
}
