// Optimizer steps on flat buffers of n elements, in place, each in one pass over memory.
//
// `scale` multiplies the gradient: it holds clipping and the loss scale, so neither costs a pass of its own.
// p parameters, g gradients, m and v moments (0 before the first step).
// A thread takes four neighbours. Launch: grid (any), block (256); n >= 0 may be anything, arrays need no alignment.
#include "element.cuh"

// Four elements of up to four arrays, from i on; `left` of them exist.
struct Here {
    long long i;
    int left;
    bool vector;
    __device__ __forceinline__ void load(const Element* x, Sum (&four)[4]) const { load_four(x + i, 0, left, vector, four); }
    __device__ __forceinline__ void store(Element* x, const Sum (&four)[4]) const { store_four(x + i, 0, left, vector, four); }
};

// p -= lr (scale g + decay p)
extern "C" __global__ void __launch_bounds__(256) sgd(
    long long n, Element* __restrict__ p, const Element* __restrict__ g, Sum scale, Sum lr, Sum decay) {
    const bool vector = in_fours(p, 0) && in_fours(g, 0);
    for (long long i = 4 * (blockIdx.x * 256LL + threadIdx.x); i < n; i += 4 * 256LL * gridDim.x) {
        const Here here = {i, int(min(n - i, 4LL)), vector};
        Sum ps[4], gs[4];
        here.load(p, ps);
        here.load(g, gs);
#pragma unroll
        for (int j = 0; j < 4; ++j) ps[j] -= lr * (scale * gs[j] + decay * ps[j]);
        here.store(p, ps);
    }
}

// m = beta m + scale g + decay p;  p -= lr m
extern "C" __global__ void __launch_bounds__(256) momentum(
    long long n, Element* __restrict__ p, const Element* __restrict__ g, Element* __restrict__ m, Sum scale, Sum lr, Sum beta,
    Sum decay) {
    const bool vector = in_fours(p, 0) && in_fours(g, 0) && in_fours(m, 0);
    for (long long i = 4 * (blockIdx.x * 256LL + threadIdx.x); i < n; i += 4 * 256LL * gridDim.x) {
        const Here here = {i, int(min(n - i, 4LL)), vector};
        Sum ps[4], gs[4], ms[4];
        here.load(p, ps);
        here.load(g, gs);
        here.load(m, ms);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            ms[j] = beta * ms[j] + scale * gs[j] + decay * ps[j];
            ps[j] -= lr * ms[j];
        }
        here.store(m, ms);
        here.store(p, ps);
    }
}

// With g scaled: m += (1 - beta1) (g - m);  v += (1 - beta2) (g^2 - v);
// p = (1 - lr decay) p - lr / correction1 x m / (sqrt(v / correction2) + epsilon)
// correction1 = 1 - beta1^step, correction2 = 1 - beta2^step: on the host in double. Loshchilov & Hutter 2019, algorithm 2,
// with lr in the decay.
extern "C" __global__ void __launch_bounds__(256) adamw(
    long long n, Element* __restrict__ p, const Element* __restrict__ g, Element* __restrict__ m, Element* __restrict__ v,
    Sum scale, Sum lr, Sum rest1, Sum rest2, Sum epsilon, Sum decay, Sum correction1, Sum correction2) {
    const bool vector = in_fours(p, 0) && in_fours(g, 0) && in_fours(m, 0) && in_fours(v, 0);
    const Sum keep = Sum(1) - lr * decay, rate = lr / correction1;
    for (long long i = 4 * (blockIdx.x * 256LL + threadIdx.x); i < n; i += 4 * 256LL * gridDim.x) {
        const Here here = {i, int(min(n - i, 4LL)), vector};
        Sum ps[4], gs[4], ms[4], vs[4];
        here.load(p, ps);
        here.load(g, gs);
        here.load(m, ms);
        here.load(v, vs);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const Sum gradient = scale * gs[j];
            ms[j] += rest1 * (gradient - ms[j]);
            vs[j] += rest2 * (gradient * gradient - vs[j]);
            ps[j] = keep * ps[j] - rate * ms[j] / (sqrt(vs[j] / correction2) + epsilon);
        }
        here.store(m, ms);
        here.store(v, vs);
        here.store(p, ps);
    }
}
