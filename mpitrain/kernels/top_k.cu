// The k elements of largest magnitude of x: (n,), chosen exactly, in ascending order of their indices; of elements of equal
// magnitude at the threshold those with the lowest indices. Equal on every run and every rank.
//
// Radix selection: the bits of |x|, as an integer, have the order of |x|. Four rounds of count_digits and choose_digit
// settle the threshold eight bits at a time; count_chosen, place_chosen and write_chosen then compact what is chosen.
// state: threshold so far, and how many of the elements still in question are to be chosen. NaN counts as the largest.
// Launch: grid (B) with 1 <= B <= 1024, block (256), equal for all; choose_digit and place_chosen with grid (1).
#include "reduce.cuh"

__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

constexpr int WIDE = RUN<float>, ROUND = 256 * WIDE;    // elements of a thread at a time; of a block

// A block's share of the elements, whole rounds.
struct Share {
    long long begin, end;
    __device__ __forceinline__ explicit Share(long long n) {
        const long long rounds = (n + ROUND - 1) / ROUND;
        begin = rounds * blockIdx.x / gridDim.x * ROUND;
        end = min(n, rounds * (blockIdx.x + 1) / gridDim.x * ROUND);
    }

    // Calls take(i, xs) in each round: this thread's elements from i on. Behind the end are zeros, which are never chosen: no
    // element is smaller, and of equal ones the first are taken.
    template <class Take> __device__ __forceinline__ void each(const float* x, Take take) const {
        const bool vector = in_runs<WIDE>(x, 0);
        for (long long round = begin; round < end; round += ROUND) {
            const long long i = round + WIDE * threadIdx.x;
            float xs[WIDE];
            load_run(x + i, 0, int(max(0LL, min(end - i, (long long)WIDE))), vector, xs);
            take(i, xs);
        }
    }
};

// counts[d] += how many elements agree with the threshold above `shift + 8` bits and have digit d there; counts: (256,)
extern "C" __global__ void __launch_bounds__(256) count_digits(
    long long n, const float* __restrict__ x, int shift, const unsigned* __restrict__ state, unsigned* counts) {
    __shared__ unsigned here[256];
    here[threadIdx.x] = 0;
    __syncthreads();
    const unsigned long long threshold = state[0];
    Share(n).each(x, [&](long long, const float (&xs)[WIDE]) {
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            const unsigned long long bits = magnitude(xs[j]);
            if (bits >> (shift + 8) == threshold >> (shift + 8)) atomicAdd(&here[bits >> shift & 255], 1u);
        }
    });
    __syncthreads();
    if (here[threadIdx.x]) atomicAdd(&counts[threadIdx.x], here[threadIdx.x]);
}

// Appends to the threshold the digit in which the last chosen element lies, and clears the counts for the next round.
extern "C" __global__ void __launch_bounds__(256) choose_digit(int shift, unsigned* state, unsigned* counts) {
    __shared__ unsigned here[256];
    here[threadIdx.x] = counts[threadIdx.x];
    counts[threadIdx.x] = 0;
    __syncthreads();
    unsigned above = 0;
    for (int digit = threadIdx.x + 1; digit < 256; ++digit) above += here[digit];
    const unsigned wanted = state[1];
    __syncthreads();    // all have read the state that one of them changes
    if (above < wanted && wanted <= above + here[threadIdx.x]) {
        state[0] |= threadIdx.x << shift;
        state[1] = wanted - above;
    }
}

// places[b] = how many elements of block b's share lie above the threshold, places[B + b] = how many at it.
extern "C" __global__ void __launch_bounds__(256) count_chosen(
    long long n, const float* __restrict__ x, const unsigned* __restrict__ state, int* __restrict__ places) {
    __shared__ int scratch[8];
    const unsigned threshold = state[0];
    int above = 0, at = 0;
    Share(n).each(x, [&](long long, const float (&xs)[WIDE]) {
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            above += magnitude(xs[j]) > threshold;
            at += magnitude(xs[j]) == threshold;
        }
    });
    above = block_sum(above, scratch);
    at = block_sum(at, scratch);
    if (threadIdx.x > 0) return;
    places[blockIdx.x] = above;
    places[gridDim.x + blockIdx.x] = at;
}

// Turns both rows of places: (2, B) into sums over the blocks before. One thread: B is small.
extern "C" __global__ void __launch_bounds__(32) place_chosen(int B, int* places) {
    if (threadIdx.x > 1) return;
    int before = 0;
    for (int b = 0; b < B; ++b) {
        const int count = places[threadIdx.x * B + b];
        places[threadIdx.x * B + b] = before;
        before += count;
    }
}

// The sum of `count` over the earlier threads of the block; that over all of them is added to `total`.
__device__ __forceinline__ unsigned sum_before(unsigned count, unsigned* scratch, unsigned& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned sum = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const unsigned other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();    // the last use of scratch is over
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    sum -= count;
    for (int w = 0; w < 8; ++w) {
        if (w < warp) sum += scratch[w];
        total += scratch[w];
    }
    return sum;
}

// indices, values: (k,)
extern "C" __global__ void __launch_bounds__(256) write_chosen(
    long long n, const float* __restrict__ x, const unsigned* __restrict__ state, const int* __restrict__ places,
    int* __restrict__ indices, float* __restrict__ values) {
    __shared__ unsigned scratch[8];
    const unsigned threshold = state[0];
    const int ties = int(state[1]);
    int above = places[blockIdx.x], at = places[gridDim.x + blockIdx.x];
    Share(n).each(x, [&](long long i, const float (&xs)[WIDE]) {
        unsigned mine = 0, all = 0;    // two counts in one: from bit 0 on those above the threshold, from bit 16 on those at it
#pragma unroll
        for (int j = 0; j < WIDE; ++j)
            mine += unsigned(magnitude(xs[j]) > threshold) + (unsigned(magnitude(xs[j]) == threshold) << 16);
        const unsigned before = sum_before(mine, scratch, all);
        int above_here = above + int(before & 0xffff), at_here = at + int(before >> 16);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            const bool is_above = magnitude(xs[j]) > threshold, is_at = magnitude(xs[j]) == threshold;
            if (is_above || (is_at && at_here < ties)) {
                const int place = above_here + min(at_here, ties);    // those chosen before this one
                indices[place] = int(i + j);
                values[place] = xs[j];
            }
            above_here += is_above;
            at_here += is_at;
        }
        above += int(all & 0xffff);
        at += int(all >> 16);
    });
}
