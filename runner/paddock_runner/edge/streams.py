"""Standard input, output and error, where one of them was closed before the program began."""

from __future__ import annotations

import io
import os
import sys

from ..errors import FileError


class ClosedOutput(io.StringIO):
    """Nowhere to tell a result: who writes there fails, instead of succeeding unheard."""

    def write(self, text: str) -> int:
        """Raises: FileError."""
        raise FileError("standard output is closed: nothing can be told there", "`> /dev/null` throws it away")


def hold_streams() -> None:
    """Takes descriptors 0 to 2 where they are free, or the next file would get them, with all that is written to them. Closed input is empty, closed error is lost."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free, this one
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or ClosedOutput()
    sys.stderr = sys.stderr or os.fdopen(2, "w", errors="backslashreplace", closefd=False)
