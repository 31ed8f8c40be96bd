// A device in two parts (packs/beside.h): green contexts over the same memory, each with multiprocessors of its own.
//
// A part is a context with a stream of its own. What it left, the rest, is a context to capture graphs with: they run on its multiprocessors
// whatever stream they are launched on, so that steps of the context that was parted stay in order on its one stream, whichever graphs they are.
// Blocks of many kernels wait for each other and count on all being resident at once, which is so while the multiprocessors that they may have
// run nothing but one launch after the other. So steps on the rest and steps of the part run at the same time, but steps on all multiprocessors
// and steps of the part take turns: of two such launches on the same ones neither might ever be whole.
#pragma once
#include "context.h"

namespace pk {

bool is_part(const pk_ctx *ctx);
// Null: ctx was not parted.
pk_ctx *rest_of(const pk_ctx *ctx);
// Steps of ctx are to run on the rest.
bool gives_way(const pk_ctx *ctx);

// Around what launches kernels of a step on the stream of ctx; on_rest: graphs that were captured with the rest. Nothing where ctx was not parted.
int32_t begin_turn(pk_ctx *ctx, bool on_rest);
int32_t end_turn(pk_ctx *ctx);
// Kernels that are no graph: between these they are launched on the rest's own stream, in order with that of ctx.
int32_t fork_rest(pk_ctx *ctx);
int32_t join_rest(pk_ctx *ctx);

// Clusters of n_blocks blocks of a kernel that run at once on the multiprocessors of a context, which asks once (cluster_launch.h).
int32_t most_clusters(pk_ctx *ctx, const char *name, const void *kernel, int n_blocks, int n_threads, int n_bytes, int *n);
// A stream to ask of occupancy with, which no graph is captured on; null: that of the device.
cudaStream_t stream_of_questions(const pk_ctx *ctx);

}  // namespace pk
