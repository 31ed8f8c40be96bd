// What attention.cu asks of the kernels for wide heads, latent attention and encoders (wide.cu), and of the plain one (plain.cu).
#pragma once
#include "attention.cuh"

namespace pk {

// Bytes of scratch behind `partial`.
int64_t attention_wide_scratch(const pk_ctx *ctx);
// Heads up to 512, in multiples of eight; latent: up to 576 with values of up to 512 that begin at most 64 behind the keys' start.
int32_t launch_attention_wide(const Launch &l, const AttentionArguments &a, bool is_latent);
// Any heads up to 1,024; slow.
int32_t launch_attention_plain(const Launch &l, const AttentionArguments &a, bool is_latent);

}  // namespace pk
