// Which instruction level this machine really runs: flags are asked, then a child process proves them.
#pragma once
#include <cstdint>

#include "context.h"

namespace pk {

// The highest proved level, at most `max_isa` (0: no limit). 0 when not even AVX2 works. Proofs run once per process.
int32_t proved_isa(int32_t max_isa);

const char *arch_name(Isa isa);

// Brand string of the processor, at most n - 1 bytes.
void processor_name(char *out, int32_t n);

}  // namespace pk
