// Device and pinned memory, reserved ranges with memory attached in granules, copies.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "../include/memory.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace pk {
namespace {

// Attaching costs tens of microseconds a granule whatever its size, so granules are larger than the driver's 2 MiB.
constexpr int64_t kGranuleBytes = 32 << 20;

int32_t driver_check(CUresult result, const char *what) {
    if (result == CUDA_SUCCESS) return PK_OK;
    return fail(result == CUDA_ERROR_OUT_OF_MEMORY ? PK_OOM : PK_DEVICE, "%s: CUDA driver error %d", what, static_cast<int>(result));
}

CUmemAllocationProp properties(const pk_ctx &ctx) {
    CUmemAllocationProp p = {};
    p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    p.location.id = ctx.device;
    return p;
}

// Large pinned blocks: huge pages, made by several threads and then registered, take a third of the time that cudaHostAlloc does.
constexpr int64_t kLargeBytes = 64 << 20;
constexpr int kMostThreads = 16;

std::mutex lock;
std::map<uint64_t, int64_t> &large_blocks() {
    static auto *blocks = new std::map<uint64_t, int64_t>;
    return *blocks;
}

// Puts real memory behind [start, start + n_bytes), a multiple of the page. False when the system has none. Parts for which the system gives no thread are made by this one.
bool populate(uint8_t *start, int64_t n_bytes) {
    const int n = std::clamp<int>(std::thread::hardware_concurrency(), 1, kMostThreads);
    const int64_t part = (n_bytes / n + (2 << 20) - 1) & ~int64_t{(2 << 20) - 1};
    std::atomic<bool> is_there{true};
    const auto make = [&](int64_t at) {
        const int64_t size = std::min(part, n_bytes - at);
        while (madvise(start + at, size, MADV_POPULATE_WRITE)) {
            if (errno == EAGAIN || errno == EINTR) continue;
            if (errno != EINVAL) is_there = false;
            for (int64_t i = 0; errno == EINVAL && i < size; i += 4096) static_cast<volatile uint8_t *>(start + at)[i] = 0;  // kernels before 5.14
            return;
        }
    };
    std::vector<std::thread> threads;
    threads.reserve(kMostThreads + 1);
    for (int64_t at = 0; at < n_bytes; at += part) {
        try {
            threads.emplace_back(make, at);
        } catch (const std::system_error &) {
            make(at);
        }
    }
    for (std::thread &t : threads) t.join();
    return is_there;
}

int32_t alloc_large(int64_t n_bytes, void **out) {
    const int64_t size = (n_bytes + (2 << 20) - 1) & ~int64_t{(2 << 20) - 1};
    void *start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return fail(PK_OOM, "alloc: %lld bytes of pinned host memory are wanted, the system refuses the address range", (long long)n_bytes);
    madvise(start, size, MADV_HUGEPAGE);
    int32_t e = populate(static_cast<uint8_t *>(start), size) ? PK_OK : fail(PK_OOM, "alloc: %lld bytes of pinned host memory are wanted, the system has less", (long long)n_bytes);
    if (!e) e = check(cudaHostRegister(start, size, cudaHostRegisterPortable | cudaHostRegisterMapped), "alloc pinned");
    if (e) {
        munmap(start, size);
        return e;
    }
    std::lock_guard guard(lock);
    large_blocks()[reinterpret_cast<uint64_t>(start)] = size;
    *out = start;
    return PK_OK;
}

int32_t drop_granule(pk_ctx &ctx, std::map<uint64_t, std::pair<int64_t, CUmemGenericAllocationHandle>>::iterator granule) {
    if (int32_t e = driver_check(ctx.driver.unmap(granule->first, kGranuleBytes), "detach")) return e;
    ctx.driver.release(granule->second.second);
    ctx.granules.erase(granule);
    return PK_OK;
}

// Memory behind one granule, or nothing of it.
int32_t attach_granule(pk_ctx &ctx, uint64_t at) {
    if (ctx.granules.count(at)) return fail(PK_BAD_ARG, "attach: memory is attached at %#llx already", (unsigned long long)at);
    const CUmemAllocationProp p = properties(ctx);
    CUmemAccessDesc access = {};
    access.location = p.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CUmemGenericAllocationHandle handle = 0;
    if (int32_t e = driver_check(ctx.driver.create(&handle, kGranuleBytes, &p, 0), "attach")) return e;
    if (int32_t e = driver_check(ctx.driver.map(at, kGranuleBytes, 0, handle, 0), "attach")) {
        ctx.driver.release(handle);
        return e;
    }
    auto made = ctx.granules.emplace(at, std::pair{kGranuleBytes, handle}).first;
    if (int32_t e = driver_check(ctx.driver.set_access(at, kGranuleBytes, &access, 1), "attach")) {
        drop_granule(ctx, made);
        return e;
    }
    ctx.n_allocations += 1;
    ctx.allocated_bytes += kGranuleBytes;
    return PK_OK;
}

bool can_register(const pk_ctx &ctx) {
    int value = 0;
    return cudaDeviceGetAttribute(&value, cudaDevAttrCanUseHostPointerForRegisteredMem, ctx.device) == cudaSuccess && value;
}

}  // namespace

int32_t memory_open(pk_ctx &ctx) {
    Driver &d = ctx.driver;
    auto entry = [](const char *name, auto *out) { return driver_entry(name, 12000, out); };
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
    if (memory == PK_MEMORY_PINNED && size >= kLargeBytes && can_register(ctx)) {
        if (int32_t e = alloc_large(size, &p)) return e;
    } else if (memory == PK_MEMORY_PINNED) {
        if (int32_t e = check(cudaHostAlloc(&p, size, cudaHostAllocPortable | cudaHostAllocMapped), "alloc pinned")) return e;
        std::memset(p, 0, size);
    } else {
        if (cudaError_t error = cudaMalloc(&p, size)) {
            cudaGetLastError();
            size_t free = 0, total = 0;
            cudaMemGetInfo(&free, &total);
            return fail(error == cudaErrorMemoryAllocation ? PK_OOM : PK_DEVICE, "alloc: %lld bytes of device memory are wanted, %lld of %lld are free", (long long)size, (long long)free, (long long)total);
        }
        int32_t e = check(cudaMemsetAsync(p, 0, size, ctx.stream), "alloc");
        if (!e) e = check(cudaStreamSynchronize(ctx.stream), "alloc");
        if (e) {
            cudaFree(p);
            return e;
        }
    }
    ctx.n_allocations += 1;
    ctx.allocated_bytes += size;
    *out = reinterpret_cast<uint64_t>(p);
    return PK_OK;
}

int32_t memory_free(pk_ctx &ctx, int32_t memory, uint64_t address) {
    if (address == 0) return PK_OK;
    if (memory == PK_MEMORY_PINNED) {
        cudaStreamSynchronize(ctx.stream);  // a load that was given up may have left copies from or to it
        std::lock_guard guard(lock);
        if (auto found = large_blocks().find(address); found != large_blocks().end()) {
            void *start = reinterpret_cast<void *>(address);
            const int32_t e = check(cudaHostUnregister(start), "free");
            munmap(start, found->second);
            large_blocks().erase(found);
            return e;
        }
    }
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
    for (int64_t done = 0; done < n_bytes; done += kGranuleBytes)
        if (int32_t e = attach_granule(ctx, address + done)) {
            while (done > 0) drop_granule(ctx, ctx.granules.find(address + (done -= kGranuleBytes)));
            return e;
        }
    return PK_OK;
}

int32_t memory_detach(pk_ctx &ctx, uint64_t address, int64_t n_bytes) {
    if (int32_t e = check(cudaStreamSynchronize(ctx.stream), "detach")) return e;
    for (uint64_t at = address; at < address + n_bytes; at += kGranuleBytes) {
        auto found = ctx.granules.find(at);
        if (found == ctx.granules.end()) return fail(PK_BAD_ARG, "detach: no memory is attached at %#llx", (unsigned long long)at);
        if (int32_t e = drop_granule(ctx, found)) return e;
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
