"""Filling in the middle: text ahead of a gap and behind it, between the marks that the model was trained with."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from ...text.tokenizer import Tokenizer
from .fields import refuse


@dataclass(frozen=True, slots=True)
class Fill:
    """marks: ids before the text ahead, before the text behind, and where the gap is filled. start: ids that begin every text."""

    tokenizer: Tokenizer
    marks: tuple[int, int, int]
    start: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Fill:
        """For one model. Raises: UsageError (param: suffix) for a model without such marks."""
        if tokenizer.fill_ids is None:
            raise refuse(
                "suffix", "this model does not fill in the middle", "use a model with fill-in-the-middle tokens"
            )
        bos = tokenizer.bos_id
        has_bos = bos is not None and tokenizer.encode("")[:1].tolist() == [bos]
        return cls(tokenizer, tokenizer.fill_ids, (bos,) if has_bos and bos is not None else ())

    def prompt(self, before: str | array[int], behind: str) -> array[int]:
        """The ids of a prompt. Marks of special tokens in the texts are ordinary text."""
        ahead, after, middle = self.marks
        encode = self.tokenizer.encode
        out = array("i", (*self.start, ahead))
        out.extend(encode(before, False, False) if isinstance(before, str) else before)
        out.append(after)
        out.extend(encode(behind, False, False))
        out.append(middle)
        return out
