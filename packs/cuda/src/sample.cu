// Sampling in three launches: adjust (a block per row), reduce (kParts blocks per row), pick (a block per row); of a lone row in one, with the step's end behind it.
#include "../include/draw.cuh"
#include "../include/lone_draw.cuh"

namespace pk {
namespace {

using namespace sampling;

__global__ void __launch_bounds__(kThreads) adjust_kernel(const __grid_constant__ SampleArguments a) {
    extern __shared__ uint32_t seen[];
    wait_dependence();
    release_dependents();
    const int s = blockIdx.x;
    if (s >= a.info->n_samples) return;
    const RowFacts f = row_facts(a, s);
    if (!f.is_dead && !f.is_scored) adjust_logits(a, f, a.logits + s * a.stride, 0, a.n, seen);
}

__global__ void __launch_bounds__(kThreads, 2) reduce_kernel(const __grid_constant__ SampleArguments a) {
    __shared__ ReduceShared sh;
    wait_dependence();
    release_dependents();
    const int s = blockIdx.y;
    if (s < a.info->n_samples) reduce_part(a, row_facts(a, s), s, blockIdx.x, sh);
}

__global__ void __launch_bounds__(kThreads, 1) pick_kernel(const __grid_constant__ SampleArguments a) {
    __shared__ PickShared sh;
    wait_dependence();
    release_dependents();
    const int s = blockIdx.x;
    if (s < a.info->n_samples) pick(a, row_facts(a, s), s, sh);
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
        f = row_facts(a, 0);
        const int size = part_size(a.n), first = blockIdx.x * size;
        if (!f.is_dead && !f.is_scored) adjust_logits(a, f, a.logits, first, min(first + size, a.n), seen);
        __syncthreads();
        reduce_part(a, f, 0, blockIdx.x, sh.reduce);
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
    if (is_drawn) pick(a, f, 0, sh.pick);
    __syncthreads();
    if (threadIdx.x == 0) {
        pk_result *results = step::results_of(a.s, a.info);
        if (a.info->n_rows > 0) step::commit_row(a.s, results, 0, is_drawn, 1);
        step::tell_done(a.s, a.info, times);
    }
}

SampleArguments arguments_of(const Launch &l, const pk_op_sample &op) {
    SampleArguments a = {};
    a.s = *l.state;
    a.info = l.info;
    a.logits = reinterpret_cast<float *>(op.logits.data);
    a.stride = op.logits.stride / 4;
    a.parts = reinterpret_cast<Part *>(l.scratch);
    a.n = static_cast<int32_t>(op.logits.cols);
    return a;
}

}  // namespace

int64_t sample_scratch(const pk_op_sample &, int64_t max_rows) { return max_rows * sampling::kParts * static_cast<int64_t>(sizeof(sampling::Part)); }

int32_t launch_sample(const Launch &l, const pk_op_sample &op) {
    const SampleArguments a = arguments_of(l, op);
    const unsigned rows = static_cast<unsigned>(bound(l, op.logits.rows));
    if (int32_t e = launch(l, "sample adjust", adjust_kernel, dim3(rows), dim3(kThreads), seen_words(a.n) * 8, a)) return e;
    if (int32_t e = launch(l, "sample reduce", reduce_kernel, dim3(kParts, rows), dim3(kThreads), 0, a)) return e;
    return launch(l, "sample pick", pick_kernel, dim3(rows), dim3(kThreads), 0, a);
}

int32_t launch_lone_draw(const Launch &l, const pk_op_sample &op) {
    const SampleArguments a = arguments_of(l, op);
    return launch(l, "sample and commit", lone_draw_kernel, dim3(kParts), dim3(kThreads), seen_words(part_size(a.n)) * 8, a, reinterpret_cast<uint64_t *>(l.consumed) + kTimesAt, l.counters);
}

}  // namespace pk
