// Products in tiles: of weights that the device's tiles read themselves, and of others through panels of unpacked rows.
#include <algorithm>

#include "../../include/even_plan.h"
#include "../../include/fp4.cuh"
#include "../../include/matmul_parts.h"
#include "../../include/operand.h"
#include "../../include/quantise.cuh"
#include "../../include/thin.cuh"
#include "../../include/wide.h"

namespace pk {
namespace {

constexpr int64_t kPanelRows = 65535 / 128 * 128;  // a grid has no more rows

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

}  // namespace

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

GemmArguments gemm_arguments(const Launch &l, const pk_op_matmul &op, const WeightGroup &g, const Packed *const *packed, int32_t min_rows) {
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

GemmArguments arguments_of(const Launch &l, const pk_op_matmul &op) {
    const Packed *packed[3] = {};
    for (int i = 0; i < op.n_w; ++i) packed[i] = find_packed(l.ctx, op.w[i]);
    return gemm_arguments(l, op, {0, op.n_w, 0}, packed, 0);
}

int32_t run_gemm(const Launch &l, const pk_op_matmul &op, const WeightGroup &g, const Packed *const *packed, int32_t min_rows, int64_t max_rows, const Beside &beside, const Handed &handed, const Tops &tops) {
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
        return tops.tops ? launch_gemm_even(l, a, max_rows, tops) : launch_gemm(l, a, max_rows);
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

int32_t run_even_units(const Launch &l, const pk_op_matmul &op, const WeightGroup &g, const Packed *const *packed, int32_t min_rows, int64_t max_rows, int32_t first_row, const Beside &beside) {
    GemmArguments a = gemm_arguments(l, op, g, packed, min_rows);
    auto move = [&](uint64_t data, const pk_tensor &t) { return data ? data + first_row * t.stride : 0; };
    a.x = reinterpret_cast<const void *>(move(op.x.data, op.x));
    a.y = reinterpret_cast<void *>(move(op.y.data, op.y));
    a.add = reinterpret_cast<const void *>(move(op.add.data, op.add));
    a.norm = half_norm(beside, max_rows, reinterpret_cast<float *>(l.scratch));
    if (beside.heads) a.heads = heads_end(*l.state, *beside.heads);
    return launch_even_units(l, a, {first_row, static_cast<int32_t>(max_rows)}, packed + g.first);
}

}  // namespace pk
