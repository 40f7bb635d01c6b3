// The gradient of attention by the products of Hopper's warpgroups: arrays and meaning as in attention.cuh, log_sums as
// attention_hopper.cu leaves them. sm_90a.
//
// q_map, dy_map, kv_map: q, dy (B, Q, H D) for boxes of STEP rows, and kv (B, T, 2 G D) for those of KEYS rows, of 64 elements.
//
// One kernel of five products. A block has a head of keys and values, and goes through every `parts`-th block of KEYS keys; for
// each through STEP queries at a time of the group's heads. A warpgroup owns ROWS of the keys, and sums dk and dv of these in registers.
// Scores stand transposed there, keys as rows, so that weights and slopes are operands of those sums as they are:
//
//     S^T = K Q^T    dP^T = V dY^T    P = 2^(scale S - log_sum)    dS = P (dP - dot)    dV += P^T dY    dK += dS^T Q
//
// With a soft-cap scale S is the capped score, and dS also has its slope.
//
// For dq, whose sum goes over all keys, slopes of both warpgroups meet in shared memory, in one of two tiles in turn. Each warpgroup makes
// a part of 64 x 64 of dq, and adds it to what it has stored itself for the keys before. The blocks of keys come in ascending order, and
// attention_hopper_dq adds the sums of the parts in ascending order: a repeated run has the same bits.
//
// S^T of all queries of a step is one sum of products, dP^T that of 64 queries at a time: a thread has no registers for both. The first
// warpgroup copies: a thread of warp 0 what TMA brings, warp 1 the statistics of queries.
// Launch: grid (parts, G, B), block (THREADS), SHARED bytes of dynamic shared memory.
// sums: (parts, B, H, Q, D). scale: of scores
#include "attention_hopper.cuh"

constexpr int KEYS = 128, STEP = HEAD == 64 ? 128 : 64, ROWS = KEYS / 2;
using OwnKeys = Panels<true, KEYS, HEAD>;           // as A of S^T, and values as A of dP^T
using KeysOfK = Panels<false, HEAD, KEYS>;          // as B of dq
using Queries = Panels<true, STEP, HEAD>;           // as B of S^T, and dy as B of dP^T
using QueriesOfK = Panels<false, HEAD, STEP>;       // as B of dk, and dy as B of dv
using Slopes = Panels<false, STEP, KEYS>;           // as A of dq: rows of keys
using Statistics = float2;                          // of a query: log_sum and dot
constexpr unsigned STATISTICS = STEP * sizeof(Statistics), BARRIERS = 2 * (1 + STAGES) + 2;
constexpr unsigned SHARED = 2 * OwnKeys::BYTES + STAGES * (2 * Queries::BYTES + STATISTICS) + 2 * Slopes::BYTES + 8 * BARRIERS + ATOM_BYTES;
static_assert(SHARED <= 232448, "what a block may have");

// Where a warpgroup's part of dq lies in a tile of STEP queries.
__device__ __forceinline__ constexpr int row_of_part(int side) { return STEP == 128 ? side * 64 : 0; }
__device__ __forceinline__ constexpr int column_of_part(int side) { return HEAD == 128 ? side * 64 : 0; }

// The tiles of queries that see keys from s0 to s0 + KEYS.
struct Span {
    int begin, end;

    __device__ __forceinline__ Span(int s0, const Sizes& sizes, const Bounds& bounds) {
        int first = GENERAL ? max(0, s0 - sizes.offset) : s0;
        if (DOCUMENTS == 2) first = max(first, bounds.first_key(s0));
        const int behind = BOUNDED ? bounds.first_query(min(first, sizes.Q), s0 + KEYS) : sizes.Q;
        begin = first / STEP, end = first < behind ? tiles_over(behind, STEP) : begin;
    }
};

// Scores of keys that their query does not see become minus infinity. s: the key of row g; t: this lane's first query.
__device__ __forceinline__ void mask(float (&scores)[STEP / 2], int s, int t, const Sizes& sizes, const Bounds& bounds) {
#pragma unroll
    for (int j = 0; j < STEP / 8; ++j) {
        if (DOCUMENTS) hold(scores);    // first keys are not loaded ahead: there are no registers for them
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int query = t + 8 * j + e, first = bounds.first_key(query), last = sizes.last_key(query);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int key = s + 8 * i;
                if (key > last || (BOUNDED && bounds.hides(first, key))) scores[4 * j + 2 * i + e] = MINUS_INFINITY;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_hopper_backward(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap kv_map, const __grid_constant__ TensorMap dy_map, int queries,
    int T, int offset, int window, int H, int kv_pitch, int kv_rows, float scale, const float* __restrict__ log_sums,
    const float* __restrict__ dots, Element* dkv, float* sums, const int* __restrict__ starts) {
    unsigned char* memory = dynamic_shared_memory();
    memory += (ATOM_BYTES - shared_address(memory) % ATOM_BYTES) % ATOM_BYTES;
    constexpr unsigned OF_VALUES = OwnKeys::BYTES, OF_STAGES = 2 * OwnKeys::BYTES, STAGE = 2 * Queries::BYTES;
    constexpr unsigned OF_SLOPES = OF_STAGES + STAGES * STAGE, OF_STATISTICS = OF_SLOPES + 2 * Slopes::BYTES;
    constexpr unsigned OF_BARRIERS = OF_STATISTICS + STAGES * STATISTICS;
    const unsigned keys = shared_address(memory), stages = keys + OF_STAGES, full_kv = keys + OF_BARRIERS, empty_kv = full_kv + 8;
    const unsigned full = full_kv + 16, empty = full + 8 * STAGES, written = empty + 8 * STAGES;
    const int group = __shfl_sync(~0u, int(threadIdx.x) / 128, 0), warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);
    const int lane = threadIdx.x % 32, h0 = blockIdx.y * GROUP, b = blockIdx.z;
    const Sizes sizes(queries, T, offset, window, H, 0, kv_pitch, 0, kv_rows);
    const Bounds bounds(starts, sizes);

    if (threadIdx.x == 0) {
        barrier_init(full_kv, 1);
        barrier_init(empty_kv, 8);
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 2);
            barrier_init(empty + 8 * s, 8);
            barrier_init(written + 8 * s, 8);
        }
        barriers_are_made();
        prefetch_map(q_map);
        prefetch_map(kv_map);
        prefetch_map(dy_map);
    }
    __syncthreads();

    const int stride = gridDim.x * KEYS;
    Turn turn;
    unsigned parity = 0;    // of the phase of full_kv that comes next
    if (group == 0) {
        give_registers<FEW>();
        if (warp == 1 || (warp == 0 && lane == 0))
            for (int s0 = blockIdx.x * KEYS; s0 < T; s0 += stride, parity ^= 1) {
                const Span span(s0, sizes, bounds);
                if (warp == 0) {
                    barrier_wait(empty_kv, parity ^ 1);    // at first nobody is in a tile: the phase before the first counts as ended
                    barrier_expect(full_kv, 2 * OwnKeys::BYTES);
                    const auto copy = [&](unsigned to, int column) {
#pragma unroll
                        for (int c = 0; c < HEAD; c += PANEL) copy_rows(to + OwnKeys::part(0, c), kv_map, full_kv, column + c, s0, b);
                    };
                    copy(keys, blockIdx.y * HEAD);
                    copy(keys + OF_VALUES, (gridDim.y + blockIdx.y) * HEAD);
                }
#pragma unroll 1
                for (int h = h0; h < h0 + GROUP; ++h)
#pragma unroll 1
                    for (int tile = span.begin; tile < span.end; ++tile, turn.advance()) {
                        const int t0 = tile * STEP;
                        barrier_wait(empty + 8 * turn.stage, turn.parity ^ 1);
                        if (warp == 0) {
                            barrier_expect(full + 8 * turn.stage, STAGE);
                            const auto copy = [&](unsigned to, const TensorMap& map) {
#pragma unroll
                                for (int c = 0; c < HEAD; c += PANEL)
                                    copy_rows(to + Queries::part(0, c), map, full + 8 * turn.stage, h * HEAD + c, t0, b);
                            };
                            copy(stages + turn.stage * STAGE, q_map);
                            copy(stages + turn.stage * STAGE + Queries::BYTES, dy_map);
                            continue;
                        }
                        float* to = reinterpret_cast<float*>(memory + OF_STATISTICS + turn.stage * STATISTICS) + lane;
                        const float* from = (lane % 2 ? dots : log_sums) + sizes.row(b, h) + t0 + lane / 2;
#pragma unroll 4
                        for (int i = 0; i < STEP; i += 16) to[2 * i] = t0 + lane / 2 + i < sizes.Q ? from[i] : 0.0f;
                        __syncwarp();
                        if (lane == 0) barrier_arrive(full + 8 * turn.stage);
                    }
            }
    } else {
        take_registers<MANY>();
        const int side = group - 1, m = side * ROWS, row = warp % 4 * 16;    // the first of the warpgroup's keys, and of the warp's 16 rows
        const unsigned long long own_k = OwnKeys::first(keys + OwnKeys::part(m, 0));
        const unsigned long long all_k = KeysOfK::first(keys + KeysOfK::part(column_of_part(side), 0));
        const unsigned long long first_q = Queries::first(stages), q_of_k = QueriesOfK::first(stages);
        const unsigned long long first_slopes = Slopes::first(keys + OF_SLOPES + Slopes::part(row_of_part(side), 0));
        const auto arrive = [&](unsigned barrier) {
            __syncwarp();    // of the whole warp
            if (lane == 0) barrier_arrive(barrier);
        };
        // This lane's first number of dq of head h and the tile of queries from t0 on.
        const auto dq_of = [&](int h, int t0) {
            const unsigned head = (blockIdx.x * gridDim.z + b) * H + h, t = t0 + row_of_part(side) + row + lane / 4;
            return sums + (long long)(head * sizes.Q + t) * HEAD + column_of_part(side) + lane % 4 * 2;    // a TB has 2^32 rows
        };
        // Of the rows of dq from that one on, those that exist.
        const auto rows_left = [&](int t0) { return sizes.Q - (t0 + row_of_part(side) + row + anew(lane) / 4); };
        const auto put_dq = [&](const float (&dq)[32], int h, int t0) {
            float* to = dq_of(h, t0);
            const int left = rows_left(t0);
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if (8 * i < left) *reinterpret_cast<float2*>(to + 8 * i * HEAD + 8 * j) = make_float2(dq[4 * j + 2 * i], dq[4 * j + 2 * i + 1]);
        };
        // No key of this block is seen by queries of these tiles.
        const auto clear = [&](int begin, int end) {
            const float zeros[32] = {};
#pragma unroll 1
            for (int tile = begin * GROUP; tile < end * GROUP; ++tile) put_dq(zeros, h0 + tile % GROUP, tile / GROUP * STEP);
        };
        int stored = 0;    // tiles of queries of which dq has been stored
        for (int s0 = blockIdx.x * KEYS; s0 < T; s0 += stride, parity ^= 1) {
            const Span span(s0, sizes, bounds);
            const int own_s0 = s0 + m;
            float dk[HEAD / 2] = {}, dv[HEAD / 2] = {};
            clear(stored, span.begin);
            stored = max(stored, span.begin);
            barrier_wait(full_kv, parity);
            // Adds the terms of a tile of queries. masked: not every one of them may see all keys.
            const auto add = [&](int h, int tile, bool masked) {
                const int t0 = tile * STEP;
                const Statistics* statistics =
                    reinterpret_cast<const Statistics*>(memory + OF_STATISTICS + turn.stage * STATISTICS) + lane % 4 * 2;
                const unsigned long long q = moved(first_q, turn.stage * STAGE), q_rows = moved(q_of_k, turn.stage * STAGE);
                float scores[STEP / 2], dq[32];
                unsigned weights[STEP / DEPTH][4], words[STEP / DEPTH][4];
                barrier_wait(full + 8 * turn.stage, turn.parity);
                wgmma_fence();
                wgmma<0, 0, 0>(scores, own_k, q, Element{});
#pragma unroll
                for (int d = DEPTH; d < HEAD; d += DEPTH)
                    wgmma<0, 0>(scores, moved(own_k, OwnKeys::part(0, d)), moved(q, Queries::part(0, d)), Element{});
                wgmma_commit();
                wgmma_wait<0>();
                hold(scores);
                cap(scores, scale * LOG2_E);
                if (masked) mask(scores, own_s0 + row + anew(lane) / 4, t0 + anew(lane) % 4 * 2, sizes, bounds);
                // Slopes of half of the queries at a time: a thread has no registers for all.
                const unsigned long long own_v = moved(own_k, OF_VALUES), d_y = moved(q, Queries::BYTES);
#pragma unroll
                for (int half = 0; half < STEP; half += 64) {
                    float slopes[32];
                    wgmma_fence();
                    wgmma<0, 0, 0>(slopes, own_v, moved(d_y, Queries::part(half, 0)), Element{});
#pragma unroll
                    for (int d = DEPTH; d < HEAD; d += DEPTH)
                        wgmma<0, 0>(slopes, moved(own_v, OwnKeys::part(0, d)), moved(d_y, Queries::part(half, d)), Element{});
                    wgmma_commit();
#pragma unroll
                    for (int i = 0; i < 32; i += 2) {
                        const int all = half / 2 + i;
                        float two[2];
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const float score = CAP == 0 ? scores[all + e] * (scale * LOG2_E) : scores[all + e];
                            two[e] = exp2_flushed(score - statistics[all / 4 * 8 + e].x);
                            // Of a hidden key the score is minus infinity.
                            scores[all + e] = CAP == 0 ? two[e] : two[e] * fmaxf(0.0f, cap_slope(score * (1.0f / LOG2_E)));
                        }
                        weights[all / 8][all % 8 / 2] = packed(two[0], two[1]);
                    }
                    wgmma_wait<0>();
                    hold(slopes);
#pragma unroll
                    for (int i = 0; i < 32; i += 2) {
                        const int all = half / 2 + i;
#pragma unroll
                        for (int e = 0; e < 2; ++e) slopes[i + e] = scores[all + e] * (slopes[i + e] - statistics[all / 4 * 8 + e].y);
                        words[all / 8][all % 8 / 2] = packed(slopes[i], slopes[i + 1]);
                    }
                }
                hold(weights);
                hold(words);
                // Row s of the tile of slopes is a key: 16 bytes are 8 queries, and swizzled.
                unsigned char* to = memory + OF_SLOPES + turn.stage * Slopes::BYTES + (m + row + lane / 4) * ROW_BYTES + lane % 4 * 4;
#pragma unroll
                for (int n = 0; n < STEP / DEPTH; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int chunk = 2 * n + i / 2;    // rows of one lane are alike modulo 8
                        memcpy(to + chunk / 8 * (KEYS * ROW_BYTES) + i % 2 * 8 * ROW_BYTES + (chunk % 8 ^ lane / 4) * 16, &words[n][i], 4);
                    }
                proxy_fence();
                arrive(written + 8 * turn.stage);
                wgmma_fence();
#pragma unroll
                for (int t = 0; t < STEP; t += DEPTH)
                    wgmma_from_registers<1>(dv, weights[t / DEPTH], moved(q_rows, Queries::BYTES + QueriesOfK::part(0, t)), Element{});
#pragma unroll
                for (int t = 0; t < STEP; t += DEPTH)
                    wgmma_from_registers<1>(dk, words[t / DEPTH], moved(q_rows, QueriesOfK::part(0, t)), Element{});
                wgmma_commit();
                const float* from = dq_of(h, t0);
                const int left = tile < stored ? rows_left(t0) : 0;
#pragma unroll
                for (int j = 0; j < 8; ++j)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const float2 two = 8 * i < left ? *reinterpret_cast<const float2*>(from + 8 * i * HEAD + 8 * j) : make_float2(0.0f, 0.0f);
                        dq[4 * j + 2 * i] = two.x, dq[4 * j + 2 * i + 1] = two.y;
                    }
                barrier_wait(written + 8 * turn.stage, turn.parity);
                hold(dq);
                wgmma_fence();
                const unsigned long long tile_of_slopes = moved(first_slopes, turn.stage * Slopes::BYTES);
#pragma unroll
                for (int s = 0; s < KEYS; s += DEPTH)
                    wgmma<1, 1>(dq, moved(tile_of_slopes, Slopes::part(0, s)), moved(all_k, KeysOfK::part(0, s)), Element{});
                wgmma_commit();
                wgmma_wait<1>();
                arrive(empty + 8 * turn.stage);
                wgmma_wait<0>();
                hold(dq);
                put_dq(dq, h, t0);
                turn.advance();
            };
            hold(dk);
            hold(dv);
            for (int h = h0; h < h0 + GROUP; ++h)
                for (int tile = span.begin; tile < span.end; ++tile) {
                    const int t0 = tile * STEP, last_t = min(t0 + STEP, sizes.Q) - 1;
                    const bool all_see = DOCUMENTS != 2 && anew(own_s0) + ROWS - 1 <= sizes.last_key(t0) && bounds.first_key(last_t) <= own_s0;
                    add(h, tile, !all_see);
                }
            stored = max(stored, span.end);
            hold(dk);
            hold(dv);
            arrive(empty_kv);
            store_rows(dk, scale, scale, dkv + sizes.k(anew(b), anew(h0)), sizes.kv_pitch, own_s0 + row, T);
            store_rows(dv, 1.0f, 1.0f, dkv + sizes.v(anew(b), anew(h0)), sizes.kv_pitch, own_s0 + row, T);
        }
        clear(stored, tiles_over(sizes.Q, STEP));
    }
}

// dq = scale times the sum of `parts` arrays, in this order. sums: (parts, B, H, Q, D); q_pitch, q_rows: as in attention.cuh.
// A thread has 8 channels. Launch: grid (ceil(Q D / 2048), H, B), block (256).
extern "C" __global__ void __launch_bounds__(256) attention_hopper_dq(
    int parts, int Q, int q_pitch, int q_rows, float scale, const float* __restrict__ sums, Element* dq) {
    constexpr int WIDE = 8;
    const int i = (blockIdx.x * 256 + threadIdx.x) * WIDE, t = i / HEAD, H = gridDim.y, h = blockIdx.y, b = blockIdx.z, B = gridDim.z;
    if (t >= Q) return;
    float sum[WIDE] = {};
    for (int part = 0; part < parts; ++part) {
        float more[WIDE];
        load_run(sums + (((long long)part * B + b) * H + h) * Q * HEAD + i, 0, WIDE, true, more);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) sum[j] += more[j];
    }
#pragma unroll
    for (float& each : sum) each *= scale;
    Element* to = dq + ((long long)b * q_rows + t) * q_pitch + h * HEAD + i % HEAD;
    store_run(to, 0, WIDE, in_runs<WIDE>(to, 0), sum);
}
