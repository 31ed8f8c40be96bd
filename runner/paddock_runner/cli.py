"""The command line of paddock-runner: flags to Config, Config to app; every error is one sentence with a hint."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import log
from .config import Config, Knob, knobs, read_config, unknown_variables
from .edge.streams import hold_streams
from .errors import DiskFull, PaddockError, UsageError

COMMANDS = {
    "plan": "print the memory plan of a model",
    "explain": "print the program of a model, op by op",
    "config": "print every setting, its value and where it comes from",
    "openapi": "print the description of the HTTP API, as /openapi.json is",
    "calibrate": "measure a GPU: what a process takes there, how fast memory moves",
}


ELSEWHERE = {
    "--ctx": "--max-ctx", "-c": "--max-ctx", "--ctx-size": "--max-ctx", "--max-model-len": "--max-ctx", "--context-length": "--max-ctx",
    "--batch": "--max-batch", "--parallel": "--max-batch", "--max-num-seqs": "--max-batch", "--kv": "--kv-dtype", "--kv-cache-dtype": "--kv-dtype",
    "--served-model-name": "--name", "--alias": "--name", "--ssl-certfile": "--tls-cert", "--ssl-keyfile": "--tls-key", "--api-key": "--api-key-file",
}  # fmt: skip
"""What other programs, and `paddock serve`, call an option -> what it is called here."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        import difflib

        word = message.partition("unrecognized arguments: ")[2].split(" ")[0].partition("=")[0]
        near = ELSEWHERE.get(word) or next(iter(difflib.get_close_matches(word, [k.flag for k in knobs()], 1, 0.7)), "")
        raise UsageError(message, f"did you mean {near}?" if near else "paddock-runner --help lists the options")


def parser() -> argparse.ArgumentParser:
    """Every option, made from the table of knobs."""
    out = _Parser(
        "paddock-runner", usage="paddock-runner --model FILE|DIR [options]\n       paddock-runner plan|explain MODEL [options] [--json]\n       paddock-runner config|calibrate [options] [--json]",
        description="Serves one model over OpenAI- and Anthropic-compatible APIs.", allow_abbrev=False,
    )  # fmt: skip
    out.add_argument("--version", action="store_true", help="print the version")
    out.add_argument("--json", action="store_true", help="plan, explain, config, calibrate: print JSON")
    out.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    for knob in knobs():
        _add(out, knob)
    return out


def _add(out: argparse.ArgumentParser, knob: Knob) -> None:
    what = knob.doc + (f" [{knob.unit}]" if knob.unit else "")
    if knob.choices:
        what += f": {', '.join(knob.choices)}"
    if knob.kind == "bool":
        out.add_argument(
            knob.flag, dest=knob.name, action="store_const", const=not knob.default, default=None, help=what
        )
        return
    default = knob.default if knob.default not in (None, "", ()) else None
    shown = "" if default is None or "default" in what else f" (default: {default})"
    if knob.kind == "list":
        out.add_argument(knob.flag, dest=knob.name, action="append", default=None, metavar="TEXT", help=what)
    else:
        out.add_argument(knob.flag, dest=knob.name, default=None, metavar=knob.kind.upper(), help=what + shown)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    hold_streams()
    code = _told(list(sys.argv[1:] if arguments is None else arguments))
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # what it still holds is dropped, or the interpreter's end would try again
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def _told(arguments: list[str]) -> int:
    """The exit code; every error is one sentence."""
    try:
        code = _main(arguments)
        print(end="", flush=True)
        return code
    except PaddockError as error:
        log.say(f"error: {error}", is_error=True)
        return error.exit_code
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130
    except MemoryError:
        log.say("error: there is not enough memory", is_error=True)
        return 9
    except Exception as fault:
        if isinstance(fault, OSError) and fault.errno == errno.ENOSPC and fault.filename is None:
            log.say("error: the output could not be written: no space is left", is_error=True)
            return DiskFull.exit_code
        log.say(f"error: {type(fault).__name__}: {fault} (this is a fault of Paddock: please report it)", is_error=True)
        return 1


def _main(arguments: list[str]) -> int:
    found = vars(parser().parse_args(arguments))
    words, as_json = found.pop("words"), found.pop("json")
    if found.pop("version"):
        from .version import our_version

        print(f"paddock-runner {our_version()}")
        return 0
    command = words.pop(0) if words and words[0] in COMMANDS else "serve"
    if command in ("plan", "explain") and words:
        found["model"] = words.pop(0)
    if words:
        raise UsageError(
            f"{words[0]!r} is no command", "commands: " + ", ".join(COMMANDS) + "; to serve: --model FILE|DIR"
        )
    if command == "openapi":
        from .front.openapi import description

        print(description().decode())
        return 0
    config = read_config(found)
    for name, near in unknown_variables():
        log.say(f"warning: {name} is set, and there is no such setting{f'; {near} is one' if near else ''}", is_error=True)
    if command == "config":
        return _print_config(config, as_json)
    if command == "serve":
        from .app.start import serve

        return serve(config)
    if command == "calibrate":
        from .app.calibrate import calibrate

        return _print_calibration(calibrate(config), as_json)
    from .app.opening import open_model

    opened = open_model(config, config.model_path)
    return _print_plan(opened, as_json) if command == "plan" else _print_program(opened, config, as_json)


def _print_config(config: Config, as_json: bool) -> int:
    rows = [
        {"name": k.name, "value": getattr(config, k.name), "origin": config.origin.get(k.name, "default"), "flag": k.flag,
         "variable": k.variable, "unit": k.unit, "doc": k.doc}
        for k in knobs()
    ]  # fmt: skip
    if as_json:
        print(json.dumps({"settings": rows}, default=_plain, indent=1))
        return 0
    for row in rows:
        value = (
            ",".join(row["value"])
            if isinstance(row["value"], tuple)
            else "-"
            if row["value"] in (None, "")
            else row["value"]
        )
        print(f"{row['name']:16} {value!s:24} {row['origin']:20} {row['flag']:16} {row['variable']:24} {row['doc']}")
    return 0


def _print_calibration(found: Any, as_json: bool) -> int:
    if as_json:
        print(json.dumps({name: getattr(found, name) for name in found.__slots__}))
        return 0
    rates = f"memory {found.memory_bytes_per_s / 1e9:.0f} GB/s, from the host {found.host_bytes_per_s / 1e9:.1f} GB/s"
    print(f"{found.gpu}, driver {found.driver}: a process takes {found.process_bytes / 2**20:.0f} MiB; {rates}")
    return 0


def _plain(value: object) -> Any:
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else repr(value)


def _print_plan(opened: Any, as_json: bool) -> int:
    plan, facts = opened.plan, opened.place.facts
    if as_json:
        print(
            json.dumps(
                {
                    "model": str(opened.checkpoint.path),
                    "device": opened.place.label,
                    "free_bytes": facts.free_bytes,
                    **plan.as_json(),
                },
                indent=1,
            )
        )
        return 0
    print(
        f"{opened.checkpoint.path} on {opened.place.label}: contexts of {plan.sizes.max_ctx_tokens} tokens, {plan.sizes.n_slots} at a time"
    )
    for line in plan.lines:
        print(f"  {line.name:44} {line.n_bytes / (1 << 20):12.2f} MiB  {line.source}")
    print(
        f"  {'in all':44} {plan.total_bytes / (1 << 20):12.2f} MiB  (peak {plan.peak_bytes / (1 << 20):.2f}, free {facts.free_bytes / (1 << 20):.2f})"
    )
    if plan.host_bytes:
        print(f"  {'experts in host memory, beside that':44} {plan.host_bytes / (1 << 20):12.2f} MiB  header")
    print(f"  {plan.pool_tokens} KV tokens in all, {plan.kv_token_bytes} bytes each")
    return 0


def _print_program(opened: Any, config: Config, as_json: bool) -> int:
    """The program of a decoding step: one token of each of --max-batch sequences (one, when that was not given), half-full contexts."""
    from .engine.explain import Case, explain
    from .formats.table import packed_bytes

    n = 1 if config.is_default("max_batch") else config.max_batch
    sizes, device = opened.plan.sizes, opened.place.facts.kind
    case = Case(n, n, max(1, sizes.max_ctx_tokens // 2), device, packed_bytes)
    rows = explain(opened.blueprint, opened.views, sizes, opened.plan.kv_format, case)
    n_bytes, flops = sum(r.n_bytes for r in rows), sum(r.flops for r in rows)
    if as_json:
        case_json = {"tokens": n, "sequences": n, "ctx_tokens": case.ctx_tokens, "device": device}
        print(
            json.dumps(
                {"case": case_json, "ops": [r.as_json() for r in rows], "bytes": n_bytes, "flops": flops}, indent=1
            )
        )
        return 0
    print(f"{'#':>4} {'op':10} {'shape':44} {'bytes':>12} {'flops':>14} {'share':>7}  weights")
    for r in rows:
        print(f"{r.number:4} {r.op:10} {r.shape:44} {r.n_bytes:12} {r.flops:14} {r.share * 100:6.2f}%  {r.weights}")
    print(
        f"{len(rows)} ops; {n} token{'s' * (n > 1)} at a context of {case.ctx_tokens}: {n_bytes} bytes, {flops} flops"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
