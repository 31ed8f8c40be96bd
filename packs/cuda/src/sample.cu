// Sampling in two launches: reduce (kParts parts of a row, adjusted first), pick (a block per row); of a lone row in one, with the step's end behind it.
#include <algorithm>

#include "../include/draw.cuh"
#include "../include/lone_draw.cuh"
#include "../include/logits.h"

namespace pk {
namespace {

using namespace sampling;

// Parts of draws by turns, adjusted and reduced: a block first looks which of its own, at most as many as it has threads, are wanted.
__global__ void __launch_bounds__(kThreads, 2) reduce_kernel(const __grid_constant__ SampleArguments a) {
    extern __shared__ uint32_t seen[];
    __shared__ ReduceShared sh;
    __shared__ int wanted[kThreads], n_wanted;
    if (threadIdx.x == 0) n_wanted = 0;
    __syncthreads();
    wait_dependence();
    release_dependents();
    const int item = blockIdx.x + threadIdx.x * gridDim.x;
    if (item < a.info->n_samples * kParts && !takes_tops(a, row_facts(a.s, item / kParts))) wanted[atomicAdd(&n_wanted, 1)] = item;
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < n_wanted; ++i) {
        {
            const int s = wanted[i] / kParts, first = wanted[i] % kParts * part_size(a.n);
            const RowFacts f = row_facts(a.s, s);
            if (!f.is_dead && !f.is_scored) adjust_logits(a, f, a.logits + s * a.stride, first, min(first + part_size(a.n), a.n), seen);
        }
        __syncthreads();
        reduce_part(a, *row_facts(a.s, wanted[i] / kParts).p, wanted[i] / kParts, wanted[i] % kParts, sh);
    }
}

__global__ void __launch_bounds__(kThreads, 1) pick_kernel(const __grid_constant__ SampleArguments a) {
    __shared__ PickShared sh;
    wait_dependence();
    release_dependents();
    const int s = blockIdx.x;
    if (s < a.info->n_samples) pick<true>(a, row_facts(a.s, s), s, sh);
}

// All of it for one row, and its commit: each block adjusts and reduces a part, the last one to be done picks and commits.
__global__ void __launch_bounds__(kThreads, 1) lone_draw_kernel(const __grid_constant__ SampleArguments a, uint64_t *times, int32_t *counter) {
    extern __shared__ uint32_t seen[];
    __shared__ union {
        ReduceShared reduce;
        PickShared pick;
    } sh;
    __shared__ int is_last;
    wait_dependence();
    const bool is_drawn = a.info->n_samples > 0;
    RowFacts f = {};
    if (is_drawn) {
        f = row_facts(a.s, 0);
        const int size = part_size(a.n), first = blockIdx.x * size;
        if (!f.is_dead && !f.is_scored) adjust_logits(a, f, a.logits, first, min(first + size, a.n), seen);
        __syncthreads();
        reduce_part(a, *f.p, 0, blockIdx.x, sh.reduce);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(counter, 1) == kParts - 1;
        if (is_last) *counter = 0;
        __threadfence();
    }
    __syncthreads();
    if (!is_last) return;
    if (is_drawn) pick<false>(a, f, 0, sh.pick);
    __syncthreads();
    if (threadIdx.x == 0) {
        pk_result *results = step::results_of(a.s, a.info);
        if (a.info->n_rows > 0) step::commit_row(a.s, results, 0, is_drawn, 1);
        step::tell_done(a.s, a.info, times);
    }
}

SampleArguments arguments_of(const Launch &l, const pk_op_sample &op, const Tops &tops = {}) {
    SampleArguments a = {};
    a.s = *l.state;
    a.info = l.info;
    a.logits = reinterpret_cast<float *>(op.logits.data);
    a.stride = op.logits.stride / 4;
    a.parts = reinterpret_cast<Part *>(l.scratch);
    a.n = static_cast<int32_t>(op.logits.cols);
    a.tops = tops;
    return a;
}

}  // namespace

int64_t sample_scratch(const pk_op_sample &, int64_t max_rows) { return max_rows * sampling::kParts * static_cast<int64_t>(sizeof(sampling::Part)); }

int32_t launch_sample(const Launch &l, const pk_op_sample &op, const Tops &tops) {
    const SampleArguments a = arguments_of(l, op, tops);
    const unsigned rows = static_cast<unsigned>(bound(l, op.logits.rows)), blocks = std::max(std::min(rows * kParts, 2u * l.ctx->n_processors), (rows * kParts + kThreads - 1) / kThreads);
    Launch ahead = l;
    ahead.overlap = true;
    if (int32_t e = launch(ahead, "sample reduce", reduce_kernel, dim3(blocks), dim3(kThreads), seen_words(part_size(a.n)) * 8, a)) return e;
    return launch(ahead, "sample pick", pick_kernel, dim3(rows), dim3(kThreads), 0, a);
}

int32_t launch_sample(const Launch &l, const pk_op_sample &op) { return launch_sample(l, op, Tops{}); }

int32_t launch_lone_draw(const Launch &l, const pk_op_sample &op) {
    const SampleArguments a = arguments_of(l, op);
    return launch(l, "sample and commit", lone_draw_kernel, dim3(kParts), dim3(kThreads), seen_words(part_size(a.n)) * 8, a, reinterpret_cast<uint64_t *>(l.consumed) + kTimesAt, l.counters);
}

}  // namespace pk
