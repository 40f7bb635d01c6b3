// The PTX instructions that kernels reach through ptx.cuh: tensor-core products, matrix loads, asynchronous copies, powers.
// Fragment layouts are those of the PTX ISA, sections "Matrix fragments for mma.m16n8k16" and "ldmatrix", so that a
// kernel's own index arithmetic is tested. Sums of TF32 are cut off towards 0, as tensor cores do; of others neither the order
// nor the rounding of sums is modelled.
#pragma once
#include "half.h"

namespace simulator {

struct Product { float* d; const unsigned *a, *b; int depth; bool is_bfloat16; };

inline SIMULATOR_OWN float half_of(unsigned word, int which, bool is_bfloat16) {
    const uint16_t bits = uint16_t(which ? word >> 16 : word);
    return is_bfloat16 ? bfloat16_value(bits) : float16_value(bits);
}

// D (16 x 8) += A (16 x depth) B (depth x 8). Lane 4 g + t holds rows g and g + 8, columns 2 t and 2 t + 1.
inline SIMULATOR_OWN void multiply(void** arrived) {
    float a[16][16], b[16][8];
    const int depth = static_cast<Product*>(arrived[0])->depth;
    for (int lane = 0; lane < 32; ++lane) {
        const auto* mine = static_cast<Product*>(arrived[lane]);
        const int g = lane >> 2, t = lane & 3;
        for (int word = 0; word < depth / 4; ++word)
            for (int which = 0; which < 2; ++which)
                a[g + (word & 1) * 8][t * 2 + which + (word >> 1) * 8] = half_of(mine->a[word], which, mine->is_bfloat16);
        for (int word = 0; word < depth / 8; ++word)
            for (int which = 0; which < 2; ++which)
                b[t * 2 + which + word * 8][g] = half_of(mine->b[word], which, mine->is_bfloat16);
    }
    for (int lane = 0; lane < 32; ++lane) {
        auto* mine = static_cast<Product*>(arrived[lane]);
        const int g = lane >> 2, t = lane & 3;
        for (int i = 0; i < 4; ++i)
            for (int k = 0; k < depth; ++k) mine->d[i] += a[g + (i >> 1) * 8][k] * b[k][t * 2 + (i & 1)];
    }
}

inline SIMULATOR_OWN float tf32_value(unsigned word) { return __builtin_bit_cast(float, word & ~0x1fffu); }

// The same of TF32, eight elements of K deep.
inline SIMULATOR_OWN void multiply_tf32(void** arrived) {
    float a[16][8], b[8][8];
    for (int lane = 0; lane < 32; ++lane) {
        const auto* mine = static_cast<Product*>(arrived[lane]);
        const int g = lane >> 2, t = lane & 3;
        for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][t + i / 2 * 4] = tf32_value(mine->a[i]);
        for (int i = 0; i < 2; ++i) b[t + i * 4][g] = tf32_value(mine->b[i]);
    }
    for (int lane = 0; lane < 32; ++lane) {
        auto* mine = static_cast<Product*>(arrived[lane]);
        const int g = lane >> 2, t = lane & 3;
        for (int i = 0; i < 4; ++i) {
            double sum = mine->d[i];
            for (int k = 0; k < 8; ++k) sum += double(a[g + (i >> 1) * 8][k]) * b[k][t * 2 + (i & 1)];
            const float nearest = float(sum);
            const bool is_beyond = fabs(double(nearest)) > fabs(sum);
            mine->d[i] = is_beyond ? __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, nearest) - 1) : nearest;
        }
    }
}

struct MatrixLoad { const void* row; unsigned* result; int count; bool transposed; };

// `count` 8 x 8 matrices of 16-bit elements; lane 8 m + r names row r of matrix m.
inline SIMULATOR_OWN void load_matrices(void** arrived) {
    for (int lane = 0; lane < 32; ++lane) {
        auto* mine = static_cast<MatrixLoad*>(arrived[lane]);
        for (int m = 0; m < mine->count; ++m) {
            uint16_t pair[2];
            for (int which = 0; which < 2; ++which) {
                const int row = mine->transposed ? lane % 4 * 2 + which : lane / 4;
                const int column = mine->transposed ? lane / 4 : lane % 4 * 2 + which;
                const auto* source = static_cast<MatrixLoad*>(arrived[8 * m + row]);
                pair[which] = static_cast<const uint16_t*>(source->row)[column];
            }
            mine->result[m] = pair[0] | unsigned(pair[1]) << 16;
        }
    }
}

inline SIMULATOR_OWN void load_matrix(unsigned* result, const void* row, int count, bool transposed, Place place) {
    if (reinterpret_cast<uintptr_t>(row) % 16) fail("alignment", "ldmatrix from a row that is not aligned to 16 bytes");
    if (self.lane < 8 * count) touch(row, 16, READ);
    MatrixLoad mine{row, result, count, transposed};
    meet(~0u, &load_matrices, &mine, place);
}

inline SIMULATOR_OWN void multiply_add(float (&d)[4], const unsigned* a, const unsigned* b, int depth, bool is_bfloat16,
                                       Place place) {
    Product mine{d, a, b, depth, is_bfloat16};
    meet(~0u, &multiply, &mine, place);
}

}  // namespace simulator

inline SIMULATOR_OWN void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], __half,
                                       SIMULATOR_HERE) {
    ::simulator::multiply_add(d, a, b, 16, false, place);
}
inline SIMULATOR_OWN void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], __nv_bfloat16,
                                       SIMULATOR_HERE) {
    ::simulator::multiply_add(d, a, b, 16, true, place);
}
inline SIMULATOR_OWN void mma_m16n8k8(float (&d)[4], unsigned a0, unsigned a1, unsigned b0, SIMULATOR_HERE) {
    const unsigned a[2] = {a0, a1}, b[1] = {b0};
    ::simulator::multiply_add(d, a, b, 8, false, place);
}
inline SIMULATOR_OWN void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], SIMULATOR_HERE) {
    ::simulator::Product mine{d, a, b, 8, false};
    ::simulator::meet(~0u, &::simulator::multiply_tf32, &mine, place);
}
inline SIMULATOR_OWN void ldmatrix_x4(unsigned (&result)[4], const void* row, SIMULATOR_HERE) {
    ::simulator::load_matrix(result, row, 4, false, place);
}
inline SIMULATOR_OWN void ldmatrix_x4_transposed(unsigned (&result)[4], const void* row, SIMULATOR_HERE) {
    ::simulator::load_matrix(result, row, 4, true, place);
}
// A subnormal x is flushed to 0, whose power is 1 all the same.
inline float exp2_flushed(float x) { return x < -126.0f ? 0.0f : exp2(x); }
inline SIMULATOR_OWN void copy_async_16(void* shared, const void* global, int valid_bytes = 16) {
    ::simulator::start_copy(shared, global, 16, size_t(valid_bytes));
}
template <int BYTES> SIMULATOR_OWN void copy_async_if(void* shared, const void* global, bool exists) {
    ::simulator::start_copy(shared, global, BYTES, exists ? BYTES : 0);
}
inline SIMULATOR_OWN void copy_async_commit() { ::simulator::commit_copies(); }
template <int groups_left> SIMULATOR_OWN void copy_async_wait() { ::simulator::wait_copies(groups_left); }
