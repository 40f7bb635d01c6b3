// The PTX instructions that kernels use, one function each. The simulator brings its own (simulator/tensor_cores.h).
//
// mma_m16n8k16      D (16 x 8, float) += A (16 x 16) B (16 x 8), a warp together; sm_80, or two steps of k8 on sm_75
// mma_m16n8k8_tf32  D (16 x 8, float) += A (16 x 8) B (8 x 8), in TF32: float32 whose last 13 bits do not count; sm_80
// ldmatrix_x4       four 8 x 8 matrices of 16-bit elements from shared memory, lane 8 i + r naming row r of matrix i
// copy_async_16     16 bytes from global to shared memory past the registers, the bytes from `valid` on as zeros
// copy_async_if     4 or 16 bytes likewise; where they do not exist they are not read, and are zeros
// exp2_flushed      2^x by one instruction: a relative error below 2^-22, and 0 where 2^x is subnormal
// Layouts of the fragments: PTX ISA, "Matrix Fragments for mma.m16n8k16" and "ldmatrix".
#pragma once
#include "element.cuh"

#ifndef KERNEL_SIMULATOR

// The same number. What follows from it is computed again here, instead of being kept in registers from further up.
__device__ __forceinline__ int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], unsigned a0, unsigned a1, unsigned b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b));
}

// The last argument chooses by its type alone.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], __half) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    mma_m16n8k8(d, a[0], a[1], b[0]);
    mma_m16n8k8(d, a[2], a[3], b[1]);
#endif
}

#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], __nv_bfloat16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_transposed(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

__device__ __forceinline__ void copy_async_16(void* shared, const void* global, int valid = 16) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(shared_address(shared)), "l"(global), "r"(valid)
                 : "memory");
#else    // an ordinary copy, whose bytes past `valid` are never read: sm_75 has no asynchronous one
    uint4 bytes = make_uint4(0, 0, 0, 0);
    if (valid == 16) bytes = *static_cast<const uint4*>(global);
    else for (int i = 0; i < valid; ++i) reinterpret_cast<char*>(&bytes)[i] = static_cast<const char*>(global)[i];
    *static_cast<uint4*>(shared) = bytes;
#endif
}

__device__ __forceinline__ float exp2_flushed(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

template <int BYTES> __device__ __forceinline__ void copy_async_if(void* shared, const void* global, bool exists) {
    static_assert(BYTES == 4 || BYTES == 16, "a number, or a chunk past the cache");
#if __CUDA_ARCH__ >= 800
    if (BYTES == 4)
        asm volatile("{.reg .pred p; setp.eq.s32 p, %2, 0; cp.async.ca.shared.global [%0], [%1], 4, p;}"
                     :: "r"(shared_address(shared)), "l"(global), "r"(int(exists)) : "memory");
    else
        asm volatile("{.reg .pred p; setp.eq.s32 p, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, p;}"
                     :: "r"(shared_address(shared)), "l"(global), "r"(int(exists)) : "memory");
#else
    if (BYTES == 4) *static_cast<unsigned*>(shared) = exists ? *static_cast<const unsigned*>(global) : 0;
    else *static_cast<uint4*>(shared) = exists ? *static_cast<const uint4*>(global) : make_uint4(0, 0, 0, 0);
#endif
}

__device__ __forceinline__ void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `groups` of the committed groups are under way.
template <int groups> __device__ __forceinline__ void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(groups) : "memory");
#endif
}

#endif
