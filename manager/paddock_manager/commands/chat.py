"""The chat at the terminal: turns, tool calls, slash commands, several lines, Ctrl-C that stops the answer and not the program."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from paddock_runner.errors import ContextTooLong, PaddockError, UsageError

from paddock_manager import paths
from paddock_manager.commands import consent, files
from paddock_manager.commands.consent import Tools
from paddock_manager.commands.markdown import Markdown
from paddock_manager.commands.sampling import KINDS, chosen
from paddock_manager.fleet.client import Chat
from paddock_manager.fleet.state import Server
from paddock_manager.ui import Ui

HELP = '''/help            this list
/bye             end (also Ctrl-D)
/clear           forget the conversation
/file PATH       put a file (text or PDF) into the next message; @PATH in a message does so, too
/retry           answer the last message again
/system TEXT     set the system prompt (without TEXT: show it)
/set NAME VALUE  temperature, top_p, top_k, min_p, repetition_penalty, seed, max_tokens (without: show all)
/show            the model, its server and settings
/stats           times and token counts of the last answer
/tools           the tools that the model may call, and which of them without asking
/save FILE       write the conversation as JSON
/load FILE       take a conversation up again
"""              begin and end a message of several lines'''
MAX_ROUNDS = 16
"""Answers with tool calls in one turn."""
KEPT = ("role", "content", "tool_calls", "tool_call_id")


@dataclass(slots=True)
class Session:
    """One conversation. model: the name that the runner serves under. is_raw: no conversation, but a text that the model goes on with."""

    server: Server
    key: str
    model: str
    settings: dict[str, Any]
    system: str = ""
    tools: Tools | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    attached: list[str] = field(default_factory=list)
    last_stats: str = ""
    is_raw: bool = False

    def asked(self, prompt: str) -> str:
        """The prompt after the files that were attached to it, and those that it names with @. Raises: as files.attachment."""
        named = [files.attachment(name, self.model) for name in files.mentioned(prompt)]
        parts, self.attached = [*self.attached, *named, prompt], []
        return "\n\n".join(parts)

    def body(self) -> dict[str, Any]:
        """The request for what comes next in the conversation."""
        if self.is_raw:
            return {"model": self.server.model, "prompt": self.messages[-1]["content"], **self.settings}
        system = [{"role": "system", "content": self.system}] if self.system else []
        tools = {"tools": self.tools.functions} if self.tools is not None else {}
        return {"model": self.server.model, "messages": [*system, *self.messages], **tools, **self.settings}

    def take(self, request: Chat) -> bool:
        """Keeps an answer. True when it calls tools."""
        calls = request.answer.calls
        made = {"tool_calls": calls} if calls else {}
        self.messages.append({"role": "assistant", "content": request.answer.text, **made})
        return bool(calls) and self.tools is not None


def stats_line(usage: dict[str, Any], first_ms: float, total_ms: float) -> str:
    """Times and counts of one answer."""
    if not usage:
        return f"stopped after {total_ms / 1000:.1f} s; the server counts tokens of whole answers only"
    prompt, done = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    decode_s = max(1e-6, (total_ms - first_ms) / 1000)
    rate = f", {(done - 1) / decode_s:.1f} tokens/s" if done > 1 else ""
    return f"prompt {prompt} tokens ({cached} cached), answer {done} tokens, first after {first_ms:.0f} ms{rate}"


def repl(session: Session, ui: Ui) -> int:
    """Read, answer, repeat."""
    try:
        import readline  # gives input() history and editing
    except ImportError:
        pass
    else:
        readline.parse_and_bind("set enable-bracketed-paste on")  # a pasted text of several lines is one message
    ui.say(f"{session.model} on {session.server.device or 'its server'}. /help lists the commands, /bye ends.")
    while True:
        try:
            text = read_message()
        except EOFError:
            ui.line()
            return 0
        except KeyboardInterrupt:
            ui.line()
            ui.say("(/bye or Ctrl-D ends)")
            continue
        except UsageError as error:
            ui.fail(error)
            continue
        try:
            if text.startswith("/"):
                if command(session, text, ui):
                    return 0
            elif text.strip():
                answer(session, text, ui)
        except PaddockError as error:
            if not session.server.is_alive:
                raise
            if isinstance(error, ContextTooLong):
                error.hint = "`/clear` forgets the conversation; a server with a larger context (--ctx) holds more of it"
            ui.fail(error)


def read_message() -> str:
    """One message from the terminal; triple quotes span lines. Raises: UsageError for bytes that are no text."""
    line = _line(">>> ")
    if not line.startswith('"""'):
        return line
    lines = [line[3:]]
    while not lines[-1].endswith('"""'):
        lines.append(_line("... "))
    lines[-1] = lines[-1][:-3]
    return "\n".join(lines)


def _line(mark: str) -> str:
    try:
        return files.typed(input(mark), "the message")
    except UnicodeDecodeError as error:
        raise UsageError(f"the message is no text in {error.encoding}") from None


def answer(session: Session, prompt: str, ui: Ui) -> None:
    """One turn: answers until one calls no tool. A stopped answer stays in the conversation as far as it came."""
    n_before = len(session.messages)
    session.messages.append({"role": "user", "content": session.asked(prompt)})
    try:
        for _ in range(MAX_ROUNDS):
            begun = time.monotonic()
            request = Chat(session.server, session.key, session.body())
            is_whole = _show_answer(session, request, begun, ui)
            if not session.take(request) or session.tools is None or not is_whole:
                return
            session.messages += [consent.call(session.tools, call, ui) for call in request.answer.calls]
        ui.say(f"(stopped after {MAX_ROUNDS} answers that call tools)")
    except PaddockError:
        del session.messages[n_before:]
        raise


def _show_answer(session: Session, request: Chat, begun: float, ui: Ui) -> bool:
    """Prints an answer as it comes. begun: when it was asked for. False when Ctrl-C stopped it."""
    first: float | None = None
    in_reasoning, is_whole = False, True
    tell_ignored(request, ui)
    style = Markdown() if ui.out_color else None
    try:
        for kind, text in request.pieces():
            first = first or time.monotonic()
            if (kind == "reasoning") != in_reasoning:
                in_reasoning = kind == "reasoning"
                ui.line("[thinking]" if in_reasoning else "\n[answer]")
            ui.piece(ui.told(text) if in_reasoning or style is None else style.feed(ui.told(text)))
    except KeyboardInterrupt:
        ui.line("")
        ui.say("(stopped)")
        is_whole = False
    else:
        if request.answer.text or request.answer.reasoning or not request.answer.calls:
            ui.line()
    finally:
        request.close()
    if style is not None:
        ui.piece(style.end())
    ended = time.monotonic()
    if request.answer.finish_reason == "length":
        ui.say("(cut off: the token limit was reached)")
    session.last_stats = stats_line(request.answer.usage, 1000 * ((first or ended) - begun), 1000 * (ended - begun))
    return is_whole


def tell_ignored(request: Chat, ui: Ui) -> None:
    """Says what of the request the model has no use for."""
    if request.answer.ignored:
        ui.warn(f"without effect on this model: {request.answer.ignored}")


def command(session: Session, text: str, ui: Ui) -> bool:
    """A slash command. True: end the chat.

    Raises: UsageError for one that is not there.
    """
    word, _, rest = text.strip().partition(" ")
    rest = rest.strip()
    if word in ("/bye", "/exit", "/quit"):
        return True
    if word in ("/help", "/?"):
        ui.line(HELP)
    elif word == "/file":
        session.attached.append(files.attachment(rest, session.model))
        ui.say(f"{rest} goes with the next message")
    elif word == "/clear":
        session.messages.clear()
        session.attached.clear()
        ui.say("(the conversation is forgotten)")
    elif word == "/retry":
        _retry(session, ui)
    elif word == "/system":
        session.system = rest or session.system
        ui.say(f"system: {session.system or '(none)'}")
    elif word == "/set":
        _set(session, rest, ui)
    elif word in ("/show", "/ctx"):
        _show(session, ui)
    elif word == "/tools":
        consent.show(session.tools, ui)
    elif word == "/stats":
        ui.say(session.last_stats or "no answer yet")
    elif word in ("/save", "/load"):
        _file(session, word, rest, ui)
    else:
        raise UsageError(f"there is no command {word}", "/help lists them")
    return False


def _retry(session: Session, ui: Ui) -> None:
    asked = [i for i, message in enumerate(session.messages) if message["role"] == "user"]
    if not asked:
        raise UsageError("there is nothing to answer again")
    prompt = session.messages[asked[-1]]["content"]
    del session.messages[asked[-1] :]
    answer(session, prompt, ui)


def _set(session: Session, rest: str, ui: Ui) -> None:
    name, _, value = rest.removeprefix("parameter ").partition(" ")
    if name == "system":
        session.system = value.strip().strip('"') or session.system
        ui.say(f"system: {session.system or '(none)'}")
        return
    if name:
        if name not in KINDS:
            raise UsageError(f"there is no setting {name}", f"there are {', '.join(KINDS)} and system")
        session.settings[name] = chosen(name, value.strip())
    for key in KINDS:
        ui.say(f"  {key} = {session.settings.get(key, '(the model’s default)')}")


def _show(session: Session, ui: Ui) -> None:
    server = session.server
    ui.pairs(
        [
            ("model", session.model),
            ("file", server.path),
            ("server", f"{server.url} (pid {server.pid})"),
            ("device", server.device),
        ]
    )
    ui.pairs([("context", f"{server.max_ctx_tokens} tokens"), ("turns", str(n_turns(session.messages)))])


def _file(session: Session, word: str, rest: str, ui: Ui) -> None:
    """/save and /load."""
    if not rest:
        raise UsageError(f"{word} needs a file name")
    path = paths.expanded(rest)
    try:
        if word == "/save":
            body = {
                "schema": "paddock.chat/1",
                "model": session.model,
                "system": session.system,
                "messages": session.messages,
            }
            path.write_text(json.dumps(body, indent=1, ensure_ascii=False), encoding="utf-8")
            ui.say(f"written to {path}")
            return
        body = json.loads(path.read_text(encoding="utf-8"))
        messages = [
            {"role": str(m["role"]), **{key: m[key] for key in KEPT if key in m}, "content": str(m["content"])}
            for m in body["messages"]
        ]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", path=str(path)) from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is no conversation that /save wrote", path=str(path)) from None
    session.messages, session.system = messages, str(body.get("system", ""))
    ui.say(f"{n_turns(messages)} turns from {path}")


def n_turns(messages: list[dict[str, Any]]) -> int:
    """What the user has said."""
    return sum(message["role"] == "user" for message in messages)
