// Attention with online softmax by the products of Hopper's warpgroups (Shah et al. 2024, FlashAttention-3): float16 or bfloat16
// elements, float32 sums. Arrays and meaning as in attention.cuh; log_sums in base 2, of scores times log2(e). sm_90a.
//
// q_map, kv_map: q (B, Q, H D) and kv (B, T, 2 G D), for boxes of OWNED and of STEP rows of 64 elements.
//
// A block is three warpgroups. One thread of the first starts the copies. The other two own ROWS queries each, and go through STEP keys
// and values at a time, the last keys first: keys that only some queries see come at the ends. In turns one of them issues its products,
// and the other computes weights from the scores that its own left:
//
//     step s of a warpgroup:   its turn   issue scores of s, and values of s + 1 with their weights   the other's turn
//                              wait for the scores   weigh them   wait for the values   shrink the sums to the new maximum
//
// Weights never leave registers. STAGES tiles of keys and as many of values are under way; of each, and of the queries, `full` says
// that one has come, and `empty` that both warpgroups have left it. Blocks stay: the copies for the next queries run while results go out.
// Launch: grid (any; one block a multiprocessor is best), block (THREADS), SHARED bytes of dynamic shared memory. HEAD is 64 or 128.
#include "attention_hopper.cuh"

constexpr int OWNED = 128, STEP = 128, ROWS = OWNED / 2;
using Queries = Panels<true, OWNED, HEAD>;
using Keys = Panels<true, STEP, HEAD>;
using Values = Panels<false, HEAD, STEP>;
constexpr unsigned BARRIERS = 2 * (1 + 2 * STAGES) + 2, PANEL_OF_OWNED = OWNED * ROW_BYTES, PANEL_OF_STEP = STEP * ROW_BYTES;
constexpr unsigned SHARED = Queries::BYTES + STAGES * (Keys::BYTES + Values::BYTES) + 8 * BARRIERS + ATOM_BYTES;
static_assert(SHARED <= 232448, "what a block may have");

// Less than every score. It is finite, because a query may see none of the keys so far, and a power of 2: times any scale it is exact, so
// that 2^(difference of two such products) is 1 also where a product and a sum are one instruction.
#define NO_SCORE -0x1p100f

template <bool VALUE> struct Constant { static constexpr bool value = VALUE; };

// Queries from t0 on of head h of sequence b, and steps of STEP keys: what those that copy and those that multiply go through in the same
// order. The jobs with most keys come first, so that short ones fill the end.
struct Job {
    int t0, h, b, first, last;    // the first key of the first step, and of the last one

    __device__ __forceinline__ Job(int number, const Sizes& sizes, int B, const int* starts) {
        const int heads = sizes.H * B, rest = number % heads;
        t0 = (tiles_over(sizes.Q, OWNED) - 1 - number / heads) * OWNED, h = rest % sizes.H, b = rest / sizes.H;
        const Bounds bounds(starts, sizes, b);
        const int last_query = min(t0 + OWNED, sizes.Q) - 1;
        const int end = min(min(t0 + sizes.offset + OWNED, sizes.T), bounds.end_key(last_query));    // of the keys that are seen
        first = bounds.first_key(t0) / STEP * STEP;
        last = first + max(0, end - 1 - first) / STEP * STEP;
    }
};

// Scores of keys that their query does not see become minus infinity. t: the query of row g; s: this lane's first key.
__device__ __forceinline__ void mask(float (&scores)[STEP / 2], int t, int s, const Sizes& sizes, const Bounds& bounds) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int first = bounds.first_key(t + 8 * i), last = sizes.last_key(t + 8 * i);
#pragma unroll
        for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int key = s + 8 * j + e;
                if (key > last || (BOUNDED && bounds.hides(first, key))) scores[4 * j + 2 * i + e] = MINUS_INFINITY;
            }
    }
}

// What a lane knows of rows g and g + 8: the largest score so far, and its part of the sum.
struct Softmax {
    float maximum[2] = {NO_SCORE, NO_SCORE}, sum[2] = {};
};

// Scores become weights 2^(scale (score - maximum)), and shrink the factor from sums so far to a new maximum.
__device__ __forceinline__ void weigh(float (&scores)[STEP / 2], Softmax& rows, float (&shrink)[2], float scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float largest = rows.maximum[i];
#pragma unroll
        for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) largest = fmaxf(largest, scores[4 * j + 2 * i + e]);    // a NaN's weight will be NaN
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const float shift = largest * scale;
        shrink[i] = exp2_flushed(rows.maximum[i] * scale - shift);    // 0 for the first keys
        rows.maximum[i] = largest;
        float part = 0.0f;
#pragma unroll
        for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& score = scores[4 * j + 2 * i + e];
                part += score = exp2_flushed(score * scale - shift);
            }
        rows.sum[i] = rows.sum[i] * shrink[i] + part;
    }
}

// scale: of scores, times log2(e)
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_hopper(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap kv_map, int queries, int T, int offset, int window, int H,
    int B, float scale, Element* __restrict__ y, float* __restrict__ log_sums, const int* __restrict__ starts) {
    unsigned char* memory = dynamic_shared_memory();
    memory += (ATOM_BYTES - shared_address(memory) % ATOM_BYTES) % ATOM_BYTES;
    const unsigned own = shared_address(memory), keys = own + Queries::BYTES, values = keys + STAGES * Keys::BYTES;
    const unsigned full_q = values + STAGES * Values::BYTES, empty_q = full_q + 8, full_k = full_q + 16, empty_k = full_k + 8 * STAGES;
    const unsigned full_v = empty_k + 8 * STAGES, empty_v = full_v + 8 * STAGES, turns = empty_v + 8 * STAGES;
    const int group = __shfl_sync(~0u, int(threadIdx.x) / 128, 0);    // the compiler shall know that a warp does not part
    const int lane = threadIdx.x % 32;
    const Sizes sizes(queries, T, offset, window, H, 0, 0, 0, 0);    // maps know the pitches of q and kv

    if (threadIdx.x == 0) {
        barrier_init(full_q, 1);
        barrier_init(empty_q, 8);
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full_k + 8 * s, 1);
            barrier_init(empty_k + 8 * s, 8);
            barrier_init(full_v + 8 * s, 1);
            barrier_init(empty_v + 8 * s, 8);
        }
        for (int g = 0; g < 2; ++g) barrier_init(turns + 8 * g, 4);
        barriers_are_made();
        prefetch_map(q_map);
        prefetch_map(kv_map);
    }
    __syncthreads();

    const int jobs = tiles_over(sizes.Q, OWNED) * H * B;
    if (group == 0) {
        give_registers<FEW>();
        if (threadIdx.x > 0) return;
        Turn k, v;
        unsigned parity = 0;    // of the phase of full_q that comes next
        for (int number = blockIdx.x; number < jobs; number += gridDim.x, parity ^= 1) {
            const Job job(number, sizes, B, starts);
            const int k_column = job.h / GROUP * HEAD, v_column = k_column + H / GROUP * HEAD;
            barrier_wait(empty_q, parity ^ 1);    // at first nobody is in a tile: the phase before the first counts as ended
            barrier_expect(full_q, Queries::BYTES);
#pragma unroll
            for (int c = 0; c < HEAD; c += PANEL)
                copy_rows(own + c / PANEL * PANEL_OF_OWNED, q_map, full_q, job.h * HEAD + c, job.t0, job.b);
            const auto copy = [&](unsigned tiles, unsigned full, unsigned empty, Turn& turn, int column, int s) {
                barrier_wait(empty + 8 * turn.stage, turn.parity ^ 1);
                barrier_expect(full + 8 * turn.stage, Keys::BYTES);
#pragma unroll
                for (int c = 0; c < HEAD; c += PANEL)
                    copy_rows(tiles + turn.stage * Keys::BYTES + c / PANEL * PANEL_OF_STEP, kv_map, full + 8 * turn.stage, column + c, s, job.b);
                turn.advance();
            };
            for (int s = job.last; s >= job.first; s -= STEP) {
                copy(keys, full_k, empty_k, k, k_column, s);
                if (s < job.last) copy(values, full_v, empty_v, v, v_column, s + STEP);
            }
            copy(values, full_v, empty_v, v, v_column, job.first);
        }
    } else {
        take_registers<MANY>();
        const int side = group - 1, warp = int(threadIdx.x) / 32 % 4, m = side * ROWS;
        const unsigned long long first_q = Queries::first(own + Queries::part(m, 0)), first_k = Keys::first(keys), first_v = Values::first(values);
        // A warp knows of its own products alone that they are done, so each one says so.
        const auto arrive = [&](unsigned barrier) {
            if (lane == 0) barrier_arrive(barrier);
        };
        Turn k, v;
        unsigned parity = 0, turn = 0;    // of the phases of full_q and of this warpgroup's turn that come next
        const float unit = CAP == 0 ? scale : 1.0f;    // of scores behind a soft-cap
        if (side == 1) arrive(turns);
        const auto take_turn = [&] {
            barrier_wait(turns + 8 * side, turn);    // for speed alone: no value depends on who goes first
            turn ^= 1;
        };
        const auto pass_turn = [&] { arrive(turns + 8 * (1 - side)); };
        for (int number = blockIdx.x; number < jobs; number += gridDim.x, parity ^= 1) {
            const Job job(number, sizes, B, starts);
            const Bounds bounds(starts, sizes, job.b);
            // All queries of this warpgroup see the keys from clear_begin to clear_end. Queries from Q on are 0, and go nowhere.
            const int own_t0 = job.t0 + m, last = max(own_t0, min(own_t0 + ROWS, sizes.Q) - 1), t = own_t0 + warp * 16 + lane / 4;
            int clear_begin = bounds.first_key(last), clear_end = sizes.last_key(own_t0) + 1;
            if (DOCUMENTS == 2) {
                clear_end = min(clear_end, bounds.end_key(last));
                if (bounds.first_key(own_t0) != clear_begin) clear_begin = job.last + STEP;    // none
            }
            Softmax rows;
            float scores[STEP / 2], out[HEAD / 2] = {}, shrink[2];
            unsigned weights[STEP / DEPTH][4];
            const auto multiply_keys = [&] {
                const unsigned long long tile = moved(first_k, k.stage * Keys::BYTES);
                wgmma<0, 0, 0>(scores, first_q, tile, Element{});
#pragma unroll
                for (int d = DEPTH; d < HEAD; d += DEPTH)
                    wgmma<0, 0>(scores, moved(first_q, Queries::part(0, d)), moved(tile, Keys::part(0, d)), Element{});
                wgmma_commit();
            };
            const auto multiply_values = [&] {
                const unsigned long long tile = moved(first_v, v.stage * Values::BYTES);
#pragma unroll
                for (int s = 0; s < STEP; s += DEPTH)
                    wgmma_from_registers<1>(out, weights[s / DEPTH], moved(tile, Values::part(0, s)), Element{});
                wgmma_commit();
            };
            const auto leave_keys = [&] {
                arrive(empty_k + 8 * k.stage);
                k.advance();
            };
            const auto leave_values = [&] {
                arrive(empty_v + 8 * v.stage);
                v.advance();
            };
            // From weights of the keys behind to those of the STEP keys from s on, in which `masked` says that some are hidden.
            const auto attend = [&](int s, auto masked) {
                barrier_wait(full_k + 8 * k.stage, k.parity);
                barrier_wait(full_v + 8 * v.stage, v.parity);
                take_turn();
                wgmma_fence();
                multiply_keys();
                multiply_values();
                pass_turn();
                wgmma_wait<1>();
                hold(scores);
                leave_keys();
                cap(scores, scale);
                if (masked.value) mask(scores, t, s + lane % 4 * 2, sizes, bounds);
                weigh(scores, rows, shrink, unit);
                wgmma_wait<0>();
                hold(out);
                leave_values();
#pragma unroll
                for (int i = 0; i < HEAD / 2; ++i) out[i] *= shrink[i / 2 % 2];
                round_sums(weights, scores);
            };

            int s = job.last;
            barrier_wait(full_q, parity);
            barrier_wait(full_k + 8 * k.stage, k.parity);
            take_turn();
            wgmma_fence();
            multiply_keys();
            pass_turn();
            wgmma_wait<0>();
            hold(scores);
            leave_keys();
            cap(scores, scale);
            mask(scores, t, s + lane % 4 * 2, sizes, bounds);
            weigh(scores, rows, shrink, unit);
            round_sums(weights, scores);
            hold(out);
            // Where queries and keys are the same tokens, the first step has all keys that come after a query.
            for (s -= STEP; GENERAL && s >= job.first && s + STEP > clear_end; s -= STEP) attend(s, Constant<true>{});
            for (; s >= (BOUNDED ? max(job.first, clear_begin) : job.first); s -= STEP) attend(s, Constant<false>{});
            for (; BOUNDED && s >= job.first; s -= STEP) attend(s, Constant<true>{});
            arrive(empty_q);
            barrier_wait(full_v + 8 * v.stage, v.parity);
            take_turn();
            wgmma_fence();
            multiply_values();
            pass_turn();
            wgmma_wait<0>();
            hold(out);
            leave_values();

            float factor[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float sum = rows.sum[i];
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                if (lane % 4 == 0 && t + 8 * i < sizes.Q) log_sums[sizes.row(job.b, job.h) + t + 8 * i] = rows.maximum[i] * unit + log2f(sum);
                factor[i] = DOCUMENTS && GENERAL && sum == 0.0f ? 0.0f : 1.0f / sum;
            }
            store_rows(out, factor[0], factor[1], y + sizes.y(job.b, job.h), H * HEAD, own_t0 + warp * 16, sizes.Q);
        }
    }
}
