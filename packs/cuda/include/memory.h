// Memory of a context: what src/memory.cu gives to the C API. Statuses and sentences as in pack.h.
#pragma once
#include "context.h"

namespace pk {

// A function of the driver, of the interface of so old a version; false: it has none.
template <class F>
bool driver_entry(const char *name, int version, F *out) {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found) != cudaSuccess || found != cudaDriverEntryPointSuccess) {
        cudaGetLastError();
        return false;
    }
    *out = reinterpret_cast<F>(function);
    return true;
}

int32_t memory_open(pk_ctx &ctx);  // finds the driver's entry points
int32_t memory_alloc(pk_ctx &ctx, int32_t memory, int64_t n_bytes, uint64_t *out);
int32_t memory_free(pk_ctx &ctx, int32_t memory, uint64_t address);
int32_t memory_reserve(pk_ctx &ctx, int64_t n_bytes, uint64_t *out);
int32_t memory_attach(pk_ctx &ctx, uint64_t address, int64_t n_bytes);
int32_t memory_detach(pk_ctx &ctx, uint64_t address, int64_t n_bytes);
int32_t memory_release(pk_ctx &ctx, uint64_t address);

}  // namespace pk
