"""Writes the help pages that test_cli compares. Usage: python -m tests.cli.snapshots"""

from __future__ import annotations

from pathlib import Path

from paddock_manager.commands.completion import all_commands
from paddock_manager.options import help_page

FOLDER = Path(__file__).parent / "snapshots"

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for command in all_commands():
        (FOLDER / f"{command.name}.txt").write_text(help_page(command) + "\n")
