// The second half of a product whose sums lie in memory, because the sum over K was split or a library did it: adds the
// parts, then does the epilogue of gemm.cu.
//
// workspace: (batches, splits, M, N) sums, each (M, N) followed by M row sums if ROW_SUMS
// One thread for WIDE neighbours of a row of C at a time, and for one row sum. Launch: grid (any, 1, batches), block (256).
#include "gemm_parts.cuh"

constexpr int WIDE = RUN<Result>;

extern "C" __global__ void __launch_bounds__(256) gemm_combine(
    int M, int N, Sum alpha, Sum beta, Result* C, int ldc, long long stride_c, const Element* __restrict__ bias,
    const Result* residual, Result* saved, Sum* row_sums, int splits,
    const Sum* __restrict__ workspace) {
    const long long part = (long long)M * (N + ROW_SUMS);
    workspace += blockIdx.z * splits * part;
    const Epilogue epilogue = {alpha, beta, bias, residual, saved};
    const bool parts_in_runs = in_runs<WIDE>(workspace, N, part);
    const bool c_in_runs = epilogue.in_runs_of<WIDE>(C, ldc, stride_c);
    // From a thread's run to its next one it is always as many rows and runs: no division within the loop.
    const unsigned thread = blockIdx.x * 256 + threadIdx.x, threads = gridDim.x * 256, runs = max(1, tiles_over(N, WIDE));
    const unsigned down = threads / runs, right = threads % runs;
    unsigned run = thread % runs;
    for (unsigned m = thread / runs; m < M; m += down) {
        const int n = run * WIDE;
        const long long row = blockIdx.z * stride_c + (long long)m * ldc;
        const Epilogue::Read<WIDE> read = epilogue.read<WIDE>(C, row, n, N, c_in_runs);
        Sum sums[WIDE] = {};
        for (int split = 0; split < splits; ++split) {
            Sum more[WIDE];
            load_run(workspace + split * part + (long long)m * N, n, N, parts_in_runs, more);
#pragma unroll
            for (int j = 0; j < WIDE; ++j) sums[j] += more[j];
        }
        epilogue.store(sums, read, C, row, n, N, c_in_runs);
        run += right;
        if (run >= runs) {
            run -= runs;
            ++m;
        }
    }
    if (!ROW_SUMS) return;
    for (unsigned m = thread; m < M; m += threads) {
        Sum sum = 0;
        for (int split = 0; split < splits; ++split) sum += workspace[split * part + (long long)M * N + m];
        store_row_sum(row_sums + m, beta, sum);
    }
}
