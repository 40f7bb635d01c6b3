// C = A B on tensor cores, in tiles of 64 x 64: a warp multiplies 16 x 16 by 16 x 8 in one instruction.
//
// A: (M, K), B: (K, N) in float16, C: (M, N) in float32, all row-major; M and N are multiples of 64, K of 16.
// Each of 4 warps computes 16 rows of the tile. An element has 2 bytes, so the same tile takes half as many sectors.
// Rows of shared memory have 8 elements more, so the 8 rows of a matrix load meet no bank twice. The store of A does:
// its quarter of a warp has 4 rows, and no padding suits both. gemm_tensor.cu is the kernel that trains.
// Launch: grid (N / 64, M / 64), block (128). ptx.cuh has the instructions and the layout of their fragments.
#include "ptx.cuh"

constexpr int TILE = 64, DEPTH = 16, PAD = 8;
using Eight = Run<__half, 8>;    // 16 bytes, moved at once

extern "C" __global__ void tensor(int M, int N, int K, const __half* A, const __half* B, float* C) {
    __shared__ __align__(16) __half As[TILE][DEPTH + PAD], Bs[DEPTH][TILE + PAD];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int m0 = blockIdx.y * TILE, n0 = blockIdx.x * TILE;
    float sums[TILE / 8][4] = {};
    for (int k0 = 0; k0 < K; k0 += DEPTH) {
        const int am = thread / 2, ak = thread % 2 * 8, bk = thread / 8, bn = thread % 8 * 8;
        *reinterpret_cast<Eight*>(&As[am][ak]) = *reinterpret_cast<const Eight*>(A + (m0 + am) * K + k0 + ak);
        *reinterpret_cast<Eight*>(&Bs[bk][bn]) = *reinterpret_cast<const Eight*>(B + (k0 + bk) * N + n0 + bn);
        __syncthreads();
        unsigned a[4];    // 16 x 16 of A
        ldmatrix_x4(a, &As[16 * warp + lane % 16][lane / 16 * 8]);
        for (int j = 0; j < TILE / 8; j += 2) {
            unsigned b[4];    // 16 x 16 of B: two matrices of 16 x 8
            ldmatrix_x4_transposed(b, &Bs[lane % 16][8 * j + lane / 16 * 8]);
            const unsigned left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
            mma_m16n8k16(sums[j], a, left, __half{});
            mma_m16n8k16(sums[j + 1], a, right, __half{});
        }
        __syncthreads();
    }
    for (int j = 0; j < TILE / 8; ++j)
        for (int half = 0; half < 2; ++half) {    // lane 4 g + t has rows g and g + 8, columns 2 t and 2 t + 1
            const int m = m0 + 16 * warp + lane / 4 + 8 * half, n = n0 + 8 * j + lane % 4 * 2;
            *reinterpret_cast<float2*>(C + m * N + n) = make_float2(sums[j][2 * half], sums[j][2 * half + 1]);
        }
}
