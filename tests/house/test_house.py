"""The house rules, as tests. A rule that is not checked here is advice, not a rule."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = {"paddock_runner": ROOT / "runner/paddock_runner", "paddock_manager": ROOT / "manager/paddock_manager"}

# room -> rooms it may import. A name with a dot is a room of the other package. None: may import everything.
MAY_IMPORT: dict[str, dict[str, set[str] | None]] = {
    "paddock_runner": {
        "errors": set(), "version": set(), "config": set(), "log": {"config"}, "files": {"formats"}, "formats": set(),
        "blueprint": {"files", "formats"}, "memory": {"formats", "blueprint", "files"}, "pack": {"config", "formats", "manifest"},
        "model": {"files", "formats", "blueprint", "pack"}, "cache": {"pack"}, "wire": set(),
        "engine": {"config", "log", "files", "blueprint", "memory", "pack", "model", "cache", "wire"},
        "text": {"files", "blueprint", "config"}, "media": {"files", "blueprint", "config"},
        "turns": {"log", "text", "media", "wire"}, "edge": set(), "front": {"config", "version", "log", "turns", "text", "media", "edge"},
        "app": None, "cli": None, "__main__": None,
    },
    "paddock_manager": {
        "ui": set(), "paths": set(), "options": set(), "foreign": set(), "disk": set(), "settings": {"disk", "options"}, "catalog": {"paths"},
        "store": {"paths", "disk", "catalog", "runner.files"}, "fleet": {"paths", "disk"},
        "fit": {"paths", "disk", "catalog", "store", "runner.hardware", "runner.manifest", "runner.files", "runner.formats", "runner.blueprint", "runner.memory"},
        "web": {"paths", "disk", "catalog", "store", "fleet", "fit", "runner.edge", "runner.version"},
        "commands": {"ui", "paths", "options", "disk", "settings", "catalog", "store", "fleet", "fit", "web", "runner.files", "runner.edge", "runner.version"}, "cli": None, "__main__": None,
    },
}  # fmt: skip
EVERYWHERE = {"errors", "runner.errors"}
MAX_LINES, MAX_FUNCTION, MAX_PARAMS = 500, 80, 8
MAX_NATIVE_LINES = {".cu": 800, ".cuh": 800, ".cpp": 800, ".h": 800}
ENV_READERS = {"paddock_runner/config.py", "paddock_manager/paths.py"}
PRINTERS = {"paddock_manager/ui.py", "paddock_runner/cli.py"}
GENERATED = {"paddock_runner/pack/abi.py"}
BAD_NAMES = {"utils", "helpers", "common", "misc", "base", "manager", "handler"}


def files():
    for name, root in PACKAGES.items():
        for path in sorted(root.rglob("*.py")):
            rel = path.relative_to(root)
            yield pytest.param(name, path, rel, id=f"{name}/{rel}")


def room(rel):
    return rel.parts[0].removesuffix(".py")


def imports(tree, package, rel):
    """Every (package, room, line) that a file imports from this repository."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            start = list(rel.parts[:-1])[: len(rel.parts) - node.level]
            tails = [node.module.split(".")] if node.module else [[a.name] for a in node.names]
            for tail in tails:
                yield package, (start + tail)[0], node.lineno
        else:
            names = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for n in names:
                head, *rest = (n or "").split(".")
                if head in PACKAGES:
                    yield head, rest[0] if rest else "", node.lineno


def faults_of_imports(tree, package, rel):
    allowed = MAY_IMPORT[package].get(room(rel), set()) if room(rel) != "__init__" else set()
    for target_package, target, line in imports(tree, package, rel):
        key = target if target_package == package else f"{target_package.removeprefix('paddock_')}.{target}"
        is_own = target_package == package and target == room(rel)
        if allowed is not None and target and not is_own and key not in allowed | EVERYWHERE:
            yield f"line {line}: {room(rel)} may not import {key}"


def faults_of_nodes(tree, name):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if (n := node.end_lineno - node.lineno + 1) > MAX_FUNCTION:
                yield f"line {node.lineno}: {node.name} has {n} lines, at most {MAX_FUNCTION}"
            if (n := len(node.args.args) + len(node.args.kwonlyargs)) > MAX_PARAMS:
                yield f"line {node.lineno}: {node.name} takes {n} parameters, at most {MAX_PARAMS}"
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and name not in ENV_READERS:
            yield f"line {node.lineno}: reads the environment; add a field to Config instead"
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}"
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print" and name not in PRINTERS:
            yield f"line {node.lineno}: print; use log, or ui in the manager"


@pytest.mark.parametrize("package, path, rel", list(files()))
def test_file_keeps_the_rules(package, path, rel):
    name, text = f"{package}/{rel.as_posix()}", path.read_text()
    if name in GENERATED or (rel.name == "__init__.py" and not text.strip()):
        return
    tree = ast.parse(text)
    wrong = [*faults_of_imports(tree, package, rel), *faults_of_nodes(tree, name)]
    if text.count("\n") > MAX_LINES:
        wrong.append(f"{text.count(chr(10))} lines, at most {MAX_LINES}")
    if not ast.get_docstring(tree):
        wrong.append("no module docstring: say in one line what this file answers for")
    if rel.stem in BAD_NAMES:
        wrong.append(f"{rel.stem} says nothing about what is inside")
    assert not wrong, f"{name}\n  " + "\n  ".join(wrong)


@pytest.mark.parametrize("path", [p for p in sorted((ROOT / "packs").rglob("*")) if p.suffix in MAX_NATIVE_LINES], ids=lambda p: str(p.relative_to(ROOT)))
def test_native_file_is_not_too_long_and_reads_no_environment(path):
    text = path.read_text()
    assert text.count("\n") <= MAX_NATIVE_LINES[path.suffix]
    assert "getenv" not in text


def test_every_family_file_is_short():
    long = {p.name: n for p in (PACKAGES["paddock_runner"] / "blueprint/families").glob("*.py") if (n := p.read_text().count("\n")) > 150}
    assert not long


def test_test_files_outside_packages_have_names_of_their_own():
    """pytest imports them by their bare names: two of one name cannot be collected together."""
    bare = [path.name for path in sorted((ROOT / "tests").rglob("test_*.py")) if not (path.parent / "__init__.py").exists()]
    assert sorted(set(bare)) == sorted(bare), "of one name: " + ", ".join(sorted({name for name in bare if bare.count(name) > 1}))


def test_generated_abi_is_fresh():
    result = subprocess.run([sys.executable, str(ROOT / "packs/bindgen.py"), "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_links_between_documents_are_alive():
    dead = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if not page.exists():
            continue
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target and not target.startswith("mailto:") and not (page.parent / target).exists():
                dead.append(f"{page.relative_to(ROOT)}: {target}")
    assert not dead


def test_no_machine_paths_or_secrets_are_committed():
    pattern = re.compile(r"/" + r"work/(main|shared|venv|models)|/" + r"root/")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    bad = []
    for name in tracked:
        path = ROOT / name
        if path.is_file() and path.suffix in {".py", ".md", ".toml", ".cpp", ".h", ".cu", ".cuh", ".sh", ".json", ".txt", ""} and path.stat().st_size < 2_000_000:
            if pattern.search(path.read_text(errors="replace")):
                bad.append(name)
            assert path.stat().st_size < 2_000_000
    assert not bad


def test_ci_runs_the_two_commands_of_the_readme():
    commands = re.findall(r"```sh\n(.*?)\n```", (ROOT / "README.md").read_text(), re.S)[:2]
    script = (ROOT / ".ci/run").read_text().splitlines()
    assert len(commands) == 2
    assert [c for c in commands if c not in script] == []
