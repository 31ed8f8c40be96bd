"""The socket that clients come to, and the certificate that they are shown: both tried before anything is loaded."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
from contextlib import suppress
from pathlib import Path

from ..errors import FileError, UsageError

BACKLOG = 2048
MAX_RESERVED = 4096
"""Open files for which there is room from the start."""
REFUSALS = {
    errno.EADDRINUSE: ("it is in use", "--port 0 takes a free one"),
    errno.EACCES: ("only the system's administrator may listen there", "--port 0 takes a free one"),
    errno.EADDRNOTAVAIL: ("this machine has no such address", "--host is one of its own: 127.0.0.1, ::1, or 0.0.0.0 for all of them"),
    errno.EAFNOSUPPORT: ("this machine has no addresses of that kind", "--host 127.0.0.1 where there is no IPv6"),
}
"""Error of the system -> what it means here, and what to do."""


def reserve_descriptors() -> None:
    """Makes the process's table of open files as large as it is likely to become.

    Linux doubles it when it is full, from 64 on, and who opens that file in a process of several threads waits for a grace period of all processors meanwhile: 5 to 45 ms
    in which nobody else is served, as a burst of clients comes.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    n = MAX_RESERVED if soft == resource.RLIM_INFINITY else min(soft, MAX_RESERVED)
    with suppress(OSError), open(os.devnull, "rb") as any_file:  # all are taken, or no number is that large: whoever opens something is told
        os.close(fcntl.fcntl(any_file.fileno(), fcntl.F_DUPFD_CLOEXEC, n - 1))


def bind(host: str, port: int) -> socket.socket:
    """A bound, listening socket, and room for those who will come. Raises: UsageError when the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        reserve_descriptors()
    except (OSError, TypeError) as error:  # the latter: a name that cannot be written as one
        listener.close()
        reason, hint = REFUSALS.get(getattr(error, "errno", 0), (getattr(error, "strerror", "") or str(error), "check --host"))
        raise UsageError(f"cannot listen on {host} port {port}: {reason}", hint, host=host, port=port) from None
    return listener


def check_tls(certificate: Path | None, key: Path | None) -> tuple[str, str] | None:
    """The two files, tried; None without TLS.

    Raises: UsageError when only one is named, FileError when they cannot be used.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise UsageError("TLS needs both files", "--tls-cert FILE --tls-key FILE")
    import ssl  # a runner without TLS is spared it

    for path in (certificate, key):
        try:
            path.read_bytes()
        except OSError as error:
            raise FileError(f"{path} cannot be read: {error.strerror}", "check --tls-cert and --tls-key", path=str(path)) from None
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "reason", None) or ("they are not PEM" if isinstance(error, ssl.SSLError) else str(error))
        raise FileError(
            f"{certificate} and {key} cannot be used for TLS: {reason.replace('_', ' ').lower() if reason.isupper() else reason}",
            "they are PEM files: the certificate with its chain, and its key without a pass phrase",
            path=str(certificate),
        ) from None
    return str(certificate), str(key)
