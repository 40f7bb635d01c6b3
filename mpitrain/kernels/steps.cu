// Optimizer steps on flat buffers of n elements, in place, each in one pass over memory.
//
// numbers: what changes with the step, in device memory, so that the arguments of a launch do not: scale, correction1,
// correction2 (both of adamw), then lr and decay of each parameter group. scale multiplies the gradient: it holds clipping
// and the loss scale, so neither costs a pass.
// table: the buffers are R runs of elements, each of one group: R, then the start of each run, then its group, (1 + 2 R,).
// Starts ascend from 0 and are multiples of WIDE. Null: one run, of group 0.
// p parameters, g gradients, m and v moments (0 before the first step); mirror: the parameters, rounded to Mirror, or null.
// fma says which products are not rounded: were it left to the compiler, an element could change with where its share ends.
// Launch: grid (any), block (256); n >= 0 may be anything, arrays need no alignment.
#include "flat.cuh"

constexpr int WIDE = RUN<Element, Mirror>;

struct Rates { Sum lr, decay; };

// The rates of the run that has element i. Threads of a warp mostly find one run, and read one address.
__device__ __forceinline__ Rates rates_at(long long i, const long long* __restrict__ table, const Sum* __restrict__ numbers) {
    int run = 0, group = 0;
    if (table) {
        const int runs = int(table[0]);
        for (int left = runs; left > 1;) {    // the run is one of `left` from `run` on
            const int half = left / 2;
            if (table[1 + run + half] <= i) run += half;
            left -= half;
        }
        group = int(table[1 + runs + run]);
    }
    return {numbers[3 + 2 * group], numbers[4 + 2 * group]};
}

// p -= lr (scale g + decay p)
extern "C" __global__ void __launch_bounds__(256) sgd(
    long long n, Element* __restrict__ p, const Element* __restrict__ g, Mirror* __restrict__ mirror,
    const long long* __restrict__ table, const Sum* __restrict__ numbers) {
    const Sum scale = numbers[0];
    each_share<WIDE>(n, [&](auto here) {
        Sum ps[WIDE], gs[WIDE];
        here.load(p, ps);
        here.load(g, gs);
        const auto [lr, decay] = rates_at(here.first, table, numbers);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) ps[j] = fma(-lr, fma(scale, gs[j], decay * ps[j]), ps[j]);
        here.store(p, ps);
        if (mirror) here.store(mirror, ps);
    }, p, g, mirror);
}

// m = beta m + scale g + decay p;  p -= lr m
extern "C" __global__ void __launch_bounds__(256) momentum(
    long long n, Element* __restrict__ p, const Element* __restrict__ g, Element* __restrict__ m,
    Mirror* __restrict__ mirror, const long long* __restrict__ table, const Sum* __restrict__ numbers, Sum beta) {
    const Sum scale = numbers[0];
    each_share<WIDE>(n, [&](auto here) {
        Sum ps[WIDE], gs[WIDE], ms[WIDE];
        here.load(p, ps);
        here.load(g, gs);
        here.load(m, ms);
        const auto [lr, decay] = rates_at(here.first, table, numbers);
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
    Mirror* __restrict__ mirror, const long long* __restrict__ table, const Sum* __restrict__ numbers, Sum beta) {
    const Sum scale = numbers[0];
    each_share<WIDE>(n, [&](auto here) {
        Sum ps[WIDE], gs[WIDE], ms[WIDE];
        here.load(p, ps);
        here.load(g, gs);
        here.load(m, ms);
        const auto [lr, decay] = rates_at(here.first, table, numbers);
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
    Mirror* __restrict__ mirror, const long long* __restrict__ table, const Sum* __restrict__ numbers, Sum rest1, Sum rest2) {
    const Sum scale = numbers[0];
    each_share<WIDE>(n, [&](auto here) {
        Sum ps[WIDE], gs[WIDE], ms[WIDE];
        here.load(p, ps);
        here.load(g, gs);
        here.load(m, ms);
        const auto [lr, decay] = rates_at(here.first, table, numbers);
        const Sum keep = Sum(1) - lr * decay;
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
    Mirror* __restrict__ mirror, const long long* __restrict__ table, const Sum* __restrict__ numbers, Sum rest1, Sum rest2, Sum epsilon) {
    const Sum scale = numbers[0], correction1 = numbers[1], correction2 = numbers[2];
    each_share<WIDE>(n, [&](auto here) {
        Sum ps[WIDE], gs[WIDE], ms[WIDE], vs[WIDE];
        here.load(p, ps);
        here.load(g, gs);
        here.load(m, ms);
        here.load(v, vs);
        const auto [lr, decay] = rates_at(here.first, table, numbers);
        const Sum rate = lr / correction1;
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
    Mirror* __restrict__ mirror, const long long* __restrict__ table, const Sum* __restrict__ numbers, Sum rest1, Sum rest2, Sum epsilon) {
    const Sum scale = numbers[0], correction1 = numbers[1], correction2 = numbers[2];
    each_share<WIDE>(n, [&](auto here) {
        Sum ps[WIDE], gs[WIDE], ms[WIDE], vs[WIDE];
        here.load(p, ps);
        here.load(g, gs);
        here.load(m, ms);
        here.load(v, vs);
        const auto [lr, decay] = rates_at(here.first, table, numbers);
        const Sum keep = Sum(1) - lr * decay, rate = lr / correction1;
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
