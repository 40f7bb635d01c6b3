// C = A B in tiles of 64 x 64: shared memory as before, and 4 x 4 sums in the registers of each thread.
//
// A: (M, K), B: (K, N), C: (M, N), row-major float32; M and N are multiples of 64, K of 16.
// For each k a thread reads 4 elements of A and 4 of B from shared memory, and multiplies 16 times.
// Its rows and columns are 16 apart. A warp has two rows of 16 threads, and no two of its words meet in a bank.
// Launch: grid (N / 64, M / 64), block (16, 16).

constexpr int TILE = 64, DEPTH = 16, SIDE = 16, EACH = TILE / SIDE;

extern "C" __global__ void registers(int M, int N, int K, const float* A, const float* B, float* C) {
    __shared__ float As[TILE][DEPTH], Bs[DEPTH][TILE + SIDE];    // two rows are 16 banks apart
    const int x = threadIdx.x, y = threadIdx.y;
    const int m0 = blockIdx.y * TILE, n0 = blockIdx.x * TILE;
    float sums[EACH][EACH] = {};
    for (int k0 = 0; k0 < K; k0 += DEPTH) {
        for (int i = 0; i < EACH; ++i) {
            As[y + SIDE * i][x] = A[(m0 + y + SIDE * i) * K + k0 + x];
            Bs[y][x + SIDE * i] = B[(k0 + y) * N + n0 + x + SIDE * i];
        }
        __syncthreads();
        for (int k = 0; k < DEPTH; ++k) {
            float a[EACH], b[EACH];
            for (int i = 0; i < EACH; ++i) {
                a[i] = As[y + SIDE * i][k];
                b[i] = Bs[k][x + SIDE * i];
            }
            for (int i = 0; i < EACH; ++i)
                for (int j = 0; j < EACH; ++j) sums[i][j] += a[i] * b[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < EACH; ++i)
        for (int j = 0; j < EACH; ++j) C[(m0 + y + SIDE * i) * N + n0 + x + SIDE * j] = sums[i][j];
}
