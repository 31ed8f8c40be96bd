/* rare.h - the part of the kernel pack ABI that few families or few requests need. It belongs to pack.h: one digest covers both, and a pack
 * may have none of these ops (it says so when a program is loaded). They stand apart so that a new one does not make every unit of every pack stale.
 */
#ifndef PK_RARE_H
#define PK_RARE_H
#include "pack.h"

typedef enum pk_rare_op {
    PK_OP_SOFTPLUS = 64, /* x times the softplus of another operand */
    PK_OP_WEIGH = 65,    /* what chosen experts count, where that is not what they were chosen by */
    PK_OP_NGRAM = 66,    /* rows of a table that the last few tokens choose */
    PK_OP_STREAMS = 67,  /* one value for several residual streams, weighed by each stream's own likeness */
    PK_OP_DILATED = 68,  /* causal convolution over every few tokens */
    PK_OP_SPARSE = 69,   /* attention over the blocks of tokens that an index chooses */
    PK_OP_DELTA_SIGMOID = 70, /* a pk_op_delta whose output is gated by sigmoid(z) instead of silu(z) */
    PK_OP_KEEP = 71,          /* draft rows: what a layer with a state needs to take guesses back */
    PK_OP_SETTLE = 72,        /* draft rows: a gated delta net as it is after the guesses that were right */
    PK_OP_SHIFT = 73,         /* every token of the step becomes the one that follows it */
    PK_OP_GUESS = 74,         /* a guess at the token after the one just drawn */
    PK_OP_SETTLE_MAMBA = 75,  /* SETTLE for a pk_op_mamba */
    PK_OP_SETTLE_CONV = 76,   /* SETTLE for a pk_op_conv */
    PK_OP_EXPERTS_FETCHED = 77, /* a pk_op_experts whose matrices lie in host memory: those that are chosen are fetched */
    PK_OP_POOL = 78           /* which pages QKV and ATTENTION use from here on */
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

/* out[t] = the rows of a table, one for each of n = (n_tokens - 1) n_each parts of it, side by side. With x_k the token k positions before
 * t, or end_token when a token at 1 .. k before t is end_token or there is none: m = x_0 multipliers[0] ^ x_1 multipliers[1] ^ ... up to
 * x_(g-1) (64 bits, g = 2 .. n_tokens); part h of those n_each that belong to g has sizes[h] rows, of which row m % sizes[h] is taken.
 * Parts lie one after the other. The table is a stack of equal pieces of table.rows rows, table.stride bytes apart. */
typedef struct pk_op_ngram {
    int32_t op;
    int32_t size;
    pk_tensor table;         /* [V,D] packed: the first piece */
    pk_tensor out;           /* [T,n*D] */
    int64_t multipliers[8];  /* positive */
    int32_t sizes[64];
    int32_t n_tokens;        /* 2 to 8 */
    int32_t n_each;
    int32_t end_token;
    int32_t n_pieces;
} pk_op_ngram;

/* out[t, j] = sigmoid(sign(g) sqrt(max(|g|, 1e-6))) v[t], g = k[t, j] . q[t, j] / sqrt(M), for every stream j of M columns. */
typedef struct pk_op_streams {
    int32_t op;
    int32_t size;
    pk_tensor q;    /* [T,n*M] */
    pk_tensor k;    /* [T,n*M] */
    pk_tensor v;    /* [T,M] */
    pk_tensor out;  /* [T,n*M]; may be q or k */
} pk_op_streams;

/* out[t, c] = add[t, c] + silu(sum_i conv[c, i] x[t - (W - 1 - i) dilation, c]). The last (W - 1) dilation rows of x lie as f32 at
 * state.recurrent + slot * recurrent_stride + conv_offset; rows as in pk_op_delta. */
typedef struct pk_op_dilated {
    int32_t op;
    int32_t size;
    pk_tensor x;          /* [T,C] */
    pk_tensor conv;       /* [1,C*W] f32, channel after channel */
    pk_tensor add;        /* [T,C] */
    pk_tensor out;        /* [T,C]; may be add */
    int64_t conv_offset;  /* bytes, a multiple of 64 */
    int32_t conv_width;   /* W */
    int32_t dilation;
} pk_op_dilated;

/* Causal attention as in pk_op_attention over fewer tokens. Tokens form blocks of block_tokens, from position 0 on. A block's key is the
 * mean of its index keys (one head of index_width, where QKV stored them: at i_offset), normed by index_norm and rotated for its first
 * position; its score for a query is the sum over index_heads of max(index_q . key, 0). A query sees the n_blocks complete blocks of best score (the
 * earlier one when equal), and the tokens after the last complete block up to its own. index_q is normed and rotated already. */
typedef struct pk_op_sparse {
    int32_t op;
    int32_t size;
    pk_tensor q;           /* [T,H*D] */
    pk_tensor index_q;     /* [T,index_heads*index_width] */
    pk_tensor index_norm;  /* [1,index_width] f32 */
    pk_tensor frequency;   /* [1,rope_width/2] f32 */
    pk_tensor gains;       /* [1,H] f32, as in pk_op_attention, or absent */
    pk_tensor out;         /* [T,H*Dv] */
    int64_t k_offset;
    int64_t v_offset;
    int64_t i_offset;
    int32_t n_heads;
    int32_t n_kv_heads;
    int32_t head_width;
    int32_t v_width;
    int32_t kv_format;
    int32_t index_heads;
    int32_t index_width;
    int32_t block_tokens;
    int32_t n_blocks;
    int32_t rope_width;
    int32_t rope_layout;
    float rope_magnitude;
    float scale;
    float eps;
    int32_t parts;         /* pk_parts: QKV */
    int32_t reserved;
} pk_op_sparse;

/* Before a pk_op_delta, pk_op_mamba or pk_op_conv, for every draft row: the n_bytes of the slot's state from from_offset on are copied to kept_offset,
 * and the row's inputs (at most max_tokens) to rows_offset: max_tokens of [C] x, then of [H] b, then of [H] a, all f32. x: qkv, xbc, or a convolution's
 * three parts; b: or a mamba's dt. n_bytes is a multiple of 16. Score rows are no draft rows here: nothing of them is taken back. */
typedef struct pk_op_keep {
    int32_t op;
    int32_t size;
    pk_tensor x;    /* [T,C] */
    pk_tensor b;    /* [T,H] f32, or absent */
    pk_tensor a;    /* [T,H] f32, or absent */
    int64_t from_offset;
    int64_t n_bytes;
    int64_t kept_offset;
    int64_t rows_offset;
    int32_t max_tokens;
    int32_t reserved;
} pk_op_keep;

/* After COMMIT, for every draft row that advanced by fewer tokens than it ran: the state is what was kept, and the tokens by which the
 * row advanced run again, without output. delta: as it ran; the rest as in the pk_op_keep before it. */
typedef struct pk_op_settle {
    int32_t op;
    int32_t size;
    pk_op_delta delta;
    int64_t from_offset;
    int64_t n_bytes;
    int64_t kept_offset;
    int64_t rows_offset;
    int32_t max_tokens;
    int32_t reserved;
} pk_op_settle;

/* The same for a Mamba 2 layer. */
typedef struct pk_op_settle_mamba {
    int32_t op;
    int32_t size;
    pk_op_mamba mamba;
    int64_t from_offset;
    int64_t n_bytes;
    int64_t kept_offset;
    int64_t rows_offset;
    int32_t max_tokens;
    int32_t reserved;
} pk_op_settle_mamba;

/* The same for a gated short convolution. */
typedef struct pk_op_settle_conv {
    int32_t op;
    int32_t size;
    pk_op_conv conv;
    int64_t from_offset;
    int64_t n_bytes;
    int64_t kept_offset;
    int64_t rows_offset;
    int32_t max_tokens;
    int32_t reserved;
} pk_op_settle_conv;

/* After COMMIT: token_id[t] = the token at position token_position[t] + 1 of the slot's text, for what reads token_id after it. */
typedef struct pk_op_shift {
    int32_t op;
    int32_t size;
} pk_op_shift;

/* After COMMIT: tokens[slot][length + 1] = the largest logit (the lowest index of equals) after the row's last token, for every row that drew one
 * and whose text has room. A draft row of two tokens then checks it. What serves the guess alone, the records from number `first` on to this one, is left
 * out of a step in which every row has one token and none is a draft row. */
typedef struct pk_op_guess {
    int32_t op;
    int32_t size;
    pk_tensor logits;  /* [S,V] f32 */
    int64_t first;
} pk_op_guess;

/* Experts of a layer in host memory (pinned, made by pk_repack): the matrices of expert e lie within the n_bytes from home + e * stride on, in
 * the same places for every e. The device has n_slots places of stride bytes for experts that stay, and n_staging = E - n_slots at staging (a
 * multiple of stride from slots) for those that find no place in a step; layers may share these.
 * cache: i32 words, zeros before the first step: PK_CACHE_HEAD of them (word 0: steps; word 2: the step for which every expert without a slot was
 * copied to staging; word 14: how many more guesses were right than wrong, -4 to 64), slot + 1 of expert [E] (0: none), where an expert of the last step lay [E] (times stride from slots), where it was copied
 * to [E], copies of the last step [2E] (expert, where), expert + 1 of slot [n_slots], last step of slot [n_slots].
 * counts: host-visible u64 [5], written by every step: experts found on the device, copied to slots, copied to staging; steps; copied ahead. */
#define PK_CACHE_HEAD 16
typedef struct pk_expert_cache {
    uint64_t home;
    uint64_t slots;
    uint64_t staging;
    uint64_t cache;
    uint64_t counts;
    int64_t stride;     /* bytes, a multiple of 64 */
    int64_t n_bytes;    /* of an expert, at most stride */
    int32_t n_slots;
    int32_t n_staging;
    int32_t n_experts;  /* E */
    int32_t reserved;
} pk_expert_cache;

/* What `experts` says, with the three stacks in `here`, whose stride is theirs. A chosen expert that is nowhere on the device is copied,
 * lower ones first, to the slot that was not used for longest (the lower one of equals) of those without an expert that this step chose, else to
 * staging. So results never depend on what was where.
 * next: of the next such layer, whose staging is not this one's; home 0: there is none. Beside this layer's products and what follows until then,
 * experts go to it ahead: where the step's choices are at least four times its experts, all that have no slot, to empty slots and to staging; where the
 * step has at most PK_AHEAD_TOKENS tokens (and, while more guesses were wrong than right, in every sixteenth step only), the first n_most without a slot that `expected` names (column after column), to slots: those not used for longest
 * but not of experts that are named; a slot that was filled so counts as never used until its expert is chosen. */
#define PK_AHEAD_TOKENS 16
typedef struct pk_op_experts_fetched {
    int32_t op;
    int32_t size;
    pk_op_experts experts;
    pk_expert_cache here;
    pk_expert_cache next;
    pk_tensor expected;  /* [T,k] i32, or absent: nothing is expected */
    int32_t n_most;
    int32_t reserved;
} pk_op_experts_fetched;

/* From here on QKV and ATTENTION use these arrays instead of the state's of the same names, until the next such record; all 0: the state's again.
 * So layers with a window can keep their keys and values apart, in pages that are given back behind it: entries of page_table behind a slot's window
 * may name pages that others have by now. Page 0 is scratch there, too. All records of a program that are not 0 are the same; PREPARE fills their
 * token_page, and writes pk_page_write into their page_table whose `reserved` is PK_PAGE_OF_POOL. */
#define PK_PAGE_OF_POOL 1
typedef struct pk_op_pool {
    int32_t op;
    int32_t size;
    uint64_t kv;
    int64_t kv_page_stride;
    uint64_t page_table;
    uint64_t token_page;
} pk_op_pool;

/* ---- steps in two halves, for rows whose mask depends on the token before ---- */

/* In pk_row.flags, with SAMPLE and without SCORE: the row draws only under masks that pk_finish brings, a draft row under one for each of
 * its draws, and no further than it has masks. pk_step then runs what comes before PK_OP_SAMPLE, and returns (or has enqueued that); everything else
 * waits for pk_finish, which has to come before the next pk_step. */
#define PK_ROW_HELD 128

/* One host block, 8-byte aligned: head, int32 slot[n_masks], uint32 mask[n_masks][ceil(V/32)], without gaps; masks of one draft row side by side. */
typedef struct pk_finish_head {
    uint64_t seq;      /* of the step */
    int32_t n_masks;
    int32_t reserved;
} pk_finish_head;

#ifdef __cplusplus
extern "C" {
#endif
/* The second half of a step. A held row whose slot has no mask here draws nothing: its slot keeps its tokens and its length, and its
 * result says PK_ROW_DEAD. The row can run again; recurrent states have moved, though: a slot that has any must be made anew. */
PK_API int32_t pk_finish(pk_program *program, const pk_finish_head *input);
#ifdef __cplusplus
}
#endif

#endif
