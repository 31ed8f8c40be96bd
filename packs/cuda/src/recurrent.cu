// The last inputs of each row of a step become its slot's tail, for ops that convolve over tokens.
#include "../include/recurrent.cuh"

namespace pk {
namespace {

constexpr int kThreads = 128;

struct TailArguments {
    RecurrentState state;
    const StepInfo *info;
    Taps taps;
    int32_t more_than;
};

// Grid: channels, rows. Every reader of the old tails ran before.
__global__ void __launch_bounds__(kThreads) tail_kernel(const __grid_constant__ TailArguments a) {
    wait_dependence();
    release_dependents();
    const int c = blockIdx.x * kThreads + threadIdx.x, r = blockIdx.y;
    if (r >= a.info->n_rows || c >= a.taps.channels) return;
    const RecurrentRow q = recurrent_row(a.state, r);
    if (!q.is_dead && q.n > a.more_than) keep_tail(a.taps, q, c);
}

}  // namespace

int32_t launch_tails(const Launch &l, const Taps &taps, int32_t more_than) {
    const TailArguments a = {recurrent_state(*l.state), l.info, taps, more_than};
    return launch(l, "tails", tail_kernel, dim3((taps.channels + kThreads - 1) / kThreads, static_cast<unsigned>(max_rows_of(l))), dim3(kThreads), 0, a);
}

}  // namespace pk
