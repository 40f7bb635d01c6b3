// C = alpha op(A) op(B) + beta C on tensor cores: float16 or bfloat16 elements, float32 sums; the arguments and the
// epilogue are those of gemm.cu, and so are ROW_SUMS and split sums.
//
// A block of THREADS threads computes TILE_M x TILE_N; each warp WARP_M x WARP_N, in products of 16 x 8 x 16. STAGES
// tiles of TILE_K are under way at once: asynchronous copies fill the stage after next while this one is computed with.
// In shared memory a tile keeps the order in which the operand is stored (rows padded by 16 bytes, so that the eight rows
// of a matrix load lie in different banks); matrix loads transpose where that order is not the fragment's.
// Operands whose rows are not aligned to 16 bytes are loaded element by element: slower, not wrong.
// Launch: as gemm.cu, with STAGE_BYTES x STAGES bytes of dynamic shared memory. Any M, N, K >= 0.
// Needs sm_80; float16 also runs on sm_75 (with STAGES = 2, whose shared memory is small).
#include "gemm_parts.cuh"
#include "ptx.cuh"

constexpr int WARPS_N = TILE_N / WARP_N, THREADS = TILE_M / WARP_M * WARPS_N * 32;
constexpr int FRAGMENTS_M = WARP_M / 16, FRAGMENTS_N = WARP_N / 8;
constexpr int CHUNK = 8;    // elements in 16 bytes

static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0 && TILE_K % 16 == 0, "whole fragments fill a warp's part");

// A TILE_K x WIDTH piece of an operand in shared memory. Element (k, w) is stored at [w][k] if K_IS_CONTIGUOUS, else [k][w].
template <bool K_IS_CONTIGUOUS, int WIDTH> struct Stage {
    static constexpr int ROWS = K_IS_CONTIGUOUS ? WIDTH : TILE_K, COLUMNS = K_IS_CONTIGUOUS ? TILE_K : WIDTH;
    static constexpr int PITCH = COLUMNS + CHUNK, ELEMENTS = ROWS * PITCH;
    static constexpr int LOADS = ROWS * COLUMNS / (CHUNK * THREADS);
    static_assert(ROWS * COLUMNS % (CHUNK * THREADS) == 0, "each thread copies whole chunks");

    // Starts to copy the piece from k0 and w0 on; what lies beyond K or W becomes 0.
    static __device__ __forceinline__ void fetch(Element* shared, const Element* __restrict__ operand, long long pitch, int w0,
                                                 int W, int k0, int K, bool vector) {
        const int row0 = K_IS_CONTIGUOUS ? w0 : k0, rows = K_IS_CONTIGUOUS ? W : K;
        const int column0 = K_IS_CONTIGUOUS ? k0 : w0, columns = K_IS_CONTIGUOUS ? K : W;
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int chunk = threadIdx.x + i * THREADS;
            const int row = chunk / (COLUMNS / CHUNK), column = chunk % (COLUMNS / CHUNK) * CHUNK;
            const int left = row0 + row < rows ? max(0, min(CHUNK, columns - column0 - column)) : 0;
            const Element* from = operand + (row0 + row) * pitch + column0 + column;
            Element* to = shared + row * PITCH + column;
            if (vector) copy_async_16(to, left ? from : operand, left * int(sizeof(Element)));
            else
                for (int j = 0; j < CHUNK; ++j) to[j] = j < left ? from[j] : narrow<Element>(0.0f);
        }
    }

    // 16 x 16 elements at (k, w) as matrix loads give them. With K_FIRST the four matrices come in the order (k, w),
    // (k + 8, w), (k, w + 8), (k + 8, w + 8), two fragments of B; without, (k, w), (k, w + 8), (k + 8, w) ..., one of A.
    template <bool K_FIRST>
    static __device__ __forceinline__ void read(unsigned (&matrices)[4], const Element* shared, int k, int w) {
        const int lane = threadIdx.x % 32, within = lane % 8, second = lane / 8 % 2 * 8, last = lane / 16 * 8;
        const int dk = K_FIRST ? second : last, dw = K_FIRST ? last : second;
        if (K_IS_CONTIGUOUS) ldmatrix_x4(matrices, shared + (w + dw + within) * PITCH + k + dk);
        else ldmatrix_x4_transposed(matrices, shared + (k + dk + within) * PITCH + w + dw);
    }
};

using StageA = Stage<!TRANSPOSED_A, TILE_M>;
using StageB = Stage<TRANSPOSED_B, TILE_N>;

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
    const bool a_in_chunks = reinterpret_cast<size_t>(A) % 16 == 0 && lda % CHUNK == 0;
    const bool b_in_chunks = reinterpret_cast<size_t>(B) % 16 == 0 && ldb % CHUNK == 0;
    const int steps = tiles_over(K, TILE_K);
    const int first = int((long long)steps * split / splits), end = int((long long)steps * (split + 1) / splits);
    auto fetch = [&](int step) {    // an empty group past the end keeps the count of groups under way right
        if (step < end) {
            Element* stage = stages + step % STAGES * (StageA::ELEMENTS + StageB::ELEMENTS);
            StageA::fetch(stage, A, lda, m0, M, step * TILE_K, K, a_in_chunks);
            StageB::fetch(stage + StageA::ELEMENTS, B, ldb, n0, N, step * TILE_K, K, b_in_chunks);
        }
        copy_async_commit();
    };

    float sums[FRAGMENTS_M][FRAGMENTS_N][4] = {};
    float row_sum[FRAGMENTS_M][4] = {};    // by products with ones, in the warps of the first columns
    const bool sums_rows = ROW_SUMS && n0 + nw == 0;
    const unsigned one = __builtin_bit_cast(unsigned short, narrow<Element>(1.0f)) * 0x10001u, ones[2] = {one, one};

    for (int step = first; step < first + STAGES - 1; ++step) fetch(step);
    for (int step = first; step < end; ++step) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();    // this step's copies are seen by all, and all have left the stage that is filled next
        fetch(step + STAGES - 1);
        const Element* a_stage = stages + step % STAGES * (StageA::ELEMENTS + StageB::ELEMENTS);
        const Element* b_stage = a_stage + StageA::ELEMENTS;
#pragma unroll
        for (int k = 0; k < TILE_K; k += 16) {
            unsigned a[FRAGMENTS_M][4], b[FRAGMENTS_N][2];
#pragma unroll
            for (int i = 0; i < FRAGMENTS_M; ++i) StageA::read<false>(a[i], a_stage, k, mw + 16 * i);
#pragma unroll
            for (int j = 0; j < FRAGMENTS_N; j += 2) {
                unsigned two[4];
                StageB::read<true>(two, b_stage, k, nw + 8 * j);
                b[j][0] = two[0];
                b[j][1] = two[1];
                b[j + 1][0] = two[2];
                b[j + 1][1] = two[3];
            }
#pragma unroll
            for (int i = 0; i < FRAGMENTS_M; ++i) {
                if (sums_rows) mma_m16n8k16(row_sum[i], a[i], ones, Element{});
#pragma unroll
                for (int j = 0; j < FRAGMENTS_N; ++j) mma_m16n8k16(sums[i][j], a[i], b[j], Element{});
            }
        }
    }

    // Lane 4 g + t of a fragment holds rows g and g + 8, columns 2 t and 2 t + 1. Lanes t and t ^ 1 exchange halves, so
    // that each stores four neighbours: the even one of row g, the odd one of row g + 8.
    const Epilogue epilogue = {alpha, beta, bias, residual, saved, activation};
    const bool c_in_fours = in_fours(C, ldc, stride_c) && (!saved || in_fours(saved, ldc)) && (!residual || in_fours(residual, ldc));
    float* raw = splits > 1 ? workspace + (long long)blockIdx.z * M * (N + ROW_SUMS) : nullptr;
    const bool odd = lane % 2;
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
        const int m = m0 + mw + 16 * i + lane / 4 + (odd ? 8 : 0);
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N; ++j) {
            float(&d)[4] = sums[i][j];
            const float x = __shfl_xor_sync(~0u, odd ? d[0] : d[2], 1), y = __shfl_xor_sync(~0u, odd ? d[1] : d[3], 1);
            const float four[4] = {odd ? x : d[0], odd ? y : d[1], odd ? d[2] : x, odd ? d[3] : y};
            const int n = n0 + nw + 8 * j + lane % 4 / 2 * 4;
            if (m >= M || n >= N) continue;
            if (raw) store_four(raw + (long long)m * N, n, N, false, four);
            else epilogue.store(four, C, batch * stride_c + (long long)m * ldc, n, N, c_in_fours);
        }
        if (sums_rows && lane % 4 < 2 && m < M) {    // all columns of a product with ones are equal
            (raw ? raw + (long long)M * N : row_sums)[m] = row_sum[i][odd ? 2 : 0];
        }
    }
}
