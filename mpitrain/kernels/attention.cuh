// Attention with online softmax, on the ordinary arithmetic units (Dao 2023, FlashAttention-2).
//
// y = softmax(scale q k^T) v for each batch and head, where query t sees the keys up to t + offset of its document and window; the
// Q x T matrix is never stored. q, y, dy: (B, Q, H D), heads of D = HEAD channels side by side; kv: (B, T, 2 G D), G = H / GROUP heads of keys,
// then of values. q_pitch and kv_pitch: elements from one row to the next, q_rows and kv_rows: rows from one sequence
// to the next, also of dq and dkv, which are like q and kv; y and dy have no gaps. log_sums: (B, H, Q), log of
// each row's sum of exponentials, all that backward needs.
//
// A block takes TILE queries (or, for dk and dv, TILE keys) of one head and goes through the other side tile by tile.
// SIDE x SIDE threads; thread (ty, tx) computes 4 x 4 of a TILE x TILE product: rows 4 ty + i, columns tx + SIDE j.
// Tiles lie in dynamic shared memory, rows padded by four: reading fours along D, neighbouring threads meet no bank twice.
// Launch: grid (ceil(Q / TILE), H, B), for dk and dv (ceil(T / TILE), G, B), block (SIDE x SIDE). Any Q, T >= 1; HEAD is a
// macro, any number from 1.
// `Mask` multiplies each probability: by 1 in attention.cu, by 0 or 1 / (1 - rate) in attention_dropout.cu.
#pragma once
#include "bounds.cuh"
#include "reduce.cuh"
#include "soft_cap.cuh"

constexpr int SIDE = TILE / 4, THREADS = SIDE * SIDE;
constexpr int PITCH = (HEAD + 3) / 4 * 4 + 4, ROW = TILE + 4;    // of a TILE x HEAD and of a TILE x TILE array
constexpr int GROUPS = (HEAD + 4 * SIDE - 1) / (4 * SIDE);       // fours of channels that a thread computes

#define MINUS_INFINITY Sum(__int_as_float(0xff800000))

// The rows of one operand of one batch and head, TILE x HEAD at a time.
struct Rows {
    const Element* first;
    long long pitch;
    int T;

    __device__ __forceinline__ void load(Sum* tile, int t0) const {
        const bool vector = HEAD % 4 == 0 && in_runs<4>(first, pitch);
        for (int i = threadIdx.x; i < TILE * (PITCH / 4); i += THREADS) {
            const int row = i / (PITCH / 4), d = i % (PITCH / 4) * 4;
            Sum four[4] = {};
            if (t0 + row < T) load_run(first + (t0 + row) * pitch, d, HEAD, vector, four);
            store_run(tile + row * PITCH, d, PITCH, true, four);
        }
    }
};

__device__ __forceinline__ Four<Sum> four_at(const Sum* address) { return *reinterpret_cast<const Four<Sum>*>(address); }

// out[i][j] += sum over d of a[4 ty + i][d] b[tx + SIDE j][d];    a, b: TILE x HEAD
__device__ __forceinline__ void add_rows_by_rows(Sum (&out)[4][4], const Sum* a, const Sum* b, int ty, int tx) {
#pragma unroll 4
    for (int d = 0; d < PITCH - 4; d += 4) {
        Four<Sum> as[4], bs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) as[i] = four_at(a + (4 * ty + i) * PITCH + d);
#pragma unroll
        for (int j = 0; j < 4; ++j) bs[j] = four_at(b + (tx + SIDE * j) * PITCH + d);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[i][j] += as[i].at[e] * bs[j].at[e];
    }
}

// out[i][g] += sum over s of p[4 ty + i][s] v[s][4 tx + 4 SIDE g ...];    p: TILE x TILE, v: TILE x HEAD
__device__ __forceinline__ void add_rows_by_columns(Four<Sum> (&out)[4][GROUPS], const Sum* p, const Sum* v, int ty, int tx) {
#pragma unroll 4
    for (int s = 0; s < TILE; s += 4) {
        Four<Sum> ps[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) ps[i] = four_at(p + (4 * ty + i) * ROW + s);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const int d = 4 * tx + 4 * SIDE * g;
            if (d >= HEAD) break;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const Four<Sum> vs = four_at(v + (s + e) * PITCH + d);
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int f = 0; f < 4; ++f) out[i][g].at[f] += ps[i].at[e] * vs.at[f];
            }
        }
    }
}

// out[j][g] += sum over s of p[s][4 ty + j] x[s][4 tx + 4 SIDE g ...];    p: TILE x TILE, x: TILE x HEAD
__device__ __forceinline__ void add_columns_by_columns(Four<Sum> (&out)[4][GROUPS], const Sum* p, const Sum* x, int ty, int tx) {
#pragma unroll 4
    for (int s = 0; s < TILE; ++s) {
        const Four<Sum> ps = four_at(p + s * ROW + 4 * ty);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const int d = 4 * tx + 4 * SIDE * g;
            if (d >= HEAD) break;
            const Four<Sum> xs = four_at(x + s * PITCH + d);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int f = 0; f < 4; ++f) out[j][g].at[f] += ps.at[j] * xs.at[f];
        }
    }
}

// Stores TILE x HEAD results, `scale` times each, to rows t0 ... of an array; rows from T on do not exist.
__device__ __forceinline__ void store_rows(const Four<Sum> (&out)[4][GROUPS], const Sum (&scale)[4], Element* first,
                                           long long pitch, int t0, int T, int ty, int tx) {
    const bool vector = HEAD % 4 == 0 && in_runs<4>(first, pitch);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int t = t0 + 4 * ty + i;
        if (t >= T) continue;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const int d = 4 * tx + 4 * SIDE * g;
            const Sum four[4] = {out[i][g].at[0] * scale[i], out[i][g].at[1] * scale[i], out[i][g].at[2] * scale[i],
                                 out[i][g].at[3] * scale[i]};
            store_run(first + t * pitch, d, HEAD, vector, four);
        }
    }
}

// The last key that the queries from t0 on see, or a key in its tile.
__device__ __forceinline__ int last_key_of(const Sizes& sizes, const Bounds& bounds, int t0) {
    if (!GENERAL) return t0;
    return min(sizes.last_key(t0 + TILE - 1), bounds.end_key(min(t0 + TILE, sizes.Q) - 1) - 1);
}

// Attention without dropout.
struct NoMask {
    __device__ __forceinline__ void next_head() {}
    __device__ __forceinline__ void draw(int t, int s0, int tx) {}
    __device__ __forceinline__ Sum at(int i, int j) const { return 1; }
};

// shared: queries, keys or values: TILE x PITCH each; weights: TILE x ROW.
template <class Mask>
__device__ __forceinline__ void attend(Mask mask, const Sizes& sizes, Sum scale, const Element* __restrict__ queries,
                                       const Element* __restrict__ kv, Element* __restrict__ y, Sum* __restrict__ log_sums,
                                       const int* __restrict__ starts, unsigned char* shared) {
    const int Q = sizes.Q, T = sizes.T, C = sizes.H * HEAD;
    const Bounds bounds(starts, sizes);
    Sum *qs = reinterpret_cast<Sum*>(shared), *kvs = qs + TILE * PITCH, *ps = kvs + TILE * PITCH;
    const int t0 = blockIdx.x * TILE, h = blockIdx.y, b = blockIdx.z, tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
    const Rows q = {queries + sizes.q(b, h), sizes.q_pitch, Q}, k = {kv + sizes.k(b, h), sizes.kv_pitch, T};
    const Rows v = {k.first + C / GROUP, sizes.kv_pitch, T};

    Four<Sum> out[4][GROUPS] = {};
    Sum maximum[4] = {MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY}, sum[4] = {};
    const int last_tile = last_key_of(sizes, bounds, t0);
    q.load(qs, t0);
    for (int s0 = bounds.first_key(t0) / TILE * TILE; s0 <= last_tile; s0 += TILE) {
        __syncthreads();    // the last tile's values and weights are done with
        k.load(kvs, s0);
        __syncthreads();
        Sum scores[4][4] = {};
        add_rows_by_rows(scores, qs, kvs, ty, tx);
        mask.draw(t0 + 4 * ty, s0, tx);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int t = t0 + 4 * ty + i, first = bounds.first_key(t), last = sizes.last_key(t);
            Sum largest = maximum[i];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int s = s0 + tx + SIDE * j;
                scores[i][j] = s <= last && !bounds.hides(first, s) ? capped(scores[i][j] * scale) : MINUS_INFINITY;
                largest = larger(largest, scores[i][j]);
            }
#pragma unroll
            for (int flip = SIDE / 2; flip > 0; flip /= 2) largest = larger(largest, __shfl_xor_sync(~0u, largest, flip));
            // A tile may have no key that the query sees.
            const Sum shift = BOUNDED && largest == MINUS_INFINITY ? Sum(0) : largest;
            const Sum shrink = exp(maximum[i] - shift);    // 0 for the first tile
            maximum[i] = largest;
            Sum part = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const Sum p = exp(scores[i][j] - shift);
                ps[(4 * ty + i) * ROW + tx + SIDE * j] = p * mask.at(i, j);
                part += p;
            }
#pragma unroll
            for (int flip = SIDE / 2; flip > 0; flip /= 2) part += __shfl_xor_sync(~0u, part, flip);
            sum[i] = sum[i] * shrink + part;
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int f = 0; f < 4; ++f) out[i][g].at[f] *= shrink;
        }
        __syncthreads();    // all weights are there, and the keys are done with
        v.load(kvs, s0);
        __syncthreads();
        add_rows_by_columns(out, ps, kvs, ty, tx);
    }
    Sum inverse[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        inverse[i] = DOCUMENTS && GENERAL && sum[i] == 0 ? Sum(0) : Sum(1) / sum[i];
        const int t = t0 + 4 * ty + i;
        if (tx == 0 && t < Q) log_sums[sizes.row(b, h) + t] = maximum[i] + log(sum[i]);
    }
    store_rows(out, inverse, y + sizes.y(b, h), C, t0, Q, ty, tx);
}

// One tile of weights p = exp(score - log_sum) times the mask and of dscores = p (mask dy v^T - dot) scale, times the slope of a soft-cap; 0 for keys that the
// query does not see. Queries from Q on have q = 0 and dy = 0: their dscores are 0, and their weights meet
// zeros.
template <class Mask>
__device__ __forceinline__ void weights_and_slopes(
    Mask mask, Sum (&p)[4][4], Sum (&ds)[4][4], const Sum* qs, const Sum* ks, const Sum* vs, const Sum* dys, const Sum* log_sums,
    const Sum* dots, const Bounds& bounds, const Sizes& sizes, Sum scale, int t0, int s0, int ty, int tx) {
    Sum scores[4][4] = {}, products[4][4] = {};
    add_rows_by_rows(scores, qs, ks, ty, tx);
    add_rows_by_rows(products, dys, vs, ty, tx);
    mask.draw(t0 + 4 * ty, s0, tx);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int t = t0 + 4 * ty + i, first = bounds.first_key(t), last = sizes.last_key(t);
        const Sum log_sum = t < sizes.Q ? log_sums[t] : Sum(0), dot = t < sizes.Q ? dots[t] : Sum(0);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int s = s0 + tx + SIDE * j;
            const bool seen = s <= last && !bounds.hides(first, s);
            const Sum score = capped(scores[i][j] * scale);
            p[i][j] = seen ? exp(score - log_sum) : Sum(0);
            ds[i][j] = p[i][j] * (products[i][j] * mask.at(i, j) - dot) * scale * cap_slope(score);
            p[i][j] *= mask.at(i, j);
        }
    }
}

__device__ __forceinline__ void put(Sum* tile, const Sum (&values)[4][4], int ty, int tx) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) tile[(4 * ty + i) * ROW + tx + SIDE * j] = values[i][j];
}

// dk and dv of TILE keys, from all queries of the group's heads that see them. shared: keys, values, queries, dy: TILE x PITCH
// each; weights, then slopes: TILE x ROW.
template <class Mask>
__device__ __forceinline__ void backward_kv(
    Mask mask, const Sizes& sizes, Sum scale, const Element* __restrict__ queries, const Element* __restrict__ kv,
    const Element* __restrict__ dy, const Sum* __restrict__ log_sums, const Sum* __restrict__ dots, Element* dkv,
    const int* __restrict__ starts, unsigned char* shared) {
    const int Q = sizes.Q, T = sizes.T, C = sizes.H * HEAD;
    const Bounds bounds(starts, sizes);
    Sum *ks = reinterpret_cast<Sum*>(shared), *vs = ks + TILE * PITCH, *qs = vs + TILE * PITCH;
    Sum *dys = qs + TILE * PITCH, *ps = dys + TILE * PITCH;
    const int s0 = blockIdx.x * TILE, h0 = blockIdx.y * GROUP, b = blockIdx.z, tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
    const Rows k = {kv + sizes.k(b, h0), sizes.kv_pitch, T}, v = {k.first + C / GROUP, sizes.kv_pitch, T};

    Four<Sum> dk[4][GROUPS] = {}, dv[4][GROUPS] = {};
    k.load(ks, s0);
    v.load(vs, s0);
    int begin = GENERAL ? max(0, s0 - sizes.offset) / TILE * TILE : s0;
    if (DOCUMENTS == 2) begin = max(begin, bounds.first_key(s0) / TILE * TILE);
    const int end = BOUNDED ? bounds.first_query(begin, s0 + TILE) : Q;
    for (int h = h0; h < h0 + GROUP; ++h) {
        const Rows q = {queries + sizes.q(b, h), sizes.q_pitch, Q}, d = {dy + sizes.y(b, h), C, Q};
        const Sum *own_sums = log_sums + sizes.row(b, h), *own_dots = dots + sizes.row(b, h);
        for (int t0 = begin; t0 < end; t0 += TILE) {
            __syncthreads();    // the last tile's queries, dy and slopes are done with
            q.load(qs, t0);
            d.load(dys, t0);
            __syncthreads();
            Sum p[4][4], ds[4][4];
            weights_and_slopes(mask, p, ds, qs, ks, vs, dys, own_sums, own_dots, bounds, sizes, scale, t0, s0, ty, tx);
            put(ps, p, ty, tx);
            __syncthreads();
            add_columns_by_columns(dv, ps, dys, ty, tx);
            __syncthreads();    // the weights are done with
            put(ps, ds, ty, tx);
            __syncthreads();
            add_columns_by_columns(dk, ps, qs, ty, tx);
        }
        mask.next_head();
    }
    const Sum one[4] = {1, 1, 1, 1};
    store_rows(dk, one, dkv + sizes.k(b, h0), sizes.kv_pitch, s0, T, ty, tx);
    store_rows(dv, one, dkv + sizes.v(b, h0), sizes.kv_pitch, s0, T, ty, tx);
}

// dq of TILE queries, from all keys they see. shared: as for backward_kv.
template <class Mask>
__device__ __forceinline__ void backward_q(
    Mask mask, const Sizes& sizes, Sum scale, const Element* __restrict__ queries, const Element* __restrict__ kv,
    const Element* __restrict__ dy, const Sum* __restrict__ log_sums, const Sum* __restrict__ dots, Element* dq,
    const int* __restrict__ starts, unsigned char* shared) {
    const int Q = sizes.Q, T = sizes.T, C = sizes.H * HEAD;
    const Bounds bounds(starts, sizes);
    Sum *ks = reinterpret_cast<Sum*>(shared), *vs = ks + TILE * PITCH, *qs = vs + TILE * PITCH;
    Sum *dys = qs + TILE * PITCH, *ps = dys + TILE * PITCH;
    const int t0 = blockIdx.x * TILE, h = blockIdx.y, b = blockIdx.z, tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
    const Rows q = {queries + sizes.q(b, h), sizes.q_pitch, Q}, k = {kv + sizes.k(b, h), sizes.kv_pitch, T};
    const Rows v = {k.first + C / GROUP, sizes.kv_pitch, T}, d = {dy + sizes.y(b, h), C, Q};
    const Sum *own_sums = log_sums + sizes.row(b, h), *own_dots = dots + sizes.row(b, h);

    Four<Sum> sums[4][GROUPS] = {};
    const int last_tile = last_key_of(sizes, bounds, t0);
    q.load(qs, t0);
    d.load(dys, t0);
    for (int s0 = bounds.first_key(t0) / TILE * TILE; s0 <= last_tile; s0 += TILE) {
        __syncthreads();    // the last tile's keys, values and slopes are done with
        k.load(ks, s0);
        v.load(vs, s0);
        __syncthreads();
        Sum p[4][4], ds[4][4];
        weights_and_slopes(mask, p, ds, qs, ks, vs, dys, own_sums, own_dots, bounds, sizes, scale, t0, s0, ty, tx);
        put(ps, ds, ty, tx);
        __syncthreads();
        add_rows_by_columns(sums, ps, ks, ty, tx);
    }
    const Sum one[4] = {1, 1, 1, 1};
    store_rows(sums, one, dq + sizes.q(b, h), sizes.q_pitch, t0, Q, ty, tx);
}
