// Attention with online softmax on tensor cores: float16, bfloat16 or float32 elements, float32 sums (Dao 2023,
// FlashAttention-2). Arrays and meaning as in attention.cuh; log_sums are in base 2 here, of scores times log2(e).
// A block has OWNED queries and goes through the keys and values that they see. The steps on the diagonal are the last, in a
// loop of their own: the loop before them does not mask. With documents or a window a first loop goes through the keys that only some
// of the queries see. The blocks with most keys come first in each head, so that short ones fill the end. Any Q, T >= 1.
// Launch: grid (ceil(Q / OWNED), H, B), block (THREADS). Dynamic shared memory: queries (OWNED x HEAD) as an Own
// tile, two stages of keys and values.
#include "attention_tensor.cuh"

// Less than every score. With documents or a window it is finite, because a query may see none of the keys so far, and a power of 2: times
// any scale it is exact, so that 2^(difference of two such products) is 1 also where a product and a sum are one instruction.
#define NO_SCORE (BOUNDED ? -0x1p100f : MINUS_INFINITY)

// What a warp knows of its queries: of row g + 8 i of fragment f the largest score so far, and this lane's part of the sum.
struct Softmax {
    float maximum[FRAGMENTS][2], sum[FRAGMENTS][2];
};

// Scores p become weights 2^(scale (score - maximum)); `out` and sums shrink to a new maximum.
__device__ __forceinline__ void weigh(Steps& p, Softmax& rows, Channels& out, float scale) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float largest = rows.maximum[f][i];
#pragma unroll
            for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) largest = fmaxf(largest, p[f][j][2 * i + e]);    // a NaN's weight will be NaN
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            const float shift = largest * scale, shrink = exp2_flushed(rows.maximum[f][i] * scale - shift);    // 0 for the first keys
            rows.maximum[f][i] = largest;
            float part = 0.0f;
#pragma unroll
            for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) part += p[f][j][2 * i + e] = exp2_flushed(p[f][j][2 * i + e] * scale - shift);
            rows.sum[f][i] = rows.sum[f][i] * shrink + part;
#pragma unroll
            for (int j = 0; j < 2 * DEPTH; ++j) {
                out[f][j][2 * i] *= shrink;
                out[f][j][2 * i + 1] *= shrink;
            }
        }
}

// scale: of scores, times log2(e)
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_tensor(
    int queries, int T, int offset, int window, int H, int q_pitch, int kv_pitch, int q_rows, int kv_rows, float scale,
    const Element* __restrict__ q, const Element* __restrict__ kv, Element* __restrict__ y, float* __restrict__ log_sums,
    const int* __restrict__ starts) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    Element* qs = reinterpret_cast<Element*>(dynamic_shared);
    const Sizes sizes(queries, T, offset, window, H, q_pitch, kv_pitch, q_rows, kv_rows);
    const int t0 = (gridDim.x - 1 - blockIdx.x) * OWNED, h = blockIdx.y, b = blockIdx.z, Q = sizes.Q, C = H * HEAD;
    const int lane = threadIdx.x % 32, m = threadIdx.x / 32 * WARP_ROWS, at0 = t0 + sizes.offset;    // the last key query t0 sees
    const Bounds bounds(starts, sizes);
    const int last = min(t0 + OWNED, Q) - 1;    // query
    const int end = min(min(at0 + OWNED, T), bounds.end_key(last));    // of the keys that are seen
    const int warp_end = t0 + m < Q ? at0 + m + WARP_ROWS : 0;
    const int all_see = GENERAL ? min(at0 + 1, end) / STEP * STEP : t0;    // the end of the steps without masks
    int s0 = bounds.first_key(t0) / STEP * STEP;
    const RowCopies k(kv + sizes.k(b, h), sizes.kv_pitch, s0), v(kv + sizes.v(b, h), sizes.kv_pitch, s0);
    Passing<false> keys = {k, v, nullptr, T, qs + Own::ELEMENTS};

    Softmax rows;
    Channels out = {};
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int i = 0; i < 2; ++i) rows.maximum[f][i] = NO_SCORE, rows.sum[f][i] = 0.0f;
    RowCopies(q + sizes.q(b, h), sizes.q_pitch, t0).fetch<OWNED>(qs, t0, Q);
    int seen_by_all = bounds.first_key(last);    // all queries see the keys from this one to all_see
    if (DOCUMENTS == 2 && bounds.first_key(t0) != seen_by_all) seen_by_all = end;    // none
    // To STEP keys. masks: some of them may come after a query, or belong to another document.
    auto attend = [&](int s0, bool masks) {
        const Element *ks = keys.arrive(s0, (!GENERAL && !masks) || s0 + STEP < end), *vs = ks + Other::ELEMENTS;
        if (masks && s0 >= warp_end) return;
        Steps p;
        multiply_rows(p, qs, m, ks);
        cap(p, scale);
        if (masks && (at0 + m + 1 < s0 + STEP || (GENERAL && T < s0 + STEP))) mask<true>(p, at0 + m, s0, T);
        if (masks && (s0 < seen_by_all || (DOCUMENTS == 2 && end < s0 + STEP))) hide<true>(p, t0 + m, s0, bounds);
        weigh(p, rows, out, scale);
        add_weighted(out, p, vs);
    };
    keys.fetch(s0, true);
    for (; ROOMY && s0 < seen_by_all; s0 += STEP) attend(s0, true);
    for (; ROOMY && s0 < all_see; s0 += STEP) attend(s0, false);
    for (; s0 < end; s0 += STEP) attend(s0, true);
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) {
        const int first = t0 + m + 16 * f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float& sum = rows.sum[f][i];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const int row = first + lane / 4 + 8 * i;
            if (lane % 4 == 0 && row < Q) log_sums[sizes.row(b, h) + row] = rows.maximum[f][i] * scale + log2f(sum);
        }
        for (float& sum : rows.sum[f]) sum = DOCUMENTS && GENERAL && sum == 0.0f ? 0.0f : 1.0f / sum;
        store_rows(out[f], rows.sum[f][0], rows.sum[f][1], y + sizes.y(b, h), C, first, Q);
    }
}
