// Tiles of 16-bit elements in shared memory, as asynchronous copies fill them and tensor cores read them.
#pragma once
#include "ptx.cuh"

constexpr int CHUNK = 8;    // elements in 16 bytes, what one copy moves

// ROWS x COLUMNS elements in the order in which global memory has them. Rows are padded by a chunk, so that the eight rows
// of a matrix load lie in different banks.
template <int ROWS, int COLUMNS, int THREADS> struct SharedTile {
    static constexpr int PITCH = COLUMNS + CHUNK, ELEMENTS = ROWS * PITCH;
    static constexpr int CHUNKS = ROWS * COLUMNS / CHUNK, ROUNDS = (CHUNKS + THREADS - 1) / THREADS;
    static_assert(COLUMNS % CHUNK == 0, "whole chunks fill a row");

    // The place of a chunk in the tile. Eight lanes write at once: they take one row of 64 elements or more, or eight rows of
    // 32, which the padding keeps in different banks.
    static constexpr bool DOWN = COLUMNS == 4 * CHUNK && ROWS % 8 == 0;
    static __device__ __forceinline__ int row_of(int chunk) {
        return DOWN ? chunk / 32 * 8 + chunk % 8 : chunk / (COLUMNS / CHUNK);
    }
    static __device__ __forceinline__ int column_of(int chunk) {
        return (DOWN ? chunk / 8 % 4 : chunk % (COLUMNS / CHUNK)) * CHUNK;
    }

    // Starts to copy the elements from (row0, column0) on of an array of rows x columns; what lies beyond it becomes 0.
    // Without `chunks` they are copied one by one: slower, not wrong.
    static __device__ __forceinline__ void fetch(Element* tile, const Element* __restrict__ array, long long pitch, int row0,
                                                 int rows, int column0, int columns, bool chunks) {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            const int chunk = threadIdx.x + i * THREADS;
            if (CHUNKS % THREADS != 0 && chunk >= CHUNKS) break;
            const int row = row_of(chunk), column = column_of(chunk);
            const int left = row0 + row < rows ? max(0, min(CHUNK, columns - column0 - column)) : 0;
            const Element* from = array + (row0 + row) * pitch + column0 + column;
            Element* to = tile + row * PITCH + column;
            if (chunks) copy_async_16(to, left ? from : array, left * int(sizeof(Element)));
            else
                for (int j = 0; j < CHUNK; ++j) to[j] = j < left ? from[j] : narrow<Element>(0.0f);
        }
    }

    static __device__ __forceinline__ Element at(const Element* tile, int row, int column) { return tile[row * PITCH + column]; }

    // 16 x 16 elements from (row, column) on, as four 8 x 8 matrices: with ROWS_FIRST (r, c), (r + 8, c), (r, c + 8),
    // (r + 8, c + 8), else the middle two in the other order. TRANSPOSED transposes each.
    template <bool ROWS_FIRST, bool TRANSPOSED>
    static __device__ __forceinline__ void read(unsigned (&matrices)[4], const Element* tile, int row, int column) {
        const int lane = threadIdx.x % 32, second = lane / 8 % 2 * 8, last = lane / 16 * 8;
        const int down = ROWS_FIRST ? second : last, right = ROWS_FIRST ? last : second;
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
    static __device__ __forceinline__ void b_from_rows_of_n(unsigned (&b)[2][2], const Element* tile, int k, int n) {
        unsigned four[4];
        read<false, false>(four, tile, n, k);
        b[0][0] = four[0], b[0][1] = four[1], b[1][0] = four[2], b[1][1] = four[3];
    }
    static __device__ __forceinline__ void b_from_rows_of_k(unsigned (&b)[2][2], const Element* tile, int k, int n) {
        unsigned four[4];
        read<true, true>(four, tile, k, n);
        b[0][0] = four[0], b[0][1] = four[1], b[1][0] = four[2], b[1][1] = four[3];
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

// Two numbers as the elements of one 32-bit word, the first in the lower half.
__device__ __forceinline__ unsigned packed(float x, float y) {
    const Element both[2] = {narrow<Element>(x), narrow<Element>(y)};
    unsigned word;
    memcpy(&word, both, sizeof word);
    return word;
}
