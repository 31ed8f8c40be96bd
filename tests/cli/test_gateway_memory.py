"""The gateway over real runners: three models that share the memory of one, interleaved requests, and memory that comes back."""

from __future__ import annotations

import json
import threading
import time
import urllib.request

import psutil
import pytest
from paddock_manager.fleet import state
from paddock_manager.paths import places

from tests import tiny_gguf

pytestmark = pytest.mark.usefixtures("stopped")


def ask(server, key, model):
    body = json.dumps({"model": model, "max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": "abc"}]}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(server["url"] + "/v1/chat/completions", body, headers), timeout=120) as answer:
        return json.load(answer)["usage"]["completion_tokens"]


def held():
    """Bytes that the gateway's runners hold (proportional set size of all their processes)."""
    total = 0
    for server in [s for s in state.servers(places()) if s.asked.get("by")]:
        try:
            runner = psutil.Process(server.pid)
            total += sum(process.memory_full_info().pss for process in (runner, *runner.children(recursive=True)))
        except psutil.Error:
            continue  # it ended meanwhile
    return total


def loaded():
    return {s.name for s in state.servers(places()) if s.asked.get("by")}


def test_three_models_share_the_budget_of_one_no_request_is_lost_and_memory_comes_back(paddock, tmp_path):
    names = ("red", "green", "blue")
    paths = [str(tiny_gguf.write(tmp_path / f"{name}.gguf")) for name in names]
    flags = ("--ctx", "128", "--batch", "2", "--device", "cpu", "--threads", "1")
    need = paddock("fit", paths[0], *flags[:2], "--batch", "2", "--device", "cpu", "--threads", "1", "--json").json["reports"][0]["plan"]["peak_bytes"]
    done = paddock("serve", *paths, *flags, "--budget", str(int(1.5 * need)), "--idle", "1.5", "--port", "0", "--json")
    assert done.code == 0, done.err
    server, key = done.json["server"], paddock("key").out.strip()
    assert held() == 0
    found, most = [], [0, 0]
    order = [*names, *names]
    threads = [threading.Thread(target=lambda name=name: found.append((name, ask(server, key, name)))) for name in order]
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads):
        most = [max(most[0], held()), max(most[1], len(loaded()))]
        threads[0].join(0.05)
    assert sorted(found) == sorted((name, 4) for name in order)
    assert most[0] > 0 and most[1] == 1  # never two at once: the budget holds one
    limit = time.monotonic() + 30
    while loaded() and time.monotonic() < limit:
        threading.Event().wait(0.05)
    assert loaded() == set() and held() == 0
    log = "\n".join(paddock("logs", server["name"], "-n", "100", "--json").json["lines"])
    assert log.count("evicting") >= 2 and "idle for" in log
    assert ask(server, key, "red") == 4  # and it is loaded again when it is asked for
