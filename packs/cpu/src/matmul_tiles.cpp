// Products of many rows through AMX tiles: scratch, and how the product is cut into jobs for the pool.
#include "matmul_amx.h"
#include "matmul_parts.h"

namespace pk {
namespace {

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileRows = 16;
constexpr int64_t kMinRows = 33;           // fewer go the other way
constexpr int64_t kMinPlainRows = 9;
constexpr int64_t kPlainBlockTiles = 12;   // tiles along K decoded at a time
constexpr int64_t kCodedBlockTiles = 8;    // blocks of 256 columns
constexpr int64_t kMinJobRowTiles = 4;      // rows are cut no finer
constexpr int64_t kMaxPairs = 8;           // pairs of a job, which take turns at a block of activations
constexpr int64_t kPairColumns = 32;

bool is_coded(const pk_tensor &w) { return find_layout(w.format)->scale != Scale::kNone; }

// Sizes in bytes, each a multiple of 64.
struct Plan {
    bool has_coded = false, has_plain = false;
    int64_t n_tiles, n_row_tiles, plain_block;
    int64_t plain_bytes, codes_bytes, x_sums_bytes;  // activations
    int64_t tiles_bytes, scales_bytes, sums_bytes;   // per thread

    Plan(const pk_op_matmul &op, int64_t n_rows) {
        for (int32_t i = 0; i < op.n_w; ++i) (is_coded(op.w[i]) ? has_coded : has_plain) = true;
        n_tiles = (op.x.cols + kGroup - 1) / kGroup;
        n_row_tiles = (n_rows + kTileRows - 1) / kTileRows;
        int64_t n_blocks = (n_tiles + kPlainBlockTiles - 1) / kPlainBlockTiles;
        plain_block = (n_tiles + n_blocks - 1) / n_blocks;
        int64_t x_tiles = n_row_tiles * n_tiles;
        plain_bytes = has_plain ? 2 * x_tiles * kTileBytes : 0;
        codes_bytes = has_coded ? 2 * x_tiles * kTileBytes : 0;
        x_sums_bytes = has_coded ? x_tiles * kGroupSums * 4 : 0;
        int64_t plain = has_plain ? plain_scratch_tiles(plain_block) : 0, coded = has_coded ? coded_scratch_tiles(kCodedBlockTiles, kMaxPairs) : 0;
        tiles_bytes = (plain > coded ? plain : coded) * kTileBytes;
        scales_bytes = has_coded ? kMaxPairs * 2 * kCodedBlockTiles * kGroupScales * 4 : 0;
        sums_bytes = kMaxPairs * n_row_tiles * kTileRows * kPairColumns * 4;
    }
    int64_t x_bytes() const { return plain_bytes + codes_bytes + x_sums_bytes; }
    int64_t thread_bytes() const { return tiles_bytes + scales_bytes + sums_bytes; }
};

struct TileProduct {
    const Parts &parts;
    const Plan &plan;
    const TileKernels &kernels;
    int64_t n_rows;
    char *x;  // upper, lower, codes, sums
    int64_t first_pair[4] = {};

    TileProduct(const Parts &of, const Plan &with, int64_t rows, void *workspace) : parts(of), plan(with), kernels(tile_kernels_amx()), n_rows(rows), x(static_cast<char *>(workspace)) {
        for (int32_t i = 0; i < parts.op.n_w; ++i) {
            int64_t panels = parts.first_panel[i + 1] - parts.first_panel[i];
            first_pair[i + 1] = first_pair[i] + (parts.is_gated() ? panels : (panels + 1) / 2);
        }
    }

    int64_t n_pairs() const { return first_pair[parts.op.n_w]; }
    uint16_t *upper(int64_t row_tile) const { return reinterpret_cast<uint16_t *>(x + row_tile * plan.n_tiles * kTileBytes); }
    uint16_t *lower(int64_t row_tile) const { return reinterpret_cast<uint16_t *>(x + plan.plain_bytes / 2 + row_tile * plan.n_tiles * kTileBytes); }
    uint16_t *codes(int64_t row_tile) const { return reinterpret_cast<uint16_t *>(x + plan.plain_bytes + row_tile * plan.n_tiles * 2 * kTileBytes); }
    float *x_sums(int64_t row_tile) const { return reinterpret_cast<float *>(x + plan.plain_bytes + plan.codes_bytes) + row_tile * plan.n_tiles * kGroupSums; }

    void pack(int64_t row_tile) const {
        const pk_op_matmul &op = parts.op;
        int64_t row = row_tile * kTileRows, left = n_rows - row, rows = left < kTileRows ? left : kTileRows;
        const float *from = reinterpret_cast<const float *>(op.x.data + row * op.x.stride);
        if (plan.has_plain) kernels.pack(from, op.x.stride / 4, op.x.cols, rows, upper(row_tile), lower(row_tile));
        if (plan.has_coded) kernels.pack_codes(from, op.x.stride / 4, op.x.cols, rows, codes(row_tile), x_sums(row_tile));
    }

    int32_t weight_of(int64_t pair) const {
        int32_t w = 0;
        while (pair >= first_pair[w + 1]) ++w;
        return w;
    }

    PanelPair::Panel panel(int32_t w, int64_t number) const { return {parts.op.w[w].format, parts.data(w, number), &parts.shapes[w]}; }

    PanelPair pair(int32_t w, int64_t i) const {
        if (parts.is_gated()) return {{panel(0, i), panel(1, i)}, {parts.finish({0, i}), {}}, 1, 1};
        int64_t left = 2 * (i - first_pair[w]), n = parts.first_panel[w + 1] - parts.first_panel[w];
        if (left + 1 == n) return {{panel(w, left), {}}, {parts.finish({w, left}), {}}, 1, 0};
        return {{panel(w, left), panel(w, left + 1)}, {parts.finish({w, left}), parts.finish({w, left + 1})}, 2, 0};
    }

    // Pairs [begin, end), at most kMaxPairs, for row tiles [first, last).
    void run(int64_t begin, int64_t end, int64_t first, int64_t last, char *scratch) const {
        TileJob tiles{plan.n_tiles, 0, first, last - first, n_rows, kMaxPairs, reinterpret_cast<uint16_t *>(scratch), reinterpret_cast<float *>(scratch + plan.tiles_bytes),
                      reinterpret_cast<float *>(scratch + plan.tiles_bytes + plan.scales_bytes), upper(0), lower(0), codes(0), x_sums(0)};
        while (begin < end) {
            PanelPair pairs[kMaxPairs];
            int32_t w = weight_of(begin);
            int64_t stop = end < first_pair[w + 1] ? end : first_pair[w + 1];
            for (int64_t i = begin; i < stop; ++i) pairs[i - begin] = pair(w, i);
            bool coded = is_coded(parts.op.w[w]);
            tiles.block_tiles = coded ? kCodedBlockTiles : plan.plain_block;
            (coded ? kernels.run_codes : kernels.run)(tiles, pairs, stop - begin);
            begin = stop;
        }
    }
};

// Pairs per piece of work: enough that a block of activations serves several, few enough that threads end together.
int64_t pairs_per_piece(int64_t n_pairs, int64_t n_jobs, int64_t n_threads) {
    int64_t n = n_pairs * n_jobs / (2 * n_threads);
    return n < 1 ? 1 : n > kMaxPairs ? kMaxPairs : n;
}

}  // namespace

bool uses_tiles(const Context &context, const pk_op_matmul &op, int64_t n_rows) {
    bool is_mixed_gate = op.act != PK_ACT_NONE && is_coded(op.w[0]) != is_coded(op.w[1]);
    bool all_plain = true;
    for (int32_t i = 0; i < op.n_w; ++i) all_plain = all_plain && !is_coded(op.w[i]);
    return context.isa == Isa::kAmx && n_rows >= (all_plain ? kMinPlainRows : kMinRows) && !is_mixed_gate;
}

int64_t tiles_workspace_bytes(const Context &context, const pk_op_matmul &op, int64_t n_rows) {
    Plan plan(op, n_rows);
    return plan.x_bytes() + context.pool.n_threads() * plan.thread_bytes();
}

void matmul_tiles(Context &context, const Parts &parts, int64_t n_rows, void *workspace) {
    Plan plan(parts.op, n_rows);
    TileProduct product(parts, plan, n_rows, workspace);
    char *scratch = static_cast<char *>(workspace) + plan.x_bytes();
    context.pool.parallel_for(plan.n_row_tiles, context.pool.grain(plan.n_row_tiles), [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t t = begin; t < end; ++t) product.pack(t);
    });
    // With more threads than pairs can feed, rows are shared out too.
    int64_t n_threads = context.pool.n_threads(), n_jobs = (2 * n_threads + product.n_pairs() - 1) / product.n_pairs();
    int64_t most = (plan.n_row_tiles + kMinJobRowTiles - 1) / kMinJobRowTiles;
    if (n_jobs > most) n_jobs = most;
    int64_t per_piece = pairs_per_piece(product.n_pairs(), n_jobs, n_threads), n_pieces = (product.n_pairs() + per_piece - 1) / per_piece;
    context.pool.parallel_for(n_pieces * n_jobs, 1, [&](int64_t begin, int64_t end, int32_t thread) {
        for (int64_t i = begin; i < end; ++i) {
            int64_t first = i % n_pieces * per_piece, last = first + per_piece, job = i / n_pieces;
            product.run(first, last < product.n_pairs() ? last : product.n_pairs(), job * plan.n_row_tiles / n_jobs, (job + 1) * plan.n_row_tiles / n_jobs,
                        scratch + thread * plan.thread_bytes());
        }
    });
}

}  // namespace pk
