// Ops of the CPU pack: each runs one record of a loaded program for the step at hand, over the pool.
#pragma once
#include "../../host/program.h"
#include "../../host/step.h"
#include "context.h"
#include "kernels.h"

namespace pk {

// Cosines and sines of one rotation: [max_step_tokens, 2, width / 2], filled once per step by the first op that needs it.
struct Angles {
    uint64_t frequency;
    int32_t width;
    float magnitude;
    float *table;
    int64_t n_ready;  // tokens of this step that are filled in; 0 at the start of a step
};

// Where the pack's scratch lies inside state.workspace. Everything is 64-byte aligned.
struct Workspace {
    int64_t bytes = 0;
    int64_t angles_at = 0;   // of all rotations, one after the other
    int64_t shared_at = 0;   // used by one op at a time
    int64_t shared_bytes = 0;
};

// What ops see of a loaded program while a step runs.
struct Run {
    Context &context;
    const Kernels &kernels;
    const pk_state &state;
    const Step *step;  // nullptr in pk_run
    int64_t n_tokens, n_samples, n_rows;
    uint8_t *shared;   // workspace of the running op
    Angles *angles;    // of the running op, or nullptr
    const pk_op_pool &pool;  // of layers with a window; all 0: they have none of their own
};

template <class Number>
Number *numbers(uint64_t address) {
    return reinterpret_cast<Number *>(address);
}

int64_t attention_workspace_bytes(const Context &context, const pk_op_attention &op, const pk_state &state);
int64_t experts_workspace_bytes(const Context &context, const pk_op_experts &op, int64_t n_rows);
int64_t delta_workspace_bytes(const Context &context, const pk_op_delta &op, const pk_state &state);
int64_t mamba_workspace_bytes(const pk_op_mamba &op, const pk_state &state);
int64_t sample_workspace_bytes(const Context &context, const pk_state &state);

void run_embed(Run &run, const pk_op_embed &op);
void run_norm(Run &run, const pk_op_norm &op);
void run_qkv(Run &run, const pk_op_qkv &op);
void run_attention(Run &run, const pk_op_attention &op);
void run_gate(Run &run, const pk_op_gate &op);
void run_gather(Run &run, const pk_op_gather &op);
void run_sample(Run &run, const pk_op_sample &op);
void run_copy(Run &run, const pk_op_copy &op);
void run_add(Run &run, const pk_op_add &op);
void run_route(Run &run, const pk_op_route &op);
// Where experts lie: expert e of a stack is at stack.data + shift + at[e] * stride, without `at` at stack.data + e * stride.
struct ExpertPlaces {
    int64_t shift = 0;
    const int32_t *at = nullptr;
};
void run_experts(Run &run, const pk_op_experts &op, const ExpertPlaces &places = {});
void run_conv(Run &run, const pk_op_conv &op);
void run_delta(Run &run, const pk_op_delta &op);
void run_mamba(Run &run, const pk_op_mamba &op);
void run_sigmoid(Run &run, const pk_op_sigmoid &op);

// The ops of rare.h: whether there is one of that number, and one record of it.
bool has_rare_op(int32_t op);
bool needs_rare_rows(int32_t op);  // it reads the step's rows
int64_t rare_workspace_bytes(const Context &context, const Record &record, const pk_state &state);
void run_rare(Run &run, const Record &record);

// Applies the step input and builds the row and token arrays. PK_BAD_ARG when a row would pass the context's end.
int32_t run_prepare(Run &run);
// Without a step input: n_samples rows (at least one) of equal length on dead slots, so that a program can be timed.
void prepare_dead_rows(Run &run);
// Masks of the step's held rows; a row without one is dead from here on.
void apply_masks(const pk_state &state, const Finish &input, int64_t n_rows);
void run_commit(Run &run);

// An operand cannot be laid out as written: same-format copies of bytes only, and the like. Called per record at load.
int32_t check_cpu(const Context &context, const Record &record, int64_t index);

}  // namespace pk
