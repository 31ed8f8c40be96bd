"""The table of commands: name, module, one help line. A command's module is imported only when it is called."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence

from paddock_runner.edge.streams import hold_streams
from paddock_runner.errors import Cancelled, DiskFull, FileError, PaddockError, UsageError

from paddock_manager import options, paths
from paddock_manager.ui import OutputGone, Ui

COMMANDS: dict[str, str] = {
    "pull": "download a model and verify it",
    "add": "use a model file or folder where it lies",
    "ls": "list the models that are here",
    "show": "what a model is: files, origin, licence, sizes",
    "inspect": "read a checkpoint's header: metadata, tensors, formats",
    "fit": "does it fit, and with which context and batch",
    "run": "chat with a model, or answer one prompt",
    "serve": "start an OpenAI-compatible server in the background",
    "ps": "list running servers",
    "stop": "stop running servers",
    "logs": "what a server said",
    "rm": "remove a model",
    "export": "copy a model's files to a folder of yours",
    "verify": "check files against their hashes, and repair them",
    "gc": "remove what interrupted work left behind",
    "du": "what takes how much disk",
    "search": "find models in the catalog and on the hub",
    "bench": "measure a model as clients see it",
    "launch": "start a coding agent against a model here",
    "config": "settings, and where each value comes from",
    "key": "the key that clients of this machine's servers present",
    "doctor": "check this machine: disk, packs, devices, ports, hub",
    "version": "versions of Paddock and what it runs on",
    "completion": "print a shell completion script",
}
HABITS: dict[str, str] = {
    "list": "ls", "models": "ls", "remove": "rm", "delete": "rm", "uninstall": "rm", "chat": "run", "generate": "run", "complete": "run",
    "info": "show", "download": "pull", "get": "pull", "install": "pull", "import": "add", "create": "add", "kill": "stop", "unload": "stop",
    "status": "ps", "start": "serve", "server": "serve", "load": "serve", "prune": "gc", "clean": "gc", "df": "du", "history": "fit --history",
    "estimate": "fit", "plan": "fit", "benchmark": "bench", "env": "config", "settings": "config", "check": "doctor", "find": "search",
}  # fmt: skip
"""What people type who come from elsewhere -> the command here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    hold_streams()
    _end_in_order()
    ui = Ui(as_json="--json" in words, quiet="--quiet" in words or "-q" in words, may_color=paths.may_color())
    try:
        for text in _strange_variables():
            ui.warn(text)
        return dispatch(words, ui)
    except PaddockError as error:
        return ui.fail(error)
    except KeyboardInterrupt:
        return ui.fail(Cancelled("interrupted"))
    except _Ended as ended:
        ui.fail(ended.error())
        raise
    except OutputGone:
        return 0
    except OSError as error:
        return ui.fail(_of_system(error))


class _Ended(SystemExit):
    """By a signal."""

    def error(self) -> Cancelled:
        """As one sentence, with the exit code that shells give it."""
        code = int(str(self.code))
        told = Cancelled(f"ended by {signal.Signals(code - 128).name}")
        told.exit_code = code  # type: ignore[misc]
        return told


def _end_in_order() -> None:
    """SIGTERM, and a terminal that is closed, end us as an error would: what was started for this command is stopped with it."""

    def end(number: int, _: object) -> None:
        raise _Ended(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, end)


def _strange_variables() -> list[str]:
    """What is to be said of PADDOCK_* variables that nobody reads, or that a runner would read whom we tell otherwise."""
    told = paths.own_variables()
    if not told.keys() - {"PADDOCK_HOME"}:
        return []
    from paddock_runner.config import knobs, unknown_variables

    from paddock_manager.commands.target import KEPT
    from paddock_manager.settings import SETTINGS

    ours = [paths.setting_variable(s.key)[0] for s in SETTINGS]
    kept = {knob.variable for knob in knobs() if knob.flag in KEPT - {"--home"}}
    out = [f"{name} is set, and there is no such setting{f'; {near} is one' if near else ''}" for name, near in unknown_variables(told, ours)]
    other = {"PADDOCK_PORT": "; here it is PADDOCK_SERVE_PORT"}
    return out + [f"{name} is for paddock-runner alone: `paddock` sets this itself{other.get(name, '')}" for name in sorted(kept & told.keys())]


def _of_system(error: OSError) -> PaddockError:
    """What the system refused, where it names the file; else it is a bug of ours, and is raised again."""
    import errno

    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    if error.filename is None and not is_full:
        raise error
    path, why = "" if error.filename is None else os.fsdecode(error.filename), error.strerror
    if is_full:
        said = f"{path}: {why}" if path else f"a file could not be written: {why}"
        return DiskFull(said, "free some space, or set PADDOCK_HOME to a larger disk", path=path)
    return FileError(f"{path}: {why}", "`paddock doctor` says which folders can be used", path=path)


def dispatch(words: list[str], ui: Ui) -> int:
    """Find the command, read its words, call it."""
    if not words or words[0] in ("help", "--help", "-h"):
        if len(words) > 1 and words[0] == "help":
            words = [words[1], "--help"]
        else:
            ui.line(front_page())
            return 0
    name = {"--version": "version", "-V": "version"}.get(words[0], words[0])
    if name not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(name, [*COMMANDS, *HABITS, "help"], 1, 0.7)
        meant = HABITS.get(near[0], near[0]) if near else ""
        hint = f"did you mean `paddock {meant}`?" if near else "`paddock --help` lists the commands"
        raise UsageError(f"there is no command {name!r}", hint, command=name)
    module = importlib.import_module(f"paddock_manager.commands.{name}")
    command: options.Command = module.COMMAND
    try:
        values = options.parse(command, words[1:])
    except options.UnknownOption as error:
        error.hint = _advice(command, str(error.facts["option"])) or error.hint
        raise
    if values.flag("help"):
        ui.line(options.help_page(command))
        return 0
    ui.as_json, ui.quiet = values.flag("json"), values.flag("quiet")
    return int(module.run(values, ui) or 0)


def _advice(command: options.Command, option: str) -> str:
    """What is to be said of an option that this command has not: other programs', or the runner's."""
    from paddock_runner.config import knobs

    from paddock_manager.commands.target import KEPT
    from paddock_manager.foreign import advice

    longer = next((o.name for o in command.options if o.name.startswith(f"{option}-")), "")
    if longer:
        return f"did you mean {longer}?"
    knob = next((k for k in knobs() if k.flag == option and option not in KEPT), None)
    said = advice(command.name, option)
    if knob is None or said or not any(o.name == "--runner" for o in command.options):
        return said
    return f"that is the runner's: --runner {option[2:]}{'' if knob.kind == 'bool' else '=' + knob.kind.upper()}"


def front_page() -> str:
    """What `paddock` alone prints."""
    width = max(map(len, COMMANDS)) + 2
    lines = ["Paddock runs open-weight models on your own machine.", "", "usage: paddock COMMAND [options]", ""]
    lines += [f"  {name:<{width}}{line}" for name, line in COMMANDS.items()]
    lines += ["", "`paddock COMMAND --help` explains one command. To begin: paddock run smollm2-135m"]
    return "\n".join(lines)


def as_markdown() -> str:
    """The reference page of all commands."""
    out = [
        "# Commands\n\nEvery command takes `--json`, `--quiet` and `--help`; exit codes are those of [errors](errors.md).\n"
    ]
    out.append(
        "Results go to standard output, talk to standard error; without a terminal there are no bars and no colour.\n"
    )
    for name, line in COMMANDS.items():
        command: options.Command = importlib.import_module(f"paddock_manager.commands.{name}").COMMAND
        out.append(f"\n## {name}\n\n{line[0].upper()}{line[1:]}.\n\n```\n{options.help_page(command)}\n```\n")
    return "".join(out)


if __name__ == "__main__":
    sys.exit(main())
