// Loading programs and giving their steps to the device.
#include "program.h"

#include "../../host/guess.h"
#include "../include/attention_plan.h"
#include "../include/cold.cuh"
#include "../include/copies.h"
#include "../include/invariant.h"
#include "../include/parted.h"
#include "enqueue.h"
#include "graph.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace pk {
namespace {

constexpr int64_t kInfoBytes = 256;  // in front of the counters of what a part left
static_assert(2 * sizeof(StepInfo) <= kInfoBytes);
constexpr std::chrono::milliseconds kQueryEvery{10};

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

void drop_view(pk_program::View &view) {
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
    const int64_t info_bytes = rest ? kInfoBytes + kCounterBytes : static_cast<int64_t>(2 * sizeof(StepInfo));
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
    if (int32_t e = find_last_rows(p.records, p.state, &p.last_rows)) return e;
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
    drop_view(p.all);
    drop_view(p.rest);
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

}  // namespace pk
