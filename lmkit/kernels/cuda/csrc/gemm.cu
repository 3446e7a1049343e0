// y = x W^T for few tokens and a packed weight (gemm.cuh). It reads W once, as fast as memory delivers it.
//
// The kernel computes Y^T = W X^T with mma.m16n8k16. The weight is operand A (16 outputs), x is operand B (8 tokens).
// 1 to 8 tokens cost one mma per fragment of W. More tokens are more operands B for the same fragment (N_TILES of 8).
//
// A block has the inputs of one range of K and processes its share of the rows of W:
//
//     grid    (blocks of 8 N_TILES tokens, ranges of K, workers); a worker takes row blocks z, z + workers ...
//     block   WARPS_N x WARPS_K warps; a row block is WARPS_N * ROWS tiles of 16 outputs. Warp (n, k) multiplies ROWS
//             tiles with stages k, k + WARPS_K ... of the range: neighbouring kilobytes are read at the same time.
//             A warp's u-th stage is its unit u. All warps have the same number of units
//
// Weights go by cp.async from memory into the warp's own ring of DEPTH slots (a stage of ROWS tiles each, with scales).
// Every lane reads back the bytes that it copied, so there is no barrier in the loop. The ring continues into the next
// row block while the sums of the current one are added up. In flight are WARPS * (DEPTH - 1) * ROWS KB of 4-bit
// weights, say 8 * 7 = 56 KB an SM; 4.3 TB/s at 0.9 us need 29 KB of each of 132 SMs.
//
// x arrives in pieces: the inputs of one unit of all warps, in the same copy groups as the weights that they multiply.
// The first row block therefore has a barrier for each unit. If x is `resident`, all pieces stay: a block reads x from
// L2 once, 132 M K 2 bytes over the number of ranges, e.g. 4 MB at M = 16, K = 4096 in 4 ranges, beside 8 MB of weights
// of 4096 outputs. If x does not fit, pieces go through a ring of DEPTH, again for each row block, and barriers remain.
// That costs 4 M / (16 WARPS_N ROWS) bytes of x for each byte of weights, so it needs large row blocks.
// A lane reads 16 bytes of a row. Rows lie 64 bytes (mod 128) apart, which puts the 8 lanes of a phase (2 rows x 64
// bytes) on different banks. With N_TILES n-tiles and ROWS tiles a warp reads 2 N_TILES / ROWS KB of x per KB of
// weights: more than 2 tiles of tokens need ROWS 2.
//
// If the kernel begins while the one before it ends (`early`), the first DEPTH - 1 stages of weights are under way
// before it waits, and the pieces of x that belong to them follow in groups of their own. Unit u then has x in group
// DEPTH - 1 + u of 2 (DEPTH - 1) + u, else in group u of DEPTH - 1 + u: DEPTH - 2 groups may be in flight either way.
// It also asks L2 for the stages after these, `ahead` bytes a block.
//
// Weights are never rounded. Codes minus zeros are small integers. Their products with Half are summed in float32 over
// a group (at most a stage of it) and scaled in float32. Warps' sums meet in shared memory. Sums of blocks (ranges of
// K) meet in a float32 buffer, and the last block to arrive adds them up. Both sums have a fixed order.
//
// Instructions for a unit (64 4-bit weights a lane and tile) at N_TILES 1, float16: 72 to dequantize (8 x (4 lop3, 1
// shift, 4 HADD2)), 8 mma, 8 LDS, 3 LDGSTS. Including all others it is 2.7 a weight at ROWS 1, 2.1 at ROWS 2. Memory at
// full speed leaves time for 3.7.
//
// With GROUPED there are many weights, of experts. Rows of y are pairs of a token and an expert, sorted by expert
// (ops.Places). A block finds out which expert and which of its rows are its own, from numbers that a kernel of the same
// step has written; the grid has as many blocks as there can be. `codes` is then [experts][codes, params, bias].
//
// With NORM x is a float32 stream, and the block begins with the RMSNorm of its rows: it reads whole rows, and writes its
// range of them to the pieces, which all stay. Its weights are under way meanwhile. For a few tokens and N_TILES 1.
//
// With INT8 x has codes of 8 bits, with a scale for each token and group of the weight (round_groups.cu has their order).
// Integers are multiplied, exactly, and the sums of a group are scaled by both. A piece of x has the scales after its
// rows, as [WARPS_K * STAGE_SCALES][TOKENS]: a lane reads those of its two tokens at once. With GROUPED, too, x has codes
// and scales once for each of its rows, whichever experts read it. A stage of a tile is 4 mma for
// 8 tokens, 24 + 3 instructions to dequantize, and 12 for each tile of tokens to scale its sums.
//
// With FLOAT8_X x has e4m3 codes likewise, and so have the weights, which are multiplied as they are. Their sums are scaled
// after each stage, however long a group is: tensor cores add float8 products with few bits.
//
// Defines besides gemm.cuh's: N_TILES, ROWS, WARPS_N, WARPS_K, DEPTH; GROUPED; NORM; INT8; FLOAT8_X.
#include "activation.cuh"
#include "gemm.cuh"
#include "groups.cuh"

constexpr int WARPS = WARPS_N * WARPS_K, THREADS = 32 * WARPS;
// If that is enough, at least so many blocks with at most 128 registers a thread (as in gemm_plan.registers).
constexpr int BLOCKS_PER_SM = N_TILES * (ROWS + 1) <= (SCALES > 1 ? 4 : 6) ? 512 / THREADS : 1;
constexpr int TOKENS = 8 * N_TILES;
constexpr int BLOCK_TILES = WARPS_N * ROWS, BLOCK_ROWS = TILE * BLOCK_TILES;
constexpr int SLOT_BYTES = ROWS * (STAGE_BYTES + STAGE_PARAM_BYTES);
constexpr int RING_BYTES = DEPTH * SLOT_BYTES;
#ifdef CODED_X
constexpr int X_BYTES = 1;  // of an input
#else
constexpr int X_BYTES = 2;
#endif
constexpr int X_STRIDE = WARPS_K * STAGE * X_BYTES + 64;      // of tokens in a piece of x
constexpr int X_SCALES = X_BYTES == 1 ? WARPS_K * STAGE_SCALES : 0;  // of a token in a piece
constexpr int SLICE = N_TILES < 4 ? N_TILES : 4;       // n-tiles summed at a time
constexpr int SUM_STRIDE = TILE * ROWS + 4;            // floats; lanes (g, t) write to 2 t * stride + g: all banks
constexpr int SUM_BYTES = 8 * SLICE * SUM_STRIDE * 4;  // of a warp
constexpr int CHAINS = N_TILES * ROWS == 1 ? 2 : 1;    // independent mma sums of a tile, so that they overlap
constexpr int LOG_BLOCK_TILES = BLOCK_TILES > 8 ? 4 : BLOCK_TILES > 4 ? 3 : BLOCK_TILES / 2;
static_assert(1 << LOG_BLOCK_TILES == BLOCK_TILES, "row blocks of 2^n tiles");

struct Arguments {
    const u8* x;         // [tokens, row_bytes]
    const u8 *codes, *params;
    const float* bias;   // [rows of the weight] or null
    void* y;             // [tokens, outputs]
    float* partial;      // [ranges, tokens, row blocks * BLOCK_ROWS], if there is more than one range
    int tokens, row_bytes, outputs, tiles, stages, groups, stages_per_group, activation, kind;
    const i64* rows;     // the row of x for each row of y, or null: the same
    const float* x_scales;  // [stages * STAGE_SCALES, padded_tokens], of codes
    int padded_tokens;      // a multiple of 8
};

enum Kind { HALF, FLOAT, ADD };

// The weights of a warp in reading order: pointers of each lane, which advance.
struct Stream {
    int first, valid;       // stages of a row block: the first, how many there are
    int block, left, unit;  // the next row block, tiles from there to the last, the next stage
    const u8 *codes, *params;

    DEVICE void start(const Arguments& a, int blocks, int warp_n, int lane) {
        const int tile = block * BLOCK_TILES + warp_n * ROWS;
        left = block < blocks ? a.tiles - tile : 0;
        unit = 0;
        codes = a.codes + (static_cast<i64>(tile) * a.stages + first) * STAGE_BYTES + lane * 16;
        params = a.params + (static_cast<i64>(tile) * a.groups + first * SCALES) * PARAM_BYTES + lane * 16;
    }

    // Starts to copy the next stage to `slot`. The lane's share is at 16 * lane.
    DEVICE void copy(u8* slot, const Arguments& a, bool has_params) {
        const u8* group = params;
        if (SCALES == 0) group += (first + unit * WARPS_K) / a.stages_per_group * PARAM_BYTES;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const bool there = unit < valid && r < left;
            const u8* from = codes + r * static_cast<i64>(a.stages) * STAGE_BYTES;
#pragma unroll
            for (int load = 0; load < LOADS; ++load)
                cp_async16_stream(slot + r * STAGE_BYTES + load * LOAD_BYTES, from + load * LOAD_BYTES, there);
            if (has_params)
                cp_async16(slot + ROWS * STAGE_BYTES + r * STAGE_PARAM_BYTES,
                           group + r * static_cast<i64>(a.groups) * PARAM_BYTES, there);
        }
        cp_async_commit();
        ++unit;
        codes += WARPS_K * STAGE_BYTES;
        params += WARPS_K * SCALES * PARAM_BYTES;
    }
};

// Asks for the block's next weights, at most `bytes`: the stages after those that `next` has under way.
DEVICE void ask_ahead(const Arguments& a, const Stream& next, int first_stage, int units, int blocks, int bytes) {
    int unit = next.unit, left = bytes / (BLOCK_TILES * STAGE_BYTES);  // stages of a row block
    for (int block = next.block; block < blocks && left > 0; block += gridDim.z, unit = 0) {
        const int first = first_stage + unit * WARPS_K, tile = block * BLOCK_TILES + threadIdx.x;
        const int count = min(min(a.stages - first, (units - unit) * WARPS_K), left);
        left -= max(count, 0);
        if (threadIdx.x >= BLOCK_TILES || tile >= a.tiles || count <= 0) continue;
        prefetch_l2(a.codes + (static_cast<i64>(tile) * a.stages + first) * STAGE_BYTES, count * STAGE_BYTES);
        if (SCALES > 0)
            prefetch_l2(a.params + (i64{a.groups} * tile + first * SCALES) * PARAM_BYTES, count * SCALES * PARAM_BYTES);
    }
}

// Starts to copy a piece of x: tokens token .. token + count - 1 from stage `first` on, zeros beyond the last input.
DEVICE void copy_x(u8* to, const Arguments& a, int token, int count, int first) {
    constexpr int VECTORS = WARPS_K * STAGE * X_BYTES / 16;  // of a row
    for (int i = threadIdx.x; i < count * VECTORS; i += THREADS) {
        const int row = i / VECTORS, at = first * STAGE * X_BYTES + i % VECTORS * 16;
        const bool valid = at < a.row_bytes;
        const i64 x_row = a.rows ? a.rows[token + row] : token + row;
        cp_async16(to + row * X_STRIDE + i % VECTORS * 16, a.x + x_row * a.row_bytes + (valid ? at : 0), valid);
    }
    u8* const scales = to + (N_TILES == 1 ? count : TOKENS) * X_STRIDE;
#ifdef GROUPED  // rows lie anywhere
    for (int i = threadIdx.x; i < X_SCALES * TOKENS; i += THREADS) {
        const int group = first * STAGE_SCALES + i / TOKENS, row = i % TOKENS;
        const bool valid = group < a.stages * STAGE_SCALES && row < count;
        const i64 x_row = valid && a.rows ? a.rows[token + row] : token + row;
        cp_async<4>(scales + i * 4, a.x_scales + (valid ? static_cast<i64>(group) * a.padded_tokens + x_row : 0), valid);
    }
#else
    for (int i = threadIdx.x; i < X_SCALES * TOKENS / 4; i += THREADS) {
        const int group = first * STAGE_SCALES + i / (TOKENS / 4), column = token + i % (TOKENS / 4) * 4;
        const bool valid = group < a.stages * STAGE_SCALES && column < a.padded_tokens;
        cp_async16(scales + i * 16, a.x_scales + (valid ? static_cast<i64>(group) * a.padded_tokens + column : 0), valid);
    }
#endif
}

// Writes Half(x / rms(x) * weight) of inputs first .. first + count - 1 to the pieces, zeros beyond the last input. The
// sums of squares of warps meet in `shared`. inputs is a multiple of 8.
DEVICE void put_normed(u8* pieces, int piece_bytes, float* shared, const float* x, const float* weight, float eps,
                       int inputs, int first, int count) {
    float squares = 0.0f;
    for (int k = 4 * threadIdx.x; k < inputs; k += 4 * THREADS) {
        const float4 v = *reinterpret_cast<const float4*>(x + k);
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    squares = warp_sum(squares);
    __syncthreads();
    if (lane_id() == 0) shared[warp_id()] = squares;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += shared[warp];
    const float factor = rsqrtf(total / inputs + eps);
    for (int i = 8 * threadIdx.x; i < count; i += 8 * THREADS) {
        uint4 half = make_uint4(0, 0, 0, 0);
        if (first + i < inputs) {
            const float4 *v = reinterpret_cast<const float4*>(x + first + i), *w = reinterpret_cast<const float4*>(weight + first + i);
            const float4 a = v[0], b = v[1], s = w[0], t = w[1];
            half = make_uint4(Half::pack(a.x * factor * s.x, a.y * factor * s.y), Half::pack(a.z * factor * s.z, a.w * factor * s.w),
                              Half::pack(b.x * factor * t.x, b.y * factor * t.y), Half::pack(b.z * factor * t.z, b.w * factor * t.w));
        }
        *reinterpret_cast<uint4*>(pieces + i / (WARPS_K * STAGE) * piece_bytes + i % (WARPS_K * STAGE) * 2) = half;
    }
}

#ifdef NORM
constexpr bool X_COMES = false;  // with the weights, in pieces
#else
constexpr bool X_COMES = true;
#endif

using Sums = float[ROWS][N_TILES][4];

#ifdef CODED_X
// sums += one stage of weights times x. `x` is the lane's part of its token in the first n-tile, `scales` those of its
// two tokens there.
DEVICE void multiply(Sums& sums, const u8* slot, const u8* x, const u8* scales, int lane) {
    CodeSum group_sums[ROWS][N_TILES][4];
    Params p[ROWS];
#pragma unroll
    for (int k64 = 0; k64 < STAGE / 64; ++k64) {
        if (N_TILES * ROWS >= 8 && k64 > 0) __syncwarp();  // keeps loads of later steps behind: registers are few
        u32 a[ROWS][2][4];
        float scale[2][ROWS][2];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const u8* params = slot + ROWS * STAGE_BYTES + r * STAGE_PARAM_BYTES;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int k32 = 2 * k64 + h;
                const u8* load = slot + r * STAGE_BYTES + k32 / HALVES * LOAD_BYTES;
                const uint4 words = reinterpret_cast<const uint4*>(load)[lane];
                if (k32 % SCALE_STRIDE == 0) p[r] = load_params(params, k32 / SCALE_STRIDE, lane >> 2);
                byte_fragment(a[r][h], words, h, p[r].excess);
                scale[h][r][0] = p[r].scale[0], scale[h][r][1] = p[r].scale[1];
            }
        }
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            const uint4 b = *reinterpret_cast<const uint4*>(x + n * 8 * X_STRIDE + k64 * 64);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int k32 = 2 * k64 + h;
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    CodeSum (&group)[4] = group_sums[r][n];
                    if (k32 % SCALE_STRIDE == 0)
#pragma unroll
                        for (int c = 0; c < 4; ++c) group[c] = NO_SUM;
                    multiply_codes(group, a[r][h], h ? b.z : b.x, h ? b.w : b.y);
                }
                if (k32 % SCALE_STRIDE < SCALE_STRIDE - 1) continue;
                const float2 x_scale =
                    *reinterpret_cast<const float2*>(scales + (k32 / SCALE_STRIDE * TOKENS + n * 8) * 4);
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
#pragma unroll
                    for (int c = 0; c < 4; ++c)
                        sums[r][n][c] = fmaf(scale[h][r][c >> 1] * (c & 1 ? x_scale.y : x_scale.x),
                                             sum_of(group_sums[r][n][c]), sums[r][n][c]);
            }
        }
    }
}
#else
constexpr u32 ONES = Half::is_bf16 ? 0x3f803f80u : 0x3c003c00u;
constexpr int PARTS = SPLIT ? 2 : 1;  // of 32 inputs with a scale each
static_assert(!SHIFTED || SCALE_STRIDE == 1, "groups with offsets have 16 or 32 inputs");

// sums += 32 inputs of one group or two, scaled at once. What offsets take off a sum are they times that of the inputs.
DEVICE void multiply_groups(Sums& sums, const u32 (&a)[ROWS][2][4], const Params (&p)[ROWS][PARTS], const u8* x) {
    constexpr u32 ones[4] = {ONES, ONES, ONES, ONES};
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
        const uint2* const b = reinterpret_cast<const uint2*>(x + n * 8 * X_STRIDE);
        const uint2 steps[2] = {b[0], b[SPLIT ? 4 : 1]};
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            float x_sums[4] = {}, group[ROWS][4] = {};
#pragma unroll
            for (int i = part; i < part + 2 / PARTS; ++i) {
                if (SHIFTED) Half::mma(x_sums, ones, steps[i].x, steps[i].y);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) Half::mma(group[r], a[r][i], steps[i].x, steps[i].y);
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    sums[r][n][c] = fmaf(p[r][part].scale[c >> 1], group[r][c], sums[r][n][c]);
                    if (SHIFTED) sums[r][n][c] = fmaf(-p[r][part].offset[c >> 1], x_sums[c], sums[r][n][c]);
                }
        }
    }
}

// sums += one stage of weights times x. `x` is the lane's part of its token in the first n-tile.
DEVICE void multiply(Sums& sums, const u8* slot, const u8* x, const u8*, int lane) {
    const int g = lane >> 2;
    float group_sums[CHAINS][ROWS][N_TILES][4];
    Params p[ROWS][PARTS];
    uint4 words[ROWS], high[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
        if (CODE_BITS == 6) high[r] = reinterpret_cast<const uint4*>(slot + r * STAGE_BYTES + 2 * LOAD_BYTES)[lane];
#pragma unroll
    for (int k32 = 0; k32 < STAGE / 32; ++k32) {
        if (N_TILES * ROWS >= 8 && k32 > 0) __syncwarp();  // keeps loads of later steps behind: registers are few
        if (k32 % HALVES == 0)
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const u8* load = slot + r * STAGE_BYTES + k32 / HALVES * LOAD_BYTES;
                words[r] = reinterpret_cast<const uint4*>(load)[lane];
            }
        if (k32 % SCALE_STRIDE == 0) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const u8* params = slot + ROWS * STAGE_BYTES + r * STAGE_PARAM_BYTES;
#pragma unroll
                for (int i = 0; i < PARTS; ++i) p[r][i] = load_params(params, PARTS * k32 / SCALE_STRIDE + i, g);
#pragma unroll
                for (int i = 0; i < CHAINS * N_TILES * 4; ++i)
                    group_sums[i / (4 * N_TILES)][r][i / 4 % N_TILES][i % 4] = 0;
            }
        }
        u32 a[ROWS][2][4];
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                fragment(a[r][i], words[r], k32 % HALVES, i, p[r][i % PARTS].excess,
                         CODE_BITS == 6 ? component(high[r], k32) : 0);
        if (SPLIT || SHIFTED) {
            multiply_groups(sums, a, p, x + k32 * 64);
            continue;
        }
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            const uint4 b = *reinterpret_cast<const uint4*>(x + n * 8 * X_STRIDE + k32 * 64);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) Half::mma(group_sums[0][r][n], a[r][0], b.x, b.y);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) Half::mma(group_sums[CHAINS - 1][r][n], a[r][1], b.z, b.w);
        }
        if (k32 % SCALE_STRIDE == SCALE_STRIDE - 1)
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        float sum = group_sums[0][r][n][c];
                        if (CHAINS > 1) sum += group_sums[CHAINS - 1][r][n][c];
                        sums[r][n][c] = fmaf(p[r][0].scale[c >> 1], sum, sums[r][n][c]);  // in all variants
                    }
    }
}
#endif

// Writes the sums of n-tiles first .. first + SLICE - 1 to the block's shared sums: [warp][token][row].
template <int FIRST>
DEVICE void put_sums(float* all, const Sums& sums) {
    const int lane = lane_id(), g = lane >> 2, t = lane & 3;
    float* mine = all + warp_id() * (SUM_BYTES / 4);
#pragma unroll
    for (int n = FIRST; n < FIRST + SLICE; ++n)
        if (n < N_TILES)
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const int token = (n - FIRST) * 8 + 2 * t + (c & 1), row = r * TILE + (c >> 1) * 8 + g;
                    mine[token * SUM_STRIDE + row] = sums[r][n < N_TILES ? n : 0][c];
                }
}

// Adds up the warps' sums.
struct FromWarps {
    const float* all;
    DEVICE float operator()(int row, int token) const {
        const int in_warp = row % (TILE * ROWS);
        const float* at = all + row / (TILE * ROWS) * WARPS_K * (SUM_BYTES / 4) + token * SUM_STRIDE + in_warp;
        float sum = at[0];
#pragma unroll
        for (int k = 1; k < WARPS_K; ++k) sum += at[k * (SUM_BYTES / 4)];
        return sum;
    }
};

// Adds up the ranges' sums.
struct FromRanges {
    const float* first;  // of the first range, at the first token and row of this block
    i64 stride, range_stride;
    int ranges;
    DEVICE float operator()(int row, int token) const {
        const float* at = first + token * stride + row;
        float sum = __ldcg(at);
#pragma unroll 4
        for (int k = 1; k < ranges; ++k) sum += __ldcg(at + k * range_stride);
        return sum;
    }
};

DEVICE float fast_gated(float x, float y, int activation) {
    const float t = gate_exponent(x, y, activation);
    return __fdividef(x, 1.0f + __expf(-t)) * y;
}

// Computes the tokens' results of a row block from its sums. Gated tiles have 8 gates, then the values they multiply.
template <class From>
DEVICE void finish(const Arguments& a, const From& from, int block, int token, int count) {
    const int log_rows = a.activation ? 3 : 4, log_width = log_rows + LOG_BLOCK_TILES;
#pragma unroll 1  // a few steps at most; unrolled, they would take registers from the loop over units
    for (int i = threadIdx.x; i < count << log_width; i += THREADS) {
        const int t = i >> log_width, column = i & ((1 << log_width) - 1);
        const int n = (block << log_width) + column;
        if (n >= a.outputs) continue;
        const int row = a.activation ? (column >> 3) * TILE + (column & 7) : column;
        float value = from(row, t);
        if (a.bias) value += a.bias[n];
        if (a.activation)
            value = fast_gated(value, from(row + 8, t) + (a.bias ? a.bias[a.outputs + n] : 0.0f), a.activation);
        const i64 at = static_cast<i64>(token + t) * a.outputs + n;
        if (a.kind == HALF)
            static_cast<u16*>(a.y)[at] = Half::from_float(value);
        else if (a.kind == FLOAT)
            static_cast<float*>(a.y)[at] = value;
        else
            static_cast<float*>(a.y)[at] += value;
    }
}

// Turns one slice of a row block's sums into results, or into this range's share of them.
template <int FIRST>
DEVICE void give(const Arguments& a, float* all, const Sums& sums, int block, int token, int count, i64 padded_rows) {
    if (8 * FIRST >= count) return;
    __syncthreads();
    put_sums<FIRST>(all, sums);
    __syncthreads();
    const int here = min(count - 8 * FIRST, 8 * SLICE);
    const FromWarps from{all};
    if (gridDim.y == 1) return finish(a, from, block, token + 8 * FIRST, here);
    const i64 first = static_cast<i64>(blockIdx.y) * a.tokens + token + 8 * FIRST;
    float* to = a.partial + first * padded_rows + block * BLOCK_ROWS;
#pragma unroll 1
    for (int i = threadIdx.x; i < here * BLOCK_ROWS; i += THREADS)
        to[i / BLOCK_ROWS * padded_rows + i % BLOCK_ROWS] = from(i % BLOCK_ROWS, i / BLOCK_ROWS);
}

// Whether this block is the last of all ranges to finish a row block. The writes of the others are visible then.
DEVICE bool is_last(i32* counter, float* flag) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        const bool last = atomicAdd(counter, 1) == static_cast<int>(gridDim.y) - 1;
        if (last) *counter = 0;
        *flag = last ? 1.0f : 0.0f;
    }
    __syncthreads();
    const bool last = *flag != 0.0f;
    __threadfence();
    return last;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    gemm(const u8* x, const u8* codes, const u8* params, const float* bias, void* y, float* partial, i32* counters,
         int tokens, int row_bytes, int outputs, int tiles, int stages, int groups, int stages_per_group, int units,
         int resident, int activation, int kind, int early, int ahead
#ifdef GROUPED
         , const i64* active, const i64* rows
#endif
#ifdef NORM
         , const float* stream, const float* norm_weight, float eps
#endif
#ifdef CODED_X
         , const float* x_scales, int padded_tokens
#endif
    ) {
    launch_next();
    Arguments a{x,     codes,  params, bias,             y,          partial, tokens,  row_bytes, outputs,
                tiles, stages, groups, stages_per_group, activation, kind,    nullptr, nullptr,   0};
#ifdef CODED_X
    a.x_scales = x_scales, a.padded_tokens = padded_tokens;
#endif
    // The shuffle keeps the compiler from taking threadIdx apart again for every unit.
    const int lane = __shfl_sync(0xffffffffu, lane_id(), lane_id()), warp = __shfl_sync(0xffffffffu, warp_id(), 0);
    const int warp_n = warp / WARPS_K, warp_k = warp % WARPS_K;
    const int blocks = (tiles + BLOCK_TILES - 1) / BLOCK_TILES, workers = gridDim.z;
    const int first_stage = blockIdx.y * units * WARPS_K, first = first_stage + warp_k;
#ifdef GROUPED
    wait_for_previous();
    const Share share = find_share(active, blockIdx.x, TOKENS);
    const int token = share.first, count = share.count;
    if (count == 0) return;
    const u64* const weight = reinterpret_cast<const u64*>(codes) + 3 * share.group;
    a.codes = reinterpret_cast<const u8*>(weight[0]), a.params = reinterpret_cast<const u8*>(weight[1]);
    a.bias = reinterpret_cast<const float*>(weight[2]), a.rows = rows;
#else
    const int token = blockIdx.x * TOKENS, count = min(tokens - token, TOKENS);
#endif
    const i64 padded_rows = static_cast<i64>(blocks) * BLOCK_ROWS;

    // With one n-tile, there is no place for tokens that do not exist: the last token is read instead. More n-tiles
    // have that place and read its contents. Either way these columns of the product are never used.
    float* const all_sums = reinterpret_cast<float*>(shared_memory + WARPS * RING_BYTES);
    u8* const pieces = shared_memory + WARPS * (RING_BYTES + SUM_BYTES);
    const int rows_bytes = (N_TILES == 1 ? count : TOKENS) * X_STRIDE, piece_bytes = rows_bytes + X_SCALES * TOKENS * 4;
    const int my_token = N_TILES == 1 ? min(lane >> 2, count - 1) : lane >> 2;
    const u8* const my_x = pieces + my_token * X_STRIDE + warp_k * STAGE * X_BYTES + (SPLIT ? 8 : 16) * (lane & 3);
    const u8* const my_scales = pieces + rows_bytes + (warp_k * STAGE_SCALES * TOKENS + 2 * (lane & 3)) * 4;
    u8* const ring = shared_memory + warp * RING_BYTES;

    // The places of a unit's weights and of its piece of x. Beyond the last stage there are zeros.
    const int num_pieces = resident ? units : DEPTH;
    int filled_piece = 0, filled_slot = 0;
    const int valid = first < stages ? (stages - first + WARPS_K - 1) / WARPS_K : 0;
    Stream weights{first, valid, static_cast<int>(blockIdx.z)};
    weights.start(a, blocks, warp_n, lane);
    const auto copy_piece = [&](int block, int unit) {
#ifndef NORM
        if (block < blocks && filled_piece < num_pieces)
            copy_x(pieces + filled_piece * piece_bytes, a, token, count, first_stage + unit * WARPS_K);
        filled_piece = !resident && filled_piece == DEPTH - 1 ? 0 : filled_piece + 1;
#endif
    };
    const auto copy_weights = [&] {
        weights.copy(ring + filled_slot + lane * 16, a, lane < STAGE_PARAM_BYTES / 16);
        filled_slot = filled_slot == (DEPTH - 1) * SLOT_BYTES ? 0 : filled_slot + SLOT_BYTES;
        if (weights.unit == units) weights.block += workers, weights.start(a, blocks, warp_n, lane);
    };
    const auto copy_next = [&] {
        copy_piece(weights.block, weights.unit);
        copy_weights();
    };
    if (early) {
#pragma unroll 1
        for (int i = 0; i < DEPTH - 1; ++i) copy_weights();
        ask_ahead(a, weights, first_stage, units, blocks, ahead);
    }
    wait_for_previous();
#ifdef NORM
    for (int t = 0; t < count; ++t)
        put_normed(pieces + t * X_STRIDE, piece_bytes, all_sums, stream + static_cast<i64>(token + t) * (row_bytes / 2),
                   norm_weight, eps, row_bytes / 2, first_stage * STAGE, units * WARPS_K * STAGE);
    __syncthreads();
#endif
    int early_block = blockIdx.z, early_unit = 0;
#pragma unroll 1
    for (int i = 0; i < DEPTH - 1; ++i) {
        if (!early) {
            copy_next();
            continue;
        }
        copy_piece(early_block, early_unit);
        cp_async_commit();
        if (++early_unit == units) early_unit = 0, early_block += workers;
    }

    int slot = 0, piece = 0;
    for (int block = blockIdx.z; block < blocks; block += workers) {
        const bool waits_for_x = X_COMES && (!resident || block == static_cast<int>(blockIdx.z));
        Sums sums = {};
        for (int unit = 0; unit < units; ++unit) {
            cp_async_wait<DEPTH - 2>();
            if (waits_for_x)
                __syncthreads();  // the piece has arrived, and all have left the one that is filled next
            else
                __syncwarp();  // other lanes copied the scales, and all have left the slot that is filled next
            copy_next();
            multiply(sums, ring + slot, my_x + piece, my_scales + piece, lane);
            slot = slot == (DEPTH - 1) * SLOT_BYTES ? 0 : slot + SLOT_BYTES;
            piece = piece == (num_pieces - 1) * piece_bytes ? 0 : piece + piece_bytes;
        }
        give<0>(a, all_sums, sums, block, token, count, padded_rows);
        if (N_TILES > SLICE) give<SLICE>(a, all_sums, sums, block, token, count, padded_rows);
        if (gridDim.y > 1) {
            const i64 at = token * padded_rows + block * BLOCK_ROWS;
            const FromRanges from{partial + at, padded_rows, tokens * padded_rows, static_cast<int>(gridDim.y)};
            if (is_last(counters + block * gridDim.x + blockIdx.x, all_sums)) finish(a, from, block, token, count);
        }
    }
    cp_async_wait<0>();
}
EXPORT(gemm)
