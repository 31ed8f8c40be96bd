// Choosing a token's experts by a warp, in registers (src/route.cu, src/experts).
#pragma once
#include "device.cuh"

namespace pk {

constexpr int kMostPerLane = 16;  // experts a lane looks at: half of them where that is enough

inline bool is_few_choice(const pk_op_route &op) { return op.n_groups <= 1 && op.logits.cols <= 32 * kMostPerLane && op.ids.cols <= 32; }

struct ChoiceArguments {
    const float *logits, *bias;  // of one token; bias may be null
    int32_t n_experts, n_used, score, is_normalised;
    float scale;
};

// Order-preserving, for the largest of a warp.
__device__ __forceinline__ uint32_t ordered(float v) {
    const uint32_t u = __float_as_uint(v);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// A warp chooses a token's experts, without groups: every lane looks at kPerLane of them. Lane i < n_used gets its i-th expert. Without a bias the logits have the order of the
// scores, which are wanted later than the choice.
template <int kPerLane>
struct Choice {
    float logit[kPerLane], bias[kPerLane];

    __device__ __forceinline__ void load(const ChoiceArguments &a) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            const int e = lane + 32 * j;
            logit[j] = e < a.n_experts ? __ldcg(a.logits + e) : -INFINITY;
            bias[j] = a.bias != nullptr && e < a.n_experts ? __ldg(a.bias + e) : 0.0f;
        }
    }
    __device__ __forceinline__ int choose(const ChoiceArguments &a) {
        const int lane = threadIdx.x & 31;
        if (a.bias != nullptr) score(a);
        uint32_t key[kPerLane];  // 0: taken, or not there
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            const float v = logit[j] + bias[j];
            key[j] = lane + 32 * j < a.n_experts ? ordered(isnan(v) ? -INFINITY : v) : 0;
        }
        int mine = 0;
#pragma unroll 1
        for (int i = 0; i < a.n_used; ++i) {
            uint32_t best = key[0];
#pragma unroll
            for (int j = 1; j < kPerLane; ++j) best = max(best, key[j]);
            best = __reduce_max_sync(~0u, best);
            uint32_t holds = 0;
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) holds |= key[j] == best ? 1u << j : 0;
            const int e = __reduce_min_sync(~0u, holds ? lane + 32 * (__ffs(holds) - 1) : INT32_MAX);
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) key[j] = lane + 32 * j == e ? 0 : key[j];
            if (lane == i) mine = e;
        }
        return mine;
    }
    // Logits become scores.
    __device__ __forceinline__ void score(const ChoiceArguments &a) {
        if (a.score == PK_SCORE_SOFTMAX) {
            float largest = -INFINITY, sum = 0.0f;
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) largest = fmaxf(largest, logit[j]);
            for (int o = 16; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, o));
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) {
                logit[j] = (threadIdx.x & 31) + 32 * j < a.n_experts ? expf(logit[j] - largest) : 0.0f;
                sum += logit[j];
            }
            const float factor = 1.0f / warp_sum(sum);
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) logit[j] *= factor;
        } else if (a.score == PK_SCORE_SIGMOID) {
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) logit[j] = 1.0f / (1.0f + expf(-logit[j]));
        }
    }
    // What the lane's expert counts.
    __device__ __forceinline__ float weigh(const ChoiceArguments &a, int mine) {
        if (a.bias == nullptr) score(a);
        float v = 0.0f;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            const float there = __shfl_sync(~0u, logit[j], mine & 31);
            if (mine >> 5 == j) v = there;
        }
        if (a.score == PK_SCORE_CHOSEN) v = expf(v - __shfl_sync(~0u, v, 0));
        if ((threadIdx.x & 31) >= a.n_used) v = 0.0f;
        const float sum = warp_sum(v);
        return v * (a.is_normalised || a.score == PK_SCORE_CHOSEN ? a.scale / (sum > 0.0f ? sum : 1.0f) : a.scale);
    }
};

}  // namespace pk
