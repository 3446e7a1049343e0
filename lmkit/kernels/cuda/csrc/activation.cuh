// Activations of a gate: a gate x and its other half y give f(x) * y. Both functions f are x sigmoid(t):
//
//     silu       t = x
//     gelu_tanh  t = 2 sqrt(2 / pi) (x + 0.044715 x^3), because (1 + tanh(u)) / 2 = sigmoid(2 u)
#pragma once
#include "ptx.cuh"

enum Activation { NOT_GATED, SILU, GELU_TANH };  // in the order of elementwise.ACTIVATIONS

DEVICE float gate_exponent(float x, int activation) {
    return activation == GELU_TANH ? 1.5957691216f * (x + 0.044715f * x * x * x) : x;
}

DEVICE float gate(float x, int activation) { return x / (1.0f + expf(-gate_exponent(x, activation))); }
