// The checked build: kernels are compiled with -fsanitize=thread and -fsanitize=undefined, and this file answers the
// calls that the compiler puts before every load and store. It keeps, for each element of each array and of shared
// memory, who touched it last, and so finds races, wrong addresses, and reads of what nobody wrote.
#include "runtime.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <sys/types.h>

namespace simulator {

// The last touch by one thread, and the barriers passed by then. `thread` counts over the whole grid from 1; 0 is nobody.
struct Touch { unsigned thread, barriers, warp_barriers; bool atomic; };

// One element. Two readers suffice: a writer that is one of them still conflicts with the other.
struct Cell { Touch writer, reader, earlier_reader; unsigned generation, fences; bool written; };    // fences: of the writer by then

struct Shadow { Buffer buffer; unsigned shift; std::vector<Cell> cells; };   // an element has 1 << shift bytes

static std::vector<Shadow> arrays;
static Shadow shared;
static unsigned generation;       // of shared memory: one a block
constexpr unsigned kSharedShift = 1;

static unsigned block_number() {
    return (self.block.z * self.blocks.y + self.block.y) * self.blocks.x + self.block.x;
}
static unsigned block_of(const Touch& touch) { return (touch.thread - 1) / threads_of_block(); }
static unsigned thread_of(const Touch& touch) { return (touch.thread - 1) % threads_of_block(); }

static unsigned warp_of(const Touch& touch, unsigned rank) { return rank * warps_of_block() + thread_of(touch) / kWarp; }
static unsigned running_warp() { return unsigned(running - &fibers[0]) / kWarp; }

// Whether a barrier, or being the same thread, puts `touch` before what the running thread does now.
static bool is_before(const Touch& touch, unsigned me) {
    if (!touch.thread || touch.thread == me) return true;
    if (block_of(touch) != block_number()) return false;
    if (touch.barriers != barrier_epoch[running->rank]) return true;
    if (touch.warp_barriers < known[running_warp()][warp_of(touch, running->rank)]) return true;
    return thread_of(touch) / kWarp == running->number / kWarp && touch.warp_barriers != warp_epoch[running_warp()];
}

static void fail_race(const void* from, const Shadow& shadow, size_t offset, const char* verb, const char* past,
                      const Touch& other) {
    fail_at(from, "race", "thread %u of block %u %s %s + %zu bytes, which thread %u of block %u %s with no barrier between",
            running->number, block_number(), verb, shadow.buffer.name, offset, thread_of(other), block_of(other), past);
}

static void fail_outside(const void* from, const char* address, size_t nbytes, const char* verb) {
    const Shadow* nearest = nullptr;
    ssize_t distance = 0;
    for (const auto& shadow : arrays) {
        const char *begin = shadow.buffer.base, *end = begin + shadow.buffer.nbytes;
        const ssize_t gap = address < begin ? begin - address : address - end;
        if (!nearest || gap < distance) nearest = &shadow, distance = gap;
    }
    if (!nearest) return fail_at(from, "out of bounds", "%s of %zu bytes at %p", verb, nbytes, address);
    fail_at(from, "out of bounds", "%s of %zu bytes, %zd bytes %s %s (%zu bytes)", verb, nbytes, distance,
            address < nearest->buffer.base ? "before" : "after the end of", nearest->buffer.name, nearest->buffer.nbytes);
}

// The shadow that an address belongs to; null if the access needs no check or has been reported.
static Shadow* find(char* address, size_t nbytes, Access access, const void* from) {
    const char* verb = access == READ ? "read" : "write";
    if (address >= shared_begin && address < shared_end) {
        const size_t offset = size_t(address - dynamic_shared_begin);
        if (offset < launch.cluster * kMostDynamicShared && offset % kMostDynamicShared + nbytes > launch.dynamic_shared) {
            fail_at(from, "out of bounds", "%s of %zu bytes at dynamic shared memory + %zu, launched with %u", verb, nbytes,
                    offset, launch.dynamic_shared);
            return nullptr;
        }
        return &shared;
    }
    for (auto& shadow : arrays) {
        const size_t offset = size_t(address - shadow.buffer.base);
        if (offset >= shadow.buffer.nbytes) continue;
        if (offset + nbytes > shadow.buffer.nbytes) {
            fail_at(from, "out of bounds", "%s of %zu bytes across the end of %s", verb, nbytes, shadow.buffer.name);
            return nullptr;
        }
        if (access != READ && shadow.buffer.readonly) {
            fail_at(from, "write to const", "write to %s + %zu bytes", shadow.buffer.name, offset);
            return nullptr;
        }
        return &shadow;
    }
    if (address < kernel_begin || address >= kernel_end) fail_outside(from, address, nbytes, verb);
    return nullptr;     // constants and other statics of the kernel's own library are no concern of ours
}

void check_access(char* address, size_t nbytes, Access access, const void* from) {
    if (!running || !launch.checked || failed || is_on_a_stack(address)) return;
    if (size_t(address - reinterpret_cast<char*>(&self)) < sizeof self) return;
    Shadow* shadow = find(address, nbytes, access, from);
    if (!shadow) return;
    if (access != WRITE) shadow->buffer.bytes_read += nbytes;
    if (access != READ) shadow->buffer.bytes_written += nbytes;
    shadow->buffer.accesses += (nbytes + 15) / 16;
    if (launch.counted && !landing) count_part(address, nbytes, access, from, shadow == &shared ? nullptr : &shadow->buffer);
    if (access != READ && shadow == &shared && address >= dynamic_shared_begin && is_read_by_products(address, nbytes))
        return fail_at(from, "in flight", "a store to what a product still reads, at dynamic shared memory + %zu bytes",
                       size_t(address - dynamic_shared_begin));
    const unsigned me = block_number() * threads_of_block() + running->number + 1;
    const Touch now{me, barrier_epoch[running->rank], warp_epoch[running_warp()], access == ATOMIC};
    const size_t first = size_t(address - shadow->buffer.base) >> shadow->shift;
    const size_t last = size_t(address - shadow->buffer.base + nbytes - 1) >> shadow->shift;
    for (size_t i = first; i <= last; ++i) {
        Cell& cell = shadow->cells[i];
        const size_t offset = i << shadow->shift;
        if (shadow == &shared && cell.generation != generation) {
            cell = Cell{};
            cell.generation = generation;
        }
        if (shadow->buffer.member && !shadow->buffer.member[i])
            return fail_at(from, "out of bounds", "%s between the rows of %s, at + %zu bytes",
                           access == READ ? "read" : "write", shadow->buffer.name, offset);
        if (access != WRITE && !cell.written)
            return fail_at(from, "uninitialised", "read of %s + %zu bytes, which nothing has written", shadow->buffer.name,
                           offset);
        if (!is_before(cell.writer, me) && !(access == ATOMIC && cell.writer.atomic))
            return fail_race(from, *shadow, offset, access == READ ? "reads" : "writes", "wrote", cell.writer);
        if (access == READ) {
            if (cell.reader.thread != me) cell.earlier_reader = cell.reader;
            cell.reader = now;
            continue;
        }
        for (const Touch* reader : {&cell.reader, &cell.earlier_reader})
            if (!is_before(*reader, me)) return fail_race(from, *shadow, offset, "writes", "read", *reader);
        cell.writer = now;
        cell.fences = running->fences;
        cell.written = true;
    }
}

void forget_value(char* address, size_t nbytes) {
    if (!launch.checked || failed || address < shared_begin || address >= shared_end) return;
    const size_t first = size_t(address - shared_begin) >> kSharedShift;
    for (size_t i = first; i < first + (nbytes >> kSharedShift); ++i) shared.cells[i].written = false;
}

void value_has_landed(char* address, size_t nbytes) {
    if (!launch.checked) return;
    const size_t first = size_t(address - shared_begin) >> kSharedShift;
    for (size_t i = first; i < first + (nbytes >> kSharedShift); ++i) {
        shared.cells[i] = Cell{};
        shared.cells[i].generation = generation;
        shared.cells[i].written = true;
    }
}

void count_read(unsigned buffer, size_t nbytes) {
    if (launch.checked) arrays[buffer].buffer.bytes_read += nbytes, arrays[buffer].buffer.accesses += (nbytes + 15) / 16;
}

void fence_proxy() { ++running->fences; }

bool check_operand(char* address, unsigned warp, const char* name, Place place) {
    const size_t i = size_t(address - shared_begin) >> kSharedShift;
    const Cell& cell = shared.cells[i];
    if (cell.generation != generation || !cell.written) {
        fail("uninitialised", "%s:%d: %s of a product is read at shared memory + %zu bytes, which nothing has written", place.file, place.line,
             name, i << kSharedShift);
        return false;
    }
    if (!cell.writer.thread) return true;    // a copy of TMA brought it
    const unsigned rank = warp / warps_of_block(), writer = thread_of(cell.writer);
    if (cell.fences == fibers[rank * threads_of_block() + writer].fences) {
        fail("proxy", "%s:%d: %s of a product is what thread %u stored at shared memory + %zu bytes, with no proxy_fence behind it", place.file,
             place.line, name, writer, i << kSharedShift);
        return false;
    }
    const bool is_known = cell.writer.warp_barriers < known[warp][warp_of(cell.writer, rank)];
    if (cell.writer.barriers == barrier_epoch[rank] && writer / kWarp != warp % warps_of_block() && !is_known) {
        fail("race", "%s:%d: %s of a product is what thread %u stored at shared memory + %zu bytes, with no barrier between", place.file,
             place.line, name, writer, i << kSharedShift);
        return false;
    }
    return true;
}

void open_shadow() {
    arrays.clear();
    if (!launch.checked) return;
    for (unsigned i = 0; i < launch.buffer_count; ++i) {
        const Buffer& buffer = launch.buffers[i];
        const unsigned shift = unsigned(__builtin_ctz(buffer.element_bytes));
        arrays.push_back({buffer, shift, std::vector<Cell>((buffer.nbytes >> shift) + 1)});
        if (!buffer.fresh) for (auto& cell : arrays.back().cells) cell.written = true;
    }
    shared.buffer = {shared_begin, size_t(shared_end - shared_begin), 1u << kSharedShift, 0, 1, nullptr, "shared memory"};
    shared.shift = kSharedShift;
    shared.cells.assign((shared.buffer.nbytes >> kSharedShift) + 1, Cell{});
}

void forget_shared() { ++generation; }

void check_outputs() {
    for (const auto& shadow : arrays) {
        if (!shadow.buffer.fresh) continue;
        for (size_t i = 0; i < shadow.buffer.nbytes >> shadow.shift; ++i)
            if (!shadow.cells[i].written && !(shadow.buffer.member && !shadow.buffer.member[i]))
                return fail_at(nullptr, "never written", "the launch left %s + %zu bytes as it was", shadow.buffer.name,
                               i << shadow.shift);
    }
}

void close_shadow() {
    for (size_t i = 0; i < arrays.size(); ++i) launch.buffers[i] = arrays[i].buffer;
    arrays.clear();
}

void touch(const void* address, size_t nbytes, Access access) {
    check_access(const_cast<char*>(static_cast<const char*>(address)), nbytes, access, __builtin_return_address(0));
}

}  // namespace simulator

// ---- What -fsanitize=thread calls
using namespace simulator;
#define FROM __builtin_return_address(0)
#define ANSWER(nbytes)                                                                                          \
    extern "C" void __tsan_read##nbytes(char* p) { check_access(p, nbytes, READ, FROM); }                        \
    extern "C" void __tsan_write##nbytes(char* p) { check_access(p, nbytes, WRITE, FROM); }                      \
    extern "C" void __tsan_unaligned_read##nbytes(char* p) { check_access(p, nbytes, READ, FROM); }              \
    extern "C" void __tsan_unaligned_write##nbytes(char* p) { check_access(p, nbytes, WRITE, FROM); }
ANSWER(1) ANSWER(2) ANSWER(4) ANSWER(8) ANSWER(16)
extern "C" void __tsan_read_range(char* p, size_t nbytes) { check_access(p, nbytes, READ, FROM); }
extern "C" void __tsan_write_range(char* p, size_t nbytes) { check_access(p, nbytes, WRITE, FROM); }
// Copies of structures are calls where zig compiles. Its alignment check does not see them.
static void check_copy(char* to, char* from, size_t nbytes, const void* code) {
    for (char* address : {from, to})
        if (std::has_single_bit(nbytes) && nbytes <= 16 && size_t(address) % nbytes && !is_on_a_stack(address))
            fail_at(code, "alignment", "copy of %zu bytes at %p, which is not aligned to them", nbytes, address);
    check_access(from, nbytes, READ, code);
    check_access(to, nbytes, WRITE, code);
}
extern "C" void* __tsan_memcpy(char* to, char* from, size_t nbytes) {
    check_copy(to, from, nbytes, FROM);
    return std::memcpy(to, from, nbytes);
}
extern "C" void* __tsan_memmove(char* to, char* from, size_t nbytes) {
    check_copy(to, from, nbytes, FROM);
    return std::memmove(to, from, nbytes);
}
extern "C" void* __tsan_memset(char* to, int value, size_t nbytes) {
    check_access(to, nbytes, WRITE, FROM);
    return std::memset(to, value, nbytes);
}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}

// ---- What -fsanitize=undefined calls; the layouts are those of libubsan's data
struct SourceLocation { const char* file; unsigned line, column; };
struct TypeName { uint16_t kind, info; char name[1]; };
struct MismatchData { SourceLocation location; const TypeName* type; uint8_t log_alignment, kind; };
struct BoundsData { SourceLocation location; const TypeName *array, *index; };
extern "C" void __ubsan_handle_out_of_bounds(BoundsData* data, size_t index) {
    fail_at(FROM, "out of bounds", "index %zd of an array of type %s", ssize_t(index), data->array->name);
}
extern "C" void __ubsan_handle_type_mismatch_v1(MismatchData* data, void* pointer) {
    fail_at(FROM, "alignment", "access to %s at %p, which is not aligned to %u bytes", data->type->name, pointer,
            1u << data->log_alignment);
}
#define ANSWER_UNDEFINED(name, text) extern "C" void __ubsan_handle_##name(void*, void*, void*) { fail_at(FROM, "undefined", text); }
ANSWER_UNDEFINED(shift_out_of_bounds, "shift by a negative number or by more than the type has bits")
ANSWER_UNDEFINED(add_overflow, "signed addition overflows")
ANSWER_UNDEFINED(sub_overflow, "signed subtraction overflows")
ANSWER_UNDEFINED(mul_overflow, "signed multiplication overflows")
ANSWER_UNDEFINED(negate_overflow, "signed negation overflows")
ANSWER_UNDEFINED(divrem_overflow, "division by zero, or overflow")
