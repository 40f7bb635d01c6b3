// What runs beside the threads of a block on Hopper: the copy engine (TMA), products of warpgroups, and barriers in shared memory that
// count arrivals and bytes. Written from the PTX ISA, not from hopper.cuh: this side decodes what a kernel encodes.
//
// A copy lands as late as it may: when no thread can go on. From its start what lies there is undefined.
// A product reads its operands as late as it may: when somebody waits for it and no thread can go on. Until then its sums are NaN,
// and the registers that hold an operand may not change.
// Who has waited for a barrier sees what was touched before the arrivals: by the arriving warp up to its last __syncwarp.
// Addresses of shared memory begin at another multiple of 16 in each launch, and never at one of 1,024.
#include "runtime.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <map>

namespace simulator {

constexpr unsigned kAtom = 1024, kRow = 128, kMostBoxRows = 256, kProducts = 0;    // the last: no address of a barrier

// The last two: by warp, up to which epoch its touches are seen by who waits for the phase under way, and for the one before.
struct Barrier { int arrivals, missing; long long bytes; unsigned phase, released[kMostWarps], ended[kMostWarps]; };
struct Range { unsigned rank, begin, end; };    // in the window of shared memory
struct Box { TensorMap map; unsigned to, barrier, blocks; int inner, outer, sequence; };
struct Issued {
    float* sums[kWarp];
    const unsigned* registers[kWarp];
    unsigned held[kWarp][4];    // in these registers at the issue
    WarpgroupProduct product;
    Range a, b;
};
// The products of a warp: not committed, committed group by group, and the true sums of those under way.
struct WarpProducts {
    std::vector<Issued> issued;
    std::deque<std::vector<Issued>> groups;
    std::map<float*, std::vector<float>> sums;
    bool fenced;
};

static std::map<std::pair<unsigned, unsigned>, Barrier> barriers;    // by block of the cluster, and address
static std::vector<Box> boxes;
static WarpProducts products[kMostThreads / kWarp];
static unsigned window_base, products_under_way;

static bool overlap(const Range& x, const Range& y) { return x.rank == y.rank && x.begin < y.end && y.begin < x.end; }
static Range of_box(const Box& box, unsigned rank) { return {rank, box.to, box.to + box.map.box_outer * kRow}; }
static char* memory_at(unsigned rank, unsigned address) { return dynamic_shared_begin + rank * kMostDynamicShared + (address - window_base); }
static bool is_inside(unsigned begin, unsigned end) {
    return begin >= window_base && end - window_base <= launch.dynamic_shared && begin <= end;
}

void begin_cluster(std::mt19937& random) {
    barriers.clear();
    boxes.clear();
    waiting = products_under_way = 0;
    for (auto& warp : products) {    // a new deque would cost an allocation a warp and block
        warp.issued.clear();
        warp.groups.clear();
        warp.sums.clear();
        warp.fenced = false;
    }
    window_base = kAtom + 16 * (1 + (launch.order == RANDOM ? random() % 63 : launch.order * 36));
}

unsigned rank_in_cluster() { return running->rank; }
unsigned char* dynamic_memory() { return reinterpret_cast<unsigned char*>(memory_at(running->rank, window_base)); }

unsigned window_address(const void* pointer) {
    const ptrdiff_t offset = static_cast<const char*>(pointer) - memory_at(running->rank, window_base);
    if (offset < 0 || size_t(offset) > launch.dynamic_shared)
        fail_at(nullptr, "out of bounds", "the address in shared memory of what is not in the %u bytes of dynamic shared memory", launch.dynamic_shared);
    return window_base + unsigned(offset);
}

// ---- Barriers

static Barrier* barrier_at(unsigned rank, unsigned address, Place place) {
    const auto found = barriers.find({rank, address});
    if (found != barriers.end()) return &found->second;
    fail_at(nullptr, "mbarrier", "%s:%d: no barrier has been made at %u of block %u of the cluster", place.file, place.line, address - window_base, rank);
    return nullptr;
}

static void end_phase(Barrier& barrier) {
    if (barrier.missing || barrier.bytes) return;
    ++barrier.phase;
    barrier.missing = barrier.arrivals;
    std::copy_n(barrier.released, kMostWarps, barrier.ended);
}

void init_barrier(unsigned barrier, int arrivals) {
    if (barrier % 8 || !is_inside(barrier, barrier + 8) || arrivals < 1)
        fail_at(nullptr, "mbarrier", "a barrier for %d arrivals at shared memory + %u, of %u bytes", arrivals, barrier - window_base, launch.dynamic_shared);
    barriers[{running->rank, barrier}] = {arrivals, arrivals, 0, 0};
}

static bool has_left(unsigned rank) {
    return std::all_of(fibers.begin() + rank * threads_of_block(), fibers.begin() + (rank + 1) * threads_of_block(),
                       [](const Fiber& fiber) { return fiber.state == DONE; });
}

void arrive(unsigned address, unsigned rank, unsigned bytes, Place place) {
    if (has_left(rank)) return fail_at(nullptr, "mbarrier", "%s:%d: block %u of the cluster has ended, and its barriers with it", place.file, place.line, rank);
    Barrier* barrier = barrier_at(rank, address, place);
    if (!barrier) return;
    barrier->bytes += bytes;
    const size_t own = size_t(running - &fibers[0]) / kWarp;
    for (unsigned warp = 0; warp < kMostWarps; ++warp)
        barrier->released[warp] = std::max(barrier->released[warp], warp == own ? warp_epoch[own] : known[own][warp]);
    if (--barrier->missing < 0)
        return fail_at(nullptr, "mbarrier", "%s:%d: one arrival more than the %d of a phase", place.file, place.line, barrier->arrivals);
    end_phase(*barrier);
}

void wait_for_phase(unsigned address, unsigned parity, Place place) {
    if (!barrier_at(running->rank, address, place)) return;
    running->state = WAITING;
    running->place = place;
    running->barrier = address;
    running->parity = parity;
    if (has_come(*running)) {
        running->state = READY;
        learn(*running);
    } else {
        ++waiting;
        suspend();
    }
}

void meet_cluster(Place place) {
    running->state = AT_CLUSTER;
    running->place = place;
    suspend();
}

// ---- Copies

// Whether products of a warp that are under way read any of this.
static bool is_read(unsigned warp, const Range& range) {
    const auto touches = [&](const std::vector<Issued>& group) {
        return std::any_of(group.begin(), group.end(), [&](const Issued& each) {
            return (!each.product.registers && overlap(each.a, range)) || overlap(each.b, range);
        });
    };
    return touches(products[warp].issued) || std::any_of(products[warp].groups.begin(), products[warp].groups.end(), touches);
}

bool is_read_by_products(const char* address, size_t nbytes) {
    if (!products_under_way) return false;
    const auto offset = unsigned(address - dynamic_shared_begin);
    const unsigned rank = offset / kMostDynamicShared, begin = window_base + offset % kMostDynamicShared;
    for (unsigned warp = 0; warp < launch.cluster * warps_of_block(); ++warp)
        if (is_read(warp, {rank, begin, begin + unsigned(nbytes)})) return true;
    return false;
}

void start_box(unsigned to, const TensorMap& map, unsigned barrier, int inner, int outer, int sequence, unsigned blocks, Place place) {
    if (to % kAtom) return fail_at(nullptr, "tile", "%s:%d: a box goes to shared memory at %u, %u bytes behind a multiple of 1,024", place.file, place.line, to, to % kAtom);
    if (map.box_inner * map.element_bytes != kRow || map.box_outer > kMostBoxRows)
        return fail_at(nullptr, "tile", "%s:%d: a box of %u rows of %u bytes; rows have 128, and there are 256 at most", place.file, place.line,
                    map.box_outer, map.box_inner * map.element_bytes);
    const Box box{map, to, barrier, blocks, inner, outer, sequence};
    for (unsigned rank = 0; rank < launch.cluster; ++rank) {
        if (!(blocks >> rank & 1)) continue;
        const Range range = of_box(box, rank);
        if (!is_inside(range.begin, range.end))
            return fail_at(nullptr, "out of bounds", "%s:%d: a box to shared memory + %u, launched with %u", place.file, place.line, to - window_base, launch.dynamic_shared);
        if (!barrier_at(rank, barrier, place)) return;
        for (const Box& other : boxes)
            if (other.blocks >> rank & 1 && overlap(of_box(other, rank), range))
                return fail_at(nullptr, "in flight", "%s:%d: a copy to where another one has not landed", place.file, place.line);
        for (unsigned warp = 0; warp < warps_of_block(); ++warp)
            if (is_read(rank * warps_of_block() + warp, range))
                return fail_at(nullptr, "in flight", "%s:%d: a copy to what a product of warp %u of block %u of the cluster still reads", place.file,
                            place.line, warp, rank);
        std::memset(memory_at(rank, range.begin), 0xff, range.end - range.begin);
        forget_value(memory_at(rank, range.begin), range.end - range.begin);
    }
    boxes.push_back(box);
}

static void land(const Box& box, unsigned rank) {
    const TensorMap& map = box.map;
    for (unsigned r = 0; r < map.box_outer; ++r)
        for (unsigned c = 0; c < map.box_inner; ++c) {
            const long long x = (long long)box.inner + c, y = (long long)box.outer + r;
            const bool exists = x >= 0 && x < map.inner && y >= 0 && y < map.outer && box.sequence >= 0 && box.sequence < map.sequences;
            const unsigned address = box.to + r * kRow + c * map.element_bytes;
            char* to = memory_at(rank, address ^ (address >> 7 & 7) << 4);
            if (exists) std::memcpy(to, map.array + box.sequence * map.sequence_pitch + y * map.pitch + x * map.element_bytes, map.element_bytes);
            else std::memset(to, 0, map.element_bytes);
        }
    value_has_landed(memory_at(rank, box.to), map.box_outer * kRow);
    Barrier& barrier = barriers[{rank, box.barrier}];
    barrier.bytes -= map.box_outer * kRow;
    end_phase(barrier);
}

// Counts what a copy reads: once, to however many blocks it goes.
static void count_box(const Box& box) {
    const TensorMap& map = box.map;
    const auto inside = [](long long first, long long count, long long extent) {
        return std::max(0LL, std::min(first + count, extent) - std::max(first, 0LL));
    };
    const long long elements = inside(box.inner, map.box_inner, map.inner) * inside(box.outer, map.box_outer, map.outer);
    const long long nbytes = inside(box.sequence, 1, map.sequences) * elements * map.element_bytes;
    for (unsigned i = 0; i < launch.buffer_count; ++i)
        if (size_t(map.array - launch.buffers[i].base) < launch.buffers[i].nbytes) count_read(i, nbytes);
}

static void land_one(size_t which) {
    const Box box = boxes[which];
    boxes.erase(boxes.begin() + ptrdiff_t(which));
    count_box(box);
    for (unsigned rank = 0; rank < launch.cluster; ++rank) {
        if (!(box.blocks >> rank & 1)) continue;
        if (has_left(rank)) fail_at(nullptr, "in flight", "a copy lands in block %u of the cluster, which has ended", rank);
        else land(box, rank);
    }
}

// ---- Products

// PTX ISA, "Strides" and "Canonical layouts" of wgmma, of 16-bit elements: the address of element (mn, k).
struct Layout {
    unsigned start, leading, stride;
    bool is_swizzled, transposed;

    Layout(unsigned long long bits, bool transposed)
        : start(unsigned(bits & 0x3fff) << 4), leading(unsigned(bits >> 16 & 0x3fff) << 4), stride(unsigned(bits >> 32 & 0x3fff) << 4),
          is_swizzled(bits >> 62 == 1), transposed(transposed) {}

    unsigned at(unsigned mn, unsigned k) const {
        if (!is_swizzled) return start + mn / 8 * stride + k / 8 * leading + mn % 8 * 16 + k % 8 * 2;
        const unsigned plain = transposed ? start + mn / 64 * leading + mn % 64 * 2 + k / 8 * stride + k % 8 * kRow
                                          : start + mn / 8 * stride + mn % 8 * kRow + k * 2;
        return plain ^ (plain >> 7 & 7) << 4;
    }

    // What holds all elements, in whole atoms if swizzled.
    Range range(unsigned rank, unsigned wide) const {
        unsigned begin = ~0u, end = 0;
        for (unsigned mn = 0; mn < wide; mn += 8)
            for (unsigned k : {0u, 8u}) {
                begin = std::min(begin, at(mn, k));
                end = std::max(end, at(mn, k) + 16);
            }
        return is_swizzled ? Range{rank, begin / kAtom * kAtom, (end + kAtom - 1) / kAtom * kAtom} : Range{rank, begin, end};
    }
};

static bool is_refused(const Layout& layout, unsigned long long bits, const Issued& issued, unsigned wide, const char* name) {
    const Place place = issued.product.place;
    if (layout.is_swizzled && (layout.start >> 7 & 7 || bits >> 49 & 7 || layout.stride % kAtom || (layout.transposed && layout.leading % kAtom))) {
        fail_at(nullptr, "tile", "%s:%d: %s begins at %u, in steps of %u and %u: not where eight rows of 128 bytes begin, at a multiple of 1,024", place.file,
             place.line, name, layout.start, layout.stride, layout.leading);
        return true;
    }
    if (bits >> 62 > 1 || (!layout.is_swizzled && layout.transposed)) {
        fail_at(nullptr, "tile", "%s:%d: %s has a layout that is not simulated (%016llx)", place.file, place.line, name, bits);
        return true;
    }
    const Range range = layout.range(issued.a.rank, wide);
    const unsigned end = window_base + launch.dynamic_shared;
    if (range.end > (end + kAtom - 1) / kAtom * kAtom || range.begin < window_base / kAtom * kAtom) {
        fail_at(nullptr, "out of bounds", "%s:%d: %s reads shared memory from %d on, launched with %u bytes", place.file, place.line, name,
             int(range.begin - window_base), launch.dynamic_shared);
        return true;
    }
    for (const Box& box : boxes)
        if (box.blocks >> range.rank & 1 && overlap(of_box(box, range.rank), range)) {
            fail_at(nullptr, "in flight", "%s:%d: %s is read before its copy has landed", place.file, place.line, name);
            return true;
        }
    return false;
}

void fence_products(void**) { products[meeting_warp].fenced = true; }

void change_registers() { products[size_t(running - &fibers[0]) / kWarp].fenced = false; }

void issue_product(void** arrived) {
    WarpProducts& warp = products[meeting_warp];
    const unsigned rank = meeting_warp / warps_of_block();
    Issued issued{};
    issued.product = *static_cast<WarpgroupProduct*>(arrived[0]);
    const WarpgroupProduct& product = issued.product;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
        const auto* mine = static_cast<WarpgroupProduct*>(arrived[lane]);
        if (mine->a != product.a || mine->b != product.b)
            return fail_at(nullptr, "tile", "%s:%d: lane %u names other operands than lane 0", product.place.file, product.place.line, lane);
        issued.sums[lane] = mine->sums;
        issued.registers[lane] = mine->registers;
        if (mine->registers) std::copy_n(mine->registers, 4, issued.held[lane]);
    }
    if (!warp.fenced)
        return fail_at(nullptr, "registers", "%s:%d: no wgmma_fence since the last wait or hold, in which sums or operands may have changed", product.place.file, product.place.line);
    const Layout a(product.a, product.transposed_a), b(product.b, product.transposed_b);
    const unsigned n = unsigned(product.count) * 2, first_row = meeting_warp % 4 * 16;
    issued.a.rank = rank;
    const bool in_registers = product.registers;
    if ((!in_registers && is_refused(a, product.a, issued, 64, "A")) || is_refused(b, product.b, issued, n, "B")) return;
    if (!in_registers) issued.a = a.range(rank, 64);
    issued.b = b.range(rank, n);
    const auto check = [&](const Layout& layout, unsigned from, unsigned wide, const char* name) {
        for (unsigned mn = from; mn < from + wide; ++mn)
            for (unsigned k = 0; k < 16; ++k)
                if (!check_operand(memory_at(rank, layout.at(mn, k)), meeting_warp, name, product.place)) return;
    };
    if (launch.checked) {
        if (!in_registers) check(a, first_row, 16, "A");
        if (!failed) check(b, 0, n, "B");
    }
    auto [sums, is_new] = warp.sums.try_emplace(product.sums);
    if (is_new)
        for (float* of_lane : issued.sums) {
            sums->second.insert(sums->second.end(), of_lane, of_lane + product.count);
            std::fill(of_lane, of_lane + product.count, std::numeric_limits<float>::quiet_NaN());
        }
    warp.issued.push_back(issued);
    ++products_under_way;
}

void commit_products(void**) {
    WarpProducts& warp = products[meeting_warp];
    warp.groups.push_back(std::move(warp.issued));
    warp.issued.clear();
}

static float value_at(unsigned rank, unsigned address, bool is_bfloat16) {
    uint16_t bits;
    std::memcpy(&bits, memory_at(rank, address), 2);
    return is_bfloat16 ? bfloat16_value(bits) : float16_value(bits);
}

// A of a warp from its lanes' registers: word i of lane 4 g + t has columns 2 t and 2 t + 1 of row g, 8 rows on if i is odd, 8 columns on from i = 2.
static void read_registers(const Issued& issued, float (&rows)[16][16]) {
    const WarpgroupProduct& product = issued.product;
    for (unsigned lane = 0; lane < kWarp; ++lane)
        for (unsigned i = 0; i < 4; ++i) {
            if (issued.registers[lane][i] != issued.held[lane][i])
                return fail_at(nullptr, "registers", "%s:%d: lane %u changed the registers of A before the wait", product.place.file, product.place.line, lane);
            for (unsigned half = 0; half < 2; ++half) {
                const auto bits = uint16_t(issued.held[lane][i] >> 16 * half);
                rows[lane / 4 + i % 2 * 8][lane % 4 * 2 + half + i / 2 * 8] = product.is_bfloat16 ? bfloat16_value(bits) : float16_value(bits);
            }
        }
}

// 16 rows of the 64. Lane 4 g + t holds rows g and g + 8, columns 2 t and 2 t + 1 of each eight.
static void compute(const Issued& issued, std::vector<float>& sums, unsigned first_row) {
    const WarpgroupProduct& product = issued.product;
    const Layout a(product.a, product.transposed_a), b(product.b, product.transposed_b);
    const unsigned n = unsigned(product.count) * 2, rank = issued.b.rank;
    static float rows[16][16], columns[16][256], result[16][256];
    if (product.registers) read_registers(issued, rows);
    for (unsigned m = 0; m < 16 && !product.registers; ++m)
        for (unsigned k = 0; k < 16; ++k) rows[m][k] = value_at(rank, a.at(first_row + m, k), product.is_bfloat16);
    for (unsigned k = 0; k < 16; ++k)
        for (unsigned j = 0; j < n; ++j) columns[k][j] = value_at(rank, b.at(j, k), product.is_bfloat16);
    for (unsigned m = 0; m < 16; ++m) {
        std::fill(result[m], result[m] + n, 0.0f);
        for (unsigned k = 0; k < 16; ++k)
            for (unsigned j = 0; j < n; ++j) result[m][j] += rows[m][k] * columns[k][j];
    }
    if (!product.adds) std::fill(sums.begin(), sums.end(), 0.0f);
    for (unsigned lane = 0; lane < kWarp; ++lane)
        for (unsigned i = 0; i < unsigned(product.count); ++i)
            sums[lane * unsigned(product.count) + i] += result[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
}

// Ends the oldest group of a warp's products. Sums that no other one is to change are seen from here on.
static void end_a_group(unsigned number) {
    WarpProducts& warp = products[number];
    for (const Issued& issued : warp.groups.front()) compute(issued, warp.sums[issued.product.sums], number % 4 * 16);
    const auto done = std::move(warp.groups.front());
    warp.groups.pop_front();
    products_under_way -= unsigned(done.size());
    const auto changes = [&](const std::vector<Issued>& group, const float* sums) {
        return std::any_of(group.begin(), group.end(), [&](const Issued& each) { return each.product.sums == sums; });
    };
    for (const Issued& issued : done) {
        const auto sums = warp.sums.find(issued.product.sums);
        if (sums == warp.sums.end() || changes(warp.issued, issued.product.sums) ||
            std::any_of(warp.groups.begin(), warp.groups.end(), [&](const auto& group) { return changes(group, issued.product.sums); }))
            continue;
        const auto count = size_t(issued.product.count);
        for (unsigned lane = 0; lane < kWarp; ++lane) std::copy_n(sums->second.data() + lane * count, count, issued.sums[lane]);
        warp.sums.erase(sums);
    }
}

void reach_wait(void**) { products[meeting_warp].fenced = false; }

void wait_for_products(unsigned groups, Place place) {
    running->state = WAITING;
    running->place = place;
    running->barrier = kProducts;
    running->parity = groups;
    if (has_come(*running)) {
        running->state = READY;
        learn(*running);
    } else {
        ++waiting;
        suspend();
    }
}

void learn(const Fiber& fiber) {
    if (fiber.barrier == kProducts) return;
    const Barrier& barrier = barriers[{fiber.rank, fiber.barrier}];
    auto& knows = known[size_t(&fiber - &fibers[0]) / kWarp];
    for (unsigned warp = 0; warp < kMostWarps; ++warp) knows[warp] = std::max(knows[warp], barrier.ended[warp]);
}

bool has_come(const Fiber& fiber) {
    if (fiber.barrier == kProducts) return products[size_t(&fiber - &fibers[0]) / kWarp].groups.size() <= fiber.parity;
    return (barriers[{fiber.rank, fiber.barrier}].phase & 1) != fiber.parity;
}

// A copy that has been started, or a group of products that a warp waits for: one order ends copies first, another one products.
bool end_something(std::mt19937& random) {
    std::vector<unsigned> waiting;
    for (unsigned i = 0; i < launch.cluster * threads_of_block(); i += kWarp)
        if (fibers[i].state == WAITING && fibers[i].barrier == kProducts && !has_come(fibers[i])) waiting.push_back(i / kWarp);
    if (boxes.empty() && waiting.empty()) return false;
    const bool prefers_copies = launch.order == RANDOM ? random() % 2 : launch.order == FORWARD;
    const bool takes_copy = !boxes.empty() && (prefers_copies || waiting.empty());
    const size_t count = takes_copy ? boxes.size() : waiting.size();
    const size_t which = launch.order == RANDOM ? random() % count : launch.order == REVERSE ? count - 1 : 0;
    if (takes_copy) land_one(which);
    else end_a_group(waiting[which]);
    return !failed;
}

void end_cluster() {
    for (const auto& warp : products)
        if (!warp.issued.empty() || !warp.groups.empty()) return fail_at(nullptr, "registers", "products were under way when their threads ended");
    if (!boxes.empty()) fail_at(nullptr, "in flight", "%zu copies were under way when the threads ended", boxes.size());
}

}  // namespace simulator
