// Repacking of weights: what src/repack.cu offers to the context.
#pragma once
#include "context.h"

namespace pk {

struct RepackArguments {
    const uint8_t *source;        // rows of blocks
    const uint8_t *group_scales;  // beside the elements (safetensors) or null (GGUF blocks carry their own)
    uint8_t *out;
    int64_t row_bytes, scale_cols, n_rows, cols;
    int32_t block_bytes;  // 0: what the format has; of Q4_Z
};

// Two pinned buffers and their device twins; free[i] is recorded when the device is done with buffer i. whole: where a weight
// becomes what it is before it goes to host memory.
struct RepackBuffers {
    int64_t n_bytes = 0, whole_bytes = 0;
    void *host[2] = {}, *device[2] = {}, *whole = nullptr;
    cudaEvent_t free[2] = {};
};

// How this pack stores a format: F32 as BF16; Q4_Z, exactly, as Q5_0 with the codes q - z + 16.
inline int32_t stored_format(int32_t format) { return format == PK_F32 ? PK_BF16 : format == PK_Q4_Z ? PK_Q5_0 : format; }

// What `source` becomes. PK_UNSUPPORTED or PK_BAD_ARG with one sentence.
int32_t describe(const pk_source &source, Packed *out);

// To device memory, or to pinned host memory by way of the device.
int32_t repack(pk_ctx *ctx, const pk_source &source, uint64_t address, const Packed &packed, RepackBuffers &buffers);

}  // namespace pk
