"""Errors that concern more than one rank."""

from __future__ import annotations

__all__ = ["CollectiveError", "LayoutError"]


class CollectiveError(RuntimeError):
    """A collective did not complete: a rank died, stalled, diverged or reported a failure.

    Every rank that waited for it raises this error, instead of hanging, within the timeout of the strategy.

    Attributes:
        ranks: the global ranks to blame, as far as they are known; empty if unknown.
        step: number of the step (counted backwards that communicate, from 0).
        bucket: index of the bucket that failed first on this rank, or None outside a bucket.
        operation: what this rank was doing, e.g. ``"all-to-all"``.
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: tuple[int, ...] = (),
        step: int | None = None,
        bucket: int | None = None,
        operation: str | None = None,
    ) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.step = step
        self.bucket = bucket
        self.operation = operation

    def again(self) -> CollectiveError:
        """A copy to raise: a stored error would keep alive, through its traceback, whatever its raisers hold."""
        kept = {k: getattr(self, k) for k in ("ranks", "step", "bucket", "operation")}
        return type(self)(str(self), **kept)


class LayoutError(CollectiveError, ValueError):
    """The ranks hold different parameters. Raised on all of them; the message names the first one that differs."""
