"""Numbers and switches that an optimizer cannot work with are refused before any work, with their name, what was
expected and what was given: by the constructor and by `add_param_group`."""

import math

import pytest
import torch
import trainwright as tw

NAN, TWO = math.nan, torch.ones(2)
NUMBER = [("x", TypeError), (None, TypeError), (True, TypeError), (NAN, ValueError), (math.inf, ValueError),
          (TWO, ValueError), (torch.tensor(NAN), ValueError)]  # fmt: skip
NOT_NEGATIVE = [*NUMBER, (-1.0, ValueError), (torch.tensor(-1.0), ValueError)]
SWITCH = [(1, TypeError), ("x", TypeError)]
BETAS = [(0.9, TypeError), (None, TypeError), ((0.9,), ValueError), ((0.9, 0.9, 0.9), ValueError),
         ((1.0, 0.9), ValueError), ((-0.1, 0.9), ValueError), ((0.9, NAN), ValueError), (("x", 0.9), TypeError),
         ((0.9, TWO), ValueError)]  # fmt: skip
BAD = {
    "lr": NOT_NEGATIVE,
    "eps": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "momentum": NOT_NEGATIVE,
    "alpha": [*NOT_NEGATIVE, (1.5, ValueError)],
    "dampening": NUMBER,
    "betas": BETAS,
    "amsgrad": SWITCH,
    "centered": SWITCH,
    "decoupled_weight_decay": SWITCH,
    "maximize": SWITCH,
    "nesterov": [*SWITCH, (True, ValueError)],  # SGD: without a momentum
}
ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
HAS = {
    "AdamW": ADAM,
    "Adam": (*ADAM, "decoupled_weight_decay"),
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"),
    "Lion": ("lr", "betas", "weight_decay", "maximize"),
    "Lamb": ("lr", "betas", "eps", "weight_decay", "maximize"),
    "Muon": ("lr", "weight_decay", "momentum", "nesterov", "eps"),
}


def leaf():
    return torch.ones(2, 2, requires_grad=True)


@pytest.mark.parametrize("name", HAS)
def test_bad_numbers_and_switches(name):
    make = getattr(tw.optim, name)
    for option in HAS[name]:
        for value, error in BAD[option]:
            if name == "Muon" and value is True and option == "nesterov":
                continue  # which it may be
            message = rf"^{name}: {option}(\[\d\])?: expected .*, got "
            with pytest.raises(error, match=message):
                make([leaf()], **{option: value})
            optimizer = make([leaf()])
            with pytest.raises(error, match=message):
                optimizer.add_param_group({"params": [leaf()], option: value})
            assert len(optimizer.param_groups) == 1


def test_numbers_may_be_tensors_of_one_and_numpy_scalars():
    numpy = pytest.importorskip("numpy")
    for value in (torch.tensor(0.5), torch.full((1,), 0.5), numpy.float32(0.5), numpy.float64(0.5)):
        p = leaf()
        p.grad = torch.ones(2, 2)
        tw.optim.Lion([p], lr=value).step()
        assert p.tolist() == [[0.5, 0.5], [0.5, 0.5]]
