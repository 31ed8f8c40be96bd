"""From what the user typed to the checkpoint that is meant: a stored model, a file or folder, or one that is pulled first."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from paddock_runner.errors import FileError, UnknownModel, UsageError

from paddock_manager import paths
from paddock_manager.catalog import catalog, names
from paddock_manager.options import Option, Values
from paddock_manager.paths import Places
from paddock_manager.store import index
from paddock_manager.store.record import Model
from paddock_manager.ui import Ui

MAX_THREADS = 1024
KV_FORMATS = ("bf16", "f16", "f32", "fp8")
LOAD_OPTIONS = (
    Option("--ctx", "context per request, in tokens", "int", value="TOKENS", also=("-c", "--ctx-size", "--max-ctx", "--max-model-len", "--context-length", "--num-ctx"), least=1),
    Option("--batch", "requests at a time", "int", value="N", also=("--max-batch", "--parallel", "-np", "--max-num-seqs"), least=1),
    Option("--kv", "format of the KV cache", "text", value="FORMAT", choices=KV_FORMATS, also=("--kv-dtype", "--kv-cache-dtype")),
    Option("--window-kv", "format of the KV cache of layers with a sliding window, where it is another", "text", value="FORMAT", choices=KV_FORMATS),
    Option("--expert-vram-gib", "device memory for the experts of a mixture; the others stay in host memory", "float", value="GIB", least=-1),
    Option("--cold-experts", "who computes experts that a GPU lacks, in small steps: auto the GPU and the CPU, by measured rates", "text", choices=("auto", "copy", "cpu")),
    Option("--device", "where to run", "text", choices=("auto", "cpu", "cuda")),
    Option("--threads", "CPU threads", "int", value="N", also=("-t",), least=0, most=MAX_THREADS),
    Option("--gpu", "the GPU, by number or UUID", "text", value="GPU"),
    Option("--kernel-pack", "another kernel pack", "path", value="FILE"),
    Option("--runner", "another flag of `paddock-runner --help`, as host-cache-gib=8 or deterministic", "text", value="FLAG", many=True),
)
RUNNER_FLAGS = {
    "ctx": "--max-ctx",
    "batch": "--max-batch",
    "kv": "--kv-dtype",
    "window_kv": "--window-kv-dtype",
    "expert_vram_gib": "--expert-vram-gib",
    "cold_experts": "--cold-experts",
    "device": "--device",
    "threads": "--threads",
    "gpu": "--gpu",
    "kernel_pack": "--kernel-pack",
    "task": "--task",
}
KEPT = {"--model", "--name", "--host", "--port", "--api-key-file", "--no-auth", "--state-file", "--tls-cert", "--tls-key", "--home"}
"""Flags of the runner that the manager gives itself."""


@dataclass(frozen=True, slots=True)
class Target:
    """A checkpoint to open. model: its record, where it has one."""

    name: str
    ref: str
    path: Path
    model: Model | None = None


def find(places: Places, text: str) -> Target:
    """What is here under that name.

    Raises: UnknownModel, AmbiguousModel; FileError when the model is not complete or offline.
    """
    ref = names.parse(text)
    if ref.url:
        raise names.foreign(ref)
    if ref.path is not None:
        return of_path(ref.path)
    return of_model(index.find(places, ref))


def of_path(path: Path) -> Target:
    """A file or folder on this machine.

    Raises: UnknownModel, FileError when its name is not UTF-8.
    """
    if not path.exists():
        raise UnknownModel(f"{path}: there is no such file or folder", name=str(path))
    absolute = path.absolute()
    if not paths.is_utf8(absolute):
        raise FileError(f"{absolute}: this name is not UTF-8, and cannot be told to clients", "rename it, or link to it from elsewhere", path=str(absolute))
    name = absolute.stem if absolute.is_file() else absolute.name
    return Target(name.lstrip("-") or "model", str(absolute), absolute)  # a name that begins with a dash reads as an option


def of_model(model: Model) -> Target:
    """A stored model that can be opened.

    Raises: FileError for the states in which it cannot.
    """
    why = {
        "partial": (
            f"{model.name} is here only in part ({model.done_bytes} of {model.size_bytes} bytes)",
            f"`paddock pull {model.name}` continues",
        ),
        "missing": (
            f"files of {model.name} are missing in {model.folder}",
            f"`paddock verify {model.name} --repair` fetches them",
        ),
        "changed": (
            f"files of {model.name} have another size than recorded",
            f"`paddock verify {model.name} --repair` fetches them",
        ),
        "damaged": (
            f"the bytes of {model.name} were not the published ones when they were last compared",
            f"`paddock verify {model.name} --repair` fetches what is wrong again",
        ),
        "offline": (f"{model.folder} of {model.name} is not there", "is its disk mounted?"),
    }.get(model.state)
    if why is not None:
        raise FileError(*why, path=str(model.folder), state=model.state)
    return Target(model.name, model.ref, model.path, model)


def find_or_pull(places: Places, text: str, ui: Ui) -> Target:
    """As find; a model of the catalog or the hub that is not here, or only in part, is pulled, which is said."""
    ref = names.parse(text)
    if ref.path is not None or ref.url:
        return find(places, text)
    hits = index.matches(places, ref)
    if len(hits) > 1 or (hits and hits[0].state != "partial"):
        return of_model(index.find(places, ref))
    if not hits and not ref.repo and catalog.find(ref.short) is None:
        return of_model(index.find(places, ref))
    from paddock_manager.commands import pull
    from paddock_manager.store.pull import Shop, Wish

    ui.say(f"{text} is not here yet" if not hits else f"{text} is here only in part")
    shop = Shop(places, paths.hub_settings())
    return of_model(pull.obtain(shop, shop.resolve(ref, Wish()), ui))


def asked(values: Values) -> dict[str, str]:
    """The load options that were given, by key; flags of the runner by their names, with dashes: repeated ones are lines of one value."""
    found = {key: values.text(key) for key in RUNNER_FLAGS if key in values.found}
    for word in values.many("runner"):
        name, _, value = word.partition("=")
        flag = f"--{name.removeprefix('--')}"
        if flag in RUNNER_FLAGS.values():
            ours = next(key for key, known in RUNNER_FLAGS.items() if known == flag)
            raise UsageError(f"--runner {word}: that is --{ours.replace('_', '-')} here", option="--runner")
        if not re.fullmatch(r"--[a-z][a-z-]*", flag) or flag in KEPT:
            raise UsageError(f"--runner {word}: {'the manager sets ' + flag if flag in KEPT else 'a flag is NAME or NAME=VALUE'}", option="--runner")
        found[flag] = f"{found[flag]}\n{value}" if flag in found else value
    return found


def runner_flags(given: dict[str, str], found: Target | None = None) -> tuple[str, ...]:
    """The same as the runner's own flags; with what the catalog recommends for that model."""
    flags = tuple(word for key, lines in given.items() for value in lines.split("\n") for word in (RUNNER_FLAGS.get(key, key), value) if word)
    advice = catalog.sampling(found.model.alias) if found is not None and found.model is not None and found.model.alias else {}
    return (*flags, *(word for key, value in advice.items() for word in ("--recommended", f"{key}={value:g}")))
