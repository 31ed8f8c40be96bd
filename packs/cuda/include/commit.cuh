// The end of a step: rows take what they have drawn, results go to pinned memory.
#pragma once
#include "../../host/step.h"
#include "device.cuh"

namespace pk::step {

__device__ __forceinline__ uint64_t now_ns() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

template <class T>
__device__ __forceinline__ T *at(uint64_t address) {
    return reinterpret_cast<T *>(address);
}

// Tokens that a row draws: after its last token, or after each.
__device__ __forceinline__ int draws_of(int flags, int n_tokens) { return flags & PK_ROW_DRAFT ? n_tokens : flags & PK_ROW_SAMPLE ? 1 : 0; }

// The token of draw `i` goes into the slot, which has `length` tokens before it.
__device__ __forceinline__ pk_result take_draw(const pk_state &s, int slot, int length, int i, bool is_scored = false) {
    const int drawn = at<int32_t>(s.sample_flags)[i], token = at<int32_t>(s.sample_token)[i];
    pk_result out = {slot, -1, PK_ROW_NAN, length, 0.0f, 0};
    if (is_scored && !(drawn & PK_ROW_NAN)) return {slot, token, PK_ROW_SCORE, length + 1, at<float>(s.sample_logprob)[i], drawn >> 16};
    if (!(drawn & PK_ROW_NAN)) {
        at<int32_t>(s.tokens)[slot * (static_cast<int64_t>(s.max_ctx_tokens) + 1) + length] = token;
        const pk_sampling &p = at<pk_sampling>(s.sampling)[slot];
        out = {slot, token, 0, length + 1, at<float>(s.sample_logprob)[i], drawn >> 16};
        for (int k = 0; k < p.n_stop; ++k)
            if (p.stop[k] == token) out.flags |= PK_ROW_STOP;
        if (length + 1 >= p.max_length || length + 1 > s.max_ctx_tokens) out.flags |= PK_ROW_LENGTH;
    }
    if (out.flags) at<int32_t>(s.alive)[slot] = 0;
    return out;
}

// Results of the step's rows.
__device__ __forceinline__ pk_result *results_of(const pk_state &s, const StepInfo *info) { return at<pk_result>(s.results) + static_cast<int64_t>(info->seq % s.n_results) * s.max_step_rows; }

// Row r takes what it has drawn. end: of its draws; result: of its results.
__device__ __forceinline__ void commit_row(const pk_state &s, pk_result *results, int r, int end, int result) {
    const int flags = at<int32_t>(s.row_flags)[r], n = at<int32_t>(s.row_start)[r + 1] - at<int32_t>(s.row_start)[r], slot = at<int32_t>(s.row_slot)[r];
    const bool is_dead = flags & PK_ROW_DEAD;
    int length = at<int32_t>(s.length)[slot];
    pk_result *out = results + result - (flags & PK_ROW_DRAFT ? n : 1);
    if (flags & PK_ROW_DRAFT) {
        // One result per token, until what is drawn is not what was guessed, or there is no mask to draw under; in a score row all are taken.
        const int32_t *tokens = at<int32_t>(s.tokens) + slot * (static_cast<int64_t>(s.max_ctx_tokens) + 1);
        const bool is_scored = flags & PK_ROW_SCORE;
        const int most = flags & PK_ROW_HELD ? flags >> kMaskedAt : n;
        bool goes_on = !is_dead;
        for (int i = 0; i < n; ++i) {
            pk_result one = {slot, -1, is_dead ? PK_ROW_DEAD : 0, length, 0.0f, 0};
            if (goes_on && i < most) {
                const int guess = i + 1 < n ? tokens[length + 1] : -1;
                one = take_draw(s, slot, ++length, end - n + i, is_scored);
                if (!is_scored) one.n_top = 0;
                goes_on = is_scored ? !(one.flags & PK_ROW_NAN) : !one.flags && one.token == guess;
            }
            out[i] = one;
        }
    } else {
        if (!is_dead) length += n;
        *out = draws_of(flags, n) && !is_dead ? take_draw(s, slot, length, end - 1) : pk_result{slot, -1, is_dead ? PK_ROW_DEAD : 0, length, 0.0f, 0};
    }
    if (!is_dead) at<int32_t>(s.length)[slot] = length;
}

// By one thread, behind all results: the step's times, and that it is done.
__device__ __forceinline__ void tell_done(const pk_state &s, const StepInfo *info, uint64_t *times) {
    uint64_t *mine = times + 2 * ((info->ring - 1) % PK_TIMES);
    mine[0] = info->begun_ns;
    mine[1] = now_ns();
    __threadfence_system();
    *reinterpret_cast<volatile uint64_t *>(s.done) = info->seq;
}

}  // namespace pk::step
