// What the matrix products share: the order of the tiles, the part of K that a block sums over, and the epilogue.
#pragma once
#include "activation.cuh"

struct Tile { int m, n; };    // counted in tiles

// Blocks with neighbouring numbers take tiles from 8 rows of tiles, column by column: what they read stays in L2.
__device__ __forceinline__ Tile tile_of(int block, int tiles_m, int tiles_n) {
    const int group = 8 * tiles_n, first = block / group * 8, height = min(tiles_m - first, 8);
    return {first + block % group % height, block % group / height};
}

__device__ __forceinline__ int tiles_over(int count, int size) { return (count + size - 1) / size; }

// The epilogue of N neighbours of row m, from column n on:
//     z = alpha sum + beta C + bias[n];  saved = z;  C = activation(z) + residual
// bias, saved and residual may be null; saved and residual have the shape and pitch of C. With beta = 0 C is not read, but by
// ACTIVATION_GELU_BACKWARD, where activation(z) is z times GELU's derivative at what C holds.
struct Epilogue {
    Sum alpha, beta;
    const Element* bias;
    const Result* residual;
    Result* saved;
    int activation;

    // Whether these rows of C can be moved in runs of this length.
    template <int RUN> __device__ __forceinline__ bool in_runs_of(const Result* c, int pitch, long long stride) const {
        return in_runs<RUN>(c, pitch, stride) && (!saved || in_runs<RUN>(saved, pitch)) &&
               (!residual || in_runs<RUN>(residual, pitch));
    }

    template <int RUN>
    __device__ __forceinline__ void store(const Sum (&sums)[RUN], Result* c, long long row, int n, int N, bool vector) const {
        Sum z[RUN], addend[RUN];
#pragma unroll
        for (int i = 0; i < RUN; ++i) z[i] = alpha * sums[i];
        if (beta != Sum(0)) {
            load_run(c + row, n, N, vector, addend);
#pragma unroll
            for (int i = 0; i < RUN; ++i) z[i] += beta * addend[i];
        }
        if (bias) {
            load_run(bias, n, N, in_runs<RUN>(bias, 0), addend);
#pragma unroll
            for (int i = 0; i < RUN; ++i) z[i] += addend[i];
        }
        if (saved) store_run(saved + row, n, N, vector, z);
#pragma unroll
        for (int i = 0; i < RUN; ++i) z[i] = activate(z[i], activation);
        if (activation == ACTIVATION_GELU_BACKWARD) {
            load_run(c + row, n, N, vector, addend);
#pragma unroll
            for (int i = 0; i < RUN; ++i) z[i] *= activation_slope(addend[i], ACTIVATION_GELU);
        }
        if (residual) {
            load_run(residual + row, n, N, vector, addend);
#pragma unroll
            for (int i = 0; i < RUN; ++i) z[i] += addend[i];
        }
        store_run(c + row, n, N, vector, z);
    }
};
