"""What a model is, as frozen data: the one decoder reads it, and so does the memory plan.

Knows nothing of files, devices or requests. A family file (families/*.py) makes a Blueprint from a checkpoint's metadata.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of one layer.

    layout: "neox" (pairs d, d+n/2) or "interleaved" (pairs 2d, 2d+1). width: rotated dimensions (<= head width).
    factors: per-frequency divisors (width/2 of them; llama-3 and longrope scaling are resolved into these), or empty.
    magnitude: multiplies cos and sin (yarn, longrope); 1.0 otherwise.
    long_factors: take the place of factors when the runner's context exceeds original_ctx_tokens (longrope); or empty.
    """

    theta: float
    width: int
    layout: str = "neox"
    factors: tuple[float, ...] = ()
    magnitude: float = 1.0
    long_factors: tuple[float, ...] = ()
    original_ctx_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention (DeepSeek): keys and values of all heads are made of one latent of `rank` numbers, which is what is cached, with
    rope_width numbers that are rotated. The attention's one key head is [rotated, latent]; its values are the latent.

    nope_width, v_width: of a head as the projections have it. q_rank: width between the query's two projections, 0: one projection.
    """

    rank: int
    rope_width: int
    nope_width: int
    v_width: int
    q_rank: int = 0

    @property
    def q_width(self) -> int:
        """Of a head's query before its unrotated part is turned into the latent's space."""
        return self.nope_width + self.rope_width


@dataclass(frozen=True, slots=True)
class Index:
    """What chooses the tokens that attention sees (Qwen 4): n_heads queries of that width score blocks of block_tokens tokens, of which n_blocks are seen."""

    n_heads: int
    width: int
    block_tokens: int
    n_blocks: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention of one layer. window: tokens visible including the own one, 0 for all. scale: multiplies q.k.

    qk_norm: norms on q and k, one per head; qk_norm_all: one over all heads together; unit_qk_norm: qk_norm has no weights.
    v_norm: likewise on v, without weights. values_are_keys: v is what k is before its norm and rope. kv_from: number of the layer whose
    keys and values these queries read, where this one has none of its own.
    out_gate: the output is multiplied with the sigmoid (gate_act: or "softplus") of a projection as wide as the queries, or one number a head.
    """

    n_heads: int
    n_kv_heads: int
    head_width: int
    scale: float
    rope: Rope | None
    v_width: int = 0  # 0: head_width
    window: int = 0
    softcap: float = 0.0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    qk_norm_all: bool = False
    sinks: bool = False
    latent: Latent | None = None
    out_gate: bool = False
    gate_act: str = "sigmoid"
    gate_by_head: bool = False
    causal: bool = True
    unit_qk_norm: bool = False
    v_norm: bool = False
    values_are_keys: bool = False
    kv_from: int | None = None
    index: Index | None = None

    @property
    def is_plain(self) -> bool:
        """Whether every query sees the keys themselves, and all that its window leaves: no latent, no index."""
        return self.latent is None and self.index is None

    @property
    def values_width(self) -> int:
        """Width of a value head as the cache has it."""
        return self.v_width or self.head_width

    @property
    def qkv_width(self) -> int:
        """Queries, keys and values of a token, as they are made for the cache."""
        if self.kv_from is not None:
            return self.n_heads * self.head_width
        v = 0 if self.latent is not None else self.n_kv_heads * self.values_width
        return (self.n_heads + self.n_kv_heads) * self.head_width + v

    @property
    def gate_width(self) -> int:
        """Numbers of the output's gate; 0 without one."""
        return 0 if not self.out_gate else self.n_heads if self.gate_by_head else self.n_heads * self.head_width

    @property
    def out_width(self) -> int:
        """What the last projection reads."""
        return self.n_heads * (self.latent.v_width if self.latent is not None else self.values_width)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Feed-forward: down(act(gate(x)) * up(x)), or (not is_gated) down(act(up(x))). activation: "silu", "gelu_tanh", "gelu_erf", "relu2"."""

    width: int
    activation: str = "silu"
    bias: bool = False
    is_gated: bool = True


NO_ATTENTION = Attention(0, 0, 0, 1.0, None)
"""Of layers of another kind: no heads, no keys, no values."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Gated delta net of one layer: a matrix state of k_width x v_width per value head, after a convolution over q, k and v.

    is_tiled: value head h belongs to key head h mod n_k_heads (GGUF), not to h // (n_v_heads / n_k_heads). gate_act: "silu" or "sigmoid".
    """

    n_k_heads: int
    n_v_heads: int
    k_width: int
    v_width: int
    conv_width: int
    is_tiled: bool = False
    gate_act: str = "silu"

    @property
    def n_values(self) -> int:
        """Width of the layer's values."""
        return self.n_v_heads * self.v_width

    @property
    def n_channels(self) -> int:
        """Width of q, k and v together: what is convolved."""
        return 2 * self.n_k_heads * self.k_width + self.n_values


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Gated short convolution of one layer (LFM2), over the model's width."""

    width: int
    conv_width: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Mamba:
    """Mamba 2 of one layer: a state of state_width x head_width per head, after a convolution over x, B and C.

    n_norms: parts that the output norm treats apart. step: the least and the largest time step.
    """

    n_heads: int
    head_width: int
    n_groups: int
    state_width: int
    conv_width: int
    n_norms: int = 1
    conv_bias: bool = True
    bias: bool = False
    step: tuple[float, float] = (0.0, float("inf"))

    @property
    def n_values(self) -> int:
        """Width of the layer's values."""
        return self.n_heads * self.head_width

    @property
    def n_channels(self) -> int:
        """Width of x, B and C together: what is convolved."""
        return self.n_values + 2 * self.n_groups * self.state_width


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts of one layer; the layer's feed_forward is the shared expert (width 0: none).

    width: of one expert. score: "softmax", "sigmoid", or "chosen" (softmax over the chosen ones). is_normalised: chosen scores are
    divided by their sum, then multiplied with scale. n_groups, n_groups_used: only experts of the best groups may be chosen; a group is
    as good as the sum of its n_group_best largest scores.
    choice_bias: a bias on scores that decides the choice only; router_bias: on the router's logits; bias: on the experts' products.
    activation: "silu", "swiglu_clamp" with limit and alpha, or (not is_gated) "relu2". shared_gate: the shared expert is weighed by a sigmoid of its own.
    is_interleaved: gate and up rows alternate in a checkpoint that stores them in one matrix. router_softcap: caps the router's logits.
    is_beside: experts and the layer's feed-forward read the residual and give their parts through norms of their own (Gemma 4); the router
    reads it through a norm too, and what it makes of that is multiplied with router_scale. has_scales: a factor for each expert's output.
    choice_by_logit: the choice is by logit plus bias, not by score plus bias.
    """

    n_experts: int
    n_used: int
    width: int
    score: str = "softmax"
    is_normalised: bool = True
    scale: float = 1.0
    n_groups: int = 1
    n_groups_used: int = 1
    n_group_best: int = 2
    choice_bias: bool = False
    router_bias: bool = False
    bias: bool = False
    activation: str = "silu"
    limit: float = 0.0
    alpha: float = 0.0
    shared_gate: bool = False
    is_interleaved: bool = False
    is_gated: bool = True
    router_softcap: float = 0.0
    is_beside: bool = False
    router_scale: float = 1.0
    has_scales: bool = False
    choice_by_logit: bool = False


@dataclass(frozen=True, slots=True)
class Ngram:
    """What the last few tokens add to a layer's residual streams (Qwen 4): rows of a table, one from each part, chosen by a product of tokens and
    multipliers; a convolution of conv_width taps, so many tokens apart as an n-gram has at most (n_tokens).

    sizes: rows of every part: n_each parts for 2-grams, as many for 3-grams, ... width: of a row. n_pieces, piece_rows: how the table is stored.
    end_token: stands for tokens before the text's beginning, and for those before the last such token.
    """

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    n_each: int
    width: int
    end_token: int
    conv_width: int
    n_pieces: int
    piece_rows: int

    @property
    def n_tokens(self) -> int:
        """Tokens of the longest n-gram."""
        return len(self.multipliers)

    @property
    def embedding_width(self) -> int:
        """All rows of a token side by side."""
        return len(self.sizes) * self.width


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: a mixer (attention, or what kind says) and a feed-forward; kind "none" has no mixer, width 0 without experts no feed-forward.

    pre_norms: norms on what the branches read; post_norms: norms on what they give, before it joins the residual.
    residual_norms: norms on the residual itself, after each branch has joined it (BERT). out_scale: multiplies the residual at the end.
    has_streams: branches read a mixture of the residual's streams, and join each by a weight of its own.
    """

    attention: Attention
    feed_forward: FeedForward
    kind: str = "attention"
    post_norms: bool = False
    pre_norms: bool = True
    residual_norms: bool = False
    out_scale: float = 1.0
    experts: Experts | None = None
    delta: Delta | None = None  # of layers of kind "delta"; their attention is NO_ATTENTION
    conv: ShortConv | None = None  # of layers of kind "conv"; likewise
    mamba: Mamba | None = None  # of layers of kind "mamba"; likewise
    has_streams: bool = False
    ngram: Ngram | None = None

    @property
    def joins_later(self) -> bool:
        """True when a branch's output does not go straight onto the residual."""
        return self.post_norms or self.has_streams

    @property
    def has_feed_forward(self) -> bool:
        """True unless the block is a mixer alone."""
        return self.feed_forward.width > 0 or self.experts is not None


@dataclass(frozen=True, slots=True)
class Dense:
    """y = activation(x W^T + b) on pooled rows. activation: "none", "tanh" or "gelu_erf"."""

    cols: int
    rows: int
    bias: bool = False
    activation: str = "none"


@dataclass(frozen=True, slots=True)
class Pooling:
    """What a model without a head makes of its hidden states: one vector a sequence.

    task: "embed" or "rank". pool: which rows, "last", "first" or "mean". layers: applied to the pooled row, in order.
    answers: ids of the tokens for no and yes, whose logits are the vector (ranking by a language model); or None.
    is_normalised: vectors have length 1. prompts: name -> text that belongs before a text of that kind.
    """

    task: str
    pool: str
    layers: tuple[Dense, ...] = ()
    answers: tuple[int, int] | None = None
    is_normalised: bool = False
    prompts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A whole text model: sizes, layers, norms, head.

    norm: kind of its norms, "rms" or "layer"; norm_bias: these have biases. n_positions: rows of learned positions, the first
    position_offset of which no token has. n_token_types: kinds of tokens; a token of kind k has the id token + k * n_vocab.
    input_width: of what every layer is told of the token once more (Gemma 4); 0: nothing. unit_embed_norm: embed_norm has no weights.
    post_norm_eps: of norms after branches; 0: as the others. out_norm_offset: of the last norm, in place of norm_offset.
    n_streams: residual streams, mixed by products of rank stream_rank (hyper-connections).
    """

    family: str
    n_vocab: int
    model_width: int
    max_ctx_tokens: int
    layers: tuple[Layer, ...]
    norm_eps: float
    tied_head: bool
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    residual_scale: float = 1.0
    norm_offset: float = 0.0  # added to norm weights at load (Hugging Face gemma stores w - 1)
    norm: str = "rms"
    norm_bias: bool = False
    embed_norm: bool = False
    unit_embed_norm: bool = False
    has_out_norm: bool = True
    out_norm_offset: float | None = None
    post_norm_eps: float = 0.0
    input_width: int = 0
    n_streams: int = 1
    stream_rank: int = 0
    n_positions: int = 0
    position_offset: int = 0
    n_token_types: int = 0
    pooling: Pooling | None = None  # of a model that gives vectors instead of tokens
    draft: Layer | None = None  # the layer that guesses the token after the next (MTP), where it is wanted; it comes after the others
    max_guesses: int = 0  # guessed tokens of a row that recurrent layers can take back
    n_draft_layers: int = 0  # blocks after the model's own that draft tokens, not loaded
    name: str = ""
    notes: tuple[str, ...] = field(default=())  # warnings for people: "the vision tower is not loaded"

    @property
    def has_states(self) -> bool:
        """True when some layer remembers a sequence otherwise than by keys and values: its pages alone cannot continue it."""
        return any(layer.delta is not None or layer.conv is not None or layer.mamba is not None for layer in self.layers)

    @property
    def all_layers(self) -> tuple[Layer, ...]:
        """The layers, and after them the one that guesses."""
        return (*self.layers, self.draft) if self.draft is not None else self.layers

    @property
    def may_take_back(self) -> bool:
        """True when every layer that remembers a sequence otherwise than by keys and values is one that can take guesses back."""
        return all(layer.ngram is None for layer in self.layers)

    @property
    def lookback_tokens(self) -> int:
        """Tokens before a step's own that it reads as tokens: those of n-grams."""
        return max((layer.ngram.n_tokens - 1 for layer in self.layers if layer.ngram is not None), default=0)

    @property
    def is_causal(self) -> bool:
        """True when no token sees a later one."""
        return all(layer.attention.causal for layer in self.layers)

    @property
    def needs_whole_prompts(self) -> bool:
        """True when a sequence must be computed in one step: later tokens, or a mean over all of them, matter to every vector."""
        return self.pooling is not None and (not self.is_causal or self.pooling.pool != "last")

    @property
    def task(self) -> str:
        """What the model is for: "generate", "embed" or "rank"."""
        return self.pooling.task if self.pooling is not None else "generate"

    @property
    def n_ids(self) -> int:
        """Ids that a token may have: its number and its type."""
        return self.n_vocab * max(1, self.n_token_types)

    @property
    def vector_width(self) -> int:
        """Numbers of a sequence's vector; 0 for a model that generates."""
        if self.pooling is None:
            return 0
        if self.pooling.answers is not None:
            return len(self.pooling.answers)
        return self.pooling.layers[-1].rows if self.pooling.layers else self.model_width

    @property
    def n_layers(self) -> int:
        """How many blocks."""
        return len(self.layers)
