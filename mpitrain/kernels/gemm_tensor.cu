// C = alpha op(A) op(B) + beta C on tensor cores: float16 or bfloat16 elements, float32 sums; the arguments and the
// epilogue are those of gemm.cu, and so are ROW_SUMS and split sums.
//
// A block of THREADS threads computes TILE_M x TILE_N; each warp WARP_M x WARP_N, in products of 16 x 8 x 16. STAGES
// tiles of TILE_K are under way at once: asynchronous copies fill the stage after next while this one is computed with.
// In shared memory a tile keeps the order in which the operand is stored; matrix loads transpose where that order is not
// the fragment's. Launch: as gemm.cu, with STAGES x STAGE elements of dynamic shared memory. Any M, N, K >= 0.
// Needs sm_80; float16 also runs on sm_75 (with STAGES = 2, whose shared memory is small).
#include "gemm_parts.cuh"
#include "tensor_tile.cuh"

constexpr int WARPS_N = TILE_N / WARP_N, THREADS = TILE_M / WARP_M * WARPS_N * 32;
constexpr int FRAGMENTS_M = WARP_M / 16, FRAGMENTS_N = WARP_N / 8;

static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0 && TILE_K % 16 == 0, "whole fragments fill a warp's part");

// A piece of A and one of B, each in the order in which the operand is stored.
using PieceA = SharedTile<TRANSPOSED_A ? TILE_K : TILE_M, TRANSPOSED_A ? TILE_M : TILE_K, THREADS>;
using PieceB = SharedTile<TRANSPOSED_B ? TILE_N : TILE_K, TRANSPOSED_B ? TILE_K : TILE_N, THREADS>;
constexpr int STAGE = PieceA::ELEMENTS + PieceB::ELEMENTS;

extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm_tensor(
    int M, int N, int K, float alpha, const Element* __restrict__ A, int lda, long long stride_a,
    const Element* __restrict__ B, int ldb, long long stride_b, float beta, Result* C, int ldc, long long stride_c,
    const Element* __restrict__ bias, const Result* residual, Result* saved, int activation, float* row_sums,
    int splits, float* workspace) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    Element* stages = reinterpret_cast<Element*>(dynamic_shared);

    const int tiles_n = tiles_over(N, TILE_N), batch = blockIdx.z / splits, split = blockIdx.z % splits;
    const Tile tile = tile_of(blockIdx.x, tiles_over(M, TILE_M), tiles_n);
    const int m0 = tile.m * TILE_M, n0 = tile.n * TILE_N;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int mw = warp / WARPS_N * WARP_M, nw = warp % WARPS_N * WARP_N;

    A += batch * stride_a;
    B += batch * stride_b;
    const bool a_in_chunks = in_chunks(A, lda), b_in_chunks = in_chunks(B, ldb);
    const int steps = tiles_over(K, TILE_K);
    const int first = int((long long)steps * split / splits), end = int((long long)steps * (split + 1) / splits);
    auto fetch = [&](int step) {    // an empty group past the end keeps the count of groups under way right
        if (step < end) {
            Element *a_piece = stages + step % STAGES * STAGE, *b_piece = a_piece + PieceA::ELEMENTS;
            const int k0 = step * TILE_K;
            if (TRANSPOSED_A) PieceA::fetch(a_piece, A, lda, k0, K, m0, M, a_in_chunks);
            else PieceA::fetch(a_piece, A, lda, m0, M, k0, K, a_in_chunks);
            if (TRANSPOSED_B) PieceB::fetch(b_piece, B, ldb, n0, N, k0, K, b_in_chunks);
            else PieceB::fetch(b_piece, B, ldb, k0, K, n0, N, b_in_chunks);
        }
        copy_async_commit();
    };

    float sums[FRAGMENTS_M][FRAGMENTS_N][4] = {};
    float row_sum[FRAGMENTS_M][4] = {};    // by products with ones, in the warps of the first columns
    const bool sums_rows = ROW_SUMS && n0 + nw == 0;
    const unsigned ones[2] = {packed(1.0f, 1.0f), packed(1.0f, 1.0f)};

    for (int step = first; step < first + STAGES - 1; ++step) fetch(step);
    for (int step = first; step < end; ++step) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();    // this step's copies are seen by all, and all have left the stage that is filled next
        fetch(step + STAGES - 1);
        const Element *a_piece = stages + step % STAGES * STAGE, *b_piece = a_piece + PieceA::ELEMENTS;
#pragma unroll
        for (int k = 0; k < TILE_K; k += 16) {
            unsigned a[FRAGMENTS_M][4], b[FRAGMENTS_N / 2][2][2];
#pragma unroll
            for (int i = 0; i < FRAGMENTS_M; ++i) {
                if (TRANSPOSED_A) PieceA::a_from_rows_of_k(a[i], a_piece, mw + 16 * i, k);
                else PieceA::a_from_rows_of_m(a[i], a_piece, mw + 16 * i, k);
            }
#pragma unroll
            for (int j = 0; j < FRAGMENTS_N / 2; ++j) {
                if (TRANSPOSED_B) PieceB::b_from_rows_of_n(b[j], b_piece, k, nw + 16 * j);
                else PieceB::b_from_rows_of_k(b[j], b_piece, k, nw + 16 * j);
            }
#pragma unroll
            for (int i = 0; i < FRAGMENTS_M; ++i) {
                if (sums_rows) mma_m16n8k16(row_sum[i], a[i], ones, Element{});
#pragma unroll
                for (int j = 0; j < FRAGMENTS_N; ++j) mma_m16n8k16(sums[i][j], a[i], b[j / 2][j % 2], Element{});
            }
        }
    }

    const Epilogue epilogue = {alpha, beta, bias, residual, saved, activation};
    const bool c_in_fours = in_fours(C, ldc, stride_c) && (!saved || in_fours(saved, ldc)) && (!residual || in_fours(residual, ldc));
    float* raw = splits > 1 ? workspace + (long long)blockIdx.z * M * (N + ROW_SUMS) : nullptr;
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N; ++j) {
            const FourOfFragment four(sums[i][j]);
            const int m = m0 + mw + 16 * i + four.row, n = n0 + nw + 8 * j + four.column;
            if (m >= M) continue;
            if (raw) store_four(raw + (long long)m * N, n, N, false, four.at);
            else epilogue.store(four.at, C, batch * stride_c + (long long)m * ldc, n, N, c_in_fours);
        }
        // All columns of a product with ones are equal: lane 4 g writes row g, lane 4 g + 1 row g + 8.
        const int m = m0 + mw + 16 * i + lane / 4 + lane % 2 * 8;
        if (sums_rows && lane % 4 < 2 && m < M) (raw ? raw + (long long)M * N : row_sums)[m] = row_sum[i][lane % 2 * 2];
    }
}
