// What a warp of the decode kernel (decode.cu) keeps of a tile of 16 (token, head) pairs, in fragments of mma.sync whose rows are the pairs: q,
// largest logits, sums of weights, weighted values; and how a group of positions is added.
#pragma once
#include "attention_ring.cuh"

namespace pk {
namespace ring {

template <int kD, int kKind>
struct Sums {
    static constexpr int kSize = kGroup<kD, kKind>, kP = kPanels<kD, kKind>, kTiles = kSize / 8;
    uint32_t q[kHoldQ<kD> ? kD / 16 : 1][4];
    int limit[2];  // of this lane's two rows of the tile
    float o[kD / 8][4], top[2], sum[2];

    __device__ __forceinline__ void open(const AttentionArguments &a, const Segment &s) {
        const int group = a.n_heads / a.n_kv_heads;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int pair = s.pair + ((threadIdx.x & 31) >> 2) + 8 * h;
            limit[h] = pair < s.n_pairs ? s.position + pair / group : -1;
            top[h] = -INFINITY;
            sum[h] = 0.0f;
        }
#pragma unroll
        for (int d = 0; d < kD / 8; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[d][e] = 0.0f;
    }

    // q of the tile, which lies at `from` in so many rows.
    __device__ __forceinline__ void hold(const uint8_t *from, int rows) {
        if constexpr (kHoldQ<kD>) {
#pragma unroll
            for (int k = 0; k < kD / 16; ++k) read_q<kD, kKind>(q[k], from, rows, k);
        }
    }

    // s[16 pairs, positions] = q k^T.
    __device__ __forceinline__ void scores(float (&s)[kTiles][4], const uint8_t *q_at, uint32_t k_at) {
        const int lane = threadIdx.x & 31;
        float more[2][4] = {};
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[t][e] = 0.0f;
        const int row = (lane & 7) + ((lane >> 4) << 3), odd = (lane >> 3) & 1;
        constexpr int kPer = kKind == kFp8 ? 2 : 1;  // k steps of a 16-byte piece
#pragma unroll
        for (int k = 0; k < kD / 16 / kPer; ++k) {
            uint32_t qk[kPer][4];
#pragma unroll
            for (int i = 0; i < kPer; ++i) {
                if constexpr (kHoldQ<kD>) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) qk[i][e] = q[k * kPer + i][e];
                } else {
                    read_q<kD, kKind>(qk[i], q_at, 16, k * kPer + i);
                }
            }
#pragma unroll
            for (int u = 0; u < kSize / 16; ++u) {
                uint32_t b[4];
                load_matrix4(b, k_at + u * 16 * kP * 128 + block_offset<kP>(row, 2 * k + odd));
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    if constexpr (kKind == kFp8) {
                        multiply<true>(s[2 * u + t], qk[0], halves(b[2 * t], 0), halves(b[2 * t], 1));
                        multiply<true>(kSize == 16 ? more[t] : s[2 * u + t], qk[1], halves(b[2 * t + 1], 0), halves(b[2 * t + 1], 1));
                    } else {  // chains of few products
                        multiply<kHalfMath<kKind>>(kSize == 16 && (k & 1) ? more[t] : s[2 * u + t], qk[0], b[2 * t], b[2 * t + 1]);
                    }
                }
            }
        }
        if constexpr (kSize == 16) {
#pragma unroll
            for (int t = 0; t < 2; ++t)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[t][e] += more[t][e];
        }
    }

    __device__ __forceinline__ void values(const uint32_t (&p)[kSize / 16][4], uint32_t v_at) {
        const int lane = threadIdx.x & 31, row = (lane & 7) + ((lane >> 3) & 1) * 8, odd = lane >> 4;
#pragma unroll
        for (int u = 0; u < kSize / 16; ++u)
#pragma unroll
            for (int m = 0; m < (kKind == kFp8 ? kD / 32 : kD / 16); ++m) {
                uint32_t b[4];
                load_matrix4_transposed(b, v_at + u * 16 * kP * 128 + block_offset<kP>(row, 2 * m + odd));
                if constexpr (kKind == kFp8) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) b[i] = __byte_perm(b[i], 0, 0x3120);
#pragma unroll
                    for (int i = 0; i < 2; ++i)
#pragma unroll
                        for (int parity = 0; parity < 2; ++parity) multiply<true>(o[4 * m + 2 * i + parity], p[u], halves(b[2 * i], parity), halves(b[2 * i + 1], parity));
                } else {
                    multiply<kHalfMath<kKind>>(o[2 * m], p[u], b[0], b[1]);
                    multiply<kHalfMath<kKind>>(o[2 * m + 1], p[u], b[2], b[3]);
                }
            }
    }

    // A group of positions that begins at `first`, whose keys and values have landed. c: what scores become logits in base 2 by, where nothing else is to be done (is_plain).
    __device__ __forceinline__ void add(const AttentionArguments &a, const Segment &s, int first, const uint8_t *q_at, uint32_t k_at, uint32_t v_at, bool is_plain, float c) {
        const int lane = threadIdx.x & 31;
        float x[kTiles][4];
        scores(x, q_at, k_at);
        if (!is_plain) logits2<4 * kTiles>(&x[0][0], a.scale, a.softcap);
        if (first + kSize - 1 > s.position || a.window > 0 || first < s.first) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int t = 0; t < kTiles; ++t)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int p = first + t * 8 + 2 * (lane & 3) + e;
                        if (p > limit[h] || p < s.first || (a.window > 0 && p <= limit[h] - a.window)) x[t][2 * h + e] = -INFINITY;
                    }
        }
        bool grew = false;
        float fade[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float most = fmaxf(x[0][2 * h], x[0][2 * h + 1]);
#pragma unroll
            for (int t = 1; t < kTiles; ++t) most = fmaxf(most, fmaxf(x[t][2 * h], x[t][2 * h + 1]));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2)) * c;
            const float now = fmaxf(top[h], most), base = now == -INFINITY ? 0.0f : now;
            grew |= now > top[h];
            fade[h] = power2(top[h] - base);
            top[h] = now;
            float part = 0.0f;
#pragma unroll
            for (int t = 0; t < kTiles; ++t)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float &y = x[t][2 * h + e];
                    y = power2(fmaf(y, c, -base));
                    part += y;
                }
            sum[h] = sum[h] * fade[h] + part;
        }
        if (__any_sync(~0u, grew)) {
#pragma unroll
            for (int d = 0; d < kD / 8; ++d)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[d][e] *= fade[e >> 1];
        }
        uint32_t p[kSize / 16][4];
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) p[t >> 1][2 * (t & 1) + h] = pack2<kHalfMath<kKind>>(x[t][2 * h], x[t][2 * h + 1]);
        values(p, v_at);
    }

    // Largest logits and sums of the warp's 16 pairs.
    __device__ __forceinline__ void end(float *tops, float *sums) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
            sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
            if ((lane & 3) == 0) {
                tops[(lane >> 2) + 8 * h] = top[h];
                sums[(lane >> 2) + 8 * h] = sum[h];
            }
        }
    }

    // Weighted values of the pairs from `first` on, as many as are joined at a time.
    __device__ __forceinline__ void put(float *to, int first) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = ((threadIdx.x & 31) >> 2) + 8 * h - first;
            if (row >= 0 && row < kMergeRows<kD>) {
#pragma unroll
                for (int d = 0; d < kD / 8; ++d)
#pragma unroll
                    for (int e = 0; e < 2; ++e) to[row * kD + o_column<kKind>(d, e)] = o[d][2 * h + e];
            }
        }
    }
};

}  // namespace ring
}  // namespace pk
