// The end of a mixture: each token adds its experts' outputs in the order of their numbers, whatever order they were made in.
#include <algorithm>

#include "../../include/device.cuh"
#include "../../include/experts_plan.h"
#include "../../include/operand.h"

namespace pk {
namespace {

struct CombineArguments {
    const int32_t *ids, *rank;  // rank null: a lone token, whose pair is its position
    const float *weights;
    const void *out, *add;
    void *y;
    const StepInfo *info;
    int64_t ids_stride, weights_stride, out_stride, add_stride, y_stride, rows_symbol;
    int32_t out_format, add_format, y_format, n_used, n_experts, first, n, is_wide;  // is_wide: eight columns are one or two loads
    float scale;
};

// y[:, first : first + n] = add + scale * sum of the token's experts. Grid: tokens, columns. 64 threads or more.
__global__ void __launch_bounds__(256) expert_combine_kernel(const __grid_constant__ CombineArguments a) {
    __shared__ int32_t positions[kMostChosen];
    __shared__ float factors[kMostChosen];
    wait_dependence();
    release_dependents();
    const int t = blockIdx.x;
    if (t >= rows_of(a.info, a.rows_symbol)) return;
    const int32_t *ids = a.ids + t * a.ids_stride;
    if (threadIdx.x < a.n_used) {
        const int i = threadIdx.x, e = ids[i];
        int before = 0;
        for (int j = 0; j < a.n_used; ++j) before += ids[j] < e || (ids[j] == e && j < i);
        const bool is_there = e >= 0 && e < a.n_experts;
        positions[before] = !is_there ? -1 : a.rank != nullptr ? a.rank[t * a.n_used + i] : i;
        factors[before] = a.weights[t * a.weights_stride + i] * a.scale;
    }
    __syncthreads();
    if (a.is_wide) {
        const int c = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
        if (c >= a.n) return;
        float v[8] = {}, x[8], old[8] = {};
        if (a.add != nullptr) load8(a.add, t * a.add_stride + a.first + c, a.add_format, old);
        if (a.out_format == PK_BF16) {
            constexpr int kFlight = 8;  // loads under way
            for (int first = 0; first < a.n_used; first += kFlight) {
                uint4 raw[kFlight];
#pragma unroll
                for (int i = 0; i < kFlight; ++i) {
                    const int at = first + i < a.n_used ? positions[first + i] : -1;
                    raw[i] = at >= 0 ? __ldcs(reinterpret_cast<const uint4 *>(static_cast<const bf16 *>(a.out) + at * a.out_stride + c)) : make_uint4(0, 0, 0, 0);
                }
#pragma unroll
                for (int i = 0; i < kFlight; ++i) {
                    const float f = first + i < a.n_used ? factors[first + i] : 0.0f;
                    const uint32_t w[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        v[2 * e] = fmaf(f, low_f32(w[e]), v[2 * e]);
                        v[2 * e + 1] = fmaf(f, high_f32(w[e]), v[2 * e + 1]);
                    }
                }
            }
        } else {
#pragma unroll 4
            for (int i = 0; i < a.n_used; ++i) {
                if (positions[i] < 0) continue;
                load8(a.out, positions[i] * a.out_stride + c, a.out_format, x);
#pragma unroll
                for (int e = 0; e < 8; ++e) v[e] = fmaf(factors[i], x[e], v[e]);
            }
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] += old[e];
        store8(a.y, t * a.y_stride + a.first + c, a.y_format, v);
        return;
    }
    for (int c = blockIdx.y * blockDim.x + threadIdx.x; c < a.n; c += gridDim.y * blockDim.x) {
        float v = 0.0f;
        for (int i = 0; i < a.n_used; ++i)
            if (positions[i] >= 0) v = fmaf(factors[i], load_as_f32(a.out, positions[i] * a.out_stride + c, a.out_format), v);
        if (a.add != nullptr) v += load_as_f32(a.add, t * a.add_stride + a.first + c, a.add_format);
        store_from_f32(a.y, t * a.y_stride + a.first + c, a.y_format, v);
    }
}

}  // namespace

int32_t launch_expert_combine(const Launch &l, const pk_op_experts &op, const ExpertPlan &plan, int64_t first, int64_t n) {
    CombineArguments a = {};
    a.ids = reinterpret_cast<const int32_t *>(op.ids.data);
    a.rank = plan.is_lone ? nullptr : reinterpret_cast<const int32_t *>(l.scratch + plan.rank);
    a.weights = reinterpret_cast<const float *>(op.weights.data);
    a.out = l.scratch + plan.out;
    a.add = reinterpret_cast<const void *>(op.add.data);
    a.y = reinterpret_cast<void *>(op.y.data);
    a.info = l.info;
    a.ids_stride = op.ids.stride / 4;
    a.weights_stride = op.weights.stride / 4;
    a.out_stride = plan.panel;
    a.add_stride = elements_apart(op.add);
    a.y_stride = elements_apart(op.y);
    a.rows_symbol = op.x.rows;
    a.out_format = plan.out_format;
    a.add_format = op.add.format;
    a.y_format = op.y.format;
    a.n_used = static_cast<int32_t>(op.ids.cols);
    a.n_experts = op.n_experts;
    a.first = static_cast<int32_t>(first);
    a.n = static_cast<int32_t>(n);
    a.scale = op.scale;
    auto is_eight = [](const void *p, int64_t stride) { return p == nullptr || (stride % 8 == 0 && reinterpret_cast<uint64_t>(p) % 16 == 0); };
    a.is_wide = n % 8 == 0 && first % 8 == 0 && is_eight(a.out, a.out_stride) && is_eight(a.add, a.add_stride) && is_eight(a.y, a.y_stride);
    // Eight columns a thread, or four turns of one.
    const int64_t threads = a.is_wide ? std::clamp<int64_t>(round_up(n / 8, 32), 64, 256) : 256, each = a.is_wide ? 8 * threads : 1024;
    return launch(l, "expert_combine", expert_combine_kernel, dim3(static_cast<unsigned>(bound(l, op.x.rows)), static_cast<unsigned>((n + each - 1) / each)), dim3(static_cast<unsigned>(threads)), 0, a);
}

}  // namespace pk
