"""`--compare`: ours and plain torch take the same steps on the same batches, each in processes of its own."""

from trainwright.train import compare
from trainwright.train.config import Config

TINY = dict(
    layers=1, dim=32, heads=2, kv_heads=1, context=32, micro_batch=2, global_batch=4, warmup=1, threads=1, device="cpu",
    compare_steps=3,
)  # fmt: skip


def test_both_sides_train_alike_and_are_told_apart(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text(" ".join(f"word{i * i % 97}" for i in range(2000)))
    sides = [s for s in compare.SIDES if s.name in ("ours float32", "torch eager float32")]
    monkeypatch.setattr(compare, "SIDES", sides)
    shown, print_table = [], compare.print_table
    monkeypatch.setattr(compare, "print_table", lambda s, c: (shown.append(s), print_table(s, c)))
    assert compare.compare(Config(**TINY, data=[str(tmp_path)])) == 0
    ours, torchs = shown[0]
    assert not ours.failure and not torchs.failure
    assert len(ours.losses) == len(torchs.losses) == 4
    assert compare.loss_difference(ours, torchs) < 1e-4 < abs(ours.losses[0] - ours.losses[-1])
    assert ours.tokens_per_s(4 * 32) > 0 and ours.peak_bytes > 0
    out = capsys.readouterr().out
    assert "ours float32" in out and "tokens/s" in out and "peak MB/rank" in out


def test_rates_leave_the_first_step_out():
    side = compare.Side("x", ours=True, dtype="float32", seconds=[9.0, 1.0, 2.0, 4.0])
    assert side.tokens_per_s(100) == 50.0
    assert compare.Side("x", ours=True, dtype="float32", seconds=[4.0]).tokens_per_s(100) == 25.0
    slow = compare.Side("x", ours=True, dtype="float32", losses=[3.0, 2.5])
    fast = compare.Side("y", ours=True, dtype="float32", losses=[3.0, 2.0, 1.0])
    assert compare.loss_difference(slow, fast) == 0.5


def test_a_side_that_fails_is_named_and_does_not_stop_the_others(capsys):
    failed = compare.Side(
        "torch.compile float32", ours=False, dtype="float32", failure="no compiler"
    )
    fine = compare.Side(
        "torch eager float32", ours=False, dtype="float32", losses=[1.0], seconds=[1.0]
    )
    compare.print_table([failed, fine], Config(**TINY))
    out = capsys.readouterr().out
    assert "no compiler" in out and "1.00" in out
