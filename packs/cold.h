/* cold.h - the part of the kernel pack ABI by which the host computes some of the experts that a device lacks. It belongs to pack.h, as rare.h does: one digest covers all.
 */
#ifndef PK_COLD_H
#define PK_COLD_H
#include "pack.h"

typedef struct pk_cold_config {
    int32_t n_threads;  /* 0: one per allowed processor but two */
    int32_t takes_all;  /* 1: the host computes all that is missing, whatever that takes */
} pk_cold_config;

/* What is known of it. Microseconds, measured when the first program was loaded, copies and threads both busy: of an expert over the link, of an
 * expert on the host beside row_us for each of its rows, and of asking at all. n_threads 0: there are none. */
typedef struct pk_cold {
    int32_t n_threads;
    int32_t n_layers;      /* whose experts the host can compute */
    uint64_t n_computed;   /* experts that it computed */
    float copy_us;
    float expert_us;
    float row_us;
    float ask_us;
    char isa[16];
} pk_cold;

#ifdef __cplusplus
extern "C" {
#endif
/* From here on programs that are loaded may leave experts of PK_OP_EXPERTS_FETCHED to threads of the host, in steps of at most PK_COLD_TOKENS tokens: some of
 * those that the step chose and the device lacks, so many that copies of the others take as long. They get no slot; their part of y is added after
 * everything else, so that numbers depend, in their last bits, on what was where. Threads sleep between steps. A pack may have none of it (PK_UNSUPPORTED).
 * PK_TIMEOUT from pk_wait: the host did not compute its part; that step's numbers are wrong, and later steps copy everything. */
#define PK_COLD_TOKENS 16
PK_API int32_t pk_cold_open(pk_ctx *ctx, const pk_cold_config *config);
PK_API int32_t pk_cold_facts(pk_ctx *ctx, pk_cold *out);
#ifdef __cplusplus
}
#endif

#endif
