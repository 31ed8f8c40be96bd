"""Lines that agent clients put in front of every prompt and change every time: without them the prefix cache sees the same prompt again.

Off unless the runner is told (`--steady-prompts`), because the prompt that the model sees is then not quite the one that was sent. The rule, whole:

1. In system and developer messages a line that begins with `x-anthropic-billing-header:` is left out (Claude Code's billing line, whose `cch=`
   differs in each request).
2. In messages of any role a line that is nothing but `<total_tokens>...</total_tokens>` is left out (what is left of the client's budget).

Nothing else is touched: no date, no reminder, no whitespace elsewhere, and messages keep their order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.MULTILINE | re.IGNORECASE)
TOTAL = re.compile(r"^[ \t]*<total_tokens>[^<\n]*</total_tokens>[ \t]*(?:\n|\Z)", re.MULTILINE)
INSTRUCTIONS = ("system", "developer")


def steady(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages without the lines that change in each request. What has none is handed through as it is."""
    return [_message(message) for message in messages]


def _message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content, leads = message.get("content"), message.get("role") in INSTRUCTIONS
    if isinstance(content, str):
        text = _text(content, leads)
        return message if text is content else {**message, "content": text}
    if isinstance(content, list):
        parts = [_part(part, leads) for part in content]
        if any(new is not old for new, old in zip(parts, content, strict=True)):
            return {**message, "content": parts}
    return message


def _part(part: Any, leads: bool) -> Any:
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        return part
    text = _text(part["text"], leads)
    return part if text is part["text"] else {**part, "text": text}


def _text(text: str, leads: bool) -> str:
    if "<total_tokens>" in text:
        text = TOTAL.sub("", text)
    if leads and "x-anthropic-billing-header" in text.lower():
        text = BILLING.sub("", text)
    return text
