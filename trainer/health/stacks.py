"""The Python stacks of all threads of this process as text, and the innermost line of the main thread."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType


def stacks() -> str:
    """The Python stack of every thread as text: the main thread first, the innermost line of a stack last."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    threads = sorted(threading.enumerate(), key=lambda thread: (thread.ident != main, thread.name))
    parts = [f"{time.strftime('%F %T')}, {len(threads)} threads"]
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is not None:
            parts.append(f"\n{thread.name}:\n" + "".join(traceback.format_stack(frame)).rstrip())
    return "\n".join(parts) + "\n"


def main_line() -> str:
    """The line that the main thread executes, such as "train.py:210 in step".

    If this is a line of a library, the line of the trainer that called the library comes first: "train.py:210
    in step, at functional.py:90 in linear". If there is no main thread, the result is "nowhere".
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "nowhere"
    own = frame
    while own.f_back is not None and "trainer" not in Path(own.f_code.co_filename).parts:
        own = own.f_back
    if "trainer" not in Path(own.f_code.co_filename).parts or own is frame:
        return _named(frame)
    return f"{_named(own)}, at {_named(frame)}"


def _named(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
