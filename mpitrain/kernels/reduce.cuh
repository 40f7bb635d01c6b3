// Sums and maxima over the lanes of a warp and the threads of a block, in a fixed order: equal on every run.
#pragma once
#include "element.cuh"

// Every lane gets the result; all 32 take part.
template <class T> __device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
    for (int flip = 16; flip > 0; flip /= 2) value += __shfl_xor_sync(~0u, value, flip);
    return value;
}

// A NaN wins: it must not vanish in a maximum.
template <class T> __device__ __forceinline__ T larger(T a, T b) { return a > b || a != a ? a : b; }

#if !defined(KERNEL_SIMULATOR) && __CUDA_ARCH__ >= 800
__device__ __forceinline__ float larger(float a, float b) {    // by one instruction
    float largest;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(a), "f"(b));
    return largest;
}
#endif

template <class T> __device__ __forceinline__ T warp_max(T value) {
#pragma unroll
    for (int flip = 16; flip > 0; flip /= 2) value = larger(value, __shfl_xor_sync(~0u, value, flip));
    return value;
}

// Every thread gets the sum over a block of whole warps; `scratch` has one place a warp and may be used again at once.
template <class T> __device__ __forceinline__ T block_sum(T value, T* scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    value = warp_sum(value);
    __syncthreads();    // the last use of scratch is over
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : T(0));
}
