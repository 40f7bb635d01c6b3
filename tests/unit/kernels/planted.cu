// Small kernels, each with one mistake planted in it; test_simulator.py says who must notice which.
// -DRIGHT=1 compiles the corrected form, which nobody may complain about.
#include <cuda_fp16.h>
#ifndef RIGHT
#define RIGHT 0
#endif

extern "C" __global__ void no_barrier(const float* x, float* y) {
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    if (RIGHT) __syncthreads();
    y[threadIdx.x] = tile[63 - threadIdx.x];
}

// The second round overwrites the tile while slow threads may still read the first.
extern "C" __global__ void no_barrier_before_reuse(const float* x, float* y) {
    __shared__ float tile[64];
    for (int round = 0; round < 2; ++round) {
        tile[threadIdx.x] = x[64 * round + threadIdx.x];
        __syncthreads();
        y[64 * round + threadIdx.x] = tile[63 - threadIdx.x];
        if (RIGHT) __syncthreads();
    }
}

extern "C" __global__ void no_syncwarp(const float* x, float* y) {
    __shared__ float tile[32];
    tile[threadIdx.x] = x[threadIdx.x];
    if (RIGHT) __syncwarp();
    y[threadIdx.x] = tile[(threadIdx.x + 1) % 32];
}

extern "C" __global__ void no_atomic(float* sum) {
    if (RIGHT) atomicAdd(sum, 1.0f);
    else *sum += 1.0f;
}

extern "C" __global__ void blocks_share_an_output(float* y) {
    y[RIGHT ? blockIdx.x * 32 + threadIdx.x : threadIdx.x] = threadIdx.x;
}

extern "C" __global__ void past_the_end(int n, const float* x, float* y) {
    const int i = threadIdx.x;
    if (RIGHT ? i < n : i <= n) y[i] = x[i];
}

extern "C" __global__ void before_the_start(int n, const float* x, float* y) {
    const int i = threadIdx.x;
    if (i < n) y[i] = x[RIGHT ? i : i - 1];
}

extern "C" __global__ void shared_row_overrun(float* y) {
    __shared__ float part[2][33];
    part[0][threadIdx.x] = part[1][threadIdx.x] = threadIdx.x;
    __syncthreads();
    y[threadIdx.x] = part[0][threadIdx.x] + part[1][threadIdx.x + (RIGHT ? 0 : 2)];
}

extern "C" __global__ void dynamic_shared_too_small(float* y) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    float* tile = reinterpret_cast<float*>(dynamic_shared);
    tile[threadIdx.x] = threadIdx.x;
    __syncthreads();
    y[threadIdx.x] = tile[threadIdx.x ^ 1];
}

extern "C" __global__ void uninitialised_shared(float* y) {
    __shared__ float tile[64];
    if (RIGHT || threadIdx.x < 32) tile[threadIdx.x] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = tile[threadIdx.x];
}

extern "C" __global__ void adds_to_a_fresh_output(float* y) {
    if (RIGHT) y[threadIdx.x] = 1.0f;
    else y[threadIdx.x] += 1.0f;
}

extern "C" __global__ void forgets_the_last_element(int n, float* y) {
    if (int(threadIdx.x) < (RIGHT ? n : n - 1)) y[threadIdx.x] = 1.0f;
}

extern "C" __global__ void misaligned(const float* x, float* y) {
    const int i = 4 * threadIdx.x;
    if (RIGHT) { for (int j = 0; j < 4; ++j) y[i + j] = x[i + 1 + j]; }
    else *reinterpret_cast<float4*>(y + i) = *reinterpret_cast<const float4*>(x + i + 1);
}

extern "C" __global__ void divergent_barrier(float* y) {
    if (RIGHT) { __syncthreads(); }
    else if (threadIdx.x & 1) { __syncthreads(); }
    else {
        __syncthreads();
    }
    y[threadIdx.x] = 1.0f;
}

extern "C" __global__ void leaves_before_a_barrier(int n, float* y) {
    if (!RIGHT && int(threadIdx.x) >= n) return;
    __syncthreads();
    if (int(threadIdx.x) < n) y[threadIdx.x] = 1.0f;
}

extern "C" __global__ void shuffle_within_a_branch(float* y) {
    float v = threadIdx.x;
    if (threadIdx.x < 16) v += __shfl_xor_sync(RIGHT ? 0xffffu : 0xffffffffu, v, 1);
    y[threadIdx.x] = v;
}

extern "C" __global__ void writes_to_const(const float* x, float* y) {
    y[threadIdx.x] = x[threadIdx.x];
    if (!RIGHT) const_cast<float*>(x)[threadIdx.x] = 0.0f;
}

extern "C" __global__ void writes_between_rows(int columns, int pitch, float* y) {
    if (int(threadIdx.x) < (RIGHT ? columns : pitch)) y[blockIdx.x * pitch + threadIdx.x] = 1.0f;
}

extern "C" __global__ void index_overflows(int n, float* y) {
    y[0] = RIGHT ? 1 : n * n;
}

// Two stages of asynchronous copies, 32 threads with 16 bytes each.
extern "C" __global__ void reads_before_the_copy_lands(const float* x, float* y) {
    __shared__ __align__(16) float stage[2][128];
    for (int s = 0; s < 2; ++s) {
        copy_async_16(&stage[s][4 * threadIdx.x], x + 128 * s + 4 * threadIdx.x);
        copy_async_commit();
    }
    for (int s = 0; s < 2; ++s) {
        if (RIGHT && s == 1) copy_async_wait<0>();
        else copy_async_wait<1>();
        __syncthreads();
        for (int j = 0; j < 4; ++j) y[128 * s + 4 * threadIdx.x + j] = stage[s][127 - 4 * threadIdx.x - j];
    }
}

// The next copy into a stage starts while other threads may still read it.
extern "C" __global__ void copies_over_what_is_read(const float* x, float* y) {
    __shared__ __align__(16) float stage[256];
    for (int s = 0; s < 2; ++s) {
        copy_async_16(&stage[4 * threadIdx.x], x + 256 * s + 4 * threadIdx.x);
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
        for (int j = 0; j < 4; ++j) y[256 * s + 4 * threadIdx.x + j] = stage[255 - 4 * threadIdx.x - j];
        if (RIGHT) __syncthreads();
    }
}

extern "C" __global__ void waits_for_what_is_not_committed(const float* x, float* y) {
    __shared__ __align__(16) float stage[128];
    copy_async_16(&stage[4 * threadIdx.x], x + 4 * threadIdx.x);
    if (RIGHT) copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    for (int j = 0; j < 4; ++j) y[4 * threadIdx.x + j] = stage[127 - 4 * threadIdx.x - j];
}

extern "C" __global__ void __launch_bounds__(64) bounded(float* y) { y[threadIdx.x] = 1.0f; }

extern "C" __global__ void takes_many_types(int n, long long wide, float scale, const __half* h, unsigned char* bytes) {}
