// Runs a program without a step's input: as a whole, or record by record with times.
#include "enqueue.h"
#include "graph.h"

#include "../include/cold.cuh"
#include "../include/copies.h"
#include "../include/parted.h"

#include <algorithm>

namespace pk {
namespace {

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

// Threads that compute experts stay awake while records run without a step.
struct ColdHold {
    pk_ctx *ctx;
    explicit ColdHold(pk_ctx *of) : ctx(of) { hold_cold(ctx, 1); }
    ~ColdHold() { hold_cold(ctx, -1); }
};

}  // namespace

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
