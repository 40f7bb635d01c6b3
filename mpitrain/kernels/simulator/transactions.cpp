// Requests of a warp and their transactions, as the hardware counts them: bank conflicts of shared memory, and sectors of
// global memory. A request is one load or store of a warp: what its lanes do at one instruction, for the n-th time since the
// last meeting of the warp. Lanes that go round a loop unequally often share the requests of the rounds that both have.
#include "runtime.h"

#include <algorithm>
#include <tuple>
#include <unordered_map>

namespace simulator {

constexpr unsigned kBanks = 32, kWord = 4, kSector = 32, kWidest = 16;

// The part of one lane in a request: at most kWidest bytes.
struct Part { const void* from; unsigned turn, lane; const char* address; unsigned nbytes; Access access; Buffer* array; };

static std::vector<Part> parts;                                    // of the warp that runs
static std::unordered_map<const void*, unsigned> turns[kWarp];     // of each lane: accesses at an instruction so far
static std::unordered_map<const void*, Site> sites;

void count_part(const char* address, size_t nbytes, Access access, const void* from, Buffer* array) {
    for (size_t done = 0; done < nbytes; done += kWidest)
        parts.push_back({from, turns[self.lane][from]++, unsigned(self.lane), address + done,
                         unsigned(std::min<size_t>(nbytes - done, kWidest)), access, array});
}

// Passes over the banks that one request takes. Up to 4 bytes a lane all lanes go together, then halves of a warp, then
// quarters; lanes that read one word are served at once. `least`: the passes without any conflict.
static unsigned passes(const Part* first, const Part* last, unsigned& least) {
    unsigned widest = 0, total = 0;
    for (const Part* part = first; part < last; ++part) widest = std::max(widest, part->nbytes);
    const unsigned together = widest <= 4 ? kWarp : widest <= 8 ? kWarp / 2 : kWarp / 4;
    for (unsigned lane = 0; lane < kWarp; lane += together) {
        std::vector<size_t> words[kBanks];
        for (const Part* part = first; part < last; ++part) {
            if (part->lane < lane || part->lane >= lane + together) continue;
            const size_t begin = size_t(part->address - shared_begin), end = begin + part->nbytes;
            for (size_t word = begin / kWord; word * kWord < end; ++word) {
                auto& there = words[word % kBanks];
                if (part->access == ATOMIC || std::find(there.begin(), there.end(), word) == there.end()) there.push_back(word);
            }
        }
        size_t most = 0;
        for (const auto& there : words) most = std::max(most, there.size());
        total += unsigned(most);
        least += most > 0;
    }
    return total;
}

static unsigned sectors(const Part* first, const Part* last) {
    std::vector<size_t> found;
    for (const Part* part = first; part < last; ++part)
        for (size_t at = size_t(part->address) / kSector; at * kSector < size_t(part->address) + part->nbytes; ++at)
            found.push_back(at);
    std::sort(found.begin(), found.end());
    return unsigned(std::unique(found.begin(), found.end()) - found.begin());
}

void count_requests() {
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
        return std::tie(a.from, a.turn, a.lane) < std::tie(b.from, b.turn, b.lane);
    });
    for (size_t begin = 0, end = 0; begin < parts.size(); begin = end) {
        const Part& part = parts[begin];
        while (end < parts.size() && parts[end].from == part.from && parts[end].turn == part.turn) ++end;
        const Part *first = &part, *last = first + (end - begin);
        if (part.array) {
            part.array->sectors += sectors(first, last);
            continue;
        }
        Site& site = sites[part.from];
        unsigned least = 0;
        site.passes += passes(first, last, least);
        site.least += least;
        ++site.requests;
        site.nbytes = std::max(site.nbytes, part.nbytes);
        site.writes = part.access != READ;
        site.offset = size_t(static_cast<const char*>(part.from) - 1 - kernel_begin);
    }
    parts.clear();
    for (auto& of_lane : turns) of_lane.clear();
}

void forget_requests() {
    sites.clear();
    parts.clear();
    for (auto& of_lane : turns) of_lane.clear();
}

}  // namespace simulator

// The instructions of the last launch that touch shared memory: their number; as many as there is room for are copied.
extern "C" size_t simulator_sites(simulator::Site* out, size_t room) {
    for (const auto& [from, site] : simulator::sites)
        if (room-- > 0) *out++ = site;
        else break;
    return simulator::sites.size();
}
