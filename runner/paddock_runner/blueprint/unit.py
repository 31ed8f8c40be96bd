"""Norms without weights: the packs' norms multiply with some, so these have ones, which no checkpoint stores."""

from __future__ import annotations

from .blueprint import Blueprint


def unit_norms(blueprint: Blueprint) -> dict[str, int]:
    """Our name -> width of every norm whose weights are ones."""
    found: dict[str, int] = {}
    if blueprint.embed_norm and blueprint.unit_embed_norm:
        found["embed_norm.weight"] = blueprint.model_width
    for i, layer in enumerate(blueprint.layers):
        a, at = layer.attention, f"layers.{i}."
        if a.qk_norm and a.unit_qk_norm:
            found[at + "q_norm.weight"] = a.head_width
        if a.kv_from is None and a.qk_norm and a.unit_qk_norm:
            found[at + "k_norm.weight"] = a.head_width
        if a.kv_from is None and a.v_norm:
            found[at + "v_norm.weight"] = a.values_width
    return found
