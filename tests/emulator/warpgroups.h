// Part of emulator.cpp: products of warpgroups (wgmma.cuh).
//
// The 128 threads of a warpgroup meet at each product. Its sums are NaN until one of them waits for it. Its shared
// memory is read at the meeting or at the wait, at random. It is an error if registers of A have changed by then, if no
// wgmma_fence stands before the first product behind a wait, or if no barrier, with a fence_for_wgmma before it,
// stands between copies and a product.

namespace lm {
namespace {

u32 in_warpgroup(const Fiber* fiber) { return (fiber - machine.fibers.data()) % 128; }
Warpgroup& warpgroup_of(const Fiber* fiber) { return machine.warpgroups[(fiber - machine.fibers.data()) / 128]; }

float b_of(const Product& p, int k, int n) {
    u16 bits;
    memcpy(&bits, p.b.first + k / 8 * p.b.next_k + n / 8 * p.b.next_n + n % 8 * 16 + k % 8 * 2, 2);
    return p.to_float(bits);
}

void read_b(Product& p) {
    p.b_values.resize(16 * p.columns);
    for (int k = 0; k < 16; ++k)
        for (int n = 0; n < p.columns; ++n) p.b_values[k * p.columns + n] = b_of(p, k, n);
}

void carry_out(Product& p) {
    if (p.b_values.empty()) read_b(p);
    for (int thread = 0; thread < 128; ++thread) {
        const int row = thread / 32 * 16 + thread % 32 / 4, t = thread % 4;
        if (memcmp(p.a_registers[thread], p.a[thread], 16)) fail("line %d: registers of A have changed before wgmma was waited for", p.line);
        for (int i = 0; i < p.columns / 2; ++i) {
            const int r = row % 16 + (i >> 1 & 1) * 8, n = i / 4 * 8 + 2 * t + (i & 1);
            float sum = !p.add ? 0.0f : p.chained ? p.d[thread][i] : p.before[thread][i];
            for (int k = 0; k < 16; ++k) {  // register of the row: 8 k each; lane t' of it: 2 k
                const int owner = thread / 32 * 32 + r % 8 * 4 + k % 8 / 2;
                const u32 pair = p.a[owner][(r >= 8) + k / 8 * 2];
                sum += p.to_float(static_cast<u16>(pair >> (k % 2 * 16))) * p.b_values[k * p.columns + n];
            }
            p.result[thread][i] = sum;
        }
    }
    count_products(p.b, p.columns, -1);
    for (int thread = 0; thread < 128; ++thread) memcpy(p.d[thread], p.result[thread], 2 * p.columns);
}

}  // namespace

void warpgroup_fence() { static_cast<Fiber*>(current)->fenced = true; }
void warpgroup_commit() { ++static_cast<Fiber*>(current)->product_group; }

void warpgroup_multiply(float* d, int columns, const u32* a, SharedMatrix b, bool add, float (*to_float)(u16), int line) {
    auto* self = static_cast<Fiber*>(current);
    if (machine.fibers.size() % 128) fail("line %d: wgmma in a block that is not made of warpgroups", line);
    if (!self->fenced) fail("line %d: no wgmma_fence before wgmma", line);
    if (self->unmet_copies) fail("line %d: no barrier between copies and wgmma", line);
    if (self->unfenced_copies || machine.unfenced_copies) fail("line %d: wgmma and copies that were not fenced for it", line);
    Warpgroup& group = warpgroup_of(self);
    const u32 index = in_warpgroup(self);
    if (!group.arrived) group.products.emplace_back(), group.products.back().line = line;
    Product& p = group.products.back();
    if (p.line != line) fail("warps of a warpgroup meet at wgmma of line %d and of line %d", p.line, line);
    if (group.arrived && (p.b.first != b.first || p.b.next_k != b.next_k || p.b.next_n != b.next_n || p.add != add))
        fail("line %d: threads of a warpgroup give wgmma different operands", line);
    p.columns = columns, p.b = b, p.add = add, p.to_float = to_float, p.group = self->product_group;
    p.d[index] = d, p.a_registers[index] = machine.checks ? p.a[index] : a;  // PTX's registers are no places
    memcpy(p.a[index], a, 16);
    memcpy(p.before[index], d, 2 * columns);
    for (int i = 0; i < columns / 2; ++i) d[i] = NAN;
    if (++group.arrived < 128) {
        group.waiting.push_back(self);
        return wait(self, line);
    }
    check_products(b, columns, line);
    count_products(b, columns, 1);
    if (draw(2)) read_b(p);
    for (const Product& other : group.products) p.chained |= &other != &p && other.d[0] == p.d[0];
    group.arrived = 0;
    for (Fiber* fiber : group.waiting) wake(fiber);
    group.waiting.clear();
    wake(self);
    leave(self);
}

void warpgroup_wait(int pending) {
    auto* self = static_cast<Fiber*>(current);
    Warpgroup& group = warpgroup_of(self);
    while (!group.products.empty() && group.products.front().group < self->product_group - pending) {
        if (group.arrived && group.products.size() == 1) fail("thread %u waits for a product that others have not begun", self->thread.x);
        carry_out(group.products.front());
        group.products.pop_front();
    }
    self->fenced = false;
}

}  // namespace lm
