// Images with channels last: the windows of a convolution as rows of a matrix, and max-pooling.
// B images of rows x columns, C channels; a kernel has S rows and S columns, a pooling window P and P.
// One warp per pixel, or row of kernels, of which there are M. Launch: grid (ceil(M / 4)), block (128); M may be 0.
#include "element.cuh"

// windows[m, (i, j, c)] = x[b, h + i - S / 2, w + j - S / 2, c], and 0 outside the image, of output pixel (b, h, w) = first + m.
// x: any strides, in elements; windows: (M, S S C)
extern "C" __global__ void __launch_bounds__(128) image_windows(
    int M, long long first, int rows, int columns, int C, int S, long long step_b, long long step_h, long long step_w,
    long long step_c, const Element* __restrict__ x, Element* __restrict__ windows) {
    const int m = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (m >= M) return;
    const long long pixel = first + m;
    const int top = int(pixel / columns % rows) - S / 2, left = int(pixel % columns) - S / 2, K = S * S * C;
    const Element* image = x + pixel / columns / rows * step_b;
    // Each step of a lane advances 32 elements: so many rows, columns and channels of the window.
    const int more_i = 32 / C / S, more_j = 32 / C % S, more_c = 32 % C;
    int i = lane / C / S, j = lane / C % S, c = lane % C;
    for (int k = lane; k < K; k += 32) {
        const int h = top + i, w = left + j;
        const bool inside = h >= 0 && h < rows && w >= 0 && w < columns;
        windows[(long long)m * K + k] = inside ? image[h * step_h + w * step_w + c * step_c] : narrow<Element>(Sum(0));
        c += more_c;
        j += more_j;
        i += more_i;
        if (c >= C) c -= C, ++j;
        if (j >= S) j -= S, ++i;
    }
}

// turned[c, (i, j, n)] = w[n, (S - 1 - i, S - 1 - j, c)], for the rows m = (n, i, j) of C elements of w.
// w: (N, S S C); turned: (C, S S N)
extern "C" __global__ void __launch_bounds__(128) turned_kernels(
    int M, int N, int C, int S, const Element* __restrict__ w, Element* __restrict__ turned) {
    const int m = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (m >= M) return;
    const int n = m / (S * S), tap = S * S - 1 - m % (S * S);
    for (int c = lane; c < C; c += 32) turned[((long long)c * S * S + tap) * N + n] = w[(long long)m * C + c];
}

// y[b, h, w, c] = the largest x[b, P h + i, P w + j, c], which is number P i + j of its window: the first of equal ones, or a NaN.
// x: (B, rows, columns, C); y, winners: (B, rows / P, columns / P, C), of M pixels
extern "C" __global__ void __launch_bounds__(128) max_pool(
    int M, int rows, int columns, int C, int P, const Element* __restrict__ x, Element* __restrict__ y,
    unsigned char* __restrict__ winners) {
    const int m = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, down = rows / P, across = columns / P;
    if (m >= M) return;
    const long long row = (long long)(m / across / down) * rows + m / across % down * P;
    const Element* window = x + (row * columns + m % across * P) * C;
    for (int c = lane; c < C; c += 32) {
        Sum best = Sum(0);
        int winner = -1;
        for (int i = 0; i < P; ++i) {
            for (int j = 0; j < P; ++j) {
                const Sum value = wide(window[((long long)i * columns + j) * C + c]);
                if (winner < 0 || value > best || value != value) best = value, winner = i * P + j;
            }
        }
        y[(long long)m * C + c] = narrow<Element>(best);
        winners[(long long)m * C + c] = (unsigned char)winner;
    }
}

// dx[b, h, w, c] = dy of the window that x[b, h, w, c] wins, else 0; pixels outside all windows have 0.
// dx: (B, rows, columns, C), of M pixels; dy, winners: (B, rows / P, columns / P, C)
extern "C" __global__ void __launch_bounds__(128) max_pool_backward(
    int M, int rows, int columns, int C, int P, const Element* __restrict__ dy, const unsigned char* __restrict__ winners,
    Element* __restrict__ dx) {
    const int m = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, down = rows / P, across = columns / P;
    if (m >= M) return;
    const int h = m / columns % rows, w = m % columns, number = h % P * P + w % P;
    const bool inside = h / P < down && w / P < across;
    const long long window = ((long long)(m / columns / rows) * down + h / P) * across + w / P;
    for (int c = lane; c < C; c += 32) {
        const bool won = inside && winners[window * C + c] == number;
        dx[(long long)m * C + c] = won ? dy[window * C + c] : narrow<Element>(Sum(0));
    }
}
