// What the simulator's own source files share: the threads of the block under way, the launch, and its failure.
// These files are compiled once and never instrumented; every simulated kernel is linked with them.
#pragma once
#include <cstdarg>
#include <cstring>
#include <random>    // with <cmath>, which takes over what is declared before it
#include <vector>

#include "language.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

namespace simulator {

constexpr unsigned kWarp = 32, kMostThreads = 1024;
constexpr size_t kMostDynamicShared = 232448;    // 227 KiB, what a block can have on sm_90
constexpr unsigned kMostCluster = 2;             // blocks that run together

enum State : uint8_t { UNSTARTED, READY, AT_BARRIER, AT_MEETING, WAITING, AT_CLUSTER, DONE };

struct Copy { void* to; const void* from; size_t nbytes, valid; int group; };

// A CUDA thread: a stack of its own, and what it waits for while it does not run.
struct Fiber {
    void* stack_pointer;
    uint3 thread, block;
    unsigned number;              // in the block, x fastest
    unsigned rank;                // of the block in its cluster
    State state;
    Place place;                  // where it waits
    unsigned mask;                // AT_MEETING: with which lanes,
    Collective collective;        // to do what,
    void* argument;               // with what of its own
    std::vector<Copy> copies;     // asynchronous copies that have not landed
    int group;                    // the one that the next copy belongs to
    unsigned barrier, parity;     // WAITING: for the phase of this parity of the barrier at this address, or for products (hopper.cpp)
    unsigned fences;              // between ordinary stores and what TMA and products read
};

// An array argument. `member` has one byte an element, 0 for those that a strided view skips; null if it has all.
// A checked launch counts the bytes that its threads have read and written, an atomic operation as both, and the accesses, of
// at most 16 bytes, that this takes. If `counted`, it also counts the sectors of 32 bytes that requests of a warp touch.
struct Buffer {
    char* base;
    size_t nbytes;
    unsigned element_bytes, readonly, fresh;
    const uint8_t* member;
    const char* name;
    unsigned long long bytes_read, bytes_written, accesses, sectors;
};

// An instruction that touches shared memory: the requests of warps there, their passes over the banks, and the passes
// without any bank conflict. nbytes: of the widest lane; writes: also an atomic operation.
struct Site { size_t offset; unsigned long long requests, passes, least; unsigned nbytes, writes; };

enum Order { FORWARD, REVERSE, RANDOM };

// One launch, as the Python side fills it in.
struct Launch {
    const char* name;
    void (*call)(void** arguments);
    void** arguments;
    unsigned blocks[3], threads[3], dynamic_shared, cluster;
    unsigned order, seed, checked, counted;
    Buffer* buffers;
    unsigned buffer_count;
};

// The first failure of a launch. `offset` is an address within the kernel's library for addr2line, or 0.
struct Report { char kind[24]; char text[1024]; size_t offset; };

extern Launch launch;
extern Report* report;
extern bool failed;
extern bool landing;              // a copy of the past lands: no instruction does that
extern Fiber* running;            // null while the scheduler itself runs
extern std::vector<Fiber> fibers;
extern char *kernel_begin, *kernel_end;     // the kernel's library in memory
extern char *shared_begin, *shared_end;     // its shared memory: the thread-local image, dynamic part included
extern char* dynamic_shared_begin;
constexpr unsigned kMostWarps = kMostThreads / kWarp;
extern unsigned barrier_epoch[kMostCluster], warp_epoch[kMostWarps];
extern unsigned known[kMostWarps][kMostWarps];    // [warp][other]: it sees what the other touched before this epoch, by barriers of Hopper
extern unsigned waiting;          // fibers that are WAITING
extern unsigned meeting_warp;     // whose collective runs, counted over all blocks of the cluster

void record_failure(const char* kind, const void* address, const char* format, va_list values);
[[gnu::format(printf, 3, 4)]] void fail_at(const void* address, const char* kind, const char* format, ...);

void prepare_stacks();
void start(Fiber& fiber);
void resume(Fiber& fiber);        // runs it until it blocks or ends
void suspend();                   // called by the running fiber
bool is_on_a_stack(const void* address);

inline unsigned threads_of_block() { return self.threads.x * self.threads.y * self.threads.z; }
inline unsigned warps_of_block() { return (threads_of_block() + kWarp - 1) / kWarp; }
void run_cluster(const uint3* blocks, std::mt19937& random);

void begin_cluster(std::mt19937& random);
bool has_come(const Fiber& fiber);           // what it is WAITING for
void learn(const Fiber& fiber);              // what it has waited for, now that this has come
bool end_something(std::mt19937& random);    // a copy or products under way, if there are any
void end_cluster();

void open_shadow();               // before the first block of a checked launch
void forget_shared();             // at the start of each block
void check_access(char* address, size_t nbytes, Access access, const void* from);
void forget_value(char* address, size_t nbytes);   // its content is undefined until the next write
bool is_read_by_products(const char* address, size_t nbytes);
bool check_operand(char* address, unsigned warp, const char* name, Place place);    // of a product; false if it may not read that
void value_has_landed(char* address, size_t nbytes);    // what a copy by TMA brought
void count_read(unsigned buffer, size_t nbytes);        // by such a copy
void check_outputs();             // after the last block: every element of a fresh array was written
void close_shadow();

void count_part(const char* address, size_t nbytes, Access access, const void* from, Buffer* array);    // null: shared
void count_requests();            // each time the lanes of a warp have come to a stop
void forget_requests();

}  // namespace simulator
