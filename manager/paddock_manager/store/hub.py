"""What a hub repository holds: its commit, files with sizes and hashes, licence. Bodies are hostile until checked."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
from paddock_runner.errors import HubError, PaddockError, UsageError

from paddock_manager.catalog import names
from paddock_manager.store.web import Transient, Web

MAX_LISTING_BYTES = 32 << 20
SHA256 = re.compile(r"[0-9a-f]{64}")
SHA1 = re.compile(r"[0-9a-f]{40}")
TRIES = 4


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository at a commit. sha256 for large files, git_sha1 (of the blob) for small ones."""

    name: str
    size_bytes: int
    sha256: str = ""
    git_sha1: str = ""


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository at one commit."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]
    licence: str = ""

    def file(self, name: str) -> RemoteFile:
        """One file by name. Raises: KeyError."""
        return next(f for f in self.files if f.name == name)


def listing(web: Web, repo: str, rev: str = "", tries: int = TRIES) -> Repository:
    """The repository at a revision, pinned to its commit.

    Raises: HubAuthError (missing, private, gated), HubError (network, or an answer that makes no sense).
    """
    url = f"{web.endpoint}/api/models/{names.check_repo(repo)}/revision/{quote(rev or 'main', safe='')}?blobs=true"
    body = _json(web, url, repo, tries)
    commit = body.get("sha")
    if not isinstance(commit, str) or not SHA1.fullmatch(commit):
        raise HubError(f"the hub's answer about {repo} names no commit", host=web.endpoint)
    files = tuple(f for f in (_file(s) for s in body.get("siblings") or []) if f is not None)
    card = body.get("cardData")
    licence = card.get("license", "") if isinstance(card, dict) else ""
    return Repository(repo, commit, files, licence if isinstance(licence, str) else "")


def file_url(web: Web, repo: str, commit: str, name: str) -> str:
    """Where a file's bytes are asked for.

    Raises: UsageError for names that could point elsewhere.
    """
    return f"{web.endpoint}/{names.check_repo(repo)}/resolve/{quote(commit, safe='')}/{quote(names.safe_file(name))}"


def _file(sibling: Any) -> RemoteFile | None:
    """One entry of a listing; None for names that must not become paths."""
    if not isinstance(sibling, dict) or not isinstance(sibling.get("rfilename"), str):
        return None
    try:
        name = names.safe_file(sibling["rfilename"])
    except UsageError:
        return None
    lfs = sibling.get("lfs")
    size = lfs.get("size") if isinstance(lfs, dict) else sibling.get("size")
    digest = str(lfs.get("sha256") or lfs.get("oid", "")).removeprefix("sha256:") if isinstance(lfs, dict) else ""
    blob = str(sibling.get("blobId") or "")
    if not isinstance(size, int) or size < 0 or (isinstance(lfs, dict) and not SHA256.fullmatch(digest)):
        return None
    return RemoteFile(name, size, digest, blob if not digest and SHA1.fullmatch(blob) else "")


def _json(web: Web, url: str, what: str, tries: int) -> dict[str, Any]:
    """A JSON object, with retries for passing trouble and a limit on its size."""
    for attempt in range(tries):
        try:
            with web.get(url) as response:
                if response.status_code != 200:
                    raise web.status_error(response, what)
                return _object(_body(web, url, response), what)
        except Transient as error:
            if attempt + 1 >= tries:
                raise
            time.sleep(min(30.0, max(float(error.facts.get("retry_after_s", 0)), 0.25 * 2**attempt)))
    raise HubError(f"no answer about {what}")


def _body(web: Web, url: str, response: httpx.Response) -> bytes:
    out = bytearray()
    try:
        for chunk in response.iter_bytes():
            out += chunk
            if len(out) > MAX_LISTING_BYTES:
                raise HubError(f"the hub's listing is over {MAX_LISTING_BYTES} bytes", host=web.endpoint)
    except httpx.HTTPError as error:
        raise web.transport_error(url, error) from None
    return bytes(out)


def _object(raw: bytes, what: str) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise HubError(
            f"the hub's answer about {what} is not JSON", "a proxy or login page may be in between"
        ) from None
    if not isinstance(body, dict):
        raise HubError(f"the hub's answer about {what} is not an object")
    return body


def reachable(web: Web) -> PaddockError | None:
    """Does the endpoint answer at all? None when it does."""
    try:
        with web.get(f"{web.endpoint}/api/models?limit=1") as response:
            return None if response.status_code < 500 else web.status_error(response, "the model list")
    except PaddockError as error:
        return error


def data_host(web: Web, repo: str, commit: str, name: str) -> PaddockError | None:
    """Does the host answer that a file's bytes come from? Its name is in web.hosts then. None when it does."""
    try:
        with web.get(file_url(web, repo, commit, name), {"Range": "bytes=0-0"}) as response:
            return None if response.status_code in (200, 206) else web.status_error(response, f"{repo}/{name}")
    except PaddockError as error:
        return error


def search(web: Web, words: str, limit: int) -> list[dict[str, Any]]:
    """Repositories with GGUF files whose name holds the words: repo, downloads, likes. Raises: HubError."""
    url = f"{web.endpoint}/api/models?search={quote(words, safe='', errors='replace')}&filter=gguf&sort=downloads&direction=-1&limit={limit}"
    with web.get(url) as response:
        if response.status_code != 200:
            raise web.status_error(response, "the search")
        raw = _body(web, url, response)
    try:
        rows = json.loads(raw)
    except (ValueError, RecursionError):
        raise HubError("the hub's answer to the search is not JSON", host=web.endpoint) from None
    out = []
    for row in rows if isinstance(rows, list) else []:
        name = row.get("id") if isinstance(row, dict) else None
        try:
            out.append(
                {
                    "repo": names.check_repo(str(name)),
                    "downloads": int(row.get("downloads") or 0),
                    "likes": int(row.get("likes") or 0),
                }
            )
        except (UsageError, ValueError, TypeError):
            continue
    return out
