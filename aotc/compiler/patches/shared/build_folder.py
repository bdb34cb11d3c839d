"""The folder that compiled code names instead of the build's own."""

from __future__ import annotations

FOLDER = "/aotc"
"""Replaces the build's cache folder in file names that are compiled in, as by `__FILE__` and assertions."""
