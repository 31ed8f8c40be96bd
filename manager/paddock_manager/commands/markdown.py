"""Markdown of a model's answer as terminal styles, while it streams: nothing waits for the end of a line but the marks themselves.

Headings, **bold**, `code` and fenced blocks get a style; their marks stay out. Everything else is passed through as it is.
"""

from __future__ import annotations

import re

RESET, BOLD, CODE, DIM, HEADING = "\x1b[0m", "\x1b[1m", "\x1b[36m", "\x1b[2m", "\x1b[1;4m"
START = re.compile(r"(#{1,6})( |$)|(`{3,}|~{3,})|(\s*)([-*+])( |$)")
MAYBE_START = re.compile(r"#{1,6}$|`{1,}$|~{1,}$|\s*[-*+]?$")


class Markdown:
    """Feed it pieces; print what it returns. `end` returns what was held back, and the reset."""

    def __init__(self) -> None:
        self._held = ""
        self._at_start = True
        self._fence = ""
        self._bold = self._code = self._heading = False

    def feed(self, text: str) -> str:
        """More of the answer."""
        self._held += text
        out: list[str] = []
        while self._held:
            piece = self._line_start() if self._at_start else self._inside()
            if piece is None:
                break
            out.append(piece)
        return "".join(out)

    def end(self) -> str:
        """What is left, and the terminal as it was."""
        rest, self._held = self._held, ""
        return rest + RESET

    def _line_start(self) -> str | None:
        """The marks that only mean something at the start of a line. None: more has to come."""
        line, newline, _ = self._held.partition("\n")
        if self._fence:
            if not newline and self._fence.startswith(line.strip()[:3]) and len(line.strip()) <= len(self._fence):
                return None
            if line.strip() == self._fence:
                self._fence, self._at_start = "", True
                self._held = self._held[len(line) + 1 :]
                return RESET + DIM + line + RESET + newline
            self._at_start = False
            return ""
        if not newline and MAYBE_START.fullmatch(line):
            return None
        found = START.match(self._held)
        self._at_start = False
        if found is None:
            return ""
        if found.group(1):
            self._held = self._held[found.end() :]
            self._heading = True
            return HEADING
        if found.group(3):
            if not newline:
                self._at_start = True
                return None
            self._fence = found.group(3)
            self._held = self._held[len(line) + 1 :]
            self._at_start = True
            return DIM + line + RESET + "\n" + CODE
        self._held = self._held[found.end() :]
        return f"{found.group(4)}•{found.group(6)}"

    def _inside(self) -> str | None:
        """Text within a line, up to the next mark or the line's end."""
        at = next(
            (i for i, c in enumerate(self._held) if c == "\n" or (c in "`*" and not self._fence)), len(self._held)
        )
        if at:
            piece, self._held = self._held[:at], self._held[at:]
            return piece
        mark = self._held[0]
        if mark == "\n":
            self._held = self._held[1:]
            return self._line_end()
        if mark == "`":
            self._held = self._held[1:]
            self._code = not self._code
            return CODE if self._code else RESET + self._styles()
        if self._code:
            self._held = self._held[1:]
            return mark
        if len(self._held) == 1:
            return None
        if self._held[1] == "*":
            self._held = self._held[2:]
            self._bold = not self._bold
            return BOLD if self._bold else RESET + self._styles()
        self._held = self._held[1:]
        return mark

    def _line_end(self) -> str:
        self._at_start = True
        if self._fence:
            return "\n"
        styled = self._bold or self._code or self._heading
        self._bold = self._code = self._heading = False
        return (RESET if styled else "") + "\n"

    def _styles(self) -> str:
        return (HEADING if self._heading else "") + (BOLD if self._bold else "")
