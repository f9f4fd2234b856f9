"""Fixtures of several modules of this folder."""

from .three import three as three
