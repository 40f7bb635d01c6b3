// Runs the threads of a block: warp by warp up to the next block barrier, lane by lane up to the next warp collective.
// CUDA promises no order in between, so the order is a parameter: forward, reverse, or drawn at random.
#include "runtime.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace simulator {

Self self;
unsigned barrier_epoch[kMostCluster], warp_epoch[kMostWarps], known[kMostWarps][kMostWarps], meeting_warp, waiting;
bool landing;

void barrier(Place place) {
    running->state = AT_BARRIER;
    running->place = place;
    suspend();
}

void meet(unsigned mask, Collective collective, void* argument, Place place) {
    if (!(mask >> self.lane & 1))
        fail("warp mask", "%s:%d: lane %d is not in its own mask %08x", place.file, place.line, self.lane, mask);
    running->state = AT_MEETING;
    running->place = place;
    running->mask = mask;
    running->collective = collective;
    running->argument = argument;
    suspend();
}

void order_memory(void**) {}    // the scheduler advances the warp's epoch, which the race check reads

// ---- Asynchronous copies: they land when waited for, as late as the hardware may let them. A wait counts committed groups:
// a copy that was never committed is in none of them, and lands when its thread ends.

void start_copy(void* to, const void* from, size_t nbytes, size_t valid) {
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % nbytes)
        fail("alignment", "asynchronous copy of %zu bytes between addresses that are not aligned to it", nbytes);
    const void* here = __builtin_return_address(0);
    if (valid) check_access(const_cast<char*>(static_cast<const char*>(from)), valid, READ, static_cast<const char*>(here) - 1);
    check_access(static_cast<char*>(to), nbytes, WRITE, here);
    forget_value(static_cast<char*>(to), nbytes);
    running->copies.push_back({to, from, nbytes, valid, running->group});
}

void commit_copies() { ++running->group; }

void wait_copies(int groups_left) {
    auto under_way = [&](const Copy& copy) { return copy.group >= running->group - groups_left; };
    landing = true;
    for (const auto& copy : running->copies) {
        if (under_way(copy)) continue;
        touch(copy.to, copy.nbytes, WRITE);
        std::memcpy(copy.to, copy.from, copy.valid);
        std::memset(static_cast<char*>(copy.to) + copy.valid, 0, copy.nbytes - copy.valid);
    }
    landing = false;
    std::erase_if(running->copies, [&](const Copy& copy) { return !under_way(copy); });
}

// ---- Scheduling

static bool waits_for_the_same(const Fiber& a, const Fiber& b) {
    return a.state == AT_MEETING && a.mask == b.mask && a.collective == b.collective && a.place.line == b.place.line;
}

// Completes one meeting that everybody has reached; false if there is none.
static bool complete_a_meeting(Fiber* warp, unsigned lanes) {
    for (unsigned first = 0; first < lanes; ++first) {
        const Fiber& asker = warp[first];
        if (asker.state != AT_MEETING) continue;
        void* arrived[kWarp] = {};
        unsigned gone = 0, late = 0;
        for (unsigned lane = 0; lane < kWarp; ++lane) {
            if (!(asker.mask >> lane & 1)) continue;
            if (lane >= lanes || warp[lane].state == DONE) gone |= 1u << lane;
            else if (waits_for_the_same(warp[lane], asker)) arrived[lane] = warp[lane].argument;
            else late |= 1u << lane;
        }
        if (late) continue;
        if (gone) {
            fail("warp mask", "%s:%d: mask %08x names lanes %08x, which have left the kernel or do not exist (warp %u)",
                 asker.place.file, asker.place.line, asker.mask, gone, asker.number / kWarp);
            return false;
        }
        meeting_warp = unsigned(warp - &fibers[0]) / kWarp;
        asker.collective(arrived);
        if (failed) return false;
        if (asker.collective == &order_memory) ++warp_epoch[meeting_warp];
        for (unsigned lane = 0; lane < lanes; ++lane)
            if (arrived[lane]) warp[lane].state = READY;
        return true;
    }
    return false;
}

static void arrange(std::vector<unsigned>& numbers, std::mt19937& random) {
    if (launch.order == RANDOM) std::shuffle(numbers.begin(), numbers.end(), random);
}

static std::vector<unsigned> numbers_up_to(unsigned count) {
    std::vector<unsigned> numbers(count);
    std::iota(numbers.begin(), numbers.end(), 0u);
    if (launch.order == REVERSE) std::reverse(numbers.begin(), numbers.end());
    return numbers;
}

static bool any(const Fiber* warp, unsigned lanes, State state) {
    return std::any_of(warp, warp + lanes, [&](const Fiber& fiber) { return fiber.state == state; });
}

// Runs one warp until each of its threads has ended or waits for others than its lanes. Returns whether any thread ran.
static bool run_warp(Fiber* warp, unsigned lanes, std::vector<unsigned>& lane_order, std::mt19937& random) {
    bool ran = false;
    do {
        arrange(lane_order, random);
        for (unsigned lane : lane_order) {
            if (waiting && lane < lanes && warp[lane].state == WAITING && has_come(warp[lane])) {
                warp[lane].state = READY;
                --waiting;
                learn(warp[lane]);
            }
            if (lane >= lanes || warp[lane].state != READY) continue;
            resume(warp[lane]);
            ran = true;
            if (failed) return true;
        }
        if (launch.counted) count_requests();
    } while (complete_a_meeting(warp, lanes));
    if (failed || (waiting && any(warp, lanes, WAITING))) return ran;    // these may still come to the meeting
    for (unsigned lane = 0; lane < lanes; ++lane)
        if (warp[lane].state == AT_MEETING)
            fail("deadlock", "%s:%d: thread %u waits for lanes of mask %08x that go elsewhere",
                 warp[lane].place.file, warp[lane].place.line, warp[lane].number, warp[lane].mask);
    return ran;
}

// Completes a barrier that all of some threads have reached, of a block or of its cluster (`kind`). False if they have ended, wait for
// something else, or not all have reached it.
static bool complete_the_barrier(Fiber* first, unsigned count, State kind) {
    const Fiber *waiting = nullptr, *ended = nullptr;
    for (unsigned i = 0; i < count; ++i) {
        const Fiber& fiber = first[i];
        if (fiber.state == DONE) {
            ended = &fiber;
        } else if (fiber.state != kind) {
            return false;
        } else if (!waiting) {
            waiting = &fiber;
        } else if (fiber.place.line != waiting->place.line) {
            fail("divergent barrier", "thread %u waits at %s:%d, thread %u at %s:%d", waiting->number,
                 waiting->place.file, waiting->place.line, fiber.number, fiber.place.file, fiber.place.line);
            return false;
        }
    }
    if (!waiting) return false;
    if (ended) {
        fail("divergent barrier", "thread %u waits at %s:%d, thread %u has left the kernel", waiting->number,
             waiting->place.file, waiting->place.line, ended->number);
        return false;
    }
    for (unsigned i = 0; i < count; ++i) {
        first[i].state = READY;
        if (first[i].number == 0) ++barrier_epoch[first[i].rank];
    }
    return true;
}

static bool complete_a_barrier(unsigned count) {
    for (unsigned rank = 0; rank < launch.cluster; ++rank)
        if (complete_the_barrier(&fibers[rank * count], count, AT_BARRIER)) return true;
    return launch.cluster > 1 && !failed && complete_the_barrier(&fibers[0], launch.cluster * count, AT_CLUSTER);
}

// The blocks of a cluster begin one after another, as far apart as may be: the next one when those before it cannot go on.
static bool start_a_block(unsigned count) {
    for (unsigned i = 0; i < launch.cluster; ++i) {
        Fiber* first = &fibers[(launch.order == REVERSE ? launch.cluster - 1 - i : i) * count];
        if (first->state != UNSTARTED) continue;
        for (unsigned thread = 0; thread < count; ++thread) first[thread].state = READY;
        return true;
    }
    return false;
}

// Runs a block, or the blocks of a cluster together.
void run_cluster(const uint3* blocks, std::mt19937& random) {
    const unsigned count = threads_of_block(), all = launch.cluster * count;
    if (launch.cluster > 1 && (count % kWarp || all > kMostThreads))
        return fail("cluster", "%u blocks of %u threads: only whole warps, and %u threads together, are simulated", launch.cluster, count, kMostThreads);
    for (unsigned i = 0; i < all; ++i) {
        const unsigned number = i % count;
        fibers[i].number = number;
        fibers[i].rank = i / count;
        fibers[i].block = blocks[i / count];
        fibers[i].thread = {number % self.threads.x, number / self.threads.x % self.threads.y, number / self.threads.x / self.threads.y};
        start(fibers[i]);
        fibers[i].state = UNSTARTED;
    }
    start_a_block(count);
    for (unsigned& epoch : barrier_epoch) ++epoch;
    begin_cluster(random);
    auto warps = numbers_up_to((all + kWarp - 1) / kWarp), lanes = numbers_up_to(kWarp);
    bool ran;
    do {
        ran = false;
        arrange(warps, random);
        for (unsigned warp : warps) {
            ran |= run_warp(&fibers[warp * kWarp], std::min(kWarp, all - warp * kWarp), lanes, random);
            if (failed) return;
        }
        ran = (ran && waiting) || complete_a_barrier(count) || start_a_block(count) ||
              (!failed && end_something(random));
    } while (ran && !failed);
    if (failed) return;
    for (unsigned i = 0; i < all; ++i)
        if (fibers[i].state != DONE)
            return fail("deadlock", "%s:%d: thread %u of block %u of the cluster waits for ever", fibers[i].place.file, fibers[i].place.line,
                        fibers[i].number, fibers[i].rank);
    end_cluster();
}

}  // namespace simulator
