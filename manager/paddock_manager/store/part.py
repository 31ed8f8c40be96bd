"""The bytes of an unfinished file: reserved, written at any offset, read back for hashes, synced. Knows no network."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path

from paddock_runner.errors import DiskFull, FileError

CHUNK_BYTES = 1 << 20
WORD_BYTES = 8
WRITE_BYTES = 256 << 10
"""Of one write. For larger ones the kernel takes large blocks of memory, which virtual machines must first get from their hosts."""


class PartHash:
    """Sum of a part's 64-bit words: says which part is wrong after the file's sha256 said that one is.

    Every change of one word changes it. At 2 % of the time of a second sha256 it costs a fast pull nothing; a CRC-32 costs a third.
    """

    def __init__(self) -> None:
        import numpy

        self._numpy = numpy
        self._value, self._rest = 0, b""

    def update(self, data: bytes | memoryview) -> None:
        """More bytes."""
        view = memoryview(data)
        if self._rest:
            n = WORD_BYTES - len(self._rest)
            self._rest, view = self._rest + bytes(view[:n]), view[n:]
            if len(self._rest) < WORD_BYTES:
                return
            self._value += int.from_bytes(self._rest, "little")
        whole = len(view) // WORD_BYTES * WORD_BYTES
        self._value += int(self._numpy.frombuffer(view[:whole], "<u8").sum(dtype="<u8"))
        self._rest = bytes(view[whole:])

    def hexdigest(self) -> str:
        """Sixteen hex digits."""
        return f"{(self._value + int.from_bytes(self._rest, 'little')) % 2**64:016x}"


class PartFile:
    """A file of known size that is being filled. Writers of different ranges may work at the same time."""

    def __init__(self, path: Path, size_bytes: int):
        self.path, self.size_bytes = path, size_bytes
        self._fd = -1
        self._writing = threading.Lock()

    def open(self) -> None:
        """Make it, or take it over, and claim its space.

        Raises: DiskFull.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        with disk_errors(self.path, self.size_bytes):
            _reserve(self._fd, self.size_bytes)

    def write(self, data: bytes, offset: int) -> None:
        """Put bytes where they belong. Raises: DiskFull.

        One writer at a time: the kernel lets no two into a file, and those that wait there spin and keep a processor from the hash.
        """
        with self._writing, disk_errors(self.path, len(data)):
            view = memoryview(data)
            while view:
                written = os.pwrite(self._fd, view[:WRITE_BYTES], offset)
                offset += written
                view = view[written:]

    def feed(self, offset: int, length: int, *digests: hashlib._Hash | PartHash) -> None:
        """Update digests with bytes of the file. Raises: FileError when it is shorter."""
        end = offset + length
        view = memoryview(bytearray(min(CHUNK_BYTES, length)))
        while offset < end:
            chunk = view[: os.preadv(self._fd, [view[: end - offset]], offset)]
            if not chunk:
                raise FileError(
                    f"{self.path} ends at byte {offset}, {end} expected", offset=offset, need=end, path=str(self.path)
                )
            for digest in digests:
                digest.update(chunk)
            offset += len(chunk)

    def part_hash(self, offset: int, length: int) -> str:
        """The hash of what is on disk now."""
        digest = PartHash()
        self.feed(offset, length, digest)
        return digest.hexdigest()

    def sync(self) -> None:
        """What was written before this call survives a power cut. Raises: DiskFull."""
        with disk_errors(self.path, self.size_bytes):
            os.fdatasync(self._fd)

    def move_to(self, target: Path) -> None:
        """Sync, give it its final name, make that durable."""
        self.sync()
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self.path, target)
        sync_folder(target.parent)

    def close(self) -> None:
        """Release the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class disk_errors:
    """Turns a full disk or quota into DiskFull."""

    def __init__(self, path: Path, need_bytes: int):
        self.path, self.need_bytes = path, need_bytes

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            facts = os.statvfs(self.path.parent)
            free = facts.f_bavail * facts.f_frsize
            raise DiskFull(
                f"the disk of {self.path.parent} is full: {free} bytes free, {self.need_bytes} needed",
                "free some space, or set PADDOCK_HOME to a larger disk; finished parts are kept",
                need_bytes=self.need_bytes,
                free_bytes=free,
                path=str(self.path.parent),
            ) from None


def _reserve(fd: int, size_bytes: int) -> None:
    """Claim the space now; where the file system cannot, set the size."""
    if size_bytes:
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(fd, size_bytes)


def sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)
