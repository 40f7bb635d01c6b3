// Accesses whose transactions are known from the layout of the banks: test_transactions.py has the numbers.
#include <cuda_fp16.h>

// STRIDE: in elements, from lane to lane.
extern "C" __global__ void strided(int stride, Element* y) {
    __shared__ __align__(16) Element tile[1024];
    tile[stride * threadIdx.x] = y[threadIdx.x];
    __syncwarp();
    y[threadIdx.x] = tile[stride * threadIdx.x];
}

extern "C" __global__ void one_word(float* y) {
    __shared__ __align__(16) float tile[32];
    tile[threadIdx.x] = y[threadIdx.x];
    __syncwarp();
    y[threadIdx.x] = tile[7];
}

extern "C" __global__ void added(int apart, unsigned* y) {
    __shared__ __align__(16) unsigned counts[32];
    counts[threadIdx.x] = 0;
    __syncwarp();
    atomicAdd(&counts[apart * threadIdx.x], 1u);
    __syncwarp();
    y[threadIdx.x] = counts[threadIdx.x];
}

// Lanes below `few` go round twice, the others once.
extern "C" __global__ void unequal(int few, float* y) {
    __shared__ __align__(16) float tile[64];
    for (int i = threadIdx.x; i < 32 + few; i += 32) tile[i] = y[i];
    __syncwarp();
    y[threadIdx.x] = tile[threadIdx.x];
}

extern "C" __global__ void columns_of(int pitch, const float* x, float* y) { y[threadIdx.x] = x[pitch * threadIdx.x]; }
