// Replaces tokens that the host did not know when it launched a step. An id below 0 stands for the token sampled last
// in slot -1 - id, or for token 0 if none could be sampled. A thread has one token.
#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(256) known_tokens(i64* token_ids, const i64* last_token, int tokens) {
    begin_kernel();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= tokens || token_ids[i] >= 0) return;
    const i64 sampled = last_token[-1 - token_ids[i]];
    token_ids[i] = sampled < 0 ? 0 : sampled;
}
EXPORT(known_tokens)
