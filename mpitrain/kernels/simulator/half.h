// float16 and bfloat16: storage and conversions, round to nearest even by integer arithmetic. No operators on purpose:
// kernels convert to float, compute, and convert back.
#pragma once
#include "language.h"

struct alignas(2) __half { uint16_t bits; };
struct alignas(4) __half2 { __half x, y; };
struct alignas(2) __nv_bfloat16 { uint16_t bits; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };

namespace simulator {

inline SIMULATOR_OWN uint16_t float16_bits(float value) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, value);
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;                              // NaN
    if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);            // 65520 and more round to infinity
    if (magnitude < 0x38800000) {                                           // below 2^-14: adding 0.5 does the rounding
        const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
        return uint16_t(sign | (__builtin_bit_cast(uint32_t, shifted) - 0x3f000000));
    }
    return uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
}

inline SIMULATOR_OWN float float16_value(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
    if (exponent == 31) return __builtin_bit_cast(float, sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) {
        const float magnitude = float(fraction) * 0x1p-24f;
        return __builtin_bit_cast(float, sign | __builtin_bit_cast(uint32_t, magnitude));
    }
    return __builtin_bit_cast(float, sign | (exponent + 112) << 23 | fraction << 13);
}

inline SIMULATOR_OWN uint16_t bfloat16_bits(float value) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float bfloat16_value(uint16_t bits) { return __builtin_bit_cast(float, uint32_t(bits) << 16); }

}  // namespace simulator

inline __half __float2half_rn(float f) { return {::simulator::float16_bits(f)}; }
inline float __half2float(__half h) { return ::simulator::float16_value(h.bits); }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return {::simulator::bfloat16_bits(f)}; }
inline float __bfloat162float(__nv_bfloat16 h) { return ::simulator::bfloat16_value(h.bits); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 h) { return {__bfloat162float(h.x), __bfloat162float(h.y)}; }
