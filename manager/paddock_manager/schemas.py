"""What `--json` prints, command by command: the published shapes. Fields may be added; none is renamed or removed within a version.

A shape is written as Python data: {"name": str, "size?": int} is an object with an optional field, [x] a list, (a, b) either, Any anything.
"""

from __future__ import annotations

from typing import Any

VERSION = 1
Shape = Any

MODEL: Shape = {
    "name": str, "ref": str, "repo": str, "quant": str, "state": str, "size_bytes": int, "done_bytes": int, "path": str, "is_added": bool,
    "source": str, "commit": str, "licence": str, "pulled_at": float, "family?": (str, None), "format?": (str, None), "n_params?": int,
    "max_ctx_tokens?": (int, None), "template_sha256?": (str, None), "role?": str, "kind?": str, "task?": str, "problem?": str,
}  # fmt: skip
CATALOG: Shape = {
    "name": str, "title": str, "params": str, "family": str, "licence": str, "repo": str, "rev": str, "quant": str, "files": [str],
    "size_bytes?": int, "sampling": {},
}  # fmt: skip
SERVER: Shape = {
    "name": str, "ref": str, "path": str, "pid": int, "url": str, "host": str, "port": int, "device": str, "max_ctx_tokens": int,
    "max_batch": int, "planned_bytes": int, "started_at": float, "log": str,
}  # fmt: skip
PLAN: Shape = {
    "lines": [{"name": str, "bytes": int, "source": str, "group": str}], "total_bytes": int, "peak_bytes": int, "host_bytes": int, "n_expert_slots": int, "max_ctx_tokens": int,
    "max_batch": int, "kv_format": str, "kv_token_bytes": int, "page_tokens": int, "n_pages": int, "pool_tokens": int,
}  # fmt: skip
REPORT: Shape = {
    "name": str, "verdict": str, "fits": bool, "plan": PLAN, "headroom_bytes": int, "largest_ctx_tokens": int, "largest_batch": int,
    "model_ctx_tokens": int, "limited_by": str, "alternatives": [{"change": str}], "notes": [str],
    "device": {"kind": str, "label": str, "memory_bytes": int, "free_bytes": int, "source": str, "holders": [{"pid": int, "name": str, "used_bytes": int}],
               "calibration?": ({"gpu": str, "driver": str, "process_bytes": int, "memory_bytes_per_s": float, "host_bytes_per_s": float, "pack": str, "at": float}, None)},
}  # fmt: skip
ORDER: Shape = {
    "ref": str, "commit": str, "quant": str, "source": str, "licence": str, "size_bytes": int, "need_bytes": int,
    "files": [{"name": str, "size_bytes": int, "sha256": str, "missing": bool}], "skipped": [{"name": str, "why": str}], "notes": [str],
}
SHAPES: dict[str, Shape] = {
    "error": {"error": {"code": str, "exit_code": int, "message": str, "hint": str, "facts": {}}},
    "pull": {"dry_run": bool, "model?": MODEL, "models?": [MODEL], "lock?": str, "orders?": [ORDER], **{f"{key}?": shape for key, shape in ORDER.items()}},
    "add": {"model": MODEL},
    "ls": {
        "models?": [{**MODEL, "fit?": {"verdict": str, "largest_ctx_tokens": int, "need_bytes": int, "says": str}}], "problems?": [str], "home?": str, "remote?": str, "elsewhere?": [{"program": str, "path": str, "size_bytes": int}], "commit?": str, "licence?": str,
        "variants?": [{"ref": str, "size_bytes": int, "files": int}],
    },
    "show": {
        "model?": MODEL, "files?": [{"name": str, "size_bytes": int, "sha256": str, "git_sha1": str}], "template?": str, "path?": str,
        "diff?": str, "same?": bool, "catalog?": CATALOG,
    },
    "export": {"name": str, "ref": str, "folder": str, "how": str, "files": [{"name": str, "path": str, "size_bytes": int, "sha256": str}]},
    "inspect": {
        "path?": str, "template?": str, "sha256?": (str, None), "version?": int, "family?": (str, None), "format?": (str, None),
        "n_params?": int, "max_ctx_tokens?": (int, None), "template_sha256?": (str, None), "role?": str, "kind?": str,
        "architecture_known?": bool, "tokenizer?": ({"kind": str, "n_tokens": int, "bos": (int, None), "eos": (int, None)}, None), "licence?": (str, None), "n_tensors?": int, "tensor_bytes?": int, "formats?": {}, "metadata?": {}, "warnings?": [str],
        "notes?": [str], "unsupported_tensors?": [{"name": str, "format": str}],
        "tensors?": [{"name": str, "shape": [int], "format": str, "offset": int, "n_bytes": int}],
    },
    "fit": {
        "reports?": [REPORT],
        "history?": [
            {
                "model": str, "device": str, "max_ctx_tokens": int, "max_batch": int, "planned_bytes": int, "measured_bytes": int,
                "at": float, "is_over": bool,
            }
        ],
    },
    "run": {
        "model": str, "ref": str, "answer": str, "reasoning": str, "finish_reason": str, "usage": {}, "settings?": {},
        "timings": {"first_token_ms": float, "total_ms": float},
    },
    "serve": {"server?": SERVER, "auth?": bool, "unit?": str},
    "ps": {
        "servers": [
            {
                **SERVER, "state": str, "restarts": int, "ended": str, "last_lines": [str], "used_bytes?": int, "busy?": int, "waiting?": int,
                "answered_tokens?": int, "kv_format?": str,
            }
        ]
    },
    "stop": {"stopped": [{"name": str, "pid": int, "killed": bool}]},
    "logs": {"name": str, "path": str, "lines": [str]},
    "rm": {"dry_run": bool, "removed": [{"name": str, "ref": str, "freed_bytes": int, "files_kept": bool, "path": str}]},
    "verify": {
        "models": [
            {
                "name": str, "ref": str, "state": str, "fetched_bytes": int, "not_finite?": [{"tensor": str, "format": str, "n_blocks": int, "first": int}],
                "files": [{"name": str, "state": str, "expected": str, "actual": str, "bad_parts": [int]}],
            }
        ]
    },
    "gc": {"dry_run": bool, "removed": [{"path": str, "what": str, "bytes": int}], "freed_bytes": int},
    "du": {"models": [{"name": str, "bytes": int, "state": str, "in_place": bool}], "home": str, "home_bytes": int, "free_bytes": int},
    "search": {
        "catalog": [CATALOG],
        "hub": [{"repo": str, "downloads": int, "likes": int}],
    },
    "bench": {
        "model": str, "device": str, "prompt_tokens": int, "tokens": int,
        "rows": [
            {
                "streams": int, "first_ms": float, "gap_ms": float, "gap_p99_ms": float, "tokens_per_s": float, "requests": int,
                "errors": int, "error": str,
            }
        ],
        "quality?": [{"kv": str, "perplexity": float, "delta": float, "tokens": int}],
    },
    "launch": {"env": {}, "command": [str], "server": SERVER},
    "config": {"settings": [{"key": str, "value": (int, str), "origin": str, "default": (int, str), "about": str}], "file": str},
    "key": {"path": str, "key?": str, "keys?": [{"name": str, "scope": str, "weight": int}]},
    "doctor": {"state": str, "findings": [{"check": str, "state": str, "says": str, "fix": str}]},
    "version": {"paddock": str, "python": str, "system": str, "packages": {}, "runner": str},
    "completion": {"shell": str, "script": str},
}  # fmt: skip


def schema(kind: str) -> dict[str, Any]:
    """The JSON Schema of one command's document (or of `error`). Raises: KeyError."""
    body = of({"schema": str, **SHAPES[kind]})
    body["properties"]["schema"] = {"const": f"paddock.{kind}/{VERSION}"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"paddock {kind} --json", **body}


def of(shape: Shape) -> dict[str, Any]:
    """A shape as JSON Schema."""
    if isinstance(shape, dict):
        properties = {k.removesuffix("?"): of(v) for k, v in shape.items()}
        return {"type": "object", "properties": properties, "required": [k for k in shape if not k.endswith("?")]}
    if isinstance(shape, list):
        return {"type": "array", "items": of(shape[0])}
    if isinstance(shape, tuple):
        return {"anyOf": [of(s) for s in shape]}
    if shape is Any:
        return {}
    return {"type": {str: "string", int: "integer", float: "number", bool: "boolean", None: "null"}[shape]}


def as_markdown() -> str:
    """The reference page of all documents."""
    import json

    out = [
        "# JSON documents\n\nWhat `--json` prints on standard output, as JSON Schema. Fields may be added within a version; none is renamed "
        "or removed. A failed command prints the `error` document.\n"
    ]
    for kind in SHAPES:
        out.append(f"\n## {kind}\n\n```json\n{json.dumps(schema(kind), indent=1)}\n```\n")
    return "".join(out)
