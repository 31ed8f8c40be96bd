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

// A causal convolution over the tokens of a row, channel by channel; the inputs before this step's lie in the slot's memory.
struct Taps {
    const void *x;
    const float *conv, *bias;  // bias: or null
    int64_t stride, offset;    // elements of a row of x; bytes of the tail in a slot's memory
    int32_t format, channels, width;
};

inline Taps taps_of(const pk_tensor &x, const pk_tensor &conv, const pk_tensor &bias, int32_t width, int64_t offset) {
    return {reinterpret_cast<const void *>(x.data), reinterpret_cast<const float *>(conv.data), reinterpret_cast<const float *>(bias.data), x.stride / (x.format == PK_F32 ? 4 : 2),
            offset, x.format, static_cast<int32_t>(x.cols), width};
}

// Input of channel c at the row's token t; negative: from the slot's tail.
__device__ __forceinline__ float input_of(const Taps &a, const RecurrentRow &q, int t, int c) {
    if (t >= 0) return load_as_f32(a.x, (q.first + t) * a.stride + c, a.format);
    return q.begins ? 0.0f : reinterpret_cast<const float *>(q.memory + a.offset)[(a.width - 1 + t) * a.channels + c];
}

__device__ __forceinline__ float convolved(const Taps &a, const RecurrentRow &q, int t, int c) {
    float sum = a.bias != nullptr ? a.bias[c] : 0.0f;
    for (int w = 0; w < a.width; ++w) sum += a.conv[c * a.width + w] * input_of(a, q, t - a.width + 1 + w, c);
    return sum / (1.0f + expf(-sum));
}

// The last inputs of the row's channel c become its tail. All are read before one is written.
__device__ __forceinline__ void keep_tail(const Taps &a, const RecurrentRow &q, int c) {
    float kept[15], *tail = reinterpret_cast<float *>(q.memory + a.offset);
    for (int i = 0; i < a.width - 1; ++i) kept[i] = input_of(a, q, q.n - a.width + 1 + i, c);
    for (int i = 0; i < a.width - 1; ++i) tail[i * a.channels + c] = kept[i];
}

// Tails of all channels of the rows with more than so many tokens.
int32_t launch_tails(const Launch &l, const Taps &taps, int32_t more_than);

// Rows that a launch may have.
inline int32_t max_rows_of(const Launch &l) { return l.max_tokens < l.state->max_step_rows ? l.max_tokens : l.state->max_step_rows; }

__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

}  // namespace pk
