// The C ABI of the CUDA pack (packs/pack.h). Nothing throws across it; it loads without a driver, and then says so.
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "../../copies.h"
#include "../../host/format.h"
#include "../../pack_digest.h"
#include "../include/cold.cuh"
#include "../include/experts.cuh"
#include "../include/format/rows.cuh"
#include "../include/format/unit.cuh"
#include "../include/invariant.h"
#include "../include/memory.h"
#include "../include/parted.h"
#include "full_context.h"
#include "program.h"

#ifndef PK_ARCH
#define PK_ARCH "sm_90a"
#endif
#ifndef PK_BUILD
#define PK_BUILD "unnamed"
#endif
#ifndef PK_VALIDATED
#define PK_VALIDATED 0
#endif

namespace pk {
namespace {

constexpr int64_t kRepackBytes = 32 << 20;

bool is_weight(int32_t f) { return f == PK_F32 || f == PK_F16 || f == PK_BF16 || f == PK_FP8_E4M3 || f == PK_FP8_E5M2 || f == PK_Q4_Z || is_block_format(f); }
bool is_plain(int32_t f) { return f >= PK_F32 && f <= PK_FP8_E5M2; }
bool is_copy(int32_t f) { return is_plain(f) || f == PK_I32 || f == PK_U8; }
bool has_op(int32_t op) { return (op >= PK_OP_ROUTE && op <= PK_OP_MAMBA) || has_rare_op(op); }
bool is_kv(int32_t f) { return f == PK_F32 || f == PK_F16 || f == PK_BF16 || f == PK_FP8_E4M3; }

constexpr Support kSupport = {"cuda", PK_BF16, is_weight, is_plain, is_kv, is_copy, 1024, has_op};

template <class Body>
int32_t guarded(const char *name, const Body &body) {
    try {
        return body();
    } catch (const std::bad_alloc &) {
        return fail(PK_OOM, "%s: host memory is exhausted", name);
    } catch (const std::exception &error) {
        return fail(PK_BAD_ARG, "%s: %s", name, error.what());
    }
}

int32_t absent(const char *name, const char *argument) { return fail(PK_BAD_ARG, "%s: %s is absent", name, argument); }

// The body of a call on a context, with its device current in this thread.
template <class Body>
int32_t on(pk_ctx *ctx, const char *name, const Body &body) {
    if (!ctx) return absent(name, "context");
    return guarded(name, [&]() -> int32_t {
        std::lock_guard guard(whole(ctx).busy);
        if (int32_t e = check(cudaSetDevice(ctx->device), name)) return e;
        return body(full(ctx));
    });
}

// The same of a call that a part is not for: memory, weights and copies are the business of the context that was parted.
template <class Body>
int32_t on_whole(pk_ctx *ctx, const char *name, const Body &body) {
    return on(ctx, name, [&](FullContext &c) { return is_part(&c) ? fail(PK_BAD_ARG, "%s: this context is a part; the one that was parted does that", name) : body(c); });
}

#if defined(PK_TCGEN05) || defined(PK_FP4_MMA) || defined(PK_FP4_EMULATED)
constexpr int32_t kMaxIsa = 1;
#else
constexpr int32_t kMaxIsa = 0;
#endif

std::string description() {
    char weights[512], kv[128];
    list_formats(is_weight, ", ", "\"", weights, sizeof weights);
    list_formats(is_kv, ", ", "\"", kv, sizeof kv);
    return std::string("{\"pack\": \"cuda\", \"archs\": [\"" PK_ARCH "\"], \"is_validated\": ") + (PK_VALIDATED ? "true" : "false") + ", \"has_untried\": " + (kMaxIsa ? "true" : "false") +
           ", \"build\": \"" PK_BUILD "\", \"formats\": [" + weights + "], \"kv_formats\": [" + kv + "], \"ops\": " + op_names_json(has_op) + "}";
}

void drop_repack_buffers(FullContext &ctx) {
    RepackBuffers &b = ctx.repacking;
    for (int i = 0; i < 2; ++i) {
        if (b.host[i]) cudaFreeHost(b.host[i]);
        if (b.device[i]) cudaFree(b.device[i]);
        if (b.free[i]) cudaEventDestroy(b.free[i]);
    }
    if (b.whole) cudaFree(b.whole);
    b = {};
}

int32_t make_repack_buffers(FullContext &ctx) {
    RepackBuffers &b = ctx.repacking;
    if (b.n_bytes) return PK_OK;
    int32_t e = PK_OK;
    for (int i = 0; i < 2 && !e; ++i) {
        e = check(cudaHostAlloc(&b.host[i], kRepackBytes, cudaHostAllocDefault), "repack");
        if (!e) e = check(cudaMalloc(&b.device[i], kRepackBytes), "repack");
        if (!e) e = check(cudaEventCreateWithFlags(&b.free[i], cudaEventDisableTiming), "repack");
    }
    if (e) {
        drop_repack_buffers(ctx);
        return e;
    }
    ctx.n_allocations += 4;
    b.n_bytes = kRepackBytes;
    return PK_OK;
}

int32_t open(const pk_open_config &config, pk_ctx **out) {
    int n = 0;
    if (cudaError_t e = cudaGetDeviceCount(&n)) {
        cudaGetLastError();
        return fail(PK_DEVICE, "open: no CUDA device can be used: %s", cudaGetErrorString(e));
    }
    if (config.device < 0 || config.device >= n) return fail(PK_BAD_ARG, "open: device %d of %d", config.device, n);
    if (config.max_isa < 0 || config.max_isa > kMaxIsa)
        return fail(PK_BAD_ARG, "open: max_isa is %d; this pack for " PK_ARCH " has %s", config.max_isa, kMaxIsa ? "0 and 1 (kernels that never ran on such a card)" : "0 only: no kernels that never ran");
    if (config.is_invariant != 0 && config.is_invariant != 1) return fail(PK_BAD_ARG, "open: is_invariant is %d, it must be 0 or 1", config.is_invariant);
    auto ctx = std::make_unique<FullContext>();
    ctx->device = config.device;
    if (int32_t e = check(cudaSetDevice(config.device), "open")) return e;
    if (int32_t e = check(cudaGetDeviceProperties(&ctx->properties, config.device), "open")) return e;
    ctx->n_processors = ctx->properties.multiProcessorCount;
    ctx->capability = ctx->properties.major * 10 + ctx->properties.minor;
    ctx->tries = config.max_isa == 1;
    ctx->is_invariant = config.is_invariant == 1;
    ctx->l2_bytes = ctx->properties.l2CacheSize;
    if (int32_t e = kernels_run()) return fail(e, "open: this pack is built for " PK_ARCH "; %s has compute capability %d.%d", ctx->properties.name, ctx->properties.major, ctx->properties.minor);
    if (int32_t e = check(cudaStreamCreateWithFlags(&ctx->stream, cudaStreamNonBlocking), "open")) return e;
    int32_t e = ctx->copies.open();
    if (!e) e = memory_open(*ctx);
    if (e) {
        ctx->copies.close();
        cudaStreamDestroy(ctx->stream);
        return e;
    }
    *out = ctx.release();
    return PK_OK;
}

int32_t copy_through(FullContext &ctx, void *to, const void *from, int64_t n_bytes, cudaMemcpyKind kind, const char *name) {
    if (n_bytes < 0) return fail(PK_BAD_ARG, "%s: %lld bytes", name, (long long)n_bytes);
    if (n_bytes == 0) return PK_OK;
    if (int32_t e = whole(&ctx).copies.settle()) return e;
    if (int32_t e = check(cudaMemcpyAsync(to, from, n_bytes, kind, ctx.stream), name)) return e;
    return check(cudaStreamSynchronize(ctx.stream), name);
}

}  // namespace

Copies &copies_of(pk_ctx *ctx) { return whole(ctx).copies; }

bool is_invariant(const pk_ctx *ctx) { return full(ctx).is_invariant; }

const Packed *find_packed(pk_ctx *ctx, const pk_tensor &w) {
    const auto &packed = whole(ctx).packed;
    auto found = packed.find(w.data);
    return found == packed.end() ? nullptr : &found->second;
}

}  // namespace pk

using namespace pk;

extern "C" {

const char *pk_abi_digest(void) { return PK_ABI_DIGEST; }

const char *pk_describe(void) {
    static const std::string text = description();
    return text.c_str();
}

const char *pk_last_error(void) { return last_error(); }

int32_t pk_n_devices(void) {
    int n = 0;
    if (cudaError_t e = cudaGetDeviceCount(&n)) {
        cudaGetLastError();
        fail(PK_DEVICE, "no CUDA device can be used: %s", cudaGetErrorString(e));
        return e == cudaErrorNoDevice ? 0 : -1;
    }
    return n;
}

int32_t pk_open(const pk_open_config *config, pk_ctx **out) {
    return guarded("open", [&]() -> int32_t {
        if (!config || !out) return absent("open", !config ? "config" : "out");
        *out = nullptr;
        return open(*config, out);
    });
}

void pk_close(pk_ctx *ctx) {
    if (!ctx) return;
    cudaSetDevice(ctx->device);
    drop_parts(full(ctx));
    full(ctx).copies.close();
    drop_repack_buffers(full(ctx));
    drop_cold(ctx);
    drop_fetches(ctx);
    while (!ctx->reserved.empty())
        if (memory_release(*ctx, ctx->reserved.begin()->first)) break;
    if (ctx->stream) cudaStreamDestroy(ctx->stream);
    cudaGetLastError();
    delete &full(ctx);
}

int32_t pk_get_facts(pk_ctx *ctx, pk_facts *out) {
    return on(ctx, "facts", [&](FullContext &c) -> int32_t {
        if (!out) return absent("facts", "out");
        std::memset(out, 0, sizeof *out);
        size_t free = 0, total = 0;
        if (int32_t e = check(cudaMemGetInfo(&free, &total), "facts")) return e;
        out->run_ahead = is_part(&c) ? 1 : 2;
        out->activation = PK_BF16;
        out->memory_bytes = static_cast<int64_t>(total);
        out->free_bytes = static_cast<int64_t>(free);
        out->granule_bytes = c.granule_bytes;
        out->n_processors = c.n_processors;
        out->is_validated = PK_VALIDATED;
        out->has_drafts = 1;
        std::strncpy(out->arch, "cuda:" PK_ARCH, sizeof out->arch - 1);
        std::strncpy(out->name, c.properties.name, sizeof out->name - 1);
        std::strncpy(out->build, PK_BUILD, sizeof out->build - 1);
        return PK_OK;
    });
}

int32_t pk_get_counters(pk_ctx *ctx, pk_counters *out) {
    if (!ctx || !out) return absent("counters", !ctx ? "context" : "out");
    *out = {ctx->n_allocations, ctx->allocated_bytes, ctx->n_steps, ctx->n_repacked_bytes};
    return PK_OK;
}

int32_t pk_alloc(pk_ctx *ctx, int32_t memory, int64_t n_bytes, uint64_t *out) {
    return on_whole(ctx, "alloc", [&](FullContext &c) -> int32_t {
        if (!out) return absent("alloc", "out");
        if (memory != PK_MEMORY_DEVICE && memory != PK_MEMORY_PINNED) return fail(PK_BAD_ARG, "alloc: there is no memory kind %d", memory);
        return memory_alloc(c, memory, n_bytes, out);
    });
}

int32_t pk_free(pk_ctx *ctx, int32_t memory, uint64_t address) {
    return on_whole(ctx, "free", [&](FullContext &c) {
        const int32_t e = c.copies.settle();
        return e ? e : memory_free(c, memory, address);
    });
}

int32_t pk_reserve(pk_ctx *ctx, int64_t n_bytes, uint64_t *out) {
    return on_whole(ctx, "reserve", [&](FullContext &c) { return out ? memory_reserve(c, n_bytes, out) : absent("reserve", "out"); });
}

int32_t pk_attach(pk_ctx *ctx, uint64_t address, int64_t n_bytes) {
    return on_whole(ctx, "attach", [&](FullContext &c) { return memory_attach(c, address, n_bytes); });
}

int32_t pk_detach(pk_ctx *ctx, uint64_t address, int64_t n_bytes) {
    return on_whole(ctx, "detach", [&](FullContext &c) {
        const int32_t e = c.copies.settle();
        return e ? e : memory_detach(c, address, n_bytes);
    });
}

int32_t pk_release(pk_ctx *ctx, uint64_t address) {
    return on_whole(ctx, "release", [&](FullContext &c) {
        const int32_t e = c.copies.settle();
        return e ? e : memory_release(c, address);
    });
}

int32_t pk_write(pk_ctx *ctx, uint64_t device, const void *host, int64_t n_bytes) {
    return on(ctx, "write", [&](FullContext &c) { return copy_through(c, reinterpret_cast<void *>(device), host, n_bytes, cudaMemcpyHostToDevice, "write"); });
}

int32_t pk_read(pk_ctx *ctx, void *host, uint64_t device, int64_t n_bytes) {
    return on(ctx, "read", [&](FullContext &c) { return copy_through(c, host, reinterpret_cast<const void *>(device), n_bytes, cudaMemcpyDeviceToHost, "read"); });
}

int32_t pk_fill(pk_ctx *ctx, uint64_t device, int32_t byte, int64_t n_bytes) {
    return on(ctx, "fill", [&](FullContext &c) -> int32_t {
        if (n_bytes < 0) return fail(PK_BAD_ARG, "fill: %lld bytes", (long long)n_bytes);
        if (int32_t e = whole(&c).copies.settle()) return e;
        if (int32_t e = check(cudaMemsetAsync(reinterpret_cast<void *>(device), byte, n_bytes, c.stream), "fill")) return e;
        return check(cudaStreamSynchronize(c.stream), "fill");
    });
}

int32_t pk_copy(pk_ctx *ctx, uint64_t to, uint64_t from, int64_t n_bytes) {
    return on_whole(ctx, "copy", [&](FullContext &c) -> int32_t {
        if (n_bytes < 0 || (n_bytes > 0 && (!to || !from)))
            return fail(PK_BAD_ARG, "copy: %lld bytes from %#llx to %#llx", (long long)n_bytes, (unsigned long long)from, (unsigned long long)to);
        return c.copies.give(c, to, from, n_bytes);
    });
}

int32_t pk_copied(pk_ctx *ctx, uint64_t *given, uint64_t *done) {
    if (!given || !done) return absent("copied", !given ? "given" : "done");
    return on_whole(ctx, "copied", [&](FullContext &c) { return c.copies.count(given, done); });
}

int32_t pk_packed_bytes(pk_ctx *ctx, const pk_source *source, int64_t *out) {
    if (!ctx || !source || !out) return absent("packed_bytes", "an argument");
    Packed p;
    if (int32_t e = describe(*source, &p)) return e;
    *out = p.n_bytes;
    return PK_OK;
}

int32_t pk_repack(pk_ctx *ctx, const pk_source *source, uint64_t device, int64_t n_bytes) {
    return on_whole(ctx, "repack", [&](FullContext &c) -> int32_t {
        if (!source || !source->data || !device) return absent("repack", "an argument");
        if (device % 128) return fail(PK_BAD_ARG, "repack: address %#llx is not a multiple of 128", (unsigned long long)device);
        Packed p;
        if (int32_t e = describe(*source, &p)) return e;
        if (n_bytes != p.n_bytes) return fail(PK_BAD_ARG, "repack: %lld bytes are there, %lld are needed", (long long)n_bytes, (long long)p.n_bytes);
        if (int32_t e = make_repack_buffers(c)) return e;
        if (int32_t e = repack(&c, *source, device, p, c.repacking)) return e;
        c.packed[device] = p;
        return PK_OK;
    });
}

int32_t pk_workspace_bytes(pk_ctx *ctx, const pk_state *state, const void *records, int64_t n_bytes, int64_t *out) {
    return on(ctx, "workspace_bytes", [&](FullContext &c) -> int32_t {
        if (!state || !out) return absent("workspace_bytes", "an argument");
        Records list;
        if (int32_t e = check_state(*state)) return e;
        if (int32_t e = list.read(records, n_bytes)) return e;
        if (int32_t e = check_records(list, *state, kSupport)) return e;
        *out = program_workspace(c, list, *state);
        return PK_OK;
    });
}

int32_t pk_load(pk_ctx *ctx, const pk_state *state, const void *records, int64_t n_bytes, const int32_t *buckets, int32_t n_buckets, pk_program **out) {
    return on(ctx, "load", [&](FullContext &c) -> int32_t {
        if (!state || !out) return absent("load", "an argument");
        *out = nullptr;
        if (int32_t e = check_state(*state)) return e;
        auto program = std::make_unique<pk_program>();
        program->ctx = ctx;
        program->state = *state;
        if (int32_t e = program->records.read(records, n_bytes)) return e;
        if (int32_t e = check_records(program->records, *state, kSupport)) return e;
        if (int32_t e = check_program(ctx, program->records, *state)) return e;
        const int64_t need = program_workspace(c, program->records, *state);
        if (!state->workspace || state->workspace_bytes < need) return fail(PK_BAD_ARG, "load: the workspace has %lld bytes, this program needs %lld", (long long)state->workspace_bytes, (long long)need);
        if (state->workspace % 256) return fail(PK_BAD_ARG, "load: the workspace at %#llx is not a multiple of 256", (unsigned long long)state->workspace);
        if (int32_t e = check(cudaStreamSynchronize(c.stream), "load")) return e;
        drop_repack_buffers(c);
        if (int32_t e = load_program(*program, buckets, n_buckets)) {
            unload_program(*program);
            return e;
        }
        *out = program.release();
        return PK_OK;
    });
}

void pk_unload(pk_program *program) {
    if (!program) return;
    cudaSetDevice(program->ctx->device);
    unload_program(*program);
    delete program;
}

int32_t pk_step(pk_program *program, const pk_step_head *input) {
    if (!program) return absent("step", "program");
    return on(program->ctx, "step", [&](FullContext &) { return step_program(*program, input); });
}

int32_t pk_finish(pk_program *program, const pk_finish_head *input) {
    if (!program) return absent("finish", "program");
    return on(program->ctx, "finish", [&](FullContext &) { return finish_program(*program, input); });
}

int32_t pk_wait(pk_program *program, uint64_t seq, int64_t timeout_us) {
    if (!program) return absent("wait", "program");
    if (!program->state.done) return absent("wait", "state.done");
    return guarded("wait", [&] { return wait_program(*program, seq, timeout_us); });
}

int32_t pk_times(pk_program *program, uint64_t *ns, int32_t n, int32_t *n_out) {
    if (!program || !n_out || (n > 0 && !ns)) return absent("times", !program ? "program" : !n_out ? "n_out" : "ns");
    return guarded("times", [&] { return times_program(*program, ns, n, n_out); });
}

int32_t pk_run(pk_program *program, int32_t n_tokens, int32_t n_samples, int32_t n_repeats, float *us) {
    if (!program) return absent("run", "program");
    return on(program->ctx, "run", [&](FullContext &) { return run_program(*program, n_tokens, n_samples, n_repeats, us); });
}

}  // extern "C"
