// Mixture of experts on the device: how pairs (token, expert) are sorted, and the arguments of the products over them.
#pragma once
#include "../../rare.h"
#include "context.h"

namespace pk {

// A stack of packed matrices, one expert after the other. Offsets are bytes from an expert's matrix; -1: absent.
struct ExpertWeight {
    const uint8_t *data;
    const float *bias;  // [E * rows] or null
    int64_t stride, row_bytes;
    int64_t scale_at, row_scale_at, block_scale_at;
    int32_t rows, padded_rows, block_stride, reserved;
};

// Pairs of one expert, neighbours in the sorted order. place: where its matrices lie in their stacks.
struct ExpertItem {
    int32_t expert, first, count, place;
};

// Where experts lie: expert e of a stack is at stack.data + shift + at[e] * stride, without `at` at stack.data + e * stride. n: at is below it.
struct ExpertPlaces {
    int64_t shift = 0;
    const int32_t *at = nullptr;
    int32_t n = 0;
};

// out[position, row] = product of the pair at that position, for rows [first_row, first_row + n_rows) of the weight. With two
// weights: the activation of the gate times up; with one weight and `gate` (as out): the activation of that times the product. A lone token needs no sorting: item i is its i-th expert (`ids`).
struct ExpertProduct {
    ExpertWeight w[2];
    const void *x;
    void *out;
    const void *gate;
    const ExpertItem *items;
    const int32_t *n_items, *order;  // order: pair at a position; a pair is token * n_used + i
    const int32_t *ids;              // of a lone token, or null
    const int32_t *places;           // of every expert, or null: the expert's number (lone tokens; items know theirs)
    const StepInfo *info;
    int64_t x_stride, out_stride, rows_symbol;  // elements
    int32_t x_format, out_format, is_wide, by_position;  // by_position: row of x is the position, not the pair's token
    int32_t n_used, n_experts, n_w, act;
    int32_t k, n_units, first_row, n_rows;
    int32_t warps_k, x_row_bytes, padded_out;  // padded_out: columns below it and past the rows are written as zeros
    float limit, alpha;
    const float *x_factors;  // of every row of x where its rows are those of fp4.cuh, or null
};

struct ExpertUnit {
    int32_t unit, group;  // elements of K a warp takes at once; of a scale, 0 without
};

// How a lone token's sum over its experts ends: y = add + scale * sum of weight * product. counter: zero between launches.
struct LoneEnd {
    const float *weights;
    const void *add;
    void *y;
    int32_t *counter;
    int32_t add_format, y_format;
    float scale;
};

int32_t launch_experts_at(const Launch &l, const pk_op_experts &op, const ExpertPlaces &places);
int32_t launch_fetched(const Launch &l, const pk_op_experts_fetched &op);
int32_t check_fetched(pk_ctx *ctx, const pk_op_experts_fetched &op, int64_t at);
void drop_fetches(const pk_ctx *ctx);  // when a context closes

#ifdef __CUDACC__
// Waits until every block of the grid is here. `counter`: zero between launches; leave() puts it back.
__device__ __forceinline__ void meet(int32_t *counter) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(counter, 1);
        while (*reinterpret_cast<volatile int32_t *>(counter) < static_cast<int>(gridDim.x)) {}
        __threadfence();
    }
    __syncthreads();
}
__device__ __forceinline__ void leave(int32_t *counter) {
    if (threadIdx.x == 0 && atomicAdd(counter, 1) == 2 * static_cast<int>(gridDim.x) - 1) *counter = 0;
}
#endif

constexpr int32_t kExpertThreads = 256;
constexpr int32_t kTileRows = 128;  // pairs, and rows of W, of a tile of the product for many tokens

// Few pairs an expert: weights at the speed of reading them. max_items: blocks in y.
template <int kFormat>
int32_t launch_expert_stream(const Launch &l, const ExpertProduct &p, int32_t max_items, int64_t shared_bytes);
// A lone token: gate and up (p), down (d) and the sum in one launch; all three of one format.
template <int kFormat>
int32_t launch_expert_lone(const Launch &l, const ExpertProduct &p, const ExpertProduct &d, const LoneEnd &end, int64_t shared_bytes);
// Many: tiles of 128 pairs and 128 rows, weights widened to bf16 in shared memory.
template <int kFormat>
int32_t launch_expert_tiles(const Launch &l, const ExpertProduct &p, int32_t max_items);

}  // namespace pk
