"""The example in the docstring of every public function and class runs, and there is one for every op."""

import doctest
import importlib
import inspect
import pkgutil

import pytest
import torch
import trainwright as tw


def _modules():
    """Every module of the package but the Triton kernels, `info`'s __main__ and the training program."""
    for module in pkgutil.walk_packages(tw.__path__, "trainwright."):
        parts = module.name.split(".")
        if "kernels" not in parts and not parts[-1].startswith(("_C", "_host", "__main__")):
            yield importlib.import_module(module.name)


def _examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in _modules():
        for test in finder.find(module):
            if test.examples:
                yield pytest.param(test, id=test.name)


@pytest.mark.parametrize("example", list(_examples()))
def test_example(example):
    torch.manual_seed(0)
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.DocTestRunner(optionflags=options).run(example)
    assert result.failed == 0 and result.attempted > 0


@pytest.mark.parametrize("name", tw.ops.__all__)
def test_every_op_documents_itself(name):
    """Arguments, returns, errors, numerics and an example; every argument is named."""
    function = getattr(tw, name)
    signature, text = inspect.signature(function), inspect.getdoc(function)
    assert ">>>" in text
    returns = [] if signature.return_annotation in (None, "None") else ["Returns"]
    for section in ("Args", "Raises", "Numerics", *returns):
        assert f"\n{section}:" in text, section
    missing = [p for p in signature.parameters if p not in text]
    assert not missing, f"{name}: not documented: {missing}"
