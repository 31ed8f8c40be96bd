// The matmul op: checks operands and chooses between the streaming, skinny and tiled kernels (packed.cu, tiled.cu).
#include <algorithm>

#include "../../include/even_plan.h"
#include "../../include/flat_plan.h"
#include "../../include/invariant.h"
#include "../../include/logits.h"
#include "../../include/matmul_parts.h"
#include "../../include/quantise.cuh"
#include "../../include/stream.cuh"
#include "../../include/wide.h"

namespace pk {
namespace {

// One group of weights, every row by itself: whatever the step has, a row's sums are made in one order. The skinny kernel cuts K by
// the weights' shape alone, and its widths add up alike.
int32_t run_each(const Launch &l, const pk_op_matmul &op, const WeightGroup &g, const Packed *const *packed) {
    const int64_t max_rows = bound(l, op.x.rows);
    if (!has_wgmma(l.ctx)) return run_gemm(l, op, g, packed, 0, max_rows);
    for (int64_t row = 0; row < max_rows; row += kSkinnyRows)
        if (int32_t status = run_skinny(l, op, g, packed, 0, max_rows, static_cast<int32_t>(row))) return status;
    return PK_OK;
}

// Whether products of sampled rows, more of them than flat ones take, are even ones of BF16 or FP8.
bool has_even_logits(const Launch &l, const pk_op_matmul &op, const WeightGroup &g, const Packed *const *packed) {
    const int32_t format = packed[g.first]->format;
    return op.x.rows == PK_ROWS_S && has_wgmma(l.ctx) && !is_invariant(l.ctx) && (format == PK_BF16 || format == PK_FP8_E4M3) && is_wide(op.x) && op.x.format == PK_BF16 &&
           is_even(l, gemm_arguments(l, op, g, packed, kClusterLeast + 1), kEvenRows, format == PK_FP8_E4M3);
}

// Sampled rows can be anything up to the bound, so that each kernel of a ladder looks whether the step is its own. Of decode rows hardly ever fewer are drawn for than the
// launch is made for: one kernel takes whatever there is.
bool is_laddered(const Launch &l, const pk_op_matmul &op) { return op.x.rows == PK_ROWS_S && !(l.decode_only && bound(l, op.x.rows) <= kEvenRows); }

// One group of weights. tops: of a product of logits.
int32_t run_group(const Launch &l, const pk_op_matmul &op, const WeightGroup &g, const Packed *const *packed, const Tops &tops = {}, const pk_op_matmul *next = nullptr) {
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
    const bool has_even = ladder && (has_units || has_even_logits(l, op, g, packed)), has_rungs = is_laddered(l, op);
    int64_t most = !has_wgmma(l.ctx) ? kStreamRows : has_even ? kClusterLeast : is_plain ? kPlainRows : kSkinnyRows;
    int64_t below = 0;
    const int64_t steps[5] = {small < 8 ? small : 8, 16, 32, 64, 128};
    for (int64_t rows : steps) {
        if (below >= max_rows || rows > most) break;
        if (!has_rungs && max_rows > rows) continue;
        const int32_t least = ladder && !has_rungs ? 1 : static_cast<int32_t>(below + (below > 0)), here = static_cast<int32_t>(std::min(rows, max_rows));
        if (int32_t status = rows <= small ? run_stream(l, op, g, packed, least, here) : run_skinny(l, op, g, packed, least, here, 0, {}, next)) return status;
        below = rows;
    }
    for (const int64_t rows : {kEvenRows / 2, kEvenRows}) {
        if (!has_even || max_rows <= most) break;
        if (!has_rungs && max_rows > rows && rows < kEvenRows) continue;
        const int32_t least = has_rungs ? static_cast<int32_t>(most) + 1 : 1;
        const int64_t here = std::min(rows, max_rows);
        if (int32_t status = has_units ? run_even_units(l, op, g, packed, least, here, 0) : run_gemm(l, op, g, packed, least, here, {}, {}, tops)) return status;
        most = rows;
    }
    if (max_rows > most && has_wgmma(l.ctx) && (ladder || max_rows <= 2 * most) && !is_plain) {
        // Twice through packed weights is still less than unpacking them.
        const int32_t here = static_cast<int32_t>(std::min(2 * most, max_rows));
        for (int32_t row : {0, static_cast<int32_t>(most)})
            if (int32_t status = has_units ? run_even_units(l, op, g, packed, static_cast<int32_t>(most) + 1, here, row) : run_skinny(l, op, g, packed, ladder ? static_cast<int32_t>(most) + 1 : 0, here, row)) return status;
        most = 2 * most;
    }
    return max_rows > most ? run_gemm(l, op, g, packed, has_rungs ? static_cast<int32_t>(most) + 1 : ladder, max_rows) : PK_OK;
}

}  // namespace

int n_groups(const pk_op_matmul &op, const Packed *const *packed, WeightGroup *groups) {
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

bool is_clustered(const Launch &l, int32_t format, int64_t max_rows) {
    return has_wgmma(l.ctx) && max_rows > kClusterLeast && ((format == PK_BF16 && max_rows <= kClusterRows) || (format == PK_FP8_E4M3 && max_rows <= kFp8ClusterRows));
}

bool is_few_even(const Launch &l, const pk_op_matmul &op) {
    const int64_t rows = bound(l, op.x.rows);
    if (op.x.rows != PK_ROWS_T || rows <= kFp8Least || rows > kClusterLeast || op.x.cols % 128 || op.x.format != PK_BF16 || is_invariant(l.ctx)) return false;
    for (int i = 0; i < op.n_w; ++i)
        if (find_packed(l.ctx, op.w[i])->format != PK_FP8_E4M3) return false;
    return is_even(l, arguments_of(l, op), rows, true);
}

int32_t launch_matmul(const Launch &l, const pk_op_matmul &op) { return launch_matmul(l, op, nullptr); }

int32_t launch_matmul(const Launch &l, const pk_op_matmul &op, const pk_op_matmul *next) {
    const Packed *packed[3] = {};
    for (int i = 0; i < op.n_w; ++i) packed[i] = find_packed(l.ctx, op.w[i]);
    WeightGroup groups[3];
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
        if (int32_t status = run_group(l, op, groups[i], packed, {}, i + 1 == n ? next : nullptr)) return status;
    return PK_OK;
}

Tops tops_of(const Launch &l, const pk_op_matmul &op) {
    const Packed *packed = find_packed(l.ctx, op.w[0]);
    const WeightGroup g = {0, 1, 0};
    const int64_t max_rows = bound(l, op.x.rows), rows = std::min(max_rows, kEvenRows);
    if (op.n_w != 1 || max_rows <= kClusterLeast || packed == nullptr || !has_even_logits(l, op, g, &packed)) return {};
    const GemmArguments a = gemm_arguments(l, op, g, &packed, kClusterLeast + 1);
    const bool is_fp8 = packed->format == PK_FP8_E4M3, has_rungs = is_laddered(l, op);
    Tops t;
    t.least = has_rungs ? kClusterLeast + 1 : 1;
    t.most = static_cast<int32_t>(rows);
    t.few = kEvenRows / 2;
    if (even_tiles(l, a, has_rungs ? std::min<int64_t>(rows, t.few) : rows, is_fp8, &t.n_few) || even_tiles(l, a, rows, is_fp8, &t.n_many)) return {};
    t.stride = std::max(t.n_few, t.n_many);
    // Behind what a product of narrowed x or the draw's parts take.
    const int64_t bytes = align256(rows * t.stride * static_cast<int64_t>(sizeof(Top)));
    if (l.scratch_bytes < bytes + (4 << 20)) return {};
    t.tops = reinterpret_cast<Top *>(l.scratch + (l.scratch_bytes - bytes) / 256 * 256);
    return t;
}

int32_t launch_logits(const Launch &l, const pk_op_matmul &op, const Tops &tops) {
    const Packed *packed = find_packed(l.ctx, op.w[0]);
    return run_group(l, op, {0, 1, 0}, &packed, tops);
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
