// Flat matmul (include/flat.cuh): which products it takes, and those in BF16.
#include "../../include/flat_plan.h"

#include "../../include/gemm.cuh"
#include "../../include/invariant.h"
#if defined(PK_WGMMA)
#include "../../include/flat_launch.cuh"
#endif

namespace pk {

#if defined(PK_WGMMA)
extern template int32_t launch_flat_format<PK_FP8_E4M3>(const Launch &, const SkinnyArguments &, const Packed *const *, const FlatPackets &);
#else
template <int kFormat>
int32_t launch_flat_format(const Launch &, const SkinnyArguments &, const Packed *const *, const FlatPackets &) { return fail(PK_UNSUPPORTED, "matmul: no wgmma on this architecture"); }
#endif

bool is_flat(const Launch &l, int32_t format, int64_t max_rows) {
    return has_wgmma(l.ctx) && !is_invariant(l.ctx) && max_rows > 2 && max_rows <= kFlatRows && l.ctx->n_processors <= kMaxBlocks && (format == PK_BF16 || format == PK_FP8_E4M3);
}

bool flat_ends_heads(const Launch &l, int64_t n_heads) { return n_heads <= kFlatHeads && 8 * n_heads <= kFlatMostTiles * l.ctx->n_processors; }

int32_t launch_flat(const Launch &l, const SkinnyArguments &a, const Packed *const *packed, const FlatPackets &packets) {
    return packed[0]->format == PK_BF16 ? launch_flat_format<PK_BF16>(l, a, packed, packets) : launch_flat_format<PK_FP8_E4M3>(l, a, packed, packets);
}

}  // namespace pk
