// What recurrent ops share: a row of the step, and where its slot's state lies.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops.h"

namespace pk {

struct RecurrentRow {
    int64_t first, n;  // tokens of the step
    bool begins;       // its first token is at position 0: state and tail count as zeros
    bool is_dead;
    float *state, *tail;
};

inline RecurrentRow row_at(const Run &run, int64_t state_offset, int64_t tail_offset, int64_t r) {
    const pk_state &s = run.state;
    const auto *start = numbers<const int32_t>(s.row_start);
    uint64_t at = s.recurrent + numbers<const int32_t>(s.row_slot)[r] * s.recurrent_stride;
    bool is_dead = numbers<const int32_t>(s.row_flags)[r] & PK_ROW_DEAD;
    return {start[r], start[r + 1] - start[r], numbers<const int32_t>(s.row_position)[r] == 0, is_dead, numbers<float>(at + state_offset), numbers<float>(at + tail_offset)};
}

inline const float *row_of(const pk_tensor &t, int64_t row) { return numbers<const float>(t.data + row * t.stride); }

inline float silu(float x) { return x / (1.0f + std::exp(-x)); }
inline double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// A causal convolution over the tokens of a row, channel by channel. bias: or nullptr.
struct Taps {
    const pk_tensor &x;
    const float *conv, *bias;
    int64_t channels;
    int32_t width;

    // Row `token` of the row's input, counted from its first token of this step; negative: from the tail; nullptr: zeros.
    const float *input(const RecurrentRow &q, int64_t token) const {
        if (token >= 0) return row_of(x, q.first + token);
        return q.begins ? nullptr : q.tail + (width - 1 + token) * channels;
    }

    // out = silu(bias + the convolution at `token`)
    void convolve(const RecurrentRow &q, int64_t token, float *out) const {
        if (bias)
            std::memcpy(out, bias, channels * sizeof(float));
        else
            std::fill(out, out + channels, 0.0f);
        for (int32_t i = 0; i < width; ++i) {
            const float *from = input(q, token - width + 1 + i);
            if (!from) continue;
            for (int64_t c = 0; c < channels; ++c) out[c] += conv[c * width + i] * from[c];
        }
        for (int64_t c = 0; c < channels; ++c) out[c] = silu(out[c]);
    }

    // The last W - 1 inputs of the row become its tail. Rows are moved upwards, so an older one is read before it is overwritten.
    void keep_tail(const RecurrentRow &q) const {
        int64_t n_tail = width - 1;
        for (int64_t i = 0; i < n_tail; ++i) {
            const float *from = input(q, q.n - n_tail + i);
            float *to = q.tail + i * channels;
            if (from)
                std::memmove(to, from, channels * sizeof(float));
            else
                std::fill(to, to + channels, 0.0f);
        }
    }
};

// All tokens of the step, convolved, into mixed [T, C]; those of dead rows are left.
inline void convolve_step(Run &run, const Taps &taps, int64_t state_offset, int64_t conv_offset, float *mixed) {
    Pool &pool = run.context.pool;
    const auto *token_row = numbers<const int32_t>(run.state.token_row);
    pool.parallel_for(run.n_tokens, pool.grain(run.n_tokens), [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t t = begin; t < end; ++t) {
            RecurrentRow q = row_at(run, state_offset, conv_offset, token_row[t]);
            if (!q.is_dead) taps.convolve(q, t - q.first, mixed + t * taps.channels);
        }
    });
}

inline void keep_tails(Run &run, const Taps &taps, int64_t state_offset, int64_t conv_offset) {
    for (int64_t r = 0; r < run.n_rows; ++r) {
        RecurrentRow q = row_at(run, state_offset, conv_offset, r);
        if (!q.is_dead && q.n > 0) taps.keep_tail(q);
    }
}

// Rows that check guesses, and live.
inline bool is_draft(const Run &run, int64_t r) { return (numbers<const int32_t>(run.state.row_flags)[r] & (PK_ROW_DRAFT | PK_ROW_SCORE | PK_ROW_DEAD)) == PK_ROW_DRAFT; }

inline uint8_t *slot_state(const Run &run, int64_t r) {
    return numbers<uint8_t>(run.state.recurrent) + numbers<const int32_t>(run.state.row_slot)[r] * run.state.recurrent_stride;
}

// f32 rows that lie one after the other from `data` on.
inline pk_tensor kept_rows(const void *data, int64_t cols) { return {reinterpret_cast<uint64_t>(data), PK_ROWS_T, cols, 4 * cols, PK_F32, PK_ROWS}; }

// For every draft row that advanced by fewer tokens than it ran: its state is put back, then again(its slot's state, tokens that were right).
// op: any of the settle ops of rare.h.
template <class Op, class F>
void settle_rows(const Run &run, const Op &op, F again) {
    const auto *starts = numbers<const int32_t>(run.state.row_start), *positions = numbers<const int32_t>(run.state.row_position);
    for (int64_t r = 0; r < run.n_rows; ++r) {
        if (!is_draft(run, r)) continue;
        const int64_t n_right = numbers<const int32_t>(run.state.length)[numbers<const int32_t>(run.state.row_slot)[r]] - positions[r];
        if (n_right >= starts[r + 1] - starts[r] || n_right > op.max_tokens) continue;
        uint8_t *slot = slot_state(run, r);
        std::memcpy(slot + op.from_offset, slot + op.kept_offset, op.n_bytes);
        again(slot, n_right);
    }
}

}  // namespace pk
