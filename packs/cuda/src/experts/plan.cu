// The shape of a mixture's launches: which kernels, how many pairs an item, and where their parts lie in the scratch.
#include <algorithm>

#include "../../include/experts_plan.h"
#include "../../include/format/rows.cuh"
#include "../../include/format/unit.cuh"
#include "../../include/fp4.cuh"
#include "../../include/gemm.cuh"
#include "../../include/grouped.cuh"
#include "../../include/invariant.h"
#include "../../include/repack.cuh"
#include "../../include/wide.h"

namespace pk {
namespace {

constexpr int64_t kStreamShared = 96 << 10;
constexpr int32_t kPanelRows = 256;

// Gate and up run as one product.
bool is_pair(const pk_op_experts &op) { return op.gate.data && stored_format(op.gate.format) == stored_format(op.up.format); }

// How many of a block's eight warps split K: the fewest rounds of units, waves of blocks counted. rows_each: rows of a warp.
int32_t warps_over_k(const pk_ctx &ctx, int64_t n_items, const pk_tensor &w, int64_t rows_each) {
    const int64_t unit = expert_unit(stored_format(w.format)).unit, n_units = (w.cols + unit - 1) / unit;
    int32_t best = 8;
    int64_t least = INT64_MAX;
    for (int32_t n : {8, 4, 2, 1}) {
        const int64_t blocks = n_items * ((w.rows + rows_each * (8 / n) - 1) / (rows_each * (8 / n))), rounds = (n_units + n - 1) / n * ((blocks + 2 * ctx.n_processors - 1) / (2 * ctx.n_processors));
        if (rounds < least) {
            least = rounds;
            best = n;
        }
    }
    return best;
}

int64_t stream_shared(int64_t k, const ExpertUnit &u, int64_t pairs, int64_t *x_row_bytes) {
    const int64_t padded = round_up(k, u.unit);
    *x_row_bytes = padded * 2 + 64;
    return pairs * *x_row_bytes + (u.group ? padded / u.group * 32 * ((pairs + 7) / 8) : 0) + 8 * 32 * 9 * 4;
}

}  // namespace

ExpertUnit expert_unit(int32_t format) {
    ExpertUnit f = {};
    if (with_unit(format, [&](auto u) { f = {decltype(u)::kU, decltype(u)::kGroup}; })) return f;
    return {format == PK_FP8_E4M3 || format == PK_FP8_E5M2 ? 128 : 64, 0};
}

bool can_group(const pk_ctx &ctx, const pk_op_experts &op) {
    const int32_t format = stored_format(op.up.format);
    const bool is_fp8 = format == PK_FP8_E4M3, has_bias = op.gate_bias.data || op.up_bias.data || op.down_bias.data;
    return has_wgmma(&ctx) && (is_fp8 || format == PK_BF16) && is_pair(op) && stored_format(op.down.format) == format && !has_bias && (op.act == PK_ACT_SILU || op.act == PK_ACT_GELU_TANH) && is_wide(op.x) &&
           op.x.cols % 16 == 0 && op.up.rows % (is_fp8 ? 128 : 8) == 0 && op.y.cols % 8 == 0;
}

ExpertPlan expert_plan(const pk_ctx &ctx, const pk_op_experts &op, int64_t n_rows) {
    ExpertPlan p;
    const int64_t panel_bytes = std::min(kExpertPanelBytes, int64_t{ctx.n_processors} << 20);  // small devices have small workspaces
    const int64_t k = op.ids.cols, cols = op.y.cols;
    p.pairs = n_rows * k;
    // Every pair by itself: tiles, in which a pair's products are added up along all of K whatever its company, and sums in f32.
    const bool is_invariant = pk::is_invariant(&ctx);
    p.is_lone = n_rows == 1 && !is_invariant;
    const bool can = can_group(ctx, op);
    p.is_stream = !is_invariant && (n_rows <= kStreamTokens || p.pairs <= int64_t{can ? kGroupedPairs : kStreamPairs} * op.n_experts);
    p.is_grouped = can && !p.is_stream && !is_invariant;
    p.is_fp8 = stored_format(op.up.format) == PK_FP8_E4M3;
    p.positions = p.pairs + (p.is_grouped ? (kGroupedAlign - 1) * std::min<int64_t>(p.pairs, op.n_experts) : 0);
    const pk_tensor *stacks[3] = {&first_expert_stack(op), &op.up, &op.down};
    // More pairs an item where many experts would have two items of eight, their weights read twice, and where registers allow it.
    bool is_small = true;
    for (const pk_tensor *stack : stacks) is_small = is_small && expert_unit(stored_format(stack->format)).unit <= 128;
    p.item_pairs = !p.is_stream ? kTileRows : is_small && p.pairs > int64_t{kStreamPairs} / 2 * op.n_experts ? 2 * kStreamPairs : kStreamPairs;
    if (p.is_stream) {
        p.item_pairs = static_cast<int32_t>(std::min<int64_t>(p.item_pairs, n_rows));
        for (int i = 0; i < 3; ++i) {
            const ExpertUnit unit = expert_unit(stored_format(stacks[i]->format));
            while (p.item_pairs > 1 && stream_shared(stacks[i]->cols, unit, p.item_pairs, &p.x_row_bytes[i]) > kStreamShared) p.item_pairs /= 2;
        }
        for (int i = 0; i < 3; ++i) p.shared_bytes[i] = stream_shared(stacks[i]->cols, expert_unit(stored_format(stacks[i]->format)), p.item_pairs, &p.x_row_bytes[i]);
    }
    p.max_items = static_cast<int32_t>(p.is_lone ? k : std::min(p.pairs, op.n_experts + p.pairs / p.item_pairs));
    for (int i = 0; i < 3 && p.is_stream; ++i) p.warps_k[i] = warps_over_k(ctx, p.max_items, *stacks[i], i < 2 && is_pair(op) ? 16 : 32);
    p.hidden_cols = round_up(op.up.rows, 8);
    const bool is_whole = p.is_stream || (!p.is_grouped && p.pairs * cols * 4 <= panel_bytes);
    p.out_format = is_whole || is_invariant ? PK_F32 : PK_BF16;
    const int64_t out_bytes = p.out_format == PK_F32 ? 4 : 2;
    p.panel = is_whole ? cols : std::min(cols, std::max<int64_t>(kTileRows, panel_bytes / (p.pairs * out_bytes) / kTileRows * kTileRows));
    int64_t at = 0;
    auto take = [&](int64_t bytes) {
        const int64_t start = at;
        at += round_up(bytes, 256);
        return start;
    };
    p.n_items = take(4);
    p.cursors = take(op.n_experts * 4);
    p.items = take(p.max_items * static_cast<int64_t>(sizeof(ExpertItem)));
    p.done = take(p.max_items * 4);
    p.order = take(p.positions * 4);
    p.rank = take(p.pairs * 4);
    if (p.is_grouped) {
        // The output of `down` goes where x was.
        const int64_t element = p.is_fp8 ? 1 : 2;
        p.x_cols = p.is_fp8 ? round_up(op.x.cols, 128) : op.x.cols;
        p.scale_stride = round_up(p.positions, kGroupedAlign) + kTileRows;
        const int64_t x_bytes = p.positions * std::max(p.x_cols * element, std::min<int64_t>(cols, kPanelRows) * 2);
        p.panel = std::min(cols, x_bytes / (p.positions * 2) / kPanelRows * kPanelRows);
        if (p.panel == 0) p.panel = cols;
        p.x = p.out = take(x_bytes);
        p.x_scales = take(p.is_fp8 ? p.x_cols / 128 * p.scale_stride * 4 : 0);
        p.hidden = take(p.positions * p.hidden_cols * element);
        p.hidden_scales = take(p.is_fp8 ? p.hidden_cols / 128 * p.scale_stride * 4 : 0);
        p.bytes = at;
        return p;
    }
    p.hidden = take(p.pairs * p.hidden_cols * 2);
    p.x = take(p.is_stream || (op.x.format == PK_BF16 && is_wide(op.x)) ? 0 : n_rows * round_up(op.x.cols, 8) * 2);
    p.out = take(p.pairs * p.panel * out_bytes);
    // Rows of x, later of the hidden values, for products with block scales: factors first.
    const bool has_fp4 = !p.is_stream && has_fp4_mma(&ctx) && (is_fp4(op.up.format) || is_fp4(op.down.format) || is_fp4(first_expert_stack(op).format));
    p.fp4 = take(has_fp4 ? round_up(p.pairs * 4, 256) + std::max(n_rows * fp4_row_bytes(PK_NVFP4, round_up(op.x.cols, 128), kTerms), p.pairs * fp4_row_bytes(PK_NVFP4, round_up(p.hidden_cols, 128), kTerms)) : 0);
    p.bytes = at;
    return p;
}

int64_t lone_shared(const pk_op_experts &op) {
    const ExpertUnit unit = expert_unit(stored_format(op.up.format));
    int64_t row_bytes = 0;
    auto staged = [&](int64_t k) { return stream_shared(k, unit, 1, &row_bytes) - 8 * 32 * 9 * 4; };
    return std::max(staged(op.up.cols) + 8 * 32 * 4, op.ids.cols * staged(op.down.cols) + 8 * 16 * 4);
}

int32_t lone_warps(const pk_ctx &ctx, const pk_op_experts &op, int64_t n_units) {
    const int64_t tasks = (op.up.rows + 15) / 16 * op.ids.cols;
    int32_t best = 8;
    int64_t least = INT64_MAX;
    for (int32_t n : {8, 4, 2, 1}) {
        const int64_t teams = int64_t{ctx.n_processors} * (8 / n), rounds = (n_units + n - 1) / n * ((tasks + teams - 1) / teams);
        if (rounds < least) {
            least = rounds;
            best = n;
        }
    }
    return best;
}

}  // namespace pk
