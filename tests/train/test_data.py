"""Text to tokens to batches: what is kept, how it is split, and that every token is a target once per epoch."""

import json

import numpy as np
import pytest
from trainwright.train import data
from trainwright.train.config import RunError

TEXTS = [f"document {i}\n" + "abc é " * (i + 5) for i in range(60)]


def write(folder, texts):
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(texts):
        (folder / f"{i:03d}.txt").write_text(text, encoding="utf-8")
    return [str(folder)]


def prepare(source, out, *, heldout=0.2, context=16, column="text"):
    return data.prepare(source, column, heldout, context, out)


def tokens(out, part):
    return np.fromfile(out / f"{part}.bin", np.uint16)


def parts(out, part):
    """The documents of one side of the split, as text."""
    text = "".join(chr(t) if t != data.EOT else "\0" for t in tokens(out, part).tolist())
    return {d.encode("latin-1").decode() for d in text.split("\0") if d}


def test_every_document_is_kept_once_on_one_side(tmp_path):
    report = prepare(write(tmp_path / "in", [*TEXTS, *TEXTS[:7], "", " \n"]), tmp_path / "out")
    train, held = parts(tmp_path / "out", "train"), parts(tmp_path / "out", "heldout")
    assert train | held == set(TEXTS) and not train & held
    assert report.duplicates == 7 and report.empty == 2
    assert report.train_documents == len(train) and report.heldout_documents == len(held) > 0
    total = sum(len(t.encode()) + 1 for t in TEXTS)
    assert report.train_tokens + report.heldout_tokens == total
    assert len(tokens(tmp_path / "out", "train")) == report.train_tokens
    assert (
        json.loads((tmp_path / "out/data.json").read_text())["heldout_tokens"]
        == report.heldout_tokens
    )


def test_split_depends_on_content_alone(tmp_path):
    prepare(write(tmp_path / "a", TEXTS), tmp_path / "out-a")
    prepare(
        write(tmp_path / "b", TEXTS[::-1][:40]), tmp_path / "out-b"
    )  # other names, order, number
    held_a, held_b = parts(tmp_path / "out-a", "heldout"), parts(tmp_path / "out-b", "heldout")
    assert held_b == held_a & set(TEXTS[::-1][:40])


def test_one_document_is_split_at_its_end(tmp_path):
    report = prepare(write(tmp_path / "in", ["x" * 500 + "y" * 500]), tmp_path / "out")
    assert (report.train_tokens, report.heldout_tokens) == (801, 200)
    assert set(tokens(tmp_path / "out", "heldout")[:-1]) == {ord("y")}


@pytest.mark.parametrize("count", [17, 33, 40, 16 * 4 + 1])
def test_each_token_is_a_target_once(tmp_path, count):
    stream = np.arange(count, dtype=np.uint16)
    stream.tofile(tmp_path / "t.bin")
    blocks = data.Blocks(tmp_path / "t.bin", 16)
    x, y = blocks.batch(list(range(len(blocks))))
    real = y != data.IGNORE
    assert y[real].tolist() == list(range(1, count))
    assert (y[real] - 1).equal(x[real])


def test_samples_of_an_epoch_are_a_permutation_and_epochs_differ():
    sampler = data.TrainSampler(37, seed=3)
    first, second = [sampler(s) for s in range(37)], [sampler(s) for s in range(37, 74)]
    assert sorted(first) == sorted(second) == list(range(37)) and first != second
    again = data.TrainSampler(37, seed=3)
    assert [again(s) for s in (50, 5, 50)] == [second[13], first[5], second[13]]
    assert [data.TrainSampler(37, seed=4)(s) for s in range(37)] != first


def test_ranks_share_a_batch_without_overlap_at_any_world_size(tmp_path):
    np.arange(16 * 64 + 1, dtype=np.uint16).tofile(tmp_path / "t.bin")
    blocks = data.Blocks(tmp_path / "t.bin", 16)

    def starts(world, micro):
        accumulation = 12 // (world * micro)
        return sorted(
            int(x)
            for rank in range(world)
            for xs, _ in data.microbatches(blocks, data.TrainSampler(64, 0), 24, micro, accumulation, rank, world)
            for x in xs[:, 0]
        )  # fmt: skip

    assert starts(1, 12) == starts(1, 2) == starts(2, 3) == starts(3, 2) == starts(4, 3)
    assert len(set(starts(2, 3))) == 12


@pytest.mark.parametrize("limit", [0, 16 * 5])
def test_heldout_share_of_the_ranks(tmp_path, limit):
    np.arange(16 * 20 + 4, dtype=np.uint16).tofile(tmp_path / "t.bin")
    blocks = data.Blocks(tmp_path / "t.bin", 16)

    def targets(world):
        ys = [y for r in range(world) for _, y in data.heldout_batches(blocks, limit, 3, r, world)]
        return sorted(t for y in ys for t in y.flatten().tolist() if t != data.IGNORE)

    assert targets(1) == targets(2) == targets(3)
    assert len(targets(1)) == (16 * 5 if limit else 16 * 20 + 3)


def test_parquet_rows_are_documents(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"id": range(60), "body": pa.array(TEXTS)})
    pq.write_table(
        table, tmp_path / "one.parquet"
    )  # one file, one row group: rows are shared, not files
    files = prepare(write(tmp_path / "in", TEXTS), tmp_path / "out-text")
    rows = prepare([str(tmp_path / "one.parquet")], tmp_path / "out", column="body")
    assert rows.train_tokens == files.train_tokens and rows.documents == 60
    assert parts(tmp_path / "out", "train") == parts(tmp_path / "out-text", "train")
    pq.write_table(
        pa.table({"body": pa.array([*TEXTS[:20], None]).dictionary_encode()}),
        tmp_path / "in/d.parquet",
    )
    mixed = prepare([str(tmp_path / "in")], tmp_path / "out-mixed", column="body")
    assert mixed.duplicates == 20 and mixed.empty == 1  # a folder may mix both; null rows are empty
    for column, message in (("text", "has no column 'text'; it has id, body"), ("id", "not text")):
        with pytest.raises(RunError, match=message):
            prepare([str(tmp_path / "one.parquet")], tmp_path / "x", column=column)


def test_what_cannot_be_read_is_named(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"not parquet at all")
    (tmp_path / "binary").write_bytes(b"ab\0cd" * 100)
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("tiny")
    for name, message in (
        ("missing", "does not exist"), ("bad.parquet", "cannot be read as Parquet"), ("binary", "not a text file"),
        ("empty", "no text found"), ("short.txt", "5 tokens are too few"),
    ):  # fmt: skip
        with pytest.raises(RunError, match=message) as error:
            prepare([str(tmp_path / name)], tmp_path / "out")
        assert "\n" not in str(error.value)
    assert prepare(write(tmp_path / "empty", TEXTS), tmp_path / "out").documents == 60


def test_default_text_is_the_standard_library(tmp_path):
    files = data.stdlib_files()
    names = {f.name for f in files}
    assert {"argparse.py", "dataclasses.py"} <= names and not any(
        "site-packages" in str(f) for f in files
    )
    assert len(files) > 300
