// Philox4x64-10 (Salmon et al. 2011), the bits of dropout: mpitrain/ops/random_bits.py says which element has which.
#pragma once

// The numbers that all blocks of a layer in one step share. `step` is in device memory, so that launches repeat.
struct Stream {
    unsigned long long seed, layer, step;
};

// Block number `block`: 16 elements of 16 bits, the first in the lowest bits of the first word.
struct Bits {
    unsigned long long word[4];
    __device__ __forceinline__ unsigned of(int lane) const { return unsigned(word[lane / 4] >> (lane % 4 * 16)) & 0xffffu; }
};

__device__ __forceinline__ Bits random_block(Stream stream, unsigned long long block) {
    unsigned long long a = block + 1, b = stream.step, c = 0, d = 0, k0 = stream.seed, k1 = stream.layer;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned long long m0 = 0xD2E7470EE14C6C93ull, m1 = 0xCA5A826395121157ull;
        const unsigned long long high0 = __umul64hi(m0, a), low0 = m0 * a, high1 = __umul64hi(m1, c), low1 = m1 * c;
        a = high1 ^ b ^ k0;
        b = low1;
        c = high0 ^ d ^ k1;
        d = low0;
        k0 += 0x9E3779B97F4A7C15ull;
        k1 += 0xBB67AE8584CAA73Bull;
    }
    return {{a, b, c, d}};
}
