"""Every `paddock …` line in README and docs is a command line that Paddock accepts."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
from paddock_manager import cli, options

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("tutorial/*.md")), *sorted((ROOT / "docs").glob("howto/*.md"))]


def command_lines() -> list[object]:
    """(page, words) of every command line in a shell block."""
    out = []
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                for found in re.findall(r"(?:^|&& |\$\()(?:\S*/)?paddock ([^)&|]*)", line.split(" #")[0]):
                    words = shlex.split(found.split(" < ")[0])
                    out.append(pytest.param(words, id=f"{page.stem}: {' '.join(words)}"))
    return out


@pytest.mark.parametrize("words", command_lines())
def test_command_line_in_the_docs_is_accepted(words):
    assert words[0] in cli.COMMANDS
    command = importlib.import_module(f"paddock_manager.commands.{words[0]}").COMMAND
    options.parse(command, words[1:])
