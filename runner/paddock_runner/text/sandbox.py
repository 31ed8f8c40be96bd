"""A jinja2 environment for chat templates, which are part of a downloaded file and so may be hostile.

On top of jinja2's immutable sandbox every render has three budgets, all checked while it runs, in the thread that renders:

- time: processor time of the thread. The clock is read in each loop body, each macro and each large operation; those calls are
  put into the syntax tree before it is compiled, so no loop and no recursion escapes them.
- size: of any one string or list that an operator, filter, method or capture makes, and of the output.
- weight: of a value that is about to be printed, compared or serialised (lists that contain each other twice grow exponentially).

No operation between two checks can run for long, because its operands are within the size budget. Nothing is killed and no
thread is needed: the render ends with LimitExceeded.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 32 << 20
MAX_ITEMS = 1 << 20
MAX_WEIGHT = 2_000_000
MAX_NUMBER_BITS = 4096
MAX_WIDTH = 1000
_LARGE = 1 << 16
_WALKING_FILTERS = {
    "dictsort", "format", "groupby", "join", "max", "min", "pprint", "replace", "sort", "string", "sum", "tojson", "unique",
    "wordcount", "trim", "upper", "lower", "capitalize", "title", "escape", "forceescape", "safe", "striptags", "urlencode",
}  # fmt: skip
_ITERATING_FILTERS = {
    "list",
    "map",
    "select",
    "reject",
    "selectattr",
    "rejectattr",
    "unique",
    "sort",
    "groupby",
    "min",
    "max",
}
_DROPPED_FILTERS = ("urlize", "xmlattr", "wordwrap", "batch", "slice", "center", "random")
_WALKING_TESTS = (
    "eq",
    "==",
    "equalto",
    "ne",
    "!=",
    "in",
    "lt",
    "le",
    "gt",
    "ge",
    "lessthan",
    "greaterthan",
    "<",
    "<=",
    ">",
    ">=",
)
_WIDE_FORMAT = re.compile(r"\{[^{}]*:[^{}]*(\d{4}|\{)")
_WIDE_PERCENT = re.compile(r"%[-+ #0.]*(\d{4}|\*|\d+\.(\d{4}|\*))")


_TICK, _WEIGH, _JOINED = "paddock tick", "paddock weigh", "paddock joined"  # no template can spell a name with a space
_JINJA_OPTIONS = ("_loop_vars", "_block_vars")


class LimitExceeded(jinja2.TemplateError):
    """A render went over one of its budgets."""


class _Budget(threading.local):
    """What the current thread's render may still use."""

    deadline_s = float("inf")
    spent = 0

    def tick(self) -> None:
        """Raises: LimitExceeded when the time is used up."""
        if time.thread_time() > self.deadline_s:
            raise LimitExceeded("it ran longer than a chat template may")

    def take(self, size: int) -> None:
        """Account for `size` new characters or items."""
        if size > MAX_CHARACTERS:
            raise LimitExceeded(f"it makes a text of {size} characters, more than {MAX_CHARACTERS}")
        self.spent += size
        if self.spent >= _LARGE:
            self.spent = 0
            self.tick()


_budget = _Budget()


class TimeLimit:
    """`with TimeLimit(1.0): ...`: renders of this thread inside it may use that many seconds of processor time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._before = _budget.deadline_s
        _budget.deadline_s = min(self._before, time.thread_time() + self._seconds)

    def __exit__(self, *_: object) -> None:
        _budget.deadline_s = self._before


def weigh(value: Any) -> Any:
    """The value itself, when printing, comparing or hashing it is affordable. Raises: LimitExceeded."""
    kind = type(value)
    if kind is str:
        _budget.take(len(value) >> 4)
    elif kind in (list, tuple, dict) and value:
        _weigh_container(value)
    return value


def _weigh_container(value: Any) -> None:
    left, stack = MAX_WEIGHT, [value]
    while stack:
        item = stack.pop()
        kind = type(item)
        if kind is str:
            left -= len(item) >> 4
        elif kind is dict:
            left -= len(item)
            stack.extend(item.keys())
            stack.extend(item.values())
        elif kind in (list, tuple):
            left -= len(item)
            if left >= 0:
                stack.extend(item)
        if left < 0:
            raise LimitExceeded("it handles a value that grows without bound")
        left -= 1
    _budget.take((MAX_WEIGHT - left) >> 2)


def _concat(parts: Iterable[str]) -> str:
    """''.join within the budget."""
    kept, size = [], 0
    for part in parts:
        size += len(part)
        if size > MAX_CHARACTERS:
            raise LimitExceeded(f"its output is longer than {MAX_CHARACTERS} characters")
        kept.append(part)
    _budget.take(size)
    return "".join(kept)


def _texts(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        yield value if type(value) is str else str(weigh(value))


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | bytes) else 0


def _add(left: Any, right: Any) -> Any:
    size = _size(left) + _size(right)
    if size > MAX_ITEMS and isinstance(left, list | tuple):
        raise LimitExceeded(f"it makes a list of {size} items, more than {MAX_ITEMS}")
    _budget.take(size)
    return left + right


def _multiply(left: Any, right: Any) -> Any:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple | bytes) and isinstance(count, int):
            size = len(sequence) * max(0, count)
            if not isinstance(sequence, str) and size > MAX_ITEMS:
                raise LimitExceeded(f"it makes a list of {size} items, more than {MAX_ITEMS}")
            _budget.take(size)
    _check_bits(left, right)
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(0, right) > MAX_NUMBER_BITS:
        raise LimitExceeded("it raises a number to a power that is too large")
    return left**right


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        if _WIDE_PERCENT.search(left):
            raise LimitExceeded("it formats a text with a width that is too large")
        _take_formatted(left, left.count("%"), right if isinstance(right, tuple) else (right,))
    return left % right


def _take_formatted(form: str, n_fields: int, values: Iterable[Any]) -> None:
    """Account for a text of `n_fields` fields, each of which may show the longest of `values`."""
    longest = 32
    for value in values:
        weigh(value)
        for text in value.values() if isinstance(value, dict) else (value,):
            longest = max(longest, len(text) if isinstance(text, str) else 0)
    _budget.take(len(form) + n_fields * longest)


def _check_bits(*numbers: Any) -> None:
    if sum(n.bit_length() for n in numbers if type(n) is int) > MAX_NUMBER_BITS:
        raise LimitExceeded("it makes a number that is too large")


def _check_widths(arguments: Iterable[Any]) -> None:
    for value in arguments:
        if type(value) is int and not -MAX_WIDTH <= value <= MAX_WIDTH:
            raise LimitExceeded(f"it asks for a width or count of {value}, more than {MAX_WIDTH}")


def _replace(text: str, old: str, new: str, count: int = -1) -> str:
    times = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    _budget.take(len(text) + times * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _join_method(separator: str, values: Iterable[Any]) -> str:
    items = list(values)
    _budget.take(len(separator) * len(items) + sum(len(v) for v in items if isinstance(v, str)))
    return separator.join(items)


def _method(bound: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[bool, Any]:
    """(True, result) for a text method that is done here, within the budget."""
    name = bound.__name__
    if name == "replace":
        return True, _replace(bound.__self__, *arguments, **options)
    if name == "join":
        return True, _join_method(bound.__self__, *arguments)
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        _check_widths((*arguments, *options.values()))
    _budget.take(len(bound.__self__))
    return False, None


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    walks, iterates = name in _WALKING_FILTERS, name in _ITERATING_FILTERS

    @functools.wraps(function)
    def guarded(*arguments: Any, **options: Any) -> Any:
        if walks:
            for value in arguments:
                weigh(value)
        if iterates and any(isinstance(a, str) and len(a) > MAX_ITEMS for a in arguments):
            raise LimitExceeded(f"it takes a text of more than {MAX_ITEMS} characters apart")
        result = function(*arguments, **options)
        if type(result) is str:
            _budget.take(len(result))
        return result

    return guarded


def _guarded_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*arguments: Any) -> Any:
        for value in arguments:
            weigh(value)
        return function(*arguments)

    return guarded


def _filter_replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    return _replace(str(text), str(old), str(new), -1 if count is None else count)


@jinja2.pass_environment
def _filter_join(environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    items = value if attribute is None else environment.filters["map"](environment, value, attribute=attribute)
    kept: list[str] = []
    size, step = 0, len(d)
    for text in _texts(items):
        size += len(text) + step
        if size > MAX_CHARACTERS:
            raise LimitExceeded(f"it makes a text of more than {MAX_CHARACTERS} characters")
        kept.append(text)
    return str(d).join(kept)


def _filter_indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    added = width if isinstance(width, int) else len(width)
    _check_widths((added,))
    _budget.take(len(text) + (str(text).count("\n") + 1) * max(0, added))
    return jinja2.filters.do_indent(text, width, first, blank)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as transformers' chat templates have it."""
    weigh(value)
    _check_widths((indent,))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _filter_format(text: Any, *arguments: Any, **options: Any) -> Any:
    return _modulo(str(text), options or arguments)


@jinja2.pass_environment
def _filter_sum(environment: jinja2.Environment, values: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    for value in values if attribute is None else environment.filters["map"](environment, values, attribute=attribute):
        start = _add(start, value)
    return start


def _filter_tick(value: Any) -> bool:
    _budget.tick()
    return True


def _filter_joined(values: Iterable[Any]) -> str:
    return _concat(_texts(values))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message)[:2000])


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}: marks the assistant's text for training; here its body alone."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """The body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment that templates are compiled in. Safe to share between threads: budgets belong to the thread."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    concat = staticmethod(_concat)

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=weigh, extensions=[loopcontrols, Generation]
        )
        self.binop_table.update({"+": _add, "*": _multiply, "**": _power, "%": _modulo})
        for name in _DROPPED_FILTERS:
            self.filters.pop(name, None)
        self.filters.update(
            join=_filter_join, replace=_filter_replace, indent=_filter_indent, format=_filter_format, sum=_filter_sum
        )
        self.filters = {name: _guarded_filter(name, f) for name, f in self.filters.items()}
        self.filters.update({"tojson": to_json, _TICK: _filter_tick, _WEIGH: weigh, _JOINED: _filter_joined})
        for name in _WALKING_TESTS:
            self.tests[name] = _guarded_test(cast("Callable[..., Any]", self.tests[name]))
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(str(form)[:200])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _instrument(tree, self)
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls on behalf of the template; text methods within the budget."""
        if type(__obj) is types.BuiltinMethodType and isinstance(__obj.__self__, str):
            for name in _JINJA_OPTIONS:
                kwargs.pop(name, None)
            is_done, result = _method(__obj, args, kwargs)
            if is_done:
                return result
        elif getattr(__obj, "__name__", "") in ("format", "format_map") and not isinstance(__obj, Undefined):
            text = getattr(getattr(__obj, "__wrapped__", None), "__self__", "")
            if isinstance(text, str) and _WIDE_FORMAT.search(text):
                raise LimitExceeded("it formats a text with a width that is too large")
            _take_formatted(text, text.count("{"), (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """obj[argument]; a tuple as argument would be hashed."""
        if type(argument) is tuple:
            weigh(argument)
        return super().getitem(obj, argument)


def _instrument(tree: nodes.Template, environment: jinja2.Environment) -> None:
    """Put the budget's checks into the tree: loop and macro bodies, `~`, comparisons, keys of dictionaries."""
    blocks: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
    for block in blocks:
        tick = _filtered(_TICK, nodes.Const(None), block.lineno)
        block.body.insert(0, nodes.ExprStmt(tick).set_lineno(block.lineno))
        if isinstance(block, nodes.For) and block.test is not None:
            block.test = nodes.And(_filtered(_TICK, nodes.Const(None), block.lineno), block.test)
    for comparison in list(tree.find_all(nodes.Compare)):
        if not any(isinstance(o, nodes.Const) for o in (comparison.expr, *(op.expr for op in comparison.ops))):
            comparison.expr = _filtered(_WEIGH, comparison.expr, comparison.lineno)
            for op in comparison.ops:
                op.expr = _filtered(_WEIGH, op.expr, comparison.lineno)
    for pair in list(tree.find_all(nodes.Pair)):
        if not isinstance(pair.key, nodes.Const):
            pair.key = _filtered(_WEIGH, pair.key, pair.lineno)
    _replace_concats(tree)
    tree.set_environment(environment)


def _replace_concats(node: nodes.Node) -> None:
    for field, value in list(node.iter_fields()):
        if isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, nodes.Node):
                    _replace_concats(item)
                    if isinstance(item, nodes.Concat):
                        value[i] = _filtered(_JOINED, nodes.Tuple(item.nodes, "load"), item.lineno)
        elif isinstance(value, nodes.Node):
            _replace_concats(value)
            if isinstance(value, nodes.Concat):
                setattr(node, field, _filtered(_JOINED, nodes.Tuple(value.nodes, "load"), value.lineno))


def _filtered(name: str, value: nodes.Expr, line: int) -> nodes.Filter:
    found = nodes.Filter(value, name, [], [], None, None)
    found.set_lineno(line)
    return found
