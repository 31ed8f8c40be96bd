// Launches of the flat kernel for block formats (flat_units.cuh): how its warps are dealt out.
#pragma once
#include "cluster_launch.h"
#include "flat_units.cuh"

namespace pk {

// What weights lack in registers (skinny_parts.cuh).
template <int kFormat>
constexpr float unit_factor() {
    using U = Unit<kFormat>;
    return U::kCode == Code::kSigned8 || (U::kCode == Code::kUnsigned && U::kLow == 4 && (U::kScale == Scale::kBytesMin || U::kScale == Scale::kSigned16 || U::kScale == Scale::kHalf)) ? 0x1p20f : 1.0f;
}

constexpr int kUnitShared = 224 << 10;  // of rings; 1 kB aligns them
constexpr int kXStepsAhead = 3;  // of x before more weights
// Of weights before the wait, on all multiprocessors: so much that most warpgroups have a step.
template <class U>
constexpr int kAheadBytes = 132 * (U::kLow == 8 ? 56 : 28) << 10;

template <int kFormat, int kNT, int kSplit, bool kPlain>
int32_t launch_flat_units(const Launch &l, SkinnyArguments a, const Packed *const *packed, const FlatPackets &packets) {
    using S = UnitsShape<kFormat, kNT>;
    using U = Unit<kFormat>;
    UnitsDeal deal = {};
    deal.packets = packets;
    deal.tile_units = static_cast<int32_t>(packed[0]->padded_cols / U::kU);
    deal.n_steps = (deal.tile_units + S::kUnits - 1) / S::kUnits;
    int n_pairs = 0;
    for (int i = 0; i < a.n_w; ++i) {
        deal.first_pair[i] = n_pairs;
        a.w[i].scale *= unit_factor<kFormat>();
        if (kSplit != kTileGated || i == 0) n_pairs += kSplit == kTileGated ? (a.w[i].rows + 15) / 16 : (a.w[i].rows + 31) / 32;
    }
    deal.scale = kSplit == kTileGated ? a.w[0].scale : a.scale * a.w[0].scale;
    const int n_clusters = l.ctx->n_processors / 2;
    deal.pairs_each = n_pairs / n_clusters;
    deal.pairs_left = n_pairs % n_clusters;
    // Warpgroups lie along K while each can have all quads of a cluster, else along quads, in passes.
    constexpr int kMost = kUnitGroups * kUnitQuads;
    const int pairs = (n_pairs + n_clusters - 1) / n_clusters, quads = (pairs + 1) / 2, steps = (deal.n_steps + 1) / 2;
    deal.along_k = quads <= kUnitQuads ? kUnitGroups : 1;
    deal.x_users = 4 * kUnitGroups / deal.along_k;
    deal.n_passes = (quads + kMost - 1) / kMost;
    deal.pass_quads = (quads + deal.n_passes - 1) / deal.n_passes;
    deal.pass_pairs = deal.n_passes == 1 ? pairs : 2 * deal.pass_quads;
    deal.step_bytes = deal.pass_pairs * 2 * S::kTileBytes;
    if (kSplit >= kTileHeads && deal.n_passes > 1) return fail(PK_UNSUPPORTED, "matmul: heads in %d pairs of tiles; the CUDA pack ends those of one pass", n_pairs);
    constexpr int halves = kSplit == kTileWhole ? 1 : 2;
    const int received = (deal.pass_pairs * (2 / halves) * S::kN8 + 1) / 2 * 2 * deal.along_k * halves * 512;
    // Whole turns of all groups: x of two (a group tells that it has multiplied one once it multiplies its next) or of three steps, weights, then x again.
    const int turn = deal.along_k, left = kUnitShared - received;
    auto least = [](int a, int b) { return a < b ? a : b; };
    auto whole = [](int slots, int of) { return (slots + of - 1) / of * of; };
    // Of Q8_0's weights two turns: more of them under way make x late.
    const int under_way = U::kLow == 8 && S::kK == 256 && turn > 1 ? 2 * turn : S::kWSlots;
    const int w_most = least(least(S::kWSlots / deal.pass_quads / turn * turn, whole(steps * deal.n_passes, turn)), under_way);
    const int x_turn = turn > 1 ? 2 * turn : 1, x_most = least(kUnitXSlots / x_turn * x_turn, whole(steps * deal.n_passes, x_turn));
    for (int some = least(x_most, turn > 1 ? x_turn : 3); some >= x_turn && deal.w_slots < turn; some -= x_turn) {
        deal.x_slots = some;
        deal.w_slots = least(w_most, (left - some * S::kXBytes) / deal.step_bytes / turn * turn);
    }
    if (deal.w_slots < turn) return fail(PK_UNSUPPORTED, "matmul: %d pairs of tiles of %d units do not fit the CUDA pack's rings", n_pairs, deal.tile_units);
    const int ahead = kAheadBytes<U> / l.ctx->n_processors / deal.step_bytes;
    deal.ahead = ahead < 1 ? 1 : least(ahead, deal.w_slots);
    deal.x_ahead = least(kXStepsAhead, deal.x_slots);
    while (deal.x_slots + x_turn <= x_most && (deal.x_slots + x_turn) * S::kXBytes + deal.w_slots * deal.step_bytes <= left) deal.x_slots += x_turn;
    const int bytes = 1024 + deal.x_slots * S::kXBytes + deal.w_slots * deal.step_bytes + received;
    CUtensorMap x_map;
    {
        const cuuint64_t size[3] = {64, static_cast<cuuint64_t>(a.max_rows), static_cast<cuuint64_t>(a.k / 64)}, stride[2] = {static_cast<cuuint64_t>(a.x_stride * 2), 128};
        const cuuint32_t box[3] = {64, kNT, S::kChunks}, step[3] = {1, 1, 1};
        const CUresult e = l.ctx->driver.encode_tiled(&x_map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void *>(a.x), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        if (e != CUDA_SUCCESS) return fail(PK_DEVICE, "matmul: tensor map of x, %d rows of %d: CUDA driver error %d", a.max_rows, a.k, static_cast<int>(e));
    }
    return launch_clusters(l, "flat", flat_units_kernel<kFormat, kNT, kSplit, kPlain>, 2 * n_clusters, kUnitThreads, bytes, 2, x_map, a, deal);
}

template <int kFormat, int kNT>
int32_t launch_flat_units_width(const Launch &l, const SkinnyArguments &a, const Packed *const *packed, const FlatPackets &packets) {
    const bool gated = a.act != PK_ACT_NONE && a.n_w == 2, plain = is_plain(a, gated);
    if (gated) return plain ? launch_flat_units<kFormat, kNT, kTileGated, true>(l, a, packed, packets) : launch_flat_units<kFormat, kNT, kTileGated, false>(l, a, packed, packets);
    if (a.heads.q && a.heads.kv_format == PK_F16) return launch_flat_units<kFormat, kNT, kTileHalfHeads, false>(l, a, packed, packets);
    if (a.heads.q) return launch_flat_units<kFormat, kNT, kTileHeads, false>(l, a, packed, packets);
    return plain ? launch_flat_units<kFormat, kNT, kTileWhole, true>(l, a, packed, packets) : launch_flat_units<kFormat, kNT, kTileWhole, false>(l, a, packed, packets);
}

template <int kFormat>
int32_t launch_flat_blocks(const Launch &l, const SkinnyArguments &a, const Packed *const *packed, const FlatPackets &packets) {
    return for_flat_width(a.max_rows, [&](auto width) { return launch_flat_units_width<kFormat, width()>(l, a, packed, packets); });
}

}  // namespace pk
