// What the sums of a group of tiles become: outputs, in memory and as packets.
#pragma once
#include "../gemm.cuh"
#include "stage.cuh"

namespace pk::persist {

struct Range {
    int begin, end;
};
// The tiles of this block: the first `more` blocks of a phase have one more than the others.
__device__ __forceinline__ Range range_of(const Phase &p) {
    const int n = gridDim.x, at = blockIdx.x + p.shift, b = at < n ? at : at - n, each = p.each, more = p.more;
    const int begin = b * each + min(b, more);
    return {begin, begin + each + (b < more)};
}
// The tiles of weight i that belong to this block, counted within the weight.
__device__ __forceinline__ Range tiles_of(const Range &all, const Weight &w) {
    const int first = w.first_tile;
    return {max(all.begin, first) - first, min(all.end, first + w.n_tiles) - first};
}
// Tiles that are added up at once.
__device__ __forceinline__ int tiles_once(const Arguments &a, const Phase &p) { return (a.part_bytes - kSumsAt) / (4 * kWarps << p.tile_shift) & ~1; }

__device__ __forceinline__ float gate_of(float v, int32_t act) {
    return __builtin_expect(act == PK_ACT_SILU, 1) ? __fdividef(v, 1.0f + __expf(-v)) : activate(v, act);
}

__device__ __forceinline__ float norm_factor(const Phase &p, const float *squares) {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kWarps; ++k) sum += squares[k];
    return rsqrtf(sum * p.inverse_k + p.eps);
}

// One output of a thread. prepare: everything that does not need its sums, ahead of them.
struct Output {
    const float *from;          // its sums, of every warp; of the other side behind them
    uint8_t *data, *packet;     // where it goes; null: nowhere
    uint2 early;                // what it is added to
    float scale[2], bias[2];
    int64_t at;                 // column of y
    int shift;                  // rows of a tile, as a power of two
    bool is_valid, is_gated, is_f32;

    // row: of the weight; o: among the group's outputs; sums: [tiles][warps][rows of a tile].
    __device__ __forceinline__ void prepare(const Phase &p, const Weight &w, const float *sums, int row, int o, bool is_one) {
        is_gated = p.is_gated;
        is_f32 = p.y.format == PK_F32;
        is_valid = is_one && row < w.rows;
        shift = p.tile_shift;
        from = sums + (((o >> shift << is_gated) * kWarps) << shift) + (o & ((1 << shift) - 1));
        at = w.first_column + row;
        data = is_valid && p.y.data ? reinterpret_cast<uint8_t *>(p.y.data) + at * (is_f32 ? 4 : 2) : nullptr;
        // A packet holds two BF16.
        packet = is_valid && p.y.packets && (is_f32 || !(at & 1)) ? reinterpret_cast<uint8_t *>(p.y.packets) + at * (is_f32 ? 8 : 4) : nullptr;
        early = {0, 0};
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const Weight &one = side ? p.w[1] : w;
            scale[side] = one.scale;
            bias[side] = 0.0f;
            if (!is_valid || side > is_gated) continue;
            if (one.row_scale != nullptr) scale[side] *= __ldg(one.row_scale + row);
            if (one.bias != nullptr) bias[side] = __ldg(one.bias + row);
        }
        if (is_valid && p.add.packets) early = load_packet(added_at(p.add, at));
    }
    // By whole warps, neighbours side by side. factor: the norm's; epoch: this phase's.
    __device__ __forceinline__ void write(const Phase &p, float factor, uint32_t epoch, uint32_t base) const {
        float out = 0.0f;
        if (is_valid) {
            out = fmaf(sum_of(from) * factor, scale[0], bias[0]);
            if (is_gated) out = gate_of(out, p.act) * fmaf(sum_of(from + (kWarps << shift)) * factor, scale[1], bias[1]);
            out *= p.scale;
            if (__builtin_expect(p.softcap > 0.0f, 0)) out = p.softcap * quick_tanh(__fdividef(out, p.softcap));
            if (p.add.packets) {
                const uint32_t wanted = base + p.add.source + 1;
                const uint2 v = early.y == wanted ? early : await_packet(added_at(p.add, at), wanted);
                out += p.add.format == PK_F32 ? __uint_as_float(v.x) : at & 1 ? high_f32(v.x) : low_f32(v.x);
            }
        }
        __syncwarp();
        const float next = __shfl_down_sync(~0u, out, 1);
        if (packet) store_packet(packet, is_f32 ? __float_as_uint(out) : pack_bf16(out, next), epoch);
        if (!data) return;
        if (is_f32) *reinterpret_cast<float *>(data) = out;
        else *reinterpret_cast<bf16 *>(data) = __float2bfloat16(out);
    }
    __device__ __forceinline__ float sum_of(const float *from) const {
        float v[kWarps];
#pragma unroll
        for (int k = 0; k < kWarps; ++k) v[k] = from[k << shift];
#pragma unroll
        for (int n = kWarps / 2; n; n /= 2)
#pragma unroll
            for (int k = 0; k < n; ++k) v[k] += v[k + n];
        return v[0];
    }
};

// By the writing threads of one block: the normed row, for whoever reads it after this launch.
__device__ __forceinline__ void write_normed(const Phase &p, int row, float factor, uint32_t base, int tid) {
    for (int i = tid; i < p.k; i += 32 * kWriters) {
        const uint2 v = await_packet(packet_at<true>(p.x.packets, row * p.x.stride + i), base + p.x.source + 1);
        reinterpret_cast<bf16 *>(p.normed.data)[i] = __float2bfloat16(__uint_as_float(v.x) * factor * __ldg(p.norm + i));
    }
}

}  // namespace pk::persist
