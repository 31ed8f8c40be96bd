// A program's records as launches (src/enqueue.cu): one by one, or several by one kernel where there is one for them.
#pragma once
#include "program.h"

namespace pk {

// `shares`: rows may begin with the same pages. Launches follow each other; kernels that gain by a head start ask for it themselves (LOG.md, entry 6, N19).
Launch launch_of(pk_program &p, const pk_program::View &view, int32_t max_tokens, int32_t max_samples, bool decode_only, bool shares);
// Enqueues records [first, end), without the two ends of a step when with_ends is false. passes: gets the nodes of passes over shared prefixes.
int32_t enqueue(pk_program &p, const pk_program::View &view, const Launch &l, int64_t first, int64_t end, bool with_ends, std::vector<cudaGraphNode_t> *passes = nullptr);
// Enqueues record i. l: of the records before it; a record of a pool changes whose pages the next ones use.
int32_t launch_next(pk_program &p, Launch &l, int64_t i, std::vector<cudaGraphNode_t> *passes = nullptr);
// Launches what decode attention of a step takes first, where a step begins: attention may begin before the launch in front of it has ended, but not before the embedding has begun, which waits for this.
int32_t launch_first_work(const pk_program &p, const Launch &l, int64_t i);
inline bool is_end(const Record &r) { return r.op == PK_OP_PREPARE || r.op == PK_OP_COMMIT; }
// The node that the next one of a capture will depend on, or null.
cudaGraphNode_t last_node(cudaStream_t stream);

}  // namespace pk
