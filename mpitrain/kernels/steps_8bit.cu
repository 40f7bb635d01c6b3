// The step of adamw on flat buffers of n elements, whose moments are codes of 8 bits. ops/codes.py has the codes.
//
// numbers, in device memory: scale, lr, correction1, correction2, as in steps.cu.
// m, v: codes; each block of 256 elements has a scale, the largest magnitude in it.
// lead: elements that the first block lacks, a multiple of 32; the last block may lack some, too.
// maps: the values of the codes of m, the bounds between them, and the same of v, 256 numbers each.
// Launch: grid (ceil(blocks / 8)), block (256); n >= 0 may be anything.
#include "flat.cuh"
#include "reduce.cuh"
template <> struct Narrow<unsigned char> {
    __device__ static unsigned char from(Sum x) { return (unsigned char)int(x); }
};

constexpr int EACH = 8;            // elements of a lane: a warp has a block
constexpr float LEAST = 0x1p-104f; // a block with a lower scale is 0

// The number of bounds below x: its code. There are 255 bounds.
__device__ __forceinline__ int code_of(float x, const float* bounds) {
    int code = 0;
#pragma unroll
    for (int half = 128; half > 0; half /= 2)
        if (x > bounds[code + half - 1]) code += half;
    return code;
}

// xs = the codes of xs, of which `count` exist. All lanes of a warp call it, and get the scale of their block.
__device__ __forceinline__ float encode(Sum (&xs)[EACH], int count, const float* bounds) {
    float largest = 0;
#pragma unroll
    for (int j = 0; j < EACH; ++j)
        if (j < count) largest = larger(largest, float(fabs(xs[j])));
    largest = warp_max(largest);
    const float scale = largest < LEAST ? 0.0f : largest;
#pragma unroll
    for (int j = 0; j < EACH; ++j) xs[j] = Sum(code_of(scale > 0.0f ? float(xs[j]) / scale : 0.0f, bounds));
    return scale;
}

extern "C" __global__ void __launch_bounds__(256) adamw8bit(
    long long n, int lead, Element* __restrict__ p, const Element* __restrict__ g, unsigned char* __restrict__ m,
    unsigned char* __restrict__ v, Sum* __restrict__ m_scales, Sum* __restrict__ v_scales, Mirror* __restrict__ mirror,
    const Sum* __restrict__ numbers, const float* __restrict__ maps, Sum rest1, Sum rest2, Sum epsilon, Sum decay) {
    __shared__ float map[1024];
    for (int i = threadIdx.x; i < 1024; i += 256) map[i] = maps[i];
    __syncthreads();
    const Sum scale = numbers[0], lr = numbers[1], correction1 = numbers[2], correction2 = numbers[3];
    const Sum keep = Sum(1) - lr * decay, rate = lr / correction1;
    const long long block = blockIdx.x * 8LL + threadIdx.x / 32, start = block * 256 - lead;
    if (n == 0 || start >= n) return;    // whole warps
    const long long first = start + EACH * (threadIdx.x % 32);
    const Sum m_scale = m_scales[block], v_scale = v_scales[block];
    auto step = [&](auto here, int count) {
        Sum ps[EACH], gs[EACH], ms[EACH], vs[EACH];
        here.load(p, ps);
        here.load(g, gs);
        here.load(m, ms);
        here.load(v, vs);
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const Sum gradient = scale * gs[j];
            const Sum mean = Sum(map[int(ms[j])]) * m_scale, square = Sum(map[512 + int(vs[j])]) * v_scale;
            ms[j] = fma(rest1, gradient - mean, mean);
            vs[j] = fma(rest2, fma(gradient, gradient, -square), square);
            ps[j] = fma(keep, ps[j], -(rate * ms[j] / (sqrt(vs[j] / correction2) + epsilon)));
        }
        here.store(p, ps);
        if (mirror) here.store(mirror, ps);
        const float new_m = encode(ms, count, map + 256), new_v = encode(vs, count, map + 768);
        here.store(m, ms);
        here.store(v, vs);
        __syncwarp();    // all lanes have read the scales
        if (threadIdx.x % 32 == 0) {
            m_scales[block] = new_m;
            v_scales[block] = new_v;
        }
    };
    const bool vector = in_runs<EACH>(p, 0) && in_runs<EACH>(g, 0) && in_runs<EACH>(m, 0) && in_runs<EACH>(v, 0) &&
        in_runs<EACH>(mirror, 0);
    if (vector && (block > 0 || lead == 0) && start + 256 <= n) step(Share<EACH, true>{first, EACH}, EACH);
    else {
        const int count = first < 0 ? 0 : int(max(0LL, min(n - first, (long long)EACH)));
        step(Share<EACH, false>{first, count}, count);
    }
}
