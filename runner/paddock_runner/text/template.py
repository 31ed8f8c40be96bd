"""Chat templates from the checkpoint: messages to prompt text, as transformers renders them.

Rendering is done in sandbox.py's environment; this file knows what templates expect of a conversation. A checkpoint without a
template serves completions only: a template is never guessed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import meta

from ..errors import UnsupportedError, UsageError
from ..files.checkpoint import Checkpoint
from ..files.folder import read_json
from .sandbox import ChatEnvironment, LimitExceeded, TimeLimit
from .tokenizer import Tokenizer

MAX_SOURCE_CHARACTERS = 256 << 10
SECONDS = 1.0
SECONDS_PER_MESSAGE = 0.0005
_PROBE_SECONDS = 0.2
_OWN_FAULTS = (jinja2.exceptions.SecurityError, LimitExceeded, RecursionError, OverflowError, MemoryError)
_FAULTS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError, RuntimeError,
)  # fmt: skip
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_HINT = "use /v1/completions (`paddock run --raw`), or a conversion of the model that carries a chat template"

Message = Mapping[str, Any]


class Function(dict[str, Any]):
    """A tool's function as templates see it: what was told of it, and something harmless where they ask for what was not."""

    def __missing__(self, key: str) -> Any:
        """What a template reads that asks by name."""
        if key == "description":
            return ""
        if key == "parameters":
            return {"type": "object", "properties": {}}
        raise KeyError(key)


class TemplateRefused(UsageError):
    """The template cannot render this conversation, or says that it will not (facts: reason, "Type: text")."""

    code = "template_refused"


class ChatTemplate:
    """One checkpoint's chat template(s). An empty `source` means that it has none: rendering then raises UnsupportedError.

    special: texts of the special tokens by their name in templates ("bos_token", ...). named: further templates of the
    checkpoint; "tool_use" is used when there are tools. Safe to share between threads.
    """

    def __init__(
        self,
        source: str,
        special: Mapping[str, str] | None = None,
        named: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._special = {**dict.fromkeys(_SPECIAL_NAMES[:2], ""), **(special or {})}
        self._environment = ChatEnvironment(now)
        self._problem: UnsupportedError | None = None
        self._compiled: jinja2.Template | None = None
        self._tool_use: jinja2.Template | None = None
        self.variables: frozenset[str] = frozenset()
        if not source.strip():
            self._problem = UnsupportedError(
                "this checkpoint has no chat template", _HINT, what="chat template", supported=[]
            )
            return
        try:
            self._compiled = self._compile(source)
            if named and "tool_use" in named:
                self._tool_use = self._compile(named["tool_use"])
        except UnsupportedError as problem:
            self._problem = problem

    @property
    def exists(self) -> bool:
        """Whether chats can be rendered."""
        return self._problem is None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation in OpenAI's shape, adapted to what this template expects (see `adapt`).

        continue_final: the last message is not closed, the model goes on with it. options: further template variables
        (enable_thinking, reasoning_effort, ...). Raises: TemplateRefused; UnsupportedError when there is no (working) template.
        """
        adapted = self.adapt(messages)
        variables: dict[str, Any] = {"messages": adapted, "tools": [_tool(t) for t in tools] if tools else None, "documents": documents or None}
        variables["add_generation_prompt"] = add_generation_prompt and not continue_final
        variables.update(options or {})
        try:
            text = self.render_exact(variables)
        except TemplateRefused as first:
            spared = {k: v for k, v in variables.items() if v is not None or k not in ("tools", "documents")}
            if len(spared) == len(variables) or "NoneType" not in first.facts["reason"]:
                raise
            text = self.render_exact(spared)
        return _cut_after_final(text, adapted) if continue_final else text

    def render_exact(self, variables: Mapping[str, Any]) -> str:
        """The template with just these variables (and the special tokens), nothing adapted. Raises: as `render`."""
        if self._problem is not None or self._compiled is None:
            raise self._problem or UnsupportedError("this checkpoint has no chat template", _HINT)
        template = self._tool_use if variables.get("tools") and self._tool_use is not None else self._compiled
        messages = variables.get("messages")
        seconds = SECONDS + SECONDS_PER_MESSAGE * (len(messages) if isinstance(messages, Sequence) else 0)
        try:
            with TimeLimit(seconds):
                return template.render({**self._special, **variables})
        except _OWN_FAULTS as error:
            raise UnsupportedError(
                f"the model's chat template cannot be used: {_words(error)}",
                _HINT,
                what="chat template",
                reason=_reason(error),
            ) from error
        except _FAULTS as error:
            raise TemplateRefused(
                f"the model's chat template does not take this conversation: {_words(error)}", reason=_reason(error)
            ) from error

    def adapt(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as this template expects them.

        Text parts joined into a string (or a string made a part); null content as ""; role developer as system where the
        template does not know it; arguments of tool calls as objects or as text; reasoning under the names it reads.
        """
        return [self._adapted(message) for message in messages]

    def thinking_options(self, is_on: bool | None = None, effort: str | None = None) -> dict[str, Any]:
        """Template variables for "think or not" and "how much", under the names that this template reads."""
        options: dict[str, Any] = {}
        if effort == "none" and is_on is None:
            is_on = False
        if is_on is not None:
            for name in ("enable_thinking", "thinking", "reasoning"):
                if name in self.variables:
                    options[name] = is_on
                    break
        if effort is not None:
            for name in ("reasoning_effort", "reasoning_strength", "thinking_effort"):
                if name in self.variables:
                    options[name] = effort
                    break
        return options

    def _compile(self, source: str) -> jinja2.Template:
        if len(source) > MAX_SOURCE_CHARACTERS:
            reason = f"it has {len(source)} characters, the limit is {MAX_SOURCE_CHARACTERS}"
            raise UnsupportedError(f"the model's chat template cannot be used: {reason}", _HINT, what="chat template")
        try:
            self.variables |= meta.find_undeclared_variables(self._environment.parse(source))
            return self._environment.from_string(source)
        except (*_OWN_FAULTS, *_FAULTS, SyntaxError) as error:
            line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise UnsupportedError(
                f"the model's chat template cannot be used: {_words(error)}{line}",
                _HINT,
                what="chat template",
                reason=_reason(error),
            ) from error

    def _adapted(self, message: Message) -> Message:
        changes: dict[str, Any] = {}
        role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
        if role == "developer" and "developer" not in self.source:
            changes["role"] = "system"
        if content is None:
            changes["content"] = ""
        elif isinstance(content, list):
            if self.takes_text and all(isinstance(p, Mapping) and p.get("type") in _TEXT_PARTS for p in content):
                changes["content"] = "\n".join(str(p.get("text") or "") for p in content)
        elif isinstance(content, str) and not self.takes_text and self.takes_parts:
            changes["content"] = [{"type": "text", "text": content}]
        if calls:
            changes["tool_calls"] = [self._call(call) for call in calls]
        call_id = message.get("tool_call_id")
        if self._wants_short_ids and isinstance(call_id, str):
            changes["tool_call_id"] = _short_id(call_id)
        thought = next((message[k] for k in _REASONING_KEYS if isinstance(message.get(k), str)), None)
        if thought:
            changes.update((key, thought) for key in self._reasoning_names if key not in message)
        return {**message, **changes} if changes else message

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call.get("function")
        if not isinstance(function, Mapping):
            return call
        arguments = {} if (given := function.get("arguments")) is None else given
        if isinstance(arguments, str) and not self.wants_argument_text:
            arguments = _parsed(arguments)
        elif self.wants_argument_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if arguments is not given:
            call = {**call, "function": {**function, "arguments": arguments}}
        call_id = call.get("id")
        return {**call, "id": _short_id(call_id)} if self._wants_short_ids and isinstance(call_id, str) else call

    @cached_property
    def _wants_short_ids(self) -> bool:
        """Whether the template refuses ids of calls that do not have nine letters and digits (Mistral)."""
        return re.search(r"length\s*(!=|<)\s*9", self.source) is not None

    @cached_property
    def _reasoning_names(self) -> tuple[str, ...]:
        """Under which keys the template looks for a message's reasoning."""
        found = (
            k
            for k in _REASONING_KEYS
            if re.search(rf"(\.{k}\b|\[\s*['\"]{k}['\"]|['\"]{k}['\"]\s+in\b|\(\s*['\"]{k}['\"])", self.source)
        )
        return tuple(found) or ("reasoning_content",)

    @cached_property
    def takes_text(self) -> bool:
        """Whether content may be a string (nearly every template)."""
        return _PROBE in self._probe([{"role": "user", "content": _PROBE}]) or not self.takes_parts

    @cached_property
    def takes_parts(self) -> bool:
        """Whether content may be a list of parts."""
        text = self._probe([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text

    @cached_property
    def wants_argument_text(self) -> bool:
        """Whether the arguments of tool calls must be JSON text: as an object the template fails or prints Python."""
        as_object = self._probe(_called({_PROBE: "x"}))
        if as_object and f"'{_PROBE}'" not in as_object:
            return False
        as_text = self._probe(_called(json.dumps({_PROBE: "x"})))
        return f'"{_PROBE}"' in as_text or (not as_object and bool(as_text))

    def _probe(self, messages: Sequence[Message]) -> str:
        """What the template makes of `messages`, or "" when it refuses them."""
        try:
            with TimeLimit(_PROBE_SECONDS):
                return self.render_exact({"messages": messages, "tools": [_PROBE_TOOL], "add_generation_prompt": True})
        except (TemplateRefused, UnsupportedError):
            return ""


_PROBE = "padprobe"
_TEXT_PARTS = ("text", "input_text", "output_text")
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {
            "type": "object",
            "properties": {"argument": {"type": "string", "description": "probe"}},
            "required": [],
        },
    },
}


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool as models have learned to read it: without fields that nobody set, and without `strict`, which is not for them."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    told = Function({k: v for k, v in function.items() if k != "strict" and v is not None and (v or k != "description")})
    return {**tool, "function": told}


def _called(arguments: Any) -> list[Message]:
    call = {"id": "call00001", "type": "function", "function": {"name": "probe_tool", "arguments": arguments}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "name": "probe_tool", "content": "done"},
    ]


def _parsed(arguments: str) -> Any:
    """An object for arguments in JSON; what is no object stays text."""
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _short_id(call_id: str) -> str:
    """Nine letters and digits that stand for any id, always the same ones."""
    if len(call_id) == 9 and call_id.isalnum() and call_id.isascii():
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "replace"), digest_size=8).hexdigest()[:9]


def _cut_after_final(text: str, messages: Sequence[Message]) -> str:
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list):
        content = next((p.get("text") for p in reversed(content) if isinstance(p, Mapping) and p.get("text")), None)
    if not isinstance(content, str) or not content.strip():
        raise UsageError("only a last message with text can be continued")
    at = text.rfind(content)
    if at >= 0:
        return text[: at + len(content)]
    at = text.rfind(content.strip())
    if at < 0:
        raise UsageError("the model's chat template changes the last message, so it cannot be continued")
    return text[: at + len(content.strip())]


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _words(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it calls itself without end"
    text = str(error) or type(error).__name__
    return text if isinstance(error, jinja2.TemplateError) else f"{text} ({type(error).__name__})"


def load_template(checkpoint: Checkpoint, tokenizer: Tokenizer) -> ChatTemplate:
    """The checkpoint's chat template (perhaps none: see ChatTemplate.exists) with its special tokens.

    Raises: FileError when a side file is damaged.
    """
    named: dict[str, str] = {}
    special: dict[str, str] = {}
    for name, token_id in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
        if token_id is not None:
            special[name] = tokenizer.pieces[token_id].decode("utf-8", "replace")
    if checkpoint.kind == "gguf":
        prefix = "tokenizer.chat_template."
        named = {
            k[len(prefix) :]: v for k, v in checkpoint.metadata.items() if k.startswith(prefix) and isinstance(v, str)
        }
        for name, key in (("pad_token", "padding"), ("unk_token", "unknown")):
            token_id = checkpoint.metadata.get(f"tokenizer.ggml.{key}_token_id")
            if isinstance(token_id, int) and 0 <= token_id < tokenizer.n_vocab:
                special[name] = tokenizer.pieces[token_id].decode("utf-8", "replace")
    elif "tokenizer_config.json" in checkpoint.files:
        config = read_json(checkpoint.files["tokenizer_config.json"])
        for name in _SPECIAL_NAMES:
            text = config.get(name)
            text = text.get("content") if isinstance(text, Mapping) else text
            if isinstance(text, str):
                special[name] = text
        templates = config.get("chat_template")
        if isinstance(templates, list):
            named = {str(t.get("name")): str(t.get("template")) for t in templates if isinstance(t, Mapping)}
    return ChatTemplate(checkpoint.chat_template or "", special, named)
