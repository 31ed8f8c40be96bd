// What tiled matmuls by tensor copies share (Hopper's and Blackwell's): the maps of their boxes and the order of their tiles.
#pragma once
#include "gemm.cuh"
#include "wgmma.cuh"

namespace pk {

struct GemmMaps {
    CUtensorMap x, w[3];
};

struct GemmTile {
    int m0, n0, weight;
};

// Tile `index` of all: kGroupM tiles of x go through W together, so that concurrent blocks share boxes in L2.
template <int kM, int kN, int kGroupM>
__device__ __forceinline__ GemmTile gemm_tile(const GemmArguments &a, int index, int m_tiles, bool gated) {
    const int per_group = kGroupM * a.n_tiles, group = index / per_group, in = index - group * per_group;
    const int first = group * kGroupM, height = min(kGroupM, m_tiles - first);
    const int n = in / height;
    GemmTile t;
    t.m0 = (first + in - n * height) * kM;
    t.weight = gated ? 0 : a.n_w > 2 && n >= a.w[2].first_tile ? 2 : a.n_w > 1 && n >= a.w[1].first_tile ? 1 : 0;
    t.n0 = (n - a.w[t.weight].first_tile) * (gated ? kN / 2 : kN);
    return t;
}

// Boxes of box_rows rows of 128 bytes, swizzled by 128.
inline int32_t make_map(const Launch &l, CUtensorMap *map, const void *data, bool fp8, int64_t rows, int64_t cols, int64_t row_bytes, int box_rows) {
    const cuuint64_t size[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)}, stride[1] = {static_cast<cuuint64_t>(row_bytes)};
    const cuuint32_t box[2] = {fp8 ? 128u : 64u, static_cast<cuuint32_t>(box_rows)}, step[2] = {1, 1};
    const CUresult e = l.ctx->driver.encode_tiled(map, fp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void *>(data), size, stride, box, step,
                                                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return e == CUDA_SUCCESS ? PK_OK : fail(PK_DEVICE, "gemm: tensor map of %lld x %lld, %lld bytes a row: CUDA driver error %d", (long long)rows, (long long)cols, (long long)row_bytes, static_cast<int>(e));
}

// The boxes of x (kM rows) and of up to three weights (kN / 2 rows), and in the arguments where each weight's tiles begin.
template <int kM, int kN>
int32_t gemm_maps(const Launch &l, GemmMaps *maps, GemmArguments &a, int64_t max_rows, int64_t x_cols, bool fp8) {
    const bool gated = a.act != PK_ACT_NONE && a.n_w == 2;
    const int wide = gated ? kN / 2 : kN;
    if (int32_t e = make_map(l, &maps->x, a.x, fp8, max_rows, x_cols, a.x_row_bytes, kM)) return e;
    int32_t tiles = 0;
    for (int i = 0; i < 3; ++i) {
        const GemmWeight &w = a.w[i < a.n_w ? i : 0];
        if (int32_t e = make_map(l, &maps->w[i], w.data, fp8, w.rows, w.row_bytes / (fp8 ? 1 : 2), w.row_bytes, kN / 2)) return e;
        if (i < a.n_w && (!gated || i == 0)) {
            a.w[i].first_tile = tiles;
            tiles += (w.rows + wide - 1) / wide;
        }
    }
    if (gated) a.w[1].first_tile = 0;
    a.n_tiles = tiles;
    return PK_OK;
}

}  // namespace pk
