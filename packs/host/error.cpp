// The error sentence of the calling thread.
#include "error.h"

#include <cstdarg>
#include <cstdio>

namespace pk {
namespace {
thread_local char sentence[512];
}

int32_t fail(int32_t status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    return status;
}

const char *last_error() { return sentence; }

void clear_error() { sentence[0] = 0; }

}  // namespace pk
