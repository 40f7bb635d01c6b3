// What an all-reduce does to the chunks it receives and sends, with the wire format decoded or encoded on the way.
//
// Element   what the wire carries: float, double, __half, __nv_bfloat16; __half and __nv_bfloat16 are the 16-bit formats
// Result    what is reduced
// int8      blocks of BLOCK elements share a scale: x = scale q, scale = (largest |x| of the block) / 127
// fp16      the same with __half numbers q; scale is a power of two, by which the largest |q| of a block is in [2^14, 2^15)
// A thread takes four neighbours unless said otherwise. Launch: grid (any), block (256); n >= 0 may be anything.
#include "reduce.cuh"

// y += x
extern "C" __global__ void __launch_bounds__(256) add_into(long long n, Result* __restrict__ y, const Element* __restrict__ x) {
    const bool vector = in_fours(x, 0) && in_fours(y, 0);
    for (long long i = 4 * (blockIdx.x * 256LL + threadIdx.x); i < n; i += 4 * 256LL * gridDim.x) {
        const int left = int(min(n - i, 4LL));
        Sum xs[4], ys[4];
        load_four(x + i, 0, left, vector, xs);
        load_four(y + i, 0, left, vector, ys);
#pragma unroll
        for (int j = 0; j < 4; ++j) ys[j] += xs[j];
        store_four(y + i, 0, left, vector, ys);
    }
}

// y = the larger of y and x; a NaN in either stays.
extern "C" __global__ void __launch_bounds__(256) maximum_into(long long n, Result* __restrict__ y, const Element* __restrict__ x) {
    const bool vector = in_fours(x, 0) && in_fours(y, 0);
    for (long long i = 4 * (blockIdx.x * 256LL + threadIdx.x); i < n; i += 4 * 256LL * gridDim.x) {
        const int left = int(min(n - i, 4LL));
        Sum xs[4], ys[4];
        load_four(x + i, 0, left, vector, xs);
        load_four(y + i, 0, left, vector, ys);
#pragma unroll
        for (int j = 0; j < 4; ++j) ys[j] = larger(ys[j], xs[j]);
        store_four(y + i, 0, left, vector, ys);
    }
}

// q, scales = x in the int8 format; one warp a block of BLOCK elements. A block with a NaN or an infinity gets a NaN scale.
// Launch: grid (ceil(blocks / 8)), block (256).
extern "C" __global__ void __launch_bounds__(256) encode_int8(
    long long n, const Result* __restrict__ x, signed char* __restrict__ q, float* __restrict__ scales) {
    const long long block = blockIdx.x * 8LL + threadIdx.x / 32, begin = block * BLOCK, end = min(n, begin + BLOCK);
    const int lane = threadIdx.x % 32;
    if (begin >= n) return;
    Sum largest = 0;
    for (long long i = begin + lane; i < end; i += 32) largest = larger(largest, fabs(wide(x[i])));
    largest = warp_max(largest);
    const float scale = isfinite(largest) ? float(largest / Sum(127)) : __int_as_float(0x7fc00000);
    for (long long i = begin + lane; i < end; i += 32)
        q[i] = scale > 0.0f ? (signed char)(max(-127, min(127, __float2int_rn(float(wide(x[i])) / scale)))) : (signed char)(0);
    if (lane == 0) scales[block] = scale;
}

// y = scale q, or y += scale q if `accumulate`. One thread an element.
extern "C" __global__ void __launch_bounds__(256) decode_int8(
    long long n, int accumulate, const signed char* __restrict__ q, const float* __restrict__ scales, Result* __restrict__ y) {
    for (long long i = blockIdx.x * 256LL + threadIdx.x; i < n; i += 256LL * gridDim.x) {
        const Sum x = Sum(scales[i / BLOCK]) * Sum(q[i]);
        y[i] = narrow<Result>(accumulate ? wide(y[i]) + x : x);
    }
}

// q, scales = x in the fp16 format; one warp a block of BLOCK elements. A block with a NaN or an infinity gets a NaN scale.
// Numbers above 0x7f7fe000, the largest of 11 binary digits, become that one: they would be rounded to infinity.
// Launch: grid (ceil(blocks / 8)), block (256).
extern "C" __global__ void __launch_bounds__(256) encode_fp16(
    long long n, const Result* __restrict__ x, __half* __restrict__ q, float* __restrict__ scales) {
    const long long block = blockIdx.x * 8LL + threadIdx.x / 32, begin = block * BLOCK, end = min(n, begin + BLOCK);
    const int lane = threadIdx.x % 32, infinity = 0x7f800000;
    if (begin >= n) return;
    int largest = 0;    // float32 bits without the sign are ordered like the numbers, and a NaN is above infinity
    for (long long i = begin + lane; i < end; i += 32) largest = max(largest, __float_as_int(float(wide(x[i]))) & 0x7fffffff);
    largest = warp_max(largest);
    const int scale = max((largest & infinity) - (14 << 23), 1 << 23);    // at least 2^-126, the smallest normal one
    const float inverse = __int_as_float((254 << 23) - scale);
    for (long long i = begin + lane; i < end; i += 32) {
        const int bits = __float_as_int(float(wide(x[i])));
        const float share = __int_as_float(min(bits & 0x7fffffff, 0x7f7fe000)) * inverse;
        q[i] = __float2half_rn(bits < 0 ? -share : share);
    }
    if (lane == 0) scales[block] = __int_as_float(largest < infinity ? scale : 0x7fc00000);
}

// y = scale q, or y += scale q if `accumulate`. One thread an element.
extern "C" __global__ void __launch_bounds__(256) decode_fp16(
    long long n, int accumulate, const __half* __restrict__ q, const float* __restrict__ scales, Result* __restrict__ y) {
    for (long long i = blockIdx.x * 256LL + threadIdx.x; i < n; i += 256LL * gridDim.x) {
        const Sum x = Sum(scales[i / BLOCK]) * Sum(wide(q[i]));
        y[i] = narrow<Result>(accumulate ? wide(y[i]) + x : x);
    }
}
