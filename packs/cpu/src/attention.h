// Attention: how one record is cut into items, and what kernels are told.
//
// Inside a page, for kv head h: K is [D, B] (element (d, b) at (h * D + d) * B + b), V is [B, Dv]. K is transposed so
// that one vector holds the same dimension of neighbouring keys: scores need no sums across a vector.
#pragma once
#include <cstdint>

#include "../../pack.h"

namespace pk {

// A piece of work: some query tokens of one row, against one kv head, over a range of keys.
struct AttentionItem {
    int32_t slot;        // for the page table
    int32_t token;       // first query token (index in the step)
    int32_t n_tokens;    // 1: decode kernel, or a prefill block of one token
    int32_t position;    // of the first query token
    int32_t kv_head;
    int32_t key_begin, key_end;         // keys of this item; causality and window cut further, token by token
    int32_t is_prefill;
    int32_t split;                      // number of its partial result; -1: it has all keys and writes `out` itself
    int32_t group_begin, group_splits;  // the partial results that belong together
    int32_t row_end;                    // position behind the row's last token of this step
};

struct AttentionJob {
    const pk_op_attention *op;
    const pk_state *state;
    float *partials;  // [split, G * (Dv + 2)]: accumulators [G, Dv], then maximum and sum of each head
};

constexpr int64_t kPrefillQueries = 256;  // query tokens times heads per kv head in one prefill item
constexpr int64_t kPrefillKeys = 128;     // keys that a prefill item converts at a time
constexpr int64_t kDecodeKeys = 256;      // keys whose scores a decode item holds at a time
constexpr int64_t kDecodeTokens = 4;      // rows with at most this many tokens run token by token
constexpr int64_t kSplitKeys = 128;       // a split has at least this many keys
constexpr int32_t kMaxHeadWidth = 1024;
constexpr float kLowest = -1e30f;         // where running maxima start: finite, so that differences are never NaN

inline int64_t heads_per_kv(const pk_op_attention &op) { return op.n_heads / op.n_kv_heads; }
inline int64_t partial_floats(const pk_op_attention &op) { return heads_per_kv(op) * (op.v_width + 2); }

// Query tokens of one prefill item.
inline int64_t prefill_tokens(const pk_op_attention &op) {
    int64_t n = kPrefillQueries / heads_per_kv(op);
    return n > 0 ? n : 1;
}

// First key that a token at `position` sees, and the one behind the last. row_end: behind the row's last token.
inline int64_t first_key(const pk_op_attention &op, int64_t position) { return op.window > 0 && position + 1 > op.window ? position + 1 - op.window : 0; }
inline int64_t key_limit(const pk_op_attention &op, int64_t position, int64_t row_end) {
    if (!op.is_bidirectional) return position + 1;
    return op.window > 0 && position + op.window < row_end ? position + op.window : row_end;
}

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Scratch of one thread, enough for the kernels of every level.
inline int64_t attention_scratch_bytes(const pk_op_attention &op, int64_t page_tokens) {
    int64_t queries = round_up(prefill_tokens(op) * heads_per_kv(op), 32), width = round_up(op.head_width, 64), v_width = round_up(op.v_width, 64);
    int64_t prefill = queries * (width + v_width + kPrefillKeys + 4) + kPrefillKeys * (width + v_width);
    int64_t tiles = queries * (width + v_width + 4) + kPrefillKeys * (width + v_width) + 128 * kPrefillKeys;
    int64_t decode = 4 * (round_up(page_tokens, 16) + kDecodeKeys + 32 + v_width);
    int64_t most = prefill > tiles ? prefill : tiles;
    return round_up(4 * (most > decode ? most : decode) + 4096, 4096);
}

}  // namespace pk
