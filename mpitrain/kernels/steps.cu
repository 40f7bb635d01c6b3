// Optimizer steps on flat buffers of n elements, in place, each in one pass over memory.
//
// numbers: what changes with the step, in device memory, so that the arguments of a launch do not: scale, lr, and of adamw
// correction1, correction2. scale multiplies the gradient: it holds clipping and the loss scale, so neither costs a pass.
// p parameters, g gradients, m and v moments (0 before the first step); mirror: the parameters, rounded to Mirror, or null.
// fma says which products are not rounded: were it left to the compiler, an element could change with where its share ends.
// Launch: grid (any), block (256); n >= 0 may be anything, arrays need no alignment.
#include "flat.cuh"

constexpr int WIDE = RUN<Element, Mirror>;

// p -= lr (scale g + decay p)
extern "C" __global__ void __launch_bounds__(256) sgd(
    long long n, Element* __restrict__ p, const Element* __restrict__ g, Mirror* __restrict__ mirror,
    const Sum* __restrict__ numbers, Sum decay) {
    const Sum scale = numbers[0], lr = numbers[1];
    each_share<WIDE>(n, [&](auto here) {
        Sum ps[WIDE], gs[WIDE];
        here.load(p, ps);
        here.load(g, gs);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) ps[j] = fma(-lr, fma(scale, gs[j], decay * ps[j]), ps[j]);
        here.store(p, ps);
        if (mirror) here.store(mirror, ps);
    }, p, g, mirror);
}

// m = beta m + scale g + decay p;  p -= lr m
extern "C" __global__ void __launch_bounds__(256) momentum(
    long long n, Element* __restrict__ p, const Element* __restrict__ g, Element* __restrict__ m,
    Mirror* __restrict__ mirror, const Sum* __restrict__ numbers, Sum beta, Sum decay) {
    const Sum scale = numbers[0], lr = numbers[1];
    each_share<WIDE>(n, [&](auto here) {
        Sum ps[WIDE], gs[WIDE], ms[WIDE];
        here.load(p, ps);
        here.load(g, gs);
        here.load(m, ms);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            ms[j] = fma(decay, ps[j], fma(beta, ms[j], scale * gs[j]));
            ps[j] = fma(-lr, ms[j], ps[j]);
        }
        here.store(m, ms);
        here.store(p, ps);
        if (mirror) here.store(mirror, ps);
    }, p, g, m, mirror);
}

// d = scale g + decay p;  m = beta m + d;  p -= lr (d + beta m)
extern "C" __global__ void __launch_bounds__(256) nesterov(
    long long n, Element* __restrict__ p, const Element* __restrict__ g, Element* __restrict__ m,
    Mirror* __restrict__ mirror, const Sum* __restrict__ numbers, Sum beta, Sum decay) {
    const Sum scale = numbers[0], lr = numbers[1];
    each_share<WIDE>(n, [&](auto here) {
        Sum ps[WIDE], gs[WIDE], ms[WIDE];
        here.load(p, ps);
        here.load(g, gs);
        here.load(m, ms);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            const Sum gradient = fma(decay, ps[j], scale * gs[j]);
            ms[j] = fma(beta, ms[j], gradient);
            ps[j] = fma(-lr, fma(beta, ms[j], gradient), ps[j]);
        }
        here.store(m, ms);
        here.store(p, ps);
        if (mirror) here.store(mirror, ps);
    }, p, g, m, mirror);
}

// With g scaled: p = (1 - lr decay) p - lr sign(m + (1 - beta1) (g - m));  m += (1 - beta2) (g - m)
// Chen et al. 2023, algorithm 2; the sign of 0 is 0.
extern "C" __global__ void __launch_bounds__(256) lion(
    long long n, Element* __restrict__ p, const Element* __restrict__ g, Element* __restrict__ m,
    Mirror* __restrict__ mirror, const Sum* __restrict__ numbers, Sum rest1, Sum rest2, Sum decay) {
    const Sum scale = numbers[0], lr = numbers[1], keep = Sum(1) - lr * decay;
    each_share<WIDE>(n, [&](auto here) {
        Sum ps[WIDE], gs[WIDE], ms[WIDE];
        here.load(p, ps);
        here.load(g, gs);
        here.load(m, ms);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            const Sum change = fma(scale, gs[j], -ms[j]), mixed = fma(rest1, change, ms[j]);
            ps[j] = fma(keep, ps[j], mixed > Sum(0) ? -lr : mixed < Sum(0) ? lr : Sum(0));
            ms[j] = fma(rest2, change, ms[j]);
        }
        here.store(m, ms);
        here.store(p, ps);
        if (mirror) here.store(mirror, ps);
    }, p, g, m, mirror);
}

// With d = scale g + decay p: m += (1 - beta1) (d - m);  v += (1 - beta2) (d^2 - v);
// p -= lr / correction1 x m / (sqrt(v / correction2) + epsilon)
// The corrections are those of adamw. Kingma & Ba 2015, algorithm 1.
extern "C" __global__ void __launch_bounds__(256) adam(
    long long n, Element* __restrict__ p, const Element* __restrict__ g, Element* __restrict__ m, Element* __restrict__ v,
    Mirror* __restrict__ mirror, const Sum* __restrict__ numbers, Sum rest1, Sum rest2, Sum epsilon, Sum decay) {
    const Sum scale = numbers[0], lr = numbers[1], correction1 = numbers[2], correction2 = numbers[3];
    const Sum rate = lr / correction1;
    each_share<WIDE>(n, [&](auto here) {
        Sum ps[WIDE], gs[WIDE], ms[WIDE], vs[WIDE];
        here.load(p, ps);
        here.load(g, gs);
        here.load(m, ms);
        here.load(v, vs);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            const Sum gradient = fma(decay, ps[j], scale * gs[j]);
            ms[j] = fma(rest1, gradient - ms[j], ms[j]);
            vs[j] = fma(rest2, fma(gradient, gradient, -vs[j]), vs[j]);
            ps[j] -= rate * ms[j] / (sqrt(vs[j] / correction2) + epsilon);
        }
        here.store(m, ms);
        here.store(v, vs);
        here.store(p, ps);
        if (mirror) here.store(mirror, ps);
    }, p, g, m, v, mirror);
}

// With g scaled: m += (1 - beta1) (g - m);  v += (1 - beta2) (g^2 - v);
// p = (1 - lr decay) p - lr / correction1 x m / (sqrt(v / correction2) + epsilon)
// correction1 = 1 - beta1^step, correction2 = 1 - beta2^step: on the host in double. Loshchilov & Hutter 2019, algorithm 2,
// with lr in the decay.
extern "C" __global__ void __launch_bounds__(256) adamw(
    long long n, Element* __restrict__ p, const Element* __restrict__ g, Element* __restrict__ m, Element* __restrict__ v,
    Mirror* __restrict__ mirror, const Sum* __restrict__ numbers, Sum rest1, Sum rest2, Sum epsilon, Sum decay) {
    const Sum scale = numbers[0], lr = numbers[1], correction1 = numbers[2], correction2 = numbers[3];
    const Sum keep = Sum(1) - lr * decay, rate = lr / correction1;
    each_share<WIDE>(n, [&](auto here) {
        Sum ps[WIDE], gs[WIDE], ms[WIDE], vs[WIDE];
        here.load(p, ps);
        here.load(g, gs);
        here.load(m, ms);
        here.load(v, vs);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            const Sum gradient = scale * gs[j];
            ms[j] = fma(rest1, gradient - ms[j], ms[j]);
            vs[j] = fma(rest2, fma(gradient, gradient, -vs[j]), vs[j]);
            ps[j] = fma(keep, ps[j], -(rate * ms[j] / (sqrt(vs[j] / correction2) + epsilon)));
        }
        here.store(m, ms);
        here.store(v, vs);
        here.store(p, ps);
        if (mirror) here.store(mirror, ps);
    }, p, g, m, v, mirror);
}
