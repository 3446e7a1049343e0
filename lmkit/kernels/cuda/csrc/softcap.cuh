// A soft cap of attention's scores (Gemma 2, arXiv 2408.00118): x becomes c tanh(x / c). SOFTCAP 0 compiles none of it.
//
// tanh(y) = 1 - 2 / (1 + e^(2 y)) has an absolute error of some 2^-22, so a capped score has an error of c 2^-22. The
// absolute error counts, since a weight is e to the score.
#pragma once
#include "ptx.cuh"

#ifndef SOFTCAP
#define SOFTCAP 0
#endif

struct SoftCap {
    float cap, rate;  // c, in the unit of the scores; 2 log2(e) / c

    DEVICE explicit SoftCap(float cap) : cap(cap), rate(2.8853900818f / cap) {}
    DEVICE float operator()(float x) const { return cap - __fdividef(2.0f * cap, 1.0f + ex2(x * rate)); }
};
