"""The training loop, from an empty folder to a trained model. Top to bottom: what a step is, then what a run is."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.optim.adamw import AdamW
from trainwright.parallel.data import DataParallel
from trainwright.parallel.errors import CollectiveError
from trainwright.parallel.estimate import estimate
from trainwright.parallel.zero import Zero
from trainwright.train import checkpoint, data, metrics
from trainwright.train.config import Config, RunError, resumed
from trainwright.train.model import GPT, GPTConfig
from trainwright.train.ranks import RankLost, Ranks, StopSignal, start
from trainwright.train.report import Reporter, plural
from trainwright.train.split import set_kv_heads, split_model


def model_config(config: Config) -> GPTConfig:
    return GPTConfig(
        data.VOCAB, config.layers, config.dim, config.heads, config.kv_heads, config.hidden_dim, config.context,
        config.tied, config.rope_theta,
    )  # fmt: skip


def learning_rate(step: int, config: Config) -> float:
    """Of step 0 .. steps - 1: linear from lr/warmup to lr, then half a cosine down to min_lr · lr at the last step."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - 1 - config.warmup)
    low = config.lr * config.min_lr
    return low + (config.lr - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, norm weights do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


WIRE_ERROR = "wire_error."  # what a checkpoint calls the errors of the int8 wire
WIRE_DTYPES = {"none": None, "bf16": torch.bfloat16, "int8": "int8"}


class Trainer:
    """Model, optimizer and data of one rank, and what one step does with them."""

    def __init__(self, config: Config, ranks: Ranks, folder: Path) -> None:
        self.config, self.ranks = config, ranks
        self.accumulation = config.accumulation(ranks.world)
        self.dtype = getattr(torch, config.dtype)
        self.model = GPT(model_config(config), config.seed, self.dtype).to(ranks.device)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        shared = config.tp > 1
        self.split = split_model(self.model, config.tp, ranks.rank, ranks.world) if shared else None
        # Which share of the batch is this rank's; those that share a model take the same.
        self.data_rank, self.data_ranks = ranks.rank // config.tp, ranks.world // config.tp
        groups = parameter_groups(self.model, config.weight_decay)
        names = {id(p): name for name, p in self.model.named_parameters()}
        self.names = [
            names[id(p)] for g in groups for p in g["params"]
        ]  # as the optimizer has them
        adam: dict[str, Any] = {
            "lr": config.lr,
            "betas": (config.beta1, config.beta2),
            "max_grad_norm": config.clip,
        }
        link: dict[str, Any] = {
            "broadcast_buffers": False, "timeout": config.timeout, "wire_dtype": WIRE_DTYPES[config.wire],
            "group": self.split.dp_group if self.split else None,
        }  # fmt: skip
        self.estimate = estimate(self.model, stage=config.zero, world=self.data_ranks, **adam)
        kind: type[AdamW] = self.split.parts.optimizer_class(AdamW) if self.split else AdamW
        self.zero = (
            Zero(self.model, kind, stage=config.zero, params=groups, **link, **adam)
            if config.zero
            else None
        )
        self.parallel = self.zero or DataParallel(self.model, **link)
        self.optimizer: AdamW = self.zero.optimizer if self.zero else kind(groups, **adam)
        self.train_blocks = data.Blocks(folder / "train.bin", config.context)
        self.heldout_blocks = data.Blocks(folder / "heldout.bin", config.context)
        self.sampler = data.TrainSampler(len(self.train_blocks), config.seed)
        self.tokens = 0  # targets of all ranks so far
        self.state_bytes = 0  # of model and optimizer on this rank, as found after the first step

    def microbatches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        return data.microbatches(
            self.train_blocks, self.sampler, step * self.config.global_batch, self.config.micro_batch,
            self.accumulation, self.data_rank, self.data_ranks,
        )  # fmt: skip

    def step(self, step: int) -> tuple[float, int]:
        """One optimizer step. Returns this rank's sum of losses and number of targets."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.config)
        loss_sum, targets = torch.zeros((), dtype=torch.float64, device=self.ranks.device), 0
        for i, (x, y) in enumerate(self.microbatches(step)):
            count = int((y != data.IGNORE).sum())
            x, y = x.to(self.ranks.device), y.to(self.ranks.device)
            self.parallel.loss_weight(count)
            with self.parallel.accumulate(i, self.accumulation):
                loss = self.parallel(x, y)
                loss.backward()
            loss_sum += loss.detach().double() * count
            targets += count
        self.optimizer.step()
        self.state_bytes = self.state_bytes or self.model_state_bytes()
        self.optimizer.zero_grad(set_to_none=True)
        return self.counted(loss_sum.item(), targets)

    def counted(self, loss_sum: float, targets: int) -> tuple[float, int]:
        """Of ranks that share a model, one has something to add to the sums over all ranks."""
        return (0.0, 0) if self.split and self.split.tp_rank else (loss_sum, targets)

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a forward needs no other rank than those that share its model."""
        return self.zero.gathered() if self.zero else contextlib.nullcontext()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the model can be used by one rank alone, whatever is divided. A model that is split stays whole."""
        with self.gathered():
            if self.split:
                self.split.parts.restore()
                set_kv_heads(self.model, None)
            yield

    def model_state_bytes(self) -> int:
        """Of parameters, gradients and optimizer state on this rank, before the gradients are dropped."""
        if self.zero:
            return self.zero.model_state_bytes()
        states = [
            v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)
        ]
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return sum(t.nbytes for t in (*self.model.parameters(), *grads, *states))

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """Mean loss over the held-out targets, the same at any world size."""
        with (
            self.gathered()
        ):  # for ranks have different numbers of batches, but those that share a model the same
            return self._heldout_loss()

    def _heldout_loss(self) -> float:
        config, total, targets = self.config, 0.0, 0
        for x, y in data.heldout_batches(
            self.heldout_blocks, config.eval_tokens, config.micro_batch, self.data_rank, self.data_ranks
        ):  # fmt: skip
            count = int((y != data.IGNORE).sum())
            total += self.model(x.to(self.ranks.device), y.to(self.ranks.device)).item() * count
            targets += count
        total, targets = self.counted(total, targets)
        loss_sum, count_sum = self.ranks.sum([total, float(targets)])
        return loss_sum / count_sum

    def save(self, folder: Path, step: int) -> None:
        """A checkpoint after `step` steps, written by rank 0."""
        full = self.zero.full_state_dict() if self.zero else {}
        if self.split and self.zero is None:
            full = {"model": self.split.parts.full_state_dict(), "optimizer": self._states(True)}
        elif (
            self.split and full
        ):  # of this rank's part of the model, on the first rank of each data-parallel group
            model = {name: self.split.parts.whole(name, x) for name, x in full["model"].items()}
            full = {"model": model, "optimizer": self._states(True, full["optimizer"])}
        errors = self.parallel.error_feedback()

        def write() -> None:
            model = full["model"] if full else self.model.state_dict()
            weights = {k: v.detach().cpu().contiguous() for k, v in model.items()}
            samples = step * self.config.global_batch
            state = {"samples": samples, "tokens": self.tokens, "world": self.ranks.world}
            saved = full["optimizer"] if full else self.optimizer.state_dict()
            tensors, values = checkpoint.pack_optimizer(saved, self.names)
            tensors |= {WIRE_ERROR + name: error for name, error in errors.items()}
            checkpoint.save(
                folder / "checkpoints", step, weights, (tensors, values), state, self.config.keep
            )

        self.ranks.first(write)

    def _states(self, whole: bool, saved: dict[str, Any] | None = None) -> dict[str, Any]:
        """The optimizer's state dict with whole tensors in the place of this rank's parts, or the other way around."""
        assert self.split is not None
        parts = self.split.parts
        saved = self.optimizer.state_dict() if saved is None else saved
        move = parts.whole if whole else parts.part
        state = {
            index: {
                key: move(self.names[index], v) if isinstance(v, Tensor) and v.dim() else v
                for key, v in entry.items()
            }
            for index, entry in saved["state"].items()
        }
        return {**saved, "state": state}

    def load(self, path: Path) -> int:
        """Continue from a checkpoint; returns the number of steps done."""
        loaded = checkpoint.load(path)
        tensors = loaded.optimizer
        errors = {k: tensors.pop(k) for k in list(tensors) if k.startswith(WIRE_ERROR)}
        state = checkpoint.unpack_optimizer(
            self.optimizer.param_groups, self.names, tensors, loaded.state["optimizer"]
        )
        if self.zero:
            model = loaded.model
            if self.split:
                model = {name: self.split.parts.part(name, x) for name, x in model.items()}
                state = self._states(False, state)
            self.zero.load_full_state_dict({"model": model, "optimizer": state})
        elif self.split:
            self.split.parts.load_full_state_dict(loaded.model)
            self.optimizer.load_state_dict(self._states(False, state))
        else:
            self.model.load_state_dict(loaded.model)
            self.optimizer.load_state_dict(state)
        self.parallel.load_error_feedback(
            {k.removeprefix(WIRE_ERROR): v for k, v in errors.items()}
        )
        self.tokens = loaded.state["tokens"]
        return loaded.step


def open_run(given: dict[str, Any], world: int) -> tuple[Config, Path, data.DataReport]:
    """Rank 0 only: the folder, config and data of a new run, or those of the run to resume."""
    asked = Config(**given)
    out = Path(asked.out)
    if asked.resume:
        folder = out / asked.name if asked.name else latest_run(out)
        if not (folder / "config.json").exists():
            raise RunError(f"--resume: there is no run in {folder}")
        config = resumed(json.loads((folder / "config.json").read_text()), given)
        config.check()
        config.accumulation(world)
    else:
        asked.accumulation(world)
        config, folder = asked, new_folder(out, asked.name)
        checkpoint.write_json(folder / "config.json", dataclasses.asdict(config))
    config.name = folder.name
    try:
        if (folder / "data/data.json").exists():
            report = data.DataReport(**json.loads((folder / "data/data.json").read_text()))
        else:
            report = data.prepare(
                config.data, config.text_column, config.heldout, config.context, folder / "data"
            )
    except (RunError, OSError):
        if not asked.resume:
            shutil.rmtree(folder, ignore_errors=True)  # the name stays free for the next try
        raise
    return config, folder, report


def latest_run(out: Path) -> Path:
    runs = [p.parent for p in out.glob("*/config.json")]
    if not runs:
        raise RunError(f"--resume: there is no run in {out}")
    return max(runs, key=lambda p: max(f.stat().st_mtime_ns for f in p.iterdir()))


def new_folder(out: Path, name: str) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = out / (name or f"run-{number:03d}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            if name:
                raise RunError(
                    f"--name: {folder} exists; continue it with --resume, or choose another name"
                ) from None
            number += 1


def find_checkpoint(folder: Path, say: Callable[[str], None]) -> Path | None:
    """Rank 0 only: what to resume from; None if the run was stopped before its first checkpoint."""
    root = folder / "checkpoints"
    path = checkpoint.newest(root, say)
    if path is None and any(root.glob(f"{checkpoint.PREFIX}*")):
        raise RunError(f"--resume: no checkpoint in {root} is valid")
    return path


def run(given: dict[str, Any]) -> int:
    """A whole run: prepare, train, finish. Returns the exit code."""
    asked = Config(**given)
    asked.check()
    if asked.compare:
        from trainwright.train.compare import compare

        return compare(asked)
    for module in ("matplotlib", "rich", "safetensors"):  # not after an hour of training
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(name=module)
    with StopSignal() as stop, start(asked) as ranks:
        say: Callable[[str], None] = print if ranks.rank == 0 else lambda text: None
        config, folder, report = ranks.first(open_run, given, ranks.world)
        trainer = Trainer(config, ranks, folder / "data")
        done = 0
        if config.resume:
            path = ranks.first(find_checkpoint, folder, say)
            done = trainer.load(path) if path else 0
            say(f"resuming {folder} at step {done}")
        peak = ranks.sum([metrics.measure_matmul_flops(ranks.device, trainer.dtype)])[0]
        introduce(trainer, folder, report, peak, say)
        if done < config.steps:
            done = train(trainer, folder, done, peak, stop)
        if done < config.steps:
            say(f"stopped after step {done} with a checkpoint; "
                f"continue with --resume --out {config.out} --name {config.name}")  # fmt: skip
        else:
            with trainer.whole():
                ranks.first(finish, trainer, folder, say)
        trainer.parallel.close()
    return 0


def introduce(
    trainer: Trainer, folder: Path, report: data.DataReport, peak: float, say: Callable[[str], None]
) -> None:
    config, ranks, parameters = trainer.config, trainer.ranks, trainer.parameters
    threads = "" if ranks.device.type == "cuda" else f" x {plural(ranks.threads, 'thread')}"
    say(
        f"run    {folder}: {plural(ranks.world, 'rank')}{threads} on {ranks.device.type}, {config.dtype}"
    )
    say(f"text   {report.source}: {report.train_documents + report.heldout_documents:,} documents "
        f"({report.duplicates:,} duplicates dropped), {report.train_tokens:,} tokens to train on, "
        f"{report.heldout_tokens:,} held out {report.split}")  # fmt: skip
    expected = trainer.estimate
    more = f", and {metrics.mib(expected.gathered)} for a moment" if expected.gathered else ""
    say(
        f"memory {metrics.mib(expected.total)} per rank predicted for parameters, gradients, optimizer state{more}"
    )
    micro = plural(trainer.accumulation, "microbatch", "microbatches")
    say(f"model  {parameters:,} parameters: {config.layers} layers x {config.dim}, context {config.context}; a step is "
        f"{config.global_batch} sequences in {micro} per rank")  # fmt: skip
    say(f"MFU    of {peak / 1e9:,.1f} GFLOP/s, torch's matmul on all ranks measured just now; "
        f"{metrics.flops_per_token(trainer.model.config) / 1e6:,.2f} MFLOP per token")  # fmt: skip


def train(trainer: Trainer, folder: Path, first: int, peak: float, stop: StopSignal) -> int:
    """Steps first .. config.steps - 1, or fewer if stopped; the last one done has a checkpoint. Returns steps done."""
    config, ranks = trainer.config, trainer.ranks
    speaks = ranks.rank == 0
    log = metrics.MetricsFile(folder / "metrics.jsonl", first) if speaks else None
    reporter = Reporter(speaks, first, config.steps, config.log_every)
    meter = metrics.Meter(metrics.flops_per_token(trainer.model.config), peak, config.log_every)
    saved = first
    try:
        for step in range(first, config.steps):
            begin = time.perf_counter()
            loss_sum, targets = trainer.step(step)
            wants_stop = stop.requested or (
                config.stop_after > 0 and step + 1 - first >= config.stop_after
            )
            link = trainer.parallel.stats()
            compute_ms = 1e3 * (time.perf_counter() - begin) - link.exposed_ms
            every = ranks.all([loss_sum, float(targets), float(wants_stop), compute_ms])
            total, count, stopping, _ = (sum(column) for column in zip(*every))
            seconds, loss, done = time.perf_counter() - begin, total / count, step + 1
            if not math.isfinite(loss):
                raise RunError(
                    f"the loss is {loss} at step {done}; try a lower --lr (the last checkpoint is at step {saved})"
                )
            trainer.tokens += int(count)
            norm = trainer.optimizer.last_step.grad_norm
            record = {
                "step": done, "tokens": trainer.tokens, "loss": loss, "lr": learning_rate(step, config),
                "grad_norm": None if norm is None else float(norm),
                **meter.update(seconds, int(count), link, [row[-1] for row in every]),
                "state_bytes": trainer.state_bytes,
            }  # fmt: skip
            if log is not None:
                log.write(record)
            reporter.step(record)
            if step == first:
                reporter.say(f"memory {metrics.mib(trainer.state_bytes)} per rank measured, "
                             f"{metrics.mib(trainer.estimate.total)} predicted")  # fmt: skip
            last = bool(stopping) or done == config.steps
            if done == config.steps or (config.eval_every and done % config.eval_every == 0):
                heldout = trainer.heldout_loss()
                if log is not None:
                    log.write({"step": done, "tokens": trainer.tokens, "heldout_loss": heldout})
                reporter.say(
                    f"step {done:>{len(str(config.steps))}}/{config.steps}  held-out loss {heldout:.4f}"
                )
            if last or (config.checkpoint_every and done % config.checkpoint_every == 0):
                trainer.save(folder, done)
                saved = done
            if last:
                return done
        return config.steps
    except (RankLost, CollectiveError) as error:
        raise RankLost(f"{error}; the last checkpoint is at step {saved}") from error
    finally:
        reporter.close()


def finish(trainer: Trainer, folder: Path, say: Callable[[str], None]) -> None:
    """Rank 0 only: the plot, the weights at the top of the folder, and a sampled text."""
    config = trainer.config
    records = metrics.read_metrics(folder / "metrics.jsonl")
    note = f"{trainer.parameters / 1e6:.1f}M parameters, {config.dtype}, {plural(trainer.ranks.world, 'rank')}"
    metrics.plot_loss(records, folder / "loss.png", f"Loss of {folder.name}", note)
    newest = folder / "checkpoints" / checkpoint.folder_name(config.steps)
    for part in ("model.safetensors", "optimizer.safetensors"):
        link = folder / f".{part}.tmp"
        link.unlink(missing_ok=True)
        os.link(newest / part, link)
        os.replace(link, folder / part)
    if config.sample_tokens:
        prompt = list(config.prompt.encode()) or [data.EOT]
        new = trainer.model.generate(
            prompt, config.sample_tokens, config.temperature, config.seed, data.EOT
        )
        text = config.prompt + data.decode(new)
        (folder / "sample.txt").write_text(text + "\n")
        say("\n" + "\n".join("  | " + line for line in text.splitlines()) + "\n")
    held = [r["heldout_loss"] for r in records if "heldout_loss" in r]
    say(
        f"done   held-out loss {held[-1]:.4f}; weights, metrics.jsonl, loss.png and sample.txt are in {folder}"
    )
