// What kernels do that exchange with other GPUs.
#pragma once
#include "ptx.cuh"

// to[i] = from[i] for i < count. `aligned`: both begin at multiples of 16 bytes.
DEVICE void copy(float* to, const float* from, int count, bool aligned) {
    const int vectors = aligned ? count / 4 : 0;
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) reinterpret_cast<float4*>(to)[i] = reinterpret_cast<const float4*>(from)[i];
    for (int i = 4 * vectors + threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}
