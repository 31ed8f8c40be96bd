"""Makes the tree's boards of what a run of bench/device.sh left: one file a topic, with the commit that ran and a peer's figures of the same run.

Usage: python -m bench.boards FOLDER... --commit C [--date 2026-12-01] [--peer 8b.q8_0=FILE ...] [--note TOPIC=TEXT ...]; then python docs/generate.py
Every board under the folders is taken (a file with machine, command and rows); its topic is its name without a date. Boards of one topic become one:
rows of the same id are the last one's, commands stand one after the other. A board of the same day that is there already, of another commit, is kept
with its commit as a suffix.
--peer MODEL.FORMAT=FILE: llama.cpp on the same card (--llama: what it is called, with its version), a file of JSON lines: llama-bench -o jsonl (one row, prompts)
and llama-batched-bench --output-format jsonl (more rows), one after the other, for the rows of that model and format. --peer FILE: {"peer": its name, "rows": {id of our row: its figure}}.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench import board

Board = dict[str, Any]


def boards_in(folders: Iterable[Path]) -> Iterator[tuple[str, Board]]:
    """(topic, board) of every board under the folders, in the order in which they are named. Raises: SystemExit when a file is cut off."""
    for folder in folders:
        for path in sorted(folder.rglob("*.json")) if folder.is_dir() else [folder]:
            try:
                found = json.loads(path.read_text())
            except ValueError as error:
                raise SystemExit(f"{path} is no JSON: {error}") from None
            if isinstance(found, dict) and {"machine", "command", "rows"} <= found.keys():
                yield path.stem.removeprefix(f"{found.get('date')}-"), found


def merged(one: Board, more: Board) -> Board:
    """Two boards of one topic."""
    new = {row["id"] for row in more["rows"]}
    commands = list(dict.fromkeys([*one["command"].split("; "), more["command"]]))
    rows = [row for row in one["rows"] if row["id"] not in new] + more["rows"]
    return one | {"command": "; ".join(commands), "context": one["context"] | more["context"], "rows": rows}


Peers = dict[str, tuple[str, float]]
"""By row id: whose figure, and the figure."""


def peers_of(word: str, machine: str, llama: str) -> Peers:
    """Figures of --peer's word; llama: that program's name. Raises: SystemExit when the file is not what it should be."""
    model, is_llama, file = word.rpartition("=")
    if is_llama:
        return {id: (llama, value) for id, value in llama_rows(model, Path(file), machine).items()}
    try:
        told = json.loads(Path(file).read_text())
        return {id: (str(told["peer"]), float(value)) for id, value in told["rows"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemExit(f'{file} is not {{"peer": name, "rows": {{id: figure}}}} ({error!r})') from None


def llama_rows(model: str, path: Path, machine: str) -> dict[str, float]:
    """Tokens a second of llama.cpp, by row id. Raises: SystemExit when a line is of neither program."""
    found: dict[str, float] = {}
    for line in filter(str.strip, path.read_text().splitlines()):
        try:
            told = json.loads(line)
            if "speed_tg" in told:
                if told["pl"] > 1:  # one row is llama-bench's
                    found[f"{machine}.decode.{model}.b{told['pl']}"] = told["speed_tg"]
            elif told["n_gen"] and not told["n_prompt"]:
                found[f"{machine}.decode.{model}.b1"] = told["avg_ts"]
            elif told["n_prompt"] and not told["n_gen"]:
                found[f"{machine}.prefill.{model}.{told['n_prompt']}"] = told["avg_ts"]
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path}: {line[:80]!r} is neither llama-bench's nor llama-batched-bench's ({error!r})") from None
    return found


def with_peer(row: dict[str, Any], peers: Peers) -> dict[str, Any]:
    """The row with the peer's figure beside it, where there is one."""
    if row["id"] not in peers:
        return row
    (peer, theirs), value = peers[row["id"]], row["value"]
    return row | {"peer": peer, "peer_value": round(theirs, 1), "vs_peer": round(value / theirs if row["better"] == "higher" else theirs / value, 4)}


def put(made: Board, topic: str) -> tuple[Path, dict[str, Any]]:
    """Writes one board; its path, and the values of the board that stood there by row id. One of another commit keeps its own name."""
    path = board.ROOT / "bench/results" / made["machine"] / f"{made['date']}-{topic}.json"
    before: dict[str, Any] = {}
    if path.exists():
        there = json.loads(path.read_text())
        before = {row["id"]: row["value"] for row in there["rows"]}
        if there["commit"] != made["commit"]:
            path.rename(path.with_stem(f"{path.stem}-{there['commit']}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made, indent=1) + "\n")
    return path, before


def table(made: Board, before: dict[str, Any]) -> str:
    """Rows for people: value, the value before, shares."""
    lines = []
    for row in made["rows"]:
        was = f"{row['value'] / before[row['id']]:7.3f} x" if before.get(row["id"]) else " " * 9
        lines.append(f"{row['id']:52} {row['value']:12.3f} {row['unit']:10} {was}" + "".join(f"  {k} {row[k]:.3f}" for k in ("of_limit", "vs_peer") if k in row) + "\n")
    return "".join(lines)


def pairs(words: list[str]) -> dict[str, str]:
    """Texts of --note by topic. Raises: SystemExit."""
    if wrong := [word for word in words if "=" not in word]:
        raise SystemExit(f"--note is TOPIC=TEXT, not {wrong[0]}")
    return dict(word.split("=", 1) for word in words)


def main() -> None:
    """Collects, writes, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--commit", required=True, help="of the tree that ran")
    parser.add_argument("--date", default="", help="of the run (default: what the boards say)")
    parser.add_argument("--peer", nargs="*", default=[], metavar="[MODEL.FORMAT=]FILE")
    parser.add_argument("--llama", default="llama.cpp", metavar="NAME", help="the name, with its version, that llama.cpp's figures bear")
    parser.add_argument("--note", nargs="*", default=[], metavar="TOPIC=TEXT")
    a = parser.parse_args()
    notes, peers = pairs(a.note), Peers()
    topics: dict[str, Board] = {}
    for topic, found in boards_in(a.folders):
        topics[topic] = merged(topics[topic], found) if topic in topics else found
    if not topics:
        raise SystemExit(f"no boards in {' '.join(map(str, a.folders))}")
    if unknown := notes.keys() - topics.keys():
        raise SystemExit(f"no board of {' '.join(sorted(unknown))}: there are {' '.join(sorted(topics))}")
    machine = next(iter(topics.values()))["machine"]
    for word in a.peer:
        peers |= peers_of(word, machine, a.llama)
    n_beside = 0
    for topic, found in sorted(topics.items()):
        made = found | {"date": a.date or found.get("date") or datetime.date.today().isoformat(), "commit": a.commit, "rows": [with_peer(row, peers) for row in found["rows"]]}
        if topic in notes:
            made["context"] = made["context"] | {"note": notes[topic]}
        n_beside += sum(row["id"] in peers for row in made["rows"])
        path, before = put(made, topic)
        sys.stdout.write(f"\n{path.relative_to(board.ROOT)}: {len(made['rows'])} rows\n{table(made, before)}")
    if n_beside < len(peers):
        sys.stdout.write(f"\n{len(peers) - n_beside} of {len(peers)} figures of the peer have no row\n")


if __name__ == "__main__":
    main()
