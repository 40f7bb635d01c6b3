// LayerNorm over the last dim of x: (M, C) row-major (Ba, Kiros & Hinton 2016), forward and backward.
//
// normal = (x - mean) inverse, inverse = 1 / sqrt(variance + epsilon), y = normal gain + bias; gain, bias: (C,)
// With CENTRED 0 it is RMSNorm (Zhang & Sennrich 2019): the mean is 0, and there is neither bias nor mean, which are null.
// One warp a row, so C >= 1 may be anything; the variance is taken about the mean, in a second pass over the row.
// Launch: grid (ceil(M / 4)), block (128); whole warps past the last row leave.
#include "reduce.cuh"

#ifndef ROW_RUNS
#define ROW_RUNS 0
#endif
#ifndef CENTRED
#define CENTRED 1
#endif

constexpr int WARPS = 4, WIDE = RUN<Element>, HELD = ROW_RUNS > 0 ? ROW_RUNS : 1;

// With ROW_RUNS a lane has its runs of a row in registers, so C <= ROW_RUNS 32 WIDE; with 0 it reads them anew for each pass.
extern "C" __global__ void __launch_bounds__(128) layer_norm(
    int M, int C, Sum epsilon, const Element* __restrict__ x, const Element* __restrict__ gain,
    const Element* __restrict__ bias, Element* __restrict__ y, Sum* __restrict__ mean, Sum* __restrict__ inverse) {
    const int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= M) return;
    const long long at = (long long)row * C;
    const bool vector = in_runs<WIDE>(x, C) && in_runs<WIDE>(y, C);
    const bool vector_weights = in_runs<WIDE>(gain, 0) && in_runs<WIDE>(bias, 0);
    Sum held[HELD][WIDE], sum = 0, squares = 0;
    if constexpr (ROW_RUNS > 0) {
        Run<Element, WIDE> runs[HELD];
#pragma unroll
        for (int r = 0; r < HELD; ++r) runs[r] = stored_run<WIDE>(x + at, WIDE * (lane + 32 * r), C, vector);
#pragma unroll
        for (int r = 0; r < HELD; ++r) widened(runs[r], held[r]);
    }
    // Calls take(c, run) for each run of the row that is this lane's.
    auto each_run = [&](auto take) {
        if constexpr (ROW_RUNS > 0) {
#pragma unroll
            for (int r = 0; r < HELD; ++r)
                if (WIDE * (lane + 32 * r) < C) take(WIDE * (lane + 32 * r), held[r]);
        } else {
            for (int c = WIDE * lane; c < C; c += 32 * WIDE) {
                load_run(x + at, c, C, vector, held[0]);
                take(c, held[0]);
            }
        }
    };
    if (CENTRED) each_run([&](int, Sum (&run)[WIDE]) {
#pragma unroll
        for (int i = 0; i < WIDE; i += 4) sum += (run[i] + run[i + 1]) + (run[i + 2] + run[i + 3]);
    });
    const Sum centre = CENTRED ? warp_sum(sum) / Sum(C) : Sum(0);
    each_run([&](int c, Sum (&run)[WIDE]) {
#pragma unroll
        for (int i = 0; i < WIDE; ++i)
            if (c + i < C) squares += (run[i] - centre) * (run[i] - centre);
    });
    const Sum scale = Sum(1) / sqrt(warp_sum(squares) / Sum(C) + epsilon);
    each_run([&](int c, Sum (&run)[WIDE]) {
        Sum g[WIDE], b[WIDE] = {};
        load_run(gain, c, C, vector_weights, g);
        if (CENTRED) load_run(bias, c, C, vector_weights, b);
#pragma unroll
        for (int i = 0; i < WIDE; ++i) run[i] = (run[i] - centre) * scale * g[i] + b[i];
        store_run(y + at, c, C, vector, run);
    });
    if (lane == 0) {
        if (CENTRED) mean[row] = centre;
        inverse[row] = scale;
    }
}

// With d = dy gain: dx = inverse (d - mean of d - normal x mean of (d normal)) + residual, means over the row; residual: (M, C),
// or null for none. And for the weights, of the
// rows of part p: gain_parts[p, c] = sum of dy normal, bias_parts[p, c] = sum of dy; parts: (P, C), for add_parts.
// All threads of a block go through one part's rows together. A thread has one run of columns, in registers, so that sums down
// them need no barrier. The next row is loaded before the barrier of a row.
// Launch: grid (P), block (whole warps, at least C / WIDE threads).
extern "C" __global__ void __launch_bounds__(512) layer_norm_backward(
    int M, int C, const Element* __restrict__ dy, const Element* __restrict__ gain, const Element* __restrict__ x,
    const Sum* __restrict__ mean, const Sum* __restrict__ inverse, const Element* __restrict__ residual, Element* __restrict__ dx,
    Sum* __restrict__ gain_parts, Sum* __restrict__ bias_parts) {
    __shared__ __align__(16) Sum scratch[2][2][16];    // of rows by turns: one barrier a row
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, c = WIDE * threadIdx.x;
    const int begin = int((long long)M * blockIdx.x / gridDim.x), end = int((long long)M * (blockIdx.x + 1) / gridDim.x);
    const bool vector = in_runs<WIDE>(x, C) && in_runs<WIDE>(dy, C) && in_runs<WIDE>(dx, C) &&
        (!residual || in_runs<WIDE>(residual, C));
    Run<Element, WIDE> xs, dys, residuals;
    Sum centre = 0, scale = 0, g[WIDE], gains[WIDE] = {}, biases[WIDE] = {};
    load_run(gain, c, C, in_runs<WIDE>(gain, 0), g);
    auto fetch = [&](int row) {
        const long long at = (long long)row * C;
        xs = stored_run<WIDE>(x + at, c, C, vector);
        dys = stored_run<WIDE>(dy + at, c, C, vector);
        if (residual) residuals = stored_run<WIDE>(residual + at, c, C, vector);
        if (CENTRED) centre = mean[row];
        scale = inverse[row];
    };
    if (begin < end) fetch(begin);
    for (int row = begin; row < end; ++row) {
        Sum normal[WIDE], d[WIDE], added[WIDE] = {}, sum = 0, dot = 0;
        const Sum row_scale = scale;
        widened(xs, normal);
        widened(dys, d);
        if (residual) widened(residuals, added);
#pragma unroll
        for (int i = 0; i < WIDE; ++i) {    // beyond C the gain is 0
            normal[i] = (normal[i] - centre) * scale;
            biases[i] += d[i];
            gains[i] += d[i] * normal[i];
            d[i] *= g[i];
            sum += d[i];
            dot += d[i] * normal[i];
        }
        if (row + 1 < end) fetch(row + 1);
        sum = warp_sum(sum);
        dot = warp_sum(dot);
        Sum (&mine)[2][16] = scratch[row % 2];
        if (lane == 0) mine[0][warp] = sum, mine[1][warp] = dot;
        __syncthreads();    // all have left the row before, and with it the other scratch
        sum = CENTRED ? warp_sum(lane < warps ? mine[0][lane] : Sum(0)) / Sum(C) : Sum(0);
        dot = warp_sum(lane < warps ? mine[1][lane] : Sum(0)) / Sum(C);
#pragma unroll
        for (int i = 0; i < WIDE; ++i) {
            d[i] = row_scale * (d[i] - sum - normal[i] * dot);
            if (residual) d[i] = plus(d[i], added[i]);
        }
        store_run(dx + (long long)row * C, c, C, vector, d);
    }
    gain_parts += (long long)blockIdx.x * C;
    bias_parts += (long long)blockIdx.x * C;
    store_run(gain_parts, c, C, in_runs<WIDE>(gain_parts, 0), gains);
    if (CENTRED) store_run(bias_parts, c, C, in_runs<WIDE>(bias_parts, 0), biases);
}

// The same for rows of any length: a thread has several runs of columns.
// With `keep` what a row needs again waits in shared memory, beside the sums: x and dy are read once.
// Launch: grid (P), block (any whole warps). Dynamic shared memory: with `keep` normal, d and both sums, (4, C up to runs).
extern "C" __global__ void __launch_bounds__(1024) layer_norm_backward_wide(
    int M, int C, int keep, const Element* __restrict__ dy, const Element* __restrict__ gain, const Element* __restrict__ x,
    const Sum* __restrict__ mean, const Sum* __restrict__ inverse, const Element* __restrict__ residual, Element* __restrict__ dx,
    Sum* gain_parts, Sum* bias_parts) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    __shared__ __align__(16) Sum scratch[2][2][32];    // of rows by turns: one barrier a row
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, room = (C + WIDE - 1) / WIDE * WIDE;
    const int begin = int((long long)M * blockIdx.x / gridDim.x), end = int((long long)M * (blockIdx.x + 1) / gridDim.x);
    const bool vector = in_runs<WIDE>(x, C) && in_runs<WIDE>(dy, C) && in_runs<WIDE>(dx, C) &&
        (!residual || in_runs<WIDE>(residual, C));
    const bool vector_gain = in_runs<WIDE>(gain, 0);
    Sum *normals = reinterpret_cast<Sum*>(dynamic_shared), *ds = normals + room;
    Sum *gains = gain_parts + (long long)blockIdx.x * C, *biases = bias_parts + (long long)blockIdx.x * C;
    Sum *gain_sums = ds + room, *bias_sums = ds + 2 * room;
    const int runs = room / WIDE;
    // Adds to a thread's columns of the sums down the rows: in shared memory with `keep`.
    auto add = [&](Sum* shared, Sum* parts, int c, const Sum (&addend)[WIDE], bool is_first) {
        Sum sums[WIDE] = {};
        const bool vector_parts = in_runs<WIDE>(parts, 0);
        if (!is_first && keep) load_pieces(shared, runs, c / WIDE, sums);
        if (!is_first && !keep) load_run(parts, c, C, vector_parts, sums);
#pragma unroll
        for (int i = 0; i < WIDE; ++i) sums[i] += addend[i];
        if (keep) store_pieces(shared, runs, c / WIDE, sums);
        else store_run(parts, c, C, vector_parts, sums);
    };
    if (begin == end) {
        const Sum none[WIDE] = {};
        for (int c = WIDE * threadIdx.x; c < C; c += WIDE * blockDim.x) {
            add(gain_sums, gains, c, none, true);
            if (CENTRED) add(bias_sums, biases, c, none, true);
        }
    }
    for (int row = begin; row < end; ++row) {
        const long long at = (long long)row * C;
        const Sum centre = CENTRED ? mean[row] : Sum(0), scale = inverse[row];
        auto read = [&](int c, Sum (&normal)[WIDE], Sum (&dys)[WIDE], Sum (&d)[WIDE]) {
            Sum g[WIDE];
            load_run(x + at, c, C, vector, normal);
            load_run(dy + at, c, C, vector, dys);
            load_run(gain, c, C, vector_gain, g);
#pragma unroll
            for (int i = 0; i < WIDE; ++i) {    // beyond C the gain is 0
                normal[i] = (normal[i] - centre) * scale;
                d[i] = dys[i] * g[i];
            }
        };
        Sum normal[WIDE], dys[WIDE], d[WIDE], sum = 0, dot = 0;
        for (int c = WIDE * threadIdx.x; c < C; c += WIDE * blockDim.x) {
            read(c, normal, dys, d);
#pragma unroll
            for (int i = 0; i < WIDE; ++i) {
                sum += d[i];
                dot += d[i] * normal[i];
            }
            if (keep) {
                store_pieces(normals, runs, c / WIDE, normal);
                store_pieces(ds, runs, c / WIDE, d);
            }
            if (CENTRED) add(bias_sums, biases, c, dys, row == begin);
#pragma unroll
            for (int i = 0; i < WIDE; ++i) dys[i] *= normal[i];
            add(gain_sums, gains, c, dys, row == begin);
        }
        sum = warp_sum(sum);
        dot = warp_sum(dot);
        Sum (&mine)[2][32] = scratch[row % 2];
        if (lane == 0) mine[0][warp] = sum, mine[1][warp] = dot;
        __syncthreads();    // all have left the row before, and with it the other scratch
        sum = CENTRED ? warp_sum(lane < warps ? mine[0][lane] : Sum(0)) / Sum(C) : Sum(0);
        dot = warp_sum(lane < warps ? mine[1][lane] : Sum(0)) / Sum(C);
        for (int c = WIDE * threadIdx.x; c < C; c += WIDE * blockDim.x) {
            if (keep) {
                load_pieces(normals, runs, c / WIDE, normal);
                load_pieces(ds, runs, c / WIDE, d);
            } else {
                read(c, normal, dys, d);
            }
#pragma unroll
            for (int i = 0; i < WIDE; ++i) d[i] = scale * (d[i] - sum - normal[i] * dot);
            if (residual) {
                load_run(residual + at, c, C, vector, dys);
#pragma unroll
                for (int i = 0; i < WIDE; ++i) d[i] = plus(d[i], dys[i]);
            }
            store_run(dx + at, c, C, vector, d);
        }
    }
    if (!keep) return;
    for (int c = WIDE * threadIdx.x; c < C; c += WIDE * blockDim.x) {
        Sum sums[WIDE];
        load_pieces(gain_sums, runs, c / WIDE, sums);
        store_run(gains, c, C, in_runs<WIDE>(gains, 0), sums);
        if (!CENTRED) continue;
        load_pieces(bias_sums, runs, c / WIDE, sums);
        store_run(biases, c, C, in_runs<WIDE>(biases, 0), sums);
    }
}
