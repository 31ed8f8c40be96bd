"""HTTP for the store: one client, the token for the hub's own origin only, redirects followed by hand, errors as ours.

A request may be redirected to another host for the data; the token never goes along, and https never becomes http.
"""

from __future__ import annotations

import functools
import re
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx
from paddock_runner.errors import HubAuthError, HubError

from paddock_manager.store.transport import REUSE, Transport

MAX_REDIRECTS = 5
CONNECT_S = 15.0
STALL_S = 30.0
"""No byte for this long: the connection is given up and made anew."""


class Transient(HubError):
    """Trouble that goes away by itself: tried again by the caller (facts: retry_after_s)."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Time limits in seconds."""

    connect_s: float = CONNECT_S
    stall_s: float = STALL_S


class Web:
    """A client for one hub endpoint. Safe to use from several threads."""

    def __init__(self, endpoint: str, token: str = "", timing: Timing | None = None, connections: int = 16):
        self.endpoint = endpoint.rstrip("/")
        self._origin = origin(self.endpoint)
        self._token = token
        timing = timing or Timing()
        has_proxy = any(k in ("http", "https", "all") for k in urllib.request.getproxies())
        way: dict[str, Any] = {"verify": certificates()} if has_proxy else {}
        way = way or {"transport": Transport(certificates, timing.connect_s, timing.stall_s, connections)}
        self._client = httpx.Client(
            follow_redirects=False,
            timeout=httpx.Timeout(timing.stall_s, connect=timing.connect_s, pool=None),
            limits=httpx.Limits(max_connections=connections + 4, max_keepalive_connections=connections),
            headers={"User-Agent": "paddock/0.1", "Accept-Encoding": "identity"},
            **way,
        )
        self._lock = threading.Lock()
        self.hosts: set[str] = set()

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def __enter__(self) -> Web:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def get(self, url: str, headers: dict[str, str] | None = None, reuse: bool = False) -> Iterator[httpx.Response]:
        """A streamed GET that follows redirects. The response may have any status.

        reuse: pieces of iter_raw may share one buffer: each is used up before the next is asked for.
        Raises: HubError for a transport failure, too many redirects or one that leaves https.
        """
        current = url
        for _ in range(MAX_REDIRECTS + 1):
            request = self._client.build_request("GET", current, headers=self._headers(current, headers))
            if reuse:
                request.extensions[REUSE] = True
            with self._lock:
                self.hosts.add(urlsplit(current).netloc)
            try:
                response = self._client.send(request, stream=True)
            except httpx.HTTPError as error:
                raise self.transport_error(current, error) from None
            try:
                target = response.headers.get("location", "")
                if response.status_code not in (301, 302, 303, 307, 308) or not target:
                    yield response
                    return
                current = self._next(current, target)
            finally:
                response.close()
        raise HubError(f"{urlsplit(url).netloc} redirects in a circle", host=urlsplit(url).netloc)

    def _next(self, current: str, target: str) -> str:
        """Where a redirect leads."""
        url = urljoin(current, target)
        here, there = urlsplit(current), urlsplit(url)
        if there.scheme not in ("http", "https") or (here.scheme == "https" and there.scheme == "http"):
            raise HubError(
                f"{here.netloc} redirects from {here.scheme} to {there.scheme}, which is refused", host=here.netloc
            )
        return url

    def _headers(self, url: str, extra: dict[str, str] | None) -> dict[str, str]:
        """The token goes to the hub's own origin, and nowhere else."""
        headers = dict(extra or {})
        if self._token and origin(url) == self._origin:
            headers["Authorization"] = f"Bearer {self._token}"
        return headers

    def transport_error(self, url: str, error: Exception) -> HubError:
        """A failed connection, as one sentence."""
        host, cause = urlsplit(url).netloc, error.__cause__
        if isinstance(cause, ssl.SSLCertVerificationError):
            return HubError(
                f"the certificate of {host} is not trusted: {cause.verify_message}",
                "where a company's proxy opens https, name the file of its certificate: SSL_CERT_FILE=FILE",
                host=host,
                reason=str(cause)[:200],
            )
        kinds: dict[type[Exception], str] = {
            httpx.ConnectTimeout: "does not answer",
            httpx.ReadTimeout: "stopped sending",
            httpx.ProxyError: "cannot be reached through the proxy",
            httpx.ConnectError: "cannot be reached",
        }
        kind = kinds.get(type(error), "broke off the transfer")
        reason = re.sub(r"^\[Errno -?\d+\] ", "", str(error))[:200]
        said = f"{host} {kind}: {reason}" if reason and isinstance(error, httpx.ConnectError | httpx.ProxyError) else f"{host} {kind}"
        return Transient(said, "`paddock doctor --net` tests every host", host=host, reason=reason)

    def status_error(self, response: httpx.Response, what: str) -> HubError:
        """A refusing status, as one sentence with what to do.

        429 and 5xx are Transient: they may go away.
        """
        host, status = response.url.netloc.decode("ascii", "replace"), response.status_code
        code = response.headers.get("x-error-code", "")
        page = f"{self.endpoint}/{'/'.join(what.split('/')[:2])}"
        facts: dict[str, Any] = {"host": host, "status": status, "what": what}
        if status in (401, 403) or code in ("GatedRepo", "RepoNotFound"):
            if code == "GatedRepo":
                return HubAuthError(
                    f"{what} is gated: its owner wants you to accept a licence first",
                    f"accept it at {page}, then set HF_TOKEN",
                    **facts,
                )
            told = "the token may not read it" if self._token else "it may not exist, be private or be gated"
            hint = f"check the name; if it exists, accept its licence at {page} and set HF_TOKEN"
            return HubAuthError(f"{host} refuses {what} (HTTP {status}): {told}", hint, **facts)
        if status == 404:
            return HubAuthError(
                f"{host} has no {what} (HTTP 404)",
                "check the name; a private repository also answers so: set HF_TOKEN",
                **facts,
            )
        if status == 429 or status >= 500:
            wait = response.headers.get("retry-after", "")
            seconds = float(wait) if wait.isdigit() else 0.0
            return Transient(
                f"{host} is {'asking us to slow down' if status == 429 else 'in trouble'} (HTTP {status})",
                "try again later",
                retry_after_s=seconds,
                **facts,
            )
        return HubError(f"{host} answered HTTP {status} for {what}", **facts)


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port: what a token belongs to."""
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or (443 if parts.scheme == "https" else 80)


@functools.cache
def certificates() -> ssl.SSLContext:
    """The system's certificates, and certifi's where the system has none. Read once, when the first https host is met."""
    context = ssl.create_default_context()
    if not context.cert_store_stats()["x509_ca"]:
        import certifi

        context.load_verify_locations(certifi.where())
    return context
