// What the checks of records share. Each check returns PK_OK, or the status of a sentence that was stored.
#pragma once
#include <cinttypes>
#include <cstdio>
#include <initializer_list>

#include "error.h"
#include "format.h"
#include "program.h"

namespace pk {

inline const char *rows_text(int64_t rows, char (&out)[24]) {
    if (rows == PK_ROWS_T) return "T";
    if (rows == PK_ROWS_S) return "S";
    std::snprintf(out, sizeof out, "%" PRId64, rows);
    return out;
}

// Of one record.
class Checks {
   public:
    Checks(int64_t index, const Record &record, const pk_state &state, const Support &support)
        : index_(index), record_(record), name_(op_name(record.op)), state_(state), support_(support) {}

   protected:
    using Long = long long;

    int32_t equal(const char *a, int64_t x, const char *b, int64_t y) const {
        if (x == y) return PK_OK;
        return fail(PK_BAD_ARG, "op %lld (%s): %s is %lld, %s is %lld", (Long)index_, name_, a, (Long)x, b, (Long)y);
    }

    int32_t range(const char *what, int64_t value, int64_t low, int64_t high) const {
        if (value >= low && value <= high) return PK_OK;
        return fail(PK_BAD_ARG, "op %lld (%s): %s is %lld, it must be %lld to %lld", (Long)index_, name_, what, (Long)value, (Long)low, (Long)high);
    }

    int32_t unsupported(const char *operand, int32_t format) const {
        return fail(PK_UNSUPPORTED, "op %lld (%s): the %s pack has no kernel for %s in format %s", (Long)index_, name_, support_.pack, operand,
                    format_name(format));
    }

    // Rows of plain elements, at an address, aligned to the element.
    int32_t rows(const char *operand, const pk_tensor &t) const {
        const Format *format = find_format(t.format);
        if (!format) return unsupported(operand, t.format);
        if (!t.data) return fail(PK_BAD_ARG, "op %lld (%s): %s is absent", (Long)index_, name_, operand);
        if (t.layout != PK_ROWS) return fail(PK_BAD_ARG, "op %lld (%s): %s must lie in rows, its layout is %d", (Long)index_, name_, operand, t.layout);
        if (t.rows < PK_ROWS_S || t.cols < 1)
            return fail(PK_BAD_ARG, "op %lld (%s): %s has %lld rows and %lld columns", (Long)index_, name_, operand, (Long)t.rows, (Long)t.cols);
        int64_t bytes = row_bytes(*format, t.cols);
        if (bytes < 0)
            return fail(PK_BAD_ARG, "op %lld (%s): %s has %lld columns, the block of %s has %d", (Long)index_, name_, operand, (Long)t.cols, format->name,
                        format->block_elements);
        if (t.stride < bytes && t.rows != 1)
            return fail(PK_BAD_ARG, "op %lld (%s): rows of %s have %lld bytes, the stride is %lld", (Long)index_, name_, operand, (Long)bytes, (Long)t.stride);
        int64_t element = format->block_elements == 1 ? format->block_bytes : 1;
        if (t.data % element || (t.rows != 1 && t.stride % element))
            return fail(PK_BAD_ARG, "op %lld (%s): %s at %#llx, stride %lld, is not aligned to %lld bytes", (Long)index_, name_, operand, (Long)t.data,
                        (Long)t.stride, (Long)element);
        return PK_OK;
    }

    // An activation: [T or S or n, cols] in the pack's activation format or F32 (the residual stream, logits).
    int32_t activation(const char *operand, const pk_tensor &t) const {
        if (int32_t status = rows(operand, t)) return status;
        return t.format == support_.activation || t.format == PK_F32 ? PK_OK : unsupported(operand, t.format);
    }

    int32_t same_rows(const char *a, const pk_tensor &x, const char *b, const pk_tensor &y) const {
        if (x.rows == y.rows) return PK_OK;
        char first[24], second[24];
        return fail(PK_BAD_ARG, "op %lld (%s): %s has %s rows, %s has %s", (Long)index_, name_, a, rows_text(x.rows, first), b, rows_text(y.rows, second));
    }

    int32_t symbol(const char *operand, const pk_tensor &t, int64_t wanted) const {
        if (t.rows == wanted) return PK_OK;
        char first[24], second[24];
        return fail(PK_BAD_ARG, "op %lld (%s): %s has %s rows, it must have %s", (Long)index_, name_, operand, rows_text(t.rows, first),
                    rows_text(wanted, second));
    }

    // A second activation of the same shape.
    int32_t like(const char *a, const pk_tensor &x, const char *b, const pk_tensor &y) const {
        if (int32_t status = activation(b, y)) return status;
        if (int32_t status = same_rows(a, x, b, y)) return status;
        if (x.cols == y.cols) return PK_OK;
        return fail(PK_BAD_ARG, "op %lld (%s): %s has %lld columns, %s has %lld", (Long)index_, name_, a, (Long)x.cols, b, (Long)y.cols);
    }

    // A [1, n] f32 vector.
    int32_t vector(const char *operand, const pk_tensor &t, int64_t n) const {
        if (int32_t status = rows(operand, t)) return status;
        if (t.format != PK_F32) return unsupported(operand, t.format);
        if (int32_t status = equal("rows of a vector", t.rows, "wanted", 1)) return status;
        return equal(operand, t.cols, "its wanted width", n);
    }

    // Rows of f32 that are added to an activation of that width.
    int32_t addends(const char *operand, const pk_tensor &t, int64_t n) const {
        if (int32_t status = rows(operand, t)) return status;
        if (t.format != PK_F32) return unsupported(operand, t.format);
        if (int32_t status = range(operand, t.rows, 1, INT32_MAX)) return status;
        return equal(operand, t.cols, "its wanted width", n);
    }

    // Rows of 4-byte numbers of one format.
    int32_t table(const char *operand, const pk_tensor &t, int32_t format) const {
        if (int32_t status = rows(operand, t)) return status;
        return t.format == format ? PK_OK : unsupported(operand, t.format);
    }

    // A part of a slot's recurrent state.
    int32_t part(const char *what, int64_t offset, int64_t bytes) const {
        if (offset >= 0 && offset % 64 == 0 && offset + bytes <= state_.recurrent_stride) return PK_OK;
        return fail(PK_BAD_ARG, "op %lld (%s): %s lies at bytes %lld to %lld of a slot's recurrent state of %lld", (Long)index_, name_, what, (Long)offset,
                    (Long)(offset + bytes), (Long)state_.recurrent_stride);
    }

    // An operand and the columns it must have.
    struct Wanted {
        const char *name;
        const pk_tensor &tensor;
        int64_t width;
    };

    int32_t activations(std::initializer_list<Wanted> list, bool is_table) const {
        for (const Wanted &x : list) {
            if (int32_t status = is_table ? table(x.name, x.tensor, PK_F32) : activation(x.name, x.tensor)) return status;
            if (int32_t status = symbol(x.name, x.tensor, PK_ROWS_T)) return status;
            if (int32_t status = equal(x.name, x.tensor.cols, "its wanted width", x.width)) return status;
        }
        return PK_OK;
    }

    int32_t vectors(std::initializer_list<Wanted> list) const {
        for (const Wanted &x : list)
            if (int32_t status = vector(x.name, x.tensor, x.width)) return status;
        return PK_OK;
    }

    template <class Op>
    int32_t heads(const Op &op) const {
        if (int32_t status = range("n_heads", op.n_heads, 1, 1 << 16)) return status;
        if (int32_t status = range("n_kv_heads", op.n_kv_heads, 1, op.n_heads)) return status;
        if (int32_t status = equal("n_heads modulo n_kv_heads", op.n_heads % op.n_kv_heads, "wanted", 0)) return status;
        if (int32_t status = range("head_width", op.head_width, 1, support_.max_head_width)) return status;
        if (int32_t status = range("v_width", op.v_width, 1, support_.max_head_width)) return status;
        const Format *format = find_format(op.kv_format);
        if (!format || !support_.is_kv(op.kv_format)) return unsupported("keys and values", op.kv_format);
        int64_t per_width = (int64_t)op.n_kv_heads * state_.page_tokens * format->block_bytes;
        if (op.k_offset < 0 || op.k_offset + per_width * op.head_width > state_.kv_page_stride)
            return fail(PK_BAD_ARG, "op %lld (%s): keys end at byte %lld of a page of %lld", (Long)index_, name_,
                        (Long)(op.k_offset + per_width * op.head_width), (Long)state_.kv_page_stride);
        if (int32_t status = range("parts", op.parts, PK_PARTS_QKV, PK_PARTS_Q)) return status;
        if (op.parts == PK_PARTS_LATENT) return range("v_width", op.v_width, 1, op.head_width);
        if (op.v_offset < 0 || op.v_offset + per_width * op.v_width > state_.kv_page_stride)
            return fail(PK_BAD_ARG, "op %lld (%s): values end at byte %lld of a page of %lld", (Long)index_, name_,
                        (Long)(op.v_offset + per_width * op.v_width), (Long)state_.kv_page_stride);
        return PK_OK;
    }

    // Beside keys in F16, queries may be F16 where activations are 16 bits wide.
    template <class Op>
    int32_t queries(const Op &op) const {
        const bool is_half = op.q.format == PK_F16 && op.kv_format == PK_F16 && support_.activation == PK_BF16;
        return is_half ? rows("q", op.q) : activation("q", op.q);
    }

    int32_t choices(const pk_tensor &ids, const pk_tensor &weights) const {
        if (int32_t status = table("ids", ids, PK_I32)) return status;
        if (int32_t status = table("weights", weights, PK_F32)) return status;
        if (int32_t status = same_rows("ids", ids, "weights", weights)) return status;
        return equal("ids width", ids.cols, "weights width", weights.cols);
    }

    int32_t expert_weight(const char *operand, const pk_tensor &w, int64_t n, int64_t k) const {
        if (!w.data) return fail(PK_BAD_ARG, "op %lld (%s): %s is absent", (Long)index_, name_, operand);
        if (w.layout != PK_PACKED) return fail(PK_BAD_ARG, "op %lld (%s): %s is not packed (layout %d)", (Long)index_, name_, operand, w.layout);
        if (!support_.is_weight(w.format)) return unsupported(operand, w.format);
        if (w.stride < 1 || w.stride % 64) return fail(PK_BAD_ARG, "op %lld (%s): experts of %s are %lld bytes apart, not a multiple of 64", (Long)index_, name_, operand, (Long)w.stride);
        if (int32_t status = equal("rows of a weight", w.rows, "wanted", n)) return status;
        return equal("columns of a weight", w.cols, "wanted", k);
    }

    int32_t experts(const pk_op_experts &op) const {
        if (int32_t status = activation("x", op.x)) return status;
        if (int32_t status = choices(op.ids, op.weights)) return status;
        if (int32_t status = same_rows("x", op.x, "ids", op.ids)) return status;
        if (int32_t status = range("n_experts", op.n_experts, op.ids.cols, 4096)) return status;
        if (int32_t status = range("act", op.act, PK_ACT_SILU, PK_ACT_RELU2)) return status;
        if (op.act == PK_ACT_RELU2 && (op.gate.data || op.gate_bias.data)) return fail(PK_BAD_ARG, "op %lld (%s): experts with relu2 have no gate", (Long)index_, name_);
        if (op.act != PK_ACT_RELU2)
            if (int32_t status = expert_weight("gate", op.gate, op.up.rows, op.x.cols)) return status;
        if (int32_t status = expert_weight("up", op.up, op.up.rows, op.x.cols)) return status;
        if (int32_t status = expert_weight("down", op.down, op.x.cols, op.up.rows)) return status;
        if (op.gate_bias.data)
            if (int32_t status = vector("gate_bias", op.gate_bias, op.up.rows * op.n_experts)) return status;
        if (op.up_bias.data)
            if (int32_t status = vector("up_bias", op.up_bias, op.up.rows * op.n_experts)) return status;
        if (op.down_bias.data)
            if (int32_t status = vector("down_bias", op.down_bias, op.x.cols * op.n_experts)) return status;
        if (int32_t status = rows("y", op.y)) return status;
        if (int32_t status = same_rows("x", op.x, "y", op.y)) return status;
        if (int32_t status = equal("x width", op.x.cols, "y width", op.y.cols)) return status;
        if (!op.add.data) return PK_OK;
        if (int32_t status = rows("add", op.add)) return status;
        if (int32_t status = same_rows("y", op.y, "add", op.add)) return status;
        return equal("y width", op.y.cols, "add width", op.add.cols);
    }

    int32_t delta(const pk_op_delta &op) const {
        if (!state_.recurrent) return fail(PK_BAD_ARG, "op %lld (%s): the state has no recurrent memory", (Long)index_, name_);
        if (int32_t status = range("n_k_heads", op.n_k_heads, 1, 1 << 12)) return status;
        if (int32_t status = range("n_v_heads", op.n_v_heads, op.n_k_heads, 1 << 12)) return status;
        if (int32_t status = equal("n_v_heads modulo n_k_heads", op.n_v_heads % op.n_k_heads, "wanted", 0)) return status;
        if (int32_t status = range("k_width", op.k_width, 1, support_.max_head_width)) return status;
        if (int32_t status = range("v_width", op.v_width, 1, support_.max_head_width)) return status;
        if (int32_t status = range("conv_width", op.conv_width, 2, 16)) return status;
        int64_t values = (int64_t)op.n_v_heads * op.v_width, channels = 2 * (int64_t)op.n_k_heads * op.k_width + values;
        if (int32_t status = activations({{"qkv", op.qkv, channels}, {"z", op.z, values}, {"out", op.out, values}}, false)) return status;
        if (int32_t status = activations({{"b", op.b, op.n_v_heads}, {"a", op.a, op.n_v_heads}}, true)) return status;
        if (int32_t status = vectors({{"conv", op.conv, channels * op.conv_width}, {"a_log", op.a_log, op.n_v_heads}, {"dt_bias", op.dt_bias, op.n_v_heads},
                                      {"scale", op.scale, op.v_width}}))
            return status;
        if (int32_t status = part("the state", op.state_offset, 4 * values * op.k_width)) return status;
        return part("the convolution's tail", op.conv_offset, 4 * channels * (op.conv_width - 1));
    }

    int32_t conv(const pk_op_conv &op) const {
        if (!state_.recurrent) return fail(PK_BAD_ARG, "op %lld (%s): the state has no recurrent memory", (Long)index_, name_);
        if (int32_t status = range("conv_width", op.conv_width, 2, 16)) return status;
        if (int32_t status = activation("x", op.x)) return status;
        if (int32_t status = activation("out", op.out)) return status;
        if (int32_t status = symbol("x", op.x, PK_ROWS_T)) return status;
        if (int32_t status = symbol("out", op.out, PK_ROWS_T)) return status;
        if (int32_t status = equal("x width", op.x.cols, "three times the out width", 3 * op.out.cols)) return status;
        if (int32_t status = vector("conv", op.conv, op.out.cols * op.conv_width)) return status;
        if (op.bias.data)
            if (int32_t status = vector("bias", op.bias, op.out.cols)) return status;
        return part("the convolution's tail", op.conv_offset, 4 * op.out.cols * (op.conv_width - 1));
    }

    int32_t mamba(const pk_op_mamba &op) const {
        if (!state_.recurrent) return fail(PK_BAD_ARG, "op %lld (%s): the state has no recurrent memory", (Long)index_, name_);
        if (int32_t status = range("n_heads", op.n_heads, 1, 1 << 12)) return status;
        if (int32_t status = range("n_groups", op.n_groups, 1, op.n_heads)) return status;
        if (int32_t status = equal("n_heads modulo n_groups", op.n_heads % op.n_groups, "wanted", 0)) return status;
        if (int32_t status = range("head_width", op.head_width, 1, support_.max_head_width)) return status;
        if (int32_t status = range("state_width", op.state_width, 1, support_.max_head_width)) return status;
        if (int32_t status = range("conv_width", op.conv_width, 2, 16)) return status;
        int64_t values = (int64_t)op.n_heads * op.head_width, channels = values + 2 * (int64_t)op.n_groups * op.state_width;
        if (int32_t status = range("n_norms", op.n_norms, 1, values)) return status;
        if (int32_t status = equal("values modulo n_norms", values % op.n_norms, "wanted", 0)) return status;
        if (int32_t status = activations({{"xbc", op.xbc, channels}, {"z", op.z, values}, {"out", op.out, values}}, false)) return status;
        if (int32_t status = activations({{"dt", op.dt, op.n_heads}}, true)) return status;
        if (int32_t status = vectors({{"conv", op.conv, channels * op.conv_width}, {"a_log", op.a_log, op.n_heads}, {"dt_bias", op.dt_bias, op.n_heads},
                                      {"d", op.d, op.n_heads}, {"scale", op.scale, values}}))
            return status;
        if (op.bias.data)
            if (int32_t status = vector("bias", op.bias, channels)) return status;
        if (int32_t status = part("the state", op.state_offset, 4 * values * op.state_width)) return status;
        return part("the convolution's tail", op.conv_offset, 4 * channels * (op.conv_width - 1));
    }

    int64_t index_;
    const Record &record_;
    const char *name_;
    const pk_state &state_;
    const Support &support_;
};

// The records of rare.h. PK_OK for any other op.
int32_t check_rare(int64_t index, const Record &record, const pk_state &state, const Support &support);

}  // namespace pk
