// Element by element over n contiguous elements: activations, sums, a bias to every row.
// Launch, but for add_bias: grid (any), block (256); n >= 0 may be anything, and arrays need no alignment.
#include "activation.cuh"
#include "flat.cuh"
#include "reduce.cuh"

constexpr int WIDE = RUN<Element>;

// dz = dy x activation'(z). dz may be z or dy.
extern "C" __global__ void __launch_bounds__(256) activation_backward(
    long long n, int activation, const Element* z, const Element* dy, Element* dz) {
    with_activation(activation, [&](auto kind) {
        map_pairs(n, z, dy, dz, [&](Sum z, Sum dy) { return dy * activation_slope(z, kind); });
    });
}

// y = activation(x), for activations that no product comes before.
extern "C" __global__ void __launch_bounds__(256) activation_forward(long long n, int activation, const Element* x, Element* y) {
    with_activation(activation, [&](auto kind) { map_elements(n, x, y, [&](Sum x) { return activate(x, kind); }); });
}

// y = a + b. y may be a or b.
extern "C" __global__ void __launch_bounds__(256) add(long long n, const Element* a, const Element* b, Element* y) {
    map_pairs(n, a, b, y, [](Sum a, Sum b) { return a + b; });
}

// y = alpha a + beta b, or alpha a where b is null. y may be a or b.
extern "C" __global__ void __launch_bounds__(256) weighted_sum(
    long long n, Sum alpha, const Element* a, Sum beta, const Element* b, Element* y) {
    each_share<WIDE>(n, [&](auto here) {
        Sum as[WIDE], bs[WIDE] = {};
        here.load(a, as);
        if (b) here.load(b, bs);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) as[j] = fma(alpha, as[j], beta * bs[j]);
        here.store(y, as);
    }, a, b, y);
}

// y[m, c] = x[m, c] + b[c] + residual[m, c].    x, residual, y: (M, C) row-major; b: (C,); b or residual may be null, and y be x
// One warp a row. Launch: grid (ceil(M / 4)), block (128).
extern "C" __global__ void __launch_bounds__(128) add_bias(
    int M, int C, const Element* x, const Element* __restrict__ b, const Element* __restrict__ residual, Element* y) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= M) return;
    const long long at = (long long)row * C;
    const bool vector = in_runs<WIDE>(x, C) && in_runs<WIDE>(y, C) && in_runs<WIDE>(residual, C);
    const bool vector_bias = in_runs<WIDE>(b, 0);
    for (int c = WIDE * lane; c < C; c += 32 * WIDE) {
        Sum ys[WIDE], bs[WIDE] = {}, rs[WIDE];
        load_run(x + at, c, C, vector, ys);
        if (b) load_run(b, c, C, vector_bias, bs);
        if (residual) load_run(residual + at, c, C, vector, rs);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            ys[j] += bs[j];
            if (residual) ys[j] = plus(ys[j], rs[j]);
        }
        store_run(y + at, c, C, vector, ys);
    }
}

// The part of a gate z that passes: activation(z) / z. SiLU is z / (1 + e^-z).
__device__ __forceinline__ Sum gate_of(Sum z, bool is_gelu) { return is_gelu ? gelu_gate(z) : logistic(z); }

// y[m, c] = activation(x[m, c]) x[m, N + c]; the activation is GELU or SiLU.    x: (M, 2 N), y: (M, N) row-major
// One warp a row. Launch: grid (ceil(M / 4)), block (128).
extern "C" __global__ void __launch_bounds__(128) gated(
    int M, int N, int is_gelu, const Element* __restrict__ x, Element* __restrict__ y) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= M) return;
    const Element* gates = x + (long long)row * 2 * N;
    const bool vector = in_runs<WIDE>(x, N) && in_runs<WIDE>(y, N);
    for (int c = WIDE * lane; c < N; c += 32 * WIDE) {
        Sum gate[WIDE], up[WIDE];
        load_run(gates, c, N, vector, gate);
        load_run(gates + N, c, N, vector, up);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) gate[j] *= gate_of(gate[j], is_gelu) * up[j];
        store_run(y + (long long)row * N, c, N, vector, gate);
    }
}

// The gradient of gated.    dy: (M, N), dx: (M, 2 N). Launch as above.
extern "C" __global__ void __launch_bounds__(128) gated_backward(
    int M, int N, int is_gelu, const Element* __restrict__ dy, const Element* __restrict__ x, Element* __restrict__ dx) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= M) return;
    const Element* gates = x + (long long)row * 2 * N;
    Element* to = dx + (long long)row * 2 * N;
    const bool vector = in_runs<WIDE>(x, N) && in_runs<WIDE>(dy, N) && in_runs<WIDE>(dx, N);
    for (int c = WIDE * lane; c < N; c += 32 * WIDE) {
        Sum gate[WIDE], up[WIDE], d[WIDE];
        load_run(gates, c, N, vector, gate);
        load_run(gates + N, c, N, vector, up);
        load_run(dy + (long long)row * N, c, N, vector, d);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            const Sum share = gate_of(gate[j], is_gelu), value = gate[j] * share;
            const Sum slope =
                is_gelu ? activation_slope(gate[j], ACTIVATION_GELU) : share * (Sum(1) + gate[j] * (Sum(1) - share));
            gate[j] = d[j] * up[j] * slope;
            up[j] = d[j] * value;
        }
        store_run(to, c, N, vector, gate);
        store_run(to + N, c, N, vector, up);
    }
}

// y = cap tanh(z / cap); for kind 1 z between -cap and cap, else the nearer of these; for kind 2 cap z. Rows begin `pitch` elements
// apart.    z, y: (M, N)
// One warp a row. Launch: grid (ceil(M / 4)), block (128).
extern "C" __global__ void __launch_bounds__(128) soft_cap(
    int M, int N, int pitch, int kind, Sum cap, const Element* __restrict__ z, Element* __restrict__ y) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= M) return;
    const long long at = (long long)row * pitch;
    const bool vector = in_runs<WIDE>(z, pitch) && in_runs<WIDE>(y, pitch);
    for (int c = WIDE * lane; c < N; c += 32 * WIDE) {
        Sum zs[WIDE];
        load_run(z + at, c, N, vector, zs);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            const Sum inside = zs[j] > cap ? cap : zs[j] < -cap ? -cap : zs[j];
            zs[j] = kind == 0 ? cap * tanh(zs[j] / cap) : kind == 1 ? inside : cap * zs[j];
        }
        store_run(y + at, c, N, vector, zs);
    }
}

// dz = dy (1 - tanh(z / cap)^2), or if is_hard dy, but 0 where z is beyond the limits.    z, dz: as above; dy: rows that begin dy_pitch elements apart. Launch as above.
extern "C" __global__ void __launch_bounds__(128) soft_cap_backward(
    int M, int N, int pitch, int dy_pitch, int is_hard, Sum cap, const Element* __restrict__ dy, const Element* __restrict__ z,
    Element* __restrict__ dz) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= M) return;
    const long long at = (long long)row * pitch, from = (long long)row * dy_pitch;
    const bool vector = in_runs<WIDE>(z, pitch) && in_runs<WIDE>(dz, pitch), vector_dy = in_runs<WIDE>(dy, dy_pitch);
    for (int c = WIDE * lane; c < N; c += 32 * WIDE) {
        Sum zs[WIDE], ds[WIDE];
        load_run(z + at, c, N, vector, zs);
        load_run(dy + from, c, N, vector_dy, ds);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            const Sum beyond = zs[j] > cap || zs[j] < -cap ? Sum(0) : Sum(1);
            zs[j] = ds[j] * (is_hard ? beyond : activation_slope(tanh(zs[j] / cap), ACTIVATION_TANH));
        }
        store_run(dz + at, c, N, vector, zs);
    }
}

// y[m, c] = x[m, c] / (1 + e^-z[m])    x, y: (M, N) row-major; z: (M,)
// One warp a row. Launch: grid (ceil(M / 4)), block (128).
extern "C" __global__ void __launch_bounds__(128) gate_rows(
    int M, int N, const Element* __restrict__ x, const Element* __restrict__ z, Element* __restrict__ y) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= M) return;
    const long long at = (long long)row * N;
    const bool vector = in_runs<WIDE>(x, N) && in_runs<WIDE>(y, N);
    const Sum share = logistic(wide(z[row]));
    for (int c = WIDE * lane; c < N; c += 32 * WIDE) {
        Sum xs[WIDE];
        load_run(x + at, c, N, vector, xs);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) xs[j] *= share;
        store_run(y + at, c, N, vector, xs);
    }
}

// The gradients of gate_rows: dx = dy s and dz = s (1 - s) sum of dy x over a row, with s = 1 / (1 + e^-z).
// dy, x, dx: (M, N), z, dz: (M,). Launch as above.
extern "C" __global__ void __launch_bounds__(128) gate_rows_backward(
    int M, int N, const Element* __restrict__ dy, const Element* __restrict__ x, const Element* __restrict__ z,
    Element* __restrict__ dx, Element* __restrict__ dz) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= M) return;
    const long long at = (long long)row * N;
    const bool vector = in_runs<WIDE>(x, N) && in_runs<WIDE>(dy, N) && in_runs<WIDE>(dx, N);
    const Sum share = logistic(wide(z[row]));
    Sum total = 0;
    for (int c = WIDE * lane; c < N; c += 32 * WIDE) {
        Sum xs[WIDE], ds[WIDE];
        load_run(x + at, c, N, vector, xs);
        load_run(dy + at, c, N, vector, ds);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            total = fma(ds[j], xs[j], total);
            ds[j] *= share;
        }
        store_run(dx + at, c, N, vector, ds);
    }
    total = warp_sum(total);
    if (lane == 0) dz[row] = narrow<Element>(total * share * (Sum(1) - share));
}
