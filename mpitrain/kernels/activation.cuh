// Activations and their slopes. GELU is the tanh form of Hendrycks & Gimpel 2016, section 2; GELU_ERF is z times the normal
// distribution.
#pragma once
#include "ptx.cuh"

#define ACTIVATION_NONE 0
#define ACTIVATION_GELU 1
#define ACTIVATION_RELU 2
#define ACTIVATION_GELU_ERF 3
#define ACTIVATION_TANH 4
#define ACTIVATION_GELU_BACKWARD -1

// 1 / (1 + e^-x). In float by two approximate instructions, with a relative error of a few 2^-24.
__device__ __forceinline__ float logistic(float x) { return __fdividef(1.0f, 1.0f + exp2_flushed(-1.4426950408889634f * x)); }
__device__ __forceinline__ double logistic(double x) { return 1.0 / (1.0 + exp(-x)); }

// (1 + tanh u) / 2 with u = sqrt(2 / pi) (z + 0.044715 z^3), which is the logistic function of 2 u: a slow tanh is not needed.
__device__ __forceinline__ Sum gelu_gate(Sum z) {
    return logistic(Sum(2 * 0.7978845608028654) * (z + Sum(0.044715) * z * z * z));
}

__device__ __forceinline__ Sum normal_distribution(Sum z) { return Sum(0.5) + Sum(0.5) * erf(Sum(0.7071067811865476) * z); }

__device__ __forceinline__ Sum activate(Sum z, int kind) {
    if (kind == ACTIVATION_GELU) return z * gelu_gate(z);
    if (kind == ACTIVATION_RELU) return z > Sum(0) ? z : z == z ? Sum(0) : z;    // a NaN stays one
    if (kind == ACTIVATION_GELU_ERF) return z * normal_distribution(z);
    if (kind == ACTIVATION_TANH) return tanh(z);
    return z;
}

template <int KIND> struct Activation {
    constexpr __device__ operator int() const { return KIND; }
};

// Call loop(kind). The long activations have loops of their own: with them that of GELU would have three times the instructions.
template <class Loop> __device__ __forceinline__ void with_activation(int kind, Loop loop) {
    if (kind == ACTIVATION_GELU_ERF) return loop(Activation<ACTIVATION_GELU_ERF>());
    if (kind == ACTIVATION_TANH) return loop(Activation<ACTIVATION_TANH>());
    loop(kind);
}

// With h the gate: gelu' = h (1 + 2 (1 - h) z u'), u' = sqrt(2 / pi) (1 + 3 x 0.044715 z^2). The slope of ReLU at 0 is 0.
// For ReLU and tanh z is the output.
__device__ __forceinline__ Sum activation_slope(Sum z, int kind) {
    if (kind == ACTIVATION_GELU) {
        const Sum h = gelu_gate(z);
        const Sum inner = Sum(0.7978845608028654) * (Sum(1) + Sum(3 * 0.044715) * z * z);
        return h * (Sum(1) + Sum(2) * (Sum(1) - h) * z * inner);
    }
    if (kind == ACTIVATION_RELU) return z > Sum(0) ? Sum(1) : Sum(0);
    if (kind == ACTIVATION_GELU_ERF) return normal_distribution(z) + z * Sum(0.3989422804014327) * exp(Sum(-0.5) * z * z);
    if (kind == ACTIVATION_TANH) return Sum(1) - z * z;
    return Sum(1);
}
