// Names and sizes of the formats in pack.h. runner/paddock_runner/formats/table.py has the same list (a test compares).
#pragma once
#include <cstdint>

namespace pk {

struct Format {
    int32_t id;
    const char *name;
    int32_t block_elements;
    int32_t block_bytes;
};

// nullptr when pack.h has no such number.
const Format *find_format(int32_t id);

// Name for sentences: "q4_k", or "format 99".
const char *format_name(int32_t id);

// Bytes of a row of `cols` elements as a checkpoint stores it; -1 when cols is not a multiple of the block.
int64_t row_bytes(const Format &format, int64_t cols);

// Writes the names of the formats for which `holds` is true as "f32, f16, ..." into out.
void list_formats(bool (*holds)(int32_t), const char *separator, const char *quote, char *out, int64_t n);

}  // namespace pk
