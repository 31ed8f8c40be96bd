// Choosing experts: a warp per token scores the logits, drops groups, and takes the k largest one after the other.
//
// Without groups, and of up to 512 experts, in registers (choice.cuh). Else scores and keys of a token lie in shared memory. Equal keys go to the lower expert. Up to 4096 experts (checked at load).
#include "../include/choice.cuh"

namespace pk {
namespace {

struct RouteArguments {
    const float *logits, *bias;
    int32_t *ids;
    float *weights;
    const StepInfo *info;
    int64_t logits_stride, ids_stride, weights_stride, rows_symbol;
    int32_t n_experts, n_chosen, score, is_normalised, n_groups, n_groups_used, n_group_best;
    float scale;
};

__device__ __forceinline__ float warp_max(float v) {
    for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
    return v;
}

// Keys of experts outside the best groups become -infinity. sums: [n_groups].
__device__ __forceinline__ void drop_groups(const RouteArguments &a, float *key, float *sums, int lane) {
    const int size = a.n_experts / a.n_groups;
    for (int g = lane; g < a.n_groups; g += 32) {
        float first = -INFINITY, second = -INFINITY;
        for (int i = g * size; i < (g + 1) * size; ++i) {
            const float v = key[i];
            if (v > first) {
                second = first;
                first = v;
            } else if (v > second) {
                second = v;
            }
        }
        sums[g] = size > 1 && a.n_group_best > 1 ? first + second : first;
    }
    __syncwarp();
    for (int g = lane; g < a.n_groups; g += 32) {
        int better = 0;
        for (int h = 0; h < a.n_groups; ++h) better += sums[h] > sums[g] || (sums[h] == sums[g] && h < g);
        if (better >= a.n_groups_used)
            for (int i = g * size; i < (g + 1) * size; ++i) key[i] = -INFINITY;
    }
    __syncwarp();
}

__global__ void __launch_bounds__(32) route_kernel(const __grid_constant__ RouteArguments a) {
    extern __shared__ float shared[];
    wait_dependence();
    release_dependents();
    const int t = blockIdx.x, lane = threadIdx.x, n = a.n_experts;
    if (t >= rows_of(a.info, a.rows_symbol)) return;
    float *score = shared, *key = score + n, *sums = key + n;
    const float *logits = a.logits + t * a.logits_stride;
    float factor = 1.0f, largest = 0.0f;
    if (a.score == PK_SCORE_SOFTMAX) {
        largest = -INFINITY;
        for (int e = lane; e < n; e += 32) largest = fmaxf(largest, logits[e]);
        largest = warp_max(largest);
        float sum = 0.0f;
        for (int e = lane; e < n; e += 32) {
            score[e] = expf(logits[e] - largest);
            sum += score[e];
        }
        factor = 1.0f / warp_sum(sum);
    }
    for (int e = lane; e < n; e += 32) {
        const float v = a.score == PK_SCORE_SOFTMAX ? score[e] * factor : a.score == PK_SCORE_SIGMOID ? 1.0f / (1.0f + expf(-logits[e])) : logits[e];
        const float with_bias = v + (a.bias != nullptr ? a.bias[e] : 0.0f);
        score[e] = v;
        key[e] = isnan(with_bias) ? -INFINITY : with_bias;
    }
    __syncwarp();
    if (a.n_groups > 1) drop_groups(a, key, sums, lane);
    float sum = 0.0f, first = 0.0f;
    for (int i = 0; i < a.n_chosen; ++i) {
        float best = -INFINITY;
        int at = n;
        for (int e = lane; e < n; e += 32)
            if (key[e] > best || at == n) {
                best = key[e];
                at = e;
            }
        for (int o = 16; o; o >>= 1) {
            const float other = __shfl_xor_sync(~0u, best, o);
            const int where = __shfl_xor_sync(~0u, at, o);
            if (where < n && (at == n || other > best || (other == best && where < at))) {
                best = other;
                at = where;
            }
        }
        if (i == 0) first = score[at];
        const float w = a.score == PK_SCORE_CHOSEN ? expf(score[at] - first) : score[at];
        sum += w;
        if (lane == 0) {
            key[at] = -INFINITY;
            a.ids[t * a.ids_stride + i] = at;
            a.weights[t * a.weights_stride + i] = w;
        }
        __syncwarp();
    }
    const bool divides = a.is_normalised || a.score == PK_SCORE_CHOSEN;
    const float by = divides ? a.scale / (sum > 0.0f ? sum : 1.0f) : a.scale;
    for (int i = lane; i < a.n_chosen; i += 32) a.weights[t * a.weights_stride + i] *= by;
}

constexpr int kRouteWarps = 8;

// A warp a token.
template <int kPerLane>
__global__ void __launch_bounds__(32 * kRouteWarps) route_few_kernel(const __grid_constant__ RouteArguments a) {
    wait_dependence();
    release_dependents();
    const int t = blockIdx.x * kRouteWarps + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (t >= rows_of(a.info, a.rows_symbol)) return;
    const ChoiceArguments c = {a.logits + t * a.logits_stride, a.bias, a.n_experts, a.n_chosen, a.score, a.is_normalised, a.scale};
    Choice<kPerLane> choice;
    choice.load(c);
    const int id = choice.choose(c);
    const float weight = choice.weigh(c, id);
    if (lane >= a.n_chosen) return;
    a.ids[t * a.ids_stride + lane] = id;
    a.weights[t * a.weights_stride + lane] = weight;
}

}  // namespace

int32_t launch_route(const Launch &l, const pk_op_route &op) {
    RouteArguments a = {};
    a.logits = reinterpret_cast<const float *>(op.logits.data);
    a.bias = reinterpret_cast<const float *>(op.bias.data);
    a.ids = reinterpret_cast<int32_t *>(op.ids.data);
    a.weights = reinterpret_cast<float *>(op.weights.data);
    a.info = l.info;
    a.logits_stride = op.logits.stride / 4;
    a.ids_stride = op.ids.stride / 4;
    a.weights_stride = op.weights.stride / 4;
    a.rows_symbol = op.logits.rows;
    a.n_experts = static_cast<int32_t>(op.logits.cols);
    a.n_chosen = static_cast<int32_t>(op.ids.cols);
    a.score = op.score;
    a.is_normalised = op.is_normalised;
    a.n_groups = op.n_groups;
    a.n_groups_used = op.n_groups_used;
    a.n_group_best = op.n_group_best;
    a.scale = op.scale;
    const int64_t n_rows = bound(l, op.logits.rows);
    if (is_few_choice(op)) {
        const dim3 blocks(static_cast<unsigned>((n_rows + kRouteWarps - 1) / kRouteWarps)), threads(32 * kRouteWarps);
        return a.n_experts <= 16 * kMostPerLane ? launch(l, "route", route_few_kernel<kMostPerLane / 2>, blocks, threads, 0, a) : launch(l, "route", route_few_kernel<kMostPerLane>, blocks, threads, 0, a);
    }
    const int64_t bytes = (2 * op.logits.cols + op.n_groups) * 4;
    return launch(l, "route", route_kernel, dim3(static_cast<unsigned>(n_rows)), dim3(32), bytes, a);
}

}  // namespace pk
