"""A model's header, read and planned: where it will run, what it will take. Loads nothing, and imports little."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from .. import hardware, log
from ..blueprint.blueprint import Blueprint
from ..blueprint.guessing import with_guesses
from ..blueprint.names import tensors_by_name
from ..blueprint.read import read_blueprint
from ..config import Config, name_of
from ..errors import PackError, UnknownModel, UsageError, WontFit
from ..files.checkpoint import Checkpoint, open_checkpoint
from ..files.view import TensorView
from ..manifest import read_manifest, wheel_name
from ..memory import calibration
from ..memory.calibration import applied
from ..memory.kinds import joined_format
from ..memory.part import MOST_SHARE
from ..memory.plan import DeviceFacts, MemoryPlan, PlanRequest, chosen_format, cpu_facts, cuda_facts
from ..memory.solve import Solver, require_fit, solver
from ..pack.library import find_pack


@dataclass(frozen=True, slots=True)
class Place:
    """Where the model will run: the pack's file, the device's facts, its name for people, why it was chosen, what speaks against it, a GPU's UUID."""

    pack: Path
    facts: DeviceFacts
    label: str
    why: str = ""
    doubt: str = ""
    gpu: str = ""


@dataclass(frozen=True, slots=True)
class Opened:
    """A model that was opened and planned: what `plan`, `explain` and `serve` share."""

    checkpoint: Checkpoint
    blueprint: Blueprint
    views: dict[str, TensorView]
    plan: MemoryPlan
    place: Place


def choose_place(config: Config) -> Place:
    """The device and its pack, as --device and --kernel-pack say. Raises: PackError with a hint."""
    told = config.kernel_pack
    kind = config.device
    if told is not None and not told.exists():
        raise PackError(f"kernel pack {told} does not exist", "check --kernel-pack")
    if kind == "auto":
        is_cuda = "cuda" in told.name if told is not None else hardware.has_gpu() or not config.is_default("gpu")  # who names a GPU means one
        kind = "cuda" if is_cuda else "cpu"
    limit = int(config.memory_gib * (1 << 30))
    if kind == "cuda":
        gpu = hardware.gpu(config.gpu, visible=config.visible_gpus)
        if hardware.is_old(gpu.driver):
            needs = f"kernel packs need {hardware.OLDEST_DRIVER} or newer"
            raise PackError(
                f"the NVIDIA driver {gpu.driver} is too old: {needs}",
                "update the driver; --device cpu serves on the CPU",
            )
        free = min(gpu.memory.free_bytes, limit) if limit else gpu.memory.free_bytes
        facts = cuda_facts(gpu.n_processors, gpu.memory.total_bytes, free, gpu.name, hardware.pack_arch(gpu.capability))
        facts = applied(facts, calibration.read(config.home_folder, gpu.name, gpu.driver))
        pack = told or _cuda_pack(gpu)
        manifest = read_manifest(pack)  # its hash is compared by who loads it
        return Place(
            pack, facts, f"{gpu.name} (GPU {gpu.which}), {pack.name}", doubt=manifest.doubt if manifest else "", gpu=gpu.uuid
        )
    if config.untried_kernels:
        raise PackError("--untried-kernels is for GPUs: the CPU pack has no kernels that never ran", "leave it out")
    memory = hardware.memory()
    free = min(memory.free_bytes, limit) if limit else memory.free_bytes
    threads = config.threads or hardware.n_threads()
    why = "" if config.device == "cpu" or told is not None else "no NVIDIA GPU here: "
    return Place(told or find_pack("cpu"), cpu_facts(threads, memory.total_bytes, free), f"CPU, {threads} threads", why)


def _cuda_pack(gpu: hardware.Gpu) -> Path:
    names = hardware.pack_names(gpu.capability)
    for name in names:
        try:
            return find_pack(name)
        except PackError:
            continue
    said = "sm_{}{}".format(*gpu.capability)
    made = hardware.pack_arch(gpu.capability)
    if not made:
        raise PackError(
            f"there is no kernel pack for {gpu.name} ({said}): they begin at sm_80",
            "--device cpu serves on the CPU",
            tried=names,
        )
    raise PackError(
        f"no kernel pack for {gpu.name} ({said}) is installed",
        f"pip install {wheel_name(made)}; --device cpu serves on the CPU",
        tried=names,
    )


def open_model(config: Config, path: Path) -> Opened:
    """Opens a model's header and plans it. Raises: UnknownModel, FileError, UnsupportedError, UsageError, WontFit, PackError."""
    if not path.exists():
        raise UnknownModel(f"{path}: there is no such file or folder", "check --model", name=str(path))
    return plan_model(config, path, choose_place(config))


def plan_model(config: Config, path: Path, place: Place) -> Opened:
    """A model's header, and what the model takes at this place. Raises: FileError, UnsupportedError, UsageError, WontFit."""
    checkpoint = open_checkpoint(path)
    blueprint = with_guesses(read_blueprint(checkpoint, config.task), checkpoint, config.guesses)
    blueprint = replace(blueprint, name=config.name or name_of(path))  # what people call it, not what its header does
    views = tensors_by_name(checkpoint, blueprint)
    ctx = config.max_ctx_tokens
    if config.is_default("max_ctx_tokens"):
        ctx = min(ctx, blueprint.max_ctx_tokens)
    kv_format, why = chosen_format(blueprint, place.facts.kind) if config.kv_format == "auto" else (config.kv_format, "")
    if why:
        log.event("kv", format=kv_format, why=why)
    kv_format = joined_format(kv_format, "" if config.window_kv_format == "same" else config.window_kv_format)
    request = PlanRequest(
        ctx, config.max_batch, place.facts, kv_format, config.max_step_tokens, state_cache_bytes=_bytes(config.state_cache_gib),
        expert_bytes=_bytes(config.expert_vram_gib), is_invariant=config.deterministic,
        prefill_share=_share(config),
    )  # fmt: skip
    answer = solver(blueprint, views, place.facts.free_bytes, place.facts.kind)
    found = _plan(answer, request)
    if request.chose_share and request.share > 0 and not found.sizes.part_tokens:
        log.warning("note", text="--prefill-share has no effect: this model, so few processors or one request at a time leave no part of the device that could read prompts; steps of prompts and of answers take turns")
    host = hardware.memory().free_bytes if found.host_bytes else 0
    if found.host_bytes > host:
        gib = 1 << 30
        raise WontFit(
            f"experts in host memory take {found.host_bytes / gib:.2f} GiB, {host / gib:.2f} GiB of it are free", "choose a smaller quantization",
            plan=found.as_json(), need_bytes=found.host_bytes, free_bytes=host,
        )  # fmt: skip
    return Opened(checkpoint, blueprint, views, found, place)


def _share(config: Config) -> float | None:
    """The part of the processors that reads long prompts aside; None when nobody said. Raises: UsageError."""
    if config.prefill_share > MOST_SHARE:
        raise UsageError(f"{config.origin.get('prefill_share', '--prefill-share')}: {config.prefill_share:g} is above {MOST_SHARE}", "who answers needs some processors, too", field="prefill_share")
    return None if config.prefill_share < 0 else config.prefill_share


def _bytes(gib: float) -> int | None:
    """So many GiB; None when nobody said."""
    return None if gib < 0 else int(gib * (1 << 30))


def _plan(answer: Solver, request: PlanRequest) -> MemoryPlan:
    """The plan with full contexts for every slot; else with the largest page pool that fits, at least one context."""
    if not answer.fits(request):
        request = answer.shrunk(request) or request
    return require_fit(answer, request)
