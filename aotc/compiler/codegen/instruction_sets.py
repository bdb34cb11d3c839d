"""Which instructions the generated code may use: those of the target, whatever CPU compiles it."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from aotc.machine.environment import cpu_features
from aotc.machine.targets import Target

_MARCH = {"cpu:x86-64-v3": "x86-64-v3", "cpu:x86-64-v4": "x86-64-v4", "cpu:amx": "x86-64-v4"}
_BESIDE_GPU = "x86-64-v2"
_ISA = {"cpu:x86-64-v3": "VecAVX2", "cpu:x86-64-v4": "VecAVX512", "cpu:amx": "VecAMX"}


@contextmanager
def code_for(target: Target) -> Iterator[None]:
    """Generate code for the target's CPU, whatever CPU this is.

    Inductor picks the vector instructions by asking this machine, which takes one C++ compile for each candidate; the
    target has already said which they are, so the question is answered here. `-march=native` would let the C++ compiler
    use this machine's own instructions, so the target's level takes its place. Beside a GPU the CPU only launches: its
    code uses what every x86-64 machine with such a GPU has.
    """
    from torch._inductor import config, cpp_builder, cpu_vec_isa

    if target.device == "cuda":
        isas, options = [], {}
    else:
        isa = getattr(cpu_vec_isa, _ISA[target.name])()
        if target.name == "cpu:amx":
            isa._is_avx512_bf16_supported = True
            cpu_features()  # asks the kernel for AMX's tiles, as Inductor's own answer does: candidates are run here
        isas, options = [isa], {"cpp.simdlen": isa.bit_width(), "cpp.vec_isa_ok": True}
    march = f"march={_MARCH.get(target.name, _BESIDE_GPU)}" if platform.machine() == "x86_64" else "march=native"
    flags_of = cpp_builder._get_optimization_cflags

    def with_march(*args: Any, **kwargs: Any) -> Any:
        result = flags_of(*args, **kwargs)
        flags, *rest = result if isinstance(result, tuple) else (result,)
        flags = [march if flag == "march=native" else flag for flag in flags]
        return (flags, *rest) if isinstance(result, tuple) else flags

    with ExitStack() as patches:
        patches.enter_context(config.patch(options))
        patches.enter_context(mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", lambda: isas))
        for isa in isas:
            patches.enter_context(mock.patch.object(type(isa), "__bool__", lambda self: True))
        patches.enter_context(mock.patch.object(cpp_builder, "_get_optimization_cflags", with_march))
        yield
