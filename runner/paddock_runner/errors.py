"""The error tree: what can go wrong, with its HTTP status and its exit code.

    PaddockError(message, hint)            http  exit
    ├─ UsageError                           400   2     the request or command is wrong
    │   ├─ UnknownModel                     404   3
    │   ├─ AmbiguousModel                   404   4
    │   ├─ Unauthorized                     401   2     no key, or a wrong one
    │   ├─ Forbidden                        403   2     Host or Origin is not allowed
    │   ├─ TooLarge                         413   2     the request body is over its limit
    │   └─ ContextTooLong                   400   2     carries prompt, limit, asked
    ├─ FileError                            500   7     a checkpoint or other file is damaged or hostile
    ├─ UnsupportedError                     501   12    family, format or arch: names the nearest supported
    ├─ WontFit                              507   9     carries the plan and alternatives
    ├─ PackError                            500   10    pack missing, wrong digest, device failure
    ├─ HubError                             502   6     network trouble with the hub
    │   └─ HubAuthError                     401   5     token missing, wrong, or the repository is gated
    ├─ DiskFull                             507   8     need, free, where
    ├─ Busy                                 429   11    queue full: carries retry_after_ms
    ├─ ShuttingDown                         503   11
    ├─ Locked                               409   13    by which process
    └─ Cancelled                            499   130
"""

from __future__ import annotations

from typing import Any, ClassVar


class PaddockError(Exception):
    """One sentence that names the thing at fault, and (where known) a hint that says what to do.

    `facts` are the numbers and names behind the sentence, for --json and for HTTP error bodies.
    """

    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, hint: str = "", **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.facts = facts

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(PaddockError):
    """The request or the command line is wrong."""

    http_status, exit_code, code = 400, 2, "invalid_request"


class UnknownModel(UsageError):
    """No model of that name here (facts: name, known)."""

    http_status, exit_code, code = 404, 3, "model_not_found"


class AmbiguousModel(UsageError):
    """The name matches more than one model or file (facts: name, choices)."""

    http_status, exit_code, code = 404, 4, "model_ambiguous"


class Unauthorized(UsageError):
    """No key, or a wrong one."""

    http_status, code = 401, "invalid_api_key"


class Forbidden(UsageError):
    """Host or Origin is not on the allow-list."""

    http_status, code = 403, "forbidden"


class TooLarge(UsageError):
    """The request body is over its limit (facts: size_bytes, max_bytes)."""

    http_status, code = 413, "request_too_large"


class SlowBody(UsageError):
    """The request body did not arrive in time (facts: size_bytes, waited_s)."""

    http_status, code = 408, "request_timeout"


class ContextTooLong(UsageError):
    """Prompt and answer do not fit the context (facts: prompt_tokens, max_ctx_tokens, max_tokens)."""

    code = "context_length_exceeded"


class FileError(PaddockError):
    """A file is damaged, truncated, hostile or something else in disguise (facts: path, offset, need, have)."""

    exit_code, code = 7, "bad_file"


class UnsupportedError(PaddockError):
    """A family, format, tokenizer or architecture that Paddock does not serve (facts: what, supported)."""

    http_status, exit_code, code = 501, 12, "unsupported"


class WontFit(PaddockError):
    """The memory plan is larger than the memory (facts: plan, need_bytes, free_bytes, alternatives)."""

    http_status, exit_code, code = 507, 9, "wont_fit"


class PackError(PaddockError):
    """The kernel pack is missing, was built from another header, or its device failed."""

    exit_code, code = 10, "pack_error"


class HubError(PaddockError):
    """The hub or the network failed (facts: host, status)."""

    http_status, exit_code, code = 502, 6, "hub_error"


class HubAuthError(HubError):
    """The hub wants a token, or the repository is gated or does not exist."""

    http_status, exit_code, code = 401, 5, "hub_auth"


class DiskFull(PaddockError):
    """Not enough room on the target file system (facts: need_bytes, free_bytes, reserve_bytes, path)."""

    http_status, exit_code, code = 507, 8, "disk_full"


class Busy(PaddockError):
    """The queue is full; try again later."""

    http_status, exit_code, code = 429, 11, "busy"

    def __init__(self, message: str, hint: str = "", retry_after_ms: int = 1000, **facts: Any) -> None:
        super().__init__(message, hint, retry_after_ms=retry_after_ms, **facts)
        self.retry_after_ms = retry_after_ms


class ShuttingDown(PaddockError):
    """The server is draining and takes no new work."""

    http_status, exit_code, code = 503, 11, "shutting_down"


class Locked(PaddockError):
    """Another process holds the lock (facts: path, pid, host)."""

    http_status, exit_code, code = 409, 13, "locked"


class Cancelled(PaddockError):
    """The user or the client went away."""

    http_status, exit_code, code = 499, 130, "cancelled"
