// Launches of the split kernel (split.cuh).
#pragma once
#include <algorithm>
#include "cluster_launch.h"
#include "split.cuh"

namespace pk {

// Of shared memory, the rings and what lies behind them; all that a block may have; weights under way; those asked for ahead of x, which comes behind them (of 8 rows all, LOG.md, M75).
constexpr int kSplitRingBytes = 200 << 10, kSplitMostBytes = 226 << 10, kSplitUnderWay = 64 << 10, kSplitAhead = 64 << 10;

template <int kNT, int kGroups, int kM, int kSplit, int kPair, int kC>
int32_t launch_split_shape(const Launch &l, SkinnyArguments a, const Packed *const *packed, const FlatPackets &packets) {
    using S = SplitShape<kNT, kGroups, kM, kSplit, kPair, kC>;
    constexpr bool kGated = S::kGated, kHeads = S::kHeads;
    SplitMaps maps = {};
    SplitDeal deal = {};
    const cuuint32_t step[4] = {1, 1, 1, 1};
    // Dimensions of a map: 128 bytes, rows, the next 128 bytes, groups of rows.
    auto encode = [&](CUtensorMap *map, CUtensorMapDataType type, const void *from, int64_t rows, int64_t row_bytes, int32_t box_rows, int32_t chunks, int32_t groups, int64_t group_bytes, CUtensorMapL2promotion promotion) {
        const cuuint32_t wide = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 128 : 64;
        const cuuint64_t size[4] = {wide, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(a.k / wide), static_cast<cuuint64_t>(groups)}, strides[3] = {static_cast<cuuint64_t>(row_bytes), 128, static_cast<cuuint64_t>(group_bytes)};
        const cuuint32_t box[4] = {wide, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(chunks), static_cast<cuuint32_t>(groups)};
        const CUresult e = l.ctx->driver.encode_tiled(map, type, group_bytes ? 4 : 3, const_cast<void *>(from), size, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        return e == CUDA_SUCCESS ? PK_OK : fail(PK_DEVICE, "matmul: tensor map of %lld rows of %d: CUDA driver error %d", static_cast<long long>(rows), a.k, static_cast<int>(e));
    };
    if (int32_t e = encode(&maps.x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, a.x, a.max_rows - a.first_row, a.x_stride * 2, kNT, 2 * kC, 1, 0, CU_TENSOR_MAP_L2_PROMOTION_L2_256B)) return e;
    int n_tiles = 0;
    for (int i = 0; i < a.n_w; ++i) {
        a.w[i].first_tile = kGated ? 0 : n_tiles;
        if (!kGated || i == 0) n_tiles += a.w[i].rows / (kGated ? 8 : 16);
    }
    for (int i = 0; i < 2; ++i) deal.first_tile[i] = !kGated && i + 1 < a.n_w ? a.w[i + 1].first_tile : INT32_MAX;
    deal.may_be_idle = a.min_rows > 0 || a.first_row > 0;
    deal.scale = a.w[0].scale * (kGated ? 1.0f : a.scale);
    const int blocks = l.ctx->n_processors / kPair;
    deal.each = n_tiles / blocks;
    deal.more = n_tiles % blocks;
    deal.pass_tiles = deal.each + (deal.more > 0);
    if (deal.pass_tiles > S::kMostTiles) return fail(PK_UNSUPPORTED, "matmul: a block has %d tiles, %d at once", deal.pass_tiles, S::kMostTiles);
    deal.base_tiles = std::max(deal.each, 1);
    for (int i = 0; i < a.n_w; ++i) {
        const Packed &p = *packed[i];
        const int groups = kGated ? 1 : 2;
        const int64_t apart = p.row_bytes * (kHeads ? 64 : 8);
        if (int32_t e = encode(maps.every + i, CU_TENSOR_MAP_DATA_TYPE_UINT8, a.w[i].data, p.padded_rows, p.row_bytes, 8, kC, kHeads ? groups : groups * deal.base_tiles, apart, CU_TENSOR_MAP_L2_PROMOTION_L2_128B)) return e;
        if (int32_t e = encode(maps.one + i, CU_TENSOR_MAP_DATA_TYPE_UINT8, a.w[i].data, p.padded_rows, p.row_bytes, 8, kC, groups, apart, CU_TENSOR_MAP_L2_PROMOTION_L2_128B)) return e;
    }
    deal.chunks_k = a.k / 128;
    deal.steps = (deal.chunks_k + kC * kPair - 1) / (kC * kPair);
    const int w_bytes = deal.pass_tiles * 2048 * kC, stage_bytes = w_bytes + S::kXBytes + kC / 2 * kNT * 4;
    // Products of 64 rows read past a stage's last tile.
    const int beside = (kPair == 2 ? (deal.pass_tiles * S::kN8 + 1) / 2 * 512 : 0) + deal.steps * kC * deal.pass_tiles * (kGated ? 2 : 1) * 4;
    auto bytes = [&](int n_stages) { return std::max(n_stages * stage_bytes + beside, (n_stages - 1) * w_bytes + S::kMostTiles * 2048 * kC) + 1024; };
    int n_stages = std::min({(kSplitRingBytes - beside) / stage_bytes, kSplitStages, std::max(2, deal.steps)});
    while (n_stages > 2 && bytes(n_stages) > kSplitMostBytes) --n_stages;
    deal.n_stages = n_stages;
    deal.under_way = std::min(n_stages, (kSplitUnderWay + w_bytes - 1) / w_bytes);
    deal.ahead = kGated || kNT == 8 ? 1 << 20 : std::max(1, kSplitAhead / w_bytes);
    return launch_clusters(l, "split", split_kernel<kNT, kGroups, kM, kSplit, kPair, kC>, blocks * kPair, S::kThreads, bytes(n_stages), kPair == 2 ? 2 : 0, deal, maps, a, packets);
}

// most: tiles of whoever has most.
template <int kNT>
int32_t launch_split_width(const Launch &l, const SkinnyArguments &a, const Packed *const *packed, const FlatPackets &packets, int most) {
    if (a.act != PK_ACT_NONE) return launch_split_shape<kNT, 2, 2, kTileGated, 1, 2>(l, a, packed, packets);
    if (a.heads.q) {
        if (a.heads.kv_format == PK_F16) return launch_split_shape<kNT, 2, 2, kTileHalfHeads, 2, 2>(l, a, packed, packets);
        return most <= 8 ? launch_split_shape<kNT, 2, 1, kTileHeads, 2, 2>(l, a, packed, packets) : launch_split_shape<kNT, 2, 2, kTileHeads, 2, 2>(l, a, packed, packets);
    }
    if (most <= 4) return launch_split_shape<kNT, 1, 1, kTileWhole, 2, 4>(l, a, packed, packets);
    if (most <= 8) return launch_split_shape<kNT, 2, 1, kTileWhole, 2, 4>(l, a, packed, packets);
    return launch_split_shape<kNT, 2, 2, kTileWhole, 2, 2>(l, a, packed, packets);
}

}  // namespace pk
