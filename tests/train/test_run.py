"""Whole runs of a tiny model: what is left in the folder, resume bit for bit, signals, and what goes wrong in words."""

import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from numerics import parallel_close
from safetensors.torch import load_file
from trainwright.parallel.buckets import StepStats
from trainwright.train import metrics
from trainwright.train.config import Config, RunError, parse
from trainwright.train.loop import learning_rate, run

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "layers": 1, "dim": 32, "heads": 2, "kv_heads": 1, "context": 32, "steps": 6, "warmup": 2, "micro_batch": 2,
    "global_batch": 8, "log_every": 1, "eval_every": 3, "checkpoint_every": 0, "sample_tokens": 12, "device": "cpu",
    "threads": 1,
}  # fmt: skip


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(40):
        words = [f"w{(i * j) % 17}" for j in range(1, 60)]
        (folder / f"{i}.txt").write_text(" ".join(words))
    return str(folder)


def options(tmp_path, text, **changed):
    return {**TINY, "data": [text], "out": str(tmp_path / "runs"), **changed}


def argv(given):
    out = []
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            out.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            out += [flag, *(map(str, value) if isinstance(value, list) else [str(value)])]
    return out


def start(given, torchrun=0, **env):
    """A training process, or `torchrun` of them under torchrun."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(torchrun)]
        if torchrun
        else []
    )
    path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "trainwright.train", *argv(given)], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip


def two_ranks(given, world=2):
    """Both ranks, or more, without torchrun, which would need seconds of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    processes = [start(given, RANK=str(r), LOCAL_RANK=str(r), **common) for r in range(world)]
    outputs = [p.communicate(timeout=90) for p in processes]
    assert [p.returncode for p in processes] == [0] * world, outputs
    assert not any(out for out, _ in outputs[1:])  # only rank 0 speaks


def read_until(process, word):
    seen = ""
    for line in process.stdout:
        seen += line
        if word in line:
            return seen
    raise AssertionError(f"{word!r} never came:\n{seen}\n{process.stderr.read()}")


def records(folder):
    keep = ("step", "tokens", "loss", "heldout_loss", "grad_norm", "lr")
    return [
        {k: r[k] for k in keep if k in r}
        for r in metrics.read_metrics(Path(folder, "metrics.jsonl"))
    ]


def same_weights(a, b):
    for part in ("model.safetensors", "optimizer.safetensors"):
        x, y = load_file(Path(a, part)), load_file(Path(b, part))
        assert x.keys() == y.keys()
        assert all(torch.equal(x[k], y[k]) and x[k].dtype == y[k].dtype for k in x)


def test_a_run_leaves_all_it_promises(tmp_path, text, capsys):
    given = options(tmp_path, text, steps=40, lr=1e-2, eval_every=20)
    assert run(given) == 0
    folder = tmp_path / "runs/run-001"
    kept = records(folder)
    losses = [r["loss"] for r in kept if "loss" in r]
    held = [r["heldout_loss"] for r in kept if "heldout_loss" in r]
    assert len(losses) == 40 and len(held) == 2
    assert abs(losses[0] - math.log(257)) < 0.1 and losses[-1] < 2.6 and held[-1] < 2.6  # it learns
    epoch = json.loads((folder / "data/data.json").read_text())["train_tokens"] - 1
    blocks = -(-epoch // 32)
    short, epochs = (
        32 * blocks - epoch,
        40 * 8 // blocks,
    )  # the last block of each whole epoch is short
    assert 40 * 8 * 32 - kept[-1]["tokens"] in (epochs * short, (epochs + 1) * short)
    assert json.loads((folder / "config.json").read_text())["lr"] == 1e-2
    assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"
    weights = load_file(folder / "model.safetensors")
    state = load_file(folder / "optimizer.safetensors")
    assert weights["embedding.weight"].dtype == torch.bfloat16
    assert state["exp_avg.embedding.weight"].dtype == torch.float32
    sample = (folder / "sample.txt").read_text()
    printed = capsys.readouterr().out
    assert sample.strip().splitlines()[0] in printed and "held-out loss" in printed
    assert (
        run(given) == 0 and (tmp_path / "runs/run-002").exists()
    )  # the next run gets the next name
    assert (
        run({"out": given["out"], "name": "run-001", "resume": True, "threads": 1}) == 0
    )  # done already: nothing to train
    assert records(folder) == kept


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_resume_continues_bit_for_bit(tmp_path, text, dtype):
    given = options(tmp_path, text, dtype=dtype)
    run({**given, "name": "whole"})
    run({**given, "name": "parts", "stop_after": 3})
    assert not (tmp_path / "runs/parts/model.safetensors").exists()
    run(
        {"out": given["out"], "resume": True, "stop_after": 0, "threads": 1}
    )  # the latest run, with its own options
    assert records(tmp_path / "runs/whole") == records(tmp_path / "runs/parts")
    same_weights(tmp_path / "runs/whole", tmp_path / "runs/parts")


def test_resume_drops_what_a_kill_left_after_the_checkpoint(tmp_path, text):
    given = options(tmp_path, text, checkpoint_every=2)
    run({**given, "name": "whole"})
    run({**given, "name": "killed", "stop_after": 4})
    folder = tmp_path / "runs/killed"
    (folder / "checkpoints/step_00000004/manifest.json").unlink()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "tok')
    run({"out": given["out"], "name": "killed", "resume": True, "threads": 1})
    assert records(tmp_path / "runs/whole") == records(folder)
    same_weights(tmp_path / "runs/whole", folder)


def test_two_ranks_train_as_one_and_resume_bit_for_bit(tmp_path, text):
    """Also at another world size: the same samples in every step, and losses equal up to rounding."""
    given = options(tmp_path, text, dtype="float32")
    run({**given, "name": "one"})
    two_ranks({**given, "name": "two"})
    two_ranks({**given, "name": "parts", "stop_after": 3})
    shutil.copytree(tmp_path / "runs/parts", tmp_path / "runs/half")
    two_ranks({"out": given["out"], "name": "parts", "resume": True})
    assert records(tmp_path / "runs/two") == records(tmp_path / "runs/parts")
    same_weights(tmp_path / "runs/two", tmp_path / "runs/parts")
    run({"out": given["out"], "name": "half", "resume": True, "threads": 1})  # 2 ranks, then 1
    for name in ("two", "half"):
        for a, b in zip(records(tmp_path / "runs/one"), records(tmp_path / f"runs/{name}")):
            assert a.keys() == b.keys() and a["tokens"] == b["tokens"]
            assert all(a[k] == pytest.approx(b[k], rel=2e-5) for k in a)


def test_split_model_trains_as_one_process(tmp_path, text):
    """50 steps of fp32: three query heads over two ranks, their one key/value head on both. Its checkpoint continues in
    one process, and one of one process over two ranks."""
    given = options(
        tmp_path,
        text,
        dtype="float32",
        steps=50,
        heads=3,
        kv_heads=1,
        dim=36,
        eval_every=25,
        sample_tokens=4,
    )
    run({**given, "name": "one"})
    run({**given, "name": "half", "stop_after": 25})
    two_ranks({**given, "name": "split", "tp": 2, "stop_after": 25})
    shutil.copytree(tmp_path / "runs/split", tmp_path / "runs/joined")
    two_ranks({"out": given["out"], "name": "split", "resume": True})
    two_ranks({"out": given["out"], "name": "half", "resume": True, "tp": 2})
    run({"out": given["out"], "name": "joined", "resume": True, "tp": 1, "threads": 1})
    for name in ("split", "half", "joined"):
        assert_trained_alike(tmp_path / "runs/one", tmp_path / f"runs/{name}")


def assert_trained_alike(one, other):
    """As one process, by the bounds of fp32 sums in another order."""
    one, other = records(one), records(other)
    assert len(one) == len(other)
    for a, b in zip(one, other):
        assert a.keys() == b.keys() and a["tokens"] == b["tokens"]
        for key in {"loss", "heldout_loss", "grad_norm"} & a.keys():
            kind = "training gradient norm" if key == "grad_norm" else "training loss"
            assert parallel_close(kind, b[key], a[key]), (key, a, b)


@pytest.mark.slow
def test_split_models_are_averaged_and_divided(tmp_path, text):
    """2 x 2 ranks: a model over two, two of those by data parallel; its state divided by ZeRO 3, then by stage 1."""
    given = options(
        tmp_path, text, dtype="float32", steps=20, heads=3, kv_heads=1, dim=36, eval_every=10, sample_tokens=4
    )  # fmt: skip
    run({**given, "name": "one"})
    two_ranks({**given, "name": "split", "tp": 2, "zero": 3, "stop_after": 10}, world=4)
    resumed = {"out": given["out"], "name": "split", "resume": True, "zero": 1, "stop_after": 0}
    two_ranks(resumed, world=4)
    assert_trained_alike(tmp_path / "runs/one", tmp_path / "runs/split")


def test_zero_divides_memory_and_changes_no_bit(tmp_path, text):
    """Stages 2 and 3, resumed in another stage; what a step's communication cost is in the metrics."""
    given = options(tmp_path, text)
    two_ranks({**given, "name": "plain"})
    two_ranks({**given, "name": "divided", "zero": 3, "stop_after": 3})
    two_ranks({"out": given["out"], "name": "divided", "resume": True, "zero": 2})
    assert records(tmp_path / "runs/plain") == records(tmp_path / "runs/divided")
    same_weights(tmp_path / "runs/plain", tmp_path / "runs/divided")
    plain, divided = (
        [r for r in metrics.read_metrics(tmp_path / f"runs/{name}/metrics.jsonl") if "loss" in r]
        for name in ("plain", "divided")
    )
    # bf16 parameters, gradients, fp32 masters and two moments: 16 bytes; stage 3 halves all, stage 2 not the parameters
    shares = [b["state_bytes"] / a["state_bytes"] for a, b in zip(plain, divided)]
    assert shares == pytest.approx([8 / 16] * 3 + [9 / 16] * 3, rel=0.03)
    for record in plain + divided:
        assert record["exposed_comm_ms"] >= 0 and record["comm_busy_ms"] > 0
        assert record["comm_bytes"] > 0 <= record["imbalance"] and 0 <= record["comm_overlap"] <= 1


def test_int8_wire_learns_and_keeps_its_errors(tmp_path, text):
    given = options(tmp_path, text, steps=30, lr=1e-2, eval_every=0, zero=2)
    two_ranks({**given, "name": "exact"})
    two_ranks({**given, "name": "int8", "wire": "int8", "stop_after": 15})
    checkpoint = tmp_path / "runs/int8/checkpoints/step_00000015"
    saved = load_file(checkpoint / "optimizer.safetensors")
    assert saved["wire_error.embedding.weight"].abs().max() > 0
    two_ranks({"out": given["out"], "name": "int8", "resume": True, "zero": 0})
    exact, rounded = (
        records(tmp_path / f"runs/{n}")[-1]["heldout_loss"] for n in ("exact", "int8")
    )
    assert rounded == pytest.approx(exact, rel=0.01)


def test_ctrl_c_stops_with_a_checkpoint(tmp_path, text):
    process = start(options(tmp_path, text, steps=100000, eval_every=0))
    read_until(process, "step      3/")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "with a checkpoint" in out and not err
    done = int(out.split("stopped after step ")[1].split()[0])
    folder = tmp_path / "runs/run-001"
    assert (folder / f"checkpoints/step_{done:08d}/manifest.json").exists()
    assert records(folder)[-1]["step"] == done


def test_sigterm_to_one_rank_stops_all_at_the_same_step(tmp_path, text):
    process = start(options(tmp_path, text, steps=100000, eval_every=0), torchrun=2)
    read_until(process, "step      3/")
    workers = children(process.pid)
    assert len(workers) == 2
    os.kill(max(workers), signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "with a checkpoint" in out and "Error" not in err


def test_killed_rank_is_an_error_on_rank_0_and_leaves_whole_checkpoints(tmp_path, text, capsys):
    process = start(
        options(tmp_path, text, steps=100000, eval_every=0, checkpoint_every=1), torchrun=2
    )
    read_until(process, "step      3/")
    begin = time.monotonic()
    os.kill(next(pid for pid in children(process.pid) if rank_of(pid) == "1"), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0 and time.monotonic() - begin < 60
    lines = [l for l in err.splitlines() if l.startswith("trainwright.train: error:")]
    assert len(lines) == 1 and "the last checkpoint is at step" in lines[0], err
    assert run({"out": str(tmp_path / "runs"), "resume": True, "stop_after": 1, "threads": 1}) == 0
    assert "damaged" not in capsys.readouterr().out


def children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def rank_of(pid):
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((p.split(b"=")[1].decode() for p in pairs if p.startswith(b"RANK=")), "")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tp": 2}, "--tp: expected a divisor of the 1 ranks, got 2"),
        ({"tp": 2, "wire": "int8"}, "--tp: expected 1 with --wire int8 or --compare, got 2"),
        ({"dim": 33}, "--dim: expected a multiple of 2 x heads = 4, got 33"),
        ({"steps": 0}, "--steps: expected at least 1, got 0"),
        ({"lr": float("nan")}, "--lr: expected a number above 0, got nan"),
        ({"global_batch": 7}, "--global-batch: expected a multiple of micro-batch x ranks = 2 x 1, got 7"),
        ({"data": ["/nonexistent"]}, "--data: /nonexistent does not exist"),
        ({"context": 100000}, "tokens are too few"),
        ({"name": "a/b"}, "--name: expected a folder name"),
        ({"out": "/proc/runs"}, "/proc/runs: No such file"),
        ({"resume": True}, "--resume: there is no run in"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_is_left(tmp_path, text, changed, message):
    with pytest.raises(RunError) as error:
        run(options(tmp_path, text, **changed))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.glob("runs/*"))


def test_an_existing_run_is_not_overwritten_nor_changed_by_a_resume(tmp_path, text):
    given = options(tmp_path, text, name="mine", stop_after=1, sample_tokens=0)
    run(given)
    with pytest.raises(RunError, match="mine exists; continue it with --resume"):
        run(given)
    with pytest.raises(
        RunError, match=r"--lr: the run was started with 0.003; .* cannot change it to 0.5"
    ):
        run({"out": given["out"], "name": "mine", "resume": True, "lr": 0.5})
    for path in (tmp_path / "runs/mine/checkpoints").glob("*/manifest.json"):
        path.write_text("{}")
    with pytest.raises(RunError, match=r"no checkpoint in .* is valid"):
        run({"out": given["out"], "name": "mine", "resume": True})


def test_command_line_errors_are_one_line_with_a_code(tmp_path, text):
    for given, code, message in (
        ({"--steps": "x"}, 2, "argument --steps: invalid int value: 'x'"),
        ({"--wat": "1"}, 2, "unrecognized arguments"),
    ):  # fmt: skip
        with pytest.raises(RunError, match=message) as error:
            parse([w for pair in given.items() for w in pair])
        assert error.value.code == code
    process = start(options(tmp_path, str(tmp_path / "nothing")), torchrun=2)
    out, err = process.communicate(timeout=60)
    assert process.returncode != 0 and not out
    lines = [l for l in err.splitlines() if "trainwright.train: error" in l]
    assert lines == [f"trainwright.train: error: --data: {tmp_path / 'nothing'} does not exist"]


def test_options_keep_their_types():
    given = parse(["--lr", "1e-4", "--no-tied", "--data", "a", "b", "--steps", "7"])
    assert given == {"lr": 1e-4, "tied": False, "data": ["a", "b"], "steps": 7}
    assert Config(**given).steps == 7 and Config().data == []


def test_learning_rate_schedule():
    config = Config(lr=1.0, min_lr=0.1, warmup=4, steps=25)
    rates = [learning_rate(s, config) for s in range(25)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0
    assert rates[14] == pytest.approx(0.55) and rates[24] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))
    assert learning_rate(0, Config(steps=1, warmup=0)) > 0


def test_meter_averages_over_its_window():
    meter = metrics.Meter(flops_per_token=10.0, peak_flops=1000.0, window=2)
    meter.update(1.0, 5, StepStats(0, exposed_ms=4.0, busy_ms=4.0), [1.0])
    meter.update(2.0, 100, StepStats(1, exposed_ms=2.0, busy_ms=1.0, sent_bytes=10), [1.0, 3.0])
    shown = meter.update(
        2.0, 60, StepStats(2, exposed_ms=6.0, busy_ms=9.0, sent_bytes=20), [2.0, 2.0]
    )
    assert shown["tokens_per_s"] == 40.0 and shown["mfu"] == 0.4 and shown["exposed_comm_ms"] == 4.0
    assert (shown["comm_busy_ms"], shown["comm_overlap"]) == (5.0, pytest.approx(0.2))
    assert (shown["comm_bytes"], shown["imbalance"]) == (15.0, 0.25)
