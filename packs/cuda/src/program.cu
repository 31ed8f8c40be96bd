// Loading, capturing and running programs.
#include "program.h"

#include "../../host/guess.h"
#include "../../rare.h"
#include "../include/attention_plan.h"
#include "../include/chosen.cuh"
#include "../include/cold.cuh"
#include "../include/copies.h"
#include "../include/invariant.h"
#include "../include/lone_draw.cuh"
#include "../include/narrow.cuh"
#include "../include/parted.h"
#include "../include/skinny.cuh"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>

namespace pk {
namespace {

constexpr int64_t kInfoBytes = 256;  // in front of the counters of what a part left
static_assert(sizeof(StepInfo) <= kInfoBytes);
constexpr std::chrono::milliseconds kQueryEvery{10};

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

// `shares`: rows may begin with the same pages. Launches follow each other; kernels that gain by a head start ask for it themselves (LOG.md, entry 6, N19).
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

bool is_end(const Record &r) { return r.op == PK_OP_PREPARE || r.op == PK_OP_COMMIT; }

// The node that the next one of a capture will depend on, or null.
cudaGraphNode_t last_node(cudaStream_t stream) {
    cudaStreamCaptureStatus capturing;
    const cudaGraphNode_t *nodes = nullptr;
    const cudaGraphEdgeData *edges = nullptr;
    size_t n = 0;
    const cudaError_t e = cudaStreamGetCaptureInfo(stream, &capturing, nullptr, nullptr, &nodes, &edges, &n);
    return e == cudaSuccess && n == 1 ? nodes[0] : nullptr;
}

// Enqueues record i. l: of the records before it; a record of a pool changes whose pages the next ones use. passes: gets the nodes of passes over shared prefixes.
int32_t launch_next(pk_program &p, Launch &l, int64_t i, std::vector<cudaGraphNode_t> *passes = nullptr) {
    const Record &record = p.records[i];
    if (record.op == PK_OP_PREPARE && p.pool.kv) return launch_prepare_pool(l, p.pool);
    if (record.op == PK_OP_ATTENTION && reads_share(l, record.as<pk_op_attention>())) {
        if (int32_t e = launch_shared(l, record.as<pk_op_attention>(), i != p.shared_rows.record())) return e;
        if (passes)
            if (cudaGraphNode_t node = last_node(l.stream)) passes->push_back(node);
    }
    if (record.op != PK_OP_POOL) return launch_record(l, record);
    l.state = record.as<pk_op_pool>().kv ? &p.pooled : &p.state;
    return PK_OK;
}

// The record behind a commit that follows the draw of record i, in a step of one row; i: there is none. guess: records that such steps leave out.
int64_t end_of_draw(const pk_program &p, const Launch &l, int64_t i, const GuessPart &guess) {
    if (!l.decode_only || l.max_tokens != 1 || p.records[i].op != PK_OP_SAMPLE) return i;
    const int64_t next = i + 1 >= guess.first && i + 1 < guess.end ? guess.end : i + 1;
    return next < p.records.n() && p.records[next].op == PK_OP_COMMIT ? next + 1 : i;
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

// Launches what decode attention of a step takes first, where a step begins: attention may begin before the launch in front of it has ended, but not before the embedding has begun, which waits for this.
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

// Enqueues records [first, end), without the two ends of a step when with_ends is false.
int32_t enqueue(pk_program &p, const pk_program::View &view, const Launch &l, int64_t first, int64_t end, bool with_ends, std::vector<cudaGraphNode_t> *passes = nullptr) {
    int32_t status = PK_OK;
    const GuessPart guess = guess_part(p.records);
    Launch at = l;
    for (int64_t i = first; i < end && !status; ++i) {
        if (l.decode_only && with_ends && i >= guess.first && i < guess.end) continue;
        if (l.share && i == p.shared_rows.record()) status = launch_share(l, p.records[i].as<pk_op_attention>());
        if (!status) status = launch_first_work(p, at, i);
        if (status) break;
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
        } else if (with_ends || !is_end(p.records[i])) {
            // Of one row the head start of a step's first launch counts, in mixtures of a few rows those of small kernels between products.
            const int32_t op = p.records[i].op;
            at.overlap = l.decode_only && (l.max_tokens == 1 ? op == PK_OP_EMBED : !view.few_rows.empty() && (op == PK_OP_DELTA || op == PK_OP_QKV || op == PK_OP_SIGMOID));
            status = launch_next(p, at, i, passes);
        }
    }
    return status;
}

// The nodes behind `last`, one after the other.
int32_t find_tail(pk_program::Graph &g, cudaGraphNode_t last) {
    size_t n = 0;
    if (int32_t e = check(cudaGraphGetEdges(g.graph, nullptr, nullptr, nullptr, &n), "capture")) return e;
    std::vector<cudaGraphNode_t> from(n), to(n);
    std::vector<cudaGraphEdgeData> edges(n);
    if (int32_t e = check(cudaGraphGetEdges(g.graph, from.data(), to.data(), edges.data(), &n), "capture")) return e;
    std::map<cudaGraphNode_t, cudaGraphNode_t> next;
    for (size_t i = 0; i < n; ++i) next[from[i]] = to[i];
    for (auto at = next.find(last); at != next.end(); at = next.find(at->second)) g.tail.push_back(at->second);
    return PK_OK;
}

// Switches nodes off, or on again; is_off: as they are.
int32_t switch_off(const pk_program::Graph &g, const std::vector<cudaGraphNode_t> &nodes, bool off, bool *is_off) {
    if (*is_off == off) return PK_OK;
    for (cudaGraphNode_t node : nodes)
        if (int32_t e = check(cudaGraphNodeSetEnabled(g.exec, node, !off), "step")) return e;
    *is_off = off;
    return PK_OK;
}

void drop(pk_program::Graph &g) {
    if (g.exec) cudaGraphExecDestroy(g.exec);
    if (g.graph) cudaGraphDestroy(g.graph);
    g = {};
}

// One graph of all records (without the two ends of a step when with_ends is false).
int32_t capture(pk_program &p, const pk_program::View &view, const Launch &l, bool with_ends, pk_program::Graph *out) {
    cudaStream_t stream = l.stream;
    const bool has_tail = with_ends && p.tail_at > 0 && p.tail_at < p.records.n();
    cudaGraphNode_t last = nullptr;
    if (int32_t e = check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture")) return e;
    int32_t status = enqueue(p, view, l, 0, has_tail ? p.tail_at : p.records.n(), with_ends, &out->passes);
    if (has_tail) last = last_node(stream);
    if (!status && has_tail) status = enqueue(p, view, l, p.tail_at, p.records.n(), with_ends);
    const int32_t ended = check(cudaStreamEndCapture(stream, &out->graph), "capture");
    if (!status) status = ended;
    if (!status && last) status = find_tail(*out, last);
    if (!status) status = check(cudaGraphInstantiate(&out->exec, out->graph, 0), "graph");
    if (out->graph && (status || (!has_tail && out->passes.empty()))) {
        cudaGraphDestroy(out->graph);
        out->graph = nullptr;
    }
    return status ? status : check(cudaGraphUpload(out->exec, stream), "graph");
}

int32_t set_info(pk_program &p, int32_t n_tokens, int32_t n_rows, int32_t n_samples) {
    StepInfo info = {};
    if (int32_t e = check(cudaMemcpyAsync(&info, p.info, sizeof info, cudaMemcpyDeviceToHost, p.ctx->stream), "run")) return e;
    if (int32_t e = check(cudaStreamSynchronize(p.ctx->stream), "run")) return e;
    info.n_tokens = n_tokens;
    info.n_rows = n_rows;
    info.n_samples = n_samples;
    if (int32_t e = check(cudaMemcpyAsync(p.info, &info, sizeof info, cudaMemcpyHostToDevice, p.ctx->stream), "run")) return e;
    return check(cudaStreamSynchronize(p.ctx->stream), "run");
}

int32_t put(pk_program &p, uint64_t device, const std::vector<int32_t> &values) {
    if (values.empty() || !device) return PK_OK;
    if (int32_t e = check(cudaMemcpyAsync(reinterpret_cast<void *>(device), values.data(), values.size() * 4, cudaMemcpyHostToDevice, p.ctx->stream), "run")) return e;
    return check(cudaStreamSynchronize(p.ctx->stream), "run");
}

// Rows of a run without step input: dead ones of equal length, as the CPU pack does.
int32_t lay_dead_rows(pk_program &p, int32_t n_tokens, int32_t n_samples, int32_t *n_rows) {
    const int32_t n = std::max(1, std::min(n_samples > 0 ? n_samples : 1, n_tokens));
    std::vector<int32_t> slot(n), start(n + 1), zero_rows(n), flags(n), zero_tokens(n_tokens), row_of(n_tokens), sample(n_samples), sample_at(n_samples);
    for (int32_t r = 0; r < n; ++r) {
        slot[r] = r % p.state.n_slots;
        start[r + 1] = static_cast<int32_t>(int64_t{n_tokens} * (r + 1) / n);
        flags[r] = PK_ROW_DEAD | (n_samples ? PK_ROW_SAMPLE : 0);
        for (int32_t t = start[r]; t < start[r + 1]; ++t) row_of[t] = r;
    }
    for (int32_t s = 0; s < n_samples; ++s) sample_at[s] = start[(sample[s] = s < n ? s : 0) + 1] - 1;
    *n_rows = n;
    const pk_state &s = p.state;
    const std::pair<uint64_t, const std::vector<int32_t> *> writes[] = {
        {s.row_slot, &slot}, {s.row_start, &start}, {s.row_position, &zero_rows}, {s.row_flags, &flags}, {s.token_id, &zero_tokens},
        {s.token_position, &zero_tokens}, {s.token_row, &row_of}, {s.token_page, &zero_tokens}, {p.pool.token_page, &zero_tokens}, {s.sample_row, &sample}, {s.sample_at, &sample_at}};
    for (const auto &[device, values] : writes)
        if (int32_t e = put(p, device, *values)) return e;
    return PK_OK;
}

int32_t count_rows(pk_program &p, int32_t n_tokens, int32_t n_samples, int32_t *n_rows) {
    *n_rows = n_samples;
    if (!p.state.row_start || n_tokens == 0) return PK_OK;
    std::vector<int32_t> start(p.state.max_step_rows + 1);
    if (int32_t e = check(cudaMemcpy(start.data(), reinterpret_cast<void *>(p.state.row_start), start.size() * 4, cudaMemcpyDeviceToHost), "run")) return e;
    for (int32_t r = 1; r <= p.state.max_step_rows; ++r)
        if (start[r] == n_tokens && start[r - 1] < n_tokens) {
            *n_rows = r;
            return PK_OK;
        }
    return PK_OK;
}

bool has_op(const pk_program &p, int32_t op) {
    for (int64_t i = 0; i < p.records.n(); ++i)
        if (p.records[i].op == op) return true;
    return false;
}

int64_t scratch_of(const pk_ctx &ctx, const Records &records, const pk_state &state) {
    int64_t most = 0;
    for (int64_t i = 0; i < records.n(); ++i) {
        const Record &r = records[i];
        int64_t n = 0;
        if (r.op == PK_OP_MATMUL) n = matmul_scratch(&ctx, r.as<pk_op_matmul>(), resolve_rows(r.as<pk_op_matmul>().x.rows, state.max_step_tokens, state.max_step_rows));
        if (r.op == PK_OP_ATTENTION) n = attention_scratch(&ctx, r.as<pk_op_attention>(), state.max_step_rows);
        if (r.op == PK_OP_EXPERTS) n = experts_scratch(&ctx, r.as<pk_op_experts>(), resolve_rows(r.as<pk_op_experts>().x.rows, state.max_step_tokens, state.max_step_rows));
        if (r.op == PK_OP_DELTA || r.op == PK_OP_DELTA_SIGMOID) n = delta_scratch(&ctx, r.as<pk_op_delta>(), state.max_step_tokens);
        if (r.op == PK_OP_MAMBA) n = mamba_scratch(r.as<pk_op_mamba>(), state.max_step_tokens);
        if (r.op == PK_OP_SAMPLE) n = sample_scratch(r.as<pk_op_sample>(), state.max_step_rows);
        if (r.op >= PK_OP_SOFTPLUS) n = std::max(n, rare_scratch(&ctx, r, state));
        most = std::max(most, n);
    }
    return kCounterBytes + share_bytes(state) + (most + 255) / 256 * 256 + kPlanBytes;
}

// Launches that serve several records, and a graph of each kind for each bucket of at most max_tokens.
int32_t fill_view(pk_program &p, pk_program::View &view, const std::vector<int32_t> &sizes, int32_t max_tokens) {
    pk_ctx &ctx = *p.ctx;
    const bool is_step = has_op(p, PK_OP_PREPARE);
    // A single product in a step is as fast on its own; programs that are run piece by piece may consist of one.
    const Launch lone = launch_of(p, view, 1, 1, true, false);
    // None of them where a row's numbers must not depend on its being alone.
    if (!is_invariant(&ctx)) {
        view.mixtures = find_mixtures(lone, p.records);
        // Between mixtures the persistent kernel has single products only.
        if (!view.mixtures.empty()) view.abreast = find_abreast(lone, p.records);
        view.few_rows = find_few_rows(lone, p.records, view.mixtures);
        persist::Taken taken;
        for (const Mixture &m : view.mixtures) taken.emplace_back(m.first, m.last);
        for (const Abreast &a : view.abreast) taken.emplace_back(a.first, a.last);
        view.plans.emplace_back();
        if (int32_t e = persist::make_plan(lone, p.records, 1, is_step ? 2 : 1, taken, &view.plans.back())) return e;
        ctx.n_allocations += view.plans.back().memory != nullptr;
        ctx.allocated_bytes += view.plans.back().n_bytes;
    }
    for (int32_t n : sizes) {
        if (n < 1 || n > p.state.max_step_tokens) return fail(PK_BAD_ARG, "load: a bucket of %d tokens, it must be 1 to %d", n, p.state.max_step_tokens);
        if (n > max_tokens) break;
        view.buckets.emplace_back();
        pk_program::Bucket &bucket = view.buckets.back();
        bucket.n_tokens = n;
        const int32_t samples = std::min(n, p.state.max_step_rows);
        if (!is_step) continue;
        if (int32_t e = capture(p, view, launch_of(p, view, n, samples, false, n > 2), true, &bucket.mixed)) return e;
        if (n > std::min(p.state.n_slots, p.state.max_step_rows)) continue;
        if (int32_t e = capture(p, view, launch_of(p, view, n, samples, true, false), true, &bucket.decode)) return e;
        if (n < 2 || p.shared_rows.record() < 0) continue;
        if (int32_t e = capture(p, view, launch_of(p, view, n, samples, true, true), true, &bucket.shared)) return e;
    }
    return check(cudaStreamSynchronize(view.ctx->stream), "load");
}

void drop(pk_program::View &view) {
    for (auto &b : view.buckets) {
        drop(b.mixed);
        drop(b.decode);
        drop(b.shared);
    }
    for (auto &plan : view.plans) persist::drop_plan(plan);
    view = {};
}

// The smallest bucket for so many tokens, or null.
pk_program::Bucket *find_bucket(pk_program::View &view, int32_t n_tokens) {
    for (auto &b : view.buckets)
        if (b.n_tokens >= n_tokens && b.mixed.exec) return &b;
    return nullptr;
}

}  // namespace

int64_t program_workspace(const pk_ctx &ctx, const Records &records, const pk_state &state) {
    const pk_ctx *rest = rest_of(&ctx);
    return std::max(scratch_of(ctx, records, state), rest ? scratch_of(*rest, records, state) : 0);
}

// Ops whose kernels add a row up in another order among others, or have not been tried: what layer has them.
static const char *varying_layer(int32_t op) {
    switch (op) {
        case PK_OP_SPARSE: return "attention over chosen blocks";
        case PK_OP_NGRAM: return "n-grams";
        case PK_OP_STREAMS: return "residual streams";
        case PK_OP_DILATED: return "dilated convolutions";
        case PK_OP_KEEP: return "guesses beside a recurrent state";
        default: return nullptr;
    }
}

int32_t check_program(pk_ctx *ctx, const Records &records, const pk_state &state) {
    if (state.max_step_tokens > kMostGridRows) return fail(PK_UNSUPPORTED, "load: steps of %d tokens; the CUDA pack's grids take up to %d rows", state.max_step_tokens, kMostGridRows);
    for (int64_t i = 0; i < records.n(); ++i) {
        const Record &r = records[i];
        int32_t status = PK_OK;
        if (const char *layer = varying_layer(r.op); layer && is_invariant(ctx))
            return fail(PK_UNSUPPORTED, "op %lld: %s; the CUDA pack has no kernels for it whose numbers of a row depend on the row alone", (long long)i, layer);
        // Two steps at once would fill one cache.
        if (r.op == PK_OP_EXPERTS_FETCHED && is_part(ctx)) return fail(PK_UNSUPPORTED, "op %lld: fetched experts; the CUDA pack has them on all processors only, not in a part", (long long)i);
        if (r.op == PK_OP_EXPERTS) status = check_experts(ctx, r.as<pk_op_experts>(), i);
        if (r.op == PK_OP_MAMBA) status = check_mamba(r.as<pk_op_mamba>(), i);
        if (r.op >= PK_OP_SOFTPLUS) status = check_rare_op(ctx, r, state, i);
        if (r.op == PK_OP_DELTA || r.op == PK_OP_DELTA_SIGMOID) status = check_delta(r.as<pk_op_delta>(), state, i);
        if (r.op == PK_OP_MATMUL) status = check_matmul(ctx, r.as<pk_op_matmul>(), i);
        if (r.op == PK_OP_EMBED) status = check_embed(ctx, r.as<pk_op_embed>(), i);
        if (r.op == PK_OP_ATTENTION) status = check_attention(r.as<pk_op_attention>(), i);
        if (r.op == PK_OP_COPY) {
            const auto &op = r.as<pk_op_copy>();
            auto is_integer = [](int32_t f) { return f == PK_I32 || f == PK_U8; };
            if (op.x.format != op.out.format && (is_integer(op.x.format) || is_integer(op.out.format)))
                return fail(PK_UNSUPPORTED, "op %lld (copy): integers are copied to the same format only", (long long)i);
        }
        if (status) return status;
    }
    return PK_OK;
}

int32_t load_program(pk_program &p, const int32_t *buckets, int32_t n_buckets) {
    pk_ctx &ctx = *p.ctx;
    p.mask_bytes = (finish_bytes(p.state, max_masks(p.state)) + 7) / 8 * 8;
    p.ring_bytes = kRingBytes + p.mask_bytes;
    if (int32_t e = prepare_cold(&ctx)) return e;
    const int64_t ring_bytes = kRing * p.ring_bytes + (kRing + 1) * p.mask_bytes;
    while (p.tail_at < p.records.n() && p.records[p.tail_at].op != PK_OP_SAMPLE) ++p.tail_at;
    void *ring = nullptr, *consumed = nullptr;
    pk_ctx *const rest = rest_of(&ctx);
    const int64_t info_bytes = rest ? kInfoBytes + kCounterBytes : static_cast<int64_t>(sizeof(StepInfo));
    if (int32_t e = check(cudaMalloc(reinterpret_cast<void **>(&p.info), info_bytes), "load")) return e;
    if (int32_t e = check(cudaMemsetAsync(p.info, 0, info_bytes, ctx.stream), "load")) return e;
    if (int32_t e = check(cudaHostAlloc(&ring, ring_bytes, cudaHostAllocPortable | cudaHostAllocMapped), "load")) return e;
    p.ring = static_cast<uint8_t *>(ring);
    p.masks = p.ring + kRing * p.ring_bytes;
    if (int32_t e = check(cudaHostAlloc(&consumed, kConsumedBytes, cudaHostAllocPortable | cudaHostAllocMapped), "load")) return e;
    p.consumed = static_cast<uint64_t *>(consumed);
    std::memset(consumed, 0, kConsumedBytes);
    ctx.n_allocations += 3;
    ctx.allocated_bytes += ring_bytes + kConsumedBytes + info_bytes;
    p.pool = find_pool(p.records);
    p.pooled = with_pool(p.state, p.pool);
    p.slots = slot_pages(&ctx, p.state);
    p.shared_rows.open(ctx, p.records, p.state);
    if (int32_t e = check(cudaMemsetAsync(reinterpret_cast<void *>(p.state.workspace), 0, kCounterBytes + share_bytes(p.state), ctx.stream), "load")) return e;
    if (int32_t e = check(cudaMemsetAsync(reinterpret_cast<void *>(p.state.workspace + plan_offset(p.state)), 0, kPlanBytes, ctx.stream), "load")) return e;
    std::vector<int32_t> sizes(buckets, buckets + (buckets ? n_buckets : 0));
    std::sort(sizes.begin(), sizes.end());
    sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
    p.guesses = has_op(p, PK_OP_GUESS);
    p.all.ctx = &ctx;
    p.all.counters = reinterpret_cast<int32_t *>(p.state.workspace);
    if (int32_t e = fill_view(p, p.all, sizes, p.state.max_step_tokens)) return e;
    if (rest == nullptr || !has_op(p, PK_OP_PREPARE)) return PK_OK;
    p.rest.ctx = rest;
    p.rest.counters = reinterpret_cast<int32_t *>(reinterpret_cast<uint8_t *>(p.info) + kInfoBytes);
    return fill_view(p, p.rest, sizes, kRestTokens);
}

void unload_program(pk_program &p) {
    cudaStreamSynchronize(p.ctx->stream);
    forget_cold(p.ctx);
    drop(p.all);
    drop(p.rest);
    if (p.info) cudaFree(p.info);
    if (p.ring) cudaFreeHost(p.ring);
    if (p.consumed) cudaFreeHost(p.consumed);
    cudaGetLastError();
}

// A step whose rows have pages on which a copy may be under way waits for it; others do not.
static int32_t hold_for_copies(pk_program &p, const Step &step) {
    Copies &copies = copies_of(p.ctx);
    uint64_t given = 0, done = 0, most = 0;
    if (int32_t e = copies.count(&given, &done)) return e;
    std::vector<int32_t> &owner = p.slots->owner;
    std::vector<uint64_t> &needs = p.slots->needs;
    for (int32_t i = 0; i < step.head->n_pages; ++i) {
        const pk_page_write &w = step.pages[i];
        if (w.reserved == PK_PAGE_OF_POOL || w.page < 0) continue;
        if (w.page >= static_cast<int64_t>(owner.size())) owner.resize(w.page + 1024, -1);
        owner[w.page] = w.slot;
        if (given != done) needs[w.slot] = std::max(needs[w.slot], copies.on(p.state.kv + w.page * p.state.kv_page_stride));
    }
    for (const auto &[address, number] : copies.take_arrivals()) {
        const uint64_t page = (address - p.state.kv) / p.state.kv_page_stride;
        if (address >= p.state.kv && page < owner.size() && owner[page] >= 0) needs[owner[page]] = std::max(needs[owner[page]], number);
    }
    for (int32_t i = 0; i < step.head->n_rows && given != done; ++i) most = std::max(most, needs[step.rows[i].slot]);
    return most > done ? copies.hold(*p.ctx, most) : PK_OK;
}

// Copies go behind the steps of their own context: what a step of a part touches nobody copies until it is done.
static void tell_copies(pk_program &p) {
    if (!is_part(p.ctx)) copies_of(p.ctx).step_given();
}

int32_t step_program(pk_program &p, const pk_step_head *input) {
    Step step;
    if (int32_t e = read_step(input, p.state, &step)) return e;
    if (p.open.seq) return fail(PK_BAD_ARG, "step %llu: step %llu is not finished", (unsigned long long)input->seq, (unsigned long long)p.open.seq);
    const int64_t bytes = step_bytes(*input);
    if (bytes > p.ring_bytes) return fail(PK_BAD_ARG, "step %llu: the input has %lld bytes, a block of the ring takes %lld", (unsigned long long)input->seq, (long long)bytes, (long long)p.ring_bytes);
    const bool on_rest = gives_way(p.ctx) && find_bucket(p.rest, input->n_tokens);
    pk_program::View &view = on_rest ? p.rest : p.all;
    pk_program::Bucket *bucket = find_bucket(view, input->n_tokens);
    if (!bucket) return fail(PK_BAD_ARG, "step %llu: %d tokens, the largest bucket has %d", (unsigned long long)input->seq, input->n_tokens, view.buckets.empty() ? 0 : view.buckets.back().n_tokens);
    // A block of the ring is free when the device has read what it held.
    volatile uint64_t *consumed = p.consumed;
    for (uint64_t n = 0; p.n_begun >= kRing && *consumed < p.n_begun - kRing + 1; ++n)
        if (n % (1 << 20) == (1 << 20) - 1)
            if (cudaError_t e = cudaStreamQuery(p.ctx->stream); e != cudaErrorNotReady && e != cudaSuccess) return check(e, "step");
    std::memcpy(p.ring + p.n_begun % kRing * p.ring_bytes, input, bytes);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const bool decode = bucket->decode.exec && input->n_rows == input->n_tokens && !(p.guesses && runs_guess(step));
    p.shared_rows.write(step);
    const bool shares = p.shared_rows.any(step), shared = decode && bucket->shared.exec && shares;
    pk_program::Graph &graph = shared ? bucket->shared : decode ? bucket->decode : bucket->mixed;
    if (step.n_held && is_part(p.ctx)) return fail(PK_BAD_ARG, "step %llu: rows of a part wait for no masks", (unsigned long long)input->seq);
    if (step.n_held && graph.tail.empty()) return fail(PK_BAD_ARG, "step %llu: %d rows wait for a mask, the program cannot be cut before it draws", (unsigned long long)input->seq, step.n_held);
    if (int32_t e = switch_off(graph, graph.tail, step.n_held > 0, &graph.is_cut)) return e;
    if (int32_t e = switch_off(graph, graph.passes, !shares, &graph.is_apart)) return e;
    if (int32_t e = hold_for_copies(p, step)) return e;
    expect_cold(p.ctx, p.state, input->seq, bucket->n_tokens);
    if (int32_t e = begin_turn(p.ctx, on_rest)) return e;
    if (int32_t e = check(cudaGraphLaunch(graph.exec, p.ctx->stream), "step")) return e;
    if (int32_t e = end_turn(p.ctx)) return e;
    tell_copies(p);
    if (step.n_held) {
        const int32_t n = bucket->n_tokens;
        p.open = {input->seq, input->n_rows, &view, launch_of(p, view, n, std::min(n, p.state.max_step_rows), decode, shared || (!decode && n > 2))};
    }
    if (p.n_begun++ == 0) p.first_seq = input->seq;
    p.ctx->n_steps += 1;
    return PK_OK;
}

int32_t finish_program(pk_program &p, const pk_finish_head *input) {
    Finish masks;
    if (int32_t e = read_finish(input, p.state, p.open.seq, &masks)) return e;
    uint8_t *block = p.masks + p.n_begun % (kRing + 1) * p.mask_bytes;
    std::memcpy(block, input, finish_bytes(p.state, input->n_masks));
    std::atomic_thread_fence(std::memory_order_seq_cst);
    p.open.seq = 0;
    tell_copies(p);
    const bool on_rest = p.open.view == &p.rest;
    if (int32_t e = on_rest ? fork_rest(p.ctx) : begin_turn(p.ctx, false)) return e;
    if (int32_t e = launch_masks(p.open.launch, block, input->n_masks, p.open.n_rows)) return e;
    if (int32_t e = enqueue(p, *p.open.view, p.open.launch, p.tail_at, p.records.n(), true)) return e;
    return on_rest ? join_rest(p.ctx) : end_turn(p.ctx);
}

// Only the device knows how long a slot is: what the CPU pack refuses at pk_step is told here, once.
static int32_t tell_past(pk_program &p, uint64_t seq) {
    volatile StepReport *report = reinterpret_cast<volatile StepReport *>(p.consumed);
    const uint64_t found = report->past_seq;
    if (found == 0 || found > seq) return PK_OK;
    report->past_seq = 0;
    return fail(PK_BAD_ARG, "step %llu: row %d ends at position %lld of slot %d, the context has %d", (unsigned long long)found, report->row, (long long)report->end, report->slot, p.state.max_ctx_tokens);
}

int32_t wait_program(pk_program &p, uint64_t seq, int64_t timeout_us) {
    using Clock = std::chrono::steady_clock;
    volatile uint64_t *done = reinterpret_cast<volatile uint64_t *>(p.state.done);
    const auto end = Clock::now() + std::chrono::microseconds(std::max<int64_t>(timeout_us, 0));
    for (;;) {
        for (int i = 0; i < 64; ++i) {
            if (*done >= seq) {
                std::atomic_thread_fence(std::memory_order_acquire);
                if (int32_t e = check_cold(p.ctx)) return e;
                return tell_past(p, seq);
            }
            __builtin_ia32_pause();
        }
        const auto now = Clock::now();
        if (now >= p.query_at) {
            const cudaError_t e = cudaStreamQuery(p.ctx->stream);
            if (e != cudaSuccess && e != cudaErrorNotReady) return check(e, "wait");
            p.query_at = now + kQueryEvery;
            sched_yield();
        }
        if (now >= end) return fail(PK_TIMEOUT, "wait: step %llu is done, %llu is not", (unsigned long long)*done, (unsigned long long)seq);
    }
}

int32_t times_program(pk_program &p, uint64_t *ns, int32_t n, int32_t *n_out) {
    const volatile uint64_t *times = p.consumed + kTimesAt;
    const uint64_t done = *p.consumed ? *reinterpret_cast<volatile uint64_t *>(p.state.done) - p.first_seq + 1 : 0;
    const uint64_t count = std::min<uint64_t>({static_cast<uint64_t>(std::max(n, 0)), PK_TIMES - kRing, done});
    for (uint64_t i = 0; i < count; ++i)
        for (int k = 0; k < 2; ++k) ns[2 * i + k] = times[2 * ((done - count + i) % PK_TIMES) + k];
    *n_out = static_cast<int32_t>(count);
    return PK_OK;
}

// Threads that compute experts stay awake while records run without a step.
struct ColdHold {
    pk_ctx *ctx;
    explicit ColdHold(pk_ctx *of) : ctx(of) { hold_cold(ctx, 1); }
    ~ColdHold() { hold_cold(ctx, -1); }
};

int32_t run_program(pk_program &p, int32_t n_tokens, int32_t n_samples, int32_t n_repeats, float *us) {
    const pk_state &s = p.state;
    if (n_tokens < 0 || n_tokens > s.max_step_tokens) return fail(PK_BAD_ARG, "run: n_tokens is %d, it must be 0 to %d", n_tokens, s.max_step_tokens);
    if (n_samples < 0 || n_samples > s.max_step_rows) return fail(PK_BAD_ARG, "run: n_samples is %d, it must be 0 to %d", n_samples, s.max_step_rows);
    n_repeats = std::max(n_repeats, 1);
    if (int32_t e = copies_of(p.ctx).settle()) return e;
    const ColdHold hold(p.ctx);
    int32_t n_rows = 0;
    if (has_op(p, PK_OP_PREPARE)) {
        if (int32_t e = lay_dead_rows(p, n_tokens, n_samples, &n_rows)) return e;
    } else if (int32_t e = count_rows(p, n_tokens, n_samples, &n_rows)) {
        return e;
    }
    if (int32_t e = set_info(p, n_tokens, n_rows, n_samples)) return e;
    const int32_t max_tokens = std::max(n_tokens, 1), max_samples = std::max(n_samples, 1);
    const bool decode_only = n_rows == n_tokens;
    cudaStream_t stream = p.ctx->stream;
    if (int32_t e = begin_turn(p.ctx, false)) return e;
    bool shares = false;
    if (int32_t e = p.shared_rows.any_on_device(s, n_rows, &shares)) return e;
    if (us == nullptr) {
        pk_program::Graph graph;
        if (int32_t e = capture(p, p.all, launch_of(p, p.all, max_tokens, max_samples, decode_only, shares), false, &graph)) return e;
        int32_t status = PK_OK;
        for (int32_t i = 0; i < n_repeats && !status; ++i) status = check(cudaGraphLaunch(graph.exec, stream), "run");
        const int32_t ended = check(cudaStreamSynchronize(stream), "run");
        drop(graph);
        return status ? status : ended ? ended : check_cold(p.ctx);
    }
    const Launch l = launch_of(p, p.all, max_tokens, max_samples, decode_only, shares);
    if (l.share)
        if (int32_t e = launch_share(l, p.records[p.shared_rows.record()].as<pk_op_attention>())) return e;
    const int64_t n = p.records.n();
    std::vector<float> times(n * n_repeats);
    for (int64_t i = 0; i < n; ++i)
        if (int32_t e = launch_first_work(p, l, i)) return e;
    cudaEvent_t begin, end;
    if (int32_t e = check(cudaEventCreate(&begin), "run")) return e;
    if (int32_t e = check(cudaEventCreate(&end), "run")) return e;
    int32_t status = PK_OK;
    Launch at = l;
    for (int32_t k = 0; k < n_repeats && !status; ++k)
        for (int64_t i = 0; i < n && !status; ++i) {
            if (is_end(p.records[i])) continue;
            cudaEventRecord(begin, stream);
            status = launch_next(p, at, i);
            cudaEventRecord(end, stream);
            if (!status) status = check(cudaEventSynchronize(end), "run");
            float ms = 0.0f;
            cudaEventElapsedTime(&ms, begin, end);
            times[i * n_repeats + k] = ms * 1000.0f;
        }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    for (int64_t i = 0; i < n; ++i) {
        std::nth_element(times.begin() + i * n_repeats, times.begin() + i * n_repeats + n_repeats / 2, times.begin() + (i + 1) * n_repeats);
        us[i] = times[i * n_repeats + n_repeats / 2];
    }
    return status;
}

}  // namespace pk
