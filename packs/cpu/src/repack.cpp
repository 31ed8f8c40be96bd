// Weights from checkpoint layout to panels (format/layout.h), and rows read back from either.
#include <cmath>
#include <cstring>

#include "../../host/format.h"
#include "format/layout.h"
#include "matmul.h"

namespace pk {
namespace {

using Long = long long;

// Nibbles and scales lie apart, elements 2 i and 2 i + 1 share byte i: how safetensors checkpoints store fp4.
bool has_group_scales(const pk_source &source) { return source.scales == PK_SCALES_GROUP; }

int64_t group_width(int32_t format) { return format == PK_NVFP4 ? 16 : 32; }

int32_t check_scales(const pk_source &s) {
    bool is_fp8 = s.format == PK_FP8_E4M3 || s.format == PK_FP8_E5M2, is_fp4 = s.format == PK_NVFP4 || s.format == PK_MXFP4;
    const char *name = format_name(s.format);
    if (s.offset != 0) return fail(PK_UNSUPPORTED, "weight: an offset of %g on a matrix in format %s", s.offset, name);
    if (s.global_scale != 1 && !is_fp8 && s.format != PK_NVFP4) return fail(PK_UNSUPPORTED, "weight: a scale of %g for the whole of a matrix in format %s", s.global_scale, name);
    int64_t rows = 0, cols = 0;
    switch (s.scales) {
        case PK_SCALES_NONE: return PK_OK;
        case PK_SCALES_TENSOR: rows = cols = is_fp8; break;
        case PK_SCALES_ROW: rows = is_fp8 ? s.rows : 0, cols = 1; break;
        case PK_SCALES_BLOCK:
            if (!is_fp8) break;
            if (s.block_rows < 1 || s.block_cols != kFp8Block)
                return fail(PK_UNSUPPORTED, "weight: scales of blocks of %d x %d; there are kernels for blocks %d wide", s.block_rows, s.block_cols, (int)kFp8Block);
            rows = (s.rows + s.block_rows - 1) / s.block_rows, cols = (s.cols + kFp8Block - 1) / kFp8Block;
            break;
        case PK_SCALES_GROUP: rows = is_fp4 ? s.rows : 0, cols = (s.cols + group_width(s.format) - 1) / group_width(s.format); break;
        default: break;
    }
    if (rows < 1) return fail(PK_UNSUPPORTED, "weight: scales of kind %d beside format %s", s.scales, name);
    if (s.scale_rows * s.scale_cols != rows * cols)
        return fail(PK_BAD_ARG, "weight: %lld x %lld scales, a matrix of %lld x %lld in format %s needs %lld x %lld", (Long)s.scale_rows, (Long)s.scale_cols, (Long)s.rows,
                    (Long)s.cols, name, (Long)rows, (Long)cols);
    return PK_OK;
}

// The factor of (row, block of 128 columns) of an fp8 weight.
float fp8_scale(const pk_source &s, int64_t row, int64_t block) {
    if (s.scales == PK_SCALES_NONE) return s.global_scale;
    int64_t at = 0;
    if (s.scales == PK_SCALES_ROW) at = row;
    if (s.scales == PK_SCALES_BLOCK) at = row / s.block_rows * s.scale_cols + block;
    return reinterpret_cast<const float *>(s.scale_data)[at] * s.global_scale;
}

// Elements of a row to every sixteenth place.
template <int kBytes>
void spread(const uint8_t *from, int64_t n, uint8_t *to) {
    for (int64_t k = 0; k < n; ++k) std::memcpy(to + k * kPanelRows * kBytes, from + k * kBytes, kBytes);
}

void repack_plain_row(const Layout &layout, const PanelShape &shape, const pk_source &s, int64_t row, uint8_t *panel) {
    int64_t n = row % kPanelRows, bytes = layout.element_bytes;
    const uint8_t *from = reinterpret_cast<const uint8_t *>(s.data) + (row - s.first_row) * s.cols * bytes;
    switch (layout.format) {
        case PK_F32: spread<4>(from, s.cols, panel + n * 4); break;
        case PK_F16: spread<2>(from, s.cols, panel + n * 2); break;
        case PK_BF16:
            spread<4>(from, s.cols / 2, panel + n * 4);
            if (s.cols % 2) std::memcpy(panel + (s.cols / 2 * kPanelRows + n) * 4, from + (s.cols - 1) * 2, 2);
            break;
        default: spread<1>(from, s.cols, panel + n); break;
    }
    if (layout.scale_bytes == 0) return;
    for (int64_t b = 0; b * kFp8Block < s.cols; ++b) {
        float scale = fp8_scale(s, row, b);
        std::memcpy(panel + shape.scale_offset + (b * kPanelRows + n) * 4, &scale, 4);
    }
}

void unpack_group_unit(const pk_source &s, int64_t row, int64_t i, Unit *out) {
    std::memset(out, 0, sizeof *out);
    const uint8_t *codes = reinterpret_cast<const uint8_t *>(s.data) + ((row - s.first_row) * s.cols + i * kGroup) / 2;
    const uint8_t *scales = reinterpret_cast<const uint8_t *>(s.scale_data) + row * s.scale_cols;
    int64_t n = s.cols - i * kGroup < kGroup ? s.cols - i * kGroup : kGroup;
    for (int64_t j = 0; j < n; ++j) out->code[j] = codes[j / 2] >> (4 * (j % 2)) & 15;
    if (s.format == PK_MXFP4) {
        out->d = scales[i];
        return;
    }
    for (int64_t j = 0; 16 * j < n; ++j) out->scale[j] = scales[2 * i + j];
}

void repack_panel(const Layout &layout, const PanelShape &shape, const pk_source &s, int64_t p, uint8_t *panel) {
    std::memset(panel, 0, shape.panel_bytes);
    const Format *format = find_format(s.format);
    Unit unit;
    for (int64_t row = p * kPanelRows; row < s.rows && row < (p + 1) * kPanelRows; ++row) {
        int64_t n = row % kPanelRows;
        if (layout.scale == Scale::kNone) {
            repack_plain_row(layout, shape, s, row, panel);
            continue;
        }
        const uint8_t *from = reinterpret_cast<const uint8_t *>(s.data) + (has_group_scales(s) ? 0 : (row - s.first_row) * row_bytes(*format, s.cols));
        for (int64_t i = 0; i * layout.unit < s.cols; ++i) {
            if (has_group_scales(s)) {
                unpack_group_unit(s, row, i, &unit);
            } else {
                int64_t half;
                const uint8_t *block = source_unit(layout, from, i, &half);
                unpack_unit(layout, block, half, &unit);
            }
            write_unit(layout, shape, panel, i, n, unit);
        }
        if (layout.scale == Scale::kE4m3) std::memcpy(panel + shape.factor_offset + 4 * n, &s.global_scale, 4);
    }
}

}  // namespace

bool is_packed_format(int32_t format) { return find_layout(format) != nullptr; }

int32_t packed_bytes(const Context &, const pk_source &source, int64_t *out) {
    const Layout *layout = find_layout(source.format);
    if (!layout) {
        char names[256];
        list_formats(is_packed_format, ", ", "", names, sizeof names);
        return fail(PK_UNSUPPORTED, "weight: the cpu pack has no kernel for %s; it has them for %s", format_name(source.format), names);
    }
    if (source.rows < 1 || source.cols < 1) return fail(PK_BAD_ARG, "weight: %lld rows of %lld columns", (Long)source.rows, (Long)source.cols);
    if (int32_t status = check_scales(source)) return status;
    int64_t row = has_group_scales(source) ? (source.cols % group_width(source.format) ? -1 : source.cols / 2) : row_bytes(*find_format(source.format), source.cols);
    if (row < 0) return fail(PK_BAD_ARG, "weight: rows of %lld elements are no multiple of the block of %s", (Long)source.cols, format_name(source.format));
    if (source.n_bytes != row * source.rows)
        return fail(PK_BAD_ARG, "weight: %lld x %lld in format %s takes %lld bytes, there are %lld", (Long)source.rows, (Long)source.cols, format_name(source.format),
                    (Long)(row * source.rows), (Long)source.n_bytes);
    *out = n_panels(source.rows) * panel_shape(*layout, source.cols).panel_bytes;
    return PK_OK;
}

int32_t repack(Context &context, const pk_source &source, void *dst, int64_t n_bytes) {
    int64_t need = 0;
    if (int32_t status = packed_bytes(context, source, &need)) return status;
    if (n_bytes != need) return fail(PK_BAD_ARG, "weight: %lld bytes for the packed matrix, it takes %lld", (Long)n_bytes, (Long)need);
    if (!source.data || (source.scales != PK_SCALES_NONE && !source.scale_data)) return fail(PK_BAD_ARG, "weight: its data or scales are absent");
    const int64_t n_rows = source.part_rows ? source.part_rows : source.rows, first = source.first_row / kPanelRows;
    if (source.first_row < 0 || n_rows < 1 || source.first_row + n_rows > source.rows || source.first_row % 128 || (n_rows % 128 && source.first_row + n_rows < source.rows))
        return fail(PK_BAD_ARG, "weight: rows %lld to %lld of %lld are no part that begins and ends at a multiple of 128", (Long)source.first_row, (Long)(source.first_row + n_rows), (Long)source.rows);
    const Layout &layout = *find_layout(source.format);
    PanelShape shape = panel_shape(layout, source.cols);
    auto *out = static_cast<uint8_t *>(dst);
    context.pool.parallel_for(n_panels(source.first_row + n_rows) - first, 1, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t p = first + begin; p < first + end; ++p) repack_panel(layout, shape, source, p, out + p * shape.panel_bytes);
    });
    return PK_OK;
}

void packed_row_to_f32(const Context &, const pk_tensor &w, int64_t row, float *out) {
    const Layout &layout = *find_layout(w.format);
    PanelShape shape = panel_shape(layout, w.cols);
    const uint8_t *panel = reinterpret_cast<const uint8_t *>(w.data) + row / kPanelRows * shape.panel_bytes;
    int64_t n = row % kPanelRows, bytes = layout.element_bytes;
    if (layout.scale == Scale::kNone) {
        if (layout.format == PK_BF16) {  // neighbours share a dword
            uint16_t row_bits[512];
            for (int64_t k = 0; k < w.cols; k += 512) {
                int64_t n_left = w.cols - k < 512 ? w.cols - k : 512;
                for (int64_t i = 0; i < n_left; i += 2) std::memcpy(row_bits + i, panel + ((k + i) / 2 * kPanelRows + n) * 4, 4);
                plain_to_f32(PK_BF16, reinterpret_cast<const uint8_t *>(row_bits), 2, n_left, out + k);
            }
        } else {
            plain_to_f32(layout.format, panel + n * bytes, kPanelRows * bytes, w.cols, out);
        }
        for (int64_t b = 0; layout.scale_bytes && b * kFp8Block < w.cols; ++b) {
            float scale;
            std::memcpy(&scale, panel + shape.scale_offset + (b * kPanelRows + n) * 4, 4);
            for (int64_t k = b * kFp8Block; k < w.cols && k < (b + 1) * kFp8Block; ++k) out[k] *= scale;
        }
        return;
    }
    float factor = 1;
    if (layout.scale == Scale::kE4m3) std::memcpy(&factor, panel + shape.factor_offset + 4 * n, 4);
    Unit unit;
    float values[256];
    for (int64_t i = 0; i * layout.unit < w.cols; ++i) {
        read_unit(layout, shape, panel, i, n, &unit);
        int64_t left = w.cols - i * layout.unit;
        unit_to_f32(layout, unit, values);
        for (int64_t k = 0; k < layout.unit && k < left; ++k) out[i * layout.unit + k] = values[k] * factor;
    }
}

bool source_row_to_f32(int32_t format, const void *row, int64_t cols, float *out) {
    const Layout *layout = find_layout(format);
    if (!layout) return false;
    const auto *from = static_cast<const uint8_t *>(row);
    if (layout->scale == Scale::kNone) {
        plain_to_f32(format, from, layout->element_bytes, cols, out);
        return true;
    }
    Unit unit;
    for (int64_t i = 0; i * layout->unit < cols; ++i) {
        int64_t half;
        const uint8_t *block = source_unit(*layout, from, i, &half);
        unpack_unit(*layout, block, half, &unit);
        unit_to_f32(*layout, unit, out + i * layout->unit);
    }
    return true;
}

}  // namespace pk
