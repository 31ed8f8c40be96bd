// Flat matmul (include/flat.cuh): which products are flat ones, and those in BF16.
#include <algorithm>

#include "../../include/split.h"

#include "../../include/format/unit.cuh"
#include "../../include/gemm.cuh"
#include "../../include/invariant.h"
#if defined(PK_WGMMA)
#include "../../include/flat_launch.cuh"
#endif

namespace pk {

#if defined(PK_WGMMA)
extern template int32_t launch_flat_format<PK_FP8_E4M3>(const Launch &, const SkinnyArguments &, const Packed *const *, const FlatPackets &);
extern template int32_t launch_flat_blocks<PK_Q8_0>(const Launch &, const SkinnyArguments &, const Packed *const *, const FlatPackets &);
extern template int32_t launch_flat_blocks<PK_Q4_K>(const Launch &, const SkinnyArguments &, const Packed *const *, const FlatPackets &);
extern template int32_t launch_flat_blocks<PK_Q6_K>(const Launch &, const SkinnyArguments &, const Packed *const *, const FlatPackets &);
#else
template <int kFormat>
int32_t launch_flat_blocks(const Launch &, const SkinnyArguments &, const Packed *const *, const FlatPackets &) { return fail(PK_UNSUPPORTED, "matmul: no wgmma on this architecture"); }
template <int kFormat>
int32_t launch_flat_format(const Launch &, const SkinnyArguments &, const Packed *const *, const FlatPackets &) { return fail(PK_UNSUPPORTED, "matmul: no wgmma on this architecture"); }
bool is_split(const Launch &, const SkinnyArguments &) { return false; }
int32_t launch_split(const Launch &, const SkinnyArguments &, const Packed *const *, const FlatPackets &) { return PK_UNSUPPORTED; }
#endif

bool is_flat(const Launch &l, const Packed &weight, int64_t max_rows) {
    const bool is_plain = weight.format == PK_BF16 || weight.format == PK_FP8_E4M3, is_block = (weight.format == PK_Q8_0 || weight.format == PK_Q4_K || weight.format == PK_Q6_K) && weight.cols == weight.padded_cols;
    return has_wgmma(l.ctx) && !is_invariant(l.ctx) && max_rows > 2 && max_rows <= (is_plain || is_block ? kFlatRows : 0) && l.ctx->n_processors <= kMaxBlocks;
}

FlatAhead flat_ahead(const Launch &l, const pk_op_matmul *next) {
    if (next == nullptr || next->x.rows != PK_ROWS_T) return {};
    const Packed *first = find_packed(l.ctx, next->w[0]);
    if (first == nullptr || first->format != PK_Q8_0 || !is_flat(l, *first, bound(l, PK_ROWS_T))) return {};
    const int64_t unit = Unit<PK_Q8_0>::kBytes, units = first->padded_cols / Unit<PK_Q8_0>::kU;
    FlatAhead ahead = {};
    int64_t pieces = 0;
    for (int i = 0; i < 3; ++i) {
        if (i < next->n_w) {
            const Packed *packed = find_packed(l.ctx, next->w[i]);
            if (packed == nullptr || packed->format != first->format || packed->padded_cols != first->padded_cols) return {};
            ahead.from[i] = reinterpret_cast<const uint8_t *>(next->w[i].data);
            pieces += 2 * (packed->rows / 16);
        }
        ahead.pieces[i] = static_cast<int32_t>(pieces);
    }
    if (pieces == 0) return {};
    const int64_t each = pieces * unit, n = std::min(units / 2, std::max<int64_t>(1, (kFlatAheadBytes * l.ctx->n_processors + each / 2) / each));
    ahead.bytes = static_cast<int32_t>(n * unit);
    ahead.second = static_cast<int32_t>(units / 2 * unit);
    ahead.apart = units * unit;
    return ahead;
}

bool flat_ends_heads(const Launch &l, int64_t n_heads) { return n_heads <= kFlatHeads && 8 * n_heads <= kFlatMostTiles * l.ctx->n_processors; }

int32_t launch_flat(const Launch &l, const SkinnyArguments &a, const Packed *const *packed, const FlatPackets &packets) {
    switch (packed[0]->format) {
        case PK_BF16: return launch_flat_format<PK_BF16>(l, a, packed, packets);
        case PK_FP8_E4M3: return is_split(l, a) ? launch_split(l, a, packed, packets) : launch_flat_format<PK_FP8_E4M3>(l, a, packed, packets);
        case PK_Q8_0: return launch_flat_blocks<PK_Q8_0>(l, a, packed, packets);
        case PK_Q4_K: return launch_flat_blocks<PK_Q4_K>(l, a, packed, packets);
        default: return launch_flat_blocks<PK_Q6_K>(l, a, packed, packets);
    }
}

}  // namespace pk
