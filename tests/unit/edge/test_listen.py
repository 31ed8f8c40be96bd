"""The listening socket: what is ready before anybody comes."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from paddock_runner.edge import listen
from paddock_runner.errors import FileError, UsageError

SIZES = """
import resource, sys
from paddock_runner.edge.listen import bind
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
limit = int(sys.argv[1]) if most == resource.RLIM_INFINITY else min(int(sys.argv[1]), most)
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
bind("127.0.0.1", 0)
size = next(line for line in open("/proc/self/status") if line.startswith("FDSize"))
print(limit, size.split()[1])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the size of the table")
@pytest.mark.parametrize("limit", [2000, 200])
def test_the_table_of_open_files_need_not_grow_when_clients_come(limit: int) -> None:
    """In a process of several threads the kernel stops who opens the file that no longer fits, for many milliseconds."""
    done = subprocess.run([sys.executable, "-c", SIZES, str(limit)], capture_output=True, text=True, check=True)
    given, size = map(int, done.stdout.split())
    assert size >= given


@pytest.mark.parametrize("limit", [0, 2**30])
def test_room_that_is_not_to_be_had_is_no_fault(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen.resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(listen, "MAX_RESERVED", limit)  # no number at all, or more than a process may open
    listen.reserve_descriptors()


def test_a_process_that_may_open_nothing_more_goes_on_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("builtins.open", full)
    listen.reserve_descriptors()


@pytest.mark.parametrize(
    "number, words",
    [
        (errno.EADDRINUSE, "it is in use (--port 0 takes a free one)"),
        (errno.EACCES, "only the system's administrator may listen there (--port 0 takes a free one)"),
        (errno.EADDRNOTAVAIL, "this machine has no such address (--host is one of its own: 127.0.0.1, ::1, or 0.0.0.0 for all of them)"),
        (errno.EAFNOSUPPORT, "this machine has no addresses of that kind (--host 127.0.0.1 where there is no IPv6)"),
        (errno.ENETDOWN, "Network is down (check --host)"),
    ],
)
def test_address_that_cannot_be_used_is_told_with_what_to_do(number: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names of the errors, whose numbers differ from system to system."""

    class Refusing(socket.socket):
        def bind(self, _: object) -> None:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(listen.socket, "socket", Refusing)
    with pytest.raises(UsageError) as caught:
        listen.bind("10.1.2.3", 80)
    assert f"{caught.value.message} ({caught.value.hint})" == f"cannot listen on 10.1.2.3 port 80: {words}"


@pytest.mark.parametrize("host", ["a." + "b" * 70, "\u0308" * 70, "no such host", "300.1.1.1", "::g"])
def test_host_that_is_none_is_a_sentence(host: str) -> None:
    with pytest.raises(UsageError, match="cannot listen on"):
        listen.bind(host, 0)


def test_address_that_is_not_of_this_machine_is_told_as_that() -> None:
    with pytest.raises(UsageError, match="this machine has no such address"):
        listen.bind("192.0.2.1", 0)


def test_files_that_are_no_certificate_and_key_are_told_as_that(tmp_path: Path) -> None:
    paths = []
    for name in ("one", "two"):
        words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}"]
        subprocess.run([*words, "-keyout", tmp_path / f"{name}.key", "-out", tmp_path / f"{name}.pem"], check=True, capture_output=True)
        paths += [tmp_path / f"{name}.pem", tmp_path / f"{name}.key"]
    assert listen.check_tls(*paths[:2]) == (str(paths[0]), str(paths[1])) and listen.check_tls(None, None) is None
    (tmp_path / "no.pem").write_text("no")
    for certificate, key, said in [
        (paths[0], paths[3], "cannot be used for TLS: key values mismatch"), (tmp_path / "no.pem", paths[1], "cannot be used for TLS: "),
        (paths[0], tmp_path / "none", f"{tmp_path}/none cannot be read: No such file or directory"), (tmp_path, paths[1], f"{tmp_path} cannot be read: Is a directory"),
    ]:  # fmt: skip
        with pytest.raises(FileError) as caught:
            listen.check_tls(certificate, key)
        assert said in caught.value.message
    with pytest.raises(UsageError, match="both files"):
        listen.check_tls(paths[0], None)
