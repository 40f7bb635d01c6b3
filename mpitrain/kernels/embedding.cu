// Token and position embedding, and the gradient of the table; that of the positions is in columns.cu.
// tokens: (M,) of type Index, M = B T rows, row m at position m mod T; table: (V, C), the rows of tokens first .. first + V - 1;
// positions: (at least T, C); x, dx: (M, C); gradients are of type Result
#include "reduce.cuh"

constexpr int WIDE = RUN<Element, Result>, COLUMNS = 32 * WIDE;    // of a thread; of a warp
constexpr int AHEAD = 8;    // rows of one chunk whose loads are under way at once: a frequent token has many

// x[m] = table[tokens[m] - first] + positions[m mod T]. A row that the table does not hold is zero, as are no positions.
// One warp a row. Launch: grid (ceil(M / 4)), block (128).
extern "C" __global__ void __launch_bounds__(128) embedding(
    int M, int T, int C, int V, long long first, const Index* __restrict__ tokens, const Element* __restrict__ table,
    const Element* __restrict__ positions, Element* __restrict__ x) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= M) return;
    const long long token = tokens[row] - first;
    const bool held = token >= 0 && token < V;
    const bool vector = in_runs<WIDE>(table, C) && in_runs<WIDE>(positions, C) && in_runs<WIDE>(x, C);
    for (int c = WIDE * lane; c < C; c += COLUMNS) {
        Sum word[WIDE] = {}, place[WIDE] = {};
        if (held) load_run(table + token * C, c, C, vector, word);
        if (positions) load_run(positions + (long long)(row % T) * C, c, C, vector, place);
#pragma unroll
        for (int i = 0; i < WIDE; ++i) word[i] += place[i];
        store_run(x + (long long)row * C, c, C, vector, word);
    }
}

// dtable[v] = scale dtable[v] + the sum of dx over the rows m with tokens[m] = first + v, in their order: equal on every run.
// A block owns 32 table rows x COLUMNS columns in shared memory and reads all tokens. A warp owns every fourth of these rows, a
// thread neighbouring columns of them, so that adding a row needs no barrier. With scale = 1 a row without tokens is left alone.
// Launch: grid (ceil(V / 32), ceil(C / COLUMNS)), block (128).
extern "C" __global__ void __launch_bounds__(128) embedding_backward_table(
    int M, int C, int V, long long first, const Index* __restrict__ tokens, const Element* __restrict__ dx, Sum scale,
    Result* __restrict__ dtable) {
    __shared__ __align__(16) Sum sums[32][COLUMNS];
    __shared__ __align__(16) int row_of[128], slot_of[128];    // the chunk's rows that belong here, in order
    __shared__ __align__(16) int found_by[2][4];    // of chunks by turns: one barrier where nothing is found
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int v0 = blockIdx.x * 32, c = blockIdx.y * COLUMNS + WIDE * lane;
    const bool vector = in_runs<WIDE>(dx, C) && in_runs<WIDE>(dtable, C);
    Sum sum[WIDE] = {}, more[WIDE];
    unsigned touched = 0;    // this warp's rows that have tokens, by bit
    for (int v = warp; v < 32; v += 4) store_pieces(sums[v], 32, lane, sum);
    for (int m0 = 0; m0 < M; m0 += 128) {
        int (&counts)[4] = found_by[m0 / 128 % 2];
        const int m = m0 + threadIdx.x;
        const long long slot = m < M ? tokens[m] - first - v0 : -1;
        const bool mine = slot >= 0 && slot < 32;
        const unsigned votes = __ballot_sync(~0u, mine);
        if (lane == 0) counts[warp] = __popc(votes);
        __syncthreads();    // the counts are there, and the last chunk's rows are done with
        int before = __popc(votes & ((1u << lane) - 1)), found = 0;
        for (int w = 0; w < 4; ++w) {
            if (w < warp) before += counts[w];
            found += counts[w];
        }
        if (found == 0) continue;
        if (mine) {
            row_of[before] = m;
            slot_of[before] = int(slot);
        }
        __syncthreads();
        for (int i = 0; i < found; i += AHEAD) {
            Run<Element, WIDE> rows[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; ++k)
                if (i + k < found && slot_of[i + k] % 4 == warp)
                    rows[k] = stored_run<WIDE>(dx + (long long)row_of[i + k] * C, c, C, vector);
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                if (i + k >= found || slot_of[i + k] % 4 != warp) continue;
                widened(rows[k], more);
                load_pieces(sums[slot_of[i + k]], 32, lane, sum);
#pragma unroll
                for (int j = 0; j < WIDE; ++j) sum[j] += more[j];
                store_pieces(sums[slot_of[i + k]], 32, lane, sum);
                touched |= 1u << slot_of[i + k];
            }
        }
    }
    for (int v = warp; v < min(32, V - v0); v += 4) {
        if (scale == Sum(1) && !(touched >> v & 1)) continue;
        Result* row = dtable + (long long)(v0 + v) * C;
        load_pieces(sums[v], 32, lane, sum);
        if (scale != Sum(0)) {
            load_run(row, c, C, vector, more);
#pragma unroll
            for (int j = 0; j < WIDE; ++j) sum[j] += scale * more[j];
        }
        store_run(row, c, C, vector, sum);
    }
}
