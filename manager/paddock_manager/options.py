"""What a command line may say, as data: one parser, one help page, one completion for all commands.

Importing an option framework costs more than `paddock ls` may take in all; this file costs under a millisecond.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from paddock_runner.errors import UsageError

SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class UnknownOption(UsageError):
    """The command has no such option (facts: option)."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A positional word. kind steers completion: model, running, path, command, word."""

    name: str
    help: str
    required: bool = True
    many: bool = False
    kind: str = "word"

    @property
    def shown(self) -> str:
        """As the usage line writes it."""
        word = self.name.upper() + ("…" if self.many else "")
        return word if self.required else f"[{word}]"


@dataclass(frozen=True, slots=True)
class Option:
    """A flag. kind: flag, text, int, float, size (bytes with k, M, GiB…), path. also: what other programs call it, taken for it. least, most: of numbers."""

    name: str
    help: str
    kind: str = "flag"
    short: str = ""
    value: str = ""
    choices: tuple[str, ...] = ()
    many: bool = False
    also: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None

    @property
    def key(self) -> str:
        """The name under which Values holds it."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def shown(self) -> str:
        """As the help page writes it."""
        head = f"{self.short}, {self.name}" if self.short else f"    {self.name}"
        return head if self.kind == "flag" else f"{head} {self.value or self.kind.upper()}"


COMMON = (
    Option("--json", "print one JSON document on standard output"),
    Option("--quiet", "print results and errors only", short="-q"),
    Option("--help", "show this page", short="-h"),
)


@dataclass(frozen=True, slots=True)
class Command:
    """What one command accepts."""

    name: str
    summary: str
    arguments: tuple[Argument, ...] = ()
    options: tuple[Option, ...] = ()
    detail: str = ""
    examples: tuple[str, ...] = ()

    @property
    def all_options(self) -> tuple[Option, ...]:
        """Its own options and those every command has."""
        return self.options + COMMON


@dataclass(slots=True)
class Values:
    """The words of one command line, by name; typed getters."""

    found: dict[str, Any] = field(default_factory=dict)

    def flag(self, key: str) -> bool:
        """Was the flag given?"""
        return bool(self.found.get(key, False))

    def text(self, key: str, default: str = "") -> str:
        """A word, or the default."""
        return str(self.found.get(key, default))

    def many(self, key: str) -> list[str]:
        """All words of a repeated argument or option."""
        return [str(v) for v in self.found.get(key, [])]

    def integer(self, key: str) -> int | None:
        """A whole number, or None."""
        value = self.found.get(key)
        return None if value is None else int(value)

    def number(self, key: str) -> float | None:
        """A number, or None."""
        value = self.found.get(key)
        return None if value is None else float(value)


def parse(command: Command, words: list[str]) -> Values:
    """Read a command line.

    Raises: UsageError naming the word at fault, with the nearest known option.
    """
    values = Values()
    plain: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "--":
            plain += queue
            break
        if not word.startswith("-") or word == "-":
            plain.append(word)
            continue
        _take_option(command, word, queue, values)
    if not values.flag("help"):
        _place(command, plain, values)
    return values


def _take_option(command: Command, word: str, queue: list[str], values: Values) -> None:
    """Match one option word, taking its value from the word or from the queue."""
    name, equals, given = word.partition("=")
    option = next((o for o in command.all_options if name in (o.name, o.short, *o.also)), None)
    if option is None:
        import difflib

        near = difflib.get_close_matches(name, [n for o in command.all_options for n in (o.name, *o.also)], 1, 0.7)
        hint = f"did you mean {near[0]}?" if near else f"`paddock {command.name} --help` lists what there is"
        raise UnknownOption(f"`paddock {command.name}` has no option {name}", hint, option=name)
    if option.kind == "flag":
        if equals:
            raise UsageError(f"{name} takes no value", option=name)
        values.found[option.key] = True
        return
    if not equals:
        if not queue:
            raise UsageError(f"{name} needs a value", option=name)
        given = queue.pop(0)
    value = convert(option, given, name)
    if option.many:
        values.found.setdefault(option.key, []).append(value)
    else:
        values.found[option.key] = value


def _place(command: Command, plain: list[str], values: Values) -> None:
    """Give the positional words their names."""
    for argument in command.arguments:
        if argument.many:
            if argument.required and not plain:
                raise UsageError(f"`paddock {command.name}` needs {argument.name.upper()}", usage(command))
            values.found[argument.name] = list(plain)
            plain = []
        elif plain:
            values.found[argument.name] = plain.pop(0)
        elif argument.required:
            raise UsageError(f"`paddock {command.name}` needs {argument.name.upper()}", usage(command))
    if plain:
        raise UsageError(f"`paddock {command.name}` does not know what to do with {plain[0]!r}", usage(command))


def convert(option: Option, word: str, name: str = "") -> str | int | float:
    """One option's word as its kind, within its bounds. name: what was typed for the option.

    Raises: UsageError with the word and what was expected.
    """
    name = name or option.name
    if option.choices and word not in option.choices:
        raise UsageError(f"{name} is one of {', '.join(option.choices)}, not {word!r}", option=name)
    try:
        if option.kind in ("int", "float"):
            number = int(word.replace("_", "")) if option.kind == "int" else float(word)
            if not math.isfinite(number):
                raise ValueError(word)
            return _bounded(option, number, name)
        if option.kind == "size":
            return parse_size(word)
    except (ValueError, OverflowError):
        shape = {"int": "a whole number", "float": "a number", "size": "a size such as 20M or 24GiB"}[option.kind]
        raise UsageError(f"{name} takes {shape}, not {word!r}", option=name) from None
    return word


def _bounded(option: Option, number: float, name: str) -> int | float:
    if option.least is not None and number < option.least:
        raise UsageError(f"{name} is {number}, at least {option.least:g} is needed", option=name)
    if option.most is not None and number > option.most:
        raise UsageError(f"{name} is {number}, at most {option.most:g} is possible", option=name)
    return number


def parse_size(word: str) -> int:
    """`24GiB`, `20M`, `1000` as bytes.

    Raises: ValueError.
    """
    text = word.strip().lower().removesuffix("/s").removesuffix("b")
    digits = text.rstrip("kmgti")
    factor = SIZES.get(text[len(digits) :])
    if factor is None or not digits:
        raise ValueError(word)
    number = float(digits)
    if number < 0 or number != number or number == float("inf"):
        raise ValueError(word)
    return int(number * factor)


def usage(command: Command) -> str:
    """The usage line."""
    words = ["usage: paddock", command.name, *(a.shown for a in command.arguments), "[options]"]
    return " ".join(words)


def help_page(command: Command) -> str:
    """The whole help page of a command."""
    lines = [usage(command), "", command.summary]
    if command.detail:
        lines += ["", command.detail]
    rows = [("  " + a.name.upper(), a.help) for a in command.arguments]
    option_rows = [("  " + o.shown, o.help + _among(o)) for o in command.all_options]
    width = min(34, max((len(left) for left, _ in rows + option_rows), default=0)) + 2
    if rows:
        lines += ["", "Arguments:", *(_row(left, right, width) for left, right in rows)]
    lines += ["", "Options:", *(_row(left, right, width) for left, right in option_rows)]
    if command.examples:
        lines += ["", "Examples:", *(f"  {e}" for e in command.examples)]
    return "\n".join(lines)


def _among(option: Option) -> str:
    return f" ({', '.join(option.choices)})" if option.choices else ""


def _row(left: str, right: str, width: int) -> str:
    return f"{left:<{width}}{right}" if len(left) < width else f"{left}\n{'':<{width}}{right}"
