"""paddock completion: a script for bash, zsh or fish, made from the table of commands."""

from __future__ import annotations

import importlib
import pkgutil

from paddock_runner.errors import UsageError

from paddock_manager import commands
from paddock_manager.catalog import catalog
from paddock_manager.options import Argument, Command, Values
from paddock_manager.ui import Ui

SHELLS = ("bash", "zsh", "fish")
COMMAND = Command(
    "completion",
    "Print a shell completion script.",
    (Argument("shell", "bash, zsh or fish"),),
    (),
    "",
    ('eval "$(paddock completion bash)"', "paddock completion fish > ~/.config/fish/completions/paddock.fish"),
)
WORDS = {
    "model": "paddock ls --names 2>/dev/null",
    "running": 'paddock ps --json 2>/dev/null | sed -n \'s/^ *"name": "\\(.*\\)",$/\\1/p\'',
}


def run(values: Values, ui: Ui) -> int:
    """Print it."""
    shell = values.text("shell")
    if shell not in SHELLS:
        raise UsageError(f"there is no completion for {shell!r}", "there is for " + ", ".join(SHELLS))
    found = all_commands()
    text = {"bash": bash, "zsh": zsh, "fish": fish}[shell](found)
    ui.result("completion", {"shell": shell, "script": text}, lambda u: u.line(text))
    return 0


def all_commands() -> list[Command]:
    """Every command's description, by name."""
    modules = [
        importlib.import_module(f"{commands.__name__}.{m.name}") for m in pkgutil.iter_modules(commands.__path__)
    ]
    return sorted((m.COMMAND for m in modules if hasattr(m, "COMMAND")), key=lambda c: str(c.name))


def _cases(found: list[Command]) -> list[str]:
    """One case per command: its options, its choices, and what its words are."""
    lines = []
    for c in found:
        flags = " ".join(o.name for o in c.all_options)
        kind = c.arguments[0].kind if c.arguments else ""
        words = f"$({WORDS[kind]})" if kind in WORDS else " ".join(catalog.entries()) if kind == "catalog" else ""
        files = "1" if kind in ("path", "model") else ""
        lines.append(f'    {c.name}) flags="{flags}"; words="{words}"; files="{files}" ;;')
    return lines


def bash(found: list[Command]) -> str:
    """For bash 4 and newer."""
    names = " ".join(c.name for c in found)
    return "\n".join([
        "_paddock() {",
        '  local word="${COMP_WORDS[COMP_CWORD]}" flags words files',
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f'    COMPREPLY=($(compgen -W "{names}" -- "$word")); return',
        "  fi",
        '  case "${COMP_WORDS[1]}" in',
        *_cases(found),
        "    *) return ;;",
        "  esac",
        '  if [ "${word:0:1}" = - ]; then COMPREPLY=($(compgen -W "$flags" -- "$word")); return; fi',
        '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
        '  if [ -n "$files" ]; then COMPREPLY+=($(compgen -f -- "$word")); fi',
        "}",
        "complete -o filenames -F _paddock paddock",
    ])  # fmt: skip


def zsh(found: list[Command]) -> str:
    """For zsh with compinit."""
    names = "\n".join(f"    '{c.name}:{c.summary.rstrip('.').replace(chr(39), '’').replace(':', ' -')}'" for c in found)
    return "\n".join([
        "#compdef paddock",
        "_paddock() {",
        "  local -a commands",
        "  commands=(",
        names,
        "  )",
        "  if (( CURRENT == 2 )); then _describe command commands; return; fi",
        "  local flags choices files",
        '  case "${words[2]}" in',
        *[line.replace("words=", "choices=") for line in _cases(found)],
        "  esac",
        '  if [[ "$PREFIX" == -* ]]; then compadd -- ${=flags}; return; fi',
        "  compadd -- ${=choices}",
        '  [[ -n "$files" ]] && _files',
        "}",
        "compdef _paddock paddock",
    ])  # fmt: skip


def fish(found: list[Command]) -> str:
    """For fish 3 and newer."""
    lines = ["complete -c paddock -f"]
    for c in found:
        lines.append(f"complete -c paddock -n __fish_use_subcommand -a {c.name} -d '{_quoted(c.summary)}'")
        seen = f"-n '__fish_seen_subcommand_from {c.name}'"
        for o in c.all_options:
            short = f" -s {o.short[1:]}" if o.short else ""
            value = "" if o.kind == "flag" else " -r"
            choices = f" -a '{' '.join(o.choices)}'" if o.choices else ""
            lines.append(f"complete -c paddock {seen} -l {o.name[2:]}{short}{value}{choices} -d '{_quoted(o.help)}'")
        kind = c.arguments[0].kind if c.arguments else ""
        if kind in WORDS:
            lines.append(f"complete -c paddock {seen} -a '({_quoted(WORDS[kind])})'")
        if kind == "catalog":
            lines.append(f"complete -c paddock {seen} -a '{' '.join(catalog.entries())}'")
        if kind in ("path", "model"):
            lines.append(f"complete -c paddock {seen} -F")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")
