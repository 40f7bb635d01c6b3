// LayerNorm over the last dim of x: (M, C) row-major (Ba, Kiros & Hinton 2016), forward and backward.
//
// normal = (x - mean) inverse, inverse = 1 / sqrt(variance + epsilon), y = normal gain + bias; gain, bias: (C,)
// One warp a row, so C >= 1 may be anything; the variance is taken about the mean, in a second pass over the row, which
// is still in the nearest cache. Launch: grid (ceil(M / 4)), block (128); whole warps past the last row leave.
#include "reduce.cuh"

constexpr int WARPS = 4;

extern "C" __global__ void __launch_bounds__(128) layer_norm(
    int M, int C, Sum epsilon, const Element* __restrict__ x, const Element* __restrict__ gain,
    const Element* __restrict__ bias, Element* __restrict__ y, Sum* __restrict__ mean, Sum* __restrict__ inverse) {
    const int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= M) return;
    const long long at = (long long)row * C;
    const bool vector = in_fours(x, C) && in_fours(y, C), vector_weights = in_fours(gain, 0) && in_fours(bias, 0);
    Sum four[4], sum = 0, squares = 0;
    for (int c = 4 * lane; c < C; c += 128) {
        load_four(x + at, c, C, vector, four);
        sum += (four[0] + four[1]) + (four[2] + four[3]);
    }
    const Sum centre = warp_sum(sum) / Sum(C);
    for (int c = 4 * lane; c < C; c += 128) {
        load_four(x + at, c, C, vector, four);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (c + i < C) squares += (four[i] - centre) * (four[i] - centre);
    }
    const Sum scale = Sum(1) / sqrt(warp_sum(squares) / Sum(C) + epsilon);
    for (int c = 4 * lane; c < C; c += 128) {
        Sum g[4], b[4];
        load_four(x + at, c, C, vector, four);
        load_four(gain, c, C, vector_weights, g);
        load_four(bias, c, C, vector_weights, b);
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = (four[i] - centre) * scale * g[i] + b[i];
        store_four(y + at, c, C, vector, four);
    }
    if (lane == 0) {
        mean[row] = centre;
        inverse[row] = scale;
    }
}

// With d = dy gain: dx = inverse (d - mean of d - normal x mean of (d normal)), means over the row.
extern "C" __global__ void __launch_bounds__(128) layer_norm_backward_input(
    int M, int C, const Element* __restrict__ dy, const Element* __restrict__ gain, const Element* __restrict__ x,
    const Sum* __restrict__ mean, const Sum* __restrict__ inverse, Element* __restrict__ dx) {
    const int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= M) return;
    const long long at = (long long)row * C;
    const bool vector = in_fours(x, C) && in_fours(dy, C) && in_fours(dx, C), vector_gain = in_fours(gain, 0);
    const Sum centre = mean[row], scale = inverse[row];
    Sum xs[4], dys[4], g[4], sum = 0, dot = 0;
    for (int c = 4 * lane; c < C; c += 128) {
        load_four(x + at, c, C, vector, xs);
        load_four(dy + at, c, C, vector, dys);
        load_four(gain, c, C, vector_gain, g);
#pragma unroll
        for (int i = 0; i < 4; ++i) {    // beyond C the gain is 0
            sum += dys[i] * g[i];
            dot += dys[i] * g[i] * (xs[i] - centre) * scale;
        }
    }
    sum = warp_sum(sum) / Sum(C);
    dot = warp_sum(dot) / Sum(C);
    for (int c = 4 * lane; c < C; c += 128) {
        load_four(x + at, c, C, vector, xs);
        load_four(dy + at, c, C, vector, dys);
        load_four(gain, c, C, vector_gain, g);
#pragma unroll
        for (int i = 0; i < 4; ++i) xs[i] = scale * (dys[i] * g[i] - sum - (xs[i] - centre) * scale * dot);
        store_four(dx + at, c, C, vector, xs);
    }
}

// gain_parts[p, c] = sum of dy normal, bias_parts[p, c] = sum of dy, over the rows of part p; parts: (P, C), for add_parts.
// 32 columns a block, 8 rows at a time. Launch: grid (ceil(C / 32), P), block (32, 8).
extern "C" __global__ void __launch_bounds__(256) layer_norm_backward_weight(
    int M, int C, const Element* __restrict__ dy, const Element* __restrict__ x, const Sum* __restrict__ mean,
    const Sum* __restrict__ inverse, Sum* __restrict__ gain_parts, Sum* __restrict__ bias_parts) {
    __shared__ Sum gains[8][33], biases[8][33];
    const int c = blockIdx.x * 32 + threadIdx.x;
    const int begin = int((long long)M * blockIdx.y / gridDim.y), end = int((long long)M * (blockIdx.y + 1) / gridDim.y);
    Sum gain = 0, bias = 0;
    if (c < C)
        for (int row = begin + threadIdx.y; row < end; row += 8) {
            const long long at = (long long)row * C + c;
            const Sum d = wide(dy[at]);
            gain += d * (wide(x[at]) - mean[row]) * inverse[row];
            bias += d;
        }
    gains[threadIdx.y][threadIdx.x] = gain;
    biases[threadIdx.y][threadIdx.x] = bias;
    __syncthreads();
    if (threadIdx.y > 0 || c >= C) return;
    for (int i = 1; i < 8; ++i) {
        gain += gains[i][threadIdx.x];
        bias += biases[i][threadIdx.x];
    }
    gain_parts[(long long)blockIdx.y * C + c] = gain;
    bias_parts[(long long)blockIdx.y * C + c] = bias;
}
