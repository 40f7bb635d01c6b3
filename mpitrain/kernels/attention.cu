// Attention on the ordinary arithmetic units: attention.cuh describes it, its arrays and its launches.
#include "attention.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) attention(
    int Q, int T, int offset, int window, int H, int q_pitch, int kv_pitch, int q_rows, int kv_rows, Sum scale,
    const Element* __restrict__ q, const Element* __restrict__ kv, Element* __restrict__ y, Sum* __restrict__ log_sums,
    const int* __restrict__ starts) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    const Sizes sizes(Q, T, offset, window, H, q_pitch, kv_pitch, q_rows, kv_rows);
    attend(NoMask{}, sizes, scale, q, kv, y, log_sums, starts, dynamic_shared);
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_kv(
    int Q, int T, int offset, int window, int H, int q_pitch, int kv_pitch, int q_rows, int kv_rows, Sum scale,
    const Element* __restrict__ q, const Element* __restrict__ kv, const Element* __restrict__ dy, const Sum* __restrict__ log_sums,
    const Sum* __restrict__ dots, Element* dkv, const int* __restrict__ starts) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    const Sizes sizes(Q, T, offset, window, H, q_pitch, kv_pitch, q_rows, kv_rows);
    backward_kv(NoMask{}, sizes, scale, q, kv, dy, log_sums, dots, dkv, starts, dynamic_shared);
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_q(
    int Q, int T, int offset, int window, int H, int q_pitch, int kv_pitch, int q_rows, int kv_rows, Sum scale,
    const Element* __restrict__ q, const Element* __restrict__ kv, const Element* __restrict__ dy, const Sum* __restrict__ log_sums,
    const Sum* __restrict__ dots, Element* dq, const int* __restrict__ starts) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    const Sizes sizes(Q, T, offset, window, H, q_pitch, kv_pitch, q_rows, kv_rows);
    backward_q(NoMask{}, sizes, scale, q, kv, dy, log_sums, dots, dq, starts, dynamic_shared);
}
