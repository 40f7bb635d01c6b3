// The gradient of causal attention on tensor cores; arrays and meaning as in attention.cuh, log_sums as attention_tensor.cu
// leaves them.
//
// Two kernels, of 4 and 3 products: each computes the weights again and sums in a fixed order. One kernel of 5 products would
// add to dq from every block of keys, in another order at each run; or each block would write what it has to add, to be summed
// later: for 128 x 128 weights at a head size of 64 that is 64 KiB of traffic for 4 million operations saved, which tensor
// cores are faster at.
//
// As in the forward, the steps on the diagonal have a loop of their own where registers are enough for two loops. Rows beyond
// T are copied as zeros, statistics included: of queries these add 0, and keys that do not exist are after every query that
// does.
// Launch: grid (ceil(T / OWNED), H, B), block (THREADS). Any T >= 1. scale: 1 / sqrt(D)
#include "attention_tensor.cuh"

#define LOG2_E 1.4426950408889634f

// Scores p become weights 2^(scale score - log_sum), and products ds of dy and values slopes p (product - dot), which lack the
// scale of scores. of(f, j, e): the statistics of the query of element e of fragments f and j.
template <class Of> __device__ __forceinline__ void weigh(Steps& p, Steps& ds, float scale, const Of& of) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const Statistics query = of(f, j, e);
                p[f][j][e] = exp2_flushed(p[f][j][e] * scale - query.x);
                ds[f][j][e] = p[f][j][e] * (ds[f][j][e] - query.y);
            }
}

// dk and dv of OWNED keys. Dynamic shared memory: keys, values (OWNED x HEAD each) as Own tiles, two stages of queries and dy.
extern "C" __global__ void __launch_bounds__(THREADS, 256 / THREADS) attention_tensor_backward_kv(
    int T, int H, float scale, const Element* __restrict__ qkv, const Element* __restrict__ dy,
    const float* __restrict__ log_sums, const float* __restrict__ dots, Element* dqkv,
    const int* __restrict__ starts) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    Element *ks = reinterpret_cast<Element*>(dynamic_shared), *vs = ks + Own::ELEMENTS;
    const int s0 = blockIdx.x * OWNED, h = blockIdx.y, b = blockIdx.z, C = H * HEAD;
    const int lane = threadIdx.x % 32, m = threadIdx.x / 32 * WARP_ROWS;
    const long long at = (long long)b * T * 3 * C + h * HEAD, row = ((long long)b * H + h) * T;
    const Documents documents(starts, T);
    RowCopies(qkv + at + C, 3 * C, s0).fetch<OWNED>(ks, s0, T);
    RowCopies(qkv + at + 2 * C, 3 * C, s0).fetch<OWNED>(vs, s0, T);
    const int end = documents.first_query(s0, s0 + OWNED);
    const int all_keys_end = documents.first_query(s0, s0 + 1);    // of the queries that see all
    const RowCopies q(qkv + at, 3 * C, s0), d(dy + (long long)b * T * C + h * HEAD, C, s0);
    const float* statistic = (threadIdx.x % 2 ? dots : log_sums) + row + s0 + threadIdx.x / 2;
    Passing<true> queries = {q, d, statistic, T, vs + Own::ELEMENTS};

    Channels dk = {}, dv = {};
    // Adds the terms of STEP queries. masks: not every one of them may see all keys.
    auto add = [&](int t0, bool masks) {
        const Element *qs = queries.arrive(t0, t0 + STEP < end), *dys = qs + Other::ELEMENTS;
        if (masks && (s0 + m >= T || t0 + STEP <= s0 + m)) return;    // no keys, or all after these queries
        const Statistics* statistics = reinterpret_cast<const Statistics*>(dys + Other::ELEMENTS) + lane % 4 * 2;
        Steps p, ds;
        multiply_rows(p, ks, m, qs);
        if (masks && (!DOCUMENTS || t0 < s0 + m + WARP_ROWS - 1)) mask<false>(p, s0 + m, t0);
        if (DOCUMENTS && masks && t0 + STEP > all_keys_end) hide<false>(p, s0 + m, t0, documents);
        multiply_rows(ds, vs, m, dys);
        weigh(p, ds, scale * LOG2_E, [&](int, int j, int e) { return statistics[8 * j + e % 2]; });
        add_weighted(dv, p, dys);
        add_weighted(dk, ds, qs);
    };
    int t0 = s0;
    queries.fetch(t0, true);
    const int masked_end = DOCUMENTS ? end : min(s0 + OWNED, end);    // with documents two loops would need more registers
    for (; t0 < masked_end; t0 += STEP) add(t0, true);
    for (; !DOCUMENTS && t0 < end; t0 += STEP) add(t0, false);
    Element* dks = dqkv + at + C;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) {
        store_rows(dk[f], scale, scale, dks, 3 * C, s0 + m + 16 * f, T);
        store_rows(dv[f], 1.0f, 1.0f, dks + C, 3 * C, s0 + m + 16 * f, T);
    }
}

// dq of OWNED queries, in the order of the forward. Dynamic shared memory: queries, dy (OWNED x HEAD each) as Own tiles, two
// stages of keys and values.
extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_tensor_backward_q(
    int T, int H, float scale, const Element* __restrict__ qkv, const Element* __restrict__ dy,
    const float* __restrict__ log_sums, const float* __restrict__ dots, Element* dqkv,
    const int* __restrict__ starts) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    Element *qs = reinterpret_cast<Element*>(dynamic_shared), *dys = qs + Own::ELEMENTS;
    const int t0 = (gridDim.x - 1 - blockIdx.x) * OWNED, h = blockIdx.y, b = blockIdx.z, C = H * HEAD;
    const int lane = threadIdx.x % 32, m = threadIdx.x / 32 * WARP_ROWS;
    const int end = min(t0 + OWNED, T), warp_end = t0 + m < T ? t0 + m + WARP_ROWS : 0;    // of the keys that are seen
    const long long at = (long long)b * T * 3 * C + h * HEAD, row = ((long long)b * H + h) * T;
    const Documents documents(starts, T);
    int s0 = documents.first_key(t0) / STEP * STEP;
    const RowCopies k(qkv + at + C, 3 * C, s0), v(qkv + at + 2 * C, 3 * C, s0);
    Passing<false> keys = {k, v, nullptr, T, dys + Own::ELEMENTS};

    Channels dq = {};
    RowCopies(qkv + at, 3 * C, t0).fetch<OWNED>(qs, t0, T);
    RowCopies(dy + (long long)b * T * C + h * HEAD, C, t0).fetch<OWNED>(dys, t0, T);
    const int seen_by_all = documents.first_key(end - 1);    // all queries see the keys from this one to t0
    keys.fetch(s0, true);
    Statistics statistics[FRAGMENTS][2];    // of rows g and g + 8
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int t = t0 + m + lane / 4 + 16 * f + 8 * i;
            statistics[f][i] = t < T ? make_float2(log_sums[row + t], dots[row + t]) : make_float2(0.0f, 0.0f);
        }
    // Adds the terms of STEP keys. masks: not every query may see all of them.
    auto add = [&](int s0, bool masks) {
        const Element *ks = keys.arrive(s0, !masks || s0 + STEP < end), *vs = ks + Other::ELEMENTS;
        if (masks && s0 >= warp_end) return;
        Steps p, ds;
        multiply_rows(p, qs, m, ks);
        if (masks && t0 + m + 1 < s0 + STEP) mask<true>(p, t0 + m, s0);
        if (masks && s0 < seen_by_all) hide<true>(p, t0 + m, s0, documents);
        multiply_rows(ds, dys, m, vs);
        weigh(p, ds, scale * LOG2_E, [&](int f, int, int e) { return statistics[f][e / 2]; });
        add_weighted(dq, ds, ks);
    };
    for (; ROOMY && s0 < seen_by_all; s0 += STEP) add(s0, true);
    for (; ROOMY && s0 < t0; s0 += STEP) add(s0, false);
    for (; s0 < end; s0 += STEP) add(s0, true);
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) store_rows(dq[f], scale, scale, dqkv + at, 3 * C, t0 + m + 16 * f, T);
}
