// Products of many rows through AMX tiles: scratch, and how the product is cut into jobs for the pool.
#include "matmul_amx.h"
#include "matmul_parts.h"

namespace pk {
namespace {

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileRows = 16;
constexpr int64_t kMaxJobRows = 512;       // rows of x that one decoding of a panel serves
constexpr int64_t kBlockTiles = 10;        // tiles along K decoded at a time
constexpr int64_t kSplitBlockTiles = 12;   // the same when each is two
constexpr int64_t kCacheBytes = 1 << 20;   // activations of a job up to this size stay in the cache by themselves
constexpr int64_t kInTurn = 8;             // pairs that share a block of activations otherwise
constexpr int64_t kMaxPairs = 8;           // pairs of a job: while one is multiplied, the next is decoded
constexpr int64_t kPairColumns = 32;

bool is_split(int32_t format) { return format == PK_F16 || format == PK_F32; }

struct Plan {
    bool splits = false;
    int64_t n_tiles, n_row_tiles, job_row_tiles, block_tiles, in_turn;
    int64_t x_bytes, tiles_bytes, sums_bytes;  // the last two per thread

    Plan(const pk_op_matmul &op, int64_t n_rows) {
        for (int32_t i = 0; i < op.n_w; ++i) splits = splits || is_split(op.w[i].format);
        n_tiles = (op.x.cols + kGroup - 1) / kGroup;
        n_row_tiles = (n_rows + kTileRows - 1) / kTileRows;
        int64_t limit = kMaxJobRows / kTileRows, n_jobs = (n_row_tiles + limit - 1) / limit;
        job_row_tiles = round_up((n_row_tiles + n_jobs - 1) / n_jobs, 2);
        int64_t most = splits ? kSplitBlockTiles : kBlockTiles, n_blocks = (n_tiles + most - 1) / most;
        block_tiles = (n_tiles + n_blocks - 1) / n_blocks;
        in_turn = n_blocks == 1 || job_row_tiles * n_tiles * kTileBytes <= kCacheBytes ? 1 : kInTurn;
        x_bytes = n_row_tiles * n_tiles * kTileBytes * (splits ? 2 : 1);
        tiles_bytes = 8 * block_tiles * kTileBytes;
        sums_bytes = in_turn * job_row_tiles * kTileRows * kPairColumns * 4;
    }
    int64_t thread_bytes() const { return tiles_bytes + sums_bytes; }
};

struct TileProduct {
    const Parts &parts;
    const Plan &plan;
    const TileKernels &tiles;
    int64_t n_rows;
    const uint16_t *x, *x_lower;

    // Two gated panels of one number, or two numbers side by side.
    int64_t n_pairs() const { return parts.is_gated() ? parts.n_numbers() : (parts.n_numbers() + 1) / 2; }

    PanelPair::Panel panel(int32_t w, int64_t number) const { return {parts.op.w[w].format, parts.data(w, number), &parts.shapes[w]}; }

    PanelPair pair(int64_t i) const {
        if (parts.is_gated()) return {{panel(0, i), panel(1, i)}, {parts.finish({0, i}), {}}, 1, 1};
        bool is_whole = 2 * i + 1 < parts.n_numbers();
        auto left = parts.place(2 * i), right = is_whole ? parts.place(2 * i + 1) : left;
        return {{panel(left.w, left.panel), panel(right.w, right.panel)}, {parts.finish(left), parts.finish(right)}, is_whole ? 2 : 1, 0};
    }

    // Pairs [begin, end), at most kMaxPairs, for the rows of job number `job`.
    void run(int64_t begin, int64_t end, int64_t job, char *scratch) const {
        int64_t first = job * plan.job_row_tiles, left = plan.n_row_tiles - first;
        TileJob tile_job{x, x_lower, plan.n_tiles, plan.block_tiles, first, left < plan.job_row_tiles ? left : plan.job_row_tiles, n_rows, plan.in_turn,
                         reinterpret_cast<uint16_t *>(scratch), reinterpret_cast<float *>(scratch + plan.tiles_bytes)};
        PanelPair pairs[kMaxPairs];
        for (int64_t i = begin; i < end; ++i) pairs[i - begin] = pair(i);
        tiles.run_pairs(tile_job, pairs, end - begin);
    }
};

// Pairs per piece of work: enough that decoding hides behind products, few enough that threads end together.
int64_t pairs_per_piece(int64_t n_pairs, int64_t n_jobs, int64_t n_threads) {
    int64_t n = n_pairs * n_jobs / (2 * n_threads);
    return n < 1 ? 1 : n > kMaxPairs ? kMaxPairs : n;
}

}  // namespace

bool uses_tiles(const Context &context, const pk_op_matmul &, int64_t n_rows) { return context.isa == Isa::kAmx && n_rows > 12; }

int64_t tiles_workspace_bytes(const Context &context, const pk_op_matmul &op, int64_t n_rows) {
    Plan plan(op, n_rows);
    return plan.x_bytes + context.pool.n_threads() * plan.thread_bytes();
}

void matmul_tiles(Context &context, const Parts &parts, int64_t n_rows, void *workspace) {
    const pk_op_matmul &op = parts.op;
    Plan plan(op, n_rows);
    const TileKernels &tiles = tile_kernels_amx();
    auto *x = static_cast<uint16_t *>(workspace);
    uint16_t *lower = plan.splits ? x + plan.x_bytes / 4 : nullptr;
    char *scratch = static_cast<char *>(workspace) + plan.x_bytes;
    context.pool.parallel_for(plan.n_row_tiles, context.pool.grain(plan.n_row_tiles), [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t t = begin; t < end; ++t) {
            int64_t row = t * kTileRows, left = n_rows - row, at = t * plan.n_tiles * kTileBytes / 2;
            tiles.pack_tiles(reinterpret_cast<const float *>(op.x.data + row * op.x.stride), op.x.stride / 4, op.x.cols, left < kTileRows ? left : kTileRows, x + at,
                             lower ? lower + at : nullptr);
        }
    });
    TileProduct product{parts, plan, tiles, n_rows, x, lower};
    int64_t n_jobs = (plan.n_row_tiles + plan.job_row_tiles - 1) / plan.job_row_tiles;
    int64_t per_piece = pairs_per_piece(product.n_pairs(), n_jobs, context.pool.n_threads()), n_pieces = (product.n_pairs() + per_piece - 1) / per_piece;
    context.pool.parallel_for(n_pieces * n_jobs, 1, [&](int64_t begin, int64_t end, int32_t thread) {
        for (int64_t i = begin; i < end; ++i) {
            int64_t first = i % n_pieces * per_piece, last = first + per_piece;
            product.run(first, last < product.n_pairs() ? last : product.n_pairs(), i / n_pieces, scratch + thread * plan.thread_bytes());
        }
    });
}

}  // namespace pk
