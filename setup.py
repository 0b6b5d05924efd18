"""Build of Trainwright's compiled modules. Sources are found by glob: a new op edits nothing here.

TRAINWRIGHT_BUILD=auto|none|cpu|cuda
    auto   (default) the CPU modules if torch and a C++ compiler are there, and the CUDA module if nvcc and a CUDA build
           of torch are there too; a pure-Python install, said in one line, otherwise
    none   pure Python: every op runs through its torch reference
    cpu    the CPU modules, or fail
    cuda   the CPU modules and the CUDA module, or fail (links against a CPU wheel of torch too)
MAX_JOBS, CXX, TORCH_CUDA_ARCH_LIST, TRAINWRIGHT_DEBUG=1 and TRAINWRIGHT_SANITIZE=address,undefined are honoured.

A compiler that is present but fails always fails the build: nothing degrades silently.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
VERSION = "0.1.0"
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
        else None
    )  # fmt: skip
    nvcc = find_nvcc()
    cuda_missing = (
        "nvcc not found" if nvcc is None
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


def find_nvcc():
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


def find_ninja():
    """The ninja program: of the running environment first, whether or not it is activated."""
    return shutil.which("ninja", path=str(Path(sys.executable).parent)) or shutil.which("ninja")


def cuda_arch_flags():
    flags = []
    for item in (
        os.environ.get("TORCH_CUDA_ARCH_LIST", DEFAULT_CUDA_ARCHS).replace(" ", ";").split(";")
    ):
        if item:
            number = item.removesuffix("+PTX").replace(".", "")
            flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
            if item.endswith("+PTX"):
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
        built = []
        if torch is not None and reasons["cpu"] is None:
            debug = os.environ.get("TRAINWRIGHT_DEBUG") == "1"
            sanitize = os.environ.get("TRAINWRIGHT_SANITIZE", "")
            work = (
                ROOT
                / "build"
                / (
                    "ninja"
                    + ("-debug" if debug else "")
                    + ("-" + sanitize.replace(",", "-") if sanitize else "")
                )
            )
            work.mkdir(parents=True, exist_ok=True)
            modules = self.modules(torch, reasons["cuda"] is None, work, out_dir)
            (work / "build.ninja").write_text(ninja_text(modules, work, debug, sanitize))
            jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
            subprocess.run([find_ninja(), "-C", str(work), "-j", jobs, "--quiet"], check=True)
            built = [module["name"] for module in modules]
        record = {
            "version": VERSION,
            "built": built,
            "reasons": {k: v for k, v in reasons.items() if v},
            "torch": torch["version"] if torch else None,
            "torch_target": "2.11",
            "compiler": subprocess.run(
                [os.environ.get("CXX", "g++"), "--version"], capture_output=True, text=True
            ).stdout.split("\n")[0]
            if built
            else None,
            "cpu_isas": list(isas()) if built else [],
            "cuda_archs": os.environ.get("TORCH_CUDA_ARCH_LIST", DEFAULT_CUDA_ARCHS)
            if "_C_cuda" in built
            else None,
        }
        (out_dir / "_build_info.json").write_text(json.dumps(record, indent=2) + "\n")

    def modules(self, torch, with_cuda, work, out_dir):
        python_include = sysconfig.get_paths()["include"]
        common = [f"-I{ROOT}/csrc", f"-I{ROOT}/csrc/include", f"-I{python_include}"]
        torch_flags = [f"-isystem{path}" for path in torch["include"]]
        stable = [f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", "-DPy_LIMITED_API=0x030a0000"]
        info = f"'-DTW_BUILD_INFO=\"torch={torch['version']} target=2.11\"'"
        objects = [("csrc/module.cpp", "module.o", "cxx", common + torch_flags + stable + [info])]
        for source in sorted((ROOT / "csrc/cpu").glob("*.cpp")):
            relative = str(source.relative_to(ROOT))
            objects.append((relative, f"{source.stem}.o", "cxx", common + torch_flags + stable))
            for isa, flags in isas().items():
                objects.append(
                    (
                        relative,
                        f"{source.stem}.{isa}.o",
                        "cxx",
                        [*common, f"-DTW_CPU_ISA={isa}", *flags],
                    )
                )
        link_torch = [f"-L{torch['lib']}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
        result = [
            {
                "name": "_C",
                "out": out_dir / "_C.abi3.so",
                "objects": objects,
                "link": link_torch,
                "rule": "cxx",
            }
        ]

        pybind = pybind_include()
        if pybind is not None:
            suffix = sysconfig.get_config_var("EXT_SUFFIX")
            sources = sorted((ROOT / "csrc/host").glob("*.cpp"))
            result.append({
                "name": "_host", "out": out_dir / f"_host{suffix}", "link": [], "rule": "cxx",
                "objects": [(str(s.relative_to(ROOT)), f"host_{s.stem}.o", "cxx", [*common, f"-isystem{pybind}", "-fvisibility=hidden"]) for s in sources],  # noqa: E501
            })  # fmt: skip
        if with_cuda:
            cuda_home = Path(find_nvcc()).resolve().parent.parent
            nvcc_home = next(
                (
                    p
                    for p in (
                        Path(os.environ.get("CUDA_HOME", "/nonexistent")),
                        Path("/usr/local/cuda"),
                        cuda_home,
                    )
                    if (p / "include").exists() and (p / "lib64").exists()
                ),
                cuda_home,
            )
            torch_nvcc = [f"-isystem={path}" for path in torch["include"]]
            flags = common + torch_nvcc + stable + ["-DUSE_CUDA", *cuda_arch_flags()]
            sources = sorted((ROOT / "csrc/cuda").glob("*.cu"))
            result.append({
                "name": "_C_cuda", "out": out_dir / "_C_cuda.abi3.so", "rule": "cxx",
                "objects": [(str(s.relative_to(ROOT)), f"{s.stem}.cuda.o", "nvcc", flags) for s in sources],
                "link": [*link_torch, f"-L{nvcc_home}/lib64", "-lcudart"],
            })  # fmt: skip
        return result

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


def ninja_text(modules, work, debug, sanitize):
    optimise = ["-O1", "-g"] if debug or sanitize else ["-O3"]
    san = [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"] if sanitize else []
    warnings = [
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-psabi",
        "-Wno-unknown-pragmas",
        "-Wno-uninitialized",
        "-Wno-maybe-uninitialized",
    ]  # false alarms inside GCC 12's intrinsics headers
    cxx = [
        "-std=c++17",
        "-fPIC",
        "-fvisibility=hidden",
        "-fno-math-errno",
        "-fno-trapping-math",
        *optimise,
        *warnings,
        *san,
    ]
    cxx.append("-DNDEBUG" if not debug else "-DTW_DEBUG")
    nvcc_host = "-fPIC,-fvisibility=hidden,-Wall,-Wno-unknown-pragmas"
    lines = [
        "ninja_required_version = 1.5",
        f"cxx = {os.environ.get('CXX', 'g++')}",
        f"nvcc = {find_nvcc() or 'nvcc'}",
        "rule cxx",
        f"  command = cd {ROOT} && $cxx -MMD -MF $out.d {' '.join(cxx)} $flags -c $src -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $name",
        "rule nvcc",
        f"  command = cd {ROOT} && $nvcc -MD -MF $out.d -std=c++17 -O3 -lineinfo --expt-relaxed-constexpr "
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
            path = (
                work / obj
            )  # absolute: the compile commands run in the source tree, for readable messages
            names.append(str(path))
            lines += [
                f"build {path}: {rule} {ROOT / source}",
                f"  src = {source}",
                f"  name = {obj}",
                f"  flags = {' '.join(flags)}",
            ]
        lines += [
            f"build {Path(module['out']).resolve()}: link {' '.join(names)}",
            f"  name = {module['name']}",
            f"  flags = {' '.join(module['link'])}",
        ]
    return "\n".join(lines) + "\n"


try:
    from setuptools.command.bdist_wheel import bdist_wheel

    class AbiWheel(bdist_wheel):
        """Tag cp310-abi3: one wheel for every Python from 3.10 on."""

        def finalize_options(self):
            reasons, torch = decide()
            if torch is not None and reasons["cpu"] is None:
                self.py_limited_api = "cp310"
            super().finalize_options()

    commands = {"build_ext": NinjaBuild, "bdist_wheel": AbiWheel}
except ImportError:
    commands = {"build_ext": NinjaBuild}

setup(
    version=VERSION,
    ext_modules=[Extension("trainwright._C", sources=[], py_limited_api=True)],
    cmdclass=commands,
)
