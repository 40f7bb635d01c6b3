// Images with channels last: the windows of a convolution as rows of a matrix, and max-pooling. One thread per element.
// B images of rows x columns, C channels; a kernel has S rows and S columns, a pooling window P and P.
// Launch: grid (any), block (256); n >= 0 may be anything, and arrays need no alignment.
#include "element.cuh"

// windows[m, (i, j, c)] = x[b, h + i - S / 2, w + j - S / 2, c], and 0 outside the image, of output pixels (b, h, w) = first + m.
// x: any strides, in elements; windows: n elements, rows of S S C
extern "C" __global__ void __launch_bounds__(256) image_windows(
    long long n, long long first, int rows, int columns, int C, int S, long long step_b, long long step_h, long long step_w,
    long long step_c, const Element* __restrict__ x, Element* __restrict__ windows) {
    for (long long at = blockIdx.x * 256LL + threadIdx.x; at < n; at += 256LL * gridDim.x) {
        const int tap = int(at / C % (S * S)), c = int(at % C);
        const long long pixel = first + at / C / (S * S);
        const int h = int(pixel / columns % rows) + tap / S - S / 2, w = int(pixel % columns) + tap % S - S / 2;
        const bool inside = h >= 0 && h < rows && w >= 0 && w < columns;
        windows[at] = inside ? x[pixel / columns / rows * step_b + h * step_h + w * step_w + c * step_c] : narrow<Element>(Sum(0));
    }
}

// turned[c, (i, j, k)] = w[k, (S - 1 - i, S - 1 - j, c)].    w: (K, S S C); turned: (C, S S K)
extern "C" __global__ void __launch_bounds__(256) turned_kernels(
    long long n, int K, int C, int S, const Element* __restrict__ w, Element* __restrict__ turned) {
    for (long long at = blockIdx.x * 256LL + threadIdx.x; at < n; at += 256LL * gridDim.x) {
        const int k = int(at % K), tap = int(at / K % (S * S)), c = int(at / K / (S * S));
        turned[at] = w[((long long)k * S * S + S * S - 1 - tap) * C + c];
    }
}

// y[b, h, w, c] = the largest x[b, P h + i, P w + j, c], which is number P i + j of its window: the first of equal ones, or a NaN.
// x: (B, rows, columns, C); y, winners: (B, rows / P, columns / P, C), n elements
extern "C" __global__ void __launch_bounds__(256) max_pool(
    long long n, int rows, int columns, int C, int P, const Element* __restrict__ x, Element* __restrict__ y,
    unsigned char* __restrict__ winners) {
    const int down = rows / P, across = columns / P;
    for (long long at = blockIdx.x * 256LL + threadIdx.x; at < n; at += 256LL * gridDim.x) {
        const long long pixel = at / C, b = pixel / across / down;
        const int h = int(pixel / across % down) * P, w = int(pixel % across) * P, c = int(at % C);
        Sum best = Sum(0);
        int winner = -1;
        for (int i = 0; i < P * P; ++i) {
            const Sum value = wide(x[((b * rows + h + i / P) * columns + w + i % P) * C + c]);
            if (winner < 0 || value > best || value != value) best = value, winner = i;
        }
        y[at] = narrow<Element>(best);
        winners[at] = (unsigned char)winner;
    }
}

// dx[b, h, w, c] = dy of the window that x[b, h, w, c] wins, else 0; pixels outside all windows have 0.
// dx: (B, rows, columns, C), n elements; dy, winners: (B, rows / P, columns / P, C)
extern "C" __global__ void __launch_bounds__(256) max_pool_backward(
    long long n, int rows, int columns, int C, int P, const Element* __restrict__ dy, const unsigned char* __restrict__ winners,
    Element* __restrict__ dx) {
    const int down = rows / P, across = columns / P;
    for (long long at = blockIdx.x * 256LL + threadIdx.x; at < n; at += 256LL * gridDim.x) {
        const long long pixel = at / C, b = pixel / columns / rows;
        const int h = int(pixel / columns % rows), w = int(pixel % columns), c = int(at % C);
        const bool inside = h / P < down && w / P < across;
        const long long window = inside ? ((b * down + h / P) * across + w / P) * C + c : 0;
        const bool won = inside && winners[window] == h % P * P + w % P;
        dx[at] = won ? dy[window] : narrow<Element>(Sum(0));
    }
}
