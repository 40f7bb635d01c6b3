// What the kernels of attention on tensor cores share: tiles in shared memory, and the two kinds of product with them.
//
// A block owns OWNED rows (queries, or keys for dk and dv), each of its warps WARP_ROWS of them: two fragments, so that what
// is read from shared memory serves two products, where registers hold the sums of both; else one. STEP rows of the other
// side pass by at a time, by asynchronous copies into one of two stages while the other is computed with. Scores and weights
// never leave registers: the fragment that a product leaves is, rounded, the fragment that the next one takes.
// Of float32, three products of TF32 make one, as in gemm_tensor.cu: `multiply_add` of tensor_tile.cuh.
// HEAD, a multiple of 16, and STEP are macros; CHUNKED: all rows can be copied 16 bytes at a time, else they are copied
// element by element.
#pragma once
#include "bounds.cuh"
#include "soft_cap.cuh"
#include "tensor_tile.cuh"

constexpr int OWNED = 128, FRAGMENTS = HEAD <= 64 && sizeof(Element) == 2 ? 2 : 1, WARP_ROWS = 16 * FRAGMENTS, THREADS = OWNED / WARP_ROWS * 32;
constexpr int DEPTH = HEAD / 16;    // pairs of fragments along the channels
// Blocks that share a multiprocessor: of float32 one, whose tiles are twice as large, and whose threads have 255 registers.
constexpr int BLOCKS = sizeof(Element) == 4 ? 1 : 2;
// Narrow heads leave registers: steps without masks have a loop of their own, and pointers run. Of wide ones both would spill.
constexpr bool ROOMY = HEAD <= 64;
// Slices of the channels, and of the rows that pass by, in a turn of the loops over them. All at once would spill with wide heads of
// float32, whose sums take most registers: beside them the additions of many products would be under way.
constexpr bool UNROLLED = ROOMY || sizeof(Element) == 2;
constexpr int SLICES = UNROLLED ? HEAD / SLICE : 2, ROW_SLICES = UNROLLED ? STEP / SLICE : 1;

static_assert(HEAD % 16 == 0 && STEP % 16 == 0 && OWNED % STEP == 0, "whole fragments, and whole steps before the diagonal");

#define MINUS_INFINITY __int_as_float(0xff800000)

using Own = SharedTile<OWNED, HEAD>;      // what stays
using Other = SharedTile<STEP, HEAD>;    // what passes by

using Steps = float[FRAGMENTS][STEP / 8][4];         // WARP_ROWS x STEP sums, as fragments
using Channels = float[FRAGMENTS][2 * DEPTH][4];    // WARP_ROWS x HEAD sums

// A thread's share of the copies of one operand of one batch and head, whose rows lie `pitch` elements apart. So many lanes go
// along a row that all of a thread's chunks lie at fixed distances. Tiles follow each other, each from row t0 on.
struct RowCopies {
    static constexpr int LANES = HEAD % 64 == 0 ? 8 : HEAD % 32 == 0 ? 4 : 2, AT_ONCE = THREADS / LANES;

    const Element* next;    // if ROOMY, this thread's first chunk of the next tile, else the operand
    int pitch;

    static __device__ __forceinline__ int row() { return threadIdx.x / LANES; }
    static __device__ __forceinline__ int column() { return threadIdx.x % LANES * CHUNK; }

    __device__ __forceinline__ RowCopies(const Element* operand, int pitch, int t0)
        : next(ROOMY ? operand + (long long)(t0 + row()) * pitch + column() : operand), pitch(pitch) {}

    // Starts to copy COUNT rows, from t0 on, to a tile; those from T on become 0.
    template <int COUNT> __device__ __forceinline__ void fetch(Element* tile, int t0, int T) {
        const Element* first = ROOMY ? next : next + (long long)(t0 + row()) * pitch + column();
        Element* to = tile + row() * Own::PITCH + column();
#pragma unroll
        for (int r = 0; r < COUNT; r += AT_ONCE) {
            if (COUNT < AT_ONCE && row() >= COUNT) break;
            const bool exists = t0 + row() + r < T;
#pragma unroll
            for (int c = 0; c < HEAD; c += LANES * CHUNK) {
                const Element* from = first + (long long)r * pitch + c;
                Element* chunk = to + r * Own::PITCH + c;
                if (CHUNKED) copy_async_if<16>(chunk, from, exists);
                else
                    for (int i = 0; i < CHUNK; ++i) chunk[i] = exists ? from[i] : narrow<Element>(0.0f);
            }
        }
        if (ROOMY) next += (long long)COUNT * pitch;
    }
};

// Of a query: log_sum and dot.
using Statistics = float2;

// What a block goes through: STEP rows of each of two operands at a time, and with STATISTICS those of these rows. In a stage
// the operands lie after each other, as tiles, and then the statistics.
template <bool STATISTICS> struct Passing {
    static constexpr int STAGE = 2 * Other::ELEMENTS + STEP * int(sizeof(Statistics) / sizeof(Element));
    static_assert(2 * STEP <= THREADS, "a number of the statistics to a thread");
    RowCopies one, two;
    const float* statistic;    // this thread's of the next rows, with STATISTICS
    int T;
    Element* stages;
    int turn = 0;    // the number of the stage that is filled next

    __device__ __forceinline__ void fetch(int row, bool more) {
        if (more) {
            Element* stage = stages + turn * STAGE;
            one.fetch<STEP>(stage, row, T);
            two.fetch<STEP>(stage + Other::ELEMENTS, row, T);
            if (STATISTICS && threadIdx.x < 2 * STEP) {
                float* to = reinterpret_cast<float*>(stage + 2 * Other::ELEMENTS) + threadIdx.x;
                copy_async_if<4>(to, statistic, row + int(threadIdx.x / 2) < T);
            }
            statistic += STEP;
        }
        copy_async_commit();
        turn ^= 1;
    }

    // The stage of the rows from `row` on, which have been fetched. If there are more, the next are fetched into the other.
    __device__ __forceinline__ const Element* arrive(int row, bool more) {
        const Element* stage = stages + (turn ^ 1) * STAGE;
        copy_async_wait<0>();
        __syncthreads();    // this stage is seen by all, and all have left the other
        fetch(row + STEP, more);
        return stage;
    }
};

// out (WARP_ROWS x STEP) = the rows of `own` from row m on times the rows of `other` (STEP x HEAD) transposed.
__device__ __forceinline__ void multiply_rows(Steps& out, const Element* own, int m, const Element* other) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int j = 0; j < STEP / 8; ++j) out[f][j][0] = out[f][j][1] = out[f][j][2] = out[f][j][3] = 0.0f;
#pragma unroll SLICES
    for (int d = 0; d < HEAD / SLICE; ++d) {
        unsigned a[FRAGMENTS][4];
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) Own::a_from_rows_of_m(a[f], own, m + 16 * f, SLICE * d);
#pragma unroll
        for (int j = 0; j < STEP / 16; ++j) {
            unsigned b[2][2];
            Other::b_from_rows_of_n(b[0], b[1], other, SLICE * d, 16 * j);
#pragma unroll
            for (int f = 0; f < FRAGMENTS; ++f) multiply_add(out[f] + 2 * j, a[f], b, Element{});
        }
    }
}

#define LOG2_E 1.4426950408889634f

// Scores get their soft-cap. `scale` times a score is its logarithm of base 2, so `whole` is the cap of that. An approximate tanh has an
// absolute error of a few 2^-24, which is enough for weights of 16 bits.
__device__ __forceinline__ void cap(Steps& scores, float scale) {
    if (CAP == 0) return;
    const float whole = CAP * LOG2_E, inside = 2.0f * LOG2_E * scale / whole, outside = whole / scale;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
            for (float& score : scores[f][j])
                score = outside * (sizeof(Element) == 4 ? tanh(scale / whole * score)
                                                        : 1.0f - __fdividef(2.0f, 1.0f + exp2_flushed(inside * score)));
}

// Scores of keys after the last that their query sees become minus infinity. The fragments' first row and column are row0 and
// column0: the last key that a query sees, if QUERIES_ARE_ROWS that of a row, and a key. There are T keys.
template <bool QUERIES_ARE_ROWS> __device__ __forceinline__ void mask(Steps& scores, int row0, int column0, int T) {
    const int lane = threadIdx.x % 32, apart = row0 + lane / 4 - (column0 + lane % 4 * 2);
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int past = 8 * j + e % 2 - (16 * f + e / 2 * 8);
                const bool seen = QUERIES_ARE_ROWS ? past <= apart : apart <= past;
                const bool exists = !GENERAL || !QUERIES_ARE_ROWS || column0 + lane % 4 * 2 + 8 * j + e % 2 < T;
                if (!seen || !exists) scores[f][j][e] = MINUS_INFINITY;
            }
}

// Scores of keys that their query's document hides become minus infinity; rows and columns as above.
template <bool QUERIES_ARE_ROWS>
__device__ __forceinline__ void hide(Steps& scores, int row0, int column0, const Bounds& bounds) {
    const int lane = threadIdx.x % 32, query0 = QUERIES_ARE_ROWS ? row0 + lane / 4 : column0 + lane % 4 * 2;
    int first_key[QUERIES_ARE_ROWS ? FRAGMENTS : STEP / 8][2];    // of rows g and g + 8, or columns 2 t and 2 t + 1
#pragma unroll
    for (int n = 0; n < int(sizeof first_key / sizeof first_key[0]); ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) first_key[n][i] = bounds.first_key(query0 + (QUERIES_ARE_ROWS ? 16 * n + 8 * i : 8 * n + i));
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = row0 + 16 * f + lane / 4 + e / 2 * 8, column = column0 + 8 * j + lane % 4 * 2 + e % 2;
                const int first = QUERIES_ARE_ROWS ? first_key[f][e / 2] : first_key[j][e % 2];
                if (bounds.hides(first, QUERIES_ARE_ROWS ? column : row)) scores[f][j][e] = MINUS_INFINITY;
            }
}

// out (WARP_ROWS x HEAD) += p (WARP_ROWS x STEP) times `other` (STEP x HEAD). The columns of p move up, so that a
// loop that is not unrolled finds the next slice in the same registers; p is used up.
__device__ __forceinline__ void add_weighted(Channels& out, Steps& p, const Element* other) {
#pragma unroll ROW_SLICES
    for (int s = 0; s < STEP / SLICE; ++s) {
        unsigned a[FRAGMENTS][4];
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) a_of_d(a[f], p[f]);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            unsigned b[2][2];
            Other::b_of_d(b[0], b[1], other, SLICE * s, 16 * d);
#pragma unroll
            for (int f = 0; f < FRAGMENTS; ++f) multiply_add(out[f] + 2 * d, a[f], b, Element{});
        }
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
            for (int j = SLICE / 8; j < STEP / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) p[f][j - SLICE / 8][e] = p[f][j][e];
    }
}

// Stores 16 x HEAD sums times `scale` (of rows g and g + 8) to rows t0 ... of an array; rows from T on do not exist.
__device__ __forceinline__ void store_rows(const float (&out)[2 * DEPTH][4], float scale0, float scale8, Element* first,
                                           long long pitch, int t0, int T) {
    const bool vector = in_runs<4>(first, pitch);
#pragma unroll
    for (int j = 0; j < 2 * DEPTH; ++j) {
        const float scaled[4] = {out[j][0] * scale0, out[j][1] * scale0, out[j][2] * scale8, out[j][3] * scale8};
        const FourOfFragment four(scaled);
        if (t0 + four.row < T) store_run(first + (t0 + four.row) * pitch, 8 * j + four.column, HEAD, vector, four.at);
    }
}
