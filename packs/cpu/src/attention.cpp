// Attention over the pool: cuts a record into items, longest first, and joins split results.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "ops.h"

namespace pk {
namespace {

// Layout of the shared workspace of one attention record.
struct Layout {
    int64_t max_items, max_splits;
    int64_t items_at, counts_at, partials_at, scratch_at, scratch_bytes, bytes;
};

Layout layout_of(const Context &context, const pk_op_attention &op, const pk_state &state) {
    Layout l;
    int64_t n_threads = context.pool.n_threads(), tokens = state.max_step_tokens, rows = state.max_step_rows;
    int64_t singles = std::min(tokens, rows * kDecodeTokens) * op.n_kv_heads;
    l.max_splits = 12 * n_threads + 8;
    l.max_items = singles + l.max_splits + (tokens + rows) * op.n_kv_heads;
    l.items_at = 0;
    l.counts_at = round_up(l.max_items * sizeof(AttentionItem), 64);
    l.partials_at = l.counts_at + round_up(l.max_splits * 4, 64);
    l.scratch_at = l.partials_at + round_up(l.max_splits * partial_floats(op) * 4, 64);
    l.scratch_bytes = attention_scratch_bytes(op, state.page_tokens);
    l.bytes = l.scratch_at + n_threads * l.scratch_bytes;
    return l;
}

class Cutter {
   public:
    Cutter(const Run &run, const pk_op_attention &op, AttentionItem *items, std::atomic<int32_t> *counts)
        : run_(run), op_(op), items_(items), counts_(counts) {}

    int64_t cut() {
        int64_t n_threads = run_.context.pool.n_threads(), singles = 0;
        for (int64_t r = 0; r < run_.n_rows; ++r)
            if (is_single(r)) singles += n_tokens(r) * op_.n_kv_heads;
        // Few items of many keys would leave threads idle: they are split. At most 12 splits per thread come out of this.
        wanted_splits_ = singles > 0 && singles < 4 * n_threads && !run_.context.is_invariant ? (4 * n_threads + singles - 1) / singles : 1;
        for (int64_t r = 0; r < run_.n_rows; ++r)
            if (flags_[r] & PK_ROW_DEAD)
                clear(r);
            else if (!is_single(r))
                cut_prefill(r);
        for (int64_t r = 0; r < run_.n_rows; ++r)
            if (is_single(r) && !(flags_[r] & PK_ROW_DEAD)) cut_decode(r);
        return n_items_;
    }

   private:
    // A dead row sees nothing: its pages may belong to somebody else by now.
    void clear(int64_t row) {
        for (int64_t t = starts_[row]; t < starts_[row + 1]; ++t) std::memset(numbers<void>(op_.out.data + t * op_.out.stride), 0, op_.out.cols * sizeof(float));
    }

    int64_t n_tokens(int64_t row) const { return starts_[row + 1] - starts_[row]; }

    // Rows that run token by token: all of them where a token's numbers must not depend on the others. Values that are part of the keys lie
    // across their rows: only the prefill kernel reads those.
    bool is_single(int64_t row) const { return op_.parts == PK_PARTS_QKV && (n_tokens(row) <= kDecodeTokens || run_.context.is_invariant); }

    AttentionItem item(int64_t row, int64_t token, int64_t n, int32_t kv_head) const {
        int32_t position = positions_[starts_[row] + token], row_end = positions_[starts_[row + 1] - 1] + 1;
        int64_t end = key_limit(op_, position + n - 1, row_end);
        return {slots_[row], static_cast<int32_t>(starts_[row] + token), static_cast<int32_t>(n), position, kv_head,
                static_cast<int32_t>(first_key(op_, position)), static_cast<int32_t>(end), 0, -1, 0, 0, row_end};
    }

    void cut_prefill(int64_t row) {
        int64_t n = n_tokens(row), most = prefill_tokens(op_);
        // Short rows: smaller blocks, so that there is one for each thread.
        int64_t share = (n * op_.n_kv_heads + 2 * run_.context.pool.n_threads() - 1) / (2 * run_.context.pool.n_threads());
        int64_t block = run_.context.is_invariant ? 1 : std::clamp<int64_t>(round_up(share, 8), std::min<int64_t>(most, 16), most);
        for (int64_t at = (n - 1) / block * block; at >= 0; at -= block) {
            for (int32_t h = 0; h < op_.n_kv_heads; ++h) {
                AttentionItem &piece = items_[n_items_++] = item(row, at, std::min(block, n - at), h);
                piece.is_prefill = 1;
            }
        }
    }

    void cut_decode(int64_t row) {
        int64_t B = run_.state.page_tokens;
        for (int64_t t = 0; t < n_tokens(row); ++t) {
            for (int32_t h = 0; h < op_.n_kv_heads; ++h) {
                AttentionItem whole = item(row, t, 1, h);
                int64_t keys = whole.key_end - whole.key_begin, splits = std::min(wanted_splits_, keys / kSplitKeys);
                int64_t step = splits > 1 ? round_up((keys + splits - 1) / splits, B) : keys;
                if (step >= keys) {
                    items_[n_items_++] = whole;
                    continue;
                }
                int32_t first = n_splits_, end = whole.key_end;
                int64_t from = whole.key_begin / B * B;
                for (; from < end; from += step) {
                    AttentionItem piece = whole;
                    piece.key_begin = std::max<int32_t>(whole.key_begin, static_cast<int32_t>(from));
                    piece.key_end = static_cast<int32_t>(std::min<int64_t>(end, from + step));
                    piece.split = n_splits_++;
                    piece.group_begin = first;
                    items_[n_items_++] = piece;
                }
                for (int32_t s = first; s < n_splits_; ++s) items_[n_items_ - 1 - (s - first)].group_splits = n_splits_ - first;
                counts_[first].store(0, std::memory_order_relaxed);
            }
        }
    }

    const Run &run_;
    const pk_op_attention &op_;
    AttentionItem *items_;
    std::atomic<int32_t> *counts_;
    const int32_t *starts_ = numbers<const int32_t>(run_.state.row_start), *slots_ = numbers<const int32_t>(run_.state.row_slot);
    const int32_t *flags_ = numbers<const int32_t>(run_.state.row_flags);
    const int32_t *positions_ = numbers<const int32_t>(run_.state.token_position);
    int64_t wanted_splits_ = 1, n_items_ = 0;
    int32_t n_splits_ = 0;
};

}  // namespace

int64_t attention_workspace_bytes(const Context &context, const pk_op_attention &op, const pk_state &state) {
    return layout_of(context, op, state).bytes;
}

void run_attention(Run &run, const pk_op_attention &op) {
    Layout layout = layout_of(run.context, op, run.state);
    auto *items = reinterpret_cast<AttentionItem *>(run.shared + layout.items_at);
    auto *counts = reinterpret_cast<std::atomic<int32_t> *>(run.shared + layout.counts_at);
    AttentionJob job{&op, &run.state, reinterpret_cast<float *>(run.shared + layout.partials_at)};
    int64_t n_items = Cutter(run, op, items, counts).cut();
    run.context.pool.parallel_for(n_items, n_items > 256 ? run.context.pool.grain(n_items, 32) : 1, [&](int64_t begin, int64_t end, int32_t thread) {
        void *scratch = run.shared + layout.scratch_at + thread * layout.scratch_bytes;
        for (int64_t i = begin; i < end; ++i) {
            const AttentionItem &item = items[i];
            if (item.is_prefill) {
                run.kernels.attend_prefill(job, item, scratch);
                continue;
            }
            run.kernels.attend_decode(job, item, scratch);
            if (item.split >= 0 && counts[item.group_begin].fetch_add(1, std::memory_order_acq_rel) + 1 == item.group_splits)
                run.kernels.attend_merge(job, item);
        }
    });
}

}  // namespace pk
