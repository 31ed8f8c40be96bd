"""GET /openapi.json: the API's description, generated from the same types that read the requests."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec

from ..version import our_version
from .described import ANSWERS, ERRORS, EXAMPLES, RPC_ERROR, STREAMS
from .http import ENCODER, Exchange

if TYPE_CHECKING:
    from .routes import Route
    from .service import Front

REFERENCE = "#/components/schemas/{name}"
ERROR_NAMES = {"openai": "OpenAIError", "anthropic": "AnthropicError", "ollama": "OllamaError"}
HEADERS = {
    "x-request-id": {"description": "the request's id, the client's own where it sent one", "schema": {"type": "string"}},
    "x-paddock-ignored-fields": {"description": "fields of the request without effect, with commas", "schema": {"type": "string"}},
}


async def get_openapi(front: Front, exchange: Exchange) -> None:
    """GET /openapi.json"""
    await exchange.answer(200, description())


@functools.cache
def description() -> bytes:
    """The OpenAPI document."""
    from .routes import ROUTES

    bodies: dict[tuple[str, str], Any] = {(r.method, r.path): kind for r in ROUTES if (kind := _body_of(r)) is not None}
    schemas, components = msgspec.json.schema_components(list(bodies.values()), ref_template=REFERENCE)
    by_path = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        path = route.path + "{name}" if route.has_name else route.path
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, by_path.get((route.method, route.path)))
    errors = {ERROR_NAMES[vendor]: schema for vendor, schema in ERRORS.items()}
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Paddock runner",
            "version": our_version(),
            "description": "OpenAI-, Anthropic- and Ollama-compatible APIs of one served model, and an MCP server.",
        },
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {"schemas": {**components, **errors}, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }
    return ENCODER.encode(document)


def _body_of(route: Route) -> type | None:
    """The type of the request body that a handler reads: its module's Shape."""
    module = __import__(route.handler.__module__, fromlist=["SHAPES"])
    shapes: dict[str, type] = getattr(module, "SHAPES", {})
    return shapes.get(route.handler.__name__)


def _operation(route: Route, schema: dict[str, Any] | None) -> dict[str, Any]:
    text = (route.handler.__doc__ or route.path).strip().splitlines()[0]
    shape: dict[str, Any] = {"$ref": REFERENCE.format(name=ERROR_NAMES[route.vendor])}
    error = {"application/json": {"schema": {"anyOf": [shape, RPC_ERROR]} if route.path == "/mcp" else shape}}
    operation: dict[str, Any] = {
        "summary": text.split(": ", 1)[-1] if ": " in text else text,
        "operationId": "_".join([route.method.lower(), *(route.path.strip("/") or "root").replace(".", "_").split("/")]),
        "responses": {
            "200": {"description": "the answer", "headers": HEADERS, **_content(route)},
            "4XX": {"description": "the request is at fault; the body says how", "content": error},
            "5XX": {"description": "the runner is at fault, or cannot serve now; the body says why", "content": error},
        },
    }
    if route.is_open:
        operation["security"] = []
    if route.has_name:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if schema is not None:
        shown = {title: {"value": body} for title, body in EXAMPLES.get(route.path, {}).items()}
        told = {"schema": schema, **({"examples": shown} if shown else {})}
        operation["requestBody"] = {"required": True, "content": {"application/json": told}}
    return operation


def _content(route: Route) -> dict[str, Any]:
    """What a 200 holds; nothing where it is not told."""
    found: dict[str, Any] = {}
    if (schema := ANSWERS.get((route.method, route.path))) is not None:
        found["application/json"] = {"schema": schema}
    if (stream := STREAMS.get(route.path)) is not None:
        found.setdefault("application/json", {})
        found[stream] = {}
    return {"content": found} if found else {}
