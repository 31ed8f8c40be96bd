// What recurrent ops share on the device: a row of the step, and where its slot's state lies.
#pragma once
#include "device.cuh"

namespace pk {

struct RecurrentState {
    const int32_t *row_slot, *row_start, *row_position, *row_flags;
    uint8_t *memory;
    int64_t stride;
};

struct RecurrentRow {
    int first, n;  // tokens of the step
    bool begins;   // its first token is at position 0: state and tail count as zeros
    bool is_dead;
    uint8_t *memory;
};

inline RecurrentState recurrent_state(const pk_state &s) {
    auto ints = [](uint64_t address) { return reinterpret_cast<const int32_t *>(address); };
    return {ints(s.row_slot), ints(s.row_start), ints(s.row_position), ints(s.row_flags), reinterpret_cast<uint8_t *>(s.recurrent), s.recurrent_stride};
}

__device__ __forceinline__ RecurrentRow recurrent_row(const RecurrentState &s, int r) {
    RecurrentRow q;
    q.first = s.row_start[r];
    q.n = s.row_start[r + 1] - q.first;
    q.begins = s.row_position[r] == 0;
    q.is_dead = (s.row_flags[r] & PK_ROW_DEAD) != 0;
    q.memory = s.memory + s.row_slot[r] * s.stride;
    return q;
}

// Rows that a launch may have.
inline int32_t max_rows_of(const Launch &l) { return l.max_tokens < l.state->max_step_rows ? l.max_tokens : l.state->max_step_rows; }

__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

}  // namespace pk
