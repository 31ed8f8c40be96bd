// Row kernels of one level: norm, gate, add, copy, the split of q, k and v, and the passes over logits that sampling needs.
#pragma once
#include <cmath>

#include "attention.h"
#include "kernels.h"
#include "simd.h"

namespace pk {
namespace {

template <class Number>
inline Number *row_at(const pk_tensor &t, int64_t row) {
    return reinterpret_cast<Number *>(t.data + row * t.stride);
}

inline float sum_squares(const float *x, int64_t n) {
    vf a = v_zero(), b = v_zero();
    int64_t i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        vf p = v_load(x + i), q = v_load(x + i + kLanes);
        a = v_fma(p, p, a);
        b = v_fma(q, q, b);
    }
    for (; i < n; i += kLanes) {
        vf p = v_load(x + i, n - i);
        a = v_fma(p, p, a);
    }
    return v_sum(v_add(a, b));
}

inline float inverse_rms(const float *x, int64_t n, float eps) { return 1.0f / std::sqrt(sum_squares(x, n) / static_cast<float>(n) + eps); }

// out = x * factor * w
inline void weigh(float *out, const float *x, float factor, const float *w, int64_t n) {
    vf f = v_set(factor);
    for (int64_t i = 0; i < n; i += kLanes) v_store(out + i, v_mul(v_mul(v_load(x + i, n - i), f), v_load(w + i, n - i)), n - i);
}

// out = (x - mean) / sqrt(variance + eps) * w + bias; out may be x. Source: Ba et al. 2016, equation 4.
inline void layer_norm(float *out, const float *x, int64_t n, float eps, const float *w, const float *bias) {
    vf sum = v_zero();
    for (int64_t i = 0; i < n; i += kLanes) sum = v_add(sum, v_load(x + i, n - i));
    vf mean = v_set(v_sum(sum) / static_cast<float>(n)), squares = v_zero();
    for (int64_t i = 0; i < n; i += kLanes) {
        vf v = v_sub(v_load(x + i, n - i), mean);
        if (n - i < kLanes) v = v_first(v, v_zero(), n - i);
        squares = v_fma(v, v, squares);
    }
    vf factor = v_set(1.0f / std::sqrt(v_sum(squares) / static_cast<float>(n) + eps));
    for (int64_t i = 0; i < n; i += kLanes) {
        vf v = v_mul(v_mul(v_sub(v_load(x + i, n - i), mean), factor), v_load(w + i, n - i));
        v_store(out + i, bias ? v_add(v, v_load(bias + i, n - i)) : v, n - i);
    }
}

// Formula and order: pk_op_norm in pack.h. Source: Zhang and Sennrich 2019, equation 4.
void norm(const pk_op_norm &op, int64_t begin, int64_t end) {
    int64_t n = op.x.cols;
    const float *w = reinterpret_cast<const float *>(op.w.data), *post = reinterpret_cast<const float *>(op.post_w.data);
    for (int64_t row = begin; row < end; ++row) {
        const float *v = row_at<float>(op.x, row);
        float *residual = op.residual.data ? row_at<float>(op.residual, row) : nullptr;
        float *out = op.out.data ? row_at<float>(op.out, row) : nullptr;
        float first = post ? inverse_rms(v, n, op.eps) : 1.0f;
        if (residual) {
            vf scale = v_set(op.residual_scale), f = v_set(first);
            for (int64_t i = 0; i < n; i += kLanes) {
                vf x = v_load(v + i, n - i);
                if (post) x = v_mul(v_mul(x, f), v_load(post + i, n - i));
                v_store(residual + i, v_fma(x, scale, v_load(residual + i, n - i)), n - i);
            }
            v = residual;
        } else if (post) {
            weigh(out, v, first, post, n);
            v = out;
        }
        if (out && op.kind == PK_NORM_LAYER)
            layer_norm(out, v, n, op.eps, w, reinterpret_cast<const float *>(op.bias.data));
        else if (out)
            weigh(out, v, inverse_rms(v, n, op.eps), w, n);
    }
}

template <int kAct>
void gate_rows(const pk_op_gate &op, int64_t begin, int64_t end) {
    int64_t n = op.out.cols;
    bool is_gated = op.x.cols != n;
    for (int64_t row = begin; row < end; ++row) {
        const float *x = row_at<float>(op.x, row);
        float *out = row_at<float>(op.out, row);
        for (int64_t i = 0; i < n; i += kLanes) {
            vf v = v_act(v_load(x + i, n - i), kAct);
            v_store(out + i, is_gated ? v_mul(v, v_load(x + n + i, n - i)) : v, n - i);
        }
    }
}

void gate(const pk_op_gate &op, int64_t begin, int64_t end) {
    switch (op.act) {
        case PK_ACT_SILU: return gate_rows<PK_ACT_SILU>(op, begin, end);
        case PK_ACT_GELU_TANH: return gate_rows<PK_ACT_GELU_TANH>(op, begin, end);
        case PK_ACT_GELU_ERF: return gate_rows<PK_ACT_GELU_ERF>(op, begin, end);
        case PK_ACT_RELU2: return gate_rows<PK_ACT_RELU2>(op, begin, end);
        default: return gate_rows<PK_ACT_NONE>(op, begin, end);
    }
}

void add(const pk_op_add &op, int64_t begin, int64_t end) {
    vf scale = v_set(op.scale);
    int64_t n = op.out.cols;
    for (int64_t row = begin; row < end; ++row) {
        const float *x = row_at<float>(op.x, row), *y = row_at<float>(op.y, row);
        float *out = row_at<float>(op.out, row);
        for (int64_t i = 0; i < n; i += kLanes) v_store(out + i, v_fma(v_load(x + i, n - i), scale, v_load(y + i, n - i)), n - i);
    }
}

void scale(float *x, int64_t n, float factor) {
    vf f = v_set(factor);
    for (int64_t i = 0; i < n; i += kLanes) v_store(x + i, v_mul(v_load(x + i, n - i), f), n - i);
}

// n <= kLanes numbers of a format, as F32 and back.
inline vf load_numbers(const void *p, int32_t format, int64_t n) {
    if (format == PK_F32) return v_load(static_cast<const float *>(p), n);
    alignas(64) uint16_t halves[kLanes] = {};
    std::memcpy(halves, p, 2 * n);
    return format == PK_F16 ? v_from_f16(halves) : v_from_bf16(halves);
}

inline void store_numbers(void *p, int32_t format, vf x, int64_t n) {
    if (format == PK_F32) return v_store(static_cast<float *>(p), x, n);
    alignas(64) uint16_t halves[kLanes];
    if (format == PK_F16)
        v_to_f16(halves, x);
    else
        v_to_bf16(halves, x);
    std::memcpy(p, halves, 2 * n);
}

inline int64_t number_bytes(int32_t format) { return format == PK_F32 || format == PK_I32 ? 4 : format == PK_U8 || format == PK_FP8_E4M3 ? 1 : 2; }

void copy(const pk_op_copy &op, int64_t begin, int64_t end) {
    int64_t n = op.x.cols, from_bytes = number_bytes(op.x.format), to_bytes = number_bytes(op.out.format);
    for (int64_t row = begin; row < end; ++row) {
        const uint8_t *x = row_at<uint8_t>(op.x, row);
        uint8_t *out = row_at<uint8_t>(op.out, row);
        if (op.x.format == op.out.format) {
            std::memmove(out, x, n * from_bytes);
            continue;
        }
        for (int64_t i = 0; i < n; i += kLanes) {
            int64_t left = n - i < kLanes ? n - i : kLanes;
            store_numbers(out + i * to_bytes, op.out.format, load_numbers(x + i * from_bytes, op.x.format, left), left);
        }
    }
}

// ---- q, k, v ----

// Rotates one head in place. cosines and sines: [width / 2] each.
inline void rotate(float *x, const float *cosines, const float *sines, int64_t width, int32_t layout) {
    int64_t half = width / 2;
    if (layout == 0) {
        for (int64_t i = 0; i < half; i += kLanes) {
            int64_t left = half - i;
            vf a = v_load(x + i, left), b = v_load(x + half + i, left), c = v_load(cosines + i, left), s = v_load(sines + i, left);
            v_store(x + i, v_fnma(b, s, v_mul(a, c)), left);
            v_store(x + half + i, v_fma(a, s, v_mul(b, c)), left);
        }
        return;
    }
    for (int64_t i = 0; i < half; ++i) {
        float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cosines[i] - b * sines[i];
        x[2 * i + 1] = a * sines[i] + b * cosines[i];
    }
}

// A head, normalised and rotated on its way from x to out (which may be x).
inline void turn_head(const pk_op_qkv &op, const float *x, float *out, const pk_tensor &w, const float *angles) {
    int64_t D = op.head_width;
    if (w.data)
        weigh(out, x, inverse_rms(x, D, op.eps), reinterpret_cast<const float *>(w.data), D);
    else if (out != x)
        std::memmove(out, x, D * sizeof(float));
    if (angles) rotate(out, angles, angles + op.rope_width / 2, op.rope_width, op.rope_layout);
}

// What lies beyond F16's range becomes its largest number, not infinity; NaN stays NaN.
inline vf in_f16(vf x) { return v_min(v_set(65504.0f), v_max(v_set(-65504.0f), x)); }

// n floats to one column of K: elements `step` numbers apart.
inline void store_column(uint8_t *p, int64_t step, int32_t format, const float *x, int64_t n) {
    if (format == PK_F32) {
        auto *out = reinterpret_cast<float *>(p);
        for (int64_t i = 0; i < n; ++i) out[i * step] = x[i];
        return;
    }
    if (format == PK_FP8_E4M3) {
        for (int64_t i = 0; i < n; ++i) p[i * step] = f32_to_e4m3(x[i]);
        return;
    }
    auto *out = reinterpret_cast<uint16_t *>(p);
    for (int64_t i = 0; i < n; i += kLanes) {
        alignas(64) uint16_t halves[kLanes];
        int64_t left = n - i < kLanes ? n - i : kLanes;
        vf v = v_load(x + i, left);
        if (format == PK_F16)
            v_to_f16(halves, in_f16(v));
        else
            v_to_bf16(halves, v);
        for (int64_t j = 0; j < left; ++j) out[(i + j) * step] = halves[j];
    }
}

inline void store_row(uint8_t *p, int32_t format, const float *x, int64_t n) {
    if (format == PK_FP8_E4M3) return store_column(p, 1, format, x, n);
    int64_t bytes = number_bytes(format);
    for (int64_t i = 0; i < n; i += kLanes) {
        int64_t left = n - i < kLanes ? n - i : kLanes;
        vf v = v_load(x + i, left);
        store_numbers(p + i * bytes, format, format == PK_F16 ? in_f16(v) : v, left);
    }
}

void qkv(const pk_op_qkv &op, const pk_state &state, const float *angles, int64_t begin, int64_t end) {
    const auto *page_of = reinterpret_cast<const int32_t *>(state.token_page), *position_of = reinterpret_cast<const int32_t *>(state.token_position);
    const auto *gains = reinterpret_cast<const float *>(op.gains.data);
    int64_t D = op.head_width, Dv = op.v_width, B = state.page_tokens, bytes = number_bytes(op.kv_format);
    for (int64_t t = begin; t < end; ++t) {
        const float *x = row_at<float>(op.qkv, t);
        float *q = row_at<float>(op.q, t);
        const float *turn = angles ? angles + t * op.rope_width : nullptr;
        for (int64_t h = 0; h < op.n_heads; ++h) {
            turn_head(op, x + h * D, q + h * D, op.q_norm, turn);
            if (gains) scale(q + h * D, D, gains[h]);
        }
        if (op.parts == PK_PARTS_Q) continue;
        x += op.n_heads * D;
        auto *page = reinterpret_cast<uint8_t *>(state.kv) + page_of[t] * state.kv_page_stride;
        int64_t at = position_of[t] % B;
        for (int64_t h = 0; h < op.n_kv_heads; ++h) {
            alignas(64) float k[kMaxHeadWidth];
            turn_head(op, x + h * D, k, op.k_norm, turn);
            if (gains) scale(k, D, gains[op.n_heads + h]);
            store_column(page + op.k_offset + (h * D * B + at) * bytes, B, op.kv_format, k, D);
        }
        if (op.parts == PK_PARTS_LATENT) continue;
        x += op.n_kv_heads * D;
        for (int64_t h = 0; h < op.n_kv_heads; ++h) {
            const float *v = x + h * Dv;
            alignas(64) float normed[kMaxHeadWidth];
            if (op.v_norm.data) {
                weigh(normed, v, inverse_rms(v, Dv, op.eps), reinterpret_cast<const float *>(op.v_norm.data), Dv);
                v = normed;
            }
            if (gains) {
                if (v != normed) std::memcpy(normed, v, Dv * sizeof(float));
                scale(normed, Dv, gains[op.n_heads + op.n_kv_heads + h]);
                v = normed;
            }
            store_row(page + op.v_offset + (h * B + at) * Dv * bytes, op.kv_format, v, Dv);
        }
    }
}

// ---- logits ----

inline vf apply_mask(vf x, uint32_t allowed) {
    const vf never = v_set(-__builtin_inff());
#if defined(__AVX512F__)
    return _mm512_mask_mov_ps(never, static_cast<__mmask16>(allowed), x);
#else
    __m256i bit = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(allowed)), _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128));
    return _mm256_blendv_ps(x, never, _mm256_castsi256_ps(_mm256_cmpeq_epi32(bit, _mm256_setzero_si256())));
#endif
}

inline uint32_t lanes_at_least(vf x, vf threshold) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(x, threshold, _CMP_GE_OQ);
#else
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x, threshold, _CMP_GE_OQ)));
#endif
}

inline uint32_t lanes_nan(vf x) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
#else
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
#endif
}

Kernels::Largest largest(float *logits, int64_t n, const uint32_t *mask) {
    vf top = v_set(-__builtin_inff());
    uint32_t nan = 0;
    for (int64_t i = 0; i < n; i += kLanes) {
        bool whole = i + kLanes <= n;
        vf x = whole ? v_load(logits + i) : v_first(v_load(logits + i, n - i), v_set(-__builtin_inff()), n - i);
        nan |= lanes_nan(x);
        if (mask) {
            x = apply_mask(x, mask[i / 32] >> (i % 32));
            v_store(logits + i, x, n - i);
        }
        top = v_max(top, x);
    }
    Kernels::Largest found{v_highest(top), -1, 1};
    if (nan || !(found.value <= 3.4028235e38f) || found.value < -3.4028235e38f) return found;
    vf threshold = v_set(found.value);
    for (int64_t i = 0; i < n; i += kLanes) {
        uint32_t hits = lanes_at_least(i + kLanes <= n ? v_load(logits + i) : v_first(v_load(logits + i, n - i), v_set(-__builtin_inff()), n - i), threshold);
        if (hits == 0) continue;
        found.index = static_cast<int32_t>(i + __builtin_ctz(hits));
        found.is_bad = 0;
        break;
    }
    return found;
}

constexpr int64_t kSumBlock = 1024;

// x where it is >= threshold, -inf elsewhere.
inline vf at_least(vf x, vf threshold) {
#if defined(__AVX512F__)
    return _mm512_mask_mov_ps(v_set(-__builtin_inff()), _mm512_cmp_ps_mask(x, threshold, _CMP_GE_OQ), x);
#else
    return _mm256_blendv_ps(v_set(-__builtin_inff()), x, _mm256_cmp_ps(x, threshold, _CMP_GE_OQ));
#endif
}

// Sum over one block, in a fixed order.
inline double block_sum(const float *x, int64_t n, vf top, vf factor, vf threshold) {
    vf a = v_zero();
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) a = v_add(a, v_exp(v_mul(v_sub(at_least(v_load(x + i), threshold), top), factor)));
    if (i < n) a = v_add(a, v_first(v_exp(v_mul(v_sub(at_least(v_load(x + i, n - i), threshold), top), factor)), v_zero(), n - i));
    return v_sum(a);
}

double sum_exp(const float *logits, int64_t n, float top, float factor, float threshold) {
    double sum = 0;
    for (int64_t i = 0; i < n; i += kSumBlock)
        sum += block_sum(logits + i, n - i < kSumBlock ? n - i : kSumBlock, v_set(top), v_set(factor), v_set(threshold));
    return sum;
}

int64_t count(const float *logits, int64_t n, float threshold) {
    vf t = v_set(threshold);
    int64_t found = 0, i = 0;
    for (; i + kLanes <= n; i += kLanes) found += __builtin_popcount(lanes_at_least(v_load(logits + i), t));
    if (i < n) found += __builtin_popcount(lanes_at_least(v_first(v_load(logits + i, n - i), v_set(-__builtin_inff()), n - i), t));
    return found;
}

int64_t find_sum(const float *logits, int64_t n, float top, float factor, double target) {
    double sum = 0;
    for (int64_t i = 0; i < n; i += kSumBlock) {
        int64_t left = n - i < kSumBlock ? n - i : kSumBlock;
        double next = sum + block_sum(logits + i, left, v_set(top), v_set(factor), v_set(-__builtin_inff()));
        if (next > target) {
            int64_t last = -1;
            for (int64_t j = 0; j < left; j += kLanes) {
                alignas(64) float e[kLanes];
                v_store(e, v_exp(v_mul(v_sub(v_load(logits + i + j, left - j), v_set(top)), v_set(factor))));
                for (int64_t lane = 0; lane < kLanes && j + lane < left; ++lane) {
                    sum += e[lane];
                    if (e[lane] > 0) last = i + j + lane;
                    if (sum > target) return i + j + lane;
                }
            }
            // The block's vector sum was larger than the sum one by one: the last possible token of the block is meant.
            if (last >= 0) return last;
        }
        sum = next;
    }
    return -1;
}

int64_t collect(const float *logits, int64_t n, float threshold, int32_t *out, int64_t max) {
    vf t = v_set(threshold);
    int64_t found = 0;
    for (int64_t i = 0; i < n; i += kLanes) {
        vf x = i + kLanes <= n ? v_load(logits + i) : v_first(v_load(logits + i, n - i), v_set(-__builtin_inff()), n - i);
        for (uint32_t hits = lanes_at_least(x, t); hits; hits &= hits - 1) {
            if (i + __builtin_ctz(hits) >= n) break;
            if (found < max) out[found] = static_cast<int32_t>(i + __builtin_ctz(hits));
            ++found;
        }
    }
    return found;
}

}  // namespace
}  // namespace pk
