"""Every knob of the runner, once: default, unit, range, flag, variable, doc line. The only reader of the environment here.

Precedence: flag, PADDOCK_* variable, configuration file (TOML), default. Each value remembers where it came from. C++ reads no
environment, ever; rooms receive the two or three fields that they need.
"""

# ruff: noqa: RUF009 (knob only makes a dataclass field)

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import FileError, UsageError

DEFAULT_PORT = 11660
PREFIX = "PADDOCK_"
MANAGERS = ("PADDOCK_PULL_", "PADDOCK_SERVE_", "PADDOCK_STORE_", "PADDOCK_FIT_")
"""Variables of the manager's settings begin so; a runner that it starts has them, too."""
TESTS = ("PADDOCK_TEST_", "PADDOCK_SHARED")
"""Those of our tests."""


MAX_THREADS = 1024
"""More threads than this are a slip: plans count memory for each of them."""
MOST = 10**9
"""No number of a setting is larger: bytes made of it stay numbers of 64 bits."""


def knob(
    default: Any, doc: str, flag: str = "", unit: str = "", choices: tuple[str, ...] = (), low: float | None = None, high: float = MOST
) -> Any:
    """A field of Config. flag: "--name-of-field" when empty. low, high: the smallest and the largest allowed number."""
    return field(
        default=default,
        metadata={"doc": doc, "flag": flag, "unit": unit, "choices": choices, "low": low, "high": high, "is_knob": True},
    )


@dataclass(frozen=True, slots=True)
class Config:
    """The runner's settings; frozen after start. `origin` says of each field: "flag --x", "PADDOCK_X", "FILE" or "default"."""

    model: Path | None = knob(None, "GGUF file, .safetensors file or model folder to serve")
    task: str = knob(
        "auto", "what the model is for (auto: as its files say)", choices=("auto", "generate", "embed", "rank")
    )
    name: str = knob("", "name that clients use for the model (default: the file's name)")
    kernel_pack: Path | None = knob(None, "kernel pack to load instead of the one that fits the device")
    device: str = knob("auto", "where to run", choices=("auto", "cpu", "cuda"))
    gpu: str = knob("0", "the GPU: its number as CUDA counts, or its UUID (GPU-..., as nvidia-smi -L lists them)")
    host: str = knob("127.0.0.1", "address to listen on")
    port: int = knob(DEFAULT_PORT, "port to listen on, 0 takes a free one", low=0, high=65535)
    max_batch: int = knob(32, "requests that run at a time", unit="requests", low=1)
    max_ctx_tokens: int = knob(
        8192, "prompt and answer of one request together, at most (default: 8192, or the model's own if smaller)",
        flag="--max-ctx", unit="tokens", low=1,
    )  # fmt: skip
    max_step_tokens: int = knob(
        0, "tokens of one step, prefill included, at most; 0: 512 on the CPU, 2560 on a GPU, 8192 on one whose experts lie in host memory", unit="tokens", low=0
    )
    kv_format: str = knob(
        "auto", "format of the KV cache; auto: f16 on the CPU and where projections of keys have a bias, else bf16; fp8: e4m3 with a scale for every head, stored in the checkpoint or measured at the start", flag="--kv-dtype",
        choices=("auto", "bf16", "f16", "f32", "fp8"),
    )  # fmt: skip
    window_kv_format: str = knob(
        "same", "format of the KV cache of layers with a sliding window; same: as the others", flag="--window-kv-dtype",
        choices=("same", "bf16", "f16", "f32", "fp8"),
    )  # fmt: skip
    state_cache_gib: float = knob(
        -1.0, "memory for recurrent states that the prefix cache keeps (default, -1: two per request and eight more)", unit="GiB", low=-1
    )
    host_cache_gib: float = knob(
        0.0, "host memory for KV pages that the device has no room for, 0 for none", unit="GiB", low=0
    )
    disk_cache_gib: float = knob(
        0.0, "disk space for KV pages, which also outlive a restart, 0 for none", unit="GiB", low=0
    )
    cache_dir: Path | None = knob(None, "folder of the KV pages on disk (default: cache/pages under --home)")
    idle_release_s: float = knob(
        300.0, "time without a request after which memory of the page pool that holds nothing goes back to the device, 0 for never", unit="s", low=0
    )
    expert_vram_gib: float = knob(
        -1.0, "device memory for the experts of a mixture: as many as fit stay there, all lie in pinned host memory and are copied when chosen (default, -1: all lie on the device)",
        unit="GiB", low=-1,
    )  # fmt: skip
    cold_experts: str = knob(
        "auto",
        "chosen experts that a GPU lacks (--expert-vram-gib), in steps of at most 16 tokens: copy copies all of them; auto lets --threads of the CPU (0: all that we may use but two) compute as many as fill the time, by rates measured at the start; cpu has them compute all",
        choices=("auto", "copy", "cpu"),
    )
    memory_gib: float = knob(0.0, "memory that the model may take in all, 0 for what is free", unit="GiB", low=0)
    threads: int = knob(0, "CPU threads, 0 for one per core that we may use", low=0, high=MAX_THREADS)
    steady_prompts: bool = knob(
        False, "leave out lines that agent clients change in each request, so that their prompts are found in the cache"
    )
    guesses: str = knob(
        "auto",
        "tokens guessed ahead and checked in one row where that pays: auto looks them up in the text, lookup does so for hybrids too (their states are kept twice), mtp asks the model's own draft layer",
        choices=("auto", "off", "lookup", "mtp"),
    )
    recommended: tuple[str, ...] = knob(
        (), "sampling of requests that do not say, FIELD=NUMBER, for a model whose files recommend none (repeatable): temperature, top_p, top_k, min_p, repetition_penalty"
    )
    deterministic: bool = knob(
        False, "answers to the same request have the same bits alone and among others, cached or not; prompts take longer"
    )
    untried_kernels: bool = knob(
        False, "also kernels that were compiled for the GPU's architecture and never run on such a card (sm_100: products by tcgen05; sm_120: FP4 weights by products with block scales)"
    )
    long_prompt_delay: float = knob(
        1.4, "how many times as long as alone a long prompt may take beside streams on a GPU: less makes their longest gaps longer", low=1.05
    )
    prefill_share: float = knob(
        -1.0, "part of the device's processors that read a long prompt while others answer, up to 0.9; 0: steps of prompts and of answers take turns (default, -1: what was measured to suit the device)", low=-1
    )
    max_queue: int = knob(1024, "requests that may wait; more get a 429", unit="requests", low=1)
    api_key_file: Path | None = knob(
        None, "file with the keys that clients may send, a line each: KEY or sha256:HEX, and admin or inference (default: made once)"
    )
    tls_cert: Path | None = knob(None, "PEM file with the certificate (and its chain) to serve https with")
    tls_key: Path | None = knob(None, "PEM file with the key of --tls-cert")
    auth: bool = knob(True, "let clients in without a key (loopback only)", flag="--no-auth")
    allow_origin: tuple[str, ...] = knob((), "web origin that may call from a browser (repeatable)")
    allow_host: tuple[str, ...] = knob(
        (), "host name that clients may use, beside addresses and localhost (repeatable)"
    )
    max_body_mib: float = knob(32.0, "size of a request's body, at most", unit="MiB", low=0.001)
    keep_alive_s: float = knob(75.0, "idle time after which a connection is closed", unit="s", low=1)
    comment_s: float = knob(10.0, "silence after which a stream gets a keep-alive comment", unit="s", low=0.01)
    drain_s: float = knob(600.0, "time that running requests get to finish at SIGTERM", unit="s", low=0)
    state_file: Path | None = knob(None, "file to write {pid, host, port, ...} to, when ready")
    log_level: str = knob("info", "how much to log", choices=("debug", "info", "warning", "error"))
    home: Path | None = knob(None, "folder of Paddock's own files (default: the platform's data folder)")
    config: Path | None = knob(None, "TOML file with settings, by field name")
    origin: Mapping[str, str] = field(default_factory=dict)
    visible_gpus: str = ""
    """CUDA_VISIBLE_DEVICES: among those CUDA counts the GPUs."""

    @property
    def key_file(self) -> Path:
        """The file with the keys: --api-key-file, or the one that Paddock makes under its home."""
        return self.api_key_file or self.home_folder / "keys" / "api_key"

    @property
    def page_folder(self) -> Path:
        """Where KV pages on disk lie: --cache-dir, or under Paddock's home."""
        return self.cache_dir or self.home_folder / "cache" / "pages"

    @property
    def home_folder(self) -> Path:
        """PADDOCK_HOME, or the platform's data folder."""
        if self.home is not None:
            return self.home
        import platformdirs

        return Path(platformdirs.user_data_dir("paddock", appauthor=False))

    @property
    def model_path(self) -> Path:
        """The model. Raises: UsageError when none was named."""
        if self.model is None:
            raise UsageError("no model was named", "paddock-runner --model FILE|DIR")
        return self.model

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.name or name_of(self.model_path)

    def is_default(self, name: str) -> bool:
        """Whether nobody set this field."""
        return self.origin.get(name, "default") == "default"


def name_of(path: Path) -> str:
    """What a checkpoint is called where nobody gave it a name: its folder, or its file without the extension."""
    path = path.absolute()
    return path.name if path.is_dir() else path.stem


@dataclass(frozen=True, slots=True)
class Knob:
    """What is known of one field of Config. kind: int, float, bool, str, Path or list."""

    name: str
    kind: str
    default: Any
    doc: str
    flag: str
    variable: str
    unit: str
    choices: tuple[str, ...]
    low: float | None
    high: float

    def parse(self, value: object, origin: str) -> Any:
        """The value from a word (flag, variable) or a TOML value. Raises: UsageError naming origin and value."""
        if isinstance(value, str) and not _is_utf8(value):
            raise UsageError(f"{origin}: {value!r} is not UTF-8", "clients are told of it: rename what is called so", field=self.name)
        try:
            parsed = self._convert(value)
        except (TypeError, ValueError):
            wanted = {"int": "a whole number", "float": "a number", "bool": "true or false"}.get(self.kind, self.kind)
            raise UsageError(
                f"{origin}: {value!r} is not {wanted}", f"{self.flag}: {self.doc}", field=self.name
            ) from None
        if self.choices and parsed not in self.choices:
            raise UsageError(f"{origin}: {parsed!r} is not one of {', '.join(self.choices)}", field=self.name)
        if self.low is not None and not parsed >= self.low:
            raise UsageError(f"{origin}: {parsed} is below {self.low:g}", f"{self.flag}: {self.doc}", field=self.name)
        if self.kind in ("int", "float") and parsed > self.high:
            raise UsageError(f"{origin}: {parsed:.12g} is above {self.high:,}", f"{self.flag}: {self.doc}", field=self.name)
        return parsed

    def _convert(self, value: object) -> Any:
        if self.kind == "int":
            if isinstance(value, bool | float):
                raise ValueError
            return int(str(value))
        if self.kind == "float":
            number = float(str(value))
            if isinstance(value, bool) or not math.isfinite(number):
                raise ValueError
            return number
        if self.kind == "bool":
            return value if isinstance(value, bool) else _boolean(str(value))
        if self.kind == "list":
            words = value.split(",") if isinstance(value, str) else value
            if not isinstance(words, list | tuple) or not all(isinstance(w, str) for w in words):
                raise ValueError
            return tuple(w.strip() for w in words if w.strip())
        if not isinstance(value, str) or (self.kind == "Path" and not value):
            raise ValueError
        return _path(value) if self.kind == "Path" else value


def _is_utf8(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:  # bytes of a command line that are no text
        return False
    return True


def _path(word: str) -> Path:
    try:
        return Path(word).expanduser()
    except RuntimeError:  # ~ of a user who is not here
        return Path(word)


def _boolean(word: str) -> bool:
    found = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if word.strip().lower() not in found:
        raise ValueError
    return found[word.strip().lower()]


def knobs() -> list[Knob]:
    """Every knob, in order of declaration."""
    out = []
    for f in fields(Config):
        if not f.metadata.get("is_knob"):
            continue
        kind = {"Path | None": "Path", "tuple[str, ...]": "list"}.get(str(f.type), str(f.type))
        flag = f.metadata["flag"] or "--" + f.name.replace("_", "-")
        out.append(
            Knob(
                f.name, kind, f.default, f.metadata["doc"], flag, PREFIX + f.name.upper(), f.metadata["unit"],
                f.metadata["choices"], f.metadata["low"], f.metadata["high"],
            )
        )  # fmt: skip
    return out


def read_config(flags: Mapping[str, object], environment: Mapping[str, str] | None = None) -> Config:
    """The settings from flags (by field name), the environment and the configuration file.

    Raises: UsageError naming the flag, variable or file and the value at fault; FileError when the file cannot be read.
    """
    env = os.environ if environment is None else environment
    table = knobs()
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for k in table:
        if flags.get(k.name) is not None:
            origin[k.name] = f"flag {k.flag}"
            values[k.name] = k.parse(flags[k.name], k.flag)
        elif env.get(k.variable, "").strip():
            origin[k.name] = k.variable
            values[k.name] = k.parse(env[k.variable], k.variable)
    path = values.get("config")
    if path is not None:
        _from_file(path, table, values, origin)
    return Config(**values, origin=origin, visible_gpus=_visible_gpus(env))


def unknown_variables(environment: Mapping[str, str] | None = None, known: Collection[str] = ()) -> list[tuple[str, str]]:
    """PADDOCK_* variables that no knob has, each with the name that is most like it ("": none is).

    known: those of the manager; without them all that begin as its tables do are taken to be its own.
    """
    env = os.environ if environment is None else environment
    by_flag = {PREFIX + k.flag.removeprefix("--").replace("-", "_").upper(): k.variable for k in knobs()}
    names = {*known, *by_flag.values()}
    theirs = (*TESTS, *(() if known else MANAGERS))
    strange = [name for name in env if name.startswith(PREFIX) and name not in names and not name.startswith(theirs)]
    return [(name, by_flag.get(name) or next(iter(difflib.get_close_matches(name, names, 1, 0.8)), "")) for name in sorted(strange)]


def _visible_gpus(env: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES; one that is set to nothing shows no GPU, as -1 does."""
    told = env.get("CUDA_VISIBLE_DEVICES")
    return "" if told is None else told.strip() or "-1"


def _from_file(path: Path, table: list[Knob], values: dict[str, Any], origin: dict[str, str]) -> None:
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise FileError(
            f"the configuration file {path} cannot be read: {reason}", "check --config", path=str(path)
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not TOML: {error}", path=str(path)) from None
    by_name = {k.name: k for k in table}
    body = body.get("runner", {}) if isinstance(body.get("runner"), dict) else body
    for name, value in body.items():
        if name not in by_name or name == "config":
            raise UsageError(f"{path}: there is no setting {name!r}", "settings: " + ", ".join(by_name), path=str(path))
        if name not in values:
            values[name] = by_name[name].parse(value, f"{path}: {name}")
            origin[name] = str(path)
