// Flat products (src/matmul/flat.cu): what the matmul op asks before it launches one.
#pragma once
#include <type_traits>

#include "skinny.cuh"

namespace pk {

// Rows of x; heads of queries, keys and values that a product can end; tiles of 16 rows of W that a block multiplies at once.
constexpr int64_t kFlatRows = 32, kFlatHeads = 80;
constexpr int kFlatMostTiles = 6;
// Of the next product's weights, a multiprocessor: asked for into the second-level cache while this one ends (LOG.md, M75; other formats lose by it).
constexpr int64_t kFlatAheadBytes = 36 << 10;

// What the product behind one of Q8_0 reads first: `bytes` at the beginning of each tile of 16 rows of its weights and as many `second` behind it; tiles are `apart`.
struct FlatAhead {
    const uint8_t *from[3];
    int64_t apart;
    int32_t pieces[3];  // of a weight and of those before it
    int32_t bytes, second;
};
// The launch numbers of blocks, and packets of sums of squares: [tile of a head][kFlatRows].
struct FlatPackets {
    int32_t *numbers;
    unsigned long long *squares;
    FlatAhead ahead;
};
constexpr int64_t kFlatPacketBytes = kMaxBlocks * 4 + kFlatHeads * 8 * kFlatRows * 8;
// Of the workspace's counters, those that are zero between launches; behind them lie these numbers and packets, then skinny products' flags.
constexpr int64_t kZeroCounterBytes = kCounterBytes - kSkinnyFlagBytes - kFlatPacketBytes;

// Whether products of such a weight by at most max_rows rows are flat ones on this device.
bool is_flat(const Launch &l, const Packed &weight, int64_t max_rows);
// Whether a flat product can end so many heads.
bool flat_ends_heads(const Launch &l, int64_t n_heads);
// next: the product behind; null: none is known.
FlatAhead flat_ahead(const Launch &l, const pk_op_matmul *next);
int32_t launch_flat(const Launch &l, const SkinnyArguments &a, const Packed *const *packed, const FlatPackets &packets);

// launch(width): with the least of the widths that kernels are compiled for, as a constant, that takes so many rows of x.
template <class F>
int32_t for_flat_width(int32_t max_rows, const F &launch) {
    if (max_rows <= 8) return launch(std::integral_constant<int, 8>());
    if (max_rows <= 16) return launch(std::integral_constant<int, 16>());
    return launch(std::integral_constant<int, kFlatRows>());
}

template <int kFormat>
int32_t launch_flat_format(const Launch &l, const SkinnyArguments &a, const Packed *const *packed, const FlatPackets &packets);
// The same of block formats.
template <int kFormat>
int32_t launch_flat_blocks(const Launch &l, const SkinnyArguments &a, const Packed *const *packed, const FlatPackets &packets);

}  // namespace pk
