// Attention kernels in F32 arithmetic, for one level. Decode: few query tokens, keys read where they lie. Prefill: a block
// of queries against chunks of keys converted to F32, products in register tiles, softmax kept online.
// Source of the online form: Milakov and Gimelshein 2018; of the blocked form: Dao et al. 2022, algorithm 1.
#pragma once
#include "attention.h"
#include "simd.h"

namespace pk {
namespace {

template <int kFormat>
inline vf kv_load(const uint8_t *p) {
    if constexpr (kFormat == PK_F32) return v_load(reinterpret_cast<const float *>(p));
    if constexpr (kFormat == PK_F16) return v_from_f16(reinterpret_cast<const uint16_t *>(p));
    if constexpr (kFormat == PK_FP8_E4M3) return v_from_e4m3(p);
    return v_from_bf16(reinterpret_cast<const uint16_t *>(p));
}

template <int kFormat>
constexpr int64_t element_bytes() {
    return kFormat == PK_F32 ? 4 : kFormat == PK_FP8_E4M3 ? 1 : 2;
}

// The first n < kLanes elements; the others are 0.
template <int kFormat>
inline vf kv_load(const uint8_t *p, int64_t n) {
    constexpr int64_t kBytes = element_bytes<kFormat>();
    alignas(64) uint8_t copy[kLanes * kBytes] = {};
    std::memcpy(copy, p, n * kBytes);
    return kv_load<kFormat>(copy);
}

struct Pages {
    const uint8_t *pool;
    const int32_t *table;
    int64_t stride, page_tokens;
    const uint8_t *page(int64_t key) const { return pool + table[key / page_tokens] * stride; }
};

inline Pages pages_of(const AttentionJob &job, int32_t slot) {
    const pk_state &s = *job.state;
    return {reinterpret_cast<const uint8_t *>(s.kv), reinterpret_cast<const int32_t *>(s.page_table) + int64_t{slot} * s.slot_pages, s.kv_page_stride,
            s.page_tokens};
}

inline float *row_of(const pk_tensor &t, int64_t row) { return reinterpret_cast<float *>(t.data + row * t.stride); }

inline const uint8_t *fetch_line(const uint8_t *p) {
    _mm_prefetch(reinterpret_cast<const char *>(p), _MM_HINT_T0);
    return p + 64;
}

// Scores of one page's keys [first, first + n) against kHeads queries: out[g][i] = q[g] . k[first + i].
// Beside the work, a line of what is needed next is fetched from each of `ahead_k` and `ahead_v`: pages lie anywhere, and a
// head's share of one is too short for hardware to see the pattern in time.
template <int kFormat, int kHeads>
inline void score_page(const uint8_t *k, int64_t page_tokens, int64_t width, int64_t first, int64_t n, const float *q, int64_t q_stride, float *out,
                       int64_t out_stride, const uint8_t *ahead_k, const uint8_t *ahead_v) {
    constexpr int64_t kBytes = element_bytes<kFormat>();
    int64_t step = page_tokens * kBytes;
    for (int64_t i = 0; i < n; i += kLanes) {
        int64_t left = n - i, in_page = page_tokens - first - i;
        const uint8_t *at = k + (first + i) * kBytes;
        vf even[kHeads], odd[kHeads];
        for (int g = 0; g < kHeads; ++g) even[g] = odd[g] = v_zero();
        if (in_page >= kLanes) {
            int64_t d = 0;
            for (; d + 1 < width; d += 2, at += 2 * step) {
                ahead_k = fetch_line(ahead_k);
                ahead_v = fetch_line(ahead_v);
                vf a = kv_load<kFormat>(at), b = kv_load<kFormat>(at + step);
                for (int g = 0; g < kHeads; ++g) {
                    even[g] = v_fma(v_set(q[g * q_stride + d]), a, even[g]);
                    odd[g] = v_fma(v_set(q[g * q_stride + d + 1]), b, odd[g]);
                }
            }
            if (d < width) {
                vf a = kv_load<kFormat>(at);
                for (int g = 0; g < kHeads; ++g) even[g] = v_fma(v_set(q[g * q_stride + d]), a, even[g]);
            }
        } else {
            for (int64_t d = 0; d < width; ++d, at += step) {
                vf a = kv_load<kFormat>(at, in_page);
                for (int g = 0; g < kHeads; ++g) even[g] = v_fma(v_set(q[g * q_stride + d]), a, even[g]);
            }
        }
        for (int g = 0; g < kHeads; ++g) v_store(out + g * out_stride + i, v_add(even[g], odd[g]), left);
    }
}

// acc[g][0 .. kVectors * kLanes) += sum over keys of p[g][key] * v[key]; `tail` > 0: only so many lanes of the last vector.
template <int kFormat, int kHeads, int kVectors>
inline void weigh_values(const Pages &pages, int64_t v_offset, int64_t row, int64_t begin, int64_t end, const float *p, int64_t p_stride, float *acc,
                         int64_t acc_stride, int64_t tail) {
    constexpr int64_t kBytes = element_bytes<kFormat>();
    vf sums[kHeads][kVectors];
    for (int g = 0; g < kHeads; ++g)
        for (int i = 0; i < kVectors; ++i) sums[g][i] = v_load(acc + g * acc_stride + i * kLanes);
    for (int64_t key = begin; key < end;) {
        int64_t at = key % pages.page_tokens, n = pages.page_tokens - at;
        if (n > end - key) n = end - key;
        const uint8_t *v = pages.page(key) + v_offset + at * row;
        for (int64_t j = 0; j < n; ++j, v += row) {
            vf values[kVectors];
            for (int i = 0; i < kVectors; ++i)
                values[i] = i == kVectors - 1 && tail ? kv_load<kFormat>(v + i * kLanes * kBytes, tail) : kv_load<kFormat>(v + i * kLanes * kBytes);
            for (int g = 0; g < kHeads; ++g) {
                vf weight = v_set(p[g * p_stride + key - begin + j]);
                for (int i = 0; i < kVectors; ++i) sums[g][i] = v_fma(weight, values[i], sums[g][i]);
            }
        }
        key += n;
    }
    for (int g = 0; g < kHeads; ++g)
        for (int i = 0; i < kVectors; ++i) v_store(acc + g * acc_stride + i * kLanes, sums[g][i]);
}

inline void cap_scores(float *s, int64_t n, float softcap) {
    vf cap = v_set(softcap), inverse = v_set(1.0f / softcap);
    for (int64_t i = 0; i < n; i += kLanes) v_store(s + i, v_mul(cap, v_tanh(v_mul(v_load(s + i), inverse))));
}

inline void scale_row(float *x, int64_t n, float factor) {
    vf f = v_set(factor);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) v_store(x + i, v_mul(v_load(x + i), f));
    if (i < n) v_store(x + i, v_mul(v_load(x + i, n - i), f), n - i);
}

// Turns n scores into weights exp(s - maximum), in place; updates the running maximum and sum of the row, and scales its
// accumulator when the maximum moved. s has room for whole vectors; lanes from n on become 0.
inline void soften(float *s, int64_t n, float &maximum, float &sum, float *acc, int64_t acc_width) {
    vf high = v_set(maximum);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) high = v_max(high, v_load(s + i));
    if (i < n) high = v_max(high, v_first(v_load(s + i), v_set(kLowest), n - i));
    float top = v_highest(high);
    if (top > maximum) {
        float factor = __builtin_expf(maximum - top);
        sum *= factor;
        scale_row(acc, acc_width, factor);
        maximum = top;
    }
    vf offset = v_set(maximum), total = v_zero();
    for (i = 0; i < n; i += kLanes) {
        vf e = v_exp(v_sub(v_load(s + i), offset));
        if (i + kLanes > n) e = v_first(e, v_zero(), n - i);
        v_store(s + i, e);
        total = v_add(total, e);
    }
    sum += v_sum(total);
}

struct DecodeState {
    const float *q;    // [kHeads] rows of head_width floats, scaled
    float *scores;     // [kHeads, score_stride]
    int64_t score_stride;
    float *acc;        // [kHeads, acc_stride]
    int64_t acc_stride;
    float *maximum, *sum;
};

template <int kFormat, int kHeads>
void decode_heads(const AttentionJob &job, const Pages &pages, const AttentionItem &item, int64_t begin, const DecodeState &d) {
    const pk_op_attention &op = *job.op;
    constexpr int64_t kBytes = element_bytes<kFormat>();
    int64_t B = pages.page_tokens, k_head = op.k_offset + int64_t{item.kv_head} * op.head_width * B * kBytes;
    int64_t v_row = int64_t{op.v_width} * kBytes, v_head = op.v_offset + item.kv_head * B * v_row;
    constexpr int kMost = 4;
    for (int64_t from = begin; from < item.key_end;) {
        int64_t to = from / B * B + (kDecodeKeys > B ? kDecodeKeys / B * B : B);
        if (to > item.key_end) to = item.key_end;
        for (int64_t key = from; key < to;) {
            int64_t first = key % B, n = B - first;
            if (n > to - key) n = to - key;
            const uint8_t *page = pages.page(key), *next = key + n < item.key_end ? pages.page(key + n) : page;
            score_page<kFormat, kHeads>(page + k_head, B, op.head_width, first, n, d.q, op.head_width, d.scores + key - from, d.score_stride, next + k_head,
                                        page + v_head + first * v_row);
            key += n;
        }
        for (int g = 0; g < kHeads; ++g) {
            float *s = d.scores + g * d.score_stride;
            if (op.softcap > 0) cap_scores(s, to - from, op.softcap);
            soften(s, to - from, d.maximum[g], d.sum[g], d.acc + g * d.acc_stride, d.acc_stride);
        }
        int64_t at = 0;
        for (; at + kMost * kLanes <= op.v_width; at += kMost * kLanes)
            weigh_values<kFormat, kHeads, kMost>(pages, v_head + at * kBytes, v_row, from, to, d.scores, d.score_stride, d.acc + at, d.acc_stride, 0);
        for (; at < op.v_width; at += kLanes) {
            int64_t left = op.v_width - at;
            weigh_values<kFormat, kHeads, 1>(pages, v_head + at * kBytes, v_row, from, to, d.scores, d.score_stride, d.acc + at, d.acc_stride,
                                             left < kLanes ? left : 0);
        }
        from = to;
    }
}

inline float gain_of(const pk_op_attention &op, int64_t head) { return op.gains.data ? reinterpret_cast<const float *>(op.gains.data)[head] : 1.0f; }

// The end of a head's sum of values: out is `head`'s.
inline void finish_row(const pk_op_attention &op, int64_t head, float *out, const float *acc, float sum) {
    const int64_t width = op.v_width;
    vf factor = v_set(sum > 0 ? gain_of(op, head) / sum : 0.0f);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) v_store(out + i, v_mul(v_load(acc + i), factor));
    if (i < width) v_store(out + i, v_mul(v_load(acc + i), factor), width - i);
}

template <int kFormat>
void attend_decode_format(const AttentionJob &job, const AttentionItem &item, float *scratch) {
    const pk_op_attention &op = *job.op;
    int64_t G = heads_per_kv(op), width = op.head_width, v_pad = round_up(op.v_width, 64);
    Pages pages = pages_of(job, item.slot);
    int64_t score_stride = round_up(pages.page_tokens > kDecodeKeys ? pages.page_tokens : kDecodeKeys, 16) + 16;
    int64_t begin = item.key_begin;
    const float *sinks = reinterpret_cast<const float *>(op.sinks.data);
    const float *q_row = row_of(op.q, item.token) + item.kv_head * G * width;
    alignas(64) float q[4 * kMaxHeadWidth];
    for (int64_t g0 = 0; g0 < G; g0 += 4) {
        int64_t n = G - g0 < 4 ? G - g0 : 4;
        float maximum[4], sum[4];
        for (int64_t g = 0; g < n; ++g) {
            const float *from = q_row + (g0 + g) * width;
            for (int64_t i = 0; i < width; ++i) q[g * width + i] = from[i] * op.scale;
            bool has_sink = sinks && item.split < 0;
            maximum[g] = has_sink ? sinks[item.kv_head * G + g0 + g] : kLowest;
            sum[g] = has_sink ? 1.0f : 0.0f;
        }
        float *acc = scratch + 4 * score_stride;
        std::memset(acc, 0, n * v_pad * sizeof(float));
        DecodeState d{q, scratch, score_stride, acc, v_pad, maximum, sum};
        switch (n) {
            case 1: decode_heads<kFormat, 1>(job, pages, item, begin, d); break;
            case 2: decode_heads<kFormat, 2>(job, pages, item, begin, d); break;
            case 3: decode_heads<kFormat, 3>(job, pages, item, begin, d); break;
            default: decode_heads<kFormat, 4>(job, pages, item, begin, d); break;
        }
        for (int64_t g = 0; g < n; ++g) {
            if (item.split < 0) {
                const int64_t head = item.kv_head * G + g0 + g;
                finish_row(op, head, row_of(op.out, item.token) + head * op.v_width, acc + g * v_pad, sum[g]);
                continue;
            }
            float *partial = job.partials + item.split * partial_floats(op);
            std::memcpy(partial + (g0 + g) * op.v_width, acc + g * v_pad, op.v_width * sizeof(float));
            partial[G * op.v_width + 2 * (g0 + g)] = maximum[g];
            partial[G * op.v_width + 2 * (g0 + g) + 1] = sum[g];
        }
    }
}

void attend_decode(const AttentionJob &job, const AttentionItem &item, void *scratch) {
    auto *floats = static_cast<float *>(scratch);
    switch (job.op->kv_format) {
        case PK_F32: return attend_decode_format<PK_F32>(job, item, floats);
        case PK_F16: return attend_decode_format<PK_F16>(job, item, floats);
        case PK_FP8_E4M3: return attend_decode_format<PK_FP8_E4M3>(job, item, floats);
        default: return attend_decode_format<PK_BF16>(job, item, floats);
    }
}

// Joins the partial results of one token and kv head.
void attend_merge(const AttentionJob &job, const AttentionItem &item) {
    const pk_op_attention &op = *job.op;
    int64_t G = heads_per_kv(op), Dv = op.v_width;
    const float *sinks = reinterpret_cast<const float *>(op.sinks.data);
    const float *first = job.partials + item.group_begin * partial_floats(op);
    for (int64_t g = 0; g < G; ++g) {
        float maximum = sinks ? sinks[item.kv_head * G + g] : kLowest;
        float sum = sinks ? 1.0f : 0.0f, top = maximum;
        for (int64_t s = 0; s < item.group_splits; ++s) {
            float m = first[s * partial_floats(op) + G * Dv + 2 * g];
            if (m > top) top = m;
        }
        sum *= __builtin_expf(maximum - top);
        float *out = row_of(op.out, item.token) + (item.kv_head * G + g) * Dv;
        std::memset(out, 0, Dv * sizeof(float));
        for (int64_t s = 0; s < item.group_splits; ++s) {
            const float *partial = first + s * partial_floats(op);
            float factor = __builtin_expf(partial[G * Dv + 2 * g] - top);
            sum += factor * partial[G * Dv + 2 * g + 1];
            for (int64_t i = 0; i < Dv; ++i) out[i] += factor * partial[g * Dv + i];
        }
        scale_row(out, Dv, sum > 0 ? gain_of(op, item.kv_head * G + g) / sum : 0.0f);
    }
}

// ---- prefill ----

// c[kRows][kVectors * kLanes] (+)= a[kRows][depth] * b[depth][...]: the register tile of both products.
template <int kRows, int kVectors, bool kAdd>
inline void tile(const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t depth, float *c, int64_t c_stride) {
    vf sums[kRows][kVectors];
    for (int r = 0; r < kRows; ++r)
        for (int i = 0; i < kVectors; ++i) sums[r][i] = kAdd ? v_load(c + r * c_stride + i * kLanes) : v_zero();
    for (int64_t k = 0; k < depth; ++k) {
        vf right[kVectors];
        for (int i = 0; i < kVectors; ++i) right[i] = v_load(b + k * b_stride + i * kLanes);
        for (int r = 0; r < kRows; ++r) {
            vf left = v_set(a[r * a_stride + k]);
            for (int i = 0; i < kVectors; ++i) sums[r][i] = v_fma(left, right[i], sums[r][i]);
        }
    }
    for (int r = 0; r < kRows; ++r)
        for (int i = 0; i < kVectors; ++i) v_store(c + r * c_stride + i * kLanes, sums[r][i]);
}

constexpr int64_t kTileRows = 6;
constexpr int kTileVectors = kLanes == 16 ? 4 : 2;

template <int kRows, bool kAdd>
inline void tile_columns(const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t depth, float *c, int64_t c_stride, int64_t n_vectors) {
    int64_t i = 0;
    for (; i + kTileVectors <= n_vectors; i += kTileVectors)
        tile<kRows, kTileVectors, kAdd>(a, a_stride, b + i * kLanes, b_stride, depth, c + i * kLanes, c_stride);
    for (; i < n_vectors; ++i) tile<kRows, 1, kAdd>(a, a_stride, b + i * kLanes, b_stride, depth, c + i * kLanes, c_stride);
}

// rows <= kTileRows.
template <bool kAdd>
inline void tile_rows(int64_t rows, const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t depth, float *c, int64_t c_stride,
                      int64_t n_vectors) {
    switch (rows) {
        case 6: return tile_columns<6, kAdd>(a, a_stride, b, b_stride, depth, c, c_stride, n_vectors);
        case 5: return tile_columns<5, kAdd>(a, a_stride, b, b_stride, depth, c, c_stride, n_vectors);
        case 4: return tile_columns<4, kAdd>(a, a_stride, b, b_stride, depth, c, c_stride, n_vectors);
        case 3: return tile_columns<3, kAdd>(a, a_stride, b, b_stride, depth, c, c_stride, n_vectors);
        case 2: return tile_columns<2, kAdd>(a, a_stride, b, b_stride, depth, c, c_stride, n_vectors);
        default: return tile_columns<1, kAdd>(a, a_stride, b, b_stride, depth, c, c_stride, n_vectors);
    }
}

// Keys [from, to) of a head as F32: k [D, kPrefillKeys], v [keys, v_pad] with zeros behind Dv.
template <int kFormat>
void convert_chunk(const AttentionJob &job, const Pages &pages, int64_t kv_head, int64_t from, int64_t to, float *k, float *v, int64_t v_pad) {
    const pk_op_attention &op = *job.op;
    constexpr int64_t kBytes = element_bytes<kFormat>();
    int64_t B = pages.page_tokens, D = op.head_width, Dv = op.v_width;
    for (int64_t key = from; key < to;) {
        int64_t at = key % B, n = B - at;
        if (n > to - key) n = to - key;
        const uint8_t *k_from = pages.page(key) + op.k_offset + (kv_head * D * B + at) * kBytes;
        const uint8_t *v_from = pages.page(key) + op.v_offset + (kv_head * B + at) * Dv * kBytes;
        if (op.parts == PK_PARTS_LATENT) v_from = nullptr;
        for (int64_t d = 0; d < D; ++d, k_from += B * kBytes) {
            float *out = k + d * kPrefillKeys + key - from;
            int64_t i = 0;
            for (; i + kLanes <= n; i += kLanes) v_store(out + i, kv_load<kFormat>(k_from + i * kBytes));
            if (i < n) v_store(out + i, kv_load<kFormat>(k_from + i * kBytes, n - i), n - i);
        }
        if (!v_from)
            for (int64_t d = 0; d < Dv; ++d)
                for (int64_t j = 0; j < n; ++j) v[(key - from + j) * v_pad + d] = k[(D - Dv + d) * kPrefillKeys + key - from + j];
        for (int64_t j = 0; v_from && j < n; ++j, v_from += Dv * kBytes) {
            float *out = v + (key - from + j) * v_pad;
            int64_t i = 0;
            for (; i + kLanes <= Dv; i += kLanes) v_store(out + i, kv_load<kFormat>(v_from + i * kBytes));
            if (i < Dv) v_store(out + i, kv_load<kFormat>(v_from + i * kBytes, Dv - i));
        }
        key += n;
    }
}

struct PrefillState {
    int64_t G, n_queries, width, v_pad;
    float *q, *scores, *acc, *maximum, *sum, *k, *v;
};

// One chunk of keys against queries [m, m + rows).
inline void prefill_tile(const AttentionJob &job, const AttentionItem &item, const PrefillState &p, int64_t from, int64_t to, int64_t m, int64_t rows) {
    const pk_op_attention &op = *job.op;
    int64_t last = item.position + (m + rows - 1) / p.G, first = item.position + m / p.G;
    int64_t limit = key_limit(op, last, item.row_end), end = limit < to ? limit : to, begin = first_key(op, first);
    begin = begin > from ? (begin - from) / kLanes * kLanes + from : from;
    if (begin >= end) return;
    int64_t skip = begin - from, n = end - begin;
    float *scores = p.scores + m * kPrefillKeys;
    tile_rows<false>(rows, p.q + m * p.width, p.width, p.k + skip, kPrefillKeys, p.width, scores, kPrefillKeys, (n + kLanes - 1) / kLanes);
    for (int64_t r = 0; r < rows; ++r) {
        float *s = scores + r * kPrefillKeys;
        int64_t position = item.position + (m + r) / p.G, low = first_key(op, position) - begin, high = key_limit(op, position, item.row_end) - begin;
        if (op.softcap > 0) cap_scores(s, n, op.softcap);
        if (high > n) high = n;
        for (int64_t i = 0; i < low && i < n; ++i) s[i] = -__builtin_inff();
        for (int64_t i = high > 0 ? high : 0; i < n; ++i) s[i] = -__builtin_inff();
        soften(s, n, p.maximum[m + r], p.sum[m + r], p.acc + (m + r) * p.v_pad, p.v_pad);
    }
    tile_rows<true>(rows, scores, kPrefillKeys, p.v + skip * p.v_pad, p.v_pad, n, p.acc + m * p.v_pad, p.v_pad, (op.v_width + kLanes - 1) / kLanes);
}

template <int kFormat>
void attend_prefill_format(const AttentionJob &job, const AttentionItem &item, float *scratch) {
    const pk_op_attention &op = *job.op;
    PrefillState p;
    p.G = heads_per_kv(op);
    p.n_queries = item.n_tokens * p.G;
    p.width = op.head_width;
    p.v_pad = round_up(op.v_width, 64);
    int64_t most = round_up(p.n_queries, 16);
    p.q = scratch;
    p.scores = p.q + most * p.width;
    p.scores = reinterpret_cast<float *>((reinterpret_cast<uintptr_t>(p.scores) + 63) & ~uintptr_t{63});
    p.acc = p.scores + most * kPrefillKeys;
    p.k = p.acc + most * p.v_pad;
    p.v = p.k + kPrefillKeys * p.width;
    p.maximum = p.v + kPrefillKeys * p.v_pad;
    p.sum = p.maximum + most;
    const float *sinks = reinterpret_cast<const float *>(op.sinks.data);
    for (int64_t m = 0; m < p.n_queries; ++m) {
        int64_t head = item.kv_head * p.G + m % p.G;
        const float *from = row_of(op.q, item.token + m / p.G) + head * p.width;
        for (int64_t i = 0; i < p.width; ++i) p.q[m * p.width + i] = from[i] * op.scale;
        p.maximum[m] = sinks ? sinks[head] : kLowest;
        p.sum[m] = sinks ? 1.0f : 0.0f;
    }
    std::memset(p.acc, 0, p.n_queries * p.v_pad * sizeof(float));
    std::memset(p.k, 0, kPrefillKeys * (p.width + p.v_pad) * sizeof(float));
    Pages pages = pages_of(job, item.slot);
    for (int64_t from = item.key_begin; from < item.key_end; from += kPrefillKeys) {
        int64_t to = from + kPrefillKeys < item.key_end ? from + kPrefillKeys : item.key_end;
        convert_chunk<kFormat>(job, pages, item.kv_head, from, to, p.k, p.v, p.v_pad);
        for (int64_t m = 0; m < p.n_queries; m += kTileRows)
            prefill_tile(job, item, p, from, to, m, p.n_queries - m < kTileRows ? p.n_queries - m : kTileRows);
    }
    for (int64_t m = 0; m < p.n_queries; ++m) {
        const int64_t head = item.kv_head * p.G + m % p.G;
        finish_row(op, head, row_of(op.out, item.token + m / p.G) + head * op.v_width, p.acc + m * p.v_pad, p.sum[m]);
    }
}

[[maybe_unused]] void attend_prefill(const AttentionJob &job, const AttentionItem &item, void *scratch) {
    auto *floats = static_cast<float *>(scratch);
    switch (job.op->kv_format) {
        case PK_F32: return attend_prefill_format<PK_F32>(job, item, floats);
        case PK_F16: return attend_prefill_format<PK_F16>(job, item, floats);
        case PK_FP8_E4M3: return attend_prefill_format<PK_FP8_E4M3>(job, item, floats);
        default: return attend_prefill_format<PK_BF16>(job, item, floats);
    }
}

}  // namespace
}  // namespace pk
