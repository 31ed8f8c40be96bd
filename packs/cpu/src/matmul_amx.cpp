// Products of many rows with plain weights, by AMX: bf16 tiles, sums in f32 tiles.
//
// C[32 rows, 32 weight rows] += A0/A1 [16, 32] x B0/B1 [32, 16]: four products per four tile loads. A block of some tiles
// along K of two panels is decoded into the thread's scratch (it should fit L1) and used for every row of the job.
// Activations are split into two bf16, so are weights that are not bf16 themselves: of the products of parts all but
// lower x lower are summed, which leaves errors of about 2^-18.
#include "matmul_tile_parts.h"

namespace pk {
namespace {

// The nearest value that bf16 holds (ties go up: half a unit more is cut).
inline vf nearest(vf x) { return cut(_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000)))); }

// A tile of 32 columns of a panel in two parts: the nearest bf16, and what that leaves.
template <class P>
void plain_tile(const uint8_t *panel, const PanelShape &shape, int64_t g, uint16_t *out, uint16_t *lower) {
    for (int64_t pair = 0; pair < 16; ++pair) {
        vf even, odd;
        P::pair(panel, 16 * g + pair, 0, &even, &odd);
        if constexpr (P::kHasScale) {
            vf scale = v_mul(v_load(reinterpret_cast<const float *>(panel + shape.scale_offset) + g * kGroup / kFp8Block * kPanelRows), v_set(P::kUnit));
            even = v_mul(even, scale);
            odd = v_mul(odd, scale);
        }
        vf even_part = nearest(even), odd_part = nearest(odd);
        store_row(out, pair, pair_bits(even_part, odd_part));
        store_row(lower, pair, pair_bits(nearest(v_sub(even, even_part)), nearest(v_sub(odd, odd_part))));
    }
}

// bf16 beside a panel that is split: its lower parts are zero.
void copy_tile(const uint8_t *panel, const PanelShape &, int64_t g, uint16_t *out, uint16_t *) { std::memcpy(out, panel + g * kTileBytes, kTileBytes); }

using TileOf = void (*)(const uint8_t *, const PanelShape &, int64_t, uint16_t *, uint16_t *);

TileOf tile_of(int32_t format) {
    switch (format) {
        case PK_F32: return plain_tile<Plain<PK_F32>>;
        case PK_F16: return plain_tile<Plain<PK_F16>>;
        case PK_BF16: return copy_tile;
        case PK_FP8_E4M3: return plain_tile<Plain<PK_FP8_E4M3>>;
        case PK_FP8_E5M2: return plain_tile<Plain<PK_FP8_E5M2>>;
        default: return nullptr;
    }
}

void pack(const float *x, int64_t stride, int64_t cols, int64_t n_rows, uint16_t *upper, uint16_t *lower) {
    for (int64_t r = 0; r < kTileRows; ++r)
        for (int64_t k = 0; k < cols; k += 32) {
            vf parts[2] = {v_zero(), v_zero()};
            for (int i = 0; i < 2; ++i) {
                int64_t left = r < n_rows ? cols - k - 16 * i : 0;
                if (left > 0) parts[i] = left >= 16 ? v_load(x + r * stride + k + 16 * i) : v_load(x + r * stride + k + 16 * i, left);
            }
            int64_t at = k / 32 * kTileElements + r * 32;
            __m512i bits = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(parts[1], parts[0]));
            _mm512_store_si512(upper + at, bits);
            for (int i = 0; i < 2; ++i) {
                __m256i half = i ? _mm512_extracti64x4_epi64(bits, 1) : _mm512_castsi512_si256(bits);
                parts[i] = v_sub(parts[i], _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)));
            }
            _mm512_store_si512(lower + at, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(parts[1], parts[0])));
        }
}

bool is_split_format(int32_t format) { return format != PK_BF16; }

// One block along K of two panels: decoded tile by tile, in between the products of the block before it, so that vector
// units and tile units work at the same time.
class Block {
   public:
    Block() = default;
    Block(const PanelPair &pair, int64_t begin, int64_t end, uint16_t *tiles, int64_t block_tiles) : begin_(begin), n_(end - begin) {
        is_split_ = is_split_format(pair.panel[0].format) || is_split_format(pair.panel[1].format);
        n_panels_ = pair.n_panels();
        for (int i = 0; i < n_panels_; ++i) {
            panels_[i] = &pair.panel[i];
            out_[i] = tiles + i * 2 * block_tiles * kTileElements;
            tiles_[i] = out_[i];
            tile_of_[i] = tile_of(pair.panel[i].format);
            if (pair.panel[i].format == PK_BF16 && !is_split_) {
                tiles_[i] = reinterpret_cast<const uint16_t *>(pair.panel[i].data) + begin * kTileElements;
                tile_of_[i] = nullptr;
            }
            if (is_split_ && !is_split_format(pair.panel[i].format)) std::memset(out_[i] + n_ * kTileElements, 0, n_ * kTileBytes);
        }
        if (n_panels_ == 1) tiles_[1] = tiles_[0];
    }

    // Decodes a share of the tiles: the rest is done when this was called n_steps times.
    inline __attribute__((always_inline)) void advance(int64_t n_steps) {
        credit_ += n_panels_ * n_;
        while (credit_ >= n_steps) {
            credit_ -= n_steps;
            decode_one();
        }
    }
    void decode_all() {
        while (done_ < n_panels_ * n_) decode_one();
    }
    const uint16_t *tiles(int panel) const { return tiles_[panel]; }
    const uint16_t *lower(int panel) const { return tiles_[panel] + n_ * kTileElements; }
    bool is_split() const { return is_split_; }
    int64_t begin() const { return begin_; }
    int64_t size() const { return n_; }
    int64_t n_steps(int64_t n_row_pairs) const { return n_row_pairs * n_ * (is_split_ ? 3 : 2); }

   private:
    void decode_one() {
        if (done_ >= n_panels_ * n_) return;
        int i = done_ >= n_ ? 1 : 0;
        int64_t k = done_ - i * n_;
        ++done_;
        if (tile_of_[i]) tile_of_[i](panels_[i]->data, *panels_[i]->shape, begin_ + k, out_[i] + k * kTileElements, out_[i] + (n_ + k) * kTileElements);
    }

    const PanelPair::Panel *panels_[2] = {};
    TileOf tile_of_[2] = {};
    uint16_t *out_[2] = {};
    const uint16_t *tiles_[2] = {};
    int64_t begin_ = 0, n_ = 0, n_panels_ = 0, done_ = 0, credit_ = 0;
    bool is_split_ = false;
};

// Where the sums of 32 rows will go: its lines are asked for while products run, a few at a time.
class Target {
   public:
    Target() = default;
    Target(const PanelPair &pair, int64_t row, int64_t n_rows, int64_t n_row_tiles, int64_t n_steps) : n_left_(n_rows) {
        const pk_op_matmul &op = *pair.finish[0].op;
        for (int i = 0; i < 2; ++i) {
            const Finish &finish = pair.finish[i < pair.n_finish ? i : 0];
            y_[i] = at_[i] = reinterpret_cast<char *>(op.y.data + row * op.y.stride) + finish.column * 4;
            is_direct_ = (i == 0 || is_direct_) && is_bare(finish) && finish.n_columns == kPanelRows;
        }
        is_direct_ = is_direct_ && pair.n_finish == 2 && n_rows == n_row_tiles * kTileRows;
        stride_ = op.y.stride;
        per_step_ = (n_rows + n_steps - 1) / n_steps;
    }
    inline __attribute__((always_inline)) void fetch() {
        for (int64_t i = 0; i < per_step_ && n_left_ > 0; ++i, --n_left_) {
            __builtin_prefetch(at_[0], 1);
            __builtin_prefetch(at_[1], 1);
            at_[0] += stride_;
            at_[1] += stride_;
        }
    }
    // Sums that need nothing done to them go to y straight from the tiles.
    bool is_direct() const { return is_direct_; }
    template <bool kTwo>
    bool store() const {
        if (!is_direct_) return false;
        _tile_stored(0, y_[0], stride_);
        _tile_stored(1, y_[1], stride_);
        if constexpr (kTwo) {
            _tile_stored(2, y_[0] + kTileRows * stride_, stride_);
            _tile_stored(3, y_[1] + kTileRows * stride_, stride_);
        }
        return true;
    }

   private:
    char *y_[2] = {}, *at_[2] = {};
    int64_t stride_ = 0, n_left_ = 0, per_step_ = 0;
    bool is_direct_ = false;
};

// Sums of 32 (kTwo) or 16 rows and two panels over n tiles along K. a1: the second sixteen rows.
template <bool kTwo>
inline __attribute__((always_inline)) void multiply(const uint16_t *a0, const uint16_t *a1, const uint16_t *b0, const uint16_t *b1, int64_t n, Block &next, int64_t n_steps,
                                                    Target &target) {
    for (int64_t k = 0; k < n; ++k) {
        _tile_loadd(6, b0 + k * kTileElements, 64);
        _tile_loadd(4, a0 + k * kTileElements, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b1 + k * kTileElements, 64);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (kTwo) {
            _tile_loadd(5, a1 + k * kTileElements, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        target.fetch();
        next.advance(n_steps);
    }
}

template <bool kTwo>
inline void load_sums(const float *sums) {
    _tile_loadd(0, sums, kSumStride * 4);
    _tile_loadd(1, sums + 16, kSumStride * 4);
    if constexpr (kTwo) {
        _tile_loadd(2, sums + 16 * kSumStride, kSumStride * 4);
        _tile_loadd(3, sums + 16 * kSumStride + 16, kSumStride * 4);
    }
}

template <bool kTwo>
inline void store_sums(float *sums) {
    _tile_stored(0, sums, kSumStride * 4);
    _tile_stored(1, sums + 16, kSumStride * 4);
    if constexpr (kTwo) {
        _tile_stored(2, sums + 16 * kSumStride, kSumStride * 4);
        _tile_stored(3, sums + 16 * kSumStride + 16, kSumStride * 4);
    }
}

inline void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// One or two row tiles of the job against a block of two panels.
template <bool kTwo>
void multiply_rows(const TileJob &job, int64_t row_tile, const Block &block, float *sums, Block &next, int64_t n_steps, Target target) {
    int64_t from = (row_tile * job.n_tiles + block.begin()) * kTileElements, after = job.n_tiles * kTileElements, n = block.size();
    if (block.begin() == 0)
        zero_sums();
    else
        load_sums<kTwo>(sums);
    const uint16_t *a = job.x_upper + from;
    multiply<kTwo>(a, a + after, block.tiles(0), block.tiles(1), n, next, n_steps, target);
    const uint16_t *lower = job.x_lower + from;
    multiply<kTwo>(lower, lower + after, block.tiles(0), block.tiles(1), n, next, n_steps, target);
    if (block.is_split()) multiply<kTwo>(a, a + after, block.lower(0), block.lower(1), n, next, n_steps, target);
    if (!target.store<kTwo>()) store_sums<kTwo>(sums);
}

// All rows of the job against one block; after the last block of K the sums go to y, 32 rows at a time.
void run_block(const TileJob &job, const PanelPair &pair, const Block &block, Block &next, float *sums) {
    const bool is_last = block.begin() + block.size() == job.n_tiles;
    const int64_t n_steps = block.n_steps((job.n_row_tiles + 1) / 2);
    for (int64_t t = 0; t < job.n_row_tiles; t += 2) {
        int64_t row = (job.first_row_tile + t) * kTileRows, left = job.n_rows - row, n_tiles = t + 1 < job.n_row_tiles ? 2 : 1, n_rows = left < n_tiles * kTileRows ? left : n_tiles * kTileRows;
        float *to = job.n_tiles == block.size() ? sums : sums + t * kTileRows * kSumStride;
        Target target = is_last ? Target(pair, row, n_rows, n_tiles, block.size()) : Target();
        if (n_tiles == 2)
            multiply_rows<true>(job, job.first_row_tile + t, block, to, next, n_steps, target);
        else
            multiply_rows<false>(job, job.first_row_tile + t, block, to, next, n_steps, target);
        if (is_last && !target.is_direct()) finish_pair(pair, row, n_rows, to);
    }
    next.decode_all();
}

// The order of blocks: groups of in_turn pairs, in a group block after block of K, in a block pair after pair.
struct Order {
    const TileJob &job;
    int64_t n_pairs, n_blocks;
    int64_t group = 0, block = 0, turn = 0;

    int64_t turns() const { return n_pairs - group < job.in_turn ? n_pairs - group : job.in_turn; }
    int64_t pair() const { return group + turn; }
    bool is_done() const { return group >= n_pairs; }
    void advance() {
        if (++turn < turns()) return;
        turn = 0;
        if (++block < n_blocks) return;
        block = 0;
        group += job.in_turn;
    }
};

Block block_at(const TileJob &job, const PanelPair *pairs, const Order &order, int64_t parity) {
    if (order.is_done()) return {};
    int64_t begin = order.block * job.block_tiles, end = begin + job.block_tiles < job.n_tiles ? begin + job.block_tiles : job.n_tiles;
    return {pairs[order.pair()], begin, end, job.tiles + parity * 4 * job.block_tiles * kTileElements, job.block_tiles};
}

void run_pairs(const TileJob &job, const PanelPair *pairs, int64_t n_pairs) {
    configure_tiles();
    Order order{job, n_pairs, (job.n_tiles + job.block_tiles - 1) / job.block_tiles};
    Block block = block_at(job, pairs, order, 0);
    block.decode_all();
    for (int64_t parity = 1; !order.is_done(); parity ^= 1) {
        const PanelPair &pair = pairs[order.pair()];
        float *sums = job.sums + order.turn * job.n_row_tiles * kTileRows * kSumStride;
        order.advance();
        Block next = block_at(job, pairs, order, parity);
        run_block(job, pair, block, next, sums);
        block = next;
    }
    _tile_release();
}

}  // namespace

const TileKernels &tile_kernels_amx() {
    static constexpr TileKernels kernels{pack, pack_code_tiles_amx, run_pairs, run_code_pairs_amx};
    return kernels;
}

}  // namespace pk
