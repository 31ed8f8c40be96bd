// How a mixture of experts is run for so many tokens (src/experts/plan.cu), and the two launches around its products that read the plan.
#pragma once
#include "experts.cuh"

namespace pk {

constexpr int64_t kExpertPanelBytes = 64 << 20;  // of down's output at a time
constexpr int32_t kStreamTokens = 8, kStreamPairs = 8, kGroupedPairs = 4, kMostChosen = 64, kFewPairs = 1024;

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// The shape of a launch for up to n_rows tokens, and where its parts lie in the scratch.
struct ExpertPlan {
    bool is_stream = false, is_lone = false, is_grouped = false, is_fp8 = false;
    int64_t pairs = 0, positions = 0;
    int32_t item_pairs = 0, max_items = 0, warps_k[3] = {};  // of gate, up and down
    int64_t x_row_bytes[3] = {}, shared_bytes[3] = {};
    int64_t x_cols = 0, hidden_cols = 0, panel = 0, scale_stride = 0;
    int32_t out_format = PK_F32;
    int64_t items = 0, n_items = 0, done = 0, cursors = 0, order = 0, rank = 0, hidden = 0, hidden_scales = 0, x = 0, x_scales = 0, out = 0, fp4 = 0, bytes = 0;
};

ExpertPlan expert_plan(const pk_ctx &ctx, const pk_op_experts &op, int64_t n_rows);
ExpertUnit expert_unit(int32_t format);
// The stack that the first product reads: experts without a gate begin with `up`.
inline const pk_tensor &first_expert_stack(const pk_op_experts &op) { return op.gate.data ? op.gate : op.up; }
// src/experts/grouped.cu takes them.
bool can_group(const pk_ctx &ctx, const pk_op_experts &op);
// Bytes that the launch of a lone token's experts stages at once: x of the first half, or every expert's hidden values.
int64_t lone_shared(const pk_op_experts &op);
// How many of a block's warps split K of its gate and up: the fewest rounds of units and of tasks of 16 rows.
int32_t lone_warps(const pk_ctx &ctx, const pk_op_experts &op, int64_t n_units);

// Pairs by their experts (src/experts/sort.cu). route: when they are chosen in the same launch, or null.
int32_t launch_expert_sort(const Launch &l, const pk_op_experts &op, const ExpertPlan &plan, const ExpertPlaces &places, const pk_op_route *route = nullptr);
// Whether that launch can make the choice, too.
bool sorts_choice(const pk_op_route &route, const pk_op_experts &op, const ExpertPlan &plan);
// y[:, first : first + n], the sum of every token's experts (src/experts/combine.cu).
int32_t launch_expert_combine(const Launch &l, const pk_op_experts &op, const ExpertPlan &plan, int64_t first, int64_t n);

}  // namespace pk
