"""Generate code for the instructions of the target, whatever CPU compiles it."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from aotc.compiler.scoped import replaced
from aotc.machine.environment import cpu_features
from aotc.machine.targets import CPU_LEVELS, Target

_BESIDE_GPU = "x86-64-v2"


@contextmanager
def code_for(target: Target) -> Iterator[None]:
    """While active, generate code for the target's CPU, whatever CPU this is.

    Inductor picks the vector instructions by probing this machine, with one C++ compile for each candidate; here the
    target decides instead. `-march=native` would use this machine's own instructions, so it is replaced by the target's
    level. For a GPU, where the CPU only launches kernels, the code uses instructions of every x86-64 machine with such
    a GPU.
    """
    from torch._inductor import config, cpp_builder, cpu_vec_isa

    if target.device == "cuda":
        isas, options, level = [], {}, _BESIDE_GPU
    else:
        level = CPU_LEVELS[target.name].march
        isa = getattr(cpu_vec_isa, CPU_LEVELS[target.name].vectors)()
        if target.name == "cpu:amx":
            isa._is_avx512_bf16_supported = True
            cpu_features()  # requests AMX's tiles from the kernel, as Inductor's own probe does: candidates run here
        isas, options = [isa], {"cpp.simdlen": isa.bit_width(), "cpp.vec_isa_ok": True}
    march = f"march={level}" if platform.machine() == "x86_64" else "march=native"
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
