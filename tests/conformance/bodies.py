"""Valid request bodies of every endpoint, with as many of their fields as possible: what the fuzz mutates."""

from __future__ import annotations

from typing import Any

from tests.conformance.live import MODEL

SCHEMA = {"type": "object", "properties": {"at": {"type": "string", "maxLength": 5}, "n": {"type": "integer"}}, "required": ["at"], "additionalProperties": False}
FUNCTION = {"name": "look", "description": "Looks", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "ada"},
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "seen"},
    {"role": "user", "content": "And?"},
]
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "max_tokens": 5, "stop": ["zz"], "logit_bias": {"5": 1}, "priority": 1}

BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"model": MODEL, "messages": CHAT, **SAMPLING, "n": 2, "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}, "chat_template_kwargs": {"a": 1}, "metadata": {"a": "b"}},
        {"model": MODEL, "messages": CHAT, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}, "parallel_tool_calls": False, "max_tokens": 5, "reasoning_effort": "low"},
        {"model": MODEL, "messages": CHAT[:2], "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}, "max_tokens": 5},
        {"model": MODEL, "messages": CHAT[:2], "structured_outputs": {"regex": "[a-z]{3}"}, "max_tokens": 5},
        {"model": MODEL, "messages": CHAT[:2], "guided_grammar": 'root ::= "a" | "b" root', "stream": True, "max_tokens": 5},
        {"model": MODEL, "messages": CHAT, "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}, "stream": True, "max_tokens": 5},
    ],
    "/v1/completions": [
        {"model": MODEL, "prompt": ["a", "b"], **SAMPLING, "n": 1, "logprobs": 1, "echo": False, "stop_token_ids": [5], "min_tokens": 1},
        {"model": MODEL, "prompt": [1, 2, 3], "guided_choice": ["one", "two"], "max_tokens": 4, "stream": True},
    ],
    "/v1/responses": [
        {"model": MODEL, "input": "Hi", "instructions": "Be brief.", "max_output_tokens": 5, "temperature": 1, "top_logprobs": 2, "include": ["message.output_text.logprobs"], "metadata": {"a": "b"}, "reasoning": {"effort": "low", "summary": "auto"}, "text": {"format": {"type": "text"}, "verbosity": "low"}, "store": True},
        {
            "model": MODEL, "stream": True, "max_output_tokens": 5, "tool_choice": "auto", "store": False,
            "tools": [{"type": "function", **FUNCTION}, {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}}, {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]}, {"type": "web_search"}],
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "t"}], "content": [{"type": "reasoning_text", "text": "t"}]},
                {"type": "function_call", "id": "fc", "call_id": "c", "name": "look", "arguments": "{}"}, {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "r"}]},
                {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "x"}, {"type": "custom_tool_call_output", "call_id": "d", "output": "ok"},
            ],
        },
        {"model": MODEL, "input": "Hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}, "max_output_tokens": 5},
    ],
    "/v1/messages": [
        {
            "model": MODEL, "max_tokens": 5, "system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}], "stop_sequences": ["zz"], "temperature": 0.5, "top_p": 0.5, "top_k": 3,
            "tools": [{"name": "look", "description": "d", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "auto"}, "thinking": {"type": "enabled", "budget_tokens": 4},
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "a"}, {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "x"}}]}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "r"}], "is_error": False}]}],
        },
        {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}], "stream": True, "metadata": {"user_id": "u"}},
    ],
    "/v1/messages/count_tokens": [{"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "system": "S", "tools": [{"name": "look", "input_schema": SCHEMA}]}],
    "/api/chat": [
        {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "thinking": "t", "tool_calls": [{"function": {"name": "look", "arguments": {"at": "x"}}}]}, {"role": "tool", "content": "r", "tool_name": "look"}], "tools": [TOOL], "options": {"temperature": 0.5, "num_predict": 5, "stop": ["zz"], "seed": 1, "num_ctx": 100}, "stream": False, "think": False, "keep_alive": "5m"},
        {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "format": SCHEMA, "options": {"num_predict": 5}},
    ],
    "/api/generate": [{"model": MODEL, "prompt": "Hi", "system": "S", "format": "json", "raw": False, "options": {"num_predict": 5}, "stream": False}],
    "/api/show": [{"model": MODEL, "verbose": True}],
    "/tokenize": [{"model": MODEL, "messages": CHAT[:2], "tools": [TOOL], "return_token_strs": True}, {"prompt": "x", "add_special_tokens": False}],
    "/detokenize": [{"model": MODEL, "tokens": [1, 2, 3]}],
    "/mcp": [{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "count_tokens", "arguments": {"text": "x"}}}],
}  # fmt: skip
