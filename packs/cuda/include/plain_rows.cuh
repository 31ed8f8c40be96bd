// Draws by row: what they are about, and those that take the largest logit and nothing else. A product of logits can leave such rows' largest logit of every tile of
// columns instead of the logits, which then neither go to memory nor come back.
#pragma once
#include "commit.cuh"
#include "plain_tops.h"

namespace pk::sampling {

using step::at;

constexpr float kGreedyTemperature = 1e-5f;

struct RowFacts {
    int row, slot, length;
    int64_t mask;
    bool is_dead, is_scored;
    const pk_sampling *p;
};
__device__ __forceinline__ RowFacts row_facts(const pk_state &state, int s) {
    RowFacts f;
    f.row = at<int32_t>(state.sample_row)[s];
    f.slot = at<int32_t>(state.row_slot)[f.row];
    f.length = at<int32_t>(state.row_position)[f.row] + at<int32_t>(state.sample_at)[s] - at<int32_t>(state.row_start)[f.row] + 1;
    const int flags = at<int32_t>(state.row_flags)[f.row];
    const bool has_masks = (flags & PK_ROW_HELD) && (flags & PK_ROW_DRAFT);
    f.mask = has_masks ? state.n_slots + s : f.slot;
    f.is_dead = (flags & PK_ROW_DEAD) || (has_masks && f.length - at<int32_t>(state.row_position)[f.row] > flags >> kMaskedAt);
    f.is_scored = flags & PK_ROW_SCORE;
    f.p = at<pk_sampling>(state.sampling) + f.slot;
    return f;
}

// Whether a draw takes the largest logit as it is: the same before and after a step's masks have come.
__device__ __forceinline__ bool is_plain(const RowFacts &f) {
    const pk_sampling &p = *f.p;
    return !f.is_scored && (p.temperature <= kGreedyTemperature || p.top_k == 1) && p.n_logprobs < 0 && p.repetition_penalty == 1.0f && p.frequency_penalty == 0.0f && p.presence_penalty == 0.0f &&
           p.n_bias == 0 && (p.n_stop == 0 || f.length >= p.min_length) && !p.use_mask;
}

// Whether the product in front left tops instead of such rows' logits.
__device__ __forceinline__ bool has_tops(const Tops &t, int n_draws) { return t.tops != nullptr && n_draws >= t.least && n_draws <= t.most; }

}  // namespace pk::sampling
