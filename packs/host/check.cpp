// Checks of every record when a program is loaded, so that nothing is refused when a token is due.
#include "kv_pool.h"
#include "check.h"

namespace pk {
namespace {

// The checks of one record.
class Checker : Checks {
   public:
    using Checks::Checks;

    int32_t check() const {
        if (record_.op > PK_OP_ADD && !(support_.has_op && support_.has_op(record_.op)))
            return fail(PK_UNSUPPORTED, "op %lld (%s): the %s pack has no kernel for it", (Long)index_, name_, support_.pack);
        switch (record_.op) {
            case PK_OP_EMBED: return embed(record_.as<pk_op_embed>());
            case PK_OP_NORM: return norm(record_.as<pk_op_norm>());
            case PK_OP_MATMUL: return matmul(record_.as<pk_op_matmul>());
            case PK_OP_QKV: return qkv(record_.as<pk_op_qkv>());
            case PK_OP_ATTENTION: return attention(record_.as<pk_op_attention>());
            case PK_OP_GATE: return gate(record_.as<pk_op_gate>());
            case PK_OP_GATHER: return gather(record_.as<pk_op_gather>());
            case PK_OP_SAMPLE: return sample(record_.as<pk_op_sample>());
            case PK_OP_COPY: return copy(record_.as<pk_op_copy>());
            case PK_OP_ADD: return add(record_.as<pk_op_add>());
            case PK_OP_ROUTE: return route(record_.as<pk_op_route>());
            case PK_OP_EXPERTS: return experts(record_.as<pk_op_experts>());
            case PK_OP_SIGMOID: return sigmoid(record_.as<pk_op_sigmoid>());
            case PK_OP_DELTA: return delta(record_.as<pk_op_delta>());
            case PK_OP_CONV: return conv(record_.as<pk_op_conv>());
            case PK_OP_MAMBA: return mamba(record_.as<pk_op_mamba>());
            default: return check_rare(index_, record_, state_, support_);  // prepare and commit have no operands
        }
    }

   private:
    int32_t embed(const pk_op_embed &op) const {
        if (int32_t status = activation("out", op.out)) return status;
        if (int32_t status = symbol("out", op.out, PK_ROWS_T)) return status;
        if (int32_t status = equal("table width", op.table.cols, "out width", op.out.cols)) return status;
        if (op.positions.data)
            if (int32_t status = addends("positions", op.positions, op.out.cols)) return status;
        if (op.types.data)
            if (int32_t status = addends("types", op.types, op.out.cols)) return status;
        if (int32_t status = range("position_offset", op.position_offset, 0, INT32_MAX)) return status;
        if (int32_t status = equal(op.types.data ? "table rows times types" : "table rows", op.table.rows * (op.types.data ? op.types.rows : 1), "n_vocab", state_.n_vocab)) return status;
        if (op.table.layout == PK_PACKED) {
            if (!op.table.data) return fail(PK_BAD_ARG, "op %lld (%s): table is absent", (Long)index_, name_);
            return support_.is_weight(op.table.format) ? PK_OK : unsupported("table", op.table.format);
        }
        if (int32_t status = rows("table", op.table)) return status;
        return support_.is_table(op.table.format) ? PK_OK : unsupported("table", op.table.format);
    }

    int32_t norm(const pk_op_norm &op) const {
        if (int32_t status = activation("x", op.x)) return status;
        if (int32_t status = range("kind", op.kind, PK_NORM_RMS, PK_NORM_LAYER)) return status;
        if (op.kind == PK_NORM_LAYER && op.post_w.data) return fail(PK_BAD_ARG, "op %lld (%s): a layer norm takes no post_w", (Long)index_, name_);
        if (op.kind == PK_NORM_RMS && op.bias.data) return fail(PK_BAD_ARG, "op %lld (%s): an rms norm takes no bias", (Long)index_, name_);
        if (op.bias.data)
            if (int32_t status = vector("bias", op.bias, op.x.cols)) return status;
        if (op.post_w.data)
            if (int32_t status = vector("post_w", op.post_w, op.x.cols)) return status;
        if (op.residual.data)
            if (int32_t status = like("x", op.x, "residual", op.residual)) return status;
        if (!op.out.data) return op.residual.data ? PK_OK : fail(PK_BAD_ARG, "op %lld (%s): both out and residual are absent", (Long)index_, name_);
        if (int32_t status = vector("w", op.w, op.x.cols)) return status;
        return like("x", op.x, "out", op.out);
    }

    int32_t matmul(const pk_op_matmul &op) const {
        if (int32_t status = activation("x", op.x)) return status;
        if (int32_t status = activation("y", op.y)) return status;
        if (int32_t status = same_rows("x", op.x, "y", op.y)) return status;
        if (int32_t status = range("n_w", op.n_w, 1, 3)) return status;
        if (int32_t status = range("act", op.act, PK_ACT_NONE, PK_ACT_GELU_ERF)) return status;
        if (op.act != PK_ACT_NONE)
            if (int32_t status = equal("n_w", op.n_w, "weights of a gated product", 2)) return status;
        static const char *const kWeights[] = {"w[0]", "w[1]", "w[2]"}, *const kBiases[] = {"bias[0]", "bias[1]", "bias[2]"};
        int64_t n_out = 0;
        for (int32_t i = 0; i < op.n_w; ++i) {
            const pk_tensor &w = op.w[i];
            if (!w.data) return fail(PK_BAD_ARG, "op %lld (%s): %s is absent", (Long)index_, name_, kWeights[i]);
            if (w.layout != PK_PACKED) return fail(PK_BAD_ARG, "op %lld (%s): %s is not packed (layout %d)", (Long)index_, name_, kWeights[i], w.layout);
            if (!support_.is_weight(w.format)) return unsupported(kWeights[i], w.format);
            if (w.rows < 1) return range(kWeights[i], w.rows, 1, INT32_MAX);
            if (int32_t status = equal(kWeights[i], w.cols, "x width", op.x.cols)) return status;
            if (op.bias[i].data)
                if (int32_t status = vector(kBiases[i], op.bias[i], w.rows)) return status;
            n_out += w.rows;
        }
        if (op.act != PK_ACT_NONE) {
            if (int32_t status = equal("rows of w[0]", op.w[0].rows, "rows of w[1]", op.w[1].rows)) return status;
            n_out = op.w[0].rows;
        }
        if (int32_t status = equal("y width", op.y.cols, "rows of the weights", n_out)) return status;
        return op.add.data ? like("y", op.y, "add", op.add) : PK_OK;
    }

    int32_t qkv(const pk_op_qkv &op) const {
        if (int32_t status = heads(op)) return status;
        if (int32_t status = activation("qkv", op.qkv)) return status;
        if (int32_t status = queries(op)) return status;
        if (int32_t status = symbol("qkv", op.qkv, PK_ROWS_T)) return status;
        if (int32_t status = symbol("q", op.q, PK_ROWS_T)) return status;
        int64_t q_width = (int64_t)op.n_heads * op.head_width;
        int64_t k_width = (int64_t)op.n_kv_heads * op.head_width, v_width = (int64_t)op.n_kv_heads * op.v_width;
        int64_t width = q_width + (op.parts == PK_PARTS_Q ? 0 : k_width) + (op.parts == PK_PARTS_QKV ? v_width : 0);
        if (int32_t status = equal("qkv width", op.qkv.cols, "width of the heads", width)) return status;
        if (int32_t status = equal("q width", op.q.cols, "width of the heads", q_width)) return status;
        if (op.q_norm.data)
            if (int32_t status = vector("q_norm", op.q_norm, op.head_width)) return status;
        if (op.k_norm.data)
            if (int32_t status = vector("k_norm", op.k_norm, op.head_width)) return status;
        if (op.v_norm.data)
            if (int32_t status = vector("v_norm", op.v_norm, op.v_width)) return status;
        if (op.gains.data)
            if (int32_t status = vector("gains", op.gains, op.n_heads + op.n_kv_heads * (op.parts == PK_PARTS_Q ? 0 : op.parts == PK_PARTS_LATENT ? 1 : 2))) return status;
        if (!op.frequency.data) return PK_OK;
        if (int32_t status = range("rope_width", op.rope_width, 2, op.head_width)) return status;
        if (int32_t status = range("rope_layout", op.rope_layout, 0, 1)) return status;
        if (int32_t status = equal("rope_width modulo 2", op.rope_width % 2, "wanted", 0)) return status;
        return vector("frequency", op.frequency, op.rope_width / 2);
    }

    int32_t attention(const pk_op_attention &op) const {
        if (int32_t status = heads(op)) return status;
        if (int32_t status = queries(op)) return status;
        if (int32_t status = activation("out", op.out)) return status;
        if (int32_t status = symbol("q", op.q, PK_ROWS_T)) return status;
        if (int32_t status = symbol("out", op.out, PK_ROWS_T)) return status;
        if (int32_t status = equal("q width", op.q.cols, "width of the heads", (int64_t)op.n_heads * op.head_width)) return status;
        if (int32_t status = equal("out width", op.out.cols, "width of the values", (int64_t)op.n_heads * op.v_width)) return status;
        if (int32_t status = range("window", op.window, 0, INT32_MAX)) return status;
        if (int32_t status = range("is_bidirectional", op.is_bidirectional, 0, 1)) return status;
        if (int32_t status = range("parts", op.parts, PK_PARTS_QKV, PK_PARTS_LATENT)) return status;
        if (op.sinks.data)
            if (int32_t status = vector("sinks", op.sinks, op.n_heads)) return status;
        return op.gains.data ? vector("gains", op.gains, op.n_heads) : PK_OK;
    }

    int32_t gate(const pk_op_gate &op) const {
        if (int32_t status = activation("x", op.x)) return status;
        if (int32_t status = activation("out", op.out)) return status;
        if (int32_t status = same_rows("x", op.x, "out", op.out)) return status;
        if (op.act != PK_ACT_RELU2)
            if (int32_t status = range("act", op.act, PK_ACT_NONE, PK_ACT_GELU_ERF)) return status;
        if (op.x.cols == op.out.cols) return PK_OK;
        return equal("x width", op.x.cols, "twice the out width", 2 * op.out.cols);
    }

    int32_t gather(const pk_op_gather &op) const {
        if (int32_t status = activation("x", op.x)) return status;
        if (int32_t status = activation("out", op.out)) return status;
        if (int32_t status = symbol("x", op.x, PK_ROWS_T)) return status;
        if (int32_t status = symbol("out", op.out, PK_ROWS_S)) return status;
        if (int32_t status = range("pool", op.pool, PK_POOL_LAST, PK_POOL_MEAN)) return status;
        return equal("x width", op.x.cols, "out width", op.out.cols);
    }

    int32_t sample(const pk_op_sample &op) const {
        if (int32_t status = rows("logits", op.logits)) return status;
        if (op.logits.format != PK_F32) return unsupported("logits", op.logits.format);
        if (int32_t status = symbol("logits", op.logits, PK_ROWS_S)) return status;
        return equal("logits width", op.logits.cols, "n_vocab", state_.n_vocab);
    }

    int32_t copy(const pk_op_copy &op) const {
        if (int32_t status = rows("x", op.x)) return status;
        if (int32_t status = rows("out", op.out)) return status;
        if (!support_.is_copy(op.x.format)) return unsupported("x", op.x.format);
        if (!support_.is_copy(op.out.format)) return unsupported("out", op.out.format);
        if (int32_t status = same_rows("x", op.x, "out", op.out)) return status;
        return equal("x width", op.x.cols, "out width", op.out.cols);
    }

    int32_t add(const pk_op_add &op) const {
        if (int32_t status = activation("x", op.x)) return status;
        if (int32_t status = like("x", op.x, "y", op.y)) return status;
        return like("x", op.x, "out", op.out);
    }

    int32_t route(const pk_op_route &op) const {
        if (int32_t status = table("logits", op.logits, PK_F32)) return status;
        if (int32_t status = choices(op.ids, op.weights)) return status;
        if (int32_t status = same_rows("logits", op.logits, "ids", op.ids)) return status;
        if (int32_t status = range("experts", op.logits.cols, 1, 4096)) return status;
        if (int32_t status = range("score", op.score, PK_SCORE_SOFTMAX, PK_SCORE_CHOSEN)) return status;
        if (int32_t status = range("n_groups", op.n_groups, 1, op.logits.cols)) return status;
        if (int32_t status = equal("experts modulo n_groups", op.logits.cols % op.n_groups, "wanted", 0)) return status;
        if (int32_t status = range("n_groups_used", op.n_groups_used, 1, op.n_groups)) return status;
        if (int32_t status = range("n_group_best", op.n_group_best, 1, 2)) return status;
        if (int32_t status = range("chosen experts", op.ids.cols, 1, op.logits.cols / op.n_groups * op.n_groups_used)) return status;
        return op.bias.data ? vector("bias", op.bias, op.logits.cols) : PK_OK;
    }

    int32_t sigmoid(const pk_op_sigmoid &op) const {
        if (int32_t status = activation("x", op.x)) return status;
        if (int32_t status = activation("g", op.g)) return status;
        if (int32_t status = same_rows("x", op.x, "g", op.g)) return status;
        if (op.g.cols != 1)
            if (int32_t status = equal("x width", op.x.cols, "g width", op.g.cols)) return status;
        return like("x", op.x, "out", op.out);
    }
};

}  // namespace

int32_t check_state(const pk_state &s) {
    struct Size {
        const char *name;
        int64_t value;
        int64_t low;
    };
    const Size sizes[] = {
        {"n_slots", s.n_slots, 1},   {"max_ctx_tokens", s.max_ctx_tokens, 1},   {"page_tokens", s.page_tokens, 1},
        {"slot_pages", s.slot_pages, 1}, {"n_vocab", s.n_vocab, 1},             {"max_step_tokens", s.max_step_tokens, 1},
        {"max_step_rows", s.max_step_rows, 1}, {"max_bias", s.max_bias, 0},     {"max_top", s.max_top, 0},
        {"n_results", s.n_results, 1}, {"kv_page_stride", s.kv_page_stride, 0}, {"workspace_bytes", s.workspace_bytes, 0},
    };
    for (const Size &size : sizes)
        if (size.value < size.low) return fail(PK_BAD_ARG, "state: %s is %lld, at least %lld is needed", size.name, (long long)size.value, (long long)size.low);
    if ((int64_t)s.slot_pages * s.page_tokens != s.max_ctx_tokens)
        return fail(PK_BAD_ARG, "state: %d pages of %d tokens are not max_ctx_tokens %d", s.slot_pages, s.page_tokens, s.max_ctx_tokens);
    return PK_OK;
}

int32_t check_records(const Records &records, const pk_state &state, const Support &support) {
    const pk_op_pool pool = find_pool(records);
    const pk_state pooled = with_pool(state, pool);
    bool is_pooled = false;
    for (int64_t i = 0; i < records.n(); ++i) {
        if (int32_t status = Checker(i, records[i], is_pooled ? pooled : state, support).check()) return status;
        if (records[i].op == PK_OP_POOL) {
            const auto &op = records[i].as<pk_op_pool>();
            is_pooled = op.kv != 0;
            if (is_pooled && (op.kv != pool.kv || op.kv_page_stride != pool.kv_page_stride || op.page_table != pool.page_table || op.token_page != pool.token_page))
                return fail(PK_BAD_ARG, "op %lld (pool): the program has another pool already", (long long)i);
        }
        if (is_pooled && records[i].op == PK_OP_ATTENTION) {
            const auto &op = records[i].as<pk_op_attention>();
            if (op.window == 0 || op.is_bidirectional) return fail(PK_BAD_ARG, "op %lld (attention): it sees more than a window of earlier tokens, and uses a pool of its own", (long long)i);
        }
    }
    return PK_OK;
}

}  // namespace pk
