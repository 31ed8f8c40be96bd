// Products of many rows with AMX: panels become bf16 tiles block by block, activations once, sums stay in f32 tiles.
//
// C[32 rows, 32 weight rows] += A0/A1 [16, 32] x B0/B1 [32, 16]: four products per four tile loads. A block of kBlockTiles
// tiles along K of two panels is decoded into the thread's scratch (L1/L2) and used for every row of the job.
// f16 and f32 weights and their activations are split into two bf16 each, and three of the four products are summed.
#include "matmul_amx.h"

#include "format/codec.h"
#include "matmul_kernels.h"

namespace pk {
namespace {

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileElements = kTileBytes / 2;

// Values are cut to bf16, not rounded; this factor takes the mean of the error away (for mantissas spread evenly in the
// logarithm) and leaves values alone that bf16 can hold.
constexpr float kCutFactor = 1.0f + 0.6667f / 256.0f;

// Pairs (even, odd) of columns as bf16, cut.
inline __m512i pair_bits(vf even, vf odd) {
    return _mm512_ternarylogic_epi32(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd), _mm512_set1_epi32(static_cast<int>(0xFFFF0000)), 0xF8);
}

inline vf cut(vf x) { return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(0xFFFF0000)))); }

inline void store_row(uint16_t *tile, int64_t row, __m512i pairs) { _mm512_store_si512(tile + row * 32, pairs); }

template <class C>
constexpr int64_t unit_bytes() {
    switch (C::kScale) {
        case Scale::kHalf: case Scale::kE4m3: return 32;
        case Scale::kHalfMin: return 64;
        case Scale::kK16: return 288;
        case Scale::kK32: return 160;
        case Scale::kE8m0: return 16;
        default: return 320;
    }
}

// Values of 4-bit codes, or of fewer bits wherever the bits above are zero or another code's.
template <class C>
inline vf value_table() {
    alignas(64) float values[16];
    for (int i = 0; i < 16; ++i) {
        int code = C::kLow == 2 && C::kHigh == 0 ? i & 3 : i;
        values[i] = static_cast<float>((C::kTable ? C::table()[code] : code) - C::kOffset);
    }
    return _mm512_load_ps(values);
}

// Four values per row, of byte kByte of every dword of `codes`: from a table when codes have at most four bits.
template <class C, int kShift>
inline __attribute__((always_inline)) vf value_at(__m512i codes, vf table) {
    constexpr int kBits = C::kLow + C::kHigh;
    __m512i at = kShift ? _mm512_srli_epi32(codes, kShift) : codes;
    if constexpr (kBits <= 4) return _mm512_permutexvar_ps(at, table);
    return _mm512_cvtepi32_ps(_mm512_and_si512(at, _mm512_set1_epi32(255)));
}

// One group of one panel as a tile of bf16.
template <class C>
inline __attribute__((always_inline)) void group_tile(const uint8_t *low, const uint8_t *high, const vf *d, const vf *m, vf table, uint16_t *tile) {
    constexpr bool kAdds = C::kHasMin || (C::kLow + C::kHigh > 4 && C::kOffset != 0);
    unrolled<8>([&](auto index) {
        constexpr int kQuad = decltype(index)::value, kSub = C::kFine && kQuad >= 4 ? 1 : 0;
        constexpr bool kRaw = C::kHigh == 0 && C::kLow <= 4;  // codes need no unpacking: the table looks at four bits only
        constexpr int kPerVector = 8 / C::kLow, kBase = kRaw ? C::kLow * (kQuad % kPerVector) : 0;
        __m512i codes;
        if constexpr (kRaw)
            codes = b_load(low + kQuad / kPerVector * 64);
        else
            codes = C::template quad<kQuad>(low, high);
        vf w[4] = {value_at<C, kBase>(codes, table), value_at<C, kBase + 8>(codes, table), value_at<C, kBase + 16>(codes, table), value_at<C, kBase + 24>(codes, table)};
        for (int j = 0; j < 4; ++j) w[j] = kAdds ? v_fma(w[j], d[kSub], m[kSub]) : v_mul(w[j], d[kSub]);
        store_row(tile, 2 * kQuad, pair_bits(w[0], w[1]));
        store_row(tile, 2 * kQuad + 1, pair_bits(w[2], w[3]));
    });
}

// Groups [begin, end) of a panel as tiles.
template <class C>
void coded_tiles(const uint8_t *panel, const PanelShape &shape, int64_t begin, int64_t end, uint16_t *out) {
    const vf table = value_table<C>();
    vf factor = v_set(kCutFactor);
    if constexpr (C::kHasFactor) factor = v_mul(factor, v_load(reinterpret_cast<const float *>(panel + shape.factor_offset)));
    for (int64_t g = begin; g < end; ++g) {
        vf d[2], m[2];
        C::scales(panel + shape.scale_offset + g / C::kGroupsPerUnit * unit_bytes<C>(), g % C::kGroupsPerUnit, 0, d, m);
        for (int i = 0; i < C::kScalesPerGroup; ++i) {
            d[i] = v_mul(d[i], factor);
            m[i] = C::kHasMin ? v_mul(m[i], factor) : v_mul(d[i], v_set(static_cast<float>(-C::kOffset)));
        }
        group_tile<C>(panel + g * 64 * C::kLow, panel + shape.high_offset + g * 64 * C::kHigh, d, m, table, out + (g - begin) * kTileElements);
    }
}

// The same of plain formats. With kSplit, tile after tile of upper parts is followed by as many of lower parts.
template <class P, bool kSplit>
void plain_tiles(const uint8_t *panel, const PanelShape &shape, int64_t begin, int64_t end, uint16_t *out) {
    uint16_t *lower = out + (end - begin) * kTileElements;
    for (int64_t pair = 16 * begin; pair < 16 * end; ++pair, out += 32, lower += 32) {
        vf even, odd;
        P::pair(panel, pair, 0, &even, &odd);
        if constexpr (P::kHasScale) {
            vf scale = v_mul(v_load(reinterpret_cast<const float *>(panel + shape.scale_offset) + 2 * pair / kFp8Block * kPanelRows), v_set(kCutFactor));
            even = v_mul(even, scale);
            odd = v_mul(odd, scale);
        }
        store_row(out, 0, pair_bits(even, odd));
        if constexpr (kSplit) store_row(lower, 0, pair_bits(v_sub(even, cut(even)), v_sub(odd, cut(odd))));
    }
}

using TilesOf = void (*)(const uint8_t *, const PanelShape &, int64_t, int64_t, uint16_t *);

TilesOf tiles_of(int32_t format) {
    switch (format) {
        case PK_F32: return plain_tiles<Plain<PK_F32>, true>;
        case PK_F16: return plain_tiles<Plain<PK_F16>, true>;
        case PK_FP8_E4M3: return plain_tiles<Plain<PK_FP8_E4M3>, false>;
        case PK_FP8_E5M2: return plain_tiles<Plain<PK_FP8_E5M2>, false>;
        case PK_Q8_0: return coded_tiles<CodecQ8_0>;
        case PK_Q4_0: return coded_tiles<CodecQ4_0>;
        case PK_Q4_1: return coded_tiles<CodecQ4_1>;
        case PK_Q5_0: return coded_tiles<CodecQ5_0>;
        case PK_Q5_1: return coded_tiles<CodecQ5_1>;
        case PK_Q2_K: return coded_tiles<CodecQ2_K>;
        case PK_Q3_K: return coded_tiles<CodecQ3_K>;
        case PK_Q4_K: return coded_tiles<CodecQ4_K>;
        case PK_Q5_K: return coded_tiles<CodecQ5_K>;
        case PK_Q6_K: return coded_tiles<CodecQ6_K>;
        case PK_IQ4_NL: return coded_tiles<CodecIQ4_NL>;
        case PK_IQ4_XS: return coded_tiles<CodecIQ4_XS>;
        case PK_MXFP4: return coded_tiles<CodecMXFP4>;
        case PK_NVFP4: return coded_tiles<CodecNVFP4>;
        default: return nullptr;
    }
}

// Rows [0, n_rows) of x, n_rows <= 16, as one row of tiles; the rest of them zero. lower: nullptr, or where x - bf16(x) goes.
void pack_tiles(const float *x, int64_t stride, int64_t cols, int64_t n_rows, uint16_t *out, uint16_t *lower) {
    for (int64_t r = 0; r < 16; ++r)
        for (int64_t k = 0; k < cols; k += 32) {
            vf parts[2] = {v_zero(), v_zero()};
            for (int i = 0; i < 2; ++i) {
                int64_t left = r < n_rows ? cols - k - 16 * i : 0;
                if (left > 0) parts[i] = left >= 16 ? v_load(x + r * stride + k + 16 * i) : v_load(x + r * stride + k + 16 * i, left);
            }
            int64_t at = k / 32 * kTileElements + r * 32;
            __m512i bits = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(parts[1], parts[0]));
            _mm512_store_si512(out + at, bits);
            if (!lower) continue;
            for (int i = 0; i < 2; ++i) {
                __m256i half = i ? _mm512_extracti64x4_epi64(bits, 1) : _mm512_castsi512_si256(bits);
                parts[i] = v_sub(parts[i], _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)));
            }
            _mm512_store_si512(lower + at, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(parts[1], parts[0])));
        }
}

void configure_tiles() {
    alignas(64) static constexpr uint8_t kConfig[64] = {1,  0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0,
                                                         0,  0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16};
    _tile_loadconfig(kConfig);
}

constexpr int64_t kSumStride = 32;  // floats from row to row of the sums of two panels

// Sums of 32 (or 16) rows and two panels over n tiles along K. a, b: first tiles; a1: the second sixteen rows.
template <bool kTwo>
inline __attribute__((always_inline)) void multiply(const uint16_t *a0, const uint16_t *a1, const uint16_t *b0, const uint16_t *b1, int64_t n) {
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

// All row tiles of the job against one block of two panels.
template <bool kTwo>
inline void multiply_rows(const TileJob &job, int64_t row_tile, int64_t begin, int64_t end, const uint16_t *const b[2], bool is_split, float *sums) {
    int64_t n = end - begin, from = (row_tile * job.n_tiles + begin) * kTileElements, next = job.n_tiles * kTileElements;
    if (begin == 0)
        zero_sums();
    else
        load_sums<kTwo>(sums);
    const uint16_t *a = job.x + from;
    multiply<kTwo>(a, a + next, b[0], b[1], n);
    if (is_split) {
        const uint16_t *lower = job.x_lower + from;
        multiply<kTwo>(lower, lower + next, b[0], b[1], n);
        multiply<kTwo>(a, a + next, b[0] + n * kTileElements, b[1] + n * kTileElements, n);
    }
    store_sums<kTwo>(sums);
}

bool is_split_format(int32_t format) { return format == PK_F16 || format == PK_F32; }

// Decodes a block of two panels into `tiles` and tells where each lies. True when b holds lower parts after the upper ones.
bool decode_pair(const TileJob &job, const PanelPair &pair, int64_t begin, int64_t end, uint16_t *tiles, const uint16_t *b[2]) {
    const bool is_split = is_split_format(pair.panel[0].format) || is_split_format(pair.panel[1].format);
    const int64_t n = (end - begin) * kTileElements;
    for (int i = 0; i < 2; ++i) {
        const PanelPair::Panel &panel = pair.panel[i];
        uint16_t *out = tiles + i * 2 * job.block_tiles * kTileElements;
        const auto *in_place = reinterpret_cast<const uint16_t *>(panel.data) + begin * kTileElements;
        b[i] = out;
        if (i == 1 && panel.data == pair.panel[0].data) {
            b[1] = b[0];
        } else if (panel.format == PK_BF16 && !is_split) {
            b[i] = in_place;
        } else {
            if (panel.format == PK_BF16)
                std::memcpy(out, in_place, n * 2);
            else
                tiles_of(panel.format)(panel.data, *panel.shape, begin, end, out);
            if (is_split && !is_split_format(panel.format)) std::memset(out + n, 0, n * 2);
        }
    }
    return is_split;
}

void run_pairs(const TileJob &job, const PanelPair *pairs, int64_t n_pairs, uint16_t *tiles, float *sums) {
    configure_tiles();
    const int64_t sums_of_pair = job.n_row_tiles * 16 * kSumStride;
    for (int64_t begin = 0; begin < job.n_tiles; begin += job.block_tiles) {
        int64_t end = begin + job.block_tiles < job.n_tiles ? begin + job.block_tiles : job.n_tiles;
        for (int64_t p = 0; p < n_pairs; ++p) {
            const uint16_t *b[2];
            bool is_split = decode_pair(job, pairs[p], begin, end, tiles, b);
            float *to = sums + p * sums_of_pair;
            int64_t t = 0;
            for (; t + 2 <= job.n_row_tiles; t += 2) multiply_rows<true>(job, job.first_row_tile + t, begin, end, b, is_split, to + t * 16 * kSumStride);
            if (t < job.n_row_tiles) multiply_rows<false>(job, job.first_row_tile + t, begin, end, b, is_split, to + t * 16 * kSumStride);
        }
    }
    _tile_release();
}

}  // namespace

const TileKernels &tile_kernels_amx() {
    static constexpr TileKernels kernels{pack_tiles, run_pairs};
    return kernels;
}

}  // namespace pk
