"""Constraints on what may be generated: JSON schema, regular expression, Lark grammar, choice; as token masks, by llguidance.

Grammars come from clients, so their size, their repetitions and the work of every step are bounded. A mask is 32-bit words,
bit i of the mask = token i, ceil(V / 32) words, V the rows of the model's embedding. Nothing here runs in the engine's thread.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import PaddockError, UnsupportedError, UsageError
from .tokenizer import Tokenizer

MAX_CHARACTERS = 256 << 10
MAX_CHOICES = 4096
MAX_REPETITION = 20_000
MAX_DEPTH = 64
MAX_NODES = 20_000
MAX_STEP_S = 1.0
MAX_THREADS = 8
"""Threads that compute the masks of one step."""
_LISTING = re.compile(r"^ *\d+ \| ", re.MULTILINE)
"""Below what is wrong with a grammar its lines are shown."""
WHITE_SPACE = r"[ \t\r\n]{1,64}"
_LIMITS = {
    "step_lexer_fuel": 50_000,
    "initial_lexer_fuel": 500_000,
    "max_lexer_states": 20_000,
    "max_items_in_row": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
_NOT_ALLOWED = "doesn't satisfy the grammar"
"""What llguidance says of a token that is none of those that may come."""
_PATTERNS = ("pattern", "patternProperties")
_BOUNDS = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_LARK_RULE = re.compile(r"^[?!_]*([A-Za-z_]\w*)(?:\[[^\]\n]*\])?(?:\.\d+)?\s*:", re.M)
_FAULTS = (ValueError, LookupError, AttributeError, AssertionError, RecursionError)
_START = re.compile(r"^\s*(?:%llguidance\b|start\s*:|root\s*::=)", re.M)
_LARK_PART = re.compile(
    r"\"(?:[^\"\\]|\\.)*\"|/(?:[^/\\\n]|\\.)+/[a-z]*|\b[A-Z_][A-Z0-9_]*\b|[()|]|[*+?]|\{\d*(?:,\d*)?\}"
)


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must match. kind: "json_schema" (text: the schema), "regex", "lark". Made by the functions below."""

    kind: str
    text: str
    is_lenient: bool = False


def json_object() -> Constraint:
    """Any JSON object."""
    return Constraint("json_schema", '{"type": "object"}')


def json_schema(schema: Mapping[str, Any] | bool, is_lenient: bool = False) -> Constraint:
    """JSON that validates against a schema. is_lenient: keywords that cannot be enforced are ignored instead of refused.

    Raises: UsageError for what is no schema, or too large.
    """
    if not isinstance(schema, Mapping | bool):
        raise UsageError("the JSON schema is no object")
    if schema is False:
        raise UsageError("the JSON schema is false: nothing matches it")
    schema = {} if schema is True else schema
    if _is_longer(schema):
        raise UsageError(f"the JSON schema has more than {MAX_CHARACTERS} characters, which is the limit")
    try:
        text = json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema cannot be written as JSON: {error}") from error
    _check_size(text, "JSON schema")
    check_schema(schema)
    return Constraint("json_schema", text, is_lenient)


def regex(pattern: str) -> Constraint:
    """Text that matches a regular expression as a whole (syntax of Rust's regex crate). Raises: UsageError when it is too large."""
    _check_size(pattern, "regular expression")
    _check_repetition(pattern, "regular expression")
    return Constraint("regex", pattern)


def lark(text: str) -> Constraint:
    """Text of a context-free grammar in llguidance's Lark dialect. Raises: UsageError when it is too large."""
    _check_size(text, "grammar")
    if _lark_repetition(text) > MAX_REPETITION:
        raise UsageError(f"the repetitions of the grammar multiply to more than {MAX_REPETITION}")
    return Constraint("lark", text)


def lark_of(text: str) -> str:
    """A grammar in Lark as it is, one in GBNF (`root ::= ...`) translated. Raises: UsageError, UnsupportedError."""
    _library()
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    if not _START.search(text):
        raise UsageError("the grammar has neither a rule `start` (Lark) nor `root` (GBNF)")
    try:
        found: str = any_to_lark(text)
    except Exception as error:  # the library raises bare ones for rules that are missing or there twice
        if type(error) is not Exception and not isinstance(error, (GbnfToLarkError, *_FAULTS)):
            raise
        raise UsageError(f"the grammar is neither Lark nor GBNF: {str(error)[:200]}") from None
    return found


def parsed(text: str) -> Any:
    """The value of JSON text. Raises: ValueError, also for what is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def choice(options: Sequence[str]) -> Constraint:
    """One of these texts. Raises: UsageError when there is none, or there are too many."""
    wanted = list(dict.fromkeys(options))
    if not wanted or not all(isinstance(o, str) and o for o in wanted):
        raise UsageError("a choice needs at least one text, and none may be empty")
    if len(wanted) > MAX_CHOICES:
        raise UsageError(f"{len(wanted)} choices were given, the limit is {MAX_CHOICES}")
    text = "start: " + " | ".join(json.dumps(o, ensure_ascii=False) for o in wanted)
    _check_size(text, "list of choices")
    return Constraint("lark", text)


def own_lark(text: str) -> Constraint:
    """A grammar that this package made itself from checked parts. Raises: UsageError when it is too large."""
    _check_size(text, "grammar of the tools")
    return Constraint("lark", text)


class Matcher:
    """The state of one constrained generation. Not safe to share between threads."""

    def __init__(self, native: Any, n_words: int) -> None:
        self.native = native
        self._mask = array("i", bytes(4 * n_words))
        self._address = self._mask.buffer_info()[0]

    @property
    def is_accepting(self) -> bool:
        """Whether the text so far is a whole match."""
        return bool(self.native.is_accepting())

    @property
    def is_stopped(self) -> bool:
        """Whether nothing but the end can follow."""
        return bool(self.native.is_stopped())

    def mask(self) -> array[int]:
        """Which tokens may come next: array('i') of ceil(V / 32) words, valid until the next call.

        Raises: UsageError when the grammar is too costly to follow.
        """
        before = time.thread_time()
        self.native.unsafe_compute_mask_ptr(self._address, 4 * len(self._mask))
        if self.native.is_error():
            raise _refused(self.native.get_error())
        if time.thread_time() - before > MAX_STEP_S:
            raise UsageError("the grammar takes more than a second for one token", "make its repetitions smaller")
        return self._mask

    def accept(self, token_id: int) -> bool:
        """Takes a generated token; False when it was not allowed (then nothing more can be), or when the grammar has become too costly."""
        return bool(self.native.consume_token(token_id))

    def refusal(self) -> UsageError | None:
        """Why no token is taken any more, where that is not that it was none of those that were allowed."""
        said = self.native.get_error()
        return None if not said or _NOT_ALLOWED in said else _refused(said)

    def accept_some(self, token_ids: Sequence[int]) -> int:
        """Takes as many of these tokens as may come, one after the other; how many."""
        return int(self.native.try_consume_tokens(list(token_ids)))

    def copy(self) -> Matcher:
        """Another in the same state, for tokens that may turn out not to come."""
        return Matcher(self.native.deep_copy(), len(self._mask))

    def forced(self) -> list[int]:
        """Tokens that must come next, as far as that is certain."""
        found: list[int] = self.native.compute_ff_tokens()
        return found


class Grammars:
    """Compiles constraints for one tokenizer. The tokenizer's table is built on first use (about a second).

    n_rows: V, rows of the model's embedding. Safe to share between threads.
    """

    def __init__(self, tokenizer: Tokenizer, n_rows: int, max_cached: int = 64) -> None:
        self._tokenizer = tokenizer
        self._n_rows = n_rows
        self._max_cached = max_cached
        self._table: Any = None
        self._executor: Any = None
        self.n_threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
        """Threads that compute the masks of one step."""
        self._words = array("i")
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def n_words(self) -> int:
        """32-bit words of a mask."""
        return (self._n_rows + 31) // 32

    def matcher(self, constraint: Constraint) -> Matcher:
        """A matcher at its beginning, whose first mask is known to be affordable.

        Raises: UsageError (a grammar that is wrong or too costly), UnsupportedError (llguidance is not installed).
        """
        with self._lock:
            native = self._compiled.get(constraint)
            if native is not None:
                self._compiled.move_to_end(constraint)
                return Matcher(native.deep_copy(), self.n_words)
            native = self._compile(constraint)
            matcher = Matcher(native.deep_copy(), self.n_words)
            matcher.mask()
            self._compiled[constraint] = native
            if len(self._compiled) > self._max_cached:
                self._compiled.popitem(last=False)
            return matcher

    def tokens_of(self, text: str) -> list[int]:
        """A text's tokens, as they could be generated."""
        return list(self._tokenizer.encode(text))

    def accept(self, taken: Sequence[tuple[Matcher, int]]) -> list[bool]:
        """What `Matcher.accept` says of each matcher's token, for several at once. To be called from one thread only, the same as `masks`."""
        found: list[bool] = self._pool().consume_token_par([(matcher.native, token) for matcher, token in taken]) if taken else []
        return found

    def _pool(self) -> Any:
        if self._executor is None:
            self._executor = _library().LLExecutor(self.n_threads)
        return self._executor

    def masks(self, matchers: Sequence[Matcher]) -> list[bytes | PaddockError]:
        """Which tokens may come next, for each of several matchers, computed together; an error where the grammar is too costly to follow.

        To be called from one thread only.
        """
        size = 4 * self.n_words
        if not matchers:
            return []
        if len(self._words) < len(matchers) * self.n_words:
            self._words = array("i", bytes(size * len(matchers)))
        natives = [(matcher.native, i) for i, matcher in enumerate(matchers)]
        with memoryview(self._words).cast("B") as words:
            self._pool().unsafe_compute_mask_ptr(natives, self._words.buffer_info()[0], size, len(natives))
            return [
                _refused(native.get_error()) if native.is_error() else bytes(words[i * size : (i + 1) * size])
                for native, i in natives
            ]

    def _compile(self, constraint: Constraint) -> Any:
        library = _library()
        matcher = library.LLMatcher
        if constraint.kind == "json_schema":
            overrides = {"whitespace_pattern": WHITE_SPACE, "lenient": constraint.is_lenient}
            try:
                text = matcher.grammar_from_json_schema(constraint.text, overrides=overrides)
            except ValueError as error:
                raise _refused(str(error)) from None
        elif constraint.kind == "regex":
            text = matcher.grammar_from_regex(constraint.text)
        else:
            text = matcher.grammar_from_lark(constraint.text)
        if self._table is None:
            self._table = self._tokens(library)
        native = matcher(self._table, text, log_level=0, limits=library.LLParserLimits(**_LIMITS))
        if native.is_error():
            raise _refused(native.get_error())
        return native

    def _tokens(self, library: Any) -> Any:
        tokenizer = self._tokenizer
        stops = list(tokenizer.stop_ids) or ([tokenizer.eos_id] if tokenizer.eos_id is not None else [])
        if not stops:
            raise UnsupportedError(
                "a model without an end-of-text token cannot be constrained", what="grammar", supported=[]
            )
        pieces = list(tokenizer.pieces[: self._n_rows])
        pieces += [b""] * (self._n_rows - len(pieces))
        source = _Source(pieces, sorted(i for i in tokenizer.special_ids if i < self._n_rows), stops[0], tokenizer)
        return library.LLTokenizer(library.TokenizerWrapper(source), n_vocab=self._n_rows, eos_token=stops)


class _Source:
    """What llguidance asks of a tokenizer."""

    def __init__(self, pieces: list[bytes], special: list[int], eos_id: int, tokenizer: Tokenizer) -> None:
        self.tokens = pieces
        self.special_token_ids = special
        self.eos_token_id = eos_id
        self.bos_token_id = tokenizer.bos_id
        self._encode: Callable[..., array[int]] = tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return list(self._encode(text, add_special=False, parse_special=False))


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UnsupportedError(
            "constrained generation needs the package llguidance",
            "pip install llguidance",
            what="grammar",
            supported=[],
        ) from error
    return llguidance


def _refused(reason: str) -> UsageError:
    """What llguidance says, without the grammar of ours that a schema of a tool's stands in."""
    if reason.startswith("NoExtension"):
        return UsageError("the grammar or schema cannot be followed: no text matches it", "does it refer to nothing but itself?", reason=reason)
    where, compiling, schema = reason.partition(": failed to compile JSON schema: ")
    if compiling and where.startswith("at "):
        reason = _LISTING.split(schema, 1)[0]
    first = " ".join(line.strip() for line in reason.splitlines() if line.strip() and not line.startswith("<"))[:400]
    return UsageError(f"the grammar or schema cannot be followed: {first}", reason=first)


def _is_longer(schema: Any) -> bool:
    """Whether JSON of a schema would certainly be too long; told without writing all of it."""
    left, stack = MAX_CHARACTERS, [schema]
    while stack and left >= 0:
        item = stack.pop()
        if isinstance(item, str):
            left -= len(item) + 2
        elif isinstance(item, Mapping):
            left -= 4 * len(item)
            if left >= 0:
                stack += item.keys()
                stack += item.values()
        elif isinstance(item, list):
            left -= 2 * len(item) - 1
            if left >= 0:
                stack += item
        else:
            left -= 1
    return left < 0


def _check_size(text: str, what: str) -> None:
    if not isinstance(text, str) or not text:
        raise UsageError(f"the {what} is empty")
    if len(text) > MAX_CHARACTERS:
        raise UsageError(f"the {what} has {len(text)} characters, the limit is {MAX_CHARACTERS}")


def check_schema(schema: Any) -> None:
    """Raises: UsageError for a JSON schema that is nested too deep, too large, or whose patterns repeat too much."""
    n_nodes, stack = 0, [(schema, 1)]
    while stack:
        node, depth = stack.pop()
        n_nodes += 1
        if depth > MAX_DEPTH or n_nodes > MAX_NODES:
            raise UsageError(f"the JSON schema is nested deeper than {MAX_DEPTH} or has more than {MAX_NODES} parts")
        if isinstance(node, Mapping):
            for name in _PATTERNS:
                found = node.get(name)
                for pattern in [found] if isinstance(found, str) else found if isinstance(found, Mapping) else []:
                    _check_repetition(str(pattern), "pattern in the JSON schema")
            stack.extend((value, depth + 1) for value in node.values())
        elif isinstance(node, list):
            stack.extend((value, depth + 1) for value in node)


def _check_repetition(pattern: str, what: str) -> None:
    if _repetition(_regex_parts(pattern)) > MAX_REPETITION:
        raise UsageError(f"the repetitions of the {what} multiply to more than {MAX_REPETITION}")


def _regex_parts(pattern: str) -> Iterator[tuple[str, int]]:
    """A regular expression as "(", ")", ("x", size) for atoms and ("{", n) for bounded repetitions."""
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 2
            if pattern[at - 1 : at] in ("p", "P", "x", "u") and pattern[at : at + 1] == "{":
                at = max(at, pattern.find("}", at) + 1)
            yield "x", 1
        elif char == "[":
            end = at + 1 + pattern.startswith("^", at + 1)
            end += pattern.startswith("]", end)
            while end < len(pattern) and pattern[end] != "]":
                end += 2 if pattern[end] == "\\" else 1
            at = end + 1
            yield "x", 1
        elif char == "{" and (bounds := _BOUNDS.match(pattern, at)):
            at = bounds.end()
            yield "{", _bound(bounds)
        else:
            at += 1
            yield (char, 0) if char in "()" else ("x", 1)


def _bound(bounds: re.Match[str]) -> int:
    numbers = [int(n[:9]) for n in bounds.groups() if n]
    return max(numbers, default=1)


def _repetition(parts: Iterator[tuple[str, int]]) -> int:
    """How many atoms the expression has when bounded repetitions are written out."""
    sums, last = [0], [0]
    for kind, size in parts:
        if kind == "(":
            sums.append(0)
            last.append(0)
        elif kind == ")":
            size = sums.pop() if len(sums) > 1 else 0
            last.pop() if len(last) > 1 else None
            sums[-1] += size
            last[-1] = size
        elif kind == "{":
            sums[-1] += last[-1] * (max(1, size) - 1)
            last[-1] *= max(1, size)
        else:
            sums[-1] += size
            last[-1] = size
        if sums[-1] > MAX_REPETITION:
            return sums[-1]
    return sum(sums)


def _lark_repetition(text: str) -> int:
    """The same for the terminals of a Lark grammar, references between them followed."""
    heads = list(_LARK_RULE.finditer(text))
    bodies = {
        h.group(1): text[h.end() : n.start() if n else len(text)]
        for h, n in zip(heads, [*heads[1:], None], strict=True)
    }
    sizes: dict[str, int] = {}

    def size_of(name: str) -> int:
        if name not in sizes:
            sizes[name] = 1  # a reference to itself is refused by the library
            sizes[name] = _repetition(_lark_parts(bodies[name], size_of, bodies))
        return sizes[name]

    try:
        return max((size_of(name) for name in bodies), default=0)
    except RecursionError:
        return MAX_REPETITION + 1


def _lark_parts(body: str, size_of: Callable[[str], int], bodies: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    for match in _LARK_PART.finditer(body):
        part = match.group()
        if part[0] == "{":
            yield "{", _bound(_BOUNDS.match(part) or match)
        elif part[0] == "/":
            yield "x", _repetition(_regex_parts(part[1 : part.rfind("/")]))
        elif part in "()":
            yield part, 0
        elif part[0] == '"':
            yield "x", 1
        elif part in bodies:
            yield "x", size_of(part)
