// Causal attention on the ordinary arithmetic units: attention.cuh describes it, its arrays and its launches.
#include "attention.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) attention(
    int T, int H, Sum scale, const Element* __restrict__ qkv, Element* __restrict__ y, Sum* __restrict__ log_sums,
    const int* __restrict__ starts) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    attend(NoMask{}, T, H, scale, qkv, y, log_sums, starts, dynamic_shared);
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_kv(
    int T, int H, Sum scale, const Element* __restrict__ qkv, const Element* __restrict__ dy, const Sum* __restrict__ log_sums,
    const Sum* __restrict__ dots, Element* dqkv, const int* __restrict__ starts) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    backward_kv(NoMask{}, T, H, scale, qkv, dy, log_sums, dots, dqkv, starts, dynamic_shared);
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_q(
    int T, int H, Sum scale, const Element* __restrict__ qkv, const Element* __restrict__ dy, const Sum* __restrict__ log_sums,
    const Sum* __restrict__ dots, Element* dqkv, const int* __restrict__ starts) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    backward_q(NoMask{}, T, H, scale, qkv, dy, log_sums, dots, dqkv, starts, dynamic_shared);
}
