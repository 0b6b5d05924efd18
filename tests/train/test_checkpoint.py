"""A checkpoint is whole or not there, whatever happens while it is written."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from trainwright.train import checkpoint

STAGES = ["model", "optimizer", "state", "manifest", "rename", "prune"]


def write(root, step, keep=2, before=None):
    tensors = {"w": torch.full((64,), float(step)), "b": torch.arange(3).to(torch.bfloat16)}
    optimizer = ({"exp_avg.w": torch.ones(64) * step}, {"state": {}, "groups": []})
    hook = {} if before is None else {"before": before}
    return checkpoint.save(root, step, tensors, optimizer, {"samples": 4 * step}, keep, **hook)


def steps(root):
    return sorted(int(p.name.removeprefix("step_")) for p in root.glob("step_*"))


def test_round_trip_and_keep(tmp_path):
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    assert steps(tmp_path) == [3, 4]
    loaded = checkpoint.load(checkpoint.newest(tmp_path))
    assert loaded.step == 4 and loaded.state["samples"] == 16
    assert loaded.model["b"].dtype == torch.bfloat16 and loaded.model["w"][0] == 4
    assert loaded.optimizer["exp_avg.w"][0] == 4


@pytest.mark.parametrize("stage", STAGES)
def test_sigkill_at_any_stage_leaves_a_valid_checkpoint(tmp_path, stage):
    write(tmp_path, 1)
    child = os.fork()
    if child == 0:
        write(tmp_path, 2, keep=1, before=lambda s: os.kill(os.getpid(), 9) if s == stage else None)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 9
    survivor = checkpoint.newest(tmp_path)
    assert survivor is not None and checkpoint.problem(survivor) is None
    assert checkpoint.load(survivor).step == (2 if stage == "prune" else 1)
    write(tmp_path, 3, keep=1)  # and the next one cleans up
    assert os.listdir(tmp_path) == ["step_00000003"]


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_full_disk_leaves_nothing_behind(tmp_path, stage):
    write(tmp_path, 1)

    def fail(at):
        if at == stage:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        write(tmp_path, 2, before=fail)
    assert os.listdir(tmp_path) == ["step_00000001"]


@pytest.mark.parametrize("damage", ["flip", "cut", "no manifest", "no file", "not json"])
def test_damage_is_found_and_the_one_before_is_used(tmp_path, damage):
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    weights = path / "model.safetensors"
    if damage == "flip":
        content = bytearray(weights.read_bytes())
        content[-5] ^= 1
        weights.write_bytes(content)
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "no manifest":
        (path / "manifest.json").unlink()
    elif damage == "no file":
        weights.unlink()
    else:
        (path / "manifest.json").write_text("{")
    said = []
    assert checkpoint.load(checkpoint.newest(tmp_path, said.append)).step == 1
    assert len(said) == 1 and "step_00000002 is damaged" in said[0]
    write(tmp_path, 2, keep=1)  # written anew, and not counted as kept while it was damaged
    assert steps(tmp_path) == [2] and checkpoint.problem(path) is None


def test_damaged_later_checkpoint_does_not_crowd_out_a_good_one(tmp_path):
    write(tmp_path, 10, keep=3)
    (write(tmp_path, 20, keep=3) / "state.json").unlink()
    write(tmp_path, 15, keep=1)
    assert steps(tmp_path) == [15]


def test_optimizer_state_by_name():
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(2, 1, bias=False)}
    )
    groups = [
        {"params": [model["a"].weight, model["b"].weight]},
        {"params": [model["a"].bias], "weight_decay": 0.0},
    ]
    names = ["a.weight", "b.weight", "a.bias"]

    def optimizer():
        return torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9))

    first = optimizer()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    first.step()
    first.param_groups[0]["lr"] = 0.05
    tensors, values = checkpoint.pack_optimizer(first.state_dict(), names)
    assert "exp_avg.a.bias" in tensors
    second = optimizer()
    second.load_state_dict(
        checkpoint.unpack_optimizer(
            second.param_groups, names, tensors, json.loads(json.dumps(values))
        )
    )
    assert second.param_groups[0]["lr"] == 0.05 and second.param_groups[0]["betas"] == (0.8, 0.9)
    for p in model.parameters():
        for key, value in first.state[p].items():
            assert torch.equal(value, second.state[p][key])


def test_checkpoint_is_readable_without_trainwright(tmp_path):
    path = write(tmp_path, 1)
    code = f"from safetensors.torch import load_file; print(load_file({str(path / 'model.safetensors')!r})['w'].sum())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "tensor(64.)"
    shutil.rmtree(path)
    assert checkpoint.newest(tmp_path) is None
