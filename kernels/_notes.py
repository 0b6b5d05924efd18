"""What a launcher decided, for `tw.explain`: it sets `sink` for the time of a call."""

from __future__ import annotations

from collections.abc import Callable

sink: Callable[[str], None] | None = None


def note(text: str) -> None:
    if sink is not None:
        sink(f"  {text}")
