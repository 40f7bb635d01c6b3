// C = alpha op(A) op(B) + beta C, row-major, with a fused epilogue; on the ordinary arithmetic units.
//
// op(A): (M, K), op(B): (K, N), C: (M, N); lda, ldb, ldc count elements from row to row of the arrays as stored.
// TRANSPOSED_A: A is stored (K, M). TRANSPOSED_B: B is stored (N, K). Batch b uses A + b stride_a and so on.
// The epilogue adds bias (N,), keeps the pre-activation, activates, adds a residual: see gemm_parts.cuh.
// ROW_SUMS: row_sums[m] = sum over k of op(A)[m, k] + beta row_sums[m], which in dw = dy^T x is the bias gradient.
// GROUPED: rows of A belong to groups, whose ends: (groups,) only the device knows; see gemm_parts.cuh. Then splits = 1.
//
// A block of THREADS threads computes TILE_M x TILE_N of C; each warp (4 THREAD_M) x (8 THREAD_N), each thread
// THREAD_M x THREAD_N in groups of 4 x 4. Tiles of TILE_K columns of A and rows of B pass through registers into one of
// two shared buffers while the other is computed with: one barrier a tile.
// Launch: grid (tiles of M x tiles of N, 1, batches x splits), block (THREADS). With splits > 1 each block sums over a
// part of K and leaves raw sums in `workspace` for gemm_combine. Any M, N, K >= 0; what lies outside is read as 0.
#include "gemm_parts.cuh"

constexpr int GROUPS_M = THREAD_M / 4, GROUPS_N = THREAD_N / 4;
constexpr int WARP_M = 4 * THREAD_M, WARP_N = 8 * THREAD_N, WARPS_N = TILE_N / WARP_N;
constexpr int THREADS = TILE_M / WARP_M * WARPS_N * 32;
// Two blocks of 256 threads fit on a multiprocessor if each thread has 128 registers; sm_75 needs a few more.
constexpr int BLOCKS = __CUDA_ARCH__ >= 800 ? 512 / THREADS : 1;
constexpr int PAD = 4;    // keeps fours aligned, and the transposing stores off each other's banks

static_assert(TILE_M % WARP_M == 0 && TILE_N % WARP_N == 0, "whole warps fill a tile");
static_assert(TILE_M * TILE_K % (4 * THREADS) == 0 && TILE_N * TILE_K % (4 * THREADS) == 0, "each thread loads whole fours");
static_assert(THREADS % (TILE_K / 4) == 0 && THREADS % (TILE_M / 4) == 0 && THREADS % (TILE_N / 4) == 0, "and whole rows");
static_assert(!ROW_SUMS || THREADS >= TILE_M, "one thread sums each row");

// One thread's share of a TILE_K x WIDTH piece of an operand, on its way from global to shared memory. Element (k, w) of
// the operand is stored at [w][k] if K_IS_CONTIGUOUS, else at [k][w]. `load` goes from piece to piece along K. What can be
// computed again is not kept: the large tile has no register to spare.
template <bool K_IS_CONTIGUOUS, int WIDTH> struct Piece {
    static constexpr int LOADS = WIDTH * TILE_K / (4 * THREADS);
    static constexpr int FOURS = (K_IS_CONTIGUOUS ? TILE_K : WIDTH) / 4;    // in a stored row of the piece
    static constexpr int APART = THREADS / FOURS;                            // stored rows between this thread's fours
    const Element* at;    // this thread's first four
    int width_left;       // elements from it on to the end of the operand's width
    bool vector;
    Four<Sum> held[LOADS];

    static __device__ __forceinline__ int major() { return threadIdx.x / FOURS; }
    static __device__ __forceinline__ int minor() { return threadIdx.x % FOURS * 4; }

    __device__ __forceinline__ Piece(const Element* operand, int pitch, int w0, int W, int k0)
        : vector(in_runs<4>(operand, pitch)) {
        const int w = K_IS_CONTIGUOUS ? min(w0 + major(), W - 1) : w0 + minor(), k = k0 + (K_IS_CONTIGUOUS ? minor() : major());
        at = operand + (K_IS_CONTIGUOUS ? (long long)w * pitch + k : (long long)k * pitch + w);
        width_left = W - w;
    }

    // `k_left` elements of K remain from this piece's first on. Rows past the width repeat its last: nobody stores them.
    __device__ __forceinline__ void load(int pitch, int k_left) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int below = !K_IS_CONTIGUOUS ? i * APART : i == 0 ? 0 : min(i * APART, width_left - 1);
            const int four_left = K_IS_CONTIGUOUS ? k_left - minor() : major() + below < k_left ? width_left : 0;
            load_run(at + (long long)below * pitch, 0, four_left, vector, held[i].at);
        }
        at += K_IS_CONTIGUOUS ? TILE_K : (long long)TILE_K * pitch;
    }

    __device__ __forceinline__ void store(Sum (*shared)[WIDTH + PAD]) const {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int row = major() + i * APART;
            if (K_IS_CONTIGUOUS) {
#pragma unroll
                for (int j = 0; j < 4; ++j) shared[minor() + j][row] = held[i].at[j];
            } else {
                *reinterpret_cast<Four<Sum>*>(&shared[row][minor()]) = held[i];
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gemm(
    int M, int N, int K, Sum alpha, const Element* __restrict__ A, int lda, long long stride_a, const Element* __restrict__ B,
    int ldb, long long stride_b, Sum beta, Result* C, int ldc, long long stride_c, const Element* __restrict__ bias,
    const Result* residual, Result* saved, Sum* row_sums, int splits, Sum* workspace, int groups,
    const long long* __restrict__ ends) {
    __shared__ __align__(16) Sum As[2][TILE_K][TILE_M + PAD];
    __shared__ __align__(16) Sum Bs[2][TILE_K][TILE_N + PAD];

    const int tiles_n = tiles_over(N, TILE_N), batch = blockIdx.z / splits, split = blockIdx.z % splits;
    const int tiles_m = GROUPED == GROUPED_ROWS ? gridDim.x / tiles_n : tiles_over(M, TILE_M);
    Tile tile = tile_of(blockIdx.x, tiles_m, tiles_n, 8);  // on an H100 16 take 1.2 times as long for N = 768
    __shared__ Rows rows;
    if (!enter_group(rows, tile, TILE_M, M, K, A, lda, B, ldb, stride_b, batch, groups, ends)) return;
    const int m0 = tile.m * TILE_M, n0 = tile.n * TILE_N;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int mt = warp / WARPS_N * WARP_M + lane / 8 * 4, nt = warp % WARPS_N * WARP_N + lane % 8 * 4;

    A += batch * stride_a;
    B += batch * stride_b;
    const int steps = tiles_over(K, TILE_K);
    const int k_begin = int((long long)steps * split / splits) * TILE_K;
    const int k_end = min(K, int((long long)steps * (split + 1) / splits) * TILE_K);

    Sum sums[THREAD_M][THREAD_N] = {};
    const bool sums_a_row = ROW_SUMS && tile.n == 0 && threadIdx.x < TILE_M;
    Sum row_sum = 0;    // of row m0 + threadIdx.x, in the first tile of each row of tiles
    Piece<!TRANSPOSED_A, TILE_M> next_a(A, lda, m0, M, k_begin);
    Piece<TRANSPOSED_B, TILE_N> next_b(B, ldb, n0, N, k_begin);
    int buffer = 0;
    if (k_begin < k_end) {
        next_a.load(lda, k_end - k_begin);
        next_b.load(ldb, k_end - k_begin);
        next_a.store(As[0]);
        next_b.store(Bs[0]);
    }
    __syncthreads();
    for (int k0 = k_begin; k0 < k_end; k0 += TILE_K) {
        const bool more = k0 + TILE_K < k_end;
        if (more) {
            next_a.load(lda, k_end - k0 - TILE_K);
            next_b.load(ldb, k_end - k0 - TILE_K);
        }
#pragma unroll
        for (int k = 0; k < TILE_K; ++k) {
            Four<Sum> a[GROUPS_M], b[GROUPS_N];
#pragma unroll
            for (int g = 0; g < GROUPS_M; ++g) a[g] = *reinterpret_cast<const Four<Sum>*>(&As[buffer][k][mt + 16 * g]);
#pragma unroll
            for (int g = 0; g < GROUPS_N; ++g) b[g] = *reinterpret_cast<const Four<Sum>*>(&Bs[buffer][k][nt + 32 * g]);
#pragma unroll
            for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
                for (int j = 0; j < THREAD_N; ++j) sums[i][j] += a[i / 4].at[i % 4] * b[j / 4].at[j % 4];
        }
        if (sums_a_row) {
#pragma unroll 1    // unrolled, it takes registers from the loop above
            for (int k = 0; k < TILE_K; ++k) row_sum += As[buffer][k][threadIdx.x];
        }
        if (more) {
            next_a.store(As[buffer ^ 1]);
            next_b.store(Bs[buffer ^ 1]);
        }
        __syncthreads();
        buffer ^= 1;
    }

    leave_group(rows, tile, M, C, ldc);
    const Epilogue epilogue = {alpha, beta, bias, residual, saved};
    const bool c_in_fours = epilogue.in_runs_of<4>(C, ldc, stride_c);
    Sum* raw = SPLIT ? workspace + (long long)blockIdx.z * M * (N + ROW_SUMS) : nullptr;
#pragma unroll
    for (int i = 0; i < THREAD_M; ++i) {
        const int m = m0 + mt + i / 4 * 16 + i % 4;
        if (m >= M) continue;
        const long long row = batch * stride_c + (long long)m * ldc;
#pragma unroll
        for (int g = 0; g < GROUPS_N; ++g) {
            const int n = n0 + nt + 32 * g;
            const Sum four[4] = {sums[i][4 * g], sums[i][4 * g + 1], sums[i][4 * g + 2], sums[i][4 * g + 3]};
            if (SPLIT) store_run(raw + (long long)m * N, n, N, false, four);
            else epilogue.store(four, epilogue.read<4>(C, row, n, N, c_in_fours), C, row, n, N, c_in_fours);
        }
    }
    if (sums_a_row && m0 + threadIdx.x < M) {
        const int m = m0 + threadIdx.x;
        store_row_sum((SPLIT ? raw + (long long)M * N : row_sums) + m, beta, row_sum);
    }
}
