// Rotary positions (Su et al. 2021): the pair of channels i and i + D / 2 of a head is turned by its position's angle.
// x, y: (M, heads, 2 half) row-major, M = B T rows; y may be x. The first `turned` heads are turned, the others copied.
// rotations: (context, 2, half), cosines and sines of each position's angles; positions: (M,), or null: row m is at m mod T;
// n = M heads
#include "reduce.cuh"

// One warp a head of a row. direction: 1, or -1 for the gradient. Launch: grid (ceil(M heads / 4)), block (128).
extern "C" __global__ void __launch_bounds__(128) rotate(
    long long n, int T, int heads, int turned, int half, Sum direction, const Element* x, const Sum* __restrict__ rotations,
    const Index* __restrict__ positions, Element* y) {
    const long long i = blockIdx.x * 4LL + threadIdx.x / 32, row = i / heads;
    if (i >= n) return;
    const bool turns = i % heads < turned;
    const Sum* turn = rotations + (!turns ? 0 : positions ? (long long)positions[row] : row % T) * 2 * half;
    x += i * 2 * half;
    y += i * 2 * half;
    for (int c = threadIdx.x % 32; c < half; c += 32) {
        const Sum a = wide(x[c]), b = wide(x[c + half]);
        const Sum cosine = turns ? turn[c] : Sum(1), sine = turns ? direction * turn[c + half] : Sum(0);
        y[c] = narrow<Element>(a * cosine - b * sine);
        y[c + half] = narrow<Element>(b * cosine + a * sine);
    }
}
