// Paged attention for head widths that are no multiple of eight, and for encoders: a warp per (token, head), one position at a time.
//
// out[t, h] = softmax(scale q.k) v over the visible positions. Exact and slow. Grid:
// tokens x groups of four heads. Every KV format.
#include "../../include/attention_wide.cuh"

namespace pk {
namespace {

// A lane holds kMost elements. A position's values: v_width numbers from v_from on, v_pitch from position to position.
template <int kMost>
__global__ void __launch_bounds__(128) attention_plain_kernel(const __grid_constant__ AttentionArguments a, int v_pitch, int v_from) {
    wait_dependence();
    release_dependents();
    const int t = blockIdx.x, head = blockIdx.y * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (t >= a.info->n_tokens || head >= a.n_heads) return;
    const int row = a.token_row[t], own = a.row_position[row] + t - a.row_start[row], end = a.row_position[row] + a.row_start[row + 1] - 1 - a.row_start[row];
    const int limit = !a.is_bidirectional ? own : a.window > 0 ? min(end, own + a.window - 1) : end;
    const bool is_dead = a.row_flags[row] & PK_ROW_DEAD;
    const int kv_head = head / (a.n_heads / a.n_kv_heads), first = a.window > 0 ? max(0, own - a.window + 1) : 0;
    const int32_t *pages = a.page_table + static_cast<int64_t>(a.row_slot[row]) * a.slot_pages;
    float q[kMost], o[kMost] = {}, top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
        const int d = i * 32 + lane;
        q[i] = d < a.head_width ? load_as_f32(a.q, t * a.q_stride + static_cast<int64_t>(head) * a.head_width + d, a.q_format) : 0.0f;
    }
    for (int p = first; p <= limit && !is_dead; ++p) {
        const uint8_t *page = a.kv + static_cast<int64_t>(pages[p / a.page_tokens]) * a.page_stride;
        const int64_t in = static_cast<int64_t>(kv_head) * a.page_tokens + p % a.page_tokens;
        float s = 0.0f;
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
            const int d = i * 32 + lane;
            if (d < a.head_width) s += q[i] * load_as_f32(page + a.k_offset, in * a.head_width + d, a.kv_format);
        }
        const float x = logit2(warp_sum(s), a.scale, a.softcap), next = fmaxf(top, x), fade = exp2f(top - next), w = exp2f(x - next);
        sum = sum * fade + w;
        top = next;
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
            const int d = i * 32 + lane;
            if (d < a.v_width) o[i] = o[i] * fade + w * load_as_f32(page + a.v_offset, in * v_pitch + v_from + d, a.kv_format);
        }
    }
    float f = gain_of(a, head);
    if (a.sinks != nullptr) {
        const float sink = a.sinks[head] * kLog2e, joint = fmaxf(top, sink);
        const float fade = exp2f(top - joint);
        sum = sum * fade + exp2f(sink - joint);
        f *= fade;
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
        const int d = i * 32 + lane;
        if (d < a.v_width) store_from_f32(a.out, t * a.out_stride + static_cast<int64_t>(head) * a.v_width + d, a.out_format, is_dead ? 0.0f : o[i] * f / sum);
    }
}

}  // namespace

int32_t launch_attention_plain(const Launch &l, const AttentionArguments &a, bool is_latent) {
    const dim3 grid(l.max_tokens, (a.n_heads + 3) / 4), block(128);
    const int v_pitch = is_latent ? a.head_width : a.v_width, v_from = v_pitch - a.v_width;
    if (a.head_width <= 256 && a.v_width <= 256) return launch(l, "attention plain", attention_plain_kernel<8>, grid, block, 0, a, v_pitch, v_from);
    return launch(l, "attention plain", attention_plain_kernel<32>, grid, block, 0, a, v_pitch, v_from);
}

}  // namespace pk
