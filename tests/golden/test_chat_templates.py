"""Prompts of real chat templates equal those of transformers, errors included; and those of llama.cpp for the served files."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from paddock_runner.errors import UnsupportedError
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.text.events import gather
from paddock_runner.text.load import load_tokenizer
from paddock_runner.text.reasoning import messages_of
from paddock_runner.text.template import ChatTemplate, TemplateRefused, load_template
from paddock_runner.text.tools import ToolParser, dialect_of

from tests.golden.test_tokenization import SERVED


def _now() -> datetime:
    return datetime(2026, 1, 2, 3, 4, 5)


def test_renders_and_errors_equal_transformers(shared_dir: Path) -> None:
    golden = json.loads((shared_dir / "golden/chat_templates.json").read_text())
    n_renders = n_errors = 0
    for name, case in golden["templates"].items():
        template = ChatTemplate(case["template"], golden["special"], now=_now)
        for kind, wanted in case["renders"].items():
            variables = {"tools": None, "documents": None, **golden["conversations"][kind]}
            if "error" in wanted:
                n_errors += 1
                with pytest.raises((TemplateRefused, UnsupportedError)) as refused:
                    template.render_exact(variables)
                assert refused.value.facts["reason"] == wanted["error"], (name, kind)
            else:
                n_renders += 1
                assert template.render_exact(variables) == wanted["ok"], (name, kind)
    assert (n_renders, n_errors) == (843, 67)


def test_adapting_a_conversation_changes_no_render_that_worked(shared_dir: Path) -> None:
    """`render` (arguments as JSON text, as clients send them) gives what transformers gives for arguments as objects."""
    golden = json.loads((shared_dir / "golden/chat_templates.json").read_text())
    for name, case in golden["templates"].items():
        template = ChatTemplate(case["template"], golden["special"], now=_now)
        if not template.takes_text:
            continue  # transformers gives it text, which it then does not print; we give it the part that it wants
        for kind, wanted in case["renders"].items():
            if "ok" not in wanted:
                continue
            told = json.loads(json.dumps(golden["conversations"][kind]))
            messages, tools, ask = told.pop("messages"), told.pop("tools", None), told.pop("add_generation_prompt")
            for message in messages:
                for call in message.get("tool_calls", []):
                    call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            got = template.render(messages, tools, add_generation_prompt=ask, options=told)
            if "reasoning_content" in case["template"] or kind != "reasoning_history":
                assert got == wanted["ok"], (name, kind)


@pytest.mark.models
@pytest.mark.parametrize("name", SERVED)
def test_prompts_of_the_served_files_equal_llamacpp(name: str, shared_dir: Path, models_dir: Path) -> None:
    path, server = models_dir / SERVED[name], shared_dir / f"golden/{name}.server.json"
    if not path.is_file() or not server.is_file():
        pytest.skip(f"{path.name} or {server.name} is not at hand")
    checkpoint = open_checkpoint(path)
    template = load_template(checkpoint, load_tokenizer(checkpoint))
    if checkpoint.chat_template is None:
        assert not template.exists
        with pytest.raises(UnsupportedError, match=r"no chat template.*v1/completions"):
            template.render([{"role": "user", "content": "hi"}])
        return
    for case in json.loads(server.read_text())["templates"]:
        assert template.render(case["messages"]) == case["prompt"]


def test_every_template_that_writes_a_call_has_a_dialect_that_reads_it(shared_dir: Path) -> None:
    """The call as the template itself writes it into the history: what the model was taught to write."""
    golden = json.loads((shared_dir / "golden/chat_templates.json").read_text())
    schemas = {"get_weather": golden["conversations"]["tools_user"]["tools"][0]["function"]["parameters"]}
    n_read = 0
    for name, case in golden["templates"].items():
        asked, called = (case["renders"][kind].get("ok", "") for kind in ("tools_user", "tool_roundtrip"))
        at = next((i for i, (a, b) in enumerate(zip(asked, called, strict=False)) if a != b), min(len(asked), len(called)))
        written = called[at : called.find('"temp', at)] if "get_weather" in asked else ""
        written = written[: max(written.rfind("{"), written.rfind('"'), 0)] if "get_weather" in written else ""
        dialect = dialect_of(case["template"])
        if not written or dialect is None:
            assert not written or messages_of(case["template"]), name
            continue
        begin = max(0, at - 60)
        text = called[begin : at + len(written)]
        starts = [text.find(m) for m in dialect.starts if m and m in text]
        bare = [i for i in (text.find('{"name"'), text.find('[{"name"')) if i >= 0]
        parser = ToolParser(dialect, schemas)
        answer = gather(parser.push(text[min(starts or bare) :]) + parser.finish())
        assert [(c.name, json.loads(c.arguments)) for c in answer.calls] == [("get_weather", {"city": "Paris", "unit": "c"})], name
        n_read += 1
    assert n_read == 56
