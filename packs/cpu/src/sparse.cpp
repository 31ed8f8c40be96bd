// Attention over the blocks that an index chooses (pk_op_sparse in rare.h). Rows that see all their blocks are left to dense attention.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "format/layout.h"
#include "rare_ops.h"
#include "recurrent.h"

namespace pk {
namespace {

pk_op_attention dense_of(const pk_op_sparse &op) {
    pk_op_attention dense{};
    dense.op = PK_OP_ATTENTION;
    dense.size = sizeof dense;
    dense.q = op.q;
    dense.gains = op.gains;
    dense.out = op.out;
    dense.k_offset = op.k_offset;
    dense.v_offset = op.v_offset;
    dense.n_heads = op.n_heads;
    dense.n_kv_heads = op.n_kv_heads;
    dense.head_width = op.head_width;
    dense.v_width = op.v_width;
    dense.kv_format = op.kv_format;
    dense.scale = op.scale;
    return dense;
}

float half_to_float(uint16_t bits) {
    const int32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float sign = bits & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
    return sign * std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
}

float element(const uint8_t *base, int64_t i, int32_t format) {
    if (format == PK_F32) return reinterpret_cast<const float *>(base)[i];
    if (format == PK_FP8_E4M3) return e4m3_to_f32_exact(base[i]);
    const uint16_t bits = reinterpret_cast<const uint16_t *>(base)[i];
    if (format == PK_F16) return half_to_float(bits);
    const uint32_t wide = uint32_t{bits} << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
}

// Scratch of one thread.
struct Scratch {
    float *scores;    // of blocks, then of tokens
    int32_t *blocks;  // by score
    int32_t *tokens;  // that a query sees
};

struct Sizes {
    int64_t max_blocks, max_tokens, thread_bytes, bytes;
    Sizes(const Context &context, const pk_op_sparse &op, const pk_state &state) {
        max_blocks = state.max_ctx_tokens / op.block_tokens + 1;
        max_tokens = std::min<int64_t>(state.max_ctx_tokens, (int64_t{op.n_blocks} + 1) * op.block_tokens) + 1;
        thread_bytes = round_up(4 * (std::max(max_blocks, max_tokens) + max_blocks + max_tokens), 64);
        bytes = round_up(4 * max_blocks * op.index_width, 64) + context.pool.n_threads() * thread_bytes;
    }
};

// One row of the step: its slot's pages, and its blocks' keys [n_blocks, index_width].
class Row {
   public:
    Row(const Run &run, const pk_op_sparse &op, int64_t row, float *keys)
        : run_(run), op_(op), keys_(keys), table_(numbers<const int32_t>(run.state.page_table) + int64_t{numbers<const int32_t>(run.state.row_slot)[row]} * run.state.slot_pages) {}

    // The key of block b.
    void make_key(int64_t b) const {
        const int64_t width = op_.index_width, n = op_.block_tokens;
        float *key = keys_ + b * width;
        std::fill_n(key, width, 0.0f);
        for (int64_t j = b * n; j < (b + 1) * n; ++j)
            for (int64_t d = 0; d < width; ++d) key[d] += at(op_.i_offset, j, d, width, 0);
        double sum = 0;
        for (int64_t d = 0; d < width; ++d) {
            key[d] /= static_cast<float>(n);
            sum += static_cast<double>(key[d]) * key[d];
        }
        const auto by = static_cast<float>(1 / std::sqrt(sum / width + op_.eps));
        const auto *norm = numbers<const float>(op_.index_norm.data);
        for (int64_t d = 0; d < width; ++d) key[d] *= by * norm[d];
        rotate(key, b * n);
    }

    void attend(int64_t t, const Scratch &scratch) const {
        const int64_t position = numbers<const int32_t>(run_.state.token_position)[t], n = choose(t, position, scratch);
        for (int64_t h = 0; h < op_.n_heads; ++h) {
            const int64_t kv = h / (op_.n_heads / op_.n_kv_heads);
            const float *q = row_of(op_.q, t) + h * op_.head_width;
            float most = -INFINITY;
            for (int64_t i = 0; i < n; ++i) {
                double sum = 0;
                for (int64_t d = 0; d < op_.head_width; ++d) sum += static_cast<double>(q[d]) * at(op_.k_offset, scratch.tokens[i], d, op_.head_width, kv);
                scratch.scores[i] = static_cast<float>(sum) * op_.scale;
                most = std::max(most, scratch.scores[i]);
            }
            auto *out = numbers<float>(op_.out.data + t * op_.out.stride) + h * op_.v_width;
            weigh(n, kv, most, scratch, out);
            if (op_.gains.data)
                for (int64_t d = 0; d < op_.v_width; ++d) out[d] *= numbers<const float>(op_.gains.data)[h];
        }
    }

   private:
    const uint8_t *page(int64_t token) const {
        const pk_state &s = run_.state;
        return numbers<const uint8_t>(s.kv) + table_[token / s.page_tokens] * s.kv_page_stride;
    }

    // Dimension d of a token's key: keys lie as [K, D, B].
    float at(int64_t offset, int64_t token, int64_t d, int64_t width, int64_t head) const {
        const int64_t B = run_.state.page_tokens;
        return element(page(token) + offset, (head * width + d) * B + token % B, op_.kv_format);
    }

    void rotate(float *key, int64_t position) const {
        const auto *frequency = numbers<const float>(op_.frequency.data);
        const int64_t half = op_.rope_width / 2;
        for (int64_t i = 0; i < half; ++i) {
            const double angle = static_cast<double>(position) * frequency[i];
            const double c = std::cos(angle) * op_.rope_magnitude, s = std::sin(angle) * op_.rope_magnitude;
            float &x = key[op_.rope_layout ? 2 * i : i], &y = key[op_.rope_layout ? 2 * i + 1 : i + half];
            const double a = x, b = y;
            x = static_cast<float>(a * c - b * s);
            y = static_cast<float>(b * c + a * s);
        }
    }

    // Tokens that a query sees, in rising order; returns how many.
    int64_t choose(int64_t t, int64_t position, const Scratch &scratch) const {
        const int64_t n_blocks = (position + 1) / op_.block_tokens, kept = std::min<int64_t>(n_blocks, op_.n_blocks), width = op_.index_width;
        for (int64_t b = 0; b < n_blocks; ++b) {
            scratch.blocks[b] = static_cast<int32_t>(b);
            float score = 0;
            for (int64_t h = 0; h < op_.index_heads; ++h) {
                const float *q = row_of(op_.index_q, t) + h * width, *key = keys_ + b * width;
                double sum = 0;
                for (int64_t d = 0; d < width; ++d) sum += static_cast<double>(q[d]) * key[d];
                score += std::max(static_cast<float>(sum), 0.0f);
            }
            scratch.scores[b] = score;
        }
        auto better = [&](int32_t a, int32_t b) { return scratch.scores[a] > scratch.scores[b] || (scratch.scores[a] == scratch.scores[b] && a < b); };
        std::nth_element(scratch.blocks, scratch.blocks + kept, scratch.blocks + n_blocks, better);
        std::sort(scratch.blocks, scratch.blocks + kept);
        int64_t n = 0;
        for (int64_t i = 0; i < kept; ++i)
            for (int32_t j = 0; j < op_.block_tokens; ++j) scratch.tokens[n++] = scratch.blocks[i] * op_.block_tokens + j;
        for (int64_t j = n_blocks * op_.block_tokens; j <= position; ++j) scratch.tokens[n++] = static_cast<int32_t>(j);
        return n;
    }

    // out = softmax(scores) times values.
    void weigh(int64_t n, int64_t kv, float most, const Scratch &scratch, float *out) const {
        const int64_t B = run_.state.page_tokens;
        double total = 0;
        std::fill_n(out, op_.v_width, 0.0f);
        for (int64_t i = 0; i < n; ++i) {
            const float weight = std::exp(scratch.scores[i] - most);
            const int64_t token = scratch.tokens[i];
            const uint8_t *values = page(token) + op_.v_offset;
            total += weight;
            for (int64_t d = 0; d < op_.v_width; ++d) out[d] += weight * element(values, (kv * B + token % B) * op_.v_width + d, op_.kv_format);
        }
        for (int64_t d = 0; d < op_.v_width; ++d) out[d] = static_cast<float>(out[d] / total);
    }

    const Run &run_;
    const pk_op_sparse &op_;
    float *keys_;
    const int32_t *table_;
};

}  // namespace

int64_t sparse_workspace_bytes(const Context &context, const pk_op_sparse &op, const pk_state &state) {
    return std::max(Sizes(context, op, state).bytes, attention_workspace_bytes(context, dense_of(op), state));
}

void run_sparse(Run &run, const pk_op_sparse &op) {
    run_attention(run, dense_of(op));
    const Sizes sizes(run.context, op, run.state);
    auto *keys = reinterpret_cast<float *>(run.shared);
    uint8_t *scratches = run.shared + round_up(4 * sizes.max_blocks * op.index_width, 64);
    const auto *starts = numbers<const int32_t>(run.state.row_start), *flags = numbers<const int32_t>(run.state.row_flags);
    const auto *positions = numbers<const int32_t>(run.state.token_position);
    Pool &pool = run.context.pool;
    for (int64_t r = 0; r < run.n_rows; ++r) {
        const int64_t n_blocks = starts[r + 1] > starts[r] ? (positions[starts[r + 1] - 1] + 1) / op.block_tokens : 0;
        if (flags[r] & PK_ROW_DEAD || n_blocks <= op.n_blocks) continue;
        const Row row(run, op, r, keys);
        pool.parallel_for(n_blocks, 16, [&](int64_t begin, int64_t end, int32_t) {
            for (int64_t b = begin; b < end; ++b) row.make_key(b);
        });
        pool.parallel_for(starts[r + 1] - starts[r], 1, [&](int64_t begin, int64_t end, int32_t thread) {
            auto *scores = reinterpret_cast<float *>(scratches + thread * sizes.thread_bytes);
            auto *blocks = reinterpret_cast<int32_t *>(scores + std::max(sizes.max_blocks, sizes.max_tokens));
            for (int64_t t = starts[r] + begin; t < starts[r] + end; ++t)
                if ((positions[t] + 1) / op.block_tokens > op.n_blocks) row.attend(t, {scores, blocks, blocks + sizes.max_blocks});
        });
    }
}

}  // namespace pk
