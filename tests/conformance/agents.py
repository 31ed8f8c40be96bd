"""Request bodies as agents and front-ends send them, written by hand from their public sources; prompts and lists of tools are shortened.

Each entry: (program, path with query, headers, body). The model's name is filled in by who sends them.
"""

from __future__ import annotations

from typing import Any

Request = tuple[str, str, dict[str, str], dict[str, Any]]
EPHEMERAL = {"type": "ephemeral"}


def schema(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    """A tool's parameters, with the keys that zod and pydantic add."""
    return {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": properties, "required": required, "additionalProperties": False}


TEXT, NUMBER = {"type": "string"}, {"type": "number"}
READ = schema(["file_path"], file_path={**TEXT, "description": "The absolute path"}, offset=NUMBER, limit=NUMBER)
BASH = schema(["command"], command=TEXT, timeout={**NUMBER, "maximum": 600000}, description=TEXT, run_in_background={"type": "boolean"})
TODO = schema(["todos"], todos={"type": "array", "items": schema(["content", "status"], content={**TEXT, "minLength": 1}, status={"enum": ["pending", "in_progress", "completed"], "type": "string"})})
SHELL = {"type": "object", "properties": {"command": {"type": "array", "items": TEXT}, "workdir": TEXT, "timeout_ms": NUMBER}, "required": ["command"], "additionalProperties": False}
GRAMMAR = 'start: begin_patch hunk end_patch\nbegin_patch: "*** Begin Patch" LF\nend_patch: "*** End Patch" LF?\nhunk: "*** Add File: " /(.+)/ LF ("+" /(.*)/ LF)+\nLF: "\\n"\n'
PIXEL_FREE = "<environment_context>\n  <cwd>/work</cwd>\n  <shell>bash</shell>\n</environment_context>"


def _claude_code() -> list[Request]:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14", "x-app": "cli", "user-agent": "claude-cli/2.0.14 (external, cli)", "x-stainless-lang": "js", "anthropic-dangerous-direct-browser-access": "true"}
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.0.14; cc_entrypoint=cli; cch=00000;"},
        {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude.", "cache_control": EPHEMERAL},
        {"type": "text", "text": "\nYou are an interactive CLI tool that helps users with software engineering tasks.\n\n<env>\nWorking directory: /work\n</env>", "cache_control": EPHEMERAL},
    ]
    tools = [{"name": n, "description": f"{n} tool.", "input_schema": s} for n, s in (("Read", READ), ("Bash", BASH), ("TodoWrite", TODO))] + [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]
    user = {"user_id": "user_0123_account__session_4f3c"}
    first = [{"role": "user", "content": [{"type": "text", "text": "<system-reminder>\nAs you answer, you can use the following context.\n</system-reminder>"}, {"type": "text", "text": "Say hello.", "cache_control": EPHEMERAL}]}]
    later = [
        {"role": "user", "content": "Read a.py"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "I read it.", "signature": "paddock-1"}, {"type": "text", "text": "Reading."}, {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "/a.py"}}, {"type": "tool_use", "id": "toolu_2", "name": "Bash", "input": {"command": "ls", "description": "List"}}]},
        {"role": "user", "content": [{"tool_use_id": "toolu_1", "type": "tool_result", "content": "     1\u2192print(1)"}, {"tool_use_id": "toolu_2", "type": "tool_result", "content": [{"type": "text", "text": "no such file"}], "is_error": True, "cache_control": EPHEMERAL}, {"type": "text", "text": "Go on."}]},
    ]
    base = {"max_tokens": 24, "system": system, "tools": tools, "metadata": user, "stream": True, "temperature": 1}
    think = {"thinking": {"type": "enabled", "budget_tokens": 16}, "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    topic = [{"type": "text", "text": "Analyze if this message indicates a new conversation topic. Format your response as a JSON object."}]
    return [
        ("claude-code", "/v1/messages?beta=true", headers, {**base, "messages": first, **think}),
        ("claude-code", "/v1/messages?beta=true", headers, {**base, "messages": later}),
        ("claude-code", "/v1/messages?beta=true", headers, {"max_tokens": 16, "system": topic, "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "{"}], "metadata": user, "temperature": 0, "stream": True}),
        ("claude-code", "/v1/messages?beta=true", headers, {"max_tokens": 1, "messages": [{"role": "user", "content": "quota"}], "metadata": user}),
        ("claude-code", "/v1/messages/count_tokens?beta=true", headers, {"messages": later, "system": system, "tools": tools[:3], "thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ]


def _codex() -> list[Request]:
    headers = {"originator": "codex_cli_rs", "user-agent": "codex_cli_rs/0.58.0", "accept": "text/event-stream", "conversation_id": "c1", "session_id": "c1", "openai-beta": "responses=experimental"}
    tools = [
        {"type": "function", "name": "shell", "description": "Runs a shell command and returns its output.", "strict": False, "parameters": SHELL},
        {"type": "function", "name": "update_plan", "description": "Updates the task plan.", "strict": False, "parameters": {"type": "object", "properties": {"plan": {"type": "array", "items": {"type": "object", "properties": {"step": TEXT, "status": TEXT}, "required": ["step", "status"], "additionalProperties": False}}}, "required": ["plan"], "additionalProperties": False}},
        {"type": "custom", "name": "apply_patch", "description": "Use the `apply_patch` tool to edit files.", "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR}},
        {"type": "local_shell"}, {"type": "web_search"},
    ]  # fmt: skip
    first = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions instructions>sandbox</permissions instructions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": PIXEL_FREE}]}, {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Say hello."}]},
    ]  # fmt: skip
    later = [
        *first, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "**Looking**"}], "content": None, "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
        {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"}, {"type": "function_call_output", "call_id": "call_1", "output": '{"output":"a.py\\n","metadata":{"exit_code":0,"duration_seconds":0.1}}'},
        {"type": "custom_tool_call", "status": "completed", "call_id": "call_2", "name": "apply_patch", "input": "*** Begin Patch\n*** End Patch"}, {"type": "custom_tool_call_output", "call_id": "call_2", "output": "ok"},
    ]  # fmt: skip
    base = {"instructions": "You are Codex, a coding agent.", "tools": tools, "tool_choice": "auto", "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "c1", "max_output_tokens": 24, "text": {"verbosity": "medium"}, "client_metadata": {"x-codex-installation-id": "i"}}
    return [("codex", "/v1/responses", headers, {**base, "input": first}), ("codex", "/v1/responses", headers, {**base, "input": later}), ("codex", "/v1/models?client_version=0.58.0", headers, {})]


def _open_webui() -> list[Request]:
    headers = {"x-openwebui-user-name": "ada", "x-openwebui-chat-id": "1", "content-type": "application/json"}
    ask = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]
    title = [{"role": "user", "content": '### Task:\nGenerate a concise, 3-5 word title.\n### Output:\nJSON format: { "title": "your title here" }\n<chat_history>\nUSER: hi\n</chat_history>'}]
    look = {"type": "function", "function": {"name": "get_time", "description": "", "parameters": {"type": "object", "properties": {}, "required": []}}}
    return [
        ("open-webui", "/v1/chat/completions", headers, {"messages": ask, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 24, "temperature": 0.8, "frequency_penalty": 0, "top_p": 0.9, "seed": None, "stop": None, "logit_bias": None}),
        ("open-webui", "/v1/chat/completions", headers, {"messages": title, "stream": False, "max_completion_tokens": 24, "metadata": {"task": "title_generation", "chat_id": "1"}}),
        ("open-webui", "/v1/chat/completions", headers, {"messages": ask, "stream": True, "tools": [look], "max_tokens": 24, "params": {"function_calling": "native"}, "session_id": "s", "chat_id": "1", "id": "2", "background_tasks": {}}),
        ("open-webui", "/api/tags", headers, {}), ("open-webui", "/v1/models", headers, {}), ("open-webui", "/api/version", headers, {}),
        ("open-webui", "/api/chat", headers, {"messages": [{"role": "user", "content": "Say hello."}], "stream": True, "options": {"num_ctx": 2048, "num_predict": 24, "temperature": 0.8, "mirostat": 0}, "keep_alive": "5m"}),
    ]  # fmt: skip


def _langchain() -> list[Request]:
    headers = {"user-agent": "OpenAI/Python 1.99.9", "x-stainless-lang": "python", "x-stainless-helper-method": "chat.completions.stream"}
    multiply = {"type": "function", "function": {"name": "multiply", "description": "Multiplies.", "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"], "type": "object"}}}
    joke = {"title": "Joke", "type": "object", "properties": {"setup": {"title": "Setup", "type": "string", "maxLength": 8}, "n": {"title": "N", "type": "integer", "minimum": 1, "maximum": 5}}, "required": ["setup", "n"], "additionalProperties": False}
    history = [
        {"content": "What is 6 times 7?", "role": "user"}, {"content": None, "role": "assistant", "tool_calls": [{"type": "function", "id": "call_9", "function": {"name": "multiply", "arguments": '{"a": 6, "b": 7}'}}]},
        {"content": "42", "role": "tool", "tool_call_id": "call_9"},
    ]  # fmt: skip
    return [
        ("langchain", "/v1/chat/completions", headers, {"messages": [{"content": "Say hello.", "role": "user"}], "temperature": 0.7, "max_completion_tokens": 24, "stream": True, "stream_options": {"include_usage": True}}),
        ("langchain", "/v1/chat/completions", headers, {"messages": history, "tools": [multiply], "tool_choice": "auto", "parallel_tool_calls": False, "max_completion_tokens": 24, "stream": False}),
        ("langchain", "/v1/chat/completions", headers, {"messages": history[:1], "tools": [multiply], "tool_choice": {"type": "function", "function": {"name": "multiply"}}, "max_tokens": 60, "stream": True}),
        ("langchain", "/v1/chat/completions", headers, {"messages": [{"content": "A joke.", "role": "user"}], "response_format": {"type": "json_schema", "json_schema": {"name": "Joke", "strict": True, "schema": joke}}, "max_tokens": 80, "logprobs": True, "top_logprobs": 2, "n": 1}),
        ("langchain", "/v1/completions", headers, {"prompt": ["The sky is"], "max_tokens": 8, "temperature": 0, "n": 1, "best_of": 1, "logit_bias": {}, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0}),
    ]


def _others() -> list[Request]:
    cline = "You are Cline, a highly skilled software engineer.\n\n====\n\nTOOL USE\n\nTool uses are formatted using XML-style tags:\n<read_file>\n<path>File path here</path>\n</read_file>"
    task = [{"role": "system", "content": cline}, {"role": "user", "content": [{"type": "text", "text": "<task>\nSay hello.\n</task>"}, {"type": "text", "text": "<environment_details>\n# Current Mode\nACT MODE\n</environment_details>"}]}]
    return [
        ("cline", "/v1/chat/completions", {"user-agent": "OpenAI/JS 4.83.0"}, {"messages": task, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 24, "reasoning_effort": None}),
        ("litellm", "/v1/chat/completions", {"user-agent": "litellm/1.80.0"}, {"messages": [{"role": "user", "content": "Say hello.", "cache_control": EPHEMERAL}], "max_tokens": 24, "stream": True, "extra_body": {"a": 1}, "user": "u", "top_k": 20, "modalities": ["text"], "drop_params": True}),
        ("litellm", "/v1/messages", {"user-agent": "litellm/1.80.0"}, {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 24, "tool_choice": {"type": "none"}, "tools": [{"name": "Read", "input_schema": READ}], "service_tier": "auto"}),
        ("continue", "/v1/completions", {}, {"prompt": "<|fim_prefix|>def add(a, b):\n    return <|fim_suffix|>\n<|fim_middle|>", "max_tokens": 12, "temperature": 0.01, "stop": ["<|endoftext|>", "\n\n"], "stream": True}),
        ("aider", "/v1/chat/completions", {}, {"messages": [{"role": "system", "content": "Act as an expert."}, {"role": "user", "content": "I added files."}, {"role": "assistant", "content": "Ok."}, {"role": "user", "content": "Say hello."}], "temperature": 0, "stream": True, "max_tokens": 24}),
        ("vscode", "/api/show", {}, {}),
    ]  # fmt: skip


REQUESTS: list[Request] = [*_claude_code(), *_codex(), *_open_webui(), *_langchain(), *_others()]
