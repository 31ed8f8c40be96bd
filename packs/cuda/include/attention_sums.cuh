// What a warp of the decode kernel (decode.cu) keeps of a tile of 16 (token, head) pairs, in fragments of mma.sync: q, the largest logits,
// sums of weights, weighted values; and how a group of positions is added. Upright: pairs are rows of the fragments. Turned: positions and
// columns of values are rows, pairs are columns, 8 at a time: a tile of at most 8 pairs takes half the products.
#pragma once
#include "attention_ring.cuh"

namespace pk {
namespace ring {

__device__ __forceinline__ uint32_t transpose8(uint32_t v) {
    uint32_t t;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(v));
    return t;
}

template <int kD, int kKind>
struct Query {
    uint32_t held[kHoldQ<kD> ? kD / 16 : 1][4];

    template <int kHalves = 2>
    __device__ __forceinline__ void hold(const uint8_t *from, int rows) {
        if constexpr (kHoldQ<kD>) {
#pragma unroll
            for (int k = 0; k < kD / 16; ++k) read_q<kD, kKind, kHalves>(held[k], from, rows, k);
        }
    }
    // The fragment of a k step; `from`: where it lies when it is not held.
    template <int kHalves = 2>
    __device__ __forceinline__ void take(uint32_t (&q)[4], const uint8_t *from, int k) const {
        if constexpr (kHoldQ<kD>) {
#pragma unroll
            for (int e = 0; e < 4; ++e) q[e] = held[k][e];
        } else {
            read_q<kD, kKind, kHalves>(q, from, 16, k);
        }
    }
};

template <int kD, int kKind>
struct Upright {
    static constexpr int kSize = kGroup<kD, kKind>, kP = kPanels<kD, kKind>, kTiles = kSize / 8;
    Query<kD, kKind> q;
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

    __device__ __forceinline__ void hold(const uint8_t *from, int rows) { q.hold(from, rows); }

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
            for (int i = 0; i < kPer; ++i) q.take(qk[i], q_at, k * kPer + i);
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

template <int kD, int kKind>
struct Turned {
    static constexpr int kSize = kGroup<kD, kKind>, kP = kPanels<kD, kKind>, kUnits = kSize / 16;
    Query<kD, kKind> q;
    bool is_half;      // at most 8 pairs
    int limit[2][2];   // of this lane's two columns of each half
    float o[2][kD / 16][4], top[2][2], sum[2][2];

    __device__ __forceinline__ int pair_of(int h, int e) const { return 8 * h + 2 * (threadIdx.x & 3) + e; }

    __device__ __forceinline__ void open(const AttentionArguments &a, const Segment &s) {
        const int group = a.n_heads / a.n_kv_heads;
        is_half = s.n_pairs - s.pair <= 8;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (h == 0 || !is_half) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int pair = s.pair + pair_of(h, e);
                    limit[h][e] = pair < s.n_pairs ? s.position + (s.n_pairs > group ? pair / group : 0) : -1;
                    top[h][e] = -INFINITY;
                    sum[h][e] = 0.0f;
                }
#pragma unroll
                for (int t = 0; t < kD / 16; ++t)
#pragma unroll
                    for (int e = 0; e < 4; ++e) o[h][t][e] = 0.0f;
            }
        }
    }

    __device__ __forceinline__ void hold(const uint8_t *from, int rows) {
        if (is_half) q.template hold<1>(from, rows);
        else q.hold(from, rows);
    }

    // s[positions, pairs] = k q^T, by chains of few products.
    template <int kHalves>
    __device__ __forceinline__ void scores(float (&s)[kHalves][kUnits][4], const uint8_t *q_at, uint32_t k_at) {
        constexpr int kPer = kKind == kFp8 ? 2 : 1, kChains = kSize == 16 && kHalves == 1 ? 4 : 2;  // k steps of a 16-byte piece
        const int lane = threadIdx.x & 31, row = (lane & 7) + ((lane >> 4) << 3), odd = (lane >> 3) & 1;
        float part[kHalves][kUnits][kChains][4] = {};
#pragma unroll
        for (int k = 0; k < kD / 16 / kPer; ++k) {
            uint32_t qk[kPer][4];
#pragma unroll
            for (int i = 0; i < kPer; ++i) q.template take<kHalves>(qk[i], q_at, k * kPer + i);
#pragma unroll
            for (int u = 0; u < kUnits; ++u) {
                uint32_t b[4];
                load_matrix4(b, k_at + u * 16 * kP * 128 + block_offset<kP>(row, 2 * k + odd));
#pragma unroll
                for (int i = 0; i < kPer; ++i) {
                    uint32_t f[4];
                    if constexpr (kKind == kFp8) {
                        f[0] = halves(b[i], 0), f[1] = halves(b[2 + i], 0), f[2] = halves(b[i], 1), f[3] = halves(b[2 + i], 1);
                    } else {
                        f[0] = b[0], f[1] = b[2], f[2] = b[1], f[3] = b[3];
                    }
#pragma unroll
                    for (int h = 0; h < kHalves; ++h) multiply<kHalfMath<kKind>>(part[h][u][(k * kPer + i) % kChains], f, qk[i][h], qk[i][h + 2]);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
#pragma unroll
            for (int u = 0; u < kUnits; ++u)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    s[h][u][e] = part[h][u][0][e] + part[h][u][1][e];
                    if constexpr (kChains == 4) s[h][u][e] += part[h][u][2][e] + part[h][u][3][e];
                }
    }

    template <int kHalves>
    __device__ __forceinline__ void values(const uint32_t (&p)[kHalves][kUnits][2], uint32_t v_at) {
        const int lane = threadIdx.x & 31, row = (lane & 7) + ((lane >> 3) & 1) * 8, odd = lane >> 4;
#pragma unroll
        for (int u = 0; u < kUnits; ++u)
#pragma unroll
            for (int m = 0; m < (kKind == kFp8 ? kD / 32 : kD / 16); ++m) {
                uint32_t b[4];
                load_matrix4_transposed(b, v_at + u * 16 * kP * 128 + block_offset<kP>(row, 2 * m + odd));
                if constexpr (kKind == kFp8) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) b[i] = __byte_perm(b[i], 0, 0x3120);
#pragma unroll
                    for (int parity = 0; parity < 2; ++parity) {
                        const uint32_t f[4] = {halves(b[0], parity), halves(b[2], parity), halves(b[1], parity), halves(b[3], parity)};
#pragma unroll
                        for (int h = 0; h < kHalves; ++h) multiply<true>(o[h][2 * m + parity], f, p[h][u][0], p[h][u][1]);
                    }
                } else {
                    const uint32_t f[4] = {b[0], b[2], b[1], b[3]};
#pragma unroll
                    for (int h = 0; h < kHalves; ++h) multiply<kHalfMath<kKind>>(o[h][m], f, p[h][u][0], p[h][u][1]);
                }
            }
    }

    template <int kHalves>
    __device__ __forceinline__ void add_halves(const AttentionArguments &a, const Segment &s, int first, const uint8_t *q_at, uint32_t k_at, uint32_t v_at, bool is_plain, float c) {
        float x[kHalves][kUnits][4];
        scores<kHalves>(x, q_at, k_at);
        if (!is_plain) logits2<4 * kUnits * kHalves>(&x[0][0][0], a.scale, a.softcap);
        if (first + kSize - 1 > s.position || a.window > 0 || first < s.first) {
#pragma unroll
            for (int h = 0; h < kHalves; ++h)
#pragma unroll
                for (int u = 0; u < kUnits; ++u)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int p = first + u * 16 + ((threadIdx.x & 31) >> 2) + 8 * (e >> 1), most = limit[h][e & 1];
                        if (p > most || p < s.first || (a.window > 0 && p <= most - a.window)) x[h][u][e] = -INFINITY;
                    }
        }
        bool grew = false;
        float fade[kHalves][2];
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float most = fmaxf(x[h][0][e], x[h][0][2 + e]);
#pragma unroll
                for (int u = 1; u < kUnits; ++u) most = fmaxf(most, fmaxf(x[h][u][e], x[h][u][2 + e]));
#pragma unroll
                for (int other = 4; other < 32; other *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, other));
                most *= c;
                const float now = fmaxf(top[h][e], most), base = now == -INFINITY ? 0.0f : now;
                grew |= now > top[h][e];
                fade[h][e] = power2(top[h][e] - base);
                top[h][e] = now;
                float part = 0.0f;
#pragma unroll
                for (int u = 0; u < kUnits; ++u)
#pragma unroll
                    for (int f = e; f < 4; f += 2) {
                        x[h][u][f] = power2(fmaf(x[h][u][f], c, -base));
                        part += x[h][u][f];
                    }
                sum[h][e] = sum[h][e] * fade[h][e] + part;
            }
        if (__any_sync(~0u, grew)) {
#pragma unroll
            for (int h = 0; h < kHalves; ++h)
#pragma unroll
                for (int t = 0; t < kD / 16; ++t)
#pragma unroll
                    for (int e = 0; e < 4; ++e) o[h][t][e] *= fade[h][e & 1];
        }
        uint32_t p[kHalves][kUnits][2];
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
#pragma unroll
            for (int u = 0; u < kUnits; ++u)
#pragma unroll
                for (int f = 0; f < 2; ++f) p[h][u][f] = transpose8(pack2<kHalfMath<kKind>>(x[h][u][2 * f], x[h][u][2 * f + 1]));
        values<kHalves>(p, v_at);
    }

    // As Upright's.
    __device__ __forceinline__ void add(const AttentionArguments &a, const Segment &s, int first, const uint8_t *q_at, uint32_t k_at, uint32_t v_at, bool is_plain, float c) {
        if (is_half) add_halves<1>(a, s, first, q_at, k_at, v_at, is_plain, c);
        else add_halves<2>(a, s, first, q_at, k_at, v_at, is_plain, c);
    }

    __device__ __forceinline__ void end(float *tops, float *sums) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (h == 0 || !is_half) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
#pragma unroll
                    for (int other = 4; other < 32; other *= 2) sum[h][e] += __shfl_xor_sync(~0u, sum[h][e], other);
                    if ((threadIdx.x & 31) < 4) {
                        tops[pair_of(h, e)] = top[h][e];
                        sums[pair_of(h, e)] = sum[h][e];
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void put(float *to, int first) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (h == 1 && is_half) continue;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int row = pair_of(h, e) - first;
                if (row < 0 || row >= kMergeRows<kD>) continue;
#pragma unroll
                for (int t = 0; t < kD / 16; ++t)
#pragma unroll
                    for (int f = 0; f < 2; ++f) {
                        const int r = (threadIdx.x & 31) >> 2, column = kKind == kFp8 ? 32 * (t >> 1) + 16 * f + 2 * r + (t & 1) : 16 * t + 8 * f + r;
                        to[row * kD + column] = o[h][t][2 * f + e];
                    }
            }
        }
    }
};

}  // namespace ring
}  // namespace pk
