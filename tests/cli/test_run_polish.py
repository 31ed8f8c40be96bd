"""Files with the prompt, and Markdown on a terminal."""

from __future__ import annotations

import fnmatch
import itertools
import sys
from pathlib import Path

import pytest
from paddock_manager.catalog import catalog
from paddock_manager.commands import files, sampling, target
from paddock_manager.commands.markdown import BOLD, CODE, DIM, HEADING, RESET, Markdown
from paddock_manager.fleet import keys
from paddock_manager.paths import places

from tests.checkpoint_bytes import LLAMA, gguf_model, llama_shapes

pytestmark = pytest.mark.usefixtures("fake_runner")

TEXT = "# Sea\nIt is **very** wide, `2**3` and 3 * 4.\n\n- one\n  * two\n```python\n# not a heading\nx = a ** b\n```\n*end*"
SHOWN = (
    f"{HEADING}Sea{RESET}\nIt is {BOLD}very{RESET} wide, {CODE}2**3{RESET} and 3 * 4.{{reset}}\n\n• one\n  • two\n{DIM}```python{RESET}\n{CODE}# not a heading\n"
    f"x = a ** b\n{RESET}{DIM}```{RESET}\n*end*{RESET}"
).replace("{reset}", "")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_markdown_is_the_same_however_it_comes(size):
    style = Markdown()
    out = "".join(style.feed("".join(part)) for part in itertools.batched(TEXT, size)) if hasattr(itertools, "batched") else "".join(style.feed(TEXT[i : i + size]) for i in range(0, len(TEXT), size))
    assert out + style.end() == SHOWN


def test_nothing_of_an_answer_is_lost_but_marks():
    for text in ("a*", "**", "`", "``", "#", "#x", "- ", "```", "```\nx", "***", "1. one\n2. two", "a `b", "**bold"):
        style = Markdown()
        shown = style.feed(text) + style.end()
        bare = shown
        for code in (RESET, BOLD, CODE, DIM, HEADING):
            bare = bare.replace(code, "")
        assert [c for c in bare if c.isalnum()] == [c for c in text if c.isalnum()], text


def test_plain_words_are_shown_at_once():
    style = Markdown()
    assert style.feed("Hello wor") == "Hello wor" and style.feed("ld") == "ld"


def test_files_go_before_the_prompt_and_say_their_names(paddock, model_file, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("tide ```x``` table\n")
    assert files.attachment(str(path), "m") == "notes.txt:\n````\ntide ```x``` table\n````"
    done = paddock("run", str(model_file), "-f", str(path), "--file", str(path), "Summarise")
    assert done.code == 0 and done.out.count("notes.txt:") == 2 and done.out.rstrip().endswith("Summarise")


def pdf(text: str) -> bytes:
    """A PDF of one page that says this."""
    stream = f"BT /F1 24 Tf 72 700 Td ({text}) Tj ET" if text else ""
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>", "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
        f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream", "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]  # fmt: skip
    out, offsets = "%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n"
    table = "".join(f"{at:010} 00000 n \n" for at in offsets)
    return f"{out}xref\n0 6\n0000000000 65535 f \n{table}trailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n{len(out)}\n%%EOF\n".encode()


KINDS = {
    "sea.png": (b"\x89PNG\r\n\x1a\n\0\0", "an image"), "sea.jpg": (b"\xff\xd8\xff\xe0\0\x10JFIF", "an image"), "sea.webp": (b"RIFF\0\0\0\0WEBPVP8 ", "an image"),
    "sea.wav": (b"RIFF\0\0\0\0WAVEfmt ", "a sound"), "sea.mp4": (b"\0\0\0\x18ftypmp42", "a film or image"), "sea.docx": (b"PK\3\4\x14\0", "an archive or office file"),
    "sea.bin": (b"ab\0c", "a binary file"), "sea.txt": (b"Stra\xdfe am Meer", "in no encoding that can be told"),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_file_that_the_model_cannot_read_is_named_for_what_it_is(paddock, model_file, tmp_path, name):
    data, kind = KINDS[name]
    (tmp_path / name).write_bytes(data)
    done = paddock("run", str(model_file), str(tmp_path / name), "What is this?")
    assert done.code == 12 and f"{name} is {kind}, and {model_file} takes text only" in done.err


def test_file_that_is_not_there_and_a_folder_are_exit_2(paddock, model_file, tmp_path):
    for words, says in ((("-f", str(tmp_path / "no")), "No such file"), ((f"@{tmp_path}/no",), "there is no such file"), ((f"@{tmp_path}",), "is a folder")):
        done = paddock("run", str(model_file), *words, "x")
        assert done.code == 2 and says in done.err


def test_words_that_are_files_go_before_the_prompt_and_that_is_said(paddock, model_file, tmp_path, monkeypatch):
    (tmp_path / "main.py").write_text("print(1)\n")
    (tmp_path / "README").write_text("Read me.\n")
    monkeypatch.chdir(tmp_path)
    done = paddock("run", str(model_file), "main.py", "@README", "What", "does README say?")
    assert done.out == "1: main.py: ``` print(1) ``` README: ``` Read me. ``` What does README say?\n"
    assert "with the prompt: main.py, README" in done.err
    assert paddock("run", str(model_file), "Compare @README, @main.py and @alice").out.startswith("1: README: ``` Read me. ``` main.py: ")
    assert "there is no file docs/no.md: it goes to the model as a word" in paddock("run", str(model_file), "docs/no.md", "and/or", "3/4").err
    assert files.missing(["a/b.md", "and/or", "https://x.y/z.html", "Is a/b.md right?", "./x", "../."]) == ["a/b.md"]
    assert files.split(["3.5", "a/b", "x.y z", "README", "@", "@ b"]) == ([], ["3.5", "a/b", "x.y z", "README", "@", "@ b"])


def test_pdf_is_read_page_by_page(paddock, model_file, tmp_path):
    path = tmp_path / "sea.pdf"
    path.write_bytes(pdf("The sea is wide."))
    assert paddock("run", str(model_file), str(path), "So?").out == "1: sea.pdf: ``` [page 1] The sea is wide. ``` So?\n"
    path.write_bytes(pdf(""))
    done = paddock("run", str(model_file), str(path), "So?")
    assert done.code == 12 and "holds no text: its 1 page(s) are pictures" in done.err
    path.write_bytes(b"%PDF-1.4\nnothing")
    assert paddock("run", str(model_file), str(path), "So?").code == 7


def test_pdf_without_its_reader_says_what_to_install(paddock, model_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    (tmp_path / "sea.pdf").write_bytes(pdf("x"))
    done = paddock("run", str(model_file), str(tmp_path / "sea.pdf"), "So?")
    assert done.code == 12 and 'pip install "paddock[pdf]"' in done.err


def test_pipes_get_the_answer_as_it_is(paddock, model_file):
    done = paddock("run", str(model_file), "**bold** `code`")
    assert done.out == "1: **bold** `code`\n"


def test_terminal_gets_it_styled(paddock, model_file, monkeypatch):
    from paddock_manager import paths

    monkeypatch.setattr(paths, "may_color", lambda: True)
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True, raising=False)
    done = paddock("run", str(model_file), "**bold**")
    assert done.out.startswith(f"1: {BOLD}bold{RESET}")


def test_answer_does_not_drive_the_terminal_and_is_as_it_is_in_a_pipe(paddock, model_file, monkeypatch):
    odd = "a\x1b]52;c;x\x07b\x9b1mc \U0001f468\u200d\U0001f469"
    assert paddock("run", str(model_file), odd).out == f"1: {odd}\n"
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True, raising=False)
    assert paddock("run", str(model_file), odd).out == "1: a]52;c;xb1mc \U0001f468\u200d\U0001f469\n"


def asked(path: Path) -> dict[str, object]:
    """The sampling that a run of that checkpoint asks for."""
    return sampling.recommended(target.of_path(path))


def test_makers_recommendation_is_asked_for_where_nobody_chose(paddock, model_file, tmp_path, models_dir):
    assert catalog.sampling("qwen3-8b") == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert catalog.sampling("qwen3-4b-2507")["top_p"] == 0.8 and catalog.sampling("qwen3-4b-thinking-2507")["top_p"] == 0.95
    assert catalog.sampling("all-minilm-l6") == {} and catalog.sampling("qwen3-mine") == {}
    for pattern in catalog._sampling():
        assert fnmatch.filter(catalog.entries(), pattern), pattern
    alias = model_file.rename(tmp_path / "smollm2-135m.gguf")
    done = paddock("run", str(alias), "hi", "--temperature", "0", "--json")
    assert done.json["settings"] == {"temperature": 0.0, "top_p": 0.9}


@pytest.mark.parametrize(
    "text, settings",
    [
        ('{"do_sample": true, "temperature": 0.6, "top_p": 0.95, "top_k": 20}', {"temperature": 0.6, "top_p": 0.95, "top_k": 20}), ('{"temperature": 1}', {"temperature": 1.0}),
        ('{"do_sample": false, "temperature": 0.6}', {"temperature": 0.0}), ("{}", {}), ("[]", {}), ("{", {}), ('{"temperature": "x", "top_k": -1, "top_p": true}', {}),
    ],
)  # fmt: skip
def test_checkpoints_own_recommendation_counts_where_the_catalog_has_none(tmp_path, text, settings):
    (tmp_path / "generation_config.json").write_text(text)
    assert asked(tmp_path) == settings
    (tmp_path / "generation_config.json").unlink()
    assert asked(tmp_path) == {}


def test_gguf_may_say_how_it_is_sampled(tmp_path):
    said = {"general.sampling.temp": 0.5, "general.sampling.top_k": 7, "general.sampling.top_p": 3.0}
    (tmp_path / "m.gguf").write_bytes(gguf_model({**LLAMA, **said}, llama_shapes()))
    assert asked(tmp_path / "m.gguf") == {"temperature": 0.5, "top_k": 7}
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert asked(tmp_path / "m.gguf") == {}


def test_answer_may_be_held_to_a_shape_and_what_has_no_effect_is_said(paddock, model_file, tmp_path):
    shape = tmp_path / "shape.json"
    shape.write_text('{"type": "object"}')
    asked = sampling.given({"format": str(shape), "think": "low", "temperature": 0.5})
    assert asked["response_format"]["json_schema"]["schema"] == {"type": "object"} and asked["reasoning_effort"] == "low"
    assert sampling.given({"format": "json"}) == {"response_format": {"type": "json_object"}}
    done = paddock("run", str(model_file), "hi", "--think", "none")
    assert done.out == "1: hi\n" and "warning: without effect on this model: reasoning_effort\n" in done.err
    shape.write_text("[" * 100_000)
    for word, said in ((str(shape), f"{shape} is no JSON: "), (f"{tmp_path}/none", f"{tmp_path}/none: No such file or directory")):
        done = paddock("run", str(model_file), "hi", "--format", word)
        assert done.code == 7 and f"error: {said}" in done.err and "--format takes json, or a file" in done.err


def test_raw_prompt_goes_as_it_is_without_the_template(paddock, model_file, monkeypatch):
    assert paddock("run", str(model_file), "--raw", "Once upon").out == "[Once upon]\n"
    done = paddock("run", str(model_file), "--raw", "Once", "--json").json
    assert (done["answer"], done["finish_reason"]) == ("[Once]", "stop")
    for more in (["--system", "x"], ["--think", "low"]):
        assert f"--raw and {more[0]} do not go together" in paddock("run", str(model_file), "--raw", "x", *more).err
    assert "--raw needs a prompt" in paddock("run", str(model_file), "--raw").err


def test_server_with_other_keys_is_told_so(paddock, model_file):
    assert paddock("serve", str(model_file), "--port", "0", "--name", "m").code == 0
    paddock("key", "--new")
    assert paddock("run", str(model_file), "hi").code == 0
    keys.server_file(places()).write_text(f"sha256:{'0' * 64} admin somebody\n")
    done = paddock("run", str(model_file), "hi")
    assert done.code == 2 and "hint:  m was started with other keys: `paddock stop m`, then start it again\n" in done.err
