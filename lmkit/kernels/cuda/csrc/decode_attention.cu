// Attention of one new token a sequence over blocked KV (ops.paged_attention). If k and v are given, also the steps
// before it: RoPE of the queries, and RoPE, quantization and append of the token's key and value
// (ops.rope_paged_attention).
//
// Grid (items, KV heads x head tiles), 4 warps, where items are those of a work list (work.cuh); or, without one (places
// 0), (splits, KV heads x head tiles, sequences). A block has up to 8 NT query heads of one KV head and a
// share of the sequence's tiles of 64 tokens. Each warp computes its own 16 tokens of every tile, with its own ring of
// STAGES buffers filled by cp.async. The warps meet only at the end. For 16 tokens and 8 heads:
//
//   S^T = K Q^T    a: 16 tokens x 16 elements, straight from stored bytes; b: 16 elements x 8 heads, always in
//                  registers; c: lane 4g + t has the scores of tokens g, g+8 with heads 2t, 2t+1
//   P              = 2^(S - max); 8 x 8 of it, transposed by movmatrix, are b of the second product
//   O^T = V^T P^T  a: 16 elements x 16 tokens, by ldmatrix.trans of stored bytes; c: a lane has heads 2t, 2t+1 again,
//                  so the values of a head (maximum, sums) are in the lanes that need them
//
// A token's key scale s and minimum z enter its score, S = s (q . code) + z sum(q). The accumulator's first value,
// -bias sum(q), takes off the codes' bias (kv.cuh). A token's value scale enters its weight,
// O = sum (P s) code + sum P z. P s is rounded to F16, so it is kept relative to the greatest s so far ("top"):
// P s / top <= P < 2^15. Weights below F16's 2^-14 are 2^-25 of the largest possible ones. P itself is relative to a
// maximum that may be out of date by a factor of 2^4 (SLACK), so that most tiles need no reduction across lanes. 2^11
// of headroom (LIFT) keeps small weights exact.
//
// Tokens that no query sees (after the end, outside of the window) are not read: cp.async puts zeros in their place.
// The newest token belongs to the last split. That split uses it as it will be read back: from the row that it also
// appends, and does not fetch, since blocks of other heads append it, too.
//
// Splits: the share of a block depends on the lengths, which only the device knows. A block without tiles ends at once.
// Other blocks leave (O, max, sum) in float32. The last one to arrive merges them in order, so results do not depend
// on timing.
//
// DIM: D. KEYS, VALUES: storage types. NT: tiles of 8 heads. BLOCK: tokens of a KV block. STAGES. MEAN: keys without
// their mean (ops.KeyMean). SOFTCAP: scores are capped. SHARES: queries come from turn.cu, in the keys' type and with
// their shares of what the keys lack; scores and outputs get those of position 0. LM_BF16: q, k, v and the result are
// bfloat16, of SHARES the result alone.
#include "kv.cuh"
#include "softcap.cuh"
#include "work.cuh"

#ifndef SHARES
#define SHARES 0
#endif

using Keys = Storage<KEYS, DIM>;
using Values = Storage<VALUES, DIM>;

constexpr int WARPS = 4, UNIT = 16, TILE = WARPS * UNIT, ROWS = 8 * NT, E = DIM / 16;
// A stage: 16 rows of keys, 16 of values, as they are stored, params of 16 keys, of 16 values.
constexpr int VALUES_AT = UNIT * Keys::STORED_STRIDE, PARAMS_AT = VALUES_AT + UNIT * Values::STORED_STRIDE;
constexpr int STAGE = PARAMS_AT + UNIT * 8;
// A warp: the ring, then 16 rows of keys, and 16 of values, that are unpacked.
constexpr int KEYS_UNPACKED_AT = STAGES * STAGE, VALUES_UNPACKED_AT = KEYS_UNPACKED_AT + Keys::PACKED * UNIT * Keys::STRIDE;
constexpr int WARP_BYTES = VALUES_UNPACKED_AT + Values::PACKED * UNIT * Values::STRIDE;
constexpr u32 ALL = (1u << UNIT) - 1u;  // mask of 16 tokens
constexpr float LIFT = 11.0f, SLACK = 4.0f, NOTHING = 1e30f;

// A row of the newest token in its stored form.
template <class S>
struct NewRow {
    alignas(16) u8 bytes[S::STRIDE];
    u32 params;

    // To `to`, and the parameters to a word or, as they are stored, to `Param`. Executed by thread `lane` of `lanes`.
    template <class Param = u32>
    DEVICE void copy(u8* to, u8* to_params, int lane, int lanes) const {
        using Word = typename Choice<S::ROW % 8 == 0, uint2, u32>::Type;
        for (int i = lane; i < S::ROW / int(sizeof(Word)); i += lanes)
            reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(bytes)[i];
        const u32 word = S::PACKED ? *reinterpret_cast<const u16*>(&params) * 0x10001u : params;  // for any row
        if (S::CODED && lane == 0) *reinterpret_cast<Param*>(to_params) = static_cast<Param>(word);
    }
    DEVICE void store(u8* data, u8* data_params, i64 row, int lane, int lanes) const {
        using Param = typename Choice<S::PACKED, u16, u32>::Type;
        copy<Param>(data + row * S::ROW, data_params + row * S::PARAM_BYTES, lane, lanes);
    }
};

// Shared memory after the rings. The merge of the warps reuses the rings.
struct Shared {
    NewRow<Keys> new_key;
    NewRow<Values> new_value;
    u16 queries[ROWS][DIM];  // Keys::Float
    float to_logits[ROWS], sums[ROWS], starts[ROWS];  // of heads: factors of scores, sums of queries, first values of S
    float maxima[WARPS][ROWS], totals[WARPS][ROWS];
    int is_last;
#if MEAN && !SHARES
    u16 plain[ROWS][DIM];  // queries that are not Hadamard-transformed
#endif
#if MEAN
    float2 mean_shares[ROWS][DIM / 2];  // factors of the cosine and the sine of a pair
#endif
#if SHARES
    float first_shares[ROWS];  // what the scores of position 0 lack
#endif
};

struct Head {  // one head of the step's tokens
    const u16* data;
    i64 token, head;
};

struct Mean {
    const float* vector;
    const i32* pairs;
    const float* table;
    int half, num_pairs, positions;  // half = R/2
};

// The tokens that a sequence's newest token sees, and a block's share of them.
struct Span {
    int length, window_start, sinks;  // tokens below `sinks` or from `window_start` to `length`
    int sink_tiles, first_tile, tiles;  // tiles of the sinks, the first one of the window, all

    DEVICE Span(int length, int window, int sinks) : length(length), sinks(sinks) {
        window_start = window > 0 ? max(0, length - window) : 0;
        first_tile = window_start / TILE;
        sink_tiles = min((sinks + TILE - 1) / TILE, first_tile);
        tiles = sink_tiles + (length + TILE - 1) / TILE - first_tile;
    }
    DEVICE int tile(int i) const { return i < sink_tiles ? i : first_tile + i - sink_tiles; }
    // A bit for each of 16 tokens: whether it is visible.
    DEVICE u32 visible(int token) const {
        if (token >= window_start && token + UNIT <= length) return ALL;
        const int end = length - token, start = window_start - token, sink = sinks - token;
        return below(end) & (~below(start) | below(sink));
    }
    static DEVICE u32 below(int count) { return (1u << min(max(count, 0), UNIT)) - 1u; }
};

// Fetches 16 tokens' rows, which are contiguous, into a stage.
template <class S, bool WHOLE>
DEVICE void fetch_rows(u8* shared, const u8* rows, u32 visible) {
    constexpr int PIECE = S::PIECE, PER_ROW = S::ROW / PIECE, COUNT = UNIT * PER_ROW;
#pragma unroll
    for (int base = 0; base < COUNT; base += 32) {
        const int i = base + lane_id(), row = i / PER_ROW;
        if (COUNT % 32 && i >= COUNT) break;
        u8* to = shared + row * S::STORED_STRIDE + (i - row * PER_ROW) * PIECE;
        const bool valid = WHOLE || visible >> row & 1;
        cp_async<PIECE>(to, rows + i * PIECE, valid);
    }
}

struct Fetcher {
    const u8 *keys, *key_params, *values, *value_params;
    const i32* table;
    int kv_heads, kv_head;

    // Only some of the 16 tokens are visible. The others become zeros.
    DEVICE void operator()(u8* stage, u32 token, u32 visible) const {
        const i64 row = (static_cast<i64>(__ldg(table + token / BLOCK)) * kv_heads + kv_head) * BLOCK + token % BLOCK;
        if (visible == ALL)
            rows<true>(stage, row, visible);
        else
            rows<false>(stage, row, visible);
    }

   private:
    template <bool WHOLE>
    DEVICE void rows(u8* stage, i64 row, u32 visible) const {
        fetch_rows<Keys, WHOLE>(stage, keys + row * Keys::ROW, visible);
        fetch_rows<Values, WHOLE>(stage + VALUES_AT, values + row * Values::ROW, visible);
        const int i = lane_id() & 15;
        const bool second = lane_id() >= 16;
        const bool valid = WHOLE || visible >> i & 1;
        u8* const to = stage + PARAMS_AT + lane_id() * 4;
        if constexpr (Keys::PACKED == Values::PACKED) {
            if (second ? Values::CODED : Keys::CODED)
                Keys::copy_params(to, second ? value_params : key_params, row + i, valid);
        } else if (second) {
            if constexpr (Values::CODED) Values::copy_params(to, value_params, row + i, valid);
        } else {
            if constexpr (Keys::CODED) Keys::copy_params(to, key_params, row + i, valid);
        }
    }
};

// ---- before the loop

// Stores a query head, held by 16 lanes, in shared memory, with the factors that its scores need.
DEVICE void prepare_query(Shared& shared, int row, float (&x)[E], bool turned, float to_logits) {
    const int lane = lane_id() & 15;
#if MEAN && !SHARES
#pragma unroll
    for (int e = 0; e < E; ++e) shared.plain[row][lane * E + e] = Half::from_float(x[e]);
#endif
    if constexpr ((DIM & (DIM - 1)) == 0) {
        if (turned) hadamard<DIM>(x);
    }
    float peak = 0.0f, sum = 0.0f;
#pragma unroll
    for (int e = 0; e < E; ++e) peak = fmaxf(peak, fabsf(x[e]));
    // bfloat16 may exceed F16's range. Then a power of two is divided out, which makes the peak 2^14.
    const u32 exponent = __float_as_uint(head_max(peak)) >> 23;
    const float factor = exponent < 142 ? 1.0f : __uint_as_float((268 - exponent) << 23);
#pragma unroll
    for (int e = 0; e < E; ++e) {
        const u16 bits = Keys::Float::from_float(x[e] * factor);
        shared.queries[row][lane * E + e] = bits;
        sum += Keys::Float::to_float(bits);
    }
    const float start = head_sum(-Keys::bias(lane >> 3) * sum), whole = head_sum(sum);
    if (lane == 0) shared.sums[row] = whole, shared.starts[row] = start, shared.to_logits[row] = to_logits / factor;
}

#if SHARES
// Loads a head of a query from turn.cu.
DEVICE void load_turned(float (&x)[E], const u16* row) {
    alignas(16) u16 bits[E];
    load_span(bits, row + (lane_id() & 15) * E);
#pragma unroll
    for (int e = 0; e < E; ++e) x[e] = Keys::Float::to_float(bits[e]);
}

// The shares of heads, from float [heads][2 num_pairs + 1]. Rows without a head get zeros: their scores are dropped, but
// a great one would make all rows rescale.
DEVICE void prepare_shares(Shared& shared, const float* shares, int num_pairs, int heads, float to_logits) {
    const int size = 2 * num_pairs + 1;
    for (int i = threadIdx.x; i < ROWS * (num_pairs + 1); i += WARPS * 32) {
        const int row = i / (num_pairs + 1), p = i % (num_pairs + 1);
        const float* from = shares + row * size + 2 * p;
        if (p == num_pairs) shared.first_shares[row] = row < heads ? from[0] * to_logits : 0.0f;
#if MEAN
        else
            shared.mean_shares[row][p] =
                row < heads ? make_float2(from[0] * to_logits, from[1] * to_logits) : make_float2(0.0f, 0.0f);
#endif
    }
}
#endif

#if MEAN && !SHARES
// The factors of cos(t theta_i) and sin(t theta_i) in q . RoPE_t(b): zeros in rows without a head, whose q is zero.
DEVICE void prepare_mean(Shared& shared, const Mean& mean, int kv_head, float to_logits) {
    const int half = mean.half;
    for (int i = threadIdx.x; i < ROWS * mean.num_pairs; i += WARPS * 32) {
        const int row = i / mean.num_pairs, p = i - row * mean.num_pairs;
        const int pair = mean.pairs[kv_head * mean.num_pairs + p];
        const float* b = mean.vector + kv_head * DIM + pair;
        const float x = Half::to_float(shared.plain[row][pair]), y = Half::to_float(shared.plain[row][pair + half]);
        const float with_cosine = x * b[0] + y * b[half], with_sine = y * b[0] - x * b[half];
        shared.mean_shares[row][p] = make_float2(with_cosine * to_logits, with_sine * to_logits);
    }
}
#endif

// Writes the newest token's key (warp 2) and value (warp 3) to shared memory in their stored form.
DEVICE void prepare_new(Shared& shared, const u16* k, const u16* v, const float* mean, Angles angles,
                        const float* k_scale, const float* v_scale, bool turned, u8* scratch) {
    float x[E];
    const bool active = lane_id() < 16;
    if (warp_id() == 2) {
        load_head<DIM>(x, k, mean, angles);
        if constexpr ((DIM & (DIM - 1)) == 0) {
            if (turned) hadamard<DIM>(x);
        }
        store_head<KEYS, DIM>(shared.new_key.bytes, reinterpret_cast<u8*>(&shared.new_key.params), x, k_scale, active,
                                scratch);
    } else if (warp_id() == 3) {
        load_head<DIM>(x, v, nullptr, {nullptr, nullptr, 0});
        u8* params = reinterpret_cast<u8*>(&shared.new_value.params);
        store_head<VALUES, DIM>(shared.new_value.bytes, params, x, v_scale, active, scratch);
    }
}

// ---- one warp's attention

struct Attention {
    u32 query[NT][Keys::STEPS][2];
    float out[NT][Values::STEPS][4];
    float shift[NT][2], total[NT][2], minima[NT][2];  // LIFT - maximum, sum of weights, sum of weight * minimum
    float to_logits[NT][2], query_sum[NT][2], start[NT][2];
    float top, inverse_top;  // the greatest value scale so far
    float first[NT][2];  // SHARES: the weight of position 0, in the lanes that have it

    DEVICE void begin(const Shared& shared) {
        const int g = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int s = 0; s < Keys::STEPS; ++s)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int low = Keys::key_element(s, t, 2 * r), high = Keys::key_element(s, t, 2 * r + 1);
                    const u16* row = shared.queries[8 * n + g];
                    query[n][s][r] = low < 0 ? 0 : row[low] | static_cast<u32>(row[high]) << 16;
                }
#pragma unroll
            for (int s = 0; s < Values::STEPS; ++s)
#pragma unroll
                for (int i = 0; i < 4; ++i) out[n][s][i] = 0.0f;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = 8 * n + 2 * t + h;
                shift[n][h] = NOTHING, total[n][h] = minima[n][h] = 0.0f;
                to_logits[n][h] = shared.to_logits[row];
                query_sum[n][h] = shared.sums[row], start[n][h] = shared.starts[row];
                first[n][h] = 0.0f;
            }
        }
        top = inverse_top = 0.0f;
    }

    // x[n][2 i + h] = the logit, as an exponent of 2, of token g + 8 i with head 8 n + 2 t + h.
    DEVICE void scores(float (&x)[NT][4], const u8* keys, const u32* key_params) const {
        float odd[NT][4];  // two chains of products, half as long
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[n][i] = start[n][i & 1], odd[n][i] = 0.0f;
#pragma unroll
        for (int load = 0; load < Keys::LOADS; ++load) {
            u32 a[Keys::STEPS_PER_LOAD][4];
            Keys::load_keys(a, keys, load);
#pragma unroll
            for (int i = 0; i < Keys::STEPS_PER_LOAD; ++i) {
                const int s = load * Keys::STEPS_PER_LOAD + i;
                if (s >= Keys::STEPS) continue;
#pragma unroll
                for (int n = 0; n < NT; ++n)
                    Keys::Float::mma(s & 1 ? odd[n] : x[n], a[i], query[n][s][0], query[n][s][1]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float scale = 1.0f, minimum = 0.0f;
            if constexpr (Keys::CODED) {
                const int row = (lane_id() >> 2) + 8 * i;
                const float2 params = Keys::scale_and_minimum(key_params[row], row);
                scale = params.x * Keys::UNIT, minimum = params.y;
            }
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float score = x[n][2 * i + h] + odd[n][2 * i + h];
                    if constexpr (Keys::CODED) score *= scale;
                    if constexpr (Keys::HAS_MINIMUM) score += minimum * query_sum[n][h];
                    x[n][2 * i + h] = score * to_logits[n][h];
                }
        }
    }

    // Adds 16 tokens with logits x. `is_first`: this lane's first one is at position 0.
    DEVICE void add(float (&x)[NT][4], const u8* values, const u32* value_params, bool is_first) {
        float scale[2] = {1.0f, 1.0f}, minimum[2] = {0.0f, 0.0f};
        if constexpr (Values::CODED) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = (lane_id() >> 2) + 8 * i;
                const float2 params = Values::scale_and_minimum(value_params[row], row);
                scale[i] = params.x, minimum[i] = params.y;
            }
        }
        bool grows = Values::CODED && fmaxf(scale[0], scale[1]) > top;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) grows |= x[n][i] + shift[n][i & 1] > LIFT + SLACK;
        if (__any_sync(0xffffffffu, grows)) rescale(x, scale);

        u32 weights[NT][2];
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float p0 = ex2(x[n][2 * i] + shift[n][0]), p1 = ex2(x[n][2 * i + 1] + shift[n][1]);
                if constexpr (Values::CODED) {
                    total[n][0] += p0, total[n][1] += p1;
                    if constexpr (Values::HAS_MINIMUM) minima[n][0] += p0 * minimum[i], minima[n][1] += p1 * minimum[i];
                    const float share = scale[i] * inverse_top;
                    weights[n][i] = F16::pack(p0 * share, p1 * share);
                } else {  // the sum uses the rounded weights of the product: the largest weight's rounding cancels
                    const u32 pair = Values::Float::pack(p0, p1);
                    p0 = Values::Float::lo(pair), p1 = Values::Float::hi(pair);
                    total[n][0] += p0, total[n][1] += p1;
                    weights[n][i] = pair;
                }
                if constexpr (SHARES) {
                    if (is_first && i == 0) first[n][0] = p0, first[n][1] = p1;
                }
                weights[n][i] = movmatrix_trans(weights[n][i]);
            }
#pragma unroll
        for (int load = 0; load < Values::LOADS; ++load) {
            u32 a[Values::STEPS_PER_LOAD][4];
            Values::load_values(a, values, load);
#pragma unroll
            for (int i = 0; i < Values::STEPS_PER_LOAD; ++i) {
                const int s = load * Values::STEPS_PER_LOAD + i;
                if (s >= Values::STEPS) continue;
#pragma unroll
                for (int n = 0; n < NT; ++n) Values::Float::mma(out[n][s], a[i], weights[n][0], weights[n][1]);
            }
        }
    }

    // Takes new maxima and a new top. All sums so far become relative to them.
    DEVICE void rescale(const float (&x)[NT][4], const float (&scale)[2]) {
        float drop = 1.0f;
        if constexpr (Values::CODED) {
            const float greatest = fmaxf(top, warp_max(fmaxf(scale[0], scale[1])));
            inverse_top = greatest > 0.0f ? 1.0f / greatest : 0.0f;
            drop = top * inverse_top;
            top = greatest;
        }
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float greatest = fmaxf(x[n][h], x[n][2 + h]);
#pragma unroll
                for (int step = 4; step < 32; step *= 2)
                    greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, step));
                const float next = fminf(shift[n][h], LIFT - greatest), factor = ex2(next - shift[n][h]);
                shift[n][h] = next, total[n][h] *= factor, minima[n][h] *= factor, first[n][h] *= factor;
#pragma unroll
                for (int s = 0; s < Values::STEPS; ++s)
                    out[n][s][h] *= factor * drop, out[n][s][2 + h] *= factor * drop;
            }
    }

    // Leaves the warp's results in shared memory: accumulated [ROWS][DIM], and a maximum and a sum for each head.
    // `first_value`: what the value of position 0 lacks, or null.
    DEVICE void finish(float* accumulated, float* maxima, float* totals, const float* first_value) {
        const int g = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = 8 * n + 2 * t + h;
#pragma unroll
                for (int step = 4; step < 32; step *= 2) {
                    total[n][h] += __shfl_xor_sync(0xffffffffu, total[n][h], step);
                    minima[n][h] += __shfl_xor_sync(0xffffffffu, minima[n][h], step);
                    if constexpr (SHARES) first[n][h] += __shfl_xor_sync(0xffffffffu, first[n][h], step);
                }
                if (g == 0) maxima[row] = -shift[n][h], totals[row] = total[n][h];
#pragma unroll
                for (int s = 0; s < Values::STEPS; ++s)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int element = Values::value_element(s, g + 8 * i);
                        float value = out[n][s][2 * i + h];
                        if constexpr (Values::CODED) value = value * (top * Values::UNIT) + minima[n][h];
                        if constexpr (SHARES) {
                            if (first_value && element >= 0) value += first[n][h] * first_value[element];
                        }
                        if (element >= 0) accumulated[row * DIM + element] = value;
                    }
            }
    }
};

#if MEAN
DEVICE void add_mean(float (&x)[NT][4], const Shared& shared, const Mean& mean, const i32* pairs, int token) {
    const int g = lane_id() >> 2, t = lane_id() & 3;
    for (int p = 0; p < mean.num_pairs; ++p) {
        const float* cosines = mean.table + 2ll * pairs[p] * mean.positions;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int position = min(token + g + 8 * i, mean.positions - 1);  // later positions are not visible
            const float c = __ldg(cosines + position), s = __ldg(cosines + mean.positions + position);
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float2 share = shared.mean_shares[8 * n + 2 * t + h][p];
                    x[n][2 * i + h] += share.x * c + share.y * s;
                }
        }
    }
}
#endif

#if SHARES
// Lanes 0 to 3 have the scores of position 0.
DEVICE void add_first_key(float (&x)[NT][4], const Shared& shared) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) x[n][h] += shared.first_shares[8 * n + 2 * lane_id() + h];
}
#endif

// ---- after the loop: warps, then splits

// The results of a split, per block: [rows][DIM] unnormalized sums, and in another array [2][rows] maxima and totals.
struct Partial {
    float *sums, *maxima;
    int rows;  // of a block, at most

    DEVICE Partial(float* partials, int rows, int split) : rows(rows) {
        const i64 blocks = static_cast<i64>(gridDim.x) * gridDim.y * gridDim.z;
        const i64 first = (static_cast<i64>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x - split;
        sums = partials + first * rows * DIM, maxima = partials + blocks * rows * DIM + first * 2 * rows;
    }
    DEVICE float* sum(int split, int i) const { return sums + static_cast<i64>(split) * rows * DIM + i; }
    DEVICE float* maximum(int split, int row) const { return maxima + split * 2 * rows + row; }
    DEVICE float* total(int split, int row) const { return maximum(split, row) + rows; }
};

// The weight of the key that `logit` is the score of, beside a maximum in units of log2(e).
DEVICE float sink_weight(float logit, float maximum) { return ex2(1.4426950409f * logit - maximum); }

// Merges the results of the four warps into `out` or, unnormalized, into the place of this split.
DEVICE void merge_warps(const Shared& shared, const float* accumulated, int heads, const float* sink_logits,
                        const Partial* partial, int split, u16* out) {
    for (int i = threadIdx.x; i < heads * DIM; i += WARPS * 32) {
        const int row = i / DIM;
        float greatest = shared.maxima[0][row], value = 0.0f, total = 0.0f;
#pragma unroll
        for (int w = 1; w < WARPS; ++w) greatest = fmaxf(greatest, shared.maxima[w][row]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = ex2(shared.maxima[w][row] - greatest);
            value += weight * accumulated[w * ROWS * DIM + i], total += weight * shared.totals[w][row];
        }
        if (!partial) {
            if (sink_logits) total += sink_weight(sink_logits[row], greatest);
            out[i] = Half::from_float(value / total);
            continue;
        }
        *partial->sum(split, i) = value;
        if (i == row * DIM) *partial->maximum(split, row) = greatest, *partial->total(split, row) = total;
    }
}

// Merges the results of all splits. `weights`: shared, [splits][ROWS].
DEVICE void merge_splits(const Partial& partial, float* weights, int heads, int splits, const float* sink_logits,
                         u16* out) {
    for (int row = warp_id(); row < heads; row += WARPS) {
        float greatest = -NOTHING, total = 0.0f;
        for (int s = lane_id(); s < splits; s += 32) greatest = fmaxf(greatest, __ldcg(partial.maximum(s, row)));
        greatest = warp_max(greatest);
        for (int s = lane_id(); s < splits; s += 32) {
            const float weight = ex2(__ldcg(partial.maximum(s, row)) - greatest);
            weights[s * ROWS + row] = weight, total += weight * __ldcg(partial.total(s, row));
        }
        total = warp_sum(total);
        if (sink_logits) total += sink_weight(sink_logits[row], greatest);
        for (int s = lane_id(); s < splits; s += 32) weights[s * ROWS + row] /= total;
    }
    __syncthreads();
    for (int i = threadIdx.x * 4; i < heads * DIM; i += WARPS * 32 * 4) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
        for (int s = 0; s < splits; ++s) {
            const float weight = weights[s * ROWS + i / DIM];
            const float4 part = __ldcg(reinterpret_cast<const float4*>(partial.sum(s, i)));
            sum.x += weight * part.x, sum.y += weight * part.y, sum.z += weight * part.z, sum.w += weight * part.w;
        }
        *reinterpret_cast<uint2*>(out + i) = make_uint2(Half::pack(sum.x, sum.y), Half::pack(sum.z, sum.w));
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, NT * DIM <= 128 ? 4 : 2)
decode_attention(const u16* q, i64 q_token, i64 q_head, const u16* k, i64 k_token, i64 k_head, const u16* v,
                 i64 v_token, i64 v_head, const float* cosines, const float* sines, int half, u8* k_data, u8* k_params,
                 const float* k_scales, int turned, u8* v_data, u8* v_params, const float* v_scales,
                 const float* mean_vector, const i32* mean_pairs, const float* mean_table, int mean_half, int num_pairs,
                 int positions, const i32* slots, const i32* block_tables, int max_blocks, const i32* query_start,
                 const i32* context_lens, float to_logits, float cap, int window, int sinks,
                 const float* sink_logits, u16* out, float* partials, i32* counters, int kv_heads, int group,
                 int sequences, int places, int cost
#if SHARES
                 , const float* shares, const float* first_values
#endif
) {
    launch_next();
    if (!k) wait_for_previous();  // the kernel before appends this step's keys and values
    const int tiles_of_heads = gridDim.y / kv_heads, kv_head = blockIdx.y / tiles_of_heads;
    const int first_head = (blockIdx.y - kv_head * tiles_of_heads) * ROWS, heads = min(ROWS, group - first_head);
    Work work{static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
    if (places > 0) {
        const auto tiles_of = [&](int s) {
            if (query_start[s + 1] - query_start[s] != 1) return 0;
            return max(1, Span(context_lens[s], window, sinks).tiles);  // a place that is not used becomes 0
        };
        work = find_work(tiles_of, sequences, blockIdx.x, gridDim.x, gridDim.y, places, cost);
        if (work.sequence < 0) return wait_for_previous();
    }
    const int sequence = work.sequence, row = query_start[sequence];
    if (query_start[sequence + 1] - row != 1) return wait_for_previous();  // left to another kernel
    const i64 out_row = (static_cast<i64>(row) * kv_heads + kv_head) * group + first_head;
    const Span span(context_lens[sequence], window, sinks);
    const int splits = min(work.splits, span.tiles), split = work.split;
    if (span.length <= 0 || split >= splits) {
        wait_for_previous();
        if (span.length <= 0 && split == 0)  // an unused place in the batch
            for (int i = threadIdx.x; i < heads * DIM; i += WARPS * 32) out[out_row * DIM + i] = 0;
        return;
    }

    const i64 tiles = span.tiles;
    const int begin = tiles * split / splits, end = tiles * (split + 1) / splits;
    const i32* table = block_tables + static_cast<i64>(sequence) * max_blocks;
    const Fetcher fetch{k_data, k_params, v_data, v_params, table, kv_heads, kv_head};
    u8* const ring = shared_memory + warp_id() * WARP_BYTES;
    u8 *const unpacked_keys = ring + KEYS_UNPACKED_AT, *const unpacked_values = ring + VALUES_UNPACKED_AT;
    int write_at = 0, read_at = 0;  // in the ring
    const int slot = k ? slots[row] : -1;
    const bool owner = slot >= 0 && split == splits - 1;
    const int stored = span.length - owner;  // the tokens before the one that this kernel appends
    auto fetch_tile = [&](int i) {
        const int token = span.tile(i) * TILE + warp_id() * UNIT;
        const u32 visible = i < end ? span.visible(token) : 0;
        if (visible) fetch(ring + write_at, token, visible & Span::below(stored - token));
        cp_async_commit();
        write_at = write_at == (STAGES - 1) * STAGE ? 0 : write_at + STAGE;
    };
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; ++s) fetch_tile(begin + s);  // of earlier steps
    wait_for_previous();

    // The merge of the results reuses the rings. The rings may be smaller than it.
    constexpr int RINGS = WARPS * WARP_BYTES, MERGE = WARPS * ROWS * DIM * 4;
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory + (RINGS > MERGE ? RINGS : MERGE));
    const Angles angles{cosines + static_cast<i64>(row) * half, sines + static_cast<i64>(row) * half, half};
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int r = 8 * n + threadIdx.x / 16;
        float x[E];
#pragma unroll
        for (int e = 0; e < E; ++e) x[e] = 0.0f;
        const u16* query = q + row * q_token + (kv_head * group + first_head + r) * q_head;
#if SHARES
        if (r < heads) load_turned(x, query);
#else
        if (r < heads) load_head<DIM>(x, query, nullptr, angles);
#endif
        prepare_query(shared, r, x, turned, to_logits);
    }
    if (owner)
        prepare_new(shared, k + row * k_token + kv_head * k_head, v + row * v_token + kv_head * v_head,
                    mean_vector ? mean_vector + kv_head * DIM : nullptr, angles,
                    k_scales ? k_scales + kv_head : nullptr, v_scales ? v_scales + kv_head : nullptr, turned,
                    unpacked_keys);
    __syncthreads();
#if MEAN
    const Mean mean{mean_vector, mean_pairs, mean_table, mean_half, num_pairs, positions};
#endif
#if SHARES
    prepare_shares(shared, shares + out_row * (2 * num_pairs + 1), num_pairs, heads, to_logits);
    __syncthreads();
#elif MEAN
    prepare_mean(shared, mean, kv_head, to_logits);
    __syncthreads();
#endif
    if (owner && first_head == 0) {
        const i64 where = row_of_slot(slot, BLOCK, kv_heads, kv_head);
        shared.new_key.store(k_data, k_params, where, threadIdx.x, WARPS * 32);
        shared.new_value.store(v_data, v_params, where, threadIdx.x, WARPS * 32);
    }

    Attention state;
    state.begin(shared);
    for (int i = begin; i < end; ++i) {
        cp_async_wait<STAGES - 2>();
        __syncwarp();  // all lanes have their bytes of this stage and have finished the stage before
        const int token = span.tile(i) * TILE + warp_id() * UNIT, newest = span.length - 1 - token;
        u8* stage = ring + read_at;
        read_at = read_at == (STAGES - 1) * STAGE ? 0 : read_at + STAGE;
        if (owner && newest >= 0 && newest < UNIT) {
            u8 *value = stage + VALUES_AT + newest * Values::STORED_STRIDE, *params = stage + PARAMS_AT + newest * 4;
            shared.new_key.copy(stage + newest * Keys::STORED_STRIDE, params, lane_id(), 32);
            shared.new_value.copy(value, params + UNIT * 4, lane_id(), 32);
            __syncwarp();
        }
        fetch_tile(i + STAGES - 1);
        const u32 visible = span.visible(token);
        if (visible == 0) continue;
        Keys::unpack(unpacked_keys, stage, UNIT, lane_id(), 32);
        Values::unpack(unpacked_values, stage + VALUES_AT, UNIT, lane_id(), 32);
        if constexpr (Keys::PACKED || Values::PACKED) __syncwarp();
        const auto* params = reinterpret_cast<const u32*>(stage + PARAMS_AT);
        float x[NT][4];
        state.scores(x, Keys::PACKED ? unpacked_keys : stage, params);
#if MEAN
        add_mean(x, shared, mean, mean_pairs + kv_head * num_pairs, token);
#endif
        const bool is_first = token == 0 && lane_id() < 4;
#if SHARES
        if (is_first) add_first_key(x, shared);
#endif
        if constexpr (SOFTCAP) {
            const SoftCap capped(cap);
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j) x[n][j] = capped(x[n][j]);
        }
        if (visible != ALL) {
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (!(visible >> ((lane_id() >> 2) + 4 * (j & 2)) & 1)) x[n][j] = -__uint_as_float(0x7f800000u);
        }
        state.add(x, Values::PACKED ? unpacked_values : stage + VALUES_AT, params + UNIT, is_first);
    }

    __syncthreads();
    auto* accumulated = reinterpret_cast<float*>(shared_memory);
    const float* first_value = nullptr;
#if SHARES
    if (first_values) first_value = first_values + kv_head * DIM;
#endif
    state.finish(accumulated + warp_id() * ROWS * DIM, shared.maxima[warp_id()], shared.totals[warp_id()], first_value);
    __syncthreads();
    u16* result = out + out_row * DIM;
    if (sink_logits) sink_logits += kv_head * group + first_head;
    if (splits == 1) return merge_warps(shared, accumulated, heads, sink_logits, nullptr, 0, result);

    const Partial partial(partials, min(ROWS, group), split);
    merge_warps(shared, accumulated, heads, nullptr, &partial, split, nullptr);
    __threadfence();
    __syncthreads();
    i32* counter = counters + sequence * gridDim.y + blockIdx.y;
    if (threadIdx.x == 0) shared.is_last = atomicAdd(counter, 1) == splits - 1;
    __syncthreads();
    if (!shared.is_last) return;
    __threadfence();
    merge_splits(partial, accumulated, heads, splits, sink_logits, result);
    if (threadIdx.x == 0) *counter = 0;
}
EXPORT(decode_attention)
