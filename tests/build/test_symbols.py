"""The compiled modules depend on torch's stable C functions alone, and on no particular Python."""

import pathlib
import re
import subprocess

import pytest
import trainwright

PACKAGE = pathlib.Path(trainwright.__file__).parent
LIBRARY = PACKAGE / "_C.abi3.so"


def symbols(kind):
    out = subprocess.run(
        ["nm", "-D", kind, LIBRARY], capture_output=True, text=True, check=True
    ).stdout
    return [line.split()[-1].split("@")[0] for line in out.splitlines()]


def test_no_cpp_symbol_of_torch_is_imported():
    """A mangled name of at::, c10:: or torch:: ties the module to one torch build."""
    undefined = symbols("--undefined-only")
    assert not [s for s in undefined if re.match(r"_Z\w*N[KVRO]*(2at|3c10|5torch)", s)]
    assert any(s.startswith(("aoti_torch_", "torch_")) for s in undefined), "not linked to torch?"


def test_python_symbols_are_of_the_limited_api():
    python = {s for s in symbols("--undefined-only") if s.startswith(("Py", "_Py"))}
    assert python == {"PyModule_Create2"}


def test_only_the_module_entry_is_exported():
    """Hidden visibility: our symbols cannot clash with those of another extension in the process."""
    standard = re.compile(r"_Z(N|NK|TI|TS|TV|ZN|)St|__bss_start|_edata|_end")
    assert [s for s in symbols("--defined-only") if not standard.match(s)] == ["PyInit__C"]


@pytest.mark.parametrize("library", ["libtorch.so", "libtorch_cpu.so"])
def test_needs_torch_itself(library):
    out = subprocess.run(["objdump", "-p", LIBRARY], capture_output=True, text=True, check=True)
    assert re.search(rf"NEEDED\s+{re.escape(library)}", out.stdout)
