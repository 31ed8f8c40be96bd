// Checks of the records of rare.h.
#include <utility>

#include "../rare.h"
#include "check.h"

namespace pk {
namespace {

class RareChecker : Checks {
   public:
    using Checks::Checks;

    int32_t check() const {
        switch (record_.op) {
            case PK_OP_SOFTPLUS: return softplus(record_.as<pk_op_softplus>());
            case PK_OP_WEIGH: return weigh(record_.as<pk_op_weigh>());
            case PK_OP_NGRAM: return ngram(record_.as<pk_op_ngram>());
            case PK_OP_STREAMS: return streams(record_.as<pk_op_streams>());
            case PK_OP_DILATED: return dilated(record_.as<pk_op_dilated>());
            case PK_OP_SPARSE: return sparse(record_.as<pk_op_sparse>());
            case PK_OP_DELTA_SIGMOID: return delta(record_.as<pk_op_delta>());
            case PK_OP_KEEP: return keep(record_.as<pk_op_keep>());
            case PK_OP_SETTLE: return settle(record_.as<pk_op_settle>());
            case PK_OP_GUESS: return guess(record_.as<pk_op_guess>());
            case PK_OP_SETTLE_MAMBA: return settle_mamba(record_.as<pk_op_settle_mamba>());
            case PK_OP_SETTLE_CONV: return settle_conv(record_.as<pk_op_settle_conv>());
            case PK_OP_EXPERTS_FETCHED: return fetched(record_.as<pk_op_experts_fetched>());
            case PK_OP_POOL: return pool(record_.as<pk_op_pool>());
            default: return PK_OK;  // shift has no operands
        }
    }

   private:
    int32_t pool(const pk_op_pool &op) const {
        const bool is_whole = op.kv && op.page_table && op.token_page && op.kv_page_stride > 0, is_none = !op.kv && !op.page_table && !op.token_page && !op.kv_page_stride;
        return is_whole || is_none ? PK_OK : fail(PK_BAD_ARG, "op %lld (%s): a part of the pool is absent", (Long)index_, name_);
    }

    int32_t softplus(const pk_op_softplus &op) const {
        if (int32_t status = activation("x", op.x)) return status;
        if (int32_t status = activation("g", op.g)) return status;
        if (int32_t status = same_rows("x", op.x, "g", op.g)) return status;
        if (int32_t status = equal("x width modulo g width", op.x.cols % op.g.cols, "wanted", 0)) return status;
        return like("x", op.x, "out", op.out);
    }

    int32_t weigh(const pk_op_weigh &op) const {
        if (int32_t status = table("ids", op.ids, PK_I32)) return status;
        if (int32_t status = table("weights", op.weights, PK_F32)) return status;
        if (int32_t status = same_rows("ids", op.ids, "weights", op.weights)) return status;
        if (int32_t status = equal("ids width", op.ids.cols, "weights width", op.weights.cols)) return status;
        if (!op.logits.data && !op.scales.data) return fail(PK_BAD_ARG, "op %lld (%s): both logits and scales are absent", (Long)index_, name_);
        if (op.scales.data)
            if (int32_t status = vector("scales", op.scales, op.logits.data ? op.logits.cols : op.scales.cols)) return status;
        if (!op.logits.data) return PK_OK;
        if (int32_t status = table("logits", op.logits, PK_F32)) return status;
        return same_rows("ids", op.ids, "logits", op.logits);
    }

    int32_t ngram(const pk_op_ngram &op) const {
        if (int32_t status = range("n_tokens", op.n_tokens, 2, 8)) return status;
        if (int32_t status = range("n_each", op.n_each, 1, 64 / (op.n_tokens - 1))) return status;
        if (int32_t status = range("n_pieces", op.n_pieces, 1, 1 << 16)) return status;
        const int64_t n = (int64_t)(op.n_tokens - 1) * op.n_each;
        if (int32_t status = activations({{"out", op.out, n * op.table.cols}}, false)) return status;
        if (!op.table.data || op.table.layout != PK_PACKED || op.table.rows < 1) return fail(PK_BAD_ARG, "op %lld (%s): the table is absent or not packed", (Long)index_, name_);
        if (!support_.is_weight(op.table.format)) return unsupported("table", op.table.format);
        int64_t rows_needed = 0;
        for (int64_t h = 0; h < n; ++h) {
            if (int32_t status = range("a part's rows", op.sizes[h], 1, INT32_MAX)) return status;
            rows_needed += op.sizes[h];
        }
        for (int32_t i = 0; i < op.n_tokens; ++i)
            if (op.multipliers[i] < 1) return fail(PK_BAD_ARG, "op %lld (%s): multiplier %d is %lld", (Long)index_, name_, i, (Long)op.multipliers[i]);
        return range("rows of all parts", rows_needed, 1, op.table.rows * op.n_pieces);
    }

    int32_t streams(const pk_op_streams &op) const {
        if (int32_t status = activation("q", op.q)) return status;
        if (int32_t status = like("q", op.q, "k", op.k)) return status;
        if (int32_t status = like("q", op.q, "out", op.out)) return status;
        if (int32_t status = activation("v", op.v)) return status;
        if (int32_t status = same_rows("q", op.q, "v", op.v)) return status;
        return equal("q width modulo v width", op.q.cols % op.v.cols, "wanted", 0);
    }

    int32_t dilated(const pk_op_dilated &op) const {
        if (!state_.recurrent) return fail(PK_BAD_ARG, "op %lld (%s): the state has no recurrent memory", (Long)index_, name_);
        if (int32_t status = range("conv_width", op.conv_width, 2, 16)) return status;
        if (int32_t status = range("dilation", op.dilation, 1, 16)) return status;
        if (int32_t status = activations({{"x", op.x, op.x.cols}, {"add", op.add, op.x.cols}, {"out", op.out, op.x.cols}}, false)) return status;
        if (int32_t status = vector("conv", op.conv, op.x.cols * op.conv_width)) return status;
        return part("the convolution's tail", op.conv_offset, 4 * op.x.cols * (op.conv_width - 1) * op.dilation);
    }

    // Where a slot's kept state and inputs lie.
    template <class Op>
    int32_t places(const Op &op, int64_t channels, int64_t n_numbers) const {
        if (!state_.recurrent) return fail(PK_BAD_ARG, "op %lld (%s): the state has no recurrent memory", (Long)index_, name_);
        if (int32_t status = range("max_tokens", op.max_tokens, 1, 1024)) return status;
        if (int32_t status = range("n_bytes", op.n_bytes, 1, state_.recurrent_stride)) return status;
        if (int32_t status = equal("n_bytes modulo 16", op.n_bytes % 16, "wanted", 0)) return status;
        if (int32_t status = part("the state", op.from_offset, op.n_bytes)) return status;
        if (int32_t status = part("the kept state", op.kept_offset, op.n_bytes)) return status;
        return part("the kept inputs", op.rows_offset, 4 * op.max_tokens * (channels + n_numbers));
    }

    int32_t keep(const pk_op_keep &op) const {
        if (int32_t status = activations({{"x", op.x, op.x.cols}}, false)) return status;
        int64_t n_numbers = 0;
        for (const auto &[name, t] : {std::pair{"b", &op.b}, {"a", &op.a}})
            if (t->data) {
                if (int32_t status = activations({{name, *t, t->cols}}, true)) return status;
                n_numbers += t->cols;
            }
        return places(op, op.x.cols, n_numbers);
    }

    int32_t settle(const pk_op_settle &op) const {
        if (int32_t status = delta(op.delta)) return status;
        return places(op, op.delta.qkv.cols, 2 * op.delta.n_v_heads);
    }

    int32_t settle_mamba(const pk_op_settle_mamba &op) const {
        if (int32_t status = mamba(op.mamba)) return status;
        return places(op, op.mamba.xbc.cols, op.mamba.n_heads);
    }

    int32_t settle_conv(const pk_op_settle_conv &op) const {
        if (int32_t status = conv(op.conv)) return status;
        return places(op, op.conv.x.cols, 0);
    }

    int32_t guess(const pk_op_guess &op) const {
        if (int32_t status = table("logits", op.logits, PK_F32)) return status;
        if (int32_t status = symbol("logits", op.logits, PK_ROWS_S)) return status;
        if (int32_t status = equal("logits width", op.logits.cols, "n_vocab", state_.n_vocab)) return status;
        return range("the first record that serves it", op.first, 0, index_);
    }

    int32_t cache(const pk_expert_cache &c) const {
        if (!c.home || !c.slots || !c.cache || !c.counts) return fail(PK_BAD_ARG, "op %lld (%s): home, slots, cache or counts are absent", (Long)index_, name_);
        if (int32_t status = range("n_experts", c.n_experts, 1, 4096)) return status;
        if (int32_t status = range("n_slots", c.n_slots, 1, c.n_experts)) return status;
        if (int32_t status = equal("n_slots and n_staging together", (int64_t)c.n_slots + c.n_staging, "n_experts", c.n_experts)) return status;
        if (int32_t status = range("stride", c.stride, 64, INT64_MAX)) return status;
        if (int32_t status = equal("stride modulo 64", c.stride % 64, "wanted", 0)) return status;
        if (int32_t status = range("n_bytes", c.n_bytes, 1, c.stride)) return status;
        // Distances are counted in i32.
        const int64_t away = (int64_t)(c.staging - c.slots);
        if (c.n_staging && (!c.staging || away % c.stride || away / c.stride < c.n_slots || away / c.stride > INT32_MAX - c.n_staging))
            return fail(PK_BAD_ARG, "op %lld (%s): staging lies %lld bytes behind the slots, strides are %lld bytes", (Long)index_, name_, (Long)away, (Long)c.stride);
        return PK_OK;
    }

    int32_t fetched(const pk_op_experts_fetched &op) const {
        if (int32_t status = experts(op.experts)) return status;
        const pk_expert_cache &c = op.here;
        const pk_tensor *stacks[3] = {&op.experts.gate, &op.experts.up, &op.experts.down};
        static const char *const kNames[3] = {"gate", "up", "down"};
        for (int i = 0; i < 3; ++i) {
            if (!stacks[i]->data) continue;
            if (int32_t status = equal("bytes from expert to expert", stacks[i]->stride, "stride", c.stride)) return status;
            if (stacks[i]->data < c.home || stacks[i]->data >= c.home + c.n_bytes)
                return fail(PK_BAD_ARG, "op %lld (%s): %s lies %lld bytes from home, an expert has %lld", (Long)index_, name_, kNames[i], (Long)(stacks[i]->data - c.home), (Long)c.n_bytes);
        }
        if (int32_t status = equal("experts of the cache", c.n_experts, "n_experts", op.experts.n_experts)) return status;
        if (int32_t status = cache(c)) return status;
        if (!op.next.home) return PK_OK;
        if (int32_t status = cache(op.next)) return status;
        if (op.next.n_staging && op.next.staging == c.staging) return fail(PK_BAD_ARG, "op %lld (%s): the next layer's staging is this one's", (Long)index_, name_);
        if (int32_t status = range("n_most", op.n_most, 0, op.next.n_experts)) return status;
        if (!op.expected.data) return PK_OK;
        if (int32_t status = table("expected", op.expected, PK_I32)) return status;
        return same_rows("x", op.experts.x, "expected", op.expected);
    }

    int32_t sparse(const pk_op_sparse &op) const {
        if (int32_t status = heads(op)) return status;
        if (int32_t status = range("index_heads", op.index_heads, 1, 1 << 12)) return status;
        if (int32_t status = range("index_width", op.index_width, 1, support_.max_head_width)) return status;
        if (int32_t status = range("block_tokens", op.block_tokens, 1, 1 << 12)) return status;
        if (int32_t status = range("n_blocks", op.n_blocks, 1, 1 << 24)) return status;
        if (int32_t status = range("rope_width", op.rope_width, 2, op.index_width)) return status;
        if (int32_t status = range("rope_layout", op.rope_layout, 0, 1)) return status;
        if (int32_t status = equal("parts", op.parts, "wanted", PK_PARTS_QKV)) return status;
        if (int32_t status = activations({{"q", op.q, (int64_t)op.n_heads * op.head_width}, {"out", op.out, (int64_t)op.n_heads * op.v_width},
                                          {"index_q", op.index_q, (int64_t)op.index_heads * op.index_width}}, false))
            return status;
        if (op.gains.data)
            if (int32_t status = vector("gains", op.gains, op.n_heads)) return status;
        if (int32_t status = vectors({{"index_norm", op.index_norm, op.index_width}, {"frequency", op.frequency, op.rope_width / 2}})) return status;
        int64_t end = op.i_offset + (int64_t)op.index_width * state_.page_tokens * find_format(op.kv_format)->block_bytes;
        if (op.i_offset >= 0 && end <= state_.kv_page_stride) return PK_OK;
        return fail(PK_BAD_ARG, "op %lld (%s): index keys end at byte %lld of a page of %lld", (Long)index_, name_, (Long)end, (Long)state_.kv_page_stride);
    }
};

}  // namespace

int32_t check_rare(int64_t index, const Record &record, const pk_state &state, const Support &support) {
    return RareChecker(index, record, state, support).check();
}

}  // namespace pk
