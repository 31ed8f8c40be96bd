// The attention op: checks, scratch, and which kernels a launch needs.
#include <algorithm>

#include "../../include/attention.cuh"

namespace pk {

int32_t launch_attention_decode(const Launch &l, const AttentionArguments &a);
int32_t launch_attention_prefill(const Launch &l, const AttentionArguments &a);
template <int kD>
int32_t launch_attention_wgmma(const Launch &l, const AttentionArguments &a);
bool has_wgmma(const pk_ctx *ctx);
int32_t launch_attention_plain(const Launch &l, const AttentionArguments &a);

namespace {

int64_t max_items(const pk_ctx *ctx, const pk_op_attention &op, int64_t max_rows) {
    const int64_t group = op.n_heads / op.n_kv_heads;
    return 4ll * ctx->n_processors + 2 * max_rows * op.n_kv_heads * ((group + 15) / 16);
}

}  // namespace

int32_t check_attention(const pk_op_attention &op, int64_t at) {
    if (op.parts == PK_PARTS_LATENT) return fail(PK_UNSUPPORTED, "op %lld attention: the CUDA pack has no kernels for latent attention yet", (long long)at);
    if (op.head_width > 256 || op.v_width > 256)
        return fail(PK_UNSUPPORTED, "op %lld attention: heads of %d and %d; the CUDA pack takes up to 256", (long long)at, op.head_width, op.v_width);
    return PK_OK;
}

int64_t attention_scratch(const pk_ctx *ctx, const pk_op_attention &op, int64_t max_rows) {
    return max_items(ctx, op, max_rows) * (16 * op.v_width + 32) * 4;
}

int32_t launch_attention(const Launch &l, const pk_op_attention &op) {
    const pk_state &s = *l.state;
    AttentionArguments a = {};
    a.q = reinterpret_cast<const void *>(op.q.data);
    a.out = reinterpret_cast<void *>(op.out.data);
    a.sinks = reinterpret_cast<const float *>(op.sinks.data);
    a.info = l.info;
    a.row_slot = reinterpret_cast<const int32_t *>(s.row_slot);
    a.row_start = reinterpret_cast<const int32_t *>(s.row_start);
    a.row_position = reinterpret_cast<const int32_t *>(s.row_position);
    a.row_flags = reinterpret_cast<const int32_t *>(s.row_flags);
    a.token_row = reinterpret_cast<const int32_t *>(s.token_row);
    a.page_table = reinterpret_cast<const int32_t *>(s.page_table);
    a.kv = reinterpret_cast<const uint8_t *>(s.kv);
    a.partial = reinterpret_cast<float *>(l.scratch);
    a.counters = l.counters;
    a.q_stride = op.q.stride / (op.q.format == PK_F32 ? 4 : 2);
    a.out_stride = op.out.stride / (op.out.format == PK_F32 ? 4 : 2);
    a.page_stride = s.kv_page_stride;
    a.k_offset = op.k_offset;
    a.v_offset = op.v_offset;
    a.q_format = op.q.format;
    a.out_format = op.out.format;
    a.kv_format = op.kv_format;
    a.n_heads = op.n_heads;
    a.n_kv_heads = op.n_kv_heads;
    a.head_width = op.head_width;
    a.v_width = op.v_width;
    a.window = op.window;
    a.page_tokens = s.page_tokens;
    a.slot_pages = s.slot_pages;
    a.page_shift = (s.page_tokens & (s.page_tokens - 1)) == 0 ? __builtin_ctz(s.page_tokens) : -1;
    a.max_rows = s.max_step_rows;
    a.max_items = static_cast<int32_t>(max_items(l.ctx, op, s.max_step_rows));
    a.scale = op.scale;
    a.softcap = op.softcap;
    a.is_bidirectional = op.is_bidirectional;
    if (a.max_items * 4ll > kCounterBytes) return fail(PK_UNSUPPORTED, "attention: %d work items; the CUDA pack counts up to %lld", a.max_items, (long long)(kCounterBytes / 4));
    const int group = op.n_heads / op.n_kv_heads;
    const int64_t kv_bytes = op.kv_format == PK_F32 ? 4 : op.kv_format == PK_FP8_E4M3 ? 1 : 2;
    // Pieces of eight elements must be whole and aligned for the tensor core kernels.
    if (op.is_bidirectional || op.head_width % 8 || op.v_width % 8 || (s.kv_page_stride | op.k_offset | op.v_offset) % (8 * kv_bytes)) return launch_attention_plain(l, a);
    if (int32_t status = launch_attention_decode(l, a)) return status;
    // A bucket in which every row must be the decode kernel's needs no second launch.
    if (l.decode_only || l.max_tokens * group <= 16 || l.max_tokens == 1) return PK_OK;
    if (!has_wgmma(l.ctx)) return launch_attention_prefill(l, a);
    const int width = std::max(op.head_width, op.v_width);
    if (width <= 64) return launch_attention_wgmma<64>(l, a);
    if (width <= 128) return launch_attention_wgmma<128>(l, a);
    return width <= 192 ? launch_attention_wgmma<192>(l, a) : launch_attention_wgmma<256>(l, a);
}

}  // namespace pk
