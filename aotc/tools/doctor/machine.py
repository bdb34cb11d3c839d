"""This machine as aotc sees it: Python, hardware, memory for code, folders, keys, and what a build needs."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sysconfig
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

import aotc
from aotc.machine.cpp_compiler import NOT_RUN, compiler_name, compiler_version, how_to_install, is_foreign
from aotc.machine.targets import CPU_LEVELS, below_all_targets, best_cpu_target, cuda_target
from aotc.machine.this_host import cpu_flags, glibc_version, libstdcxx_versions, refuse_free_threading
from aotc.standalone.cpu_environment import open_cpu
from aotc.store.cache_folder import cache_folder
from aotc.store.files.anonymous import anonymous_file
from aotc.store.opening import open_readable
from aotc.store.reference import is_remote
from aotc.store.signing.trust import KEYS_VARIABLE, read_trust
from aotc.tools.doctor.checks import Check, CheckStatus, check_folder, failing
from aotc.tools.doctor.remotes import check_credentials, check_remote

HERE = "this machine"
BUILDING = "building"

EXTRA = {
    "jinja2": "Jinja2",
    "numpy": "",
    "elftools": "pyelftools",
    "pygments": "Pygments",
    "yaml": "PyYAML",
    "rich": "",
}
"""The modules of the extra `build` in pyproject.toml but click, without which no command runs, and their packages."""


def check_machine(store: str, *, with_torch: bool) -> list[Check]:
    """Everything but torch's import (`check_torch`). `store` is the folder or URL that commands take by default."""
    return [
        *_python(),
        _cpu(targets_here() if with_torch else [best_cpu_target(cpu_flags())]),
        *(_gpus() if with_torch else ()),
        _glibc(),
        _libstdcxx(),
        *check_code_memory(HERE),
        *([_calls()] if with_torch else ()),
        *check_runtime(HERE, "warn" if with_torch else "fail"),
        *_folders(),
        *check_store(store),
        *_keys(),
        *check_credentials(),
        *(check_toolchain() if with_torch else ()),
    ]


def _python() -> list[Check]:
    checks: list[Check] = []
    with failing(checks, HERE, "Python"):
        refuse_free_threading()
        checks.append(Check(HERE, "Python", "ok", f"{platform.python_version()}, aotc {aotc.__version__}"))
    return checks


def _calls() -> Check:
    from aotc.runtime.native import load_core

    try:
        load_core()
    except ImportError as error:
        hint = "install g++ and then aotc again, or a wheel of aotc; calls take longer until then, and give the same"
        return Check(HERE, "calls", "warn", f"made by Python: {error}", "the extension aotc.core", hint)
    return Check(HERE, "calls", "ok", "made by the extension aotc.core")


def check_runtime(part: str, lack: CheckStatus) -> list[Check]:
    """Whether the standalone runtime can be opened."""
    checks: list[Check] = []
    with failing(checks, part, "standalone", lack):
        open_cpu()
        checks.append(Check(part, "standalone", "ok", "aotc.standalone can run code for CPUs, without torch"))
    return checks


# -- hardware ---------------------------------------------------------------------------------------------------------


def targets_here() -> list[str]:
    """The most capable target of this CPU, and the target of each kind of GPU that torch sees."""
    import torch

    from aotc.machine.environment import cpu_features

    cpu = best_cpu_target(cpu_features())
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = (cuda_target(torch.cuda.get_device_capability(index)) for index in range(count))
    return list(dict.fromkeys([*([cpu] if cpu else []), *gpus]))


def _cpu(targets: Iterable[str | None]) -> Check:
    best = next((target for target in targets if target and target.startswith("cpu:")), None)
    if best is None:
        machine = f"{platform.machine()}, {below_all_targets(platform.machine())}"
        hint = "aotc runs on such CPUs, and on CUDA GPUs of such machines"
        return Check(HERE, "CPU", "fail", machine, "x86-64 with AVX2, or Armv8.2", hint)
    return Check(HERE, "CPU", "ok", f"{best}, {len(os.sched_getaffinity(0))} cores")


def _gpus() -> list[Check]:
    import torch

    driver, build = _driver(), torch.version.cuda
    if build is None:
        if driver:
            hint = "install torch's CUDA build to use the GPU: see https://pytorch.org/get-started"
            return [Check(HERE, "GPU", "warn", f"driver {driver}, and torch is a CPU build", hint=hint)]
        return [Check(HERE, "GPU", "ok", "none; torch is a CPU build")]
    with warnings.catch_warnings(record=True) as told:  # torch tells why it sees none by a warning
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        why = f": {str(told[0].message).partition('(Triggered')[0].strip()}" if told else ""
        hint = "check the driver (nvidia-smi), that the container is given the GPU, and CUDA_VISIBLE_DEVICES"
        about = f"torch for CUDA {build} sees no GPU, driver {driver or 'none'}{why}"
        return [Check(HERE, "GPU", "fail" if driver else "warn", about, hint=hint)]
    checks = []
    for index in range(count):
        known = torch.cuda.get_device_properties(index)
        target, memory = cuda_target((known.major, known.minor)), known.total_memory / (1 << 30)
        about = f"{known.name}, {target}, {memory:.0f} GiB, driver {driver or 'unknown'}, CUDA {build}"
        checks.append(Check(HERE, f"GPU {index}", "ok", about))
    return checks


def _driver() -> str:
    """The version of NVIDIA's kernel module; "" where it is not loaded."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    return match[1] if (match := re.search(r"Kernel Module\D*([0-9.]+)", text)) else "of an unknown version"


def _glibc() -> Check:
    if version := glibc_version():
        return Check(HERE, "glibc", "ok", version)
    return Check(HERE, "glibc", "fail", "another C library", "glibc", "use an image with glibc, like debian or ubuntu")


def _libstdcxx() -> Check:
    if versions := libstdcxx_versions():
        return Check(HERE, "libstdc++", "ok", " ".join(versions))
    hint = "install libstdc++6, which compiled code is linked with"
    return Check(HERE, "libstdc++", "fail", "none, or another C++ library", "libstdc++", hint)


def check_code_memory(part: str) -> list[Check]:
    """Whether code can be mapped from an anonymous file, as every load does it."""
    checks: list[Check] = []
    with failing(checks, part, "memory for code"), anonymous_file("aotc doctor") as stream:
        in_memory = "memfd" in str(Path(f"/proc/self/fd/{stream.fileno()}").readlink())
        about = "memfd" if in_memory else "a temporary file: no memfd, or code may not be mapped from it"
        checks.append(Check(part, "memory for code", "ok", about))
    return checks


# -- folders and stores -----------------------------------------------------------------------------------------------


def _folders() -> list[Check]:
    checks: list[Check] = []
    with failing(checks, HERE, "cache folder", "warn"):
        folder = cache_folder()
        hint = "set AOTC_CACHE_DIR to a folder that can be written; else what is fetched is kept for one process only"
        checks.append(check_folder(HERE, "cache folder", folder, hint))
    hint = "set TMPDIR to a folder that can be written"
    try:
        checks.append(check_folder(HERE, "temporary files", Path(tempfile.gettempdir()), hint))
    except OSError as error:  # no folder that Python tries is of use
        checks.append(Check(HERE, "temporary files", "fail", str(error), hint=hint))
    return checks


def check_store(where: str) -> list[Check]:
    """Whether the store can be opened and its tags read; of a URL, by one attempt over the network."""
    if is_remote(where):
        return check_remote(where)
    checks: list[Check] = []
    with failing(checks, HERE, "store", "fail" if Path(where).exists() else "warn"):
        tags = open_readable(where).tags()
        models = sorted({entry.model for entry in tags})
        named = f", of {', '.join(models[:5])}{' …' if len(models) > 5 else ''}" if models else ""
        checks.append(Check(HERE, "store", "ok", f"{where}, tags: {len(tags)}{named}"))
        hint = "to build, fetch or sign here, let this user write it; to load, reading is enough"
        checks.append(check_folder(HERE, "store's folder", Path(where), hint))
    return checks


def _keys() -> list[Check]:
    checks: list[Check] = []
    with failing(checks, HERE, "trusted keys"):
        trust = read_trust()
        if trust is None:
            hint = f"in production, sign bundles and set {KEYS_VARIABLE}: aotc/store/SECURITY.md"
            about = f"{KEYS_VARIABLE} is not set: any writer of the store can run code here"
            return [Check(HERE, "trusted keys", "warn", about, hint=hint)]
        since = f", signed after {trust.signed_after:%FT%TZ}" if trust.signed_after else ""
        keys = ", ".join(key.fingerprint[:23] for key in trust.keys)
        checks.append(Check(HERE, "trusted keys", "ok", f"{keys}{since}"))
    return checks


# -- building ---------------------------------------------------------------------------------------------------------


def check_toolchain(needed: bool = False) -> list[Check]:
    """What a build needs of this machine. Where nothing is to be built (`needed` is False), a lack is a `warn`."""
    lack: CheckStatus = "fail" if needed else "warn"
    checks = []
    missing = [package or module for module, package in EXTRA.items() if importlib.util.find_spec(module) is None]
    about = f"not installed: {', '.join(missing)}" if missing else "installed"
    only = "" if needed else "; a machine that only serves needs none of them"
    hint = f"pip install 'aotc[build]'{only}" if missing else ""
    checks.append(Check(BUILDING, "aotc[build]", lack if missing else "ok", about, hint=hint))
    checks += [_compiler(needed), *_cross_compilers()]
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.is_file():
        hint = "install python3-dev: some code that torch generates includes it"
        checks.append(Check(BUILDING, "Python.h", "warn", f"{header} is missing", hint=hint))
    return checks


def _compiler(needed: bool) -> Check:
    name, version = compiler_name(), compiler_version()
    if NOT_RUN not in version:
        command = [name, "-x", "c++", "-std=c++20", "-fopenmp", "-fsyntax-only", "-"]
        code = "#include <memory>\n#include <omp.h>\n"
        try:
            subprocess.run(command, input=code, capture_output=True, text=True, timeout=60, check=True)
            return Check(BUILDING, "C++ compiler", "ok", f"{name}: {version}")
        except subprocess.CalledProcessError as error:
            told = (error.stderr.strip() or f"it ends with {error.returncode}").splitlines()[0][:200]
        except (OSError, subprocess.SubprocessError) as error:
            told = str(error)
        version = f"{name} compiles nothing: {told}"
    only = "" if needed else "; a machine that only serves needs none"
    hint = f"install g++, or set CXX to a C++ compiler with its headers and OpenMP{only}"
    return Check(BUILDING, "C++ compiler", "fail" if needed else "warn", version, "C++20 with OpenMP", hint)


def _cross_compilers() -> list[Check]:
    """The cross compilers for CPU targets of other architectures. A missing one is not an error here: `aotc build`
    reports it if a target needs it."""
    checks = []
    for machine in sorted({level.machine for level in CPU_LEVELS.values() if is_foreign(level.machine)}):
        name, version = compiler_name(machine), compiler_version(machine)
        about = f"{name}: {version}"
        if NOT_RUN in version:
            targets = ", ".join(name for name, level in CPU_LEVELS.items() if level.machine == machine)
            about = f"none, and so no builds for {targets}: {how_to_install(machine)}"
        checks.append(Check(BUILDING, f"C++ for {machine}", "ok", about))
    return checks
