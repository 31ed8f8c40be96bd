// What recurrent ops share: a row of the step, and where its slot's state lies.
#pragma once
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

}  // namespace pk
