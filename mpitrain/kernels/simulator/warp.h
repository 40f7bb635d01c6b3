// Barriers and warp collectives as CUDA names them, each a meeting of the lanes named in a mask.
#pragma once
#include "language.h"

inline SIMULATOR_OWN void __syncthreads(SIMULATOR_HERE) { ::simulator::barrier(place); }

namespace simulator {

void order_memory(void** arrived);    // the collective of __syncwarp: afterwards the lanes see each other's writes

template <class T> struct Shuffle { T value, result; int source; };

template <class T> SIMULATOR_OWN void shuffle(void** arrived) {
    for (int lane = 0; lane < 32; ++lane) {
        if (!arrived[lane]) continue;
        auto* mine = static_cast<Shuffle<T>*>(arrived[lane]);
        // The value of an absent lane is undefined: all bits set is a NaN in every floating format.
        if (arrived[mine->source]) mine->result = static_cast<Shuffle<T>*>(arrived[mine->source])->value;
        else memset(static_cast<void*>(&mine->result), 0xff, sizeof(T));
    }
}

template <class T> SIMULATOR_OWN T shuffle_from(unsigned mask, T value, int source, Place place) {
    Shuffle<T> mine{value, value, source};
    meet(mask, &shuffle<T>, &mine, place);
    return mine.result;
}

struct Vote { bool claim; unsigned result; };

inline SIMULATOR_OWN void count_votes(void** arrived) {
    unsigned result = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (arrived[lane] && static_cast<Vote*>(arrived[lane])->claim) result |= 1u << lane;
    for (int lane = 0; lane < 32; ++lane)
        if (arrived[lane]) static_cast<Vote*>(arrived[lane])->result = result;
}

inline SIMULATOR_OWN unsigned vote(unsigned mask, bool claim, Place place) {
    Vote mine{claim, 0};
    meet(mask, &count_votes, &mine, place);
    return mine.result;
}

}  // namespace simulator

inline SIMULATOR_OWN void __syncwarp(unsigned mask = ~0u, SIMULATOR_HERE) {
    ::simulator::meet(mask, &::simulator::order_memory, &mask, place);
}
template <class T> SIMULATOR_OWN T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMULATOR_HERE) {
    const int lane = ::simulator::self.lane;
    return ::simulator::shuffle_from(mask, value, (lane & ~(width - 1)) | (source & (width - 1)), place);
}
template <class T> SIMULATOR_OWN T __shfl_up_sync(unsigned mask, T value, int delta, int width = 32, SIMULATOR_HERE) {
    const int lane = ::simulator::self.lane;
    return ::simulator::shuffle_from(mask, value, (lane & (width - 1)) < delta ? lane : lane - delta, place);
}
template <class T> SIMULATOR_OWN T __shfl_down_sync(unsigned mask, T value, int delta, int width = 32, SIMULATOR_HERE) {
    const int lane = ::simulator::self.lane;
    return ::simulator::shuffle_from(mask, value, (lane & (width - 1)) + delta >= width ? lane : lane + delta, place);
}
template <class T> SIMULATOR_OWN T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32, SIMULATOR_HERE) {
    const int lane = ::simulator::self.lane, source = lane ^ flip;
    return ::simulator::shuffle_from(mask, value, source / width > lane / width ? lane : source, place);
}
inline SIMULATOR_OWN unsigned __ballot_sync(unsigned mask, int claim, SIMULATOR_HERE) {
    return ::simulator::vote(mask, claim != 0, place);
}
inline SIMULATOR_OWN int __any_sync(unsigned mask, int claim, SIMULATOR_HERE) {
    return ::simulator::vote(mask, claim != 0, place) != 0;
}
inline SIMULATOR_OWN int __all_sync(unsigned mask, int claim, SIMULATOR_HERE) {
    return ::simulator::vote(mask, claim == 0, place) == 0;
}
