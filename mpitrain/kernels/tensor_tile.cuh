// Tiles of 16-bit elements or of float32 in shared memory, as asynchronous copies fill them and tensor cores read them.
#pragma once
#include "ptx.cuh"

constexpr int CHUNK = 16 / sizeof(Element);    // elements in 16 bytes, what one copy moves
constexpr int SLICE = 2 * CHUNK;               // elements of K in a fragment: 16, or 8 of float32

// ROWS x COLUMNS elements in the order in which global memory has them. Rows are padded, by a chunk or by eight float32, so
// that the eight rows of a matrix load lie in different banks, or the four rows that a warp reads without one.
template <int ROWS, int COLUMNS, int PADDING = CHUNK> struct SharedTile {
    static constexpr int PITCH = COLUMNS + PADDING, ELEMENTS = ROWS * PITCH;
    static_assert(COLUMNS % CHUNK == 0, "whole chunks fill a row");

    // 16 x 16 elements from (row, column) on, as four 8 x 8 matrices: with ROWS_FIRST (r, c), (r + 8, c), (r, c + 8),
    // (r + 8, c + 8), else the middle two in the other order. TRANSPOSED transposes each. In float32 a matrix has rows of
    // one chunk: 8 x 4. No instruction transposes it, so that each lane reads its own four elements.
    template <bool ROWS_FIRST, bool TRANSPOSED>
    static __device__ __forceinline__ void read(unsigned (&matrices)[4], const Element* tile, int row, int column) {
        const int lane = threadIdx.x % 32;
        if (TRANSPOSED && sizeof(Element) == 4) {
            const Element* at = tile + (row + lane % 4) * PITCH + column + lane / 4;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int last = i / 2, second = i % 2, down = ROWS_FIRST ? second : last, right = ROWS_FIRST ? last : second;
                memcpy(&matrices[i], at + down * CHUNK * PITCH + right * 8, 4);
            }
            return;
        }
        const int second = lane / 8 % 2 * 8, last = lane / 16 * 8;
        const int down = ROWS_FIRST ? second : last, right = (ROWS_FIRST ? last : second) / 8 * CHUNK;
        const Element* at = tile + (row + down + lane % 8) * PITCH + column + right;
        if (TRANSPOSED) ldmatrix_x4_transposed(matrices, at);
        else ldmatrix_x4(matrices, at);
    }

    // The fragment of A (m x k) from a tile that holds it as rows of m, or as rows of k.
    static __device__ __forceinline__ void a_from_rows_of_m(unsigned (&a)[4], const Element* tile, int m, int k) {
        read<true, false>(a, tile, m, k);
    }
    static __device__ __forceinline__ void a_from_rows_of_k(unsigned (&a)[4], const Element* tile, int m, int k) {
        read<false, true>(a, tile, k, m);
    }

    // Two fragments of B (k x n), of columns n ... n + 7 and n + 8 ... n + 15.
    static __device__ __forceinline__ void b_from_rows_of_n(unsigned (&b)[2], unsigned (&next)[2], const Element* tile, int k, int n) {
        unsigned four[4];
        read<false, false>(four, tile, n, k);
        b[0] = four[0], b[1] = four[1], next[0] = four[2], next[1] = four[3];
    }
    static __device__ __forceinline__ void b_from_rows_of_k(unsigned (&b)[2], unsigned (&next)[2], const Element* tile, int k, int n) {
        unsigned four[4];
        read<true, true>(four, tile, k, n);
        b[0] = four[0], b[1] = four[1], next[0] = four[2], next[1] = four[3];
    }

    // The same for a fragment of A that was one of D (`a_of_d`): of float32, k follows its columns. With four more elements a
    // row than a multiple of 32, no two lanes meet in a bank.
    static __device__ __forceinline__ void b_of_d(unsigned (&b)[2], unsigned (&next)[2], const Element* tile, int k, int n) {
        if (sizeof(Element) == 2) return b_from_rows_of_k(b, next, tile, k, n);
        const int lane = threadIdx.x % 32;
        const Element* at = tile + (k + lane % 4 * 2) * PITCH + n + lane / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            memcpy(&b[i], at + i * PITCH, 4);
            memcpy(&next[i], at + i * PITCH + 8, 4);
        }
    }
};

// The tiles of one operand along K, and a thread's share of the copies: in each tile the same chunks, so that its pointer runs.
// The operand has W x K elements, stored as rows of K if K_IS_CONTIGUOUS, else as rows of W; what lies beyond it becomes 0.
// Eight lanes copy at once: eight chunks of a row, or one of each of eight rows, which the padding keeps in different banks.
template <bool K_IS_CONTIGUOUS, int WIDTH, int DEPTH_K, int THREADS> struct Copies {
    static constexpr int ROWS = K_IS_CONTIGUOUS ? WIDTH : DEPTH_K, COLUMNS = K_IS_CONTIGUOUS ? DEPTH_K : WIDTH;
    using Tile = SharedTile<ROWS, COLUMNS, K_IS_CONTIGUOUS ? CHUNK : 8>;
    static constexpr int LANES = COLUMNS / CHUNK % 8 > 0 ? 4 : THREADS / ROWS > 8 ? THREADS / ROWS : 8, AT_ONCE = THREADS / LANES, ACROSS = LANES * CHUNK;
    static_assert(COLUMNS % ACROSS == 0 && ROWS % AT_ONCE == 0, "all threads copy equally");

    const Element* next;    // this thread's first chunk of the next tile
    long long down;         // from it to the chunk AT_ONCE rows below, in elements
    int rows_left, columns_left;    // from that chunk on to the end of the operand

    static __device__ __forceinline__ int row() {
        return LANES == 4 ? threadIdx.x / 32 * 8 + threadIdx.x % 8 : threadIdx.x / LANES;
    }
    static __device__ __forceinline__ int column() { return (LANES == 4 ? threadIdx.x / 8 % 4 : threadIdx.x % LANES) * CHUNK; }

    __device__ __forceinline__ Copies(const Element* operand, long long pitch, int w0, int W, int k0, int K)
        : down(AT_ONCE * pitch) {
        const int row0 = (K_IS_CONTIGUOUS ? w0 : k0) + row(), column0 = (K_IS_CONTIGUOUS ? k0 : w0) + column();
        next = operand + row0 * pitch + column0;
        rows_left = (K_IS_CONTIGUOUS ? W : K) - row0;
        columns_left = (K_IS_CONTIGUOUS ? K : W) - column0;
    }

    // Starts to copy a part of the next tile; all parts of it, in turn. Without `chunks` elements are copied one by one: slower,
    // not wrong.
    __device__ __forceinline__ void fetch(Element* tile, long long pitch, bool chunks, int part, int parts) {
        constexpr int DOWN = ROWS / AT_ONCE, ALL = DOWN * (COLUMNS / ACROSS);
        Element* to = tile + row() * Tile::PITCH + column();
#pragma unroll
        for (int i = 0; i < ALL; ++i) {
            if (i < ALL * part / parts || i >= ALL * (part + 1) / parts) continue;
            const int r = i % DOWN, c = i / DOWN * ACROSS;
            const int there = r * AT_ONCE < rows_left ? max(0, min(CHUNK, columns_left - c)) : 0;
            const Element* from = next + r * down + c;
            Element* chunk = to + r * AT_ONCE * Tile::PITCH + c;
            if (chunks) copy_async_16(chunk, from, there * int(sizeof(Element)));
            else
                for (int j = 0; j < CHUNK; ++j) chunk[j] = j < there ? from[j] : narrow<Element>(0.0f);
        }
        if (part + 1 < parts) return;
        next += K_IS_CONTIGUOUS ? DEPTH_K : DEPTH_K * pitch;
        (K_IS_CONTIGUOUS ? columns_left : rows_left) -= DEPTH_K;
    }
};

// Lane 4 g + t of a fragment of D holds rows g and g + 8, columns 2 t and 2 t + 1. Lanes t and t ^ 1 exchange halves, so
// that each holds four neighbours: the even one of row g, the odd one of row g + 8.
struct FourOfFragment {
    int row, column;
    float at[4];

    __device__ __forceinline__ explicit FourOfFragment(const float (&d)[4]) {
        const int lane = threadIdx.x % 32;
        const bool odd = lane % 2;
        const float x = __shfl_xor_sync(~0u, odd ? d[0] : d[2], 1), y = __shfl_xor_sync(~0u, odd ? d[1] : d[3], 1);
        row = lane / 4 + (odd ? 8 : 0);
        column = lane % 4 / 2 * 4;
        at[0] = odd ? x : d[0], at[1] = odd ? y : d[1], at[2] = odd ? d[2] : x, at[3] = odd ? d[3] : y;
    }
};

// Two numbers as the elements of one 32-bit word, the first in the lower half; of float32 the first alone.
__device__ __forceinline__ unsigned packed(float x, float y) {
    const Element both[2] = {narrow<Element>(x), narrow<Element>(y)};
    unsigned word;
    memcpy(&word, both, sizeof word);
    return word;
}

// A fragment of A, SLICE deep, from fragments of D: 16 x 16 of these, or of float32 16 x 8. Lane 4 g + t of float32 has columns
// 2 t and 2 t + 1 of D, which become k = t and t + 4: an order that `b_of_d` knows, and for which nothing moves between lanes.
__device__ __forceinline__ void a_of_d(unsigned (&a)[4], const float (*d)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        a[i] = sizeof(Element) == 2 ? packed(d[i / 2][i % 2 * 2], d[i / 2][i % 2 * 2 + 1]) : __float_as_uint(d[0][i % 2 * 2 + i / 2]);
}

#if __CUDA_ARCH__ >= 800
template <int N> __device__ __forceinline__ void split_tf32(const unsigned (&x)[N], unsigned (&high)[N], unsigned (&low)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        high[i] = x[i] + 0x1000 & ~0x1fffu;
        low[i] = __float_as_uint(__uint_as_float(x[i]) - __uint_as_float(high[i]));
    }
}
#endif

// sums: (N fragments) += A B: a fragment of A with N fragments of B. The last argument chooses by its type alone.
template <int N, class T>
__device__ __forceinline__ void multiply_add(float (*sums)[4], const unsigned (&a)[4], const unsigned (&b)[N][2], T type) {
#pragma unroll
    for (int j = 0; j < N; ++j) mma_m16n8k16(sums[j], a, b[j], type);
}

// float32: x = high + low, each rounded to the 11 bits of TF32, which leaves 2^-23 of x. Of the four products the fourth,
// low x low, is as small. Tensor cores cut off what a sum has beyond 24 bits: three products start at 0 and the rounding
// addition follows, or errors of one sign would grow with K.
template <int N>
__device__ __forceinline__ void multiply_add(float (*sums)[4], const unsigned (&a)[4], const unsigned (&b)[N][2], float) {
    unsigned a_high[4], a_low[4], b_high[N][2], b_low[N][2];
    float part[N][4] = {};
    split_tf32(a, a_high, a_low);
#pragma unroll
    for (int j = 0; j < N; ++j) {
        split_tf32(b[j], b_high[j], b_low[j]);
        mma_m16n8k8_tf32(part[j], a_low, b_high[j]);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) mma_m16n8k8_tf32(part[j], a_high, b_low[j]);
#pragma unroll
    for (int j = 0; j < N; ++j) mma_m16n8k8_tf32(part[j], a_high, b_high[j]);
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[j][i] += part[j][i];
}
