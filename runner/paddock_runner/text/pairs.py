"""How a tokenizer joins two texts into one input: the ids around and between them, and the types of all tokens."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from ..errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class PairEnds:
    """The ids around and between two texts, each with the types that tokens have there: (ids, type of the text that follows)."""

    before: tuple[tuple[int, int], ...]
    between: tuple[tuple[int, int], ...]
    after: tuple[tuple[int, int], ...]
    types: tuple[int, int] = (0, 1)

    def joined(self, first: array[int], second: array[int]) -> tuple[array[int], list[int]]:
        """Ids and types of both texts."""
        ids, types = array("i"), []
        for ends, text, kind in ((self.before, first, self.types[0]), (self.between, second, self.types[1]), (self.after, array("i"), 0)):
            ids.extend(i for i, _ in ends)
            types += [t for _, t in ends]
            ids.extend(text)
            types += [kind] * len(text)
        return ids, types


def require_pairs(ends: PairEnds | None) -> PairEnds:
    """Raises: UnsupportedError when the tokenizer does not say how two texts are joined."""
    if ends is None:
        raise UnsupportedError("this model's tokenizer does not say how two texts are joined, so it cannot rank", what="pairs of texts")
    return ends
