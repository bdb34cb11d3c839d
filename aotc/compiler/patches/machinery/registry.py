"""The patches of torch: those of the files in the folder above, and the list of hooks.

The README there lists, for each patch, the torch versions in which its reproducer fails without it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

import aotc.compiler.patches as patches
from aotc.compiler.patches.machinery.patch import Patch


def _discovered() -> tuple[Patch, ...]:
    """Each module's `PATCH`, by name. Any order will do: patches with a common target add to it independently."""
    names = sorted(module.name for module in pkgutil.iter_modules(patches.__path__) if not module.ispkg)
    return tuple(importlib.import_module(f"{patches.__name__}.{name}").PATCH for name in names)


PATCHES = _discovered()

_BUILD = "torch._inductor.cpp_builder:CppBuilder.build()"
_TIMED = "torch._inductor.runtime.benchmarking:Benchmarker.benchmark_cpu"

HOOKS: Mapping[str, tuple[str, ...]] = {
    "codegen/instruction_sets.py": (
        "torch._inductor.cpu_vec_isa:valid_vec_isa_list()",
        "torch._inductor.cpp_builder:_get_optimization_cflags(cpp_compiler)",
    ),
    "codegen/library_constants.py": (
        "torch._inductor.codecache:AotCodeCompiler.compile(graph, ...)",
        "torch._inductor.constant_folding:ConstantFolder._deduce_value(node)",
    ),
    "codegen/called_operators.py": (
        "torch._inductor.ir:FallbackKernel.codegen(wrapper)",
        "torch._inductor.ir:FallbackKernel.export_extern_kernel_node()",
    ),
    "codegen/library_imports.py": ("torch._inductor.scheduler:Scheduler.codegen_extern_call(scheduler_node)",),
    "codegen/standalone_code.py": (
        "torch._inductor.decomposition:fast_random_decomps()",
        "torch._decomp.decompositions:select_one_layer_lstm_function(input, hx, params)",
        "torch._inductor.fx_passes.freezing_patterns:lazy_init(input_device)",
        "torch._inductor.utils:is_big_gpu()",
    ),
    "codegen/standalone_attention.py": ("torch._inductor.kernel.flex.flex_attention:flex_attention(query, ...)",),
    "codegen/generated_kernels.py": (
        "torch._inductor.codegen.wrapper:PythonWrapperCodegen.define_kernel(kernel_name, kernel_body, metadata)",
        "torch._inductor.codegen.cpp:CppScheduling.define_kernel(src_code, nodes)",
    ),
    "patches/machinery/graph_operators.py": ("torch._inductor.graph:GraphLowering.run(*args)",),
    "autotune/benchmarks.py": (_TIMED,),
    "toolchain/parallel_compile.py": (_BUILD, _TIMED),
    "toolchain/precompiled_headers.py": (_BUILD, "torch._inductor.cpp_builder:CppBuilder.get_command_line()"),
    "capture/export.py": ("torch.fx.experimental.symbolic_shapes:GuardOnDataDependentSymNode.__init__(cond, ...)",),
    "capture/replaced_functions.py": ("torch.nn.modules.module:Module.to(*args, **kwargs)",),
    "capture/custom_backward.py": ("torch.autograd.function:_SingleLevelFunction.apply",),
    "capture/operator_trace.py": ("torch.autograd.function:_SingleLevelFunction.apply",),
    "training/halves.py": ("torch._decomp.decompositions:select_one_layer_lstm_function(input, hx, params)",),
    "capture/analysis/custom_operators.py": ("torch:_ops._Ops.load_library(path)", "torch.library:define"),
    "capture/distributed_tensors.py": ("torch._export.wrappers:_maybe_find_pre_dispatch_tf_mode_for_export()",),
    "cross_compile/absent_gpu.py": (
        "torch._inductor.codegen.wrapper:PythonWrapperCodegen.generate_and_run_autotune_block()",
        "torch._inductor.fx_passes.joint_graph:UniformValueConstantFolder._deduce_value(node)",
    ),
}
"""Targets of hooks in other modules of the compiler, which observe torch or answer it for a unit. They change no
result, so they have no bounds and no reproducers: a build needs them in every torch. The hooks of
`autotune/inductor_hooks.py` have a list there, and those of `workers/inductor_progress.py` none: a build does without
them."""
