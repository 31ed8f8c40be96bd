// Products that read packed weights as they lie, by a few rows: what the streaming, skinny and flat kernels are told.
#include "../../include/flat_plan.h"
#include "../../include/format/rows.cuh"
#include "../../include/format/unit.cuh"
#include "../../include/matmul_parts.h"
#include "../../include/operand.h"
#include "../../include/stream.cuh"
#include "../../include/wide.h"
#include "../../include/with_format.h"

namespace pk {
namespace {

struct UnitFacts {
    int32_t unit = 0, group = 0;
};
UnitFacts unit_facts(int32_t format) {
    UnitFacts f;
    if (with_unit(format, [&](auto u) { f = {decltype(u)::kU, decltype(u)::kGroup}; })) return f;
    return {format == PK_FP8_E4M3 || format == PK_FP8_E5M2 ? 128 : 64, 0};
}

// Weight i of a product as kernels of few rows take it. W: StreamWeight or SkinnyWeight. column: its first one of y.
template <class W>
void place_weight(const pk_op_matmul &op, int i, const Packed &p, int64_t column, W &w) {
    w.data = reinterpret_cast<const uint8_t *>(op.w[i].data);
    const float *scales = reinterpret_cast<const float *>(w.data + p.scales);
    w.row_scale = p.scale_kind == PK_SCALES_ROW ? scales : nullptr;
    w.block_scale = p.scale_kind == PK_SCALES_BLOCK ? scales : nullptr;
    w.bias = reinterpret_cast<const float *>(op.bias[i].data);
    w.rows = static_cast<int32_t>(p.rows);
    w.first_column = static_cast<int32_t>(column);
    w.block_stride = static_cast<int32_t>(p.scale_stride);
    w.scale = p.scale;
}

int32_t launch_stream_of(int32_t format, const Launch &l, const StreamShape &s, const StreamArguments &a) {
    return with_format("matmul", format, [&](auto f) { return launch_stream<decltype(f)::value>(l, s, a); });
}

}  // namespace

int32_t run_stream(const Launch &l, const pk_op_matmul &op, const WeightGroup &g, const Packed *const *packed, int32_t min_rows, int32_t max_rows) {
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
        place_weight(op, g.first + i, p, column, w);
        w.row_bytes = p.row_bytes;
        w.padded_rows = static_cast<int32_t>(p.padded_rows);
        w.first_tile = gated ? 0 : static_cast<int32_t>(tiles);
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

int32_t run_skinny(const Launch &l, const pk_op_matmul &op, const WeightGroup &g, const Packed *const *packed, int32_t min_rows, int64_t max_rows, int32_t first_row, const Beside &beside, const pk_op_matmul *next) {
    const bool gated = op.act != PK_ACT_NONE && g.n == 2;
    SkinnyArguments a = {};
    int64_t column = g.first_column;
    for (int i = 0; i < g.n; ++i) {
        const Packed &p = *packed[g.first + i];
        SkinnyWeight &w = a.w[i];
        place_weight(op, g.first + i, p, column, w);
        w.n_tiles16 = static_cast<int32_t>(p.padded_rows / 16);
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
        return launch_flat(l, a, packed + g.first, {numbers, reinterpret_cast<unsigned long long *>(numbers + kMaxBlocks), flat_ahead(l, next)});
    }
    return with_format("matmul", packed[g.first]->format, [&](auto f) { return launch_skinny<decltype(f)::value>(l, a, packed + g.first, max_rows); });
}

}  // namespace pk
