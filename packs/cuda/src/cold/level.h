// Products of experts that lie in host memory as the device reads them, for one instruction level. For avx2.cpp and avx512.cpp only: everything lies in an anonymous namespace.
//
// Row-major formats (BF16, FP8): x in its own order. Block formats lie as include/format/unit.cuh says: a line of 64 bytes holds, for rows r and
// r + 8 of the tile, what four lanes of a warp read. x is prepared so that a line is multiplied with neighbours:
//   Q8_0: per block of 32, for each lane c: x of its eight elements in the order of the bytes, twice (rows r and r + 8);
//   4-bit codes: per two blocks of 32, for each nibble: x of that nibble in the 16 words of a line (lane c, block, row), and then of each word
//   the sum over its first and over its last four elements.
// A tile is read from its begin to its end, as the processor likes to fetch it.
#pragma once
#include "vectors.h"

namespace pk {
namespace {

// Bytes ahead of what is read that are asked for: a tile is too short for the processor to find its way by itself.
constexpr int kAheadBytes = 4096;
inline void ask_ahead(const uint8_t *p) { _mm_prefetch(reinterpret_cast<const char *>(p) + kAheadBytes, _MM_HINT_T0); }

template <int kFormat, int kN>
void multiply_plain(const ColdMatrix &m, int32_t tile, const float *const *x, float (*out)[kColdTile]) {
    constexpr int kElement = kFormat == PK_BF16 ? 2 : 1;
    const int64_t padded = m.row_bytes / kElement, span = m.block_scales ? 128 : padded;
    for (int r = 0; r < kColdTile; ++r) {
        const uint8_t *row = m.data + (int64_t{tile} * kColdTile + r) * m.row_bytes;
        const float *scales = m.block_scales ? m.block_scales + (tile * kColdTile + r) / 128 * m.block_stride : nullptr;
        Floats sum[kN];
        for (Floats &s : sum) s = zero();
        for (int64_t k0 = 0; k0 < padded; k0 += span) {
            Floats part[2][kN];
            for (auto &each : part)
                for (Floats &s : each) s = zero();
            for (int64_t k = k0; k < k0 + span && k < padded; k += 64) {
                ask_ahead(row + k * kElement);
                if (kElement == 2) ask_ahead(row + k * kElement + 64);
                for (int half = 0; half < 2; ++half)
                    for (int i = 0; i < kN; ++i) part[half][i] = dot_plain<kFormat>(row + (k + 32 * half) * kElement, reinterpret_cast<const float *>(reinterpret_cast<const uint8_t *>(x[i]) + (k + 32 * half) * kXBytes), part[half][i]);
            }
            const Floats scale = splat(scales ? scales[k0 / 128] : 1.0f);
            for (int i = 0; i < kN; ++i) sum[i] = add_product(scale, plus(part[0][i], part[1][i]), sum[i]);
        }
        for (int i = 0; i < kN; ++i) out[i][r] = sum_of(sum[i]) * (kFormat == PK_BF16 ? 1.0f : kE4m3Factor);
    }
}

// Block formats: elements and bytes of a unit, and of its two planes.
struct CodedUnit {
    int32_t elements, bytes, low_bytes, high_bytes;
};
constexpr CodedUnit coded_unit(int32_t format) {
    switch (format) {
        case PK_Q8_0: return {128, 2048 + 128, 2048, 0};
        case PK_Q4_K: return {256, 2048 + 256 + 64, 2048, 0};
        default: return {256, 2048 + 1024 + 256 + 32, 2048, 1024};  // Q6_K
    }
}

// Sums of rows r and r + 8 of a tile, lane by lane.
template <int kN>
struct Sums {
    Floats at[8][kN];

    Sums() {
        for (auto &each : at)
            for (Floats &s : each) s = zero();
    }
    // Lanes whose bit `row_bit` is set belong to row r + 8.
    void finish(int row_bit, float (*out)[kColdTile]) const {
        for (int r = 0; r < 8; ++r)
            for (int i = 0; i < kN; ++i) {
                float lanes[16], s[2] = {};
                store(lanes, at[r][i]);
                for (int lane = 0; lane < 16; ++lane) s[lane >> row_bit & 1] += lanes[lane];
                out[i][r] = s[0];
                out[i][r + 8] = s[1];
            }
    }
};

template <int kN>
void multiply_q8_0(const ColdMatrix &m, int32_t tile, const float *const *x, float (*out)[kColdTile]) {
    constexpr CodedUnit kUnit = coded_unit(PK_Q8_0);
    Sums<kN> sums;
    for (int64_t u = 0; u < m.n_units; ++u) {
        const uint8_t *unit = m.data + (tile * m.n_units + u) * kUnit.bytes;
        for (int b = 0; b < 4; ++b)
            for (int r = 0; r < 8; ++r) {
                const uint8_t *line = unit + 512 * b + 64 * r, *scales = unit + kUnit.low_bytes + 16 * r + 2 * b;
                ask_ahead(line);
                Floats part[kN];
                for (Floats &p : part) p = zero();
                for (int c = 0; c < 4; ++c) {
                    const Floats w = from_signed(line + 16 * c);
                    for (int i = 0; i < kN; ++i) part[i] = add_product(w, floats_at(x[i] + ((4 * u + b) * 4 + c) * 16), part[i]);
                }
                const Floats scale = joined(_mm256_set1_ps(half_to_float(scales)), _mm256_set1_ps(half_to_float(scales + 8)));
                for (int i = 0; i < kN; ++i) sums.at[r][i] = add_product(scale, part[i], sums.at[r][i]);
            }
    }
    sums.finish(3, out);
}

constexpr int64_t kPairFloats = kPairWords + 2 * 16;  // prepared x of two blocks of 4-bit codes

template <int kN>
void multiply_q4_k(const ColdMatrix &m, int32_t tile, const float *const *x, float (*out)[kColdTile]) {
    constexpr CodedUnit kUnit = coded_unit(PK_Q4_K);
    Sums<kN> sums;
    for (int64_t u = 0; u < m.n_units; ++u) {
        const uint8_t *unit = m.data + (tile * m.n_units + u) * kUnit.bytes;
        // Of row r block after block, each for rows r and r + 8; what a sum of x counts against it, the bias of codes among it.
        float scales[8][16], less[8][16];
        for (int r = 0; r < 8; ++r) {
            const uint8_t *bytes = unit + kUnit.low_bytes + 32 * r, *factor = unit + kUnit.low_bytes + 256 + 8 * r;
            const __m128i near = load<__m128i>(bytes), far = load<__m128i>(bytes + 16);
            const Floats scale = times(alternating(half_to_float(factor), half_to_float(factor + 4)), from_unsigned(_mm_unpacklo_epi8(near, far)));
            const Floats least = times(alternating(half_to_float(factor + 2), half_to_float(factor + 6)), from_unsigned(_mm_unpackhi_epi8(near, far)));
            store(scales[r], scale);
            store(less[r], add_product(splat(kCodeBias), scale, least));
        }
        for (int p = 0; p < 4; ++p) {
            PairX pair[kN];
            Floats x_sum[kN];
            for (int n = 0; n < kN; ++n) {
                const float *at = x[n] + (4 * u + p) * kPairFloats;
                pair[n] = pair_x(at);
                x_sum[n] = plus(floats_at(at + kPairWords), floats_at(at + kPairWords + 16));
            }
            for (int r = 0; r < 8; ++r) {
                const uint8_t *line = unit + 512 * p + 64 * r;
                ask_ahead(line);
                const Words w = words_at(line);
                const Floats scale = four_times(scales[r] + 4 * p), minus = four_times(less[r] + 4 * p);
                for (int n = 0; n < kN; ++n) {
                    const Floats part = dot_nibbles<3>(w, pair[n], dot_nibbles<2>(w, pair[n], dot_nibbles<1>(w, pair[n], dot_nibbles<0>(w, pair[n], zero()))));
                    sums.at[r][n] = subtract_product(minus, x_sum[n], add_product(scale, part, sums.at[r][n]));
                }
            }
        }
    }
    sums.finish(0, out);
}

template <int kN>
void multiply_q6_k(const ColdMatrix &m, int32_t tile, const float *const *x, float (*out)[kColdTile]) {
    constexpr CodedUnit kUnit = coded_unit(PK_Q6_K);
    Sums<kN> sums;
    for (int64_t u = 0; u < m.n_units; ++u) {
        const uint8_t *unit = m.data + (tile * m.n_units + u) * kUnit.bytes;
        // Of row r group after group, each for rows r and r + 8.
        float scales[8][32];
        for (int r = 0; r < 8; ++r) {
            const uint8_t *bytes = unit + kUnit.low_bytes + kUnit.high_bytes + 32 * r, *factor = unit + kUnit.low_bytes + kUnit.high_bytes + 256 + 4 * r;
            const Floats d = alternating(half_to_float(factor), half_to_float(factor + 2)), zeros = times(d, splat(-128.0f));
            const __m128i near = load<__m128i>(bytes), far = load<__m128i>(bytes + 16);
            store(scales[r], add_product(d, from_unsigned(_mm_unpacklo_epi8(near, far)), zeros));
            store(scales[r] + 16, add_product(d, from_unsigned(_mm_unpackhi_epi8(near, far)), zeros));
        }
        for (int p = 0; p < 4; ++p) {
            PairX pair[kN];
            Floats less[2][kN];
            for (int n = 0; n < kN; ++n) {
                const float *at = x[n] + (4 * u + p) * kPairFloats;
                pair[n] = pair_x(at);
                for (int i = 0; i < 2; ++i) less[i][n] = times(splat(-32.0f - kCodeBias), floats_at(at + kPairWords + 16 * i));
            }
            for (int r = 0; r < 8; ++r) {
                const uint8_t *line = unit + 512 * p + 64 * r, *high = unit + kUnit.low_bytes + 64 * r;
                ask_ahead(line);
                if (p < 2) ask_ahead(high + 512 * p);
                const Words w = words_at(line), h = high_words(high, high + 512, p);
                const Floats first = pairs_of(scales[r] + 8 * p), last = pairs_of(scales[r] + 8 * p + 2);
                for (int n = 0; n < kN; ++n) {
                    sums.at[r][n] = add_product(first, dot_six_bits<1>(w, h, pair[n], dot_six_bits<0>(w, h, pair[n], less[0][n])), sums.at[r][n]);
                    sums.at[r][n] = add_product(last, dot_six_bits<3>(w, h, pair[n], dot_six_bits<2>(w, h, pair[n], less[1][n])), sums.at[r][n]);
                }
            }
        }
    }
    sums.finish(0, out);
}

template <int kN>
void multiply_rows(const ColdMatrix &m, int32_t tile, const float *const *x, float (*out)[kColdTile]) {
    switch (m.format) {
        case PK_BF16: multiply_plain<PK_BF16, kN>(m, tile, x, out); break;
        case PK_FP8_E4M3: multiply_plain<PK_FP8_E4M3, kN>(m, tile, x, out); break;
        case PK_Q8_0: multiply_q8_0<kN>(m, tile, x, out); break;
        case PK_Q4_K: multiply_q4_k<kN>(m, tile, x, out); break;
        default: multiply_q6_k<kN>(m, tile, x, out); break;
    }
    for (int i = 0; i < kN; ++i)
        for (int r = 0; r < kColdTile; ++r) {
            const int32_t row = tile * kColdTile + r;
            out[i][r] = row < m.rows ? out[i][r] * m.scale * (m.row_scales ? m.row_scales[row] : 1.0f) : 0.0f;
        }
}

void multiply(const ColdMatrix &m, int32_t tile, const float *const *x, int32_t n, float (*out)[kColdTile]) {
    switch (n) {
        case 1: return multiply_rows<1>(m, tile, x, out);
        case 2: return multiply_rows<2>(m, tile, x, out);
        case 3: return multiply_rows<3>(m, tile, x, out);
        default: return multiply_rows<4>(m, tile, x, out);
    }
}

void prepare(int32_t format, const uint16_t *x, int32_t cols, float *out) {
    auto at = [&](int64_t k) {
        const uint32_t bits = k < cols ? uint32_t{x[k]} << 16 : 0;
        float v;
        __builtin_memcpy(&v, &bits, 4);
        return v;
    };
    if (format == PK_BF16 || format == PK_FP8_E4M3) {
        const int64_t padded = cold_floats(format, cols), whole = cols / 16 * 16;
        for (int64_t k = 0; k < whole; k += 16) prepare_plain(out, k, x + k);
        for (int64_t k = whole; k < padded; k += 16) {
            uint16_t last[16] = {};
            for (int i = 0; i < 16 && k + i < cols; ++i) last[i] = x[k + i];
            prepare_plain(out, k, last);
        }
        return;
    }
    const int64_t unit = coded_unit(format).elements, padded = (cols + unit - 1) / unit * unit;
    if (format == PK_Q8_0) {
        static constexpr int kOrder[8] = {0, 2, 1, 3, 16, 18, 17, 19};
        for (int64_t b = 0; b < padded / 32; ++b)
            for (int c = 0; c < 4; ++c)
                for (int j = 0; j < 8; ++j) out[(4 * b + c) * 16 + j] = out[(4 * b + c) * 16 + 8 + j] = at(32 * b + 4 * c + kOrder[j]);
        return;
    }
    for (int64_t p = 0; p < padded / 64; ++p) {
        float *to = out + p * kPairFloats;
        for (int word = 0; word < 16; ++word) {
            const int64_t k = 64 * p + 32 * (word >> 1 & 1) + 4 * (word >> 2);
            for (int half = 0; half < 2; ++half) {
                float sum = 0.0f;
                for (int j = 0; j < 4; ++j) {
                    const float v = at(k + 16 * half + j);
                    prepare_word(to, 4 * half + j, word, v);
                    sum += v;
                }
                to[kPairWords + 16 * half + word] = sum;
            }
        }
    }
}

}  // namespace
}  // namespace pk
