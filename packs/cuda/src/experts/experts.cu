// Mixture of experts: pairs (token, expert) are sorted by expert on the device (sort.cu), gate and up run over the sorted pairs, then down,
// and each token adds its experts' outputs (combine.cu). Here is which kernels run, with what they are told.
//
// Few pairs an expert: the streaming product, eight pairs an item (BF16 and e4m3 on Hopper: few.cu). Many: tiles of 128 pairs; the output of `down` is made in
// panels of columns so that it never takes more than kExpertPanelBytes. BF16 and e4m3 on Hopper: x goes to the pairs' positions first (grouped.cu).
#include <algorithm>

#include "../../include/chosen.cuh"
#include "../../include/experts_few.cuh"
#include "../../include/experts_plan.h"
#include "../../include/fp4.cuh"
#include "../../include/gemm.cuh"
#include "../../include/grouped.cuh"
#include "../../include/invariant.h"
#include "../../include/operand.h"
#include "../../include/repack.cuh"
#include "../../include/wide.h"
#include "../../include/with_format.h"

namespace pk {
namespace {

constexpr int64_t kLoneShared = 160 << 10;

ExpertWeight weight_of(const Launch &l, const pk_tensor &w, const pk_tensor &bias, int64_t shift) {
    const Packed &p = *find_packed(l.ctx, w);
    ExpertWeight e = {};
    e.data = reinterpret_cast<const uint8_t *>(w.data + shift);
    e.bias = reinterpret_cast<const float *>(bias.data);
    e.stride = w.stride;
    e.row_bytes = p.row_bytes;
    e.scale_at = p.scale_at;
    e.row_scale_at = p.scale_kind == PK_SCALES_ROW ? p.scales : -1;
    e.block_scale_at = p.scale_kind == PK_SCALES_BLOCK ? p.scales : -1;
    e.rows = static_cast<int32_t>(p.rows);
    e.padded_rows = static_cast<int32_t>(p.padded_rows);
    e.block_stride = static_cast<int32_t>(p.scale_stride);
    return e;
}

int32_t launch_product(const Launch &l, int32_t format, const ExpertPlan &plan, const ExpertProduct &p, int which) {
    return with_format("experts", format, [&](auto f) {
        constexpr int kFormat = decltype(f)::value;
        return plan.is_stream ? launch_expert_stream<kFormat>(l, p, plan.max_items, plan.shared_bytes[which]) : launch_expert_tiles<kFormat>(l, p, plan.max_items);
    });
}

int32_t launch_lone(const Launch &l, int32_t format, const ExpertProduct &p, const ExpertProduct &d, const LoneEnd &end, int64_t shared_bytes) {
    return with_format("experts", format, [&](auto f) { return launch_expert_lone<decltype(f)::value>(l, p, d, end, shared_bytes); });
}

// Many pairs on Hopper's asynchronous units.
int32_t run_grouped(const Launch &l, const pk_op_experts &op, const ExpertPlan &plan, const ExpertPlaces &places) {
    auto floats = [&](int64_t at) { return reinterpret_cast<float *>(l.scratch + at); };
    if (int32_t e = launch_expert_sort(l, op, plan, places)) return e;
    SpreadArguments s = {};
    s.x = reinterpret_cast<const void *>(op.x.data);
    s.out = l.scratch + plan.x;
    s.scales = floats(plan.x_scales);
    s.rank = reinterpret_cast<const int32_t *>(l.scratch + plan.rank);
    s.x_stride = elements_apart(op.x);
    s.out_stride = plan.x_cols;
    s.scale_stride = plan.scale_stride;
    s.rows_symbol = op.x.rows;
    s.x_format = op.x.format;
    s.n_used = static_cast<int32_t>(op.ids.cols);
    s.k = static_cast<int32_t>(op.x.cols);
    if (int32_t e = launch_spread(l, s, plan.is_fp8, bound(l, op.x.rows))) return e;
    GroupedProduct g = {};
    g.w[0] = weight_of(l, op.gate, op.gate_bias, places.shift);
    g.w[1] = weight_of(l, op.up, op.up_bias, places.shift);
    g.x = l.scratch + plan.x;
    g.out = l.scratch + plan.hidden;
    g.x_scales = floats(plan.x_scales);
    g.out_scales = floats(plan.hidden_scales);
    g.items = reinterpret_cast<const ExpertItem *>(l.scratch + plan.items);
    g.n_items = reinterpret_cast<const int32_t *>(l.scratch + plan.n_items);
    g.positions = plan.positions;
    g.scale_stride = plan.scale_stride;
    g.x_stride = plan.x_cols;
    g.out_stride = plan.hidden_cols;
    g.k = static_cast<int32_t>(plan.x_cols);
    g.n_places = places.at != nullptr ? places.n : op.n_experts;
    g.n_rows = static_cast<int32_t>(op.up.rows);
    g.act = op.act;
    if (int32_t e = launch_grouped(l, g, plan.is_fp8, true)) return e;
    g.w[0] = weight_of(l, op.down, op.down_bias, places.shift);
    g.x = g.out;
    g.x_scales = g.out_scales;
    g.x_stride = plan.hidden_cols;
    g.k = static_cast<int32_t>(op.up.rows);
    g.out = l.scratch + plan.out;
    g.out_stride = plan.panel;
    for (int64_t first = 0; first < op.down.rows; first += plan.panel) {
        g.first_row = static_cast<int32_t>(first);
        g.n_rows = static_cast<int32_t>(std::min(plan.panel, op.down.rows - first));
        if (int32_t e = launch_grouped(l, g, plan.is_fp8, false)) return e;
        if (int32_t e = launch_expert_combine(l, op, plan, first, g.n_rows)) return e;
    }
    return PK_OK;
}

}  // namespace

// route: when this launch is to choose, too; or null.
static int32_t run_experts(const Launch &step, const pk_op_experts &op, const ExpertPlaces &places, const pk_op_route *route) {
    const int64_t n_rows = bound(step, op.x.rows);
    const ExpertPlan plan = expert_plan(*step.ctx, op, n_rows);
    Launch l = step;
    l.overlap = step.overlap || (step.decode_only && plan.is_stream && plan.pairs <= kFewPairs);
    if (plan.bytes > l.scratch_bytes) return fail(PK_BAD_ARG, "experts: %lld bytes of scratch are needed, the workspace has %lld", (long long)plan.bytes, (long long)l.scratch_bytes);
    if (plan.is_grouped) return run_grouped(l, op, plan, places);
    pk_tensor x = op.x;
    if (!plan.is_stream && (x.format != PK_BF16 || !is_wide(x))) {
        pk_op_copy copy = {};
        copy.x = copy.out = op.x;
        copy.out.data = reinterpret_cast<uint64_t>(l.scratch + plan.x);
        copy.out.format = PK_BF16;
        copy.out.stride = round_up(op.x.cols, 8) * 2;
        if (op.x.cols % 8)
            if (int32_t e = check(cudaMemsetAsync(l.scratch + plan.x, 0, n_rows * copy.out.stride, l.stream), "experts")) return e;
        if (int32_t e = launch_copy(l, copy)) return e;
        x = copy.out;
        x.cols = round_up(op.x.cols, 8);
    }
    if (!plan.is_lone)
        if (int32_t e = launch_expert_sort(l, op, plan, places, route)) return e;
    ExpertProduct p = {};
    p.items = reinterpret_cast<const ExpertItem *>(l.scratch + plan.items);
    p.n_items = reinterpret_cast<const int32_t *>(l.scratch + plan.n_items);
    p.order = reinterpret_cast<const int32_t *>(l.scratch + plan.order);
    p.ids = plan.is_lone ? reinterpret_cast<const int32_t *>(op.ids.data) : nullptr;
    p.places = places.at;
    p.info = l.info;
    p.rows_symbol = op.x.rows;
    p.n_used = static_cast<int32_t>(op.ids.cols);
    p.n_experts = op.n_experts;
    p.limit = op.limit;
    p.alpha = op.alpha;

    // The product of stack `which` (0 gate, 1 up, 2 down) as the plan has shaped it.
    auto run = [&](ExpertProduct q, const Packed &packed, int which) {
        if (plan.is_stream || !is_fp4(packed.format) || !has_fp4_mma(l.ctx)) return launch_product(l, packed.format, plan, q, which);
        const int32_t per_token = q.by_position ? q.n_used : 1;
        float *factors = reinterpret_cast<float *>(l.scratch + plan.fp4);
        const NarrowFp4 a = {q.x, l.scratch + plan.fp4 + round_up(plan.pairs * 4, 256), factors, nullptr, q.x_stride, fp4_row_bytes(packed.format, packed.padded_cols, kTerms), q.rows_symbol, q.x_format, q.k, 0, 0, per_token};
        if (q.first_row == 0)
            if (int32_t e = launch_narrow_fp4(l, packed.format, a, n_rows * per_token)) return e;
        q.x = a.out;
        q.x_stride = a.row_bytes / 2;
        q.x_factors = factors;
        return launch_product(l, packed.format, plan, q, which);
    };
    auto shape = [&](ExpertProduct *q, const Packed &packed, int which) {
        q->n_units = static_cast<int32_t>(packed.padded_cols / expert_unit(packed.format).unit);
        q->warps_k = plan.warps_k[which];
        q->x_row_bytes = static_cast<int32_t>(plan.x_row_bytes[which]);
    };
    const Packed &gate = *find_packed(l.ctx, first_expert_stack(op)), &up = *find_packed(l.ctx, op.up), &down = *find_packed(l.ctx, op.down);
    const bool has_gate = op.gate.data != 0, is_one = has_gate && gate.format == up.format;
    p.w[0] = has_gate ? weight_of(l, op.gate, op.gate_bias, places.shift) : weight_of(l, op.up, op.up_bias, places.shift);
    if (is_one) p.w[1] = weight_of(l, op.up, op.up_bias, places.shift);
    p.n_w = is_one ? 2 : 1;
    p.act = op.act;
    p.x = reinterpret_cast<const void *>(x.data);
    p.x_stride = elements_apart(x);
    p.x_format = x.format;
    p.is_wide = is_wide(x);
    p.k = static_cast<int32_t>(x.cols);
    p.n_rows = static_cast<int32_t>(gate.rows);
    p.out = l.scratch + plan.hidden;
    p.out_format = PK_BF16;
    p.out_stride = p.padded_out = static_cast<int32_t>(plan.hidden_cols);
    shape(&p, gate, 0);
    ExpertProduct d = p;
    d.w[0] = weight_of(l, op.down, op.down_bias, places.shift);
    d.w[1] = {};
    d.act = PK_ACT_NONE;
    d.n_w = 1;
    d.x = l.scratch + plan.hidden;
    d.x_stride = plan.hidden_cols;
    d.x_format = PK_BF16;
    d.by_position = 1;
    d.is_wide = gate.rows % 8 == 0;
    d.k = static_cast<int32_t>(plan.is_stream ? gate.rows : plan.hidden_cols);
    d.n_rows = static_cast<int32_t>(down.rows);
    d.out = l.scratch + plan.out;
    d.out_format = plan.out_format;
    d.out_stride = plan.panel;
    d.padded_out = 0;
    shape(&d, down, 2);
    const bool is_alike = gate.format == down.format && up.format == down.format;
    // Where every block has at most one tile of the output; with more, the blocks of three launches share the work better.
    if (plan.is_lone && is_alike && lone_shared(op) <= kLoneShared && down.rows <= 16ll * l.ctx->n_processors) {
        p.warps_k = lone_warps(*l.ctx, op, p.n_units);
        LoneEnd end = {};
        end.weights = reinterpret_cast<const float *>(op.weights.data);
        end.add = reinterpret_cast<const void *>(op.add.data);
        end.y = reinterpret_cast<void *>(op.y.data);
        end.counter = l.counters;
        end.add_format = op.add.format;
        end.y_format = op.y.format;
        end.scale = op.scale;
        return launch_lone(l, down.format, p, d, end, lone_shared(op));
    }
    if (plan.is_stream && !plan.is_lone && is_alike && fits_expert_few(l, p, d, down.format, plan.item_pairs)) {
        const int32_t n_places = places.at != nullptr ? places.n : op.n_experts;
        if (int32_t e = launch_expert_few(l, p, d, reinterpret_cast<int32_t *>(l.scratch + plan.done), down.format, plan.item_pairs, n_places)) return e;
        return launch_expert_combine(l, op, plan, 0, down.rows);
    }
    if (int32_t e = run(p, gate, 0)) return e;
    if (has_gate && !is_one) {
        p.w[0] = weight_of(l, op.up, op.up_bias, places.shift);
        p.gate = p.out;
        shape(&p, up, 1);
        if (int32_t e = run(p, up, 1)) return e;
    }
    for (int64_t first = 0; first < down.rows; first += plan.panel) {
        d.first_row = static_cast<int32_t>(first);
        d.n_rows = static_cast<int32_t>(std::min(plan.panel, down.rows - first));
        if (int32_t e = run(d, down, 2)) return e;
        if (int32_t e = launch_expert_combine(l, op, plan, first, d.n_rows)) return e;
    }
    return PK_OK;
}

int32_t launch_experts(const Launch &l, const pk_op_experts &op) { return run_experts(l, op, {}, nullptr); }
int32_t launch_experts_at(const Launch &l, const pk_op_experts &op, const ExpertPlaces &places) { return run_experts(l, op, places, nullptr); }

int32_t launch_chosen_experts(const Launch &l, const pk_op_route &route, const pk_op_experts &op) {
    const ExpertPlan plan = expert_plan(*l.ctx, op, bound(l, op.x.rows));
    const bool is_one = sorts_choice(route, op, plan);
    if (!is_one)
        if (int32_t e = launch_route(l, route)) return e;
    return run_experts(l, op, {}, is_one ? &route : nullptr);
}

int32_t check_experts(pk_ctx *ctx, const pk_op_experts &op, int64_t at) {
    const pk_tensor *stacks[3] = {&op.gate, &op.up, &op.down};
    static const char *const kNames[3] = {"gate", "up", "down"};
    const Packed *packed[3] = {};
    for (int i = op.gate.data ? 0 : 1; i < 3; ++i) {
        for (int32_t e = 0; e < op.n_experts; ++e) {
            pk_tensor one = *stacks[i];
            one.data += e * one.stride;
            const Packed *p = find_packed(ctx, one);
            if (p == nullptr || p->rows != one.rows || p->cols != one.cols)
                return fail(PK_BAD_ARG, "op %lld experts: matrix %d of %s was not made by pk_repack of this context", (long long)at, e, kNames[i]);
            if (e == 0) packed[i] = p;
            if (p->format != packed[i]->format || p->scale_kind != packed[i]->scale_kind)
                return fail(PK_UNSUPPORTED, "op %lld experts: matrices 0 and %d of %s have different formats or scales", (long long)at, e, kNames[i]);
        }
    }
    if (op.ids.cols > kMostChosen) return fail(PK_UNSUPPORTED, "op %lld experts: %lld experts a token; the CUDA pack takes up to %d", (long long)at, (long long)op.ids.cols, kMostChosen);
    const int64_t widest = std::max(op.x.cols, op.up.rows);
    if (widest > 16384) return fail(PK_UNSUPPORTED, "op %lld experts: rows of %lld elements; the CUDA pack takes up to 16384", (long long)at, (long long)widest);
    for (const pk_tensor *t : {&op.y, &op.add})
        if (t->data && t->format != PK_F32 && t->format != PK_BF16) return fail(PK_UNSUPPORTED, "op %lld experts: y or add is format %d; the CUDA pack takes F32 and BF16", (long long)at, t->format);
    return PK_OK;
}

int64_t experts_scratch(const pk_ctx *ctx, const pk_op_experts &op, int64_t max_rows) {
    if (is_invariant(ctx)) {
        // Smaller steps may have more of the output at once.
        const ExpertPlan p = expert_plan(*ctx, op, max_rows);
        return p.bytes + std::max<int64_t>(0, std::min({kExpertPanelBytes, int64_t{ctx->n_processors} << 20, p.pairs * op.y.cols * 4}) - p.pairs * p.panel * 4);
    }
    // Both ways: the streaming product serves small steps of a program whose largest step takes tiles.
    const int64_t few = std::max<int64_t>(kStreamTokens, int64_t{can_group(*ctx, op) ? kGroupedPairs : kStreamPairs} * op.n_experts / op.ids.cols);
    return std::max({expert_plan(*ctx, op, max_rows).bytes, expert_plan(*ctx, op, std::min(max_rows, few)).bytes, expert_plan(*ctx, op, std::min(max_rows, few + 1)).bytes});
}

}  // namespace pk
