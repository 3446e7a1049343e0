// Part of emulator.cpp: what translated PTX moves, counted as a GPU's memory counts it (benchmarks/gpu/model.py).
//
// A request is an access of a warp: the same instruction, the same time around. In global memory it touches sectors of
// 32 bytes; the least is its bytes / 32, rounded up. In shared memory it takes as many turns as the fullest bank of 32
// has different words, for each part of 128 bytes; the least is one for each part.

namespace lm {
namespace {

u64 distinct(std::vector<u64>& values) {
    std::sort(values.begin(), values.end());
    return std::unique(values.begin(), values.end()) - values.begin();
}

void note(Fiber* self, u64 address, int bytes, int kind, int line) {
    const u32 turn = self->turns[line * 4 + kind]++, index = self - machine.fibers.data();
    Request& request = machine.requests[{index / 32, static_cast<u32>(line * 4 + kind), turn}];
    request.bytes = bytes, request.lanes |= 1u << index % 32, request.at[index % 32] = address;
}

void note_global(Fiber* self, u64 address, int bytes, bool writes, int line) { note(self, address, bytes, writes, line); }
void note_shared(Fiber* self, u64 at, int bytes, bool writes, int line) { note(self, at, bytes, 2 + writes, line); }

void count_sectors(const Request& r, Requests& sum) {
    std::vector<u64> sectors, bytes;
    for (int i = 0; i < 32; ++i)
        if (r.lanes >> i & 1) {
            for (u64 b = r.at[i] / 32; b <= (r.at[i] + r.bytes - 1) / 32; ++b) sectors.push_back(b);
            bytes.push_back(r.at[i]);
        }
    const u64 needed = distinct(bytes) * r.bytes;  // lanes may read the same
    sum.parts += distinct(sectors), sum.least += (needed + 31) / 32, sum.bytes += needed;
}

void count_banks(const Request& r, Requests& sum) {
    const int together = r.bytes <= 4 ? 32 : 128 / r.bytes;  // lanes
    for (int first = 0; first < 32; first += together) {
        std::vector<u64> words[32];
        u64 fullest = 0;
        for (int i = first; i < first + together; ++i)
            if (r.lanes >> i & 1)
                for (u64 w = r.at[i] / 4; w <= (r.at[i] + r.bytes - 1) / 4; ++w) words[w % 32].push_back(w);
        for (auto& bank : words) {
            const u64 here = distinct(bank);
            fullest = here > fullest ? here : fullest;
        }
        sum.parts += fullest, sum.least += fullest > 0;
    }
    sum.bytes += __builtin_popcount(r.lanes) * r.bytes;
}

// All requests of a block are complete at its end.
void count_requests() {
    for (const auto& [key, request] : machine.requests) {
        const int kind = key.place & 3;
        Requests& sum = machine.traffic_of[key.place];
        ++sum.count;
        (kind < 2 ? count_sectors : count_banks)(request, sum);
    }
    machine.requests.clear();
    u64 in_flight = 0;
    for (const Fiber& fiber : machine.fibers) in_flight += fiber.most_flying;
    machine.in_flight = std::max(machine.in_flight, in_flight);
}

}  // namespace
}  // namespace lm

// The most bytes of copies that a block had in flight since the last call.
extern "C" u64 lm_in_flight() { return lm::open_machine(), std::exchange(lm::of_thread->in_flight, 0); }

// For each place, of those that were counted since the last call: line * 4 + kind, requests, parts, the least, bytes.
// Kinds: loads and stores of global memory, then of shared memory. Returns how many there are.
extern "C" u64 lm_traffic(u64* to, u64 places) {
    using namespace lm;
    open_machine();
    const u64 count = machine.traffic_of.size();
    if (!to) return count;
    for (const auto& [place, sum] : machine.traffic_of) {
        if (!places--) break;
        for (const u64 value : {static_cast<u64>(place), sum.count, sum.parts, sum.least, sum.bytes}) *to++ = value;
    }
    machine.traffic_of.clear();
    return count;
}
