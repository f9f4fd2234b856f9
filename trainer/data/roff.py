"""Manual pages without their markup: headings and paragraphs, about as `man` shows them.

For pages in the man macros, which are nearly all; those in mdoc (BSD's) stay as they are. Tables go.
"""

import re
from collections.abc import Iterator
from pathlib import Path

# .../man1/ls.1.gz, .../de/man7/x.7
_PLACE = re.compile(r"/man[1-9n]\w*/[^/]+\.[1-9n]\w*(\.gz)?$")
_ALTERNATING = {"BR", "RB", "BI", "IB", "IR", "RI"}  # words in two fonts in turn, without blanks between
_FONT = {"B", "I", "SM", "SB", "R"}
_BREAK = {"PP", "P", "LP", "HP", "TP", "TQ", "IP", "sp", "Sp", "RS", "RE", "nf", "fi", "EX", "EE", "Vb", "Ve"}
_LEFT_OUT = {"TS": ".TE", "EQ": ".EN", "de": "..", "PS": ".PE"}  # from the macro to that line
_WORD = re.compile(r'"((?:[^"]|"")*)"?|(\S+)')
_NAMED = {
    "aq": "'", "cq": "'", "oq": "'", "dq": '"', "lq": '"', "rq": '"', "bu": "*", "em": "--", "en": "-",
    "mi": "-", "hy": "-", "ha": "^", "ti": "~", "rs": "\\", "ga": "`", "co": "(c)", "rg": "(R)", "->": "->",
    "Aq": "'", "L\"": '"', "R\"": '"', "C`": '"', "C'": '"',
}  # fmt: skip
_PLAIN = {"e": "\\", "-": "-", " ": " ", "~": " ", "0": " ", "'": "'", "`": "`", "\\": "\\", "t": "\t"}
_ESCAPE = re.compile(
    r"\\(?:\".*|[fFmks](?:\(..|\[[^]]*\]|[+-]?.)|[hvwoNDlLbZ]'[^']*'|n[+-]?(?:\(..|\[[^]]*\]|.)"
    r"|\*?\((..)|\*?\[([^]]*)\]|\*.|(.)|$)"
)


def is_manual(path: Path, text: str) -> bool:
    """Whether a file is a manual page in the man macros, by its place and by what it says."""
    return bool(_PLACE.search(path.as_posix())) and re.search(r"^\.TH\b", text, re.MULTILINE) is not None


def strip_roff(text: str) -> str:
    """The text of a manual page."""
    plain = "\n".join(_lines(text.replace("\\\n", "").splitlines()))
    return re.sub(r"\n{3,}", "\n\n", plain).strip() + "\n"


def _lines(lines: list[str]) -> Iterator[str]:
    until = ""
    for line in lines:
        if until:
            until = "" if line.startswith(until) else until
            continue
        if not line.startswith((".", "'")):
            yield _unescaped(line)
            continue
        macro, _, rest = line[1:].strip().partition(" ")
        words = [(quoted or word).replace('""', '"') for quoted, word in _WORD.findall(rest)]
        until = _LEFT_OUT.get(macro, "")
        if macro in ("SH", "SS"):
            yield from ("", _unescaped(" ".join(words)), "")
        elif macro in _BREAK:
            yield ""
            if macro == "IP" and words:
                yield _unescaped(words[0])
        elif macro in _ALTERNATING or macro in _FONT:
            yield _unescaped(("" if macro in _ALTERNATING else " ").join(words))


def _unescaped(line: str) -> str:
    def plain(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        return _NAMED.get(name, "") if name else _PLAIN.get(found[3] or "", "")

    return _ESCAPE.sub(plain, line)
