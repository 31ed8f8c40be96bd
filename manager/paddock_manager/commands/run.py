"""paddock run: one prompt and its streamed answer, or a chat. Uses the server of the model where one runs, else starts one."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from paddock_runner.edge.auth import is_loopback
from paddock_runner.errors import Cancelled, UsageError

from paddock_manager import paths
from paddock_manager.commands import chat, consent, files, sampling, serve, target
from paddock_manager.commands.consent import Tools
from paddock_manager.commands.markdown import Markdown
from paddock_manager.commands.target import LOAD_OPTIONS, Target
from paddock_manager.fleet import keys, spawn, state
from paddock_manager.fleet.client import Chat
from paddock_manager.fleet.mcp import Toolbox, read_servers
from paddock_manager.fleet.spawn import Launch
from paddock_manager.fleet.state import Server
from paddock_manager.options import Argument, Command, Option, Values
from paddock_manager.ui import Ui

COMMAND = Command(
    "run",
    "Chat with a model, or answer one prompt.",
    (
        Argument("model", "a model that is here, a path, or a name that can be pulled", kind="model"),
        Argument(
            "prompt",
            "answer this and end; - reads it from standard input; @FILE, and a word that is the path of a file, stand for the file",
            required=False,
            many=True,
        ),
    ),
    (
        Option("--system", "system prompt", "text", value="TEXT", short="-s", also=("--system-prompt",)),
        Option("--file", "put a file before the prompt: text or PDF", "path", short="-f", value="FILE", many=True),
        Option("--temperature", "0 is greedy (default, as for the next two: what its makers recommend)", "float", value="T", also=("--temp",)),
        Option("--top-p", "keep the likeliest tokens of this probability", "float", value="P"),
        Option("--top-k", "keep so many of the likeliest tokens", "int", value="K"),
        Option("--min-p", "keep tokens at least so likely as this part of the likeliest", "float", value="P"),
        Option("--repetition-penalty", "make tokens that were there less likely: 1 is none", "float", value="X", also=("--repeat-penalty",)),
        Option("--seed", "repeatable sampling", "int", value="N"),
        Option("--max-tokens", "end the answer after so many tokens", "int", value="N", short="-n", also=("--num-predict", "--n-predict", "--predict")),
        Option("--format", "hold the answer to JSON: json, or a file with a JSON schema", "text", value="SHAPE", also=("--schema",)),
        Option("--raw", "go on with the prompt as it is, without the model's chat template"),
        Option("--think", "how much to reason first, where the model can be told", "text", choices=("none", "low", "medium", "high")),
        Option(
            "--mcp",
            "let the model call the tools of these MCP servers, with your consent: a JSON file with mcpServers, or a URL",
            "text",
            value="CONFIG",
        ),
        Option(
            "--mcp-allow", "tools that are called without asking: names with commas, * for all", "text", value="NAMES"
        ),
        Option("--keep", "leave the server running"),
        Option("--stats", "print times and token counts after the answer", also=("--verbose",)),
        *LOAD_OPTIONS,
    ),
    "Text piped in is put after the prompt. In a chat, Ctrl-C stops the answer, Ctrl-D or /bye ends; /help lists the commands.",
    (
        'paddock run smollm2-135m "Write one short sentence about the sea."',
        'paddock run smollm2-135m "Summarise:" < notes.txt',
        'paddock run qwen3-8b main.py test_main.py "Which case is not tested?"',
        "paddock run qwen3-8b @README What is this?",
        "paddock run qwen3-8b --mcp tools.json",
    ),
)


def run(values: Values, ui: Ui) -> int:
    """One-shot or chat."""
    places = paths.places()
    given = sampling.given(values.found)
    named, words = files.split(values.many("prompt"))
    prompt, system = prompt_of(words), files.typed(values.text("system"), "--system")
    if values.flag("raw"):
        for key in ("system", "think", "mcp"):
            if key in values.found:
                raise UsageError(f"--raw and --{key} do not go together: there is no conversation")
        if prompt is None:
            raise UsageError("--raw needs a prompt", "give one after the model, or pipe text in")
    if prompt is None and (ui.as_json or not sys.stdin.isatty()):
        raise UsageError("there is no prompt", "give one after the model, or pipe text in")
    attached = [files.attachment(name, values.text("model")) for name in (*values.many("file"), *named)]
    for word in files.missing(words):
        ui.warn(f"there is no file {word}: it goes to the model as a word")
    if named:
        ui.say(f"with the prompt: {', '.join(named)}")
    found = target.find_or_pull(places, values.text("model"), ui)
    settings: dict[str, Any] = {**sampling.recommended(found), **given}
    with tools_of(values) as tools, server_for(places, found, values, ui) as (server, key):
        session = chat.Session(server, key, found.name, settings, system, tools)
        session.attached, session.is_raw = attached, values.flag("raw")
        if prompt is None:
            return chat.repl(session, ui)
        return once(session, prompt, ui, values.flag("stats"))


@contextmanager
def tools_of(values: Values) -> Iterator[Tools | None]:
    """The tools of --mcp, while they are wanted. Raises: FileError, UsageError, McpError, UnsupportedError."""
    told = values.text("mcp")
    if not told:
        if values.text("mcp_allow"):
            raise UsageError("--mcp-allow needs --mcp")
        yield None
        return
    box = Toolbox(read_servers(told))
    try:
        yield Tools(box, set(consent.names(values.text("mcp_allow"))))
    finally:
        box.close()


def once(session: chat.Session, prompt: str, ui: Ui, with_stats: bool) -> int:
    """Answer one prompt."""
    begun = time.monotonic()
    first: float | None = None
    session.messages.append({"role": "user", "content": session.asked(prompt)})
    style = Markdown() if ui.out_color else None
    for _ in range(chat.MAX_ROUNDS):
        request = Chat(session.server, session.key, session.body())
        chat.tell_ignored(request, ui)
        try:
            for kind, text in request.pieces():
                first = first or time.monotonic()
                if not ui.as_json and kind == "text":
                    ui.piece(style.feed(ui.told(text)) if style else ui.told(text))
        except KeyboardInterrupt:
            if not ui.as_json:
                ui.line()
            raise Cancelled("stopped") from None
        finally:
            request.close()
        if not session.take(request) or session.tools is None:
            break
        session.messages += [consent.call(session.tools, call, ui) for call in request.answer.calls]
    if style is not None and not ui.as_json:
        ui.piece(style.end())
    answer, ended = request.answer, time.monotonic()
    timings = {
        "first_token_ms": round(1000 * ((first or ended) - begun), 1),
        "total_ms": round(1000 * (ended - begun), 1),
    }
    if ui.as_json:
        body: dict[str, Any] = {
            "model": session.model,
            "ref": session.server.ref,
            "answer": answer.text,
            "reasoning": answer.reasoning,
            "settings": session.settings,
        }
        body |= {"finish_reason": answer.finish_reason, "usage": answer.usage, "timings": timings}
        ui.result("run", body, lambda _: None)
        return 0
    if not answer.text.endswith("\n"):
        ui.line()
    if answer.finish_reason == "length":
        ui.say("(cut off: the token limit was reached)")
    if with_stats:
        ui.say(chat.stats_line(answer.usage, timings["first_token_ms"], timings["total_ms"]))
    return 0


def prompt_of(words: list[str]) -> str | None:
    """The prompt from the words and from standard input; None for a chat. Raises: UsageError for bytes that are no text."""
    piped = ""
    if words == ["-"]:
        return files.piped()
    if _is_piped():
        piped = files.piped().strip("\n")
    parts = [p for p in (files.typed(" ".join(words)), piped) if p]
    return "\n\n".join(parts) if parts else None


def _is_piped() -> bool:
    """Is standard input a pipe or a file (not a terminal, not the null device)?"""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


@contextmanager
def server_for(places: paths.Places, found: Target, values: Values, ui: Ui, batch: int = 1) -> Iterator[tuple[Server, str]]:
    """The running server of this model and the key for it; one that is started here, with room for so many requests, is stopped again, unless --keep."""
    given = target.asked(values)
    for server in state.servers(places):
        if not given and found.name in server.asked.get("models", ()) and is_loopback(server.host):
            yield replace(server, model=found.name), keys.key(places)
            return
        if "by" in server.asked or server.ends_with:
            continue  # a gateway's, which may be unloaded at any time, or another command's, which ends with that
        if server.path == str(found.path) and (not given or given == server.asked) and is_loopback(server.host):
            yield server, keys.key(places)
            return
    keep = values.flag("keep")
    name = found.name if keep else f"{found.name}.run{os.getpid()}"
    wanted = dict(given) if keep else {"batch": str(batch), **given}
    launch = Launch(
        name,
        found.ref,
        found.path,
        found.name,
        key_file=keys.server_file(places),
        flags=target.runner_flags(wanted, found),
        asked=dict(given),
        is_watched=keep,
        ends_with_us=not keep,
    )
    server = serve.started(places, launch, ui, serve.START_S)
    if server.device == "cpu" and given.get("device") != "cpu":
        ui.say("no GPU that can be used here: on the CPU")
    try:
        yield server, keys.key(places)
    finally:
        if keep and server.is_alive:
            ui.say(f"{server.name} goes on at {server.url}/v1; `paddock stop {server.name}` ends it")
        elif not keep:
            was_alive = server.is_alive
            spawn.stop(places, server)
            if was_alive:
                spawn.log_path(places, name).unlink(missing_ok=True)
