// Fused passes of float32 over rows: GELU with its derivative, and LayerNorm forward and backward.
//
// A row stays in the L1 cache between the loops over it. No function keeps state or allocates.
// M rows, C channels. Sums over a row have the order of the compiler's vectors: bits depend on the
// processor, but not on M.

#include <cstdint>
#include <cstring>

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define RESTRICT __restrict__

static const int64_t BLOCK = 256;  // rows of a partial sum

// exp(x): 2^n times a polynomial (Cephes, expf). NaN stays NaN; beyond +-87 the result is exp(+-87).
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 87.0f ? 87.0f : x;
    const float round = 12582912.0f;  // 1.5 * 2^23: the sum has no fraction
    const float n = (x * 1.44269504088896341f + round) - round;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

// y[m, c] = z h with z = y + b[c], h = (1 + tanh u) / 2, u = c1 z + c3 z^3; slope its derivative.
// b may be null. y, slope: (M, C)
EXPORTED void gelu(int64_t m, int64_t c, float* RESTRICT y, const float* RESTRICT b,
                   float* RESTRICT slope, float c1, float c3) {
    for (int64_t i = 0; i < m; i++, y += c, slope += c) {
#pragma omp simd
        for (int64_t j = 0; j < c; j++) {
            const float z = b ? y[j] + b[j] : y[j];
            const float square = z * z;
            const float h = 1.0f / (1.0f + exponential(-2.0f * z * (c1 + c3 * square)));
            const float value = z * h;
            y[j] = value;
            slope[j] = h + (1.0f - h) * value * (2.0f * c1 + 6.0f * c3 * square);
        }
    }
}

// normal = (x - mean) inverse, y = normal gain + bias.   x, y, normal: (M, C); inverse: (M,)
EXPORTED void layer_norm(int64_t m, int64_t c, const float* RESTRICT x, const float* RESTRICT gain,
                         const float* RESTRICT bias, float epsilon, float* RESTRICT y,
                         float* RESTRICT normal, float* RESTRICT inverse) {
    for (int64_t i = 0; i < m; i++, x += c, y += c, normal += c) {
        float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < c; j++) sum += x[j];
        const float mean = sum / c;
#pragma omp simd reduction(+ : squares)
        for (int64_t j = 0; j < c; j++) squares += (x[j] - mean) * (x[j] - mean);
        const float scale = 1.0f / __builtin_sqrtf(squares / c + epsilon);
#pragma omp simd
        for (int64_t j = 0; j < c; j++) {
            const float n = (x[j] - mean) * scale;
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
EXPORTED void layer_norm_backward(int64_t m, int64_t c, const float* RESTRICT dy,
                                  const float* RESTRICT gain, const float* RESTRICT normal,
                                  const float* RESTRICT inverse, const float* RESTRICT residual,
                                  float* RESTRICT dx, float* RESTRICT dgain, float* RESTRICT dbias,
                                  float* RESTRICT part) {
    memset(dgain, 0, c * sizeof *dgain);
    memset(dbias, 0, c * sizeof *dbias);
    for (int64_t start = 0; start < m; start += BLOCK) {
        memset(part, 0, 2 * c * sizeof *part);
        const int64_t stop = start + BLOCK < m ? start + BLOCK : m;
        for (int64_t i = start; i < stop; i++, dy += c, normal += c, dx += c) {
            float first = 0, second = 0;
#pragma omp simd reduction(+ : first, second)
            for (int64_t j = 0; j < c; j++) {
                const float product = dy[j] * normal[j];
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
