"""Manual pages come without their markup; everything else as it is."""

import gzip
from pathlib import Path

from trainer.data.roff import is_manual, strip_roff
from trainer.data.sources import documents, find_files

PAGE = r"""'\" t
.\" a comment
.de Sp \" a macro of its own
.if t .sp .5v
..
.ds Aq \(aq
.TH COPY 1 "July 2024" "tools 1.0"
.SH NAME
copy \- copy \*(Aqfiles\*(Aq
.SH "SEE ALSO"
.B copy
[\fI\,OPTION\/\fR]... \fB\-\-all\fR \s-1NOTE\s0 a\ b C:\e \(lqx\(rq
.BR move (1),
.BI \-\-to= dir
.TP
.B \-v
be verbose\&.
.IP \(bu 2
one
.TS
l l.
a	b
.TE
.UNKNOWN macro
joined \
line
"""
TEXT = r"""NAME

copy - copy 'files'

SEE ALSO

copy
[OPTION]... --all NOTE a b C:\ "x"
move(1),
--to=dir

-v
be verbose.

*
one
joined line
"""


def test_a_page_is_what_a_reader_sees() -> None:
    assert strip_roff(PAGE) == TEXT


def test_only_manual_pages_in_their_place_are_changed(tmp_path: Path) -> None:
    mdoc = ".Dd July 1, 2024\n.Dt X 1\n.Sh NAME\n"
    for name, text in (
        ("man1/copy.1.gz", PAGE),
        ("de/man8/copy.8", PAGE),
        ("man1/bsd.1", mdoc),
        ("text/copy.1", PAGE),
        ("man1/notes.txt", PAGE),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    files, _ = find_files([tmp_path])
    found = {file.path.relative_to(tmp_path).as_posix(): "".join(documents(file, 10**6)) for file in files}
    assert found == {
        "man1/copy.1.gz": TEXT,
        "de/man8/copy.8": TEXT,
        "man1/bsd.1": mdoc,
        "text/copy.1": PAGE,
        "man1/notes.txt": PAGE,
    }
    assert not is_manual(Path("/x/man1/empty.1"), "")
