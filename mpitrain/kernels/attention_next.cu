// Attention of new tokens over the stored keys and values of earlier ones (incremental decoding), with online softmax.
// q: (B, T, H D) and kv: (B, T, 2 G D) of the T new tokens, keys before values; H / G heads of queries in turn share keys and
// values. keys, values: (B, G, W, D), which receive the new rows; past: (B,) earlier tokens of each sequence, with
// past[b] + T <= W; y: (B, T, H D). q_pitch, kv_pitch: elements from one row to the next
#include "reduce.cuh"
#include "soft_cap.cuh"

constexpr int OWN = (HEAD + 31) / 32;    // channels of a lane; D = HEAD is a macro, any number from 1

// y[b, t, h] = softmax(scale q k^T) v over past[b] stored tokens and the new ones up to t, of these the last `window`. New keys are read from kv, since
// another warp may be storing them. One warp a row; a lane scores every 32nd key, then sums its channels of the values.
// Launch: grid (ceil(B T H / 4)), block (128).
extern "C" __global__ void __launch_bounds__(128) attention_next(
    int B, int T, int H, int G, int W, int window, int q_pitch, int kv_pitch, Sum scale, const Element* __restrict__ q,
    const Element* __restrict__ kv, const Index* __restrict__ past, Element* keys, Element* values, Element* __restrict__ y) {
    const long long row = blockIdx.x * 4LL + threadIdx.x / 32;
    if (row >= (long long)B * T * H) return;
    const int lane = threadIdx.x % 32, h = int(row % H), t = int(row / H % T), b = int(row / H / T);
    const int g = h / (H / G);
    const long long pitch = kv_pitch, stored = ((long long)b * G + g) * W * HEAD;
    const Element* query = q + ((long long)b * T + t) * q_pitch + h * HEAD;
    const Element* new_key = kv + (long long)b * T * pitch + g * HEAD;
    const int first = int(past[b]), end = first + t + 1;
    if (h % (H / G) == 0)
        for (int d = lane; d < HEAD; d += 32) {
            keys[stored + (long long)(end - 1) * HEAD + d] = new_key[t * pitch + d];
            values[stored + (long long)(end - 1) * HEAD + d] = new_key[t * pitch + G * HEAD + d];
        }
    Sum largest = Sum(__int_as_float(0xff800000)), total = 0, sums[OWN] = {};
    for (int k0 = max(0, end - window); k0 < end; k0 += 32) {
        const int k = k0 + lane;
        Sum score = Sum(__int_as_float(0xff800000));
        if (k < end) {
            const Element* key = k < first ? keys + stored + (long long)k * HEAD : new_key + (k - first) * pitch;
            Sum dot = 0;
            for (int d = 0; d < HEAD; ++d) dot += wide(query[d]) * wide(key[d]);
            score = capped(dot * scale);
        }
        const Sum peak = larger(largest, warp_max(score));
        const Sum shrunk = exp(largest - peak), weight = exp(score - peak);
        total = total * shrunk + warp_sum(weight);
#pragma unroll
        for (int i = 0; i < OWN; ++i) sums[i] *= shrunk;
        for (int j = 0; j < min(32, end - k0); ++j) {
            const Sum other = __shfl_sync(~0u, weight, j);
            const Element* value = k0 + j < first ? values + stored + (long long)(k0 + j) * HEAD
                                                  : new_key + (k0 + j - first) * pitch + G * HEAD;
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                if (lane + 32 * i < HEAD) sums[i] += other * wide(value[lane + 32 * i]);
        }
        largest = peak;
    }
    Element* out = y + ((long long)b * T + t) * H * HEAD + h * HEAD;
#pragma unroll
    for (int i = 0; i < OWN; ++i)
        if (lane + 32 * i < HEAD) out[lane + 32 * i] = narrow<Element>(sums[i] / total);
}
