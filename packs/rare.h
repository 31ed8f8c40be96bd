/* rare.h - the part of the kernel pack ABI that few families need. It belongs to pack.h: one digest covers both, and a pack may have
 * none of these ops (it says so when a program is loaded). They stand apart so that a new one does not make every unit of every pack stale.
 */
#ifndef PK_RARE_H
#define PK_RARE_H
#include "pack.h"

typedef enum pk_rare_op {
    PK_OP_SOFTPLUS = 64, /* x times the softplus of another operand */
    PK_OP_WEIGH = 65     /* what chosen experts count, where that is not what they were chosen by */
} pk_rare_op;

/* out = x * softplus(g), softplus(v) = log(1 + exp(v)); g has n columns, each of which counts for N / n neighbours of x. */
typedef struct pk_op_softplus {
    int32_t op;
    int32_t size;
    pk_tensor x;    /* [T,N] */
    pk_tensor g;    /* [T,n] */
    pk_tensor out;  /* as x; may be x */
} pk_op_softplus;

/* weights[t, i] = (sigmoid(logits[t, e]), else weights[t, i]) * scales[e], e = ids[t, i]; with logits and is_normalised the sigmoids of a
 * token are divided by their sum before. One of logits and scales may be absent. */
typedef struct pk_op_weigh {
    int32_t op;
    int32_t size;
    pk_tensor ids;      /* [T,k] i32 */
    pk_tensor weights;  /* [T,k] f32 */
    pk_tensor logits;   /* [T,E] f32, or absent */
    pk_tensor scales;   /* [1,E] f32, or absent */
    int32_t is_normalised;
    int32_t reserved;
} pk_op_weigh;

#endif
