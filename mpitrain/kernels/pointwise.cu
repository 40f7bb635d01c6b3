// Element by element over n contiguous elements; a thread takes four neighbours at a time.
// Launch: grid (any), block (256); n >= 0 may be anything, and arrays need no alignment.
#include "activation.cuh"
#include "flat.cuh"

// dz = dy x activation'(z). dz may be z or dy.
extern "C" __global__ void __launch_bounds__(256) activation_backward(
    long long n, int activation, const Element* z, const Element* dy, Element* dz) {
    const bool vector = in_fours(z, 0) && in_fours(dy, 0) && in_fours(dz, 0);
    for (long long i = 4 * (blockIdx.x * 256LL + threadIdx.x); i < n; i += 4 * 256LL * gridDim.x) {
        const int left = int(min(n - i, 4LL));
        Sum zs[4], dys[4];
        load_four(z + i, 0, left, vector, zs);
        load_four(dy + i, 0, left, vector, dys);
#pragma unroll
        for (int j = 0; j < 4; ++j) zs[j] = dys[j] * activation_slope(zs[j], activation);
        store_four(dz + i, 0, left, vector, zs);
    }
}

// y = a + b. y may be a or b.
extern "C" __global__ void __launch_bounds__(256) add(long long n, const Element* a, const Element* b, Element* y) {
    const bool vector = in_fours(a, 0) && in_fours(b, 0) && in_fours(y, 0);
    for (long long i = 4 * (blockIdx.x * 256LL + threadIdx.x); i < n; i += 4 * 256LL * gridDim.x) {
        const int left = int(min(n - i, 4LL));
        Sum as[4], bs[4];
        load_four(a + i, 0, left, vector, as);
        load_four(b + i, 0, left, vector, bs);
#pragma unroll
        for (int j = 0; j < 4; ++j) as[j] += bs[j];
        store_four(y + i, 0, left, vector, as);
    }
}

// y = alpha a + beta b, or alpha a where b is null. y may be a or b.
extern "C" __global__ void __launch_bounds__(256) weighted_sum(
    long long n, Sum alpha, const Element* a, Sum beta, const Element* b, Element* y) {
    constexpr int WIDE = RUN<Element>;
    each_share<WIDE>(n, [&](auto here) {
        Sum as[WIDE], bs[WIDE] = {};
        here.load(a, as);
        if (b) here.load(b, bs);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) as[j] = fma(alpha, as[j], beta * bs[j]);
        here.store(y, as);
    }, a, b, y);
}

// y[m, c] += b[c].    y: (n / C, C) row-major; b: (C,)
extern "C" __global__ void __launch_bounds__(256) add_bias(long long n, int C, const Element* __restrict__ b, Element* __restrict__ y) {
    for (long long i = blockIdx.x * 256LL + threadIdx.x; i < n; i += 256LL * gridDim.x)
        y[i] = narrow<Element>(wide(y[i]) + wide(b[i % C]));
}

// y = activation(x), for activations that no product comes before.
extern "C" __global__ void __launch_bounds__(256) activation_forward(long long n, int activation, const Element* x, Element* y) {
    const bool vector = in_fours(x, 0) && in_fours(y, 0);
    for (long long i = 4 * (blockIdx.x * 256LL + threadIdx.x); i < n; i += 4 * 256LL * gridDim.x) {
        const int left = int(min(n - i, 4LL));
        Sum xs[4];
        load_four(x + i, 0, left, vector, xs);
#pragma unroll
        for (int j = 0; j < 4; ++j) xs[j] = activate(xs[j], activation);
        store_four(y + i, 0, left, vector, xs);
    }
}
