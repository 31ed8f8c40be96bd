"""Whether a call that a model wrote without its markers, so that no grammar held it, is one that may be made all the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import PaddockError
from .grammar import Grammars, json_schema

Schema = Mapping[str, Any]
MAX_DEPTH = 32


class Fitting:
    """The calls of one answer. schemas: what the arguments of each tool must match. is_parallel: whether there may be several calls."""

    def __init__(self, grammars: Grammars, schemas: Mapping[str, Schema], is_parallel: bool) -> None:
        self._grammars, self._schemas, self._is_parallel = grammars, schemas, is_parallel
        self._n_calls = 0

    def __call__(self, name: str, arguments: str) -> bool:
        """Whether this is a call, too."""
        if self._n_calls and not self._is_parallel:
            return False
        schema = self._schemas.get(name)
        if schema and not self._matches(schema, arguments):
            return False
        self._n_calls += 1
        return True

    def _matches(self, schema: Schema, arguments: str) -> bool:
        try:
            matcher = self._grammars.matcher(json_schema(schema))
        except PaddockError:
            return False
        tokens = self._grammars.tokens_of(json.dumps(_ordered(json.loads(arguments), schema, schema), ensure_ascii=False))
        return matcher.accept_some(tokens) == len(tokens) and matcher.is_accepting


def _ordered(value: Any, schema: Any, root: Schema, depth: int = 0) -> Any:
    """The value with the keys of its objects in the schema's order: grammars know no other."""
    if depth > MAX_DEPTH or not isinstance(schema, Mapping):
        return value
    reference = str(schema.get("$ref", ""))
    if reference.startswith("#/"):
        found: Any = root
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        return _ordered(value, found, root, depth + 1)
    if isinstance(value, list):
        return [_ordered(item, schema.get("items"), root, depth + 1) for item in value]
    known = schema.get("properties")
    if not isinstance(value, dict) or not isinstance(known, Mapping):
        return value
    names = [*(name for name in known if name in value), *(name for name in value if name not in known)]
    return {name: _ordered(value[name], known.get(name), root, depth + 1) for name in names}
