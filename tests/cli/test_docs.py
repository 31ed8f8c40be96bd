"""Every `paddock …` line in README and docs is a command line that Paddock accepts."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
from paddock_manager import cli, options

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *(page for folder in ("tutorial", "howto", "explanation") for page in sorted((ROOT / "docs" / folder).glob("*.md")))]


def command_lines() -> list[object]:
    """(page, words) of every command line in a shell block, and of every one in a sentence."""
    out = []
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"```(?:sh|bash)?\n(.*?)```", text, re.DOTALL)
        inline = re.findall(r"`(paddock [^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        for block in [*blocks, *inline]:
            for line in block.replace("\\\n", " ").splitlines():
                for found in re.findall(r"(?:^|&& |\$\()(?:\S*/)?paddock ([^)&|]*)", line.split(" #")[0]):
                    words = shlex.split(found.split(" < ")[0])
                    out.append(pytest.param(words, id=f"{page.stem}: {' '.join(words)}"))
    return out


@pytest.mark.parametrize("words", command_lines())
def test_command_line_in_the_docs_is_accepted(words):
    assert words[0] in cli.COMMANDS
    if len(words) == 1:
        return  # a sentence names the command
    command = importlib.import_module(f"paddock_manager.commands.{words[0]}").COMMAND
    options.parse(command, words[1:])
