// Part of emulator.cpp: accesses of translated PTX to global memory (ptx/runtime.h).
//
// An access must be aligned and within the memory of a tensor that the launch was given, unless the launch follows
// addresses that lie in memory. It is a race if a block reads or writes what another block of this launch wrote, other
// than the same bytes again, unless that block's write, its __threadfence, its atomic, this block's atomic on the same
// word, its __threadfence and this access follow each other. Blocks run one after the other in random order, so of a
// race in which each reads or writes once, one order of two is seen.

namespace lm {
namespace {

u32 block_index(const Thread* t) { return (t->block.z * t->grid_size.y + t->block.y) * t->grid_size.x + t->block.x; }

Written& written_at(u64 word) {
    auto& table = machine.global;
    u64 at = (word / 8 * 0x9e3779b97f4a7c15ull >> 20) + word % 8;
    for (;; ++at) {
        Written& found = table[at & (table.size() - 1)];
        if (found.launch != machine.launch || found.word == word) return found;
    }
}

void grow_global() {
    std::vector<Written> before = std::move(machine.global);
    machine.global.assign(before.empty() ? 1 << 12 : 2 * before.size(), {});
    for (const Written& each : before)
        if (each.launch == machine.launch && machine.launch) written_at(each.word) = each;
}

bool is_released(const Released& released, const Written& write) {
    return write.epoch < released.epoch || write.count <= released.counts[write.thread];
}

bool is_known(const Fiber* self, const Written& write) {
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
        mine->counts[i] = is_self ? each.fenced_writes : each.known_fenced_writes;
    }
    releases.push_back(mine);
}

void access_global_word(Fiber* self, u64 word, u8 bytes, Use use, bool same, int line) {
    Written& found = written_at(word);
    const u32 block = block_index(self);
    const bool is_new = found.launch != machine.launch, overlaps = !is_new && found.bytes & bytes;
    if (overlaps && found.block != block && !same && !(use == COUNTS && found.counts) && !is_known(self, found))
        fail("line %d: a race between blocks: block %u %s what block %u wrote at line %d", line, block, use == READS ? "reads" : "writes", found.block, found.line);
    if (use == READS) return;
    if (is_new) ++machine.global_words;
    const u8 all = overlaps || (!is_new && found.block == block) ? found.bytes | bytes : bytes;
    found = {word, machine.epoch, machine.launch, block, ++self->writes, line, static_cast<u16>(index_of(self)), all, use == COUNTS};
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
    machine.global_words = 0;
    machine.releases.clear();
    if (machine.global.empty()) grow_global();
}

// At a __syncthreads: what one thread has fenced, all know.
void tell_fences() {
    for (Fiber& each : machine.fibers) each.known_fence_epoch = each.fence_epoch, each.known_fenced_writes = each.fenced_writes;
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
        while (2 * (machine.global_words + 4) > machine.global.size()) grow_global();
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
    ++self->memory_fences, self->fence_epoch = machine.epoch, self->fenced_writes = self->writes;
}

}  // namespace lm
