// A product of one warpgroup, in which one rule of Hopper's instructions can be broken; test_hopper.py says who must notice which.
//
// y: (64 x 64) = a (64, 64 steps) b (64, 64 steps)^T, then 64 sums over the rows of a, as products with a tile of ones that ordinary
// stores made. Warps 0 to 3 multiply, thread 128 copies, through two stages. Launch: grid (1), block (160), SHARED bytes.
#define Element __nv_bfloat16
#define Sum float
#include "hopper.cuh"

enum Mistake {
    NONE, OFF_THE_ATOM, NO_SWIZZLE, OTHER_LANES, SUMS_TOO_EARLY, NO_COMMIT, NO_FENCE, LEFT_TOO_EARLY, NOT_AWAITED, ARRIVALS_TOO_FEW,
    ARRIVALS_TOO_MANY, BYTES_TOO_FEW, BYTES_TOO_MANY, PARITY_KEPT, NO_PROXY_FENCE, NO_SYNC_BEHIND_STORES, NO_SYNC_BEHIND_BARRIERS,
    CHANGED_BEHIND_FENCE
};

constexpr unsigned OPERAND = 64 * ROW_BYTES, STAGE = 2 * OPERAND, ONES = 256;

extern "C" __global__ void __launch_bounds__(160) one_mistake(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, int steps, int mistake, float* y) {
    unsigned char* memory = dynamic_shared_memory();
    if (mistake != OFF_THE_ATOM) memory += (ATOM_BYTES - shared_address(memory) % ATOM_BYTES) % ATOM_BYTES;
    const unsigned stages = shared_address(memory), ones = stages + 2 * STAGE, barriers = ones + ONES;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0)
        for (int s = 0; s < 2; ++s) {
            barrier_init(barriers + 16 * s, 1);
            barrier_init(barriers + 16 * s + 8, 4 + (mistake == ARRIVALS_TOO_MANY) - (mistake == ARRIVALS_TOO_FEW));
        }
    if (mistake != NO_SYNC_BEHIND_BARRIERS) __syncthreads();
    if (threadIdx.x < 64) {
        const unsigned two = 0x3f803f80;
        memcpy(memory + 2 * STAGE + 4 * threadIdx.x, &two, 4);
        if (mistake != NO_PROXY_FENCE) proxy_fence();
    }
    if (mistake != NO_SYNC_BEHIND_STORES && mistake != NO_SYNC_BEHIND_BARRIERS) __syncthreads();

    unsigned parity = 0;
    if (warp == 4) {
        for (int step = 0; lane == 0 && step < steps; ++step) {
            const unsigned stage = step % 2, full = barriers + 16 * stage, to = stages + stage * STAGE;
            if (step >= 2) barrier_wait(full + 8, (step / 2 - 1) % 2);
            barrier_expect(full, STAGE + 16 * ((mistake == BYTES_TOO_MANY) - (mistake == BYTES_TOO_FEW)));
            copy_box(to, a_map, full, 64 * step, 0);
            copy_box(to + OPERAND, b_map, full, 64 * step, 0);
        }
        return;
    }
    float sums[32] = {}, row_sums[4] = {};
    for (int step = 0; step < steps; ++step) {
        const unsigned stage = step % 2, full = barriers + 16 * stage, from = stages + stage * STAGE;
        if (mistake != NOT_AWAITED) barrier_wait(full, mistake == PARITY_KEPT ? 0 : parity);
        if (step % 2) parity ^= 1;
        hold(sums), hold(row_sums);
        if (mistake != NO_FENCE) wgmma_fence();
        if (mistake == CHANGED_BEHIND_FENCE) hold(sums);
        for (int k = 0; k < 64; k += 16) {
            const unsigned long long a = moved(Panels<true, 64, 64>::first(from), 2 * k);
            unsigned long long b = moved(Panels<true, 64, 64>::first(from + OPERAND), 2 * k);
            if (mistake == NO_SWIZZLE) b = plain_descriptor(from + OPERAND + 2 * k, 16, ATOM_BYTES);
            if (mistake == OTHER_LANES && lane == 7) b += 2;
            wgmma<0, 0>(sums, a, b, Element{});
            wgmma<0, 0>(row_sums, a, plain_descriptor(ones, 128, 128), Element{});
        }
        if (mistake != NO_COMMIT) wgmma_commit();
        if (mistake == LEFT_TOO_EARLY && lane == 0) barrier_arrive(full + 8);
        if (mistake != SUMS_TOO_EARLY || step + 1 < steps) wgmma_wait<0>();
        if (mistake != LEFT_TOO_EARLY && lane == 0) barrier_arrive(full + 8);
    }
    for (int i = 0; i < 32; ++i) y[(16 * warp + lane / 4 + i / 2 % 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] = sums[i];
    for (int half = 0; half < 2; ++half)
        if (lane % 4 == 0) y[64 * 64 + 16 * warp + lane / 4 + 8 * half] = row_sums[2 * half];
    wgmma_wait<0>();
}
