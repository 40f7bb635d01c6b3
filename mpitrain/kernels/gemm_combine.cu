// The second half of a product whose sums lie in memory, because the sum over K was split or a library did it: adds the
// parts, then does the epilogue of gemm.cu.
//
// workspace: (batches, splits, M, N) sums, each (M, N) followed by M row sums if ROW_SUMS
// One thread for WIDE neighbours of a row of C, or for one row sum. Launch: grid (any, 1, batches), block (256).
#include "gemm_parts.cuh"

constexpr int WIDE = RUN<Result>;

extern "C" __global__ void __launch_bounds__(256) gemm_combine(
    int M, int N, Sum alpha, Sum beta, Result* C, int ldc, long long stride_c, const Element* __restrict__ bias,
    const Result* residual, Result* saved, int activation, Sum* row_sums, int splits,
    const Sum* __restrict__ workspace) {
    const long long part = (long long)M * (N + ROW_SUMS), runs = tiles_over(N, WIDE);
    const long long work = M * runs + (ROW_SUMS ? M : 0);
    workspace += blockIdx.z * splits * part;
    const Epilogue epilogue = {alpha, beta, bias, residual, saved, activation};
    const bool parts_in_runs = in_runs<WIDE>(workspace, N, part);
    const bool c_in_runs = epilogue.in_runs_of<WIDE>(C, ldc, stride_c);
    for (long long i = blockIdx.x * 256LL + threadIdx.x; i < work; i += gridDim.x * 256LL) {
        if (ROW_SUMS && i >= M * runs) {
            const long long m = i - M * runs;
            Sum sum = 0;
            for (int split = 0; split < splits; ++split) sum += workspace[split * part + (long long)M * N + m];
            row_sums[m] = sum;
            continue;
        }
        const long long m = i / runs;
        const int n = int(i % runs) * WIDE;
        Sum sums[WIDE] = {};
        for (int split = 0; split < splits; ++split) {
            Sum more[WIDE];
            load_run(workspace + split * part + m * N, n, N, parts_in_runs, more);
#pragma unroll
            for (int j = 0; j < WIDE; ++j) sums[j] += more[j];
        }
        epilogue.store(sums, C, blockIdx.z * stride_c + m * ldc, n, N, c_in_runs);
    }
}
