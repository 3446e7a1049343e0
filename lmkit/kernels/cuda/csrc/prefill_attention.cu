// Attention of sequences with several query tokens (prefill, chunks of it, drafts) over blocked KV: ops.paged_attention
// in one pass over the keys with an online softmax (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention-2,
// arXiv 2307.08691).
//
// A block of threads computes ROWS = 128 rows of one KV head. A row is one head of one query token. The heads that
// share the KV head follow each other, then comes the next token. A tile of keys is thus read once for all of them, and
// a chunk of few tokens wastes little. Each warp has 16 M_TILES rows and all KEYS keys of a tile:
//
//   S [rows, KEYS] = Q K^T     mma.m16n8k16, A = Q from shared memory, B = K, its rows as they lie
//   P = exp2(S - maximum)      in registers: the fragments of S are those of A for the next product
//   O [rows, DV]   = O + P V   B = V, transposed by ldmatrix
//
// A warp has 32 rows if registers allow it (DV <= 128), because every fragment of K and V is then read for two products:
// with 16 rows, shared memory would be slower than the tensor cores.
//
// Tiles of K and V come through the block table by cp.async, one ahead of the computation. 16-bit values go directly to
// the places that ldmatrix reads; there are two copies of these. Codes (int8, int4, fp8) are copied as stored, and the
// whole block of threads converts them to float16 once per tile: with 128 rows, converting in each warp's registers
// would cost four times the instructions. x = code * scale + minimum is rounded once, by less than the step of the
// codes. The products are in float16 even if activations are bfloat16, whose numbers are too coarse for 8-bit codes.
//
//   shared   Q [ROWS][DK] | K tile(s) [KEYS][DK], codes, params | V tile(s) [KEYS][DV], codes, params | places | Work
//
// Rows of tiles are padded to an odd number of 16-byte pieces: the eight rows of an ldmatrix are then in different
// banks, and addresses are constants apart. DV is the width of values, where it is not that of keys. DK = D + columns for the mean of keys (ops.KeyMean). The mean's share of a
// score is sum over pairs (share_c cos + share_s sin). That is six more products a pair, since every number is split in
// two: x ~ high + low.
//
// With SHARES, queries come from turn.cu, in the keys' type and with their shares of what the keys lack. That of position 0
// is added to its scores, and what its value lacks to the tile of values.
//
// Tiles that no row sees are skipped. Tiles that some row sees only in part are masked. Keys that no row of the block
// of threads sees are replaced by zeros. If there are few blocks of threads, the keys of each one are split into up to
// `num_splits` ranges, and the block that finishes last adds up the ranges in order.
//
// With PART a row's bits do not depend on the rows beside it. Ranges then are PART tiles at fixed positions. Each begins
// with a softmax of its own, and they are folded in order: (maximum, sum, outputs) of what was and of the next range. A
// range without a key for a row changes nothing. So it is free who computes the ranges: a block of threads each, and the
// last one folds; or one block has all (num_splits = 1), which keeps what it has in its record.
//
// Nothing here needs more than sm_80; Hopper's wgmma, whose peak is higher, is not used.
#include "kv.cuh"
#include "sequence.cuh"
#include "softcap.cuh"

#ifndef VALUE_DIM
#define VALUE_DIM HEAD_DIM
#endif
#ifndef SHARES
#define SHARES 0
#endif
#define D HEAD_DIM
#define DV VALUE_DIM
#ifndef PART
#define PART 0  // tiles of keys of a range; 0: the number of blocks decides
#endif

constexpr int ROWS = 128;
constexpr int M_TILES = DV <= 128 ? 2 : 1;
constexpr int NUM_WARPS = ROWS / (16 * M_TILES);
constexpr int THREADS = 32 * NUM_WARPS;
constexpr int N_TILES = KEYS / 8;
constexpr int MEAN_COLUMNS = (6 * MEAN_PAIRS + 15) / 16 * 16;
constexpr int DK = D + MEAN_COLUMNS;
constexpr int Q_STRIDE = (DK / 8 | 1) * 16;  // bytes
constexpr float SHARE_UNIT = 16.0f;          // unit in which shares are stored, far from the end of float16's range
constexpr int MIN_TILES = 4;                 // of keys, for a range of its own, without PART
constexpr int TILES = PART ? PART : 1;       // of a range
#define NOTHING __int_as_float(0xff800000)    // minus infinity
constexpr u32 NOWHERE = 0xffffffffu;  // a place

using KeyNumber = Storage<K_STORAGE, D>::Float;
using ValueNumber = Storage<V_STORAGE, DV>::Float;
using QueryNumber = Choice<SHARES, KeyNumber, Half>::Type;
constexpr int NUM_SHARES = 2 * MEAN_PAIRS + 1;  // of a query, with SHARES

// Runs do_part(0 .. COUNT - 1), with the threads side by side.
template <int COUNT, class F>
DEVICE void share_out(F do_part) {
#pragma unroll 2  // all at once spill registers
    for (int first = 0; first < COUNT; first += THREADS) {
        const int i = first + threadIdx.x;
        if (COUNT % THREADS == 0 || i < COUNT) do_part(i);
    }
}

// Four codes with a scale and a minimum (twice each, float16) -> two pairs of float16.
template <int STORAGE>
DEVICE void decode4(u32 codes, u32 scale, u32 minimum, u32 (&out)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if constexpr (STORAGE == KV_FP8)
            out[i] = F16::mul(e4m3_to_f16(i ? codes >> 16 : codes & 0xffffu), scale);
        else  // 0x6400 + code is the float16 1024 + code
            out[i] = F16::fma(F16::sub(prmt(codes, 0x64646464u, i ? 0x4342 : 0x4140), 0x64006400u), scale, minimum);
    }
}

// K or V, rows of WIDTH elements: its address, and its tile in shared memory.
template <int STORAGE, int WIDTH, int COLUMNS>
struct Operand {
    using Stored = Storage<STORAGE, WIDTH>;
    static constexpr bool CODED = Stored::CODED;
    static constexpr int ROW_BYTES = Stored::ROW;
    static constexpr int STRIDE = (COLUMNS / 8 | 1) * 16;
    static constexpr int TILE_BYTES = KEYS * STRIDE;
    static constexpr int BYTES = CODED ? TILE_BYTES + KEYS * (ROW_BYTES + 4) : 2 * TILE_BYTES;

    const u8* data;
    const u8* params;
    u8* shared;

    DEVICE u8* tile(int stage) const { return shared + (CODED ? 0 : stage * TILE_BYTES); }
    DEVICE u8* codes() const { return shared + TILE_BYTES; }
    DEVICE u32* tile_params() const { return reinterpret_cast<u32*>(codes() + KEYS * ROW_BYTES); }

    // Starts to copy the tokens at `rows` of the storage. Nothing is read for NOWHERE.
    DEVICE void load(int stage, const u32* rows) const {
        constexpr int PIECE = Stored::PIECE, PIECES = ROW_BYTES / PIECE;
        u8* to = CODED ? codes() : tile(stage);
        share_out<KEYS * PIECES>([&](int i) {
            const int row = i / PIECES, part = i % PIECES * PIECE;
            const u8* from = data + static_cast<u64>(rows[row]) * ROW_BYTES + part;
            u8* here = to + row * (CODED ? ROW_BYTES : STRIDE) + part;
            cp_async<PIECE>(here, from, rows[row] != NOWHERE);
        });
        if constexpr (CODED)
            share_out<KEYS>([&](int i) {
                Stored::copy_params(codes() + KEYS * ROW_BYTES + 4 * i, params, rows[i], rows[i] != NOWHERE);
            });
    }

    // Codes -> the tile. 8 bytes are 8 values; for int4 there are 8 more, WIDTH / 2 further on. Units of levels have 32.
    // `rows`: as they were loaded.
    DEVICE void expand(const u32* rows) const {
        if constexpr (Stored::PACKED) {
            share_out<KEYS * (WIDTH / 32)>([&](int i) {
                const int row = i / (WIDTH / 32);
                const uint4 w = Stored::unpacked(reinterpret_cast<const u32*>(codes()) + i * Stored::BITS);
                const float2 params = Stored::scale_and_minimum(tile_params()[row], static_cast<int>(rows[row]));
                const u32 pair = F16::pack(params.x, params.y);
                u8* to = shared + row * STRIDE + i % (WIDTH / 32) * 64;
                uint2 low, high;  // levels of codes in low and in high nibbles
                split_levels(low.x, high.x, w.x), split_levels(low.y, high.y, w.y);
                store8(to, low, pair), store8(to + 32, high, pair);
                split_levels(low.x, high.x, w.z), split_levels(low.y, high.y, w.w);
                store8(to + 16, low, pair), store8(to + 48, high, pair);
            });
        } else if constexpr (CODED) {
            share_out<KEYS * (ROW_BYTES / 8)>([&](int i) {
                const int row = i / (ROW_BYTES / 8), part = i % (ROW_BYTES / 8);
                const uint2 w = *reinterpret_cast<const uint2*>(codes() + 8 * i);
                const u32 pair = tile_params()[row];
                u8* to = shared + row * STRIDE + part * 16;
                if constexpr (STORAGE == KV_INT4) {
                    store8(to, make_uint2(w.x & 0x0f0f0f0fu, w.y & 0x0f0f0f0fu), pair);
                    store8(to + WIDTH, make_uint2(w.x >> 4 & 0x0f0f0f0fu, w.y >> 4 & 0x0f0f0f0fu), pair);
                } else {
                    store8(to, w, pair);
                }
            });
        }
    }

    static DEVICE void split_levels(u32& low, u32& high, u32 codes) {
        const u32 first = Stored::levels(codes), second = Stored::levels(codes >> 16);
        low = prmt(first, second, 0x6420), high = prmt(first, second, 0x7531);
    }

    static DEVICE void store8(u8* to, uint2 codes, u32 pair) {
        const u32 scale = prmt(pair, 0, 0x1010), minimum = prmt(pair, 0, 0x3232);
        u32 low[2], high[2];
        decode4<STORAGE>(codes.x, scale, minimum, low);
        decode4<STORAGE>(codes.y, scale, minimum, high);
        *reinterpret_cast<uint4*>(to) = make_uint4(low[0], low[1], high[0], high[1]);
    }
};

using Keys = Operand<K_STORAGE, D, DK>;
using Values = Operand<V_STORAGE, DV, DV>;
constexpr bool EXPANDS = Keys::CODED || Values::CODED || MEAN_PAIRS;

// The rows of a block of threads, and the keys that they see. Positions count tokens of the sequence.
struct Work {
    int sequence, token;          // the sequence's number, its first query's row of q
    int first_row, num_rows;      // of the rows (tokens x group) of the sequence and KV head
    int group, past;              // past: the first query's position
    int first, last;              // positions of the first and of the last row
    int window, sinks;
    int sink_tiles, window_tile;  // tiles of keys are those with sinks, then from the window on
    int2 spans[NUM_WARPS];        // positions of each warp's first and last row

    DEVICE int position(int row) const { return past + min(first_row + row, num_rows - 1) / group; }
    DEVICE int num_tiles() const { return sink_tiles + last / KEYS + 1 - window_tile; }
    DEVICE int tile(int i) const { return i < sink_tiles ? i : i - sink_tiles + window_tile; }
    DEVICE int first_key(int i) const { return tile(i) * KEYS; }

    // Ranges of PART tiles, of those that hold some of these tiles: first those with sinks, then from the window on.
    DEVICE int sink_parts() const { return min((sink_tiles + TILES - 1) / TILES, window_tile / TILES); }
    DEVICE int num_parts() const { return sink_parts() + last / (KEYS * TILES) + 1 - window_tile / TILES; }
    DEVICE int part(int i) const { return i < sink_parts() ? i : i - sink_parts() + window_tile / TILES; }
    // How many of the tiles stand before a range.
    DEVICE int before(int part) const {
        return min(min(part * TILES, sink_tiles) + max(part * TILES - window_tile, 0), num_tiles());
    }
};

// Finds tile `slot` of all, or returns false.
DEVICE bool find_work(
    Work& work, int slot, const int* query_start, const int* context_lens, int num_seqs, bool skip_single) {
    const int b = sequence_of<ROWS>(slot, query_start, num_seqs, work.group, work.first_row);
    const int start = query_start[b], tokens = query_start[b + 1] - start, length = context_lens[b];
    work.sequence = b, work.token = start, work.past = length - tokens, work.num_rows = tokens * work.group;
    if (work.first_row >= work.num_rows || length < tokens || (skip_single && tokens == 1)) return false;
    work.first = work.position(0), work.last = work.position(ROWS - 1);
    work.window_tile = work.window ? max(work.first - work.window + 1, 0) / KEYS : 0;
    work.sink_tiles = min((work.sinks + KEYS - 1) / KEYS, work.window_tile);
#pragma unroll
    for (int w = 0; w < NUM_WARPS; ++w)
        work.spans[w] = make_int2(work.position(w * 16 * M_TILES), work.position((w + 1) * 16 * M_TILES - 1));
    return true;
}

// Copies queries to shared memory unchanged.
DEVICE void load_queries(u8* shared, const u16* q, i64 q_stride, const Work& work) {
    constexpr int PIECES = D / 8;
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        const int row = i / PIECES, at = work.first_row + row;
        const bool valid = at < work.num_rows;
        const u16* from = q + (valid ? at / work.group * q_stride + at % work.group * D : 0) + i % PIECES * 8;
        cp_async16(shared + row * Q_STRIDE + i % PIECES * 16, from, valid);
    }
}

DEVICE u16 key_number(float x) {
    return KeyNumber::from_float(KeyNumber::is_bf16 ? x : fminf(fmaxf(x, -65504.0f), 65504.0f));
}

// Splits x into high and low, two columns.
DEVICE void split_number(float x, u16& high, u16& low) {
    high = key_number(x);
    low = key_number(x - KeyNumber::to_float(high));
}

struct Mean {
    const float* vector;  // of the KV head
    const int* pairs;
    const float* table;  // [half][2][positions]
    int half, positions;
};

// A query's factors of the mean, from x [DK]: columns high, high, low of the cosine's share, then of the sine's.
// `shares`: those of the query that turn.cu has found, or null.
DEVICE void mean_shares(u16* x, const Mean& mean, const float* shares) {
    for (int p = lane_id() & 15; p < MEAN_COLUMNS / 6 + 1; p += 16) {
        u16* to = x + D + 6 * p;
        if (p >= MEAN_PAIRS) {
            for (int i = 6 * p; i < min(6 * p + 6, MEAN_COLUMNS); ++i) x[D + i] = 0;
            continue;
        }
        if (SHARES) {
            split_number((shares ? shares[2 * p] : 0.0f) / SHARE_UNIT, to[0], to[2]);
            split_number((shares ? shares[2 * p + 1] : 0.0f) / SHARE_UNIT, to[3], to[5]);
            to[1] = to[0], to[4] = to[3];
            continue;
        }
        const int i = mean.pairs[p];
        const float first = Half::to_float(x[i]), second = Half::to_float(x[i + mean.half]);
        const float b0 = mean.vector[i] / SHARE_UNIT, b1 = mean.vector[i + mean.half] / SHARE_UNIT;
        split_number(first * b0 + second * b1, to[0], to[2]);
        split_number(second * b0 - first * b1, to[3], to[5]);
        to[1] = to[0], to[4] = to[3];
    }
}

// The other factors: high, low, high of the cosine, then of the sine, for each key of a tile.
DEVICE void mean_angles(u8* tile, const Mean& mean, int first_key) {
#pragma unroll 1
    for (int i = threadIdx.x; i < KEYS * (MEAN_COLUMNS / 6 + 1); i += THREADS) {
        const int key = i % KEYS, p = i / KEYS;
        u16* x = reinterpret_cast<u16*>(tile + key * Keys::STRIDE) + D;
        if (p >= MEAN_PAIRS) {
            for (int j = 6 * p; j < min(6 * p + 6, MEAN_COLUMNS); ++j) x[j] = 0;
            continue;
        }
        const int position = min(first_key + key, mean.positions - 1);
        const float* from = mean.table + 2ll * mean.pairs[p] * mean.positions + position;
        split_number(from[0] * SHARE_UNIT, x[6 * p], x[6 * p + 1]);
        split_number(from[mean.positions] * SHARE_UNIT, x[6 * p + 3], x[6 * p + 4]);
        x[6 * p + 2] = x[6 * p], x[6 * p + 5] = x[6 * p + 3];
    }
}

// The shares of a row (turn.cu), or null if it does not exist. `shares`: of the sequence's first token and the
// KV head; a token's are `step` queries apart.
DEVICE const float* shares_of(const float* shares, int step, const Work& work, int row) {
    const int at = work.first_row + row;
    if (at >= work.num_rows) return nullptr;
    return shares + (static_cast<i64>(at / work.group) * step + at % work.group) * NUM_SHARES;
}

// Prepares the loaded queries for the product with the keys. Half a warp has a row.
DEVICE void prepare_queries(
    u8* shared, const Mean& mean, bool turned, const float* shares, int step, const Work& work) {
    constexpr int E = D / 16;
    for (int row = threadIdx.x / 16; row < ROWS; row += THREADS / 16) {
        u16* x = reinterpret_cast<u16*>(shared + row * Q_STRIDE);
        if (MEAN_PAIRS) mean_shares(x, mean, SHARES ? shares_of(shares, step, work, row) : nullptr);
        __syncwarp();
        x += (lane_id() & 15) * E;
        float y[E];
        alignas(16) u16 loaded[E];
        load_span(loaded, x);
#pragma unroll
        for (int e = 0; e < E; ++e) y[e] = QueryNumber::to_float(loaded[e]);
        if constexpr ((D & (D - 1)) == 0)
            if (turned) hadamard<D>(y);
        alignas(16) u16 bits[E];
#pragma unroll
        for (int e = 0; e < E; ++e) bits[e] = key_number(y[e]);
        store_span(x, bits);
    }
}

// A warp's state of its rows. Lane 4 g + t has rows g and g + 8 of each 16. Sums are over this lane's keys only.
struct Rows {
    float out[M_TILES][DV / 8][4];
    float maximum[M_TILES][2], sum[M_TILES][2];
};

DEVICE void clear(Rows& rows) {
    rows = {};
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) rows.maximum[m][0] = rows.maximum[m][1] = NOTHING;
}

DEVICE void multiply_keys(float (&s)[M_TILES][N_TILES][4], const u8* queries, const u8* keys) {
    const u8* a_row = queries + (lane_id() & 15) * Q_STRIDE + (lane_id() >> 4) * 16;
    const u8* b_row = keys + ((lane_id() & 7) + (lane_id() >> 4) * 8) * Keys::STRIDE + (lane_id() >> 3 & 1) * 16;
#pragma unroll 4  // all at once spill registers
    for (int k = 0; k < DK / 16; ++k) {
        u32 a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) ldmatrix_x4(a[m], a_row + m * 16 * Q_STRIDE + k * 32);
#pragma unroll
        for (int n = 0; n < N_TILES; n += 2) {
            u32 b[4];
            ldmatrix_x4(b, b_row + n * 8 * Keys::STRIDE + k * 32);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                KeyNumber::mma(s[m][n], a[m], b[0], b[1]);
                KeyNumber::mma(s[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Scores -> weights in place, relative to the greatest score so far. Earlier results are rescaled to it.
DEVICE void soften(Rows& rows, float (&s)[M_TILES][N_TILES][4], float scale) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        float factor[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float top = rows.maximum[m][h];
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) top = fmaxf(top, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            const float base = top == NOTHING ? 0 : __fmul_rn(top, scale);  // no key has been seen yet
            factor[h] = ex2(__fmul_rn(rows.maximum[m][h], scale) - base);  // 1 if the tile has no key for this row
            rows.maximum[m][h] = top;
            float sum = 0;
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; ++i) sum += s[m][n][i] = ex2(fmaf(s[m][n][i], scale, -base));
            rows.sum[m][h] = fmaf(rows.sum[m][h], factor[h], sum);
        }
        if (__any_sync(0xffffffffu, factor[0] != 1 || factor[1] != 1)) {
#pragma unroll
            for (int n = 0; n < DV / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) rows.out[m][n][i] *= factor[i >> 1];
        }
    }
}

DEVICE void multiply_values(Rows& rows, const float (&p)[M_TILES][N_TILES][4], const u8* values) {
    const u8* b_row = values + (lane_id() & 15) * Values::STRIDE + (lane_id() >> 4) * 16;
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
        u32 a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float(&pair)[4] = p[m][2 * k + (i >> 1)];
                a[m][i] = ValueNumber::pack(pair[2 * (i & 1)], pair[2 * (i & 1) + 1]);
            }
#pragma unroll
        for (int n = 0; n < DV / 8; n += 2) {
            u32 b[4];
            ldmatrix_x4_trans(b, b_row + k * 16 * Values::STRIDE + n * 16);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                ValueNumber::mma(rows.out[m][n], a[m], b[0], b[1]);
                ValueNumber::mma(rows.out[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Hidden scores become minus infinity.
DEVICE void mask(float (&s)[M_TILES][N_TILES][4], const Work& work, int row, int key) {
    const int column = key + 2 * (lane_id() & 3), sinks = work.sinks - column;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int last = work.position(row + 16 * m + 8 * h + lane_id() / 4) - column;
            const int before = work.window ? last - work.window : -1;  // the key before the window, apart from sinks
#pragma unroll
            for (int i = 0; i < KEYS / 4; ++i) {
                const int at = i / 2 * 8 + i % 2;
                if (at > last || (at <= before && at >= sinks)) s[m][i / 2][2 * h + i % 2] = NOTHING;
            }
        }
}

// Adds to the scores of position 0, the first ones of the tile, what they lack.
DEVICE void add_first_key(
    float (&s)[M_TILES][N_TILES][4], const float* shares, int step, const Work& work, int row) {
    if (lane_id() & 3) return;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float* mine = shares_of(shares, step, work, row + 16 * m + 8 * h + lane_id() / 4);
            if (mine) s[m][0][2 * h] += mine[2 * MEAN_PAIRS];
        }
}

// Adds to the value of position 0, the first one of the tile, what it lacks.
DEVICE void add_first_value(u8* tile, const float* first) {
    u16* x = reinterpret_cast<u16*>(tile);
    for (int i = threadIdx.x; i < DV; i += THREADS) x[i] = ValueNumber::from_float(ValueNumber::to_float(x[i]) + first[i]);
}

// The factor on scores before 2 is raised to them. With a soft cap it is 1.
DEVICE float to_logits(float scale) { return SOFTCAP ? 1.0f : scale; }

// Attends to a tile of keys from `key` on, for the warp's rows from `row` on.
DEVICE void attend(
    Rows& rows, const Work& work, int row, int key, const u8* queries, const u8* keys, const u8* values, float scale,
    float cap, const float* shares, int step) {
    const int first = work.spans[warp_id()].x, last = work.spans[warp_id()].y, end = key + KEYS - 1;
    if (key > last || (work.window && end <= first - work.window && key >= work.sinks)) return;
    float s[M_TILES][N_TILES][4] = {};
    multiply_keys(s, queries + row * Q_STRIDE, keys);
    if (SHARES && key == 0) add_first_key(s, shares, step, work, row);
    if constexpr (SOFTCAP) {
        const SoftCap capped(cap);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[m][n][i] = capped(s[m][n][i] * scale);
    }
    if (end > first || (work.window && key <= last - work.window && end >= work.sinks)) mask(s, work, row, key);
    soften(rows, s, to_logits(scale));
    multiply_values(rows, s, values);
}

// The place of a row in the result.
DEVICE u32* output(u16* out, int num_heads, int head, const Work& work, int row) {
    const int at = work.first_row + row;
    const i64 token = work.token + at / work.group;
    return reinterpret_cast<u32*>(out + (token * num_heads + head * work.group + at % work.group) * DV);
}

// Partial results of a range of keys, of up to `rows` rows: outputs [rows][DV], maxima [rows], sums [rows].
struct Record {
    float* at;
    int rows;

    static DEVICE i64 size(int rows) { return i64(rows) * (DV + 2); }
    DEVICE float* outputs(int row) const { return at + row * DV; }
    DEVICE float* maximum(int row) const { return at + rows * DV + row; }
    DEVICE float* sum(int row) const { return at + rows * (DV + 1) + row; }
};

// The weight of a row's `sink_logits` entry, beside a maximum of scores that are still to be scaled.
DEVICE float sink_weight(const float* sink_logits, const Work& work, int row, int head, float maximum, float scale) {
    const float logit = sink_logits[head * work.group + (work.first_row + row) % work.group];
    return ex2(1.4426950409f * logit - maximum * scale);
}

// Adds up the sums of a row's four lanes, for all of them.
DEVICE void add_lanes(Rows& rows) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            rows.sum[m][h] += __shfl_xor_sync(0xffffffffu, rows.sum[m][h], 1);
            rows.sum[m][h] += __shfl_xor_sync(0xffffffffu, rows.sum[m][h], 2);
        }
}

// The factors by which what was and what comes are added, relative to the greater maximum, which `top` becomes.
DEVICE float2 fold_factors(float& top, float next, float scale) {
    const float before = top;
    top = fmaxf(before, next);
    const float base = top == NOTHING ? 0 : __fmul_rn(top, scale);
    return make_float2(ex2(__fmul_rn(before, scale) - base), ex2(__fmul_rn(next, scale) - base));
}

DEVICE float fold(float before, float next, float2 factors) {
    return fmaf(before, factors.x, __fmul_rn(next, factors.y));
}

// f(m, h, row of the block) for the rows of a warp's fragments that exist; `row` is the warp's first.
template <class F>
DEVICE void each_row(const Work& work, int row, F f) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int mine = row + 16 * m + 8 * h + lane_id() / 4;
            if (work.first_row + mine < work.num_rows) f(m, h, mine);
        }
}

// What the ranges before had, which lies in the record, and then these rows. The record is this block's own.
DEVICE void fold_rows(Rows& rows, const Work& work, int row, const Record& record, float scale) {
    __syncwarp();  // a lane has written for four
    each_row(work, row, [&](int m, int h, int mine) {
        float top = *record.maximum(mine);
        const float2 factors = fold_factors(top, rows.maximum[m][h], scale);
        rows.maximum[m][h] = top;
        rows.sum[m][h] = fold(*record.sum(mine), rows.sum[m][h], factors);
#pragma unroll
        for (int n = 0; n < DV / 8; ++n) {
            const float2 before = *reinterpret_cast<const float2*>(record.outputs(mine) + 8 * n + 2 * (lane_id() & 3));
            rows.out[m][n][2 * h] = fold(before.x, rows.out[m][n][2 * h], factors);
            rows.out[m][n][2 * h + 1] = fold(before.y, rows.out[m][n][2 * h + 1], factors);
        }
    });
    __syncwarp();  // before a lane writes again
}

DEVICE void store_rows(const Rows& rows, const Work& work, int row, const Record& record) {
    const int t = lane_id() & 3;
    each_row(work, row, [&](int m, int h, int mine) {
#pragma unroll
        for (int n = 0; n < DV / 8; ++n)
            *reinterpret_cast<float2*>(record.outputs(mine) + 8 * n + 2 * t) =
                make_float2(rows.out[m][n][2 * h], rows.out[m][n][2 * h + 1]);
        if (t == 0) *record.maximum(mine) = rows.maximum[m][h], *record.sum(mine) = rows.sum[m][h];
    });
}

DEVICE void write_rows(const Rows& rows, const Work& work, int row, u16* out, int num_heads, int head,
                       const float* sink_logits, float scale) {
    each_row(work, row, [&](int m, int h, int mine) {
        float sum = rows.sum[m][h];
        if (sink_logits) sum += sink_weight(sink_logits, work, mine, head, rows.maximum[m][h], scale);
        u32* to = output(out, num_heads, head, work, mine) + (lane_id() & 3);
        const float inverse = 1 / sum;
#pragma unroll
        for (int n = 0; n < DV / 8; ++n)
            to[4 * n] = Half::pack(rows.out[m][n][2 * h] * inverse, rows.out[m][n][2 * h + 1] * inverse);
    });
}

// Four outputs of a row, with its maximum and its sum, in a record.
struct Part {
    float4 y;
    float top, sum;
};

DEVICE Part read_part(const Record& record, int row, int column) {
    return {__ldcg(reinterpret_cast<const float4*>(record.outputs(row) + column)), __ldcg(record.maximum(row)),
            __ldcg(record.sum(row))};
}

// The sum of the ranges' parts, relative to the greatest maximum of all.
DEVICE Part add_parts(Record record, int count, i64 stride, int row, int column, float scale) {
    constexpr int BATCH = 8;
    Part all = {{}, NOTHING, 0};
    for (int s = 0; s < count; ++s) all.top = fmaxf(all.top, __ldcg(record.maximum(row) + s * stride));
    for (int s = 0; s < count; s += BATCH) {
        Part part[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j)
            part[j] = read_part({record.at + min(s + j, count - 1) * stride, record.rows}, row, column);
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const float weight = s + j < count ? ex2((part[j].top - all.top) * scale) : 0;
            all.sum += weight * part[j].sum;
            all.y.x += weight * part[j].y.x, all.y.y += weight * part[j].y.y;
            all.y.z += weight * part[j].y.z, all.y.w += weight * part[j].y.w;
        }
    }
    return all;
}

// The ranges' parts, folded one after the other as fold_rows does it.
DEVICE Part fold_parts(Record record, int count, i64 stride, int row, int column, float scale) {
    Part all = read_part(record, row, column);
#pragma unroll 4
    for (int s = 1; s < count; ++s) {
        record.at += stride;
        const Part next = read_part(record, row, column);
        const float2 factors = fold_factors(all.top, next.top, scale);
        all.sum = fold(all.sum, next.sum, factors);
        all.y.x = fold(all.y.x, next.y.x, factors), all.y.y = fold(all.y.y, next.y.y, factors);
        all.y.z = fold(all.y.z, next.y.z, factors), all.y.w = fold(all.y.w, next.y.w, factors);
    }
    return all;
}

// Merges the records of all ranges into the result.
DEVICE void merge(const Record& record, int count, const Work& work, u16* out, int num_heads, int head, float scale,
                  const float* sink_logits) {
    constexpr int PIECES = DV / 4;
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        const int row = i / PIECES, piece = i % PIECES;
        if (work.first_row + row >= work.num_rows) return;
        const i64 stride = Record::size(record.rows);
        Part all = PART ? fold_parts(record, count, stride, row, 4 * piece, scale)
                        : add_parts(record, count, stride, row, 4 * piece, scale);
        if (sink_logits) all.sum += sink_weight(sink_logits, work, row, head, all.top, scale);
        u32* to = output(out, num_heads, head, work, row) + 2 * piece;
        const float inverse = 1 / all.sum;
        to[0] = Half::pack(all.y.x * inverse, all.y.y * inverse), to[1] = Half::pack(all.y.z * inverse, all.y.w * inverse);
    }
}

// Grid (kv_heads, slots, num_splits), slots = num_tokens * group / ROWS + num_seqs. The last slots, the heaviest, run
// first. scale is that of scores, times log2(e). cap is the soft cap, times log2(e). records: float
// [slots * kv_heads][num_splits][Record::size(record_rows)], if there are several ranges. record_rows: the most rows of a
// block of threads that are in use.
extern "C" __global__ void __launch_bounds__(THREADS, DV <= 128 ? 2 : 1) prefill_attention(
    const u16* q, i64 q_stride, const u8* k_data, const u8* k_params, const u8* v_data, const u8* v_params,
    const float* mean_vector, const int* mean_pairs, const float* mean_table, int mean_half, int mean_positions,
    const int* block_tables, int table_stride, const int* query_start, const int* context_lens, int num_seqs, int group,
    int block_size, int window, int sinks, int turned, int skip_single, float scale, float cap,
    const float* sink_logits, u16* out, float* records, int record_rows, int* counters
#if SHARES
    , const float* all_shares, const float* first_values
#endif
) {
    begin_kernel();
    const int head = blockIdx.x, num_kv_heads = gridDim.x, slot = gridDim.y - 1 - blockIdx.y, num_splits = gridDim.z;
    u8* const queries = shared_memory;
    const Keys keys{k_data, k_params, queries + ROWS * Q_STRIDE};
    const Values values{v_data, v_params, keys.shared + Keys::BYTES};
    u32* const places = reinterpret_cast<u32*>(values.shared + Values::BYTES);
    Work& work = *reinterpret_cast<Work*>(places + 2 * KEYS);  // in shared memory, because registers are too few
    {
        Work mine;
        mine.group = group, mine.window = window, mine.sinks = sinks;
        if (!find_work(mine, slot, query_start, context_lens, num_seqs, skip_single)) return;
        if (threadIdx.x == 0) work = mine;
        __syncthreads();
    }
    const bool folds = PART && num_splits == 1;  // this block has all ranges
    const int num_tiles = work.num_tiles(), split = blockIdx.z;
    const int splits = !PART ? max(1, min(num_splits, num_tiles / MIN_TILES)) : folds ? 1 : work.num_parts();
    if (split >= splits) return;
    int begin = i64(num_tiles) * split / splits, end = i64(num_tiles) * (split + 1) / splits;
    if (PART && !folds) begin = work.before(work.part(split)), end = work.before(work.part(split) + 1);
    const i64 pair = i64(slot) * num_kv_heads + head;
    const int rows_kept = PART ? record_rows : ROWS;
    const Record first{records + pair * num_splits * Record::size(rows_kept), rows_kept};

    const Mean mean{mean_vector + head * D, mean_pairs + head * MEAN_PAIRS, mean_table, mean_half, mean_positions};

#if SHARES
    const int step = num_kv_heads * group;  // of tokens, in queries
    const float* const shares = all_shares + (i64(work.token) * step + head * group) * NUM_SHARES;
    const float* const first_value = first_values ? first_values + head * DV : nullptr;
#else
    constexpr int step = 0;
    constexpr const float *shares = nullptr, *first_value = nullptr;
#endif

    // The row of the storage with this thread's key of tile i.
    const auto place = [&](int i) {
        const int key = work.first_key(i) + threadIdx.x;
        if (threadIdx.x >= KEYS || i >= end || key > work.last) return NOWHERE;
        if (window && key <= work.first - window && key >= sinks) return NOWHERE;
        const u32 block = block_tables[i64(work.sequence) * table_stride + key / block_size];
        return (block * num_kv_heads + head) * block_size + key % block_size;
    };
    const auto load = [&](int i) {
        const int stage = (i - begin) & 1;
        keys.load(stage, places + stage * KEYS);
        values.load(stage, places + stage * KEYS);
    };
    if (threadIdx.x < KEYS) places[threadIdx.x] = place(begin), places[KEYS + threadIdx.x] = place(begin + 1);
    load_queries(queries, q + work.token * q_stride + i64(head) * group * D, q_stride, work);
    __syncthreads();
    load(begin);
    cp_async_commit();
    if (MEAN_PAIRS || turned || KeyNumber::is_bf16 != QueryNumber::is_bf16) {
        cp_async_wait<0>();
        __syncthreads();
        prepare_queries(queries, mean, turned, shares, step, work);
    }

    Rows rows;
    clear(rows);
    bool has_before = false;  // ranges in the record, which this block has computed
    const int row = warp_id() * 16 * M_TILES;
    for (int i = begin; i < end; ++i) {
        const int stage = (i - begin) & 1;
        cp_async_wait<0>();
        __syncthreads();
        if (EXPANDS) {
            keys.expand(places + stage * KEYS);
            values.expand(places + stage * KEYS);
            if (MEAN_PAIRS) mean_angles(keys.tile(stage), mean, work.first_key(i));
            __syncthreads();
        }
        if (SHARES && first_value && work.first_key(i) == 0) {
            add_first_value(values.tile(stage), first_value);
            __syncthreads();
        }
        if (i + 1 < end) load(i + 1);
        cp_async_commit();
        if (work.first_row + row < work.num_rows)
            attend(rows, work, row, work.first_key(i), queries, keys.tile(stage), values.tile(stage), scale, cap,
                   shares, step);
        if (threadIdx.x < KEYS) places[stage * KEYS + threadIdx.x] = place(i + 2);
        if (folds && (i + 1 == end || work.tile(i) / TILES != work.tile(i + 1) / TILES)) {
            add_lanes(rows);
            if (has_before) fold_rows(rows, work, row, first, to_logits(scale));
            if (i + 1 == end) break;
            store_rows(rows, work, row, first);
            clear(rows);
            has_before = true;
        }
    }
    cp_async_wait<0>();
    if (!folds) add_lanes(rows);

    const int num_heads = num_kv_heads * group;
    if (splits == 1) return write_rows(rows, work, row, out, num_heads, head, sink_logits, to_logits(scale));
    store_rows(rows, work, row, {first.at + split * Record::size(rows_kept), rows_kept});
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        places[0] = atomicAdd(counters + pair, 1) == splits - 1;
        if (places[0]) counters[pair] = 0;
    }
    __syncthreads();
    if (!places[0]) return;
    __threadfence();
    merge(first, splits, work, out, num_heads, head, to_logits(scale), sink_logits);
}
EXPORT(prefill_attention)
