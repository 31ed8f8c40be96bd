// Launches of the flat kernel (flat.cuh): how it is dealt out, its maps of weights and x.
#pragma once
#include <algorithm>

#include "cluster_launch.h"
#include "flat.cuh"

namespace pk {

// Of shared memory, the rings; weights under way on all multiprocessors: with more, x would queue behind them.
constexpr int kFlatRingBytes = 200 << 10, kFlatUnderWay = 132 * 64 << 10;
// Of rings and of sums beside them.
constexpr int kFlatSharedBytes = 224 << 10;

template <int kFormat, int kNT, int kWM, int kT, int kSteps, int kSplit, int kPair, bool kPlain>
int32_t launch_flat_shape(const Launch &l, SkinnyArguments a, const Packed *const *packed, const FlatPackets &packets) {
    using S = FlatShape<kFormat, kNT, kWM, kT, kSteps, kSplit, kPair>;
    constexpr bool kGated = kSplit == kTileGated;
    FlatMaps maps = {};
    FlatDeal deal = {};
    const cuuint32_t step[3] = {1, 1, 1};
    // K that ends within a box of 64 columns: by boxes, which are zero behind it.
    deal.has_whole_x = a.k % 64 == 0;
    {
        const cuuint64_t rows = static_cast<cuuint64_t>(a.max_rows - a.first_row), row_bytes = static_cast<cuuint64_t>(a.x_stride * 2), columns = static_cast<cuuint64_t>(a.k);
        const cuuint64_t size[3] = {deal.has_whole_x ? 64 : columns, rows, columns / 64}, stride[2] = {row_bytes, 128};
        const cuuint32_t box[3] = {64, kNT, S::kXBoxes};
        const CUresult e = l.ctx->driver.encode_tiled(&maps.x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, deal.has_whole_x ? 3 : 2, const_cast<void *>(a.x), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        if (e != CUDA_SUCCESS) return fail(PK_DEVICE, "matmul: tensor map of x, %d rows of %d: CUDA driver error %d", a.max_rows - a.first_row, a.k, static_cast<int>(e));
    }
    int n_tiles = 0;
    for (int i = 0; i < a.n_w; ++i) {
        SkinnyWeight &w = a.w[i];
        w.first_tile = kGated ? 0 : n_tiles;
        if (!kGated || i == 0) n_tiles += kGated ? (w.rows + 7) / 8 : (w.rows + 15) / 16;
    }
    for (int i = 0; i < 2; ++i) deal.first_tile[i] = !kGated && i + 1 < a.n_w ? a.w[i + 1].first_tile : INT32_MAX;
    deal.may_be_idle = a.min_rows > 0 || a.first_row > 0;
    deal.scale = a.w[0].scale * (kGated ? 1.0f : a.scale);
    const int blocks = l.ctx->n_processors / kPair, most = (n_tiles + blocks - 1) / blocks, passes = (most + kWM * kT - 1) / (kWM * kT), least = n_tiles / blocks / passes;
    deal.each = n_tiles / blocks;
    deal.more = n_tiles % blocks;
    deal.n_passes = passes;
    deal.pass_share = (65536 + passes - 1) / passes;
    if ((kPair == 2 || kSplit >= kTileHeads) && passes > 1) return fail(PK_UNSUPPORTED, "matmul: a block has %d tiles, %d at once; the CUDA pack wants them in one pass", most, kWM * kT);
    deal.pass_tiles = (most + passes - 1) / passes;
    deal.base_tiles = least > 0 ? least : 1;
    constexpr int kWide = 128 / S::kElement;
    deal.is_wide = kSplit == kTileWhole && a.n_w == 1 && passes == 1;
    for (int i = 0; i < (kGated ? 4 : deal.is_wide ? 2 : a.n_w); ++i) {
        const int of = kGated ? i & 1 : deal.is_wide ? 0 : i;
        const Packed &p = *packed[of];
        const cuuint64_t size[3] = {kWide, static_cast<cuuint64_t>(p.padded_rows), static_cast<cuuint64_t>(p.padded_cols / kWide)}, stride[2] = {static_cast<cuuint64_t>(p.row_bytes), 128};
        const cuuint32_t box[3] = {kWide, static_cast<cuuint32_t>(kGated ? (i < 2 ? 8 * deal.base_tiles : 8) : kSplit >= kTileHeads ? 8 : deal.is_wide && i == 0 ? 16 * deal.base_tiles : 16), kGated ? 1 : S::kChunks};
        const CUresult e = l.ctx->driver.encode_tiled(&maps.w[i], S::kIsFp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, const_cast<uint8_t *>(a.w[of].data), size, stride, box, step,
                                                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        if (e != CUDA_SUCCESS) return fail(PK_DEVICE, "matmul: tensor map of weight %d: CUDA driver error %d", i, static_cast<int>(e));
    }
    const int w_bytes = deal.pass_tiles * S::kTileBytes, stage_bytes = w_bytes + S::kXBytes + S::kFactorBytes;
    const int sums = kFlatWarps / kWM * deal.pass_tiles * S::kN8 * 512;
    const bool apart = passes > 1;
    deal.n_stages = ((apart ? std::min(kFlatRingBytes, kFlatSharedBytes - sums) : kFlatRingBytes) - S::kReceived) / stage_bytes;
    if (deal.n_stages > kFlatStages) deal.n_stages = kFlatStages;
    deal.under_way = (kFlatUnderWay / l.ctx->n_processors + w_bytes - 1) / w_bytes;
    if (deal.under_way > deal.n_stages) deal.under_way = deal.n_stages;
    const int units = (a.k + S::kStageK - 1) / S::kStageK;
    deal.steps = (units + kPair - 1) / kPair;
    const int ring = deal.n_stages * stage_bytes + S::kReceived, bytes = (apart ? ring + sums : std::max(ring, sums)) + 1024;
    deal.sums = apart ? ring : 0;
    return launch_clusters(l, "flat", flat_kernel<kFormat, kNT, kWM, kT, kSteps, kSplit, kPair, kPlain>, blocks * kPair, S::kThreads, bytes, kPair == 2 ? 2 : 0, deal, maps, a, packets);
}

template <int kFormat, int kNT, int kSplit>
int32_t launch_flat_heads(const Launch &l, const SkinnyArguments &a, const Packed *const *packed, const FlatPackets &packets, int64_t most) {
    if (most <= 3) return launch_flat_shape<kFormat, kNT, 1, 3, 2, kSplit, 1, false>(l, a, packed, packets);
    return launch_flat_shape<kFormat, kNT, 2, kFlatMostTiles / 2, 4, kSplit, 1, false>(l, a, packed, packets);
}

template <int kFormat, int kNT>
int32_t launch_flat_width(const Launch &l, const SkinnyArguments &a, const Packed *const *packed, const FlatPackets &packets) {
    const bool gated = a.act != PK_ACT_NONE && a.n_w == 2, plain = is_plain(a, gated);
    if (gated) return plain ? launch_flat_shape<kFormat, kNT, 4, 3, 4, kTileGated, 1, true>(l, a, packed, packets) : launch_flat_shape<kFormat, kNT, 4, 3, 4, kTileGated, 1, false>(l, a, packed, packets);
    int64_t tiles = 0;
    for (int i = 0; i < a.n_w; ++i) tiles += (a.w[i].rows + 15) / 16;
    const int64_t most = (tiles + l.ctx->n_processors - 1) / l.ctx->n_processors;
    if (a.heads.q && a.heads.kv_format == PK_F16) return launch_flat_heads<kFormat, kNT, kTileHalfHeads>(l, a, packed, packets, most);
    if (a.heads.q) return launch_flat_heads<kFormat, kNT, kTileHeads>(l, a, packed, packets, most);
    if (!plain) return launch_flat_shape<kFormat, kNT, 2, kFlatMostTiles / 2, 4, kTileWhole, 1, false>(l, a, packed, packets);
    // Pairs of blocks halve what each reads of x. For weights of two bytes what they send each other takes as long.
    if constexpr (kFormat == PK_FP8_E4M3) {
        const int64_t pairs = l.ctx->n_processors / 2, most_of_pair = (tiles + pairs - 1) / pairs;
        if (most_of_pair <= 4) return launch_flat_shape<kFormat, kNT, 2, 2, 4, kTileWhole, 2, true>(l, a, packed, packets);
        if constexpr (kNT <= 16)
            if (most_of_pair <= kFlatMostTiles) return launch_flat_shape<kFormat, kNT, 2, kFlatMostTiles / 2, 4, kTileWhole, 2, true>(l, a, packed, packets);
    }
    if (most <= 2) return launch_flat_shape<kFormat, kNT, 2, 1, 4, kTileWhole, 1, true>(l, a, packed, packets);
    if (most <= 3) return launch_flat_shape<kFormat, kNT, 1, 3, 2, kTileWhole, 1, true>(l, a, packed, packets);
    return launch_flat_shape<kFormat, kNT, 2, kFlatMostTiles / 2, 4, kTileWhole, 1, true>(l, a, packed, packets);
}

template <int kFormat>
int32_t launch_flat_format(const Launch &l, const SkinnyArguments &a, const Packed *const *packed, const FlatPackets &packets) {
    return for_flat_width(a.max_rows, [&](auto width) { return launch_flat_width<kFormat, width()>(l, a, packed, packets); });
}

}  // namespace pk
