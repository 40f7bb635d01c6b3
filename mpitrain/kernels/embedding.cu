// Token and position embedding, and the gradient of the table; that of the positions is in columns.cu.
// tokens: (M,) of type Index, M = B T rows, row m at position m mod T; table: (V, C), the rows of tokens first .. first + V - 1;
// positions: (at least T, C); x, dx: (M, C); gradients are of type Result
#include "reduce.cuh"

// x[m] = table[tokens[m] - first] + positions[m mod T]. A row that the table does not hold is zero, as are no positions.
// One warp a row. Launch: grid (ceil(M / 4)), block (128).
extern "C" __global__ void __launch_bounds__(128) embedding(
    int M, int T, int C, int V, long long first, const Index* __restrict__ tokens, const Element* __restrict__ table,
    const Element* __restrict__ positions, Element* __restrict__ x) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= M) return;
    const long long token = tokens[row] - first;
    const bool held = token >= 0 && token < V;
    const bool vector = in_fours(table, C) && in_fours(positions, C) && in_fours(x, C);
    for (int c = 4 * lane; c < C; c += 128) {
        Sum word[4] = {}, place[4] = {};
        if (held) load_four(table + token * C, c, C, vector, word);
        if (positions) load_four(positions + (long long)(row % T) * C, c, C, vector, place);
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] += place[i];
        store_four(x + (long long)row * C, c, C, vector, word);
    }
}

// dtable[v] = scale dtable[v] + the sum of dx over the rows m with tokens[m] = first + v, in their order: equal on every run.
// A block owns 32 table rows x 128 columns in shared memory and reads all tokens; each thread owns one column, so that
// adding a row needs no barrier. Launch: grid (ceil(V / 32), ceil(C / 128)), block (128).
extern "C" __global__ void __launch_bounds__(128) embedding_backward_table(
    int M, int C, int V, long long first, const Index* __restrict__ tokens, const Element* __restrict__ dx, Sum scale,
    Result* __restrict__ dtable) {
    __shared__ Sum sums[32][128];
    __shared__ int row_of[128], slot_of[128];    // the chunk's rows that belong here, in order
    __shared__ int found_by[4];
    const int v0 = blockIdx.x * 32, c = blockIdx.y * 128 + threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int v = 0; v < 32; ++v) sums[v][threadIdx.x] = 0;
    for (int m0 = 0; m0 < M; m0 += 128) {
        const int m = m0 + threadIdx.x;
        const long long slot = m < M ? tokens[m] - first - v0 : -1;
        const bool mine = slot >= 0 && slot < 32;
        const unsigned votes = __ballot_sync(~0u, mine);
        if (lane == 0) found_by[warp] = __popc(votes);
        __syncthreads();    // the counts are there, and the last chunk's rows are done with
        int before = __popc(votes & ((1u << lane) - 1)), found = 0;
        for (int w = 0; w < 4; ++w) {
            if (w < warp) before += found_by[w];
            found += found_by[w];
        }
        if (mine) {
            row_of[before] = m;
            slot_of[before] = int(slot);
        }
        __syncthreads();
        if (c < C)
            for (int i = 0; i < found; ++i) sums[slot_of[i]][threadIdx.x] += wide(dx[(long long)row_of[i] * C + c]);
    }
    if (c >= C) return;
    for (int v = 0; v < min(32, V - v0); ++v) {
        const long long at = (long long)(v0 + v) * C + c;
        dtable[at] = narrow<Result>(sums[v][threadIdx.x] + (scale != Sum(0) ? scale * wide(dtable[at]) : Sum(0)));
    }
}
