// C = alpha op(A) op(B) + beta C by the products of Hopper's warpgroups: float16 or bfloat16 elements, float32 sums. The epilogue, ROW_SUMS
// and split sums are those of gemm_tensor.cu; there are no batches. sm_90a.
//
// a_map, b_map: A and B as stored, for boxes of 64 elements in a row. If an operand is K-major (A stored (M, K), B stored (N, K)) a box
// has TILE_M or TILE_N / CLUSTER rows, else 64 or 64 / CLUSTER. Each stored row begins at a multiple of 16 bytes.
//
// A block is three warpgroups. One thread of the first starts the copies; the other two multiply, each TILE_M / 2 rows of the tile,
// straight from shared memory. STAGES pieces of K are under way: `full` says that one has come, `empty` that all have left it.
// Blocks stay: while the sums of one tile go out, the copies for the next one run.
//
//     step s of those that multiply:   wait full[s]   issue the products of s   wait for those of s - 1   arrive empty[s - 1]
//
// With CLUSTER 2 two blocks with neighbouring rows of tiles share the columns of B: each copies half of them into both.
// Launch: grid (any multiple of CLUSTER; one block a multiprocessor is best), block (384), SHARED bytes of dynamic shared memory. M, N > 0,
// and each split has a step: 1 <= splits <= K / TILE_K, rounded up.
#include "gemm_parts.cuh"
#include "hopper.cuh"

constexpr int DEPTH = 16, THREADS = 384;
constexpr int ROWS = TILE_M / 2, HALVES = ROWS / 64;    // of a warpgroup; a product has 64 of them
using PanelsA = Panels<!TRANSPOSED_A, TILE_M, TILE_K>;
using PanelsB = Panels<TRANSPOSED_B, TILE_N, TILE_K>;
constexpr unsigned STAGE = PanelsA::BYTES + PanelsB::BYTES;
// Sums on their way out: 16 rows of 64 columns for each warp. The pitch keeps rows in different banks.
constexpr int OUT = 64, OUT_PITCH = OUT + 8, CHUNKS = TILE_N / OUT, WIDE = 8;
// What the epilogue reads beside its sums comes ahead of them, 16 bytes of four rows for each lane: else each would be waited for.
constexpr bool AHEAD = !SPLIT && sizeof(Result) == 2 && Epilogue::READS_C != bool(RESIDUAL);
constexpr unsigned AHEAD_BYTES = 8 * 32 * 4 * 16;
// Behind the stages lie the sums, the ones, the barriers, what comes ahead; and in front of them what the begin of shared memory lacks
// to a multiple of 1,024.
constexpr unsigned OUT_BYTES = 8 * 16 * OUT_PITCH * 4, ONES_BYTES = 512, BARRIER_BYTES = 2 * STAGES * 8;
constexpr unsigned SHARED = STAGES * STAGE + OUT_BYTES + ONES_BYTES + BARRIER_BYTES + AHEAD_BYTES + ATOM_BYTES;
// Registers of a thread that copies and of one that multiplies: all start with 168. Where there is room, copying has enough.
constexpr int FEW = HALVES * TILE_N > 256 ? 24 : 40, MANY = HALVES * TILE_N > 256 ? 240 : 232;

static_assert(TILE_M % 128 == 0 && TILE_N % 64 == 0 && TILE_N <= 256 && STAGE % ATOM_BYTES == 0, "whole products, whole atoms");
static_assert(SHARED <= 232448, "what a block may have");
static_assert(CLUSTER == 1 || CLUSTER == 2, "a block by itself, or a pair");

template <bool VALUE> struct Constant { static constexpr bool value = VALUE; };

// A tile, and the steps of K that one split sums: what those that copy and those that multiply go through in the same order.
struct Job { int m0, n0, split, first, end; };

__device__ __forceinline__ Job job_of(int number, int rank, int M, int N, int K, int splits) {
    const int pairs = tiles_over(tiles_over(M, TILE_M), CLUSTER), tiles_n = tiles_over(N, TILE_N);
    const int tiles = pairs * tiles_n, split = number / tiles;
    const Tile tile = tile_of(number % tiles, pairs, tiles_n, max(1, 2048 / (TILE_M * CLUSTER)));
    const int steps = tiles_over(K, TILE_K);    // times 32 splits, this is less than 2^31
    return {(tile.m * CLUSTER + rank) * TILE_M, tile.n * TILE_N, split, steps * split / splits, steps * (split + 1) / splits};
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) gemm_hopper(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, int M, int N, int K, float alpha, float beta,
    Result* C, int ldc, const Element* __restrict__ bias, const Result* residual, Result* saved, float* row_sums, int splits,
    float* workspace) {
    unsigned char* memory = dynamic_shared_memory();
    memory += (ATOM_BYTES - shared_address(memory) % ATOM_BYTES) % ATOM_BYTES;
    const unsigned stages = shared_address(memory), ones = stages + STAGES * STAGE + OUT_BYTES, barriers = ones + ONES_BYTES;
    const auto full = [&](int stage) { return barriers + 8 * stage; };
    const auto empty = [&](int stage) { return barriers + 8 * (STAGES + stage); };
    const int group = __shfl_sync(~0u, int(threadIdx.x) / 128, 0);    // the compiler shall know that a warp does not part
    const int lane = threadIdx.x % 32, rank = CLUSTER > 1 ? int(cluster_rank()) : 0;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full(s), 1);
            barrier_init(empty(s), 8 * CLUSTER);
        }
        barriers_are_made();
        prefetch_map(a_map);
        prefetch_map(b_map);
    }
    if (ROW_SUMS && threadIdx.x < ONES_BYTES / 4) {
        const Element one = narrow<Element>(1.0f), two[2] = {one, one};
        memcpy(memory + STAGES * STAGE + OUT_BYTES + 4 * threadIdx.x, two, 4);
        proxy_fence();
    }
    if (CLUSTER > 1) cluster_sync();
    __syncthreads();

    const int first_job = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
    int stage = 0;
    unsigned parity = 0;    // of the phase of `full` that comes next
    const auto advance = [&] {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    };

    if (group == 0) {
        give_registers<FEW>();
        for (int number = first_job; threadIdx.x == 0; number += stride) {
            const Job job = job_of(number, rank, anew(M), anew(N), K, splits);
            if (job.split >= splits) break;
            for (int step = job.first; step < job.end; ++step, advance()) {
                const unsigned a = stages + stage * STAGE, b = a + PanelsA::BYTES;
                const int k = step * TILE_K;
                barrier_wait(empty(stage), parity ^ 1);    // at first nobody is in a stage: the phase before the first counts as ended
                barrier_expect(full(stage), STAGE);
                if (!TRANSPOSED_A) copy_box(a, a_map, full(stage), k, job.m0);
                else
#pragma unroll
                    for (int w = 0; w < TILE_M; w += PANEL) copy_box(a + PanelsA::part(w, 0), a_map, full(stage), job.m0 + w, k);
                // Of a pair, each block copies half of B for both: half of the columns if K-major, else of the rows of K.
                const auto copy_b = [&](unsigned to, int inner, int outer) {
                    if (CLUSTER > 1) copy_box(to, b_map, full(stage), inner, outer, (1 << CLUSTER) - 1);
                    else copy_box(to, b_map, full(stage), inner, outer);
                };
                const int w0 = rank * (TILE_N / CLUSTER), k0 = rank * (TILE_K / CLUSTER);
                if (TRANSPOSED_B) copy_b(b + w0 * ROW_BYTES, k, job.n0 + w0);
                else
#pragma unroll
                    for (int w = 0; w < TILE_N; w += PANEL) copy_b(b + PanelsB::part(w, k0), job.n0 + w, k + k0);
            }
        }
    } else {
        take_registers<MANY>();
        const int m_of_group = (group - 1) * ROWS, warp = int(threadIdx.x) / 32 - 4;
        float* out = reinterpret_cast<float*>(memory + STAGES * STAGE) + warp * 16 * OUT_PITCH;
        const unsigned long long first_a = PanelsA::first(stages + PanelsA::part(m_of_group, 0));
        const unsigned long long first_b = PanelsB::first(stages + PanelsA::BYTES);
        const unsigned long long of_ones = plain_descriptor(ones, 128, 128);    // eight columns of sixteen ones: each layout is right
        const Epilogue epilogue = {alpha, beta, bias, residual, saved};
        Run<Result, WIDE>* ahead = reinterpret_cast<Run<Result, WIDE>*>(memory + (barriers + BARRIER_BYTES - stages)) + warp * 4 * 32 + lane;
        for (int number = first_job;; number += stride) {
            const Job job = job_of(number, rank, anew(M), anew(N), K, splits);
            if (job.split >= splits) break;
            float sums[HALVES][TILE_N / 2] = {}, row_sums_of[HALVES][4] = {};
            const bool sums_rows = ROW_SUMS && job.n0 == 0;
            // A warp knows of its own products alone that they are done, so each one says so, to every block that fills this stage.
            const auto leave = [&](int stage) {
                if (CLUSTER == 1 && lane == 0) barrier_arrive(empty(stage));
                if (CLUSTER > 1 && lane < CLUSTER) barrier_arrive(empty(stage), lane);
            };
            const auto hold_all = [&] {
#pragma unroll
                for (int h = 0; h < HALVES; ++h) {
                    hold(sums[h]);
                    if (ROW_SUMS) hold(row_sums_of[h]);
                }
            };
            // Row sums have a loop of their own: a branch would stand among the products.
            const auto multiply = [&](auto with_row_sums) {
                int before = 0;
                for (int step = job.first; step < job.end; ++step, advance()) {
                    barrier_wait(full(stage), parity);
                    wgmma_fence();
#pragma unroll
                    for (int k = 0; k < TILE_K; k += DEPTH) {
                        const unsigned long long b = moved(first_b, stage * STAGE + PanelsB::part(0, k));
#pragma unroll
                        for (int h = 0; h < HALVES; ++h) {
                            const unsigned long long a = moved(first_a, stage * STAGE + PanelsA::part(64 * h, k));
                            wgmma<TRANSPOSED_A, !TRANSPOSED_B>(sums[h], a, b, Element{});
                            if constexpr (with_row_sums.value) wgmma<TRANSPOSED_A, 0>(row_sums_of[h], a, of_ones, Element{});
                        }
                    }
                    wgmma_commit();
                    if (step > job.first) {
                        wgmma_wait<1>();
                        leave(before);
                    }
                    before = stage;
                }
                wgmma_wait<0>();
                leave(before);
            };
            const bool vector = !SPLIT && epilogue.in_runs_of<WIDE>(C, ldc, 0);
            // Each lane fetches what it will need in a part, and closes a group even if that is nothing: it counts them.
            const auto fetch = [&](int part, int r) {
                const int m = job.m0 + m_of_group + part / CHUNKS * 64 + warp % 4 * 16 + 4 * r + anew(lane) / 8;
                const int n = job.n0 + part % CHUNKS * OUT;
                if (part < HALVES * CHUNKS && vector && m < M && n + OUT <= N)
                    copy_async_16(ahead + 32 * r, (RESIDUAL ? residual : C) + (long long)m * ldc + n + lane % 8 * WIDE);
                copy_async_commit();
            };
            if (AHEAD)
#pragma unroll
                for (int r = 0; r < 4; ++r) fetch(0, r);
            hold_all();
            if constexpr (ROW_SUMS) {
                if (sums_rows) multiply(Constant<true>{});
                else multiply(Constant<false>{});
            } else multiply(Constant<false>{});
            hold_all();

            float* raw = SPLIT ? workspace + (long long)job.split * M * (N + ROW_SUMS) : nullptr;
            const bool raw_vector = SPLIT && in_runs<WIDE>(raw, N);
#pragma unroll 1    // unrolled, its instructions come from memory, not from their caches
            for (int part = 0; part < HALVES * CHUNKS; ++part) {
                __syncwarp();    // the part before is out
#pragma unroll
                for (int p = 0; p < HALVES * CHUNKS; ++p) {
                    if (p != part) continue;    // registers have no index
#pragma unroll
                    for (int j = 0; j < OUT / 8; ++j)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {    // lane 4 g + t holds rows g and g + 8, columns 2 t and 2 t + 1
                            const float* two = &sums[p / CHUNKS][(p % CHUNKS * OUT / 8 + j) * 4 + 2 * half];
                            *reinterpret_cast<float2*>(out + (lane / 4 + 8 * half) * OUT_PITCH + 8 * j + lane % 4 * 2) = make_float2(two[0], two[1]);
                        }
                }
                __syncwarp();
                const int m_first = job.m0 + m_of_group + part / CHUNKS * 64 + warp % 4 * 16, n_first = job.n0 + part % CHUNKS * OUT;
                // Of a run that lies in C as a whole. read: what the epilogue reads beside its sums
                const auto finish = [&](const auto& run, const auto& read, int r, int column) {
                    constexpr int COUNT = sizeof(run) / sizeof(float);
                    const int m = m_first + r, n = n_first + column, end = n + COUNT;
                    const long long row = (long long)m * (SPLIT ? N : ldc);
                    if (SPLIT) store_run(raw + row, n, end, true, run);
                    else epilogue.store(run, read(row, n, end), C, row, n, end, true);
                };
                if ((SPLIT ? raw_vector : vector) && n_first + OUT <= N) {
                    const int column = lane % 8 * WIDE;
                    const bool flip = lane / 4 % 2;    // lanes l and l + 4 would meet in a bank
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        const int row = 4 * r + lane / 8;
                        const Four<float>* fours = reinterpret_cast<const Four<float>*>(out + row * OUT_PITCH + column);
                        const Four<float> one = fours[flip], other = fours[!flip];
                        float run[WIDE];
#pragma unroll
                        for (int i = 0; i < WIDE; ++i) run[i] = (i < 4) != flip ? one.at[i % 4] : other.at[i % 4];
                        if (AHEAD) copy_async_wait<3>();
                        const auto read = [&](long long at, int n, int end) {
                            if (!AHEAD) return epilogue.read<WIDE>(C, at, n, end, true);
                            Epilogue::Read<WIDE> read;
                            (RESIDUAL ? read.residual : read.c) = ahead[32 * r];
                            return read;
                        };
                        if (m_first + row < M) finish(run, read, row, column);
                        if (AHEAD) fetch(part + 1, r);
                    }
                } else {
#pragma unroll 2
                    for (int r = 0; r < 16; ++r)
#pragma unroll
                        for (int column = anew(lane); column < OUT; column += 32) {
                            const float one[1] = {out[r * OUT_PITCH + column]};
                            const auto read = [&](long long at, int n, int end) { return epilogue.read<1>(C, at, n, end, true); };
                            if (m_first + r < M && n_first + column < N) finish(one, read, r, column);
                        }
                    if (AHEAD)
#pragma unroll
                        for (int r = 0; r < 4; ++r) fetch(part + 1, r);
                }
            }
            if (sums_rows && lane % 4 == 0) {
                float* summed = SPLIT ? raw + (long long)M * N : row_sums;
#pragma unroll
                for (int h = 0; h < HALVES; ++h)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int m = job.m0 + m_of_group + 64 * h + warp % 4 * 16 + lane / 4 + 8 * half;
                        if (m < M) store_row_sum(summed + m, beta, row_sums_of[h][2 * half]);
                    }
            }
        }
    }
    if (CLUSTER > 1) cluster_sync();    // nobody leaves while the other block may still copy to it, or arrive at its barriers
}
