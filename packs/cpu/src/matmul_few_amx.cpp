// Products of five to eight rows with coded weights, by AMX in whole numbers. Fewer rows are quicker with dot products
// (matmul_level.h), more of them with matmul_codes_amx.cpp; sums are the same.
//
// One tile of x holds 8 rows twice: rows 0-7 the high parts, rows 8-15 the low parts of their integers (matmul_codes.h).
// A group of a panel is a tile [8 quads][16 rows x 4 columns] of signed bytes. So one instruction gives both partial sums
// of 8 x 16 results, and I = 128 high + low is what the float sums go on with.
#include "matmul_few_amx.h"

#include "matmul_level.h"

namespace pk {
namespace {

constexpr int64_t kBlockGroups = kCodeBlock / kGroup;
constexpr int kFewRows = 8;

// 8 rows x 32 columns of x.
struct alignas(64) FewX {
    int8_t high[kFewRows][32];
    int8_t low[kFewRows][32];
    float sum[kFewRows];
    float half_sum[2][kFewRows];
    float scale[kFewRows];  // of the block of 256 columns
};
static_assert(sizeof(FewX) <= kFewRows * sizeof(CodedX));

void pack_few(const float *x, int64_t stride, int64_t cols, int64_t n_rows, FewX *out) {
    for (int64_t r = 0; r < kFewRows; ++r) {
        BlockScale scale{};
        for (int64_t k = 0; k < cols; k += kGroup) {
            FewX &to = out[k / kGroup];
            vi codes[kGroupVectors] = {};
            int32_t sums[2] = {0, 0};
            if (r < n_rows) {
                const float *from = x + r * stride + k;
                if (k % kCodeBlock == 0) scale = block_scale(from, cols - k < kCodeBlock ? cols - k : kCodeBlock);
                group_codes(from, cols - k, scale.inverse, codes);
                half_sums(codes, sums);
            }
            for (int i = 0; i < kGroupVectors; ++i) {
                vi low = low_part(codes[i]);
                vi_store_bytes(to.low[r] + i * kLanes, low);
                vi_store_bytes(to.high[r] + i * kLanes, vi_right<7>(vi_sub(codes[i], low)));
            }
            to.sum[r] = static_cast<float>(sums[0] + sums[1]);
            for (int i = 0; i < 2; ++i) to.half_sum[i][r] = static_cast<float>(sums[i]);
            to.scale[r] = scale.scale;
        }
    }
}

// Tiles 0 and 1: sums, 16 rows of 16 integers. 4: x. 6: codes. A tile has kColumns columns of x: a group, or half of it.
template <int kColumns>
void configure() {
    alignas(64) static constexpr uint8_t kConfig[64] = {1,  0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 64, 0, 0, 0, 0, 0, kColumns, 0, kColumns, 0, 64, 0, 64, 0,
                                                         0,  0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 0, 0, 16, 16, kColumns / 4, kColumns / 4};
    _tile_loadconfig(kConfig);
}

// A group's codes as signed bytes.
template <class C>
inline __attribute__((always_inline)) void decode_codes(const uint8_t *low, const uint8_t *high, int8_t *out) {
    unrolled<8>([&](auto index) {
        constexpr int kQuad = decltype(index)::value;
        __m512i codes = C::template quad<kQuad>(low, high);
        if constexpr (C::kOffset == 128) codes = _mm512_xor_si512(codes, b_set(0x80));
        if constexpr (C::kOffset != 128 && C::kOffset != 0) codes = _mm512_sub_epi8(codes, b_set(C::kOffset));
        _mm512_store_si512(out + 64 * kQuad, codes);
    });
}

inline __attribute__((always_inline)) void multiply_even(const int8_t *x, const int8_t *w, int32_t *out) {
    _tile_zero(0);
    _tile_loadd(6, w, 64);
    _tile_loadd(4, x, 32);
    _tile_dpbssd(0, 4, 6);
    _tile_stored(0, out, 64);
}

inline __attribute__((always_inline)) void multiply_odd(const int8_t *x, const int8_t *w, int32_t *out) {
    _tile_zero(1);
    _tile_loadd(7, w, 64);
    _tile_loadd(5, x, 32);
    _tile_dpbssd(1, 5, 7);
    _tile_stored(1, out, 64);
}

template <class C>
void few_panel(const uint8_t *panel, const PanelShape &shape, const void *x_block, float *out) {
    constexpr int kSubs = C::kScalesPerGroup;
    constexpr int64_t kProducts = 16 * 16;
    alignas(64) int8_t codes[kBlockGroups * 512];
    alignas(64) int32_t products[kBlockGroups * kSubs * kProducts];
    configure<32 / kSubs>();
    const auto *x = static_cast<const FewX *>(x_block);
    Cursor at{panel, panel + shape.high_offset, panel + shape.scale_offset, 0};
    vf total[kFewRows];
    for (int r = 0; r < kFewRows; ++r) total[r] = v_zero();
    for (int64_t begin = 0; begin < shape.n_groups; begin += kBlockGroups, x += kBlockGroups) {
        const int64_t n = shape.n_groups - begin < kBlockGroups ? shape.n_groups - begin : kBlockGroups;
        for (int64_t g = 0; g < n; ++g) {
            prefetch_group<C>(shape, at.low, at.high, panel + shape.scale_offset, begin + g);
            decode_codes<C>(at.low, at.high, codes + g * 512);
            at.low += 64 * C::kLow;
            at.high += 64 * C::kHigh;
        }
        for (int64_t g = 0; g < n; ++g) {
            if constexpr (kSubs == 2) {
                multiply_even(x[g].high[0], codes + g * 512, products + 2 * g * kProducts);
                multiply_odd(x[g].high[0] + 16, codes + g * 512 + 256, products + (2 * g + 1) * kProducts);
            } else {
                if (g % 2)
                    multiply_odd(x[g].high[0], codes + g * 512, products + g * kProducts);
                else
                    multiply_even(x[g].high[0], codes + g * 512, products + g * kProducts);
            }
        }
        vf sums[kFewRows];
        for (int r = 0; r < kFewRows; ++r) sums[r] = v_zero();
        for (int64_t g = 0; g < n; ++g) {
            vf d[2], m[2];
            C::scales(at.unit, g, 0, d, m);
            if constexpr (C::kGroupsPerUnit == 1) at.unit += C::kUnitBytes;
            for (int s = 0; s < kSubs; ++s) {
                const int32_t *high = products + (g * kSubs + s) * kProducts, *low = high + kProducts / 2;
                const float *x_sums = kSubs == 2 ? x[g].half_sum[s] : x[g].sum;
                for (int r = 0; r < kFewRows; ++r) sums[r] = add_group<C>(sums[r], b_load(high + 16 * r), b_load(low + 16 * r), x_sums[r], d[s], m[s]);
            }
        }
        if constexpr (C::kGroupsPerUnit > 1) at.unit += C::kUnitBytes;
        for (int r = 0; r < kFewRows; ++r) total[r] = v_fma(sums[r], v_set(x[0].scale[r]), total[r]);
    }
    _tile_release();
    vf factor = C::kHasFactor ? v_load(reinterpret_cast<const float *>(panel + shape.factor_offset)) : v_set(1.0f);
    for (int r = 0; r < kFewRows; ++r) v_store(out + kPanelRows * r, C::kHasFactor ? v_mul(total[r], factor) : total[r]);
}

}  // namespace

void pack_few_amx(const float *x, int64_t stride, int64_t cols, int64_t n_rows, void *out) { pack_few(x, stride, cols, n_rows, static_cast<FewX *>(out)); }

PanelKernel few_panel_amx(int32_t format) {
    switch (format) {
        case PK_Q8_0: return few_panel<CodecQ8_0>;
        case PK_Q4_0: return few_panel<CodecQ4_0>;
        case PK_Q4_1: return few_panel<CodecQ4_1>;
        case PK_Q4_Z: return few_panel<CodecQ4_Z>;
        case PK_Q5_0: return few_panel<CodecQ5_0>;
        case PK_Q5_1: return few_panel<CodecQ5_1>;
        case PK_Q2_K: return few_panel<CodecQ2_K>;
        case PK_Q3_K: return few_panel<CodecQ3_K>;
        case PK_Q4_K: return few_panel<CodecQ4_K>;
        case PK_Q5_K: return few_panel<CodecQ5_K>;
        case PK_Q6_K: return few_panel<CodecQ6_K>;
        case PK_IQ4_NL: return few_panel<CodecIQ4_NL>;
        case PK_IQ4_XS: return few_panel<CodecIQ4_XS>;
        case PK_MXFP4: return few_panel<CodecMXFP4>;
        case PK_NVFP4: return few_panel<CodecNVFP4>;
        default: return nullptr;
    }
}

}  // namespace pk
