// From logits to tokens, without a sort and without the host: argmax, draws (lmkit.kernels.ops.draw) and
// log-probabilities. A draw is two kernels of several blocks a row: `peaks` finds the greatest logit of each chunk of
// the row, `sample` adds up the weights, and the last block of a row draws. A chunk depends on the vocabulary alone, so
// that the blocks of a row change nothing.
//
// Weights, relative to the most likely token's, are computed in float64 and rounded to integers. The unit is chosen so
// that the row's weights add up to about 2^61, for any distribution. Integer sums do not depend on the order, so a
// row's token depends on the row alone, and atomics in shared memory may add the weights. Top-k and top-p are exact,
// without rejection: the tokens are the CPU sampler's. Both need the least logit that is kept, and the number of its
// equals that are kept. A radix selection finds them in three passes, over 11, 11 and 10 bits of the logits:
//
//   bins of 11 bits of the logit  [0 ............ b ..... 2047]   the count (top-k) or the weight (top-p) of each;
//   b is the bin where the sum from the right reaches the wanted amount; the next pass covers the tokens of bin b only
//
// Before that, a bound on the logits excludes tokens that cannot be kept: some thousand tokens are binned, not the
// vocabulary. At the end the vocabulary is cut into THREADS segments of ids. A search finds the segment, then the
// token, at which the kept weights exceed the row's share of their total.
//
// A GPU's exp and the CPU's differ in the last of 53 bits, and the CPU's sums are rounded. The token differs if the
// share falls between the two. Both effects together, for 152k tokens of any spread: once in 10^9 draws at the worst.
// If unequal logits have equal float64 weights (they differ by less than 10^-16 temperatures), top-p takes the
// greater logit, not the lower id.
#include "slot.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32, BINS = 2048;
constexpr int MOST_CHUNKS = 16, CHUNK_TOKENS = 4096;
constexpr u32 FULL = 0xffffffffu, NONE = 0xffffffffu;

struct Shared {
    u32 low[BINS], high[BINS];  // 64-bit sums of the bins, as halves: an addition of 32 bits is one instruction
    u64 segment[THREADS];
    u64 warp[WARPS];
    u64 before;
    u32 found, count;
};

DEVICE Shared& shared() { return *reinterpret_cast<Shared*>(shared_memory); }

struct Row {
    const float* logits;
    int vocab;
};

// f(logit, id) for the ids from `begin` to `end`, by SIZE threads. `rank` is this thread; its ids ascend.
// BATCH x 16 bytes are in flight at a time, so that a pass waits only for memory.
template <int SIZE, int BATCH, class F>
DEVICE void for_each(Row row, int begin, int end, int rank, F f) {
    const int misplaced = reinterpret_cast<u64>(row.logits + begin) / 4 % 4;
    for (int at = begin - misplaced + 4 * rank; at < end; at += 4 * SIZE * BATCH) {
        float4 x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int id = at + 4 * SIZE * i;
            const auto one = [&](int k) { return begin <= id + k && id + k < end ? row.logits[id + k] : 0.0f; };
            if (begin <= id && id + 4 <= end)
                x[i] = *reinterpret_cast<const float4*>(row.logits + id);
            else
                x[i] = make_float4(one(0), one(1), one(2), one(3));
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int id = at + 4 * SIZE * i;
            const auto take = [&](float value, int id) {
                if (begin <= id && id < end) f(value, id);
            };
            take(x[i].x, id), take(x[i].y, id + 1), take(x[i].z, id + 2), take(x[i].w, id + 3);
        }
    }
}

template <int BATCH, class F>
DEVICE void for_all(Row row, F f) { for_each<THREADS, BATCH>(row, 0, row.vocab, threadIdx.x, f); }

// ---- of a block

struct Sum { DEVICE u64 operator()(u64 a, u64 b) const { return a + b; } };
struct Least { DEVICE u64 operator()(u64 a, u64 b) const { return b < a ? b : a; } };
struct Greatest { DEVICE u64 operator()(u64 a, u64 b) const { return a < b ? b : a; } };

template <class Op>
DEVICE u64 warp_reduce(u64 x, Op op) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x = op(x, __shfl_xor_sync(FULL, x, step));
    return x;
}

template <class Op>
DEVICE u64 block_reduce(u64 x, Op op) {
    Shared& s = shared();
    x = warp_reduce(x, op);
    __syncthreads();
    if (lane_id() == 0) s.warp[warp_id()] = x;
    __syncthreads();
    x = s.warp[0];
    for (int i = 1; i < WARPS; ++i) x = op(x, s.warp[i]);
    return x;
}

DEVICE u64 warp_scan(u64 x) {
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const u64 other = __shfl_up_sync(FULL, x, step);
        if (lane_id() >= step) x += other;
    }
    return x;
}

// The sum of this thread's x and those of the threads before it.
DEVICE u64 block_scan(u64 x) {
    Shared& s = shared();
    x = warp_scan(x);
    __syncthreads();
    if (lane_id() == 31) s.warp[warp_id()] = x;
    __syncthreads();
    for (int i = 0; i < warp_id(); ++i) x += s.warp[i];
    return x;
}

// ---- logits

DEVICE float infinity() { return __uint_as_float(0x7f800000u); }

// Numbers in the order of the floats. -0 and 0 are equal.
DEVICE u32 order(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits ^ (static_cast<i32>(bits) < 0 ? 0xffffffffu : 0x80000000u);
}

DEVICE float unorder(u32 key) { return __uint_as_float(key ^ (key & 0x80000000u ? 0x80000000u : 0xffffffffu)); }

// The greatest wins; of equal logits the lower id wins.
DEVICE u64 ranked(float x, int id) { return static_cast<u64>(order(x)) << 32 | static_cast<u32>(~id); }
DEVICE float value_of(u64 rank) { return unorder(static_cast<u32>(rank >> 32)); }
DEVICE int id_of(u64 rank) { return static_cast<int>(~static_cast<u32>(rank)); }
DEVICE bool is_usable(float top) { return top < infinity() && top > -infinity(); }

struct Peak {
    float top;  // not finite: the row is unusable
    int id;
    u64 bound;  // the weights' total is below this / 2^19
};

// Of a part of a row.
struct Part {
    u64 best;   // ranked
    u64 total;  // of the weights relative to it, about, times 2^19
    u32 own;    // order of the greatest logit that this thread has seen; 0 = none
};

// In one pass: the greatest logit, and the approximate sum of all weights relative to it (online softmax).
// octaves: 1 / (temperature ln 2)
DEVICE Part find_part(Row row, int begin, int end, float octaves) {
    float top = -infinity(), weight = 0.0f;
    int id = row.vocab;
    for_each<THREADS, 4>(row, begin, end, threadIdx.x, [&](float x, int at) {
        if (!(x < infinity())) x = infinity();
        if (x > top) {
            weight = weight * ex2((top - x) * octaves) + 1.0f;
            top = x, id = at;
        } else if (x > -infinity()) {
            weight += ex2((x - top) * octaves);
        }
    });
    Part part{block_reduce(ranked(top, id), Greatest{}), 0, top > -infinity() ? order(top) : 0};
    const float best = value_of(part.best);
    if (!is_usable(best)) return part;
    const float relative = top > -infinity() ? weight * ex2((top - best) * octaves) : 0.0f;
    part.total = block_reduce(static_cast<u64>(relative * 524288.0f) + 1, Sum{});
    return part;
}

// At least THREADS tokens are ordered this high (0 if there are fewer tokens). own: the greatest that a thread has seen.
DEVICE u32 find_floor(u32 own) { return static_cast<u32>(block_reduce(own, Least{})); }

// ---- weights

struct Weights {
    double inverse;  // of the temperature
    double scale;  // the weight of the most likely token: a power of two
    float top, octaves;

    // At most 1. Weights below 2^-64, far less than the integers' unit, become 2^-64, or 0 if float64 cannot hold them.
    DEVICE double relative(float x) const {
        if (x == top) return 1.0;
        const float distance = (top - x) * octaves;
        if (!(distance < 64.0f)) return distance < 1074.0f ? 0x1p-64 : 0.0;
        return exp((static_cast<double>(x) - top) * inverse);
    }
    DEVICE u64 integer(double weight) const { return static_cast<u64>(weight * scale + 0.5); }
    DEVICE u64 operator()(float x) const { return integer(relative(x)); }
};

DEVICE float octaves_of(double temperature) { return static_cast<float>(fmin(1.4426950408889634 / temperature, 1e30)); }

DEVICE Weights weights_of(const Peak& peak, double temperature) {
    const u64 bound = peak.bound + (peak.bound >> 5) + 1;  // float32 sums are more accurate than that
    const i64 exponent = (__double_as_longlong(static_cast<double>(bound)) >> 52) - 1023 + 1 - 19;
    return {1.0 / temperature, __longlong_as_double((1023 + 62 - exponent) << 52), peak.top, octaves_of(temperature)};
}

// ---- selection

// The tokens above `least`, and those of its equals with ids up to `last`.
struct Kept {
    u32 least;
    int last;
    DEVICE bool has(u32 key, int id) const { return key > least || (key == least && id <= last); }
};

// A row's values by id, in segments: `own` is thread t's sum, `before` the sum before it.
struct Segments {
    u64 before, own, total;
};

DEVICE int segment_size(int vocab) { return ((vocab + THREADS - 1) / THREADS + 31) & ~31; }

// The sum of each segment is with its thread.
DEVICE Segments segments(u64 own) {
    Shared& s = shared();
    const u64 sums = block_scan(own);
    __syncthreads();
    if (threadIdx.x == THREADS - 1) s.before = sums;
    __syncthreads();
    return {sums - own, own, s.before};
}

// value(x, id) is a token's value.
template <class F>
DEVICE Segments add_up(Row row, F value) {
    Shared& s = shared();
    const int size = segment_size(row.vocab);
    __syncthreads();
    s.segment[threadIdx.x] = 0;
    __syncthreads();
    for (int segment = warp_id(); segment * size < row.vocab; segment += WARPS) {
        const int end = min(row.vocab, (segment + 1) * size);
        u64 sum = 0;
        for_each<32, 1>(row, segment * size, end, lane_id(), [&](float x, int id) { sum += value(x, id); });
        sum = warp_reduce(sum, Sum{});
        if (lane_id() == 0) s.segment[segment] = sum;
    }
    __syncthreads();
    return segments(s.segment[threadIdx.x]);
}

// The first id at which the values of it and of lower ids add up to more than `target`, which is below their total.
template <class F>
DEVICE int find_crossing(Row row, F value, Segments sums, u64 target) {
    Shared& s = shared();
    __syncthreads();
    if (sums.before <= target && target - sums.before < sums.own) s.found = threadIdx.x, s.before = sums.before;
    __syncthreads();
    const int size = segment_size(row.vocab), first = s.found * size, end = min(row.vocab, first + size);
    u64 before = s.before;
    __syncthreads();
    if (warp_id() == 0)
        for (int base = first; base < end; base += 32) {
            const int id = base + lane_id();
            const u64 sum = before + warp_scan(id < end ? value(row.logits[id], id) : 0);
            const u32 beyond = __ballot_sync(FULL, sum > target);
            if (beyond) {
                if (lane_id() == 0) s.found = base + __ffs(beyond) - 1;
                break;
            }
            before = __shfl_sync(FULL, sum, 31);
        }
    __syncthreads();
    return s.found;
}

DEVICE void add_to_bin(u32 bin, u64 x) {
    Shared& s = shared();
    const u32 low = static_cast<u32>(x), before = atomicAdd(&s.low[bin], low);
    const u32 high = static_cast<u32>(x >> 32) + (before + low < before);
    if (high) atomicAdd(&s.high[bin], high);
}

DEVICE u64 of_bin(int bin) { return static_cast<u64>(shared().high[bin]) << 32 | shared().low[bin]; }

// The greatest bin at which it and the bins above reach `need`, or NONE. `before` is the sum of the bins above.
DEVICE u32 find_bin(u64 need, u64& before) {
    constexpr int EACH = BINS / THREADS;
    Shared& s = shared();
    const int first = BINS - 1 - EACH * threadIdx.x;
    u64 own = 0;
    for (int i = 0; i < EACH; ++i) own += of_bin(first - i);
    if (threadIdx.x == 0) s.found = NONE;
    u64 sum = block_scan(own) - own;
    if (sum < need && need - sum <= own) {
        int bin = first;
        while (need - sum > of_bin(bin)) sum += of_bin(bin--);
        s.found = bin, s.before = sum;
    }
    __syncthreads();
    before = s.before;
    return s.found;
}

// The fewest of the tokens `kept` whose values reach `need`, greater logits first. Equal logits have equal value(x).
// Tokens ordered below `floor` are known not to be among them.
template <class F>
DEVICE Kept keep_greatest(Row row, Kept kept, u32 floor, u64 need, F value) {
    u32 prefix = 0;
    u64 equals = 0;
    Shared& s = shared();
    for (int level = 0; level < 3; ++level) {
        const int shift = level == 0 ? 21 : level == 1 ? 10 : 0, bits = level < 2 ? 11 : 10;
        __syncthreads();
        for (int i = threadIdx.x; i < BINS; i += THREADS) s.low[i] = s.high[i] = 0;
        __syncthreads();
        for_all<4>(row, [&](float x, int id) {
            const u32 key = order(x);
            if (key < floor || (level > 0 && key >> (shift + bits) != prefix) || !kept.has(key, id)) return;
            add_to_bin(key >> shift & ((1u << bits) - 1), value(x));
        });
        __syncthreads();
        u64 before;
        const u32 bin = find_bin(need, before);
        if (bin == NONE) return kept;
        need -= before;
        prefix = prefix << bits | bin;
        equals = of_bin(bin);
    }
    const Kept all{prefix, prefix == kept.least ? kept.last : row.vocab};
    const u64 each = value(unorder(prefix)), count = (need + each - 1) / each;
    if (count * each >= equals) return all;
    const auto is_equal = [=](float x, int id) -> u64 { return order(x) == prefix && all.has(prefix, id); };
    return {prefix, find_crossing(row, is_equal, add_up(row, is_equal), count - 1)};
}

// own: as find_floor has it
DEVICE Kept keep_top_k(Row row, u32 own, i64 count) {
    const u32 floor = count <= THREADS ? find_floor(own) : 0;
    return keep_greatest(row, {0, row.vocab}, floor, count, [](float) -> u64 { return 1; });
}

// Weights below (1 - top_p) / vocab of the total, which is that of `kept`, are left out: all of them together are less
// than 1 - top_p.
DEVICE Kept keep_nucleus(Row row, Kept kept, const Weights& weights, double total, double temperature, double top_p) {
    const double least = 0.9 * (1.0 - top_p) * total / row.vocab;
    const double floor = weights.top + temperature * log(fmin(least / weights.scale, 1.0));
    const double rounding = 1e-6 * (fabs(floor) + fabs(static_cast<double>(weights.top)));
    const u64 need = static_cast<u64>(ceil(top_p * total));
    return keep_greatest(row, kept, order(static_cast<float>(floor - rounding)), max(need, u64(1)), weights);
}

// ---- random numbers

// Number `index` of the stream of `seed`, in [0, 1), with 53 bits. Philox4x32-10: Salmon et al., SC 2011.
DEVICE double philox_uniform(u64 seed, u64 index) {
    u32 c0 = static_cast<u32>(index), c1 = static_cast<u32>(index >> 32), c2 = 0, c3 = 0;
    u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const u32 even = __umulhi(c0, 0xd2511f53u), odd = __umulhi(c2, 0xcd9e8d57u), low = c0 * 0xd2511f53u;
        c0 = odd ^ c1 ^ k0, c1 = c2 * 0xcd9e8d57u, c2 = even ^ c3 ^ k1, c3 = low;
        k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
    }
    return static_cast<double>(static_cast<u64>(c0 >> 5) << 26 | c1 >> 6) * 0x1p-53;
}

// ---- kernels

// A row on its way to a token, in memory: what blocks hand to others.
struct Progress {
    u64 best[MOST_CHUNKS], total[MOST_CHUNKS];  // Part, of each chunk
    u32 own[MOST_CHUNKS][THREADS];
    u64 sum[THREADS], tiny[THREADS];  // of each segment: the weights, and how many of them are integers of 0
};
static_assert(sizeof(Progress) == 8 * 5152, "as sampling.py allocates it");

DEVICE int num_chunks(int vocab) { return max(1, min(MOST_CHUNKS, vocab / CHUNK_TOKENS)); }

DEVICE Peak peak_of(const Progress& progress, int vocab, float octaves) {
    const int chunks = num_chunks(vocab);
    u64 best = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) best = max(best, progress.best[chunk]);
    Peak peak{value_of(best), id_of(best), 0};
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const float top = value_of(progress.best[chunk]);
        if (!is_usable(top)) continue;
        peak.bound += static_cast<u64>(static_cast<float>(progress.total[chunk]) * ex2((top - peak.top) * octaves)) + 1;
    }
    return peak;
}

DEVICE int draw(Row row, const Peak& peak, const Weights& weights, const Slot& slot, double share,
                const Progress& progress) {
    const bool has_segment = threadIdx.x * segment_size(row.vocab) < row.vocab;
    const u64 own_sum = has_segment ? __ldcg(&progress.sum[threadIdx.x]) : 0;
    Kept kept{0, row.vocab};
    const bool by_rank = slot.top_k > 0 && slot.top_k < row.vocab;
    if (by_rank) {
        u32 own = 0;
#pragma unroll 1
        for (int chunk = 0; chunk < num_chunks(row.vocab); ++chunk) own = max(own, progress.own[chunk][threadIdx.x]);
        kept = keep_top_k(row, own, slot.top_k);
    }
    if (slot.top_p < 1.0) {
        const auto value = [&](float x, int id) -> u64 { return kept.has(order(x), id) ? weights(x) : 0; };
        const u64 total = (by_rank ? add_up(row, value) : segments(own_sum)).total;
        kept = keep_nucleus(row, kept, weights, static_cast<double>(total), slot.temperature, slot.top_p);
    }
    // Weights are below min_p beyond so many octaves, give or take one.
    const float far = slot.min_p > 0.0 ? static_cast<float>(1.0 - log(slot.min_p) * 1.4426950408889634) : infinity();
    const auto value = [&](float x, int id) -> u64 {
        if (!kept.has(order(x), id) || (weights.top - x) * weights.octaves > far) return 0;
        const double weight = weights.relative(x);
        if (weight == 0.0 || weight < slot.min_p) return 0;
        return max(weights.integer(weight), u64(1));  // a share of 0 finds this weight
    };
    const bool all = !by_rank && slot.top_p >= 1.0 && !(slot.min_p > 0.0);
    const u64 own_tiny = has_segment ? __ldcg(&progress.tiny[threadIdx.x]) : 0;
    const Segments sums = all ? segments(own_sum + own_tiny) : add_up(row, value);
    const u64 target = static_cast<u64>(share * static_cast<double>(sums.total));
    return find_crossing(row, value, sums, min(target, sums.total - 1));
}

// Of row i, which table[slots[i]] samples, or table[i] if slots is null. A negative slot is skipped, and, if only rows
// with a temperature are drawn (drawn_only), any other. Grid (blocks of a row, rows). rows: the place of row i in
// logits, null = i.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    peaks(const float* logits, i64 stride, int vocab, const i64* rows, const Slot* table, const i32* slots,
          int drawn_only, Progress* all_progress) {
    begin_kernel();
    const int i = blockIdx.y, slot = slots ? slots[i] : i;
    if (slot < 0) return;
    const double temperature = table[slot].temperature;
    if (drawn_only && !(temperature > 0)) return;
    const Row row{logits + (rows ? rows[i] : i) * stride, vocab};
    const int chunks = num_chunks(vocab), size = (vocab + chunks - 1) / chunks;
    Progress& progress = all_progress[i];
    for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const int end = min(vocab, (chunk + 1) * size);
        const Part part = find_part(row, chunk * size, end, temperature > 0 ? octaves_of(temperature) : 1.0f);
        progress.own[chunk][threadIdx.x] = part.own;
        if (threadIdx.x == 0) progress.best[chunk] = part.best, progress.total[chunk] = part.total;
    }
}
EXPORT(peaks)

// tokens[i] of row i, after `peaks`; its grid and arguments. counters: zero, [rows].
// share: null = from the slot's own stream. last_token: null = the slots are not changed.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    sample(const float* logits, i64 stride, int vocab, const i64* rows, Slot* table, const i32* slots,
           int drawn_only, Progress* all_progress, i32* counters, const double* share, i64* last_token, i64* tokens) {
    begin_kernel();
    const int i = blockIdx.y, slot_id = slots ? slots[i] : i;
    if (slot_id < 0 || (drawn_only && !(table[slot_id].temperature > 0))) return;
    const Slot& slot = table[slot_id];
    const Row row{logits + (rows ? rows[i] : i) * stride, vocab};
    Progress& progress = all_progress[i];
    const Peak peak = peak_of(progress, vocab, slot.temperature > 0 ? octaves_of(slot.temperature) : 1.0f);
    i64 token = is_usable(peak.top) ? peak.id : FAILED_TOKEN;
    if (slot.temperature > 0 && token >= 0) {
        const Weights weights = weights_of(peak, slot.temperature);
        const int size = segment_size(vocab);
        for (int segment = blockIdx.x * WARPS + warp_id(); segment * size < vocab; segment += gridDim.x * WARPS) {
            u64 sum = 0, tiny = 0;
            for_each<32, 1>(row, segment * size, min(vocab, (segment + 1) * size), lane_id(), [&](float x, int) {
                const double weight = weights.relative(x);
                const u64 integer = weights.integer(weight);
                sum += integer, tiny += weight > 0.0 && integer == 0;
            });
            sum = warp_reduce(sum, Sum{}), tiny = warp_reduce(tiny, Sum{});
            if (lane_id() == 0) progress.sum[segment] = sum, progress.tiny[segment] = tiny;
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) shared().count = atomicAdd(&counters[i], 1);
        __syncthreads();
        if (shared().count != gridDim.x - 1) return;
        __threadfence();
        if (threadIdx.x == 0) counters[i] = 0;
        token = draw(row, peak, weights, slot, share ? share[i] : philox_uniform(slot.seed, slot.num_outputs), progress);
    } else if (blockIdx.x > 0) {
        return;
    }
    if (threadIdx.x) return;
    tokens[i] = token;
    if (last_token) commit(table, slot_id, token, last_token);
}
EXPORT(sample)

// Greedy rows only. Grid (parts of a row, rows); partial: u64 [rows, parts]; counters: zero, [rows]. `last_token` is
// null if the host decides which tokens count.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    argmax(const float* logits, i64 stride, int vocab, Slot* table, const i32* slots, u64* partial, i32* counters,
           i64* last_token, i64* tokens) {
    begin_kernel();
    const int i = blockIdx.y, parts = gridDim.x, slot = slots[i];
    if (slot < 0 || table[slot].temperature > 0) return;
    const int size = (vocab + parts - 1) / parts, first = blockIdx.x * size, end = min(vocab, first + size);
    float top = -infinity();
    int id = vocab;
    for_each<THREADS, 4>({logits + i * stride, vocab}, first, end, threadIdx.x, [&](float x, int at) {
        if (!(x < infinity())) x = infinity();
        if (x > top) top = x, id = at;
    });
    u64 best = block_reduce(ranked(top, id), Greatest{});
    if (threadIdx.x) return;
    partial[i * parts + blockIdx.x] = best;
    __threadfence();
    if (atomicAdd(&counters[i], 1) != parts - 1) return;
    __threadfence();
    counters[i] = 0;
    for (int part = 0; part < parts; ++part) best = max(best, __ldcg(&partial[i * parts + part]));
    tokens[i] = is_usable(value_of(best)) ? id_of(best) : FAILED_TOKEN;
    if (last_token) commit(table, slot, tokens[i], last_token);
}
EXPORT(argmax)

// out[j] for row rows[j] (at j in logits if they are `gathered`): the logarithm of the sum of all e^logit, the logit of
// its token, then id and logit of the num_top most likely tokens in any order. Nothing is written for a failed row.
// Float64 [rows, 2 + 2 max_top]. Grid: rows.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    score(const float* logits, i64 stride, int vocab, int gathered, const i32* rows, const Slot* table,
          const i32* slots, const i64* tokens, int max_top, double* out) {
    begin_kernel();
    const int i = rows[blockIdx.x];
    const i64 token = tokens[i], num_top = min(table[slots[i]].num_top, static_cast<i64>(vocab));
    if (token < 0) return;
    const Row row{logits + (gathered ? blockIdx.x : i) * stride, vocab};
    double* result = out + blockIdx.x * (2 + 2 * max_top);
    const Part part = find_part(row, 0, vocab, octaves_of(1.0));
    const Peak peak{value_of(part.best), id_of(part.best), part.total};
    const Weights weights = weights_of(peak, 1.0);
    const double total = static_cast<double>(add_up(row, [&](float x, int) { return weights(x); }).total);
    if (threadIdx.x == 0) {
        result[0] = peak.top + log(total / weights.scale);
        result[1] = row.logits[token];
        shared().count = 0;
    }
    if (num_top == 0) return;
    const Kept kept = num_top < vocab ? keep_top_k(row, part.own, num_top) : Kept{0, vocab};
    __syncthreads();
    for_all<4>(row, [&](float x, int id) {
        if (!kept.has(order(x), id)) return;
        double* entry = result + 2 + 2 * atomicAdd(&shared().count, 1u);
        entry[0] = id, entry[1] = x;
    });
}
EXPORT(score)
