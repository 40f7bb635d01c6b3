// C = A B, one thread for each element of C; neighbouring threads take neighbouring rows.
//
// A: (M, K), B: (K, N), C: (M, N), row-major float32; M is a multiple of 32, N of 8.
// The 32 threads of a warp read one column of A: 32 words in 32 sectors of 32 bytes, for one element of B.
// Launch: grid (M / 32, N / 8), block (32, 8).

extern "C" __global__ void naive(int M, int N, int K, const float* A, const float* B, float* C) {
    const int m = blockIdx.x * 32 + threadIdx.x, n = blockIdx.y * 8 + threadIdx.y;
    float sum = 0;
    for (int k = 0; k < K; ++k) sum += A[m * K + k] * B[k * N + n];
    C[m * N + n] = sum;
}
