"""Checkpoints that a kill at any moment cannot spoil.

A checkpoint is a folder ``step_00000100`` with ``model.safetensors``, ``optimizer.safetensors``, ``state.json``
and, written last, ``manifest.json`` with the size and SHA-256 of the others. It is written under a name that starts
with ``.tmp-``, every file and the folder are flushed to disk, and one rename makes it visible: what has the final
name is complete. `newest` checks the manifest and steps back to an older checkpoint if the disk lost something
later.

Optimizer tensors are stored by parameter name ("exp_avg.blocks.0.mlp.up.weight"), numbers in state.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

PREFIX, TEMPORARY, MANIFEST = "step_", ".tmp-", "manifest.json"
PARTS = ("model.safetensors", "optimizer.safetensors", "state.json")


def folder_name(step: int) -> str:
    return f"{PREFIX}{step:08d}"


def flush(path: Path) -> None:
    """fsync a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Replace a small file in one step: whoever reads it sees the old or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    flush(temporary)
    os.replace(temporary, path)
    flush(path.parent)


def pack_optimizer(
    saved: dict[str, Any], names: list[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state_dict() as named tensors, and as plain values. `names` are in the order of its parameters."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {"state": {}, "groups": []}
    for index, state in saved["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{key}.{names[index]}"] = value.detach().cpu().contiguous()
            else:
                values["state"].setdefault(names[index], {})[key] = value
    for group in saved["param_groups"]:
        plain = {
            k: v
            for k, v in group.items()
            if isinstance(v, int | float | str | bool | list | tuple | None)
        }
        values["groups"].append({**plain, "params": [names[i] for i in group["params"]]})
    return tensors, values


def unpack_optimizer(
    now: list[dict[str, Any]], names: list[str], tensors: dict[str, Tensor], values: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """Undo `pack_optimizer`, for an optimizer whose param_groups are `now`."""
    index = {name: i for i, name in enumerate(names)}
    state: dict[int, dict[str, Any]] = {index[n]: dict(v) for n, v in values["state"].items()}
    for full, tensor in tensors.items():
        key, name = full.split(".", 1)
        state.setdefault(index[name], {})[key] = tensor
    groups = []
    for own, saved in zip(now, values["groups"]):
        kept = {
            k: tuple(v) if isinstance(own.get(k), tuple) else v
            for k, v in saved.items()
            if k != "params"
        }
        groups.append({**own, **kept, "params": [index[n] for n in saved["params"]]})
    return {"state": state, "param_groups": groups}


def _nothing(stage: str) -> None:
    pass


def save(
    root: Path, step: int, model: dict[str, Tensor], optimizer: tuple[dict[str, Tensor], dict[str, Any]],
    state: dict[str, Any], keep: int, *, before: Callable[[str], None] = _nothing,
) -> Path:  # fmt: skip
    """Write the checkpoint of `step` under `root` and drop all but the newest `keep`.

    `before(stage)` is called as each stage is about to start, for tests that break off there.
    """
    from safetensors.torch import save_file

    root.mkdir(parents=True, exist_ok=True)
    temporary, final = root / f"{TEMPORARY}{folder_name(step)}", root / folder_name(step)
    if final.exists() and problem(final) is None:
        return final  # runs repeat bit for bit: it holds the same
    for stale in root.glob(f"{TEMPORARY}*"):
        shutil.rmtree(stale, ignore_errors=True)
    tensors, values = optimizer
    temporary.mkdir()
    try:
        before("model")
        save_file(model, str(temporary / PARTS[0]))
        before("optimizer")
        save_file(tensors, str(temporary / PARTS[1]))
        before("state")
        (temporary / PARTS[2]).write_text(json.dumps({**state, "step": step, "optimizer": values}))
        files = {}
        for part in PARTS:
            flush(temporary / part)
            path = temporary / part
            files[part] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        before("manifest")
        write_json(temporary / MANIFEST, {"format": 1, "step": step, "files": files})
        before("rename")
        if final.exists():  # damaged, see above
            shutil.rmtree(final)
        os.rename(temporary, final)
        flush(root)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk: give the space back
        raise
    before("prune")
    written = sorted(root.glob(f"{PREFIX}*"))
    newest_first = [p for p in reversed(written) if p.name <= final.name]
    for (
        path
    ) in written:  # a later step than this one is a damaged checkpoint that a resume went past
        if path not in newest_first[:keep]:
            shutil.rmtree(path)
    return final


@dataclass
class Loaded:
    path: Path
    step: int
    state: dict[str, Any]
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def problem(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for part in PARTS:
            want = manifest["files"][part]
            if (path / part).stat().st_size != want["bytes"]:
                return f"{part} has {(path / part).stat().st_size} bytes, expected {want['bytes']}"
            if sha256(path / part) != want["sha256"]:
                return f"{part} does not match its checksum"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def newest(root: Path, say: Callable[[str], None] = print) -> Path | None:
    """The newest valid checkpoint; each newer one that is damaged is named with the reason."""
    for path in sorted(root.glob(f"{PREFIX}*"), reverse=True):
        reason = problem(path)
        if reason is None:
            return path
        say(f"checkpoint {path.name} is damaged ({reason}); trying the one before")
    return None


def load(path: Path) -> Loaded:
    from safetensors.torch import load_file

    state = json.loads((path / PARTS[2]).read_text())
    return Loaded(
        path, state["step"], state, load_file(path / PARTS[0]), load_file(path / PARTS[1])
    )
