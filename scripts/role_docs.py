"""Entry points and variables in each role's README, written from its argument specs.

    python scripts/role_docs.py [--check]

What stands between the two markers is replaced, the rest of the README is left as it is; one without them
gets a section at its end. Entry points are left out where the README has a table of its own for them.
`--check` writes nothing and names those that are not current.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- From meta/argument_specs.yml by scripts/role_docs.py: -->"
END = "<!-- end -->"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def default_of(option: dict[str, Any]) -> str:
    if option.get("required"):
        return "required"
    value = option.get("default")
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{cell(str(value))}`" if value not in (None, "") else '`""`'


def type_of(option: dict[str, Any]) -> str:
    inner = option.get("elements")
    name = f"{option['type']} of {inner}" if inner else option["type"]
    choices = option.get("choices")
    return f"{name}: {', '.join(map(str, choices))}" if choices else name


def section(specs: dict[str, Any], with_entries: bool) -> str:
    """Entry points, then every option once with the entry points that take it, if not all of them do."""
    entries = {name: spec.get("options") or {} for name, spec in specs.items()}
    lines = []
    if with_entries:
        lines += ["| entry point | |", "|---|---|"]
        lines += [f"| `{name}` | {cell(spec['short_description'])} |" for name, spec in specs.items()]
        lines.append("")
    takers: dict[str, list[str]] = {}
    for name, options in entries.items():
        for option in options:
            takers.setdefault(option, []).append(name)
    if takers:
        lines += ["| variable | type | default | |", "|---|---|---|---|"]
    for option, names in takers.items():
        spec = entries[names[0]][option]
        only = "" if len(names) == len(entries) else f" ({', '.join(f'`{name}`' for name in names)})"
        text = spec["description"] if isinstance(spec["description"], str) else " ".join(spec["description"])
        lines.append(f"| `{option}` | {type_of(spec)} | {default_of(spec)} | {cell(text)}{only} |")
    return "\n".join(lines).strip()


def renewed(readme: str, specs: dict[str, Any]) -> str:
    """The README with its section as the specs have it now."""
    before, _, rest = readme.partition(BEGIN)
    body = f"{BEGIN}\n\n{section(specs, '| entry point |' not in before)}\n\n{END}"
    if not rest:
        return f"{readme.rstrip()}\n\n## Variables\n\n{body}\n"
    return before + body + rest.partition(END)[2]


def stale(root: Path) -> dict[Path, str]:
    """The READMEs that are not current, with what they should be."""
    found = {}
    for path in sorted(root.glob("roles/*/meta/argument_specs.yml")):
        readme = path.parents[1] / "README.md"
        old = readme.read_text(encoding="utf-8")
        new = renewed(old, yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"])
        if new != old:
            found[readme] = new
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="role_docs.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, name what is not current")
    args = parser.parse_args(argv)
    found = stale(ROOT)
    for readme, text in found.items():
        name = readme.relative_to(ROOT)
        if args.check:
            print(f"{name} is not current: python scripts/role_docs.py")
        else:
            readme.write_text(text, encoding="utf-8")
            print(f"{name} written")
    return 1 if args.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
