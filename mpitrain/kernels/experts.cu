// A mixture of experts without its products, which are in gemm.cu: the choice, rows sorted by expert, weighted sums.
// M tokens in B sequences, of which this rank has S chunks; E experts, k experts of a token, n = k M / S choices of a chunk;
// R rows, sorted by expert.
// logits: (M, E); chosen: (M, k), experts of each token, all in 0 .. E - 1; weights, dweights: (M, k)
// places: (M, k), the row of each choice, or -1; sources: (R,), the choice of each row
// ends: (E,), the row behind the last one of each expert. x, y, dy: (M, C); rows: (R, C)
#include "reduce.cuh"

#define INFINITE Sum(__int_as_float(0x7f800000))

constexpr int WIDE = RUN<Element>, COLUMNS = 32 * WIDE;    // of a thread; of a warp

// The order of choices: the larger logit first, of equal ones the first expert.
__device__ __forceinline__ bool precedes(Sum a, int i, Sum b, int j) { return a > b || (a == b && i < j); }

// The k largest logits of each row and their weights: of the softmax over all logits (before = 1) or over the chosen ones.
// One warp a row, which looks k times for what follows the choice before. A NaN counts as the least logit, so that every
// choice is an expert; its weights are NaN. Launch: grid (ceil(M / 4)), block (128).
extern "C" __global__ void __launch_bounds__(128) choose(
    int M, int E, int k, int before, const Element* __restrict__ logits, Sum* weights, long long* chosen) {
    const int m = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (m >= M) return;
    logits += (long long)m * E;
    weights += (long long)m * k;
    chosen += (long long)m * k;
    Sum last = INFINITE, largest = 0, sum = 0;
    int last_place = -1;
    for (int j = 0; j < k; ++j) {
        Sum best = -INFINITE;
        int place = E;
        for (int e = lane; e < E; e += 32) {
            const Sum logit = wide(logits[e]), x = logit == logit ? logit : -INFINITE;
            if (precedes(last, last_place, x, e) && precedes(x, e, best, place)) {
                best = x;
                place = e;
            }
        }
#pragma unroll
        for (int flip = 16; flip > 0; flip /= 2) {
            const Sum other = __shfl_xor_sync(~0u, best, flip);
            const int other_place = __shfl_xor_sync(~0u, place, flip);
            if (precedes(other, other_place, best, place)) {
                best = other;
                place = other_place;
            }
        }
        last = best;
        last_place = place;
        if (j == 0) largest = best;
        if (lane == 0) chosen[j] = place;
        sum += exp(wide(logits[place]) - largest);
    }
    if (before) {
        sum = 0;
        for (int e = lane; e < E; e += 32) sum += exp(wide(logits[e]) - largest);
        sum = warp_sum(sum);
    }
    __syncwarp();    // the first lane's choices are there
    for (int j = lane; j < k; j += 32) weights[j] = exp(wide(logits[chosen[j]]) - largest) / sum;
}

// The gradient of the logits, with those of the sums over rows of
//     balance weight[b] (sum of load[:, b] . softmax of the logits)    and    z weight[b] (log of the sum of their exponentials)^2
// where b = m / T is the row's sequence, and weight: (B,) or null, for zeros. load: (B, Q, E), of Q chunks of each
// sequence. dlogits: (M, E) of type Result.
// One warp a row. Launch: grid (ceil(M / 4)), block (128).
extern "C" __global__ void __launch_bounds__(128) choose_backward(
    int M, int T, int E, int k, int before, int Q, Sum balance, Sum z, const Element* __restrict__ logits,
    const Sum* __restrict__ weights, const long long* __restrict__ chosen, const Sum* __restrict__ dweights,
    const long long* __restrict__ load, const Sum* __restrict__ weight, Result* __restrict__ dlogits) {
    const int m = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (m >= M) return;
    const int b = m / T;
    logits += (long long)m * E;
    weights += (long long)m * k;
    chosen += (long long)m * k;
    dweights += (long long)m * k;
    load += (long long)b * Q * E;
    auto pull = [&](int e) {
        long long count = 0;
        for (int q = 0; q < Q; ++q) count += load[q * E + e];
        return balance * Sum(count);
    };
    dlogits += (long long)m * E;
    const Sum of_sequence = weight ? weight[b] : Sum(0);
    balance *= of_sequence;
    Sum largest = -INFINITE, sum = 0, mean = 0, dot = 0;
    for (int e = lane; e < E; e += 32) largest = larger(largest, wide(logits[e]));
    largest = warp_max(largest);
    for (int e = lane; e < E; e += 32) {
        const Sum part = exp(wide(logits[e]) - largest);
        sum += part;
        mean += part * pull(e);
    }
    sum = warp_sum(sum);
    mean = warp_sum(mean) / sum;
    for (int j = lane; j < k; j += 32) dot += weights[j] * dweights[j];
    dot = warp_sum(dot);
    // All weights depend on all logits (before = 1), or the chosen ones on each other.
    const Sum of_all = 2 * z * of_sequence * (log(sum) + largest) - mean - (before ? dot : Sum(0));
    const Sum of_chosen = before ? Sum(0) : dot;
    for (int e = lane; e < E; e += 32) {
        Sum d = exp(wide(logits[e]) - largest) / sum * (pull(e) + of_all);
        for (int j = 0; j < k; ++j)
            if (chosen[j] == e) d += weights[j] * (dweights[j] - of_chosen);
        dlogits[e] = narrow<Result>(d);
    }
}

// load: (S, E), the choices of each expert in each chunk. One warp for each of them, which reads all choices of the chunk.
// Launch: grid (ceil(S E / 4)), block (128).
extern "C" __global__ void __launch_bounds__(128) count_choices(
    int S, int E, int n, const long long* __restrict__ chosen, long long* __restrict__ load) {
    const int i = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (i >= S * E) return;
    const int s = i / E, e = i % E;
    int count = 0;
    for (int j = lane; j < n; j += 32) count += chosen[(long long)s * n + j] == e;
    count = warp_sum(count);
    if (lane == 0) load[i] = count;
}

// takes: (2, S, E), what expert e takes of a chunk, the first of its choices there, and their first row: those of one expert are
// neighbours. load: (B, Q, E), choices in all Q chunks of each sequence; this rank has `own` of them, 1 or 2: the numbers `first`
// and `last`. An expert takes at most `capacity` choices of a sequence, the first ones. One warp, which has 32 experts at a time.
// Launch: grid (1), block (32).
extern "C" __global__ void __launch_bounds__(32) start_experts(
    int B, int Q, int E, int own, int first, int last, int capacity, const long long* __restrict__ load,
    int* __restrict__ takes, long long* __restrict__ ends) {
    const int lane = threadIdx.x, S = B * own;
    int before = 0;    // rows of all experts before these
    for (int e0 = 0; e0 < E; e0 += 32) {
        const int e = e0 + lane;
        int total = 0;
        for (int b = 0, s = 0; b < B && e < E; ++b) {
            const long long* chunk = load + (long long)b * Q * E + e;
            for (int c = 0; c < own; ++c, ++s) {
                const int number = c ? last : first;
                int left = capacity;
                for (int q = 0; q < number; ++q) left -= int(chunk[q * E]);
                const int taken = max(0, min(left, int(chunk[number * E])));
                takes[(long long)s * E + e] = taken;
                total += taken;
            }
        }
        int sum = total;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        int row = before + sum - total;
        for (int s = 0; s < S && e < E; ++s) {
            const long long i = (long long)s * E + e;
            takes[(long long)S * E + i] = row;
            row += takes[i];
        }
        if (e < E) ends[e] = row;
        before += __shfl_sync(~0u, sum, 31);
    }
}

// places and sources: choices of one expert and chunk keep their order, and what exceeds `takes`, as above, has place -1.
// Behind the last row sources are 0. One warp for each expert and chunk. Launch: grid (ceil(S E / 4)), block (128).
extern "C" __global__ void __launch_bounds__(128) permute(
    int S, int E, int n, const long long* __restrict__ chosen, const int* __restrict__ takes,
    const long long* __restrict__ ends, long long* __restrict__ places, long long* __restrict__ sources) {
    const int i = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (i >= S * E) return;
    const int s = i / E, e = i % E, takes_here = takes[i], first = takes[(long long)S * E + i];
    int found = 0;
    for (int j0 = 0; j0 < n; j0 += 32) {
        const int j = j0 + lane;
        const long long choice = (long long)s * n + j;
        const bool mine = j < n && chosen[choice] == e;
        const unsigned votes = __ballot_sync(~0u, mine);
        const int order = found + __popc(votes & ((1u << lane) - 1));
        const bool taken = mine && order < takes_here;
        if (mine) places[choice] = taken ? first + order : -1;
        if (taken) sources[first + order] = choice;
        found += __popc(votes);
    }
    for (int row = int(ends[E - 1]) + 32 * i + lane; row < S * n; row += 32 * S * E) sources[row] = 0;
}

// tally: (2, E), to which are added the choices of each expert, and those that it took. load: (S, E).
// Launch: grid (ceil(E / 128)), block (128).
extern "C" __global__ void __launch_bounds__(128) add_load(
    int S, int E, const long long* __restrict__ load, const long long* __restrict__ ends, long long* tally) {
    const int e = blockIdx.x * 128 + threadIdx.x;
    if (e >= E) return;
    long long sum = 0;
    for (int s = 0; s < S; ++s) sum += load[s * E + e];
    tally[e] += sum;
    tally[E + e] += ends[e] - (e > 0 ? ends[e - 1] : 0);
}

// rows[r] = x[sources[r] / k], times the weight of that choice; weights are of type Result, or null: 1.
// One warp a row. Launch: grid (ceil(R / 4)), block (128).
extern "C" __global__ void __launch_bounds__(128) dispatch(
    int R, int C, int k, const Element* __restrict__ x, const long long* __restrict__ sources,
    const Result* __restrict__ weights, Element* __restrict__ rows) {
    const int r = blockIdx.x * 4 + threadIdx.x / 32;
    if (r >= R) return;
    const long long choice = sources[r], m = choice / k;
    const Sum weight = weights ? Sum(wide(weights[choice])) : Sum(1);
    const bool vector = in_runs<WIDE>(x, C) && in_runs<WIDE>(rows, C);
    for (int c = WIDE * (threadIdx.x % 32); c < C; c += COLUMNS) {
        Sum run[WIDE];
        load_run(x + m * C, c, C, vector, run);
#pragma unroll
        for (int i = 0; i < WIDE; ++i) run[i] *= weight;
        store_run(rows + (long long)r * C, c, C, vector, run);
    }
}

// y[m] = the sum over j of weights[m, j] rows[places[m, j]], in the order of j; a place below 0 has zeros. Weights as above.
// One warp a token. Launch: grid (ceil(M / 4)), block (128).
extern "C" __global__ void __launch_bounds__(128) combine(
    int M, int C, int k, const Element* __restrict__ rows, const long long* __restrict__ places,
    const Result* __restrict__ weights, Element* __restrict__ y) {
    const int m = blockIdx.x * 4 + threadIdx.x / 32;
    if (m >= M) return;
    const bool vector = in_runs<WIDE>(rows, C) && in_runs<WIDE>(y, C);
    for (int c = WIDE * (threadIdx.x % 32); c < C; c += COLUMNS) {
        Sum sum[WIDE] = {}, run[WIDE];
        for (long long j = (long long)m * k; j < (m + 1LL) * k; ++j) {
            if (places[j] < 0) continue;
            const Sum weight = weights ? Sum(wide(weights[j])) : Sum(1);
            load_run(rows + places[j] * C, c, C, vector, run);
#pragma unroll
            for (int i = 0; i < WIDE; ++i) sum[i] += weight * run[i];
        }
        store_run(y + (long long)m * C, c, C, vector, sum);
    }
}

// dweights[m, j] = dy[m] . rows[places[m, j]], of type Result; 0 at a place below 0.
// One warp a token. Launch: grid (ceil(M / 4)), block (128).
extern "C" __global__ void __launch_bounds__(128) combine_backward(
    int M, int C, int k, const Element* __restrict__ dy, const Element* __restrict__ rows,
    const long long* __restrict__ places, Result* __restrict__ dweights) {
    const int m = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (m >= M) return;
    const bool vector = in_runs<WIDE>(rows, C) && in_runs<WIDE>(dy, C);
    for (long long j = (long long)m * k; j < (m + 1LL) * k; ++j) {
        Sum dot = 0, pull[WIDE], run[WIDE];
        for (int c = WIDE * lane; c < C && places[j] >= 0; c += COLUMNS) {
            load_run(dy + (long long)m * C, c, C, vector, pull);
            load_run(rows + places[j] * C, c, C, vector, run);
#pragma unroll
            for (int i = 0; i < WIDE; ++i) dot += pull[i] * run[i];
        }
        dot = warp_sum(dot);
        if (lane == 0) dweights[j] = narrow<Result>(dot);
    }
}
