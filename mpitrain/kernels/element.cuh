// Elements as stored and as computed with.
//
// Element   what arrays hold: float, double, __half or __nv_bfloat16
// Sum       what arithmetic is done in: double if Element is double, else float
// Both are macros of the launch, so a source is compiled once for each element type that is used.
//
// Result    what gradients of parameters, or products, are stored as; Element where nothing else is said
// Mirror    what parameters are rounded to for layers to compute with; likewise
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef Result
#define Result Element
#endif
#ifndef Mirror
#define Mirror Element
#endif

__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ double wide(double x) { return x; }
__device__ __forceinline__ float wide(__half x) { return __half2float(x); }
__device__ __forceinline__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T> struct Narrow;
template <> struct Narrow<float> { __device__ static float from(double x) { return float(x); } };
template <> struct Narrow<double> { __device__ static double from(double x) { return x; } };
template <> struct Narrow<__half> { __device__ static __half from(float x) { return __float2half_rn(x); } };
template <> struct Narrow<__nv_bfloat16> { __device__ static __nv_bfloat16 from(float x) { return __float2bfloat16_rn(x); } };
template <> struct Narrow<const float> : Narrow<float> {};

// Rounds to nearest even.
template <class T> __device__ __forceinline__ T narrow(Sum x) { return Narrow<T>::from(x); }

// Four neighbours, moved by one instruction (two for double).
template <class T> struct __align__(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) Four { T at[4]; };

// Whether rows that start `pitch` elements apart can be read four elements at a time.
template <class T> __device__ __forceinline__ bool in_fours(const T* array, long long pitch, long long stride = 0) {
    return reinterpret_cast<size_t>(array) % alignof(Four<T>) == 0 && pitch % 4 == 0 && stride % 4 == 0;
}

// out = row[first .. first + 3], with 0 from `end` on.
template <class T>
__device__ __forceinline__ void load_four(const T* __restrict__ row, int first, int end, bool vector, Sum (&out)[4]) {
    if (vector && first + 4 <= end) {
        const Four<T> four = *reinterpret_cast<const Four<T>*>(row + first);
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = wide(four.at[i]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = first + i < end ? Sum(wide(row[first + i])) : Sum(0);
}

// row[first .. first + 3] = values, as far as `end`.
template <class T>
__device__ __forceinline__ void store_four(T* row, int first, int end, bool vector, const Sum (&values)[4]) {
    if (vector && first + 4 <= end) {
        Four<T> four;
#pragma unroll
        for (int i = 0; i < 4; ++i) four.at[i] = narrow<T>(values[i]);
        *reinterpret_cast<Four<T>*>(row + first) = four;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (first + i < end) row[first + i] = narrow<T>(values[i]);
}
