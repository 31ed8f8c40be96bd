// How a streaming matmul is cut: a pure function of the machine and the shape.
#include <algorithm>
#include <cstdint>

#include "../../include/skinny.cuh"
#include "../../include/stream.cuh"

namespace pk {
namespace {
constexpr int64_t kStagedBytes = 64 << 10;  // of x, so that two blocks fit on a multiprocessor
}

StreamShape stream_shape(int32_t n_processors, int32_t max_rows, int64_t total_tiles32, int64_t n_units, int32_t unit, int32_t group, bool gated) {
    StreamShape s = {};
    s.n_tokens8 = max_rows <= 8 ? 1 : max_rows <= 16 ? 2 : max_rows <= 32 ? 4 : 8;
    s.warps_k = s.n_tokens8 <= 2 ? 8 : s.n_tokens8 == 4 ? 4 : 2;
    s.tile_rows = 32 * (8 / s.warps_k);
    (void)gated;
    const int64_t n_tiles = (total_tiles32 * 32 + s.tile_rows - 1) / s.tile_rows;
    const int64_t staged = s.n_tokens8 == 1 ? max_rows : 8 * s.n_tokens8;
    const int64_t most = std::max<int64_t>(1, kStagedBytes / (staged * unit * 2));
    int64_t slices = (n_units + most - 1) / most;
    const int64_t n_slots = (s.n_tokens8 == 8 ? 1ll : 2ll) * n_processors;
    // The fewest rounds of a warp's units, waves of blocks counted: 160 tiles in two slices would take two waves for 1.2. With slices
    // every tile's sums go through memory, which takes as long as a round.
    const int64_t wanted = std::max<int64_t>(8, (n_slots + n_tiles - 1) / n_tiles), finest = std::max<int64_t>(slices, std::min<int64_t>(wanted, n_units / s.warps_k)), fewest = slices;
    int64_t least = INT64_MAX;
    for (int64_t n = fewest; n <= finest; ++n) {
        const int64_t units = (n_units + n - 1) / n, waves = (n_tiles * ((n_units + units - 1) / units) + n_slots - 1) / n_slots;
        const int64_t cost = waves * ((units + s.warps_k - 1) / s.warps_k + (n > 1));
        if (cost < least) {
            least = cost;
            slices = n;
        }
    }
    s.units_per_slice = static_cast<int32_t>((n_units + slices - 1) / slices);
    s.n_slices = static_cast<int32_t>((n_units + s.units_per_slice - 1) / s.units_per_slice);
    s.n_tiles = static_cast<int32_t>(n_tiles);
    int64_t blocks = std::min<int64_t>(n_tiles * s.n_slices, n_slots);
    s.n_blocks = static_cast<int32_t>(std::max<int64_t>(s.n_slices, blocks / s.n_slices * s.n_slices));
    s.x_row_bytes = static_cast<int64_t>(s.units_per_slice) * unit * 2 + 64;
    s.shared_bytes = staged * s.x_row_bytes + 8 * 32 * (8 * s.n_tokens8 + 1) * 4;
    if (s.n_tokens8 == 1 && group > 0) s.shared_bytes += static_cast<int64_t>(s.units_per_slice) * unit / group * 8 * 4;
    return s;
}

namespace {
int64_t skinny_width(int64_t rows) { return rows <= 32 ? 32 : 128; }  // of the formats with the fewest widths
}  // namespace

int64_t skinny_partial_bytes(int32_t n_processors, int64_t max_rows) { return static_cast<int64_t>(n_processors) * 2 * 256 * skinny_width(max_rows) * 4; }

}  // namespace pk
