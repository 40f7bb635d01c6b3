// Sums down the columns of a matrix, in two steps and a fixed order.
#include "reduce.cuh"

// parts[p, n] = sum over the rows m of part p of x[m, n].    x: (M, N); parts: (P, N)
// 32 columns a block, 8 rows at a time. Launch: grid (ceil(N / 32), P), block (32, 8). M or N may be 0.
extern "C" __global__ void __launch_bounds__(256) column_sums(int M, int N, const Element* __restrict__ x, Sum* __restrict__ parts) {
    __shared__ Sum sums[8][33];
    const int n = blockIdx.x * 32 + threadIdx.x;
    const int begin = int((long long)M * blockIdx.y / gridDim.y), end = int((long long)M * (blockIdx.y + 1) / gridDim.y);
    Sum sum = 0;
    if (n < N)
        for (int m = begin + threadIdx.y; m < end; m += 8) sum += wide(x[(long long)m * N + n]);
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || n >= N) return;
    for (int i = 1; i < 8; ++i) sum += sums[i][threadIdx.x];
    parts[(long long)blockIdx.y * N + n] = sum;
}

// y[n] = scale y[n] + sum over p of parts[p, n]; with scale = 0 y is not read.    parts: (P, N)
// 32 columns a block, 8 parts at a time. Launch: grid (ceil(N / 32)), block (32, 8).
extern "C" __global__ void __launch_bounds__(256) add_parts(
    int P, int N, const Sum* __restrict__ parts, Sum scale, Element* __restrict__ y) {
    __shared__ Sum sums[8][33];
    const int n = blockIdx.x * 32 + threadIdx.x;
    Sum sum = 0;
    if (n < N)
        for (int p = threadIdx.y; p < P; p += 8) sum += parts[(long long)p * N + n];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || n >= N) return;
    for (int i = 1; i < 8; ++i) sum += sums[i][threadIdx.x];
    y[n] = narrow<Element>(sum + (scale != Sum(0) ? scale * wide(y[n]) : Sum(0)));
}

// The gradient of learned positions: dpositions[t] = scale dpositions[t] + sum over the batch of dx[b, t], and 0 for the
// positions from T on.    dx: (B, T, C); dpositions: (rows, C), of type Result
// One thread an element. Launch: grid (any), block (256).
extern "C" __global__ void __launch_bounds__(256) embedding_backward_positions(
    int B, int T, int C, int rows, const Element* __restrict__ dx, Sum scale, Result* __restrict__ dpositions) {
    const long long used = (long long)T * C;
    for (long long i = blockIdx.x * 256LL + threadIdx.x; i < (long long)rows * C; i += gridDim.x * 256LL) {
        Sum sum = scale != Sum(0) ? scale * wide(dpositions[i]) : Sum(0);
        if (i < used)
            for (int b = 0; b < B; ++b) sum += wide(dx[b * used + i]);
        dpositions[i] = narrow<Result>(sum);
    }
}
