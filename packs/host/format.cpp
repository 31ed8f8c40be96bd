// Names and sizes of the formats in pack.h.
#include "format.h"

#include <cstdio>

#include "../pack.h"

namespace pk {
namespace {

constexpr Format kFormats[] = {
    {PK_F32, "f32", 1, 4},       {PK_F16, "f16", 1, 2},       {PK_BF16, "bf16", 1, 2},     {PK_FP8_E4M3, "fp8_e4m3", 1, 1},
    {PK_FP8_E5M2, "fp8_e5m2", 1, 1}, {PK_Q8_0, "q8_0", 32, 34},   {PK_Q4_0, "q4_0", 32, 18},   {PK_Q4_1, "q4_1", 32, 20},
    {PK_Q5_0, "q5_0", 32, 22},   {PK_Q5_1, "q5_1", 32, 24},   {PK_Q2_K, "q2_k", 256, 84},  {PK_Q3_K, "q3_k", 256, 110},
    {PK_Q4_K, "q4_k", 256, 144}, {PK_Q5_K, "q5_k", 256, 176}, {PK_Q6_K, "q6_k", 256, 210}, {PK_IQ4_NL, "iq4_nl", 32, 18},
    {PK_IQ4_XS, "iq4_xs", 256, 136}, {PK_MXFP4, "mxfp4", 32, 17}, {PK_NVFP4, "nvfp4", 64, 36}, {PK_Q4_Z, "q4_z", 32, 20}, {PK_I32, "i32", 1, 4},
    {PK_U8, "u8", 1, 1},
};

}  // namespace

const Format *find_format(int32_t id) {
    for (const Format &format : kFormats)
        if (format.id == id) return &format;
    return nullptr;
}

const char *format_name(int32_t id) {
    if (const Format *format = find_format(id)) return format->name;
    thread_local char unknown[32];
    std::snprintf(unknown, sizeof unknown, "format %d", id);
    return unknown;
}

int64_t row_bytes(const Format &format, int64_t cols) {
    if (cols % format.block_elements) return -1;
    return cols / format.block_elements * format.block_bytes;
}

void list_formats(bool (*holds)(int32_t), const char *separator, const char *quote, char *out, int64_t n) {
    int64_t at = 0;
    if (n > 0) out[0] = 0;
    for (const Format &format : kFormats) {
        if (!holds(format.id) || at >= n) continue;
        int written = std::snprintf(out + at, n - at, "%s%s%s%s", at ? separator : "", quote, format.name, quote);
        at += written > 0 ? written : 0;
    }
}

}  // namespace pk
