// The matmul op: checks operands, chooses between the streaming and the tiled kernels, and runs panels of dequantised
// weights through the tiled one for formats it does not read itself.
#include <algorithm>
#include <type_traits>

#include "../../include/even_plan.h"
#include "../../include/flat_plan.h"
#include "../../include/format/rows.cuh"
#include "../../include/format/unit.cuh"
#include "../../include/fp4.cuh"
#include "../../include/gemm.cuh"
#include "../../include/invariant.h"
#include "../../include/narrow.cuh"
#include "../../include/operand.h"
#include "../../include/quantise.cuh"
#include "../../include/skinny.cuh"
#include "../../include/stream.cuh"
#include "../../include/thin.cuh"

namespace pk {
namespace {

constexpr int64_t kPanelBytes = 64 << 20, kPanelRows = 65535 / 128 * 128;  // of weights that are unpacked at a time; a grid has no more rows
constexpr int64_t kStreamRows = 64;   // the streaming kernel takes so many rows where there is no wgmma,
constexpr int64_t kDotRows = 2;       // so many where there is,
constexpr int64_t kSkinnyRows = 128;  // and the skinny kernel the rest up to here,
constexpr int64_t kPlainRows = 64;    // or to here, where tiles read the weights as they are;
constexpr int64_t kClusterLeast = 32; // of BF16 and FP8 clusters of blocks take more than these,
constexpr int64_t kFp8Least = 16;     // and of FP8 more than these where they are even products.

int64_t align256(int64_t n) { return (n + 255) & ~int64_t{255}; }

struct UnitFacts {
    int32_t unit = 0, group = 0;
};
UnitFacts unit_facts(int32_t format) {
    UnitFacts f;
    if (with_unit(format, [&](auto u) { f = {decltype(u)::kU, decltype(u)::kGroup}; })) return f;
    return {format == PK_FP8_E4M3 || format == PK_FP8_E5M2 ? 128 : 64, 0};
}

// Runs `call` with the format as a constant.
template <class Call>
int32_t with_format(int32_t format, Call &&call) {
    switch (format) {
#define PK_CASE(F) case F: return call(std::integral_constant<int32_t, F>());
        PK_CASE(PK_BF16) PK_CASE(PK_F16) PK_CASE(PK_FP8_E4M3) PK_CASE(PK_FP8_E5M2) PK_CASE(PK_Q8_0) PK_CASE(PK_Q4_0) PK_CASE(PK_Q4_1) PK_CASE(PK_Q5_0) PK_CASE(PK_Q5_1)
        PK_CASE(PK_Q2_K) PK_CASE(PK_Q3_K) PK_CASE(PK_Q4_K) PK_CASE(PK_Q5_K) PK_CASE(PK_Q6_K) PK_CASE(PK_IQ4_NL) PK_CASE(PK_IQ4_XS) PK_CASE(PK_MXFP4) PK_CASE(PK_NVFP4)
#undef PK_CASE
        default: return fail(PK_UNSUPPORTED, "matmul: no kernel for weight format %d", format);
    }
}

int32_t launch_stream_of(int32_t format, const Launch &l, const StreamShape &s, const StreamArguments &a) {
    return with_format(format, [&](auto f) { return launch_stream<decltype(f)::value>(l, s, a); });
}

// The weights of one record that share a format, as one launch sees them.
struct Group {
    int first = 0, n = 0;
    int64_t first_column = 0;
};

// Rows of x can be read 16 bytes at a time.
bool is_wide(const pk_tensor &x) { return x.cols % 8 == 0 && x.stride % 16 == 0 && x.data % 16 == 0; }

int32_t run_stream(const Launch &l, const pk_op_matmul &op, const Group &g, const Packed *const *packed, int32_t min_rows, int32_t max_rows) {
    const bool gated = op.act != PK_ACT_NONE && g.n == 2;
    const int32_t format = packed[g.first]->format;
    const UnitFacts facts = unit_facts(format);
    const int64_t n_units = packed[g.first]->padded_cols / facts.unit;
    StreamArguments a = {};
    const int32_t tile_rows = 32 * (max_rows <= 16 ? 1 : max_rows <= 32 ? 2 : 4), out_rows = gated ? tile_rows / 2 : tile_rows;
    int64_t tiles = 0, column = g.first_column;
    for (int i = 0; i < g.n; ++i) {
        const Packed &p = *packed[g.first + i];
        StreamWeight &w = a.w[i];
        w.data = reinterpret_cast<const uint8_t *>(op.w[g.first + i].data);
        const float *scales = reinterpret_cast<const float *>(w.data + p.scales);
        w.row_scale = p.scale_kind == PK_SCALES_ROW ? scales : nullptr;
        w.block_scale = p.scale_kind == PK_SCALES_BLOCK ? scales : nullptr;
        w.bias = reinterpret_cast<const float *>(op.bias[g.first + i].data);
        w.row_bytes = p.row_bytes;
        w.rows = static_cast<int32_t>(p.rows);
        w.padded_rows = static_cast<int32_t>(p.padded_rows);
        w.first_tile = gated ? 0 : static_cast<int32_t>(tiles);
        w.first_column = static_cast<int32_t>(column);
        w.block_stride = static_cast<int32_t>(p.scale_stride);
        w.scale = p.scale;
        if (!gated || i == 0) tiles += (p.rows + out_rows - 1) / out_rows;
        column += gated ? 0 : p.rows;
    }
    StreamShape s = stream_shape(l.ctx->n_processors, max_rows, tiles * (tile_rows / 32), n_units, facts.unit, facts.group, gated);
    const int64_t partial = s.n_slices > 1 ? static_cast<int64_t>(s.n_slices) * s.n_tiles * tile_rows * 8 * s.n_tokens8 * 4 : 0;
    if (partial > l.scratch_bytes || s.n_tiles * 4ll > kZeroCounterBytes)
        return fail(PK_BAD_ARG, "matmul: partial sums take %lld bytes and %d counters, the workspace has %lld and %lld", (long long)partial, s.n_tiles, (long long)l.scratch_bytes, (long long)(kZeroCounterBytes / 4));
    a.x = reinterpret_cast<const void *>(op.x.data);
    a.y = reinterpret_cast<void *>(op.y.data);
    a.add = reinterpret_cast<const void *>(op.add.data);
    a.info = l.info;
    a.counters = l.counters;
    a.partial = reinterpret_cast<float *>(l.scratch);
    a.x_stride = elements_apart(op.x);
    a.y_stride = elements_apart(op.y);
    a.add_stride = elements_apart(op.add);
    a.rows_symbol = op.x.rows;
    a.x_format = op.x.format;
    a.y_format = op.y.format;
    a.add_format = op.add.format;
    a.n_w = g.n;
    a.k = static_cast<int32_t>(op.x.cols);
    a.n_units = static_cast<int32_t>(n_units);
    a.units_per_slice = s.units_per_slice;
    a.n_slices = s.n_slices;
    a.n_tiles = s.n_tiles;
    a.staged_rows = s.n_tokens8 == 1 ? max_rows : 8 * s.n_tokens8;
    a.x_row_bytes = static_cast<int32_t>(s.x_row_bytes);
    a.min_rows = min_rows;
    a.max_rows = max_rows;
    a.act = op.act;
    a.is_wide = is_wide(op.x);
    a.scale = op.scale;
    a.softcap = op.softcap;
    return launch_stream_of(format, l, s, a);
}

// x as bf16 in scratch, widened with zeros to whole pieces of 16 bytes.
int32_t narrow_x(const Launch &l, const pk_tensor &x, int64_t max_rows, uint8_t *scratch, pk_tensor *out) {
    pk_op_copy copy = {};
    copy.x = x;
    copy.out = x;
    copy.out.data = reinterpret_cast<uint64_t>(scratch);
    copy.out.format = PK_BF16;
    copy.out.stride = (x.cols + 7) / 8 * 16;
    if (x.cols % 8)
        if (int32_t status = check(cudaMemsetAsync(scratch, 0, max_rows * copy.out.stride, l.stream), "matmul")) return status;
    if (int32_t status = launch_copy(l, copy)) return status;
    *out = copy.out;
    out->cols = copy.out.stride / 2;
    return PK_OK;
}

// What a product makes of the norms beside it; squares: room for their sums.
HalfNorm half_norm(const Beside &beside, int64_t max_rows, float *squares) {
    HalfNorm n = {};
    n.stride = static_cast<int32_t>((max_rows + 15) / 16 * 16);
    if (beside.after) {
        n.out = reinterpret_cast<void *>(beside.after->out.data);
        n.out_stride = beside.after->out.stride / 2;
        n.w = reinterpret_cast<const float *>(beside.after->w.data);
        n.squares = squares;
    }
    if (beside.before) {
        n.row_squares = squares;
        n.n_cols = static_cast<int32_t>(beside.before->x.cols);
        n.eps = beside.before->eps;
    }
    return n;
}

HeadsEnd heads_end(const pk_state &s, const pk_op_qkv &op) {
    auto numbers = [](const pk_tensor &t) { return reinterpret_cast<const float *>(t.data); };
    return {
        reinterpret_cast<void *>(op.q.data), reinterpret_cast<uint8_t *>(s.kv), numbers(op.q_norm), numbers(op.k_norm), numbers(op.v_norm), numbers(op.frequency), numbers(op.gains),
        reinterpret_cast<const int32_t *>(s.token_position), reinterpret_cast<const int32_t *>(s.token_page), op.q.stride / 2, s.kv_page_stride, op.k_offset, op.v_offset,
        op.n_heads, op.n_kv_heads, s.page_tokens, op.kv_format, op.rope_magnitude, op.eps,
    };
}

// Rows first_row and at most 127 more, when the step has min_rows to max_rows.
int32_t run_skinny(const Launch &l, const pk_op_matmul &op, const Group &g, const Packed *const *packed, int32_t min_rows, int64_t max_rows, int32_t first_row, const Beside &beside = {}) {
    const bool gated = op.act != PK_ACT_NONE && g.n == 2;
    SkinnyArguments a = {};
    int64_t column = g.first_column;
    for (int i = 0; i < g.n; ++i) {
        const Packed &p = *packed[g.first + i];
        SkinnyWeight &w = a.w[i];
        w.data = reinterpret_cast<const uint8_t *>(op.w[g.first + i].data);
        const float *scales = reinterpret_cast<const float *>(w.data + p.scales);
        w.row_scale = p.scale_kind == PK_SCALES_ROW ? scales : nullptr;
        w.block_scale = p.scale_kind == PK_SCALES_BLOCK ? scales : nullptr;
        w.bias = reinterpret_cast<const float *>(op.bias[g.first + i].data);
        w.rows = static_cast<int32_t>(p.rows);
        w.n_tiles16 = static_cast<int32_t>(p.padded_rows / 16);
        w.first_column = static_cast<int32_t>(column);
        w.block_stride = static_cast<int32_t>(p.scale_stride);
        w.scale = p.scale;
        column += gated ? 0 : p.rows;
    }
    const int64_t partial = skinny_partial_bytes(l.ctx->n_processors, max_rows - first_row);
    const int64_t narrowed = align256(max_rows * ((op.x.cols + 7) / 8 * 16));
    if (partial + narrowed > l.scratch_bytes)
        return fail(PK_BAD_ARG, "matmul: %lld rows want %lld bytes of workspace, there are %lld", (long long)max_rows, (long long)(partial + narrowed), (long long)l.scratch_bytes);
    pk_tensor x = op.x;
    if (x.format != PK_BF16 || !is_wide(x))
        if (int32_t status = narrow_x(l, op.x, max_rows, l.scratch + partial, &x)) return status;
    a.x = reinterpret_cast<const void *>(x.data);
    a.y = reinterpret_cast<void *>(op.y.data);
    a.add = reinterpret_cast<const void *>(op.add.data);
    a.info = l.info;
    a.partial = reinterpret_cast<float *>(l.scratch);
    a.flags = l.counters + (kCounterBytes - kSkinnyFlagBytes) / 4;
    a.x_stride = elements_apart(x);
    a.y_stride = elements_apart(op.y);
    a.add_stride = elements_apart(op.add);
    a.rows_symbol = op.x.rows;
    a.y_format = op.y.format;
    a.add_format = op.add.format;
    a.n_w = g.n;
    a.k = static_cast<int32_t>(x.cols);
    a.min_rows = min_rows;
    a.max_rows = static_cast<int32_t>(max_rows);
    a.first_row = first_row;
    a.act = op.act;
    a.scale = op.scale;
    a.softcap = op.softcap;
    a.norm = half_norm(beside, max_rows, reinterpret_cast<float *>(l.scratch + partial));  // where x would be narrowed to, which takes more
    if (beside.heads) a.heads = heads_end(*l.state, *beside.heads);
    if (op.x.rows == PK_ROWS_T && is_flat(l, *packed[g.first], max_rows)) {
        int32_t *numbers = l.counters + kZeroCounterBytes / 4;
        return launch_flat(l, a, packed + g.first, {numbers, reinterpret_cast<unsigned long long *>(numbers + kMaxBlocks)});
    }
    return with_format(packed[g.first]->format, [&](auto f) { return launch_skinny<decltype(f)::value>(l, a, packed + g.first, max_rows); });
}

// bf16 or narrowed operands, on whatever the device does best.
int32_t launch_gemm(const Launch &l, const GemmArguments &a, int64_t max_rows) {
    if (has_tcgen05(l.ctx)) return launch_gemm_tcgen05(l, a, max_rows);
    if (is_thin(l, a, max_rows)) return launch_thin(l, a, max_rows);
    return has_wgmma(l.ctx) ? launch_gemm_wgmma(l, a, max_rows) : launch_gemm_mma(l, a, max_rows);
}

// Rows of one weight that lie in a panel.
struct PanelPiece {
    int weight = 0;
    int64_t row = 0, n = 0;
};

constexpr int64_t kTileRows = 128, kTileColumns = 256;  // of x, and of y: what a block multiplies
int64_t padded_to_tiles(int64_t rows) { return (rows + kTileRows - 1) / kTileRows * kTileRows; }

// The next piece of a panel with room for `left` rows, from `at` on; false when the panel is full or nothing is left.
bool next_piece(const int64_t *rows, int n_w, int64_t &left, PanelPiece &at, PanelPiece &piece) {
    if (at.weight == n_w || left < kTileRows) return false;
    piece = {at.weight, at.row, std::min(left, rows[at.weight] - at.row)};
    left -= padded_to_tiles(piece.n);
    at.row += piece.n;
    if (at.row == rows[at.weight]) at = {at.weight + 1};
    return true;
}

// Rows of a panel, of at most `most`: as few panels as fit, as small as makes the fewest waves of tiles of `wide` columns. A weight of 4,096 rows in panels of 2,688 takes three
// waves of 2,048 rows of x, in panels of 2,048 two; k and v by themselves take a wave each, which in q's panel they share.
int64_t panel_rows(const Launch &l, const int64_t *rows, int n_w, int64_t most, int64_t max_rows, int64_t wide) {
    int64_t best = most, fewest = 0, least = 0;
    for (int64_t size = most; size >= kTileRows; size -= kTileRows) {
        int64_t n_panels = 0, n_waves = 0;
        for (PanelPiece at, p; at.weight < n_w; ++n_panels) {
            int64_t left = size, n_tiles = 0;
            while (next_piece(rows, n_w, left, at, p)) n_tiles += (p.n + wide - 1) / wide;
            n_waves += (n_tiles * ((max_rows + kTileRows - 1) / kTileRows) + l.ctx->n_processors - 1) / l.ctx->n_processors;
        }
        if (size == most) fewest = n_panels;
        if (n_panels > fewest) break;
        if (size == most || n_waves <= least) {
            best = size;
            least = n_waves;
        }
    }
    return best;
}

// FP8 weights that tiles read as they are.
bool reads_fp8(const Launch &l, int32_t format) { return format == PK_FP8_E4M3 && (has_wgmma(l.ctx) || has_fp8_mma() || has_tcgen05(l.ctx)); }

// What a tiled product of x and weights as they lie is asked.
GemmArguments gemm_arguments(const Launch &l, const pk_op_matmul &op, const Group &g, const Packed *const *packed, int32_t min_rows) {
    const bool gated = op.act != PK_ACT_NONE && g.n == 2;
    GemmArguments a = {};
    a.x = reinterpret_cast<const void *>(op.x.data);
    a.x_row_bytes = op.x.stride;
    a.k = static_cast<int32_t>(op.x.cols);
    a.y = reinterpret_cast<void *>(op.y.data);
    a.add = reinterpret_cast<const void *>(op.add.data);
    a.info = l.info;
    a.y_stride = elements_apart(op.y);
    a.add_stride = elements_apart(op.add);
    a.rows_symbol = op.x.rows;
    a.y_format = op.y.format;
    a.add_format = op.add.format;
    a.min_rows = min_rows;
    a.act = op.act;
    a.scale = op.scale;
    a.softcap = op.softcap;
    a.n_w = g.n;
    int64_t column = g.first_column;
    for (int i = 0; i < g.n; ++i) {
        const Packed &p = *packed[g.first + i];
        GemmWeight &w = a.w[i];
        w.data = reinterpret_cast<const void *>(op.w[g.first + i].data);
        w.row_bytes = p.row_bytes;
        if (reads_fp8(l, p.format)) {
            const float *scales = reinterpret_cast<const float *>(op.w[g.first + i].data + p.scales);
            w.row_scale = p.scale_kind == PK_SCALES_ROW ? scales : nullptr;
            w.block_scale = p.scale_kind == PK_SCALES_BLOCK ? scales : nullptr;
            w.block_stride = p.scale_stride;
        }
        w.bias = reinterpret_cast<const float *>(op.bias[g.first + i].data);
        w.rows = static_cast<int32_t>(p.rows);
        w.first_column = static_cast<int32_t>(column);
        w.scale = p.scale;
        column += gated ? 0 : p.rows;
    }
    return a;
}

int32_t run_gemm(const Launch &l, const pk_op_matmul &op, const Group &g, const Packed *const *packed, int32_t min_rows, int64_t max_rows, const Beside &beside = {}, const Handed &handed = {}) {
    const bool gated = op.act != PK_ACT_NONE && g.n == 2, is_fp8 = reads_fp8(l, packed[g.first]->format);
    GemmArguments a = gemm_arguments(l, op, g, packed, min_rows);
    uint8_t *scratch = handed.scratch ? handed.scratch : l.scratch;
    const int64_t padded = packed[g.first]->padded_cols;
    if (is_fp4(packed[g.first]->format) && has_fp4_mma(l.ctx)) {
        a.fp4 = packed[g.first]->format;
        a.x_scale = reinterpret_cast<const float *>(scratch);
        NarrowFp4 narrow = {a.x, scratch + align256(max_rows * 4), reinterpret_cast<float *>(scratch), nullptr, elements_apart(op.x), fp4_row_bytes(a.fp4, padded, kTerms), op.x.rows, op.x.format, a.k, min_rows, 0, 1};
        if (int32_t status = launch_narrow_fp4(l, a.fp4, narrow, max_rows)) return status;
        a.x = narrow.out;
        a.x_row_bytes = narrow.row_bytes;
        scratch = narrow.out + align256(max_rows * narrow.row_bytes);
    } else if (!is_fp8 && (op.x.format != PK_BF16 || !is_wide(op.x))) {
        pk_tensor narrow;
        if (int32_t status = narrow_x(l, op.x, max_rows, scratch, &narrow)) return status;
        a.k = static_cast<int32_t>(narrow.cols);
        a.x = scratch;
        a.x_row_bytes = narrow.stride;
        scratch += align256(max_rows * narrow.stride);
    }
    a.narrowed = handed.left;
    if (beside.before || beside.after) a.norm = half_norm(beside, max_rows, handed.squares ? handed.squares : reinterpret_cast<float *>(scratch));
    if (beside.heads) a.heads = heads_end(*l.state, *beside.heads);
    if (packed[g.first]->format == PK_BF16 || is_fp8) {
        if (is_fp8) {
            Launch own = l;
            own.scratch = scratch;
            if (int32_t status = narrow_fp8(own, a, max_rows, op.x.format, handed.x)) return status;
        }
        return launch_gemm(l, a, max_rows);
    }
    // Panels of dequantised rows (FP4: of rows in order).
    const int64_t row_bytes = a.fp4 ? fp4_row_bytes(a.fp4, padded, 1) : padded * 2;
    const int sides = gated ? 2 : 1, n_w = gated ? 1 : g.n;
    int64_t rows[3], columns[3], tallest = 0;
    for (int i = 0; i < g.n; ++i) {
        rows[i] = packed[g.first + i]->rows;
        columns[i] = i == 0 ? g.first_column : columns[i - 1] + rows[i - 1];
        tallest = std::max(tallest, padded_to_tiles(rows[i]));
    }
    const int64_t fit = std::min(std::min(kPanelBytes, 2 * tallest * row_bytes) / (row_bytes * sides) / kTileRows * kTileRows, kPanelRows);
    const int64_t most = panel_rows(l, rows, n_w, std::max(kTileRows, fit), max_rows, kTileColumns / sides);
    a.are_unpacked = true;
    a.n_w = 0;
    for (PanelPiece at, p; at.weight < n_w;) {
        uint8_t *to = scratch;
        int64_t left = most;
        a.n_w = 0;
        while (next_piece(rows, n_w, left, at, p))
            for (int side = 0; side < sides; ++side) {
                const int i = p.weight + side;
                const Packed &q = *packed[g.first + i];
                const uint64_t data = op.w[g.first + i].data;
                if (int32_t status = a.fp4 ? launch_unpack_fp4(l, q, data, p.row, p.n, to, row_bytes) : launch_dequantize(l, q, data, p.row, p.n, to, row_bytes)) return status;
                GemmWeight &w = a.w[a.n_w++];
                w.data = to;
                w.row_bytes = row_bytes;
                w.bias = op.bias[g.first + i].data ? reinterpret_cast<const float *>(op.bias[g.first + i].data) + p.row : nullptr;
                w.rows = static_cast<int32_t>(p.n);
                w.first_column = static_cast<int32_t>(columns[p.weight] + p.row);
                w.scale = a.fp4 ? q.scale : 1.0f;
                to += align256(p.n * row_bytes);
            }
        if (int32_t status = launch_gemm(l, a, max_rows)) return status;
    }
    return PK_OK;
}

// Block formats as they are, by more than 32 rows: those from first_row on, when the step has min_rows to max_rows.
int32_t run_even_units(const Launch &l, const pk_op_matmul &op, const Group &g, const Packed *const *packed, int32_t min_rows, int64_t max_rows, int32_t first_row, const Beside &beside = {}) {
    GemmArguments a = gemm_arguments(l, op, g, packed, min_rows);
    auto move = [&](uint64_t data, const pk_tensor &t) { return data ? data + first_row * t.stride : 0; };
    a.x = reinterpret_cast<const void *>(move(op.x.data, op.x));
    a.y = reinterpret_cast<void *>(move(op.y.data, op.y));
    a.add = reinterpret_cast<const void *>(move(op.add.data, op.add));
    a.norm = half_norm(beside, max_rows, reinterpret_cast<float *>(l.scratch));
    if (beside.heads) a.heads = heads_end(*l.state, *beside.heads);
    return launch_even_units(l, a, {first_row, static_cast<int32_t>(max_rows)}, packed + g.first);
}

int n_groups(const pk_op_matmul &op, const Packed *const *packed, Group *groups) {
    int n = 0;
    int64_t column = 0;
    for (int i = 0; i < op.n_w; ++i) {
        if (n > 0 && packed[i]->format == packed[groups[n - 1].first]->format) {
            ++groups[n - 1].n;
        } else {
            groups[n++] = {i, 1, column};
        }
        column += packed[i]->rows;
    }
    return n;
}

// One group of weights, every row by itself: whatever the step has, a row's sums are made in one order. The skinny kernel cuts K by
// the weights' shape alone, and its widths add up alike.
int32_t run_each(const Launch &l, const pk_op_matmul &op, const Group &g, const Packed *const *packed) {
    const int64_t max_rows = bound(l, op.x.rows);
    if (!has_wgmma(l.ctx)) return run_gemm(l, op, g, packed, 0, max_rows);
    for (int64_t row = 0; row < max_rows; row += kSkinnyRows)
        if (int32_t status = run_skinny(l, op, g, packed, 0, max_rows, static_cast<int32_t>(row))) return status;
    return PK_OK;
}

// Weights that clusters of blocks multiply by fewer rows than other tiles; FP8 by narrowed ones.
bool is_clustered(const Launch &l, int32_t format, int64_t max_rows) {
    return has_wgmma(l.ctx) && max_rows > kClusterLeast && ((format == PK_BF16 && max_rows <= kClusterRows) || (format == PK_FP8_E4M3 && max_rows <= kFp8ClusterRows));
}

// What a tiled product is asked, of weights in one format.
GemmArguments arguments_of(const Launch &l, const pk_op_matmul &op) {
    const Packed *packed[3] = {};
    for (int i = 0; i < op.n_w; ++i) packed[i] = find_packed(l.ctx, op.w[i]);
    return gemm_arguments(l, op, {0, op.n_w, 0}, packed, 0);
}

// Rows of a step that flat products take, too, but even ones, by x narrowed, in less time (LOG.md, M61).
bool is_few_even(const Launch &l, const pk_op_matmul &op) {
    const int64_t rows = bound(l, op.x.rows);
    if (op.x.rows != PK_ROWS_T || rows <= kFp8Least || rows > kClusterLeast || op.x.cols % 128 || op.x.format != PK_BF16 || is_invariant(l.ctx)) return false;
    for (int i = 0; i < op.n_w; ++i)
        if (find_packed(l.ctx, op.w[i])->format != PK_FP8_E4M3) return false;
    return is_even(l, arguments_of(l, op), rows, true);
}

// One group of weights: sampled rows can be anything up to the bound, so that each kernel of the ladder looks whether the
// step is its own.
int32_t run_group(const Launch &l, const pk_op_matmul &op, const Group &g, const Packed *const *packed) {
    if (is_invariant(l.ctx)) return run_each(l, op, g, packed);
    const int64_t max_rows = bound(l, op.x.rows), small = has_wgmma(l.ctx) ? kDotRows : kStreamRows;
    const bool is_plain = packed[g.first]->format == PK_BF16 || packed[g.first]->format == PK_FP8_E4M3;
    const bool ladder = op.x.rows == PK_ROWS_S;
    if (!ladder && (is_clustered(l, packed[g.first]->format, max_rows) || is_few_even(l, op))) return run_gemm(l, op, g, packed, 0, max_rows);
    // Sampled rows beyond flat products: even ones of one warpgroup's rows and of two.
    const bool is_readable = has_wgmma(l.ctx) && is_wide(op.x) && op.x.format == PK_BF16;
    auto arguments = [&] { return gemm_arguments(l, op, g, packed, ladder ? kClusterLeast + 1 : 0); };
    const bool has_units = is_readable && !is_plain && are_even_units(l, arguments(), packed + g.first);
    if (!ladder && has_units && max_rows > kFlatRows && max_rows <= kEvenUnitsRows) {
        for (int32_t row = 0; row < max_rows; row += kEvenRows)
            if (int32_t status = run_even_units(l, op, g, packed, 0, max_rows, row)) return status;
        return PK_OK;
    }
    const bool has_even = ladder && (has_units || (is_plain && is_readable && is_even(l, arguments(), kEvenRows, packed[g.first]->format == PK_FP8_E4M3)));
    int64_t most = !has_wgmma(l.ctx) ? kStreamRows : has_even ? kClusterLeast : is_plain ? kPlainRows : kSkinnyRows;
    int64_t below = 0;
    const int64_t steps[5] = {small < 8 ? small : 8, 16, 32, 64, 128};
    for (int64_t rows : steps) {
        if (below >= max_rows || rows > most) break;
        if (!ladder && max_rows > rows) continue;
        const int32_t least = static_cast<int32_t>(below + (below > 0)), here = static_cast<int32_t>(std::min(rows, max_rows));
        if (int32_t status = rows <= small ? run_stream(l, op, g, packed, least, here) : run_skinny(l, op, g, packed, least, here, 0)) return status;
        below = rows;
    }
    for (const int64_t rows : {kEvenRows / 2, kEvenRows}) {
        if (!has_even || max_rows <= most) break;
        const int32_t least = static_cast<int32_t>(most) + 1;
        const int64_t here = std::min(rows, max_rows);
        if (int32_t status = has_units ? run_even_units(l, op, g, packed, least, here, 0) : run_gemm(l, op, g, packed, least, here)) return status;
        most = rows;
    }
    if (max_rows > most && has_wgmma(l.ctx) && (ladder || max_rows <= 2 * most) && !is_plain) {
        // Twice through packed weights is still less than unpacking them.
        const int32_t here = static_cast<int32_t>(std::min(2 * most, max_rows));
        for (int32_t row : {0, static_cast<int32_t>(most)})
            if (int32_t status = has_units ? run_even_units(l, op, g, packed, static_cast<int32_t>(most) + 1, here, row) : run_skinny(l, op, g, packed, ladder ? static_cast<int32_t>(most) + 1 : 0, here, row)) return status;
        most = 2 * most;
    }
    return max_rows > most ? run_gemm(l, op, g, packed, ladder ? static_cast<int32_t>(most) + 1 : 0, max_rows) : PK_OK;
}

}  // namespace

int32_t launch_matmul(const Launch &l, const pk_op_matmul &op) {
    const Packed *packed[3] = {};
    for (int i = 0; i < op.n_w; ++i) packed[i] = find_packed(l.ctx, op.w[i]);
    Group groups[3];
    const int n = n_groups(op, packed, groups);
    if (op.act != PK_ACT_NONE && n == 2) {
        // Gate and up in two formats: gate into y, then up times its activation, as a record with one weight says it: y = act(add) * (x W^T).
        pk_op_matmul gate = op, up = op;
        gate.act = PK_ACT_NONE;
        gate.scale = 1.0f;
        up.add = op.y;
        groups[1].first_column = 0;
        if (int32_t status = run_group(l, gate, groups[0], packed)) return status;
        return run_group(l, up, groups[1], packed);
    }
    for (int i = 0; i < n; ++i)
        if (int32_t status = run_group(l, op, groups[i], packed)) return status;
    return PK_OK;
}

// The kernel that runs a product in steps of l's bounds and can multiply by what a norm left.
enum class HalfKernel { kNone, kFlat, kEven, kEvenFp8, kEvenUnits, kTall, kTallFp8 };
// What a tiled product is asked with x narrowed: nothing but its place is not known yet.
static GemmArguments narrowed_somewhere(const Launch &l, GemmArguments a) {
    a.x_scale = reinterpret_cast<const float *>(l.scratch);
    return a;
}
static HalfKernel half_kernel(const Launch &l, const pk_op_matmul &op) {
    const int64_t rows = bound(l, PK_ROWS_T);
    if (!has_wgmma(l.ctx) || is_invariant(l.ctx) || rows <= kDotRows || op.x.rows != PK_ROWS_T || op.x.format != PK_BF16 || !is_wide(op.x)) return HalfKernel::kNone;
    const bool is_few = is_few_even(l, op);
    int n_clustered = 0, n_fp8 = 0, n_units = 0;
    const Packed *packed[3] = {};
    for (int i = 0; i < op.n_w; ++i) {
        packed[i] = find_packed(l.ctx, op.w[i]);
        const Packed &weight = *packed[i];
        const int32_t format = weight.format;
        if (is_few || is_clustered(l, format, rows)) ++n_clustered, n_fp8 += format == PK_FP8_E4M3;
        else if (rows > kFlatRows && rows <= kEvenRows && has_even_units(weight)) ++n_units;
        else if (!is_flat(l, weight, rows)) return HalfKernel::kNone;
        if (op.act != PK_ACT_NONE && format != find_packed(l.ctx, op.w[0])->format) return HalfKernel::kNone;
    }
    if (n_units > 0) return n_units == op.n_w && are_even_units(l, arguments_of(l, op), packed) ? HalfKernel::kEvenUnits : HalfKernel::kNone;
    if (n_clustered == 0) return HalfKernel::kFlat;
    if (n_clustered < op.n_w) return HalfKernel::kNone;
    const bool is_fp8 = n_fp8 > 0;
    if (is_fp8 && (n_fp8 < op.n_w || !narrows_input(l, op))) return HalfKernel::kNone;
    GemmArguments a = arguments_of(l, op);
    if (rows <= kEvenRows) return !is_even(l, a, rows, is_fp8) ? HalfKernel::kNone : is_fp8 ? HalfKernel::kEvenFp8 : HalfKernel::kEven;
    if (is_fp8) a = narrowed_somewhere(l, a);
    return !is_tall(l, a, rows) ? HalfKernel::kNone : is_fp8 ? HalfKernel::kTallFp8 : HalfKernel::kTall;
}

static bool is_same(const pk_tensor &a, const pk_tensor &b) { return a.data == b.data && a.rows == b.rows && a.cols == b.cols && a.stride == b.stride; }

bool halves_norm(const Launch &l, const pk_op_matmul &front, const pk_op_norm &norm, const pk_op_matmul &back) {
    if (front.n_w != 1 || front.act != PK_ACT_NONE || front.y.format != PK_F32 || front.w[0].rows % 16) return false;
    if (norm.kind != PK_NORM_RMS || norm.post_w.data || norm.residual.data || norm.bias.data || !norm.w.data || norm.out.format != PK_BF16) return false;
    if (!is_same(front.y, norm.x) || norm.x.cols != front.w[0].rows || !is_same(norm.out, back.x)) return false;
    const HalfKernel kernel = half_kernel(l, front);
    if (kernel == HalfKernel::kNone || kernel != half_kernel(l, back)) return false;
    if (kernel == HalfKernel::kFlat) return true;
    if (kernel == HalfKernel::kEven || kernel == HalfKernel::kEvenFp8 || kernel == HalfKernel::kEvenUnits) return !front.bias[0].data && (norm.out.data | norm.out.stride | norm.w.data) % 16 == 0 && (kernel != HalfKernel::kEvenFp8 || front.w[0].rows % 128 == 0);
    // Tall tiles make their half where they add up parts; with more than one tile of rows they gain nothing by it (LOG.md, M36). They store pairs of columns straight from registers.
    const int64_t rows = bound(l, PK_ROWS_T);
    auto has_pairs = [](const pk_tensor &t) { return t.data % 8 == 0 && t.stride % 8 == 0; };
    if (rows > 256 || front.w[0].rows % 64 || front.bias[0].data || front.softcap > 0.0f || front.add.format != PK_F32 || !is_same(front.add, front.y) || !has_pairs(front.y) || !has_pairs(norm.out) || norm.w.data % 8) return false;
    GemmArguments a = arguments_of(l, front);
    if (kernel == HalfKernel::kTallFp8) {
        // Behind what a run of products keeps there is room for every part of a tile.
        if (l.scratch_bytes - half_scratch(rows, norm.x.cols) - fp8_scratch(rows, std::max(front.x.cols, back.y.cols)) < tall_most_parts_bytes(l)) return false;
        a = narrowed_somewhere(l, a);
    }
    return tall_is_cut(l, a, rows);
}

bool ends_heads(const Launch &l, const pk_op_matmul &op, const pk_op_qkv &heads) {
    if (op.act != PK_ACT_NONE || op.softcap > 0.0f || op.add.data || !is_same(op.y, heads.qkv)) return false;
    const HalfKernel kernel = half_kernel(l, op);
    if (kernel == HalfKernel::kNone || kernel == HalfKernel::kTall || kernel == HalfKernel::kTallFp8) return false;
    if (heads.parts != PK_PARTS_QKV || heads.head_width != 128 || heads.v_width != 128 || (heads.frequency.data && (heads.rope_width != 128 || heads.rope_layout != 0))) return false;
    const bool is_half = heads.kv_format == PK_F16;
    if ((heads.kv_format != PK_BF16 && heads.kv_format != PK_FP8_E4M3 && !is_half) || heads.q.format != (is_half ? PK_F16 : PK_BF16) || ((heads.q.data | heads.q.stride | heads.k_offset | heads.v_offset | l.state->kv_page_stride) & 3)) return false;
    for (int i = 0; i < op.n_w; ++i)
        if (find_packed(l.ctx, op.w[i])->rows % 128) return false;
    if (kernel == HalfKernel::kEven || kernel == HalfKernel::kEvenFp8 || kernel == HalfKernel::kEvenUnits) return !is_half && ((heads.q.data | heads.q.stride | heads.k_offset | heads.v_offset | l.state->kv_page_stride) & 15) == 0;
    return flat_ends_heads(l, heads.n_heads + 2 * heads.n_kv_heads);
}

int32_t launch_matmul_beside(const Launch &l, const pk_op_matmul &op, const Beside &beside, const Handed &handed) {
    const Packed *packed[3] = {};
    for (int i = 0; i < op.n_w; ++i) packed[i] = find_packed(l.ctx, op.w[i]);
    Group groups[3];
    const HalfKernel kernel = half_kernel(l, op);
    const int64_t rows = bound(l, op.x.rows);
    // Heads of several formats are one launch where they may be: values alone are a few blocks' work.
    if (kernel == HalfKernel::kEvenUnits && beside.heads && are_multiplied_together(packed, op.n_w)) return run_even_units(l, op, {0, op.n_w, 0}, packed, 0, rows, 0, beside);
    for (int i = 0, n = n_groups(op, packed, groups); i < n; ++i) {
        int32_t status = PK_OK;
        if (kernel == HalfKernel::kFlat) status = run_skinny(l, op, groups[i], packed, 0, rows, 0, beside);
        else if (kernel == HalfKernel::kEvenUnits) status = run_even_units(l, op, groups[i], packed, 0, rows, 0, beside);
        else status = run_gemm(l, op, groups[i], packed, 0, rows, beside, handed);
        if (status) return status;
    }
    return PK_OK;
}

bool narrows_input(const Launch &l, const pk_op_matmul &op) {
    if (bound(l, op.x.rows) <= kClusterLeast) return is_few_even(l, op);
    if (op.x.rows != PK_ROWS_T || !has_wgmma(l.ctx) || op.x.cols % 128 || op.x.format != PK_BF16 || is_invariant(l.ctx)) return false;
    for (int i = 0; i < op.n_w; ++i)
        if (find_packed(l.ctx, op.w[i])->format != PK_FP8_E4M3) return false;
    return true;
}

bool can_narrow_output(const Launch &l, const pk_op_matmul &op) {
    if (op.act != PK_ACT_SILU || op.n_w != 2 || op.add.data || op.softcap > 0.0f || op.y.format != PK_BF16 || !is_wide(op.y) || op.w[0].rows % 128 || !narrows_input(l, op)) return false;
    for (int i = 0; i < 2; ++i)
        if (op.bias[i].data || find_packed(l.ctx, op.w[i])->scale_kind == PK_SCALES_ROW) return false;
    return leaves_narrowed(l, bound(l, op.x.rows), op.w[0].rows, op.x.cols);
}

int32_t check_matmul(pk_ctx *ctx, const pk_op_matmul &op, int64_t at) {
    const Packed *packed[3] = {};
    for (int i = 0; i < op.n_w; ++i) {
        packed[i] = find_packed(ctx, op.w[i]);
        if (packed[i] == nullptr) return fail(PK_BAD_ARG, "op %lld matmul: w[%d] was not made by pk_repack of this context", (long long)at, i);
        if (packed[i]->rows != op.w[i].rows || packed[i]->cols != op.w[i].cols)
            return fail(PK_BAD_ARG, "op %lld matmul: w[%d] is %lld x %lld, pk_repack made %lld x %lld", (long long)at, i, (long long)op.w[i].rows,
                        (long long)op.w[i].cols, (long long)packed[i]->rows, (long long)packed[i]->cols);
    }
    if (op.act != PK_ACT_NONE && packed[0]->format != packed[1]->format && (op.add.data || op.softcap > 0.0f))
        return fail(PK_UNSUPPORTED, "op %lld matmul: gate is format %d and up is format %d, with add or softcap; the CUDA pack wants one format or neither of both", (long long)at, packed[0]->format, packed[1]->format);
    const pk_tensor *operands[3] = {&op.x, &op.y, &op.add};
    const char *names[3] = {"x", "y", "add"};
    for (int i = 0; i < 3; ++i) {
        if (!operands[i]->data) continue;
        if (operands[i]->format != PK_F32 && operands[i]->format != PK_BF16)
            return fail(PK_UNSUPPORTED, "op %lld matmul: %s is format %d; the CUDA pack takes F32 and BF16", (long long)at, names[i], operands[i]->format);
    }
    return PK_OK;
}

int64_t matmul_scratch(const pk_ctx *ctx, const pk_op_matmul &op, int64_t max_rows) {
    const int64_t k = (op.x.cols + 255) / 256 * 256;
    int64_t stream = 0;
    for (int32_t rows : {1, 2, 4, 8, 16, 32, 64}) {
        if (rows > std::max<int64_t>(8, 2 * max_rows) || (rows > kDotRows && has_wgmma(ctx))) break;
        int64_t columns = 0;
        for (int i = 0; i < op.n_w; ++i) columns += (op.w[i].rows + 127) / 128 * 128;
        const int64_t tile_rows = 32 * (rows <= 16 ? 1 : rows <= 32 ? 2 : 4);
        for (int32_t unit : {64, 128, 256}) {
            StreamShape s = stream_shape(ctx->n_processors, rows, (columns + 3 * 128) / 32, k / unit, unit, 16, op.act != PK_ACT_NONE);
            // Fewer tiles (one weight of several) mean more slices: never more items than slots and one more slice of each tile.
            const int64_t items = std::max<int64_t>(static_cast<int64_t>(s.n_slices) * s.n_tiles, 2ll * ctx->n_processors + 2 * s.n_tiles);
            stream = std::max(stream, items * tile_rows * 8 * s.n_tokens8 * 4);
        }
    }
    if (has_wgmma(ctx)) {
        const int64_t width = std::min(max_rows, kSkinnyRows);
        const int64_t narrowed = is_invariant(ctx) ? max_rows : std::min(max_rows, 2 * kSkinnyRows);
        stream = std::max(stream, skinny_partial_bytes(ctx->n_processors, width) + align256(narrowed * k * 2));
    }
    // What a run of products with FP8 weights keeps (narrowing.cu): behind its own x a gated one may leave y narrowed, in front of it others what a norm leaves.
    int64_t narrowed = half_scratch(max_rows, k) + (op.act == PK_ACT_NONE ? 0 : fp8_scratch(max_rows, op.w[0].rows));
    const int64_t few = std::min(max_rows, kFp8ClusterRows);
    if (op.act == PK_ACT_NONE && op.x.rows == PK_ROWS_T && op.w[0].format == PK_FP8_E4M3) narrowed = std::max(narrowed, half_scratch(few, op.w[0].rows) + fp8_scratch(few, k));
    if (max_rows <= kStreamRows && has_wgmma(ctx)) return std::max(stream, narrowed);
    if (max_rows <= kStreamRows && !is_invariant(ctx)) return stream;
    int64_t rows = 0;
    for (int i = 0; i < op.n_w; ++i) rows = std::max(rows, op.w[i].rows);
    const int64_t gemm = align256(max_rows * k * 2) + std::min<int64_t>(kPanelBytes, 2 * align256((rows + 127) / 128 * 128 * k * 2)) + (1 << 20);
    return std::max({stream, gemm, narrowed});
}

}  // namespace pk
