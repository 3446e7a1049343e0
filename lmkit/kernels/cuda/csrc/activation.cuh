// Activations of a gate: a gate x and its other half y give f(x) * y. All functions f are x sigmoid(t):
//
//     silu           t = x
//     gelu_tanh      t = 2 sqrt(2 / pi) (x + 0.044715 x^3), because (1 + tanh(u)) / 2 = sigmoid(2 u)
//     clamped_swish  t = 1.702 x, where x is at most 7, and y in -7 .. 7 becomes y + 1
#pragma once
#include "ptx.cuh"

enum Activation { NOT_GATED, SILU, GELU_TANH, CLAMPED_SWISH };  // in the order of elementwise.ACTIVATIONS

constexpr float CLAMP = 7.0f, SWISH = 1.702f;

// Brings x and y into their range, and returns t.
DEVICE float gate_exponent(float& x, float& y, int activation) {
    if (activation == CLAMPED_SWISH) {
        x = fminf(x, CLAMP), y = 1.0f + fmaxf(-CLAMP, fminf(y, CLAMP));
        return SWISH * x;
    }
    return activation == GELU_TANH ? 1.5957691216f * (x + 0.044715f * x * x * x) : x;
}

DEVICE float gated(float x, float y, int activation) {
    const float t = gate_exponent(x, y, activation);
    return x / (1.0f + expf(-t)) * y;
}
