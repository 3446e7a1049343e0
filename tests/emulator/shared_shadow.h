// Part of emulator.cpp: what each byte of shared memory has seen, for translated PTX (ptx/runtime.h).
//
// An access must be aligned and within the bytes that the launch asked for. It is an error to read bytes that nothing
// has written since the block began (unless the kernel is known to read and drop some), and to touch a word that a copy
// still writes, or to write one that a product of a warpgroup still reads. Two accesses to a byte of which one writes
// are a race unless a __syncthreads stands between them, or, within a warp, a __syncwarp of both lanes. Shuffles, votes
// and products order nothing.

namespace lm {
namespace {

constexpr u16 SEVERAL = 0xffff;  // warps

u32 index_of(const Fiber* fiber) { return fiber - machine.fibers.data(); }

// Whether what another thread of this epoch did at its `clock` comes before what `self` does now.
bool is_ordered(const Fiber* self, u32 other, u32 clock) {
    return other / 32 == index_of(self) / 32 && machine.clocks[index_of(self)].of[other % 32] >= clock;
}

// The lanes of the warp that have read a byte, but for this thread's, which order nothing with it.
u32 unordered_readers(const Fiber* self, const Byte& byte) {
    const bool own = byte.read_warp == index_of(self) / 32;
    u32 lanes = byte.read_lanes & ~(own ? 1u << index_of(self) % 32 : 0), found = 0;
    for (; lanes; lanes &= lanes - 1)
        if (!own || !is_ordered(self, byte.read_warp * 32 + __builtin_ctz(lanes), byte.read_clock)) found |= lanes & -lanes;
    return found;
}

void fail_race(int line, const char* does, u64 at, u32 other, const char* did, int other_line) {
    fail("line %d: a race in shared memory: thread %u %s byte %llu, which thread %u %s at line %d, and no barrier stands between",
         line, index_of(static_cast<Fiber*>(current)), does, at, other, did, other_line);
}

void check_write(const Fiber* self, const Byte& byte, u64 at, const char* does, bool counts, int line) {
    if (byte.write_epoch == machine.epoch && byte.write_thread != index_of(self) && !(counts && byte.counts) && !is_ordered(self, byte.write_thread, byte.write_clock))
        fail_race(line, does, at, byte.write_thread, "writes", byte.write_line);
}

void check_readers(const Fiber* self, const Byte& byte, u64 at, int line) {
    if (byte.read_epoch != machine.epoch) return;
    const bool several = byte.read_warp == SEVERAL;
    const u32 lanes = several ? 1 : unordered_readers(self, byte);
    if (lanes) fail_race(line, "writes", at, several ? 0 : byte.read_warp * 32 + __builtin_ctz(lanes), "reads", byte.read_line);
}

// Readers that this thread comes behind are forgotten: who comes behind it comes behind them.
void note_read(const Fiber* self, Byte& byte, int line) {
    const u32 me = index_of(self), clock = machine.clocks[me].of[me % 32];
    byte.read_line = line;
    if (byte.read_epoch != machine.epoch || (byte.read_warp == me / 32 && !unordered_readers(self, byte))) {
        byte.read_epoch = machine.epoch, byte.read_warp = me / 32, byte.read_clock = clock, byte.read_lanes = 1u << me % 32;
        return;
    }
    if (byte.read_warp != me / 32) byte.read_warp = SEVERAL;
    byte.read_clock = std::max(clock, byte.read_clock), byte.read_lanes |= 1u << me % 32;
}

void note_write(const Fiber* self, Byte& byte, bool counts, int line) {
    const u32 me = index_of(self);
    byte.write_epoch = machine.epoch, byte.write_thread = me, byte.write_clock = machine.clocks[me].of[me % 32];
    byte.write_line = line, byte.write_fences = self->fences, byte.counts = counts;
}

void check_product(const Byte& byte, u64 at, int line) {
    const Fiber& writer = machine.fibers[byte.write_thread];
    if (byte.write_epoch == machine.epoch) fail("line %d: no barrier between the write of byte %llu at line %d and wgmma", line, at, byte.write_line);
    if (writer.fences == byte.write_fences) fail("line %d: wgmma and the write of byte %llu at line %d, which was not fenced for it", line, at, byte.write_line);
}

// `same`: it writes what is there.
void access_byte(Fiber* self, Byte& byte, u64 at, Use use, bool same, int line) {
    const bool writes = use == WRITES || use == COUNTS || use == COPIES;
    if (use == MULTIPLIES) return check_product(byte, at, line);
    if (!same) check_write(self, byte, at, writes ? "writes" : "reads", use == COUNTS, line);
    if (!writes) return note_read(self, byte, line);
    if (!same) check_readers(self, byte, at, line);
    note_write(self, byte, use == COUNTS, line);
}

// `bytes`: a bit for each that is touched, of the word at byte `at` of shared memory.
void access_word(Fiber* self, Word& word, u8 bytes, u64 at, Use use, bool same, int line) {
    const bool writes = use == WRITES || use == COUNTS || use == COPIES, is_new = word.block != machine.block_serial;
    if (is_new) word.block = machine.block_serial, word.written = 0, word.copies = word.products = 0;
    if (word.copies) fail("line %d: thread %u touches byte %llu, which the copy of line %d may still write", line, index_of(self), at, word.bytes[0].write_line);
    if (writes && word.products) fail("line %d: thread %u writes byte %llu, which a product still reads", line, index_of(self), at);
    if (!machine.is_padded && (use == READS || use == COUNTS || use == MULTIPLIES) && bytes & ~word.written)
        fail("line %d: thread %u reads byte %llu of shared memory, which nothing has written", line, index_of(self), at + __builtin_ctz(bytes & ~word.written));
    for (u32 left = bytes; left; left &= left - 1) access_byte(self, word.bytes[__builtin_ctz(left)], at + __builtin_ctz(left), use, same, line);
    if (writes) word.written |= bytes;
    if (use == COPIES) ++word.copies;
}

Word* words_at(const void* shared) { return machine.words.data() + (static_cast<const u8*>(shared) - current->shared) / 4; }

// A copy of this thread has landed: from now on it is a write like others.
void copied(const Fiber* self, const Copy& copy) {
    if (!machine.checks) return;
    for (Word* word = words_at(copy.to); word < words_at(copy.to) + copy.bytes / 4; ++word) {
        --word->copies;
        for (Byte& byte : word->bytes) note_write(self, byte, false, byte.write_line);
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
        access_word(self, machine.words[first / 4], ((1u << (end - first)) - 1) << first % 4, first / 4 * 4, use, same, line);
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
