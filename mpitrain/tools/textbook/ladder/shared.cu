// C = A B in tiles of 16 x 16 that pass through shared memory, one thread for each element of a tile.
//
// A: (M, K), B: (K, N), C: (M, N), row-major float32; M, N and K are multiples of 16.
// A block loads each tile of A and B once, and each element of it is multiplied 16 times.
// Launch: grid (N / 16, M / 16), block (16, 16).

constexpr int TILE = 16;

extern "C" __global__ void shared(int M, int N, int K, const float* A, const float* B, float* C) {
    __shared__ float As[TILE][TILE], Bs[TILE][TILE];
    const int x = threadIdx.x, y = threadIdx.y;
    const int m = blockIdx.y * TILE + y, n = blockIdx.x * TILE + x;
    float sum = 0;
    for (int k0 = 0; k0 < K; k0 += TILE) {
        As[y][x] = A[m * K + k0 + x];
        Bs[y][x] = B[(k0 + y) * N + n];
        __syncthreads();    // the tiles are complete
        for (int k = 0; k < TILE; ++k) sum += As[y][k] * Bs[k][x];
        __syncthreads();    // all threads have read the tiles, so the next ones can replace them
    }
    C[m * N + n] = sum;
}
