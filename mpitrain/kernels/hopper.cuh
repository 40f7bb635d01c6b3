// The PTX instructions of Hopper that kernels use, one function each, and the layout of their tiles in shared memory. sm_90a. The
// simulator brings its own instructions (simulator/hopper.h).
//
// wgmma<TA, TB>   D (64 x N, float) += A (64 x 16) B (16 x N), of 16-bit elements that both lie in shared memory: four
//                 warps together, asynchronous. TA, TB: 1 where the operand is stored as rows of K; ADDS 0: D = A B
// wgmma_from_registers<TB>  the same, of an A whose 16 rows of each warp lie in its registers, as a fragment of mma.m16n8k16
// wgmma_fence     before the first product, and behind whatever else reads or writes their sums; wgmma_commit closes a group of
//                 products, wgmma_wait waits until at most so many groups are under way
// copy_box        a box of a tensor to shared memory by the copy engine (TMA), swizzled; what lies outside of the tensor becomes 0
// copy_rows       the same of one sequence of several: what lies outside of the sequence becomes 0
// barrier_...     an mbarrier: a phase ends when all arrivals and all announced bytes have come
// proxy_fence     ordinary stores of this thread to shared memory are seen by wgmma and TMA from here on
// cluster_...     the blocks that run together, and share copies
//
// A tile in shared memory is made of panels. A panel has rows of 128 bytes, which are 64 elements. The 16-byte chunk c of row r lies at
// chunk c ^ r % 8 of that row (the 128-byte swizzle), which follows from the address alone where panels begin at multiples of 1,024.
//
//     K-major: stored as rows of W    panels of W rows, of 64 elements of K
//     else: stored as rows of K       W / 64 panels of as many rows as K has elements, of 64 elements of W
#pragma once
#include "ptx.cuh"

constexpr unsigned PANEL = 64, ROW_BYTES = 128, ATOM_BYTES = 1024;    // eight rows: what the swizzle repeats after

// What wgmma is told about an operand. Addresses and distances count in 16 bytes: the address in bits 0 to 13; `leading`, from a panel
// to the next one, from bit 16 on (K-major operands have one panel); `stride`, from eight rows to the next eight, from bit 32 on;
// and in bit 62 that the layout is swizzled.
__device__ __forceinline__ unsigned long long descriptor(unsigned address, unsigned leading, unsigned stride) {
    return (unsigned long long)((address & 0x3FFFF) >> 4) | (unsigned long long)(leading >> 4) << 16 |
           (unsigned long long)(stride >> 4) << 32 | 1ull << 62;
}

// The same of a layout without a swizzle.
__device__ __forceinline__ unsigned long long plain_descriptor(unsigned address, unsigned leading, unsigned stride) {
    return descriptor(address, leading, stride) & ~(3ull << 62);
}

// The descriptor of what lies `bytes` further on: an address below 256 KB never carries into the other fields.
__device__ __forceinline__ unsigned long long moved(unsigned long long descriptor, unsigned bytes) { return descriptor + (bytes >> 4); }

// An operand of WIDE x DEPTH elements in shared memory.
template <bool K_MAJOR, int WIDE, int DEPTH> struct Panels {
    static constexpr unsigned BYTES = WIDE * DEPTH * 2;
    static_assert(DEPTH % (K_MAJOR ? PANEL : 16) == 0 && WIDE % (K_MAJOR ? 8 : PANEL) == 0, "whole rows, whole panels");

    // From its begin to the part that a product of depth 16 reads: from w on (a multiple of 64 if not K-major), from k on.
    static __device__ __forceinline__ constexpr unsigned part(unsigned w, unsigned k) {
        return K_MAJOR ? k / PANEL * WIDE * ROW_BYTES + w * ROW_BYTES + k % PANEL * 2 : w / PANEL * DEPTH * ROW_BYTES + k * ROW_BYTES;
    }
    static __device__ __forceinline__ unsigned long long first(unsigned begin) {
        return descriptor(begin, K_MAJOR ? 16 : DEPTH * ROW_BYTES, ATOM_BYTES);
    }
};

#ifndef KERNEL_SIMULATOR

struct alignas(64) TensorMap { unsigned char opaque[128]; };    // made by the driver's cuTensorMapEncodeTiled

__device__ __forceinline__ unsigned char* dynamic_shared_memory() {
    extern __shared__ __align__(1024) unsigned char tiles_in_shared_memory[];
    return tiles_in_shared_memory;
}

// Registers of each thread of a warpgroup, which it gives back or takes together.
template <int COUNT> __device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> __device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// What barrier_init wrote is there for the copy engine, and for the other blocks of a cluster.
__device__ __forceinline__ void barriers_are_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Arrives, and announces the bytes of copies.
__device__ __forceinline__ void barrier_expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the barrier at this place in block `rank` of the cluster. (With the scope of a cluster ptxas would wait for all stores of
// the thread. But what arrives here has only read, by products that have been waited for.)
__device__ __forceinline__ void barrier_arrive(unsigned barrier, unsigned rank) {
    asm volatile(
        "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there];}"
        ::"r"(barrier), "r"(rank) : "memory");
}
// Waits until the phase of this parity has ended. (For the scope of a cluster ptxas would discard the L1 cache after each wait. But
// what is waited for here is read by products alone, and not through that cache.)
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    unsigned ended;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(ended) : "r"(barrier), "r"(parity) : "memory");
    } while (!ended);
}

__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_sync() { asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory"); }

__device__ __forceinline__ void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// inner, outer: the first element of the box in its row, and its first row
__device__ __forceinline__ void copy_box(unsigned to, const TensorMap& map, unsigned barrier, int inner, int outer) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(&map), "r"(inner), "r"(outer), "r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_rows(unsigned to, const TensorMap& map, unsigned barrier, int inner, int outer, int sequence) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(to), "l"(&map), "r"(inner), "r"(outer), "r"(sequence), "r"(barrier) : "memory");
}
// copy_box to this place of every block in `blocks` (a bit each), each with its barrier at this place.
__device__ __forceinline__ void copy_box(unsigned to, const TensorMap& map, unsigned barrier, int inner, int outer, unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(&map), "r"(inner), "r"(outer), "r"(barrier), "h"(blocks) : "memory");
}

__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int GROUPS> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}
// The compiler moves nothing that reads or writes these sums across this place.
template <int N> __device__ __forceinline__ void hold(float (&sums)[N]) {
#pragma unroll
    for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
}
// The same of an operand: its words are in registers from here on.
template <int N> __device__ __forceinline__ void hold(unsigned (&words)[N][4]) {
#pragma unroll
    for (auto& four : words)
#pragma unroll
        for (unsigned& word : four) asm volatile("" : "+r"(word)::"memory");
}

// An asm statement needs a name for each register of the sums: ten by ten.
#define WGMMA_TEN(t) "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define WGMMA_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_16(i) WGMMA_4(i), WGMMA_4(i + 4), WGMMA_4(i + 8), WGMMA_4(i + 12)
#define WGMMA_32(i) WGMMA_16(i), WGMMA_16(i + 16)
#define WGMMA_64(i) WGMMA_32(i), WGMMA_32(i + 32)
// sums: the names of `count` registers, and a_, b_, ta_, tb_, adds_: those of the operands behind them. The last argument of the
// functions chooses by its type alone.
#define WGMMA(type, types, n, count, sums, a_, b_, ta_, tb_, adds_, ...)                                                     \
    template <int TA, int TB, int ADDS = 1>                                                                                  \
    __device__ __forceinline__ void wgmma(float (&d)[count], unsigned long long a, unsigned long long b, type) {             \
        asm volatile("{.reg .pred p; setp.ne.b32 p, " adds_ ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." types      \
                     " {" sums "}, " a_ ", " b_ ", p, 1, 1, " ta_ ", " tb_ ";}"                                              \
                     : __VA_ARGS__ : "l"(a), "l"(b), "n"(TA), "n"(TB), "n"(ADDS));                                           \
    }
#define WGMMA_FROM_REGISTERS(type, types, n, count, sums, a_, b_, tb_, adds_, ...)                                           \
    template <int TB, int ADDS = 1>                                                                                          \
    __device__ __forceinline__ void wgmma_from_registers(float (&d)[count], const unsigned (&a)[4], unsigned long long b, type) { \
        asm volatile("{.reg .pred p; setp.ne.b32 p, " adds_ ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." types      \
                     " {" sums "}, {" a_ "}, " b_ ", p, 1, 1, " tb_ ";}"                                                     \
                     : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TB), "n"(ADDS));                \
    }
#define WGMMA_32_SUMS WGMMA_TEN() WGMMA_TEN(1) WGMMA_TEN(2) "%30, %31"
#define WGMMA_64_SUMS WGMMA_TEN() WGMMA_TEN(1) WGMMA_TEN(2) WGMMA_TEN(3) WGMMA_TEN(4) WGMMA_TEN(5) "%60, %61, %62, %63"
#define WGMMA_WIDTHS(type, types)                                                                                            \
    WGMMA(type, types, 8, 4, "%0, %1, %2, %3", "%4", "%5", "%6", "%7", "%8", WGMMA_4(0))                                     \
    WGMMA(type, types, 64, 32, WGMMA_32_SUMS, "%32", "%33", "%34", "%35", "%36", WGMMA_32(0))                                \
    WGMMA(type, types, 128, 64, WGMMA_64_SUMS, "%64", "%65", "%66", "%67", "%68", WGMMA_64(0))                               \
    WGMMA(type, types, 192, 96, WGMMA_TEN() WGMMA_TEN(1) WGMMA_TEN(2) WGMMA_TEN(3) WGMMA_TEN(4) WGMMA_TEN(5) WGMMA_TEN(6)    \
          WGMMA_TEN(7) WGMMA_TEN(8) "%90, %91, %92, %93, %94, %95", "%96", "%97", "%98", "%99", "%100", WGMMA_64(0), WGMMA_32(64)) \
    WGMMA(type, types, 256, 128, WGMMA_TEN() WGMMA_TEN(1) WGMMA_TEN(2) WGMMA_TEN(3) WGMMA_TEN(4) WGMMA_TEN(5) WGMMA_TEN(6)   \
          WGMMA_TEN(7) WGMMA_TEN(8) WGMMA_TEN(9) WGMMA_TEN(10) WGMMA_TEN(11) "%120, %121, %122, %123, %124, %125, %126, %127", \
          "%128", "%129", "%130", "%131", "%132", WGMMA_64(0), WGMMA_64(64))                                                 \
    WGMMA_FROM_REGISTERS(type, types, 64, 32, WGMMA_32_SUMS, "%32, %33, %34, %35", "%36", "%37", "%38", WGMMA_32(0))         \
    WGMMA_FROM_REGISTERS(type, types, 128, 64, WGMMA_64_SUMS, "%64, %65, %66, %67", "%68", "%69", "%70", WGMMA_64(0))
WGMMA_WIDTHS(__half, "f16.f16")
WGMMA_WIDTHS(__nv_bfloat16, "bf16.bf16")

#endif
