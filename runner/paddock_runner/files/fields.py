"""Typed access to metadata and config values: every wrong or missing one is an error that names file and key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import FileError, UnsupportedError


class Fields(Mapping[str, Any]):
    """A mapping with typed getters. A getter with `default=None` requires the key.

    where: names the file in errors. noun: "metadata key" or "config field".
    Raises: FileError from every getter, with the key, what was expected and what was found.
    """

    def __init__(self, values: Mapping[str, Any], where: str, noun: str = "metadata key", prefix: str = "") -> None:
        self._values = values
        self.where = where
        self.noun = noun
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values and self._values[key] is not None if isinstance(key, str) else False

    def error(self, key: str, trouble: str) -> FileError:
        """The error for this key."""
        name = self.prefix + key
        return FileError(f"{self.where}: {self.noun} {name} {trouble}", path=self.where, field=name)

    def _required(self, key: str) -> Any:
        if key not in self:
            raise self.error(key, "is missing")
        return self._values[key]

    def integer(self, key: str, default: int | None = None, low: int = 0, high: int = 1 << 40) -> int:
        """A whole number between low and high. A one-element array counts as its element."""
        if default is not None and key not in self:
            return default
        value = self._required(key)
        if _is_array(value) and len(value) == 1:
            value = value[0]
        if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"is {_words(value)}, expected a whole number")
        if not low <= value <= high:
            raise self.error(key, f"is {value}, expected {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        if default is not None and key not in self:
            return default
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, f"is {_words(value)}, expected a number")
        if not abs(value) < 1e308:
            raise self.error(key, f"is {value}, expected a finite number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        if default is not None and key not in self:
            return default
        value = self._required(key)
        if not isinstance(value, str):
            raise self.error(key, f"is {_words(value)}, expected a string")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        if default is not None and key not in self:
            return default
        value = self._required(key)
        if not isinstance(value, bool):
            raise self.error(key, f"is {_words(value)}, expected true or false")
        return value

    def integers(self, key: str, n: int, default: int | None = None, high: int = 1 << 40) -> tuple[int, ...]:
        """n whole numbers: an array of that length, or a scalar that stands for all."""
        if key not in self and default is not None:
            return (default,) * n
        value = self._required(key)
        if not _is_array(value):
            return (self.integer(key, high=high),) * n
        if len(value) != n:
            raise self.error(key, f"has {len(value)} entries, expected {n}")
        for i, v in enumerate(value):
            if isinstance(v, bool) or not isinstance(v, int) or not 0 <= v <= high:
                raise self.error(key, f"has {_words(v)} at {i}, expected 0 to {high}")
        return tuple(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """An array of finite numbers."""
        value = self._required(key)
        if not _is_array(value) or not all(
            isinstance(v, (int, float)) and not isinstance(v, bool) and abs(v) < 1e308 for v in value
        ):
            raise self.error(key, f"is {_words(value)}, expected an array of numbers")
        return tuple(float(v) for v in value)

    def choice(self, key: str, default: str, supported: tuple[str, ...]) -> str:
        """One of the supported words. Raises: UnsupportedError naming them."""
        value = self.text(key, default)
        if value not in supported:
            raise UnsupportedError(
                f"{self.where}: {self.noun} {self.prefix}{key} is {value!r:.40}, which is not supported; supported: {', '.join(supported)}",
                what=value[:40],
                supported=list(supported),
            )
        return value

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """The same fields, with values for keys that are not there."""
        return Fields(
            {**defaults, **{k: v for k, v in self._values.items() if v is not None or k not in defaults}},
            self.where,
            self.noun,
            self.prefix,
        )

    def section(self, key: str) -> Fields:
        """The object under this key."""
        value = self._required(key)
        if not isinstance(value, Mapping):
            raise self.error(key, f"is {_words(value)}, expected an object")
        return Fields(value, self.where, self.noun, f"{self.prefix}{key}.")


def _is_array(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _words(value: Any) -> str:
    """A value, briefly, for an error message."""
    if _is_array(value):
        return f"an array of {len(value)}"
    if isinstance(value, Mapping):
        return "an object"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
