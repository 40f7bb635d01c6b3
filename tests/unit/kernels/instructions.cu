// One kernel per instruction or group of functions that the simulator imitates; test_instructions.py compares with NumPy.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void convert_to_16_bits(int n, const float* x, __half* h, __nv_bfloat16* b) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { h[i] = __float2half_rn(x[i]); b[i] = __float2bfloat16_rn(x[i]); }
}

extern "C" __global__ void convert_from_16_bits(int n, const __half* h, const __nv_bfloat16* b, float* from_h, float* from_b) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { from_h[i] = __half2float(h[i]); from_b[i] = __bfloat162float(b[i]); }
}

// One warp. y: (8, 32), a row per instruction.
extern "C" __global__ void shuffle(const float* x, float* y) {
    const int lane = threadIdx.x;
    const float v = x[lane];
    y[0 * 32 + lane] = __shfl_sync(~0u, v, 5);
    y[1 * 32 + lane] = __shfl_up_sync(~0u, v, 3);
    y[2 * 32 + lane] = __shfl_down_sync(~0u, v, 3);
    y[3 * 32 + lane] = __shfl_xor_sync(~0u, v, 6);
    y[4 * 32 + lane] = __shfl_xor_sync(~0u, v, 3, 8);
    y[5 * 32 + lane] = float(__popc(__ballot_sync(~0u, v > 0.0f)));
    y[6 * 32 + lane] = float(__any_sync(~0u, v > 1e9f));
    y[7 * 32 + lane] = float(__all_sync(~0u, v > -1e9f));
}

// c (16, 8) = a (16, 16) b (16, 8), with matrix loads from shared memory; b is loaded transposed.
extern "C" __global__ void multiply_tile(const Element* a, const Element* b, float* c) {
    __shared__ __align__(16) Element as[16][16], bs[16][8];
    for (int i = threadIdx.x; i < 256; i += 32) as[i / 16][i % 16] = a[i];
    for (int i = threadIdx.x; i < 128; i += 32) bs[i / 8][i % 8] = b[i];
    __syncwarp();
    const int lane = threadIdx.x;
    unsigned fa[4], fb[4];
    ldmatrix_x4(fa, &as[lane % 16][lane / 16 * 8]);
    ldmatrix_x4_transposed(fb, &bs[lane % 16][0]);    // the upper 16 lanes repeat the lower 16
    const unsigned fragment[2] = {fb[0], fb[1]};
    float d[4] = {};
    mma_m16n8k16(d, fa, fragment, Element{});
    for (int i = 0; i < 4; ++i) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}

// The same in two steps of depth 8, as sm_75 has it.
extern "C" __global__ void multiply_tile_sm75(const __half* a, const __half* b, float* c) {
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    auto pair = [](__half x, __half y) { return __builtin_bit_cast(unsigned, __half2{x, y}); };
    float d[4] = {};
    for (int k = 0; k < 16; k += 8)
        mma_m16n8k8(d, pair(a[g * 16 + k + 2 * t], a[g * 16 + k + 2 * t + 1]),
                    pair(a[(g + 8) * 16 + k + 2 * t], a[(g + 8) * 16 + k + 2 * t + 1]),
                    pair(b[(k + 2 * t) * 8 + g], b[(k + 2 * t + 1) * 8 + g]));
    for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}

extern "C" __global__ void copy_in_part(int valid, const float* x, float* y) {
    __shared__ __align__(16) float s[4];
    if (threadIdx.x == 0) { copy_async_16(s, x, valid); copy_async_commit(); copy_async_wait<0>(); }
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x];
}

extern "C" __global__ void copy_or_not(int exists, const float* x, float* y) {
    __shared__ __align__(16) float s[5];
    if (threadIdx.x == 0) {
        copy_async_if<16>(s, x, exists);
        copy_async_if<4>(s + 4, x + 4, exists);
        copy_async_commit();
        copy_async_wait<0>();
    }
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x];
}
