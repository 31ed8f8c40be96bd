// Device and pinned memory, reserved ranges with memory attached in granules, copies.
#include <algorithm>
#include <cstring>

#include "../include/memory.h"

namespace pk {
namespace {

// Attaching costs tens of microseconds a granule whatever its size, so granules are larger than the driver's 2 MiB.
constexpr int64_t kGranuleBytes = 32 << 20;

int32_t driver_check(CUresult result, const char *what) {
    if (result == CUDA_SUCCESS) return PK_OK;
    return fail(result == CUDA_ERROR_OUT_OF_MEMORY ? PK_OOM : PK_DEVICE, "%s: CUDA driver error %d", what, static_cast<int>(result));
}

template <class F>
bool entry(const char *name, F *out) {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found) != cudaSuccess || found != cudaDriverEntryPointSuccess) {
        cudaGetLastError();
        return false;
    }
    *out = reinterpret_cast<F>(function);
    return true;
}

CUmemAllocationProp properties(const pk_ctx &ctx) {
    CUmemAllocationProp p = {};
    p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    p.location.id = ctx.device;
    return p;
}

}  // namespace

int32_t memory_open(pk_ctx &ctx) {
    Driver &d = ctx.driver;
    const bool all = entry("cuMemAddressReserve", &d.reserve) && entry("cuMemAddressFree", &d.address_free) && entry("cuMemCreate", &d.create) &&
                     entry("cuMemRelease", &d.release) && entry("cuMemMap", &d.map) && entry("cuMemUnmap", &d.unmap) && entry("cuMemSetAccess", &d.set_access) &&
                     entry("cuMemGetAllocationGranularity", &d.granularity) && entry("cuTensorMapEncodeTiled", &d.encode_tiled);
    if (!all) return fail(PK_DEVICE, "open: the driver lacks virtual memory or tensor maps; version 580 or newer is needed");
    ctx.granule_bytes = kGranuleBytes;
    return PK_OK;
}

int32_t memory_alloc(pk_ctx &ctx, int32_t memory, int64_t n_bytes, uint64_t *out) {
    void *p = nullptr;
    if (n_bytes < 0) return fail(PK_BAD_ARG, "alloc: %lld bytes", (long long)n_bytes);
    const int64_t size = std::max<int64_t>(n_bytes, 256);
    if (memory == PK_MEMORY_PINNED) {
        if (int32_t e = check(cudaHostAlloc(&p, size, cudaHostAllocPortable | cudaHostAllocMapped), "alloc pinned")) return e;
        std::memset(p, 0, size);
    } else {
        if (cudaError_t error = cudaMalloc(&p, size)) {
            cudaGetLastError();
            size_t free = 0, total = 0;
            cudaMemGetInfo(&free, &total);
            return fail(error == cudaErrorMemoryAllocation ? PK_OOM : PK_DEVICE, "alloc: %lld bytes of device memory are wanted, %lld of %lld are free", (long long)size, (long long)free, (long long)total);
        }
        if (int32_t e = check(cudaMemsetAsync(p, 0, size, ctx.stream), "alloc")) return e;
        if (int32_t e = check(cudaStreamSynchronize(ctx.stream), "alloc")) return e;
    }
    ctx.n_allocations += 1;
    ctx.allocated_bytes += size;
    *out = reinterpret_cast<uint64_t>(p);
    return PK_OK;
}

int32_t memory_free(pk_ctx &ctx, int32_t memory, uint64_t address) {
    if (address == 0) return PK_OK;
    (void)ctx;
    if (memory == PK_MEMORY_PINNED) return check(cudaFreeHost(reinterpret_cast<void *>(address)), "free");
    return check(cudaFree(reinterpret_cast<void *>(address)), "free");
}

int32_t memory_reserve(pk_ctx &ctx, int64_t n_bytes, uint64_t *out) {
    CUdeviceptr p = 0;
    const int64_t size = std::max<int64_t>(kGranuleBytes, (n_bytes + kGranuleBytes - 1) / kGranuleBytes * kGranuleBytes);
    if (int32_t e = driver_check(ctx.driver.reserve(&p, size, kGranuleBytes, 0, 0), "reserve")) return e;
    ctx.reserved[p] = size;
    *out = p;
    return PK_OK;
}

int32_t memory_attach(pk_ctx &ctx, uint64_t address, int64_t n_bytes) {
    if (address % kGranuleBytes || n_bytes % kGranuleBytes || n_bytes < 0)
        return fail(PK_BAD_ARG, "attach: %lld bytes at %#llx are no multiples of %lld", (long long)n_bytes, (unsigned long long)address, (long long)kGranuleBytes);
    const CUmemAllocationProp p = properties(ctx);
    CUmemAccessDesc access = {};
    access.location = p.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    for (int64_t done = 0; done < n_bytes; done += kGranuleBytes) {
        CUmemGenericAllocationHandle handle = 0;
        if (int32_t e = driver_check(ctx.driver.create(&handle, kGranuleBytes, &p, 0), "attach")) return e;
        int32_t e = driver_check(ctx.driver.map(address + done, kGranuleBytes, 0, handle, 0), "attach");
        if (!e) e = driver_check(ctx.driver.set_access(address + done, kGranuleBytes, &access, 1), "attach");
        if (e) {
            ctx.driver.release(handle);
            return e;
        }
        ctx.granules[address + done] = {kGranuleBytes, handle};
        ctx.n_allocations += 1;
        ctx.allocated_bytes += kGranuleBytes;
    }
    return PK_OK;
}

int32_t memory_detach(pk_ctx &ctx, uint64_t address, int64_t n_bytes) {
    if (int32_t e = check(cudaStreamSynchronize(ctx.stream), "detach")) return e;
    for (uint64_t at = address; at < address + n_bytes; at += kGranuleBytes) {
        auto found = ctx.granules.find(at);
        if (found == ctx.granules.end()) return fail(PK_BAD_ARG, "detach: no memory is attached at %#llx", (unsigned long long)at);
        if (int32_t e = driver_check(ctx.driver.unmap(at, kGranuleBytes), "detach")) return e;
        ctx.driver.release(found->second.second);
        ctx.granules.erase(found);
    }
    return PK_OK;
}

int32_t memory_release(pk_ctx &ctx, uint64_t address) {
    auto found = ctx.reserved.find(address);
    if (found == ctx.reserved.end()) return fail(PK_BAD_ARG, "release: nothing is reserved at %#llx", (unsigned long long)address);
    const uint64_t end = address + found->second;
    for (auto granule = ctx.granules.lower_bound(address); granule != ctx.granules.end() && granule->first < end;) {
        const uint64_t at = (granule++)->first;
        if (int32_t e = memory_detach(ctx, at, kGranuleBytes)) return e;
    }
    if (int32_t e = driver_check(ctx.driver.address_free(address, found->second), "release")) return e;
    ctx.reserved.erase(found);
    return PK_OK;
}

}  // namespace pk
