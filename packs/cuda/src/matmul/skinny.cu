// Skinny matmul on Hopper: y[rows, N] = x[rows, K] W^T for 3 to 128 rows, at the speed of reading W.
// One translation unit per format (PK_STREAM_FORMAT). Does not handle: more than 128 rows, blocks that do not all run at once.
#include "../../include/skinny.cuh"

#if defined(PK_WGMMA)
#include "../../include/skinny_kernel.cuh"
#endif

namespace pk {

#if defined(PK_WGMMA)
namespace {

// What weights lack in registers.
template <int kFormat>
constexpr float tiny_factor() {
    using U = Unit<kFormat>;
    return U::kCode == Code::kSigned8 || (U::kCode == Code::kUnsigned && U::kLow == 4 && (U::kScale == Scale::kBytesMin || U::kScale == Scale::kSigned16 || U::kScale == Scale::kHalf)) ? 0x1p20f : 1.0f;
}

template <int kFormat, int kNT, int kWg, int kT>
int32_t launch_shape(const Launch &l, SkinnyArguments a, const Packed *const *packed) {
    using S = Shape<kFormat, kNT, kWg, kT>;
    constexpr bool gated = kT == 2;
    Maps maps = {};
    {
        const cuuint64_t size[2] = {static_cast<cuuint64_t>(a.k), static_cast<cuuint64_t>(a.max_rows - a.first_row)}, stride[1] = {static_cast<cuuint64_t>(a.x_stride * 2)};
        const cuuint32_t box[2] = {64, kNT}, step[2] = {1, 1};
        const CUresult e = l.ctx->driver.encode_tiled(&maps.x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void *>(a.x), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        if (e != CUDA_SUCCESS) return fail(PK_DEVICE, "matmul: tensor map of x, %d rows of %d: CUDA driver error %d", a.max_rows - a.first_row, a.k, static_cast<int>(e));
    }
    a.n_units = static_cast<int32_t>(packed[0]->padded_cols / StageOf<kFormat>::kU);
    a.n_tiles = 0;
    const int height = gated ? S::kM / 2 : S::kM;
    for (int i = 0; i < a.n_w; ++i) {
        SkinnyWeight &w = a.w[i];
        w.first_tile = gated ? 0 : a.n_tiles;
        if (!gated || i == 0) a.n_tiles += (w.rows + height - 1) / height;
        if constexpr (is_block_format(kFormat)) w.scale *= tiny_factor<kFormat>();
        if constexpr (!is_block_format(kFormat)) {
            const bool wide = !Rows<kFormat>::kIsFp8;
            const cuuint64_t size[2] = {static_cast<cuuint64_t>(packed[i]->padded_cols), static_cast<cuuint64_t>(packed[i]->padded_rows)}, stride[1] = {static_cast<cuuint64_t>(packed[i]->row_bytes)};
            const cuuint32_t box[2] = {wide ? 64u : 128u, 64u}, step[2] = {1, 1};
            const CUresult e = l.ctx->driver.encode_tiled(&maps.w[i], wide ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<uint8_t *>(w.data), size, stride, box, step,
                                                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
            if (e != CUDA_SUCCESS) return fail(PK_DEVICE, "matmul: tensor map of weight %d: CUDA driver error %d", i, static_cast<int>(e));
        }
    }
    if (static_cast<int64_t>(a.n_tiles) * a.n_units * l.ctx->n_processors > 0x7fffffff) return fail(PK_UNSUPPORTED, "matmul: %d tiles of %d units; the CUDA pack counts up to 2^31 by %d multiprocessors", a.n_tiles, a.n_units, l.ctx->n_processors);
    if (l.ctx->n_processors > kMaxBlocks) return fail(PK_UNSUPPORTED, "matmul: %d multiprocessors; the CUDA pack counts up to %d", l.ctx->n_processors, kMaxBlocks);
    Launch own = l;
    own.overlap = true;
    return launch(own, "skinny", skinny_kernel<kFormat, kNT, kWg, kT>, dim3(l.ctx->n_processors), dim3(S::kThreads), S::kBytes, maps, a);
}

// Moves x, y and add to the first row of the launch.
void move_rows(SkinnyArguments &a) {
    auto at = [&](const void *p, int64_t stride, int32_t format) { return p ? static_cast<const uint8_t *>(p) + a.first_row * stride * (format == PK_F32 ? 4 : 2) : nullptr; };
    a.x = at(a.x, a.x_stride, PK_BF16);
    a.y = const_cast<uint8_t *>(at(a.y, a.y_stride, a.y_format));
    a.add = at(a.add, a.add_stride, a.add_format);
}

template <int kFormat, int kNT>
int32_t launch_width(const Launch &l, const SkinnyArguments &a, const Packed *const *packed) {
    if (a.act != PK_ACT_NONE && a.n_w == 2) return launch_shape<kFormat, kNT, 2, 2>(l, a, packed);
    return launch_shape<kFormat, kNT, 2, 1>(l, a, packed);
}

}  // namespace

template <int kFormat>
int32_t launch_skinny(const Launch &l, SkinnyArguments a, const Packed *const *packed, int64_t max_rows) {
    move_rows(a);
    max_rows -= a.first_row;
    if constexpr (has_all_widths(kFormat)) {
        if (max_rows <= 16) return launch_width<kFormat, 16>(l, a, packed);
    }
    if (max_rows <= 32) return launch_width<kFormat, 32>(l, a, packed);
    if constexpr (has_all_widths(kFormat)) {
        if (max_rows <= 64) return launch_width<kFormat, 64>(l, a, packed);
    }
    return launch_width<kFormat, 128>(l, a, packed);
}

#else

template <int kFormat>
int32_t launch_skinny(const Launch &, SkinnyArguments, const Packed *const *, int64_t) { return fail(PK_UNSUPPORTED, "matmul: no wgmma on this architecture"); }

#endif

template int32_t launch_skinny<PK_STREAM_FORMAT>(const Launch &, SkinnyArguments, const Packed *const *, int64_t);

}  // namespace pk
