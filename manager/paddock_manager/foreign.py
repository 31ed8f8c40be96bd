"""Options of llama.cpp, Ollama and vLLM that are none here: what to do instead, or why nothing needs to be done.

Those that mean the same as one of ours are its `also`, in the command's own table.
"""

from __future__ import annotations

_MODEL = (
    "the model is named without an option: `paddock {command} MODEL`, where MODEL is a name, ORG/REPO:QUANT or a path"
)
_LEFT = "leave it out: "
_KEYS = "keys are made here: `paddock key` prints this machine's, `paddock key add NAME` makes one for others"
_ONE_GPU = "a model runs on one GPU: `--gpu` chooses it"
_TASK = "`--task embed` serves vectors, `--task rank` a reranker (auto: as the model's files say)"
_OWN = "leave it out: it is as the checkpoint's files say"

ADVICE: dict[tuple[str, ...], str] = {
    ("-m", "--model", "--model-path", "--hf-repo", "-hf", "-hfr", "--hf-file", "-hff", "--model-url", "-mu", "--from"): _MODEL,
    ("-p", "--prompt"): "the prompt stands behind the model: `paddock run MODEL \"PROMPT\"`",
    ("-i", "--interactive", "-cnv", "--conversation", "-no-cnv", "--no-conversation", "-st", "--single-turn"): (
        _LEFT + "`paddock run MODEL` without a prompt is a chat, with one it answers and ends"
    ),
    ("-ngl", "--gpu-layers", "--n-gpu-layers", "--num-gpu", "-ncmoe", "--n-cpu-moe", "-cmoe", "--cpu-moe", "-ot", "--override-tensor", "--cpu-offload-gb"): (
        "a model is on its device whole: `--device cuda` or cpu; of a mixture, experts may lie in host memory (`--expert-vram-gib`)"
    ),
    ("--gpu-memory-utilization", "--mem-fraction-static", "--fit", "-fit", "--fit-target", "-fitt", "--kv-cache-memory-bytes"): (
        "what the plan needs is taken, no more: `paddock fit MODEL` shows it, `--runner memory-gib=N` bounds it"
    ),
    ("--tensor-parallel-size", "-tp", "--tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp", "-ts", "--tensor-split", "-sm", "--split-mode", "-mg", "--main-gpu", "--device-map"): _ONE_GPU,
    ("-b", "--batch-size", "-ub", "--ubatch-size", "--max-num-batched-tokens", "--chunked-prefill-size", "--prefill-chunk"): "`--runner max-step-tokens=N` bounds the tokens of a step; `--batch` is the number of requests at a time",
    ("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"): "`--kv FORMAT` is for keys and values (f16, bf16, f32, fp8)",
    ("--api-key", "--api-key-file"): _KEYS,
    ("--embedding", "--embeddings", "--reranking", "--rerank", "--runner-type", "--convert", "--pooling"): _TASK,
    ("--jinja", "--no-jinja", "--chat-template", "--chat-template-file", "--reasoning-format", "--reasoning-parser", "--enable-auto-tool-choice", "--tool-call-parser", "--enable-reasoning"): (
        _LEFT + "the checkpoint's own chat template is used, and it says how the model calls tools and reasons"
    ),
    ("-fa", "--flash-attn", "--no-flash-attn", "--enable-prefix-caching", "--no-enable-prefix-caching", "--enable-chunked-prefill", "-cb", "--cont-batching", "--cache-prompt", "--cache-reuse", "--enforce-eager", "--async-scheduling", "--attention-backend", "--swa-full", "--kv-unified", "-kvu", "--no-warmup"): (
        _LEFT + "prefixes are kept, prompts are cut into steps and requests share them, always"
    ),
    ("--mlock", "--mmap", "--no-mmap", "--numa", "--swap-space", "--load-format", "--download-dir", "--low-vram"): (
        _LEFT + "weights are read once into the memory of the device; `--runner host-cache-gib=N` keeps more of the cache in host memory"
    ),
    ("--dtype", "--quantization", "--torch-dtype", "--type"): "leave it out: weights are computed with as they are stored; `paddock search` and `paddock pull ORG/REPO:QUANT` choose others",
    ("--trust-remote-code", "--tokenizer", "--tokenizer-mode", "--config-format", "--hf-config-path", "--hf-overrides", "--generation-config", "--rope-scaling", "--rope-freq-base", "--rope-freq-scale", "--rope-theta", "--yarn-orig-ctx"): _OWN,
    ("--speculative-config", "-md", "--model-draft", "--draft", "--draft-max", "--draft-min", "--num-speculative-tokens", "--speculative-model", "--spec-type"): (
        "tokens are guessed from the text by itself; `--runner guesses=mtp` asks the model's own draft layer, `guesses=off` none"
    ),
    ("--lora", "--lora-scaled", "--enable-lora", "--lora-modules", "--adapter", "--control-vector"): "adapters are not served: merge it into the model first",
    ("-mm", "--mmproj", "--limit-mm-per-prompt", "--image", "--audio"): "models take text here, no pictures and no sound",
    ("--no-webui", "--webui", "--path", "--slots", "--no-slots", "--metrics", "--props", "--disable-log-requests", "--disable-log-stats", "--disable-uvicorn-access-log"): (
        _LEFT + "there is no page to turn off, `/metrics` is there for admins, and requests are in the log"
    ),
    ("--uvicorn-log-level", "--log-level", "-lv", "--verbosity", "--log-verbosity", "-v"): "`--runner log-level=debug` says more",
    ("--allowed-origins", "--cors-allow-origins", "--allowed-hosts"): "`--runner allow-origin=ORIGIN` and `--runner allow-host=NAME`, once each",
    ("--timeout-keep-alive", "--timeout-read", "-to"): "`--runner keep-alive-s=N`",
    ("--keep-alive", "--keepalive", "--ttl"): "a server of `paddock run` ends with it; `--keep` leaves it running",
    ("--hidethinking", "--hide-thinking", "--nowordwrap", "--no-display-prompt", "--insecure", "--truncate", "--dimensions"): "leave it out: there is no such choice",
    ("--grammar", "--grammar-file", "-j", "--json-schema", "--json-schema-file", "-jf"): "`--format FILE` holds an answer to a JSON schema; the API takes grammars, too",
    ("--system-prompt-file", "-sysf", "-sys"): "`--system \"$(cat FILE)\"` is the system prompt in a file",
    ("--download", "--offline"): "HF_HUB_OFFLINE=1 touches no network",
}  # fmt: skip


def advice(command: str, option: str) -> str:
    """What is to be said of an option of other programs; "" where it is not known."""
    said = next((text for words, text in ADVICE.items() if option in words), "")
    return said.replace("{command}", command)
