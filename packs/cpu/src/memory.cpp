// Memory of the CPU pack: small blocks from the C library, large ones and reserved ranges from mmap with huge pages.
#include "memory.h"

#include <errno.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace pk {
namespace {

constexpr int64_t kLargeBytes = 1 << 20;
constexpr uintptr_t kPageBytes = 4096;

struct Block {
    void *start;      // what was mapped or allocated
    int64_t n_bytes;  // of the mapping; 0 when it came from the C library
};

std::mutex lock;
std::map<uint64_t, Block> &blocks() {
    static auto *map = new std::map<uint64_t, Block>;
    return *map;
}
std::map<uint64_t, int64_t> &ranges() {
    static auto *map = new std::map<uint64_t, int64_t>;
    return *map;
}

int64_t first_number(const char *path, const char *key) {
    FILE *file = std::fopen(path, "re");
    if (!file) return -1;
    char line[256];
    int64_t value = -1;
    size_t n = std::strlen(key);
    while (std::fgets(line, sizeof line, file)) {
        long long number;
        if (std::strncmp(line, key, n) == 0 && std::sscanf(line + n, "%lld", &number) == 1) {
            value = number;
            break;
        }
    }
    std::fclose(file);
    return value;
}

// Puts real memory behind [start, start + n_bytes). False when the system has none.
bool populate(void *start, int64_t n_bytes) {
    madvise(start, n_bytes, MADV_HUGEPAGE);
    for (;;) {
        if (madvise(start, n_bytes, MADV_POPULATE_WRITE) == 0) return true;
        if (errno == EAGAIN || errno == EINTR) continue;
        if (errno != EINVAL) return false;
        break;
    }
    // Kernels before 5.14: touch each page.
    for (int64_t i = 0; i < n_bytes; i += kPageBytes) static_cast<volatile char *>(start)[i] = 0;
    return true;
}

int32_t out_of_memory(int64_t n_bytes) {
    int64_t total, available;
    memory_sizes(&total, &available);
    return fail(PK_OOM, "%lld bytes were asked for, %lld of %lld are free", static_cast<long long>(n_bytes), static_cast<long long>(available),
                static_cast<long long>(total));
}

bool is_available(int64_t n_bytes) {
    int64_t total, available;
    memory_sizes(&total, &available);
    return n_bytes <= available;
}

int32_t alloc_large(int64_t n_bytes, uint64_t *out, Block *block) {
    if (!is_available(n_bytes)) return out_of_memory(n_bytes);
    int64_t mapped = n_bytes + kGranuleBytes;
    void *start = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return out_of_memory(n_bytes);
    auto at = (reinterpret_cast<uintptr_t>(start) + kGranuleBytes - 1) / kGranuleBytes * kGranuleBytes;
    uintptr_t end = (at + n_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    uintptr_t mapped_end = reinterpret_cast<uintptr_t>(start) + mapped;
    if (at > reinterpret_cast<uintptr_t>(start)) munmap(start, at - reinterpret_cast<uintptr_t>(start));
    if (mapped_end > end) munmap(reinterpret_cast<void *>(end), mapped_end - end);
    *block = {reinterpret_cast<void *>(at), static_cast<int64_t>(end - at)};
    if (!populate(block->start, block->n_bytes)) {
        munmap(block->start, block->n_bytes);
        return out_of_memory(n_bytes);
    }
    *out = at;
    return PK_OK;
}

// The reserved range that holds [address, address + n_bytes), checked against the granule.
int32_t find_range(const char *what, uint64_t address, int64_t n_bytes) {
    auto at = ranges().upper_bound(address);
    if (at == ranges().begin()) return fail(PK_BAD_ARG, "%s: address %#llx is in no reserved range", what, static_cast<unsigned long long>(address));
    --at;
    if (n_bytes < 0 || address - at->first + n_bytes > static_cast<uint64_t>(at->second))
        return fail(PK_BAD_ARG, "%s: %lld bytes at offset %lld leave the reserved range of %lld bytes", what, static_cast<long long>(n_bytes),
                    static_cast<long long>(address - at->first), static_cast<long long>(at->second));
    if ((address - at->first) % kGranuleBytes || n_bytes % kGranuleBytes)
        return fail(PK_BAD_ARG, "%s: offset %lld and size %lld must be multiples of %lld bytes", what, static_cast<long long>(address - at->first),
                    static_cast<long long>(n_bytes), static_cast<long long>(kGranuleBytes));
    return PK_OK;
}

}  // namespace

void memory_sizes(int64_t *total_bytes, int64_t *free_bytes) {
    int64_t total = first_number("/proc/meminfo", "MemTotal:"), available = first_number("/proc/meminfo", "MemAvailable:");
    *total_bytes = total > 0 ? total * 1024 : 0;
    *free_bytes = available > 0 ? available * 1024 : *total_bytes;
    int64_t limit = first_number("/sys/fs/cgroup/memory.max", ""), used = first_number("/sys/fs/cgroup/memory.current", "");
    if (limit > 0 && used >= 0) {
        if (limit < *total_bytes) *total_bytes = limit;
        int64_t cached = first_number("/sys/fs/cgroup/memory.stat", "file ");
        int64_t left = limit - used + (cached > 0 ? cached : 0);
        if (left < *free_bytes) *free_bytes = left > 0 ? left : 0;
    }
}

int32_t memory_alloc(Context &context, int64_t n_bytes, uint64_t *out) {
    if (n_bytes < 0) return fail(PK_BAD_ARG, "alloc: %lld bytes", static_cast<long long>(n_bytes));
    Block block{nullptr, 0};
    if (n_bytes >= kLargeBytes) {
        if (int32_t status = alloc_large(n_bytes, out, &block)) return status;
    } else {
        int64_t rounded = (n_bytes > 0 ? n_bytes + 63 : 64) / 64 * 64;
        block.start = std::aligned_alloc(64, rounded);
        if (!block.start) return out_of_memory(n_bytes);
        std::memset(block.start, 0, rounded);
        *out = reinterpret_cast<uintptr_t>(block.start);
    }
    std::lock_guard guard(lock);
    blocks()[*out] = block;
    context.n_allocations += 1;
    context.allocated_bytes += n_bytes;
    return PK_OK;
}

int32_t memory_free(Context &, uint64_t address) {
    if (address == 0) return PK_OK;
    std::lock_guard guard(lock);
    auto at = blocks().find(address);
    if (at == blocks().end()) return fail(PK_BAD_ARG, "free: nothing was allocated at %#llx", static_cast<unsigned long long>(address));
    if (at->second.n_bytes)
        munmap(at->second.start, at->second.n_bytes);
    else
        std::free(at->second.start);
    blocks().erase(at);
    return PK_OK;
}

int32_t memory_reserve(Context &, int64_t n_bytes, uint64_t *out) {
    if (n_bytes <= 0) return fail(PK_BAD_ARG, "reserve: %lld bytes", static_cast<long long>(n_bytes));
    // One granule more, so that the range can begin at a huge page.
    int64_t mapped = n_bytes + kGranuleBytes;
    void *start = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return fail(PK_OOM, "reserve: the system refuses an address range of %lld bytes", static_cast<long long>(n_bytes));
    auto first = reinterpret_cast<uintptr_t>(start);
    uintptr_t at = (first + kGranuleBytes - 1) / kGranuleBytes * kGranuleBytes;
    if (at > first) munmap(start, at - first);
    uintptr_t end = (at + n_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    if (first + mapped > end) munmap(reinterpret_cast<void *>(end), first + mapped - end);
    std::lock_guard guard(lock);
    ranges()[at] = n_bytes;
    *out = at;
    return PK_OK;
}

int32_t memory_attach(Context &context, uint64_t address, int64_t n_bytes) {
    std::lock_guard guard(lock);
    if (int32_t status = find_range("attach", address, n_bytes)) return status;
    if (n_bytes == 0) return PK_OK;
    if (!is_available(n_bytes)) return out_of_memory(n_bytes);
    auto *start = reinterpret_cast<void *>(address);
    if (mprotect(start, n_bytes, PROT_READ | PROT_WRITE) != 0) return out_of_memory(n_bytes);
    if (!populate(start, n_bytes)) {
        madvise(start, n_bytes, MADV_DONTNEED);
        mprotect(start, n_bytes, PROT_NONE);
        return out_of_memory(n_bytes);
    }
    context.n_allocations += 1;
    context.allocated_bytes += n_bytes;
    return PK_OK;
}

int32_t memory_detach(Context &context, uint64_t address, int64_t n_bytes) {
    std::lock_guard guard(lock);
    if (int32_t status = find_range("detach", address, n_bytes)) return status;
    if (n_bytes == 0) return PK_OK;
    auto *start = reinterpret_cast<void *>(address);
    madvise(start, n_bytes, MADV_DONTNEED);
    if (mprotect(start, n_bytes, PROT_NONE) != 0) return fail(PK_DEVICE, "detach: the system refuses to protect %lld bytes", static_cast<long long>(n_bytes));
    context.allocated_bytes -= n_bytes;
    return PK_OK;
}

int32_t memory_release(Context &, uint64_t address) {
    if (address == 0) return PK_OK;
    std::lock_guard guard(lock);
    auto at = ranges().find(address);
    if (at == ranges().end()) return fail(PK_BAD_ARG, "release: nothing was reserved at %#llx", static_cast<unsigned long long>(address));
    munmap(reinterpret_cast<void *>(address), at->second);
    ranges().erase(at);
    return PK_OK;
}

}  // namespace pk
