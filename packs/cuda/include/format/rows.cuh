// Row-major formats as tiles of 16 rows x kU elements: the same lane ownership as format/unit.cuh, 16 bytes a load.
//
// BF16, F16: kU 64; lane (r, c) holds elements 32b + 8c .. + 7 of block b. FP8: kU 128; block b is half of a run of 64:
// elements 64 (b / 2) + 16c + 8 (b % 2) .. + 7, in the order 0 2 1 3 4 6 5 7 in which bytes widen to pairs.
#pragma once
#include "../device.cuh"

namespace pk {

template <int kFormat>
struct Rows {
    static constexpr bool kIsFp8 = kFormat == PK_FP8_E4M3 || kFormat == PK_FP8_E5M2;
    static constexpr int kU = kIsFp8 ? 128 : 64;
    static constexpr int kElementBytes = kIsFp8 ? 1 : 2;
};

struct RowsRegisters {
    uint4 v[4];  // row * 2 + part
};

template <int kFormat>
__device__ __forceinline__ void load_rows(RowsRegisters &u, const uint8_t *tile, int64_t row_bytes, int unit, int lane) {
    const uint8_t *p = tile + (lane >> 2) * row_bytes + unit * 128 + 16 * (lane & 3);
    u.v[0] = load_stream(p);
    u.v[1] = load_stream(p + 64);
    u.v[2] = load_stream(p + 8 * row_bytes);
    u.v[3] = load_stream(p + 8 * row_bytes + 64);
}

__device__ __forceinline__ uint32_t row_word(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Eight values of block b as bf16 pairs. F16: kPart 0 gives the value rounded to bf16, kPart 1 what is left over.
template <int kFormat, int kPart>
__device__ __forceinline__ void rows_codes(const RowsRegisters &u, int b, int row, uint32_t (&out)[4]) {
    if constexpr (Rows<kFormat>::kIsFp8) {
        constexpr int kShift = kFormat == PK_FP8_E4M3 ? 4 : 5;
        const bf162 k = as_bf162(kFormat == PK_FP8_E4M3 ? 0x7b807b80u : 0x77807780u);
        const uint4 &v = u.v[row * 2 + b / 2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t w = row_word(v, (b & 1) * 2 + i);
            uint32_t even = ((w & 0x00800080u) << 8) | ((w & 0x007f007fu) << kShift);
            uint32_t odd = (w & 0x80008000u) | ((w & 0x7f007f00u) >> (8 - kShift));
            out[2 * i] = bits(__hmul2(as_bf162(even), k));
            out[2 * i + 1] = bits(__hmul2(as_bf162(odd), k));
        }
    } else {
        const uint4 &v = u.v[row * 2 + b];
        if constexpr (kFormat == PK_BF16) {
            out[0] = v.x; out[1] = v.y; out[2] = v.z; out[3] = v.w;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t w = row_word(v, i);
                float2 f = __half22float2(*reinterpret_cast<__half2 *>(&w));
                uint32_t near = pack_bf16(f.x, f.y);
                out[i] = kPart == 0 ? near : pack_bf16(f.x - low_f32(near), f.y - high_f32(near));
            }
        }
    }
}

}  // namespace pk
