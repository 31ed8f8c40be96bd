"""The manager's settings, once: default, kind, doc line. Values come from variables and config.toml; each knows its origin."""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paddock_runner.errors import FileError, UsageError

from paddock_manager import paths
from paddock_manager.disk import alone, write_text
from paddock_manager.options import parse_size


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. kind: int, size (bytes; written as 20M) or paths (folders, joined as PATH is)."""

    key: str
    kind: str
    default: int | str
    about: str
    low: int = 0
    high: int = 1 << 62
    value: int | str = 0
    origin: str = "default"

    def parse(self, word: object, where: str) -> int | str:
        """A value for it. where: "FILE: " or "VARIABLE: ", before the sentence. Raises: UsageError."""
        if self.kind == "paths":
            bad = [p for p in str(word).split(os.pathsep) if p and not paths.expanded(p).is_absolute()]
            if bad:
                raise UsageError(f"{where}{self.key} takes absolute paths, not {bad[0]!r}")
            return str(word)
        try:
            number = parse_size(str(word)) if self.kind == "size" else int(str(word))
        except ValueError:
            shape = "a size such as 20M" if self.kind == "size" else "a whole number"
            raise UsageError(f"{where}{self.key} takes {shape}, not {word!r}") from None
        if not self.low <= number <= self.high:
            raise UsageError(f"{where}{self.key} is from {self.low} to {self.high}, not {number}")
        return number


SETTINGS = (
    Setting("pull.connections", "int", 8, "parallel connections of a pull", 1, 32),
    Setting("pull.limit_rate", "size", 0, "bytes a second of a pull, 0 for no limit"),
    Setting("serve.port", "int", 11660, "port of `paddock serve`, 0 takes a free one", 0, 65535),
    Setting("serve.timeout", "int", 900, "seconds to wait until a server is ready", 1, 86400),
    Setting("store.roots", "paths", "", "further folders of models (ORG/REPO below them), on disks that may be away"),
    Setting("fit.ctx", "int", 32768, "context that `paddock fit` assumes", 1),
    Setting("fit.batch", "int", 1, "batch that `paddock fit` assumes", 1, 4096),
)


def load(path: Path) -> dict[str, Setting]:
    """All settings with their values.

    Raises: FileError (not TOML), UsageError (an unknown key or a wrong value, named with the file).
    """
    known = {s.key: replace(s, value=s.default) for s in SETTINGS}
    for key, word in _read(path).items():
        setting = one(known, key, f"{path}: ")
        known[key] = replace(setting, value=setting.parse(word, f"{path}: "), origin=str(path))
    for key, setting in known.items():
        variable, told = paths.setting_variable(key)
        if told:
            known[key] = replace(setting, value=setting.parse(told, f"{variable}: "), origin=variable)
    return known


def value(path: Path, key: str, flag: int | float | None) -> int:
    """One value: the flag's, or the variable's, or the file's, or the default."""
    return int(flag) if flag is not None else int(load(path)[key].value)


def one(known: dict[str, Setting], key: str, where: str = "") -> Setting:
    """A setting by key. where: as for `parse`. Raises: UsageError with those there are."""
    if key not in known:
        raise UsageError(f"{where}there is no setting {key!r}", "settings: " + ", ".join(known), key=key)
    return known[key]


def change(path: Path, key: str, word: str | None) -> None:
    """Write one value to the file, or take it out (None). Raises: UsageError, FileError."""
    setting = one({s.key: s for s in SETTINGS}, key)
    if word is not None:
        setting.parse(word, "")
    with alone(path.parent):
        kept = {k: v for k, v in _read(path).items() if k != key}
        if word is not None:
            kept[key] = int(word) if setting.kind == "int" else word
        _write(path, kept)


def _write(path: Path, kept: dict[str, Any]) -> None:
    tables: dict[str, list[str]] = {}
    for name, entry in sorted(kept.items()):
        table, _, field_name = name.partition(".")
        shown = json.dumps(entry) if isinstance(entry, str) else str(entry)
        tables.setdefault(table, []).append(f"{field_name} = {shown}")
    write_text(path, "\n\n".join("\n".join([f"[{t}]", *lines]) for t, lines in tables.items()) + "\n")


def _read(path: Path) -> dict[str, Any]:
    """The file's values by dotted key."""
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FileError(f"{path}: not readable as TOML: {error}", path=str(path)) from None
    return {
        key: value
        for table, entry in body.items()
        for key, value in ({f"{table}.{k}": v for k, v in entry.items()} if isinstance(entry, dict) else {table: entry}).items()
    }
