// The attention op: checks, scratch, and which kernels a launch needs.
#include <algorithm>

#include "../../include/attention_arguments.h"
#include "../../include/attention_beside.cuh"
#include "../../include/attention_narrowing.h"
#include "../../include/attention_plan.h"
#include "../../include/attention_share.cuh"
#include "../../include/attention_wide.cuh"
#include "../../include/invariant.h"

namespace pk {

template <int kD>
int32_t launch_attention_decode(const Launch &l, const AttentionArguments &a, const Beside &beside, bool is_cut, const Narrowed &narrowed, const void *plan);
int32_t launch_attention_plan(const Launch &l, const AttentionArguments &a, void *plan);
int32_t launch_attention_prefill(const Launch &l, const AttentionArguments &a);
template <int kD>
int32_t launch_attention_wgmma(const Launch &l, const AttentionArguments &a, const Beside &beside);
bool has_wgmma(const pk_ctx *ctx);

namespace {

// Two partial sums a block of the decode kernel: its first and its last segment.
int64_t max_parts(const pk_ctx *ctx) { return 4ll * ctx->n_processors; }

int64_t padded_width(const pk_op_attention &op) {
    const int64_t width = std::max(op.head_width, op.v_width);
    return width <= 64 ? 64 : width <= 128 ? 128 : width <= 192 ? 192 : 256;
}

// is_cut: all rows, each by itself.
int32_t launch_few(const Launch &l, const pk_op_attention &op, const AttentionArguments &a, const Beside &beside, bool is_cut = false, const Narrowed &narrowed = {}) {
    const int width = std::max(op.head_width, op.v_width);
    const void *plan = is_planned(l, op) ? plan_at(l) : nullptr;
    if (width <= 64) return launch_attention_decode<64>(l, a, beside, is_cut, narrowed, plan);
    if (width <= 96) return launch_attention_decode<96>(l, a, beside, is_cut, narrowed, plan);
    if (width <= 128) return launch_attention_decode<128>(l, a, beside, is_cut, narrowed, plan);
    return width <= 192 ? launch_attention_decode<192>(l, a, beside, is_cut, narrowed, plan) : launch_attention_decode<256>(l, a, beside, is_cut, narrowed, plan);
}

int32_t launch_many(const Launch &l, const pk_op_attention &op, const AttentionArguments &a, const Beside &beside) {
    switch (padded_width(op)) {
        case 64: return launch_attention_wgmma<64>(l, a, beside);
        case 128: return launch_attention_wgmma<128>(l, a, beside);
        case 192: return launch_attention_wgmma<192>(l, a, beside);
        default: return launch_attention_wgmma<256>(l, a, beside);
    }
}

int64_t kv_bytes(const pk_op_attention &op) { return op.kv_format == PK_F32 ? 4 : op.kv_format == PK_FP8_E4M3 ? 1 : 2; }

// Neither the decode nor the prefill kernels take it.
bool is_other(const pk_op_attention &op) { return op.is_bidirectional || op.parts == PK_PARTS_LATENT || op.head_width > 256 || op.v_width > 256; }

// Of what is_other(): the tensor core kernel takes it.
bool fits_wide(const pk_op_attention &op, int64_t page_stride) {
    const bool is_latent = op.parts == PK_PARTS_LATENT;
    if (op.head_width % 8 || op.v_width % 8 || (op.k_offset | (is_latent ? 0 : op.v_offset) | page_stride) % (8 * kv_bytes(op))) return false;
    return is_latent ? op.head_width <= 576 && op.v_width <= 512 && op.head_width - op.v_width <= 64 : op.head_width <= 512 && op.v_width <= 512;
}

bool needs_plain(const pk_op_attention &op) {
    const int64_t piece = op.kv_format == PK_FP8_E4M3 ? 16 : 8;
    return op.head_width % piece || op.v_width % piece || (op.k_offset | op.v_offset) % (piece * kv_bytes(op));
}

}  // namespace

int32_t check_attention(const pk_op_attention &op, int64_t at) {
    if (op.head_width > 1024 || op.v_width > 1024)
        return fail(PK_UNSUPPORTED, "op %lld attention: heads of %d and %d; the CUDA pack takes up to 1024", (long long)at, op.head_width, op.v_width);
    return PK_OK;
}

// Rows of partial sums, at most, of shared prefixes (share.cu fills the device once) and of pieces of long contexts (attention_pieces.cuh).
static int64_t prefix_rows(const pk_ctx *ctx, const pk_op_attention &op, int64_t max_rows) { return max_rows * op.n_heads + ctx->n_processors * 128ll; }
static int64_t piece_rows(const pk_ctx *ctx) { return 4ll * ctx->n_processors * 128; }
static int64_t shared_rows(const pk_ctx *ctx, const pk_op_attention &op, int64_t max_rows) { return prefix_rows(ctx, op, max_rows) + piece_rows(ctx); }

bool uses_share(const pk_ctx *ctx, const pk_op_attention &op) { return has_wgmma(ctx) && !is_invariant(ctx) && op.window == 0 && !is_other(op) && !needs_plain(op); }

int64_t attention_parts_bytes(const pk_ctx *ctx) { return max_parts(ctx) * (16 * 256 + 32) * 4; }

int64_t attention_scratch(const pk_ctx *ctx, const pk_op_attention &op, int64_t max_rows) {
    if (is_other(op)) return attention_wide_scratch(ctx);
    return attention_parts_bytes(ctx) + (uses_share(ctx, op) ? shared_rows(ctx, op, max_rows) * (padded_width(op) + 2) * 4 : 0);
}

static AttentionArguments arguments_of(const Launch &l, const pk_op_attention &op) {
    const pk_state &s = *l.state;
    AttentionArguments a = attention_arguments(l, op);
    a.sinks = reinterpret_cast<const float *>(op.sinks.data);
    a.partial = reinterpret_cast<float *>(l.scratch);
    a.counters = l.counters;
    a.window = op.window;
    a.page_shift = (s.page_tokens & (s.page_tokens - 1)) == 0 ? __builtin_ctz(s.page_tokens) : -1;
    a.max_rows = s.max_step_rows;
    a.softcap = op.softcap;
    a.is_bidirectional = op.is_bidirectional;
    if (op.parts == PK_PARTS_LATENT) a.v_offset = op.k_offset;
    return a;
}

// Pieces of 16 bytes must be whole and aligned for the tensor core kernels.
static bool has_whole_pieces(const Launch &l, const pk_op_attention &op) { return !needs_plain(op) && l.state->kv_page_stride % (op.kv_format == PK_F32 ? 32 : 16) == 0; }

bool reads_share(const Launch &l, const pk_op_attention &op) {
    return l.share != nullptr && uses_share(l.ctx, op) && has_whole_pieces(l, op) && op.n_heads == l.share_heads && op.n_kv_heads == l.share_kv_heads;
}

// Where the partial sums of shared prefixes lie.
static void place_shared(const Launch &l, const pk_op_attention &op, AttentionArguments &a) {
    a.share_part = a.partial + max_parts(l.ctx) * (16 * 256 + 32);
    a.share_ml = reinterpret_cast<float2 *>(a.share_part + shared_rows(l.ctx, op, l.state->max_step_rows) * padded_width(op));
}

int32_t launch_shared(const Launch &l, const pk_op_attention &op, bool is_ahead) {
    const Share share = share_of(*l.state, l.share);
    AttentionArguments a = arguments_of(l, op);
    a.share_head = share.head;
    a.share_groups = share.groups;
    a.share_members = share.members;
    place_shared(l, op, a);
    Launch own = l;
    own.overlap = is_ahead;
    return launch_many(own, op, a, {});
}

// Rows of one token each by pairs as columns (attention_columns.cuh).
static bool is_single(const Launch &l, const pk_op_attention &op) {
    const int32_t page_tokens = l.state->page_tokens;
    return has_wgmma(l.ctx) && l.decode_only && !is_invariant(l.ctx) && !is_other(op) && has_whole_pieces(l, op) && op.head_width == 128 && op.v_width == 128 && (op.kv_format == PK_BF16 || op.kv_format == PK_F16) && op.n_heads <= 8 * op.n_kv_heads &&
           page_tokens >= 16 && (page_tokens & (page_tokens - 1)) == 0;
}

bool can_narrow(const Launch &l, const pk_op_attention &op) { return is_single(l, op) && !reads_share(l, op) && op.out.format == PK_BF16; }

bool is_planned(const Launch &l, const pk_op_attention &op) { return l.max_tokens >= kPlanRows && l.share == nullptr && l.ctx->n_processors <= kPlanProcessors && is_single(l, op); }

int32_t launch_plan(const Launch &l, const pk_op_attention &op) { return launch_attention_plan(l, arguments_of(l, op), plan_at(l)); }

int32_t launch_attention_narrowing(const Launch &l, const pk_op_attention &op, const Narrowed &to) { return launch_few(l, op, arguments_of(l, op), {}, false, to); }

int32_t launch_attention(const Launch &l, const pk_op_attention &op) {
    const pk_state &s = *l.state;
    AttentionArguments a = arguments_of(l, op);
    const int group = op.n_heads / op.n_kv_heads;
    const bool is_latent = op.parts == PK_PARTS_LATENT;
    const bool is_invariant = pk::is_invariant(l.ctx);  // the wide kernel cuts by the number of tiles
    if (is_other(op)) return fits_wide(op, s.kv_page_stride) && !is_invariant ? launch_attention_wide(l, a, is_latent) : launch_attention_plain(l, a, is_latent);
    if (!has_whole_pieces(l, op)) return launch_attention_plain(l, a, false);
    if (is_invariant) return launch_few(l, op, a, {}, true);
    if (reads_share(l, op)) {
        place_shared(l, op, a);
        a.share_rows = share_of(s, l.share).rows;
        a.share_width = static_cast<int32_t>(padded_width(op));
    }
    // A bucket in which every row must be the decode kernel's needs no second launch.
    if (l.decode_only || l.max_tokens * group <= 16 || l.max_tokens == 1) return launch_few(l, op, a, {});
    if (!has_wgmma(l.ctx)) {
        const int32_t status = launch_few(l, op, a, {});
        return status ? status : launch_attention_prefill(l, a);
    }
    // Counters of decode's tiles, two a multiprocessor, lie in front.
    Beside beside = {l.counters + 4 * l.ctx->n_processors, static_cast<int32_t>(reinterpret_cast<uintptr_t>(&op) >> 2 | 1), 0};
    AttentionArguments many = a;
    if (uses_share(l.ctx, op)) {
        place_shared(l, op, many);
        const int64_t first = prefix_rows(l.ctx, op, s.max_step_rows);
        many.share_part += first * padded_width(op);
        many.share_ml += first;
        beside.max_parts = static_cast<int32_t>(piece_rows(l.ctx));
    }
    Launch own = l;
    own.overlap = true;
    if (int32_t status = launch_many(own, op, many, beside)) return status;
    return launch_few(own, op, a, beside);
}

}  // namespace pk
