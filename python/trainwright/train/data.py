"""Text to tokens to batches.

Tokens are the bytes of the text; one more token, `EOT`, ends each document. Documents with equal content count
once. The hash of its content decides whether a document is held out, so the split does not depend on names, order
or machine, and adding files moves no other. `prepare` writes two flat files of tokens into the run's folder; every
rank maps them, and a resume reads the very same tokens even if the text has changed since.

A sample is a block of `context` tokens and the tokens one later. Sample s of a run is block perm_e(s mod n) of
epoch e = s // n: batches are counted in global samples, so a run continues at the same text on any number of ranks.
Each token but the first is a target exactly once per epoch; the last block is filled up with targets that do not
count.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from trainwright.train.config import RunError

EOT = 256
VOCAB = 257
IGNORE = -100
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass
class DataReport:
    """What became of the text; stored as data.json."""

    source: str
    documents: int = 0
    duplicates: int = 0
    empty: int = 0
    text_bytes: int = 0
    train_documents: int = 0
    heldout_documents: int = 0
    train_tokens: int = 0
    heldout_tokens: int = 0
    split: str = "by document"


def stdlib_files() -> list[Path]:
    """The Python sources of the standard library, without its tests and without installed packages."""
    found = []
    for folder, folders, files in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS)
        found += [Path(folder, f) for f in sorted(files) if f.endswith(".py")]
    return found


def text_files(path: Path) -> Iterator[Path]:
    """The files under `path`, hidden ones aside, in the order of their names."""
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(f for f in folders if f[0] != "." and f != "__pycache__")
        yield from (Path(folder, f) for f in sorted(files) if f[0] != ".")


def parquet_rows(path: Path, column: str) -> Iterator[bytes]:
    """The rows of one text column, a batch at a time."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise RunError(f"--data: {path} needs pyarrow (pip install pyarrow)") from None
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise RunError(
                    f"--text-column: {path} has no column {column!r}; it has {', '.join(names)}"
                )
            kind = file.schema_arrow.field(column).type
            if pa.types.is_dictionary(kind):
                kind = kind.value_type
            if not (
                pa.types.is_string(kind)
                or pa.types.is_large_string(kind)
                or pa.types.is_string_view(kind)
            ):
                raise RunError(f"--text-column: column {column!r} of {path} holds {kind}, not text")
            for batch in file.iter_batches(batch_size=1024, columns=[column]):
                for row in batch.column(0).to_pylist():
                    yield (row or "").encode("utf-8", "surrogatepass")
    except (pa.ArrowException, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise RunError(f"--data: {path} cannot be read as Parquet: {first}") from None


def documents(data: list[str], column: str) -> Iterator[bytes]:
    """Every document named by --data: a text file, a row of a Parquet file, or the files of a folder."""
    if not data:
        yield from (file.read_bytes() for file in stdlib_files())
        return
    for name in data:
        path = Path(name).expanduser()
        if not path.exists():
            raise RunError(f"--data: {name} does not exist")
        for file in text_files(path) if path.is_dir() else [path]:
            try:
                if file.suffix.lower() in (".parquet", ".pq"):
                    yield from parquet_rows(file, column)
                    continue
                with open(file, "rb") as opened:
                    content = opened.read(8192)
                    binary = b"\0" in content
                    content += b"" if binary else opened.read()
            except OSError as error:
                raise RunError(f"--data: {file} cannot be read: {error.strerror}") from None
            if not binary:
                yield content
            elif not path.is_dir():
                raise RunError(f"--data: {name} is not a text file")


def is_heldout(digest: bytes, fraction: float) -> bool:
    return int.from_bytes(digest[:8], "big") < fraction * 2.0**64


def write_tokens(file: BinaryIO, text: bytes) -> int:
    tokens = np.empty(len(text) + 1, dtype=np.uint16)
    tokens[:-1] = np.frombuffer(text, dtype=np.uint8)
    tokens[-1] = EOT
    file.write(tokens.tobytes())
    return len(tokens)


def prepare(data: list[str], column: str, heldout: float, context: int, folder: Path) -> DataReport:
    """Read the text once and write train.bin, heldout.bin (uint16 tokens) and data.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    report = DataReport(" ".join(data) if data else "Python standard library")
    seen: set[bytes] = set()
    with open(folder / "train.bin", "wb") as train, open(folder / "heldout.bin", "wb") as held:
        for text in documents(data, column):
            report.documents += 1
            if not text.strip():
                report.empty += 1
                continue
            digest = hashlib.sha256(text).digest()
            if digest in seen:
                report.duplicates += 1
                continue
            seen.add(digest)
            report.text_bytes += len(text)
            if is_heldout(digest, heldout):
                report.heldout_documents += 1
                report.heldout_tokens += write_tokens(held, text)
            else:
                report.train_documents += 1
                report.train_tokens += write_tokens(train, text)
    if not seen:
        raise RunError(f"--data: no text found in {report.source}")
    if report.train_tokens + report.heldout_tokens < 2 * (context + 1):
        raise RunError(
            f"--data: {report.train_tokens + report.heldout_tokens} tokens are too few: training and held-out text "
            f"need one block of {context} tokens each (--context)"
        )  # fmt: skip
    if min(report.train_tokens, report.heldout_tokens) <= context:
        split_by_tokens(report, heldout, context, folder)
    (folder / "data.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    return report


def split_by_tokens(report: DataReport, heldout: float, context: int, folder: Path) -> None:
    """Too few documents for a split by document: the end of the text is held out, at least one block of it."""
    both = np.concatenate(
        [np.fromfile(folder / f"{part}.bin", np.uint16) for part in ("train", "heldout")]
    )
    held = min(max(int(len(both) * heldout), context + 1), len(both) - context - 1)
    both[:-held].tofile(folder / "train.bin")
    both[-held:].tofile(folder / "heldout.bin")
    report.train_tokens, report.heldout_tokens = len(both) - held, held
    report.train_documents, report.heldout_documents = (
        report.documents - report.empty - report.duplicates,
        0,
    )
    report.split = "by tokens: too few documents"


class Blocks:
    """The samples of one file of tokens, each (context,) inputs and (context,) targets."""

    def __init__(self, file: Path, context: int) -> None:
        self.tokens = np.memmap(file, dtype=np.uint16, mode="r")
        self.context = context
        self.targets = len(self.tokens) - 1
        self.count = -(-self.targets // context)

    def __len__(self) -> int:
        return self.count

    def block(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        piece = torch.from_numpy(self.tokens[start : start + self.context + 1].astype(np.int64))
        x, y = torch.zeros(self.context, dtype=torch.int64), torch.full((self.context,), IGNORE)
        x[: len(piece) - 1], y[: len(piece) - 1] = piece[:-1], piece[1:]
        return x, y

    def batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        pairs = [self.block(i) for i in indices]
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


class TrainSampler:
    """Which block is global sample s: a new order each epoch, from the seed."""

    def __init__(self, blocks: int, seed: int) -> None:
        self.blocks, self.seed, self.epoch = blocks, seed, -1
        self.order: Any = None

    def __call__(self, sample: int) -> int:
        epoch, position = divmod(sample, self.blocks)
        if epoch != self.epoch:
            self.order = np.random.default_rng([self.seed, epoch]).permutation(self.blocks)
            self.epoch = epoch
        return int(self.order[position])


def microbatches(
    blocks: Blocks, sampler: TrainSampler, first: int, micro: int, accumulation: int, rank: int, world: int
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """This rank's microbatches of the step whose global samples start at `first`."""
    for i in range(accumulation):
        start = first + (i * world + rank) * micro
        yield blocks.batch([sampler(s) for s in range(start, start + micro)])


def heldout_batches(
    blocks: Blocks, limit_tokens: int, micro: int, rank: int, world: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of the held-out blocks; with a limit, blocks spread evenly over the text."""
    count = len(blocks)
    if limit_tokens:
        count = min(count, max(1, limit_tokens // blocks.context))
    chosen = [i * len(blocks) // count for i in range(count)][rank::world]
    for start in range(0, len(chosen), micro):
        yield blocks.batch(chosen[start : start + micro])


def decode(tokens: list[int]) -> str:
    """Text of byte tokens; bytes that are not UTF-8 become U+FFFD."""
    return bytes(t for t in tokens if t < EOT).decode("utf-8", "replace")
