/* pack.h - the kernel pack C ABI, and the only contract between Python and kernels.
 *
 * Shapes use these letters: T tokens this step, S rows that are sampled this step, R rows (sequences) this step, M model
 * width, F feed-forward width, H heads, K kv heads, D head width, V vocabulary, P pages, B tokens per page.
 * Addresses are device addresses as integers (host addresses on the CPU pack); 0 means "absent".
 * Every function returns a pk_status; pk_last_error() gives the sentence. packs/README.md has the contract in prose.
 * Restricted C subset, read by packs/bindgen.py, which writes runner/paddock_runner/pack/abi.py.
 */
#ifndef PK_PACK_H
#define PK_PACK_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
#define PK_API __attribute__((visibility("default")))
#define PK_ABI 1
#define PK_TIMES 1024

typedef enum pk_status { PK_OK = 0, PK_BAD_ARG = 1, PK_UNSUPPORTED = 2, PK_OOM = 3, PK_DEVICE = 4, PK_TIMEOUT = 5 } pk_status;

/* Formats of activations, weights and KV. Numbers are stable; formats/table.py has the same list. */
typedef enum pk_format {
    PK_F32 = 0, PK_F16 = 1, PK_BF16 = 2, PK_FP8_E4M3 = 3, PK_FP8_E5M2 = 4,
    PK_Q8_0 = 8, PK_Q4_0 = 9, PK_Q4_1 = 10, PK_Q5_0 = 11, PK_Q5_1 = 12,
    PK_Q2_K = 13, PK_Q3_K = 14, PK_Q4_K = 15, PK_Q5_K = 16, PK_Q6_K = 17,
    PK_IQ4_NL = 18, PK_IQ4_XS = 19, PK_MXFP4 = 20, PK_NVFP4 = 21,
    PK_Q4_Z = 22,  /* 32 elements: f16 d, u8 z, a byte of nothing, 4-bit codes q as in q4_0; x = d (q - z) */
    PK_I32 = 32, PK_U8 = 33
} pk_format;

typedef enum pk_op {
    PK_OP_PREPARE = 1,   /* apply the step input, build positions and rows */
    PK_OP_EMBED = 2,
    PK_OP_NORM = 3,
    PK_OP_MATMUL = 4,
    PK_OP_QKV = 5,       /* qk-norm, rope, KV write */
    PK_OP_ATTENTION = 6,
    PK_OP_GATE = 7,      /* gated activation */
    PK_OP_GATHER = 8,    /* rows that are sampled */
    PK_OP_SAMPLE = 9,
    PK_OP_COMMIT = 10,   /* append tokens, advance lengths, publish results */
    PK_OP_COPY = 11,     /* copy with format conversion */
    PK_OP_ADD = 12,
    PK_OP_ROUTE = 13,    /* which experts a token goes to */
    PK_OP_EXPERTS = 14,  /* gated feed-forward of the chosen experts */
    PK_OP_SIGMOID = 15,  /* x times the sigmoid of another operand */
    PK_OP_DELTA = 16,    /* gated delta net: convolution, state update, output norm and gate */
    PK_OP_CONV = 17,     /* gated short convolution */
    PK_OP_MAMBA = 18     /* Mamba 2: convolution, state update, gate, output norm */
} pk_op;

/* RELU2 (gate, and experts without a gate): max(x, 0)^2. SWIGLU_CLAMP (experts only): with g = min(gate, limit), u = min(max(up, -limit), limit): g * sigmoid(alpha * g) * (u + 1). */
typedef enum pk_act { PK_ACT_NONE = 0, PK_ACT_SILU = 1, PK_ACT_GELU_TANH = 2, PK_ACT_GELU_ERF = 3, PK_ACT_SWIGLU_CLAMP = 4, PK_ACT_RELU2 = 5 } pk_act;

/* Which rows GATHER takes of a sequence: its last one, its first one, or the mean of all (of this step). */
typedef enum pk_pool { PK_POOL_LAST = 0, PK_POOL_FIRST = 1, PK_POOL_MEAN = 2 } pk_pool;

/* Kinds of NORM. RMS: v / rms(v) * w. LAYER: (v - mean(v)) / sqrt(variance(v) + eps) * w + bias. */
typedef enum pk_norm { PK_NORM_RMS = 0, PK_NORM_LAYER = 1 } pk_norm;

/* What QKV splits: q, k and v; q and k, values being the last Dv of the D dimensions of the keys (latent attention); q alone, keys and
 * values being those of an earlier layer. ATTENTION: LATENT too. */
typedef enum pk_parts { PK_PARTS_QKV = 0, PK_PARTS_LATENT = 1, PK_PARTS_Q = 2 } pk_parts;

/* What a router makes of its logits. CHOSEN: softmax over the chosen experts alone. */
typedef enum pk_score { PK_SCORE_SOFTMAX = 0, PK_SCORE_SIGMOID = 1, PK_SCORE_CHOSEN = 2 } pk_score;

/* How a matrix lies in memory. ROWS: row after row, `stride` bytes apart. PACKED: whatever pk_repack of this pack made. */
typedef enum pk_layout { PK_ROWS = 0, PK_PACKED = 1 } pk_layout;

/* pk_tensor.rows may be one of these symbols: the number of tokens, or of sampled rows, of the step that runs. */
#define PK_ROWS_T -1
#define PK_ROWS_S -2

/* One operand: a matrix [rows, cols] (a vector is [1, cols]). */
typedef struct pk_tensor {
    uint64_t data;
    int64_t rows;
    int64_t cols;
    int64_t stride;  /* bytes from row to row; 0 when packed */
    int32_t format;  /* pk_format */
    int32_t layout;  /* pk_layout */
} pk_tensor;

/* ---- state: everything that varies from step to step lies here, at fixed addresses ---- */

/* Sampling parameters of one slot. Neutral values switch a stage off: top_k 0, top_p 1, min_p 0, typical_p 1, penalties 1/0/0. */
typedef struct pk_sampling {
    float temperature;        /* 0: greedy */
    float top_p;
    float min_p;
    float typical_p;
    float repetition_penalty; /* over prompt and output */
    float frequency_penalty;  /* over output */
    float presence_penalty;   /* over output */
    int32_t top_k;
    uint64_t seed;            /* the random number is a function of (seed, position) alone */
    int32_t prompt_length;    /* tokens of the prompt: output starts here */
    int32_t min_length;       /* stop tokens are impossible while fewer tokens than this are there */
    int32_t max_length;       /* the slot dies (PK_ROW_LENGTH) when it holds this many tokens */
    int32_t n_logprobs;       /* -1: none; 0: of the chosen token; k: also of the k best */
    int32_t n_bias;           /* entries of state.bias in use */
    int32_t use_mask;         /* 1: state.mask row applies (bit set: token allowed) */
    int32_t n_stop;
    int32_t stop[17];         /* stop tokens: drawn, reported with PK_ROW_STOP, the slot dies */
} pk_sampling;

typedef struct pk_bias {
    int32_t token;
    float value;
} pk_bias;

/* One row of results (a draft row has several). Written by PK_OP_COMMIT into host-visible memory. */
typedef struct pk_result {
    int32_t slot;
    int32_t token;    /* -1: the row produced none */
    int32_t flags;    /* PK_ROW_* */
    int32_t length;   /* tokens of the slot after this step, the new one included */
    float logprob;    /* of the token, after bias/penalties/mask/temperature-free log-softmax of raw logits */
    int32_t n_top;    /* entries in state.top for this row */
} pk_result;

typedef struct pk_top {
    int32_t token;
    float logprob;
} pk_top;

/* Row flags. In pk_row.flags: SAMPLE, DRAFT and SCORE. In pk_result.flags: SCORE again, and the others. */
#define PK_ROW_SAMPLE 1   /* draw a token after the last token of this row */
#define PK_ROW_STOP 2     /* the token is a stop token: the slot is dead now */
#define PK_ROW_LENGTH 4   /* max_length reached: the slot is dead now */
#define PK_ROW_DEAD 8     /* the slot was dead before this step: no token, nothing changed */
#define PK_ROW_NAN 16     /* the logits held a NaN: no token, the slot is dead now */
#define PK_ROW_DRAFT 32   /* with SAMPLE: draw after every token of this row; its tokens but the first are guesses */
#define PK_ROW_SCORE 64   /* with SAMPLE and DRAFT: nothing is drawn; what follows each token in the slot's text is rated */

/* A draft row: its guesses were written by pk_text. It goes on as long as what is drawn is what was guessed next, and has one result per
 * token; those after the last token drawn have token -1. Such rows come after all others, and publish no best tokens.
 * A score row takes the token that stands next in the slot's text, whatever it is, n_tokens times: logprobs and best tokens are those of
 * the raw logits, stop tokens and max_length do not count. Its last successor must have been written too. */

/* Addresses and sizes of the state. Page 0 is the scratch page: dead rows and padding write there.
 * A slot's history: tokens[slot][0..length) have their KV computed; tokens[slot][length] is the next input.
 * The address of token position p of a slot is kv + page_table[slot][p / B] * kv_page_stride + layer offset (in the op) + pack's own layout. */
typedef struct pk_state {
    int32_t n_slots;
    int32_t max_ctx_tokens;   /* a multiple of page_tokens */
    int32_t page_tokens;      /* B */
    int32_t slot_pages;       /* max_ctx_tokens / page_tokens */
    int32_t n_vocab;
    int32_t max_step_tokens;  /* largest T */
    int32_t max_step_rows;    /* largest R and S */
    int32_t max_bias;
    int32_t max_top;
    int32_t n_results;        /* ring of result blocks: the block of a step is seq % n_results */
    int64_t kv_page_stride;   /* bytes */
    uint64_t kv;              /* page pool: [P] pages of kv_page_stride bytes */
    uint64_t tokens;          /* i32 [n_slots, max_ctx_tokens + 1] */
    uint64_t length;          /* i32 [n_slots] */
    uint64_t alive;           /* i32 [n_slots] */
    uint64_t page_table;      /* i32 [n_slots, slot_pages] */
    uint64_t sampling;        /* pk_sampling [n_slots] */
    uint64_t bias;            /* pk_bias [n_slots, max_bias] */
    uint64_t mask;            /* u32 [n_slots + max_step_rows, ceil(V/32)]: of slots, then of a step's draws in draft rows */
    uint64_t row_slot;        /* i32 [R]    built by PREPARE, like all below */
    uint64_t row_start;       /* i32 [R+1]  first token index of the row in this step */
    uint64_t row_position;    /* i32 [R]    position of that token in its sequence */
    uint64_t row_flags;       /* i32 [R] */
    uint64_t token_id;        /* i32 [T] */
    uint64_t token_position;  /* i32 [T] */
    uint64_t token_row;       /* i32 [T] */
    uint64_t token_page;      /* i32 [T]    page the token's KV goes to (0 for dead rows) */
    uint64_t sample_row;      /* i32 [S]    row of the s-th draw */
    uint64_t sample_at;       /* i32 [S]    index in this step of the token that it is drawn after */
    uint64_t sample_token;    /* i32 [S]    written by SAMPLE */
    uint64_t sample_flags;    /* i32 [S]    written by SAMPLE */
    uint64_t sample_logprob;  /* f32 [S]    written by SAMPLE */
    uint64_t workspace;       /* scratch of the pack: workspace_bytes, asked with pk_workspace_bytes */
    int64_t workspace_bytes;
    uint64_t results;         /* host-visible pk_result [n_results, max_step_rows], row order of the step */
    uint64_t top;             /* host-visible pk_top [n_results, max_step_rows, max_top], by result */
    uint64_t done;            /* host-visible u64: seq of the last finished step */
    uint64_t recurrent;       /* [n_slots] of recurrent_stride bytes: what recurrent layers remember of a slot; 0 without such layers */
    int64_t recurrent_stride; /* bytes */
} pk_state;

/* ---- step input: one host block, 8-byte aligned: head, then the arrays in this order without gaps ---- */

typedef struct pk_step_head {
    uint64_t seq;        /* 1, 2, 3, ... */
    int32_t n_tokens;    /* T: sum of rows' n_tokens */
    int32_t n_rows;      /* pk_row[n_rows] */
    int32_t n_samples;   /* S: rows with PK_ROW_SAMPLE, draft rows once per token */
    int32_t n_new;       /* pk_new_slot[n_new] */
    int32_t n_pages;     /* pk_page_write[n_pages] */
    int32_t n_texts;     /* pk_text[n_texts] */
    int32_t n_masks;     /* pk_mask_write[n_masks] */
    int32_t n_payload;   /* int32 words after the arrays */
} pk_step_head;

/* Order of the arrays: pk_new_slot (multiple of 8 bytes), pk_row, pk_page_write, pk_text, pk_mask_write, payload.
 * A row runs tokens[slot][length .. length + n_tokens). */
typedef struct pk_row {
    int32_t slot;
    int32_t n_tokens;
    int32_t flags;
    int32_t reserved;
} pk_row;

/* Makes a slot alive with `length` tokens already in the cache. Its bias entries (token, float bits) start at payload[bias_offset]. */
typedef struct pk_new_slot {
    int32_t slot;
    int32_t length;
    int32_t bias_offset;
    int32_t reserved;
    pk_sampling sampling;
} pk_new_slot;

typedef struct pk_page_write {
    int32_t slot;
    int32_t index;
    int32_t page;
    int32_t reserved;
} pk_page_write;

/* tokens[slot][position .. position + n) = payload[offset .. offset + n) */
typedef struct pk_text {
    int32_t slot;
    int32_t position;
    int32_t n;
    int32_t offset;
} pk_text;

/* mask[slot] = payload[offset .. offset + ceil(V/32)) */
typedef struct pk_mask_write {
    int32_t slot;
    int32_t offset;
} pk_mask_write;

/* ---- ops: one record each; `size` is sizeof the record. Ops use the program's pk_state where they need rows or pages ---- */

/* Applies the step input to the state and builds row_*, token_*, sample_row. */
typedef struct pk_op_prepare {
    int32_t op;
    int32_t size;
} pk_op_prepare;

/* out[T,M] = table[id % V, :] * scale + positions[position + position_offset, :] + types[id / V, :], id = token_id[T]. A token's type
 * goes with its id: with types there are n_vocab = V times their number ids. A position behind the table takes its last row. */
typedef struct pk_op_embed {
    int32_t op;
    int32_t size;
    pk_tensor table;      /* [V,M], any weight format, rows or packed */
    pk_tensor positions;  /* f32 rows [n,M], or absent */
    pk_tensor types;      /* f32 rows [n,M], or absent */
    pk_tensor out;        /* [T,M] */
    float scale;
    int32_t position_offset;
} pk_op_embed;

/* Row by row: v = x; if post_w: v = v / rms(v) * post_w; if residual: residual = v = residual + v * residual_scale;
 * if out: out = v / rms(v) * w. rms(v) = sqrt(mean(v^2) + eps). kind LAYER: the last norm is a layer norm, post_w is absent. */
typedef struct pk_op_norm {
    int32_t op;
    int32_t size;
    pk_tensor x;         /* [T or S, M] */
    pk_tensor w;         /* [1,M] f32 */
    pk_tensor bias;      /* [1,M] f32 or absent; LAYER only */
    pk_tensor post_w;    /* [1,M] f32 or absent */
    pk_tensor residual;  /* as x, or absent; updated in place */
    pk_tensor out;       /* as x, or absent; may be x */
    float eps;
    float residual_scale;
    int32_t kind;        /* pk_norm */
    int32_t reserved;
} pk_op_norm;

/* y = x W^T for up to three weights side by side: with act NONE, y[:, N0 + N1 + N2] = [x W0^T + b0, x W1^T + b1, x W2^T + b2];
 * with another act, n_w is 2 and y[:, N0] = act(x W0^T + b0) * (x W1^T + b1).
 * Then y = y * scale; y = softcap * tanh(y / softcap) when softcap > 0; y = y + add when add is there (add may be y). */
typedef struct pk_op_matmul {
    int32_t op;
    int32_t size;
    pk_tensor x;        /* [T or S, K] */
    pk_tensor w[3];     /* [N_i, K] packed */
    pk_tensor bias[3];  /* [1, N_i] f32 or absent */
    pk_tensor y;        /* [T or S, N] */
    pk_tensor add;      /* as y, or absent */
    int32_t n_w;
    int32_t act;        /* pk_act */
    float scale;
    float softcap;
} pk_op_matmul;

/* Splits qkv[T, H*D + K*D + K*Dv]; q and k heads are normalised (rms over D, when q_norm/k_norm are there) and rotated, v heads are
 * normalised when v_norm is there, then all heads are multiplied by their gains; q goes to `q`, k and v go to the token's page. What is not among `parts` is not in qkv either. Rotation of pair (a, b) at position p by angle p * frequency[i]:
 * layout 0 (neox): a = i, b = i + width/2; layout 1 (interleaved): a = 2i, b = 2i + 1; cos and sin are multiplied by magnitude. */
typedef struct pk_op_qkv {
    int32_t op;
    int32_t size;
    pk_tensor qkv;        /* [T, H*D + K*D + K*Dv] */
    pk_tensor q;          /* [T, H*D]; may lie in qkv's own memory with qkv's stride */
    pk_tensor q_norm;     /* [1,D] f32 or absent */
    pk_tensor k_norm;     /* [1,D] f32 or absent */
    pk_tensor v_norm;     /* [1,Dv] f32 or absent */
    pk_tensor frequency;  /* [1,width/2] f32, or absent: no rotation */
    pk_tensor gains;      /* [1,H + K + K] f32, of the heads that qkv holds; or absent: all 1 */
    int64_t k_offset;     /* bytes from the page's start to this layer's K: K*B*D elements */
    int64_t v_offset;     /* likewise V: K*B*Dv elements */
    int32_t n_heads;
    int32_t n_kv_heads;
    int32_t head_width;
    int32_t v_width;
    int32_t rope_width;
    int32_t rope_layout;
    float rope_magnitude;
    float eps;
    int32_t kv_format;    /* pk_format: F32, F16, BF16, FP8_E4M3 */
    int32_t parts;        /* pk_parts */
} pk_op_qkv;

/* out[t, h] = softmax over visible positions j of (scale * q.k_j, soft-capped) times v_j; the sink of a head is one more logit
 * without a value; the sum is multiplied by the head's gain. Visible to a token at position p: j <= p, and j > p - window when window > 0; when is_bidirectional: every token of
 * the row up to its last one of this step, and |p - j| < window when window > 0. Reads KV through the page table, this step's own
 * tokens included (QKV ran before). */
typedef struct pk_op_attention {
    int32_t op;
    int32_t size;
    pk_tensor q;      /* [T, H*D] */
    pk_tensor out;    /* [T, H*Dv] */
    pk_tensor sinks;  /* [1,H] f32 or absent */
    pk_tensor gains;  /* [1,H] f32, or absent: all 1 */
    int64_t k_offset;
    int64_t v_offset;
    int32_t n_heads;
    int32_t n_kv_heads;
    int32_t head_width;
    int32_t v_width;
    int32_t window;
    int32_t kv_format;
    float scale;
    float softcap;
    int32_t is_bidirectional;
    int32_t parts;    /* pk_parts: QKV or LATENT */
} pk_op_attention;

/* out[T,F] = act(x[:, 0:F]) * x[:, F:2F]; when x has F columns: out = act(x), out may be x */
typedef struct pk_op_gate {
    int32_t op;
    int32_t size;
    pk_tensor x;
    pk_tensor out;
    int32_t act;
    int32_t reserved;
} pk_op_gate;

/* out[S,M] = x[sample_at[s], :], or as `pool` says of row sample_row[s] */
typedef struct pk_op_gather {
    int32_t op;
    int32_t size;
    pk_tensor x;
    pk_tensor out;
    int32_t pool;      /* pk_pool */
    int32_t reserved;
} pk_op_gather;

/* Draws one token per sampled row: penalties, bias, mask and min_length on the logits; logprobs from the logits so changed at
 * temperature 1; then temperature, top-k, typical, top-p, min-p (in this order), Gumbel or inverse-CDF draw with a counter-based
 * generator on (seed, position). Greedy (temperature 0) takes the lowest index of the largest logit. May overwrite the logits. */
typedef struct pk_op_sample {
    int32_t op;
    int32_t size;
    pk_tensor logits;  /* [S,V] f32 */
} pk_op_sample;

/* Rows advance: length += n_tokens, tokens[slot][length] = sample; stop and length are tested; results and `done` are published. */
typedef struct pk_op_commit {
    int32_t op;
    int32_t size;
} pk_op_commit;

/* out = x, formats may differ */
typedef struct pk_op_copy {
    int32_t op;
    int32_t size;
    pk_tensor x;
    pk_tensor out;
} pk_op_copy;

/* out = x * scale + y */
typedef struct pk_op_add {
    int32_t op;
    int32_t size;
    pk_tensor x;
    pk_tensor y;
    pk_tensor out;
    float scale;
    int32_t reserved;
} pk_op_add;

/* Chooses k of E experts per token: scores of the logits; the k largest of score + bias, lower index first when equal (with groups:
 * only within the n_groups_used of n_groups equal groups whose n_group_best largest of score + bias have the largest sum). Weights are the
 * chosen scores (without bias), divided by their sum when is_normalised, times scale. */
typedef struct pk_op_route {
    int32_t op;
    int32_t size;
    pk_tensor logits;   /* [T,E] f32 */
    pk_tensor bias;     /* [1,E] f32 or absent */
    pk_tensor ids;      /* [T,k] i32 */
    pk_tensor weights;  /* [T,k] f32 */
    int32_t score;      /* pk_score */
    int32_t is_normalised;
    int32_t n_groups;   /* 1: no groups */
    int32_t n_groups_used;
    float scale;
    int32_t n_group_best;  /* 2, or 1: how many of a group's largest make its score */
} pk_op_route;

/* y = add + scale * sum over the token's k experts e of weight * (down_e(act(gate_e(x)), up_e(x)) + down_bias_e), in the order of
 * e. A stack of matrices is described by its first one: [N,K] packed, `stride` bytes from one expert's matrix to the next. */
typedef struct pk_op_experts {
    int32_t op;
    int32_t size;
    pk_tensor x;          /* [T,M] */
    pk_tensor ids;        /* [T,k] i32 */
    pk_tensor weights;    /* [T,k] f32 */
    pk_tensor gate;       /* E of [F,M]; absent with RELU2: down_e(act(up_e(x))) */
    pk_tensor up;         /* E of [F,M] */
    pk_tensor down;       /* E of [M,F] */
    pk_tensor gate_bias;  /* [1,E*F] f32 or absent */
    pk_tensor up_bias;    /* [1,E*F] f32 or absent */
    pk_tensor down_bias;  /* [1,E*M] f32 or absent */
    pk_tensor y;          /* [T,M] */
    pk_tensor add;        /* as y, or absent; may be y */
    int32_t n_experts;
    int32_t act;          /* pk_act, not NONE */
    float scale;
    float limit;          /* of SWIGLU_CLAMP */
    float alpha;          /* of SWIGLU_CLAMP */
    int32_t reserved;
} pk_op_experts;

/* out = x * sigmoid(g); g has the columns of x, or one. */
typedef struct pk_op_sigmoid {
    int32_t op;
    int32_t size;
    pk_tensor x;    /* [T,N] */
    pk_tensor g;    /* [T,N] or [T,1] */
    pk_tensor out;  /* as x; may be x */
} pk_op_sigmoid;

/* One layer of gated delta net (Yang et al. 2024). Per token t of a row, in order, with C = 2 G Dk + H Dv channels (G key heads, H value
 * heads; value head h has key head h / (H / G), or h % G when is_tiled):
 *   u = silu(sum_i conv[c, i] * qkv[t - W + 1 + i, c]): the tokens before this step's come from the slot's state, zeros at position 0;
 *   q = l2(u[0 : G Dk]) / sqrt(Dk), k = l2(u[G Dk : 2 G Dk]) per head, v = u[2 G Dk :];  l2(x) = x / sqrt(sum(x^2) + 1e-6)
 *   S = exp(-exp(a_log[h]) softplus(a[t, h] + dt_bias[h])) S;  d = sigmoid(b[t, h]) (v - S^T k);  S = S + k d^T;  o = S^T q
 *   out[t, h] = o / rms(o) * scale * silu(z[t, h])
 * S of head h is [Dk, Dv] f32 at state.recurrent + slot * recurrent_stride + state_offset + 4 h Dk Dv; the last W - 1 rows of qkv lie as
 * [W - 1, C] f32 at conv_offset. A row that begins at position 0 begins with zeros. Rows of dead slots change nothing. */
typedef struct pk_op_delta {
    int32_t op;
    int32_t size;
    pk_tensor qkv;      /* [T,C] */
    pk_tensor z;        /* [T,H*Dv] */
    pk_tensor b;        /* [T,H] f32 */
    pk_tensor a;        /* [T,H] f32 */
    pk_tensor conv;     /* [1,C*W] f32, channel after channel */
    pk_tensor a_log;    /* [1,H] f32 */
    pk_tensor dt_bias;  /* [1,H] f32 */
    pk_tensor scale;    /* [1,Dv] f32 */
    pk_tensor out;      /* [T,H*Dv] */
    int64_t state_offset;  /* bytes, a multiple of 64 */
    int64_t conv_offset;   /* likewise */
    int32_t n_k_heads;     /* G */
    int32_t n_v_heads;     /* H */
    int32_t k_width;       /* Dk */
    int32_t v_width;       /* Dv */
    int32_t conv_width;    /* W */
    float eps;
    int32_t is_tiled;
    int32_t reserved;
} pk_op_delta;

/* out[t, c] = g2[t, c] (bias[c] + sum_i conv[c, i] * (g1 v)[t - W + 1 + i, c]), with x[t] = (g1, g2, v): three times M columns. The last W - 1
 * products g1 v of a row lie as [W - 1, M] f32 at state.recurrent + slot * recurrent_stride + conv_offset; rows as in pk_op_delta. */
typedef struct pk_op_conv {
    int32_t op;
    int32_t size;
    pk_tensor x;          /* [T,3M] */
    pk_tensor conv;       /* [1,M*W] f32, channel after channel */
    pk_tensor bias;       /* [1,M] f32 or absent */
    pk_tensor out;        /* [T,M] */
    int64_t conv_offset;  /* bytes, a multiple of 64 */
    int32_t conv_width;   /* W */
    int32_t reserved;
} pk_op_conv;

/* One layer of Mamba 2 (Dao and Gu 2024). Per token t of a row, in order, with C = H P + 2 G N channels (H heads of P, G groups of N):
 *   u = silu(bias[c] + sum_i conv[c, i] * xbc[t - W + 1 + i, c]), x = u[0 : H P], B = u[H P : H P + G N], C = u[H P + G N :]; head h has
 *   group h / (H / G); s = min(max(softplus(dt[t, h] + dt_bias[h]), dt_low), dt_high)
 *   S = exp(-exp(a_log[h]) s) S + B (s x_h)^T;  y = S^T C + d[h] x_h
 *   y = y * silu(z[t]);  out[t] = y / rms(y) * scale, rms over each of n_norms equal parts of the H P values
 * S of head h is [N, P] f32 at state_offset + 4 h N P of the slot's state; the last W - 1 rows of xbc lie as [W - 1, C] f32 at
 * conv_offset. Rows as in pk_op_delta. */
typedef struct pk_op_mamba {
    int32_t op;
    int32_t size;
    pk_tensor xbc;      /* [T,C] */
    pk_tensor z;        /* [T,H*P] */
    pk_tensor dt;       /* [T,H] f32 */
    pk_tensor conv;     /* [1,C*W] f32, channel after channel */
    pk_tensor bias;     /* [1,C] f32 or absent */
    pk_tensor a_log;    /* [1,H] f32 */
    pk_tensor dt_bias;  /* [1,H] f32 */
    pk_tensor d;        /* [1,H] f32 */
    pk_tensor scale;    /* [1,H*P] f32 */
    pk_tensor out;      /* [T,H*P] */
    int64_t state_offset;  /* bytes, a multiple of 64 */
    int64_t conv_offset;   /* likewise */
    int32_t n_heads;       /* H */
    int32_t head_width;    /* P */
    int32_t n_groups;      /* G */
    int32_t state_width;   /* N */
    int32_t conv_width;    /* W */
    int32_t n_norms;
    float eps;
    float dt_low;
    float dt_high;
    int32_t reserved;
} pk_op_mamba;

/* ---- weights ---- */

/* How scales beside a weight are laid out (safetensors formats; GGUF formats carry their own). */
typedef enum pk_scales { PK_SCALES_NONE = 0, PK_SCALES_TENSOR = 1, PK_SCALES_ROW = 2, PK_SCALES_BLOCK = 3, PK_SCALES_GROUP = 4 } pk_scales;

/* A weight as the checkpoint stores it, in host memory. rows x cols, row after row; or a part of its rows, the others in calls of
 * their own: parts come in order, each begins where the last ended, and all but the last have a multiple of 128 rows. */
typedef struct pk_source {
    uint64_t data;
    int64_t n_bytes;
    int64_t rows;
    int64_t cols;
    int32_t format;        /* pk_format */
    int32_t scales;        /* pk_scales */
    uint64_t scale_data;   /* f32 (BLOCK, ROW, TENSOR), e4m3 or e8m0 bytes (GROUP); row-major */
    int64_t scale_rows;
    int64_t scale_cols;
    float global_scale;    /* multiplies everything; 1 where there is none */
    float offset;          /* added to every element (norm weights stored minus one); 0 otherwise */
    int32_t block_rows;    /* BLOCK: 128 x 128 */
    int32_t block_cols;
    int64_t first_row;     /* data begins with this row and has part_rows of them; part_rows 0: all. n_bytes and scale_data are the whole weight's */
    int64_t part_rows;
} pk_source;

/* ---- functions ---- */

typedef struct pk_ctx pk_ctx;
typedef struct pk_program pk_program;

typedef struct pk_open_config {
    int32_t device;       /* CUDA: ordinal among the visible devices; CPU: 0 */
    int32_t n_threads;    /* CPU: 0 for one per allowed processor */
    int32_t max_isa;      /* CPU: highest instruction class to use: 0 all that work, 1 AVX2, 2 AVX-512 VNNI, 3 AMX. CUDA: 1 takes kernels, too, that never ran on a card of the architecture */
    int32_t is_invariant; /* 1: only kernels whose numbers of a row depend on the row alone: neither on the other rows of a step nor on where a prompt was cut */
} pk_open_config;

/* Facts about an open context. arch: "cpu:avx512-vnni-amx", "cuda:sm_90a". */
typedef struct pk_facts {
    int32_t is_host;          /* 1: device memory is host memory */
    int32_t run_ahead;        /* steps that may be in flight before the first is read: 0 on a pack that runs pk_step synchronously */
    int32_t activation;       /* pk_format of activations: PK_F32 or PK_BF16 */
    int32_t n_threads;
    int64_t memory_bytes;     /* of the device */
    int64_t free_bytes;
    int64_t granule_bytes;    /* of pk_attach */
    int32_t n_processors;     /* SMs, or threads */
    int32_t is_validated;     /* 0: nobody has run the tests on this architecture */
    int32_t has_drafts;       /* 1: PK_ROW_DRAFT is supported */
    int32_t reserved;
    char arch[64];
    char name[128];
    char build[64];
} pk_facts;

typedef struct pk_counters {
    int64_t n_allocations;    /* calls that took memory, of any kind, inside the pack */
    int64_t allocated_bytes;
    int64_t n_steps;
    int64_t n_repacked_bytes;
} pk_counters;

typedef enum pk_memory { PK_MEMORY_DEVICE = 0, PK_MEMORY_PINNED = 1 } pk_memory;

PK_API const char *pk_abi_digest(void);
/* JSON: {"pack": "cpu", "archs": [...], "build": "...", "formats": [...], "ops": [...]}. Needs no device. */
PK_API const char *pk_describe(void);
PK_API const char *pk_last_error(void);
PK_API int32_t pk_n_devices(void);
PK_API int32_t pk_open(const pk_open_config *config, pk_ctx **out);
PK_API void pk_close(pk_ctx *ctx);
PK_API int32_t pk_get_facts(pk_ctx *ctx, pk_facts *out);
PK_API int32_t pk_get_counters(pk_ctx *ctx, pk_counters *out);

PK_API int32_t pk_alloc(pk_ctx *ctx, int32_t memory, int64_t n_bytes, uint64_t *out);
PK_API int32_t pk_free(pk_ctx *ctx, int32_t memory, uint64_t address);
/* An address range without memory; pk_attach puts memory behind a part of it (multiples of granule_bytes), pk_detach takes it back. */
PK_API int32_t pk_reserve(pk_ctx *ctx, int64_t n_bytes, uint64_t *out);
PK_API int32_t pk_attach(pk_ctx *ctx, uint64_t address, int64_t n_bytes);
PK_API int32_t pk_detach(pk_ctx *ctx, uint64_t address, int64_t n_bytes);
PK_API int32_t pk_release(pk_ctx *ctx, uint64_t address);
PK_API int32_t pk_write(pk_ctx *ctx, uint64_t device, const void *host, int64_t n_bytes);
PK_API int32_t pk_read(pk_ctx *ctx, void *host, uint64_t device, int64_t n_bytes);
PK_API int32_t pk_fill(pk_ctx *ctx, uint64_t device, int32_t byte, int64_t n_bytes);
/* Copies between device memory and device or pinned memory, in order with the steps: after those that were given before, before those
 * that come later. With run_ahead 0 it is done when this returns; otherwise it is enqueued. The ranges do not overlap. */
PK_API int32_t pk_copy(pk_ctx *ctx, uint64_t to, uint64_t from, int64_t n_bytes);

/* Bytes of a weight after pk_repack, and the repacking: the source's memory may be used again when it returns. A format without kernels is refused here, by name. */
PK_API int32_t pk_packed_bytes(pk_ctx *ctx, const pk_source *source, int64_t *out);
PK_API int32_t pk_repack(pk_ctx *ctx, const pk_source *source, uint64_t device, int64_t n_bytes);

/* Scratch that a program needs for its largest step; goes to state.workspace. */
PK_API int32_t pk_workspace_bytes(pk_ctx *ctx, const pk_state *state, const void *records, int64_t n_bytes, int64_t *out);
/* Checks every record (shapes, formats, op x format) and prepares the program; buckets: token counts for which launches are prepared. */
PK_API int32_t pk_load(pk_ctx *ctx, const pk_state *state, const void *records, int64_t n_bytes, const int32_t *buckets, int32_t n_buckets, pk_program **out);
PK_API void pk_unload(pk_program *program);
/* Runs one step. With run_ahead 0 it returns when the step is done; otherwise it copies the input, enqueues and returns. */
PK_API int32_t pk_step(pk_program *program, const pk_step_head *input);
/* Waits until state.done >= seq. */
PK_API int32_t pk_wait(pk_program *program, uint64_t seq, int64_t timeout_us);
/* Times of the last finished steps, oldest first: ns[2 i] when a step began and ns[2 i + 1] when it ended, by the device's own clock.
 * At most n of them, and PK_TIMES; *n_out says how many. */
PK_API int32_t pk_times(pk_program *program, uint64_t *ns, int32_t n, int32_t *n_out);
/* Runs the records as they are (no step input) with these T and S, and waits; us: microseconds per record (median of n_repeats), or null. */
PK_API int32_t pk_run(pk_program *program, int32_t n_tokens, int32_t n_samples, int32_t n_repeats, float *us);

#ifdef __cplusplus
}
#endif
#endif
