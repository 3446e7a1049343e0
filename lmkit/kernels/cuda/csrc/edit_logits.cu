// Edits of some rows of logits, in place: suppressed ids, biases, penalties, the mask, in this order.
//
// A block loads CHUNK tokens of one row into shared memory. All threads together look up the ids of a sparse list in
// it. At the end the chunk is written back. NaN and +inf make a row unusable. They become NaN and stay: no edit hides
// them. Every operation is rounded on its own (no fused multiply-add), so the CPU sampler gets the same bits.
#include "slot.cuh"

constexpr int THREADS = 256, CHUNK = 2048;

// Grid (ceil(vocab / CHUNK), number of rows).
extern "C" __global__ void __launch_bounds__(THREADS)
    edit_logits(float* logits, i64 stride, int vocab, const i32* rows, const i32* slots, const Slot* table) {
    begin_kernel();
    float* chunk = reinterpret_cast<float*>(shared_memory);
    const int first = blockIdx.x * CHUNK, size = min(CHUNK, vocab - first), row = rows[blockIdx.y];
    const Slot slot = table[slots[row]];
    float* tokens = logits + row * stride + first;
    const float infinity = __uint_as_float(0x7f800000u);

    for (int i = threadIdx.x; i < size; i += THREADS) {
        const float x = tokens[i];
        chunk[i] = x < infinity ? x : __uint_as_float(0x7fc00000u);
    }
    __syncthreads();
    if (slot.num_outputs < slot.min_tokens)
        for (int j = threadIdx.x; j < slot.num_held; j += THREADS) {
            const int i = slot.held[j] - first;
            if (0 <= i && i < size && chunk[i] < infinity) chunk[i] = -infinity;
        }
    __syncthreads();
    for (int j = threadIdx.x; j < slot.num_bias; j += THREADS) {
        const int i = slot.bias_ids[j] - first;
        if (0 <= i && i < size) chunk[i] += slot.bias[j];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += THREADS) {
        float x = chunk[i];
        if (const int seen = slot.seen ? slot.seen[first + i] : 0) {
            const int count = seen - 1;
            x = x > 0.0f ? x / slot.repetition : __fmul_rn(x, slot.repetition);
            const float frequency = __fmul_rn(slot.frequency, static_cast<float>(count));
            x -= static_cast<float>((count ? slot.presence : 0.0) + static_cast<double>(frequency));
        }
        const int token = first + i;
        const bool allowed = !slot.mask || (slot.mask[token / 32] >> (token % 32) & 1u);
        tokens[i] = allowed || x != x ? x : -infinity;
    }
}
EXPORT(edit_logits)
