// C = alpha op(A) op(B) + beta C on tensor cores: float16, bfloat16 or float32 elements, float32 sums; the arguments and the
// epilogue are those of gemm.cu, and so are ROW_SUMS and split sums. Of float32, three products of TF32 make one.
//
// A block of THREADS threads computes TILE_M x TILE_N; each warp WARP_M x WARP_N, in products of 16 x 8 x SLICE. STAGES
// tiles of TILE_K are under way at once: asynchronous copies fill the stage after next while this one is computed with. A
// thread copies the same chunks of each tile, so its two pointers run along K. Row sums are products with a column of ones.
// In shared memory a tile keeps the order in which the operand is stored; matrix loads transpose where that order is not
// the fragment's. Sums pass through shared memory once more on their way out, so that a warp writes whole rows of its part.
// CHUNKED: both operands can be copied 16 bytes at a time, whatever the batch; else they are copied element by element.
// Launch: as gemm.cu, with STAGES x STAGE elements of dynamic shared memory. Any M, N, K >= 0.
// Needs sm_80; float16 also runs on sm_75 (with STAGES = 2, whose shared memory is small).
#include "gemm_parts.cuh"
#include "tensor_tile.cuh"

constexpr int WARPS_N = TILE_N / WARP_N, THREADS = TILE_M / WARP_M * WARPS_N * 32;
constexpr int FRAGMENTS_M = WARP_M / 16, FRAGMENTS_N = WARP_N / 8, SLICES = TILE_K / SLICE;
// Row sums are products with a column of ones. Of the warps with the same rows, each sums up so many fragments.
constexpr int SUMMED = (FRAGMENTS_M + WARPS_N - 1) / WARPS_N;
// As many blocks share a multiprocessor's registers as leave each thread 64 beside its sums, of float32 128, but no more than four.
constexpr int ROOM = 65536 / (THREADS * (WARP_M * WARP_N / 32 + (sizeof(Element) == 4 ? 128 : 64)));
constexpr int BLOCKS = __CUDA_ARCH__ < 800 || ROOM < 1 ? 1 : ROOM < 4 ? ROOM : 4;

static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0 && SLICES % 2 == 0, "whole fragments fill a warp's part, by turns in two buffers");

// A piece of A and one of B, each in the order in which the operand is stored.
using CopiesA = Copies<!TRANSPOSED_A, TILE_M, TILE_K, THREADS>;
using CopiesB = Copies<TRANSPOSED_B, TILE_N, TILE_K, THREADS>;
using PieceA = CopiesA::Tile;
using PieceB = CopiesB::Tile;
constexpr int STAGE = PieceA::ELEMENTS + PieceB::ELEMENTS;

// Sixteen rows of a warp's sums on their way out; the pitch keeps eight rows of pairs in different banks.
constexpr int OUT_PITCH = WARP_N + 8, OUT_FLOATS = 16 * OUT_PITCH;
constexpr int WIDE = RUN<Result>;
// Lanes that move one row, of a width that they divide. Two lanes move 32 bytes or more: a whole sector.
constexpr int ROW_LANES = WARP_N % 32 == 0 ? WARP_N / WIDE : 2, RUNS = WARP_N / (ROW_LANES * WIDE);
constexpr int ROWS_AT_ONCE = 32 / ROW_LANES, ROUNDS = 16 / ROWS_AT_ONCE;
static_assert(THREADS / 32 * OUT_FLOATS * 4 <= STAGES * STAGE * sizeof(Element), "what goes out fits where the pieces were");

// A lane's part of a row on its way out. Of two fours, neighbouring lanes read different ones first: eight lanes meet no bank
// twice.
__device__ __forceinline__ void load_out(const float* part, int lane, float (&out)[WIDE]) {
    const Four<float>* fours = reinterpret_cast<const Four<float>*>(part);
    const bool flip = WIDE > 4 && (ROW_LANES < 8 ? lane : lane ^ lane / 4) % 2;
    const Four<float> one = fours[flip], other = fours[WIDE > 4 && !flip];
#pragma unroll
    for (int i = 0; i < WIDE; ++i) out[i] = (i < 4) != flip ? one.at[i % 4] : other.at[i % 4];
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gemm_tensor(
    int M, int N, int K, float alpha, const Element* __restrict__ A, int lda, long long stride_a,
    const Element* __restrict__ B, int ldb, long long stride_b, float beta, Result* C, int ldc, long long stride_c,
    const Element* __restrict__ bias, const Result* residual, Result* saved, float* row_sums, int splits,
    float* workspace, int groups, const long long* __restrict__ ends) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    Element* stages = reinterpret_cast<Element*>(dynamic_shared);

    const int tiles_n = tiles_over(N, TILE_N), batch = blockIdx.z / splits, split = blockIdx.z % splits;
    // The blocks that a large GPU runs at once cover a square of C if these are 2048 rows of it.
    const int tiles_m = GROUPED == GROUPED_ROWS ? gridDim.x / tiles_n : tiles_over(M, TILE_M);
    Tile tile = tile_of(blockIdx.x, tiles_m, tiles_n, 2048 / TILE_M);
    __shared__ Rows rows;
    if (!enter_group(rows, tile, TILE_M, M, K, A, lda, B, ldb, stride_b, batch, groups, ends)) return;
    const int m0 = tile.m * TILE_M, n0 = tile.n * TILE_N;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int mw = warp / WARPS_N * WARP_M, nw = warp % WARPS_N * WARP_N;

    A += batch * stride_a;
    B += batch * stride_b;
    const int steps = tiles_over(K, TILE_K);
    const int first = int((long long)steps * split / splits), end = int((long long)steps * (split + 1) / splits);
    const int k_end = min(K, end * TILE_K);    // behind it copies bring zeros, and read nothing
    CopiesA next_a(A, lda, m0, M, first * TILE_K, k_end);
    CopiesB next_b(B, ldb, n0, N, first * TILE_K, k_end);
    auto fetch = [&](int stage, int part, int parts) {
        next_a.fetch(stages + stage * STAGE, lda, CHUNKED, part, parts);
        next_b.fetch(stages + stage * STAGE + PieceA::ELEMENTS, ldb, CHUNKED, part, parts);
        if (part + 1 == parts) copy_async_commit();
    };
    unsigned a[2][FRAGMENTS_M][4], b[2][FRAGMENTS_N][2];    // of a slice of K, and of the next one
    auto load = [&](int stage, int k, int buffer) {
        const Element *a_piece = stages + stage * STAGE, *b_piece = a_piece + PieceA::ELEMENTS;
#pragma unroll
        for (int i = 0; i < FRAGMENTS_M; ++i) {
            if (TRANSPOSED_A) PieceA::a_from_rows_of_k(a[buffer][i], a_piece, mw + 16 * i, k);
            else PieceA::a_from_rows_of_m(a[buffer][i], a_piece, mw + 16 * i, k);
        }
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N / 2; ++j) {
            if (TRANSPOSED_B) PieceB::b_from_rows_of_n(b[buffer][2 * j], b[buffer][2 * j + 1], b_piece, k, nw + 16 * j);
            else PieceB::b_from_rows_of_k(b[buffer][2 * j], b[buffer][2 * j + 1], b_piece, k, nw + 16 * j);
        }
    };

    float sums[FRAGMENTS_M][FRAGMENTS_N][4] = {};
    const bool sums_rows = ROW_SUMS && tile.n == 0;    // in the first tile of each row of tiles
    float row_sums_of[SUMMED][1][4] = {};

#pragma unroll 1
    for (int s = 0; s < STAGES - 1; ++s) fetch(s, 0, 1);
    copy_async_wait<STAGES - 2>();
    __syncthreads();
    load(0, 0, 0);
    int stage = 0, free = STAGES - 1;    // the stage that is computed with, and the one that is filled next
    for (int step = first; step < end; ++step) {
        // Each slice loads the next one, and starts a share of the copies: tensor cores wait for neither.
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            fetch(free, slice, SLICES);
            if (slice + 1 < SLICES) {
                load(stage, SLICE * (slice + 1), (slice + 1) % 2);
            } else {
                free = stage;
                stage = stage + 1 == STAGES ? 0 : stage + 1;
                copy_async_wait<STAGES - 2>();
                __syncthreads();    // the next stage is seen by all, and all have left the one that is filled then
                load(stage, 0, 0);
            }
#pragma unroll
            for (int i = 0; i < FRAGMENTS_M; ++i) multiply_add(sums[i], a[slice % 2][i], b[slice % 2], Element{});
            if (sums_rows) {
                const unsigned ones[1][2] = {packed(1.0f, 1.0f), packed(1.0f, 1.0f)};
#pragma unroll
                for (int i = 0; i < FRAGMENTS_M; ++i)
                    if (i % WARPS_N == warp % WARPS_N)
                        multiply_add(row_sums_of[i / WARPS_N], a[slice % 2][i], ones, Element{});
            }
        }
    }

    copy_async_wait<0>();
    __syncthreads();    // the pieces are done with: their memory is free for what goes out
    leave_group(rows, tile, M, C, ldc);
    const Epilogue epilogue = {alpha, beta, bias, residual, saved};
    const bool vector = epilogue.in_runs_of<WIDE>(C, ldc, stride_c);
    float* raw = SPLIT ? workspace + (long long)blockIdx.z * M * (N + ROW_SUMS) : nullptr;
    const bool raw_vector = in_runs<WIDE>(raw, N);
    float* out = reinterpret_cast<float*>(dynamic_shared) + warp * OUT_FLOATS;
#pragma unroll 1    // unrolled, its instructions come from memory, not from their caches
    for (int i = 0; i < FRAGMENTS_M; ++i) {
        const int m_first = m0 + mw + 16 * i + lane / ROW_LANES, n_first = n0 + nw + lane % ROW_LANES * WIDE;
        Epilogue::Read<WIDE> read[ROUNDS][RUNS];
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int c = 0; c < RUNS; ++c) {
                const int m = m_first + r * ROWS_AT_ONCE, n = n_first + c * ROW_LANES * WIDE;
                if (!SPLIT && m < M) read[r][c] = epilogue.read<WIDE>(C, batch * stride_c + (long long)m * ldc, n, N, vector);
            }
        __syncwarp();    // the rows before are out
#pragma unroll
        for (int fragment = 0; fragment < FRAGMENTS_M; ++fragment) {
            if (fragment != i) continue;    // registers have no index
#pragma unroll
            for (int j = 0; j < FRAGMENTS_N; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half)    // lane 4 g + t holds rows g and g + 8, columns 2 t and 2 t + 1
                    *reinterpret_cast<float2*>(out + (lane / 4 + 8 * half) * OUT_PITCH + 8 * j + lane % 4 * 2) =
                        make_float2(sums[fragment][j][2 * half], sums[fragment][j][2 * half + 1]);
        }
        __syncwarp();
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int row = r * ROWS_AT_ONCE + lane / ROW_LANES, m = m_first + r * ROWS_AT_ONCE;
            if (m >= M) continue;
#pragma unroll
            for (int c = 0; c < RUNS; ++c) {
                const int column = (c * ROW_LANES + lane % ROW_LANES) * WIDE, n = n0 + nw + column;
                float run[WIDE];
                load_out(out + row * OUT_PITCH + column, lane, run);
                if (SPLIT) store_run(raw + (long long)m * N, n, N, raw_vector, run);
                else epilogue.store(run, read[r][c], C, batch * stride_c + (long long)m * ldc, n, N, vector);
            }
        }
    }
    if (!sums_rows || lane % 4 != 0) return;
    float* summed = SPLIT ? raw + (long long)M * N : row_sums;
#pragma unroll
    for (int i = 0; i < SUMMED; ++i) {
        const int fragment = i * WARPS_N + warp % WARPS_N, m = m0 + mw + 16 * fragment + lane / 4;
        if (fragment >= FRAGMENTS_M) continue;
        if (m < M) store_row_sum(summed + m, beta, row_sums_of[i][0][0]);
        if (m + 8 < M) store_row_sum(summed + m + 8, beta, row_sums_of[i][0][2]);
    }
}
