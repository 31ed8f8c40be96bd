// How a weight lies in memory after repack: panels of 16 rows, panel after panel; a panel is a few planes.
//
// Coded formats (integers with scales), per panel:
//   low plane   [K/32][kLow vectors of 64 bytes]   low_bits of every code
//   high plane  [K/32][kHigh vectors of 64 bytes]  high_bits above them
//   scale plane [K/unit][scale_bytes]              see Scale
//   factors     f32 [16], nvfp4 only               multiplies a whole row
// A group of 32 columns is 8 quads of 4 columns; element (row n, column 4 i + j of the group) is byte 4 n + j of quad i. Planes of
// b bits hold 8/b quads per vector: quad i lies in vector i / (8/b), in the bits from b * (i % (8/b)) of each byte. So one
// vector operation yields 64 codes in the order that dot products of four bytes and AMX tiles both want.
// Plain formats: f32, f16 and fp8 [K'][16] elements; bf16 [K'/2][16][2]; fp8 then f32 [ceil(K/128)][16] scales. K' is K
// rounded up to 32, the rest is zero. Rows are padded to 16 (zero scales), panels to 64 bytes.
#pragma once
#include <cstdint>

namespace pk {

constexpr int64_t kPanelRows = 16;
constexpr int64_t kGroup = 32;
constexpr int64_t kFp8Block = 128;

// One record of the scale plane, 16 rows side by side in every part. "i8 16": sixteen signed bytes, one per row.
enum class Scale : int32_t {
    kNone,    // plain formats
    kHalf,    // f16 d                                        x = d v
    kHalfMin, // f16 d, f16 m                                 x = d v + m
    kHalfZero, // f16 d, u8 z                                 x = d (v - z)
    kK4,      // f16 d, f16 dmin, u8 s[8], u8 m[8]            x = d s v - dmin m, groups of 32
    kK2,      // f16 d, f16 dmin, u8 (s | m << 4)[16]         x = d s v - dmin m, groups of 16
    kK16,     // f16 d, i8 s[16]                              x = d s v, groups of 16
    kK32,     // f16 d, i8 s[8]                               x = d s v, groups of 32
    kE8m0,    // u8 e                                         x = 2^(e-128) v
    kE4m3,    // u8 s[2]                                      x = e4m3(s) v / 2, groups of 16
};

struct Layout {
    int32_t format;
    int32_t low_bits, high_bits;  // 0 for plain formats
    Scale scale;
    int32_t unit;         // columns per record of the scale plane
    int32_t scale_bytes;  // of that record
    int32_t offset;       // v = code - offset, or v = table[code] - offset
    const uint8_t *table; // 16 values, or nullptr
    int32_t element_bytes;  // plain formats
};

// v + 128 for the steps of iq4, 2 v + 16 for e2m1.
extern const uint8_t kIq4Table[16];
extern const uint8_t kE2m1Table[16];

// nullptr when there are no kernels for this format.
const Layout *find_layout(int32_t format);

struct PanelShape {
    int64_t k;            // columns
    int64_t n_groups;     // of 32 columns, the last one maybe padded
    int64_t high_offset;  // bytes from the panel's start
    int64_t scale_offset;
    int64_t factor_offset;
    int64_t panel_bytes;
};

PanelShape panel_shape(const Layout &layout, int64_t cols);

inline int64_t n_panels(int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }

// One unit (layout.unit columns) of one row, codes apart.
struct Unit {
    uint8_t code[256];
    uint16_t d, dmin;          // f16 bits; e8m0: d is the exponent
    uint8_t scale[16], min[16];
};

// Reads a unit from checkpoint bytes (layout.unit columns of a row; nvfp4: 32 of its block of 64, `half` 0 or 1).
void unpack_unit(const Layout &layout, const uint8_t *block, int64_t half, Unit *out);
// Bytes of checkpoint per unit is row_bytes / units except for nvfp4; this finds where unit `i` of a row begins.
const uint8_t *source_unit(const Layout &layout, const uint8_t *row, int64_t i, int64_t *half);

// The values of a unit, exactly as formats/reference.py computes them.
void unit_to_f32(const Layout &layout, const Unit &unit, float *out);

// Writes unit `i` of row `n` (0..15) into a zeroed panel, and reads it back.
void write_unit(const Layout &layout, const PanelShape &shape, uint8_t *panel, int64_t i, int64_t n, const Unit &unit);
void read_unit(const Layout &layout, const PanelShape &shape, const uint8_t *panel, int64_t i, int64_t n, Unit *out);

float f16_to_f32_exact(uint16_t bits);
float e4m3_to_f32_exact(uint8_t code);
float e5m2_to_f32_exact(uint8_t code);
// out[k] = element k of a plain format, elements `stride` bytes apart.
void plain_to_f32(int32_t format, const uint8_t *from, int64_t stride, int64_t n, float *out);

}  // namespace pk
