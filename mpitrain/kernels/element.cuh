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
__device__ __forceinline__ float wide(signed char x) { return float(x); }    // int8 numbers on the wire
__device__ __forceinline__ float wide(unsigned char x) { return float(x); }    // codes of a weight

// A sum that takes in no product, which a compiler would not round: it has the bits of a pass of its own.
__device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double plus(double a, double b) { return __dadd_rn(a, b); }

template <class T> struct Narrow;
template <> struct Narrow<float> { __device__ static float from(double x) { return float(x); } };
template <> struct Narrow<double> { __device__ static double from(double x) { return x; } };
template <> struct Narrow<__half> { __device__ static __half from(float x) { return __float2half_rn(x); } };
template <> struct Narrow<__nv_bfloat16> { __device__ static __nv_bfloat16 from(float x) { return __float2bfloat16_rn(x); } };
template <> struct Narrow<signed char> {
    __device__ static signed char from(float x) { return (signed char)(max(-127, min(127, __float2int_rn(x)))); }
};
template <> struct Narrow<const float> : Narrow<float> {};

// Rounds to nearest even; to int8, at most 127 in magnitude.
template <class T> __device__ __forceinline__ T narrow(Sum x) { return Narrow<T>::from(x); }

// N neighbours, moved by as few instructions of at most 16 bytes as there can be.
template <class T, int N> struct __align__(N * sizeof(T) > 16 ? 16 : N * sizeof(T)) Run { T at[N]; };

template <class T> using Four = Run<T, 4>;

// How many elements of arrays of these types a thread takes at a time: of each 16 bytes or whole multiples of them.
template <class T, class Other = T> constexpr int RUN = sizeof(T) == 2 || sizeof(Other) == 2 ? 8 : 4;

// Whether rows that start `pitch` elements apart can be read N elements at a time.
template <int N, class T> __device__ __forceinline__ bool in_runs(const T* array, long long pitch, long long stride = 0) {
    return reinterpret_cast<size_t>(array) % alignof(Run<T, N>) == 0 && pitch % N == 0 && stride % N == 0;
}

// out = row[first .. first + N - 1], with 0 from `end` on. vector: the row is in runs of N, and `first` a multiple of N
template <class T, int N, class S>
__device__ __forceinline__ void load_run(const T* __restrict__ row, int first, int end, bool vector, S (&out)[N]) {
    if (vector && first + N <= end) {
        const Run<T, N> run = *reinterpret_cast<const Run<T, N>*>(row + first);
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = wide(run.at[i]);
        return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = first + i < end ? S(wide(row[first + i])) : S(0);
}

// The same as stored, for `widened`: nothing waits for such a load until it is used, so several can be under way.
template <int N, class T>
__device__ __forceinline__ Run<T, N> stored_run(const T* __restrict__ row, int first, int end, bool vector) {
    if (vector && first + N <= end) return *reinterpret_cast<const Run<T, N>*>(row + first);
    Run<T, N> run;
#pragma unroll
    for (int i = 0; i < N; ++i) run.at[i] = first + i < end ? row[first + i] : narrow<T>(Sum(0));
    return run;
}

template <class T, int N> __device__ __forceinline__ void widened(const Run<T, N>& run, Sum (&out)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = wide(run.at[i]);
}

// row[first .. first + N - 1] = values, as far as `end`.
template <class T, int N>
__device__ __forceinline__ void store_run(T* row, int first, int end, bool vector, const Sum (&values)[N]) {
    if (vector && first + N <= end) {
        Run<T, N> run;
#pragma unroll
        for (int i = 0; i < N; ++i) run.at[i] = narrow<T>(values[i]);
        *reinterpret_cast<Run<T, N>*>(row + first) = run;
        return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (first + i < end) row[first + i] = narrow<T>(values[i]);
}

// Runs of sums in shared memory, in pieces of 16 bytes: piece p of all runs precedes piece p + 1 of any. The pieces of
// neighbouring threads are neighbours, so no two of them meet in a bank. runs: of the array; run: the thread's.
template <int N> __device__ __forceinline__ void load_pieces(const Sum* array, int runs, int run, Sum (&out)[N]) {
    constexpr int PIECE = 16 / sizeof(Sum);
#pragma unroll
    for (int p = 0; p < N / PIECE; ++p) {
        const Run<Sum, PIECE> piece = *reinterpret_cast<const Run<Sum, PIECE>*>(array + (p * runs + run) * PIECE);
#pragma unroll
        for (int i = 0; i < PIECE; ++i) out[p * PIECE + i] = piece.at[i];
    }
}

template <int N> __device__ __forceinline__ void store_pieces(Sum* array, int runs, int run, const Sum (&values)[N]) {
    constexpr int PIECE = 16 / sizeof(Sum);
#pragma unroll
    for (int p = 0; p < N / PIECE; ++p) {
        Run<Sum, PIECE> piece;
#pragma unroll
        for (int i = 0; i < PIECE; ++i) piece.at[i] = values[p * PIECE + i];
        *reinterpret_cast<Run<Sum, PIECE>*>(array + (p * runs + run) * PIECE) = piece;
    }
}
