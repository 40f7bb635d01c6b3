// The part of the backward of attention that comes before both ways of it, on ordinary units and on tensor cores.
// y, dy: (B, T, H D); dots: (B, H, T)
#include "reduce.cuh"

// dots[b, h, t] = sum over the head's D channels of dy y: what each row of dscores has in common.
// One warp a row. Launch: grid (ceil(B H T / 4)), block (128).
extern "C" __global__ void __launch_bounds__(128) attention_dots(
    int B, int T, int H, int D, const Element* __restrict__ y, const Element* __restrict__ dy, Sum* __restrict__ dots) {
    const long long row = blockIdx.x * 4LL + threadIdx.x / 32;
    if (row >= (long long)B * H * T) return;
    const int lane = threadIdx.x % 32, t = int(row % T), h = int(row / T % H), b = int(row / T / H);
    const long long at = (((long long)b * T + t) * H + h) * D;
    Sum dot = 0;
    for (int d = lane; d < D; d += 32) dot += wide(y[at + d]) * wide(dy[at + d]);
    dot = warp_sum(dot);
    if (lane == 0) dots[row] = dot;
}
