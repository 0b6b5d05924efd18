"""What each rank says at the end of a step."""

from __future__ import annotations

from collections.abc import Iterable

USED, LATE = 1, 2  # bits of a slot's byte
_HEAD = 2  # bytes before those of the slots


class Footer:
    """Bytes: whether a hook ran, whether buffers changed, one byte per slot of the layout, the order of the buckets.

    Attributes:
        data: all of it, as it travels.
        hooks_ran: this rank's backward reached a parameter.
        buffers_changed: its forward changed a buffer.
        slots: per slot USED (the parameter got a gradient), and LATE (it got one after its bucket was launched).
    """

    def __init__(self, data: bytes, slots: int) -> None:
        self.data = data
        self.hooks_ran, self.buffers_changed = bool(data[0]), bool(data[1])
        self.slots = data[_HEAD : _HEAD + slots]

    @classmethod
    def of(
        cls,
        *,
        hooks_ran: bool,
        buffers_changed: bool,
        used: bytes,
        late: Iterable[int],
        order: Iterable[int],
    ) -> Footer:
        words = bytearray([hooks_ran, buffers_changed]) + used
        for slot in late:
            words[_HEAD + slot] |= LATE
        for bucket in order:
            words += bucket.to_bytes(4, "little")
        return cls(bytes(words), len(used))

    @property
    def late(self) -> set[int]:
        """The slots that are LATE."""
        if max(self.slots, default=0) < LATE:  # nearly always
            return set()
        return {slot for slot, bits in enumerate(self.slots) if bits & LATE}

    @property
    def order(self) -> list[int]:
        """The buckets in the order in which they filled up."""
        words = self.data[_HEAD + len(self.slots) :]
        return [int.from_bytes(words[i : i + 4], "little") for i in range(0, len(words), 4)]
