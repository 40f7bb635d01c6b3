// What an all-reduce does to the chunks it receives and sends, with the wire format decoded or encoded on the way.
//
// Element   what the wire carries: float, double, __half, __nv_bfloat16; __half and __nv_bfloat16 are the 16-bit formats
// Result    what is reduced
// int8      blocks of BLOCK elements share a scale: x = scale q, scale = (largest |x| of the block) / 127
// fp16      the same with __half numbers q; scale is a power of two, by which the largest |q| of a block is in [2^14, 2^15)
// Launch, but for the two that encode: grid (any), block (256); n >= 0 may be anything.
#include "flat.cuh"
#include "reduce.cuh"

// y += x
extern "C" __global__ void __launch_bounds__(256) add_into(long long n, Result* __restrict__ y, const Element* __restrict__ x) {
    map_pairs(n, y, x, y, [](Sum y, Sum x) { return y + x; });
}

// y = the larger of y and x; a NaN in either stays.
extern "C" __global__ void __launch_bounds__(256) maximum_into(
    long long n, Result* __restrict__ y, const Element* __restrict__ x) {
    map_pairs(n, y, x, y, [](Sum y, Sum x) { return larger(y, x); });
}

// How many numbers a thread takes at a time: one warp has a block of them. Those of int8 are 8 bytes.
constexpr int CODED = BLOCK / 32;
static_assert(CODED % 8 == 0, "shares of 16 bytes");

// Calls encode(block, share) for the block of BLOCK elements that a warp has.
template <class Encode, class Number>
__device__ __forceinline__ void each_block(long long n, Encode encode, const Result* x, const Number* q) {
    const long long mine = CODED * (blockIdx.x * 256LL + threadIdx.x), block = mine / BLOCK, end = block * BLOCK + BLOCK;
    if (end - BLOCK >= n) return;
    if (in_runs<CODED>(x, 0) && in_runs<CODED>(q, 0) && end <= n) encode(block, Share<CODED, true>{mine, CODED});
    else encode(block, Share<CODED, false>{mine, int(max(0LL, min(n - mine, (long long)CODED)))});
}

// q, scales = x in the int8 format; one warp a block of BLOCK elements. A block with a NaN or an infinity gets a NaN scale.
// Launch: grid (ceil(blocks / 8)), block (256).
extern "C" __global__ void __launch_bounds__(256) encode_int8(
    long long n, const Result* __restrict__ x, signed char* __restrict__ q, float* __restrict__ scales) {
    each_block(n, [&](long long block, auto here) {
        Sum xs[CODED], largest = 0;
        here.load(x, xs);
#pragma unroll
        for (int j = 0; j < CODED; ++j) largest = larger(largest, fabs(xs[j]));
        largest = warp_max(largest);
        const float scale = isfinite(largest) ? float(largest / Sum(127)) : __int_as_float(0x7fc00000);
#pragma unroll
        for (int j = 0; j < CODED; ++j) xs[j] = scale > 0.0f ? float(xs[j]) / scale : 0.0f;
        here.store(q, xs);
        if (threadIdx.x % 32 == 0) scales[block] = scale;
    }, x, q);
}

// q, scales = x in the fp16 format; one warp a block of BLOCK elements. A block with a NaN or an infinity gets a NaN scale.
// Numbers above 0x7f7fe000, the largest of 11 binary digits, become that one: they would be rounded to infinity.
// Launch: grid (ceil(blocks / 8)), block (256).
extern "C" __global__ void __launch_bounds__(256) encode_fp16(
    long long n, const Result* __restrict__ x, __half* __restrict__ q, float* __restrict__ scales) {
    each_block(n, [&](long long block, auto here) {
        const int infinity = 0x7f800000;
        Sum xs[CODED];
        here.load(x, xs);
        int largest = 0;    // float32 bits without the sign are ordered like the numbers, and a NaN is above infinity
#pragma unroll
        for (int j = 0; j < CODED; ++j) largest = max(largest, __float_as_int(float(xs[j])) & 0x7fffffff);
        largest = warp_max(largest);
        const int scale = max((largest & infinity) - (14 << 23), 1 << 23);    // at least 2^-126, the smallest normal one
        const float inverse = __int_as_float((254 << 23) - scale);
#pragma unroll
        for (int j = 0; j < CODED; ++j) {
            const int bits = __float_as_int(float(xs[j]));
            const float share = __int_as_float(min(bits & 0x7fffffff, 0x7f7fe000)) * inverse;
            xs[j] = bits < 0 ? -share : share;
        }
        here.store(q, xs);
        if (threadIdx.x % 32 == 0) scales[block] = __int_as_float(largest < infinity ? scale : 0x7fc00000);
    }, x, q);
}

// y = scale q, or y += scale q if `accumulate`. A share lies within one block: it has one scale.
// A thread writes 16 bytes, so that each store of a warp fills all sectors that it touches: with two stores, each fills half.
template <class Number>
__device__ __forceinline__ void decode(long long n, int accumulate, const Number* q, const float* scales, Result* y) {
    constexpr int N = 16 / sizeof(Result);
    each_share<N>(n, [&](auto here) {
        const Sum scale = scales[here.first / BLOCK];
        Sum xs[N], ys[N];
        here.load(q, xs);
        if (accumulate) here.load(y, ys);
#pragma unroll
        for (int j = 0; j < N; ++j) xs[j] = accumulate ? ys[j] + scale * xs[j] : scale * xs[j];
        here.store(y, xs);
    }, q, y);
}

extern "C" __global__ void __launch_bounds__(256) decode_int8(
    long long n, int accumulate, const signed char* __restrict__ q, const float* __restrict__ scales, Result* __restrict__ y) {
    decode(n, accumulate, q, scales, y);
}

extern "C" __global__ void __launch_bounds__(256) decode_fp16(
    long long n, int accumulate, const __half* __restrict__ q, const float* __restrict__ scales, Result* __restrict__ y) {
    decode(n, accumulate, q, scales, y);
}
