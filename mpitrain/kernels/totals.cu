// Totals over a flat array of n elements, in double and in a fixed order: each block leaves a part, and `total` adds them.
// Launch: grid (any), block (256), then `total` with grid (1); n >= 0 may be anything.
#include "reduce.cuh"

// square_parts[b] = block b's sum of squares, nonfinite_parts[b] = how many of its elements are infinite or NaN: the
// gradient norm, and whether it may be used, in one pass.
extern "C" __global__ void __launch_bounds__(256) gradient_facts(
    long long n, const Element* __restrict__ x, double* __restrict__ square_parts, double* __restrict__ nonfinite_parts) {
    __shared__ double scratch[8];
    const bool vector = in_fours(x, 0);
    double squares = 0, nonfinite = 0;
    for (long long i = 4 * (blockIdx.x * 256LL + threadIdx.x); i < n; i += 4 * 256LL * gridDim.x) {
        Sum four[4];
        load_four(x + i, 0, int(min(n - i, 4LL)), vector, four);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            squares += double(four[j]) * double(four[j]);
            if (!isfinite(four[j])) nonfinite += 1;
        }
    }
    squares = block_sum(squares, scratch);
    nonfinite = block_sum(nonfinite, scratch);
    if (threadIdx.x > 0) return;
    square_parts[blockIdx.x] = squares;
    nonfinite_parts[blockIdx.x] = nonfinite;
}

// parts[b] = block b's sum.
extern "C" __global__ void __launch_bounds__(256) sum_parts(long long n, const Element* __restrict__ x, double* __restrict__ parts) {
    __shared__ double scratch[8];
    double sum = 0;
    for (long long i = blockIdx.x * 256LL + threadIdx.x; i < n; i += 256LL * gridDim.x) sum += double(wide(x[i]));
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// *result = sum of the parts.
extern "C" __global__ void __launch_bounds__(256) total(int count, const double* __restrict__ parts, double* __restrict__ result) {
    __shared__ double scratch[8];
    double sum = 0;
    for (int i = threadIdx.x; i < count; i += 256) sum += parts[i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) *result = sum;
}
