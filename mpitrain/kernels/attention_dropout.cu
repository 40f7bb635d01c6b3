// Attention with dropout of its probabilities: attention.cuh, with the masks of mpitrain/ops/random_bits.py.
//
// Head h of sequence b has number first + b every + h. A probability becomes 0 where its 16 bits are below `threshold`, else it
// is multiplied by `kept`, 1 / (1 - rate). numbers: the step, in device memory.
#include "attention.cuh"
#include "philox.cuh"

constexpr int STRIP = 64;    // keys whose blocks of 4 queries x 4 keys are neighbours

// The masks of a thread's 4 x 4 elements of a tile: rows t + i, columns s0 + tx + SIDE j.
struct DropMask {
    Stream stream;
    long long head;    // number
    int strips, groups;
    unsigned threshold;
    Sum scale;
    unsigned kept;    // bit 4 i + j

    __device__ __forceinline__ void next_head() { ++head; }

    // Four neighbouring threads need the same four blocks, one column of each: thread l draws block l, and they exchange columns.
    __device__ __forceinline__ void draw(int t, int s0, int tx) {
        const int lane = tx % 4, s = s0 + tx + SIDE * lane;
        const long long group = (head * strips + s / STRIP) * groups + t / 4;
        const Bits bits = random_block(stream, group * (STRIP / 4) + s % STRIP / 4);
        kept = 0;
#pragma unroll
        for (int flip = 0; flip < 4; ++flip) {
            unsigned long long column = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) column |= (bits.word[i] >> ((lane ^ flip) * 16) & 0xffffull) << (16 * i);
            column = __shfl_xor_sync(~0u, column, flip);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                kept |= unsigned((column >> (16 * i) & 0xffffull) >= threshold) << (4 * i + (lane ^ flip));
        }
    }
    __device__ __forceinline__ Sum at(int i, int j) const { return kept >> (4 * i + j) & 1 ? scale : Sum(0); }
};

// each: heads of a block
__device__ __forceinline__ DropMask mask_of(int each, int T, int threshold, Sum kept, long long first, long long every,
                                            long long seed, long long layer, const long long* numbers) {
    const Stream stream = {(unsigned long long)seed, (unsigned long long)layer, (unsigned long long)*numbers};
    const long long head = first + blockIdx.z * every + blockIdx.y * each;
    return {stream, head, (T + STRIP - 1) / STRIP, (T + 3) / 4, unsigned(threshold), kept, 0};
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_dropout(
    int Q, int T, int offset, int window, int H, int q_pitch, int kv_pitch, int q_rows, int kv_rows, Sum scale,
    const Element* __restrict__ q, const Element* __restrict__ kv, Element* __restrict__ y, Sum* __restrict__ log_sums,
    int threshold, Sum kept, long long first, long long every, long long seed, long long layer,
    const long long* __restrict__ numbers, const int* __restrict__ starts) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    const Sizes sizes(Q, T, offset, window, H, q_pitch, kv_pitch, q_rows, kv_rows);
    const DropMask mask = mask_of(1, T, threshold, kept, first, every, seed, layer, numbers);
    attend(mask, sizes, scale, q, kv, y, log_sums, starts, dynamic_shared);
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_dropout_backward_kv(
    int Q, int T, int offset, int window, int H, int q_pitch, int kv_pitch, int q_rows, int kv_rows, Sum scale,
    const Element* __restrict__ q, const Element* __restrict__ kv, const Element* __restrict__ dy, const Sum* __restrict__ log_sums,
    const Sum* __restrict__ dots, Element* dkv,
    int threshold, Sum kept, long long first, long long every, long long seed, long long layer,
    const long long* __restrict__ numbers, const int* __restrict__ starts) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    const Sizes sizes(Q, T, offset, window, H, q_pitch, kv_pitch, q_rows, kv_rows);
    const DropMask mask = mask_of(GROUP, T, threshold, kept, first, every, seed, layer, numbers);
    backward_kv(mask, sizes, scale, q, kv, dy, log_sums, dots, dkv, starts, dynamic_shared);
}

// With documents or a window two blocks of a multiprocessor would spill registers; 0 leaves the number to the compiler.
extern "C" __global__ void __launch_bounds__(THREADS, BOUNDED ? 1 : 0) attention_dropout_backward_q(
    int Q, int T, int offset, int window, int H, int q_pitch, int kv_pitch, int q_rows, int kv_rows, Sum scale,
    const Element* __restrict__ q, const Element* __restrict__ kv, const Element* __restrict__ dy, const Sum* __restrict__ log_sums,
    const Sum* __restrict__ dots, Element* dq,
    int threshold, Sum kept, long long first, long long every, long long seed, long long layer,
    const long long* __restrict__ numbers, const int* __restrict__ starts) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    const Sizes sizes(Q, T, offset, window, H, q_pitch, kv_pitch, q_rows, kv_rows);
    const DropMask mask = mask_of(1, T, threshold, kept, first, every, seed, layer, numbers);
    backward_q(mask, sizes, scale, q, kv, dy, log_sums, dots, dq, starts, dynamic_shared);
}
