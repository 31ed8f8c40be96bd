// What the sums of a group of tiles become: outputs, in memory and as packets.
#pragma once
#include "../gemm.cuh"
#include "stage.cuh"

namespace pk::persist {

struct Range {
    int begin, end;
};
// The tiles of this block, or parts of cut ones: the first `more` blocks of a phase, or of a weight, have one more than the others.
__device__ __forceinline__ Range range_of(const Phase &p) {
    const int n = gridDim.x, at = blockIdx.x + p.shift, b = at < n ? at : at - n, each = p.each, more = p.more;
    if (p.begins[0]) {
        const int i = (b >= p.begins[0]) + (b >= p.begins[1]), at_weight = b - (i ? p.begins[i - 1] : 0);
        const Weight &w = p.w[i];
        const int begin = w.first_tile + at_weight * w.each + min(at_weight, w.more);
        return {begin, begin + w.each + (at_weight < w.more)};
    }
    const int begin = b * each + min(b, more), twos = p.cut ? 0 : p.is_paired;
    return {begin << twos, begin + each + (b < more) << twos};
}
// The tiles of weight i that belong to this block, counted within the weight.
__device__ __forceinline__ Range tiles_of(const Range &all, const Weight &w) {
    const int first = w.first_tile;
    return {max(all.begin, first) - first, min(all.end, first + w.n_tiles) - first};
}
// What lies in a row of one block's work: tiles of a weight, all of K or chunks [first, first + chunks) of it. i: the weight, or of cut tiles the end of one in front, what is whole, the beginning of one behind.
struct Piece {
    int weight, begin, end, first, chunks;
};
__device__ __forceinline__ int n_pieces(const Phase &p) { return p.cut ? 3 : p.is_gated ? 1 : p.n_w; }
__device__ __forceinline__ Piece piece_of(const Phase &p, const Range &all, int i) {
    if (!p.cut) {
        const Range tiles = tiles_of(all, p.w[i]);
        return {i, tiles.begin, tiles.end, 0, p.w[i].n_chunks};
    }
    // A block has as many parts as a tile, or more: none has the middle of one.
    const int cut = p.cut, twos = p.is_paired, last = (1 << cut) - 1, chunks = p.w[0].n_chunks, part = chunks >> cut, whole = all.begin + last >> cut, behind = all.end >> cut;
    if (i == 0) return {0, all.begin >> cut << twos, whole << twos, (all.begin & last) * part, chunks - (all.begin & last) * part};
    if (i == 1) return {0, whole << twos, behind << twos, 0, chunks};
    return {0, behind << twos, (all.end + last >> cut) << twos, 0, (all.end & last) * part};
}
// Where the sums of a tile's end go: by the place among the phase's blocks of the one that has it.
__device__ __forceinline__ uint8_t *end_place(const Phase &p, const Arguments &a, int phase, int after) {
    const int n = gridDim.x, at = blockIdx.x + p.shift, b = (at < n ? at : at - n) + after;
    return a.ends + ((phase & (kBuffers - 1)) * n + b) * kEndBytes;
}
// Tiles that are added up at once: by fours, so that those of a record of folded outputs stay together.
__device__ __forceinline__ int tiles_once(const Phase &p) { return kWarpSums >> p.tile_shift & ~3; }

__device__ __forceinline__ float gate_of(float v, int32_t act) {
    return __builtin_expect(act == PK_ACT_SILU, 1) ? __fdividef(v, 1.0f + __expf(-v)) : activate(v, act);
}

// What the squares of a phase's x become.
struct NormFactor {
    float inverse_k, eps;
    __device__ __forceinline__ float of(const float *squares) const {
        const float4 a = *reinterpret_cast<const float4 *>(squares), b = *reinterpret_cast<const float4 *>(squares + 4);
        static_assert(kWarps == 8);
        return rsqrtf((((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w))) * inverse_k + eps);
    }
};

// What becomes of outputs: the usual ways have code of their own in one row, as code that runs once a phase costs what it takes to fetch it.
enum Way : int32_t { kAnyWay, kGatedFold, kAddedFold, kPairs };

// One output of a thread. prepare: everything that does not need its sums, ahead of them.
struct Output {
    const float *from;                // its sums, of every warp; of the other side behind them
    uint8_t *data, *packet, *folded;  // where it goes; null: nowhere
    const uint8_t *added;             // what it is added to, or null
    uint2 early;                      // what was there of it
    uint32_t wanted;
    float scale[2], bias[2], softcap;
    float norm;                       // of folded outputs
    int32_t act;
    int shift;                        // rows of a tile, as a power of two
    bool is_valid, is_gated, is_f32, is_bytes, is_fours, adds_f32, is_odd;
    Way way;

    // row: of the weight; o: among the group's outputs; sums: [warps][tiles][rows of a tile]. base: phases before this launch.
    __device__ __forceinline__ void prepare(const Phase &p, const Weight &w, const float *sums, int row, int o, bool is_one, uint32_t base) {
        is_gated = p.is_gated;
        is_f32 = p.y.format == PK_F32;
        is_valid = is_one && row < w.rows;
        act = p.act;
        softcap = p.softcap;
        shift = p.tile_shift;
        from = sums + (o >> shift << is_gated << shift) + (o & ((1 << shift) - 1));
        const int64_t at = w.first_column + row;
        is_odd = at & 1;
        data = is_valid && p.y.data ? reinterpret_cast<uint8_t *>(p.y.data) + at * (is_f32 ? 4 : 2) : nullptr;
        // A packet holds two BF16.
        packet = is_valid && p.y.packets && (is_f32 || !is_odd) ? reinterpret_cast<uint8_t *>(p.y.packets) + at * (is_f32 ? 8 : 4) : nullptr;
        folded = p.folded_y ? reinterpret_cast<uint8_t *>(p.folded_y) + folded_at(p.fold_y, at) : nullptr;
        is_bytes = p.folded_staging == kStageBytes;
        is_fours = p.fold_y == kInFours;
        added = is_valid && p.add.packets ? added_at(p.add, at) : nullptr;
        wanted = base + p.add.source + 1;
        adds_f32 = p.add.format == PK_F32;
        early = added ? load_packet(added) : make_uint2(0, 0);
        norm = is_valid && p.folded_norm != nullptr ? __ldg(p.folded_norm + at) : 1.0f;
        ask_side(w, row, is_valid, is_gated ? 1.0f : p.scale, scale[0], bias[0]);
        ask_side(p.w[1], row, is_valid && is_gated, p.scale, scale[1], bias[1]);
        const bool has_data = p.y.data, has_packets = p.y.packets, is_folded = p.folded_y != 0 && !is_fours, is_plain = !has_data && softcap == 0.0f;
        way = kAnyWay;
        if (is_plain && is_folded && is_gated && act == PK_ACT_SILU && !has_packets && p.add.packets == 0) way = kGatedFold;
        if (is_plain && is_folded && !is_gated && has_packets && is_f32 && p.add.packets != 0 && adds_f32) way = kAddedFold;
        if (is_plain && p.folded_y == 0 && !is_gated && has_packets && !is_f32 && p.add.packets == 0) way = kPairs;
    }
    static __device__ __forceinline__ void ask_side(const Weight &w, int row, bool is_one, float times, float &scale, float &bias) {
        scale = w.scale * times;
        bias = 0.0f;
        if (is_one && w.row_scale != nullptr) scale *= __ldg(w.row_scale + row);
        if (is_one && w.bias != nullptr) bias = __ldg(w.bias + row) * times;
    }
    // By whole warps, neighbours side by side. factor: the norm's; epoch: this phase's.
    __device__ __forceinline__ void write(float2 sums, float factor, uint32_t epoch) const {
        if (way == kGatedFold) write_as<kGatedFold>(sums, factor, epoch);
        else if (way == kAddedFold) write_as<kAddedFold>(sums, factor, epoch);
        else if (way == kPairs) write_as<kPairs>(sums, factor, epoch);
        else write_any(sums, factor, epoch);
    }
    // Folded outputs come by whole records, whose lanes are all valid or none.
    template <Way kWay>
    __device__ __forceinline__ void write_as(float2 sums, float factor, uint32_t epoch) const {
        float out = fmaf(sums.x * factor, scale[0], bias[0]);
        if constexpr (kWay == kGatedFold) out = gate_of(out, PK_ACT_SILU) * fmaf(sums.y * factor, scale[1], bias[1]);
        if constexpr (kWay == kAddedFold) {
            uint2 v = early;
            while (is_valid && v.y != wanted) v = load_packet(added);
            __syncwarp();
            out += __uint_as_float(v.x);
        }
        if constexpr (kWay == kPairs) {
            const float next = __shfl_down_sync(~0u, out, 1);
            if (packet) store_packet(packet, pack_bf16(out, next), epoch);
        } else {
            const float scaled[1] = {out * norm};
            if (is_valid) put_folded<1>(folded, scaled, out * out, epoch, is_bytes);
            if (kWay == kAddedFold && is_valid) store_packet(packet, __float_as_uint(out), epoch);
        }
    }
    __device__ __forceinline__ void write_any(float2 sums, float factor, uint32_t epoch) const {
        float out = 0.0f;
        if (is_valid) {
            out = fmaf(sums.x * factor, scale[0], bias[0]);
            if (is_gated) out = gate_of(out, act) * fmaf(sums.y * factor, scale[1], bias[1]);
            if (__builtin_expect(softcap > 0.0f, 0)) out = softcap * quick_tanh(__fdividef(out, softcap));
            if (added != nullptr) {
                const uint2 v = early.y == wanted ? early : await_packet(added, wanted);
                out += adds_f32 ? __uint_as_float(v.x) : is_odd ? high_f32(v.x) : low_f32(v.x);
            }
        }
        __syncwarp();
        if (folded != nullptr) {
            const float scaled[1] = {out * norm};
            if (is_fours) put_four(folded, scaled[0], out * out, is_valid, epoch);
            else put_folded<1>(folded, scaled, out * out, epoch, is_bytes);
        }
        const float next = __shfl_down_sync(~0u, out, 1);
        if (packet) store_packet(packet, is_f32 ? __float_as_uint(out) : pack_bf16(out, next), epoch);
        if (!data) return;
        if (is_f32) *reinterpret_cast<float *>(data) = out;
        else *reinterpret_cast<bf16 *>(data) = __float2bfloat16(out);
    }
    // What the warps have left, of both sides.
    __device__ __forceinline__ float2 take() const { return make_float2(sum_of(from), is_gated ? sum_of(from + (1 << shift)) : 0.0f); }
    // Sums of a tile's end are sent to where the block before looks for them, or what the block behind has sent is added to this one's.
    __device__ __forceinline__ void join_end(float2 &sums, uint8_t *end, bool is_sent, uint32_t epoch) const {
        if (!is_valid) return;
#pragma unroll 1
        for (int side = 0; side <= is_gated; ++side) {
            uint8_t *const there = end + kEndSideBytes * side;
            if (is_sent) store_packet(there, __float_as_uint(sums.x), epoch);
            else sums.x += __uint_as_float(await_packet(there, epoch).x);
            sums = make_float2(is_gated ? sums.y : sums.x, sums.x);
        }
    }
    __device__ __forceinline__ float sum_of(const float *from) const {
        float v[kWarps];
#pragma unroll
        for (int k = 0; k < kWarps; ++k) v[k] = from[k * kWarpSums];
#pragma unroll
        for (int n = kWarps / 2; n; n /= 2)
#pragma unroll
            for (int k = 0; k < n; ++k) v[k] += v[k + n];
        return v[0];
    }
};

// By the writing threads of all blocks that have tiles: the normed row, for whoever reads it after this launch, each a share: an element is a trip to L2 behind the weights.
__device__ __forceinline__ void write_normed(const Phase &p, int row, float factor, uint32_t base, int tid) {
    const int n = gridDim.x, at = blockIdx.x + p.shift, b = at < n ? at : at - n, n_busy = p.each ? n : p.more;
    for (int i = b * 32 * kWriters + tid; i < p.k; i += n_busy * 32 * kWriters) {
        const uint2 v = await_packet(packet_at<true>(p.x.packets, row * p.x.stride + i), base + p.x.source + 1);
        reinterpret_cast<bf16 *>(p.normed.data)[i] = __float2bfloat16(__uint_as_float(v.x) * factor * __ldg(p.norm + i));
    }
}

}  // namespace pk::persist
