/* beside.h - the part of the kernel pack ABI by which one part of a device reads a long prompt while the rest goes on with other steps. It belongs to pack.h, as rare.h does: one digest covers all.
 */
#ifndef PK_BESIDE_H
#define PK_BESIDE_H
#include "pack.h"

#ifdef __cplusplus
extern "C" {
#endif
/* Parts the device: *out is a context over the memory and the weights of ctx, with processors of its own, n_processors of them or the nearest number that can be parted from the others (1 at least; pk_get_facts says how many). To be done once, before programs of ctx are
 * loaded, and not in a context of a part. Programs of *out run beside those of ctx: pk_step copies the input, enqueues and returns on every pack, and one step may be on its way; one that failed is told by the next pk_wait. Memory is taken and given back by ctx alone.
 * The state of such a program has arrays of its own for what a step lays out (row_slot to sample_logprob, workspace, results, top, done) and shares what belongs to slots; a slot is in steps of one of both at a time, and a step sees what steps of the other left that
 * were done when it was given. Closed before ctx. PK_UNSUPPORTED: this device, or a context that is_invariant, is not parted. */
PK_API int32_t pk_part(pk_ctx *ctx, int32_t n_processors, pk_ctx **out);
/* From the next step on steps of ctx, which was parted, run on the processors that the part left (is_on 1), or on all of them again (0). They stay in order. */
PK_API int32_t pk_give_way(pk_ctx *ctx, int32_t is_on);
#ifdef __cplusplus
}
#endif

#endif
