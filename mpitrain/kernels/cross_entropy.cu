// Softmax cross-entropy of each row of logits: (M, V), whole or with the vocabulary split over ranks. Rows lie `pitch`
// elements apart; what lies behind a row's V elements is nobody's, and is neither read nor written.
//
// loss = log(sum over v of exp(x[v])) - x[target];  its gradient, times `scale`, is written over the logits:
// dx[v] = scale (exp(x[v] - max) / sum - (1 if v is the target)).    targets: (M,)
// Label smoothing takes the part `smoothing` off the target, and gives each of the V entries the `share` smoothing / V.
// One block a row. Launch: grid (M), block (any whole warps). A target outside the row gives loss NaN.
// A row with the target IGNORED, PyTorch's default `ignore_index`, has loss and gradient 0.
#include "ptx.cuh"
#include "reduce.cuh"

constexpr long long IGNORED = -100;

#define MINUS_INFINITY Sum(__int_as_float(0xff800000))
#define NOT_A_NUMBER Sum(__int_as_float(0x7fc00000))
#define LOG2_E Sum(1.4426950408889634)

constexpr int WIDE = RUN<Element>;

// Loads of a thread that are under way at once. With one, 1024 threads wait for 16 KiB; a multiprocessor of an H200 gets 36 bytes
// a ns, and a load takes some 700 ns: 25 KiB, and twice that where a block only reads for half of its time.
constexpr int AHEAD = sizeof(Element) == 8 ? 1 : 4;

// Calls take(v, whole, x) for each run of the row that is this thread's, in order: x holds the elements v .. v + WIDE - 1, 0 from
// V on. Whole runs have loops of their own, which ask for no end. The last loop takes elements one by one.
template <class Take> __device__ __forceinline__ void each_run(const Element* row, int V, bool vector, Take take) {
    const int whole_end = vector ? V - V % WIDE : 0, step = WIDE * blockDim.x;
    int v = WIDE * threadIdx.x;
    Sum x[WIDE];
    for (; v + (AHEAD - 1) * step < whole_end; v += AHEAD * step) {
        Run<Element, WIDE> runs[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) runs[i] = stored_run<WIDE>(row, v + i * step, v + i * step + WIDE, true);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            widened(runs[i], x);
            take(v + i * step, true, x);
        }
    }
    for (; v < whole_end; v += step) {
        load_run(row, v, v + WIDE, true, x);
        take(v, true, x);
    }
    for (; v < V; v += step) {
        load_run(row, v, V, false, x);
        take(v, false, x);
    }
}

// 2^x. In float one instruction, with a relative error of 2^-22.
__device__ __forceinline__ float power_of_2(float x) { return exp2_flushed(x); }
__device__ __forceinline__ double power_of_2(double x) { return exp2(x); }

// e^x for x <= 0, with a relative error of 2^-22 + |x| 2^-24 in float.
__device__ __forceinline__ Sum exponential(Sum x) { return power_of_2(x * LOG2_E); }

struct Normalizer { Sum maximum, sum; };    // of exp(x - maximum)

// Joins two parts of a row. Where both maxima are -infinity (no element yet) their difference must not become NaN.
__device__ __forceinline__ Normalizer join(Normalizer a, Normalizer b) {
    const Sum maximum = larger(a.maximum, b.maximum);
    const Sum of_a = a.maximum == maximum ? a.sum : a.sum * exponential(a.maximum - maximum);
    const Sum of_b = b.maximum == maximum ? b.sum : b.sum * exponential(b.maximum - maximum);
    return {maximum, of_a + of_b};
}

// The normalizer of one row; every thread of the block gets it. A thread takes the maximum of a run first, then one
// exponential an element.
// kept: with KEEPS, shared memory that receives the row, each thread's runs at their places
template <bool KEEPS>
__device__ __forceinline__ Normalizer row_normalizer(const Element* row, int V, bool vector, Element* kept, Normalizer* scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const Normalizer none = {MINUS_INFINITY, Sum(0)};
    Normalizer own = none;
    each_run(row, V, vector, [&](int v, bool whole, const Sum (&x)[WIDE]) {
        if (KEEPS) store_run(kept, v, whole ? v + WIDE : V, true, x);
        Sum logits[WIDE], largest = own.maximum, part = 0;
#pragma unroll
        for (int j = 0; j < WIDE; ++j) logits[j] = whole || v + j < V ? x[j] : MINUS_INFINITY;
#pragma unroll
        for (int j = 0; j < WIDE; ++j) largest = larger(largest, logits[j]);
        const Sum centre = largest == MINUS_INFINITY ? Sum(0) : largest;
#pragma unroll
        for (int j = 0; j < WIDE; ++j) part += exponential(logits[j] - centre);
        own = {largest, own.sum * exponential(own.maximum - centre) + part};
    });
    for (int round = 0; round < 2; ++round) {
#pragma unroll
        for (int flip = 16; flip > 0; flip /= 2) {
            const Normalizer other = {__shfl_xor_sync(~0u, own.maximum, flip), __shfl_xor_sync(~0u, own.sum, flip)};
            own = lane & flip ? join(other, own) : join(own, other);    // one order in both lanes
        }
        if (round == 1) break;
        if (lane == 0) scratch[warp] = own;
        __syncthreads();    // and what is kept of the row is there for all
        own = lane < warps ? scratch[lane] : none;
    }
    return own;
}

// The target's logit: of a target outside the vocabulary no number, and so is its loss.
__device__ __forceinline__ Sum logit_of(const Element* row, long long target, int V) {
    return target >= 0 && target < V ? Sum(wide(row[target])) : NOT_A_NUMBER;
}

__device__ __forceinline__ Sum loss_of(Normalizer whole, const Element* row, long long target, int V) {
    return log(whole.sum) + whole.maximum - logit_of(row, target, V);
}

// The sum of x - maximum over a row, in every thread of the block.
__device__ __forceinline__ Sum shifted_sum(const Element* row, int V, bool vector, Sum maximum, Sum* scratch) {
    Sum own = 0;
    each_run(row, V, vector, [&](int v, bool whole, const Sum (&x)[WIDE]) {
#pragma unroll
        for (int j = 0; j < WIDE; ++j)
            if (whole || v + j < V) own += x[j] - maximum;
    });
    return block_sum(own, scratch);
}

// What label smoothing adds to the loss of a row; all threads of the block call it.
__device__ __forceinline__ Sum smoothed(
    Normalizer whole, const Element* row, long long target, int V, bool vector, Sum smoothing, Sum share, Sum* scratch) {
    const Sum every = share * shifted_sum(row, V, vector, whole.maximum, scratch);
    return smoothing * (logit_of(row, target, V) - whole.maximum) - every;
}

// Writes the gradient over the row: scale exp(x - maximum) / sum as one power of 2, less scale at the target. scale >= 0
// logits: the row, or its copy in shared memory
__device__ __forceinline__ void write_gradient(
    const Element* logits, Element* row, int V, bool vector, Normalizer whole, long long target, Sum scale) {
    const Sum factor = log2(scale / whole.sum);
    const int place = target >= 0 && target < V ? int(target) : -1, run_of_target = place / WIDE * WIDE;
    each_run(logits, V, vector, [&](int v, bool is_whole, const Sum (&x)[WIDE]) {
        Sum dx[WIDE];
#pragma unroll
        for (int j = 0; j < WIDE; ++j) dx[j] = power_of_2(fma(x[j] - whole.maximum, LOG2_E, factor));
        if (v == run_of_target) {
#pragma unroll
            for (int j = 0; j < WIDE; ++j)
                if (v + j == place) dx[j] -= scale;
        }
        store_run(row, v, is_whole ? v + WIDE : V, is_whole, dx);
    });
}

// Takes `share` off the gradient of each entry of a row, in each thread's own runs, and adds `part` at the target.
__device__ __forceinline__ void smooth_gradient(Element* row, int V, bool vector, long long target, Sum part, Sum share) {
    each_run(row, V, vector, [&](int v, bool whole, const Sum (&x)[WIDE]) {
        Sum dx[WIDE];
#pragma unroll
        for (int j = 0; j < WIDE; ++j) dx[j] = x[j] - share;
        store_run(row, v, whole ? v + WIDE : V, whole, dx);
    });
    __syncthreads();
    if (threadIdx.x == 0 && target >= 0 && target < V) row[target] = narrow<Element>(wide(row[target]) + part);
}

// Writes the gradient of a row that does not count, whatever its logits are.
__device__ __forceinline__ void write_zeros(Element* row, int V, bool vector) {
    const Sum zeros[WIDE] = {};
    for (int v = WIDE * threadIdx.x; v < V; v += WIDE * blockDim.x) store_run(row, v, V, vector, zeros);
}

// losses[m], and the gradient over the logits. With `keep` the row waits in shared memory between the two: it is read once.
// Two blocks of 512 threads share a multiprocessor where two rows fit: one writes while the other reads.
// Dynamic shared memory: with `keep` one row, V elements up to whole runs.
extern "C" __global__ void __launch_bounds__(1024) cross_entropy(
    int M, int V, int pitch, int keep, const Index* __restrict__ targets, Sum scale, Sum smoothing, Sum share, Element* logits,
    Sum* __restrict__ losses) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    __shared__ __align__(16) Sum sums[32];
    __shared__ __align__(16) Normalizer scratch[32];
    Element *row = logits + (long long)blockIdx.x * pitch, *kept = reinterpret_cast<Element*>(dynamic_shared);
    const bool vector = in_runs<WIDE>(logits, pitch);
    const long long target = targets[blockIdx.x];
    if (target == IGNORED) {
        if (threadIdx.x == 0) losses[blockIdx.x] = Sum(0);
        write_zeros(row, V, vector);
        return;
    }
    const Normalizer whole = keep ? row_normalizer<true>(row, V, vector, kept, scratch)
                                  : row_normalizer<false>(row, V, vector, nullptr, scratch);
    const Element* x = keep ? kept : row;
    const Sum more = smoothing > 0 ? smoothed(whole, x, target, V, vector, smoothing, share, sums) : Sum(0);
    if (threadIdx.x == 0) losses[blockIdx.x] = loss_of(whole, x, target, V) + more;
    if (keep) write_gradient(kept, row, V, vector, whole, target, scale);
    else {
        __syncthreads();    // the target's logit is read before it is overwritten
        write_gradient(row, row, V, vector, whole, target, scale);
    }
    if (smoothing > 0) smooth_gradient(row, V, vector, target, scale * smoothing, scale * share);
}

// losses[m] alone; logits stay as they are.
extern "C" __global__ void __launch_bounds__(1024) cross_entropy_loss(
    int M, int V, int pitch, const Index* __restrict__ targets, const Element* __restrict__ logits, Sum* __restrict__ losses) {
    __shared__ __align__(16) Normalizer scratch[32];
    const Element* row = logits + (long long)blockIdx.x * pitch;
    const long long target = targets[blockIdx.x];
    if (target == IGNORED) {
        if (threadIdx.x == 0) losses[blockIdx.x] = Sum(0);
        return;
    }
    const Normalizer whole = row_normalizer<false>(row, V, in_runs<WIDE>(logits, pitch), nullptr, scratch);
    if (threadIdx.x == 0) losses[blockIdx.x] = loss_of(whole, row, target, V);
}

// The vocabulary split in parts: this one has columns first .. first + V - 1. For the loss in order: row_maximum; a maximum over
// the parts; row_exponentials; a sum over the parts of both its outputs; cross_entropy_split. To count correct rows, after the
// maximum over the parts: row_argmax; another maximum over the parts; place_is_target.

// The largest of the values of a block's threads, in its first warp; `scratch` has one place a warp and is used once.
__device__ __forceinline__ Sum block_max(Sum value, Sum* scratch) {
    const int lane = threadIdx.x % 32;
    value = warp_max(value);
    if (lane == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    return warp_max(lane < int(blockDim.x / 32) ? scratch[lane] : MINUS_INFINITY);
}

// maxima[m] = the largest logit of this part's columns, -infinity if V = 0.
extern "C" __global__ void __launch_bounds__(1024) row_maximum(
    int M, int V, int pitch, const Element* __restrict__ logits, Sum* __restrict__ maxima) {
    __shared__ __align__(16) Sum scratch[32];
    const Element* row = logits + (long long)blockIdx.x * pitch;
    Sum own = MINUS_INFINITY;
    each_run(row, V, in_runs<WIDE>(logits, pitch), [&](int v, bool whole, const Sum (&x)[WIDE]) {
#pragma unroll
        for (int j = 0; j < WIDE; ++j)
            if (whole || v + j < V) own = larger(own, x[j]);
    });
    own = block_max(own, scratch);
    if (threadIdx.x == 0) maxima[blockIdx.x] = own;
}

// sums[m] = sum of exp(x - maximum) here; target_logits[m] = (1 - smoothing) (x[target] - maximum) if the target is here, else
// 0, plus `share` of the sum of x - maximum here.
extern "C" __global__ void __launch_bounds__(1024) row_exponentials(
    int M, int V, int pitch, long long first, const Index* __restrict__ targets, Sum smoothing, Sum share,
    const Element* __restrict__ logits, const Sum* __restrict__ maxima, Sum* __restrict__ sums, Sum* __restrict__ target_logits) {
    __shared__ __align__(16) Sum scratch[32];
    const Element* row = logits + (long long)blockIdx.x * pitch;
    const Sum maximum = maxima[blockIdx.x];
    const long long target = targets[blockIdx.x] - first;
    Sum own = 0;
    each_run(row, V, in_runs<WIDE>(logits, pitch), [&](int v, bool whole, const Sum (&x)[WIDE]) {
#pragma unroll
        for (int j = 0; j < WIDE; ++j)
            if (whole || v + j < V) own += exponential(x[j] - maximum);
    });
    own = block_sum(own, scratch);
    const Sum every = share > 0 ? share * shifted_sum(row, V, in_runs<WIDE>(logits, pitch), maximum, scratch) : Sum(0);
    if (threadIdx.x > 0) return;
    sums[blockIdx.x] = own;
    target_logits[blockIdx.x] = every + (target >= 0 && target < V ? (Sum(1) - smoothing) * (wide(row[target]) - maximum) : Sum(0));
}

// losses[m] = log(sum) - target logit, from the sums over all parts; the gradient over this part's logits.
extern "C" __global__ void __launch_bounds__(1024) cross_entropy_split(
    int M, int V, int pitch, long long first, const Index* __restrict__ targets, Sum scale, Sum smoothing, Sum share,
    const Sum* __restrict__ maxima, const Sum* __restrict__ sums, const Sum* __restrict__ target_logits, Element* logits,
    Sum* __restrict__ losses) {
    Element* row = logits + (long long)blockIdx.x * pitch;
    const bool vector = in_runs<WIDE>(logits, pitch);
    const Normalizer whole = {maxima[blockIdx.x], sums[blockIdx.x]};
    const long long target = targets[blockIdx.x];
    const bool counts = target != IGNORED;
    if (threadIdx.x == 0) losses[blockIdx.x] = counts ? log(whole.sum) - target_logits[blockIdx.x] : Sum(0);
    if (counts) write_gradient(row, row, V, vector, whole, target - first, scale);
    else write_zeros(row, V, vector);
    if (counts && share > 0) smooth_gradient(row, V, vector, target - first, scale * smoothing, scale * share);
}

// losses[i] of predictions x and targets y, and the gradient times scale over x; both are 0 where y is NaN.
// kind 0: (x - y)^2; 1: |x - y|; 2: binary cross-entropy of the logit x.    x, y, losses: (n,)
// One thread a number. Launch: grid (any), block (256).
extern "C" __global__ void __launch_bounds__(256) number_loss(
    long long n, int kind, const Sum* __restrict__ targets, Sum scale, Element* predictions, Sum* __restrict__ losses) {
    for (long long i = blockIdx.x * 256LL + threadIdx.x; i < n; i += gridDim.x * 256LL) {
        const Sum x = wide(predictions[i]), y = targets[i], error = x - y, power = exp(-fabs(x));
        Sum loss = error * error, slope = Sum(2) * error;
        if (kind == 1) {
            loss = fabs(error);
            slope = Sum(error > 0) - Sum(error < 0);
        }
        if (kind == 2) {
            loss = (x > 0 ? x : Sum(0)) - x * y + log1p(power);
            slope = (x > 0 ? Sum(1) : power) / (Sum(1) + power) - y;
        }
        const bool counts = y == y;
        losses[i] = counts ? loss : Sum(0);
        predictions[i] = narrow<Element>(counts ? scale * slope : Sum(0));
    }
}

// places[m] = -(first + v) of the lowest column v of this part whose logit is the largest of the whole row, or a NaN; -infinity
// if there is none. Places are exact up to 2^24 in float.
extern "C" __global__ void __launch_bounds__(1024) row_argmax(
    int M, int V, int pitch, long long first, const Element* __restrict__ logits, const Sum* __restrict__ maxima,
    Sum* __restrict__ places) {
    __shared__ __align__(16) Sum scratch[32];
    const Element* row = logits + (long long)blockIdx.x * pitch;
    const Sum maximum = maxima[blockIdx.x];
    Sum own = MINUS_INFINITY;
    each_run(row, V, in_runs<WIDE>(logits, pitch), [&](int v, bool whole, const Sum (&x)[WIDE]) {
#pragma unroll
        for (int j = 0; j < WIDE; ++j)
            if ((whole || v + j < V) && (x[j] == maximum || x[j] != x[j])) own = larger(own, -Sum(first + v + j));
    });
    own = block_max(own, scratch);
    if (threadIdx.x == 0) places[blockIdx.x] = own;
}

// correct[m] = 1 if places[m], a maximum over all parts, is minus the target, else 0.    places, targets, correct: (n,)
// One thread a row. Launch: grid (any), block (256).
extern "C" __global__ void __launch_bounds__(256) place_is_target(
    long long n, const Index* __restrict__ targets, const Sum* __restrict__ places, Sum* __restrict__ correct) {
    for (long long i = blockIdx.x * 256LL + threadIdx.x; i < n; i += gridDim.x * 256LL)
        correct[i] = -places[i] == Sum(targets[i]) ? Sum(1) : Sum(0);
}

// correct[m] = 1 if the first of the largest logits of row m is at the target, else 0. A NaN is the largest of all.
extern "C" __global__ void __launch_bounds__(1024) largest_is_target(
    int M, int V, int pitch, const Index* __restrict__ targets, const Element* __restrict__ logits, Sum* __restrict__ correct) {
    __shared__ __align__(16) Sum values[32];
    __shared__ __align__(16) int places[32];
    const Element* row = logits + (long long)blockIdx.x * pitch;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    Sum best = MINUS_INFINITY;
    int place = V;
    auto take = [&](Sum value, int at) {
        const bool beats = value > best || (value != value && best == best);
        const bool equal = value == best || (value != value && best != best);
        if (beats || (equal && at < place)) {
            best = value;
            place = at;
        }
    };
    each_run(row, V, in_runs<WIDE>(logits, pitch), [&](int v, bool whole, const Sum (&x)[WIDE]) {
#pragma unroll
        for (int j = 0; j < WIDE; ++j)
            if (whole || v + j < V) take(x[j], v + j);
    });
    for (int round = 0; round < 2; ++round) {
#pragma unroll
        for (int flip = 16; flip > 0; flip /= 2) {
            const Sum value = __shfl_xor_sync(~0u, best, flip);
            const int at = __shfl_xor_sync(~0u, place, flip);
            take(value, at);
        }
        if (round == 1) break;
        if (lane == 0) {
            values[warp] = best;
            places[warp] = place;
        }
        __syncthreads();
        best = lane < warps ? values[lane] : MINUS_INFINITY;
        place = lane < warps ? places[lane] : V;
    }
    if (threadIdx.x == 0) correct[blockIdx.x] = place == targets[blockIdx.x] ? Sum(1) : Sum(0);
}
