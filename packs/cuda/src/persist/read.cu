// Reads a program's records as phases of the persistent decode kernel: which of them it has, and what it is told of each.
#include "../../include/persist/draft.h"

#include "../../../rare.h"

#include "../../include/format/unit.cuh"
#include "../../include/gemm.cuh"

namespace pk::persist {
namespace {

bool is_activation(const pk_tensor &t) {
    return (t.format == PK_F32 || t.format == PK_BF16) && t.stride % (4 * element_bytes(t)) == 0 && t.data % 16 == 0;
}

bool mentions(const Record &r, uint64_t address) {
    const uint64_t *words = reinterpret_cast<const uint64_t *>(&r);
    for (int32_t i = 0; i < r.size / 8; ++i)
        if (words[i] == address) return true;
    return false;
}
// Nobody reads what was at this address: the next record that names it writes a product there, or queries.
bool is_dead_after(const Records &records, int64_t from, uint64_t address) {
    for (int64_t i = from; i < records.n(); ++i) {
        if (!mentions(records[i], address)) continue;
        if (records[i].op == PK_OP_QKV && records[i].as<pk_op_qkv>().qkv.data != address) return records[i].as<pk_op_qkv>().q.data == address;
        if (records[i].op != PK_OP_MATMUL) return false;
        const auto &op = records[i].as<pk_op_matmul>();
        return op.y.data == address && op.x.data != address && op.add.data != address;
    }
    return true;
}

int32_t staging_of(int32_t format) {
    switch (format) {
        case PK_BF16: return kStageBf16;
        case PK_FP8_E4M3: return kStageFp8;
        case PK_Q8_0: return kStageBytes;
        case PK_Q4_K: case PK_Q6_K: return kStageNibbles;
        default: return -1;
    }
}

bool read_weight(const Launch &l, const pk_op_matmul &op, int i, Weight *w) {
    const Packed *found = find_packed(l.ctx, op.w[i]);
    if (found == nullptr || staging_of(found->format) < 0) return false;
    const Packed &p = *found;
    // The last chunk of a row-major format may be half a chunk: copies put zeros behind it.
    if (p.cols % (chunk_elements(p.format) >> is_rows(p.format)) || p.padded_cols != p.cols) return false;
    w->data = reinterpret_cast<const uint8_t *>(op.w[i].data);
    const float *scales = reinterpret_cast<const float *>(w->data + p.scales);
    w->row_scale = p.scale_kind == PK_SCALES_ROW ? scales : nullptr;
    w->block_scale = p.scale_kind == PK_SCALES_BLOCK ? scales : nullptr;
    if (w->block_scale && (p.scale_stride % 4 || reinterpret_cast<uint64_t>(scales) % 16)) return false;
    w->bias = reinterpret_cast<const float *>(op.bias[i].data);
    w->row_bytes = p.row_bytes;
    w->rows = static_cast<int32_t>(p.rows);
    w->n_tiles = static_cast<int32_t>((p.rows + (1 << tile_shift(p.format)) - 1) >> tile_shift(p.format));
    w->scale_stride = static_cast<int32_t>(p.scale_stride);
    w->format = p.format;
    w->scale = p.scale;
    w->n_chunks = static_cast<int32_t>((p.cols + chunk_elements(p.format) - 1) / chunk_elements(p.format));
    return op.w[i].data % 128 == 0;
}

// A product, after a norm of its x or without one. False: not for this kernel.
bool read_matmul(const Launch &l, const pk_op_matmul &op, const pk_op_norm *norm, Draft *d) {
    Phase &p = d->phase;
    p.kind = kMatmul;
    p.n_w = op.n_w;
    p.is_gated = op.act != PK_ACT_NONE;
    p.act = op.act;
    p.k = static_cast<int32_t>(op.x.cols);
    p.rows_symbol = op.x.rows;
    p.scale = op.scale;
    p.softcap = op.softcap;
    int64_t column = 0;
    for (int i = 0; i < op.n_w; ++i) {
        Weight &w = p.w[i];
        if (!read_weight(l, op, i, &w)) return false;
        if (i > 0 && staging_of(w.format) != p.staging) return false;
        if (p.is_gated && i > 0 && (w.format != p.w[0].format || w.rows != p.w[0].rows)) return false;
        if (column % 2) return false;
        p.staging = staging_of(w.format);
        p.tile_shift = tile_shift(w.format);
        w.first_tile = p.is_gated ? 0 : p.n_tiles;
        w.first_column = p.is_gated ? 0 : static_cast<int32_t>(column);
        if (!p.is_gated || i == 0) p.n_tiles += w.n_tiles;
        column += w.rows;
    }
    d->x = op.x;
    d->y = op.y;
    d->add = op.add;
    if (norm != nullptr) {
        if (norm->x.format != PK_F32 || norm->kind != PK_NORM_RMS || norm->bias.data || norm->post_w.data || norm->residual.data || norm->out.data != op.x.data || norm->out.stride != op.x.stride) return false;
        if (norm->out.cols != op.x.cols || norm->x.rows != op.x.rows || norm->out.format != PK_BF16 || norm->w.data % 16 || norm->out.stride % 8 || norm->out.data % 8) return false;
        d->x = norm->x;
        d->normed = norm->out.data;
        p.norm = reinterpret_cast<const float *>(norm->w.data);
        p.eps = norm->eps;
        p.inverse_k = 1.0f / static_cast<float>(op.x.cols);
        p.normed = place_of(norm->out);
    }
    if (norm == nullptr && op.x.format != PK_BF16) return false;
    if (bound(l, op.x.rows) > kMaxRows || !is_activation(d->x) || !is_activation(d->y)) return false;
    return !op.add.data || is_activation(op.add);
}

// Attention of new tokens, from the raw product on, with the gate of its outputs where there is one. next: the record behind it.
bool read_attention(const Launch &l, const pk_op_qkv &in, const pk_op_attention &op, const Records &records, int64_t next, Draft *d) {
    const int32_t group = op.n_kv_heads > 0 ? op.n_heads / op.n_kv_heads : 0, width = op.head_width;
    if (in.parts != PK_PARTS_QKV || op.parts != PK_PARTS_QKV || op.is_bidirectional || in.v_norm.data || in.kv_format != op.kv_format) return false;
    const bool is_fp8 = op.kv_format == PK_FP8_E4M3, is_half = op.kv_format == PK_F16;
    if (!is_fp8 && ((op.kv_format != PK_BF16 && !is_half) || in.gains.data || op.gains.data)) return false;
    if ((width != 64 && width != 128 && (width != 256 || in.rope_width > 128)) || op.v_width != width || in.head_width != width || in.v_width != width) return false;
    if (group < 1 || group > 8 || group * op.n_kv_heads != op.n_heads || in.n_heads != op.n_heads || in.n_kv_heads != op.n_kv_heads) return false;
    if (op.q.data != in.q.data || op.q.stride != in.q.stride || in.k_offset != op.k_offset || in.v_offset != op.v_offset) return false;
    if ((l.state->kv_page_stride | op.k_offset | op.v_offset) % 16 || in.rope_width > width || in.rope_width % 8) return false;
    const pk_op_sigmoid *gate = next < records.n() && records[next].op == PK_OP_SIGMOID ? &records[next].as<pk_op_sigmoid>() : nullptr;
    if (gate != nullptr && (gate->x.data != op.out.data || gate->out.data != op.out.data || gate->g.cols != op.out.cols || gate->g.format != PK_BF16 || !is_activation(gate->g))) gate = nullptr;
    if (gate != nullptr) {
        d->add = gate->g;
        ++next;
    }
    if (!is_activation(in.qkv) || in.qkv.format != (is_half ? PK_F32 : PK_BF16) || !is_activation(op.out)) return false;
    if (!is_dead_after(records, next, op.q.data) || !is_dead_after(records, next, in.qkv.data)) return false;
    // A group of 16 positions lies in one page; a block takes one KV head.
    if (l.state->page_tokens % 16 || l.state->kv % 16 || op.n_kv_heads > l.ctx->n_processors) return false;
    d->phase.kind = kAttend;
    d->phase.rows_symbol = PK_ROWS_T;
    Attend &a = d->phase.attend;
    a.q_norm = reinterpret_cast<const float *>(in.q_norm.data);
    a.k_norm = reinterpret_cast<const float *>(in.k_norm.data);
    a.frequency = reinterpret_cast<const float *>(in.frequency.data);
    a.sinks = reinterpret_cast<const float *>(op.sinks.data);
    a.gains = reinterpret_cast<const float *>(in.gains.data);
    a.out_gains = reinterpret_cast<const float *>(op.gains.data);
    a.is_fp8 = is_fp8;
    a.k_offset = op.k_offset;
    a.v_offset = op.v_offset;
    a.n_heads = op.n_heads;
    a.n_kv_heads = op.n_kv_heads;
    a.head_width = width;
    a.rope_width = in.rope_width;
    a.rope_layout = in.rope_layout;
    a.window = op.window;
    a.magnitude = in.rope_magnitude;
    a.eps = in.eps;
    a.scale = op.scale;
    a.softcap = op.softcap;
    a.is_half = is_half;
    d->x = in.qkv;
    d->y = op.out;
    d->n_records = gate != nullptr ? 3 : 2;
    return true;
}

// A gated delta net from the raw product on, z behind q, k and v, and a behind b.
bool read_delta(const Launch &l, const pk_op_delta &op, Draft *d) {
    const int64_t channels = (2 * int64_t{op.n_k_heads} + op.n_v_heads) * kDeltaWidth;
    if (op.k_width != kDeltaWidth || op.v_width != kDeltaWidth || op.conv_width != 4 || op.n_v_heads > l.ctx->n_processors || op.n_v_heads > 32 * op.n_k_heads) return false;
    if (op.qkv.format != PK_BF16 || op.z.format != PK_BF16 || op.z.stride != op.qkv.stride || op.z.data != op.qkv.data + channels * 2) return false;
    if (op.b.format != PK_F32 || op.a.format != PK_F32 || op.a.stride != op.b.stride || op.a.data != op.b.data + op.n_v_heads * 4) return false;
    if (!is_activation(op.qkv) || !is_activation(op.b) || !is_activation(op.out) || op.qkv.rows != PK_ROWS_T) return false;
    if ((l.state->recurrent | l.state->recurrent_stride | op.state_offset | op.conv.data) % 16) return false;
    d->phase.kind = kDelta;
    d->phase.rows_symbol = PK_ROWS_T;
    Delta &t = d->phase.delta;
    t.conv = reinterpret_cast<const float *>(op.conv.data);
    t.a_log = reinterpret_cast<const float *>(op.a_log.data);
    t.dt_bias = reinterpret_cast<const float *>(op.dt_bias.data);
    t.scale = reinterpret_cast<const float *>(op.scale.data);
    t.state_offset = op.state_offset;
    t.tail_offset = op.conv_offset;
    t.n_k_heads = op.n_k_heads;
    t.n_v_heads = op.n_v_heads;
    t.is_tiled = op.is_tiled;
    t.is_sigmoid = op.op != PK_OP_DELTA;
    t.eps = op.eps;
    d->x = op.qkv;
    d->x.cols = channels + op.z.cols;
    d->add = op.b;
    d->add.cols = 2 * op.n_v_heads;
    d->y = op.out;
    d->n_records = 1;
    return true;
}

}  // namespace

bool read_phase(const Launch &l, const Records &records, int64_t i, Draft *d) {
    const Record &r = records[i];
    auto op_at = [&](int64_t k) { return k < records.n() ? records[k].op : 0; };
    if (r.op == PK_OP_MATMUL) {
        d->n_records = 1;
        return read_matmul(l, r.as<pk_op_matmul>(), nullptr, d);
    }
    if (r.op == PK_OP_NORM && op_at(i + 1) == PK_OP_MATMUL) {
        d->n_records = 2;
        return read_matmul(l, records[i + 1].as<pk_op_matmul>(), &r.as<pk_op_norm>(), d);
    }
    if (r.op == PK_OP_GATHER && op_at(i + 1) == PK_OP_NORM && op_at(i + 2) == PK_OP_MATMUL) {
        const auto &gather = r.as<pk_op_gather>();
        const auto &norm = records[i + 1].as<pk_op_norm>();
        if (gather.pool != PK_POOL_LAST || norm.x.data != gather.out.data || gather.out.format != gather.x.format || !is_dead_after(records, i + 3, gather.out.data)) return false;
        d->n_records = 3;
        if (!read_matmul(l, records[i + 2].as<pk_op_matmul>(), &norm, d)) return false;
        d->x = gather.x;
        d->phase.is_gathered = 1;
        return is_activation(d->x) && gather.x.cols == norm.x.cols;
    }
    // Behind a record of a pool keys and values lie elsewhere, which phases do not know.
    if (r.op == PK_OP_QKV && op_at(i + 1) == PK_OP_ATTENTION && l.decode_only && (i == 0 || records[i - 1].op != PK_OP_POOL)) return read_attention(l, r.as<pk_op_qkv>(), records[i + 1].as<pk_op_attention>(), records, i + 2, d);
    if ((r.op == PK_OP_DELTA || r.op == PK_OP_DELTA_SIGMOID) && l.decode_only) return read_delta(l, r.as<pk_op_delta>(), d);
    return false;
}

}  // namespace pk::persist
