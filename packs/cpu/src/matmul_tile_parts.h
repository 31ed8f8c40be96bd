// What both AMX sources share: tile sizes, bf16 pairs, and what a pair of panels does at the end.
#pragma once
#include "format/codec.h"
#include "matmul_amx.h"
#include "matmul_finish.h"

namespace pk {
namespace {

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileElements = kTileBytes / 2;
constexpr int64_t kTileRows = 16;
constexpr int64_t kSumStride = 32;  // floats from row to row of the sums of two panels

// Pairs (even, odd) of columns as bf16, cut.
inline __m512i pair_bits(vf even, vf odd) {
    return _mm512_ternarylogic_epi32(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd), _mm512_set1_epi32(static_cast<int>(0xFFFF0000)), 0xF8);
}

inline vf cut(vf x) { return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(0xFFFF0000)))); }

inline void store_row(uint16_t *tile, int64_t row, __m512i pairs) { _mm512_store_si512(tile + row * 32, pairs); }

// Every tile register as 16 rows of 64 bytes. The compiler believes that the instruction reads eight bytes only: a
// configuration must be a constant in memory.
inline void configure_tiles() {
    alignas(64) static constexpr uint8_t kConfig[64] = {1,  0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0,
                                                         0,  0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16};
    _tile_loadconfig(kConfig);
}

inline void finish_pair(const PanelPair &pair, int64_t row, int64_t n_rows, const float *sums) {
    if (pair.is_gated) return finish_rows(pair.finish[0], row, n_rows, sums, sums + kPanelRows, kSumStride);
    for (int32_t i = 0; i < pair.n_finish; ++i) finish_rows(pair.finish[i], row, n_rows, sums + i * kPanelRows, nullptr, kSumStride);
}

}  // namespace
}  // namespace pk
