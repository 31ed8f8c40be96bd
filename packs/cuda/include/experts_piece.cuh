// What the products of experts share (src/experts): how units of a format are read, x as they want it staged, and the sum of a unit.
#pragma once
#include "device.cuh"
#include "experts.cuh"
#include "format/rows.cuh"
#include "format/unit.cuh"

namespace pk {

constexpr int kRed = 9;  // floats of a row of partial sums

// How a format lies in registers: units of kU elements of 16 rows.
template <int kFormat, bool kBlock> struct Piece;
template <int kFormat> struct Piece<kFormat, true> {
    using U = Unit<kFormat>;
    using Registers = UnitRegisters<U>;
    static constexpr int kU = U::kU, kGroup = U::kGroup, kBias = U::kBias;
    static constexpr bool kHasSums = U::kBias != 0 || U::kHasMin;
    __device__ static void load(Registers &r, const ExpertWeight &, const uint8_t *matrix, int row0, int unit, int n_units, int lane) {
        load_unit<U>(r, matrix + (static_cast<int64_t>(row0 >> 4) * n_units + unit) * U::kBytes, lane);
    }
};
template <int kFormat> struct Piece<kFormat, false> {
    using Registers = RowsRegisters;
    static constexpr int kU = Rows<kFormat>::kU, kGroup = 32, kBias = 0;
    static constexpr bool kHasSums = false;
    __device__ static void load(Registers &r, const ExpertWeight &w, const uint8_t *matrix, int row0, int unit, int, int lane) {
        load_rows<kFormat>(r, matrix + row0 * w.row_bytes, w.row_bytes, unit, lane);
    }
};
template <int kFormat> using PieceOf = Piece<kFormat, is_block_format(kFormat)>;

__device__ __forceinline__ int place_of(const ExpertProduct &p, int expert) { return p.places != nullptr ? p.places[expert] : expert; }

__device__ __forceinline__ ExpertItem item_of(const ExpertProduct &p, int i) {
    if (p.ids != nullptr) {
        const int e = p.ids[i], expert = e >= 0 && e < p.n_experts ? e : 0;  // an expert that is not there is left out of the sum
        return {expert, i, 1, place_of(p, expert)};
    }
    return i < *p.n_items ? p.items[i] : ExpertItem{0, 0, 0, 0};
}

__device__ __forceinline__ int items_of(const ExpertProduct &p) { return p.ids == nullptr ? *p.n_items : rows_of(p.info, p.rows_symbol) > 0 ? p.n_used : 0; }

__device__ __forceinline__ int64_t x_row_of(const ExpertProduct &p, int position) {
    return p.by_position ? position : p.ids != nullptr ? 0 : p.order[position] / p.n_used;
}

__device__ __forceinline__ float gated(const ExpertProduct &p, float gate, float up) {
    if (p.act != PK_ACT_SWIGLU_CLAMP) return activate(gate, p.act) * up;
    gate = fminf(gate, p.limit);
    up = fminf(fmaxf(up, -p.limit), p.limit);
    return gate / (1.0f + __expf(-p.alpha * gate)) * (up + 1.0f);
}

// What a raw sum of row `row` becomes.
__device__ __forceinline__ float finish(const ExpertWeight &w, const uint8_t *matrix, float scale, int expert, int row, float v) {
    v *= scale;
    if (w.row_scale_at >= 0) v *= reinterpret_cast<const float *>(matrix + w.row_scale_at)[row];
    return w.bias != nullptr ? v + w.bias[static_cast<int64_t>(expert) * w.rows + row] : v;
}

__device__ __forceinline__ float block_scale_of(const ExpertWeight &w, const uint8_t *matrix, int row, int unit) {
    return w.block_scale_at >= 0 ? __ldg(reinterpret_cast<const float *>(matrix + w.block_scale_at) + (row >> 7) * w.block_stride + unit) : 1.0f;
}

// Where the run of four elements at k goes among the staged elements, so that a lane's eight values are neighbours.
template <int kFormat>
__device__ __forceinline__ int staged_position(int k) {
    if constexpr (is_block_format(kFormat)) {
        const int in = k & 31;
        return (k & ~31) + 8 * ((in & 15) >> 2) + 4 * (in >> 4);
    } else if constexpr (Rows<kFormat>::kIsFp8) {
        const int in = k & 63;
        return (k & ~63) + 32 * ((in >> 3) & 1) + 8 * (in >> 4) + (in & 7);
    } else {
        return k;
    }
}

template <int kFormat>
__device__ __forceinline__ void stage_x(const ExpertProduct &p, const ExpertItem &item, uint8_t *xs) {
    const int per_row = p.n_units * PieceOf<kFormat>::kU / 8;
    for (int i = threadIdx.x; i < per_row * item.count; i += kExpertThreads) {
        const int n = i / per_row, k = (i - n * per_row) * 8;
        const int64_t from = x_row_of(p, item.first + n) * p.x_stride + k;
        float v[8] = {};
        if (p.is_wide && k < p.k) {
            load8(p.x, from, p.x_format, v);
        } else {
            for (int e = 0; e < 8 && k + e < p.k; ++e) v[e] = load_as_f32(p.x, from + e, p.x_format);
        }
        uint2 low = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])), high = make_uint2(pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
        if constexpr (!is_block_format(kFormat) && Rows<kFormat>::kIsFp8) {
            low = make_uint2(pack_bf16(v[0], v[2]), pack_bf16(v[1], v[3]));
            high = make_uint2(pack_bf16(v[4], v[6]), pack_bf16(v[5], v[7]));
        }
        uint8_t *row = xs + n * p.x_row_bytes;
        *reinterpret_cast<uint2 *>(row + 2 * staged_position<kFormat>(k)) = low;
        *reinterpret_cast<uint2 *>(row + 2 * staged_position<kFormat>(k + 4)) = high;
    }
}

// -kBias (or -1) times the sum of x over each group of a scale.
template <int kFormat>
__device__ __forceinline__ void stage_sums(const ExpertProduct &p, const ExpertItem &item, const uint8_t *xs, float *sums) {
    using P = PieceOf<kFormat>;
    constexpr float kFactor = P::kBias ? -static_cast<float>(P::kBias) : -1.0f;
    const int n_blocks = p.n_units * P::kU / 32;
    for (int i = threadIdx.x; i < n_blocks * 8; i += kExpertThreads) {
        const int b = i >> 3, n = i & 7;
        float s[2] = {0.0f, 0.0f};
        if (n < item.count) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const uint4 v = *reinterpret_cast<const uint4 *>(xs + n * p.x_row_bytes + b * 64 + c * 16);
                s[0] += low_f32(v.x) + high_f32(v.x) + low_f32(v.y) + high_f32(v.y);
                s[1] += low_f32(v.z) + high_f32(v.z) + low_f32(v.w) + high_f32(v.w);
            }
        }
        if constexpr (P::kGroup == 16) {
            sums[2 * b * 8 + n] = kFactor * s[0];
            sums[(2 * b + 1) * 8 + n] = kFactor * s[1];
        } else {
            sums[b * 8 + n] = kFactor * (s[0] + s[1]);
        }
    }
}

// Adds one unit of 16 rows times up to eight pairs: acc[rows 16, pairs 8].
template <int kFormat>
__device__ __forceinline__ void multiply(const typename PieceOf<kFormat>::Registers &r, float (&acc)[4], const uint8_t *x_lane, const float *sums_lane, float block_scale) {
    using P = PieceOf<kFormat>;
    float raw[4] = {};
#pragma unroll
    for (int b = 0; b < P::kU / 32; ++b) {
        if constexpr (P::kU > 64) __syncwarp();  // keeps the scheduler from decoding all blocks at once, which spills
        uint32_t lo[4], hi[4];
        const uint4 x = *reinterpret_cast<const uint4 *>(x_lane + b * 64);
        if constexpr (is_block_format(kFormat)) {
            using U = Unit<kFormat>;
            constexpr int kParts = 32 / U::kGroup;
            unit_codes<U>(r, b, 0, lo);
            unit_codes<U>(r, b, 1, hi);
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                float s0, m0, s1, m1;
                unit_scale<U>(r, b * kParts + part, 0, s0, m0);
                unit_scale<U>(r, b * kParts + part, 1, s1, m1);
                float2 bias = make_float2(0.0f, 0.0f);
                if constexpr (P::kHasSums) bias = *reinterpret_cast<const float2 *>(sums_lane + (b * kParts + part) * 8);
                float t[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                if constexpr (U::kBias != 0) {
                    t[0] = t[2] = bias.x;
                    t[1] = t[3] = bias.y;
                }
                if (kParts == 1 || part == 0) mma_bf16(t, lo[0], hi[0], lo[1], hi[1], x.x, x.y);
                if (kParts == 1 || part == 1) mma_bf16(t, lo[2], hi[2], lo[3], hi[3], x.z, x.w);
                acc[0] = fmaf(s0, t[0], acc[0]);
                acc[1] = fmaf(s0, t[1], acc[1]);
                acc[2] = fmaf(s1, t[2], acc[2]);
                acc[3] = fmaf(s1, t[3], acc[3]);
                if constexpr (U::kHasMin) {
                    constexpr float kPer = U::kBias ? 1.0f / U::kBias : 1.0f;
                    m0 *= kPer;
                    m1 *= kPer;
                    acc[0] = fmaf(m0, bias.x, acc[0]);
                    acc[1] = fmaf(m0, bias.y, acc[1]);
                    acc[2] = fmaf(m1, bias.x, acc[2]);
                    acc[3] = fmaf(m1, bias.y, acc[3]);
                }
            }
        } else {
            rows_codes<kFormat, 0>(r, b, 0, lo);
            rows_codes<kFormat, 0>(r, b, 1, hi);
            mma_bf16(raw, lo[0], hi[0], lo[1], hi[1], x.x, x.y);
            mma_bf16(raw, lo[2], hi[2], lo[3], hi[3], x.z, x.w);
            if constexpr (kFormat == PK_F16) {
                rows_codes<kFormat, 1>(r, b, 0, lo);
                rows_codes<kFormat, 1>(r, b, 1, hi);
                mma_bf16(raw, lo[0], hi[0], lo[1], hi[1], x.x, x.y);
                mma_bf16(raw, lo[2], hi[2], lo[3], hi[3], x.z, x.w);
            }
        }
    }
    if constexpr (!is_block_format(kFormat)) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[i] = fmaf(block_scale, raw[i], acc[i]);
    }
}

}  // namespace pk
