"""Runs the kernel tests of a CUDA pack under compute-sanitizer, several processes at a time, and tells what ran and what it found.

Usage: python packs/cuda/sanitize.py PACK [--tool racecheck] [--jobs 12] [--limit-s 40] [--only WORD ...] [--tests FILE] [--out FOLDER]
(memcheck, racecheck, synccheck or initcheck; none: bare). Tests are dealt out one by one, so that what is left when the time is over is
spread over all of them. Exits 1 when something was found or a test failed; tests that did not run are counted, not hidden.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent
RESULT = re.compile(r"^(tests/\S.*?) (PASSED|FAILED|ERROR|SKIPPED)", re.MULTILINE)
PYTEST = ["-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider"]
QUIET = (
    "COMPUTE-SANITIZER",
    "ERROR SUMMARY: 0 ",
    "RACECHECK SUMMARY: 0 ",
    "Target application returned",
    "No kernels were checked",
)


@dataclasses.dataclass
class Share:
    """One process: its tests, its files and what came of them."""

    tests: list[str]
    log: pathlib.Path
    findings: pathlib.Path
    process: subprocess.Popen[bytes]

    def results(self) -> dict[str, str]:
        """What pytest has said so far, by test."""
        return dict(RESULT.findall(self.log.read_text(errors="replace")))

    def found(self) -> list[str]:
        """Lines of the sanitizer that are not its frame."""
        text = self.findings.read_text(errors="replace") if self.findings.exists() else ""
        lines = [line.removeprefix("=========").strip() for line in text.splitlines()]
        return [line for line in lines if line and not any(word in line for word in QUIET)]


def collect(words: list[str]) -> list[str]:
    """Ids of the tests that a GPU pack runs; words: only those whose id holds one of them."""
    told = subprocess.run(
        [sys.executable, *PYTEST, "--collect-only", "-q", "tests/kernels"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    ids = [line for line in told.stdout.splitlines() if "::" in line and not re.search(r"avx512|amx", line)]
    return [i for i in ids if not words or any(word in i for word in words)]


def start(pack: pathlib.Path, tool: str, tests: list[str], stem: pathlib.Path) -> Share:
    """A process that runs the tests under a tool."""
    names, log, findings = (stem.with_suffix(end) for end in (".tests", ".log", ".found"))
    names.write_text("\n".join(tests) + "\n")
    command = [sys.executable, *PYTEST, "-v", "--tb=short", f"@{names}"]
    if tool != "none":
        sanitizer = shutil.which("compute-sanitizer")
        if not sanitizer:
            raise SystemExit("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
        command = [sanitizer, "--tool", tool, "--print-limit", "20", "--log-file", str(findings), *command]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=os.environ | {"PADDOCK_TEST_PACK": str(pack)},
        )
    return Share(tests, log, findings, process)


def main() -> None:
    """Runs what the command line names; prints one line, and what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=pathlib.Path)
    parser.add_argument("--tool", default="racecheck", choices=("memcheck", "racecheck", "synccheck", "initcheck", "none"))
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--limit-s", type=float, default=40)
    parser.add_argument("--only", nargs="*", default=[], help="tests whose id holds one of these words")
    parser.add_argument(
        "--tests", type=pathlib.Path, help="a file with ids of tests, most important first, instead of all"
    )
    parser.add_argument("--out", type=pathlib.Path, help="where logs are kept")
    options = parser.parse_args()
    end = time.monotonic() + options.limit_s
    folder = options.out or pathlib.Path(tempfile.mkdtemp(prefix="paddock-sanitize-"))
    folder.mkdir(parents=True, exist_ok=True)
    tests = options.tests.read_text().split("\n") if options.tests else collect(options.only)
    tests = [t for t in tests if t]
    n = min(options.jobs, len(tests))
    shares = [start(options.pack.resolve(), options.tool, tests[i::n], folder / f"{options.tool}{i}") for i in range(n)]
    for share in shares:
        try:
            share.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(share.process.pid, signal.SIGKILL)
            share.process.wait()
    results = {test: result for share in shares for test, result in share.results().items()}
    found = [line for share in shares for line in share.found()]
    bad = [f"{result} {test}" for test, result in results.items() if result in ("FAILED", "ERROR")]
    (folder / f"{options.tool}.notrun").write_text("\n".join(t for t in tests if t not in results) + "\n")
    counts = {result: list(results.values()).count(result) for result in ("PASSED", "SKIPPED", "FAILED", "ERROR")}
    sys.stdout.write(
        f"{options.tool}: {len(results)} of {len(tests)} tests ran ({', '.join(f'{c} {r.lower()}' for r, c in counts.items() if c)}), {len(found)} lines found\n"
    )
    sys.stdout.write("".join(f"  {line}\n" for line in [*bad[:40], *found[:80]]))
    raise SystemExit(bool(found or bad))


if __name__ == "__main__":
    main()
