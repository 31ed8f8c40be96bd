// A loaded program: its records, its step ring, and one captured graph per token bucket and kind of step.
#pragma once
#include <chrono>
#include <string>
#include <vector>

#include "../../host/kv_pool.h"
#include "../../host/program.h"
#include "../../host/step.h"
#include "../include/abreast.cuh"
#include "../include/context.h"
#include "../include/few_rows.cuh"
#include "../include/mixture.cuh"
#include "../include/persist/plan.h"
#include "../include/share.h"
#include "../include/slot_pages.h"
#include "last_rows.h"

struct pk_program {
    pk_ctx *ctx = nullptr;
    pk_state state = {};
    pk::Records records;
    pk_op_pool pool = {};   // of layers with a window; all 0: they have none of their own
    pk_state pooled = {};   // the state as they see it
    // A captured step. `tail`: the nodes from PK_OP_SAMPLE on, which are switched off for steps with held rows; `passes`: those over
    // prefixes that rows share, which are switched off for steps whose rows share none.
    struct Graph {
        cudaGraphExec_t exec = nullptr;
        cudaGraph_t graph = nullptr;  // kept where there are such nodes, which are its
        std::vector<cudaGraphNode_t> tail, passes;
        bool is_cut = false, is_apart = false;
    };
    struct Bucket {
        int32_t n_tokens = 0;
        Graph mixed, decode, shared;  // shared: as decode, with prefixes that rows share
    };
    // What depends on the multiprocessors that a step runs on: all of the program's context, or what a part of it left.
    struct View {
        pk_ctx *ctx = nullptr;         // what is captured with; null: there is none
        int32_t *counters = nullptr;   // zero between launches, or numbers of launches that count by the number of blocks
        std::vector<Bucket> buckets;
        std::vector<pk::Mixture> mixtures;     // of steps of one token, as the next
        std::vector<pk::Abreast> abreast;
        std::vector<pk::FewRows> few_rows;     // of steps of 2 to 32
        std::vector<pk::persist::Plan> plans;  // of steps of few rows, fewest first
    };
    // The step whose second half has still to come; seq 0: none.
    struct Open {
        uint64_t seq = 0;
        int32_t n_rows = 0;
        const View *view = nullptr;
        pk::Launch launch;
    };
    View all, rest;
    pk::StepInfo *info = nullptr;  // and a second one, of a step whose tokens are the sampled rows
    uint8_t *ring = nullptr;        // pinned, n_ring blocks of ring_bytes
    uint64_t *consumed = nullptr;   // pinned: blocks that the device has read
    int64_t ring_bytes = 0;
    uint8_t *masks = nullptr;       // pinned, n_ring + 1 blocks of mask_bytes: a block is free when the step after its own has begun
    int64_t mask_bytes = 0;
    int64_t tail_at = 0;            // the record of PK_OP_SAMPLE
    Open open;
    uint64_t n_begun = 0;
    uint64_t first_seq = 0;
    std::chrono::steady_clock::time_point query_at;  // when the device is asked next whether it has failed: waits may be many and short
    bool guesses = false;           // steps with draft rows run records that others leave out
    pk::SharedRows shared_rows;
    pk::LastRows last_rows;
    std::shared_ptr<pk::SlotPages> slots;
};

namespace pk {

constexpr int32_t kMostGridRows = 65535;  // of a grid's second side, along which many kernels have rows of tokens
constexpr int32_t kRing = 4;
constexpr int64_t kRingBytes = 4 << 20;
constexpr int32_t kRestTokens = 512;  // of a step that may run on what a part left; larger ones have all, in turn with the part

inline bool has_op(const pk_program &p, int32_t op) {
    for (int64_t i = 0; i < p.records.n(); ++i)
        if (p.records[i].op == op) return true;
    return false;
}

// Bytes of scratch of the largest launch of every record, the counters included, whatever multiprocessors its steps run on.
int64_t program_workspace(const pk_ctx &ctx, const Records &records, const pk_state &state);
// The ops of rare.h: whether there is one of that number, and one record of it.
bool has_rare_op(int32_t op);
int32_t launch_rare(const Launch &l, const Record &record);
// PREPARE of a program that may have a pool.
int32_t launch_prepare_pool(const Launch &l, const pk_op_pool &pool);
int64_t rare_scratch(const pk_ctx *ctx, const Record &record, const pk_state &state);
int32_t check_rare_op(pk_ctx *ctx, const Record &record, const pk_state &state, int64_t at);
// The checks that only these kernels know.
int32_t check_program(pk_ctx *ctx, const Records &records, const pk_state &state);
int32_t load_program(pk_program &program, const int32_t *buckets, int32_t n_buckets);
void unload_program(pk_program &program);
int32_t step_program(pk_program &program, const pk_step_head *input);
int32_t finish_program(pk_program &program, const pk_finish_head *input);
// Masks of held rows, from pinned memory; a row without one is dead from here on.
int32_t launch_masks(const Launch &l, const uint8_t *input, int32_t n_masks, int32_t n_rows);
int32_t wait_program(pk_program &program, uint64_t seq, int64_t timeout_us);
// Begin and end of the last finished steps, oldest first.
int32_t times_program(pk_program &program, uint64_t *ns, int32_t n, int32_t *n_out);
int32_t run_program(pk_program &program, int32_t n_tokens, int32_t n_samples, int32_t n_repeats, float *us);

}  // namespace pk
