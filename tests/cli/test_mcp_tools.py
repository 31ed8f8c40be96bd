"""`paddock run --mcp`: tools of real MCP servers (standard streams and streamable HTTP), called only with the user's consent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from paddock_manager.commands.chat import KEPT
from paddock_manager.fleet.mcp import McpError, Toolbox, ToolServer, read_servers
from paddock_runner.errors import FileError, UsageError

from tests.cli.test_fleet_commands import chat_with
from tests.conformance.live import KEY, live

pytest.importorskip("mcp")
pytestmark = pytest.mark.usefixtures("fake_runner")
SCRIPT = Path(__file__).parent.parent / "fakes" / "mcp_server.py"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps({"mcpServers": {"adder": {"command": sys.executable, "args": [str(SCRIPT)]}, "off": {"command": "nothing", "disabled": True}}}))
    return path


def test_the_model_calls_tools_with_the_users_consent(paddock: Any, model_file: Path, config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    lines = ["/tools", 'use add {"a": 2, "b": 3}', "y", 'use add {"a": 2, "b": 4}', "n", 'use fail {"a": 1}', "a", 'use fail {"a": 2}', "use nothing {}", "use add nonsense", f"/save {saved}", f"/load {saved}", "/retry"]
    chat_with(monkeypatch, lines)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    done = paddock("run", str(model_file), "--mcp", str(config))
    assert done.code == 0, done.err
    assert "adder" in done.out and "\x1b[31m" not in done.out
    assert 'The model wants to call add of adder with {"a": 2, "b": 3}' in done.err
    assert "3: 5\n" in done.out and "The user did not allow this call." in done.out
    assert done.err.count("The model wants to call fail") == 1 and "Error: it broke" in done.out
    assert "there is no tool nothing" in done.out and "the arguments are no JSON object" in done.out
    messages = json.loads(saved.read_text())["messages"]
    assert [m["role"] for m in messages[:4]] == ["user", "assistant", "tool", "assistant"] and set(messages[1]) <= set(KEPT)
    assert done.err.count("turns from") == 1 and done.out.count("the arguments are no JSON object") == 2


def test_one_shot_calls_only_what_was_allowed_before(paddock: Any, model_file: Path, config: Path) -> None:
    done = paddock("run", str(model_file), 'use add {"a": 20, "b": 3}', "--mcp", str(config), "--mcp-allow", "add", "--json")
    assert done.code == 0 and done.json["answer"] == "3: 23"
    refused = paddock("run", str(model_file), 'use add {"a": 20, "b": 3}', "--mcp", str(config))
    assert refused.code == 0 and "The user did not allow this call." in refused.out and "--mcp-allow add" in refused.err


def test_a_runners_own_tools_come_over_http() -> None:
    with live() as server:
        box = Toolbox([ToolServer("paddock", url=server.url + "/mcp", headers={"Authorization": f"Bearer {KEY}"})])
        try:
            assert "count_tokens" in box.tools
            text, is_error = box.call("count_tokens", {"text": "the thing"})
            assert not is_error and json.loads(text) == {"tokens": len(server.tokenizer.encode("the thing"))}
            assert box.call("nothing", {})[1] and box.call("generate", {"prompt": 5})[1]
        finally:
            box.close()


def test_long_results_are_cut_and_say_so_and_a_server_that_does_not_start_is_named() -> None:
    box = Toolbox([ToolServer("adder", sys.executable, (str(SCRIPT),))])
    try:
        text, _ = box.call("shout", {"a": 1, "b": 2})
        assert len(text) < 70_000 and text.endswith("(cut: the result has 100000 characters)")
    finally:
        box.close()
    with pytest.raises(McpError, match="the MCP server 'gone' cannot be used") as failed:
        Toolbox([ToolServer("gone", sys.executable, ("-c", "import sys; sys.exit('no such thing')"))])
    assert "no such thing" in failed.value.hint
    with pytest.raises(McpError, match="'nowhere'"):
        Toolbox([ToolServer("nowhere", "/nonexistent/program")])


@pytest.mark.parametrize("text, message", [("{", "tools.json"), ("{}", "names no servers"), ('{"mcpServers": {"a": {}}}', "command or a url"), ('{"mcpServers": {"a": {"command": "x", "args": "y"}}}', "args"), ('{"mcpServers": {"a": {"command": "x", "env": {"a": 1}}}}', "env")])
def test_a_wrong_configuration_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tools.json"
    path.write_text(text)
    with pytest.raises((FileError, UsageError), match=message):
        read_servers(str(path))
