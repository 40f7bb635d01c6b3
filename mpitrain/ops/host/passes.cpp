// Fused passes over rows: GELU with its derivative, and LayerNorm forward and backward.
// REAL is the type of all numbers: float or double. Arrays come as Python objects, whose header has
// HEADER bytes; a NumPy array has the address of its first element behind that.
//
// A row stays in the L1 cache between the loops over it. No function keeps state or allocates.
// M rows, C channels. Sums over a row have the order of the compiler's vectors: bits depend on the
// processor, but not on M.

#include <stdint.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))
#define RESTRICT __restrict__

typedef REAL real;

EXPORTED const char* none;  // Python's None

static inline real* at(const char* array) {
    return array == none ? nullptr : *(real* const*)(array + HEADER);
}

static const int64_t BLOCK = 256;  // rows of a partial sum

// exp(x) = 2^n exp(r), |r| <= ln(2) / 2, by a polynomial in r. NaN stays NaN. Beyond +-87 (float) and
// +-708 (double) the result is that of this bound. Adding 1.5 * 2^23 (1.5 * 2^52) rounds to an
// integer, which is then in the lowest bits of the sum.
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 87.0f ? 87.0f : x;
    const float sum = x * 1.44269504088896341f + 12582912.0f, n = sum - 12582912.0f;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;  // Cephes, expf
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &sum, sizeof bits);
    bits = (bits + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

static inline double exponential(double x) {
    x = x < -708.0 ? -708.0 : x;
    x = x > 708.0 ? 708.0 : x;
    const double sum = x * 1.4426950408889634074 + 6755399441055744.0, n = sum - 6755399441055744.0;
    const double r = (x - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6;
    double p = 1.0 / 6227020800.0;  // Taylor's series up to r^13 / 13!
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r * r + r + 1.0;
    uint64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    bits = (bits + 1023) << 52;
    double scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

extern "C" {

// y[m, c] = z h with z = y + b[c], h = (1 + tanh u) / 2, u = c1 z + c3 z^3; slope its derivative.
// b may be null. y, slope: (M, C)
EXPORTED void gelu(int64_t m, int64_t c, real c1, real c3, char* y_, char* b_, char* slope_) {
    real *RESTRICT y = at(y_), *RESTRICT slope = at(slope_);
    const real* RESTRICT b = at(b_);
    for (int64_t i = 0; i < m; i++, y += c, slope += c) {
#pragma omp simd
        for (int64_t j = 0; j < c; j++) {
            const real z = b ? y[j] + b[j] : y[j];
            const real square = z * z;
            const real h = 1 / (1 + exponential(-2 * z * (c1 + c3 * square)));
            const real value = z * h;
            y[j] = value;
            slope[j] = h + (1 - h) * value * (2 * c1 + 6 * c3 * square);
        }
    }
}

// normal = (x - mean) inverse, y = normal gain + bias.   x, y, normal: (M, C); inverse: (M,)
EXPORTED void layer_norm(int64_t m, int64_t c, real epsilon, char* x_, char* gain_, char* bias_,
                         char* y_, char* normal_, char* inverse_) {
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
// residual may be null.   dy, normal, dx, residual: (M, C); inverse: (M,); dgain, dbias: (C,);
// part: scratch (2, C)
EXPORTED void layer_norm_backward(int64_t m, int64_t c, char* dy_, char* gain_, char* normal_,
                                  char* inverse_, char* residual_, char* dx_, char* dgain_,
                                  char* dbias_, char* part_) {
    const real *RESTRICT dy = at(dy_), *RESTRICT gain = at(gain_), *RESTRICT normal = at(normal_);
    const real *RESTRICT inverse = at(inverse_), *RESTRICT residual = at(residual_);
    real *RESTRICT dx = at(dx_), *RESTRICT dgain = at(dgain_), *RESTRICT dbias = at(dbias_);
    real* RESTRICT part = at(part_);
    memset(dgain, 0, c * sizeof *dgain);
    memset(dbias, 0, c * sizeof *dbias);
    for (int64_t start = 0; start < m; start += BLOCK) {
        memset(part, 0, 2 * c * sizeof *part);
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

}  // extern "C"
