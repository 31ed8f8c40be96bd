"""Bodies to typed requests, errors to vendors' shapes, and the OpenAPI document that is made from the same types."""

from __future__ import annotations

import json

import pytest
from paddock_runner.edge import problem
from paddock_runner.edge.counts import Histogram
from paddock_runner.edge.problem import ANTHROPIC, OPENAI, UnknownPath, WrongMethod
from paddock_runner.errors import (
    Busy,
    ContextTooLong,
    PackError,
    ShuttingDown,
    Unauthorized,
    UnsupportedError,
    UsageError,
)
from paddock_runner.front import openapi
from paddock_runner.front.metrics import Metrics
from paddock_runner.front.openai.chat import SHAPE
from paddock_runner.front.routes import ROUTES, find
from paddock_runner.turns.usage import Timing, Usage


def test_nested_type_error_names_its_path() -> None:
    for raw, param in (
        (b'{"messages":[{"role":"user","content":"x","tool_calls":[{"function":{"name":1}}]}]}', "messages[0].tool_calls[0].function.name"),
        (b'{"messages":[{"role":"user"}],"stream_options":{"include_usage":"x"}}', "stream_options.include_usage"),
        (b'{"messages":[{"role":"user"}],"logit_bias":{"x":1}}', "logit_bias"),
        (b"[]", None),
    ):
        with pytest.raises(UsageError) as caught:
            SHAPE.parse(raw)
        assert caught.value.facts["param"] == param


def test_context_error_says_both_numbers_in_each_vendors_words() -> None:
    error = ContextTooLong("m", "h", prompt_tokens=90, max_ctx_tokens=100, max_tokens=20)
    ours = problem.body_of(error, OPENAI)["error"]
    assert ours["code"] == "context_length_exceeded" and "maximum context length is 100 tokens" in ours["message"] and "110 tokens (90 in" in ours["message"]
    assert "90 + 20 > 100" in problem.body_of(error, ANTHROPIC)["error"]["message"]


@pytest.mark.parametrize(
    "error, kind, headers",
    [
        (UsageError("m"), "invalid_request_error", []),
        (Unauthorized("m"), "authentication_error", [b"www-authenticate"]),
        (Busy("m", "", 1500), "rate_limit_error", [b"retry-after", b"retry-after-ms"]),
        (ShuttingDown("m"), "server_error", [b"retry-after", b"retry-after-ms"]),
        (PackError("m"), "server_error", []),
        (UnsupportedError("m"), "server_error", [b"x-should-retry"]),
    ],
)
def test_errors_have_type_code_and_retry_headers(error: UsageError, kind: str, headers: list[bytes]) -> None:
    body = problem.body_of(error, OPENAI)["error"]
    assert body["type"] == kind and body["code"] == error.code and body["message"] == "m"
    assert [name for name, _ in problem.headers_of(error)] == headers
    assert dict(problem.headers_of(Busy("m", "", 1500)))[b"retry-after"] == b"2"


def test_openapi_document_covers_every_route_and_its_references_resolve() -> None:
    document = json.loads(openapi.description())
    for route in ROUTES:
        path = route.path + "{name}" if route.has_name else route.path
        operation = document["paths"][path][route.method.lower()]
        assert operation["summary"] and ("requestBody" in operation) == (route.method == "POST")

    def references(value: object) -> list[str]:
        if isinstance(value, dict):
            return [r for k, v in value.items() for r in ([v] if k == "$ref" else references(v))]
        return [r for v in value for r in references(v)] if isinstance(value, list) else []

    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "max_completion_tokens", "min_p", "ignore_eos", "stream_options"} <= set(chat)


def test_routes_are_found_by_method_and_path() -> None:
    assert find("HEAD", "/health").path == "/health" and find("GET", "/v1/models/a/b").path == "/v1/models/"
    with pytest.raises(WrongMethod):
        find("DELETE", "/v1/models")
    with pytest.raises(UnknownPath):
        find("GET", "/v2")


def test_metrics_are_valid_exposition_and_add_up() -> None:
    metrics = Metrics()
    metrics.on_request("/v1/models", 200, 0.003)
    metrics.on_request("/v1/models", 499, 7.0)
    metrics.on_request("/v1/completions", 200, 7.0, has_left=True)
    metrics.on_turn(Usage(10, 4, 3, 1), 10, Timing(1_000_000, 2_000_000, 11_000_000, 31_000_000, 5_000), [5_000_000, 15_000_000, 2_000_000_000])
    text = metrics.text({"slots": {"free": 3}, "counters": {"steps": 9}, "running": [1]})
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values['paddock_http_requests_total{route="/v1/models",status="200"}'] == "1"
    assert values["paddock_aborted_requests_total"] == "2" and values["paddock_cached_tokens_total"] == "4"
    assert values["paddock_engine_slots_free"] == "3" and values["paddock_engine_up"] == "1"
    assert values['paddock_time_to_first_token_seconds_bucket{le="0.01"}'] == "1"
    assert float(values["paddock_inter_token_seconds_sum"]) == pytest.approx(2.02)
    assert [values[f'paddock_inter_token_seconds_bucket{{le="{le}"}}'] for le in ("0.0025", "0.005", "0.02", "1", "+Inf")] == ["0", "1", "2", "2", "3"]
    assert "# TYPE paddock_engine_counters_steps counter" in text and "# TYPE paddock_engine_slots_free gauge" in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_histogram_counts_are_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert list(histogram.lines("h")) == ["# TYPE h histogram", 'h_bucket{le="1"} 2', 'h_bucket{le="2"} 3', 'h_bucket{le="+Inf"} 4', "h_sum 12", "h_count 4"]
