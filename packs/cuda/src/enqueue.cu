// Which launches a program's records become, in which order.
#include "enqueue.h"

#include "../../host/guess.h"
#include "../../rare.h"
#include "../include/attention_plan.h"
#include "../include/chosen.cuh"
#include "../include/invariant.h"
#include "../include/logits.h"
#include "../include/lone_draw.cuh"
#include "../include/narrow.cuh"

namespace pk {
namespace {

int32_t launch_record(const Launch &l, const Record &record) {
    switch (record.op) {
        case PK_OP_PREPARE: return launch_prepare(l);
        case PK_OP_EMBED: return launch_embed(l, record.as<pk_op_embed>());
        case PK_OP_NORM: return launch_norm(l, record.as<pk_op_norm>());
        case PK_OP_MATMUL: return launch_matmul(l, record.as<pk_op_matmul>());
        case PK_OP_QKV: return launch_qkv(l, record.as<pk_op_qkv>());
        case PK_OP_ATTENTION: return launch_attention(l, record.as<pk_op_attention>());
        case PK_OP_GATE: return launch_gate(l, record.as<pk_op_gate>());
        case PK_OP_GATHER: return launch_gather(l, record.as<pk_op_gather>());
        case PK_OP_SAMPLE: return launch_sample(l, record.as<pk_op_sample>());
        case PK_OP_COMMIT: return launch_commit(l);
        case PK_OP_COPY: return launch_copy(l, record.as<pk_op_copy>());
        case PK_OP_ADD: return launch_add(l, record.as<pk_op_add>());
        case PK_OP_SIGMOID: return launch_sigmoid(l, record.as<pk_op_sigmoid>());
        case PK_OP_ROUTE: return launch_route(l, record.as<pk_op_route>());
        case PK_OP_EXPERTS: return launch_experts(l, record.as<pk_op_experts>());
        case PK_OP_DELTA: return launch_delta(l, record.as<pk_op_delta>());
        case PK_OP_MAMBA: return launch_mamba(l, record.as<pk_op_mamba>());
        case PK_OP_CONV: return launch_conv(l, record.as<pk_op_conv>());
        default: return launch_rare(l, record);
    }
}

// The record behind a commit that follows the draw of record i, in a step of one row; i: there is none. guess: records that such steps leave out.
int64_t end_of_draw(const pk_program &p, const Launch &l, int64_t i, const GuessPart &guess) {
    if (!l.decode_only || l.max_tokens != 1 || p.records[i].op != PK_OP_SAMPLE) return i;
    const int64_t next = i + 1 >= guess.first && i + 1 < guess.end ? guess.end : i + 1;
    return next < p.records.n() && p.records[next].op == PK_OP_COMMIT ? next + 1 : i;
}

// What the product of logits in front of the draw of record `at` leaves for it in a step, whose logits nobody else reads; nothing in those of a few rows.
Tops tops_for(const pk_program &p, const Launch &l, int64_t at) {
    if (at < 1 || at >= p.records.n() || p.records[at].op != PK_OP_SAMPLE || p.records[at - 1].op != PK_OP_MATMUL) return {};
    const auto &product = p.records[at - 1].as<pk_op_matmul>();
    const pk_tensor &y = product.y, &logits = p.records[at].as<pk_op_sample>().logits;
    return y.data == logits.data && y.cols == logits.cols && y.stride == logits.stride ? tops_of(l, product) : Tops{};
}

// Whether record i is a small kernel before the layers or behind them.
bool is_at_end(const pk_program &p, int64_t i) {
    const int32_t op = p.records[i].op, before = i > 0 ? p.records[i - 1].op : op;
    return op == PK_OP_GATHER || op == PK_OP_COMMIT || (op == PK_OP_NORM && (before == PK_OP_EMBED || before == PK_OP_GATHER));
}

// What is launched together that begins with record i and ends before `end`: in steps of one token or a few a layer's products, in all of them a choice and its experts. The record behind it; i when there is nothing.
int64_t launch_together(const pk_program &p, const pk_program::View &view, const Launch &l, int64_t i, int64_t end, int32_t *status) {
    if (is_of_few_rows(l)) {
        Launch at = l;
        at.overlap = true;
        for (const FewRows &few : view.few_rows) {
            if (few.first != i || few.last > end) continue;
            for (const FewRows::Part &part : few.parts) {
                const bool fits = fits_few_rows(l, part.products);
                if (fits && !*status) *status = launch_few_rows(at, part.products);
                for (size_t k = 0; k < part.records.size() && !fits && !*status; ++k) {
                    const Record &record = p.records[part.records[k]];
                    if (record.op == PK_OP_ROUTE && k + 1 < part.records.size()) *status = launch_chosen_experts(at, record.as<pk_op_route>(), p.records[part.records[++k]].as<pk_op_experts>());
                    else *status = launch_record(at, record);
                }
            }
            return few.last;
        }
    }
    if (p.records[i].op == PK_OP_ROUTE && i + 1 < end && p.records[i + 1].op == PK_OP_EXPERTS) {
        *status = launch_chosen_experts(l, p.records[i].as<pk_op_route>(), p.records[i + 1].as<pk_op_experts>());
        return i + 2;
    }
    if (!l.decode_only || l.max_tokens != 1) return i;
    for (const Mixture &m : view.mixtures)
        if (m.first == i && m.last <= end) {
            *status = launch_mixture(l, m);
            return m.last;
        }
    for (const Abreast &a : view.abreast)
        if (a.first == i && a.last <= end) {
            *status = launch_abreast(l, a);
            return a.last;
        }
    return i;
}

// The end of the last layer, for sampled rows: its products see a step of as many tokens.
int32_t launch_last_rows(const LastRows &last, const Launch &l) {
    Launch few = l;
    few.info = l.info + 1;
    few.max_tokens = l.max_samples;
    int32_t status = PK_OK;
    for (int64_t i = 0; i < last.gathers.n() && !status; ++i) status = launch_record(l, last.gathers[i]);
    const int64_t n = last.products.n();
    for (int64_t i = 0; i < n && !status; ++i) {
        if (const int64_t next = launch_beside(last.products, few, i, n, &status); next > i) i = next - 1;
        else if (const int64_t behind = launch_narrowing(last.products, few, i, n, &status); behind > i) i = behind - 1;
        else status = launch_record(few, last.products[i]);
    }
    return status ? status : launch_record(l, last.norm[0]);
}

}  // namespace

Launch launch_of(pk_program &p, const pk_program::View &view, int32_t max_tokens, int32_t max_samples, bool decode_only, bool shares) {
    Launch l;
    l.ctx = view.ctx;
    l.stream = view.ctx->stream;
    l.state = &p.state;
    l.info = p.info;
    l.ring = reinterpret_cast<uint64_t>(p.ring);
    l.ring_bytes = p.ring_bytes;
    l.n_ring = kRing;
    l.consumed = reinterpret_cast<uint64_t>(p.consumed);
    l.max_tokens = max_tokens;
    l.max_samples = max_samples;
    l.decode_only = decode_only;
    l.counters = view.counters;
    l.scratch = reinterpret_cast<uint8_t *>(p.state.workspace + kCounterBytes + share_bytes(p.state));
    l.scratch_bytes = plan_offset(p.state) - kCounterBytes - share_bytes(p.state);
    if (shares && p.shared_rows.record() >= 0) {
        const auto &op = p.records[p.shared_rows.record()].as<pk_op_attention>();
        l.share = reinterpret_cast<uint8_t *>(p.state.workspace + kCounterBytes);
        l.share_heads = op.n_heads;
        l.share_kv_heads = op.n_kv_heads;
    }
    return l;
}

cudaGraphNode_t last_node(cudaStream_t stream) {
    cudaStreamCaptureStatus capturing;
    const cudaGraphNode_t *nodes = nullptr;
    const cudaGraphEdgeData *edges = nullptr;
    size_t n = 0;
    const cudaError_t e = cudaStreamGetCaptureInfo(stream, &capturing, nullptr, nullptr, &nodes, &edges, &n);
    return e == cudaSuccess && n == 1 ? nodes[0] : nullptr;
}

int32_t launch_next(pk_program &p, Launch &l, int64_t i, std::vector<cudaGraphNode_t> *passes) {
    const Record &record = p.records[i];
    if (record.op == PK_OP_PREPARE && p.pool.kv) return launch_prepare_pool(l, p.pool);
    if (record.op == PK_OP_ATTENTION && reads_share(l, record.as<pk_op_attention>())) {
        if (int32_t e = launch_shared(l, record.as<pk_op_attention>(), i != p.shared_rows.record())) return e;
        if (passes)
            if (cudaGraphNode_t node = last_node(l.stream)) passes->push_back(node);
    }
    if (record.op == PK_OP_MATMUL) return launch_matmul(l, record.as<pk_op_matmul>(), next_product(p.records, i, p.records.n()));
    if (record.op != PK_OP_POOL) return launch_record(l, record);
    l.state = record.as<pk_op_pool>().kv ? &p.pooled : &p.state;
    return PK_OK;
}

int32_t launch_first_work(const pk_program &p, const Launch &l, int64_t i) {
    if (p.records[i].op != PK_OP_EMBED) return PK_OK;
    Launch at = l;
    for (int64_t k = 0; k < p.records.n(); ++k) {
        const Record &record = p.records[k];
        if (k < i && record.op != PK_OP_PREPARE && record.op != PK_OP_POOL) return PK_OK;
        if (record.op == PK_OP_POOL) at.state = record.as<pk_op_pool>().kv ? &p.pooled : &p.state;
        if (k > i && record.op == PK_OP_ATTENTION && is_planned(at, record.as<pk_op_attention>())) return launch_plan(at, record.as<pk_op_attention>());
    }
    return PK_OK;
}

int32_t enqueue(pk_program &p, const pk_program::View &view, const Launch &l, int64_t first, int64_t end, bool with_ends, std::vector<cudaGraphNode_t> *passes) {
    int32_t status = PK_OK;
    const GuessPart guess = guess_part(p.records);
    Launch at = l;
    for (int64_t i = first; i < end && !status; ++i) {
        if (l.decode_only && with_ends && i >= guess.first && i < guess.end) continue;
        if (l.share && i == p.shared_rows.record()) status = launch_share(l, p.records[i].as<pk_op_attention>());
        if (!status) status = launch_first_work(p, at, i);
        if (status) break;
        if (i == p.last_rows.first && with_ends && p.last_rows.end <= end && has_few_last_rows(p.last_rows, l) && !is_invariant(l.ctx)) {
            status = launch_last_rows(p.last_rows, l);
            i = p.last_rows.end - 1;
            continue;
        }
        const persist::Run *run = l.share ? nullptr : persist::find_run(view.plans, l, i);
        if (const int64_t next = launch_together(p, view, l, i, end, &status); next > i) {
            i = next - 1;
        } else if (run && run->last <= end) {
            status = persist::launch_run(l, *run);
            i = run->last - 1;
        } else if (const int64_t next = launch_beside(p.records, at, i, end, &status); next > i) {
            i = next - 1;
        } else if (const int64_t next = launch_narrowing(p.records, at, i, end, &status); next > i) {
            i = next - 1;
        } else if (const int64_t next = with_ends ? end_of_draw(p, l, i, guess) : i; next > i) {
            status = launch_lone_draw(l, p.records[i].as<pk_op_sample>());
            i = next - 1;
        } else if (const Tops tops = with_ends ? tops_for(p, l, i + 1) : Tops{}; tops.tops) {
            status = launch_logits(l, p.records[i].as<pk_op_matmul>(), tops);
        } else if (with_ends && p.records[i].op == PK_OP_SAMPLE) {
            status = launch_sample(l, p.records[i].as<pk_op_sample>(), tops_for(p, l, i));
        } else if (with_ends || !is_end(p.records[i])) {
            // Of one row the head start of a step's first launch counts, in mixtures of a few rows those of small kernels between products, of decode rows those at a step's ends.
            const int32_t op = p.records[i].op;
            at.overlap = l.decode_only && (l.max_tokens == 1 ? op == PK_OP_EMBED : is_at_end(p, i) || (!view.few_rows.empty() && (op == PK_OP_DELTA || op == PK_OP_QKV || op == PK_OP_SIGMOID)));
            status = launch_next(p, at, i, passes);
            if (is_at_end(p, i)) at.overlap = false;
        }
    }
    return status;
}

}  // namespace pk
