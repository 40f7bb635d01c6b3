// The k elements of largest magnitude of x: (n,), chosen exactly, in ascending order of their indices; of elements of equal
// magnitude at the threshold those with the lowest indices. Equal on every run and every rank.
//
// Radix selection: the bits of |x|, as an integer, have the order of |x|. Four rounds of count_digits and choose_digit
// settle the threshold eight bits at a time; count_chosen, place_chosen and write_chosen then compact what is chosen.
// state: threshold so far, and how many of the elements still in question are to be chosen. NaN counts as the largest.
// Launch: grid (B) with 1 <= B <= 1024, block (256), equal for all; choose_digit and place_chosen with grid (1).
#include "reduce.cuh"

__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// A block's share of the elements, whole rounds of 256.
struct Share {
    long long begin, end;
    __device__ __forceinline__ explicit Share(long long n) {
        const long long rounds = (n + 255) / 256;
        begin = rounds * blockIdx.x / gridDim.x * 256;
        end = min(n, rounds * (blockIdx.x + 1) / gridDim.x * 256);
    }
};

// counts[d] += how many elements agree with the threshold above `shift + 8` bits and have digit d there; counts: (256,)
extern "C" __global__ void __launch_bounds__(256) count_digits(
    long long n, const float* __restrict__ x, int shift, const unsigned* __restrict__ state, unsigned* counts) {
    __shared__ unsigned here[256];
    here[threadIdx.x] = 0;
    __syncthreads();
    const unsigned long long threshold = state[0];
    const Share share(n);
    for (long long i = share.begin + threadIdx.x; i < share.end; i += 256) {
        const unsigned long long bits = magnitude(x[i]);
        if (bits >> (shift + 8) == threshold >> (shift + 8)) atomicAdd(&here[bits >> shift & 255], 1u);
    }
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
    const Share share(n);
    int above = 0, at = 0;
    for (long long i = share.begin + threadIdx.x; i < share.end; i += 256) {
        above += magnitude(x[i]) > state[0];
        at += magnitude(x[i]) == state[0];
    }
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

// How many earlier threads of the block, in this round of 256, make the claim; the block's total is added to `total`.
__device__ __forceinline__ int claims_before(bool claim, int* scratch, int& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned votes = __ballot_sync(~0u, claim);
    __syncthreads();    // the last use of scratch is over
    if (lane == 0) scratch[warp] = __popc(votes);
    __syncthreads();
    int before = __popc(votes & ((1u << lane) - 1));
    for (int w = 0; w < 8; ++w) {
        if (w < warp) before += scratch[w];
        total += scratch[w];
    }
    return before;
}

// indices, values: (k,)
extern "C" __global__ void __launch_bounds__(256) write_chosen(
    long long n, const float* __restrict__ x, const unsigned* __restrict__ state, const int* __restrict__ places,
    int* __restrict__ indices, float* __restrict__ values) {
    __shared__ int scratch[8];
    const Share share(n);
    const int ties = int(state[1]);
    int above = places[blockIdx.x], at = places[gridDim.x + blockIdx.x];
    for (long long round = share.begin; round < share.end; round += 256) {
        const long long i = round + threadIdx.x;
        const bool inside = i < share.end;
        const unsigned bits = inside ? magnitude(x[i]) : 0u;
        const bool is_above = inside && bits > state[0], is_at = inside && bits == state[0];
        int more_above = 0, more_at = 0;
        const int above_here = above + claims_before(is_above, scratch, more_above);
        const int at_here = at + claims_before(is_at, scratch, more_at);
        if (is_above || (is_at && at_here < ties)) {
            const int place = above_here + min(at_here, ties);    // those chosen before this one
            indices[place] = int(i);
            values[place] = x[i];
        }
        above += more_above;
        at += more_at;
    }
}
