// The gated short convolution. lmkit.kernels.short_conv has the formulas. A thread has a channel, and its last inputs in
// registers.
#include "recurrent.cuh"

// Grid: (sequences, blocks of channels). A row of y is b | gates | x.
extern "C" __global__ void __launch_bounds__(128) short_conv(
    const void* y, i64 y_stride, const i32* query_start, const i32* rows, const float* weights, const float* bias,
    float* windows, float* drafted, void* out, int tokens, int room, int channels, int half
) {
    begin_kernel();
    const Sequence seq(rows, query_start, blockIdx.x, tokens, room);
    const int c = blockIdx.y * blockDim.x + threadIdx.x;
    if (seq.row < 0 || c >= channels) return;
    convolve(
        seq, c, channels, channels, room, weights, bias ? bias[c] : 0.0f, windows, drafted,
        [&](int t) {
            const i64 at = t * y_stride + c;
            return load(y, at, half) * load(y, at + 2 * channels, half);
        },
        [&](int t, float total) {
            if (t < seq.start) return;
            const float result = total * load(y, t * y_stride + channels + c, half);
            const i64 at = static_cast<i64>(t) * channels + c;
            if (half) static_cast<u16*>(out)[at] = Half::from_float(result);
            else static_cast<float*>(out)[at] = result;
        }
    );
}
EXPORT(short_conv)
