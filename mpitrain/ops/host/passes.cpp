// Fused passes over rows: GELU with its derivative, LayerNorm and the weights of attention, both
// forward and backward.
// REAL is the type of all numbers: float or double. Arrays come as Python objects, whose header has
// HEADER bytes; the fields of a NumPy array are behind that. The functions have the names and the
// arguments of NumPy's passes (`NUMPY` in passes.py).
//
// A row stays in the L1 cache between the loops over it. No function keeps state or allocates.
// M rows, C channels. Sums over a row have the order of the compiler's vectors: bits depend on the
// processor, but not on M.

// zig compiles this on machines without headers of the C library: so memcpy and memset are the compiler's own.
#include <stdint.h>

#define EXPORTED __attribute__((visibility("default")))
#define RESTRICT __restrict__

typedef REAL real;

EXPORTED const char* none;  // Python's None

// The first fields of NumPy's PyArrayObject.
struct Fields {
    char* first;
    int dims;
    const int64_t *shape, *strides;  // strides in bytes
};

static inline const Fields* fields(const char* array) { return (const Fields*)(array + HEADER); }

static inline real* at(const char* array) { return array == none ? nullptr : (real*)fields(array)->first; }

// M rows of K numbers, with `stride` numbers from row to row: an array (..., Q, K), of which every dim but
// the last are rows. Q queries
struct Rows {
    int64_t m, q, k, stride;
    Rows(const char* array) {
        const Fields* of = fields(array);
        m = 1;
        for (int dim = 0; dim < of->dims - 1; dim++) m *= of->shape[dim];
        q = of->shape[of->dims - 2], k = of->shape[of->dims - 1];
        stride = of->strides[of->dims - 2] / (int64_t)sizeof(real);
    }
};

static const int64_t BLOCK = 256;  // rows of a partial sum

// The numbers of exp(x) = 2^n (1 + r p(r)) with x = (n + r) log(2), |r| <= 1/2; p interpolates
// (2^r - 1) / r at Chebyshev's nodes, with a relative error of 1e-8 (float) and 1e-17 (double).
// Adding `round` = 1.5 * 2^23 (1.5 * 2^52) rounds to an integer, which is then in the sum's lowest bits.
template <class>
struct Exp;
template <>
struct Exp<float> {
    typedef uint32_t Bits;
    static constexpr int fraction = 23;
    static constexpr float bound = 87, round = 12582912;
    static constexpr float p[] = {1.5453163e-4f, 1.3390863e-3f, 9.618083e-3f,
                                  5.550357e-2f,  2.402265e-1f,  6.931472e-1f};
};
template <>
struct Exp<double> {
    typedef uint64_t Bits;
    static constexpr int fraction = 52;
    static constexpr double bound = 708, round = 6755399441055744;
    static constexpr double p[] = {
        4.4549605981865186e-10, 7.072585949269223e-09, 1.0178062445845774e-07, 1.321544258792169e-06,
        1.525273382983612e-05,  1.540353044173605e-04, 1.3333558146416936e-03, 9.618129107606888e-03,
        5.55041086648216e-02,   2.4022650695910097e-01, 6.931471805599453e-01};
};

// NaN stays NaN; beyond +-bound the result is that of the bound.
static inline real exponential(real x) {
    typedef Exp<real> E;
    const real log2e = 1.4426950408889634;
    x = x < -E::bound ? -E::bound : x;
    x = x > E::bound ? E::bound : x;
    const real sum = x * log2e + E::round, n = sum - E::round, r = x * log2e - n;
    real p = E::p[0];
#pragma GCC unroll 16
    for (unsigned i = 1; i < sizeof E::p / sizeof *E::p; i++) p = p * r + E::p[i];
    p = p * r + 1;
    E::Bits bits, shift;
    __builtin_memcpy(&bits, &p, sizeof bits);
    __builtin_memcpy(&shift, &sum, sizeof shift);
    bits += shift << E::fraction;
    __builtin_memcpy(&p, &bits, sizeof bits);
    return p;
}

extern "C" {

// y[m, c] = z h with z = y + b[c], h = (1 + tanh u) / 2, u = c1 z + c3 z^3; slope its derivative.
// b may be None. y, slope: (M, C)
EXPORTED void gelu(real c1, real c3, char* y_, char* b_, char* slope_, char* /* arena */) {
    const Rows rows(y_);
    const int64_t m = rows.m, c = rows.k;
    real *RESTRICT y = at(y_), *RESTRICT slope = at(slope_);
    const real* RESTRICT b = at(b_);
    for (int64_t i = 0; i < m; i++, y += c, slope += c) {
        if (b)
#pragma omp simd
            for (int64_t j = 0; j < c; j++) y[j] += b[j];
#pragma omp simd
        for (int64_t j = 0; j < c; j++) {
            const real z = y[j], square = z * z;
            const real h = 1 / (1 + exponential(-2 * z * (c1 + c3 * square)));
            const real value = z * h;
            y[j] = value;
            slope[j] = h + (1 - h) * value * (2 * c1 + 6 * c3 * square);
        }
    }
}

// normal = (x - mean) inverse, y = normal gain + bias.   x, y, normal: (M, C); inverse: (M,)
EXPORTED void layer_norm(real epsilon, char* x_, char* gain_, char* bias_, char* y_, char* normal_,
                         char* inverse_) {
    const Rows rows(x_);
    const int64_t m = rows.m, c = rows.k;
    const real *RESTRICT x = at(x_), *RESTRICT gain = at(gain_), *RESTRICT bias = at(bias_);
    real *RESTRICT y = at(y_), *RESTRICT normal = at(normal_), *RESTRICT inverse = at(inverse_);
    for (int64_t i = 0; i < m; i++, x += c, y += c, normal += c) {
        real sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < c; j++) sum += x[j];
        const real mean = sum / c;
#pragma omp simd reduction(+ : squares)
        for (int64_t j = 0; j < c; j++) squares += (x[j] - mean) * (x[j] - mean);
        const real scale = 1 / __builtin_sqrt(squares / c + epsilon);
#pragma omp simd
        for (int64_t j = 0; j < c; j++) {
            const real n = (x[j] - mean) * scale;
            normal[j] = n;
            y[j] = n * gain[j] + bias[j];
        }
        inverse[i] = scale;
    }
}

// dx = (dy gain - mean(dy gain) - normal mean(dy gain normal)) inverse + residual
// dgain = sum of dy normal over rows, dbias = sum of dy; both are sums of sums over BLOCK rows.
// residual may be None.   dy, normal, dx, residual: (M, C); inverse: (M,); dgain, dbias: (C,);
// part: scratch (2, C)
EXPORTED void layer_norm_backward(char* dy_, char* gain_, char* normal_, char* inverse_, char* residual_,
                                  char* dx_, char* dgain_, char* dbias_, char* part_, char* /* arena */) {
    const Rows rows(dy_);
    const int64_t m = rows.m, c = rows.k;
    const real *RESTRICT dy = at(dy_), *RESTRICT gain = at(gain_), *RESTRICT normal = at(normal_);
    const real *RESTRICT inverse = at(inverse_), *RESTRICT residual = at(residual_);
    real *RESTRICT dx = at(dx_), *RESTRICT dgain = at(dgain_), *RESTRICT dbias = at(dbias_);
    real* RESTRICT part = at(part_);
    __builtin_memset(dgain, 0, c * sizeof *dgain);
    __builtin_memset(dbias, 0, c * sizeof *dbias);
    for (int64_t start = 0; start < m; start += BLOCK) {
        __builtin_memset(part, 0, 2 * c * sizeof *part);
        const int64_t stop = start + BLOCK < m ? start + BLOCK : m;
        for (int64_t i = start; i < stop; i++, dy += c, normal += c, dx += c) {
            real first = 0, second = 0;
#pragma omp simd reduction(+ : first, second)
            for (int64_t j = 0; j < c; j++) {
                const real product = dy[j] * normal[j];
                part[j] += product;
                part[c + j] += dy[j];
                first += dy[j] * gain[j];
                second += product * gain[j];
            }
            first /= c;
            second /= c;
#pragma omp simd
            for (int64_t j = 0; j < c; j++)
                dx[j] = (dy[j] * gain[j] - first - normal[j] * second) * inverse[i];
            // A loop of its own rounds dx before the sum, as a separate operation would.
            if (residual)
#pragma omp simd
                for (int64_t j = 0; j < c; j++) dx[j] += residual[i * c + j];
        }
#pragma omp simd
        for (int64_t j = 0; j < c; j++) {
            dgain[j] += part[j];
            dbias[j] += part[c + j];
        }
    }
}

// The columns [first, last) that a query sees: `end` for query 0, one more for each query, but of these
// only [starts, ends) of that query, where these are given.   K columns
struct Seen {
    int64_t first, last;
    Seen(int64_t query, int64_t k, int64_t end, const int64_t* starts, const int64_t* ends) {
        last = end + query < k ? end + query : k;
        last = ends && ends[query] < last ? ends[query] : last;
        last = last > 0 ? last : 0;
        first = starts && starts[query] > 0 ? starts[query] : 0;
        first = first < last ? first : last;
    }
    void hide_others(real* row, int64_t k) const {
        for (int64_t j = 0; j < first; j++) row[j] = 0;
        for (int64_t j = last; j < k; j++) row[j] = 0;
    }
};

// scores = exp(scores) where a query sees the key, else 0; dropped, if not null, is multiplied by that.
// Returns the sum of a row.
static inline real weigh(const Seen seen, int64_t k, real* RESTRICT scores, real* RESTRICT dropped) {
    real sum = 0;
    seen.hide_others(scores, k);
#pragma omp simd reduction(+ : sum)
    for (int64_t j = seen.first; j < seen.last; j++) {
        const real value = exponential(scores[j]);
        scores[j] = value;
        sum += value;
    }
    if (dropped)
#pragma omp simd
        for (int64_t j = 0; j < k; j++) dropped[j] *= scores[j];
    return sum;
}

// A tile of the forward. sums: (Q,), written by the first tile of its queries, else added to.
// scores, dropped: (Q, K) with one stride; starts, ends: (Q,); the last three may be None
EXPORTED void weigh_tile(int64_t end, int64_t is_first, char* starts_, char* ends_, char* scores_,
                         char* dropped_, char* sums_) {
    const Rows rows(scores_);
    const int64_t q = rows.q, k = rows.k, stride = rows.stride;
    const int64_t *starts = (const int64_t*)at(starts_), *ends = (const int64_t*)at(ends_);
    real *scores = at(scores_), *dropped = at(dropped_), *sums = at(sums_);
    for (int64_t i = 0; i < q; i++) {
        const real sum = weigh(Seen(i, k, end, starts, ends), k, scores + i * stride,
                               dropped ? dropped + i * stride : nullptr);
        sums[i] = is_first ? sum : sums[i] + sum;
    }
}

// A block of attention that is not tiled; M rows, of which each Q are the queries of a head.
// inverse = 1 / sum of exp. Returns whether every sum is within (least, most).   exp: (M, K)
EXPORTED int weigh_block(int64_t end, real least, real most, char* starts_, char* ends_, char* exp_,
                         char* inverse_) {
    const Rows rows(exp_);
    const int64_t m = rows.m, q = rows.q, k = rows.k, stride = rows.stride;
    const int64_t *starts = (const int64_t*)at(starts_), *ends = (const int64_t*)at(ends_);
    real *exp = at(exp_), *inverse = at(inverse_);
    int is_safe = 1;
    for (int64_t i = 0; i < m; i++) {
        const real sum = weigh(Seen(i % q, k, end, starts, ends), k, exp + i * stride, nullptr);
        is_safe &= least < sum && sum < most;
        inverse[i] = 1 / sum;
    }
    return is_safe;
}

// weights = exp(weights) as above, dscores = weights dscores. With dropout: dscores = weights (dropped
// dscores + minus_dots), dropped = weights dropped.   minus_dots: (Q,); others: (Q, K)
EXPORTED void tile_backward(int64_t end, char* starts_, char* ends_, char* weights_, char* dscores_,
                            char* dropped_, char* minus_dots_) {
    const Rows rows(weights_);
    const int64_t q = rows.q, k = rows.k, stride = rows.stride;
    const int64_t *starts = (const int64_t*)at(starts_), *ends = (const int64_t*)at(ends_);
    real *every_weights = at(weights_), *every_dscores = at(dscores_), *every_dropped = at(dropped_);
    const real* minus_dots = at(minus_dots_);
    for (int64_t i = 0; i < q; i++) {
        const Seen seen(i, k, end, starts, ends);
        real *RESTRICT weights = every_weights + i * stride, *RESTRICT dscores = every_dscores + i * stride;
        seen.hide_others(weights, k);
        seen.hide_others(dscores, k);
        if (!every_dropped) {
#pragma omp simd
            for (int64_t j = seen.first; j < seen.last; j++) {
                const real value = exponential(weights[j]);
                weights[j] = value;
                dscores[j] *= value;
            }
            continue;
        }
        real* RESTRICT dropped = every_dropped + i * stride;
        seen.hide_others(dropped, k);
        const real minus_dot = minus_dots[i];
#pragma omp simd
        for (int64_t j = seen.first; j < seen.last; j++) {
            const real value = exponential(weights[j]), mask = dropped[j];
            weights[j] = value;
            dscores[j] = value * (mask * dscores[j] + minus_dot);
            dropped[j] = mask * value;
        }
    }
}

// dscores = exp (dscores - inverse (sum of exp dscores)); with masks of dropout, first dscores = masks
// dscores, and masks = masks exp.   inverse: (M,); others: (M, K) with one stride; masks may be None
EXPORTED void block_backward(char* exp_, char* inverse_, char* dscores_, char* masks_) {
    const Rows rows(exp_);
    const int64_t m = rows.m, k = rows.k, stride = rows.stride;
    const real *every_exp = at(exp_), *inverse = at(inverse_);
    real *every_dscores = at(dscores_), *every_masks = at(masks_);
    for (int64_t i = 0; i < m; i++) {
        const real* RESTRICT exp = every_exp + i * stride;
        real* RESTRICT dscores = every_dscores + i * stride;
        real dot = 0;
        if (every_masks) {
            real* RESTRICT masks = every_masks + i * stride;
#pragma omp simd
            for (int64_t j = 0; j < k; j++) {
                dscores[j] *= masks[j];
                masks[j] *= exp[j];
            }
        }
#pragma omp simd reduction(+ : dot)
        for (int64_t j = 0; j < k; j++) dot += exp[j] * dscores[j];
        dot *= inverse[i];
#pragma omp simd
        for (int64_t j = 0; j < k; j++) dscores[j] = exp[j] * (dscores[j] - dot);
    }
}

}  // extern "C"
