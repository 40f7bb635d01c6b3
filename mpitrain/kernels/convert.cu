// y = x in another element type: from Element to Result, rounded to nearest even; beyond Result's range, infinity.
// Launch: grid (any), block (256); n >= 0 may be anything, and arrays need no alignment.
#include "element.cuh"

extern "C" __global__ void __launch_bounds__(256) convert(long long n, const Element* __restrict__ x, Result* __restrict__ y) {
    const bool vector = in_fours(x, 0) && in_fours(y, 0);
    for (long long i = 4 * (blockIdx.x * 256LL + threadIdx.x); i < n; i += 4 * 256LL * gridDim.x) {
        const int left = int(min(n - i, 4LL));
        Sum four[4];
        load_four(x + i, 0, left, vector, four);
        store_four(y + i, 0, left, vector, four);
    }
}
