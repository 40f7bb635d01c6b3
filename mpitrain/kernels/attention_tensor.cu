// Causal attention with online softmax on tensor cores: float16 or bfloat16 elements, float32 sums (Dao 2023,
// FlashAttention-2). Arrays and meaning as in attention.cu; log_sums are in base 2 here, of scores times log2(e).
//
// Four warps, each with 16 of the block's 64 queries (or keys, for dk and dv). Scores and weights never leave registers:
// the fragment that a product leaves is, rounded, the fragment that the next one takes. What the block goes through, keys
// and values or queries and dy, comes by asynchronous copies into one of two stages while the other is computed with.
// HEAD is a macro: a multiple of 16. STEP rows of the other side at a time. Any T >= 1.
// Launch: grid (ceil(T / 64), H, B), block (128), dynamic shared memory as said at each kernel.
#include "reduce.cuh"
#include "tensor_tile.cuh"

constexpr int OWNED = 64, THREADS = 128;    // rows that a block owns
constexpr int DEPTH = HEAD / 16;    // fragments along the channels

static_assert(HEAD % 16 == 0 && STEP % 16 == 0, "whole fragments");

using Own = SharedTile<OWNED, HEAD, THREADS>;      // what stays
using Other = SharedTile<STEP, HEAD, THREADS>;    // what passes by

#define MINUS_INFINITY __int_as_float(0xff800000)

// The rows of one operand of one batch and head.
struct Rows {
    const Element* first;
    long long pitch;
    int T;
    template <class Tile> __device__ __forceinline__ void fetch(Element* tile, int t0) const {
        Tile::fetch(tile, first, pitch, t0, T, 0, HEAD, in_chunks(first, pitch));
    }
};

// out (16 x STEP) = a (16 x HEAD, rows of `own` from row m on) times the rows of `other` (STEP x HEAD) transposed.
__device__ __forceinline__ void multiply_rows(float (&out)[STEP / 8][4], const Element* own, int m, const Element* other) {
#pragma unroll
    for (int j = 0; j < STEP / 8; ++j) out[j][0] = out[j][1] = out[j][2] = out[j][3] = 0.0f;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        unsigned a[4];
        Own::a_from_rows_of_m(a, own, m, 16 * d);
#pragma unroll
        for (int j = 0; j < STEP / 16; ++j) {
            unsigned b[2][2];
            Other::b_from_rows_of_n(b, other, 16 * d, 16 * j);
            mma_m16n8k16(out[2 * j], a, b[0], Element{});
            mma_m16n8k16(out[2 * j + 1], a, b[1], Element{});
        }
    }
}

// out (16 x HEAD) += p (16 x STEP, still as fragments of sums) times `other` (STEP x HEAD).
__device__ __forceinline__ void add_weighted(float (&out)[2 * DEPTH][4], const float (&p)[STEP / 8][4], const Element* other) {
#pragma unroll
    for (int s = 0; s < STEP / 16; ++s) {
        const unsigned a[4] = {packed(p[2 * s][0], p[2 * s][1]), packed(p[2 * s][2], p[2 * s][3]),
                               packed(p[2 * s + 1][0], p[2 * s + 1][1]), packed(p[2 * s + 1][2], p[2 * s + 1][3])};
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            unsigned b[2][2];
            Other::b_from_rows_of_k(b, other, 16 * s, 16 * d);
            mma_m16n8k16(out[2 * d], a, b[0], Element{});
            mma_m16n8k16(out[2 * d + 1], a, b[1], Element{});
        }
    }
}

// Stores 16 x HEAD sums times `scale` (of rows g and g + 8) to rows t0 ... of an array; rows from T on do not exist.
__device__ __forceinline__ void store_rows(const float (&out)[2 * DEPTH][4], float scale0, float scale8, Element* first,
                                           long long pitch, int t0, int T) {
    const bool vector = in_fours(first, pitch);
#pragma unroll
    for (int j = 0; j < 2 * DEPTH; ++j) {
        const float scaled[4] = {out[j][0] * scale0, out[j][1] * scale0, out[j][2] * scale8, out[j][3] * scale8};
        const FourOfFragment four(scaled);
        if (t0 + four.row < T) store_four(first + (t0 + four.row) * pitch, 8 * j + four.column, HEAD, vector, four.at);
    }
}

// Dynamic shared memory: queries (OWNED x HEAD), two stages of keys and values (STEP x HEAD each), as SharedTiles.
// scale: log2(e) / sqrt(D)
extern "C" __global__ void __launch_bounds__(THREADS) attention_tensor(
    int T, int H, float scale, const Element* __restrict__ qkv, Element* __restrict__ y, float* __restrict__ log_sums) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    Element *qs = reinterpret_cast<Element*>(dynamic_shared), *stages = qs + Own::ELEMENTS;
    const int t0 = blockIdx.x * OWNED, h = blockIdx.y, b = blockIdx.z, lane = threadIdx.x % 32, m = threadIdx.x / 32 * 16;
    const long long C = (long long)H * HEAD, at = (long long)b * T * 3 * C + h * HEAD;
    const Rows q = {qkv + at, 3 * C, T}, k = {qkv + at + C, 3 * C, T}, v = {qkv + at + 2 * C, 3 * C, T};
    const int t = t0 + m + lane / 4;    // this lane's rows are t and t + 8
    const int end = min(t0 + OWNED, T);
    auto fetch = [&](int s0) {
        Element* stage = stages + s0 / STEP % 2 * 2 * Other::ELEMENTS;
        if (s0 < end) {
            k.fetch<Other>(stage, s0);
            v.fetch<Other>(stage + Other::ELEMENTS, s0);
        }
        copy_async_commit();
    };

    float out[2 * DEPTH][4] = {}, maximum[2] = {MINUS_INFINITY, MINUS_INFINITY}, sum[2] = {};
    q.fetch<Own>(qs, t0);
    fetch(0);
    for (int s0 = 0; s0 < end; s0 += STEP) {
        copy_async_wait<0>();
        __syncthreads();    // this stage is seen by all, and all have left the other
        fetch(s0 + STEP);
        const Element *ks = stages + s0 / STEP % 2 * 2 * Other::ELEMENTS, *vs = ks + Other::ELEMENTS;
        float p[STEP / 8][4];
        multiply_rows(p, qs, m, ks);
#pragma unroll
        for (int i = 0; i < 2; ++i) {    // rows t and t + 8
            float largest = maximum[i];
#pragma unroll
            for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& score = p[j][2 * i + e];
                    score = s0 + 8 * j + lane % 4 * 2 + e <= t + 8 * i ? score * scale : MINUS_INFINITY;
                    largest = larger(largest, score);
                }
            largest = larger(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = larger(largest, __shfl_xor_sync(~0u, largest, 2));
            const float shrink = exp2f(maximum[i] - largest);    // 0 for the first keys
            maximum[i] = largest;
            float part = 0.0f;
#pragma unroll
            for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) part += p[j][2 * i + e] = exp2f(p[j][2 * i + e] - largest);
            sum[i] = sum[i] * shrink + part;    // of this lane's columns; the lanes are added at the end
#pragma unroll
            for (int j = 0; j < 2 * DEPTH; ++j) {
                out[j][2 * i] *= shrink;
                out[j][2 * i + 1] *= shrink;
            }
        }
        add_weighted(out, p, vs);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
        sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
        if (lane % 4 == 0 && t + 8 * i < T) log_sums[((long long)b * H + h) * T + t + 8 * i] = maximum[i] + log2f(sum[i]);
    }
    store_rows(out, 1.0f / sum[0], 1.0f / sum[1], y + (long long)b * T * C + h * HEAD, C, t0 + m, T);
}

// One step of weights p = 2^(score - log_sum) and slopes p (product - dot) scale, where nothing is masked; else 0. A row of
// these fragments is a query if QUERIES_ARE_ROWS, else a key.
template <bool QUERIES_ARE_ROWS>
__device__ __forceinline__ void weights_and_slopes(float (&p)[STEP / 8][4], float (&ds)[STEP / 8][4], const float* log_sums,
                                                   const float* dots, float scale2, float scale, int row0, int column0, int T) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = row0 + lane / 4 + e / 2 * 8, column = column0 + 8 * j + lane % 4 * 2 + e % 2;
            const int t = QUERIES_ARE_ROWS ? row : column, s = QUERIES_ARE_ROWS ? column : row;
            const bool seen = t < T && s <= t;
            p[j][e] = seen ? exp2f(p[j][e] * scale2 - log_sums[t]) : 0.0f;
            ds[j][e] = seen ? p[j][e] * (ds[j][e] - dots[t]) * scale : 0.0f;
        }
}

// dk and dv of 64 keys. Dynamic shared memory: keys, values (OWNED x HEAD each), two stages of queries and dy (STEP x HEAD
// each), as SharedTiles. scale: 1 / sqrt(D)
extern "C" __global__ void __launch_bounds__(THREADS) attention_tensor_backward_kv(
    int T, int H, float scale, const Element* __restrict__ qkv, const Element* __restrict__ dy,
    const float* __restrict__ log_sums, const float* __restrict__ dots, Element* dqkv) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    Element *ks = reinterpret_cast<Element*>(dynamic_shared), *vs = ks + Own::ELEMENTS, *stages = vs + Own::ELEMENTS;
    const int s0 = blockIdx.x * OWNED, h = blockIdx.y, b = blockIdx.z, m = threadIdx.x / 32 * 16;
    const long long C = (long long)H * HEAD, at = (long long)b * T * 3 * C + h * HEAD, row = ((long long)b * H + h) * T;
    const Rows q = {qkv + at, 3 * C, T}, k = {qkv + at + C, 3 * C, T}, v = {qkv + at + 2 * C, 3 * C, T};
    const Rows d = {dy + (long long)b * T * C + h * HEAD, C, T};
    auto fetch = [&](int t0) {
        Element* stage = stages + t0 / STEP % 2 * 2 * Other::ELEMENTS;
        if (t0 < T) {
            q.fetch<Other>(stage, t0);
            d.fetch<Other>(stage + Other::ELEMENTS, t0);
        }
        copy_async_commit();
    };

    float dk[2 * DEPTH][4] = {}, dv[2 * DEPTH][4] = {};
    k.fetch<Own>(ks, s0);
    v.fetch<Own>(vs, s0);
    fetch(s0);
    for (int t0 = s0; t0 < T; t0 += STEP) {
        copy_async_wait<0>();
        __syncthreads();    // this stage is seen by all, and all have left the other
        fetch(t0 + STEP);
        const Element *qs = stages + t0 / STEP % 2 * 2 * Other::ELEMENTS, *dys = qs + Other::ELEMENTS;
        float p[STEP / 8][4], ds[STEP / 8][4];
        multiply_rows(p, ks, m, qs);
        multiply_rows(ds, vs, m, dys);
        weights_and_slopes<false>(p, ds, log_sums + row, dots + row, scale * 1.4426950408889634f, scale, s0 + m, t0, T);
        add_weighted(dv, p, dys);
        add_weighted(dk, ds, qs);
    }
    store_rows(dk, 1.0f, 1.0f, dqkv + at + C, 3 * C, s0 + m, T);
    store_rows(dv, 1.0f, 1.0f, dqkv + at + 2 * C, 3 * C, s0 + m, T);
}

// dq of 64 queries. Dynamic shared memory: queries, dy (OWNED x HEAD each), two stages of keys and values (STEP x HEAD each),
// as SharedTiles. scale: 1 / sqrt(D). Three blocks, which is what shared memory has room for at a head size of 128: for four the
// compiler would spill.
extern "C" __global__ void __launch_bounds__(THREADS, 3) attention_tensor_backward_q(
    int T, int H, float scale, const Element* __restrict__ qkv, const Element* __restrict__ dy,
    const float* __restrict__ log_sums, const float* __restrict__ dots, Element* dqkv) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    Element *qs = reinterpret_cast<Element*>(dynamic_shared), *dys = qs + Own::ELEMENTS, *stages = dys + Own::ELEMENTS;
    const int t0 = blockIdx.x * OWNED, h = blockIdx.y, b = blockIdx.z, m = threadIdx.x / 32 * 16, end = min(t0 + OWNED, T);
    const long long C = (long long)H * HEAD, at = (long long)b * T * 3 * C + h * HEAD, row = ((long long)b * H + h) * T;
    const Rows q = {qkv + at, 3 * C, T}, k = {qkv + at + C, 3 * C, T}, v = {qkv + at + 2 * C, 3 * C, T};
    const Rows d = {dy + (long long)b * T * C + h * HEAD, C, T};
    auto fetch = [&](int s0) {
        Element* stage = stages + s0 / STEP % 2 * 2 * Other::ELEMENTS;
        if (s0 < end) {
            k.fetch<Other>(stage, s0);
            v.fetch<Other>(stage + Other::ELEMENTS, s0);
        }
        copy_async_commit();
    };

    float dq[2 * DEPTH][4] = {};
    q.fetch<Own>(qs, t0);
    d.fetch<Own>(dys, t0);
    fetch(0);
    for (int s0 = 0; s0 < end; s0 += STEP) {
        copy_async_wait<0>();
        __syncthreads();    // this stage is seen by all, and all have left the other
        fetch(s0 + STEP);
        const Element *ks = stages + s0 / STEP % 2 * 2 * Other::ELEMENTS, *vs = ks + Other::ELEMENTS;
        float p[STEP / 8][4], ds[STEP / 8][4];
        multiply_rows(p, qs, m, ks);
        multiply_rows(ds, dys, m, vs);
        weights_and_slopes<true>(p, ds, log_sums + row, dots + row, scale * 1.4426950408889634f, scale, t0 + m, s0, T);
        add_weighted(dq, ds, ks);
    }
    store_rows(dq, 1.0f, 1.0f, dqkv + at, 3 * C, t0 + m, T);
}
