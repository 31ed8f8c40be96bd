/* copies.h - the part of the kernel pack ABI that tells the host what copies have come. It belongs to pack.h, as rare.h does: one digest covers all.
 */
#ifndef PK_COPIES_H
#define PK_COPIES_H
#include "pack.h"

#ifdef __cplusplus
extern "C" {
#endif
/* Copies between device and pinned memory since the context was opened: how many pk_copy was given, and how many of them are done with all that were given before.
 * Only then may the host read what they brought to it, or write over what they took. With run_ahead 0 both are the same. */
PK_API int32_t pk_copied(pk_ctx *ctx, uint64_t *given, uint64_t *done);
#ifdef __cplusplus
}
#endif

#endif
