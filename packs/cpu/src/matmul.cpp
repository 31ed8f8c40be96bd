// Matrix products over plain F32 copies of the weights: correct on every machine, and slow.
#include "matmul.h"

#include <cmath>
#include <cstring>

#include "../../host/format.h"

namespace pk {
namespace {

float half_to_f32(uint16_t h) {
    uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(fraction) * 5.9604644775390625e-8f;
    uint32_t bits = sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | fraction << 13;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

float activate(float x, int32_t act) {
    switch (act) {
        case PK_ACT_SILU: return x / (1 + std::exp(-x));
        case PK_ACT_GELU_TANH: return 0.5f * x * (1 + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
        case PK_ACT_GELU_ERF: return 0.5f * x * (1 + std::erf(x * 0.70710678f));
        default: return x;
    }
}

float dot(const float *x, const pk_tensor &w, int64_t row) {
    const float *v = reinterpret_cast<const float *>(w.data) + row * w.cols;
    double sum = 0;
    for (int64_t i = 0; i < w.cols; ++i) sum += static_cast<double>(x[i]) * v[i];
    return static_cast<float>(sum);
}

float bias_of(const pk_tensor &bias, int64_t i) { return bias.data ? reinterpret_cast<const float *>(bias.data)[i] : 0.0f; }

}  // namespace

bool is_packed_format(int32_t format) { return format == PK_F32 || format == PK_F16 || format == PK_BF16; }

int32_t packed_bytes(const Context &, const pk_source &source, int64_t *out) {
    if (!is_packed_format(source.format)) return fail(PK_UNSUPPORTED, "weights in %s are not supported; f32, f16, bf16 are", format_name(source.format));
    if (source.n_bytes != source.rows * row_bytes(*find_format(source.format), source.cols))
        return fail(PK_BAD_ARG, "a %lld x %lld weight has %lld bytes", (long long)source.rows, (long long)source.cols, (long long)source.n_bytes);
    *out = source.rows * source.cols * 4;
    return PK_OK;
}

int32_t repack(Context &, const pk_source &source, void *dst, int64_t) {
    for (int64_t row = 0; row < source.rows; ++row) {
        float *out = static_cast<float *>(dst) + row * source.cols;
        source_row_to_f32(source.format, reinterpret_cast<const uint8_t *>(source.data) + row * row_bytes(*find_format(source.format), source.cols), source.cols, out);
        for (int64_t i = 0; i < source.cols; ++i) out[i] = out[i] * (source.global_scale) + source.offset;
    }
    return PK_OK;
}

bool source_row_to_f32(int32_t format, const void *row, int64_t cols, float *out) {
    if (!is_packed_format(format)) return false;
    if (format == PK_F32 && cols) std::memcpy(out, row, cols * 4);
    const auto *halves = static_cast<const uint16_t *>(row);
    for (int64_t i = 0; format != PK_F32 && i < cols; ++i) {
        uint32_t bits = static_cast<uint32_t>(halves[i]) << 16;
        if (format == PK_BF16)
            std::memcpy(out + i, &bits, 4);
        else
            out[i] = half_to_f32(halves[i]);
    }
    return true;
}

void packed_row_to_f32(const Context &, const pk_tensor &w, int64_t row, float *out) {
    std::memcpy(out, reinterpret_cast<const float *>(w.data) + row * w.cols, w.cols * 4);
}

int32_t matmul_check(const Context &, const pk_op_matmul &, int64_t) { return PK_OK; }
int64_t matmul_workspace_bytes(const Context &, const pk_op_matmul &, int64_t) { return 0; }

void matmul(Context &context, const pk_op_matmul &op, int64_t n_rows, void *) {
    context.pool.parallel_for(n_rows * op.y.cols, 64, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t i = begin; i < end; ++i) {
            int64_t row = i / op.y.cols, n = i % op.y.cols, which = 0;
            const auto *x = reinterpret_cast<const float *>(op.x.data + row * op.x.stride);
            auto *y = reinterpret_cast<float *>(op.y.data + row * op.y.stride) + n;
            float value;
            if (op.act != PK_ACT_NONE) {
                value = activate(dot(x, op.w[0], n) + bias_of(op.bias[0], n), op.act) * (dot(x, op.w[1], n) + bias_of(op.bias[1], n));
            } else {
                while (n >= op.w[which].rows) n -= op.w[which++].rows;
                value = dot(x, op.w[which], n) + bias_of(op.bias[which], n);
            }
            value *= op.scale;
            if (op.softcap > 0) value = op.softcap * std::tanh(value / op.softcap);
            if (op.add.data) value += reinterpret_cast<const float *>(op.add.data + row * op.add.stride)[i % op.y.cols];
            *y = value;
        }
    });
}

}  // namespace pk
