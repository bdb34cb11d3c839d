"""Generate code for the instructions of the target, whatever CPU compiles it."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from aotc.compiler.scoped import replaced
from aotc.errors import BuildError
from aotc.machine.cpp_compiler import compiler_name, is_foreign
from aotc.machine.environment import cpu_features
from aotc.machine.targets import CPU_LEVELS, CpuLevel, Target

_BESIDE_GPU = {"x86_64": "x86-64-v2", "aarch64": CPU_LEVELS["cpu:neon"].march}
"""By architecture, what every machine with a GPU of the table has."""


@contextmanager
def code_for(target: Target) -> Iterator[None]:
    """While active, generate code for the target's CPU, whatever CPU this is.

    Inductor picks the vector instructions by probing this machine, with one C++ compile for each candidate; here the
    target decides instead. `-march=native` would use this machine's own instructions, so it is replaced by the target's
    level. For a GPU, where the CPU only launches kernels, the code uses instructions of every x86-64 machine with such
    a GPU. For another architecture, its cross compiler compiles.
    """
    from torch._inductor import config, cpp_builder, cpu_vec_isa

    options: dict[str, Any] = {}
    machine = target.machine or platform.machine()
    if target.device == "cuda":
        isas, march = [], f"march={_BESIDE_GPU.get(machine, 'native')}"
    else:
        level = CPU_LEVELS[target.name]
        isas, march = [_vectors(level)], f"march={level.march}"
        if target.name == "cpu:amx":
            cpu_features()  # requests AMX's tiles from the kernel, as Inductor's own probe does: candidates run here
        options = {"cpp.simdlen": isas[0].bit_width(), "cpp.vec_isa_ok": True}
    if is_foreign(machine):
        options["cpp.cxx"] = (compiler_name(machine),)
    flags_of = cpp_builder._get_optimization_cflags

    def with_march(*args: Any, **kwargs: Any) -> Any:
        result = flags_of(*args, **kwargs)
        flags, *rest = result if isinstance(result, tuple) else (result,)
        flags = [march if flag == "march=native" else flag for flag in flags]
        return (flags, *rest) if isinstance(result, tuple) else flags

    with ExitStack() as patches:
        patches.enter_context(config.patch(options))
        patches.enter_context(replaced(cpu_vec_isa, "valid_vec_isa_list", lambda: isas))
        for isa in isas:
            patches.enter_context(replaced(type(isa), "__bool__", lambda self: True))
        patches.enter_context(replaced(cpp_builder, "_get_optimization_cflags", with_march))
        yield


def _vectors(level: CpuLevel) -> Any:
    """Inductor's vector instructions of a level, with the options of the C++ compiler that they need."""
    from torch._inductor import cpu_vec_isa

    try:
        isa = getattr(cpu_vec_isa, level.vectors)(*([level.bits] if level.bits else []))
    except (AttributeError, TypeError, AssertionError) as error:
        raise BuildError(
            f"torch {torch.__version__} generates no code for vectors of the kind {level.vectors} {level.bits or ''}",
            hint="use another torch, or build for `cpu:neon` instead",
            stage="compile",
        ) from error
    if level.vectors == "VecAMX":
        isa._is_avx512_bf16_supported = True
    if level.machine == "aarch64":
        # Mathematical functions are libm's, element by element: torch brings SLEEF's for its own architecture alone.
        macros = [macro for macro in isa.build_macro() if not macro.endswith(("WITH_SLEEF", "FEATURE_BF16"))]
        flags = f"-msve-vector-bits={level.bits}" if level.bits else ""  # torch's own depend on this machine
        isa.build_macro, isa.build_arch_flags = lambda: macros, lambda: flags
    return isa
