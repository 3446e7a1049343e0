// Part of emulator.cpp: accesses of translated PTX to global memory (ptx/runtime.h).
//
// An access must be aligned and within the memory of a tensor that the launch was given, unless the launch follows
// addresses that lie in memory. It is a race if a block reads or writes what another block of this launch wrote, other
// than the same bytes again, or writes what another block read, unless that block's access, its __threadfence, its
// atomic, this block's atomic on the same word, its __threadfence and this access follow each other. Blocks run one
// after the other: in which order does not matter.

namespace lm {
namespace {

u32 block_index(const Thread* t) { return (t->block.z * t->grid_size.y + t->block.y) * t->grid_size.x + t->block.x; }

Touched& touched_at(Table& table, u64 key) {
    u64 at = (key / 8 * 0x9e3779b97f4a7c15ull >> 20) + key % 8;
    for (;; ++at) {
        Touched& found = table.places[at & (table.places.size() - 1)];
        if (found.launch != machine.launch || found.key == key) return found;
    }
}

void make_room(Table& table) {
    while (2 * (table.used + 8) > table.places.size()) {
        const std::vector<Touched> before = std::move(table.places);
        table.places.assign(before.empty() ? 1 << 12 : 2 * before.size(), {});
        for (const Touched& each : before)
            if (each.launch == machine.launch) touched_at(table, each.key) = each;
    }
}

void touch(Table& table, Touched& found, Fiber* self, u64 key, u8 bytes, bool counts, int line) {
    const bool is_new = found.launch != machine.launch;
    table.used += is_new;
    const u32 block = block_index(self);
    const u8 all = !is_new && found.block == block ? found.bytes | bytes : bytes;
    found = {key, machine.epoch, machine.launch, block, self->accesses, line, static_cast<u16>(index_of(self)), all, counts};
}

bool is_released(const Released& released, const Touched& write) {
    return write.epoch < released.epoch || write.count <= released.counts[write.thread];
}

bool is_known(const Fiber* self, const Touched& write) {
    for (const Met& met : machine.met) {
        if (met.released->block != write.block || !is_released(*met.released, write)) continue;
        const bool own = met.thread == index_of(self) ? self->memory_fences > met.fences : self->fence_epoch > met.epoch;
        if (own || met.fenced < machine.epoch) return true;
    }
    return false;
}

void count_at(Fiber* self, u64 word) {  // an atomic releases what this thread knows to be fenced, and meets what others released
    auto& releases = machine.releases[word];
    const u32 block = block_index(self);
    for (const auto& other : releases)
        if (other->block != block) machine.met.push_back({other, index_of(self), machine.epoch, self->memory_fences, ~0ull});
    auto mine = std::make_shared<Released>(Released{block, 0, std::vector<u32>(machine.fibers.size())});
    for (u32 i = 0; i < machine.fibers.size(); ++i) {
        const Fiber& each = machine.fibers[i];
        const bool is_self = &each == self;
        const u64 epoch = is_self ? each.fence_epoch : each.known_fence_epoch;
        mine->epoch = epoch > mine->epoch ? epoch : mine->epoch;
        mine->counts[i] = is_self ? each.fenced_accesses : each.known_fenced_accesses;
    }
    releases.push_back(mine);
}

// What another block did to some of the bytes, if nothing orders that before what `self` does now.
bool is_race(const Fiber* self, const Touched& other, u8 bytes) {
    return other.launch == machine.launch && other.bytes & bytes && other.block != block_index(self) && !is_known(self, other);
}

void note_global_read(Fiber* self, u64 word, u8 bytes, int line) {  // of two blocks: one of them is not that which writes
    u64 key = 2 * word;
    Touched* found = &touched_at(machine.global_reads, key);
    if (found->launch == machine.launch && found->block != block_index(self)) found = &touched_at(machine.global_reads, ++key);
    ++self->accesses;
    touch(machine.global_reads, *found, self, key, bytes, false, line);
}

void access_global_word(Fiber* self, u64 word, u8 bytes, Use use, bool same, int line) {
    Touched& written = touched_at(machine.global_writes, word);
    if (!same && !(use == COUNTS && written.counts) && is_race(self, written, bytes))
        fail("line %d: a race between blocks: block %u %s what block %u wrote at line %d", line, block_index(self), use == READS ? "reads" : "writes", written.block, written.line);
    if (use == READS) return note_global_read(self, word, bytes, line);
    for (int i = 0; i < 2 && !same; ++i) {
        const Touched& read = touched_at(machine.global_reads, 2 * word + i);
        if (is_race(self, read, bytes)) fail("line %d: a race between blocks: block %u writes what block %u reads at line %d", line, block_index(self), read.block, read.line);
    }
    ++self->accesses;
    touch(machine.global_writes, written, self, word, bytes, use == COUNTS, line);
}

bool is_bounded(u64 address, int bytes) {
    for (u64 i = 0; i + 1 < machine.bounds.size(); i += 2)
        if (address >= machine.bounds[i] && address + bytes <= machine.bounds[i + 1]) {
            if (i) std::swap(machine.bounds[i], machine.bounds[0]), std::swap(machine.bounds[i + 1], machine.bounds[1]);
            return true;
        }
    return false;
}

void begin_launch_of_words() {
    ++machine.launch;
    machine.global_writes.used = machine.global_reads.used = 0;
    machine.releases.clear();
}

// At a __syncthreads: what one thread has fenced, all know.
void tell_fences() {
    for (Fiber& each : machine.fibers) each.known_fence_epoch = each.fence_epoch, each.known_fenced_accesses = each.fenced_accesses;
}

}  // namespace

u8* global_access(u64 address, int bytes, Use use, const void* value, int line) {
    if (address % bytes) fail("line %d: an access of %d bytes to global memory at ..%04llx is not aligned", line, bytes, address & 0xffff);
    if (machine.is_bounded && !is_bounded(address, bytes)) fail("line %d: thread %u of block (%u, %u, %u): an access of %d bytes outside of all tensors", line, current->thread.x, current->block.x, current->block.y, current->block.z, bytes);
    auto* memory = reinterpret_cast<u8*>(address);
    if (use == TOUCHES) return memory;
    auto* self = static_cast<Fiber*>(current);
    access(memory, bytes, use != READS);
    if (use == TELLS) return memory;
    if (machine.blocks > 1) {
        const bool same = use == WRITES && memcmp(memory, value, bytes) == 0;
        if (use == COUNTS) count_at(self, address / 4);
        make_room(machine.global_writes), make_room(machine.global_reads);
        for (u64 first = address; first < address + bytes;) {
            const u64 end = address + bytes < (first / 4 + 1) * 4 ? address + bytes : (first / 4 + 1) * 4;
            access_global_word(self, first / 4, ((1u << (end - first)) - 1) << first % 4, use, same, line);
            first = end;
        }
    }
    if (machine.traffic) note_global(self, address, bytes, use != READS, line);
    return memory;
}

void fence_memory() {
    auto* self = static_cast<Fiber*>(current);
    for (Met& met : machine.met)
        if ((met.epoch < machine.epoch || met.thread == index_of(self)) && met.fenced > machine.epoch) met.fenced = machine.epoch;
    ++self->memory_fences, self->fence_epoch = machine.epoch, self->fenced_accesses = self->accesses;
}

}  // namespace lm
