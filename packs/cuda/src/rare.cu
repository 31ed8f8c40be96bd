// Ops that few families need (rare.h).
#include "../include/rare.cuh"

#include <algorithm>

#include "../include/experts.cuh"
#include "../include/operand.h"
#include "../include/recurrent.cuh"
#include "program.h"

namespace pk {
namespace {

struct SoftplusArguments {
    const void *x, *g;
    void *out;
    const StepInfo *info;
    int64_t x_stride, g_stride, out_stride, rows_symbol;
    int32_t x_format, g_format, out_format, cols, share;
};

// out = x * log(1 + exp(g)). Grid: columns, rows.
__global__ void softplus_kernel(const __grid_constant__ SoftplusArguments a) {
    wait_dependence();
    release_dependents();
    const int row = blockIdx.y;
    if (row >= rows_of(a.info, a.rows_symbol)) return;
    for (int k = blockIdx.x * blockDim.x + threadIdx.x; k < a.cols; k += gridDim.x * blockDim.x) {
        const float g = load_as_f32(a.g, row * a.g_stride + k / a.share, a.g_format), factor = g > 20.0f ? g : log1pf(expf(g));
        store_from_f32(a.out, row * a.out_stride + k, a.out_format, load_as_f32(a.x, row * a.x_stride + k, a.x_format) * factor);
    }
}

int32_t launch_softplus(const Launch &l, const pk_op_softplus &op) {
    SoftplusArguments a = {};
    a.x = reinterpret_cast<const void *>(op.x.data);
    a.g = reinterpret_cast<const void *>(op.g.data);
    a.out = reinterpret_cast<void *>(op.out.data);
    a.info = l.info;
    a.x_stride = elements_apart(op.x);
    a.g_stride = elements_apart(op.g);
    a.out_stride = elements_apart(op.out);
    a.rows_symbol = op.x.rows;
    a.x_format = op.x.format;
    a.g_format = op.g.format;
    a.out_format = op.out.format;
    a.cols = static_cast<int32_t>(op.x.cols);
    a.share = static_cast<int32_t>(op.x.cols / op.g.cols);
    const dim3 grid(static_cast<unsigned>(std::min<int64_t>((op.x.cols + 255) / 256, 64)), static_cast<unsigned>(bound(l, op.x.rows)));
    return launch(l, "softplus", softplus_kernel, grid, dim3(256), 0, a);
}

struct WeighArguments {
    const int32_t *ids;
    float *weights;
    const float *logits, *scales;
    const StepInfo *info;
    int64_t ids_stride, weights_stride, logits_stride, rows_symbol;
    int32_t n_used, n_experts, is_normalised;
};

// A warp a token. Grid: groups of four tokens.
__global__ void __launch_bounds__(128) weigh_kernel(const __grid_constant__ WeighArguments a) {
    wait_dependence();
    release_dependents();
    const int t = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (t >= rows_of(a.info, a.rows_symbol)) return;
    float *weights = a.weights + t * a.weights_stride;
    float sum = 0.0f;
    auto chosen = [&](int i) {
        const int e = a.ids[t * a.ids_stride + i];
        return e >= 0 && e < a.n_experts ? e : 0;
    };
    auto score = [&](int i) { return 1.0f / (1.0f + expf(-a.logits[t * a.logits_stride + chosen(i)])); };
    for (int i = lane; i < a.n_used && a.logits != nullptr; i += 32) sum += score(i);
    sum = warp_sum(sum);
    for (int i = lane; i < a.n_used; i += 32) {
        float v = a.logits == nullptr ? weights[i] : a.is_normalised ? score(i) / sum : score(i);
        if (a.scales != nullptr) v *= a.scales[chosen(i)];
        weights[i] = v;
    }
}

int32_t launch_weigh(const Launch &l, const pk_op_weigh &op) {
    WeighArguments a = {};
    a.ids = reinterpret_cast<const int32_t *>(op.ids.data);
    a.weights = reinterpret_cast<float *>(op.weights.data);
    a.logits = reinterpret_cast<const float *>(op.logits.data);
    a.scales = reinterpret_cast<const float *>(op.scales.data);
    a.info = l.info;
    a.ids_stride = op.ids.stride / 4;
    a.weights_stride = op.weights.stride / 4;
    a.logits_stride = op.logits.stride / 4;
    a.rows_symbol = op.ids.rows;
    a.n_used = static_cast<int32_t>(op.ids.cols);
    a.n_experts = static_cast<int32_t>(op.logits.data ? op.logits.cols : op.scales.cols);
    a.is_normalised = op.is_normalised;
    return launch(l, "weigh", weigh_kernel, dim3(static_cast<unsigned>((bound(l, op.ids.rows) + 3) / 4)), dim3(128), 0, a);
}

// Which row of a part of the table a token's last tokens choose, into ids [parts, max_tokens]; -1 in dead rows.
struct NgramArguments {
    pk_op_ngram op;
    const int32_t *tokens, *token_row, *position, *row_slot, *row_flags;
    const StepInfo *info;
    int32_t *ids;
    int64_t context;
    int32_t max_tokens;
};

__global__ void __launch_bounds__(128) ngram_kernel(const __grid_constant__ NgramArguments a) {
    wait_dependence();
    release_dependents();
    const int t = blockIdx.x * 128 + threadIdx.x, n_parts = (a.op.n_tokens - 1) * a.op.n_each;
    if (t >= a.info->n_tokens) return;
    const int row = a.token_row[t], position = a.position[t];
    if (a.row_flags[row] & PK_ROW_DEAD) {
        for (int h = 0; h < n_parts; ++h) a.ids[static_cast<int64_t>(h) * a.max_tokens + t] = -1;
        return;
    }
    const int32_t *history = a.tokens + a.row_slot[row] * a.context + position;
    uint64_t mixed = static_cast<uint64_t>(static_cast<int64_t>(history[0])) * static_cast<uint64_t>(a.op.multipliers[0]);
    bool is_open = true;
    int first = 0;
    for (int g = 2, h = 0; g <= a.op.n_tokens; ++g) {
        const int k = g - 1;
        is_open = is_open && position >= k && history[-k] != a.op.end_token;
        mixed ^= static_cast<uint64_t>(static_cast<int64_t>(is_open ? history[-k] : a.op.end_token)) * static_cast<uint64_t>(a.op.multipliers[k]);
        for (int i = 0; i < a.op.n_each; ++i, ++h) {
            int64_t rest = static_cast<int64_t>(mixed) % a.op.sizes[h];
            if (rest < 0) rest += a.op.sizes[h];
            a.ids[static_cast<int64_t>(h) * a.max_tokens + t] = first + static_cast<int32_t>(rest);
            first += a.op.sizes[h];
        }
    }
}

int32_t launch_ngram(const Launch &l, const pk_op_ngram &op) {
    const pk_state &s = *l.state;
    auto ints = [](uint64_t address) { return reinterpret_cast<const int32_t *>(address); };
    NgramArguments a = {op, ints(s.tokens), ints(s.token_row), ints(s.token_position), ints(s.row_slot), ints(s.row_flags), l.info, reinterpret_cast<int32_t *>(l.scratch), s.max_ctx_tokens + 1, l.max_tokens};
    if (int32_t e = launch(l, "ngram", ngram_kernel, dim3(static_cast<unsigned>((l.max_tokens + 127) / 128)), dim3(128), 0, a)) return e;
    pk_tensor out = op.out;
    out.cols = op.table.cols;
    for (int h = 0; h < (op.n_tokens - 1) * op.n_each; ++h) {
        out.data = op.out.data + h * op.table.cols * (op.out.format == PK_F32 ? 4 : 2);
        if (int32_t e = launch_lookup(l, op.table, static_cast<int32_t>(op.table.rows * op.n_pieces), a.ids + static_cast<int64_t>(h) * l.max_tokens, out)) return e;
    }
    return PK_OK;
}

struct StreamsArguments {
    const void *q, *k, *v;
    void *out;
    const StepInfo *info;
    int64_t q_stride, k_stride, v_stride, out_stride, rows_symbol;
    int32_t q_format, k_format, v_format, out_format, width, n_streams;
};

// A warp a stream of a token. Grid: tokens.
__global__ void __launch_bounds__(128) streams_kernel(const __grid_constant__ StreamsArguments a) {
    wait_dependence();
    release_dependents();
    const int t = blockIdx.x, lane = threadIdx.x & 31;
    if (t >= rows_of(a.info, a.rows_symbol)) return;
    for (int j = threadIdx.x >> 5; j < a.n_streams; j += 4) {
        float sum = 0.0f;
        for (int i = lane; i < a.width; i += 32) sum += load_as_f32(a.q, t * a.q_stride + j * a.width + i, a.q_format) * load_as_f32(a.k, t * a.k_stride + j * a.width + i, a.k_format);
        sum = warp_sum(sum) * rsqrtf(static_cast<float>(a.width));
        const float root = sqrtf(fmaxf(fabsf(sum), 1e-6f)), gate = sum > 0.0f ? root : sum < 0.0f ? -root : 0.0f, factor = 1.0f / (1.0f + expf(-gate));
        for (int i = lane; i < a.width; i += 32) store_from_f32(a.out, t * a.out_stride + j * a.width + i, a.out_format, factor * load_as_f32(a.v, t * a.v_stride + i, a.v_format));
    }
}

int32_t launch_streams(const Launch &l, const pk_op_streams &op) {
    StreamsArguments a = {reinterpret_cast<const void *>(op.q.data), reinterpret_cast<const void *>(op.k.data), reinterpret_cast<const void *>(op.v.data), reinterpret_cast<void *>(op.out.data), l.info,
                          elements_apart(op.q), elements_apart(op.k), elements_apart(op.v), elements_apart(op.out), op.q.rows, op.q.format, op.k.format, op.v.format, op.out.format,
                          static_cast<int32_t>(op.v.cols), static_cast<int32_t>(op.q.cols / op.v.cols)};
    return launch(l, "streams", streams_kernel, dim3(static_cast<unsigned>(bound(l, op.q.rows))), dim3(128), 0, a);
}

struct DilatedArguments {
    RecurrentState state;
    Taps taps;  // their width spans all tokens between the first and the last input
    const StepInfo *info;
    const int32_t *token_row;
    const void *add;
    void *out;
    int64_t add_stride, out_stride;
    int32_t add_format, out_format, width, dilation;
};

// Grid: channels, tokens.
__global__ void __launch_bounds__(128) dilated_kernel(const __grid_constant__ DilatedArguments a) {
    wait_dependence();
    release_dependents();
    const int c = blockIdx.x * 128 + threadIdx.x, t = blockIdx.y;
    if (t >= a.info->n_tokens || c >= a.taps.channels) return;
    const RecurrentRow q = recurrent_row(a.state, a.token_row[t]);
    float sum = 0.0f;
    if (!q.is_dead)
        for (int i = 0; i < a.width; ++i) sum += a.taps.conv[static_cast<int64_t>(c) * a.width + i] * input_of(a.taps, q, t - q.first - (a.width - 1 - i) * a.dilation, c);
    store_from_f32(a.out, t * a.out_stride + c, a.out_format, load_as_f32(a.add, t * a.add_stride + c, a.add_format) + sum / (1.0f + expf(-sum)));
}

// Tails of any length: inputs move towards the front, so the earlier ones may be written before the later ones are read. Grid: channels, rows.
__global__ void __launch_bounds__(128) dilated_tail_kernel(const __grid_constant__ DilatedArguments a) {
    wait_dependence();
    release_dependents();
    const int c = blockIdx.x * 128 + threadIdx.x, r = blockIdx.y;
    if (r >= a.info->n_rows || c >= a.taps.channels) return;
    const RecurrentRow q = recurrent_row(a.state, r);
    if (q.is_dead || q.n == 0) return;
    float *tail = reinterpret_cast<float *>(q.memory + a.taps.offset);
    for (int i = 0; i < a.taps.width - 1; ++i) tail[static_cast<int64_t>(i) * a.taps.channels + c] = input_of(a.taps, q, q.n - a.taps.width + 1 + i, c);
}

int32_t launch_dilated(const Launch &l, const pk_op_dilated &op) {
    DilatedArguments a = {};
    a.state = recurrent_state(*l.state);
    a.taps = taps_of(op.x, op.conv, {}, (op.conv_width - 1) * op.dilation + 1, op.conv_offset);
    a.info = l.info;
    a.token_row = reinterpret_cast<const int32_t *>(l.state->token_row);
    a.add = reinterpret_cast<const void *>(op.add.data);
    a.out = reinterpret_cast<void *>(op.out.data);
    a.add_stride = elements_apart(op.add);
    a.out_stride = elements_apart(op.out);
    a.add_format = op.add.format;
    a.out_format = op.out.format;
    a.width = op.conv_width;
    a.dilation = op.dilation;
    const unsigned blocks = static_cast<unsigned>((op.x.cols + 127) / 128);
    if (int32_t e = launch(l, "dilated", dilated_kernel, dim3(blocks, static_cast<unsigned>(l.max_tokens)), dim3(128), 0, a)) return e;
    return launch(l, "dilated tails", dilated_tail_kernel, dim3(blocks, static_cast<unsigned>(max_rows_of(l))), dim3(128), 0, a);
}

}  // namespace

bool has_rare_op(int32_t op) { return op >= PK_OP_SOFTPLUS && op <= PK_OP_POOL; }

int64_t rare_scratch(const pk_ctx *ctx, const Record &record, const pk_state &state) {
    if (record.op == PK_OP_SPARSE) return sparse_scratch(ctx, record.as<pk_op_sparse>(), state);
    if (record.op == PK_OP_EXPERTS_FETCHED) return experts_scratch(ctx, record.as<pk_op_experts_fetched>().experts, state.max_step_tokens);
    if (record.op != PK_OP_NGRAM) return 0;
    const auto &op = record.as<pk_op_ngram>();
    return int64_t{op.n_tokens - 1} * op.n_each * state.max_step_tokens * 4;
}

int32_t check_rare_op(pk_ctx *ctx, const Record &record, const pk_state &state, int64_t at) {
    if (record.op == PK_OP_EXPERTS_FETCHED) return check_fetched(ctx, record.as<pk_op_experts_fetched>(), at);
    if (record.op == PK_OP_SPARSE) return check_sparse(record.as<pk_op_sparse>(), state, at);
    if (record.op == PK_OP_SETTLE) return check_settle(record.as<pk_op_settle>(), at);
    if (record.op == PK_OP_SETTLE_MAMBA) return check_settle(record.as<pk_op_settle_mamba>(), at);
    if (record.op == PK_OP_NGRAM && find_packed(ctx, record.as<pk_op_ngram>().table) == nullptr)
        return fail(PK_BAD_ARG, "op %lld ngram: the table was not made by pk_repack of this context", (long long)at);
    return PK_OK;
}

int32_t launch_rare(const Launch &l, const Record &record) {
    switch (record.op) {
        case PK_OP_SOFTPLUS: return launch_softplus(l, record.as<pk_op_softplus>());
        case PK_OP_WEIGH: return launch_weigh(l, record.as<pk_op_weigh>());
        case PK_OP_NGRAM: return launch_ngram(l, record.as<pk_op_ngram>());
        case PK_OP_STREAMS: return launch_streams(l, record.as<pk_op_streams>());
        case PK_OP_DILATED: return launch_dilated(l, record.as<pk_op_dilated>());
        case PK_OP_SPARSE: return launch_sparse(l, record.as<pk_op_sparse>());
        case PK_OP_EXPERTS_FETCHED: return launch_fetched(l, record.as<pk_op_experts_fetched>());
        case PK_OP_DELTA_SIGMOID: return launch_delta(l, record.as<pk_op_delta>());
        case PK_OP_KEEP: return launch_keep(l, record.as<pk_op_keep>());
        case PK_OP_SETTLE: return launch_settle(l, record.as<pk_op_settle>());
        case PK_OP_SETTLE_MAMBA: return launch_settle(l, record.as<pk_op_settle_mamba>());
        case PK_OP_SETTLE_CONV: return launch_settle(l, record.as<pk_op_settle_conv>());
        case PK_OP_SHIFT: return launch_shift(l);
        case PK_OP_GUESS: return launch_guess(l, record.as<pk_op_guess>());
        default: return fail(PK_UNSUPPORTED, "%s: the CUDA pack has no kernel for this op", op_name(record.op));
    }
}

}  // namespace pk
