// The entry points of the runtime: guarded memory for array arguments, and a launch, block after block.
#include "runtime.h"

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <link.h>
#include <numeric>
#include <sys/mman.h>
#include <ucontext.h>

namespace simulator {

Launch launch;
Report* report;
bool failed;
char *kernel_begin, *kernel_end, *shared_begin, *shared_end, *dynamic_shared_begin;
static sigjmp_buf after_fault;
static thread_local bool launching;

// ---- Failures. The first one counts; a fiber that fails never runs again.

void record_failure(const char* kind, const void* address, const char* format, va_list values) {
    if (failed) return;
    failed = true;
    std::snprintf(report->kind, sizeof report->kind, "%s", kind);
    const int length = std::vsnprintf(report->text, sizeof report->text, format, values);
    if (running && length > 0 && size_t(length) < sizeof report->text)
        std::snprintf(report->text + length, sizeof report->text - size_t(length), "; block (%u, %u, %u), thread (%u, %u, %u)",
                      self.block.x, self.block.y, self.block.z, self.thread.x, self.thread.y, self.thread.z);
    const auto* code = static_cast<const char*>(address);
    report->offset = code > kernel_begin && code < kernel_end ? size_t(code - 1 - kernel_begin) : 0;
}

static void stop() {
    if (!running) return;
    running->state = DONE;
    suspend();
}

void fail_at(const void* address, const char* kind, const char* format, ...) {
    va_list values;
    va_start(values, format);
    record_failure(kind, address, format, values);
    va_end(values);
    stop();
}

void fail(const char* kind, const char* format, ...) {
    va_list values;
    va_start(values, format);
    record_failure(kind, __builtin_return_address(0), format, values);
    va_end(values);
    stop();
}

// A guard page was hit, or a vector access was misaligned: report where, and leave the launch.
static void on_fault(int signal_number, siginfo_t* info, void* context) {
    if (!launching) {
        signal(signal_number, SIG_DFL);
        return;
    }
    const auto* address = static_cast<const char*>(info->si_addr);
    const auto* code = reinterpret_cast<const char*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]) + 1;
    const Buffer* nearest = nullptr;
    ssize_t distance = 0;
    for (unsigned i = 0; i < launch.buffer_count; ++i) {
        const Buffer& buffer = launch.buffers[i];
        const ssize_t gap = address < buffer.base ? buffer.base - address : address - buffer.base;
        if (!nearest || gap < distance) nearest = &buffer, distance = gap;
    }
    running = nullptr;      // the scheduler's own stack goes on; no fiber is to be suspended
    if (info->si_code == SI_KERNEL || !nearest)
        fail_at(code, "alignment", "misaligned vector access, or a wild address; block (%u, %u, %u), thread (%u, %u, %u)",
                self.block.x, self.block.y, self.block.z, self.thread.x, self.thread.y, self.thread.z);
    else
        fail_at(code, "out of bounds", "access to %s %+zd bytes (it has %zu); block (%u, %u, %u), thread (%u, %u, %u)",
                nearest->name, ssize_t(address - nearest->base), nearest->nbytes, self.block.x, self.block.y, self.block.z,
                self.thread.x, self.thread.y, self.thread.z);
    siglongjmp(after_fault, 1);
}

struct FaultHandler {
    struct sigaction segv, bus;
    stack_t stack;
    FaultHandler() {
        static char memory[64 << 10];
        stack_t own{};
        own.ss_sp = memory;
        own.ss_size = sizeof memory;
        sigaltstack(&own, &stack);
        struct sigaction action{};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &action, &segv);
        sigaction(SIGBUS, &action, &bus);
        launching = true;
    }
    ~FaultHandler() {
        launching = false;
        sigaction(SIGSEGV, &segv, nullptr);
        sigaction(SIGBUS, &bus, nullptr);
        sigaltstack(&stack, nullptr);
    }
};

// Finds the library that holds the kernel, and its thread-local image: that is its shared memory.
static int find_kernel(dl_phdr_info* library, size_t, void*) {
    const auto* code = reinterpret_cast<const char*>(launch.call);
    char *begin = nullptr, *end = nullptr;
    size_t shared_bytes = 0;
    for (int i = 0; i < library->dlpi_phnum; ++i) {
        const auto& part = library->dlpi_phdr[i];
        auto* from = reinterpret_cast<char*>(library->dlpi_addr + part.p_vaddr);
        if (part.p_type == PT_TLS) shared_bytes = part.p_memsz;
        if (part.p_type != PT_LOAD) continue;
        begin = begin ? std::min(begin, from) : from;
        end = std::max(end, from + part.p_memsz);
    }
    if (code < begin || code >= end) return 0;
    kernel_begin = begin;
    kernel_end = end;
    shared_begin = static_cast<char*>(library->dlpi_tls_data);
    shared_end = shared_begin + shared_bytes;
    return 1;
}

// Shared memory starts a block as NaNs of every floating format, so that even the fast build shows a missing write.
static void poison_shared() {
    char *end = dynamic_shared_begin + launch.cluster * kMostDynamicShared;
    std::memset(shared_begin, 0xff, size_t(dynamic_shared_begin - shared_begin));
    for (char* block = dynamic_shared_begin; block < end; block += kMostDynamicShared) std::memset(block, 0xff, launch.dynamic_shared);
    if (end < shared_end) std::memset(end, 0xff, size_t(shared_end - end));
}

static void run_blocks() {
    const unsigned count = self.blocks.x * self.blocks.y * self.blocks.z;
    if (self.blocks.x % launch.cluster)
        return fail("cluster", "a grid of %u blocks is no multiple of the %u of a cluster", self.blocks.x, launch.cluster);
    std::mt19937 random(launch.seed);
    std::vector<unsigned> clusters(count / launch.cluster);
    std::iota(clusters.begin(), clusters.end(), 0u);
    if (launch.order == REVERSE) std::reverse(clusters.begin(), clusters.end());
    if (launch.order == RANDOM) std::shuffle(clusters.begin(), clusters.end(), random);
    for (unsigned cluster : clusters) {
        uint3 blocks[kMostCluster];
        for (unsigned rank = 0; rank < launch.cluster; ++rank) {
            const unsigned block = cluster * launch.cluster + rank;
            blocks[rank] = {block % self.blocks.x, block / self.blocks.x % self.blocks.y, block / self.blocks.x / self.blocks.y};
        }
        poison_shared();
        forget_shared();
        run_cluster(blocks, random);
        if (failed) return;
    }
    check_outputs();
}

}  // namespace simulator

using namespace simulator;

// Memory for one array: it ends right before an inaccessible page, and another lies in front.
struct Guarded { char* base; char* map; size_t mapped; };

// `remainder` is the array's own address modulo 16, which is kept: alignment is part of what is tested.
extern "C" void simulator_allocate(size_t nbytes, size_t remainder, Guarded* memory) {
    const size_t page = 4096, body = (nbytes + remainder + 15) / 16 * 16;
    memory->mapped = (body + page - 1) / page * page + 2 * page;
    memory->map = static_cast<char*>(
        mmap(nullptr, memory->mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    char* end = memory->map + memory->mapped - page;
    mprotect(memory->map, page, PROT_NONE);
    mprotect(end, page, PROT_NONE);
    memory->base = end - body + remainder;
}

extern "C" void simulator_free(const Guarded* memory) { munmap(memory->map, memory->mapped); }

// Runs the launch. Returns 0, or 1 with the failure in *result. Not reentrant: the caller holds a lock.
extern "C" int simulator_launch(const Launch* request, char* dynamic_shared, Report* result) {
    launch = *request;
    report = result;
    failed = false;
    running = nullptr;
    dynamic_shared_begin = dynamic_shared;
    self.blocks = {launch.blocks[0], launch.blocks[1], launch.blocks[2]};
    self.threads = {launch.threads[0], launch.threads[1], launch.threads[2]};
    prepare_stacks();
    dl_iterate_phdr(find_kernel, nullptr);
    open_shadow();
    landing = false;
    forget_requests();
    {
        FaultHandler handler;
        if (!sigsetjmp(after_fault, 1)) run_blocks();
    }
    close_shadow();
    return failed;
}
