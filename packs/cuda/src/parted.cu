// Parts of a device (include/parted.h): the multiprocessors are split, and who may run when is kept with events.
#include "../include/parted.h"

#include <algorithm>
#include <new>
#include <vector>

#include "../../beside.h"
#include "../include/cluster_launch.h"
#include "../include/memory.h"
#include "full_context.h"

namespace pk {

// Of a context that was parted. whole_given: steps on all multiprocessors since a step of the part waited for such; is_marked: and whole_end was recorded
// behind the last of them. side_given: steps of the part since one on all multiprocessors waited for such.
struct Parting {
    FullContext rest;
    FullContext *side = nullptr;
    CUgreenCtx rest_green = nullptr, side_green = nullptr;
    decltype(&cuGreenCtxDestroy) destroy = nullptr;
    cudaEvent_t whole_end = nullptr, side_end = nullptr, forked = nullptr, joined = nullptr;
    bool gives_way = false, whole_given = true, is_marked = false, side_given = false;
    uint64_t n_copies = 0;  // on the stream of the steps, for which a step of the part has waited
};

FullContext::FullContext() = default;
FullContext::~FullContext() = default;

namespace {

constexpr int kGreenVersion = 12050;  // of the driver whose interface these have
// Multiprocessors that go to one side together: in fewer there is no room for clusters of more than two blocks.
constexpr unsigned int kGroup = 8;

struct Green {
    decltype(&cuDeviceGet) device = nullptr;
    decltype(&cuDeviceGetDevResource) resource = nullptr;
    decltype(&cuDevSmResourceSplitByCount) split = nullptr;
    decltype(&cuDevResourceGenerateDesc) describe = nullptr;
    decltype(&cuGreenCtxGetDevResource) resource_of = nullptr;
    decltype(&cuGreenCtxCreate) create = nullptr;
    decltype(&cuGreenCtxDestroy) destroy = nullptr;
    decltype(&cuGreenCtxStreamCreate) stream = nullptr;
    bool find() {
        return driver_entry("cuDeviceGet", kGreenVersion, &device) && driver_entry("cuDeviceGetDevResource", kGreenVersion, &resource) && driver_entry("cuDevSmResourceSplitByCount", kGreenVersion, &split) &&
               driver_entry("cuDevResourceGenerateDesc", kGreenVersion, &describe) && driver_entry("cuGreenCtxCreate", kGreenVersion, &create) && driver_entry("cuGreenCtxDestroy", kGreenVersion, &destroy) &&
               driver_entry("cuGreenCtxStreamCreate", kGreenVersion, &stream) && driver_entry("cuGreenCtxGetDevResource", kGreenVersion, &resource_of);
    }
};

int32_t green_check(CUresult result, const char *what) {
    if (result == CUDA_SUCCESS) return PK_OK;
    if (result == CUDA_ERROR_OUT_OF_MEMORY) return fail(PK_OOM, "part: %s: memory is exhausted", what);
    return fail(PK_UNSUPPORTED, "part: %s: CUDA driver error %d; this device or driver is not parted", what, static_cast<int>(result));
}

using Resources = std::vector<CUdevResource>;

// Groups are of one cluster of processors each, whose members share a way to memory, and the driver names one of each first: the rest's, whose steps wait for memory, are the first ones.
// What is no whole group is the part's.
int32_t split(const Green &green, CUdevice device, int32_t n, Resources *rest, Resources *side) {
    CUdevResource all = {}, left = {};
    if (int32_t e = green_check(green.resource(device, &all, CU_DEV_RESOURCE_TYPE_SM), "multiprocessors")) return e;
    const unsigned int total = all.sm.smCount, group = std::max({kGroup, all.sm.minSmPartitionSize, all.sm.smCoscheduledAlignment});
    unsigned int n_groups = total / group;
    Resources groups(n_groups);
    if (n_groups > 1)
        if (int32_t e = green_check(green.split(groups.data(), &n_groups, &all, &left, 0, group), "split")) return e;
    if (n_groups < 2) return fail(PK_UNSUPPORTED, "part: %u multiprocessors cannot be parted in groups of %u", total, group);
    const unsigned int each = groups[0].sm.smCount, n_rest = std::clamp((total - n + each / 2) / each, 1u, n_groups - 1);
    rest->assign(groups.begin(), groups.begin() + n_rest);
    side->assign(groups.begin() + n_rest, groups.begin() + n_groups);
    if (left.type == CU_DEV_RESOURCE_TYPE_SM && left.sm.smCount > 0) side->push_back(left);
    return PK_OK;
}

// A context of `of` on such multiprocessors.
int32_t make_view(const Green &green, CUdevice device, Resources &resources, FullContext &of, FullContext &view, CUgreenCtx *context) {
    CUdevResourceDesc description = nullptr;
    if (int32_t e = green_check(green.describe(&description, resources.data(), static_cast<unsigned int>(resources.size())), "description")) return e;
    if (int32_t e = green_check(green.create(context, description, device, CU_GREEN_CTX_DEFAULT_STREAM), "context")) return e;
    CUdevResource resource = {};
    if (int32_t e = green_check(green.resource_of(*context, &resource, CU_DEV_RESOURCE_TYPE_SM), "multiprocessors of a part")) return e;
    for (cudaStream_t *stream : {&view.stream, &view.questions})
        if (int32_t e = green_check(green.stream(stream, *context, CU_STREAM_NON_BLOCKING, 0), "stream")) return e;
    view.of = &of;
    view.device = of.device;
    view.n_processors = static_cast<int32_t>(resource.sm.smCount);
    view.capability = of.capability;
    view.tries = of.tries;
    view.l2_bytes = of.l2_bytes;
    view.granule_bytes = of.granule_bytes;
    view.driver = of.driver;
    view.properties = of.properties;
    return PK_OK;
}

void drop_view(FullContext &view) {
    for (cudaStream_t *stream : {&view.stream, &view.questions}) {
        if (*stream == nullptr) continue;
        cudaStreamSynchronize(*stream);
        cudaStreamDestroy(*stream);
        *stream = nullptr;
    }
}

void drop_side(Parting &p) {
    if (p.side == nullptr) return;
    drop_view(*p.side);
    if (p.side_green) p.destroy(p.side_green);
    p.side->of = nullptr;
    p.side_green = nullptr;
    p.side = nullptr;
    p.side_given = false;
}

int32_t part(FullContext &c, int32_t n, pk_ctx **out) {
    if (c.of != nullptr) return fail(PK_BAD_ARG, "part: this context is a part itself");
    if (c.parting != nullptr) return fail(PK_BAD_ARG, "part: this context was parted before");
    if (c.is_invariant) return fail(PK_UNSUPPORTED, "part: sums depend on the number of multiprocessors, in a context whose answers depend on nothing else");
    if (n < 1 || n >= c.properties.multiProcessorCount) return fail(PK_BAD_ARG, "part: n_processors is %d, it must be 1 to %d", n, c.properties.multiProcessorCount - 1);
    Green green;
    if (!green.find()) return fail(PK_UNSUPPORTED, "part: the driver lacks green contexts; version 580 or newer is needed");
    CUdevice device = 0;
    if (int32_t e = green_check(green.device(&device, c.device), "device")) return e;
    auto side = std::make_unique<FullContext>();
    c.parting = std::make_unique<Parting>();
    Parting &p = *c.parting;
    p.destroy = green.destroy;
    p.side = side.get();
    Resources rest, others;
    int32_t e = split(green, device, n, &rest, &others);
    if (!e) e = make_view(green, device, rest, c, p.rest, &p.rest_green);
    if (!e) e = make_view(green, device, others, c, *side, &p.side_green);
    for (cudaEvent_t *event : {&p.whole_end, &p.side_end, &p.forked, &p.joined})
        if (!e) e = check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "part");
    if (e) {
        drop_parts(c);
        return e;
    }
    *out = side.release();
    return PK_OK;
}

int32_t give_way(FullContext &c, int32_t is_on) {
    if (c.parting == nullptr) return fail(PK_BAD_ARG, "give_way: this context was not parted");
    if (is_on != 0 && is_on != 1) return fail(PK_BAD_ARG, "give_way: is_on is %d, it must be 0 or 1", is_on);
    Parting &p = *c.parting;
    p.gives_way = is_on == 1;
    // So that a step of the part need not wait for steps on the rest.
    if (!p.gives_way || !p.whole_given || p.is_marked) return PK_OK;
    p.is_marked = true;
    return check(cudaEventRecord(p.whole_end, c.stream), "give_way");
}

Parting *parting_of(pk_ctx *ctx) { return whole(ctx).parting.get(); }

}  // namespace

void drop_parts(FullContext &c) {
    if (c.of != nullptr) {
        drop_side(*c.of->parting);
        return;
    }
    if (c.parting == nullptr) return;
    Parting &p = *c.parting;
    drop_side(p);
    drop_view(p.rest);
    if (p.rest_green) p.destroy(p.rest_green);
    for (cudaEvent_t event : {p.whole_end, p.side_end, p.forked, p.joined})
        if (event) cudaEventDestroy(event);
    c.parting.reset();
}

bool is_part(const pk_ctx *ctx) { return full(ctx).of != nullptr; }
pk_ctx *rest_of(const pk_ctx *ctx) { return full(ctx).parting ? &full(ctx).parting->rest : nullptr; }
bool gives_way(const pk_ctx *ctx) { return full(ctx).parting && full(ctx).parting->gives_way; }
cudaStream_t stream_of_questions(const pk_ctx *ctx) { return full(ctx).questions; }

int32_t begin_turn(pk_ctx *ctx, bool on_rest) {
    Parting *p = parting_of(ctx);
    if (p == nullptr) return PK_OK;
    if (!is_part(ctx)) {
        if (on_rest) return PK_OK;
        p->whole_given = true;
        p->is_marked = false;
        if (!p->side_given) return PK_OK;
        p->side_given = false;
        return check(cudaStreamWaitEvent(ctx->stream, p->side_end, 0), "step");
    }
    FullContext &of = whole(ctx);
    const uint64_t n_copies = of.copies.n_among_steps();
    if (n_copies != p->n_copies) {
        // Behind what is copied on the stream of the steps, for this step it may be.
        p->n_copies = n_copies;
        p->whole_given = true;
        p->is_marked = false;
    }
    if (!p->whole_given) return PK_OK;
    if (!p->is_marked)
        if (int32_t e = check(cudaEventRecord(p->whole_end, of.stream), "step")) return e;
    p->whole_given = p->is_marked = false;
    return check(cudaStreamWaitEvent(ctx->stream, p->whole_end, 0), "step");
}

int32_t end_turn(pk_ctx *ctx) {
    Parting *p = parting_of(ctx);
    if (p == nullptr || !is_part(ctx)) return PK_OK;
    p->side_given = true;
    return check(cudaEventRecord(p->side_end, ctx->stream), "step");
}

int32_t fork_rest(pk_ctx *ctx) {
    Parting &p = *parting_of(ctx);
    if (int32_t e = check(cudaEventRecord(p.forked, ctx->stream), "finish")) return e;
    return check(cudaStreamWaitEvent(p.rest.stream, p.forked, 0), "finish");
}

int32_t join_rest(pk_ctx *ctx) {
    Parting &p = *parting_of(ctx);
    if (int32_t e = check(cudaEventRecord(p.joined, p.rest.stream), "finish")) return e;
    return check(cudaStreamWaitEvent(ctx->stream, p.joined, 0), "finish");
}

int32_t most_clusters(pk_ctx *ctx, const char *name, const void *kernel, int n_blocks, int n_threads, int n_bytes, int *n) {
    auto &known = full(ctx).clusters;
    const auto found = known.find({kernel, n_blocks});
    if (found != known.end()) {
        *n = found->second;
        return PK_OK;
    }
    if (int32_t e = clusters_at_once(name, kernel, n_blocks * 64, n_threads, n_bytes, n_blocks, stream_of_questions(ctx), n)) return e;
    known[{kernel, n_blocks}] = *n;
    return PK_OK;
}

std::shared_ptr<SlotPages> slot_pages(pk_ctx *ctx, const pk_state &state) {
    std::weak_ptr<SlotPages> &known = whole(ctx).slots[state.page_table];
    auto found = known.lock();
    if (found == nullptr) known = found = std::make_shared<SlotPages>();
    if (static_cast<int64_t>(found->shared.size()) < state.n_slots) {
        found->shared.resize(state.n_slots);
        found->needs.resize(state.n_slots);
    }
    return found;
}

}  // namespace pk

using namespace pk;

namespace {

template <class Body>
int32_t with_busy(pk_ctx *ctx, const char *name, const Body &body) {
    std::lock_guard guard(whole(ctx).busy);
    if (int32_t e = check(cudaSetDevice(ctx->device), name)) return e;
    try {
        return body(full(ctx));
    } catch (const std::bad_alloc &) {
        return fail(PK_OOM, "%s: host memory is exhausted", name);
    }
}

}  // namespace

extern "C" {

int32_t pk_part(pk_ctx *ctx, int32_t n_processors, pk_ctx **out) {
    if (!ctx || !out) return fail(PK_BAD_ARG, "part: %s is absent", !ctx ? "context" : "out");
    *out = nullptr;
    return with_busy(ctx, "part", [&](FullContext &c) { return part(c, n_processors, out); });
}

int32_t pk_give_way(pk_ctx *ctx, int32_t is_on) {
    if (!ctx) return fail(PK_BAD_ARG, "give_way: context is absent");
    return with_busy(ctx, "give_way", [&](FullContext &c) { return give_way(c, is_on); });
}

}  // extern "C"
