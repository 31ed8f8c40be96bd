// FP8 products of 3 to 16 rows whose x is split in two (include/split.cuh): which ones, and their launches.
#include "../../include/split.h"
#if defined(PK_WGMMA)
#include "../../include/split_launch.cuh"

namespace pk {

// Tiles of whoever has most: a block where they are gated, a pair of blocks otherwise; 0: not a product of this kind.
static int split_tiles(const Launch &l, const SkinnyArguments &a) {
    const bool gated = a.act != PK_ACT_NONE && a.n_w == 2;
    if (a.max_rows - a.first_row > 16 || a.k % 128 || a.k > 1 << 15 || (!a.heads.q && !is_plain(a, gated))) return 0;
    int n_tiles = 0;
    for (int i = 0; i < (gated ? 1 : a.n_w); ++i) n_tiles += a.w[i].rows / (gated ? 8 : 16);
    const int among = l.ctx->n_processors / (gated ? 1 : 2), most = (n_tiles + among - 1) / among;
    return n_tiles < among || most > 16 ? 0 : most;
}

bool is_split(const Launch &l, const SkinnyArguments &a) { return split_tiles(l, a) > 0; }

int32_t launch_split(const Launch &l, const SkinnyArguments &a, const Packed *const *packed, const FlatPackets &packets) {
    const int most = split_tiles(l, a);
    return a.max_rows - a.first_row <= 8 ? launch_split_width<8>(l, a, packed, packets, most) : launch_split_width<16>(l, a, packed, packets, most);
}

}  // namespace pk
#endif
