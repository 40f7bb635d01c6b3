// What the kernels of attention by Hopper's warpgroups share. HEAD, a macro, is 64 or 128.
#pragma once
#include "bounds.cuh"
#include "hopper.cuh"
#include "soft_cap.cuh"
#include "tensor_tile.cuh"

constexpr int STAGES = 2, DEPTH = 16, THREADS = 384;
// Registers of a thread that copies and of one that multiplies: all start with 168.
constexpr int FEW = 24, MANY = 240;

static_assert(HEAD == 64 || HEAD == 128, "whole panels, and registers for the sums");

#define MINUS_INFINITY __int_as_float(0xff800000)
#define LOG2_E 1.4426950408889634f

__device__ __forceinline__ int tiles_over(int extent, int tile) { return (extent + tile - 1) / tile; }

// A stage, and the parity of its next phase.
struct Turn {
    int stage = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// With a soft-cap a score s becomes log2(e) CAP tanh(s' / CAP), where s' is the scaled score; without one the caller multiplies
// by `scale`. An approximate tanh has an absolute error of a few 2^-24, which is enough for weights of 16 bits.
template <int N> __device__ __forceinline__ void cap(float (&scores)[N], float scale) {
    if (CAP == 0) return;
    const float whole = CAP * LOG2_E, inside = scale * float(2.0 / CAP);
#pragma unroll
    for (int i = 0; i < N; ++i) scores[i] = whole * (1.0f - __fdividef(2.0f, 1.0f + exp2_flushed(inside * scores[i])));
}

// Sums of 16 rows, rounded: the words of an operand in registers.
template <int N> __device__ __forceinline__ void round_sums(unsigned (&words)[N / 8][4], const float (&sums)[N]) {
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) words[n][i] = packed(sums[8 * n + 2 * i], sums[8 * n + 2 * i + 1]);
    hold(words);
}

// Stores HEAD channels of a warp's 16 rows, from row t0 on, times a factor for rows g and one for rows g + 8; rows from T on do not exist.
__device__ __forceinline__ void store_rows(const float (&sums)[HEAD / 2], float factor0, float factor8, Element* first, long long pitch,
                                           int t0, int T) {
    const bool vector = in_runs<4>(first, pitch);
#pragma unroll
    for (int j = 0; j < HEAD / 8; ++j) {
        const float scaled[4] = {sums[4 * j] * factor0, sums[4 * j + 1] * factor0, sums[4 * j + 2] * factor8, sums[4 * j + 3] * factor8};
        const FourOfFragment four(scaled);
        if (t0 + four.row < T) store_run(first + (t0 + four.row) * pitch, 8 * j + four.column, HEAD, vector, four.at);
    }
}
