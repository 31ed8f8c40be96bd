// What a warp of the decode kernel (decode.cu) keeps of one token's pairs where these are eight at most, in fragments of mma.sync whose columns are the
// pairs and whose rows are positions, then columns of V: half the products and half the registers of attention_sums.cuh, and one decision in place of
// shuffles while no logit is far above the largest so far.
#pragma once
#include "attention_ring.cuh"
#include "gather_columns.cuh"

namespace pk {
namespace ring {

constexpr float kSlack = 8.0f;  // powers of two by which a weight may pass one: neither f16 nor sums mind

// Transposes eight by eight numbers of 16 bits.
__device__ __forceinline__ uint32_t transpose8(uint32_t v) {
    uint32_t t;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(v));
    return t;
}

template <int kD, int kKind>
struct Columns {
    static constexpr int kSize = kGroup<kD, kKind>, kP = kPanels<kD, kKind>;
    static_assert(kSize == 16 && (kKind == kBf16 || kKind == kF16) && kHoldQ<kD>);
    uint32_t q[kD / 16][2];
    float o[kD / 16][4], top[2], sum[2];  // of this lane's two pairs; top is what weights are relative to, their own part of the sum

    __device__ __forceinline__ void open(const AttentionArguments &, const Segment &) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            top[e] = -INFINITY;
            sum[e] = 0.0f;
        }
#pragma unroll
        for (int d = 0; d < kD / 16; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[d][e] = 0.0f;
    }

    // q of the token, which lies at `from` in so many rows.
    __device__ __forceinline__ void hold(const uint8_t *from, int rows) {
        const int lane = threadIdx.x & 31, row = (lane >> 2) & (rows - 1);
        const uint32_t at = shared_address(from) + row * kQPieces<kD> * 16 + (lane & 3) * 4;
#pragma unroll
        for (int k = 0; k < kD / 16; ++k)
#pragma unroll
            for (int e = 0; e < 2; ++e) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(q[k][e]) : "r"(at + (((2 * k + e) ^ row) << 4)));
    }

    // A group of positions that begins at `first`, whose keys and values have landed. c: as Sums has it.
    __device__ __forceinline__ void add(const AttentionArguments &a, const Segment &s, int first, const uint8_t *, uint32_t k_at, uint32_t v_at, bool is_plain, float c) {
        const int lane = threadIdx.x & 31;
        // Positions lane / 4 and eight more, by this lane's pairs; in four chains of products.
        float chain[4][4] = {};
        {
            const int row = (lane & 7) + ((lane >> 3) & 1) * 8, odd = lane >> 4;
#pragma unroll
            for (int k = 0; k < kD / 16; ++k) {
                uint32_t b[4];
                load_matrix4(b, k_at + block_offset<kP>(row, 2 * k + odd));
                multiply<kHalfMath<kKind>>(chain[k & 3], b, q[k][0], q[k][1]);
            }
        }
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = (chain[0][i] + chain[1][i]) + (chain[2][i] + chain[3][i]);
        if (!is_plain) logits2<4>(x, a.scale, a.softcap);
        if (first < s.first || first + kSize > s.end) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int p = first + (lane >> 2) + 8 * h;
                if (p < s.first || p >= s.end) x[2 * h] = x[2 * h + 1] = -INFINITY;
            }
        }
        float most[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) most[e] = fmaxf(x[e], x[2 + e]) * c;
        if (__any_sync(~0u, most[0] > top[0] + kSlack || most[1] > top[1] + kSlack)) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2) most[e] = fmaxf(most[e], __shfl_xor_sync(~0u, most[e], lanes));
                const float now = fmaxf(top[e], most[e]), fade = power2(top[e] - (now == -INFINITY ? 0.0f : now));
                top[e] = now;
                sum[e] *= fade;
#pragma unroll
                for (int d = 0; d < kD / 16; ++d) {
                    o[d][e] *= fade;
                    o[d][2 + e] *= fade;
                }
            }
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float base = top[e] == -INFINITY ? 0.0f : top[e];
#pragma unroll
            for (int h = 0; h < 2; ++h) x[2 * h + e] = power2(fmaf(x[2 * h + e], c, -base));
            sum[e] += x[e] + x[2 + e];
        }
        // Weights as columns: pairs in the lanes' places of rows, positions in a register.
        const uint32_t low = transpose8(pack2<kHalfMath<kKind>>(x[0], x[1])), high = transpose8(pack2<kHalfMath<kKind>>(x[2], x[3]));
        const int row = (lane & 7) + (lane >> 4) * 8, odd = (lane >> 3) & 1;
#pragma unroll
        for (int d = 0; d < kD / 16; ++d) {
            uint32_t b[4];
            load_matrix4_transposed(b, v_at + block_offset<kP>(row, 2 * d + odd));
            multiply<kHalfMath<kKind>>(o[d], b, low, high);
        }
    }

    // The end of a head that the warp has to itself: sinks join, gains count, rows are written in bf16, eight columns a lane.
    __device__ __forceinline__ void finish(const AttentionArguments &a, const Segment &s) {
        const int lane = threadIdx.x & 31, group = a.n_heads / a.n_kv_heads;
        float f[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) sum[e] += __shfl_xor_sync(~0u, sum[e], lanes);
            const int head = s.head * group + min(2 * (lane & 3) + e, group - 1);
            f[e] = 1.0f;
            if (a.sinks != nullptr) {
                const float sink = a.sinks[head] * kLog2e, joint = fmaxf(top[e], sink);
                f[e] = power2(top[e] - joint);
                sum[e] = sum[e] * f[e] + power2(sink - joint);
            }
            f[e] = sum[e] > 0.0f ? f[e] * gain_of(a, head) / sum[e] : 0.0f;
        }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        const int pair = lane >> 2, c = lane & 3;
        bf16 *to = static_cast<bf16 *>(a.out) + static_cast<int64_t>(s.start) * a.out_stride + (s.head * group + pair) * 128 + 8 * c;
        auto columns = [&](int i) { return transpose8(pack_bf16(o[i >> 1][2 * (i & 1)] * f[0], o[i >> 1][2 * (i & 1) + 1] * f[1])); };
#pragma unroll
        for (int i = 0; i < kD / 8; i += 4) {
            const uint4 v = gather_columns(columns(i), columns(i + 1), columns(i + 2), columns(i + 3), c);
            if (pair < group) *reinterpret_cast<uint4 *>(to + 8 * i) = v;
        }
#endif
    }

    // What weights are relative to, and sums, of the warp's pairs.
    __device__ __forceinline__ void end(float *tops, float *sums) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) sum[e] += __shfl_xor_sync(~0u, sum[e], lanes);
            if (lane < 4) {
                tops[2 * lane + e] = top[e];
                sums[2 * lane + e] = sum[e];
            }
        }
    }

    // Weighted values of the pairs from `first` on, as many as are joined at a time.
    __device__ __forceinline__ void put(float *to, int first) const {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int row = 2 * (lane & 3) + e - first;
            if (row >= 0 && row < kMergeRows<kD>) {
#pragma unroll
                for (int d = 0; d < kD / 16; ++d)
#pragma unroll
                    for (int h = 0; h < 2; ++h) to[row * kD + 16 * d + 8 * h + (lane >> 2)] = o[d][2 * h + e];
            }
        }
    }
};

}  // namespace ring
}  // namespace pk
