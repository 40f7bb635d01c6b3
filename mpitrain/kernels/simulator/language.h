// The part of CUDA C++ that C++ lacks: keywords, built-in variables, vector types, mathematics, atomics.
// Included before a kernel source (-include), which is then compiled for the CPU unmodified.
#pragma once
// C's own headers, for <cmath> would be half of what a kernel takes to compile. (For zig, build.py says -nostdinc++.)
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KERNEL_SIMULATOR 1
#define __global__
#define __device__
#define __host__
#define __constant__
// One copy a block: blocks run one after another.
#define __shared__ thread_local
#define __forceinline__ inline    // left to the compiler: forced, the products take ten times as long to compile
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__

// NVRTC has none of these; a source that uses them must fail here too.
#undef INFINITY
#undef NAN
#undef HUGE_VALF
#undef M_PI

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };

#define SIMULATOR_VECTOR(name, element, align2, align4)                                                         \
    struct alignas(align2) name##2 { element x, y; };                                                           \
    struct alignas(align4) name##4 { element x, y, z, w; };                                                     \
    inline name##2 make_##name##2(element x, element y) { return {x, y}; }                                      \
    inline name##4 make_##name##4(element x, element y, element z, element w) { return {x, y, z, w}; }
SIMULATOR_VECTOR(float, float, 8, 16)
SIMULATOR_VECTOR(int, int, 8, 16)
SIMULATOR_VECTOR(uint, unsigned, 8, 16)
SIMULATOR_VECTOR(double, double, 16, 16)
SIMULATOR_VECTOR(char, signed char, 2, 4)
#undef SIMULATOR_VECTOR

// Not seen by the sanitizers of the checked build: the simulator's own work inside a kernel.
#define SIMULATOR_OWN __attribute__((no_sanitize("thread", "undefined")))

namespace simulator {

// What the thread that runs at this moment sees of itself.
struct Self { uint3 thread, block; dim3 threads, blocks; int lane; };
extern Self self;

struct Place { const char* file; int line; };

// A warp collective: runs once, when every lane of the mask has arrived; arrived[l] is lane l's argument, or null.
using Collective = void (*)(void** arrived);

void barrier(Place place);
void meet(unsigned mask, Collective collective, void* argument, Place place);
enum Access { READ, WRITE, ATOMIC };
void touch(const void* address, size_t nbytes, Access access);      // what the sanitizer cannot see by itself
void start_copy(void* to, const void* from, size_t nbytes, size_t valid);   // bytes from `valid` on become zero
void commit_copies();
void wait_copies(int groups_left);
[[gnu::format(printf, 2, 3)]] void fail(const char* kind, const char* format, ...);

// How a launch calls a kernel: arguments[i] points at the i-th argument.
template <size_t...> struct Positions {};
template <size_t N, size_t... I> struct Count : Count<N - 1, N - 1, I...> {};
template <size_t... I> struct Count<0, I...> { using Up = Positions<I...>; };
template <class... P, size_t... I>
SIMULATOR_OWN void call(void (*kernel)(P...), void** arguments, Positions<I...>) {
    kernel(*static_cast<P*>(arguments[I])...);
}
template <class... P> SIMULATOR_OWN void call(void (*kernel)(P...), void** arguments) {
    call(kernel, arguments, typename Count<sizeof...(P)>::Up{});
}

// The type of a parameter that has no say in what T is, and is converted to it.
template <class T> struct Same { using Type = T; };
template <class T> using Given = typename Same<T>::Type;

}  // namespace simulator

#define threadIdx (::simulator::self.thread)
#define blockIdx (::simulator::self.block)
#define blockDim (::simulator::self.threads)
#define gridDim (::simulator::self.blocks)
#define warpSize 32
// The place of the call, as the last and defaulted parameter of whatever can block or fail.
#define SIMULATOR_HERE ::simulator::Place place = {__builtin_FILE(), __builtin_LINE()}

// ---- Atomics. One thread runs at a time, so plain operations do; the race check is told that they are atomic.
#define SIMULATOR_ATOMIC(name, changed)                                                                         \
    template <class T> SIMULATOR_OWN T name(T* address, simulator::Given<T> value) {                            \
        ::simulator::touch(address, sizeof(T), ::simulator::ATOMIC);                                            \
        const T old = *address;                                                                                 \
        *address = (changed);                                                                                   \
        return old;                                                                                             \
    }
SIMULATOR_ATOMIC(atomicAdd, T(old + value))
SIMULATOR_ATOMIC(atomicSub, T(old - value))
SIMULATOR_ATOMIC(atomicMax, old < value ? value : old)
SIMULATOR_ATOMIC(atomicMin, value < old ? value : old)
SIMULATOR_ATOMIC(atomicExch, value)
SIMULATOR_ATOMIC(atomicOr, old | value)
SIMULATOR_ATOMIC(atomicAnd, old & value)
#undef SIMULATOR_ATOMIC
template <class T>
SIMULATOR_OWN T atomicCAS(T* address, simulator::Given<T> expected, simulator::Given<T> value) {
    ::simulator::touch(address, sizeof(T), ::simulator::ATOMIC);
    const T old = *address;
    if (old == expected) *address = value;
    return old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

// ---- Mathematics: what C has for double alone, for float, too.
#ifndef _LIBCPP_VERSION    // there the simulator's own files have them from <random>
#define SIMULATOR_FLOAT(name) inline float name(float x) { return __builtin_##name##f(x); }
SIMULATOR_FLOAT(exp) SIMULATOR_FLOAT(exp2) SIMULATOR_FLOAT(log) SIMULATOR_FLOAT(log2) SIMULATOR_FLOAT(sqrt)
SIMULATOR_FLOAT(sin) SIMULATOR_FLOAT(cos) SIMULATOR_FLOAT(tanh) SIMULATOR_FLOAT(erf) SIMULATOR_FLOAT(fabs)
SIMULATOR_FLOAT(floor) SIMULATOR_FLOAT(ceil) SIMULATOR_FLOAT(rint) SIMULATOR_FLOAT(nearbyint)
#undef SIMULATOR_FLOAT
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#endif

// What NVRTC knows and C does not. The fast versions are as exact as the slow ones here.
inline float rsqrtf(float x) { return 1.0f / sqrt(x); }
inline float __expf(float x) { return exp(x); }
inline float __logf(float x) { return log(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmaf_rn(float a, float b, float c) { return fma(a, b, c); }
inline float __fadd_rn(float a, float b) { volatile float sum = a + b; return sum; }      // never contracted
inline double __dadd_rn(double a, double b) { volatile double sum = a + b; return sum; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned __int128)(a) * b >> 64; }
inline int __float2int_rn(float x) { return int(nearbyint(x)); }
inline float __int_as_float(int i) { return __builtin_bit_cast(float, i); }
inline float __uint_as_float(unsigned u) { return __builtin_bit_cast(float, u); }
inline int __float_as_int(float f) { return __builtin_bit_cast(int, f); }
inline unsigned __float_as_uint(float f) { return __builtin_bit_cast(unsigned, f); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
template <class A, class B> constexpr auto min(A a, B b) { return b < a ? b : a; }
template <class A, class B> constexpr auto max(A a, B b) { return a < b ? b : a; }
template <class T> inline T __ldg(const T* address) { return *address; }
template <class T> inline T __ldcs(const T* address) { return *address; }
template <class T> inline void __stcs(T* address, T value) { *address = value; }
template <class T> inline void __stcg(T* address, T value) { *address = value; }

#include "warp.h"
#include "half.h"
#include "tensor_cores.h"
#include "hopper.h"
