"""What a run can be told: one dataclass, its command line, and the checks that need no data."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class RunError(Exception):
    """Something the user can put right. Its text is one line; rank 0 prints it and every rank exits with `code`."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def _option(default: Any, text: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": text, **extra})


@dataclass
class Config:
    """Sizes are in tokens or sequences, as named. A resume keeps the fields marked `fixed`: they decide the numbers."""

    # Data
    data: list[str] = field(
        default_factory=list,
        metadata={"help": "text files, folders, or Parquet files; default: the Python standard library",
                  "nargs": "+", "fixed": True},
    )  # fmt: skip
    text_column: str = _option("text", "column of a Parquet file that holds the text", fixed=True)
    heldout: float = _option(0.05, "fraction of the text, by file, that is never trained on", fixed=True)  # fmt: skip
    # Model
    layers: int = _option(4, "transformer blocks", fixed=True)
    dim: int = _option(192, "channels C", fixed=True)
    heads: int = _option(3, "query heads H", fixed=True)
    kv_heads: int = _option(1, "key/value heads G; H is a multiple of it", fixed=True)
    hidden: int = _option(0, "channels inside the gated MLP; 0: 8/3 dim, rounded up to 64", fixed=True)  # fmt: skip
    context: int = _option(256, "tokens per sequence T", fixed=True)
    tied: bool = _option(True, "the output head is the embedding", fixed=True)
    rope_theta: float = _option(10000.0, "base of the rotary frequencies", fixed=True)
    # Optimisation
    steps: int = _option(200, "optimizer steps of the whole run", fixed=True)
    global_batch: int = _option(16, "sequences per step over all ranks", fixed=True)
    micro_batch: int = _option(8, "sequences per rank and backward; accumulation is derived from it")  # fmt: skip
    lr: float = _option(3e-3, "peak learning rate", fixed=True)
    min_lr: float = _option(0.1, "last learning rate, as a fraction of the peak", fixed=True)
    warmup: int = _option(20, "steps of linear warm-up", fixed=True)
    weight_decay: float = _option(0.1, "AdamW decay of the matrices", fixed=True)
    beta1: float = _option(0.9, "AdamW beta 1", fixed=True)
    beta2: float = _option(0.95, "AdamW beta 2", fixed=True)
    clip: float = _option(1.0, "largest global gradient norm", fixed=True)
    seed: int = _option(0, "of the weights, the order of the data and the sample", fixed=True)
    wire: str = _option(
        "none", "how gradients are rounded to travel between ranks", choices=("none", "bf16", "int8"), fixed=True
    )  # fmt: skip
    # Machine
    zero: int = _option(
        0, "ZeRO stage: ranks divide 1 optimizer state, 2 gradients too, 3 parameters too", choices=(0, 1, 2, 3)
    )  # fmt: skip
    tp: int = _option(1, "neighbouring ranks that share one model, every layer split over them")
    dtype: str = _option(
        "bfloat16", "of weights and activations", choices=("bfloat16", "float32"), fixed=True
    )
    device: str = _option("auto", "auto: cuda if there is one, else cpu", choices=("auto", "cpu", "cuda"))  # fmt: skip
    threads: int = _option(0, "CPU threads per rank; 0: OMP_NUM_THREADS, else cores / ranks")  # fmt: skip
    timeout: float = _option(20.0, "seconds after which a silent rank is an error")
    # Run
    out: str = _option("runs", "folder that holds the runs")
    name: str = _option(
        "", "of this run's folder; default: the next free run-001 ... (--resume: the latest)"
    )
    resume: bool = _option(False, "continue from the newest valid checkpoint of the run")
    stop_after: int = _option(0, "stop with a checkpoint after this many steps of this call; 0: do not")  # fmt: skip
    log_every: int = _option(10, "steps per report")
    eval_every: int = _option(50, "steps between held-out losses; 0: only at the end")
    eval_tokens: int = _option(16384, "held-out tokens per evaluation; 0: all")
    checkpoint_every: int = _option(100, "steps between checkpoints; 0: only at the end")
    keep: int = _option(2, "checkpoints kept")
    sample_tokens: int = _option(240, "tokens of the sampled text; 0: no sample")
    prompt: str = _option("", "start of the sampled text; default: the start of a document")
    temperature: float = _option(0.7, "of the sampled text")
    # Comparison
    compare: bool = _option(False, "instead of a run: a few steps of the model beside plain torch")  # fmt: skip
    compare_steps: int = _option(8, "timed steps of each side of the comparison")
    compare_seconds: float = _option(60.0, "a side stops early after this long")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def hidden_dim(self) -> int:
        return self.hidden or -(-8 * self.dim // 3 // 64) * 64

    def data_ranks(self, world: int) -> int:
        """How many models there are, each with its own share of the batch."""
        if world % self.tp:
            raise RunError(f"--tp: expected a divisor of the {world} ranks, got {self.tp}", 2)
        return world // self.tp

    def accumulation(self, world: int) -> int:
        """Microbatches per rank and step, so that the global batch is the same at any world size."""
        world = self.data_ranks(world)
        per_pass = self.micro_batch * world
        if self.global_batch % per_pass:
            raise RunError(
                f"--global-batch: expected a multiple of micro-batch x ranks = {self.micro_batch} x {world}, "
                f"got {self.global_batch}", 2,
            )  # fmt: skip
        return self.global_batch // per_pass

    def check(self) -> None:
        """Raise RunError for values that cannot work, naming the flag."""

        def need(flag: str, condition: bool, expected: str) -> None:
            if not condition:
                value = getattr(self, flag.replace("-", "_"))
                raise RunError(f"--{flag}: expected {expected}, got {value!r}", 2)

        for flag in ("layers", "dim", "heads", "kv-heads", "context", "steps", "global-batch", "micro-batch",
                     "tp", "log-every", "keep", "compare-steps"):  # fmt: skip
            need(flag, getattr(self, flag.replace("-", "_")) >= 1, "at least 1")
        for flag in ("hidden", "warmup", "threads", "stop-after", "eval-every", "eval-tokens", "checkpoint-every",
                     "sample-tokens", "seed", "weight-decay"):  # fmt: skip
            need(flag, getattr(self, flag.replace("-", "_")) >= 0, "at least 0")
        for flag in ("lr", "rope-theta", "clip", "timeout", "temperature", "compare-seconds"):
            need(flag, 0 < getattr(self, flag.replace("-", "_")) < float("inf"), "a number above 0")
        for flag in ("beta1", "beta2"):
            need(flag, 0 <= getattr(self, flag) < 1, "a number in [0, 1)")
        need("min-lr", 0 <= self.min_lr <= 1, "a fraction in [0, 1]")
        need("heldout", 0 < self.heldout < 1, "a fraction between 0 and 1")
        need("dim", self.dim % (2 * self.heads) == 0, f"a multiple of 2 x heads = {2 * self.heads}")
        need("kv-heads", self.heads % self.kv_heads == 0, f"a divisor of heads = {self.heads}")
        alone = self.wire == "int8" or self.compare
        need("tp", self.tp == 1 or not alone, "1 with --wire int8 or --compare")
        need("name", Path(self.name).name == self.name, "a folder name without slashes")


FIXED = [f.name for f in dataclasses.fields(Config) if f.metadata.get("fixed")]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise RunError(message, 2)


def parse(argv: list[str]) -> dict[str, Any]:
    """The options that were given on the command line, by field name. `Config(**parse(argv))` is the run asked for."""
    parser = _Parser(
        prog="trainwright.train",
        description="Train a GPT on text with Trainwright's ops.",
        epilog="Example: torchrun --nproc-per-node 2 -m trainwright.train --data corpus/ --steps 1000",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for f in dataclasses.fields(Config):
        extra = {k: f.metadata[k] for k in ("nargs", "choices") if k in f.metadata}
        silent = f.default is dataclasses.MISSING or f.default in ("", False, True)
        default = "" if silent else f" [{f.default}]"
        text = f.metadata["help"].replace("%", "%%") + default
        if f.type == "bool":
            parser.add_argument(flag(f.name), action=argparse.BooleanOptionalAction, help=text)
        else:
            kind = {"int": int, "float": float}.get(str(f.type), str)
            parser.add_argument(flag(f.name), type=kind, help=text, **extra)
    return vars(parser.parse_args(argv))


def resumed(saved: dict[str, Any], given: dict[str, Any]) -> Config:
    """The config of a run to continue: what was saved, with the options that may change taken from the command line."""
    known = {f.name for f in dataclasses.fields(Config)}
    config = Config(**{k: v for k, v in saved.items() if k in known})
    for name, value in given.items():
        if name in FIXED and value != getattr(config, name):
            raise RunError(
                f"{flag(name)}: the run was started with {getattr(config, name)!r}; "
                f"a resume cannot change it to {value!r}", 2
            )  # fmt: skip
        setattr(config, name, value)
    return config
