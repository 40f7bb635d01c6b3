// Totals over a flat array of n elements, in double and in a fixed order: each block leaves a part, and `total` adds them.
// Launch: grid (any), block (256), then `total` with grid (1); n >= 0 may be anything.
#include "flat.cuh"
#include "reduce.cuh"

constexpr int WIDE = RUN<Element>;

// square_parts[b] = block b's sum of squares, nonfinite_parts[b] = how many of its elements are infinite or NaN: the
// gradient norm, and whether it may be used, in one pass. The squares of a run, 4 or 8, are added in float32 where none can
// overflow and none that counts is subnormal: an error below 2^-21. Only other runs can have elements that are not finite.
extern "C" __global__ void __launch_bounds__(256) gradient_facts(
    long long n, const Element* __restrict__ x, double* __restrict__ square_parts, double* __restrict__ nonfinite_parts) {
    __shared__ double scratch[8];
    __shared__ int counts[8];
    double squares = 0;
    int nonfinite = 0;
    each_share<WIDE>(n, [&](auto here) {
        Sum xs[WIDE], run = 0, largest = 0;
        here.load(x, xs);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            run += xs[j] * xs[j];
            largest = larger(largest, Sum(fabs(xs[j])));
        }
        if (largest == 0 || (largest > Sum(0x1p-40) && largest < Sum(0x1p60))) {
            squares += run;
            return;
        }
#pragma unroll 1
        for (int j = 0; j < WIDE; ++j) {
            squares += double(xs[j]) * double(xs[j]);
            nonfinite += !isfinite(xs[j]);
        }
    }, x);
    squares = block_sum(squares, scratch);
    nonfinite = block_sum(nonfinite, counts);
    if (threadIdx.x > 0) return;
    square_parts[blockIdx.x] = squares;
    nonfinite_parts[blockIdx.x] = nonfinite;
}

// The sum over this block's shares of x; every thread gets it.
template <int N, class T> __device__ __forceinline__ double sum_of_shares(long long n, const T* __restrict__ x, double* scratch) {
    double sum = 0;
    each_share<N>(n, [&](auto here) {
        double xs[N];
        here.load(x, xs);
#pragma unroll
        for (int j = 0; j < N; ++j) sum += xs[j];
    }, x);
    return block_sum(sum, scratch);
}

// parts[b] = block b's sum.
extern "C" __global__ void __launch_bounds__(256) sum_parts(
    long long n, const Element* __restrict__ x, double* __restrict__ parts) {
    __shared__ double scratch[8];
    const double sum = sum_of_shares<WIDE>(n, x, scratch);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// result[r] = sum of row r of parts: (R, count). Launch: grid (1, R).
extern "C" __global__ void __launch_bounds__(256) total(
    int count, const double* __restrict__ parts, double* __restrict__ result) {
    __shared__ double scratch[8];
    const double sum = sum_of_shares<RUN<double>>(count, parts + (long long)blockIdx.y * count, scratch);
    if (threadIdx.x == 0) result[blockIdx.y] = sum;
}
