// What attention on ordinary units and on tensor cores have in common: sums before the backward, and the join of two parts.
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

// Joins attention of the last P of Q queries to other keys, `part`, to y and log_sums, in place. y: (B, Q, H D); part: (B, P, H D);
// log_sums: (B, H, Q); part_sums: (B, H, P), -infinity where a query sees none of the other keys. unit: ln of the base of the
// logarithms. One warp a row. Launch: grid (ceil(B H P / 4)), block (128).
extern "C" __global__ void __launch_bounds__(128) attention_join(
    int B, int Q, int P, int H, int D, Sum unit, const Element* __restrict__ part, const Sum* __restrict__ part_sums, Element* y,
    Sum* log_sums) {
    const long long row = blockIdx.x * 4LL + threadIdx.x / 32;
    if (row >= (long long)B * H * P) return;
    const int lane = threadIdx.x % 32, p = int(row % P), h = int(row / P % H), b = int(row / P / H), q = Q - P + p;
    const long long own = ((long long)b * H + h) * Q + q, to = (((long long)b * Q + q) * H + h) * D;
    const long long from = (((long long)b * P + p) * H + h) * D;
    const Sum before = log_sums[own], more = part_sums[row], largest = larger(before, more);
    const Sum kept = exp((before - largest) * unit), added = exp((more - largest) * unit), sum = kept + added;
    for (int d = lane; d < D; d += 32)
        y[to + d] = narrow<Element>((wide(y[to + d]) * kept + wide(part[from + d]) * added) / sum);
    __syncwarp();    // all lanes have read the log sum
    if (lane == 0) log_sums[own] = largest + log(sum) / unit;
}
