// Part of emulator.cpp: what each word of shared memory has seen, for translated PTX (ptx/runtime.h).
//
// An access must be aligned and within the bytes that the launch asked for. It is an error to read bytes that nothing
// has written since the block began (unless the kernel is known to read and drop some), and to touch a word that a copy still writes, or to write one that a product of a
// warpgroup still reads. Two accesses to the same bytes of which one writes are a race unless a __syncthreads stands
// between them, or, within a warp, a __syncwarp of both lanes. Shuffles, votes and products order nothing.

namespace lm {
namespace {

constexpr u16 SEVERAL = 0xffff;  // warps

u32 index_of(const Fiber* fiber) { return fiber - machine.fibers.data(); }

// Whether what another thread of this epoch did at its `clock` comes before what `self` does now.
bool is_ordered(const Fiber* self, u32 other, u32 clock) {
    return other / 32 == index_of(self) / 32 && machine.clocks[index_of(self)].of[other % 32] >= clock;
}

bool readers_are_ordered(const Fiber* self, const Word& word, u32 lanes) {
    for (; lanes; lanes &= lanes - 1)
        if (!is_ordered(self, word.read_warp * 32 + __builtin_ctz(lanes), word.read_clock)) return false;
    return true;
}

void fail_race(int line, const char* does, u64 at, u32 other, const char* did, int other_line) {
    fail("line %d: a race in shared memory: thread %u %s byte %llu, which thread %u %s at line %d, and no barrier stands between",
         line, index_of(static_cast<Fiber*>(current)), does, at, other, did, other_line);
}

void check_write(const Fiber* self, const Word& word, u8 bytes, u64 at, const char* does, bool counts, bool same, int line) {
    if (word.write_epoch == machine.epoch && word.write_bytes & bytes && word.write_thread != index_of(self) && !same &&
        !(counts && word.counts) && !is_ordered(self, word.write_thread, word.write_clock))
        fail_race(line, does, at, word.write_thread, "writes", word.write_line);
}

// The lanes of the warp that have read any of these bytes, but for this thread's.
u32 other_readers(const Fiber* self, const Word& word, u8 bytes) {
    u32 lanes = 0;
    for (int i = 0; i < 4; ++i) lanes |= bytes >> i & 1 ? word.read_lanes[i] : 0;
    return lanes & ~(word.read_warp == index_of(self) / 32 ? 1u << index_of(self) % 32 : 0);
}

void check_readers(const Fiber* self, const Word& word, u8 bytes, u64 at, int line) {
    if (word.read_epoch != machine.epoch || !(word.read_bytes & bytes)) return;
    const bool several = word.read_warp == SEVERAL;
    const u32 lanes = several ? 0 : other_readers(self, word, bytes);
    if (several || (lanes && (word.read_warp != index_of(self) / 32 || !readers_are_ordered(self, word, lanes))))
        fail_race(line, "writes", at, several ? 0 : word.read_warp * 32 + __builtin_ctz(lanes), "reads", word.read_line);
}

void note_read(const Fiber* self, Word& word, u8 bytes, int line) {
    const u32 me = index_of(self), clock = machine.clocks[me].of[me % 32];
    const bool first = word.read_epoch != machine.epoch;
    if (first || (word.read_warp == me / 32 && word.read_bytes == bytes && readers_are_ordered(self, word, other_readers(self, word, bytes)))) {
        word.read_epoch = machine.epoch, word.read_warp = me / 32, word.read_clock = clock, word.read_bytes = 0;
        for (u32& lanes : word.read_lanes) lanes = 0;
    } else if (word.read_warp != me / 32) {
        word.read_warp = SEVERAL;
    }
    word.read_bytes |= bytes, word.read_clock = clock > word.read_clock ? clock : word.read_clock, word.read_line = line;
    for (int i = 0; i < 4; ++i) word.read_lanes[i] |= bytes >> i & 1 ? 1u << me % 32 : 0;
}

void note_write(const Fiber* self, Word& word, u8 bytes, bool counts, int line) {
    const u32 me = index_of(self);
    if (word.block != machine.block_serial) word.block = machine.block_serial, word.written = 0;
    word.written |= bytes, word.write_bytes = bytes, word.counts = counts;
    word.write_epoch = machine.epoch, word.write_thread = me, word.write_clock = machine.clocks[me].of[me % 32];
    word.write_line = line, word.write_fences = self->fences;
}

void check_product(const Word& word, u64 at, int line) {
    const Fiber& writer = machine.fibers[word.write_thread];
    if (word.write_epoch == machine.epoch) fail("line %d: no barrier between the write of byte %llu at line %d and wgmma", line, at, word.write_line);
    if (writer.fences == word.write_fences) fail("line %d: wgmma and the write of byte %llu at line %d, which was not fenced for it", line, at, word.write_line);
}

void access_word(Fiber* self, Word& word, u8 bytes, u64 at, Use use, bool same, int line) {
    const bool writes = use == WRITES || use == COUNTS || use == COPIES;
    if (word.copies && word.block == machine.block_serial) fail("line %d: thread %u touches byte %llu, which the copy of line %d may still write", line, index_of(self), at, word.write_line);
    if (writes && word.products && word.block == machine.block_serial) fail("line %d: thread %u writes byte %llu, which a product still reads", line, index_of(self), at);
    if (!machine.is_padded && (use == READS || use == COUNTS || use == MULTIPLIES))
        if (word.block != machine.block_serial || bytes & ~word.written) fail("line %d: thread %u reads byte %llu of shared memory, which nothing has written", line, index_of(self), at);
    if (use == MULTIPLIES) return check_product(word, at, line);
    check_write(self, word, bytes, at, writes ? "writes" : "reads", use == COUNTS, same, line);
    if (writes && !same) check_readers(self, word, bytes, at, line);
    if (!writes) return note_read(self, word, bytes, line);
    note_write(self, word, bytes, use == COUNTS, line);
    if (use == COPIES) ++word.copies;
}

Word* words_at(const void* shared) { return machine.words.data() + (static_cast<const u8*>(shared) - current->shared) / 4; }

// A copy of this thread has landed: from now on it is a write like others.
void copied(const Fiber* self, const Copy& copy) {
    if (!machine.checks) return;
    for (Word* word = words_at(copy.to); word < words_at(copy.to) + copy.bytes / 4; ++word) {
        --word->copies;
        note_write(self, *word, 15, false, word->write_line);
    }
}

// All words of a product's matrix, eight columns and eight k at a time.
template <class Each>
void for_words(const SharedMatrix& b, int columns, Each each) {
    if (!machine.checks) return;
    for (int k = 0; k < 2; ++k)
        for (int n = 0; n < columns / 8; ++n)
            for (int i = 0; i < 32; ++i) each(words_at(b.first + k * b.next_k + n * b.next_n)[i]);
}

void check_products(const SharedMatrix& b, int columns, int line) {
    for_words(b, columns, [&](Word& word) { access_word(static_cast<Fiber*>(current), word, 15, 4 * (&word - machine.words.data()), MULTIPLIES, false, line); });
}

void count_products(const SharedMatrix& b, int columns, int change) {
    for_words(b, columns, [&](Word& word) { word.products += change; });
}

void begin_block_of_words() {
    ++machine.block_serial, ++machine.epoch;
    machine.met.clear();
    machine.words.resize((machine.shared_bytes + 3) / 4);
    machine.clocks.resize(machine.fibers.size());
    for (u32 i = 0; i < machine.clocks.size(); ++i) machine.clocks[i] = {}, machine.clocks[i].of[i % 32] = 1;
    for (Word& word : machine.words) word.copies = word.products = 0;
}

}  // namespace

u8* shared_access(u64 address, int bytes, Use use, const void* value, int line) {
    if (address % (bytes < 16 ? bytes : 16)) fail("line %d: an access of %d bytes to shared memory at byte %lld is not aligned", line, bytes, static_cast<i64>(address - SHARED_BASE));
    if (address < SHARED_BASE || address + bytes > SHARED_BASE + machine.shared_bytes)
        fail("line %d: an access of %d bytes at byte %lld of shared memory, which has %llu", line, bytes, static_cast<i64>(address - SHARED_BASE), machine.shared_bytes);
    const u64 at = address - SHARED_BASE;
    if (use == TOUCHES) return current->shared + at;
    u8* memory = current->shared + at;
    auto* self = static_cast<Fiber*>(current);
    const bool same = use == WRITES && memcmp(memory, value, bytes) == 0;
    for (u64 first = at; first < at + bytes;) {
        const u64 end = at + bytes < (first / 4 + 1) * 4 ? at + bytes : (first / 4 + 1) * 4;
        access_word(self, machine.words[first / 4], ((1u << (end - first)) - 1) << first % 4, first, use, same, line);
        first = end;
    }
    if (machine.traffic) note_shared(self, at, bytes, use != READS, line);
    return memory;
}

void warp_barrier(u32 mask, int line) {
    collective(mask, line, current, [](void** lanes) {
        Clocks all = {};
        u32 latest = 0;
        for (int i = 0; i < 32; ++i)
            if (lanes[i])
                for (int j = 0; j < 32; ++j) {
                    const u32 clock = machine.clocks[index_of(static_cast<Fiber*>(static_cast<Thread*>(lanes[i])))].of[j];
                    all.of[j] = clock > all.of[j] ? clock : all.of[j];
                }
        for (int i = 0; i < 32; ++i)
            if (lanes[i]) latest = all.of[i] > latest ? all.of[i] : latest;
        for (int i = 0; i < 32; ++i)
            if (lanes[i]) {
                Clocks& mine = machine.clocks[index_of(static_cast<Fiber*>(static_cast<Thread*>(lanes[i])))];
                mine = all, mine.of[i] = latest + 1;
            }
    });
}

u8* local_access(u64 address, int bytes, int line) {
    if (address % bytes) fail("line %d: an access of %d bytes to local memory is not aligned", line, bytes);
    if (!is_local(address) || !is_local(address + bytes - 1)) fail("line %d: an access of %d bytes outside of local memory", line, bytes);
    return reinterpret_cast<u8*>(address);
}

bool is_local(u64 address) {
    const auto stack = reinterpret_cast<u64>(stack_of(static_cast<Fiber*>(current)));
    return address - stack < STACK_BYTES;
}

void yield() {
    auto* self = static_cast<Fiber*>(current);
    if (machine.ready.empty()) usleep(20);
    wake(self);
    leave(self);
}

u64 nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

}  // namespace lm
