// What products do beside multiplying: halves of the norms between them, heads, and rows narrowed from one to the next. Which can, and their launch.
#include <algorithm>

#include "../../include/even_plan.h"
#include "../../include/flat_plan.h"
#include "../../include/invariant.h"
#include "../../include/matmul_parts.h"
#include "../../include/quantise.cuh"
#include "../../include/wide.h"

namespace pk {
namespace {

// The kernel that runs a product in steps of l's bounds and can multiply by what a norm left.
enum class HalfKernel { kNone, kFlat, kEven, kEvenFp8, kEvenUnits, kTall, kTallFp8 };
// What a tiled product is asked with x narrowed: nothing but its place is not known yet.
GemmArguments narrowed_somewhere(const Launch &l, GemmArguments a) {
    a.x_scale = reinterpret_cast<const float *>(l.scratch);
    return a;
}
HalfKernel half_kernel(const Launch &l, const pk_op_matmul &op) {
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

bool is_same(const pk_tensor &a, const pk_tensor &b) { return a.data == b.data && a.rows == b.rows && a.cols == b.cols && a.stride == b.stride; }

}  // namespace

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

int32_t launch_matmul_beside(const Launch &l, const pk_op_matmul &op, const Beside &beside, const Handed &handed, const pk_op_matmul *next) {
    const Packed *packed[3] = {};
    for (int i = 0; i < op.n_w; ++i) packed[i] = find_packed(l.ctx, op.w[i]);
    WeightGroup groups[3];
    const HalfKernel kernel = half_kernel(l, op);
    const int64_t rows = bound(l, op.x.rows);
    // Heads of several formats are one launch where they may be: values alone are a few blocks' work.
    if (kernel == HalfKernel::kEvenUnits && beside.heads && are_multiplied_together(packed, op.n_w)) return run_even_units(l, op, {0, op.n_w, 0}, packed, 0, rows, 0, beside);
    for (int i = 0, n = n_groups(op, packed, groups); i < n; ++i) {
        int32_t status = PK_OK;
        if (kernel == HalfKernel::kFlat) status = run_skinny(l, op, groups[i], packed, 0, rows, 0, beside, i + 1 == n ? next : nullptr);
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

}  // namespace pk
