// Products of many rows with coded weights, by AMX: integers times integers, exact in the tiles.
//
// For 16 rows of x and one panel, group by group: C = (128 high) x codes + low x codes, both as bf16 that hold these
// integers exactly; then sums += C * d (+ m * sum of x). Where d is a small integer or a power of two times something
// that a whole block of 256 columns shares, it is multiplied into the codes, and C runs through the block. The order of
// the float operations is that of matmul_level.h: a row gives the same sums there and here.
#include "matmul_codes.h"
#include "matmul_tile_parts.h"

namespace pk {
namespace {

constexpr int64_t kBlockGroups = kCodeBlock / kGroup;

void pack_code_tiles(const float *x, int64_t stride, int64_t cols, int64_t n_rows, uint16_t *codes, float *sums) {
    for (int64_t r = 0; r < kTileRows; ++r) {
        BlockScale scale{};
        for (int64_t k = 0; k < cols; k += kGroup) {
            uint16_t *tile = codes + k / kGroup * 2 * kTileElements + r * 32;
            float *to = sums + k / kGroup * kGroupSums + r;
            vi high[kGroupVectors] = {}, low[kGroupVectors] = {};
            int32_t halves[2] = {0, 0};
            if (r < n_rows) {
                const float *from = x + r * stride + k;
                if (k % kCodeBlock == 0) scale = block_scale(from, cols - k < kCodeBlock ? cols - k : kCodeBlock);
                group_codes(from, cols - k, scale.inverse, high);
                half_sums(high, halves);
                for (int i = 0; i < kGroupVectors; ++i) {
                    low[i] = low_part(high[i]);
                    high[i] = vi_sub(high[i], low[i]);
                }
            }
            _mm512_store_si512(tile, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(vi_to_float(high[1]), vi_to_float(high[0]))));
            _mm512_store_si512(tile + kTileElements, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(vi_to_float(low[1]), vi_to_float(low[0]))));
            to[0] = static_cast<float>(halves[0] + halves[1]);
            to[16] = static_cast<float>(halves[0]);
            to[32] = static_cast<float>(halves[1]);
            to[48] = scale.scale;
        }
    }
}

// Values of codes that are table indices or of up to four bits; bits above are zero or another code's.
template <class C>
inline vf value_table() {
    alignas(64) float values[16];
    for (int i = 0; i < 16; ++i) {
        int code = C::kLow == 2 && C::kHigh == 0 ? i & 3 : i;
        values[i] = static_cast<float>((C::kTable ? C::table()[code] : code) - C::kOffset);
    }
    return _mm512_load_ps(values);
}

// Values of the codes in one byte of every dword, kShift bits up.
template <class C, int kShift>
inline __attribute__((always_inline)) vf value_at(__m512i codes, vf table) {
    __m512i at = kShift ? _mm512_srli_epi32(codes, kShift) : codes;
    if constexpr (C::kLow + C::kHigh <= 4) return _mm512_permutexvar_ps(at, table);
    vf value = _mm512_cvtepi32_ps(_mm512_and_si512(at, _mm512_set1_epi32(255)));
    return C::kOffset ? v_sub(value, v_set(static_cast<float>(C::kOffset))) : value;
}

template <class C>
constexpr int n_parts() { return C::kScale == Scale::kK16 && C::kLow == 4 ? 2 : 1; }

// One group of a panel as a tile of codes (times their small scales); a second tile holds what bf16 cut off.
template <class C>
void decode_group(const uint8_t *panel, const PanelShape &shape, int64_t g, uint16_t *tile, float *scales) {
    const uint8_t *low = panel + g * 64 * C::kLow, *high = panel + shape.high_offset + g * 64 * C::kHigh;
    const uint8_t *unit = panel + shape.scale_offset + g / C::kGroupsPerUnit * C::kUnitBytes;
    const vf table = value_table<C>();
    vf small[2], d[2], m[2];
    C::scales(unit, g % C::kGroupsPerUnit, 0, d, m);
    if constexpr (C::kFolds) {
        C::small_scales(unit, g % C::kGroupsPerUnit, 0, small);
        d[0] = C::whole_scale(unit, 0);
    }
    v_store(scales, d[0]);
    if constexpr (C::kHasMin) v_store(scales + 16, m[0]);
    if constexpr (C::kHasMin && C::kFine) v_store(scales + 32, m[1]);
    unrolled<8>([&](auto index) {
        constexpr int kQuad = decltype(index)::value, kSub = C::kFine && kQuad >= 4 ? 1 : 0;
        constexpr bool kRaw = C::kHigh == 0 && C::kLow <= 4;  // the table looks at four bits only: no unpacking
        constexpr int kPerVector = 8 / C::kLow, kBase = kRaw ? C::kLow * (kQuad % kPerVector) : 0;
        __m512i codes;
        if constexpr (kRaw)
            codes = b_load(low + kQuad / kPerVector * 64);
        else
            codes = C::template quad<kQuad>(low, high);
        vf w[4] = {value_at<C, kBase>(codes, table), value_at<C, kBase + 8>(codes, table), value_at<C, kBase + 16>(codes, table), value_at<C, kBase + 24>(codes, table)};
        if constexpr (C::kFolds)
            for (int j = 0; j < 4; ++j) w[j] = v_mul(w[j], small[kSub]);
        for (int j = 0; j < 4; j += 2) {
            store_row(tile, 2 * kQuad + j / 2, pair_bits(w[j], w[j + 1]));
            if constexpr (n_parts<C>() == 2) store_row(tile + kTileElements, 2 * kQuad + j / 2, pair_bits(v_sub(w[j], cut(w[j])), v_sub(w[j + 1], cut(w[j + 1]))));
        }
    });
}

// One row tile of x and one panel, from some group on: codes and sums of x, codes and scales of the panel.
struct Operands {
    const uint16_t *x;
    const float *x_sums;
    const uint16_t *w;
    const float *scales;
};

// One group into sums tile 0. (Tile numbers are part of the instruction's name: no templates over them.)
inline __attribute__((always_inline)) void multiply_even(const uint16_t *x, const uint16_t *w) {
    _tile_loadd(6, w, 64);
    _tile_loadd(4, x, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, x + kTileElements, 64);
    _tile_dpbf16ps(0, 5, 6);
}

// The same into sums tile 1.
inline __attribute__((always_inline)) void multiply_odd(const uint16_t *x, const uint16_t *w) {
    _tile_loadd(7, w, 64);
    _tile_loadd(2, x, 64);
    _tile_dpbf16ps(1, 2, 7);
    _tile_loadd(3, x + kTileElements, 64);
    _tile_dpbf16ps(1, 3, 7);
}

// products[g] = x . codes of each group.
inline void multiply_groups(const Operands &at, int64_t n, float *products) {
    int64_t g = 0;
    for (; g + 2 <= n; g += 2) {
        _tile_zero(0);
        multiply_even(at.x + g * 2 * kTileElements, at.w + g * kTileElements);
        _tile_zero(1);
        multiply_odd(at.x + (g + 1) * 2 * kTileElements, at.w + (g + 1) * kTileElements);
        _tile_stored(0, products + g * 256, 64);
        _tile_stored(1, products + (g + 1) * 256, 64);
    }
    if (g == n) return;
    _tile_zero(0);
    multiply_even(at.x + g * 2 * kTileElements, at.w + g * kTileElements);
    _tile_stored(0, products + g * 256, 64);
}

// products[0] = x . codes of the whole block.
template <int kParts>
inline void multiply_block(const Operands &at, int64_t n, float *products) {
    _tile_zero(0);
    for (int64_t g = 0; g < n; ++g) {
        multiply_even(at.x + g * 2 * kTileElements, at.w + g * kParts * kTileElements);
        if constexpr (kParts == 2) {
            _tile_loadd(7, at.w + (g * 2 + 1) * kTileElements, 64);
            _tile_dpbf16ps(0, 4, 7);
            _tile_dpbf16ps(0, 5, 7);
        }
    }
    _tile_stored(0, products, 64);
}

// One block of 256 columns (or the rest of them): total += scale of x * (products * d + sums of x * m).
template <class C>
void run_block(const Operands &at, int64_t n, float *total) {
    constexpr int kMinima = C::kHasMin ? C::kScalesPerGroup : 0;
    alignas(64) float products[kBlockGroups * 256];
    if constexpr (C::kFolds)
        multiply_block<n_parts<C>()>(at, n, products);
    else
        multiply_groups(at, n, products);
    vf sums[kTileRows];
    for (int r = 0; r < kTileRows; ++r) sums[r] = v_zero();
    for (int64_t g = 0; g < n; ++g) {
        const float *x_sums = at.x_sums + g * kGroupSums, *scales = at.scales + g * kGroupScales;
        if (!C::kFolds || g == 0) {
            vf d = v_load(scales);
            for (int r = 0; r < kTileRows; ++r) sums[r] = v_fma(v_load(products + g * 256 + r * 16), d, sums[r]);
        }
        for (int i = 0; i < kMinima; ++i) {
            vf m = v_load(scales + 16 + 16 * i);
            for (int r = 0; r < kTileRows; ++r) sums[r] = v_fma(m, v_set(x_sums[(kMinima == 2 ? 16 + 16 * i : 0) + r]), sums[r]);
        }
    }
    for (int r = 0; r < kTileRows; ++r) v_store(total + r * kSumStride, v_fma(sums[r], v_set(at.x_sums[48 + r]), v_load(total + r * kSumStride)));
}

// What a format needs: how to decode, how to multiply, tiles per group.
struct Kind {
    void (*decode)(const uint8_t *, const PanelShape &, int64_t, uint16_t *, float *);
    void (*run)(const Operands &, int64_t, float *);
    int64_t n_parts;
    bool has_factor;
};

template <class C>
Kind kind() { return {decode_group<C>, run_block<C>, n_parts<C>(), C::kHasFactor}; }

Kind kind_of(int32_t format) {
    switch (format) {
        case PK_Q8_0: return kind<CodecQ8_0>();
        case PK_Q4_0: return kind<CodecQ4_0>();
        case PK_Q4_1: return kind<CodecQ4_1>();
        case PK_Q4_Z: return kind<CodecQ4_Z>();
        case PK_Q5_0: return kind<CodecQ5_0>();
        case PK_Q5_1: return kind<CodecQ5_1>();
        case PK_Q2_K: return kind<CodecQ2_K>();
        case PK_Q3_K: return kind<CodecQ3_K>();
        case PK_Q4_K: return kind<CodecQ4_K>();
        case PK_Q5_K: return kind<CodecQ5_K>();
        case PK_Q6_K: return kind<CodecQ6_K>();
        case PK_IQ4_NL: return kind<CodecIQ4_NL>();
        case PK_IQ4_XS: return kind<CodecIQ4_XS>();
        case PK_MXFP4: return kind<CodecMXFP4>();
        default: return kind<CodecNVFP4>();
    }
}

inline void clear_sums(float *total) {
    for (int64_t r = 0; r < kTileRows; ++r) v_store(total + r * kSumStride, v_zero());
}

// What is left to do to the sums of a panel's 16 rows when all of K is in.
inline void apply_factor(const Kind &kind, const PanelPair::Panel &panel, float *total) {
    if (!kind.has_factor) return;
    vf factor = v_load(reinterpret_cast<const float *>(panel.data + panel.shape->factor_offset));
    for (int64_t r = 0; r < kTileRows; ++r) v_store(total + r * kSumStride, v_mul(v_load(total + r * kSumStride), factor));
}

// A block of groups of some pairs is decoded, then meets all row tiles; a row tile stays in L1 meanwhile.
struct Piece {
    const TileJob &job;
    const PanelPair *pairs;
    int64_t n_pairs;
    int64_t begin, end;  // groups, at most kBlockGroups

    uint16_t *tiles(int64_t panel) const { return job.tiles + panel * 2 * kBlockGroups * kTileElements; }
    float *scales(int64_t panel) const { return job.scales + panel * kBlockGroups * kGroupScales; }
    float *sums(int64_t pair, int64_t row_tile) const { return job.sums + (pair * job.n_row_tiles + row_tile) * kTileRows * kSumStride; }

    void decode() const {
        for (int64_t p = 0; p < n_pairs; ++p)
            for (int i = 0; i < pairs[p].n_panels(); ++i) {
                const PanelPair::Panel &panel = pairs[p].panel[i];
                Kind kind = kind_of(panel.format);
                for (int64_t g = begin; g < end; ++g)
                    kind.decode(panel.data, *panel.shape, g, tiles(2 * p + i) + (g - begin) * kind.n_parts * kTileElements, scales(2 * p + i) + (g - begin) * kGroupScales);
            }
    }

    void multiply(int64_t p, int i, int64_t t) const {
        const PanelPair::Panel &panel = pairs[p].panel[i];
        Kind kind = kind_of(panel.format);
        int64_t x_tile = (job.first_row_tile + t) * job.n_tiles + begin;
        float *total = sums(p, t) + i * kPanelRows;
        if (begin == 0) clear_sums(total);
        kind.run({job.x_codes + x_tile * 2 * kTileElements, job.x_sums + x_tile * kGroupSums, tiles(2 * p + i), scales(2 * p + i)}, end - begin, total);
        if (end == job.n_tiles) apply_factor(kind, panel, total);
    }

    // Asks for the p-th share of what row tile `t` brings: it comes from far away and is needed at once.
    void prefetch_x(int64_t t, int64_t p) const {
        if (t >= job.n_row_tiles) return;
        int64_t x_tile = (job.first_row_tile + t) * job.n_tiles + begin, n_lines = (end - begin) * 2 * kTileBytes / 64, n_sum_lines = (end - begin) * kGroupSums * 4 / 64;
        const auto *codes = reinterpret_cast<const char *>(job.x_codes + x_tile * 2 * kTileElements), *sums_at = reinterpret_cast<const char *>(job.x_sums + x_tile * kGroupSums);
        for (int64_t i = p * n_lines / n_pairs; i < (p + 1) * n_lines / n_pairs; ++i) _mm_prefetch(codes + 64 * i, _MM_HINT_T1);
        for (int64_t i = p * n_sum_lines / n_pairs; i < (p + 1) * n_sum_lines / n_pairs; ++i) _mm_prefetch(sums_at + 64 * i, _MM_HINT_T1);
    }

    void run() const {
        decode();
        for (int64_t t = 0; t < job.n_row_tiles; ++t)
            for (int64_t p = 0; p < n_pairs; ++p) {
                prefetch_x(t + 1, p);
                for (int i = 0; i < pairs[p].n_panels(); ++i) multiply(p, i, t);
                int64_t row = (job.first_row_tile + t) * kTileRows, left = job.n_rows - row;
                if (end == job.n_tiles) finish_pair(pairs[p], row, left < kTileRows ? left : kTileRows, sums(p, t));
            }
    }
};

}  // namespace

void pack_code_tiles_amx(const float *x, int64_t stride, int64_t cols, int64_t n_rows, uint16_t *codes, float *sums) {
    pack_code_tiles(x, stride, cols, n_rows, codes, sums);
}

void run_code_pairs_amx(const TileJob &job, const PanelPair *pairs, int64_t n_pairs) {
    configure_tiles();
    for (int64_t p = 0; p < n_pairs; p += job.in_turn)
        for (int64_t begin = 0; begin < job.n_tiles; begin += kBlockGroups) {
                int64_t end = begin + kBlockGroups < job.n_tiles ? begin + kBlockGroups : job.n_tiles;
            Piece{job, pairs + p, n_pairs - p < job.in_turn ? n_pairs - p : job.in_turn, begin, end}.run();
        }
    _tile_release();
}

}  // namespace pk
