"""Answers of the endpoints as JSON schemas, and examples of requests, by path: what /openapi.json and the API's page tell beyond the bodies' types."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
ANY: Schema = {}
MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
LOOK = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def _object(**fields: Schema) -> Schema:
    """An object with these fields, all of them there, and perhaps others."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _const(value: str) -> Schema:
    return {"const": value}


def _null_or(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


USAGE = _object(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
ENDS: Schema = {"enum": ["stop", "length", "tool_calls"]}
CHAT = _object(
    id=TEXT, object=_const("chat.completion"), created=COUNT, model=TEXT, usage=USAGE,
    choices=_list(_object(index=COUNT, finish_reason=ENDS, message=_object(role=_const("assistant"), content=_null_or(TEXT)))),
)  # fmt: skip
COMPLETION = _object(
    id=TEXT, object=_const("text_completion"), created=COUNT, model=TEXT, usage=USAGE,
    choices=_list(_object(index=COUNT, text=TEXT, finish_reason=ENDS)),
)  # fmt: skip
RESPONSE = _object(id=TEXT, object=_const("response"), status=TEXT, model=TEXT, output=_list(_object(id=TEXT, type=TEXT)), usage=ANY)
MESSAGE = _object(
    id=TEXT, type=_const("message"), role=_const("assistant"), model=TEXT, content=_list(_object(type=TEXT)),
    stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]}, usage=_object(input_tokens=COUNT, output_tokens=COUNT),
)  # fmt: skip
MODEL = _object(id=TEXT, object=_const("model"), created=COUNT, owned_by=TEXT)
RANKED = _object(results=_list(_object(index=COUNT, relevance_score=NUMBER)))
SCORES = _object(data=_list(_object(index=COUNT, score=NUMBER)))
EMBEDDED = _object(object=_const("list"), data=_list(_object(index=COUNT, embedding=ANY)), usage=_object(prompt_tokens=COUNT, total_tokens=COUNT))

ANSWERS: dict[tuple[str, str], Schema] = {
    ("GET", "/v1/models"): _object(object=_const("list"), data=_list(MODEL)),
    ("GET", "/v1/models/"): MODEL,
    ("POST", "/v1/chat/completions"): CHAT,
    ("POST", "/v1/completions"): COMPLETION,
    ("POST", "/v1/responses"): RESPONSE,
    ("DELETE", "/v1/responses/"): _object(id=TEXT, deleted=FLAG),
    ("POST", "/v1/embeddings"): EMBEDDED,
    ("POST", "/v1/rerank"): RANKED,
    ("POST", "/v2/rerank"): RANKED,
    ("POST", "/rerank"): RANKED,
    ("POST", "/v1/score"): SCORES,
    ("POST", "/score"): SCORES,
    ("POST", "/tokenize"): _object(count=COUNT, max_model_len=COUNT, tokens=_list(COUNT)),
    ("POST", "/detokenize"): _object(prompt=TEXT),
    ("GET", "/api/tags"): _object(models=_list(_object(name=TEXT, model=TEXT, size=COUNT, digest=TEXT, details={"type": "object"}))),
    ("GET", "/api/ps"): _object(models=_list(_object(name=TEXT, expires_at=TEXT))),
    ("GET", "/api/version"): _object(version=TEXT),
    ("GET", "/version"): _object(version=TEXT),
    ("POST", "/api/embed"): _object(model=TEXT, embeddings=_list(_list(NUMBER)), prompt_eval_count=COUNT),
    ("POST", "/api/embeddings"): _object(embedding=_list(NUMBER)),
    ("POST", "/api/show"): _object(template=TEXT, details={"type": "object"}, model_info={"type": "object"}, capabilities=_list(TEXT)),
    ("POST", "/v1/messages"): MESSAGE,
    ("POST", "/v1/messages/count_tokens"): _object(input_tokens=COUNT),
    ("GET", "/v1/paddock/state"): _object(phase=TEXT, model=TEXT, engine={"type": "object"}),
}
"""Whole answers; streams and lines are told by their content type."""
STREAMS: dict[str, str] = {
    "/v1/chat/completions": "text/event-stream", "/v1/completions": "text/event-stream", "/v1/responses": "text/event-stream",
    "/v1/messages": "text/event-stream", "/mcp": "text/event-stream", "/api/chat": "application/x-ndjson", "/api/generate": "application/x-ndjson",
    "/api/pull": "application/x-ndjson",
}  # fmt: skip
ERRORS: dict[str, Schema] = {
    "openai": _object(error=_object(message=TEXT, type=TEXT, param=_null_or(TEXT), code=TEXT)),
    "anthropic": _object(type=_const("error"), error=_object(type=TEXT, message=TEXT)),
    "ollama": _object(error=TEXT),
}
RPC_ERROR = _object(jsonrpc=_const("2.0"), error=_object(code={"type": "integer"}, message=TEXT))
"""What the Model Context Protocol answers."""

EXAMPLES: dict[str, dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {
        "an answer": {"messages": MESSAGES, "max_tokens": 200},
        "a stream with its usage": {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}},
        "a tool": {"messages": [{"role": "user", "content": "The weather in Paris?"}], "tools": [{"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": LOOK}}], "tool_choice": "auto"},
        "JSON of a schema": {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": LOOK, "strict": True}}},
        "at most 500 tokens of reasoning": {"messages": MESSAGES, "thinking_token_budget": 500},
    },
    "/v1/completions": {
        "two prompts": {"prompt": ["Once upon a time", "The sky is"], "max_tokens": 20},
        "one of two words": {"prompt": "Is water wet? ", "guided_choice": ["yes", "no"]},
        "log-probabilities": {"prompt": "The sky is", "max_tokens": 5, "logprobs": 3},
    },
    "/v1/responses": {"an answer": {"input": "Why is the sky blue?", "max_output_tokens": 200}, "a stream, nothing stored": {"input": "Why is the sky blue?", "stream": True, "store": False}},
    "/v1/messages": {
        "an answer": {"max_tokens": 200, "messages": MESSAGES},
        "a stream with thinking": {"max_tokens": 2000, "messages": MESSAGES, "thinking": {"type": "enabled", "budget_tokens": 1024}, "stream": True},
        "a tool": {"max_tokens": 200, "messages": MESSAGES, "tools": [{"name": "weather", "description": "Weather of a city", "input_schema": LOOK}]},
    },
    "/v1/messages/count_tokens": {"a conversation": {"messages": MESSAGES, "system": "Be brief."}},
    "/v1/embeddings": {"two texts": {"input": ["The sky is blue.", "Water is wet."], "encoding_format": "float"}},
    "/v1/rerank": {"two documents": {"query": "Why is the sky blue?", "documents": ["Light is scattered.", "Water is wet."], "top_n": 1}},
    "/v1/score": {"a pair": {"text_1": "Why is the sky blue?", "text_2": "Light is scattered."}},
    "/tokenize": {"a text": {"prompt": "The sky is blue."}, "a conversation": {"messages": MESSAGES}},
    "/detokenize": {"three tokens": {"tokens": [1, 2, 3]}},
    "/api/chat": {"lines": {"messages": MESSAGES, "options": {"num_predict": 200}}, "one answer": {"messages": MESSAGES, "stream": False}},
    "/api/generate": {"JSON": {"prompt": "Name a city as JSON.", "format": "json", "stream": False}},
    "/api/embed": {"two texts": {"input": ["The sky is blue.", "Water is wet."]}},
    "/api/embeddings": {"a text": {"prompt": "The sky is blue."}},
    "/api/show": {"the served model": {"model": "default"}},
    "/mcp": {"the tools": {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}},
}
"""Bodies by path and title. A `model` may be added to each of them; without one the served model answers."""
