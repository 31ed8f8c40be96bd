// The packed layouts as a table, and their scalar reading and writing.
#include "layout.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "../../../pack.h"

namespace pk {

// Source: ggml/src/ggml-common.h, kvalues_iq4nl.
const uint8_t kIq4Table[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
// Source: OCP Microscaling Formats (MX) v1.0, 5.3.3.
const uint8_t kE2m1Table[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

namespace {

constexpr Layout kLayouts[] = {
    {PK_F32, 0, 0, Scale::kNone, 32, 0, 0, nullptr, 4},
    {PK_F16, 0, 0, Scale::kNone, 32, 0, 0, nullptr, 2},
    {PK_BF16, 0, 0, Scale::kNone, 32, 0, 0, nullptr, 2},
    {PK_FP8_E4M3, 0, 0, Scale::kNone, 128, 64, 0, nullptr, 1},
    {PK_FP8_E5M2, 0, 0, Scale::kNone, 128, 64, 0, nullptr, 1},
    {PK_Q8_0, 8, 0, Scale::kHalf, 32, 32, 128, nullptr, 0},
    {PK_Q4_0, 4, 0, Scale::kHalf, 32, 32, 8, nullptr, 0},
    {PK_Q4_1, 4, 0, Scale::kHalfMin, 32, 64, 0, nullptr, 0},
    {PK_Q4_Z, 4, 0, Scale::kHalfZero, 32, 48, 0, nullptr, 0},
    {PK_Q5_0, 4, 1, Scale::kHalf, 32, 32, 16, nullptr, 0},
    {PK_Q5_1, 4, 1, Scale::kHalfMin, 32, 64, 0, nullptr, 0},
    {PK_Q2_K, 2, 0, Scale::kK2, 256, 320, 0, nullptr, 0},
    {PK_Q3_K, 2, 1, Scale::kK16, 256, 288, 4, nullptr, 0},
    {PK_Q4_K, 4, 0, Scale::kK4, 256, 320, 0, nullptr, 0},
    {PK_Q5_K, 4, 1, Scale::kK4, 256, 320, 0, nullptr, 0},
    {PK_Q6_K, 4, 2, Scale::kK16, 256, 288, 32, nullptr, 0},
    {PK_IQ4_NL, 4, 0, Scale::kHalf, 32, 32, 128, kIq4Table, 0},
    {PK_IQ4_XS, 4, 0, Scale::kK32, 256, 160, 128, kIq4Table, 0},
    {PK_MXFP4, 4, 0, Scale::kE8m0, 32, 16, 16, kE2m1Table, 0},
    {PK_NVFP4, 4, 0, Scale::kE4m3, 32, 32, 16, kE2m1Table, 0},
};

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

uint16_t load16(const uint8_t *p) {
    uint16_t x;
    std::memcpy(&x, p, 2);
    return x;
}

void store16(uint8_t *p, uint16_t x) { std::memcpy(p, &x, 2); }

// out[i] |= the field of kWidth bits in plane after plane of each group of bytes, kUp bits up: see formats/arrays.py, bit_planes.
template <int kWidth, int kGroupBytes, int kUp = 0>
void add_planes(const uint8_t *packed, int64_t n_bytes, uint8_t *out) {
    for (int64_t base = 0; base < n_bytes; base += kGroupBytes)
        for (int shift = 0; shift < 8; shift += kWidth, out += kGroupBytes)
            for (int i = 0; i < kGroupBytes; ++i) out[i] |= static_cast<uint8_t>((packed[base + i] >> shift & ((1 << kWidth) - 1)) << kUp);
}

// Scales and minima of q4_k and q5_k. Source: ggml-quants.c, get_scale_min_k4.
void unpack_k4_scales(const uint8_t *packed, Unit *out) {
    for (int i = 0; i < 4; ++i) {
        out->scale[i] = packed[i] & 63;
        out->min[i] = packed[4 + i] & 63;
        out->scale[4 + i] = static_cast<uint8_t>((packed[8 + i] & 15) | (packed[i] >> 6 << 4));
        out->min[4 + i] = static_cast<uint8_t>((packed[8 + i] >> 4) | (packed[4 + i] >> 6 << 4));
    }
}

void unpack_k16_scales(const uint8_t *packed, Unit *out) {
    uint8_t low[16] = {}, high[16] = {};
    add_planes<4, 8>(packed, 8, low);
    add_planes<2, 4, 4>(packed + 8, 4, high);
    for (int i = 0; i < 16; ++i) out->scale[i] = static_cast<uint8_t>((low[i] | high[i]) - 32);
}

void unpack_xs_scales(const uint8_t *packed, Unit *out) {
    uint16_t high = load16(packed);
    for (int i = 0; i < 8; ++i) {
        int low = packed[2 + i / 2] >> (4 * (i % 2)) & 15;
        out->scale[i] = static_cast<uint8_t>((low | (high >> (2 * i) & 3) << 4) - 32);
    }
}

void fifth_bits(const uint8_t *word, uint8_t *code) {
    for (int i = 0; i < 32; ++i) code[i] |= static_cast<uint8_t>((word[i / 8] >> (i % 8) & 1) << 4);
}

}  // namespace

const Layout *find_layout(int32_t format) {
    for (const Layout &layout : kLayouts)
        if (layout.format == format) return &layout;
    return nullptr;
}

PanelShape panel_shape(const Layout &layout, int64_t cols) {
    PanelShape shape{};
    shape.k = cols;
    shape.n_groups = (cols + kGroup - 1) / kGroup;
    int64_t n_units = (cols + layout.unit - 1) / layout.unit;
    int64_t elements = shape.n_groups * kGroup * kPanelRows;
    if (layout.scale == Scale::kNone) {
        shape.high_offset = shape.scale_offset = elements * layout.element_bytes;
    } else {
        shape.high_offset = elements * layout.low_bits / 8;
        shape.scale_offset = shape.high_offset + elements * layout.high_bits / 8;
    }
    shape.factor_offset = round_up(shape.scale_offset + n_units * layout.scale_bytes, 64);
    shape.panel_bytes = shape.factor_offset + (layout.scale == Scale::kE4m3 ? 64 : 0);
    return shape;
}

const uint8_t *source_unit(const Layout &layout, const uint8_t *row, int64_t i, int64_t *half) {
    *half = 0;
    switch (layout.format) {
        case PK_Q8_0: return row + 34 * i;
        case PK_Q4_0: case PK_IQ4_NL: return row + 18 * i;
        case PK_Q4_1: case PK_Q4_Z: return row + 20 * i;
        case PK_Q5_0: return row + 22 * i;
        case PK_Q5_1: return row + 24 * i;
        case PK_Q2_K: return row + 84 * i;
        case PK_Q3_K: return row + 110 * i;
        case PK_Q4_K: return row + 144 * i;
        case PK_Q5_K: return row + 176 * i;
        case PK_Q6_K: return row + 210 * i;
        case PK_IQ4_XS: return row + 136 * i;
        case PK_MXFP4: return row + 17 * i;
        case PK_NVFP4: *half = i % 2; return row + 36 * (i / 2);
        default: return nullptr;
    }
}

// Source of every block layout: ggml/src/ggml-common.h; decoding as in ggml-quants.c.
void unpack_unit(const Layout &layout, const uint8_t *b, int64_t half, Unit *out) {
    std::memset(out, 0, sizeof *out);
    out->d = load16(b);
    switch (layout.format) {
        case PK_Q8_0:
            for (int i = 0; i < 32; ++i) out->code[i] = b[2 + i] ^ 0x80;
            break;
        case PK_Q4_0: case PK_IQ4_NL: add_planes<4, 16>(b + 2, 16, out->code); break;
        case PK_Q4_1:
            out->dmin = load16(b + 2);
            add_planes<4, 16>(b + 4, 16, out->code);
            break;
        case PK_Q4_Z:
            out->scale[0] = b[2];
            add_planes<4, 16>(b + 4, 16, out->code);
            break;
        case PK_Q5_0:
            add_planes<4, 16>(b + 6, 16, out->code);
            fifth_bits(b + 2, out->code);
            break;
        case PK_Q5_1:
            out->dmin = load16(b + 2);
            add_planes<4, 16>(b + 8, 16, out->code);
            fifth_bits(b + 4, out->code);
            break;
        case PK_Q2_K:
            out->d = load16(b + 80);
            out->dmin = load16(b + 82);
            std::memcpy(out->scale, b, 16);
            add_planes<2, 32>(b + 16, 64, out->code);
            break;
        case PK_Q3_K:
            out->d = load16(b + 108);
            unpack_k16_scales(b + 96, out);
            add_planes<2, 32>(b + 32, 64, out->code);
            add_planes<1, 32, 2>(b, 32, out->code);
            break;
        case PK_Q4_K: case PK_Q5_K:
            out->dmin = load16(b + 2);
            unpack_k4_scales(b + 4, out);
            add_planes<4, 32>(b + (layout.format == PK_Q4_K ? 16 : 48), 128, out->code);
            if (layout.format == PK_Q5_K) add_planes<1, 32, 4>(b + 16, 32, out->code);
            break;
        case PK_Q6_K:
            out->d = load16(b + 208);
            std::memcpy(out->scale, b + 192, 16);
            add_planes<4, 64>(b, 128, out->code);
            add_planes<2, 32, 4>(b + 128, 64, out->code);
            break;
        case PK_IQ4_XS:
            unpack_xs_scales(b + 2, out);
            for (int i = 0; i < 8; ++i) add_planes<4, 16>(b + 8 + 16 * i, 16, out->code + 32 * i);
            break;
        case PK_MXFP4:
            out->d = b[0];
            add_planes<4, 16>(b + 1, 16, out->code);
            break;
        case PK_NVFP4:
            for (int i = 0; i < 2; ++i) {
                out->scale[i] = b[2 * half + i];
                add_planes<4, 8>(b + 4 + 8 * (2 * half + i), 8, out->code + 16 * i);
            }
            break;
        default: break;
    }
}

void unit_to_f32(const Layout &layout, const Unit &unit, float *out) {
    float v[256];
    for (int i = 0; i < layout.unit; ++i)
        v[i] = static_cast<float>((layout.table ? layout.table[unit.code[i] & 15] : unit.code[i]) - layout.offset);
    float d = f16_to_f32_exact(unit.d), dmin = f16_to_f32_exact(unit.dmin);
    switch (layout.scale) {
        case Scale::kHalf:
            for (int i = 0; i < 32; ++i) out[i] = d * v[i];
            break;
        case Scale::kHalfMin:
            for (int i = 0; i < 32; ++i) out[i] = d * v[i] + dmin;
            break;
        case Scale::kHalfZero:
            for (int i = 0; i < 32; ++i) out[i] = d * (v[i] - unit.scale[0]);
            break;
        case Scale::kK4: case Scale::kK2: {
            bool fine = layout.scale == Scale::kK2;
            int group = fine ? 16 : 32;
            for (int g = 0; g < 256 / group; ++g) {
                float s = d * static_cast<float>(fine ? unit.scale[g] & 15 : unit.scale[g]);
                float m = dmin * static_cast<float>(fine ? unit.scale[g] >> 4 : unit.min[g]);
                for (int i = g * group; i < (g + 1) * group; ++i) out[i] = s * v[i] - m;
            }
            break;
        }
        case Scale::kK16: case Scale::kK32: {
            int group = layout.scale == Scale::kK16 ? 16 : 32;
            for (int g = 0; g < 256 / group; ++g) {
                float s = d * static_cast<float>(static_cast<int8_t>(unit.scale[g]));
                for (int i = g * group; i < (g + 1) * group; ++i) out[i] = s * v[i];
            }
            break;
        }
        case Scale::kE8m0: {
            float s = std::ldexp(1.0f, static_cast<int>(unit.d & 255) - 128);
            for (int i = 0; i < 32; ++i) out[i] = s * v[i];
            break;
        }
        case Scale::kE4m3:
            for (int i = 0; i < 32; ++i) {
                uint8_t code = unit.scale[i / 16] & 127;
                out[i] = (code == 127 ? 0.0f : e4m3_to_f32_exact(code)) * (0.5f * v[i]);
            }
            break;
        case Scale::kNone: break;
    }
}

namespace {

// What a record of the scale plane is made of.
struct ScaleParts {
    bool has_half, has_min;
    int n_scales, n_minima;
};

ScaleParts parts_of(Scale scale) {
    switch (scale) {
        case Scale::kHalf: return {true, false, 0, 0};
        case Scale::kHalfMin: return {true, true, 0, 0};
        case Scale::kHalfZero: return {true, false, 1, 0};
        case Scale::kK4: return {true, true, 8, 8};
        case Scale::kK2: return {true, true, 16, 0};
        case Scale::kK16: return {true, false, 16, 0};
        case Scale::kK32: return {true, false, 8, 0};
        case Scale::kE4m3: return {false, false, 2, 0};
        default: return {false, false, 0, 0};
    }
}

uint32_t load32(const uint8_t *p) {
    uint32_t x;
    std::memcpy(&x, p, 4);
    return x;
}

// The same byte four times.
constexpr uint32_t four(uint32_t byte) { return byte * 0x01010101u; }

// The codes of one row and group, `from` bits up, as a plane of kBits bits holds them: a dword in each of kBits vectors.
template <int kBits>
void write_plane(const uint8_t *code, int from, uint8_t *plane) {
    constexpr int kPerVector = 8 / kBits;
    constexpr uint32_t kMask = four((1u << kBits) - 1);
    for (int vector = 0; vector < kBits; ++vector) {
        uint32_t word = 0;
        for (int i = 0; i < kPerVector; ++i) word |= (load32(code + 4 * (vector * kPerVector + i)) >> from & kMask) << (kBits * i);
        std::memcpy(plane + 64 * vector, &word, 4);
    }
}

template <int kBits>
void read_plane(const uint8_t *plane, int up, uint8_t *code) {
    constexpr int kPerVector = 8 / kBits;
    constexpr uint32_t kMask = four((1u << kBits) - 1);
    for (int vector = 0; vector < kBits; ++vector) {
        uint32_t word = load32(plane + 64 * vector);
        for (int i = 0; i < kPerVector; ++i) {
            uint8_t *at = code + 4 * (vector * kPerVector + i);
            uint32_t codes = (up ? load32(at) : 0) | (word >> (kBits * i) & kMask) << up;
            std::memcpy(at, &codes, 4);
        }
    }
}

using WritePlane = void (*)(const uint8_t *, int, uint8_t *);
using ReadPlane = void (*)(const uint8_t *, int, uint8_t *);

WritePlane write_plane_of(int bits) { return bits == 1 ? write_plane<1> : bits == 2 ? write_plane<2> : bits == 4 ? write_plane<4> : write_plane<8>; }
ReadPlane read_plane_of(int bits) { return bits == 1 ? read_plane<1> : bits == 2 ? read_plane<2> : bits == 4 ? read_plane<4> : read_plane<8>; }

}  // namespace

void write_unit(const Layout &layout, const PanelShape &shape, uint8_t *panel, int64_t i, int64_t n, const Unit &unit) {
    int64_t per_unit = layout.unit / kGroup;
    WritePlane write_low = write_plane_of(layout.low_bits), write_high = write_plane_of(layout.high_bits);
    for (int64_t g = 0; g < per_unit; ++g) {
        write_low(unit.code + g * kGroup, 0, panel + (i * per_unit + g) * 64 * layout.low_bits + 4 * n);
        if (layout.high_bits)
            write_high(unit.code + g * kGroup, layout.low_bits, panel + shape.high_offset + (i * per_unit + g) * 64 * layout.high_bits + 4 * n);
    }
    uint8_t *scale = panel + shape.scale_offset + i * layout.scale_bytes;
    ScaleParts parts = parts_of(layout.scale);
    if (layout.scale == Scale::kE8m0) scale[n] = static_cast<uint8_t>(unit.d);
    if (parts.has_half) store16(scale + 2 * n, unit.d), scale += 32;
    if (parts.has_min) store16(scale + 2 * n, unit.dmin), scale += 32;
    for (int s = 0; s < 16 && s < parts.n_scales; ++s) scale[16 * s + n] = unit.scale[s];
    for (int s = 0; s < 8 && s < parts.n_minima; ++s) scale[16 * (parts.n_scales + s) + n] = unit.min[s];
}

void read_unit(const Layout &layout, const PanelShape &shape, const uint8_t *panel, int64_t i, int64_t n, Unit *out) {
    int64_t per_unit = layout.unit / kGroup;
    ReadPlane read_low = read_plane_of(layout.low_bits), read_high = read_plane_of(layout.high_bits);
    for (int64_t g = 0; g < per_unit; ++g) {
        read_low(panel + (i * per_unit + g) * 64 * layout.low_bits + 4 * n, 0, out->code + g * kGroup);
        if (layout.high_bits)
            read_high(panel + shape.high_offset + (i * per_unit + g) * 64 * layout.high_bits + 4 * n, layout.low_bits, out->code + g * kGroup);
    }
    const uint8_t *scale = panel + shape.scale_offset + i * layout.scale_bytes;
    ScaleParts parts = parts_of(layout.scale);
    out->d = layout.scale == Scale::kE8m0 ? scale[n] : 0;
    out->dmin = 0;
    if (parts.has_half) out->d = load16(scale + 2 * n), scale += 32;
    if (parts.has_min) out->dmin = load16(scale + 2 * n), scale += 32;
    for (int s = 0; s < 16 && s < parts.n_scales; ++s) out->scale[s] = scale[16 * s + n];
    for (int s = 0; s < 8 && s < parts.n_minima; ++s) out->min[s] = scale[16 * (parts.n_scales + s) + n];
}

float f16_to_f32_exact(uint16_t bits) {
    uint32_t magnitude = bits & 0x7FFFu, word;
    float x;
    if (magnitude >= 0x7C00u) {
        word = magnitude << 13 | 0x7F800000u;
        std::memcpy(&x, &word, 4);
    } else {
        word = magnitude << 13;
        std::memcpy(&x, &word, 4);
        x *= 0x1p112f;  // exponent bias 127 against 15; subnormals come out right too
    }
    return bits & 0x8000u ? -x : x;
}

float e4m3_to_f32_exact(uint8_t code) {
    if ((code & 127) == 127) return std::numeric_limits<float>::quiet_NaN();
    return f16_to_f32_exact(static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7F) << 7)) * 256.0f;
}

float e5m2_to_f32_exact(uint8_t code) { return f16_to_f32_exact(static_cast<uint16_t>(code << 8)); }

namespace {

template <class Decode>
void decode_row(const uint8_t *from, int64_t stride, int64_t n, float *out, const Decode &decode) {
    for (int64_t k = 0; k < n; ++k) out[k] = decode(from + k * stride);
}

}  // namespace

void plain_to_f32(int32_t format, const uint8_t *from, int64_t stride, int64_t n, float *out) {
    auto word = [](uint32_t bits) {
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    };
    switch (format) {
        case PK_F16: return decode_row(from, stride, n, out, [](const uint8_t *p) { return f16_to_f32_exact(load16(p)); });
        case PK_BF16: return decode_row(from, stride, n, out, [&](const uint8_t *p) { return word(static_cast<uint32_t>(load16(p)) << 16); });
        case PK_FP8_E4M3: return decode_row(from, stride, n, out, [](const uint8_t *p) { return e4m3_to_f32_exact(*p); });
        case PK_FP8_E5M2: return decode_row(from, stride, n, out, [](const uint8_t *p) { return e5m2_to_f32_exact(*p); });
        default: return decode_row(from, stride, n, out, [&](const uint8_t *p) { return word(load32(p)); });
    }
}

}  // namespace pk
