// The C functions of pack.h. Nothing is thrown across this border.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "../../beside.h"
#include "../../cold.h"
#include "../../copies.h"
#include "../../host/format.h"
#include "../../host/guess.h"
#include "../../host/kv_pool.h"
#include "../../pack_digest.h"
#include "isa.h"
#include "matmul.h"
#include "memory.h"
#include "ops.h"

struct pk_program {
    pk_ctx *context;
    pk_state state;
    pk::Records records;
    pk::Workspace workspace;
    std::vector<pk::Angles> angles;
    std::vector<int32_t> angles_of;  // per record: index into angles, or -1
    uint64_t times[PK_TIMES][2] = {};  // of step i at i % PK_TIMES
    int64_t n_timed = 0;
    int64_t sample_at = 0;  // the record at which a step's second half begins
    pk_step_head open = {};  // of the step whose second half has still to come; seq 0: none
    uint64_t open_ns = 0;    // when it began
    bool leaves_guess = false;  // the step runs without the records of guesses; its second half does not know its rows
    pk_op_pool pool = {};    // of layers with a window
    pk_state pooled = {};    // the state as they see it
    std::vector<uint64_t> given;  // of a part: the input of the step that its thread runs
    uint64_t given_seq = 0;       // and that step
};

namespace {

using namespace pk;
using Clock = std::chrono::steady_clock;

uint64_t now_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count(); }

bool has_op(int32_t op) { return (op >= PK_OP_ROUTE && op <= PK_OP_MAMBA) || has_rare_op(op); }
bool is_kv(int32_t format) { return format == PK_F32 || format == PK_F16 || format == PK_BF16 || format == PK_FP8_E4M3; }
bool is_copy(int32_t format) { return format == PK_F32 || format == PK_F16 || format == PK_BF16 || format == PK_I32 || format == PK_U8; }
bool is_table(int32_t format) {
    const Format *known = find_format(format);
    if (!known || format == PK_I32 || format == PK_U8) return false;
    // Asked with no elements: only whether there is a decoder.
    return source_row_to_f32(format, nullptr, 0, nullptr);
}

constexpr Support kSupport{"cpu", PK_F32, is_packed_format, is_table, is_kv, is_copy, kMaxHeadWidth, has_op};

// Runs `body`, turning whatever it throws into a status.
template <class Body>
int32_t guarded(const char *name, const Body &body) {
    try {
        clear_error();
        return body();
    } catch (const std::bad_alloc &) {
        return fail(PK_OOM, "%s: the process is out of memory", name);
    } catch (const std::exception &error) {
        return fail(PK_DEVICE, "%s: %s", name, error.what());
    } catch (...) {
        return fail(PK_DEVICE, "%s: an unknown error", name);
    }
}

int32_t absent(const char *name, const char *argument) { return fail(PK_BAD_ARG, "%s: %s is absent", name, argument); }

const Kernels &kernels_of(Isa isa) {
    switch (isa) {
        case Isa::kAmx: return kernels_amx();
        case Isa::kAvx512: return kernels_avx512();
        default: return kernels_avx2();
    }
}

const char *build_id() {
    static const std::string text = std::string("gcc ") + __VERSION__ + ", abi " + PK_ABI_DIGEST;
    return text.c_str();
}

std::string description() {
    char weights[512], kv[128];
    list_formats(is_packed_format, ", ", "\"", weights, sizeof weights);
    list_formats(is_kv, ", ", "\"", kv, sizeof kv);
    return std::string("{\"pack\": \"cpu\", \"archs\": [\"") + arch_name(Isa::kAvx2) + "\", \"" + arch_name(Isa::kAvx512) + "\", \"" +
           arch_name(Isa::kAmx) + "\"], \"build\": \"" + build_id() + "\", \"formats\": [" + weights + "], \"kv_formats\": [" + kv +
           "], \"ops\": " + op_names_json(has_op) + "}";
}

int64_t workspace_of_record(const Context &context, const Record &record, const pk_state &state) {
    switch (record.op) {
        case PK_OP_MATMUL: {
            const auto &op = record.as<pk_op_matmul>();
            return matmul_workspace_bytes(context, op, resolve_rows(op.x.rows, state.max_step_tokens, state.max_step_rows));
        }
        case PK_OP_ATTENTION: return attention_workspace_bytes(context, record.as<pk_op_attention>(), state);
        case PK_OP_SAMPLE: return sample_workspace_bytes(context, state);
        case PK_OP_DELTA: return delta_workspace_bytes(context, record.as<pk_op_delta>(), state);
        case PK_OP_MAMBA: return mamba_workspace_bytes(record.as<pk_op_mamba>(), state);
        case PK_OP_EXPERTS: return experts_workspace_bytes(context, record.as<pk_op_experts>(), state.max_step_tokens);
        default: return rare_workspace_bytes(context, record, state);
    }
}

// Finds the distinct rotations of a program and lays out the workspace. Addresses are not filled in.
Workspace lay_out(const Context &context, const Records &records, const pk_state &state, std::vector<Angles> *angles, std::vector<int32_t> *angles_of) {
    Workspace w;
    for (int64_t i = 0; i < records.n(); ++i) {
        w.shared_bytes = std::max(w.shared_bytes, round_up(workspace_of_record(context, records[i], state), 64));
        angles_of->push_back(-1);
        if (records[i].op != PK_OP_QKV || !records[i].as<pk_op_qkv>().frequency.data) continue;
        const auto &op = records[i].as<pk_op_qkv>();
        auto same = [&](const Angles &a) { return a.frequency == op.frequency.data && a.width == op.rope_width && a.magnitude == op.rope_magnitude; };
        auto at = std::find_if(angles->begin(), angles->end(), same);
        angles_of->back() = static_cast<int32_t>(at - angles->begin());
        if (at == angles->end()) angles->push_back({op.frequency.data, op.rope_width, op.rope_magnitude, nullptr, 0});
    }
    w.shared_at = 0;
    w.angles_at = w.shared_bytes;
    w.bytes = w.angles_at;
    for (const Angles &a : *angles) w.bytes += round_up(int64_t{state.max_step_tokens} * a.width * 4, 64);
    return w;
}

int32_t run_record(Run &run, const Record &record) {
    switch (record.op) {
        case PK_OP_PREPARE:
            if (run.step) return run_prepare(run);
            prepare_dead_rows(run);
            break;
        case PK_OP_EMBED: run_embed(run, record.as<pk_op_embed>()); break;
        case PK_OP_NORM: run_norm(run, record.as<pk_op_norm>()); break;
        case PK_OP_MATMUL: {
            const auto &op = record.as<pk_op_matmul>();
            matmul(run.context, op, resolve_rows(op.x.rows, run.n_tokens, run.n_samples), run.shared);
            break;
        }
        case PK_OP_QKV: run_qkv(run, record.as<pk_op_qkv>()); break;
        case PK_OP_ATTENTION: run_attention(run, record.as<pk_op_attention>()); break;
        case PK_OP_GATE: run_gate(run, record.as<pk_op_gate>()); break;
        case PK_OP_GATHER: run_gather(run, record.as<pk_op_gather>()); break;
        case PK_OP_SAMPLE: run_sample(run, record.as<pk_op_sample>()); break;
        case PK_OP_COMMIT:
            if (run.step) run_commit(run);
            break;
        case PK_OP_COPY: run_copy(run, record.as<pk_op_copy>()); break;
        case PK_OP_ROUTE: run_route(run, record.as<pk_op_route>()); break;
        case PK_OP_EXPERTS: run_experts(run, record.as<pk_op_experts>()); break;
        case PK_OP_CONV: run_conv(run, record.as<pk_op_conv>()); break;
        case PK_OP_DELTA: run_delta(run, record.as<pk_op_delta>()); break;
        case PK_OP_MAMBA: run_mamba(run, record.as<pk_op_mamba>()); break;
        case PK_OP_SIGMOID: run_sigmoid(run, record.as<pk_op_sigmoid>()); break;
        case PK_OP_ADD: run_add(run, record.as<pk_op_add>()); break;
        default: run_rare(run, record); break;
    }
    return PK_OK;
}

// Walks records [first, end). us: microseconds of each record, or nullptr.
int32_t walk(pk_program *program, Run &run, int64_t first, int64_t end, float *us) {
    if (first == 0)
        for (Angles &a : program->angles) a.n_ready = 0;
    const GuessPart guess = guess_part(program->records);
    const bool is_left_out = run.step && program->leaves_guess;
    Run pooled = {run.context, run.kernels, program->pooled, run.step, run.n_tokens, run.n_samples, run.n_rows, run.shared, nullptr, run.pool}, *at = &run;
    for (int64_t i = first; i < end; ++i) {
        if (is_left_out && i >= guess.first && i < guess.end) continue;
        int32_t which = program->angles_of[i];
        if (program->records[i].op == PK_OP_POOL) at = program->records[i].as<pk_op_pool>().kv ? &pooled : &run;
        at->angles = which < 0 ? nullptr : &program->angles[which];
        Clock::time_point start = us ? Clock::now() : Clock::time_point{};
        if (int32_t status = run_record(*at, program->records[i])) return status;
        if (us) us[i] = std::chrono::duration<float, std::micro>(Clock::now() - start).count();
    }
    return PK_OK;
}

Run run_of(pk_program *program, const Step *step, int64_t n_tokens, int64_t n_samples, int64_t n_rows) {
    return {*program->context, kernels_of(program->context->isa), program->state, step, n_tokens, n_samples, n_rows,
            reinterpret_cast<uint8_t *>(program->state.workspace) + program->workspace.shared_at, nullptr, program->pool};
}

// The step has ended: its times are kept.
void count_step(pk_program *program, uint64_t begun_ns) {
    uint64_t *times = program->times[program->n_timed++ % PK_TIMES];
    times[0] = begun_ns;
    times[1] = now_ns();
    program->context->n_steps += 1;
}

// A whole step, or its first half where rows are held.
int32_t run_step(pk_program *program, const pk_step_head *input) {
    Step step;
    if (int32_t status = read_step(input, program->state, &step)) return status;
    std::lock_guard guard(program->context->busy);
    if (program->open.seq) return fail(PK_BAD_ARG, "step %llu: step %llu is not finished", (unsigned long long)input->seq, (unsigned long long)program->open.seq);
    const int64_t n = program->records.n();
    if (step.n_held && program->sample_at == n) return fail(PK_BAD_ARG, "step %llu: %d rows wait for a mask, the program draws nothing", (unsigned long long)input->seq, step.n_held);
    program->leaves_guess = !runs_guess(step);
    Run run = run_of(program, &step, input->n_tokens, input->n_samples, input->n_rows);
    const uint64_t begun = now_ns();
    if (int32_t status = walk(program, run, 0, step.n_held ? program->sample_at : n, nullptr)) return status;
    if (step.n_held) {
        program->open = *input;
        program->open_ns = begun;
    } else {
        count_step(program, begun);
    }
    return PK_OK;
}

// The same on the thread of a part.
int32_t give_step(pk_program *program, const pk_step_head *input) {
    Part &part = *program->context->part;
    Step step;
    if (int32_t status = read_step(input, program->state, &step)) return status;
    if (step.n_held) return fail(PK_BAD_ARG, "step %llu: rows of a part wait for no masks", (unsigned long long)input->seq);
    const auto refuse = [&] { return fail(PK_BAD_ARG, "step %llu: another is on its way in this part", (unsigned long long)input->seq); };
    // A step is done a moment before its thread is.
    if (program->given_seq && std::atomic_ref<uint64_t>(*numbers<uint64_t>(program->state.done)).load(std::memory_order_acquire) >= program->given_seq) part.settle();
    if (part.is_busy()) return refuse();
    const int64_t n_bytes = step_bytes(*input);
    program->given.resize((n_bytes + 7) / 8);
    std::memcpy(program->given.data(), input, n_bytes);
    program->given_seq = input->seq;
    const bool is_given = part.give([program] {
        return guarded("step", [&] { return run_step(program, reinterpret_cast<const pk_step_head *>(program->given.data())); });
    });
    return is_given ? PK_OK : refuse();
}

// True when a run without step input must find rows in the state: some op reads them and no prepare builds them.
bool finds_rows(const pk_program *program) {
    bool reads = false;
    for (int64_t i = 0; i < program->records.n(); ++i) {
        int32_t op = program->records[i].op;
        if (op == PK_OP_PREPARE) return false;
        reads |= op == PK_OP_QKV || op == PK_OP_ATTENTION || op == PK_OP_GATHER || op == PK_OP_SAMPLE || op == PK_OP_DELTA || op == PK_OP_CONV || op == PK_OP_MAMBA || needs_rare_rows(op);
    }
    return reads;
}

// The rows that the state describes, for a run without prepare: checked, since nobody built them here.
int32_t count_rows(const pk_state &s, int32_t n_tokens, int32_t n_samples, int64_t *out) {
    const int32_t *start = numbers<int32_t>(s.row_start), *slot = numbers<int32_t>(s.row_slot);
    const int32_t *row = numbers<int32_t>(s.token_row), *position = numbers<int32_t>(s.token_position);
    int64_t n = n_tokens > 0 ? int64_t{row[n_tokens - 1]} + 1 : 0;
    if (n < 0 || n > s.max_step_rows) return fail(PK_BAD_ARG, "run: the last token is of row %lld, there are %d rows", (long long)n - 1, s.max_step_rows);
    for (int64_t r = 0; r < n; ++r)
        if (slot[r] < 0 || slot[r] >= s.n_slots || start[r + 1] <= start[r] || start[r + 1] > n_tokens || (r == 0 && start[0] != 0))
            return fail(PK_BAD_ARG, "run: row %lld has slot %d and tokens %d to %d of %d", (long long)r, slot[r], start[r], start[r + 1], n_tokens);
    for (int32_t t = 0; t < n_tokens; ++t)
        if (position[t] < 0 || position[t] >= s.max_ctx_tokens)
            return fail(PK_BAD_ARG, "run: token %d has position %d of %d", t, position[t], s.max_ctx_tokens);
    for (int32_t i = 0; i < n_samples && n > 0; ++i)
        if (numbers<int32_t>(s.sample_row)[i] < 0 || numbers<int32_t>(s.sample_row)[i] >= n)
            return fail(PK_BAD_ARG, "run: sample %d is of row %d of %lld", i, numbers<int32_t>(s.sample_row)[i], (long long)n);
    for (int32_t i = 0; i < n_samples && n > 0; ++i)
        if (numbers<int32_t>(s.sample_at)[i] < 0 || numbers<int32_t>(s.sample_at)[i] >= n_tokens)
            return fail(PK_BAD_ARG, "run: sample %d is drawn after token %d of %d", i, numbers<int32_t>(s.sample_at)[i], n_tokens);
    *out = n;
    return PK_OK;
}

}  // namespace

extern "C" {

const char *pk_abi_digest(void) { return PK_ABI_DIGEST; }

const char *pk_describe(void) {
    static const std::string text = description();
    return text.c_str();
}

const char *pk_last_error(void) { return last_error(); }

int32_t pk_n_devices(void) { return 1; }

int32_t pk_open(const pk_open_config *config, pk_ctx **out) {
    return guarded("open", [&]() -> int32_t {
        if (!config || !out) return absent("open", !config ? "config" : "out");
        *out = nullptr;
        if (config->device != 0) return fail(PK_BAD_ARG, "open: the cpu pack has device 0 only, not %d", config->device);
        if (config->n_threads < 0 || config->n_threads > 1024) return fail(PK_BAD_ARG, "open: n_threads is %d, it must be 0 to 1024", config->n_threads);
        if (config->max_isa < 0 || config->max_isa > 3) return fail(PK_BAD_ARG, "open: max_isa is %d, it must be 0 to 3", config->max_isa);
        if (config->is_invariant != 0 && config->is_invariant != 1) return fail(PK_BAD_ARG, "open: is_invariant is %d, it must be 0 or 1", config->is_invariant);
        // Tiles of matrices add up in another order than products of few rows.
        const int32_t below_tiles = static_cast<int32_t>(Isa::kAvx512), most = config->max_isa == 0 ? below_tiles : std::min(config->max_isa, below_tiles);
        int32_t isa = proved_isa(config->is_invariant ? most : config->max_isa);
        if (isa == 0) return fail(PK_UNSUPPORTED, "open: this processor does not run AVX2, FMA, F16C and BMI2, which the cpu pack needs");
        *out = new pk_ctx(config->n_threads);
        (*out)->isa = static_cast<Isa>(isa);
        (*out)->is_invariant = config->is_invariant == 1;
        return PK_OK;
    });
}

void pk_close(pk_ctx *ctx) {
    if (ctx && ctx->part) ctx->part->settle();
    delete ctx;
}

int32_t pk_get_facts(pk_ctx *ctx, pk_facts *out) {
    return guarded("facts", [&]() -> int32_t {
        if (!ctx || !out) return absent("facts", !ctx ? "context" : "out");
        *out = {};
        out->is_host = 1;
        out->run_ahead = 0;
        out->activation = PK_F32;
        out->n_threads = out->n_processors = ctx->pool.n_threads();
        memory_sizes(&out->memory_bytes, &out->free_bytes);
        out->granule_bytes = kGranuleBytes;
        out->is_validated = 1;
        out->has_drafts = 1;
        std::snprintf(out->arch, sizeof out->arch, "%s", arch_name(ctx->isa));
        processor_name(out->name, sizeof out->name);
        std::snprintf(out->build, sizeof out->build, "%s", build_id());
        return PK_OK;
    });
}

int32_t pk_get_counters(pk_ctx *ctx, pk_counters *out) {
    if (!ctx || !out) return absent("counters", !ctx ? "context" : "out");
    *out = {ctx->n_allocations, ctx->allocated_bytes, ctx->n_steps, ctx->n_repacked_bytes};
    return PK_OK;
}

int32_t pk_alloc(pk_ctx *ctx, int32_t memory, int64_t n_bytes, uint64_t *out) {
    return guarded("alloc", [&]() -> int32_t {
        if (!ctx || !out) return absent("alloc", !ctx ? "context" : "out");
        if (memory != PK_MEMORY_DEVICE && memory != PK_MEMORY_PINNED) return fail(PK_BAD_ARG, "alloc: there is no memory kind %d", memory);
        return memory_alloc(*ctx, n_bytes, out);
    });
}

int32_t pk_free(pk_ctx *ctx, int32_t, uint64_t address) {
    return guarded("free", [&]() -> int32_t { return ctx ? memory_free(*ctx, address) : absent("free", "context"); });
}

int32_t pk_reserve(pk_ctx *ctx, int64_t n_bytes, uint64_t *out) {
    return guarded("reserve", [&]() -> int32_t {
        if (!ctx || !out) return absent("reserve", !ctx ? "context" : "out");
        return memory_reserve(*ctx, n_bytes, out);
    });
}

int32_t pk_attach(pk_ctx *ctx, uint64_t address, int64_t n_bytes) {
    return guarded("attach", [&]() -> int32_t { return ctx ? memory_attach(*ctx, address, n_bytes) : absent("attach", "context"); });
}

int32_t pk_detach(pk_ctx *ctx, uint64_t address, int64_t n_bytes) {
    return guarded("detach", [&]() -> int32_t { return ctx ? memory_detach(*ctx, address, n_bytes) : absent("detach", "context"); });
}

int32_t pk_release(pk_ctx *ctx, uint64_t address) {
    return guarded("release", [&]() -> int32_t { return ctx ? memory_release(*ctx, address) : absent("release", "context"); });
}

int32_t pk_write(pk_ctx *ctx, uint64_t device, const void *host, int64_t n_bytes) {
    if (!ctx || n_bytes < 0 || (n_bytes > 0 && (!device || !host))) return fail(PK_BAD_ARG, "write: %lld bytes from %p to %#llx", (long long)n_bytes, host, (unsigned long long)device);
    if (n_bytes) std::memmove(reinterpret_cast<void *>(device), host, n_bytes);
    return PK_OK;
}

int32_t pk_read(pk_ctx *ctx, void *host, uint64_t device, int64_t n_bytes) {
    if (!ctx || n_bytes < 0 || (n_bytes > 0 && (!device || !host))) return fail(PK_BAD_ARG, "read: %lld bytes from %#llx to %p", (long long)n_bytes, (unsigned long long)device, host);
    if (n_bytes) std::memmove(host, reinterpret_cast<const void *>(device), n_bytes);
    return PK_OK;
}

int32_t pk_fill(pk_ctx *ctx, uint64_t device, int32_t byte, int64_t n_bytes) {
    if (!ctx || n_bytes < 0 || (n_bytes > 0 && !device)) return fail(PK_BAD_ARG, "fill: %lld bytes at %#llx", (long long)n_bytes, (unsigned long long)device);
    if (n_bytes) std::memset(reinterpret_cast<void *>(device), byte, n_bytes);
    return PK_OK;
}

int32_t pk_copy(pk_ctx *ctx, uint64_t to, uint64_t from, int64_t n_bytes) {
    if (!ctx || n_bytes < 0 || (n_bytes > 0 && (!to || !from)))
        return fail(PK_BAD_ARG, "copy: %lld bytes from %#llx to %#llx", (long long)n_bytes, (unsigned long long)from, (unsigned long long)to);
    if (n_bytes) std::memcpy(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), n_bytes);
    ++ctx->n_copies;
    return PK_OK;
}

int32_t pk_copied(pk_ctx *ctx, uint64_t *given, uint64_t *done) {
    if (!ctx || !given || !done) return absent("copied", !ctx ? "context" : !given ? "given" : "done");
    *given = *done = static_cast<uint64_t>(ctx->n_copies.load());
    return PK_OK;
}

int32_t pk_cold_open(pk_ctx *ctx, const pk_cold_config *config) {
    if (!ctx || !config) return absent("cold_open", !ctx ? "context" : "config");
    return fail(PK_UNSUPPORTED, "cold experts: the CPU pack computes all experts on the host");
}

int32_t pk_cold_facts(pk_ctx *ctx, pk_cold *out) {
    if (!ctx || !out) return absent("cold_facts", !ctx ? "context" : "out");
    *out = {};
    return PK_OK;
}

int32_t pk_packed_bytes(pk_ctx *ctx, const pk_source *source, int64_t *out) {
    return guarded("packed_bytes", [&]() -> int32_t {
        if (!ctx || !source || !out) return absent("packed_bytes", "an argument");
        return packed_bytes(*ctx, *source, out);
    });
}

int32_t pk_repack(pk_ctx *ctx, const pk_source *source, uint64_t device, int64_t n_bytes) {
    return guarded("repack", [&]() -> int32_t {
        if (!ctx || !source || !device) return absent("repack", "an argument");
        if (device % 64) return fail(PK_BAD_ARG, "repack: address %#llx is not a multiple of 64", (unsigned long long)device);
        std::lock_guard guard(ctx->busy);
        if (int32_t status = repack(*ctx, *source, reinterpret_cast<void *>(device), n_bytes)) return status;
        ctx->n_repacked_bytes += n_bytes;
        return PK_OK;
    });
}

int32_t pk_workspace_bytes(pk_ctx *ctx, const pk_state *state, const void *records, int64_t n_bytes, int64_t *out) {
    return guarded("workspace_bytes", [&]() -> int32_t {
        if (!ctx || !state || !out) return absent("workspace_bytes", "an argument");
        Records list;
        if (int32_t status = check_state(*state)) return status;
        if (int32_t status = list.read(records, n_bytes)) return status;
        if (int32_t status = check_records(list, *state, kSupport)) return status;
        std::vector<Angles> angles;
        std::vector<int32_t> angles_of;
        *out = lay_out(*ctx, list, *state, &angles, &angles_of).bytes;
        return PK_OK;
    });
}

int32_t pk_load(pk_ctx *ctx, const pk_state *state, const void *records, int64_t n_bytes, const int32_t *, int32_t, pk_program **out) {
    return guarded("load", [&]() -> int32_t {
        if (!ctx || !state || !out) return absent("load", "an argument");
        *out = nullptr;
        if (int32_t status = check_state(*state)) return status;
        auto program = std::make_unique<pk_program>();
        program->context = ctx;
        program->state = *state;
        if (int32_t status = program->records.read(records, n_bytes)) return status;
        if (int32_t status = check_records(program->records, *state, kSupport)) return status;
        for (int64_t i = 0; i < program->records.n(); ++i)
            if (int32_t status = check_cpu(*ctx, program->records[i], i)) return status;
        while (program->sample_at < program->records.n() && program->records[program->sample_at].op != PK_OP_SAMPLE) ++program->sample_at;
        program->pool = find_pool(program->records);
        program->pooled = with_pool(program->state, program->pool);
        program->workspace = lay_out(*ctx, program->records, *state, &program->angles, &program->angles_of);
        if (state->workspace_bytes < program->workspace.bytes || (!state->workspace && program->workspace.bytes))
            return fail(PK_BAD_ARG, "load: the workspace has %lld bytes, this program needs %lld", (long long)state->workspace_bytes,
                        (long long)program->workspace.bytes);
        if (state->workspace % 64) return fail(PK_BAD_ARG, "load: the workspace at %#llx is not a multiple of 64", (unsigned long long)state->workspace);
        auto *table = reinterpret_cast<uint8_t *>(state->workspace) + program->workspace.angles_at;
        for (Angles &a : program->angles) {
            a.table = reinterpret_cast<float *>(table);
            table += round_up(int64_t{state->max_step_tokens} * a.width * 4, 64);
        }
        *out = program.release();
        return PK_OK;
    });
}

void pk_unload(pk_program *program) {
    if (program && program->context->part) program->context->part->settle();
    delete program;
}

int32_t pk_part(pk_ctx *ctx, int32_t n_processors, pk_ctx **out) {
    return guarded("part", [&]() -> int32_t {
        if (!ctx || !out) return absent("part", !ctx ? "context" : "out");
        *out = nullptr;
        const int32_t n = ctx->pool.n_threads();
        if (ctx->part || ctx->n_parted) return fail(PK_BAD_ARG, "part: this context %s", ctx->part ? "is a part itself" : "was parted before");
        if (ctx->is_invariant) return fail(PK_UNSUPPORTED, "part: numbers must not depend on how many threads compute them in this context");
        if (n < 2) return fail(PK_UNSUPPORTED, "part: one thread cannot be parted");
        if (n_processors < 1 || n_processors >= n) return fail(PK_BAD_ARG, "part: n_processors is %d, it must be 1 to %d", n_processors, n - 1);
        auto part = std::make_unique<pk_ctx>(n_processors);
        part->isa = ctx->isa;
        part->part = std::make_unique<Part>();
        ctx->n_parted = part->pool.n_threads();
        *out = part.release();
        return PK_OK;
    });
}

int32_t pk_give_way(pk_ctx *ctx, int32_t is_on) {
    if (!ctx) return absent("give_way", "context");
    if (!ctx->n_parted) return fail(PK_BAD_ARG, "give_way: this context was not parted");
    if (is_on != 0 && is_on != 1) return fail(PK_BAD_ARG, "give_way: is_on is %d, it must be 0 or 1", is_on);
    std::lock_guard guard(ctx->busy);
    ctx->pool.limit(is_on ? std::max(1, ctx->pool.n_all() - ctx->n_parted) : 0);
    return PK_OK;
}

int32_t pk_step(pk_program *program, const pk_step_head *input) {
    return guarded("step", [&]() -> int32_t {
        if (!program) return absent("step", "program");
        return program->context->part ? give_step(program, input) : run_step(program, input);
    });
}

int32_t pk_finish(pk_program *program, const pk_finish_head *input) {
    return guarded("finish", [&]() -> int32_t {
        if (!program) return absent("finish", "program");
        std::lock_guard guard(program->context->busy);
        Finish masks;
        if (int32_t status = read_finish(input, program->state, program->open.seq, &masks)) return status;
        const pk_step_head head = program->open;
        program->open.seq = 0;
        apply_masks(program->state, masks, head.n_rows);
        Step step;
        step.head = &head;
        Run run = run_of(program, &step, head.n_tokens, head.n_samples, head.n_rows);
        if (int32_t status = walk(program, run, program->sample_at, program->records.n(), nullptr)) return status;
        count_step(program, program->open_ns);
        return PK_OK;
    });
}

int32_t pk_wait(pk_program *program, uint64_t seq, int64_t timeout_us) {
    if (!program) return absent("wait", "program");
    if (!program->state.done) return absent("wait", "state.done");
    std::atomic_ref<uint64_t> done(*numbers<uint64_t>(program->state.done));
    auto end = Clock::now() + std::chrono::microseconds(timeout_us > 0 ? timeout_us : 0);
    for (;;) {
        uint64_t last = done.load(std::memory_order_acquire);
        if (last >= seq) return PK_OK;
        if (Part *part = program->context->part.get())
            if (int32_t status = part->take_failure()) return status;
        if (Clock::now() >= end) return fail(PK_TIMEOUT, "wait: step %llu is done, %llu is not", (unsigned long long)last, (unsigned long long)seq);
        usleep(20);
    }
}

int32_t pk_times(pk_program *program, uint64_t *ns, int32_t n, int32_t *n_out) {
    if (!program || !n_out || (n > 0 && !ns)) return absent("times", !program ? "program" : !n_out ? "n_out" : "ns");
    std::lock_guard guard(program->context->busy);
    const int64_t count = std::min<int64_t>({std::max(n, 0), PK_TIMES, program->n_timed});
    for (int64_t i = 0; i < count; ++i) std::memcpy(ns + 2 * i, program->times[(program->n_timed - count + i) % PK_TIMES], 16);
    *n_out = static_cast<int32_t>(count);
    return PK_OK;
}

int32_t pk_run(pk_program *program, int32_t n_tokens, int32_t n_samples, int32_t n_repeats, float *us) {
    return guarded("run", [&]() -> int32_t {
        if (!program) return absent("run", "program");
        const pk_state &s = program->state;
        if (n_tokens < 0 || n_tokens > s.max_step_tokens) return fail(PK_BAD_ARG, "run: n_tokens is %d, it must be 0 to %d", n_tokens, s.max_step_tokens);
        if (n_samples < 0 || n_samples > s.max_step_rows) return fail(PK_BAD_ARG, "run: n_samples is %d, it must be 0 to %d", n_samples, s.max_step_rows);
        if (n_repeats < 1) n_repeats = 1;
        std::lock_guard guard(program->context->busy);
        int64_t n = program->records.n();
        std::vector<float> times(us ? n * n_repeats : 0);
        for (int32_t i = 0; i < n_repeats; ++i) {
            Run run = run_of(program, nullptr, n_tokens, n_samples, 0);
            if (finds_rows(program))
                if (int32_t status = count_rows(s, n_tokens, n_samples, &run.n_rows)) return status;
            if (int32_t status = walk(program, run, 0, n, us ? times.data() + i * n : nullptr)) return status;
        }
        for (int64_t i = 0; us && i < n; ++i) {
            std::vector<float> of_record(n_repeats);
            for (int32_t k = 0; k < n_repeats; ++k) of_record[k] = times[k * n + i];
            std::nth_element(of_record.begin(), of_record.begin() + n_repeats / 2, of_record.end());
            us[i] = of_record[n_repeats / 2];
        }
        return PK_OK;
    });
}

}  // extern "C"
