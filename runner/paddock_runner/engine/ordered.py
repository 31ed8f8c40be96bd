"""What the engine was ordered to do, done: weights and program onto an open device, then the loop until it ends."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from .. import log
from ..blueprint.guessing import with_guesses
from ..blueprint.kv_scales import kv_scales
from ..blueprint.names import tensors_by_name
from ..blueprint.read import read_blueprint
from ..cache.tiers import file_facts
from ..files.checkpoint import open_checkpoint
from ..memory.state import page_layout
from ..pack.device import Device
from ..wire.channel import Channel
from .accounts import is_shared
from .assemble import Kept, fill_device
from .order import Order
from .policy import Policy
from .process import EngineConfig, engine_main
from .tiering import TierConfig


def serve(order: Order, device: Device, stages: log.Stages) -> None:
    """Loads the model and serves it; the device stays open. Raises: PaddockError."""
    channel = Channel.parse(order.channel)
    checkpoint = open_checkpoint(order.model)
    blueprint = with_guesses(read_blueprint(checkpoint, order.task), checkpoint, order.guesses)
    views = tensors_by_name(checkpoint, blueprint)
    stages.end("header")
    tiers = None
    if order.host_cache_bytes or order.disk_cache_bytes:
        files = tuple(file_facts(path) for path in sorted(checkpoint.paths))
        tiers = TierConfig(order.host_cache_bytes, order.disk_cache_bytes, Path(order.cache_folder), files)
    policy = Policy(
        max_queue=order.max_queue, whole_prompts=blueprint.needs_whole_prompts, idle_release_s=order.idle_release_s, draft_head=blueprint.draft is not None,
        long_delay=order.long_delay,
    ).on(device.facts.arch)
    if order.guesses == "off":
        policy = replace(policy, draft_rows=0)
    layout = page_layout(blueprint, order.kv_format, order.sizes.page_tokens, order.sizes.n_window_pages > 0)
    facts = (*device.page_facts[:-1], order.kv_format)
    with tiers.claimed(order.sizes, layout.page_bytes, facts) if tiers is not None and is_shared(order.sizes, policy) else nullcontext():
        kept = Kept(order.kv_format, kv_scales(checkpoint.tensors, blueprint) if "fp8" in order.kv_format else {})
        experts = fill_device(device, order.sizes, kept, blueprint, views, stages=stages, cold_experts=order.cold_experts)
        row_bytes = 0 if any(layer.experts for layer in blueprint.layers) else device.allocated["weights"]
        config = EngineConfig(order.sizes, policy, device.read_vectors if blueprint.pooling else None, tiers, stages, experts.report if experts else None, row_bytes)
        engine_main(config, device, [channel])
