// Sums down the columns of a matrix, in two steps and a fixed order.
#include "flat.cuh"

constexpr int WIDE = RUN<Element, Result>, COLUMNS = 8 * WIDE;    // of a thread; of a block, whose rows of threads are 8 wide

// Adds up a thread's columns over the 32 rows of its block. The first row of threads gets the sums.
__device__ __forceinline__ void add_down(Sum (&sum)[WIDE]) {
    __shared__ __align__(16) Sum sums[8][COLUMNS];
    const int warp = threadIdx.y / 4;
#pragma unroll
    for (int j = 0; j < WIDE; ++j) {    // a warp has four rows
        sum[j] += __shfl_xor_sync(~0u, sum[j], 8);
        sum[j] += __shfl_xor_sync(~0u, sum[j], 16);
    }
    if (threadIdx.y % 4 == 0) store_pieces(sums[warp], 8, threadIdx.x, sum);
    __syncthreads();
    if (threadIdx.y > 0) return;
    for (int i = 1; i < 8; ++i) {
        Sum more[WIDE];
        load_pieces(sums[i], 8, threadIdx.x, more);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) sum[j] += more[j];
    }
}

// parts[p, n] = sum over the rows m of part p of x[m, n].    x: (M, N); parts: (P, N)
// Launch: grid (ceil(N / COLUMNS), P), block (8, 32). M or N may be 0.
extern "C" __global__ void __launch_bounds__(256) column_sums(
    int M, int N, const Element* __restrict__ x, Sum* __restrict__ parts) {
    const int n = blockIdx.x * COLUMNS + WIDE * threadIdx.x;
    const int begin = int((long long)M * blockIdx.y / gridDim.y), end = int((long long)M * (blockIdx.y + 1) / gridDim.y);
    const bool vector = in_runs<WIDE>(x, N);
    Sum sum[WIDE] = {}, more[WIDE];
    for (int m = begin + threadIdx.y; m < end; m += 32) {
        load_run(x + (long long)m * N, n, N, vector, more);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) sum[j] += more[j];
    }
    add_down(sum);
    if (threadIdx.y == 0) store_run(parts + (long long)blockIdx.y * N, n, N, in_runs<WIDE>(parts, N), sum);
}

// y[n] = scale y[n] + sum over p of parts[p, n]; with scale = 0 y is not read.    parts: (P, N); y: (N,)
// The second row of blocks does the same for `other` with P more rows of parts: (2, P, N).
// Launch: grid (ceil(N / COLUMNS), 1, or 2 with `other`), block (8, 32).
extern "C" __global__ void __launch_bounds__(256) add_parts(
    int P, int N, const Sum* __restrict__ parts, Sum scale, Element* __restrict__ y, Element* __restrict__ other) {
    const int n = blockIdx.x * COLUMNS + WIDE * threadIdx.x;
    if (blockIdx.y > 0) {
        parts += (long long)P * N;
        y = other;
    }
    const bool vector = in_runs<WIDE>(parts, N), vector_y = in_runs<WIDE>(y, 0);
    Sum sum[WIDE] = {}, more[WIDE];
    for (int p = threadIdx.y; p < P; p += 32) {
        load_run(parts + (long long)p * N, n, N, vector, more);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) sum[j] += more[j];
    }
    add_down(sum);
    if (threadIdx.y > 0) return;
    if (scale != Sum(0)) {
        load_run(y, n, N, vector_y, more);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) sum[j] += scale * more[j];
    }
    store_run(y, n, N, vector_y, sum);
}

// The gradient of learned positions: dpositions[t] = scale dpositions[t] + sum over the batch of dx[b, t], and 0 for the
// positions from T on.    dx: (B, T, C); dpositions: (rows, C), of type Result
// Launch: grid (any), block (256).
extern "C" __global__ void __launch_bounds__(256) embedding_backward_positions(
    int B, int T, int C, int rows, const Element* __restrict__ dx, Sum scale, Result* __restrict__ dpositions) {
    const long long used = (long long)T * C;
    const bool vector = in_runs<WIDE>(dx, used);
    each_share<WIDE>((long long)rows * C, [&](auto here) {
        Sum sum[WIDE] = {}, more[WIDE];
        if (scale != Sum(0)) {
            here.load(dpositions, sum);
#pragma unroll
            for (int j = 0; j < WIDE; ++j) sum[j] *= scale;
        }
        const int left = int(max(0LL, min(used - here.first, (long long)WIDE)));
        for (int b = 0; b < B; ++b) {
            load_run(dx + b * used + here.first, 0, left, vector, more);
#pragma unroll
            for (int j = 0; j < WIDE; ++j) sum[j] += more[j];
        }
        here.store(dpositions, sum);
    }, dpositions);
}
