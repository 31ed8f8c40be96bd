// A lone token's mixture of experts in one launch (src/experts/mixture.cu, find_mixtures.cu): which records of a program it stands for, and its arguments.
#pragma once
#include <vector>

#include "../../host/program.h"
#include "choice.cuh"
#include "device.cuh"
#include "experts.cuh"

namespace pk {

// From the residual to the residual: the product that ends the branch before (or none), norm, router, choice, the chosen experts and the shared one
// with its gate.
struct MixtureArguments {
    const float *norm, *router_bias;
    float *residual, *logits, *weights, *switched;  // switched: what the shared expert's gate says
    int32_t *ids;
    const bf16 *before_x;
    bf16 *normed, *hidden;  // hidden [n_used, f], the shared expert's behind it
    ExpertWeight before, router, switching, gate, up, down, shared_gate, shared_up, shared_down;
    ChoiceArguments choice;
    const StepInfo *info;
    int32_t *counter;  // three, 32 apart, zero between launches
    int64_t rows_symbol;
    int32_t m, before_k, f, f_shared, n_experts, n_used, act, warps_k;  // f_shared 0: no shared expert; warps_k: of a block's, for gate and up
    float eps, before_scale, router_scale, experts_scale, switch_scale, shared_scale, limit, alpha;
};

// Records [first, last).
struct Mixture {
    int64_t first = 0, last = 0;
    int32_t format = 0;  // of the experts
    MixtureArguments arguments = {};
};

// The mixtures of a program that one launch can serve when a step has one token; none where a format or a size is not for it.
std::vector<Mixture> find_mixtures(const Launch &l, const Records &records);
int64_t mixture_shared_bytes(const MixtureArguments &a);
int32_t launch_mixture(const Launch &l, const Mixture &mixture);

}  // namespace pk
