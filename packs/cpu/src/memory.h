// Memory of the CPU pack. "Device" memory is host memory: 64-byte aligned, zeroed, and really there when the call returns.
#pragma once
#include <cstdint>

#include "context.h"

namespace pk {

constexpr int64_t kGranuleBytes = 2 << 20;

int32_t memory_alloc(Context &context, int64_t n_bytes, uint64_t *out);
int32_t memory_free(Context &context, uint64_t address);
int32_t memory_reserve(Context &context, int64_t n_bytes, uint64_t *out);
int32_t memory_attach(Context &context, uint64_t address, int64_t n_bytes);
int32_t memory_detach(Context &context, uint64_t address, int64_t n_bytes);
int32_t memory_release(Context &context, uint64_t address);
// Memory of the machine, or of this process's control group when that is less.
void memory_sizes(int64_t *total_bytes, int64_t *free_bytes);

}  // namespace pk
