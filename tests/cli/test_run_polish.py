"""Files with the prompt, and Markdown on a terminal."""

from __future__ import annotations

import itertools

import pytest
from paddock_manager.commands import chat
from paddock_manager.commands.markdown import BOLD, CODE, DIM, HEADING, RESET, Markdown

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
    assert chat.attachment(str(path)) == "notes.txt:\n````\ntide ```x``` table\n````"
    done = paddock("run", str(model_file), "-f", str(path), "--file", str(path), "Summarise")
    assert done.code == 0 and done.out.count("notes.txt:") == 2 and done.out.rstrip().endswith("Summarise")


def test_file_that_is_no_text_is_exit_12_and_one_that_is_not_there_exit_2(paddock, model_file, tmp_path):
    path = tmp_path / "sea.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    done = paddock("run", str(model_file), "-f", str(path), "What is this?")
    assert done.code == 12 and "text only" in done.err
    assert paddock("run", str(model_file), "-f", str(tmp_path / "no"), "x").code == 2


def test_pipes_get_the_answer_as_it_is(paddock, model_file):
    done = paddock("run", str(model_file), "**bold** `code`")
    assert done.out == "1: **bold** `code`\n"


def test_terminal_gets_it_styled(paddock, model_file, monkeypatch):
    import sys

    from paddock_manager import paths

    monkeypatch.setattr(paths, "may_color", lambda: True)
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True, raising=False)
    done = paddock("run", str(model_file), "**bold**")
    assert done.out.startswith(f"1: {BOLD}bold{RESET}")
