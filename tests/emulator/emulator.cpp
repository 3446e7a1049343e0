// Runs a kernel on the CPU, a fiber for each CUDA thread: the other half of host.cuh. Blocks run one after the other, in
// random order, so a kernel may count blocks that have finished, but not wait for one. It may wait for the same block of
// another GPU, which is another thread or process, if blocks run in the same order there.
#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <map>
#include <memory>
#include <sys/mman.h>
#include <unistd.h>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "types.cuh"
#define DEVICE inline
#include LMKIT_HOST
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim
#undef shared_memory
#include <ptx/runtime.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define ASAN 1
#else
#define ASAN 0
#endif

// Keep what a callee must, leave the stack pointer in *save, go on with the other stack.
extern "C" void lm_switch(void** save, void* to);
asm(R"(
.text
.globl lm_switch
.type lm_switch, @function
lm_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
.size lm_switch, .-lm_switch
)");

namespace lm {
namespace {

constexpr size_t STACK_BYTES = 64 << 10;
constexpr int NUM_BARRIERS = 16;

enum State : u8 { READY, WAITING, DONE };

struct Copy { void* to; const void* from; int bytes, given, group; };

struct Fiber : Thread {
    void* stack_pointer;
    State state;
    int line;  // where it waits
    int group;  // of copies, the one that is open
    u32 flying, most_flying;  // bytes of copies that have not landed, and the most so far
    std::vector<Copy> copies;
    void* fake_stack;
    bool fenced, unfenced_copies, unmet_copies;  // for wgmma; the last: since the last barrier
    int product_group;  // of wgmma, the one that is open
    // of translated PTX: fences for wgmma, and of global memory
    u32 fences, accesses, memory_fences, fenced_accesses, known_fenced_accesses;
    u64 fence_epoch, known_fence_epoch;
    std::unordered_map<u32, u32> turns;  // how often it was at a place (traffic.h)
};

// ---- what accesses of translated PTX leave behind: shared_shadow.h, global_shadow.h, traffic.h
struct Byte {  // of shared memory: its last write, and its reads by a warp
    u64 write_epoch, read_epoch;  // barriers that all threads have passed until then; they begin at 1
    u32 write_clock, read_clock, read_lanes, write_fences;
    i32 write_line, read_line;
    u16 write_thread, read_warp;
    bool counts;  // the last write was an atomic
};

struct Word {
    Byte bytes[4];
    u32 block;  // whose `written` it is
    u16 copies, products;
    u8 written;  // a bit for each byte
};

// In which order the lanes of a warp have met at a __syncwarp: a vector clock for each.
struct Clocks { u32 of[32]; };

struct Touched {  // a word of global memory
    u64 key;  // the address / 4; of reads twice that, and one more for the second block that reads
    u64 epoch;
    u32 launch, block, count;  // count: of the accesses of its thread until then
    i32 line;
    u16 thread;
    u8 bytes;
    bool counts;
};

struct Table {  // by hash of the key
    std::vector<Touched> places;
    u64 used = 0;  // in this launch
};

// What another block can know of a block: all that was accessed before barrier `epoch`, and of each thread of it the
// first `counts` accesses.
struct Released { u32 block; u64 epoch; std::vector<u32> counts; };

// A release that this block has met, through an atomic of `thread`.
struct Met { std::shared_ptr<Released> released; u32 thread; u64 epoch; u32 fences; u64 fenced; };

struct Requests { u64 count, parts, least, bytes; };
struct RequestKey {
    u32 warp, place, turn;
    bool operator==(const RequestKey& other) const { return warp == other.warp && place == other.place && turn == other.turn; }
};
struct RequestHash {
    size_t operator()(const RequestKey& key) const { return ((static_cast<u64>(key.warp) << 32 | key.place) * 0x9e3779b97f4a7c15ull) ^ (key.turn * 0xc2b2ae3d27d4eb4full); }
};
struct Request { u64 at[32]; int bytes; u32 lanes; };

struct Product {  // of a warpgroup: warpgroups.h
    int line, columns, group;
    bool add, chained = false;
    SharedMatrix b;
    float (*to_float)(u16);
    float* d[128];
    const u32* a_registers[128];
    u32 a[128][4];
    float before[128][64], result[128][64];
    std::vector<float> b_values;
};

struct Warpgroup { int arrived = 0; std::vector<Fiber*> waiting; std::deque<Product> products; };

struct Barrier { int arrived, line; bool unfenced_copies; std::vector<Fiber*> waiting; };

struct Meeting {  // of lanes of a warp; several at a time if their masks have no lane in common
    u32 mask, arrived;
    int line;
    void* lanes[32];
};

struct Machine {
    std::vector<Fiber> fibers;
    std::vector<Fiber*> ready;
    std::vector<std::vector<Meeting>> meetings;  // by warp
    std::vector<Warpgroup> warpgroups;
    bool unfenced_copies;  // of a thread that has met others at a barrier
    Barrier barriers[NUM_BARRIERS];
    void (*kernel)(void**);
    void** args;
    u8* stacks = nullptr;
    size_t num_stacks = 0;
    void* main_stack_pointer;
    void* main_fake_stack;
    const void* main_bottom = nullptr;
    size_t main_bytes = 0;
    int alive;
    u64 random;
    bool failed;
    char message[512];
    bool watches;  // accesses before a wait
    u64 shared_bytes;
    u64 in_flight = 0;  // the most bytes that copies of a block have had in flight, each thread at its best time
    std::unordered_set<uintptr_t> asked;  // 16 bytes each that L2 was asked for and nothing has copied since
    u64 prefetched = 0;
    std::unordered_map<uintptr_t, u64> written;  // since the last barrier: a bit for each byte of 64
    u64 begin;  // of the launch, in nanoseconds
    bool checks = false, traffic = false, is_bounded = false, is_padded = false;  // of translated PTX
    u16 poison = 0x7fff;  // what shared memory holds at first: a NaN of all float types
    u64 epoch = 0;  // barriers of all threads, and beginnings of blocks, until now
    u32 block_serial = 0, launch = 0, blocks = 0;
    std::vector<Word> words;
    std::vector<Clocks> clocks;
    Table global_writes, global_reads;
    std::vector<Met> met;
    std::unordered_map<u64, std::vector<std::shared_ptr<Released>>> releases;  // by word
    std::vector<u64> bounds;  // begins and ends of tensors
    std::unordered_map<RequestKey, Request, RequestHash> requests;
    std::map<u32, Requests> traffic_of;  // by place

    ~Machine() { free_stacks(); }
    void free_stacks() {
        if (!stacks) return;
#if ASAN
        __asan_unpoison_memory_region(stacks, num_stacks * STACK_BYTES);  // for who gets it next
#endif
        munmap(stacks, num_stacks * STACK_BYTES);
    }
};

void begin_block_of_words();
void begin_launch_of_words();
void tell_fences();
void copied(const Fiber* self, const Copy& copy);
void check_products(const SharedMatrix& b, int columns, int line);
void count_products(const SharedMatrix& b, int columns, int change);
void note_shared(Fiber* self, u64 at, int bytes, bool writes, int line);
void note_global(Fiber* self, u64 address, int bytes, bool writes, int line);
void count_requests();

__thread Machine* of_thread;
#define machine (*of_thread)

// The GPU of this thread, made for its first call.
void open_machine() {
    static thread_local std::unique_ptr<Machine> owner;
    if (!owner) owner = std::make_unique<Machine>(), of_thread = owner.get();
}

u32 draw(u32 below) {  // xorshift64*
    u64& x = machine.random;
    x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
    return static_cast<u32>((x * 0x2545f4914f6cdd1dull >> 32) * below >> 32);
}

u8* stack_of(const Fiber* fiber) { return machine.stacks + (fiber - machine.fibers.data()) * STACK_BYTES; }

void go(void** save, void** fake, Fiber* to) {
#if ASAN
    if (to)
        __sanitizer_start_switch_fiber(fake, stack_of(to), STACK_BYTES);
    else
        __sanitizer_start_switch_fiber(fake, machine.main_bottom, machine.main_bytes);
#endif
    if (to) current = to;
    lm_switch(save, to ? to->stack_pointer : machine.main_stack_pointer);
}

void arrived_here(void* fake) {
#if ASAN
    const void* bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(fake, &bottom, &bytes);
    if (!machine.main_bottom) machine.main_bottom = bottom, machine.main_bytes = bytes;
#endif
}

void leave(Fiber* self) {
    if (machine.failed || machine.ready.empty()) {
        if (!machine.failed && machine.alive) {
            machine.failed = true;
            int length = snprintf(machine.message, sizeof machine.message, "threads wait for ever:");
            int shown = 0;
            for (const Fiber& f : machine.fibers)
                if (f.state == WAITING && shown++ < 6)
                    length += snprintf(machine.message + length, sizeof machine.message - length, " %u at line %d;", f.thread.x, f.line);
        }
        go(&self->stack_pointer, self->state == DONE ? nullptr : &self->fake_stack, nullptr);
    } else {
        const u32 pick = draw(machine.ready.size());
        Fiber* next = machine.ready[pick];
        machine.ready[pick] = machine.ready.back();
        machine.ready.pop_back();
        if (next == self) return;
        go(&self->stack_pointer, self->state == DONE ? nullptr : &self->fake_stack, next);
    }
    arrived_here(self->fake_stack);
}

void wait(Fiber* self, int line) {
    self->state = WAITING;
    self->line = line;
    leave(self);
}

void wake(Fiber* fiber) {
    fiber->state = READY;
    machine.ready.push_back(fiber);
}

void release(Barrier& barrier) {
    for (Fiber* fiber : barrier.waiting) wake(fiber);
    barrier.waiting.clear();
    barrier.arrived = 0;
    machine.unfenced_copies |= std::exchange(barrier.unfenced_copies, false);
    if (&barrier == machine.barriers) ++machine.epoch;
    if (machine.checks) tell_fences();
}

void run_fiber() {
    auto* self = static_cast<Fiber*>(current);
    arrived_here(nullptr);
    machine.kernel(machine.args);
    if (!self->copies.empty() && !machine.failed) {
        machine.failed = true;
        snprintf(machine.message, sizeof machine.message, "thread %u ended with %zu copies that nobody waited for", self->thread.x, self->copies.size());
    }
    if (!machine.warpgroups[(self - machine.fibers.data()) / 128].products.empty() && !machine.failed) {
        machine.failed = true;
        snprintf(machine.message, sizeof machine.message, "thread %u ended with products that nobody waited for", self->thread.x);
    }
    if (machine.watches && !self->waited && !machine.failed) {
        machine.failed = true;
        snprintf(machine.message, sizeof machine.message, "thread %u of block (%u, %u, %u) ended and did not wait for the kernel before", self->thread.x, self->block.x, self->block.y, self->block.z);
    }
    self->state = DONE;
    --machine.alive;
    Barrier& all = machine.barriers[0];  // threads that have ended are not waited for
    if (machine.alive && all.arrived == machine.alive) release(all);
    leave(self);
    abort();
}

void run_block(Index block, Index block_size, Index grid_size, u8* shared) {
    const int count = machine.fibers.size();
    machine.alive = count;
    machine.ready.clear();
    for (auto& meetings : machine.meetings) meetings.clear();
    for (Warpgroup& group : machine.warpgroups) group = {};
    machine.unfenced_copies = false;
    for (Barrier& barrier : machine.barriers) barrier = {};
    for (int i = 0; i < count; ++i) {
        Fiber& fiber = machine.fibers[i];
        static_cast<Thread&>(fiber) = {{i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y}, block, block_size, grid_size, shared, false};
#if ASAN
        __asan_unpoison_memory_region(stack_of(&fiber), STACK_BYTES);  // the last fiber here never returned
#endif
        void** top = reinterpret_cast<void**>(stack_of(&fiber) + STACK_BYTES);
        *--top = nullptr;
        *--top = reinterpret_cast<void*>(run_fiber);
        for (int r = 0; r < 6; ++r) *--top = nullptr;
        fiber.stack_pointer = top;
        fiber.copies.clear();
        fiber.group = fiber.product_group = 0;
        fiber.flying = fiber.most_flying = 0;
        fiber.fenced = fiber.unfenced_copies = fiber.unmet_copies = false;
        fiber.fake_stack = nullptr;
        fiber.fences = fiber.accesses = fiber.memory_fences = fiber.fenced_accesses = fiber.known_fenced_accesses = 0;
        fiber.fence_epoch = fiber.known_fence_epoch = 0;
        if (machine.traffic) fiber.turns.clear();
        wake(&fiber);
    }
    if (machine.checks) begin_block_of_words();
    const u32 pick = draw(count);
    Fiber* first = machine.ready[pick];
    machine.ready[pick] = machine.ready.back();
    machine.ready.pop_back();
    go(&machine.main_stack_pointer, &machine.main_fake_stack, first);
    arrived_here(machine.main_fake_stack);
}

}  // namespace

__thread Thread* current;

void fail(const char* format, ...) {
    if (!machine.failed) {
        va_list args;
        va_start(args, format);
        vsnprintf(machine.message, sizeof machine.message, format, args);
        va_end(args);
        machine.failed = true;
    }
    leave(static_cast<Fiber*>(current));
    abort();
}

void barrier(int id, int count, int line) {
    auto* self = static_cast<Fiber*>(current);
    Barrier& barrier = machine.barriers[id];
    barrier.unfenced_copies |= self->unfenced_copies;
    self->unmet_copies = false;
    if (barrier.arrived && barrier.line != line && id == 0) fail("__syncthreads of line %d and of line %d meet", barrier.line, line);
    barrier.line = line;
    if (++barrier.arrived == (count ? count : machine.alive)) {
        release(barrier);
        wake(self);
        leave(self);
    } else {
        barrier.waiting.push_back(self);
        wait(self, line);
    }
}

void collective(u32 mask, int line, void* mine, void (*op)(void** lanes)) {
    auto* self = static_cast<Fiber*>(current);
    const int index = self - machine.fibers.data(), lane = index & 31;
    auto& meetings = machine.meetings[index >> 5];
    if (!(mask >> lane & 1)) fail("line %d: lane %d is not in its own mask %08x", line, lane, mask);
    size_t at = 0;
    while (at < meetings.size() && !(meetings[at].mask & mask)) ++at;
    if (at == meetings.size()) meetings.push_back({mask, 0, line, {}});
    Meeting& meeting = meetings[at];
    if (meeting.mask != mask || meeting.line != line)
        fail("lanes of a warp meet at line %d (mask %08x) and at line %d (mask %08x)", meeting.line, meeting.mask, line, mask);
    meeting.arrived |= 1u << lane;
    meeting.lanes[lane] = mine;
    if (meeting.arrived != mask) return wait(self, line);
    Meeting whole = meeting;
    meetings.erase(meetings.begin() + at);
    if (op) op(whole.lanes);
    for (int i = 0; i < 32; ++i)
        if ((mask >> i & 1) && i != lane) wake(&machine.fibers[(index & ~31) + i]);
    wake(self);
    leave(self);
}

void wait_for_previous() { current->waited = true; }

void access(const void* pointer, int bytes, bool writes);

void store_release(u32* p, u32 value) {
    access(p, 4, true);
    __atomic_store_n(p, value, __ATOMIC_RELEASE);
}

void wait_for_peer(const u32* flag, u32 value, u32* lost, u64 limit) {
    auto* self = static_cast<Fiber*>(current);
    while (static_cast<i32>(__atomic_load_n(flag, __ATOMIC_ACQUIRE) - value) < 0) {
        if (__atomic_load_n(lost, __ATOMIC_ACQUIRE)) return;
        if (nanoseconds() - machine.begin > limit) return __atomic_store_n(lost, 1, __ATOMIC_RELEASE);
        if (machine.ready.empty()) usleep(20);
        wake(self);
        leave(self);
    }
}

// Memory that threads share. The rest is a thread's own: its stack, and shared memory, which a block owns.
bool is_global(uintptr_t address) {
    const auto stacks = reinterpret_cast<uintptr_t>(machine.stacks), shared = reinterpret_cast<uintptr_t>(current->shared);
    return address - stacks >= machine.num_stacks * STACK_BYTES && address - shared >= machine.shared_bytes;
}

u64 bits_of(uintptr_t address, int bytes) { return (bytes >= 64 ? ~0ull : (1ull << bytes) - 1) << address % 64; }

// An access of at most 16 bytes. It may lie in two lines of 64.
void access(const void* pointer, int bytes, bool writes) {
    auto address = reinterpret_cast<uintptr_t>(pointer);
    if (!machine.watches || machine.failed || !current || !is_global(address)) return;
    const int here = bytes < 64 - static_cast<int>(address % 64) ? bytes : 64 - static_cast<int>(address % 64);
    if (bytes > here) access(static_cast<const u8*>(pointer) + here, bytes - here, writes);
    if (writes) {
        if (!current->waited) fail("thread %u writes before it has waited for the kernel before", current->thread.x);
        machine.written[address / 64] |= bits_of(address, here);
    } else if (!current->waited) {
        const auto found = machine.written.find(address / 64);
        if (found != machine.written.end() && found->second & bits_of(address, here))
            fail("thread %u reads what an earlier kernel writes, and has not waited for it", current->thread.x);
    }
}

// `given` bytes are read, and the others become zeros.
void copy_later(void* shared, const void* global, int bytes, int given) {
    auto* self = static_cast<Fiber*>(current);
    if (given) access(global, given, false);
    if (given && !machine.asked.empty()) machine.asked.erase(reinterpret_cast<uintptr_t>(global));
    if (reinterpret_cast<uintptr_t>(shared) % bytes || (given && reinterpret_cast<uintptr_t>(global) % bytes)) fail("cp.async of %d bytes is not aligned", bytes);
    self->copies.push_back({shared, global, bytes, given, self->group});
    self->flying += given;
    self->most_flying = std::max(self->most_flying, self->flying);
}

// Touches the bytes, which must exist. `lm_prefetched` counts them, `lm_asked` those that nothing has copied since.
void prefetch(const void* global, int bytes) {
    if (bytes <= 0 || bytes % 16 || reinterpret_cast<uintptr_t>(global) % 16) fail("a prefetch of %d bytes is not aligned", bytes);
    for (int i = 0; i < bytes; i += 16) {
        access(static_cast<const u8*>(global) + i, 16, false);
        (void)static_cast<const volatile u8*>(global)[i];
        if (!machine.asked.insert(reinterpret_cast<uintptr_t>(global) + i).second) fail("L2 is asked for the same bytes again");
        machine.prefetched += 16;
    }
}

void commit_copies() { ++static_cast<Fiber*>(current)->group; }

void wait_copies(int groups) {
    auto* self = static_cast<Fiber*>(current);
    std::vector<Copy> later, now;
    for (const Copy& copy : self->copies) (copy.group < self->group - groups ? now : later).push_back(copy);
    self->copies = later;
    if (!now.empty()) self->unfenced_copies = self->unmet_copies = true;
    while (!now.empty()) {
        const u32 pick = draw(now.size());
        memset(now[pick].to, 0, now[pick].bytes);
        if (now[pick].given) memcpy(now[pick].to, now[pick].from, now[pick].given);
        copied(self, now[pick]);
        self->flying -= now[pick].given;
        now[pick] = now.back();
        now.pop_back();
    }
}

void fence_copies() {
    auto* self = static_cast<Fiber*>(current);
    self->unfenced_copies = false, ++self->fences;
}

}  // namespace lm

#include <warpgroups.h>
#include <shared_shadow.h>
#include <global_shadow.h>
#include <traffic.h>

// What g++ calls before each access of a kernel that is compiled with -fsanitize=thread.
#define ACCESS(bytes)                                                                            \
    extern "C" void __tsan_read##bytes(void* p) { lm::access(p, bytes, false); }                 \
    extern "C" void __tsan_write##bytes(void* p) { lm::access(p, bytes, true); }                 \
    extern "C" void __tsan_unaligned_read##bytes(void* p) { lm::access(p, bytes, false); }       \
    extern "C" void __tsan_unaligned_write##bytes(void* p) { lm::access(p, bytes, true); }       \
    extern "C" void __tsan_volatile_read##bytes(void* p) { lm::access(p, bytes, false); }        \
    extern "C" void __tsan_volatile_write##bytes(void* p) { lm::access(p, bytes, true); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
extern "C" void __tsan_read_range(void* p, u64 n) { for (u64 i = 0; i < n; ++i) lm::access(static_cast<u8*>(p) + i, 1, false); }
extern "C" void __tsan_write_range(void* p, u64 n) { for (u64 i = 0; i < n; ++i) lm::access(static_cast<u8*>(p) + i, 1, true); }
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}

// What has been written is visible to every later kernel: a copy, or a kernel that begins at the end of all others.
extern "C" u64 lm_asked() { return lm::open_machine(), 16 * std::exchange(lm::of_thread->asked, {}).size(); }
extern "C" u64 lm_prefetched() { return lm::open_machine(), std::exchange(lm::of_thread->prefetched, 0); }
extern "C" void lm_barrier() { lm::open_machine(), lm::of_thread->written.clear(); }

// A tensor is gone: what lies there next is another one, which no kernel has written yet.
extern "C" void lm_forget(uintptr_t first, u64 bytes) {
    lm::open_machine();
    for (uintptr_t at = first, next; at < first + bytes; at = next) {
        next = std::min<uintptr_t>((at / 64 + 1) * 64, first + bytes);
        const auto found = lm::of_thread->written.find(at / 64);
        if (found != lm::of_thread->written.end()) found->second &= ~lm::bits_of(at, next - at);
    }
}

// The next launch is of translated PTX, whose accesses are checked. `bounds`: `count` times the begin and the end of a
// tensor's memory. Unless `is_bounded`, it may also follow addresses that lie in memory. If `is_padded`, it may read
// shared memory that nothing has written, which holds `poison`.
extern "C" void lm_check(const u64* bounds, u64 count, bool is_bounded, bool is_padded, bool traffic, u32 poison) {
    using namespace lm;
    open_machine();
    machine.checks = true, machine.is_bounded = is_bounded, machine.is_padded = is_padded, machine.traffic = traffic;
    machine.poison = static_cast<u16>(poison);
    machine.bounds.assign(bounds, bounds + 2 * count);
}

// Carry out a launch; on an error, false and its text in `message`.
extern "C" bool lm_launch(void (*kernel)(void**), void** args, const u32* grid, const u32* block, u64 shared_bytes, u64 order_seed, u64 seed, bool watches, char* message, u64 size) {
    using namespace lm;
    open_machine();
    machine.begin = nanoseconds();
    machine.watches = watches, machine.shared_bytes = shared_bytes;
    machine.blocks = grid[0] * grid[1] * grid[2];
    const u32 count = block[0] * block[1] * block[2];
    machine.kernel = kernel, machine.args = args, machine.failed = false, machine.random = order_seed * 2 + 1;
    machine.fibers.resize(count);
    machine.meetings.resize((count + 31) / 32);
    machine.warpgroups.resize((count + 127) / 128);
    if (machine.num_stacks < count) {
        machine.free_stacks();
        machine.stacks = static_cast<u8*>(mmap(nullptr, count * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        machine.num_stacks = count;
    }
    std::vector<u32> order(grid[0] * grid[1] * grid[2]);
    for (u32 i = 0; i < order.size(); ++i) order[i] = i;
    for (u32 i = order.size(); i > 1; --i) std::swap(order[i - 1], order[draw(i)]);
    machine.random = seed * 2 + 1;
    void* memory = nullptr;
    if (posix_memalign(&memory, 128, shared_bytes)) abort();
    auto* shared = static_cast<u8*>(memory);  // not a byte more than was asked for
    if (machine.checks) begin_launch_of_words();
    for (u32 at : order) {
        for (u64 i = 0; i < shared_bytes; ++i) shared[i] = static_cast<u8>(machine.poison >> i % 2 * 8);
        run_block({at % grid[0], at / grid[0] % grid[1], at / grid[0] / grid[1]}, {block[0], block[1], block[2]}, {grid[0], grid[1], grid[2]}, shared);
        if (machine.traffic) count_requests();
        if (machine.failed) break;
    }
    free(shared);
    machine.watches = machine.checks = machine.traffic = false, machine.poison = 0x7fff;
    if (machine.failed) snprintf(message, size, "%s", machine.message);
    return !machine.failed;
}
