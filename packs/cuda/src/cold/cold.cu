// The device's side of experts that the host computes: a context's threads, what its launches ask, the sums that come back, and how it is measured who
// computes how many. include/cold.cuh has what a step asks; src/experts/fetch.cu asks it.
#include "../../../cold.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>

#include "../../include/cold.cuh"
#include "../../include/device.cuh"
#include "../../include/format/unit.cuh"
#include "../../include/invariant.h"

namespace pk {
namespace {

static_assert(kColdRows == PK_COLD_TOKENS);
constexpr int kThreads = 1024, kEach = 4, kFlight = 4;
// What a request takes from the device to the host and back, beside what the host measures.
constexpr float kThereAndBackUs = 5.0f;
// How slack_us changes by an answer that was there before it was waited for; by a wait, however long, since a thread that lost its processor for
// milliseconds says nothing of the next answer, it changes the other way: so much less as an expert is cheaper on the host.
constexpr float kEarlierUs = 1.0f, kMostSlackCopies = 16.0f;
constexpr uint64_t kGiveUpNs = 5'000'000'000;

struct SumsArguments {
    ColdMail *mail;
    ColdState *state;
    void *y;
    const StepInfo *info;
    int64_t y_stride, rows_symbol;
    int32_t y_format, cols;
    float scale, later_us, most_us;
};

__device__ __forceinline__ uint64_t answered(const ColdMail *mail) {
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(&mail->answer) : "memory");
    return v;
}
__device__ __forceinline__ uint64_t now_ns() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// y[t, c] += scale * sums of the host. One block: every further one that asks the host's memory whether it has answered makes it answer later.
__global__ void __launch_bounds__(kThreads) cold_sums_kernel(const __grid_constant__ SumsArguments a) {
    __shared__ bool is_there;
    wait_dependence();
    release_dependents();
    if (!a.state->is_asked) return;
    if (threadIdx.x == 0) {
        const uint64_t request = a.state->request, begun = now_ns();
        is_there = answered(a.mail) == request;
        float *slack = a.state->slack_us + rows_of(a.info, a.rows_symbol);
        if (is_there) {
            *slack = fminf(*slack + kEarlierUs, a.most_us);
        } else {
            is_there = true;
            while (answered(a.mail) != request && is_there) is_there = now_ns() - begun < kGiveUpNs;
            *slack = fmaxf(*slack - a.later_us, -a.most_us);
        }
        if (!is_there) {
            a.state->is_given_up = 1;
            *reinterpret_cast<volatile uint64_t *>(&a.mail->failed) = request;
        }
    }
    __syncthreads();
    if (!is_there) return;
    const float *sums = reinterpret_cast<const float *>(reinterpret_cast<const uint8_t *>(a.mail) + kColdYAt);
    const int n_rows = rows_of(a.info, a.rows_symbol), per_row = (a.cols + kEach - 1) / kEach, n = n_rows * per_row;
    for (int first = threadIdx.x; first < n; first += kFlight * kThreads) {
        float v[kFlight][kEach];
#pragma unroll
        for (int i = 0; i < kFlight; ++i) {
            const int at = min(first + i * kThreads, n - 1), t = at / per_row;
            const float *from = sums + t * cold_stride(a.cols) + (at - t * per_row) * kEach;
            asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[i][0]), "=f"(v[i][1]), "=f"(v[i][2]), "=f"(v[i][3]) : "l"(from) : "memory");
        }
#pragma unroll
        for (int i = 0; i < kFlight; ++i) {
            const int at = first + i * kThreads, t = at / per_row, c = (at - t * per_row) * kEach;
            for (int e = 0; e < kEach && at < n && c + e < a.cols; ++e) {
                const int64_t to = t * a.y_stride + c + e;
                store_from_f32(a.y, to, a.y_format, fmaf(a.scale, v[i][e], load_as_f32(a.y, to, a.y_format)));
            }
        }
    }
}

// What a context has for it.
struct Cold {
    Cold() = default;
    Cold(const Cold &) = delete;
    Cold &operator=(const Cold &) = delete;
    ~Cold() {
        workers.reset();
        if (mail) cudaFreeHost(mail);
        if (state) cudaFree(state);
    }
    ColdMail *mail = nullptr;
    ColdState *state = nullptr;
    const ColdKernels *kernels = nullptr;
    const char *isa = "";
    std::unique_ptr<ColdWorkers> workers;
    std::map<uint64_t, int32_t> numbers;  // of layers, by their caches; -1: the host cannot compute its experts
    std::vector<std::unique_ptr<ColdLayer>> layers;
    pk_expert_cache first = {};
    ColdCosts costs = {};
    bool is_measured = false, is_told = false;
    uint64_t n_computed_before = 0;  // of layers that were replaced
};

std::mutex lock;
std::map<const pk_ctx *, std::unique_ptr<Cold>> &all() {
    static auto *map = new std::map<const pk_ctx *, std::unique_ptr<Cold>>;
    return *map;
}

Cold *find(const pk_ctx *ctx) {
    std::lock_guard guard(lock);
    auto found = all().find(ctx);
    return found == all().end() ? nullptr : found->second.get();
}

int32_t allowed_processors() {
    cpu_set_t set;
    CPU_ZERO(&set);
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 4;
}

ColdMatrix matrix_of(pk_ctx *ctx, const pk_tensor &w, int64_t *scale_at) {
    ColdMatrix m;
    if (!w.data) return m;
    const Packed &p = *find_packed(ctx, w);
    m.data = reinterpret_cast<const uint8_t *>(w.data);
    m.format = p.format;
    m.rows = static_cast<int32_t>(p.rows);
    m.cols = static_cast<int32_t>(p.cols);
    m.row_bytes = p.row_bytes;
    with_unit(p.format, [&](auto u) { m.n_units = p.padded_cols / decltype(u)::kU; });
    const float *scales = reinterpret_cast<const float *>(m.data + p.scales);
    if (p.scale_kind == PK_SCALES_ROW) m.row_scales = scales;
    if (p.scale_kind == PK_SCALES_BLOCK) m.block_scales = scales;
    m.block_stride = static_cast<int32_t>(p.scale_stride);
    *scale_at = p.scale_at;
    return m;
}

// Microseconds until the host has answered: n experts from the first-th on, each for n_rows rows. Below 0: it did not answer.
float ask_once(Cold &cold, int32_t n, int32_t n_rows, int32_t first, int32_t n_experts) {
    using Clock = std::chrono::steady_clock;
    ColdMail &mail = *cold.mail;
    mail.layer = 0;
    mail.n_rows = n_rows;
    mail.n_used = n;
    for (int32_t p = 0; p < n * n_rows; ++p) {
        mail.ids[p] = (first + p % n) % n_experts;
        mail.weights[p] = 1.0f;
    }
    const auto begin = Clock::now();
    const uint64_t request = mail.request + 1;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    *const_cast<volatile uint64_t *>(&mail.request) = request;
    while (*const_cast<volatile uint64_t *>(&mail.answer) != request)
        if (Clock::now() - begin > std::chrono::nanoseconds(kGiveUpNs)) return -1.0f;
    return std::chrono::duration<float, std::micro>(Clock::now() - begin).count();
}

// Copies and the host's products at once, as in a step: each is slower then than alone.
int32_t measure(pk_ctx *ctx, Cold &cold) {
    constexpr int64_t kCopied = 1 << 30;
    constexpr int kShapes = 3, kLeast = 7;
    static constexpr int32_t kN[kShapes] = {1, 4, 4}, kRows[kShapes] = {1, 1, 4};
    const pk_expert_cache &c = cold.first;
    const int32_t n = std::min(kColdMeasured, c.n_slots), n_repeats = static_cast<int32_t>(std::clamp<int64_t>(kCopied / (n * c.n_bytes), 1, 64));
    cudaEvent_t begin = nullptr, end = nullptr;
    if (int32_t e = check(cudaEventCreate(&begin), "experts")) return e;
    if (int32_t e = check(cudaEventCreate(&end), "experts")) return e;
    std::vector<float> times[kShapes];
    cold.workers->hold(1);
    int32_t status = launch_first_copies(ctx, c, cold.state->words, n, 1);
    if (!status) status = check(cudaEventRecord(begin, ctx->stream), "experts");
    if (!status) status = launch_first_copies(ctx, c, cold.state->words, n, n_repeats);
    if (!status) status = check(cudaEventRecord(end, ctx->stream), "experts");
    for (int32_t i = 0, at = 0; !status; ++i) {
        const int shape = i % kShapes;
        const float us = ask_once(cold, kN[shape], kRows[shape], at, c.n_experts);
        at += kN[shape];
        if (us < 0.0f) status = fail(PK_TIMEOUT, "experts: %d threads of the host did not compute an expert within %d s", cold.workers->n_threads(), static_cast<int>(kGiveUpNs / 1'000'000'000));
        // The first of each wakes threads and memory.
        if (i >= kShapes) times[shape].push_back(us);
        if (i >= (kLeast + 1) * kShapes && cudaEventQuery(end) != cudaErrorNotReady) break;
    }
    cold.workers->hold(-1);
    float copies_ms = 0.0f;
    if (!status) status = check(cudaEventSynchronize(end), "experts");
    if (!status) status = check(cudaEventElapsedTime(&copies_ms, begin, end), "experts");
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    if (status) return status;
    float us[kShapes];
    for (int s = 0; s < kShapes; ++s) {
        std::nth_element(times[s].begin(), times[s].begin() + times[s].size() / 2, times[s].end());
        us[s] = times[s][times[s].size() / 2];
    }
    const float one = std::max(0.1f, (us[1] - us[0]) / 3);
    cold.costs.copy_us = copies_ms * 1e3f / (n * n_repeats);
    cold.costs.row_us = std::clamp((us[2] - us[1]) / 12, 0.0f, one);
    cold.costs.expert_us = one - cold.costs.row_us;
    cold.costs.ask_us = std::max(0.0f, us[0] - one) + kThereAndBackUs;
    cold.is_measured = true;
    for (const auto &layer : cold.layers) layer->n_computed = 0;
    // The device goes on counting where the host stopped.
    ColdState state = {};
    state.request = cold.mail->request;
    return check(cudaMemcpy(cold.state, &state, sizeof state, cudaMemcpyHostToDevice), "experts");
}

int32_t open_cold(pk_ctx *ctx, const pk_cold_config &config) {
    if (is_invariant(ctx)) return fail(PK_UNSUPPORTED, "cold experts: answers would depend on which experts were on the device, in a context whose answers depend on nothing else");
    if (config.n_threads < 0 || config.n_threads > 1024) return fail(PK_BAD_ARG, "cold experts: n_threads is %d, it must be 0 to 1024", config.n_threads);
    if (config.takes_all != 0 && config.takes_all != 1) return fail(PK_BAD_ARG, "cold experts: takes_all is %d, it must be 0 or 1", config.takes_all);
    auto cold = std::make_unique<Cold>();
    cold->kernels = cold_kernels(&cold->isa);
    if (cold->kernels == nullptr) return fail(PK_UNSUPPORTED, "cold experts: this processor has no AVX2");
    void *mail = nullptr, *state = nullptr;
    if (int32_t e = check(cudaHostAlloc(&mail, kColdMailBytes, cudaHostAllocPortable | cudaHostAllocMapped), "cold experts")) return e;
    cold->mail = static_cast<ColdMail *>(mail);
    std::memset(mail, 0, kColdMailBytes);
    if (int32_t e = check(cudaMalloc(&state, sizeof(ColdState)), "cold experts")) return e;
    cold->state = static_cast<ColdState *>(state);
    if (int32_t e = check(cudaMemset(state, 0, sizeof(ColdState)), "cold experts")) return e;
    ctx->n_allocations += 2;
    ctx->allocated_bytes += kColdMailBytes + static_cast<int64_t>(sizeof(ColdState));
    cold->costs.takes_all = config.takes_all;
    const int32_t n_threads = config.n_threads ? config.n_threads : std::max(1, allowed_processors() - 2);
    cold->workers = std::make_unique<ColdWorkers>(*cold->kernels, n_threads, cold->mail);
    if (cold->workers->n_threads() == 0) return fail(PK_UNSUPPORTED, "cold experts: the system gives this process no thread");
    std::lock_guard guard(lock);
    all()[ctx] = std::move(cold);
    return PK_OK;
}

}  // namespace

int32_t keep_cold_layer(pk_ctx *ctx, const pk_op_experts_fetched &op) {
    Cold *cold = find(ctx);
    if (cold == nullptr) return PK_OK;
    const pk_op_experts &x = op.experts;
    int32_t &number = cold->numbers.try_emplace(op.here.cache, -1).first->second;
    const bool is_kept = number >= 0;
    auto layer = std::make_unique<ColdLayer>();
    const pk_tensor *stacks[3] = {&x.gate, &x.up, &x.down};
    bool can = x.ids.cols * kColdRows <= kColdPairs && x.x.cols <= kColdWidest && x.up.rows <= kColdWidest && x.act != PK_ACT_NONE && !x.gate_bias.data && !x.up_bias.data && !x.down_bias.data && (is_kept || cold->layers.size() < kColdLayers);
    for (int i = 0; i < 3; ++i) {
        layer->matrices[i] = matrix_of(ctx, *stacks[i], &layer->scale_at[i]);
        can = can && (!stacks[i]->data || has_cold_format(layer->matrices[i].format));
    }
    layer->stride = op.here.stride;
    layer->n_experts = op.here.n_experts;
    layer->act = x.act;
    layer->limit = x.limit;
    layer->alpha = x.alpha;
    if (!can && !is_kept) return PK_OK;
    // Nothing may be on its way that still reads what was there.
    if (int32_t e = check(cudaStreamSynchronize(ctx->stream), "experts")) return e;
    if (!is_kept) {
        number = static_cast<int32_t>(cold->layers.size());
        cold->layers.emplace_back();
    }
    if (cold->layers[number]) cold->n_computed_before += cold->layers[number]->n_computed;
    cold->workers->set_layer(number, can ? layer.get() : nullptr);
    cold->layers[number] = std::move(layer);
    if (!can) number = -1;
    if (number == 0) cold->first = op.here;
    return PK_OK;
}

ColdAsk cold_ask(const Launch &l, const pk_op_experts_fetched &op) {
    ColdAsk a = {};
    Cold *cold = find(l.ctx);
    if (cold == nullptr || !cold->is_measured || bound(l, op.experts.x.rows) > kColdRows) return a;
    const auto found = cold->numbers.find(op.here.cache);
    if (found == cold->numbers.end() || found->second < 0) return a;
    const pk_op_experts &x = op.experts;
    a.mail = cold->mail;
    a.state = cold->state;
    a.x = reinterpret_cast<const void *>(x.x.data);
    a.weights = reinterpret_cast<const float *>(x.weights.data);
    a.x_stride = x.x.stride / (x.x.format == PK_F32 ? 4 : 2);
    a.weights_stride = x.weights.stride / 4;
    a.x_format = x.x.format;
    a.x_cols = static_cast<int32_t>(x.x.cols);
    a.layer = found->second;
    a.costs = cold->costs;
    return a;
}

int32_t launch_cold_sums(const Launch &l, const pk_op_experts &op, const ColdAsk &ask) {
    SumsArguments a = {};
    a.mail = ask.mail;
    a.state = ask.state;
    a.y = reinterpret_cast<void *>(op.y.data);
    a.info = l.info;
    a.y_stride = op.y.stride / (op.y.format == PK_F32 ? 4 : 2);
    a.rows_symbol = op.x.rows;
    a.y_format = op.y.format;
    a.cols = static_cast<int32_t>(op.y.cols);
    a.scale = op.scale;
    a.later_us = kEarlierUs * std::min(4.0f, (ask.costs.expert_us + ask.costs.row_us) / ask.costs.copy_us);
    a.most_us = kMostSlackCopies * ask.costs.copy_us;
    return launch(l, "cold_sums", cold_sums_kernel, dim3(1), dim3(kThreads), 0, a);
}

int32_t prepare_cold(pk_ctx *ctx) {
    Cold *cold = find(ctx);
    return cold == nullptr || cold->is_measured || cold->layers.empty() ? PK_OK : measure(ctx, *cold);
}

void expect_cold(pk_ctx *ctx, const pk_state &state, uint64_t seq, int32_t n_tokens) {
    Cold *cold = find(ctx);
    if (cold != nullptr && cold->is_measured && n_tokens <= kColdRows) cold->workers->expect(reinterpret_cast<const uint64_t *>(state.done), seq);
}

void hold_cold(pk_ctx *ctx, int32_t by) {
    if (Cold *cold = find(ctx)) cold->workers->hold(by);
}

void forget_cold(pk_ctx *ctx) {
    if (Cold *cold = find(ctx)) cold->workers->forget();
}

int32_t check_cold(pk_ctx *ctx) {
    Cold *cold = find(ctx);
    if (cold == nullptr || cold->is_told || *const_cast<volatile uint64_t *>(&cold->mail->failed) == 0) return PK_OK;
    cold->is_told = true;
    return fail(PK_TIMEOUT, "experts: the host did not compute its part of a layer within %d s; from here on all missing experts are copied", static_cast<int>(kGiveUpNs / 1'000'000'000));
}

void drop_cold(const pk_ctx *ctx) {
    std::lock_guard guard(lock);
    all().erase(ctx);
}

}  // namespace pk

using namespace pk;

extern "C" {

int32_t pk_cold_open(pk_ctx *ctx, const pk_cold_config *config) {
    if (!ctx || !config) return fail(PK_BAD_ARG, "cold experts: %s is absent", !ctx ? "context" : "config");
    std::lock_guard guard(ctx->busy);
    if (find(ctx) != nullptr) return fail(PK_BAD_ARG, "cold experts: this context has threads for them");
    if (int32_t e = check(cudaSetDevice(ctx->device), "cold experts")) return e;
    try {
        return open_cold(ctx, *config);
    } catch (const std::exception &error) {
        return fail(PK_OOM, "cold experts: %s", error.what());
    }
}

int32_t pk_cold_facts(pk_ctx *ctx, pk_cold *out) {
    if (!ctx || !out) return fail(PK_BAD_ARG, "cold experts: %s is absent", !ctx ? "context" : "out");
    std::memset(out, 0, sizeof *out);
    Cold *cold = find(ctx);
    if (cold == nullptr) return PK_OK;
    out->n_threads = cold->workers->n_threads();
    for (const auto &layer : cold->layers)
        if (layer) {
            out->n_layers += layer->matrices[1].data != nullptr;
            out->n_computed += layer->n_computed;
        }
    out->n_computed += cold->n_computed_before;
    out->copy_us = cold->costs.copy_us;
    out->expert_us = cold->costs.expert_us;
    out->row_us = cold->costs.row_us;
    out->ask_us = cold->costs.ask_us;
    std::strncpy(out->isa, cold->isa, sizeof out->isa - 1);
    return PK_OK;
}

}  // extern "C"
