"""Build of Trainwright's compiled modules. Sources are found by glob: a new op edits nothing here.

TRAINWRIGHT_BUILD=auto|none|cpu|cuda
    auto   (default) the CPU modules if torch and a C++ compiler are there, and the CUDA module if nvcc and a CUDA build
           of torch are there too; a pure-Python install, said in one line, otherwise
    none   pure Python: every op runs through its torch reference
    cpu    the CPU modules, or fail
    cuda   the CPU modules and the CUDA module, or fail (links against a CPU wheel of torch too)
`python setup.py build_cuda_on_vgpu` compiles the CUDA kernels for the virtual GPU into build/vgpu (nvcc; for tests).
MAX_JOBS, CXX, TORCH_CUDA_ARCH_LIST, TRAINWRIGHT_DEBUG=1 and TRAINWRIGHT_SANITIZE=address,undefined are honoured.

A compiler that is present but fails always fails the build: nothing degrades silently.
"""

import functools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'"(.+)"', (ROOT / "python/trainwright/_version.py").read_text()).group(1)
CPU_ISAS = {
    "base": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c",
               "-mprefer-vector-width=512"],
}  # fmt: skip
DEFAULT_CUDA_ARCHS = "8.0;9.0a;10.0a;12.0+PTX"  # 8.6 and 8.9 run the code of 8.0
TORCH_TARGET = "0x020b000000000000"  # stable ABI of torch 2.11: loads in every later torch too


def torch_paths():
    """Include dirs, library dir and version of torch, or None. Does not import torch unless it is there."""
    try:
        import torch
        from torch.utils.cpp_extension import include_paths, library_paths
    except ImportError:
        return None
    return {
        "include": include_paths(),
        "lib": library_paths()[0],
        "version": torch.__version__,
        "cuda": torch.version.cuda,
    }


@functools.cache
def decide():
    """What to build, and the reason for each thing that is not built."""
    asked = os.environ.get("TRAINWRIGHT_BUILD", "auto")
    if asked not in ("auto", "none", "cpu", "cuda"):
        sys.exit(f"TRAINWRIGHT_BUILD: expected auto, none, cpu or cuda, got {asked!r}")
    torch = None if asked == "none" else torch_paths()
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    missing = (
        "torch cannot be imported here (with pip use --no-build-isolation)" if torch is None
        else "no C++ compiler (g++)" if compiler is None
        else "ninja is not installed" if find_ninja() is None
        else "Python.h was not found (Debian: apt-get install python3-dev)" if not has_python_headers()
        else None
    )  # fmt: skip
    cuda_missing = (
        "no .cu file" if not sources("csrc/cuda", "*.cu")
        else "nvcc not found" if find_nvcc() is None
        else "this torch is a CPU build" if torch is not None and torch["cuda"] is None and asked == "auto"
        else None
    )  # fmt: skip
    if asked == "none":
        return {"cpu": "TRAINWRIGHT_BUILD=none", "cuda": "TRAINWRIGHT_BUILD=none"}, None
    if asked in ("cpu", "cuda") and missing:
        sys.exit(f"TRAINWRIGHT_BUILD={asked}: {missing}")
    if asked == "cuda" and cuda_missing:
        sys.exit(f"TRAINWRIGHT_BUILD=cuda: {cuda_missing}")
    if missing:
        print(f"trainwright: installing pure Python: {missing}", file=sys.stderr)
    reasons = {
        "cpu": missing,
        "cuda": missing or ("TRAINWRIGHT_BUILD=cpu" if asked == "cpu" else cuda_missing),
    }
    return reasons, torch


def has_python_headers():
    return (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()


def find_nvcc():
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


def cuda_home():
    """The toolkit's folder. nvcc itself may be a wrapper somewhere else."""
    candidates = [
        os.environ.get("CUDA_HOME"),
        Path(find_nvcc()).resolve().parent.parent,
        "/usr/local/cuda",
    ]
    return next(
        (p for p in map(Path, filter(None, candidates)) if (p / "lib64").exists()), candidates[1]
    )


def find_ninja():
    """The ninja program: of the running environment first, whether or not it is activated."""
    return shutil.which("ninja", path=str(Path(sys.executable).parent)) or shutil.which("ninja")


def cuda_archs():
    return os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_CUDA_ARCHS


def cuda_arch_flags():
    flags = []
    for arch in cuda_archs().replace(" ", ";").split(";"):
        number = arch.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


class NinjaBuild(build_ext):
    """Writes one build.ninja for all modules and runs it; setuptools only learns where the results lie."""

    def run(self):
        reasons, torch = decide()
        out_dir = (
            ROOT / "python/trainwright" if self.inplace else Path(self.build_lib) / "trainwright"
        )
        out_dir.mkdir(parents=True, exist_ok=True)
        modules = []
        if torch is not None and reasons["cpu"] is None:
            modules.append(cpu_module(torch, out_dir))
            # _host and _vgpu serve tests and kernel authors, for one Python version: not in wheels, which are for all.
            here = self.inplace or self.editable_mode or os.environ.get("TRAINWRIGHT_SANITIZE")
            if here and pybind_include() is not None:
                modules.append(host_module(out_dir))
                modules.append(vgpu_module(out_dir))
            if reasons["cuda"] is None:
                modules.append(cuda_module(torch, out_dir))
            run_ninja(modules)
        for left_over in set(out_dir.glob("_*.so")) - {module["out"] for module in modules}:
            left_over.unlink()  # of an earlier build that was asked for more
        built = [module["name"] for module in modules]
        compiler = os.environ.get("CXX", "g++")
        version = (
            subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
            if built
            else ""
        )
        record = {
            "version": VERSION,
            "built": built,
            "reasons": {k: v for k, v in reasons.items() if v},
            "torch": torch["version"] if torch else None,
            "torch_target": "2.11",
            "compiler": version.split("\n")[0] or None,
            "cpu_isas": list(isas()) if built else [],
            "cuda_archs": cuda_archs() if "_C_cuda" in built else None,
        }
        (out_dir / "_build_info.json").write_text(json.dumps(record, indent=2) + "\n")

    def get_outputs(self):
        out_dir = Path(self.build_lib) / "trainwright"
        return [str(p) for p in out_dir.glob("_*.so")] if out_dir.exists() else []


def isas():
    return CPU_ISAS if platform.machine() in ("x86_64", "AMD64") else {"base": []}


def pybind_include():
    try:
        import pybind11
    except ImportError:
        return None
    return pybind11.get_include()


# ---- modules: name, output, objects [(source, object, rule, flags)] and link flags


def include_flags():
    python = sysconfig.get_paths()["include"]
    return [f"-I{ROOT}/csrc", f"-I{ROOT}/csrc/include", f"-I{python}"]


def stable_flags():
    return [f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", "-DPy_LIMITED_API=0x030a0000"]


def link_torch(torch):
    return [f"-L{torch['lib']}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]


def sources(folder, pattern):
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / folder).glob(pattern))]


def cpu_module(torch, out_dir):
    """Each op file is compiled once for the torch bindings and once per instruction set, without torch."""
    bindings = include_flags() + [f"-isystem{path}" for path in torch["include"]] + stable_flags()
    info = f"'-DTW_BUILD_INFO=\"torch={torch['version']} target=2.11\"'"
    objects = [("csrc/module.cpp", "module.o", "cxx", [*bindings, info])]
    for source in sources("csrc/cpu", "*.cpp"):
        stem = Path(source).stem
        objects.append((source, f"{stem}.o", "cxx", bindings))
        for isa, flags in isas().items():
            flags = [*include_flags(), f"-DTW_CPU_ISA={isa}", *flags]
            objects.append((source, f"{stem}.{isa}.o", "cxx", flags))
    return {
        "name": "_C",
        "out": out_dir / "_C.abi3.so",
        "objects": objects,
        "link": link_torch(torch),
    }


def host_module(out_dir):
    flags = [*include_flags(), f"-isystem{pybind_include()}", "-fvisibility=hidden"]
    objects = [(s, f"host_{Path(s).stem}.o", "cxx", flags) for s in sources("csrc/host", "*.cpp")]
    out = out_dir / f"_host{sysconfig.get_config_var('EXT_SUFFIX')}"
    return {"name": "_host", "out": out, "objects": objects, "link": []}


def vgpu_module(out_dir):
    """The virtual GPU. Built where it runs, so it may use this CPU's AVX2: its lanes are vectorised loops."""
    flags = [*include_flags(), f"-isystem{pybind_include()}", "-std=c++20", "-ffp-contract=off"]
    flags += [
        "-fno-strict-aliasing",
        "-Wno-restrict",
    ]  # the latter: false alarms of GCC 12 in std::string
    flags += CPU_ISAS["avx2"] if has_avx2() else []
    objects = []
    for source in sources("csrc/vgpu", "*.cpp"):
        stem = Path(source).stem
        test_only = stem.endswith("_binding")  # not run by kernels: quick to compile instead
        objects.append((source, f"vgpu_{stem}.o", "cxx", [*flags, "-O1"] if test_only else flags))
    out = out_dir / f"_vgpu{sysconfig.get_config_var('EXT_SUFFIX')}"
    return {"name": "_vgpu", "out": out, "objects": objects, "link": ["-pthread"]}


def has_avx2():
    cpuinfo = Path("/proc/cpuinfo")
    words = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return {"avx2", "fma", "f16c"} <= words


def cuda_module(torch, out_dir):
    """Needs no CUDA build of torch: it calls torch's stable C functions and the CUDA runtime only."""
    flags = include_flags() + [f"-isystem={path}" for path in torch["include"]] + stable_flags()
    flags += ["-DUSE_CUDA", *cuda_arch_flags()]
    objects = [(s, f"{Path(s).stem}.cuda.o", "nvcc", flags) for s in sources("csrc/cuda", "*.cu")]
    link = [*link_torch(torch), f"-L{cuda_home()}/lib64", "-lcudart"]
    return {"name": "_C_cuda", "out": out_dir / "_C_cuda.abi3.so", "objects": objects, "link": link}


def vgpu_cuda_modules(torch, out_dir):
    """The CUDA ops for CPU tensors, on the virtual GPU: kernels as PTX, and what stands in for libcudart."""
    runtime = out_dir / "libtw_cudart.so"
    flags = [
        *include_flags(),
        f"-isystem{cuda_home()}/include",
        "-std=c++20",
        "-fvisibility=hidden",
    ]
    objects = [(s, f"{Path(s).stem}.o", "cxx", flags) for s in sources("csrc/vgpu/cudart", "*.cpp")]
    modules = [
        {"name": "libtw_cudart", "out": runtime, "objects": objects, "link": ["-Wl,-Bsymbolic"]}
    ]
    flags = include_flags() + [f"-isystem={path}" for path in torch["include"]] + stable_flags()
    flags += ["-DTW_VIRTUAL_GPU", "-gencode=arch=compute_80,code=compute_80", "--no-compress"]
    objects = [
        (s, f"{Path(s).stem}.vgpu.o", "nvcc", flags)
        for s in sources("csrc/cuda", "*.cu")
        if Path(s).stem != "module"
    ]
    link = [*link_torch(torch), str(runtime)]
    out = out_dir / "libtw_cuda_ops.so"
    modules.append(
        {"name": "libtw_cuda_ops", "out": out, "objects": objects, "link": link, "after": runtime}
    )
    return modules


class CudaOnVgpuBuild(Command):
    description = "compile the CUDA kernels for the virtual GPU"
    user_options = []  # noqa: RUF012  (setuptools wants a list)

    def initialize_options(self):
        pass

    def finalize_options(self):
        pass

    def run(self):
        torch = torch_paths()
        missing = "torch" if torch is None else "nvcc" if find_nvcc() is None else None
        if missing or find_ninja() is None:
            sys.exit(f"build_cuda_on_vgpu: needs {missing or 'ninja'}")
        out_dir = ROOT / "build/vgpu"
        run_ninja(vgpu_cuda_modules(torch, out_dir), "vgpu")


# The last two are false alarms inside GCC 12's intrinsics headers.
WARNINGS = "-Wall -Wextra -Werror -Wno-psabi -Wno-unknown-pragmas -Wno-uninitialized -Wno-maybe-uninitialized"
CXX_FLAGS = "-std=c++17 -fPIC -fvisibility=hidden -fno-math-errno -fno-trapping-math"


def rounding_flags(source, rule):
    """A source with the line "// build: no fused multiply-add" rounds the same on every backend."""
    if "\n// build: no fused multiply-add\n" not in (ROOT / source).read_text(encoding="utf-8"):
        return []
    return ["-fmad=false"] if rule == "nvcc" else ["-ffp-contract=off"]


def run_ninja(modules, folder="ninja"):
    debug = os.environ.get("TRAINWRIGHT_DEBUG") == "1"
    sanitize = os.environ.get("TRAINWRIGHT_SANITIZE", "")
    kind = [folder, *(["debug"] if debug else []), *sanitize.split(",")]
    work = ROOT / "build" / "-".join(filter(None, kind))
    work.mkdir(parents=True, exist_ok=True)
    (work / "build.ninja").write_text(ninja_text(modules, work, debug, sanitize))
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    # From the source tree: its compilers' lists of dependencies name the sources relative to it.
    ninja = [find_ninja(), "-f", str(work / "build.ninja"), "-j", jobs, "--quiet"]
    subprocess.run(ninja, check=True, cwd=ROOT)


def ninja_text(modules, work, debug, sanitize):
    san = [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"] if sanitize else []
    optimise = ["-O1", "-g1" if sanitize else "-g"] if debug or sanitize else ["-O3"]
    checks = ["-D_GLIBCXX_ASSERTIONS"] if sanitize else []  # indices within what a vector holds
    cxx = [*CXX_FLAGS.split(), *optimise, *WARNINGS.split(), *san, *checks]
    cxx.append("-DTW_DEBUG" if debug else "-DNDEBUG")
    nvcc_host = "-fPIC,-fvisibility=hidden,-Wall,-Wno-unknown-pragmas"
    lines = [
        "ninja_required_version = 1.5",
        f"builddir = {work}",
        f"cxx = {os.environ.get('CXX', 'g++')}",
        f"nvcc = {find_nvcc() or 'nvcc'}",
        "rule cxx",
        f"  command = $cxx -MMD -MF $out.d {' '.join(cxx)} $flags -c $src -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $name",
        "rule nvcc",
        f"  command = $nvcc -MD -MF $out.d -std=c++17 -O3 -lineinfo --expt-relaxed-constexpr "
        f"--expt-extended-lambda -Xcompiler {nvcc_host} $flags -c $src -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $name",
        "rule link",
        f"  command = $cxx -shared {' '.join(san)} -o $out.tmp $in $flags && mv $out.tmp $out",
        "  description = link $name",
    ]  # fmt: skip
    for module in modules:
        names = []
        for source, obj, rule, flags in module["objects"]:
            path = work / obj
            names.append(str(path))
            lines += [
                f"build {path}: {rule} {ROOT / source}",
                f"  src = {source}",
                f"  name = {obj}",
            ]
            lines.append(f"  flags = {' '.join([*flags, *rounding_flags(source, rule)])}")
        after = f" | {module['after']}" if "after" in module else ""
        lines.append(f"build {Path(module['out']).resolve()}: link {' '.join(names)}{after}")
        lines += [f"  name = {module['name']}", f"  flags = {' '.join(module['link'])}"]
    return "\n".join(lines) + "\n"


try:
    from setuptools.command.bdist_wheel import bdist_wheel

    class AbiWheel(bdist_wheel):
        """Tag cp310-abi3, one wheel for every Python from 3.10 on; py3-none-any without compiled modules."""

        def finalize_options(self):
            self.py_limited_api = "cp310"
            super().finalize_options()

        def get_tag(self):
            reasons, _ = decide()
            return super().get_tag() if reasons["cpu"] is None else ("py3", "none", "any")

    commands = {"bdist_wheel": AbiWheel}
except ImportError:
    commands = {}
commands |= {"build_ext": NinjaBuild, "build_cuda_on_vgpu": CudaOnVgpuBuild}

setup(
    version=VERSION,
    ext_modules=[Extension("trainwright._C", sources=[], py_limited_api=True)],
    cmdclass=commands,
)
