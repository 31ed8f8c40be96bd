"""paddock launch: start a coding agent or client against a server of ours, by environment alone; its files are never edited."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import dataclass, replace

from paddock_runner.errors import PaddockError, UnknownModel, UsageError
from paddock_runner.files.checkpoint import open_checkpoint

from paddock_manager import paths
from paddock_manager.commands import serve, target
from paddock_manager.commands.target import LOAD_OPTIONS, Target
from paddock_manager.disk import write_json
from paddock_manager.fit import fit
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


AGENT_CTX_TOKENS, AGENT_BATCH = 65536, 2
"""What a server is started with for an agent where nobody says otherwise: its first prompts have 10,000 to 25,000 tokens, and it asks aside for titles and the like."""
SMALL_CTX_TOKENS = 16384

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
CLAUDE = {**ANTHROPIC, "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "{output}"}
"""It asks for 32,000 tokens otherwise, which small contexts do not hold."""
OPENCODE = {
    "OPENCODE_CONFIG_CONTENT": '{{"provider":{{"paddock":{{"npm":"@ai-sdk/openai-compatible","name":"Paddock","options":{{"baseURL":"{url}/v1",'
    '"apiKey":"{key}"}},"models":{{"{model}":{{"name":"{model}","limit":{{"context":{context},"output":{output}}}}}}}}}}},"model":"paddock/{model}"}}'
}
"""Merged over the configuration in its files. Source: https://opencode.ai/docs/config, precedence order."""
AGENTS = {
    "claude": Agent(("claude",), CLAUDE),
    "codex": Agent(
        (
            "codex",
            "-c",
            "model_provider=paddock",
            "-c",
            'model_providers.paddock={{name="paddock",base_url="{url}/v1",env_key="OPENAI_API_KEY",wire_api="responses"}}',
            "-c",
            "model_context_window={context}",
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
    (Option("--print", "print the variables and the command, and start no agent"), *LOAD_OPTIONS),
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
    server = _server(places, values, ui)
    folder = places.fleet / f"launch-{values.text('agent')}"
    facts = {"url": server.url, "key": keys.key(places), "model": server.model, "folder": str(folder)}
    context = server.max_ctx_tokens or int(server.asked.get("contexts", {}).get(server.model, 0)) or AGENT_CTX_TOKENS
    if context < SMALL_CTX_TOKENS:
        ui.warn(f"a request to {server.model} may have {context} tokens: prompts of agents often have more than {SMALL_CTX_TOKENS // 2}")
    facts |= {"context": str(context), "output": str(min(32000, context // 4))}
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


def _server(places: paths.Places, values: Values, ui: Ui) -> state.Server:
    """The running server of that name, or one that is started now. A gateway's runner is asked through its gateway, which may unload it at any time."""
    word, given = values.text("model"), target.asked(values)
    found = _running(places, word, ui)
    if isinstance(found, state.Server):
        if given:
            said = f"{found.model} is already served at {found.url}, as it was started"
            raise UsageError(said, f"`paddock stop {found.name}` first, or leave {', '.join('--' + k.removeprefix('--').replace('_', '-') for k in given)} out")
        return found
    given.setdefault("batch", str(AGENT_BATCH))
    if "ctx" not in given and (ctx := _context(found, given, values.integer("threads"))):
        given["ctx"] = str(ctx)
        ui.say(f"{found.name} is started with contexts of {ctx} tokens; --ctx chooses others")
    launch = Launch(found.name, found.ref, found.path, key_file=keys.server_file(places), flags=target.runner_flags(given, found), asked=given, is_watched=True)
    return serve.started(places, launch, ui, serve.START_S)


def _context(found: Target, given: dict[str, str], n_threads: int | None) -> int:
    """What agents want, as far as the model has it and it fits; 0 where nothing does, or it cannot be read: the runner tells why."""
    where = fit.find_where(given.get("gpu") or given.get("device", "auto"), None, "", n_threads)[0]
    wish = fit.Wish(None, int(given["batch"]), given.get("kv"), AGENT_CTX_TOKENS, window_kv_format=given.get("window_kv"))
    try:
        return min(AGENT_CTX_TOKENS, fit.report(found.name, open_checkpoint(found.path), where, wish).largest_ctx_tokens)
    except PaddockError:
        return 0


def _running(places: paths.Places, word: str, ui: Ui) -> state.Server | Target:
    """The server to ask, or the model that none serves."""
    running = state.servers(places)
    shared = next((s for s in running if word in s.asked.get("models", ())), None)
    if shared is not None:
        return replace(shared, model=word)
    try:
        named = state.find(places, word, lasting=True)
        by = next((s for s in running if s.name == named.asked.get("by")), None)
        return named if by is None else replace(by, model=named.name)
    except UnknownModel:
        found = target.find_or_pull(places, word, ui)
    for server in running:
        if found.name in server.asked.get("models", ()):
            return replace(server, model=found.name)
        if server.path == str(found.path) and "by" not in server.asked and not server.ends_with:
            return server
    return found
