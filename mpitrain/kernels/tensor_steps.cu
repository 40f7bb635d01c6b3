// Optimizer steps that need sums over whole tensors: LAMB, Adafactor and Muon.
//
// numbers: values that change with the step, in device memory. scale multiplies the gradient.
// Result: the type of sums over tensors, double in a run; sums of elements are taken in double and in a fixed order.
// rows, columns: indices of a matrix' rows and columns in the whole tensor, each once; a vector has no rows.
#include "flat.cuh"
#include "reduce.cuh"

constexpr int WIDE = RUN<Element, Mirror>;

// result[r] += sum of row r of parts: (R, count). Launch: grid (1, R), block (256).
extern "C" __global__ void __launch_bounds__(256) add_total(
    int count, const double* __restrict__ parts, Result* __restrict__ result) {
    __shared__ double scratch[8];
    double sum = 0;
    for (int i = threadIdx.x; i < count; i += 256) sum += parts[(long long)blockIdx.y * count + i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) result[blockIdx.y] += Result(sum);
}

// LAMB's update before its trust ratio: m / correction1 / (sqrt(v / correction2) + epsilon) + decay p.
__device__ __forceinline__ Sum lamb_update(
    Sum p, Sum m, Sum v, Sum correction1, Sum correction2, Sum epsilon, Sum decay) {
    return fma(decay, p, m / correction1 / (sqrt(v / correction2) + epsilon));
}

// Steps both moments as `adamw` does. square_parts: (2, blocks), the squares of p and of the update.
// numbers: scale, correction1, correction2. Launch: grid (any), block (256); n >= 0 may be anything.
extern "C" __global__ void __launch_bounds__(256) lamb_moments(
    long long n, const Element* __restrict__ p, const Element* __restrict__ g, Element* __restrict__ m,
    Element* __restrict__ v, double* __restrict__ square_parts, const Sum* __restrict__ numbers, Sum rest1, Sum rest2,
    Sum epsilon, Sum decay) {
    __shared__ double scratch[8];
    const Sum scale = numbers[0], correction1 = numbers[1], correction2 = numbers[2];
    double before = 0, step = 0;
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
            const double update = lamb_update(ps[j], ms[j], vs[j], correction1, correction2, epsilon, decay);
            before += double(ps[j]) * double(ps[j]);
            step += update * update;
        }
        here.store(m, ms);
        here.store(v, vs);
    }, p, g, m, v);
    before = block_sum(before, scratch);
    step = block_sum(step, scratch);
    if (threadIdx.x > 0) return;
    square_parts[blockIdx.x] = before;
    square_parts[gridDim.x + blockIdx.x] = step;
}

// p -= lr sqrt(squares[0] / squares[1]) update; the root is 1 where a square is 0.
// numbers: lr, correction1, correction2. Launch: grid (any), block (256); n >= 0 may be anything.
extern "C" __global__ void __launch_bounds__(256) lamb(
    long long n, Element* __restrict__ p, const Element* __restrict__ m, const Element* __restrict__ v,
    Mirror* __restrict__ mirror, const Result* __restrict__ squares, const Sum* __restrict__ numbers, Sum epsilon,
    Sum decay) {
    const Sum lr = numbers[0], correction1 = numbers[1], correction2 = numbers[2];
    const double before = squares[0], step = squares[1];
    const Sum rate = lr * Sum(before != 0 && step != 0 ? sqrt(before / step) : 1);
    each_share<WIDE>(n, [&](auto here) {
        Sum ps[WIDE], ms[WIDE], vs[WIDE];
        here.load(p, ps);
        here.load(m, ms);
        here.load(v, vs);
#pragma unroll
        for (int j = 0; j < WIDE; ++j)
            ps[j] = fma(-rate, lamb_update(ps[j], ms[j], vs[j], correction1, correction2, epsilon, decay), ps[j]);
        here.store(p, ps);
        if (mirror) here.store(mirror, ps);
    }, p, m, v, mirror);
}

// sums[rows[m]] += sum over n of (scale g[m, n])^2.    g: (M, N)
// numbers: scale. Launch: grid (ceil(M / 8)), block (256), a warp for each row.
extern "C" __global__ void __launch_bounds__(256) row_squares(
    int M, int N, const Element* __restrict__ g, const long long* __restrict__ rows, const Sum* __restrict__ numbers,
    Result* __restrict__ sums) {
    const int m = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (m >= M) return;
    const double scale = numbers[0];
    double sum = 0;
    for (int n = lane; n < N; n += 32) {
        const double x = wide(g[(long long)m * N + n]);
        sum += x * x;
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[rows[m]] += Result(scale * scale * sum);
}

// parts[p, n] = sum over the rows m of part p of g[m, n]^2.    g: (M, N); parts: (P, N)
// Launch: grid (ceil(N / 32), P), block (32, 8).
extern "C" __global__ void __launch_bounds__(256) column_squares(
    int M, int N, const Element* __restrict__ g, double* __restrict__ parts) {
    __shared__ double sums[8][32];
    const int n = blockIdx.x * 32 + threadIdx.x;
    const int begin = int((long long)M * blockIdx.y / gridDim.y), end = int((long long)M * (blockIdx.y + 1) / gridDim.y);
    double sum = 0;
    if (n < N) {
        for (int m = begin + threadIdx.y; m < end; m += 8) {
            const double x = wide(g[(long long)m * N + n]);
            sum += x * x;
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || n >= N) return;
    for (int i = 1; i < 8; ++i) sum += sums[i][threadIdx.x];
    parts[(long long)blockIdx.y * N + n] = sum;
}

// sums[columns[n]] += scale^2 x sum over p of parts[p, n].    parts: (P, N)
// numbers: scale. Launch: grid (ceil(N / 256)), block (256).
extern "C" __global__ void __launch_bounds__(256) add_column_squares(
    int P, int N, const double* __restrict__ parts, const long long* __restrict__ columns,
    const Sum* __restrict__ numbers, Result* __restrict__ sums) {
    const int n = blockIdx.x * 256 + threadIdx.x;
    if (n >= N) return;
    const double scale = numbers[0];
    double sum = 0;
    for (int p = 0; p < P; ++p) sum += parts[(long long)p * N + n];
    sums[columns[n]] += Result(scale * scale * sum);
}

// Adafactor's factored variance: row += weight (row_sums / C - row), column likewise. Then row_sums = row / max(mean of row,
// epsilon) and column_sums = column, whose product estimates an element. row and row_sums may be null: a vector, of R = 1.
// numbers: weight. Launch: grid (1), block (256): each thread reads only sums that itself wrote.
extern "C" __global__ void __launch_bounds__(256) adafactor_variances(
    int R, int C, Element* __restrict__ row, Element* __restrict__ column, Result* __restrict__ row_sums,
    Result* __restrict__ column_sums, const Sum* __restrict__ numbers, double epsilon) {
    __shared__ double scratch[8];
    const double weight = numbers[0];
    if (row) {
        double sum = 0;
        for (int r = threadIdx.x; r < R; r += 256) {
            const double before = wide(row[r]);
            row[r] = narrow<Element>(before + weight * (wide(row_sums[r]) / C - before));
            sum += wide(row[r]);
        }
        const double mean = max(block_sum(sum, scratch) / R, epsilon);
        for (int r = threadIdx.x; r < R; r += 256) row_sums[r] = Result(wide(row[r]) / mean);
    }
    for (int c = threadIdx.x; c < C; c += 256) {
        const double before = wide(column[c]);
        column[c] = narrow<Element>(before + weight * (wide(column_sums[c]) / R - before));
        column_sums[c] = Result(wide(column[c]));
    }
}

// scale g / sqrt(max(row factor x column factor, epsilon^2))
__device__ __forceinline__ Sum adafactor_of(Sum g, Sum row, Sum column, Sum epsilon) {
    return g / sqrt(max(row * column, epsilon * epsilon));
}

// parts[b] = block b's sum of squares of Adafactor's update before its clipping.    g: (M, N)
// numbers: scale. Launch: grid (any), block (256); a block takes whole rows.
extern "C" __global__ void __launch_bounds__(256) adafactor_update(
    int M, int N, const Element* __restrict__ g, const long long* __restrict__ rows, const long long* __restrict__ columns,
    const Result* __restrict__ row_factors, const Result* __restrict__ column_factors, const Sum* __restrict__ numbers,
    Sum epsilon, double* __restrict__ parts) {
    __shared__ double scratch[8];
    const Sum scale = numbers[0];
    double sum = 0;
    for (int m = blockIdx.x; m < M; m += gridDim.x) {
        const Sum row = rows ? Sum(row_factors[rows[m]]) : Sum(1);
        for (int n = threadIdx.x; n < N; n += 256) {
            const double update = adafactor_of(
                scale * wide(g[(long long)m * N + n]), row, Sum(column_factors[columns[n]]), epsilon);
            sum += update * update;
        }
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// p = (1 - lr decay) p - rate max(0.001, RMS(p)) / max(1, RMS(update)) update, roots of means over `count` elements.
// numbers: scale, lr, rate. Launch: grid (any), block (256); a block takes whole rows.
extern "C" __global__ void __launch_bounds__(256) adafactor(
    int M, int N, Element* __restrict__ p, const Element* __restrict__ g, Mirror* __restrict__ mirror,
    const long long* __restrict__ rows, const long long* __restrict__ columns, const Result* __restrict__ row_factors,
    const Result* __restrict__ column_factors, const Result* __restrict__ parameter_squares,
    const Result* __restrict__ update_squares, double count, const Sum* __restrict__ numbers, Sum epsilon, Sum decay) {
    const Sum scale = numbers[0], lr = numbers[1], rate = numbers[2], keep = Sum(1) - lr * decay;
    const double before = sqrt(double(parameter_squares[0]) / count), step = sqrt(double(update_squares[0]) / count);
    const Sum alpha = Sum(rate * max(1e-3, before) / max(1.0, step));
    for (int m = blockIdx.x; m < M; m += gridDim.x) {
        const Sum row = rows ? Sum(row_factors[rows[m]]) : Sum(1);
        long long i = (long long)m * N + threadIdx.x;
        for (int n = threadIdx.x; n < N; n += 256, i += 256) {
            const Sum update = adafactor_of(scale * wide(g[i]), row, Sum(column_factors[columns[n]]), epsilon);
            const Sum next = fma(keep, Sum(wide(p[i])), -(alpha * update));
            p[i] = narrow<Element>(next);
            if (mirror) mirror[i] = narrow<Mirror>(next);
        }
    }
}

// With g scaled: m += (1 - momentum) (g - m), out = g + momentum (m - g).
// numbers: scale. Launch: grid (any), block (256); n >= 0 may be anything.
extern "C" __global__ void __launch_bounds__(256) muon_momentum(
    long long n, const Element* __restrict__ g, Element* __restrict__ m, Element* __restrict__ out,
    const Sum* __restrict__ numbers, Sum momentum, Sum rest) {
    const Sum scale = numbers[0];
    each_share<WIDE>(n, [&](auto here) {
        Sum gs[WIDE], ms[WIDE];
        here.load(g, gs);
        here.load(m, ms);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            gs[j] *= scale;
            ms[j] = fma(rest, gs[j] - ms[j], ms[j]);
            gs[j] = fma(momentum, ms[j] - gs[j], gs[j]);
        }
        here.store(m, ms);
        here.store(out, gs);
    }, g, m, out);
}

// x /= max(sqrt(squares[0]), least). Launch: grid (any), block (256); n >= 0 may be anything.
extern "C" __global__ void __launch_bounds__(256) divide_by_norm(
    long long n, Element* __restrict__ x, const double* __restrict__ squares, Sum least) {
    const Sum norm = max(Sum(sqrt(squares[0])), least);
    each_share<WIDE>(n, [&](auto here) {
        Sum xs[WIDE];
        here.load(x, xs);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) xs[j] /= norm;
        here.store(x, xs);
    }, x);
}

// p = (1 - lr decay) p - lr ratio update. numbers: lr. Launch: grid (any), block (256); n >= 0 may be anything.
extern "C" __global__ void __launch_bounds__(256) muon(
    long long n, Element* __restrict__ p, const Element* __restrict__ update, Mirror* __restrict__ mirror,
    const Sum* __restrict__ numbers, Sum ratio, Sum decay) {
    const Sum lr = numbers[0], keep = Sum(1) - lr * decay, rate = lr * ratio;
    each_share<WIDE>(n, [&](auto here) {
        Sum ps[WIDE], us[WIDE];
        here.load(p, ps);
        here.load(update, us);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) ps[j] = fma(keep, ps[j], -(rate * us[j]));
        here.store(p, ps);
        if (mirror) here.store(mirror, ps);
    }, p, update, mirror);
}
