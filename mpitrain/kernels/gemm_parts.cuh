// What the matrix products share: the order of the tiles, the part of K that a block sums over, and the epilogue.
#pragma once
#include "activation.cuh"

struct Tile { int m, n; };    // counted in tiles

// Blocks with neighbouring numbers take tiles from `rows` rows of tiles, column by column: what they read stays in L2.
__device__ __forceinline__ Tile tile_of(int block, int tiles_m, int tiles_n, int rows) {
    const int group = rows * tiles_n, first = block / group * rows, height = min(tiles_m - first, rows);
    return {first + block % group % height, block % group / height};
}

__device__ __forceinline__ int tiles_over(int count, int size) { return (count + size - 1) / size; }

// GROUPED: the products of a mixture of experts. Group g has what precedes ends[g] and follows the group before.
// GROUPED_ROWS: it has rows of A and of C, and B of batch g. Rows behind the last group's become 0.
// GROUPED_SUMS: it has rows of A, stored transposed, and of B: a part of K; its product is C of batch g.
// The host knows no ends. So a grid has blocks for as many tiles of rows as there can be, and those without a tile leave at once.
#ifndef GROUPED
#define GROUPED 0
#endif
#define GROUPED_ROWS 1
#define GROUPED_SUMS 2

struct Rows { int group, first, count, tile; };    // tile: within the group; count 0: there is none

__device__ __forceinline__ Rows rows_in(int group, const long long* __restrict__ ends) {
    const int first = group > 0 ? int(ends[group - 1]) : 0;
    return {group, first, int(ends[group]) - first, 0};
}

// The rows of tile `tile`, counted over all groups; those of nobody are those of group `groups`. The walk reads ends that all
// blocks read: E steps beside hundreds of steps along K.
__device__ __forceinline__ Rows rows_of(int tile, int height, int M, int groups, const long long* __restrict__ ends) {
    int first = 0;
    for (int g = 0;; ++g) {
        const int end = g < groups ? int(ends[g]) : M, tiles = tiles_over(end - first, height);
        if (tile < tiles) return {g, first, end - first, tile};
        if (g == groups) return {g, end, 0, 0};
        tile -= tiles;
        first = end;
    }
}

// What a block of a grouped product computes: its tile, M and K become those of its group, A and B begin there. `rows` lies in shared
// memory: the large tile has no register to spare for what comes after its loop, behind which `leave_group` reads it again.
// Returns whether the block has rows. height: of a tile; all threads of the block call it
__device__ __forceinline__ bool enter_group(Rows& rows, Tile& tile, int height, int& M, int& K, const Element* __restrict__& A,
                                            int lda, const Element* __restrict__& B, int ldb, long long stride_b, int batch, int groups,
                                            const long long* __restrict__ ends) {
    if (!GROUPED) return true;
    if (threadIdx.x == 0) rows = GROUPED == GROUPED_ROWS ? rows_of(tile.m, height, M, groups, ends) : rows_in(batch, ends);
    __syncthreads();
    A += (long long)rows.first * lda;
    if (GROUPED == GROUPED_SUMS) {
        K = rows.count;
        B += (long long)rows.first * ldb;
        return true;
    }
    tile.m = rows.tile;
    M = rows.count;
    if (rows.group < groups) B += rows.group * stride_b;
    else K = 0;
    return M > 0;
}

// The rows of the group that the block stores: C begins there.
__device__ __forceinline__ void leave_group(const Rows& rows, Tile& tile, int& M, Result*& C, int ldc) {
    if (GROUPED != GROUPED_ROWS) return;
    tile.m = rows.tile;
    M = rows.count;
    C += (long long)rows.first * ldc;
}

// ROW_SUMS: the sum over k of op(A)[m, k], added to beta times what is there; in dw = dy^T x the bias gradient.
__device__ __forceinline__ void store_row_sum(Sum* to, Sum beta, Sum sum) { *to = BETA ? plus(beta * *to, sum) : sum; }

// The epilogue of N neighbours of row m, from column n on:
//     z = alpha sum + beta C + bias[n];  saved = z;  C = activation(z) + residual
// saved and residual have the shape and pitch of C. What of this there is, macros say: what is not asked for takes no
// instructions. BETA, BIAS, SAVED, RESIDUAL: 0 or 1. ACTIVATION: activation.cuh; with ACTIVATION_GELU_BACKWARD activation(z) is z
// times GELU's derivative at what C holds. SPLIT: 1 if sums go to the workspace, for the epilogue of gemm_combine.cu.
struct Epilogue {
    static constexpr bool READS_C = BETA || ACTIVATION == ACTIVATION_GELU_BACKWARD;
    Sum alpha, beta;
    const Element* bias;
    const Result* residual;
    Result* saved;

    // Whether these rows of C can be moved in runs of this length.
    template <int RUN> __device__ __forceinline__ bool in_runs_of(const Result* c, int pitch, long long stride) const {
        return in_runs<RUN>(c, pitch, stride) && (!SAVED || in_runs<RUN>(saved, pitch)) &&
               (!RESIDUAL || in_runs<RUN>(residual, pitch));
    }

    // What a run needs beside its sums, as stored: several such loads can be under way.
    template <int RUN> struct Read { Run<Result, RUN> c, residual; };

    template <int RUN>
    __device__ __forceinline__ Read<RUN> read(const Result* c, long long row, int n, int N, bool vector) const {
        Read<RUN> read;
        if (READS_C) read.c = stored_run<RUN>(c + row, n, N, vector);
        if (RESIDUAL) read.residual = stored_run<RUN>(residual + row, n, N, vector);
        return read;
    }

    template <int RUN>
    __device__ __forceinline__ void store(
        const Sum (&sums)[RUN], const Read<RUN>& read, Result* c, long long row, int n, int N, bool vector) const {
        Sum z[RUN], held[RUN], addend[RUN];
        if (READS_C) widened(read.c, held);
        if (BIAS) load_run(bias, n, N, in_runs<RUN>(bias, 0), addend);
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            z[i] = alpha * sums[i];
            if (BETA) z[i] += beta * held[i];
            if (BIAS) z[i] += addend[i];
        }
        if (SAVED) store_run(saved + row, n, N, vector, z);
        if (RESIDUAL) widened(read.residual, addend);
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            z[i] = activate(z[i], ACTIVATION);
            if (ACTIVATION == ACTIVATION_GELU_BACKWARD) z[i] *= activation_slope(held[i], ACTIVATION_GELU);
            if (RESIDUAL) z[i] = plus(z[i], addend[i]);
        }
        store_run(c + row, n, N, vector, z);
    }
};
