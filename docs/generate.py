"""Writes docs/reference from the code, and the list of all pages from their titles, so that neither can rot. With --check only compares.

Usage: python docs/generate.py [--check]
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs/reference"


def table(head: list[str], rows: list[list[Any]]) -> str:
    """A markdown table."""
    lines = [head, ["---"] * len(head), *[[str(c).replace("|", "\\|") for c in row] for row in rows]]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def errors() -> str:
    """Every error class with its code, HTTP status and exit code."""
    module = importlib.import_module("paddock_runner.errors")
    classes = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, module.PaddockError)]
    rows = [[f"`{c.__name__}`", f"`{c.code}`", c.http_status, c.exit_code, (inspect.getdoc(c) or "").split("\n")[0]] for c in classes]
    exits = {0: "success", 1: "an internal fault: please report it"}
    for c in classes[1:]:
        exits.setdefault(c.exit_code, (inspect.getdoc(c) or "").split("\n")[0].rstrip("."))
    return (
        "# Errors and exit codes\n\nEvery failure is one sentence that names the file, field or number at fault, and what to do.\n\n"
        "## Exit codes\n\n" + table(["code", "meaning"], [[k, exits[k]] for k in sorted(exits)]) + "\n## Classes\n\n"
        + table(["class", "code in JSON", "HTTP", "exit", "meaning"], rows)
    )


def formats() -> str:
    """The weight formats."""
    module = importlib.import_module("paddock_runner.formats.table")
    rows = [
        [f"`{f.name}`", f.id, f.block_elements, f.block_bytes, round(8 * f.block_bytes / f.block_elements, 4), f.ggml if f.ggml is not None else "", f.safetensors or ""]
        for f in module.FORMATS
        if f.is_weight
    ]
    head = ["format", "pk_format", "elements per block", "bytes per block", "bits per weight", "GGUF type", "safetensors dtype"]
    return "# Weight formats\n\nWhat a matrix may be stored in. Anything else is refused by name when a model is opened.\n\n" + table(head, rows)


def models() -> str:
    """The families, from their files' own first lines."""
    folder = ROOT / "runner/paddock_runner/blueprint/families"
    rows = []
    for path in sorted(folder.glob("*.py")):
        if path.stem != "__init__":
            doc = inspect.getdoc(importlib.import_module(f"paddock_runner.blueprint.families.{path.stem}")) or ""
            rows.append([f"`{path.stem}`", doc.split("\n")[0]])
    return "# Model families\n\n" + table(["family", "what it covers"], rows)


def config() -> str:
    """Every knob of the runner."""
    module = importlib.import_module("paddock_runner.config")
    rows = []
    for k in module.knobs():
        default = "" if k.default in (None, "", ()) else k.default
        choices = f" ({', '.join(k.choices)})" if k.choices else ""
        rows.append([f"`{k.flag}`" if k.flag else "", f"`{k.variable}`", f"`{k.name}`", default, k.unit, k.doc + choices])
    text = (
        "# Configuration of a runner\n\nA flag wins over a variable, a variable over the TOML file (`--config`), the file over the default. "
        "`paddock-runner config` says where each value comes from, `--runner NAME=VALUE` of `paddock serve` passes a flag on, and PADDOCK_* variables that no setting has are named at the start. Nothing else reads the environment, C++ least of all.\n\n"
    )
    return text + table(["flag", "variable", "in the file", "default", "unit", "meaning"], rows)


def api() -> str:
    """Every route, with its handler's first line; then the fields and examples of every body."""
    module = importlib.import_module("paddock_runner.front.routes")
    document = json.loads(importlib.import_module("paddock_runner.front.openapi").description())
    rows = [
        [r.method, f"`{r.path}{'NAME' if r.path.endswith('/') else ''}`", r.vendor, "no" if r.is_open else "yes", (inspect.getdoc(r.handler) or "").split("\n")[0]]
        for r in module.ROUTES
    ]
    text = (
        "# The HTTP API\n\nThe fields are in `/openapi.json` of a running server, generated from the types that read the requests. Unknown fields are "
        "accepted and named in a response header. Errors have the shape that the vendor's SDK expects; see [errors](errors.md).\n\n"
    )
    text += table(["method", "path", "error shape", "needs a key", "what it does"], rows)
    told: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        body = methods.get("post", {}).get("requestBody")
        if body is not None:
            told.setdefault(json.dumps(body["content"]["application/json"]["schema"]), []).append(path)
    for reference, paths in told.items():
        text += "\n\n## " + ", ".join(f"POST {path}" for path in paths) + "\n"
        text += fields_of(json.loads(reference)["$ref"].rsplit("/", 1)[-1], document["components"]["schemas"])
        for path in paths:
            for title, example in document["paths"][path]["post"]["requestBody"]["content"]["application/json"].get("examples", {}).items():
                text += f"\n{title[:1].upper()}{title[1:]}:\n\n```json\n{json.dumps(example['value'], ensure_ascii=False)}\n```\n"
    return text


def fields_of(name: str, schemas: dict[str, Any]) -> str:
    """A body's description and the table of its fields."""
    schema = schemas[name]
    required = schema.get("required", ())
    rows = [[f"`{key}`", kind_of(kind), "yes" if key in required else ""] for key, kind in schema.get("properties", {}).items()]
    return f"\n{schema.get('description', '')}\n\n" + table(["field", "what it holds", "required"], rows)


def kind_of(schema: dict[str, Any]) -> str:
    """A field's type in words."""
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[-1].rsplit(".", 1)[-1])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind_of(part) for part in schema["anyOf"] if part.get("type") != "null"))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        return f"list of {kind_of(schema.get('items', {}))}"
    bounds = [f"{word} {schema[key]}" for key, word in (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to")) if key in schema]
    return " ".join([kind, *bounds])


def cli() -> str:
    """Every command of the manager."""
    module = importlib.import_module("paddock_manager.cli")
    return str(module.as_markdown())


def documents() -> str:
    """What --json prints."""
    module = importlib.import_module("paddock_manager.schemas")
    return str(module.as_markdown())


def boards() -> str:
    """Every measured row, newest board first."""
    out = ["# Boards\n\nWritten by `bench/`, never by hand. `of limit`: share of the roofline measured in the same run; `vs peer`: ratio to the peer in the same run.\n"]
    for path in sorted((ROOT / "bench/results").glob("*/*.json"), reverse=True):
        board = json.loads(path.read_text())
        context = ", ".join(f"{k} {shown(v)}" for k, v in board["context"].items())
        out.append(f"\n## {path.parent.name}: {path.stem}\n\n`{board['command']}` at {board['commit']} ({context})\n\n")
        rows = [[r["id"], shown(r["value"]), r["unit"], *(shown(r.get(name, "")) for name in ("of_limit", "vs_peer", "peer", "spread"))] for r in board["rows"]]
        out.append(table(["id", "value", "unit", "of limit", "vs peer", "peer", "spread"], rows))
    return "".join(out)


SHELVES = {
    "tutorial": "Learn by doing", "howto": "Do one thing", "explanation": "Understand", "reference": "Look up (written from the code)",
    "explanation/decisions": "Decisions, with what else was considered: never edited, only superseded",
}  # fmt: skip


def index() -> str:
    """Every page, by shelf; to be written last."""
    out = ["# All pages\n\nBegin with the [README](../README.md).\n"]
    for shelf, what in SHELVES.items():
        pages = sorted((ROOT / "docs" / shelf).glob("*.md"))
        out.append(f"\n## {what}\n\n" + "".join(f"- [{page.read_text().split(chr(10), 1)[0].removeprefix('# ')}]({shelf}/{page.name})\n" for page in pages))
    return "".join(out)


def shown(value: object) -> object:
    """A measured number without digits that mean nothing; everything else as it is."""
    return value if not isinstance(value, float) else f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


PAGES: dict[str, Callable[[], str]] = {"errors": errors, "formats": formats, "models": models, "config": config, "api": api, "cli": cli, "json": documents, "boards": boards, "../index": index}


def main(arguments: list[str]) -> int:
    """Write (or compare) every page."""
    stale = []
    for name, make in PAGES.items():
        path, text = REFERENCE / f"{name}.md", make()
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(text)
    if "--check" in arguments and stale:
        sys.stderr.write(f"stale: {', '.join(stale)}; run make docs\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
