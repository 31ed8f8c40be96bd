"""paddock version: versions of Paddock and of what it stands on."""

from __future__ import annotations

import platform

from paddock_runner.version import our_version, version_of

from paddock_manager.options import Command, Values
from paddock_manager.ui import Ui

COMMAND = Command("version", "Print versions of Paddock and of what it stands on.")
PARTS = ("numpy", "tokenizers", "jinja2", "uvicorn", "httpx")


def run(values: Values, ui: Ui) -> int:
    """Print them."""
    from paddock_runner import __file__ as runner

    body = {
        "paddock": our_version(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    parts = {name: version_of(name) or "not installed" for name in PARTS}
    ui.result(
        "version",
        {**body, "packages": parts, "runner": str(runner)},
        lambda u: u.pairs([*body.items(), *parts.items()]),
    )
    return 0
