// Threads of a block as fibers: each has a stack, and a switch saves six registers.
#include "runtime.h"

#include <sys/mman.h>

namespace simulator {

Fiber* running;
std::vector<Fiber> fibers;
static void* scheduler_stack_pointer;
static char* stacks;
constexpr size_t kStack = 256 << 10;

// Saves the callee-saved registers on the current stack, stores its pointer in *save, and goes on where `next` stopped.
extern "C" void simulator_switch(void** save, void* next);
asm(R"(.text
.hidden simulator_switch
.globl simulator_switch
.type simulator_switch,@function
simulator_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp,(%rdi)
    movq %rsi,%rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");

void prepare_stacks() {
    if (stacks) return;
    stacks = static_cast<char*>(mmap(nullptr, kStack * kMostThreads, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    fibers.resize(kMostThreads);
}

bool is_on_a_stack(const void* address) {
    return size_t(static_cast<const char*>(address) - stacks) < kStack * kMostThreads;
}

static void run_thread() {
    launch.call(launch.arguments);
    commit_copies();
    wait_copies(0);
    running->state = DONE;
    suspend();
    __builtin_unreachable();
}

void start(Fiber& fiber) {
    // Neighbouring stacks start at different offsets in their page, so that they do not all fall into the same cache sets.
    const size_t index = size_t(&fiber - &fibers[0]);
    char* end = stacks + (index + 1) * kStack - index % 7 * 576;
    auto** top = reinterpret_cast<void**>(end) - 8;     // six registers, the return address, and alignment
    std::memset(top, 0, 64);
    top[6] = reinterpret_cast<void*>(&run_thread);
    fiber.stack_pointer = top;
    fiber.state = READY;
    fiber.copies.clear();
    fiber.group = 0;
    fiber.fences = 0;
}

void resume(Fiber& fiber) {
    running = &fiber;
    self.thread = fiber.thread;
    self.block = fiber.block;
    self.lane = int(fiber.number % kWarp);
    simulator_switch(&scheduler_stack_pointer, fiber.stack_pointer);
    running = nullptr;
}

void suspend() { simulator_switch(&running->stack_pointer, scheduler_stack_pointer); }

}  // namespace simulator
