// C = A B, one thread for each element of C; neighbouring threads take neighbouring columns.
//
// A: (M, K), B: (K, N), C: (M, N), row-major float32; M is a multiple of 8, N of 32.
// The 32 threads of a warp read one element of A, and 32 neighbours of B in 4 sectors of 32 bytes.
// Launch: grid (N / 32, M / 8), block (32, 8).

extern "C" __global__ void coalesced(int M, int N, int K, const float* A, const float* B, float* C) {
    const int m = blockIdx.y * 8 + threadIdx.y, n = blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
    for (int k = 0; k < K; ++k) sum += A[m * K + k] * B[k * N + n];
    C[m * N + n] = sum;
}
