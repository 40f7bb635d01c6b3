// Optimizer steps on flat buffers of n elements, in place, each in one pass over memory.
//
// numbers: what changes with the step, in device memory, so that the arguments of a launch do not: scale, lr, and of adamw
// correction1, correction2. scale multiplies the gradient: it holds clipping and the loss scale, so neither costs a pass.
// p parameters, g gradients, m and v moments (0 before the first step); mirror: the parameters, rounded to Mirror, or null.
// A thread takes four neighbours. Launch: grid (any), block (256); n >= 0 may be anything, arrays need no alignment.
#include "element.cuh"

// Four elements of up to four arrays, from i on; `left` of them exist.
struct Here {
    long long i;
    int left;
    bool vector;
    __device__ __forceinline__ void load(const Element* x, Sum (&four)[4]) const { load_four(x + i, 0, left, vector, four); }
    __device__ __forceinline__ void store(Element* x, const Sum (&four)[4]) const { store_four(x + i, 0, left, vector, four); }
    // The parameters as they are stored, rounded.
    __device__ __forceinline__ void store_mirror(Mirror* x, const Sum (&four)[4]) const {
        if (x) store_four(x + i, 0, left, in_fours(x, 0), four);
    }
};

// p -= lr (scale g + decay p)
extern "C" __global__ void __launch_bounds__(256) sgd(
    long long n, Element* __restrict__ p, const Element* __restrict__ g, Mirror* __restrict__ mirror,
    const Sum* __restrict__ numbers, Sum decay) {
    const Sum scale = numbers[0], lr = numbers[1];
    const bool vector = in_fours(p, 0) && in_fours(g, 0);
    for (long long i = 4 * (blockIdx.x * 256LL + threadIdx.x); i < n; i += 4 * 256LL * gridDim.x) {
        const Here here = {i, int(min(n - i, 4LL)), vector};
        Sum ps[4], gs[4];
        here.load(p, ps);
        here.load(g, gs);
#pragma unroll
        for (int j = 0; j < 4; ++j) ps[j] -= lr * (scale * gs[j] + decay * ps[j]);
        here.store(p, ps);
        here.store_mirror(mirror, ps);
    }
}

// m = beta m + scale g + decay p;  p -= lr m
extern "C" __global__ void __launch_bounds__(256) momentum(
    long long n, Element* __restrict__ p, const Element* __restrict__ g, Element* __restrict__ m,
    Mirror* __restrict__ mirror, const Sum* __restrict__ numbers, Sum beta, Sum decay) {
    const Sum scale = numbers[0], lr = numbers[1];
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
        here.store_mirror(mirror, ps);
    }
}

// With g scaled: m += (1 - beta1) (g - m);  v += (1 - beta2) (g^2 - v);
// p = (1 - lr decay) p - lr / correction1 x m / (sqrt(v / correction2) + epsilon)
// correction1 = 1 - beta1^step, correction2 = 1 - beta2^step: on the host in double. Loshchilov & Hutter 2019, algorithm 2,
// with lr in the decay.
extern "C" __global__ void __launch_bounds__(256) adamw(
    long long n, Element* __restrict__ p, const Element* __restrict__ g, Element* __restrict__ m, Element* __restrict__ v,
    Mirror* __restrict__ mirror, const Sum* __restrict__ numbers, Sum rest1, Sum rest2, Sum epsilon, Sum decay) {
    const Sum scale = numbers[0], lr = numbers[1], correction1 = numbers[2], correction2 = numbers[3];
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
        here.store_mirror(mirror, ps);
    }
}
