"""paddock launch: start a coding agent or client against a server of ours, by environment alone; its files are never edited."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import dataclass, replace

from paddock_runner.errors import UnknownModel, UsageError

from paddock_manager import paths
from paddock_manager.commands import serve, target
from paddock_manager.disk import write_json
from paddock_manager.fleet import keys, state
from paddock_manager.fleet.spawn import Launch
from paddock_manager.options import Argument, Command, Option, Values
from paddock_manager.ui import Ui


@dataclass(frozen=True, slots=True)
class Agent:
    """How a program is told where to go. env: variable to value, with {url}, {key}, {model} and {folder}; words: its command line.

    models_file: of the program's own, where it reads models from nothing else: it is written to a folder of ours, which is {folder}.
    """

    words: tuple[str, ...]
    env: dict[str, str]
    models_file: str = ""


OPENAI = {
    "OPENAI_BASE_URL": "{url}/v1",
    "OPENAI_API_BASE": "{url}/v1",
    "OPENAI_API_KEY": "{key}",
    "OPENAI_MODEL": "{model}",
}
ANTHROPIC = {
    "ANTHROPIC_BASE_URL": "{url}",
    "ANTHROPIC_AUTH_TOKEN": "{key}",
    "ANTHROPIC_MODEL": "{model}",
    "ANTHROPIC_SMALL_FAST_MODEL": "{model}",
}
OPENCODE = {
    "OPENCODE_CONFIG_CONTENT": '{{"provider":{{"paddock":{{"npm":"@ai-sdk/openai-compatible","name":"Paddock","options":{{"baseURL":"{url}/v1",'
    '"apiKey":"{key}"}},"models":{{"{model}":{{"name":"{model}"}}}}}}}},"model":"paddock/{model}"}}'
}
"""Merged over the configuration in its files. Source: https://opencode.ai/docs/config, precedence order."""
AGENTS = {
    "claude": Agent(("claude",), ANTHROPIC),
    "codex": Agent(
        (
            "codex",
            "-c",
            "model_provider=paddock",
            "-c",
            'model_providers.paddock={{name="paddock",base_url="{url}/v1",env_key="OPENAI_API_KEY",wire_api="responses"}}',
            "-m",
            "{model}",
        ),
        OPENAI,
    ),
    "opencode": Agent(("opencode",), OPENCODE),
    "aider": Agent(("aider", "--model", "openai/{model}"), OPENAI),
    "llm": Agent(("llm",), OPENAI | {"LLM_USER_PATH": "{folder}", "LLM_MODEL": "{model}"}, "extra-openai-models.yaml"),
    "env": Agent((), OPENAI | ANTHROPIC),
}

COMMAND = Command(
    "launch",
    "Start a coding agent that talks to a model here.",
    (
        Argument("agent", "claude, codex, opencode, aider, llm, or env for the variables alone"),
        Argument("model", "a running server or a model", kind="model"),
    ),
    (Option("--print", "print the variables and the command, and start nothing"),),
    "Only the program's environment is set. `eval \"$(paddock launch env MODEL --print)\"` sets your shell's.",
    ("paddock launch claude qwen3-8b", "paddock launch env smollm2-135m --print"),
)


def run(values: Values, ui: Ui) -> int:
    """Find or start the server, then become the agent."""
    agent = AGENTS.get(values.text("agent"))
    if agent is None:
        raise UsageError(f"launch does not know {values.text('agent')!r}", "it knows " + ", ".join(AGENTS))
    is_told = values.flag("print") or not agent.words or ui.as_json
    if not is_told and shutil.which(agent.words[0]) is None:
        shown = f"`paddock launch {values.text('agent')} {values.text('model')} --print` shows what it would get"
        raise UsageError(f"{agent.words[0]} is not installed", shown)
    places = paths.places()
    server = _server(places, values.text("model"), ui)
    folder = places.fleet / f"launch-{values.text('agent')}"
    facts = {"url": server.url, "key": keys.key(places), "model": server.model, "folder": str(folder)}
    env = {k: v.format(**facts) for k, v in agent.env.items()}
    words = [w.format(**facts) for w in agent.words]
    if agent.models_file:
        # Source: llm's documentation, "OpenAI-compatible models". JSON is YAML; the key comes from OPENAI_API_KEY.
        told = {"model_id": server.model, "model_name": server.model, "api_base": f"{server.url}/v1", "api_key_name": "openai"}
        write_json(folder / agent.models_file, [{**told, "supports_schema": True, "supports_tools": True}])
    if is_told:

        def human(out: Ui) -> None:
            for name, value in env.items():
                out.line(f"export {name}={shlex.quote(value)}")
            if words:
                out.line(shlex.join(words))

        ui.result("launch", {"env": env, "command": words, "server": serve.facts(server)}, human)
        return 0
    ui.say(f"{words[0]} with {server.name} at {server.url}")
    return subprocess.run(words, env=paths.child_environment(env), check=False).returncode


def _server(places: paths.Places, word: str, ui: Ui) -> state.Server:
    """The running server of that name, or one that is started now. A gateway's runner is asked through its gateway, which may unload it at any time."""
    running = state.servers(places)
    shared = next((s for s in running if word in s.asked.get("models", ())), None)
    if shared is not None:
        return replace(shared, model=word)
    try:
        named = state.find(places, word)
        by = next((s for s in running if s.name == named.asked.get("by")), None)
        return named if by is None else replace(by, model=named.name)
    except UnknownModel:
        found = target.find_or_pull(places, word, ui)
    for server in running:
        if found.name in server.asked.get("models", ()):
            return replace(server, model=found.name)
        if server.path == str(found.path) and "by" not in server.asked:
            return server
    launch = Launch(found.name, found.ref, found.path, key_file=keys.server_file(places), flags=target.runner_flags({}, found), is_watched=True)
    return serve.started(places, launch, ui, serve.START_S)
