"""Does a model fit, with which context and batch, and what would fit instead: the runner's own plan, asked for by the manager."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paddock_runner.blueprint.blueprint import Blueprint
from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.errors import PackError, PaddockError, UnsupportedError, UsageError
from paddock_runner.files.checkpoint import Checkpoint, open_checkpoint
from paddock_runner.files.folder import require_tokenizer
from paddock_runner.memory import calibration
from paddock_runner.memory.calibration import Calibration
from paddock_runner.memory.kinds import joined_format
from paddock_runner.memory.plan import (
    DeviceFacts,
    MemoryPlan,
    PlanRequest,
    chosen_format,
    cpu_facts,
    cuda_facts,
)
from paddock_runner.memory.solve import Solver, solver

from paddock_manager import paths
from paddock_manager.fit.gpus import Gpu, Host, gpus, host

DEFAULT_CTX_TOKENS = 32768
DEFAULT_BATCH = 1
TIGHT_SHARE = 0.05
"""Less headroom than this share of the free memory is called tight."""
COLD = "in steps of up to 16 tokens the CPU computes some of those meanwhile, by rates that are measured at the start (--cold-experts)"
"""Beside experts in host memory: what is not known before they are there."""
PROCESSORS = {
    "sm_80": 108,
    "sm_86": 84,
    "sm_89": 128,
    "sm_90": 132,
    "sm_90a": 132,
    "sm_100": 148,
    "sm_103": 160,
    "sm_120": 170,
    "sm_121": 48,
}
"""Multiprocessors of the largest common board, for a device that is not here. Source: NVIDIA's architecture papers."""


@dataclass(frozen=True, slots=True)
class Where:
    """A device to fit on. holders: who holds memory there now. source: measured, or told on the command line.

    calibration: what `paddock doctor --gpu` found there. host_free_bytes: host memory for experts beside a GPU; 0: not known.
    """

    facts: DeviceFacts
    label: str
    source: str
    holders: tuple[dict[str, Any], ...] = ()
    calibration: Calibration | None = None
    host_free_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for; None: the defaults (a context no longer than the model's, a batch, the runner's KV format)."""

    ctx_tokens: int | None = None
    batch: int | None = None
    kv_format: str | None = None
    default_ctx_tokens: int = DEFAULT_CTX_TOKENS
    default_batch: int = DEFAULT_BATCH
    expert_gib: float | None = None
    window_kv_format: str | None = None


@dataclass(slots=True)
class Report:
    """The answer. largest_ctx_tokens: at this batch; largest_batch: at this context.

    verdict: fits, tight (little is left), shared (it starts, but its requests share a pool of pages that is smaller than all their
    contexts together), or no.
    """

    name: str
    where: Where
    plan: MemoryPlan
    verdict: str
    headroom_bytes: int
    largest_ctx_tokens: int
    largest_batch: int
    model_ctx_tokens: int
    limited_by: str
    alternatives: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """For --json."""
        device = self.where.facts
        return {
            "name": self.name,
            "verdict": self.verdict,
            "fits": self.verdict != "no",
            "device": {
                "kind": device.kind,
                "label": self.where.label,
                "memory_bytes": device.memory_bytes,
                "free_bytes": device.free_bytes,
                "source": self.where.source,
                "holders": list(self.where.holders),
                "calibration": asdict(self.where.calibration) if self.where.calibration else None,
            },
            "plan": self.plan.as_json(),
            "headroom_bytes": self.headroom_bytes,
            "largest_ctx_tokens": self.largest_ctx_tokens,
            "largest_batch": self.largest_batch,
            "model_ctx_tokens": self.model_ctx_tokens,
            "limited_by": self.limited_by,
            "alternatives": self.alternatives,
            "notes": self.notes,
        }


def report(name: str, checkpoint: Checkpoint, where: Where, wish: Wish) -> Report:
    """Plan a model on a device.

    Raises: UnsupportedError, FileError (the model), UsageError (more context than it was made for).
    """
    blueprint = replace(read_blueprint(checkpoint), name=name)
    request = request_of(blueprint, where, wish)
    answer = solver(blueprint, tensors_by_name(checkpoint, blueprint), where.facts.free_bytes, where.facts.kind)
    plan, verdict = _verdict(answer, request)
    head = where.facts.free_bytes - plan.peak_bytes
    ctx, batch = answer.largest_ctx_tokens(request), answer.largest_batch(request)
    notes = [*blueprint.notes, *_kv_note(blueprint, where, wish), *_load_note(plan, where.calibration), *_fetch_note(blueprint, answer, plan, where.calibration)]
    room = where.host_free_bytes or plan.host_bytes
    if plan.host_bytes > room:
        verdict = "no"
        notes.append(f"its experts take {plan.host_bytes / 2**30:.2f} GiB of host memory, {room / 2**30:.2f} GiB of it are free")
    others = answer.alternatives(request) if verdict in ("no", "shared") else []
    others = [x for x in others if x.get("host_bytes", 0) <= (where.host_free_bytes or x.get("host_bytes", 0))]
    limit = "the model's context" if ctx >= blueprint.max_ctx_tokens else _limited_by(answer, request)
    return Report(name, where, plan, verdict, head, ctx, batch, blueprint.max_ctx_tokens, limit, others, notes)


def _kv_note(blueprint: Blueprint, where: Where, wish: Wish) -> list[str]:
    """Why keys and values have a format that a device of that kind does not usually take."""
    format, why = chosen_format(blueprint, where.facts.kind)
    return [f"keys and values in {format}: {why}"] if why and not wish.kv_format else []


def _load_note(plan: MemoryPlan, measured: Calibration | None) -> list[str]:
    """How long the weights take to come, where that was measured."""
    if measured is None:
        return []
    seconds = plan.group_bytes("weights") / measured.host_bytes_per_s
    return [f"from memory to the GPU its weights take {seconds:.1f} s or more, at {measured.host_bytes_per_s / 1e9:.1f} GB/s as measured"]


def _fetch_note(blueprint: Blueprint, answer: Solver, plan: MemoryPlan, measured: Calibration | None) -> list[str]:
    """What a token lacks of experts in host memory, if all are chosen equally often; they are not, and those often chosen stay on the device."""
    n = plan.sizes.n_expert_slots
    used = [layer.experts.n_used for layer in blueprint.all_layers if layer.experts is not None]
    if not n:
        return []
    away = sum(k * x.n_bytes * max(0, x.n_experts - n) / x.n_experts for k, x in zip(used, answer.weights.experts.layers, strict=False))
    words = f"were its experts chosen equally often, a token would lack {away / 1e9:.2f} GB of them"
    if measured is not None:
        words += f", whose copies take {away / measured.host_bytes_per_s * 1e3:.0f} ms at {measured.host_bytes_per_s / 1e9:.1f} GB/s as measured"
    return [words, COLD]


def _verdict(answer: Solver, request: PlanRequest) -> tuple[MemoryPlan, str]:
    """The plan as the runner would make it: full contexts for all requests, else the largest pool of pages that they share."""
    plan = answer.plan(request)
    if plan.peak_bytes <= answer.free_bytes:
        return plan, "tight" if answer.free_bytes - plan.peak_bytes < TIGHT_SHARE * answer.free_bytes else "fits"
    shrunk = answer.shrunk(request)
    return (answer.plan(shrunk), "shared") if shrunk else (plan, "no")


def request_of(blueprint: Blueprint, where: Where, wish: Wish) -> PlanRequest:
    """The request, with the defaults where nothing was asked."""
    ctx = wish.ctx_tokens if wish.ctx_tokens is not None else min(wish.default_ctx_tokens, blueprint.max_ctx_tokens)
    request = PlanRequest(ctx, wish.batch if wish.batch is not None else wish.default_batch, where.facts)
    if wish.expert_gib is not None:
        request = replace(request, expert_bytes=int(wish.expert_gib * (1 << 30)), max_step_tokens=0)
    kv_format = wish.kv_format or chosen_format(blueprint, where.facts.kind)[0]
    return replace(request, kv_format=joined_format(kv_format, wish.window_kv_format or ""))


def _limited_by(answer: Solver, request: PlanRequest) -> str:
    """The largest group of costs."""
    plan = answer.plan(request)
    groups = {line.group for line in plan.lines}
    return max(groups, key=plan.group_bytes)


def on_host(threads: int | None = None, told_bytes: int = 0) -> Where:
    """This machine's CPU, or one with so much memory."""
    machine: Host = host()
    n = threads or machine.n_threads
    if told_bytes:
        return Where(cpu_facts(n, told_bytes, told_bytes), "CPU, as told", "told")
    return Where(cpu_facts(n, machine.memory_bytes, machine.free_bytes), machine.name or "CPU", "measured")


def on_gpu(gpu: Gpu) -> Where:
    """A GPU of this machine, with what is free on it now."""
    holders = tuple({"pid": h.pid, "name": h.name, "used_bytes": h.used_bytes} for h in gpu.holders)
    facts = cuda_facts(gpu.n_processors, gpu.memory_bytes, gpu.free_bytes, gpu.name, gpu.arch)
    measured = calibration.read(paths.places().home, gpu.name, gpu.driver)
    label = f"{gpu.name} ({gpu.uuid}, {gpu.arch})"
    return Where(calibration.applied(facts, measured), label, "measured", holders, measured, host().free_bytes)


def on_told(vram_bytes: int, arch: str) -> Where:
    """A GPU that is not here.

    Raises: UsageError for an architecture that we do not know.
    """
    if arch not in PROCESSORS:
        raise UsageError(
            f"{arch} is not an architecture that Paddock knows", "known: " + ", ".join(PROCESSORS), arch=arch
        )
    return Where(
        cuda_facts(PROCESSORS[arch], vram_bytes, vram_bytes, arch, arch),
        f"{arch} with {vram_bytes / 2**30:.3g} GiB, as told",
        "told",
    )


def find_where(device: str, vram_bytes: int | None, arch: str, threads: int | None) -> list[Where]:
    """The devices to fit on: told, all GPUs, one GPU by number, UUID or name, or the CPU.

    Raises: PackError when a GPU was asked for and there is none, with the reason; UsageError.
    """
    if vram_bytes is not None and vram_bytes < 1 << 20:
        raise UsageError(f"--vram {vram_bytes} are {vram_bytes} bytes", f"write the unit: --vram {vram_bytes}GiB")
    if vram_bytes is not None:
        return [on_host(threads, vram_bytes)] if device == "cpu" else [on_told(vram_bytes, arch or "sm_90")]
    if device == "cpu":
        return [on_host(threads)]
    found, why = gpus()
    if device in ("", "auto"):
        return [on_gpu(g) for g in found] or [on_host(threads)]
    if not found:
        raise PackError(
            f"there is no GPU to fit on: {why}",
            "`--device cpu` fits on the CPU; `--vram 24GiB --arch sm_89` on one that is not here",
        )
    if device == "cuda":
        return [on_gpu(g) for g in found]
    word = device.removeprefix("cuda:").lower()
    hits = [g for g in found if word in (str(g.index), g.uuid.lower()) or (len(word) > 3 and word in g.name.lower())]
    if not hits:
        raise UsageError(
            f"there is no GPU {device!r}", "there are " + ", ".join(f"{g.index}: {g.name} {g.uuid}" for g in found)
        )
    return [on_gpu(g) for g in hits]


def refusal(path: Path) -> str:
    """Why no runner serves a checkpoint, as far as can be told without its weights; "" when nothing speaks against it."""
    try:
        checkpoint = open_checkpoint(path)
    except PaddockError as error:
        return error.message.removeprefix(f"{path}: ")
    try:
        read_blueprint(checkpoint)
        if checkpoint.kind != "gguf":
            require_tokenizer(checkpoint.path)
    except UnsupportedError as error:
        return str(error).removeprefix(f"{path}: ")
    except PaddockError:
        return ""
    return ""
