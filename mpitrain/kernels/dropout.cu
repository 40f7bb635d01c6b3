// Dropout (Srivastava et al. 2014): y = x mask scale + residual, with the mask drawn from counters, forward and backward.
#include "element.cuh"
#include "philox.cuh"

// x, residual, y: (M, C) row-major; residual may be null, and y be x. Element (m, c) has number first + m columns + c; its
// mask is 0 where its 16 bits are below `threshold`, else 1. One thread a block of 16 numbers, which may lie over a row's ends.
// numbers: the step, in device memory. Launch: grid (any, any), block (256):
// threads along (C + 30) / 16 blocks of numbers, and rows.
extern "C" __global__ void __launch_bounds__(256) dropout(
    long long M, long long C, long long first, long long columns, int threshold, Sum scale, long long seed, long long layer,
    const long long* __restrict__ numbers, const Element* x, const Element* residual, Element* y) {
    const long long runs = (C + 30) / 16;
    const Stream stream = {(unsigned long long)seed, (unsigned long long)layer, (unsigned long long)*numbers};
    for (long long m = blockIdx.y; m < M; m += gridDim.y) {
        for (long long i = blockIdx.x * 256LL + threadIdx.x; i < runs; i += 256LL * gridDim.x) {
            const long long start = first + m * columns, block = start / 16 + i, c = block * 16 - start;
            if (c >= C) continue;
            const Bits bits = random_block(stream, block);
            const long long at = m * C + c;
            const bool vector = c >= 0 && c + 16 <= C && in_runs<16>(x + at, 0) && in_runs<16>(y + at, 0) &&
                                (!residual || in_runs<16>(residual + at, 0));
            if (vector) {
                Sum xs[16], rs[16] = {};
                load_run(x + at, 0, 16, true, xs);
                if (residual) load_run(residual + at, 0, 16, true, rs);
    #pragma unroll
                for (int j = 0; j < 16; ++j) {
                    xs[j] *= bits.of(j) < unsigned(threshold) ? Sum(0) : scale;
                    if (residual) xs[j] = plus(xs[j], rs[j]);
                }
                store_run(y + at, 0, 16, true, xs);
                continue;
            }
    #pragma unroll
            for (int j = 0; j < 16; ++j) {
                if (c + j < 0 || c + j >= C) continue;
                Sum value = Sum(wide(x[at + j])) * (bits.of(j) < unsigned(threshold) ? Sum(0) : scale);
                if (residual) value = plus(value, wide(residual[at + j]));
                y[at + j] = narrow<Element>(value);
            }
        }
    }
}
