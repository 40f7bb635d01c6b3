// The PTX instructions that kernels reach through hopper.cuh: barriers in shared memory, boxes copied by TMA, products of warpgroups.
// The rules are in hopper.cpp.
#pragma once
#include "tensor_cores.h"

#define __cluster_dims__(...)

// As machine.py fills it in: extents in elements, `pitch` from a row and `sequence_pitch` from a sequence to the next in bytes.
struct alignas(64) TensorMap {
    const char* array;
    long long inner, outer, sequences, pitch, sequence_pitch;
    unsigned box_inner, box_outer, element_bytes;
    char rest[68];
};
static_assert(sizeof(TensorMap) == 128);

namespace simulator {

unsigned char* dynamic_memory();
unsigned window_address(const void* pointer);
void init_barrier(unsigned barrier, int arrivals);
void arrive(unsigned barrier, unsigned rank, unsigned bytes, Place place);
void wait_for_phase(unsigned barrier, unsigned parity, Place place);
void start_box(unsigned to, const TensorMap& map, unsigned barrier, int inner, int outer, int sequence, unsigned blocks, Place place);
void fence_proxy();
unsigned rank_in_cluster();
void meet_cluster(Place place);

// registers: four of a lane's that hold A, or null where A lies in shared memory, as `a` says
struct WarpgroupProduct {
    float* sums;
    int count;
    unsigned long long a, b;
    const unsigned* registers;
    bool transposed_a, transposed_b, adds, is_bfloat16;
    Place place;
};
void fence_products(void** arrived);
void change_registers();
void issue_product(void** arrived);
void commit_products(void** arrived);
void reach_wait(void** arrived);
void wait_for_products(unsigned groups, Place place);

}  // namespace simulator

inline SIMULATOR_OWN unsigned shared_address(const void* pointer) { return ::simulator::window_address(pointer); }
inline SIMULATOR_OWN unsigned char* dynamic_shared_memory() { return ::simulator::dynamic_memory(); }
template <int COUNT> void give_registers() {}
template <int COUNT> void take_registers() {}
inline SIMULATOR_OWN void barrier_init(unsigned barrier, int arrivals) { ::simulator::init_barrier(barrier, arrivals); }
inline void barriers_are_made() {}
inline SIMULATOR_OWN void barrier_expect(unsigned barrier, unsigned bytes, SIMULATOR_HERE) {
    ::simulator::arrive(barrier, ::simulator::rank_in_cluster(), bytes, place);
}
inline SIMULATOR_OWN void barrier_arrive(unsigned barrier, SIMULATOR_HERE) {
    ::simulator::arrive(barrier, ::simulator::rank_in_cluster(), 0, place);
}
inline SIMULATOR_OWN void barrier_arrive(unsigned barrier, unsigned rank, SIMULATOR_HERE) {
    ::simulator::arrive(barrier, rank, 0, place);
}
inline SIMULATOR_OWN void barrier_wait(unsigned barrier, unsigned parity, SIMULATOR_HERE) {
    ::simulator::wait_for_phase(barrier, parity, place);
}
inline SIMULATOR_OWN unsigned cluster_rank() { return ::simulator::rank_in_cluster(); }
inline SIMULATOR_OWN void cluster_sync(SIMULATOR_HERE) { ::simulator::meet_cluster(place); }
inline void prefetch_map(const TensorMap&) {}
inline SIMULATOR_OWN void copy_box(unsigned to, const TensorMap& map, unsigned barrier, int inner, int outer, SIMULATOR_HERE) {
    ::simulator::start_box(to, map, barrier, inner, outer, 0, 1u << ::simulator::rank_in_cluster(), place);
}
inline SIMULATOR_OWN void copy_box(unsigned to, const TensorMap& map, unsigned barrier, int inner, int outer, unsigned short blocks,
                                   SIMULATOR_HERE) {
    ::simulator::start_box(to, map, barrier, inner, outer, 0, blocks, place);
}
inline SIMULATOR_OWN void copy_rows(unsigned to, const TensorMap& map, unsigned barrier, int inner, int outer, int sequence, SIMULATOR_HERE) {
    ::simulator::start_box(to, map, barrier, inner, outer, sequence, 1u << ::simulator::rank_in_cluster(), place);
}
inline SIMULATOR_OWN void proxy_fence() { ::simulator::fence_proxy(); }
inline SIMULATOR_OWN void wgmma_fence(SIMULATOR_HERE) { ::simulator::meet(~0u, &::simulator::fence_products, &place, place); }
inline SIMULATOR_OWN void wgmma_commit(SIMULATOR_HERE) { ::simulator::meet(~0u, &::simulator::commit_products, &place, place); }
template <int GROUPS> SIMULATOR_OWN void wgmma_wait(SIMULATOR_HERE) {
    ::simulator::meet(~0u, &::simulator::reach_wait, &place, place);
    ::simulator::wait_for_products(GROUPS, place);
}
template <int N> SIMULATOR_OWN void hold(float (&)[N]) { ::simulator::change_registers(); }
template <int N> SIMULATOR_OWN void hold(unsigned (&)[N][4]) { ::simulator::change_registers(); }
inline SIMULATOR_OWN int anew(int x) { return x; }
template <int TA, int TB, int ADDS = 1, int COUNT, class T>
SIMULATOR_OWN void wgmma(float (&sums)[COUNT], unsigned long long a, unsigned long long b, T, SIMULATOR_HERE) {
    ::simulator::WarpgroupProduct mine{sums, COUNT, a, b, nullptr, TA != 0, TB != 0, ADDS != 0, __is_same(T, __nv_bfloat16), place};
    ::simulator::meet(~0u, &::simulator::issue_product, &mine, place);
}
template <int TB, int ADDS = 1, int COUNT, class T>
SIMULATOR_OWN void wgmma_from_registers(float (&sums)[COUNT], const unsigned (&a)[4], unsigned long long b, T, SIMULATOR_HERE) {
    ::simulator::WarpgroupProduct mine{sums, COUNT, 0, b, a, false, TB != 0, ADDS != 0, __is_same(T, __nv_bfloat16), place};
    ::simulator::meet(~0u, &::simulator::issue_product, &mine, place);
}
