"""What test_parallelize.py runs in each rank: case(rank, world) -> list of what is wrong."""

import contextlib
import copy

import torch
import trainwright as tw
from numerics import parallel_close
from split_cases import unexpected
from tensor_cases import integers
from torch import nn
from torch.distributed import init_device_mesh
from torch.nn import functional as F
from trainwright.parallel import (
    ColumnParallelLinear,
    DataParallel,
    Style,
    Zero,
    gather_rows,
    parallelize,
    scatter_rows,
    sum_gradients,
    tied_logits,
    vocab_parallel_cross_entropy,
)
from trainwright.parallel._sizes import shard_slice, split_evenly


class MLP(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = tw.nn.RMSNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, two MLPs, a head that is tied or not."""

    def __init__(self, tied, V=11, width=6, hidden=7):
        super().__init__()
        self.embedding = nn.Embedding(V, width)
        self.blocks = nn.ModuleList(MLP(width, hidden) for _ in range(2))
        self.head = nn.Linear(width, V, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens, target, sequence=False):
        x = self.embedding(tokens)
        x = scatter_rows(x) if sequence else x
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if isinstance(self.head, ColumnParallelLinear):
            return vocab_parallel_cross_entropy(logits, target)
        return F.cross_entropy(logits, target)


PLAN = {"blocks.*.up": "column", "blocks.*.down": "row", "embedding": "vocab", "head": "column"}


def sequence_plan():
    options = {"sequence_parallel": True}
    plan = {name: Style(kind, options) for name, kind in PLAN.items() if kind != "vocab"}
    return {**plan, "embedding": "vocab", "blocks.*.norm": "sequence"}


def models(tied):
    torch.manual_seed(3)
    whole = Model(tied)
    return whole, copy.deepcopy(whole)


def batch():
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(11, (9,), generator=generator) for _ in range(2))


def full_gradients(tp, model):
    found = {}
    for name, p in model.named_parameters():
        found[name] = tp.whole(name, p.grad, everywhere=True)
    return found


def trains_as_the_whole_model(rank, world):
    """Loss, every gradient, and the norm over all; plain and sequence parallel, tied and not."""
    wrong = []
    for tied in (False, True):
        for sequence in (False, True):
            whole, model = models(tied)
            tp = parallelize(model, sequence_plan() if sequence else PLAN)
            tokens, target = batch()
            expected = whole(tokens, target)
            expected.backward()
            loss = model(tokens, target, sequence)
            loss.backward()
            case = f"tied {tied} sequence {sequence}"
            if not parallel_close("training loss", loss, expected):
                wrong.append(f"{case}: loss {loss} for {expected}")
            grads = full_gradients(tp, model)
            for name, p in whole.named_parameters():
                if not parallel_close("sharded gradient", grads[name], p.grad):
                    wrong.append(f"{case}: {name}")
            norm = tw.grad_norm([p.grad for p in whole.parameters()])
            if not parallel_close("training gradient norm", tp.grad_norm(), norm):
                wrong.append(f"{case}: norm {tp.grad_norm()} for {norm}")
    return wrong


def clips_by_the_norm_of_the_whole(rank, world):
    """Two steps of SGD with clipping: split and whole parameters count once each, however many ranks hold them."""
    whole, model = models(False)
    tp = parallelize(model, PLAN)
    options = {"lr": 10.0, "max_grad_norm": 0.01}
    ours = tp.optimizer(tw.optim.SGD, model.parameters(), **options)
    theirs = tw.optim.SGD(whole.parameters(), **options)
    wrong = []
    for _ in range(2):
        for m, optimizer in ((model, ours), (whole, theirs)):
            tokens, target = batch()
            m(tokens, target).backward()
            optimizer.step()
            optimizer.zero_grad()
        norms = [o.last_step.grad_norm for o in (ours, theirs)]
        if not parallel_close("training gradient norm", *norms):
            wrong.append(f"norm {norms}")
    full = {n: tp.whole(n, p, everywhere=True) for n, p in model.named_parameters()}
    for name, p in whole.named_parameters():
        wrong += [] if parallel_close("sharded gradient", full[name], p) else [name]
    return wrong


def shared_rows_count_once(rank, world):
    """A layer whose ranks hold overlapping rows: its gradient's norm is that of the whole layer."""
    model = nn.Sequential(nn.Linear(3, 8))
    even = [shard_slice(split_evenly(8, world), r) for r in range(world)]
    ranges = [(max(0, s.start - 2), s.stop) for s in even]
    tp = parallelize(model, {"0": Style("column", {"ranges": ranges})})
    gradient = integers(8, 3, seed=1)
    begin, end = ranges[rank]
    model[0].weight.grad = gradient[begin:end].clone()
    model[0].bias.grad = torch.zeros(end - begin)
    near = parallel_close("training gradient norm", tp.grad_norm(), gradient.norm())
    return [] if near else [tp.grad_norm()]


def there_and_back(rank, world):
    """The full state dict is the unsharded one; it loads, also changed, into any sharding; `restore` gives the model
    back."""
    wrong = []
    for tied in (False, True):
        whole, model = models(tied)
        original = model.blocks[0].up
        tp = parallelize(model, PLAN)
        full = tp.full_state_dict()
        expected = whole.state_dict() if rank == 0 else {}
        same = all(torch.equal(full[k], v) for k, v in expected.items())
        if full.keys() != expected.keys() or not same:
            wrong.append("full_state_dict")
        if model.state_dict().keys() != whole.state_dict().keys():
            wrong.append("keys")
        if tied and model.head.weight is not model.embedding.weight:
            wrong.append("no longer tied")
        changed = {k: v + 1 for k, v in whole.state_dict().items()}
        tp.load_full_state_dict(changed)
        tp.restore()
        same = all(torch.equal(model.state_dict()[k], v) for k, v in changed.items())
        if not same or model.blocks[0].up is not original or tp.shards:
            wrong.append("restore")
        if tied and model.head.weight is not model.embedding.weight:
            wrong.append("restored, but not tied")
        tokens, target = batch()
        model(tokens, target).backward()
        if any(p.grad is None for p in model.parameters()):
            wrong.append("restored, but no gradients")
    return wrong


def rows(rank, world):
    """scatter_rows and gather_rows are each other's inverse, forward and backward; more ranks than rows too."""
    wrong = []
    for T in (7, world - 1, 0):
        x = integers(T, 3, 2, seed=1).requires_grad_()
        mine = scatter_rows(x)
        back = gather_rows(mine * (rank + 1))
        back.backward(integers(T, 3, 2, seed=2))
        scale = torch.cat([torch.full((n,), r + 1.0) for r, n in enumerate(split_evenly(T, world))])
        scale = scale.view(-1, 1, 1)
        if not torch.equal(mine, x[shard_slice(split_evenly(T, world), rank)]):
            wrong.append(f"{T}: scatter")
        if not torch.equal(back, x * scale):
            wrong.append(f"{T}: gather")
        if not torch.equal(x.grad, integers(T, 3, 2, seed=2) * scale):
            wrong.append(f"{T}: gradient")
    return wrong


def router_gradients(rank, world):
    """A replicated router in a sequence-parallel region: without the sum replicas drift apart; with it they have the
    gradient of all rows, also where a rank has none, and after `undo` their own."""
    x = integers(world - 1 + 3, 4, seed=1)
    sizes = [x.shape[0] - world + 1 + (world == 1) * 0, *[1] * (world - 1)]
    sizes = [x.shape[0], *[0] * (world - 1)] if world > 2 else sizes
    mine = x[shard_slice(sizes, rank)]
    router = nn.Linear(4, 3)
    undo = sum_gradients(router)
    router(mine).sum().backward()
    expected = x.sum(0).expand(3, 4)
    wrong = [] if torch.equal(router.weight.grad, expected) else ["weight"]
    wrong += [] if torch.equal(router.bias.grad, torch.full((3,), float(x.shape[0]))) else ["bias"]
    undo()
    router.zero_grad()
    router(mine).sum().backward()
    own = torch.equal(router.weight.grad, mine.sum(0).expand(3, 4))
    return wrong + ([] if own else ["undo"])


def tied_head(rank, world):
    """tied_logits: the logits of the whole table, and both its gradients in one parameter."""
    whole = nn.Embedding(7, 4)
    with torch.no_grad():
        whole.weight.copy_(integers(7, 4, seed=1))
    model = nn.Sequential(copy.deepcopy(whole))
    parallelize(model, {"0": "vocab"})
    mine = shard_slice(split_evenly(7, world), rank)
    tokens, dy = torch.tensor([0, 3, 6, 3]), integers(4, 7, seed=2)
    logits = tied_logits(model[0](tokens), model[0])
    logits.backward(dy[:, mine])
    expected = whole(tokens) @ whole.weight.t()
    expected.backward(dy)
    right = torch.equal(logits, expected[:, mine])
    return [] if right and torch.equal(model[0].weight.grad, whole.weight.grad[mine]) else ["tied"]


def messages(rank, world):
    class Odd(nn.Linear):
        pass

    def model(**other):
        linears = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
        return nn.ModuleDict({**linears, "e": nn.Embedding(5, 4), **other})

    def tied():
        m = model(h=nn.Linear(4, 5, bias=False))
        m["h"].weight = m["e"].weight
        return m

    tp = parallelize(model(), {"a": "column"})
    state = {**model().state_dict(), "a.weight": torch.zeros(4, 5)}
    cases = {
        "ValueError parallelize: plan: expected patterns that match modules, got 'blocks.*.q', which matches none of "
        "a, b, e, ...": lambda: parallelize(model(), {"blocks.*.q": "column"}),
        "TypeError parallelize: plan: e as 'column': "
        "expected torch.nn.Linear or trainwright.nn.Linear, got Embedding": (
            lambda: parallelize(model(), {"e": "column"})
        ),
        "TypeError parallelize: plan: o as 'row': expected torch.nn.Linear or trainwright.nn.Linear, got Odd": (
            lambda: parallelize(model(o=Odd(2, 2)), {"o": "row"})
        ),
        "ValueError parallelize: plan['a']: expected one of 'column', 'row', 'vocab', 'sequence', got 'diagonal'": (
            lambda: parallelize(model(), {"a": "diagonal"})
        ),
        "ValueError parallelize: plan['a']: expected options of RowParallelLinear, got 'rows'": lambda: (
            parallelize(model(), {"a": Style("row", {"rows": 1})})
        ),
        "TypeError parallelize: group: expected None or a process group that this rank is in, got int": lambda: (
            parallelize(model(), {"a": "row"}, group=7)
        ),
        "TypeError parallelize: plan['a']: expected a str or a Style, got int": lambda: parallelize(model(), {"a": 1}),
        "ValueError parallelize: plan: expected one pattern for a, got 'a' and '[ab]'": lambda: (
            parallelize(model(), {"a": "column", "[ab]": "row"})
        ),
        "ValueError parallelize: plan: "
        "expected modules that share a parameter to be split alike, got e vocab, h whole": (
            lambda: parallelize(tied(), {"e": "vocab"})
        ),
        "ValueError parallelize: plan: f: expected a linear layer without activation, got gelu": lambda: (
            parallelize(model(f=tw.nn.Linear(2, 2, activation="gelu")), {"f": "column"})
        ),
        "ValueError load_full_state_dict: a.weight: expected shape (4, 4), got (4, 5)": lambda: (
            tp.load_full_state_dict(state)
        ),
        "ValueError load_full_state_dict: state: "
        "expected the names of the model, got ['b.bias'] missing, [] too many": (
            lambda: tp.load_full_state_dict({k: v for k, v in state.items() if k != "b.bias"})
        ),
        "ValueError parallelize: plan: expected the same plan on every rank, got plans that differ": lambda: (
            parallelize(model(), {"a": "column" if rank == 0 else "row"})
        ),
    }  # fmt: skip
    return unexpected(cases)


class Shared(nn.Module):
    """A layer of which the ranks of a group hold more than they need, in both dimensions, between others."""

    def __init__(self, width=6, hidden=7):
        super().__init__()
        self.norm = tw.nn.RMSNorm(width)
        self.up = nn.Linear(width, hidden)
        self.shared = nn.Linear(width, 5)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.relu(self.up(y))), self.shared(y)


def averaged_and_divided(rank, world):
    """2 x 2 ranks: split over neighbours, averaged over the others by token weight, the optimizer in every stage of
    Zero; the norm, by which all gradients are cut short, and the parameters are those of one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"].get_group(), mesh["tp"].get_group()
    overlapping = Style("column", {"ranges": [(0, 3), (2, 5)]})
    wrong = []
    for stage in (0, 1, 2, 3):
        torch.manual_seed(3)
        whole = Shared()
        model = copy.deepcopy(whole)
        parts = parallelize(model, {"up": "column", "down": "row", "shared": overlapping}, group=tp)
        options = {"lr": 3.0, "max_grad_norm": 0.05}
        kind = parts.optimizer_class(tw.optim.SGD)
        if stage:
            parallel = Zero(model, kind, stage=stage, group=dp, bucket_mb=0.0002, **options)
            ours = parallel.optimizer
        else:
            parallel = DataParallel(model, group=dp)
            ours = kind(model.parameters(), **options)
        theirs = tw.optim.SGD(whole.parameters(), **options)
        for step in range(2):
            seeds = (torch.Generator().manual_seed(10 * step + r) for r in (0, 1))
            batches = [torch.randn(4, 6, generator=g) for g in seeds]

            def loss(m, x, sharded=False):
                y, z = m(x)
                if sharded:  # both have output 2
                    z = z[:, :3] if rank % 2 == 0 else z[:, 1:]
                return y.square().mean() + z.square().sum() / 20

            parallel.loss_weight(1 + rank // 2)
            loss(parallel, batches[rank // 2], True).backward()
            for weight, x in zip((1, 2), batches):
                (loss(whole, x) * weight / 3).backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            norms = [o.last_step.grad_norm for o in (ours, theirs)]
            if not parallel_close("training gradient norm", *norms):
                wrong.append(f"stage {stage}: norm {norms}")
        with parallel.gathered() if stage else contextlib.nullcontext():
            for name, p in model.named_parameters():
                full = parts.whole(name, p, everywhere=True)
                if not parallel_close("sharded gradient", full, whole.get_parameter(name)):
                    wrong.append(f"stage {stage}: {name}")
        if stage:
            try:
                parallel.clip_grad_norm(1.0)
                wrong.append("clip_grad_norm")
            except RuntimeError as error:
                wrong += [] if "give the optimizer max_grad_norm" in str(error) else [error]
    return wrong
