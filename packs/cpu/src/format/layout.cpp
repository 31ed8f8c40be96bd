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

// out[i] (+)= the field of `width` bits at `shift` of byte i % group, group by group: see formats/arrays.py, bit_planes.
void add_planes(const uint8_t *packed, int64_t n_bytes, int width, int64_t group, int up, uint8_t *out) {
    int64_t at = 0;
    for (int64_t base = 0; base < n_bytes; base += group)
        for (int shift = 0; shift < 8; shift += width)
            for (int64_t i = 0; i < group; ++i) out[at++] |= static_cast<uint8_t>((packed[base + i] >> shift & ((1 << width) - 1)) << up);
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
    add_planes(packed, 8, 4, 8, 0, low);
    add_planes(packed + 8, 4, 2, 4, 4, high);
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
        case PK_Q4_1: return row + 20 * i;
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
        case PK_Q4_0: case PK_IQ4_NL: add_planes(b + 2, 16, 4, 16, 0, out->code); break;
        case PK_Q4_1:
            out->dmin = load16(b + 2);
            add_planes(b + 4, 16, 4, 16, 0, out->code);
            break;
        case PK_Q5_0:
            add_planes(b + 6, 16, 4, 16, 0, out->code);
            fifth_bits(b + 2, out->code);
            break;
        case PK_Q5_1:
            out->dmin = load16(b + 2);
            add_planes(b + 8, 16, 4, 16, 0, out->code);
            fifth_bits(b + 4, out->code);
            break;
        case PK_Q2_K:
            out->d = load16(b + 80);
            out->dmin = load16(b + 82);
            std::memcpy(out->scale, b, 16);
            add_planes(b + 16, 64, 2, 32, 0, out->code);
            break;
        case PK_Q3_K:
            out->d = load16(b + 108);
            unpack_k16_scales(b + 96, out);
            add_planes(b + 32, 64, 2, 32, 0, out->code);
            add_planes(b, 32, 1, 32, 2, out->code);
            break;
        case PK_Q4_K: case PK_Q5_K:
            out->dmin = load16(b + 2);
            unpack_k4_scales(b + 4, out);
            add_planes(b + (layout.format == PK_Q4_K ? 16 : 48), 128, 4, 32, 0, out->code);
            if (layout.format == PK_Q5_K) add_planes(b + 16, 32, 1, 32, 4, out->code);
            break;
        case PK_Q6_K:
            out->d = load16(b + 208);
            std::memcpy(out->scale, b + 192, 16);
            add_planes(b, 128, 4, 64, 0, out->code);
            add_planes(b + 128, 64, 2, 32, 4, out->code);
            break;
        case PK_IQ4_XS:
            unpack_xs_scales(b + 2, out);
            for (int i = 0; i < 8; ++i) add_planes(b + 8 + 16 * i, 16, 4, 16, 0, out->code + 32 * i);
            break;
        case PK_MXFP4:
            out->d = b[0];
            add_planes(b + 1, 16, 4, 16, 0, out->code);
            break;
        case PK_NVFP4:
            for (int i = 0; i < 2; ++i) {
                out->scale[i] = b[2 * half + i];
                add_planes(b + 4 + 8 * (2 * half + i), 8, 4, 8, 0, out->code + 16 * i);
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

// The bytes of the scale plane that belong to unit i.
template <class Byte>
Byte *scale_record(const Layout &layout, const PanelShape &shape, Byte *panel, int64_t i) {
    return panel + shape.scale_offset + i * layout.scale_bytes;
}

struct Field {
    int64_t vector;
    int shift;
};

// Where the codes of quad `i` of a group lie in a plane of `bits` bits.
Field field_of(int bits, int i) { return {i / (8 / bits), bits * (i % (8 / bits))}; }

}  // namespace

void write_unit(const Layout &layout, const PanelShape &shape, uint8_t *panel, int64_t i, int64_t n, const Unit &unit) {
    int64_t per_unit = layout.unit / kGroup;
    int low_mask = (1 << layout.low_bits) - 1;
    for (int64_t g = 0; g < per_unit; ++g) {
        uint8_t *low = panel + (i * per_unit + g) * 64 * layout.low_bits + 4 * n;
        uint8_t *high = panel + shape.high_offset + (i * per_unit + g) * 64 * layout.high_bits + 4 * n;
        for (int q = 0; q < 8; ++q) {
            const uint8_t *code = unit.code + g * kGroup + 4 * q;
            Field at = field_of(layout.low_bits, q);
            for (int j = 0; j < 4; ++j) low[at.vector * 64 + j] |= static_cast<uint8_t>((code[j] & low_mask) << at.shift);
            if (!layout.high_bits) continue;
            at = field_of(layout.high_bits, q);
            for (int j = 0; j < 4; ++j) high[at.vector * 64 + j] |= static_cast<uint8_t>((code[j] >> layout.low_bits) << at.shift);
        }
    }
    uint8_t *scale = scale_record(layout, shape, panel, i);
    bool has_half = layout.scale != Scale::kE8m0 && layout.scale != Scale::kE4m3;
    bool has_min = layout.scale == Scale::kHalfMin || layout.scale == Scale::kK4 || layout.scale == Scale::kK2;
    if (layout.scale == Scale::kE8m0) scale[n] = static_cast<uint8_t>(unit.d);
    if (has_half) store16(scale + 2 * n, unit.d), scale += 32;
    if (has_min) store16(scale + 2 * n, unit.dmin), scale += 32;
    int n_scales = layout.scale == Scale::kE4m3 ? 2 : layout.unit == 32 ? 0 : layout.scale == Scale::kK4 || layout.scale == Scale::kK32 ? 8 : 16;
    for (int s = 0; s < n_scales; ++s) scale[16 * s + n] = unit.scale[s];
    if (layout.scale == Scale::kK4)
        for (int s = 0; s < 8; ++s) scale[128 + 16 * s + n] = unit.min[s];
}

void read_unit(const Layout &layout, const PanelShape &shape, const uint8_t *panel, int64_t i, int64_t n, Unit *out) {
    int64_t per_unit = layout.unit / kGroup;
    int low_mask = (1 << layout.low_bits) - 1, high_mask = (1 << layout.high_bits) - 1;
    for (int64_t g = 0; g < per_unit; ++g) {
        const uint8_t *low = panel + (i * per_unit + g) * 64 * layout.low_bits + 4 * n;
        const uint8_t *high = panel + shape.high_offset + (i * per_unit + g) * 64 * layout.high_bits + 4 * n;
        for (int q = 0; q < 8; ++q) {
            uint8_t *code = out->code + g * kGroup + 4 * q;
            Field at = field_of(layout.low_bits, q);
            for (int j = 0; j < 4; ++j) code[j] = static_cast<uint8_t>(low[at.vector * 64 + j] >> at.shift & low_mask);
            if (!layout.high_bits) continue;
            at = field_of(layout.high_bits, q);
            for (int j = 0; j < 4; ++j) code[j] |= static_cast<uint8_t>((high[at.vector * 64 + j] >> at.shift & high_mask) << layout.low_bits);
        }
    }
    const uint8_t *scale = scale_record(layout, shape, panel, i);
    out->d = out->dmin = 0;
    bool has_half = layout.scale != Scale::kE8m0 && layout.scale != Scale::kE4m3;
    bool has_min = layout.scale == Scale::kHalfMin || layout.scale == Scale::kK4 || layout.scale == Scale::kK2;
    if (layout.scale == Scale::kE8m0) out->d = scale[n];
    if (has_half) out->d = load16(scale + 2 * n), scale += 32;
    if (has_min) out->dmin = load16(scale + 2 * n), scale += 32;
    int n_scales = layout.scale == Scale::kE4m3 ? 2 : layout.unit == 32 ? 0 : layout.scale == Scale::kK4 || layout.scale == Scale::kK32 ? 8 : 16;
    for (int s = 0; s < n_scales; ++s) out->scale[s] = scale[16 * s + n];
    if (layout.scale == Scale::kK4)
        for (int s = 0; s < 8; ++s) out->min[s] = scale[128 + 16 * s + n];
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

float plain_to_f32(int32_t format, const uint8_t *element) {
    uint32_t word;
    float x;
    switch (format) {
        case PK_F16: return f16_to_f32_exact(load16(element));
        case PK_BF16: word = static_cast<uint32_t>(load16(element)) << 16; break;
        case PK_FP8_E4M3: return e4m3_to_f32_exact(*element);
        case PK_FP8_E5M2: return e5m2_to_f32_exact(*element);
        default: std::memcpy(&word, element, 4); break;
    }
    std::memcpy(&x, &word, 4);
    return x;
}

}  // namespace pk
