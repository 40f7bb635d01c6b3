// Flat arrays, element by element: a thread takes N neighbours of each at a time, in accesses of 16 bytes.
// Launch: grid (any), block (256); n >= 0 may be anything, and arrays need no alignment.
#pragma once
#include "element.cuh"

// A thread's share of every array: N elements, of which `count` exist. WHOLE: all do, and all arrays can be moved in runs.
template <int N, bool WHOLE> struct Share {
    long long first;
    int count;
    template <class T, class S> __device__ __forceinline__ void load(const T* array, S (&out)[N]) const {
        load_run(array + first, 0, WHOLE ? N : count, WHOLE, out);
    }
    template <class T> __device__ __forceinline__ void store(T* array, const Sum (&values)[N]) const {
        store_run(array + first, 0, WHOLE ? N : count, WHOLE, values);
    }
};

// Calls take(share) for each share of n elements that is this thread's. arrays: all that `take` moves; null for one that is not
// there. Whole shares have code of their own, in which no load waits for a branch on what another one found.
template <int N, class Take, class... T>
__device__ __forceinline__ void each_share(long long n, Take take, const T*... arrays) {
    const bool vector = (in_runs<N>(arrays, 0) && ...);
    for (long long i = N * (blockIdx.x * 256LL + threadIdx.x); i < n; i += N * 256LL * gridDim.x) {
        if (vector && i + N <= n) take(Share<N, true>{i, N});
        else take(Share<N, false>{i, int(min(n - i, (long long)N))});
    }
}

// y = f(x), element by element; y may be x.
template <class X, class Y, class F> __device__ __forceinline__ void map_elements(long long n, const X* x, Y* y, F f) {
    constexpr int N = RUN<X, Y>;
    each_share<N>(n, [&](auto here) {
        Sum xs[N];
        here.load(x, xs);
#pragma unroll
        for (int j = 0; j < N; ++j) xs[j] = f(xs[j]);
        here.store(y, xs);
    }, x, y);
}

// y = f(a, b), element by element; y, of the type of a, may be a or b.
template <class A, class B, class F> __device__ __forceinline__ void map_pairs(long long n, const A* a, const B* b, A* y, F f) {
    constexpr int N = RUN<A, B>;
    each_share<N>(n, [&](auto here) {
        Sum as[N], bs[N];
        here.load(a, as);
        here.load(b, bs);
#pragma unroll
        for (int j = 0; j < N; ++j) as[j] = f(as[j], bs[j]);
        here.store(y, as);
    }, a, b, y);
}
