"""Generated from packs/pack.h, packs/rare.h, packs/copies.h, packs/cold.h and packs/beside.h by packs/bindgen.py. Do not edit."""
# mypy: ignore-errors
from ctypes import Structure, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p  # noqa: F401

DIGEST = "436c974a195bde58"
PK_ABI = 1
PK_TIMES = 1024

# enum pk_status
PK_OK = 0
PK_BAD_ARG = 1
PK_UNSUPPORTED = 2
PK_OOM = 3
PK_DEVICE = 4
PK_TIMEOUT = 5

# enum pk_format
PK_F32 = 0
PK_F16 = 1
PK_BF16 = 2
PK_FP8_E4M3 = 3
PK_FP8_E5M2 = 4
PK_Q8_0 = 8
PK_Q4_0 = 9
PK_Q4_1 = 10
PK_Q5_0 = 11
PK_Q5_1 = 12
PK_Q2_K = 13
PK_Q3_K = 14
PK_Q4_K = 15
PK_Q5_K = 16
PK_Q6_K = 17
PK_IQ4_NL = 18
PK_IQ4_XS = 19
PK_MXFP4 = 20
PK_NVFP4 = 21
PK_Q4_Z = 22
PK_I32 = 32
PK_U8 = 33

# enum pk_op
PK_OP_PREPARE = 1
PK_OP_EMBED = 2
PK_OP_NORM = 3
PK_OP_MATMUL = 4
PK_OP_QKV = 5
PK_OP_ATTENTION = 6
PK_OP_GATE = 7
PK_OP_GATHER = 8
PK_OP_SAMPLE = 9
PK_OP_COMMIT = 10
PK_OP_COPY = 11
PK_OP_ADD = 12
PK_OP_ROUTE = 13
PK_OP_EXPERTS = 14
PK_OP_SIGMOID = 15
PK_OP_DELTA = 16
PK_OP_CONV = 17
PK_OP_MAMBA = 18

# enum pk_act
PK_ACT_NONE = 0
PK_ACT_SILU = 1
PK_ACT_GELU_TANH = 2
PK_ACT_GELU_ERF = 3
PK_ACT_SWIGLU_CLAMP = 4
PK_ACT_RELU2 = 5

# enum pk_pool
PK_POOL_LAST = 0
PK_POOL_FIRST = 1
PK_POOL_MEAN = 2

# enum pk_norm
PK_NORM_RMS = 0
PK_NORM_LAYER = 1

# enum pk_parts
PK_PARTS_QKV = 0
PK_PARTS_LATENT = 1
PK_PARTS_Q = 2

# enum pk_score
PK_SCORE_SOFTMAX = 0
PK_SCORE_SIGMOID = 1
PK_SCORE_CHOSEN = 2

# enum pk_layout
PK_ROWS = 0
PK_PACKED = 1
PK_ROWS_T = -1
PK_ROWS_S = -2


class pk_tensor(Structure):
    _fields_ = [
        ("data", c_uint64),
        ("rows", c_int64),
        ("cols", c_int64),
        ("stride", c_int64),
        ("format", c_int32),
        ("layout", c_int32),
    ]


class pk_sampling(Structure):
    _fields_ = [
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("typical_p", c_float),
        ("repetition_penalty", c_float),
        ("frequency_penalty", c_float),
        ("presence_penalty", c_float),
        ("top_k", c_int32),
        ("seed", c_uint64),
        ("prompt_length", c_int32),
        ("min_length", c_int32),
        ("max_length", c_int32),
        ("n_logprobs", c_int32),
        ("n_bias", c_int32),
        ("use_mask", c_int32),
        ("n_stop", c_int32),
        ("stop", c_int32 * 17),
    ]


class pk_bias(Structure):
    _fields_ = [
        ("token", c_int32),
        ("value", c_float),
    ]


class pk_result(Structure):
    _fields_ = [
        ("slot", c_int32),
        ("token", c_int32),
        ("flags", c_int32),
        ("length", c_int32),
        ("logprob", c_float),
        ("n_top", c_int32),
    ]


class pk_top(Structure):
    _fields_ = [
        ("token", c_int32),
        ("logprob", c_float),
    ]
PK_ROW_SAMPLE = 1
PK_ROW_STOP = 2
PK_ROW_LENGTH = 4
PK_ROW_DEAD = 8
PK_ROW_NAN = 16
PK_ROW_DRAFT = 32
PK_ROW_SCORE = 64


class pk_state(Structure):
    _fields_ = [
        ("n_slots", c_int32),
        ("max_ctx_tokens", c_int32),
        ("page_tokens", c_int32),
        ("slot_pages", c_int32),
        ("n_vocab", c_int32),
        ("max_step_tokens", c_int32),
        ("max_step_rows", c_int32),
        ("max_bias", c_int32),
        ("max_top", c_int32),
        ("n_results", c_int32),
        ("kv_page_stride", c_int64),
        ("kv", c_uint64),
        ("tokens", c_uint64),
        ("length", c_uint64),
        ("alive", c_uint64),
        ("page_table", c_uint64),
        ("sampling", c_uint64),
        ("bias", c_uint64),
        ("mask", c_uint64),
        ("row_slot", c_uint64),
        ("row_start", c_uint64),
        ("row_position", c_uint64),
        ("row_flags", c_uint64),
        ("token_id", c_uint64),
        ("token_position", c_uint64),
        ("token_row", c_uint64),
        ("token_page", c_uint64),
        ("sample_row", c_uint64),
        ("sample_at", c_uint64),
        ("sample_token", c_uint64),
        ("sample_flags", c_uint64),
        ("sample_logprob", c_uint64),
        ("workspace", c_uint64),
        ("workspace_bytes", c_int64),
        ("results", c_uint64),
        ("top", c_uint64),
        ("done", c_uint64),
        ("recurrent", c_uint64),
        ("recurrent_stride", c_int64),
    ]


class pk_step_head(Structure):
    _fields_ = [
        ("seq", c_uint64),
        ("n_tokens", c_int32),
        ("n_rows", c_int32),
        ("n_samples", c_int32),
        ("n_new", c_int32),
        ("n_pages", c_int32),
        ("n_texts", c_int32),
        ("n_masks", c_int32),
        ("n_payload", c_int32),
    ]


class pk_row(Structure):
    _fields_ = [
        ("slot", c_int32),
        ("n_tokens", c_int32),
        ("flags", c_int32),
        ("reserved", c_int32),
    ]


class pk_new_slot(Structure):
    _fields_ = [
        ("slot", c_int32),
        ("length", c_int32),
        ("bias_offset", c_int32),
        ("reserved", c_int32),
        ("sampling", pk_sampling),
    ]


class pk_page_write(Structure):
    _fields_ = [
        ("slot", c_int32),
        ("index", c_int32),
        ("page", c_int32),
        ("reserved", c_int32),
    ]


class pk_text(Structure):
    _fields_ = [
        ("slot", c_int32),
        ("position", c_int32),
        ("n", c_int32),
        ("offset", c_int32),
    ]


class pk_mask_write(Structure):
    _fields_ = [
        ("slot", c_int32),
        ("offset", c_int32),
    ]


class pk_op_prepare(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
    ]


class pk_op_embed(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("table", pk_tensor),
        ("positions", pk_tensor),
        ("types", pk_tensor),
        ("out", pk_tensor),
        ("scale", c_float),
        ("position_offset", c_int32),
    ]


class pk_op_norm(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("x", pk_tensor),
        ("w", pk_tensor),
        ("bias", pk_tensor),
        ("post_w", pk_tensor),
        ("residual", pk_tensor),
        ("out", pk_tensor),
        ("eps", c_float),
        ("residual_scale", c_float),
        ("kind", c_int32),
        ("reserved", c_int32),
    ]


class pk_op_matmul(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("x", pk_tensor),
        ("w", pk_tensor * 3),
        ("bias", pk_tensor * 3),
        ("y", pk_tensor),
        ("add", pk_tensor),
        ("n_w", c_int32),
        ("act", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
    ]


class pk_op_qkv(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("qkv", pk_tensor),
        ("q", pk_tensor),
        ("q_norm", pk_tensor),
        ("k_norm", pk_tensor),
        ("v_norm", pk_tensor),
        ("frequency", pk_tensor),
        ("gains", pk_tensor),
        ("k_offset", c_int64),
        ("v_offset", c_int64),
        ("n_heads", c_int32),
        ("n_kv_heads", c_int32),
        ("head_width", c_int32),
        ("v_width", c_int32),
        ("rope_width", c_int32),
        ("rope_layout", c_int32),
        ("rope_magnitude", c_float),
        ("eps", c_float),
        ("kv_format", c_int32),
        ("parts", c_int32),
    ]


class pk_op_attention(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("q", pk_tensor),
        ("out", pk_tensor),
        ("sinks", pk_tensor),
        ("gains", pk_tensor),
        ("k_offset", c_int64),
        ("v_offset", c_int64),
        ("n_heads", c_int32),
        ("n_kv_heads", c_int32),
        ("head_width", c_int32),
        ("v_width", c_int32),
        ("window", c_int32),
        ("kv_format", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("is_bidirectional", c_int32),
        ("parts", c_int32),
    ]


class pk_op_gate(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("x", pk_tensor),
        ("out", pk_tensor),
        ("act", c_int32),
        ("reserved", c_int32),
    ]


class pk_op_gather(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("x", pk_tensor),
        ("out", pk_tensor),
        ("pool", c_int32),
        ("reserved", c_int32),
    ]


class pk_op_sample(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("logits", pk_tensor),
    ]


class pk_op_commit(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
    ]


class pk_op_copy(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("x", pk_tensor),
        ("out", pk_tensor),
    ]


class pk_op_add(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("x", pk_tensor),
        ("y", pk_tensor),
        ("out", pk_tensor),
        ("scale", c_float),
        ("reserved", c_int32),
    ]


class pk_op_route(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("logits", pk_tensor),
        ("bias", pk_tensor),
        ("ids", pk_tensor),
        ("weights", pk_tensor),
        ("score", c_int32),
        ("is_normalised", c_int32),
        ("n_groups", c_int32),
        ("n_groups_used", c_int32),
        ("scale", c_float),
        ("n_group_best", c_int32),
    ]


class pk_op_experts(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("x", pk_tensor),
        ("ids", pk_tensor),
        ("weights", pk_tensor),
        ("gate", pk_tensor),
        ("up", pk_tensor),
        ("down", pk_tensor),
        ("gate_bias", pk_tensor),
        ("up_bias", pk_tensor),
        ("down_bias", pk_tensor),
        ("y", pk_tensor),
        ("add", pk_tensor),
        ("n_experts", c_int32),
        ("act", c_int32),
        ("scale", c_float),
        ("limit", c_float),
        ("alpha", c_float),
        ("reserved", c_int32),
    ]


class pk_op_sigmoid(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("x", pk_tensor),
        ("g", pk_tensor),
        ("out", pk_tensor),
    ]


class pk_op_delta(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("qkv", pk_tensor),
        ("z", pk_tensor),
        ("b", pk_tensor),
        ("a", pk_tensor),
        ("conv", pk_tensor),
        ("a_log", pk_tensor),
        ("dt_bias", pk_tensor),
        ("scale", pk_tensor),
        ("out", pk_tensor),
        ("state_offset", c_int64),
        ("conv_offset", c_int64),
        ("n_k_heads", c_int32),
        ("n_v_heads", c_int32),
        ("k_width", c_int32),
        ("v_width", c_int32),
        ("conv_width", c_int32),
        ("eps", c_float),
        ("is_tiled", c_int32),
        ("reserved", c_int32),
    ]


class pk_op_conv(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("x", pk_tensor),
        ("conv", pk_tensor),
        ("bias", pk_tensor),
        ("out", pk_tensor),
        ("conv_offset", c_int64),
        ("conv_width", c_int32),
        ("reserved", c_int32),
    ]


class pk_op_mamba(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("xbc", pk_tensor),
        ("z", pk_tensor),
        ("dt", pk_tensor),
        ("conv", pk_tensor),
        ("bias", pk_tensor),
        ("a_log", pk_tensor),
        ("dt_bias", pk_tensor),
        ("d", pk_tensor),
        ("scale", pk_tensor),
        ("out", pk_tensor),
        ("state_offset", c_int64),
        ("conv_offset", c_int64),
        ("n_heads", c_int32),
        ("head_width", c_int32),
        ("n_groups", c_int32),
        ("state_width", c_int32),
        ("conv_width", c_int32),
        ("n_norms", c_int32),
        ("eps", c_float),
        ("dt_low", c_float),
        ("dt_high", c_float),
        ("reserved", c_int32),
    ]

# enum pk_scales
PK_SCALES_NONE = 0
PK_SCALES_TENSOR = 1
PK_SCALES_ROW = 2
PK_SCALES_BLOCK = 3
PK_SCALES_GROUP = 4


class pk_source(Structure):
    _fields_ = [
        ("data", c_uint64),
        ("n_bytes", c_int64),
        ("rows", c_int64),
        ("cols", c_int64),
        ("format", c_int32),
        ("scales", c_int32),
        ("scale_data", c_uint64),
        ("scale_rows", c_int64),
        ("scale_cols", c_int64),
        ("global_scale", c_float),
        ("offset", c_float),
        ("block_rows", c_int32),
        ("block_cols", c_int32),
        ("first_row", c_int64),
        ("part_rows", c_int64),
    ]


class pk_open_config(Structure):
    _fields_ = [
        ("device", c_int32),
        ("n_threads", c_int32),
        ("max_isa", c_int32),
        ("is_invariant", c_int32),
    ]


class pk_facts(Structure):
    _fields_ = [
        ("is_host", c_int32),
        ("run_ahead", c_int32),
        ("activation", c_int32),
        ("n_threads", c_int32),
        ("memory_bytes", c_int64),
        ("free_bytes", c_int64),
        ("granule_bytes", c_int64),
        ("n_processors", c_int32),
        ("is_validated", c_int32),
        ("has_drafts", c_int32),
        ("reserved", c_int32),
        ("arch", c_char * 64),
        ("name", c_char * 128),
        ("build", c_char * 64),
    ]


class pk_counters(Structure):
    _fields_ = [
        ("n_allocations", c_int64),
        ("allocated_bytes", c_int64),
        ("n_steps", c_int64),
        ("n_repacked_bytes", c_int64),
    ]

# enum pk_memory
PK_MEMORY_DEVICE = 0
PK_MEMORY_PINNED = 1

# enum pk_rare_op
PK_OP_SOFTPLUS = 64
PK_OP_WEIGH = 65
PK_OP_NGRAM = 66
PK_OP_STREAMS = 67
PK_OP_DILATED = 68
PK_OP_SPARSE = 69
PK_OP_DELTA_SIGMOID = 70
PK_OP_KEEP = 71
PK_OP_SETTLE = 72
PK_OP_SHIFT = 73
PK_OP_GUESS = 74
PK_OP_SETTLE_MAMBA = 75
PK_OP_SETTLE_CONV = 76
PK_OP_EXPERTS_FETCHED = 77
PK_OP_POOL = 78


class pk_op_softplus(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("x", pk_tensor),
        ("g", pk_tensor),
        ("out", pk_tensor),
    ]


class pk_op_weigh(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("ids", pk_tensor),
        ("weights", pk_tensor),
        ("logits", pk_tensor),
        ("scales", pk_tensor),
        ("is_normalised", c_int32),
        ("reserved", c_int32),
    ]


class pk_op_ngram(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("table", pk_tensor),
        ("out", pk_tensor),
        ("multipliers", c_int64 * 8),
        ("sizes", c_int32 * 64),
        ("n_tokens", c_int32),
        ("n_each", c_int32),
        ("end_token", c_int32),
        ("n_pieces", c_int32),
    ]


class pk_op_streams(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("q", pk_tensor),
        ("k", pk_tensor),
        ("v", pk_tensor),
        ("out", pk_tensor),
    ]


class pk_op_dilated(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("x", pk_tensor),
        ("conv", pk_tensor),
        ("add", pk_tensor),
        ("out", pk_tensor),
        ("conv_offset", c_int64),
        ("conv_width", c_int32),
        ("dilation", c_int32),
    ]


class pk_op_sparse(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("q", pk_tensor),
        ("index_q", pk_tensor),
        ("index_norm", pk_tensor),
        ("frequency", pk_tensor),
        ("gains", pk_tensor),
        ("out", pk_tensor),
        ("k_offset", c_int64),
        ("v_offset", c_int64),
        ("i_offset", c_int64),
        ("n_heads", c_int32),
        ("n_kv_heads", c_int32),
        ("head_width", c_int32),
        ("v_width", c_int32),
        ("kv_format", c_int32),
        ("index_heads", c_int32),
        ("index_width", c_int32),
        ("block_tokens", c_int32),
        ("n_blocks", c_int32),
        ("rope_width", c_int32),
        ("rope_layout", c_int32),
        ("rope_magnitude", c_float),
        ("scale", c_float),
        ("eps", c_float),
        ("parts", c_int32),
        ("reserved", c_int32),
    ]


class pk_op_keep(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("x", pk_tensor),
        ("b", pk_tensor),
        ("a", pk_tensor),
        ("from_offset", c_int64),
        ("n_bytes", c_int64),
        ("kept_offset", c_int64),
        ("rows_offset", c_int64),
        ("max_tokens", c_int32),
        ("reserved", c_int32),
    ]


class pk_op_settle(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("delta", pk_op_delta),
        ("from_offset", c_int64),
        ("n_bytes", c_int64),
        ("kept_offset", c_int64),
        ("rows_offset", c_int64),
        ("max_tokens", c_int32),
        ("reserved", c_int32),
    ]


class pk_op_settle_mamba(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("mamba", pk_op_mamba),
        ("from_offset", c_int64),
        ("n_bytes", c_int64),
        ("kept_offset", c_int64),
        ("rows_offset", c_int64),
        ("max_tokens", c_int32),
        ("reserved", c_int32),
    ]


class pk_op_settle_conv(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("conv", pk_op_conv),
        ("from_offset", c_int64),
        ("n_bytes", c_int64),
        ("kept_offset", c_int64),
        ("rows_offset", c_int64),
        ("max_tokens", c_int32),
        ("reserved", c_int32),
    ]


class pk_op_shift(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
    ]


class pk_op_guess(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("logits", pk_tensor),
        ("first", c_int64),
    ]
PK_CACHE_HEAD = 16


class pk_expert_cache(Structure):
    _fields_ = [
        ("home", c_uint64),
        ("slots", c_uint64),
        ("staging", c_uint64),
        ("cache", c_uint64),
        ("counts", c_uint64),
        ("stride", c_int64),
        ("n_bytes", c_int64),
        ("n_slots", c_int32),
        ("n_staging", c_int32),
        ("n_experts", c_int32),
        ("reserved", c_int32),
    ]
PK_AHEAD_TOKENS = 16


class pk_op_experts_fetched(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("experts", pk_op_experts),
        ("here", pk_expert_cache),
        ("next", pk_expert_cache),
        ("expected", pk_tensor),
        ("n_most", c_int32),
        ("reserved", c_int32),
    ]
PK_PAGE_OF_POOL = 1


class pk_op_pool(Structure):
    _fields_ = [
        ("op", c_int32),
        ("size", c_int32),
        ("kv", c_uint64),
        ("kv_page_stride", c_int64),
        ("page_table", c_uint64),
        ("token_page", c_uint64),
    ]
PK_ROW_HELD = 128


class pk_finish_head(Structure):
    _fields_ = [
        ("seq", c_uint64),
        ("n_masks", c_int32),
        ("reserved", c_int32),
    ]


class pk_cold_config(Structure):
    _fields_ = [
        ("n_threads", c_int32),
        ("takes_all", c_int32),
    ]


class pk_cold(Structure):
    _fields_ = [
        ("n_threads", c_int32),
        ("n_layers", c_int32),
        ("n_computed", c_uint64),
        ("copy_us", c_float),
        ("expert_us", c_float),
        ("row_us", c_float),
        ("ask_us", c_float),
        ("isa", c_char * 16),
    ]
PK_COLD_TOKENS = 16


PROTOTYPES = {
    "pk_abi_digest": (c_char_p, []),
    "pk_describe": (c_char_p, []),
    "pk_last_error": (c_char_p, []),
    "pk_n_devices": (c_int32, []),
    "pk_open": (c_int32, [c_void_p, c_void_p]),
    "pk_close": (None, [c_void_p]),
    "pk_get_facts": (c_int32, [c_void_p, c_void_p]),
    "pk_get_counters": (c_int32, [c_void_p, c_void_p]),
    "pk_alloc": (c_int32, [c_void_p, c_int32, c_int64, c_void_p]),
    "pk_free": (c_int32, [c_void_p, c_int32, c_uint64]),
    "pk_reserve": (c_int32, [c_void_p, c_int64, c_void_p]),
    "pk_attach": (c_int32, [c_void_p, c_uint64, c_int64]),
    "pk_detach": (c_int32, [c_void_p, c_uint64, c_int64]),
    "pk_release": (c_int32, [c_void_p, c_uint64]),
    "pk_write": (c_int32, [c_void_p, c_uint64, c_void_p, c_int64]),
    "pk_read": (c_int32, [c_void_p, c_void_p, c_uint64, c_int64]),
    "pk_fill": (c_int32, [c_void_p, c_uint64, c_int32, c_int64]),
    "pk_copy": (c_int32, [c_void_p, c_uint64, c_uint64, c_int64]),
    "pk_packed_bytes": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "pk_repack": (c_int32, [c_void_p, c_void_p, c_uint64, c_int64]),
    "pk_workspace_bytes": (c_int32, [c_void_p, c_void_p, c_void_p, c_int64, c_void_p]),
    "pk_load": (c_int32, [c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int32, c_void_p]),
    "pk_unload": (None, [c_void_p]),
    "pk_step": (c_int32, [c_void_p, c_void_p]),
    "pk_wait": (c_int32, [c_void_p, c_uint64, c_int64]),
    "pk_times": (c_int32, [c_void_p, c_void_p, c_int32, c_void_p]),
    "pk_run": (c_int32, [c_void_p, c_int32, c_int32, c_int32, c_void_p]),
    "pk_finish": (c_int32, [c_void_p, c_void_p]),
    "pk_copied": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "pk_cold_open": (c_int32, [c_void_p, c_void_p]),
    "pk_cold_facts": (c_int32, [c_void_p, c_void_p]),
    "pk_part": (c_int32, [c_void_p, c_int32, c_void_p]),
    "pk_give_way": (c_int32, [c_void_p, c_int32]),
}
