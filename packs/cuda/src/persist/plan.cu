// Reads a program's records as phases of the persistent decode kernel. A run is a row of records that are phases, each of
// which reads what the one before it wrote, or products beside each other that read the same; any other record ends it and is launched on its own.
#include "../../include/persist/plan.h"

#include "../../../rare.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../../../host/guess.h"
#include "../../include/format/unit.cuh"
#include "../../include/gemm.cuh"
#include "../../include/parted.h"

namespace pk::persist {
namespace {

constexpr int64_t kSharedBytes = 227 * 1024 - kStaticBytes;
constexpr int kReach = 4;                            // how many phases back a phase may read
constexpr int kPairedGroups = 16;                    // groups of 16 positions of a head up to which two blocks share it

// A phase before it knows where packets lie.
struct Draft {
    Phase phase = {};
    int64_t n_records = 0;
    pk_tensor x = {}, y = {}, add = {};
    uint64_t normed = 0;
};

int64_t element_bytes(const pk_tensor &t) { return t.format == PK_F32 ? 4 : 2; }
bool is_activation(const pk_tensor &t) {
    return (t.format == PK_F32 || t.format == PK_BF16) && t.stride % (4 * element_bytes(t)) == 0 && t.data % 16 == 0;
}
Place place_of(const pk_tensor &t) { return {t.data, t.data ? t.stride / element_bytes(t) : 0, t.format, 0, 0}; }

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

// The phase that begins with record i.
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

// The phase among [0, n) whose output tensor t is, or lies in; -1: none; -2: one that t cannot be read from as packets.
int writer_of(const std::vector<Draft> &drafts, int n, const pk_tensor &t) {
    for (int i = n - 1; i >= 0; --i) {
        const pk_tensor &y = drafts[i].y;
        const uint64_t end = y.data + (kMaxRows - 1) * y.stride + y.cols * element_bytes(y), last = t.data + (kMaxRows - 1) * t.stride + t.cols * element_bytes(t);
        if (end <= t.data || last <= y.data) continue;
        const int64_t offset = static_cast<int64_t>(t.data - y.data) / element_bytes(y);
        const bool fits = t.data >= y.data && t.stride == y.stride && t.format == y.format && offset % 4 == 0 && offset + t.cols <= y.cols && t.cols % 4 == 0;
        return fits ? i : -2;
    }
    return -1;
}

// Elements that a row of a phase's x has.
int64_t x_cols(const Draft &d) { return d.phase.kind == kMatmul ? d.phase.k : d.x.cols; }

// A run being put together: publishing phases first, then the others.
struct Building {
    int32_t n_blocks;
    std::vector<Draft> drafts;
    std::vector<int> x_from, add_from;  // phases; -1: memory
    std::vector<bool> is_read;          // by a later one

    // False when the phase cannot follow.
    bool add(const Draft &d) {
        const int n = static_cast<int>(drafts.size());
        if (n > 0 && d.phase.kind == kMatmul && d.phase.norm == nullptr && d.x.data == drafts[n - 1].normed && d.x.data) return add_beside(d);
        if (d.phase.kind == kAttend && std::any_of(drafts.begin(), drafts.end(), [&](const Draft &other) { return other.phase.kind == kAttend && other.phase.attend.is_half != d.phase.attend.is_half; })) return false;
        pk_tensor x = d.x;
        x.cols = x_cols(d);
        const int from = writer_of(drafts, n, x);
        if (from == -2 || (n > 0) != (from >= 0) || (from >= 0 && (is_read[from] || n - from > kReach))) return false;
        int add_source = -1;
        if (d.add.data) {
            add_source = writer_of(drafts, n, d.add);
            if (add_source == -2 || (add_source >= 0 && n - add_source > kReach) || (add_source == -1 && n >= kReach)) return false;
            if (d.phase.kind == kMatmul && (d.add.data != d.y.data || d.add.stride != d.y.stride || d.add.format != d.y.format)) return false;
        }
        // What nobody has read is read now: so no block can be ahead of a reader by more than the phases in between.
        for (int i = 0; i < n; ++i)
            if (!is_read[i] && i != from && i != add_source) return false;
        // Nothing in a phase may be written while others still read it.
        const uint64_t x_end = x.data + (kMaxRows - 1) * x.stride + x.cols * element_bytes(x), y_end = d.y.data + (kMaxRows - 1) * d.y.stride + d.y.cols * element_bytes(d.y);
        if (from == -1 && d.y.data < x_end && x.data < y_end) return false;
        if (from >= 0) is_read[from] = true;
        if (add_source >= 0) is_read[add_source] = true;
        put(n, d, from, add_source);
        return true;
    }

    // A product of the rows that the last phase norms. One that does not employ every block comes first: others go on meanwhile.
    bool add_beside(Draft d) {
        const int n = static_cast<int>(drafts.size());
        const Draft &last = drafts[n - 1];
        if (last.phase.is_gathered || last.add.data || d.add.data || x_cols(d) != x_cols(last) || d.phase.rows_symbol != last.phase.rows_symbol || is_read[n - 1]) return false;
        if (writer_of(drafts, n, d.y) == n - 1 || d.y.data == last.x.data) return false;
        d.x = last.x;
        d.phase.norm = last.phase.norm;
        d.phase.eps = last.phase.eps;
        d.phase.inverse_k = last.phase.inverse_k;
        put(d.phase.n_tiles < n_blocks ? n - 1 : n, d, x_from[n - 1], -1);
        return true;
    }

    void put(int at, const Draft &d, int from, int add_source) {
        drafts.insert(drafts.begin() + at, d);
        x_from.insert(x_from.begin() + at, from);
        add_from.insert(add_from.begin() + at, add_source);
        is_read.insert(is_read.begin() + at, false);
    }
};

// How a product's tiles, or pairs of them, are cut so that no block has more than it must: 0, not at all; 1, halves of tiles; 2, quarters of pairs. longest: then of a block, in quarters of tiles.
int32_t cut_of(const Phase &p, bool is_paired, int32_t n_blocks, int32_t *longest) {
    const int32_t n = p.n_tiles >> is_paired, cut = is_paired ? 2 : 1, whole = (n + n_blocks - 1) / n_blocks << cut, parts = ((n << cut) + n_blocks - 1) / n_blocks;
    const bool is_cut = !is_rows(p.w[0].format) && (p.is_gated || p.n_w == 1) && p.w[0].n_chunks % (1 << cut) == 0 && n > n_blocks && parts < whole;
    *longest = (is_cut ? parts : whole) * 2;
    return is_cut ? cut : 0;
}

// How the writer may leave what is all that the reader takes: as codes of integers if tiles by twos keep no block longer, else in fours for a norm, which are what its rows are defined as.
Fold fold_between(const Draft &writer, const Draft &reader, int32_t n_blocks) {
    const Phase &w = writer.phase, &r = reader.phase;
    const bool is_integer = r.staging > kStageFp8;
    if (r.kind != kMatmul || r.is_gathered || reader.x.data != writer.y.data || r.k != writer.y.cols) return kUnfolded;
    if (w.kind == kAttend) return is_integer && w.attend.head_width % 32 == 0 ? kInCodes : kUnfolded;
    if (w.kind != kMatmul || is_rows(w.w[0].format) == is_integer) return kUnfolded;
    auto comes_by = [&](int32_t least) { return std::all_of(w.w, w.w + w.n_w, [least](const Weight &one) { return one.rows % least == 0 && one.first_column % least == 0; }); };
    int32_t paired, single;
    cut_of(w, true, n_blocks, &paired);
    cut_of(w, false, n_blocks, &single);
    if (is_integer && comes_by(32) && paired <= single) return kInCodes;
    return r.norm != nullptr && comes_by(4) ? kInFours : kUnfolded;
}

Draft publisher_of(const pk_tensor &t, int64_t cols, int64_t rows_symbol) {
    Draft d;
    d.phase.kind = kPublish;
    d.phase.k = static_cast<int32_t>(cols);
    d.phase.rows_symbol = rows_symbol;
    d.x = d.y = t;
    d.phase.x = d.phase.y = place_of(t);
    return d;
}

// Publishing phases in front, sources as numbers of phases, and which outputs are written to memory or as packets.
std::vector<Phase> number_phases(const Building &b, std::vector<int64_t> *packet_bytes, int32_t rows) {
    std::vector<Draft> all;
    std::vector<int> x_from(b.drafts.size()), add_from(b.drafts.size());
    const pk_tensor &first = b.drafts[0].x;
    all.push_back(publisher_of(first, x_cols(b.drafts[0]), b.drafts[0].phase.is_gathered ? PK_ROWS_T : b.drafts[0].phase.rows_symbol));
    for (size_t i = 0; i < b.drafts.size(); ++i)
        if (b.drafts[i].add.data && b.add_from[i] < 0) {
            const bool same = b.drafts[i].add.data == first.data && b.drafts[i].add.stride == first.stride && b.drafts[i].add.format == first.format && b.drafts[i].add.cols <= x_cols(b.drafts[0]);
            add_from[i] = same ? 0 : static_cast<int>(all.size());
            if (!same) all.push_back(publisher_of(b.drafts[i].add, b.drafts[i].add.cols, b.drafts[i].phase.rows_symbol));
        }
    const int shift = static_cast<int>(all.size());
    for (size_t i = 0; i < b.drafts.size(); ++i) {
        x_from[i] = b.x_from[i] < 0 ? 0 : b.x_from[i] + shift;
        if (b.add_from[i] >= 0) add_from[i] = b.add_from[i] + shift;
        all.push_back(b.drafts[i]);
    }
    packet_bytes->assign(all.size(), 0);
    std::vector<const Draft *> folded_for(all.size(), nullptr);
    auto read = [&](Place *place, const pk_tensor &t, int from) {
        *place = place_of(t);
        place->source = from;
        // For now the distance into the writer's buffer; its address is added later.
        place->packets = (t.data - all[from].y.data) / element_bytes(t) * (t.format == PK_F32 ? 8 : 4);
        all[from].phase.y.packets = 1;
        (*packet_bytes)[from] = rows * all[from].y.stride / element_bytes(t) * (t.format == PK_F32 ? 8 : 4);
    };
    for (size_t i = 0; i < b.drafts.size(); ++i) {
        Draft &d = all[shift + i];
        Draft &writer = all[x_from[i]];
        const Draft *&first_reader = folded_for[x_from[i]];
        const Fold fold = rows == 1 ? fold_between(writer, d, b.n_blocks) : kUnfolded;
        const bool is_folded = fold != kUnfolded && (first_reader == nullptr || (writer.phase.fold_y == fold && first_reader->phase.norm == d.phase.norm && first_reader->phase.staging == d.phase.staging));
        if (is_folded) {
            first_reader = &d;
            writer.phase.fold_y = d.phase.fold_x = fold;
            writer.phase.folded_norm = d.phase.norm;
            writer.phase.folded_staging = d.phase.staging;
            writer.phase.is_paired = writer.phase.kind == kMatmul && fold == kInCodes;
            d.phase.folded_x = 1;
            d.phase.x = place_of(d.x);
            d.phase.x.source = x_from[i];
        }
        if (!is_folded || d.phase.normed.data) read(&d.phase.x, d.x, x_from[i]);
        d.phase.is_plain = x_from[i] == 0 && d.phase.norm != nullptr && !d.phase.is_gathered;
        if (d.add.data) read(&d.phase.add, d.add, add_from[i]);
        d.phase.y = place_of(d.y);
        // Heads that share a tail look at each other's outputs.
        if (d.phase.kind == kDelta) {
            d.phase.y.packets = 1;
            (*packet_bytes)[shift + i] = rows * d.y.stride / element_bytes(d.y) * (d.y.format == PK_F32 ? 8 : 4);
        }
    }
    // Folded outputs lie behind packets, never at the beginning of a buffer.
    for (size_t i = 0; i < all.size(); ++i) {
        if (folded_for[i] == nullptr) continue;
        const int64_t at = std::max<int64_t>(256, ((*packet_bytes)[i] + 255) / 256 * 256);
        all[i].phase.folded_y = at;
        for (size_t k = i + 1; k < all.size(); ++k)
            if (all[k].phase.folded_x && all[k].phase.x.source == static_cast<int32_t>(i)) all[k].phase.folded_x = at;
        (*packet_bytes)[i] = at + folded_at(all[i].phase.fold_y, folded_for[i]->phase.k);
    }
    std::vector<Phase> phases;
    for (size_t i = 0; i < all.size(); ++i) {
        Phase p = all[i].phase;
        for (size_t j = i + 1; j < all.size(); ++j) {
            if (all[j].phase.kind != kPublish && all[j].y.data == all[i].y.data) p.y.data = 0;  // the last one to write an address does
            if (all[j].normed == all[i].normed) p.normed.data = 0;
        }
        if (p.kind == kPublish) p.y.data = 0;
        p.shift = static_cast<int32_t>(i * 37);
        phases.push_back(p);
    }
    return phases;
}

bool has_rows(const Phase &p) { return p.kind == kMatmul && is_rows(p.w[0].format); }

// Maps of the boxes that row-major weights are copied in, three a phase: words of four bytes, as no side of a box may have more than 256 elements.
int32_t make_boxes(decltype(&cuTensorMapEncodeTiled) encode, const std::vector<Phase> &phases, std::vector<CUtensorMap> *boxes) {
    const CUtensorMap *any = nullptr;
    for (size_t i = 0; i < phases.size(); ++i) {
        const Phase &p = phases[i];
        for (int k = 0; p.kind == kMatmul && k < p.n_w; ++k) {
            const Weight &w = p.w[k];
            if (!is_rows(w.format)) continue;
            const cuuint64_t size[2] = {static_cast<cuuint64_t>(p.k) * (w.format == PK_BF16 ? 2 : 1) / 4, static_cast<cuuint64_t>(w.rows)}, stride[1] = {static_cast<cuuint64_t>(w.row_bytes)};
            const cuuint32_t box[2] = {kBoxWidth / 4, kBoxRows}, step[2] = {1, 1};
            const CUresult e = encode(&(*boxes)[3 * i + k], CU_TENSOR_MAP_DATA_TYPE_UINT32, 2, const_cast<uint8_t *>(w.data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                      CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
            if (e != CUDA_SUCCESS) return fail(PK_DEVICE, "persist: tensor map of %d rows of %lld bytes: CUDA driver error %d", w.rows, static_cast<long long>(w.row_bytes), static_cast<int>(e));
            any = &(*boxes)[3 * i + k];
        }
    }
    // Maps are asked for ahead by their places: none is without meaning.
    for (size_t i = 0; any != nullptr && i < boxes->size(); ++i)
        if (const Phase &p = phases[i / 3]; p.kind != kMatmul || static_cast<int>(i % 3) >= p.n_w || !is_rows(p.w[i % 3].format)) (*boxes)[i] = *any;
    return PK_OK;
}

// Gives weights beside each other blocks of their own if no block is busier then: one that has tiles of two weights begins anew with the second, and everybody waits for it.
void divide(Phase *p, int32_t n_blocks) {
    if (p->n_w < 2 || p->is_gated || p->is_paired || p->n_tiles <= n_blocks) return;
    constexpr double kLonger = 2.2;  // a tile of Q6_K than one of Q4_K
    const bool is_mixed = std::any_of(p->w, p->w + p->n_w, [p](const Weight &w) { return w.format != p->w[0].format; });
    auto cost = [&](const Weight &w) { return is_mixed && w.format == PK_Q6_K ? kLonger : 1.0; };
    auto wanted = [&](const Weight &w, double most) { return std::max<int32_t>(1, static_cast<int32_t>(std::ceil(w.n_tiles / std::floor(most / cost(w) + 1e-9)))); };
    double dearest = 0;
    for (int i = 0; i < p->n_w; ++i) dearest = std::max(dearest, cost(p->w[i]));
    // The least that the busiest block may have.
    const double undivided = dearest * ((p->n_tiles + n_blocks - 1) / n_blocks);
    int32_t n[3] = {}, left = -1;
    for (double next = dearest; next <= undivided + 1e-9 && left < 0; next += 0.1) {
        left = n_blocks;
        for (int i = 0; i < p->n_w; ++i) left -= n[i] = wanted(p->w[i], next);
    }
    if (left < 0) return;
    for (; left > 0; --left) {
        int busiest = 0;
        auto load = [&](int i) { return cost(p->w[i]) * p->w[i].n_tiles / n[i]; };
        for (int i = 1; i < p->n_w; ++i)
            if (load(i) > load(busiest)) busiest = i;
        ++n[busiest];
    }
    p->begins[0] = n[0];
    p->begins[1] = p->n_w > 2 ? n[0] + n[1] : n_blocks;
    for (int i = 0; i < p->n_w; ++i) {
        p->w[i].each = p->w[i].n_tiles / n[i];
        p->w[i].more = p->w[i].n_tiles % n[i];
    }
}

// The kernel that has all that the phases take, and the least beside it.
Sort sort_of(const std::vector<Phase> &phases) {
    auto is_lean_for = [&](Sort sort) {
        return std::all_of(phases.begin(), phases.end(), [sort](const Phase &p) {
            if (p.kind == kAttend) return p.attend.head_width == 128 && !p.attend.is_fp8;
            return p.kind != kDelta && (p.kind != kMatmul || std::all_of(p.w, p.w + p.n_w, [sort](const Weight &w) { return takes(sort, w.format); }));
        });
    };
    if (std::any_of(phases.begin(), phases.end(), [](const Phase &p) { return p.kind == kAttend && p.attend.is_half; })) return kHalfPages;
    for (Sort sort : {kNibbles, kBytes, kRowMajor})
        if (is_lean_for(sort)) return sort;
    return kEverything;
}
template <class Call>
auto of_sort(Sort sort, const Call &call) {
    switch (sort) {
        case kHalfPages: return call(std::integral_constant<Sort, kHalfPages>());
        case kNibbles: return call(std::integral_constant<Sort, kNibbles>());
        case kBytes: return call(std::integral_constant<Sort, kBytes>());
        case kRowMajor: return call(std::integral_constant<Sort, kRowMajor>());
        default: return call(std::integral_constant<Sort, kEverything>());
    }
}

// How shared memory is divided. False: something does not fit.
bool share_memory(std::vector<Phase> &phases, int32_t n_blocks, Arguments *a) {
    int32_t slot = 128, x = 0;
    const bool has_nibbles = std::any_of(phases.begin(), phases.end(), [](const Phase &p) {
        return p.kind == kMatmul && std::any_of(p.w, p.w + p.n_w, [](const Weight &w) { return w.format == PK_Q4_K; });
    });
    for (Phase &p : phases) {
        if (p.kind == kAttend) {
            x = std::max(x, attend_bytes(p.attend.head_width));
            slot = std::max(slot, 16 * p.attend.head_width);  // eight positions of K or V
        }
        if (p.kind == kDelta) {
            slot = std::max(slot, kPieceBytes);
            x = std::max(x, kDeltaBytes);
        }
        if (p.kind != kMatmul) continue;
        for (int i = 0; i < p.n_w; ++i) {
            slot = std::max(slot, has_nibbles && p.w[i].format == PK_Q6_K ? kFirstBytes : slot_bytes(p.w[i].format));  // else chunks of Q6_K need no parts
            // Much of what is wanted, little of what is not wanted yet: that would keep blocks that are behind, and packets, waiting.
            a->most_sent = 4;
            a->most_ahead = is_rows(p.w[i].format) || p.w[i].format == PK_Q8_0 ? 1 : 2;
        }
        int32_t longest;
        p.cut = cut_of(p, p.is_paired, n_blocks, &longest);
        const int32_t n_shares = p.n_tiles >> p.is_paired << p.cut;
        p.each = n_shares / n_blocks;
        p.more = n_shares % n_blocks;
        divide(&p, n_blocks);
        x = std::max(x, staged_bytes(p.staging, p.k));
    }
    // What few blocks do is done by those that have a tile less to do behind it.
    for (size_t i = 0; i + 1 < phases.size(); ++i) {
        const int32_t few = phases[i].kind == kDelta ? phases[i].delta.n_v_heads : phases[i].kind == kMatmul && phases[i].each == 0 ? phases[i].more : 0;
        if (few && phases[i + 1].kind == kMatmul) phases[i].shift = phases[i + 1].shift + few;
    }
    a->slot_bytes = slot;
    a->part_bytes = kSumsAt + 4 * kWarps * kWarpSums;
    a->x_bytes = (x + 127) / 128 * 128;
    a->n_slots = 0;
    a->n_slots = std::min<int32_t>(kMaxSlots, (static_cast<int32_t>(kSharedBytes) - layout_of(*a).end) / (kWarps * slot));
    a->most_sent = std::min(a->most_sent, a->n_slots - 1);
    return a->n_slots >= kMinSlots;
}

}  // namespace

int32_t make_plan(const Launch &l, const Records &records, int32_t rows, int32_t min_phases, const Taken &taken, Plan *out) {
    out->rows = rows;
    if (!has_wgmma(l.ctx)) return PK_OK;
    struct Made {
        Run run;
        std::vector<Phase> phases;
        std::vector<int64_t> packets;
        std::vector<CUtensorMap> boxes;
    };
    std::vector<Made> made;
    const int64_t guess = guess_part(records).first;  // from there on it is left out
    auto is_taken = [&](int64_t i) { return std::any_of(taken.begin(), taken.end(), [i](const auto &range) { return range.first <= i && i < range.second; }); };
    for (int64_t i = 0; i < records.n();) {
        Building b = {l.ctx->n_processors, {}, {}, {}, {}};
        int64_t next = i;
        for (; next < records.n() && !is_taken(next) && (next == i || next != guess);) {
            Draft d;
            d.n_records = 1;
            const bool is_idle = next > i && records[next].op == PK_OP_KEEP;  // rows of one token keep nothing
            if (!is_idle && (!read_phase(l, records, next, &d) || !b.add(d))) break;
            next += d.n_records;
        }
        if (static_cast<int32_t>(b.drafts.size()) >= min_phases) {
            Made m;
            m.run.first = i;
            m.run.last = next;
            m.phases = number_phases(b, &m.packets, rows);
            if (share_memory(m.phases, l.ctx->n_processors, &m.run.arguments)) {
                m.run.sort = sort_of(m.phases);
                if (of_sort(m.run.sort, [&](auto sort) { return fits_pairs<sort()>(m.run.arguments, l.ctx->n_processors, stream_of_questions(l.ctx)); })) m.run.arguments.paired = kPairedGroups;
                made.push_back(m);
                i = next;
                continue;
            }
        }
        i = std::max(i + 1, next);
    }
    if (made.empty()) return PK_OK;
    // One piece of memory: epochs, partial sums of attention, buffers of packets, phases. Runs follow each other and share the first three.
    int64_t buffer = 0, n_phases = 0, partial = 0;
    bool has_boxes = false;
    for (const Made &m : made) {
        for (int64_t n : m.packets) buffer = std::max(buffer, (n + 255) / 256 * 256);
        n_phases += static_cast<int64_t>(m.phases.size());
        for (const Phase &p : m.phases) {
            has_boxes |= has_rows(p);
            if (p.kind == kAttend)
                partial = std::max(partial, l.ctx->n_processors * (8 * int64_t{p.attend.head_width} + 16) * 8);
        }
    }
    const int64_t partial_at = 256, ends_at = partial_at + partial, packets_at = ends_at + kBuffers * (l.ctx->n_processors + 1) * int64_t{kEndBytes}, boxes_at = packets_at + kBuffers * buffer;
    const int64_t phases_at = boxes_at + (has_boxes ? 3 * n_phases * static_cast<int64_t>(sizeof(CUtensorMap)) : 0);
    out->n_bytes = phases_at + n_phases * static_cast<int64_t>(sizeof(Phase));
    if (int32_t e = check(cudaMalloc(&out->memory, out->n_bytes), "load")) return e;
    uint8_t *memory = static_cast<uint8_t *>(out->memory);
    if (int32_t e = check(cudaMemsetAsync(memory, 0, phases_at, l.stream), "load")) return e;
    const pk_state &s = *l.state;
    uint8_t *to = memory + phases_at, *boxes_to = memory + boxes_at;
    for (Made &m : made) {
        for (size_t i = 0; i < m.phases.size(); ++i) {
            Phase &p = m.phases[i];
            auto address = [&](int phase) { return reinterpret_cast<uint64_t>(memory + packets_at + phase % kBuffers * buffer); };
            p.shift = p.shift % l.ctx->n_processors;
            if (p.kind != kPublish) p.x.packets += address(p.x.source);
            if (p.add.data) p.add.packets += address(p.add.source);
            p.y.packets = p.y.packets ? address(static_cast<int>(i)) : 0;
            if (p.folded_x) p.folded_x += address(p.x.source);
            if (p.folded_y) p.folded_y += address(static_cast<int>(i));
        }
        Arguments &a = m.run.arguments;
        a.phases = reinterpret_cast<const Phase *>(to);
        if (std::any_of(m.phases.begin(), m.phases.end(), has_rows)) {
            m.boxes.resize(3 * m.phases.size());
            if (int32_t e = make_boxes(l.ctx->driver.encode_tiled, m.phases, &m.boxes)) return e;
            const int64_t n = static_cast<int64_t>(m.boxes.size() * sizeof(CUtensorMap));
            // Behind the memset, which another stream would not wait for.
            if (int32_t e = check(cudaMemcpyAsync(boxes_to, m.boxes.data(), n, cudaMemcpyHostToDevice, l.stream), "load")) return e;
            a.boxes = reinterpret_cast<const CUtensorMap *>(boxes_to);
            boxes_to += n;
        }
        a.n_phases = static_cast<int32_t>(m.phases.size());
        a.info = l.info;
        a.sample_at = reinterpret_cast<const int32_t *>(s.sample_at);
        a.row_slot = reinterpret_cast<const int32_t *>(s.row_slot);
        a.row_position = reinterpret_cast<const int32_t *>(s.row_position);
        a.row_flags = reinterpret_cast<const int32_t *>(s.row_flags);
        a.token_page = reinterpret_cast<const int32_t *>(s.token_page);
        a.page_table = reinterpret_cast<const int32_t *>(s.page_table);
        a.kv = reinterpret_cast<uint8_t *>(s.kv);
        a.recurrent = reinterpret_cast<uint8_t *>(s.recurrent);
        a.recurrent_stride = s.recurrent_stride;
        a.page_stride = s.kv_page_stride;
        a.page_tokens = s.page_tokens;
        a.slot_pages = s.slot_pages;
        a.partial = memory + partial_at;
        a.ends = memory + ends_at;
        a.epochs = reinterpret_cast<uint32_t *>(memory);
        const int64_t bytes = static_cast<int64_t>(m.phases.size() * sizeof(Phase));
        if (int32_t e = check(cudaMemcpyAsync(to, m.phases.data(), bytes, cudaMemcpyHostToDevice, l.stream), "load")) return e;
        to += bytes;
        out->runs.push_back(m.run);
    }
    return check(cudaStreamSynchronize(l.stream), "load");
}

void drop_plan(Plan &plan) {
    if (plan.memory) cudaFree(plan.memory);
    plan = {};
}

const Run *find_run(const std::vector<Plan> &plans, const Launch &l, int64_t i) {
    if (!l.decode_only) return nullptr;
    for (const Plan &plan : plans) {
        if (plan.rows < l.max_tokens || plan.rows < l.max_samples) continue;
        for (const Run &run : plan.runs)
            if (run.first == i) return &run;
        return nullptr;
    }
    return nullptr;
}

int32_t launch_run(const Launch &l, const Run &run) {
    return of_sort(run.sort, [&](auto sort) { return launch_rows<1, sort()>(l, run.arguments, l.ctx->n_processors); });
}

}  // namespace pk::persist
