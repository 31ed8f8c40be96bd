// Repacking of weights: what src/repack.cu offers to the context.
#pragma once
#include "context.h"

namespace pk {

struct RepackArguments {
    const uint8_t *source;        // rows of blocks
    const uint8_t *group_scales;  // beside the elements (safetensors) or null (GGUF blocks carry their own)
    uint8_t *out;
    int64_t row_bytes, scale_cols, n_rows, cols;
};

// Two pinned buffers and their device twins; free[i] is recorded when the device is done with buffer i.
struct RepackBuffers {
    int64_t n_bytes = 0;
    void *host[2] = {}, *device[2] = {};
    cudaEvent_t free[2] = {};
};

// What `source` becomes. PK_UNSUPPORTED or PK_BAD_ARG with one sentence.
int32_t describe(const pk_source &source, Packed *out);

int32_t repack(pk_ctx *ctx, const pk_source &source, uint64_t device, const Packed &packed, RepackBuffers &buffers);

}  // namespace pk
