// The error sentence of the calling thread: what pk_last_error() returns.
#pragma once
#include <cstdint>

namespace pk {

// Stores one sentence (printf style) for the calling thread and returns `status`, so that callers write
// `return fail(PK_BAD_ARG, "...", ...)`. Never throws, never allocates; longer sentences are cut at 511 bytes.
int32_t fail(int32_t status, const char *format, ...) __attribute__((format(printf, 2, 3)));

const char *last_error();
void clear_error();

}  // namespace pk
