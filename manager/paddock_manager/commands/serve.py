"""paddock serve: start a server in the background and wait until it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paddock_runner.edge.auth import is_loopback
from paddock_runner.errors import UsageError

from paddock_manager import paths, settings
from paddock_manager.commands import logs, stop, target
from paddock_manager.commands.target import LOAD_OPTIONS
from paddock_manager.fit import history
from paddock_manager.fit.history import Run
from paddock_manager.fleet import keys, spawn, state
from paddock_manager.fleet.client import Unreachable
from paddock_manager.fleet.spawn import Launch
from paddock_manager.fleet.state import Server
from paddock_manager.options import Argument, Command, Option, Values
from paddock_manager.ui import Ui

DEFAULT_PORT = 11660
START_S = 900.0

COMMAND = Command(
    "serve",
    "Start an OpenAI-compatible server for one or several models, in the background.",
    (Argument("models", "models that are here, paths, or names that can be pulled", many=True, kind="model"),),
    (
        Option("--port", f"port (default {DEFAULT_PORT}; 0 takes a free one)", "int", value="PORT", least=0, most=65535),
        Option("--host", "address to listen on (default 127.0.0.1)", "text", value="ADDRESS"),
        Option("--name", "the name that clients and `paddock ps` use", "text", also=("--served-model-name", "--alias")),
        Option("--no-auth", "let clients in without a key; loopback only"),
        Option("--tls-cert", "serve https with this certificate (PEM, with its chain)", "path", value="FILE", also=("--ssl-certfile", "--ssl-cert-file")),
        Option("--tls-key", "the key of --tls-cert", "path", value="FILE", also=("--ssl-keyfile", "--ssl-key-file")),
        Option("--foreground", "stay, show what it says, and stop it at Ctrl-C or SIGTERM, as containers want it"),
        Option("--systemd", "print a systemd user unit that serves the model, and start nothing"),
        Option("--timeout", "how long to wait until it is ready (default 900 s)", "float", value="SECONDS", least=0),
        Option("--budget", "several models: memory for all of them (default what is free)", "size", value="SIZE"),
        Option(
            "--idle",
            "several models: unload one that is idle so long (default 600, 0 never)",
            "float",
            value="SECONDS",
            also=("--ttl", "--keep-alive", "--keepalive"),
            least=0,
        ),
        Option("--on-demand", "one model, too: load it when it is asked for"),
        Option("--task", "what it is for (auto: as its files say)", "text", choices=("auto", "generate", "embed", "rank")),
        *LOAD_OPTIONS,
    ),
    "Several models share one port: the request's model decides, and models are loaded and unloaded as they are needed. "
    "Clients send the key of `paddock key` as a bearer token. The server goes on when this command ends: `paddock stop` ends it.",
    (
        "paddock serve smollm2-135m",
        "paddock serve ./model.gguf --port 0 --ctx 8192 --batch 4",
        "paddock serve qwen3-8b gemma3-4b --budget 12GiB --idle 300",
    ),
)


def run(values: Values, ui: Ui) -> int:
    """Start, wait, say where it is."""
    places = paths.places()
    if values.flag("foreground") and (ui.as_json or values.flag("systemd")):
        raise UsageError(f"--foreground and {'--json' if ui.as_json else '--systemd'} do not go together")
    host = values.text("host", "127.0.0.1")
    if values.flag("no_auth") and not is_loopback(host):
        raise UsageError(f"without a key a server listens on loopback only, not on {host}", "drop --no-auth or --host")
    found = [target.find_or_pull(places, word, ui) for word in dict.fromkeys(values.many("models"))]
    is_gateway = len(found) > 1 or values.flag("on_demand")
    for key in ("budget", "idle"):
        if key in values.found and not is_gateway:
            raise UsageError(f"--{key} is for several models, and for one that --on-demand loads", f"add --on-demand, or leave --{key} out")
    name = values.text("name") or ("gateway" if is_gateway else found[0].name)
    port = settings.value(places.config_file, "serve.port", values.integer("port"))
    timeout_s = settings.value(places.config_file, "serve.timeout", values.number("timeout"))
    if not values.flag("systemd"):
        refuse_taken(places, name, [f.name for f in found] if is_gateway else [], port)
    tls = tls_of(values)
    if not is_loopback(host) and not tls:
        ui.warn(f"listening on {host}: anybody who reaches it and has the key can use it; the traffic is not encrypted")
    given = target.asked(values)
    key_file = None if values.flag("no_auth") else keys.server_file(places)
    is_watched = not values.flag("systemd")  # systemd watches its own units
    if is_gateway:
        from paddock_manager.commands import many

        ask = many.Ask(name, host, port, key_file, float(timeout_s), tls, is_watched)
        launch = many.gateway(places, found, ask, values)
    else:
        model = found[0]
        flags = target.runner_flags(given, model)
        launch = Launch(
            name, model.ref, model.path, "", host, port, key_file, flags, dict(given), is_watched=is_watched, tls=tls
        )
    if values.flag("systemd"):
        text = unit(places, launch)
        ui.result("serve", {"unit": text}, lambda u: u.line(text))
        return 0
    server = started(places, launch, ui, timeout_s)
    body = {"server": facts(server), "auth": key_file is not None}
    ui.result("serve", body, lambda u: u.line(f"{server.name} is served at {server.url}/v1 ({describe(server)})"))
    return stay(places, server, ui) if values.flag("foreground") else 0


def stay(places: paths.Places, server: Server, ui: Ui) -> int:
    """Show what the server says until we are told to end, which ends it, or it has ended. Raises: Unreachable."""
    is_alive = True
    try:
        logs.follow(Path(server.log), ui, lambda: server.is_alive)
        is_alive = server.is_alive
    finally:
        stop.end(places, server)
    if not is_alive:
        raise Unreachable(f"{server.name} has ended", f"`paddock logs {server.name}` shows why", url=server.url)
    ui.say(f"stopped {server.name}")
    return 0


def tls_of(values: Values) -> tuple[str, ...]:
    """Certificate and key as absolute paths; () without. Raises: UsageError when only one is given, or one is not there."""
    given = [paths.expanded(values.text(k)).absolute() for k in ("tls_cert", "tls_key") if values.text(k)]
    if len(given) == 1:
        raise UsageError("TLS needs both files", "--tls-cert FILE --tls-key FILE")
    for path in given:
        if not path.is_file():
            raise UsageError(f"{path}: there is no such file", path=str(path))
    return tuple(map(str, given))


def unit(places: paths.Places, launch: Launch) -> str:
    """A systemd user unit that runs the same program in the foreground, restarted with growing pauses."""
    words = [w for w in launch.words(places.fleet / f"ready-{paths.file_word(launch.name)}.json")]
    shown = " ".join(_quoted(w).replace("$", "$$") for w in words)
    return "\n".join([
        "# save as ~/.config/systemd/user/paddock.service, then: systemctl --user enable --now paddock",
        "[Unit]",
        f"Description=Paddock: {launch.shown.replace('%', '%%')}",
        "After=network.target",
        "[Service]",
        f"ExecStart={shown}",
        f"Environment={_quoted(f'PADDOCK_HOME={places.home}')}",
        "Restart=on-failure",
        "RestartSec=2",
        "RestartSteps=6",
        "RestartMaxDelaySec=60",
        "[Install]",
        "WantedBy=default.target",
    ])  # fmt: skip


def _quoted(word: str) -> str:
    """A word as systemd reads it. Source: systemd.service(5), command lines; systemd.unit(5), specifiers."""
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


def refuse_taken(places: paths.Places, name: str, models: list[str], port: int) -> None:
    """models: of a gateway of that name. Raises: UsageError when a server of ours has one of the names, or the port."""
    alive = state.servers(places)
    state.refuse_taken(alive, name)
    for model in models:
        state.refuse_taken(alive, model, by=name)
    for other in alive:
        if port and other.port == port:
            hint = "`--port 0` takes a free one"
            raise UsageError(f"port {port} is taken by the server of {other.name}", hint, port=port)


def started(places: paths.Places, launch: Launch, ui: Ui, timeout_s: float) -> Server:
    """Start a runner; say that it loads when that takes a while."""
    told = False

    def waiting(passed_s: float) -> None:
        nonlocal told
        if passed_s > 2 and not told:
            told = True
            ui.say(f"loading {launch.path.name or launch.name} …")

    server = spawn.start(places, launch, timeout_s, waiting)
    if server.planned_bytes:
        took = history.measure(server.pid, server.device)
        sizes = (server.max_ctx_tokens, server.max_batch)
        history.note(places, Run(server.model, server.device, *sizes, server.planned_bytes, took, server.started_at))
    return server


def describe(server: Server) -> str:
    """Device, context and batch in a phrase."""
    words = [server.device] if server.device else []
    words += [f"{server.max_ctx_tokens} tokens a request"] if server.max_ctx_tokens else []
    words += [f"{server.max_batch} at a time"] if server.max_batch else []
    return ", ".join([*words, f"pid {server.pid}"])


def facts(server: Server) -> dict[str, Any]:
    """A server for --json."""
    return {
        "name": server.name,
        "ref": server.ref,
        "path": server.path,
        "pid": server.pid,
        "url": server.url,
        "host": server.host,
        "port": server.port,
        "device": server.device,
        "max_ctx_tokens": server.max_ctx_tokens,
        "max_batch": server.max_batch,
        "planned_bytes": server.planned_bytes,
        "started_at": server.started_at,
        "log": server.log,
    }
