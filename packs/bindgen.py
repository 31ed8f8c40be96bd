"""Turn pack.h, rare.h, copies.h, cold.h and beside.h (a restricted C subset) into abi.py: ctypes structs, enums, prototypes and a digest; and into docs/reference/pack.md.

The subset: #define PK_NAME int, typedef enum, typedef struct (opaque or with fields), PK_API prototypes.
Anything else in the header is an error that quotes it, so the header stays readable by people and by this file.
Usage: python packs/bindgen.py [--check]  (writes, or only compares, the generated files)
"""

from __future__ import annotations

import hashlib
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADERS = (ROOT / "packs/pack.h", ROOT / "packs/rare.h", ROOT / "packs/copies.h", ROOT / "packs/cold.h", ROOT / "packs/beside.h")
OUTPUTS = {
    "abi": ROOT / "runner/paddock_runner/pack/abi.py",
    "digest": ROOT / "packs/pack_digest.h",
    "docs": ROOT / "docs/reference/pack.md",
}
SCALAR = {
    "int32_t": "c_int32", "uint32_t": "c_uint32", "int64_t": "c_int64", "uint64_t": "c_uint64",
    "float": "c_float", "double": "c_double", "uint8_t": "c_uint8", "char": "c_char",
}  # fmt: skip
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
DECL = re.compile(
    r"typedef enum (?P<enum>\w+) \{(?P<items>[^}]*)\} (?P=enum);"
    r"|typedef struct (?P<struct>\w+) \{(?P<fields>[^}]*)\} (?P=struct);"
    r"|typedef struct (?P<opaque>\w+) (?P=opaque);"
    r"|PK_API (?P<ret>[\w ]+?[ *]+)(?P<fn>pk_\w+)\((?P<args>[^)]*)\);"
    r"|#define (?P<macro>PK_\w+) (?P<value>-?\d+)"
)


def normal_form(text: str) -> str:
    """The header without comments, guards and spacing: what the digest is taken over."""
    guard = re.compile(r"\s*#(?!define PK_(?!PACK_H|RARE_H|COPIES_H|COLD_H|BESIDE_H|API))|\s*extern \"C\"|\s*\}\s*$")
    lines = [line for line in COMMENT.sub(" ", text).splitlines() if not guard.match(line)]
    return re.sub(r"\s+", " ", " ".join(lines)).strip()


def ctype(spelling: str, enums: set[str], structs: set[str]) -> str:
    """The ctypes spelling of a C type. Pointers become c_void_p: an address is an int, and calls stay cheap."""
    base = spelling.replace("const", "").replace("*", "").strip()
    if "*" in spelling:
        return "c_char_p" if base == "char" else "c_void_p"
    known = {"void": "None", **SCALAR, **dict.fromkeys(enums, "c_int32"), **{s: s for s in structs}}
    if base not in known:
        raise SystemExit(f"pack.h: unknown type {base!r}")
    return known[base]


def split(declaration: str) -> tuple[str, str, str | None]:
    """'int32_t stop[4]' -> ('int32_t ', 'stop', '4')."""
    m = re.fullmatch(r"\s*(.+?[\s*])(\w+)(?:\[(\d+)\])?\s*", declaration)
    if not m or ":" in declaration:
        raise SystemExit(f"pack.h: cannot read declaration {declaration.strip()!r}")
    return m[1], m[2], m[3]


def struct_lines(name: str, body: str, enums: set[str], structs: set[str]) -> list[str]:
    """The Python class of one C struct."""
    out = ["", "", f"class {name}(Structure):", "    _fields_ = ["]
    for part in filter(str.strip, body.split(";")):
        spelling, field, count = split(part)
        kind = ctype(spelling, enums, structs)
        out.append(f'        ("{field}", {kind}{f" * {count}" if count else ""}),')
    return [*out, "    ]"]


def generate(text: str) -> tuple[str, str]:
    """abi.py's text and the digest."""
    norm = normal_form(text)
    digest = hashlib.sha256(norm.encode()).hexdigest()[:16]
    out = [
        '"""Generated from packs/pack.h, packs/rare.h, packs/copies.h, packs/cold.h and packs/beside.h by packs/bindgen.py. Do not edit."""',
        "# mypy: ignore-errors",
        "from ctypes import Structure, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p  # noqa: F401",
        "",
        f'DIGEST = "{digest}"',
    ]
    enums: set[str] = set()
    structs: set[str] = set()
    prototypes: list[str] = []
    rest = DECL.sub(" ", norm)
    if rest.strip():
        raise SystemExit(f"pack.h: outside the subset: {rest.strip()[:120]!r}")
    for m in DECL.finditer(norm):
        if m["macro"]:
            out.append(f"{m['macro']} = {m['value']}")
        elif m["enum"]:
            enums.add(m["enum"])
            out += ["", f"# enum {m['enum']}", *(i.strip() for i in m["items"].split(",") if i.strip())]
        elif m["opaque"]:
            structs.add(m["opaque"])
        elif m["struct"]:
            out += struct_lines(m["struct"], m["fields"], enums, structs)
            structs.add(m["struct"])
        else:
            args = m["args"].strip()
            kinds = [] if args == "void" else [ctype(split(a)[0], enums, structs) for a in args.split(",")]
            prototypes.append(f'    "{m["fn"]}": ({ctype(m["ret"], enums, structs)}, [{", ".join(kinds)}]),')
    return "\n".join([*out, "", "", "PROTOTYPES = {", *prototypes, "}", ""]), digest


def document(text: str, digest: str) -> str:
    """docs/reference/pack.md: the header itself, since its comments are the reference."""
    return (
        "# The kernel pack ABI\n\nGenerated from `packs/pack.h`, `packs/rare.h`, `packs/copies.h`, `packs/cold.h` and `packs/beside.h` by `packs/bindgen.py`. The contract in prose is `packs/README.md`.\n\n"
        f"Digest: `{digest}`\n\n```c\n{text.strip()}\n```\n"
    )


def main(arguments: list[str]) -> int:
    """Write the generated files; with --check only compare them."""
    text = "\n".join(path.read_text() for path in HEADERS)
    abi, digest = generate(text)
    wanted = {"abi": abi, "digest": f'#define PK_ABI_DIGEST "{digest}"\n', "docs": document(text, digest)}
    stale = [k for k, path in OUTPUTS.items() if not path.exists() or path.read_text() != wanted[k]]
    if "--check" in arguments:
        if stale:
            sys.stderr.write(f"stale: {', '.join(str(OUTPUTS[k].relative_to(ROOT)) for k in stale)}; run make abi\n")
        return 1 if stale else 0
    for k in stale:
        OUTPUTS[k].write_text(wanted[k])
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
