// Rotary positions (Su et al. 2021): the pair of channels i and i + D / 2 of a head is turned by its position's angle.
// x, y: (M, heads, 2 half) row-major, M = B T rows; y may be x. The first `turned` heads are turned, the others copied.
// table: (context, 2, half), cosines and sines of each position's angles; positions: (M,), or null: row m is at m mod T
#include "reduce.cuh"

// One thread a pair. direction: 1, or -1 for the gradient. Launch: grid (any), block (256).
extern "C" __global__ void __launch_bounds__(256) rotate(
    long long n, int T, int heads, int turned, int half, Sum direction, const Element* x, const Sum* __restrict__ table,
    const Index* __restrict__ positions, Element* y) {
    for (long long i = blockIdx.x * 256LL + threadIdx.x; i < n; i += 256LL * gridDim.x) {
        const int c = int(i % half), h = int(i / half % heads);
        const long long row = i / half / heads, at = (row * heads + h) * 2 * half + c;
        const Sum a = wide(x[at]), b = wide(x[at + half]);
        if (h < turned) {
            const Sum* turn = table + (positions ? (long long)positions[row] : row % T) * 2 * half + c;
            const Sum cosine = turn[0], sine = direction * turn[half];
            y[at] = narrow<Element>(a * cosine - b * sine);
            y[at + half] = narrow<Element>(b * cosine + a * sine);
        } else {
            y[at] = narrow<Element>(a);
            y[at + half] = narrow<Element>(b);
        }
    }
}
