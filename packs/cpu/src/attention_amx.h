// Prefill attention on AMX tiles, for ops_amx.cpp.
//
// Scores and outputs are sums of bf16 products in F32 (tdpbf16ps). So that they are as good as F32 products, each operand is
// split into two bf16 numbers, x = high + low, and high*high + low*high + high*low are summed; the term that is left out is
// 2^-16 of the product. BF16 and FP8 pages have no low part. Exponentials are taken to the base 2, with a polynomial of degree 4.
//
// The tile unit and the vector units work at the same time: while one block of queries runs through softmax, the tile
// products of the next block's scores and of the last block's outputs are issued between its rows.
//
// Tiles: A is [16 rows, 32 bf16]; B is [16 pairs, 16 columns, 2 bf16]; C is [16, 16] f32.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS.
#pragma once
#include "attention_level.h"

namespace pk {
namespace {

constexpr int64_t kAmxKeys = 128;      // keys converted at a time
constexpr int64_t kBlockQueries = 32;  // two tiles of queries run through softmax together
constexpr int64_t kTileBytes = 1024;
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kUnseen = -1e32f;      // score of a key that a query must not see: finite, and 2^(kUnseen - kLowest) is 0

// 2^x for x <= 0, within 3e-6 of its value; 0 far below. scalef takes the whole part of x, reduce leaves the fraction.
// Coefficients: minimax fit of 2^r on [0, 1].
inline __m512 exp2_of(__m512 x) {
    __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
    __m512 p = _mm512_set1_ps(0.0135341676f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.0520114612f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.2414427565f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.6930038345f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0000025934f));
    return _mm512_scalef_ps(p, x);
}

// The upper halves of 32 words, a's first.
inline __m512i upper_halves(__m512 a, __m512 b) {
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_epi16(_mm512_castps_si512(a), odd, _mm512_castps_si512(b));
}

// x + half a bf16 unit: its upper half is x rounded to bf16 (ties away from zero).
inline __m512 nudged(__m512 x) { return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000))); }

inline __m512 upper(__m512 x) { return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(0xFFFF0000)))); }

// What is left of x when its rounded upper half is taken away, nudged for its own rounding.
inline __m512 rest_of(__m512 x, __m512 nudged_x) { return nudged(_mm512_sub_ps(x, upper(nudged_x))); }

// 32 numbers as bf16 in their order: the high parts, and the low parts.
inline void store_split(uint8_t *high, uint8_t *low, __m512 a, __m512 b) {
    __m512 x = nudged(a), y = nudged(b);
    _mm512_store_si512(high, upper_halves(x, y));
    _mm512_store_si512(low, upper_halves(rest_of(a, x), rest_of(b, y)));
}

// The same with high parts cut off instead of rounded: good enough for one of two factors, and shorter.
inline void store_cut(uint8_t *high, uint8_t *low, __m512 a, __m512 b) {
    _mm512_store_si512(high, upper_halves(a, b));
    _mm512_store_si512(low, upper_halves(nudged(_mm512_sub_ps(a, upper(a))), nudged(_mm512_sub_ps(b, upper(b)))));
}

// Upper halves as pairs (a[i], b[i]).
inline __m512i paired(__m512 a, __m512 b) {
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(a), 16), _mm512_castps_si512(upper(b)));
}

// 16 pairs (a[i], b[i]) as bf16. low nullptr: the numbers are bf16 already.
inline void store_pairs(uint8_t *high, uint8_t *low, __m512 a, __m512 b) {
    if (!low) {
        _mm512_store_si512(high, paired(a, b));
        return;
    }
    __m512 x = nudged(a), y = nudged(b);
    _mm512_store_si512(high, paired(x, y));
    _mm512_store_si512(low, paired(rest_of(a, x), rest_of(b, y)));
}

struct AmxState {
    int64_t G, n_queries, D, Dv, d_steps, v_tiles;  // d_steps: of 32 dimensions; v_tiles: of 16
    uint8_t *q_high, *q_low;   // [query tile, d step] tiles A
    uint8_t *k_high, *k_low;   // [d step, key tile] tiles B; low is nullptr for BF16 and FP8 pages
    uint8_t *v_high, *v_low;   // [key step, v tile] tiles B
    float *scores;             // [2, kBlockQueries, kAmxKeys]: block b has half b % 2
    uint8_t *p_high, *p_low;   // [2, kBlockQueries, kAmxKeys] bf16
    float *acc;                // [queries, v_tiles * 16]
    float *maximum, *sum;      // [queries], to the base 2
};

constexpr int64_t kKeyTiles = kAmxKeys / 16, kPBytes = kAmxKeys * 2;
constexpr int64_t kScoreFloats = kBlockQueries * kAmxKeys;

// Queries, scaled, in two bf16 parts.
inline void load_queries(const AttentionJob &job, const AttentionItem &item, const AmxState &s) {
    const pk_op_attention &op = *job.op;
    float factor = op.softcap > 0 ? op.scale : op.scale * kLog2E;
    int64_t tiles = (s.n_queries + kBlockQueries - 1) / kBlockQueries * 2;
    std::memset(s.q_high, 0, tiles * s.d_steps * kTileBytes);
    std::memset(s.q_low, 0, tiles * s.d_steps * kTileBytes);
    for (int64_t m = 0; m < s.n_queries; ++m) {
        const float *from = row_of(op.q, item.token + m / s.G) + (item.kv_head * s.G + m % s.G) * s.D;
        for (int64_t d = 0; d < s.D; d += 32) {
            __m512 f = _mm512_set1_ps(factor);
            __m512 a = _mm512_mul_ps(v_load(from + d, s.D - d), f), b = s.D - d > 16 ? _mm512_mul_ps(v_load(from + d + 16, s.D - d - 16), f) : v_zero();
            int64_t at = (m / 16 * s.d_steps + d / 32) * kTileBytes + m % 16 * 64;
            store_split(s.q_high + at, s.q_low + at, a, b);
        }
    }
}

// Dimension d of 16 keys from `key` on, of which n are wanted.
template <int kFormat>
inline __m512 load_keys(const Pages &pages, int64_t offset, int64_t d, int64_t key, int64_t n) {
    constexpr int64_t kBytes = element_bytes<kFormat>();
    int64_t B = pages.page_tokens, at = key % B;
    if (at + 16 <= B && n >= 16) return kv_load<kFormat>(pages.page(key) + offset + (d * B + at) * kBytes);
    alignas(64) uint8_t copy[16 * kBytes] = {};
    for (int64_t i = 0; i < n && i < 16;) {
        int64_t here = (key + i) % B, run = B - here < n - i ? B - here : n - i;
        if (run > 16 - i) run = 16 - i;
        std::memcpy(copy + i * kBytes, pages.page(key + i) + offset + (d * B + here) * kBytes, run * kBytes);
        i += run;
    }
    return kv_load<kFormat>(copy);
}

// Keys [from, to) to tiles; columns and rows behind `to` become 0. So do values before the item's first key: no query sees
// those, but 0 times what lies there must be 0.
template <int kFormat>
void load_chunk(const AttentionJob &job, const Pages &pages, const AttentionItem &item, int64_t from, int64_t to, const AmxState &s) {
    const pk_op_attention &op = *job.op;
    int64_t kv_head = item.kv_head, seen = item.key_begin;
    constexpr int64_t kBytes = element_bytes<kFormat>();
    constexpr bool kExact = kFormat == PK_BF16 || kFormat == PK_FP8_E4M3;
    int64_t B = pages.page_tokens, k_offset = op.k_offset + kv_head * s.D * B * kBytes;
    for (int64_t tile = 0; tile * 16 < to - from; ++tile) {
        int64_t key = from + tile * 16;
        for (int64_t d = 0; d < s.D; d += 2) {
            __m512 a = load_keys<kFormat>(pages, k_offset, d, key, to - key), b = d + 1 < s.D ? load_keys<kFormat>(pages, k_offset, d + 1, key, to - key) : v_zero();
            int64_t at = (d / 32 * kKeyTiles + tile) * kTileBytes + d % 32 / 2 * 64;
            store_pairs(s.k_high + at, kExact ? nullptr : s.k_low + at, a, b);
        }
    }
    int64_t v_row = s.Dv * kBytes;
    for (int64_t i = 0; i < (to - from + 31) / 32 * 32; i += 2) {
        int64_t key = from + i;
        const uint8_t *first = key >= seen && key < to ? pages.page(key) + op.v_offset + (kv_head * B + key % B) * v_row : nullptr;
        const uint8_t *second = key + 1 >= seen && key + 1 < to ? pages.page(key + 1) + op.v_offset + (kv_head * B + (key + 1) % B) * v_row : nullptr;
        for (int64_t t = 0; t < s.v_tiles; ++t) {
            int64_t left = s.Dv - t * 16;
            auto load = [&](const uint8_t *row) {
                if (!row) return v_zero();
                return left >= 16 ? kv_load<kFormat>(row + t * 16 * kBytes) : kv_load<kFormat>(row + t * 16 * kBytes, left);
            };
            int64_t at = (i / 32 * s.v_tiles + t) * kTileBytes + i % 32 / 2 * 64;
            store_pairs(s.v_high + at, kExact ? nullptr : s.v_low + at, load(first), load(second));
        }
    }
}

// The keys of a chunk that a block of queries sees, relative to the chunk, in whole steps of 32. Empty: begin >= end.
struct Span {
    int64_t begin, end;
    int64_t steps() const { return begin < end ? (end - begin) / 32 : 0; }
};

// The products that run beside one block's softmax: the next block's scores, then the last block's outputs. They are cut
// into steps of two tile products, so that they can be dealt out evenly over the softmax: the tile registers are not renamed,
// and a load that waits for one fills the scheduler.
// Tiles 0..3 are C (row-major), 4 and 5 are A, 6 and 7 are B.
class TileWork {
   public:
    TileWork(const AmxState &s, int64_t next, Span next_span, int64_t last, Span last_span)
        : s_(s), next_(next), last_(last), next_span_(next_span), last_span_(last_span), n_parts_(s.k_low ? 3 : 2),
          n_scores_(2 * next_span.steps() * s.d_steps * n_parts_), n_(n_scores_ + 2 * last_span.steps() * ((s.v_tiles + 1) / 2) * n_parts_) {}

    // Deals all steps out over `n_calls` calls of beat().
    void pace(int64_t n_calls) { n_calls_ = n_calls; }

    void beat() {
        for (credit_ += n_; credit_ >= n_calls_ && at_ < n_; credit_ -= n_calls_) step();
    }

    void finish() {
        while (at_ < n_) step();
    }

   private:
    void step() {
        if (at_ < n_scores_)
            score_step();
        else
            value_step();
        ++at_;
    }

    // Of a step's three products: low * high, high * high, high * low; of each, one row of the 2 x 2 block at a time.
    void multiply(const uint8_t *a_high, const uint8_t *a_low, int64_t a_tile, int64_t a_stride, const uint8_t *b_high, const uint8_t *b_low,
                  int64_t b_tile) const {
        const uint8_t *a = part_ == 0 ? a_low : a_high, *b = part_ == 2 ? b_low : b_high;
        if (!is_second_) {
            if (part_ != 1) _tile_loadd(6, b, 64);
            if (part_ != 2) _tile_loadd(4, a, a_stride);
            _tile_dpbf16ps(0, 4, 6);
            if (part_ != 1) _tile_loadd(7, b + b_tile, 64);
            _tile_dpbf16ps(1, 4, 7);
        } else {
            if (part_ != 2) _tile_loadd(5, a + a_tile, a_stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }

    // Scores of the next block against two tiles of keys, one dimension step after the other.
    void score_step() {
        int64_t tile = next_span_.begin / 16 + 2 * pair_;
        if (depth_ == 0 && part_ == 0 && !is_second_) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        int64_t a = (next_ * 2 * s_.d_steps + depth_) * kTileBytes, b = (depth_ * kKeyTiles + tile) * kTileBytes;
        multiply(s_.q_high + a, s_.q_low + a, s_.d_steps * kTileBytes, 64, s_.k_high + b, s_.k_low + b, kTileBytes);
        if (!advance(s_.d_steps)) return;
        constexpr int64_t kStride = kAmxKeys * 4;
        float *out = s_.scores + next_ % 2 * kScoreFloats + tile * 16;
        _tile_stored(0, out, kStride);
        _tile_stored(1, out + 16, kStride);
        _tile_stored(2, out + 16 * kAmxKeys, kStride);
        _tile_stored(3, out + 16 * kAmxKeys + 16, kStride);
        if (at_ + 1 == n_scores_) pair_ = 0;
    }

    // Outputs of the last block in two tiles of values, one key step after the other. An odd last tile is computed twice and
    // stored once.
    void value_step() {
        int64_t t = 2 * pair_, stride = s_.v_tiles * 64;
        bool is_pair = t + 1 < s_.v_tiles;
        float *out = s_.acc + last_ * kBlockQueries * s_.v_tiles * 16 + t * 16, *below = out + 16 * s_.v_tiles * 16;
        if (depth_ == 0 && part_ == 0 && !is_second_) {
            _tile_loadd(0, out, stride);
            _tile_loadd(1, out + (is_pair ? 16 : 0), stride);
            _tile_loadd(2, below, stride);
            _tile_loadd(3, below + (is_pair ? 16 : 0), stride);
        }
        int64_t k = last_span_.begin / 32 + depth_, a = last_ % 2 * kBlockQueries * kPBytes + k * 64, b = (k * s_.v_tiles + t) * kTileBytes;
        multiply(s_.p_high + a, s_.p_low + a, 16 * kPBytes, kPBytes, s_.v_high + b, s_.v_low + b, is_pair ? kTileBytes : 0);
        if (!advance(last_span_.steps())) return;
        _tile_stored(0, out, stride);
        _tile_stored(2, below, stride);
        if (!is_pair) return;
        _tile_stored(1, out + 16, stride);
        _tile_stored(3, below + 16, stride);
    }

    // To the next part, depth, pair. True when a pair of C columns is complete.
    bool advance(int64_t depths) {
        is_second_ = !is_second_;
        if (is_second_ || ++part_ < n_parts_) return false;
        part_ = 0;
        if (++depth_ < depths) return false;
        depth_ = 0;
        ++pair_;
        return true;
    }

    const AmxState &s_;
    int64_t next_, last_;
    Span next_span_, last_span_;
    int64_t n_parts_, n_scores_, n_, at_ = 0, pair_ = 0, depth_ = 0, part_ = 0, n_calls_ = 1, credit_ = 0;
    bool is_second_ = false;
};

// Query m's scores in the span become weights in two bf16 parts; [low, high) are the keys it sees.
inline void soften_row(const AmxState &s, TileWork &work, int64_t m, Span span, int64_t low, int64_t high, float softcap) {
    int64_t r = m % (2 * kBlockQueries);
    float *x = s.scores + r * kAmxKeys;
    const __m512 never = _mm512_set1_ps(kUnseen);
    __m512 top = _mm512_set1_ps(s.maximum[m]);
    for (int64_t i = span.begin; i < span.end; i += 16) {
        __m512 v = _mm512_load_ps(x + i);
        if (softcap > 0) v = v_mul(v_set(softcap * kLog2E), v_tanh(v_mul(v, v_set(1.0f / softcap))));
        if (i < low || i + 16 > high) {
            auto seen = static_cast<__mmask16>(first_n(high > i ? high - i : 0) & ~first_n(low > i ? low - i : 0));
            v = _mm512_mask_mov_ps(never, seen, v);
            _mm512_store_ps(x + i, v);
        } else if (softcap > 0) {
            _mm512_store_ps(x + i, v);
        }
        top = _mm512_max_ps(top, v);
    }
    float highest = _mm512_reduce_max_ps(top);
    if (highest > s.maximum[m]) {
        float factor = _mm512_cvtss_f32(exp2_of(_mm512_set1_ps(s.maximum[m] - highest)));
        s.sum[m] *= factor;
        float *acc = s.acc + m * s.v_tiles * 16;
        for (int64_t t = 0; t < s.v_tiles; ++t) _mm512_store_ps(acc + t * 16, _mm512_mul_ps(_mm512_load_ps(acc + t * 16), _mm512_set1_ps(factor)));
        s.maximum[m] = highest;
    }
    __m512 offset = _mm512_set1_ps(highest), total = v_zero();
    uint8_t *p_high = s.p_high + r * kPBytes, *p_low = s.p_low + r * kPBytes;
    for (int64_t i = span.begin; i < span.end; i += 32) {
        work.beat();
        __m512 a = exp2_of(_mm512_sub_ps(_mm512_load_ps(x + i), offset)), b = exp2_of(_mm512_sub_ps(_mm512_load_ps(x + i + 16), offset));
        total = _mm512_add_ps(total, _mm512_add_ps(a, b));
        store_cut(p_high + i * 2, p_low + i * 2, a, b);
    }
    s.sum[m] += _mm512_reduce_add_ps(total);
}

// Keys [from, to), which lie in the tiles, against all blocks of queries.
inline void attend_chunk(const AttentionJob &job, const AttentionItem &item, const AmxState &s, int64_t from, int64_t to) {
    const pk_op_attention &op = *job.op;
    int64_t n_blocks = (s.n_queries + kBlockQueries - 1) / kBlockQueries;
    auto span_of = [&](int64_t block) -> Span {
        if (block < 0 || block >= n_blocks) return {0, 0};
        int64_t m0 = block * kBlockQueries, m1 = m0 + kBlockQueries < s.n_queries ? m0 + kBlockQueries : s.n_queries;
        int64_t last = item.position + (m1 - 1) / s.G, lowest = first_key(op, item.position + m0 / s.G);
        int64_t limit = key_limit(op, last, item.row_end), end = (limit < to ? limit : to) - from, begin = lowest > from ? (lowest - from) / 32 * 32 : 0;
        return begin < end ? Span{begin, round_up(end, 32)} : Span{0, 0};
    };
    for (int64_t block = -1; block <= n_blocks; ++block) {
        Span span = span_of(block);
        TileWork work(s, block + 1, span_of(block + 1), block - 1, span_of(block - 1));
        int64_t n_rows = 0;
        if (span.begin < span.end) n_rows = s.n_queries - block * kBlockQueries < kBlockQueries ? s.n_queries - block * kBlockQueries : kBlockQueries;
        work.pace(n_rows * span.steps());
        for (int64_t r = 0; r < n_rows; ++r) {
            int64_t m = block * kBlockQueries + r, position = item.position + m / s.G, low = first_key(op, position) - from, high = key_limit(op, position, item.row_end) - from;
            soften_row(s, work, m, span, low > 0 ? low : 0, high < to - from ? high : to - from, op.softcap);
        }
        work.finish();
    }
}

// Every tile register as 16 rows of 64 bytes. The compiler believes that the instruction reads eight bytes only, so the
// configuration must be a constant in memory.
inline void configure_tiles() {
    alignas(64) static constexpr uint8_t kConfig[64] = {1,  0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0,
                                                         0,  0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16};
    _tile_loadconfig(kConfig);
}

template <int kFormat>
void attend_prefill_tiles(const AttentionJob &job, const AttentionItem &item, uint8_t *scratch) {
    const pk_op_attention &op = *job.op;
    AmxState s;
    s.G = heads_per_kv(op);
    s.n_queries = item.n_tokens * s.G;
    s.D = op.head_width;
    s.Dv = op.v_width;
    s.d_steps = (s.D + 31) / 32;
    s.v_tiles = (s.Dv + 15) / 16;
    int64_t queries = round_up(s.n_queries, kBlockQueries);
    auto take = [&scratch](int64_t n) {
        uint8_t *at = scratch;
        scratch += round_up(n, 64);
        return at;
    };
    constexpr bool kExact = kFormat == PK_BF16 || kFormat == PK_FP8_E4M3;
    s.q_high = take(queries / 16 * s.d_steps * kTileBytes);
    s.q_low = take(queries / 16 * s.d_steps * kTileBytes);
    s.k_high = take(s.d_steps * kKeyTiles * kTileBytes);
    s.k_low = kExact ? nullptr : take(s.d_steps * kKeyTiles * kTileBytes);
    s.v_high = take(kAmxKeys / 32 * s.v_tiles * kTileBytes);
    s.v_low = kExact ? nullptr : take(kAmxKeys / 32 * s.v_tiles * kTileBytes);
    s.scores = reinterpret_cast<float *>(take(2 * kScoreFloats * 4));
    s.p_high = take(2 * kBlockQueries * kPBytes);
    s.p_low = take(2 * kBlockQueries * kPBytes);
    s.acc = reinterpret_cast<float *>(take(queries * s.v_tiles * 64));
    s.maximum = reinterpret_cast<float *>(take(queries * 4));
    s.sum = reinterpret_cast<float *>(take(queries * 4));

    const float *sinks = reinterpret_cast<const float *>(op.sinks.data);
    for (int64_t m = 0; m < s.n_queries; ++m) {
        s.maximum[m] = sinks ? sinks[item.kv_head * s.G + m % s.G] * kLog2E : kLowest;
        s.sum[m] = sinks ? 1.0f : 0.0f;
    }
    std::memset(s.acc, 0, queries * s.v_tiles * 64);
    // Rows of queries that do not exist and dimensions behind D and Dv must be numbers: they run through the tiles too.
    std::memset(s.p_high, 0, 4 * kBlockQueries * kPBytes);
    std::memset(s.k_high, 0, (kExact ? 1 : 2) * s.d_steps * kKeyTiles * kTileBytes);
    load_queries(job, item, s);
    Pages pages = pages_of(job, item.slot);
    configure_tiles();
    int64_t start = item.key_begin / pages.page_tokens * pages.page_tokens;
    for (int64_t from = start; from < item.key_end; from += kAmxKeys) {
        int64_t to = from + kAmxKeys < item.key_end ? from + kAmxKeys : item.key_end;
        load_chunk<kFormat>(job, pages, item, from, to, s);
        attend_chunk(job, item, s, from, to);
    }
    _tile_release();
    for (int64_t m = 0; m < s.n_queries; ++m) {
        const int64_t head = item.kv_head * s.G + m % s.G;
        finish_row(op, head, row_of(op.out, item.token + m / s.G) + head * s.Dv, s.acc + m * s.v_tiles * 16, s.sum[m]);
    }
}

void attend_prefill_amx(const AttentionJob &job, const AttentionItem &item, void *scratch) {
    if (job.op->parts == PK_PARTS_LATENT) return attend_prefill(job, item, scratch);
    auto *bytes = static_cast<uint8_t *>(scratch);
    switch (job.op->kv_format) {
        case PK_F32: return attend_prefill_tiles<PK_F32>(job, item, bytes);
        case PK_F16: return attend_prefill_tiles<PK_F16>(job, item, bytes);
        case PK_FP8_E4M3: return attend_prefill_tiles<PK_FP8_E4M3>(job, item, bytes);
        default: return attend_prefill_tiles<PK_BF16>(job, item, bytes);
    }
}

}  // namespace
}  // namespace pk
