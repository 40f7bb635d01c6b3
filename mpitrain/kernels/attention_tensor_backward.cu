// The gradient of attention on tensor cores; arrays and meaning as in attention.cuh, log_sums as attention_tensor.cu
// leaves them.
//
// Two kernels, of 4 and 3 products: each computes the weights again and sums in a fixed order. One kernel of 5 products would
// add to dq from every block of keys, in another order at each run; or each block would write what it has to add, to be summed
// later: for 128 x 128 weights at a head size of 64 that is 64 KiB of traffic for 4 million operations saved, which tensor
// cores are faster at.
//
// As in the forward, the steps on the diagonal have a loop of their own where registers are enough for two loops. Rows beyond
// Q or T are copied as zeros, statistics included: of queries these add 0, and no query sees keys that do not exist.
// Launch: grid (ceil(Q / OWNED), H, B), for dk and dv (ceil(T / OWNED), G, B), block (THREADS). Any Q, T >= 1. scale: of scores
#include "attention_tensor.cuh"

// Scores p become weights 2^(scale score - log_sum), and products ds of dy and values slopes p (product - dot), which lack the
// scale of scores, with the slope of a soft-cap. of(f, j, e): the statistics of the query of element e of fragments f and j.
template <class Of> __device__ __forceinline__ void weigh(Steps& p, Steps& ds, float scale, const Of& of) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const Statistics query = of(f, j, e);
                const float score = p[f][j][e] * scale;
                p[f][j][e] = exp2_flushed(score - query.x);
                ds[f][j][e] = p[f][j][e] * (ds[f][j][e] - query.y);
                if (CAP != 0) ds[f][j][e] *= fmaxf(0.0f, cap_slope(score * (1.0f / LOG2_E)));    // of a hidden key the score is minus infinity
            }
}

// dk and dv of OWNED keys, from the queries of the group's heads in turn. Dynamic shared memory: keys, values (OWNED x HEAD
// each) as Own tiles, two stages of queries and dy.
extern "C" __global__ void __launch_bounds__(THREADS, 256 / THREADS) attention_tensor_backward_kv(
    int queries, int T, int offset, int window, int H, int q_pitch, int kv_pitch, int q_rows, int kv_rows, float scale,
    const Element* __restrict__ q, const Element* __restrict__ kv, const Element* __restrict__ dy,
    const float* __restrict__ log_sums, const float* __restrict__ dots, Element* dkv, const int* __restrict__ starts) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    Element *ks = reinterpret_cast<Element*>(dynamic_shared), *vs = ks + Own::ELEMENTS;
    const Sizes sizes(queries, T, offset, window, H, q_pitch, kv_pitch, q_rows, kv_rows);
    const int s0 = blockIdx.x * OWNED, b = blockIdx.z, Q = sizes.Q, C = H * HEAD;
    const int lane = threadIdx.x % 32, m = threadIdx.x / 32 * WARP_ROWS;
    const Bounds bounds(starts, sizes);
    RowCopies(kv + sizes.k(b, blockIdx.y * GROUP), sizes.kv_pitch, s0).fetch<OWNED>(ks, s0, T);
    RowCopies(kv + sizes.v(b, blockIdx.y * GROUP), sizes.kv_pitch, s0).fetch<OWNED>(vs, s0, T);
    int begin = GENERAL ? max(0, s0 - sizes.offset) : s0;
    if (DOCUMENTS == 2) begin = max(begin, bounds.first_key(s0));
    const int end = BOUNDED ? bounds.first_query(begin, s0 + OWNED) : Q;
    // Of the queries that see all these keys, as far as they are before the query.
    const int all_keys_begin = DOCUMENTS == 2 ? bounds.first_key(min(s0 + OWNED, T) - 1) : 0;
    const int all_keys_end = bounds.first_query(begin, s0 + 1);
    // With documents or a window two loops would need more registers.
    const int masked_end = BOUNDED ? end : min(s0 + OWNED - sizes.offset, end);
    Channels dk = {}, dv = {};
    for (int i = 0; i < GROUP; ++i) {
        const int h = blockIdx.y * GROUP + i;
        const RowCopies own_q(q + sizes.q(b, h), sizes.q_pitch, begin), d(dy + sizes.y(b, h), C, begin);
        const float* statistic = (threadIdx.x % 2 ? dots : log_sums) + sizes.row(b, h) + begin + threadIdx.x / 2;
        Passing<true> passing = {own_q, d, statistic, Q, vs + Own::ELEMENTS};
        if (GROUP > 1) __syncthreads();    // all have left the stages
        // Adds the terms of STEP queries. masks: not every one of them may see all keys.
        auto add = [&](int t0, bool masks) {
            const Element *qs = passing.arrive(t0, t0 + STEP < end), *dys = qs + Other::ELEMENTS;
            const int at0 = t0 + sizes.offset;    // the last key that query t0 sees
            if (masks && (s0 + m >= T || at0 + STEP <= s0 + m)) return;    // no keys, or all after these queries
            const Statistics* statistics = reinterpret_cast<const Statistics*>(dys + Other::ELEMENTS) + lane % 4 * 2;
            Steps p, ds;
            multiply_rows(p, ks, m, qs);
            cap(p, scale * LOG2_E);
            if (masks && (!BOUNDED || at0 < s0 + m + WARP_ROWS - 1)) mask<false>(p, s0 + m, at0, T);
            if (BOUNDED && masks && (t0 < all_keys_begin || t0 + STEP > all_keys_end)) hide<false>(p, s0 + m, t0, bounds);
            multiply_rows(ds, vs, m, dys);
            weigh(p, ds, scale * LOG2_E, [&](int, int j, int e) { return statistics[8 * j + e % 2]; });
            add_weighted(dv, p, dys);
            add_weighted(dk, ds, qs);
        };
        int t0 = begin;
        passing.fetch(t0, t0 < end);
        for (; t0 < masked_end; t0 += STEP) add(t0, true);
        for (; !BOUNDED && t0 < end; t0 += STEP) add(t0, false);
    }
    Element *dks = dkv + sizes.k(anew(b), blockIdx.y * GROUP), *dvs = dks + H / GROUP * HEAD;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) {
        store_rows(dk[f], scale, scale, dks, sizes.kv_pitch, s0 + m + 16 * f, T);
        store_rows(dv[f], 1.0f, 1.0f, dvs, sizes.kv_pitch, s0 + m + 16 * f, T);
    }
}

// dq of OWNED queries, in the order of the forward. Dynamic shared memory: queries, dy (OWNED x HEAD each) as Own tiles, two
// stages of keys and values.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_tensor_backward_q(
    int queries, int T, int offset, int window, int H, int q_pitch, int kv_pitch, int q_rows, int kv_rows, float scale,
    const Element* __restrict__ q, const Element* __restrict__ kv, const Element* __restrict__ dy,
    const float* __restrict__ log_sums, const float* __restrict__ dots, Element* dq, const int* __restrict__ starts) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    Element *qs = reinterpret_cast<Element*>(dynamic_shared), *dys = qs + Own::ELEMENTS;
    const Sizes sizes(queries, T, offset, window, H, q_pitch, kv_pitch, q_rows, kv_rows);
    const int t0 = (gridDim.x - 1 - blockIdx.x) * OWNED, h = blockIdx.y, b = blockIdx.z, Q = sizes.Q, C = H * HEAD;
    const int lane = threadIdx.x % 32, m = threadIdx.x / 32 * WARP_ROWS, at0 = t0 + sizes.offset;    // the last key query t0 sees
    const Bounds bounds(starts, sizes);
    const int last = min(t0 + OWNED, Q) - 1;    // query
    const int end = min(min(at0 + OWNED, T), bounds.end_key(last));    // of the keys that are seen
    const int warp_end = t0 + m < Q ? at0 + m + WARP_ROWS : 0;
    const int all_see = GENERAL ? min(at0 + 1, end) / STEP * STEP : t0;    // the end of the steps without masks
    const long long row = sizes.row(b, h);
    int s0 = bounds.first_key(t0) / STEP * STEP;
    const RowCopies k(kv + sizes.k(b, h), sizes.kv_pitch, s0), v(kv + sizes.v(b, h), sizes.kv_pitch, s0);
    Passing<false> keys = {k, v, nullptr, T, dys + Own::ELEMENTS};

    Channels sums = {};
    RowCopies(q + sizes.q(b, h), sizes.q_pitch, t0).fetch<OWNED>(qs, t0, Q);
    RowCopies(dy + sizes.y(b, h), C, t0).fetch<OWNED>(dys, t0, Q);
    int seen_by_all = bounds.first_key(last);    // all queries see the keys from this one to all_see
    if (DOCUMENTS == 2 && bounds.first_key(t0) != seen_by_all) seen_by_all = end;    // none
    keys.fetch(s0, true);
    Statistics statistics[FRAGMENTS][2];    // of rows g and g + 8
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int t = t0 + m + lane / 4 + 16 * f + 8 * i;
            statistics[f][i] = t < Q ? make_float2(log_sums[row + t], dots[row + t]) : make_float2(0.0f, 0.0f);
        }
    // Adds the terms of STEP keys. masks: not every query may see all of them.
    auto add = [&](int s0, bool masks) {
        const Element *ks = keys.arrive(s0, (!GENERAL && !masks) || s0 + STEP < end), *vs = ks + Other::ELEMENTS;
        if (masks && s0 >= warp_end) return;
        Steps p, ds;
        multiply_rows(p, qs, m, ks);
        cap(p, scale * LOG2_E);
        if (masks && (at0 + m + 1 < s0 + STEP || (GENERAL && T < s0 + STEP))) mask<true>(p, at0 + m, s0, T);
        if (masks && (s0 < seen_by_all || (DOCUMENTS == 2 && end < s0 + STEP))) hide<true>(p, t0 + m, s0, bounds);
        multiply_rows(ds, dys, m, vs);
        weigh(p, ds, scale * LOG2_E, [&](int f, int, int e) { return statistics[f][e / 2]; });
        add_weighted(sums, ds, ks);
    };
    for (; ROOMY && s0 < seen_by_all; s0 += STEP) add(s0, true);
    for (; ROOMY && s0 < all_see; s0 += STEP) add(s0, false);
    for (; s0 < end; s0 += STEP) add(s0, true);
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) store_rows(sums[f], scale, scale, dq + sizes.q(b, h), sizes.q_pitch, t0 + m + 16 * f, Q);
}
