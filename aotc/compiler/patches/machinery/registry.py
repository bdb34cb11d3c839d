"""The patches of torch: one list, in the order in which `aotc.compiler.patches.machinery.apply` applies them.

The README in the folder above lists, for each patch, the torch versions in which its reproducer fails without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from aotc.compiler.patches.bugs.arithmetic.complex_numbers import complex_numbers_are_tensors
from aotc.compiler.patches.bugs.arithmetic.grouped_products import grouped_products_are_called
from aotc.compiler.patches.bugs.arithmetic.int8_products import operands_are_aligned
from aotc.compiler.patches.bugs.arithmetic.powers import powers_of_ints_are_ints
from aotc.compiler.patches.bugs.arithmetic.quotients import quotients_from_remainders
from aotc.compiler.patches.bugs.assigned_numbers import numbers_are_assigned
from aotc.compiler.patches.bugs.batched_products import batches_are_indexed
from aotc.compiler.patches.bugs.checked_values import conditions_are_compared
from aotc.compiler.patches.bugs.concatenated import single_parts_lie_as_in_eager, written_parts_are_copied
from aotc.compiler.patches.bugs.empty_constants import empty_constants_have_no_memory
from aotc.compiler.patches.bugs.errors.divisors import divisors_are_checked
from aotc.compiler.patches.bugs.errors.index_checks import index_errors_are_raised
from aotc.compiler.patches.bugs.errors.negative_indices import negative_indices_are_refused
from aotc.compiler.patches.bugs.errors.noted_errors import noted_errors_are_thrown
from aotc.compiler.patches.bugs.errors.operator_errors import operator_errors_are_raised
from aotc.compiler.patches.bugs.errors.repeated_rows import counts_of_rows_are_checked
from aotc.compiler.patches.bugs.exporting import (
    dropout_of_nothing_is_no_copy,
    pooled_sizes_are_floored,
    refusals_need_no_advice,
    rows_are_set_by_integer_tensors,
)
from aotc.compiler.patches.bugs.known_bools import known_bools_are_compared
from aotc.compiler.patches.bugs.loops import loops_begin_with_copies
from aotc.compiler.patches.bugs.old_values import (
    copies_of_written_tensors_are_kept,
    kernels_fuse_with_reads_of_the_same_elements,
    reads_are_not_written_over,
    reordered_loops_keep_their_order,
    results_are_not_inputs,
)
from aotc.compiler.patches.bugs.operands import operands_keep_their_memory, operands_lie_as_exported
from aotc.compiler.patches.bugs.operator_arguments import defaults_are_written, enums_are_numbers_of_cpp
from aotc.compiler.patches.bugs.own_device import tensors_made_on_own_gpu
from aotc.compiler.patches.bugs.patterns import only_constants_of_channels_are_folded, only_equal_attention_is_replaced
from aotc.compiler.patches.bugs.ranges.adaptive_pool_range import windows_stay_open
from aotc.compiler.patches.bugs.ranges.conv_batch_range import batches_stay_open
from aotc.compiler.patches.bugs.ranges.kept_ranges import ranges_kept
from aotc.compiler.patches.bugs.ranges.remainders import remainders_are_not_negative
from aotc.compiler.patches.bugs.ranges.tried_ranges import ranges_tried
from aotc.compiler.patches.bugs.scratch import scratch_for_every_program
from aotc.compiler.patches.bugs.size_arithmetic import (
    rounded_as_in_python,
    rounded_quotients_are_refused,
    sizes_round_to_tens,
)
from aotc.compiler.patches.bugs.view_offsets import views_begin_where_theirs_do
from aotc.compiler.patches.determinism.repeatable_code import (
    arrays_are_found_by_writer,
    cubins_are_linked_by_name,
    repeatable_code,
)
from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.performance.depthwise import depthwise_template_raced
from aotc.compiler.patches.performance.half_precision import shorter_functions
from aotc.compiler.patches.performance.small_loops import small_loops_are_serial
from aotc.compiler.patches.performance.tma_templates import (
    tiles_for_tf32_on_hopper,
    tma_templates_on_tensor_cores_only,
    valid_tensor_maps_only,
)

TMA_TEMPLATES = "triton.enable_persistent_tma_matmul"
"""An option of Inductor; if the user sets it, aotc changes nothing about these templates."""

_CPP = "torch._inductor.codegen.cpp"
_CPP_WRAPPER = "torch._inductor.codegen.cpp_wrapper_cpu:CppWrapperCpu"
_REINPLACE = "torch._inductor.fx_passes.reinplace"
_LOWERINGS = "torch._inductor.lowering:lowerings"
_CSE = "torch._inductor.codegen.common:CSEProxy"
_MM = "torch._inductor.kernel.mm"

PATCHES: tuple[Patch, ...] = (
    # -- torch.export -------------------------------------------------------------------------------------------------
    Patch(
        name="dropout_copies",
        stage="export",
        torch=">=2.11,<2.14",
        targets=("torch:_VF.dropout",),
        apply=dropout_of_nothing_is_no_copy,
    ),
    Patch(
        name="rows_set_by_tensors",
        stage="export",
        torch=">=2.11,<2.14",
        targets=("torch:Tensor.__setitem__(key, value)",),
        apply=rows_are_set_by_integer_tensors,
    ),
    Patch(
        name="pooled_sizes",
        stage="export",
        torch=">=2.11,<2.13",
        targets=("torch._meta_registrations:div_rtn(x, y)",),
        apply=pooled_sizes_are_floored,
    ),
    Patch(
        name="rounded_sizes",
        stage="export",
        targets=("torch:SymInt.__round__(ndigits)",),
        apply=sizes_round_to_tens,
    ),
    Patch(
        name="floor_divided_sizes",
        stage="export",
        targets=("torch:SymInt.__floordiv__(other)", "torch:SymFloat.__floordiv__(other)"),
        apply=rounded_quotients_are_refused,
    ),
    Patch(
        name="failing_advice",
        stage="export",
        targets=("torch.fx.experimental.symbolic_shapes:DimConstraints.prettify_results(original_signature, ...)",),
        apply=refusals_need_no_advice,
    ),
    Patch(
        name="undecided_conditions",
        stage="export again",
        targets=("torch.fx.experimental.symbolic_shapes:ShapeEnv._maybe_evaluate_static(expr)",),
        apply=ranges_tried,
    ),
    # -- GPUs ---------------------------------------------------------------------------------------------------------
    Patch(
        name="depthwise_template",
        kind="performance",
        device="cuda",
        targets=("torch._inductor.kernel.conv:conv2d_template.maybe_append_choice(choices, **kwargs)",),
        apply=depthwise_template_raced,
    ),
    Patch(
        name="tf32_tiles",
        kind="performance",
        device="cuda",
        wanted=lambda options: TMA_TEMPLATES not in options,
        targets=(
            "torch._inductor.choices:InductorChoices.get_template_configs(kernel_inputs, templates, op_name)",
            f"{_MM}:persistent_tma_mm_template",
        ),
        apply=tiles_for_tf32_on_hopper,
    ),
    Patch(
        name="no_tma_templates_of_float32",
        kind="performance",
        device="cuda",
        wanted=lambda options: TMA_TEMPLATES not in options,
        targets=(
            f"{_MM}:use_triton_tma_template(*matrices, output_layout)",
            f"{_MM}:use_triton_blackwell_tma_template(*matrices, output_layout)",
        ),
        apply=tma_templates_on_tensor_cores_only,
    ),
    Patch(
        name="invalid_tensor_maps",
        device="cuda",
        targets=(
            f"{_MM}:use_triton_tma_template(*matrices, output_layout)",
            f"{_MM}:use_triton_blackwell_tma_template(*matrices, output_layout)",
        ),
        apply=valid_tensor_maps_only,
    ),
    Patch(
        name="half_precision_functions",
        kind="performance",
        device="cuda",
        targets=(
            "aten.sin.default(self)",
            "aten.cos.default(self)",
            "aten.tanh.default(self)",
            "aten.sigmoid.default(self)",
        ),
        apply=shorter_functions,
    ),
    Patch(
        name="scratch_of_one_program",
        device="cuda",
        torch=">=2.11,<2.12",
        targets=("torch._inductor.codegen.cuda.device_op_overrides:CUDADeviceOpOverrides.cpp_scratch(idx, workspace)",),
        apply=scratch_for_every_program,
    ),
    Patch(
        name="device_of_the_build",
        device="cuda",
        targets=(f"{_CPP_WRAPPER}.codegen_device(device)",),
        apply=tensors_made_on_own_gpu,
    ),
    # -- ranges of sizes ----------------------------------------------------------------------------------------------
    Patch(
        name="sizes_taken_for_fixed",
        upstream="pytorch#150364",
        of_graph=True,
        targets=(
            "torch._inductor.sizevars:SizeVarAllocator.evaluate_min(left, right)",
            "torch._inductor.sizevars:SizeVarAllocator.evaluate_max(left, right)",
        ),
        apply=ranges_kept,
    ),
    Patch(
        name="convolutions_of_a_range",
        operators=("aten.conv", "aten._conv", "aten.cudnn_conv", "aten.mkldnn_conv"),
        targets=("torch:_C._select_conv_backend",),
        apply=batches_stay_open,
    ),
    Patch(
        name="adaptive_pools_of_a_range",
        operators=("aten.adaptive_", "aten._adaptive_"),
        targets=(
            f"{_LOWERINGS}[aten._adaptive_avg_pool2d.default]",
            f"{_LOWERINGS}[aten.adaptive_max_pool2d.default]",
            "aten.adaptive_max_pool2d.default(self, output_size)",
            "aten.adaptive_max_pool3d.default(self, output_size)",
            "torch._inductor.lowering:fallback_adaptive_avg_pool2d",
            "torch._inductor.lowering:fallback_adaptive_max_pool2d",
        ),
        apply=windows_stay_open,
    ),
    Patch(
        name="negative_remainders",
        torch=">=2.11,<2.14",
        targets=("torch.utils._sympy.functions:ModularIndexing.eval(base, divisor, modulus)",),
        apply=remainders_are_not_negative,
    ),
    Patch(
        name="decimal_rounding",
        targets=("torch.utils._sympy.printers:CppPrinter._print_RoundDecimal(expr)",),
        apply=rounded_as_in_python,
    ),
    # -- memory that is written to ------------------------------------------------------------------------------------
    Patch(
        name="copies_of_written_tensors",
        upstream="pytorch#198131",
        torch=">=2.11,<2.15",
        targets=("torch._inductor.fx_passes.post_grad:same_meta(node1, node2)",),
        apply=copies_of_written_tensors_are_kept,
    ),
    Patch(
        name="reads_written_over",
        upstream="pytorch#197829",
        torch=">=2.11,<2.15",
        targets=(
            f"{_REINPLACE}:inplaceable_ops[aten.index_put.default]",
            f"{_REINPLACE}:inplaceable_ops[aten._unsafe_index_put.default]",
            f"{_REINPLACE}:inplaceable_ops[{_REINPLACE}:_generalized_scatter]",
        ),
        apply=reads_are_not_written_over,
    ),
    Patch(
        name="results_made_in_inputs",
        upstream="pytorch#198096",
        targets=(f"{_REINPLACE}:reinplace_inplaceable_ops_core(graph)",),
        apply=results_are_not_inputs,
    ),
    Patch(
        name="order_of_reordered_loops",
        torch=">=2.11,<2.12",
        targets=("torch._inductor.scheduler:SchedulerNode.recompute_size_and_body(extra_indexing_constraints)",),
        apply=reordered_loops_keep_their_order,
    ),
    Patch(
        name="fusion_of_reads_and_writes",
        upstream="pytorch#198270",
        torch=">=2.11,<2.15",
        targets=("torch._inductor.scheduler:Scheduler.fusable_weak_dep(weak_dep, node1, node2)",),
        apply=kernels_fuse_with_reads_of_the_same_elements,
    ),
    Patch(
        name="written_parts_of_concatenations",
        torch=">=2.11,<2.15",
        targets=("torch._inductor.ir:ConcatKernel.create(inputs, dim)",),
        apply=written_parts_are_copied,
    ),
    Patch(
        name="single_parts_of_concatenations",
        targets=("aten.cat.default(tensors)",),
        apply=single_parts_lie_as_in_eager,
    ),
    Patch(
        name="aligned_int8_operands",
        device="cpu",
        targets=("torch._inductor.quantized_lowerings:mm_args(mat1, mat2, ...)",),
        apply=operands_are_aligned,
    ),
    Patch(
        name="memory_of_operands",
        operators=("higher_order.",),
        torch=">=2.11,<2.14",
        targets=(
            "torch._inductor.ir:Conditional.__init__(predicate, ...)",
            "torch._inductor.ir:WhileLoop.__init__(carried_inputs, ...)",
        ),
        apply=partial(operands_keep_their_memory, "Conditional"),
    ),
    Patch(
        name="memory_of_operands_of_switch",
        operators=("higher_order.",),
        torch=">=2.14,<2.15",
        targets=(
            "torch._inductor.ir:Switch.__init__(selector, ...)",
            "torch._inductor.ir:WhileLoop.__init__(carried_inputs, ...)",
        ),
        apply=partial(operands_keep_their_memory, "Switch"),
    ),
    Patch(
        name="layout_of_operands",
        operators=("higher_order.",),
        targets=(f"{_LOWERINGS}[higher_order.cond]",),
        apply=partial(operands_lie_as_exported, "cond"),
    ),
    Patch(
        name="layout_of_operands_of_switch",
        operators=("higher_order.",),
        torch=">=2.14",
        targets=(f"{_LOWERINGS}[higher_order.switch]",),
        apply=partial(operands_lie_as_exported, "switch"),
    ),
    Patch(
        name="loops_without_iterations",
        operators=("higher_order.",),
        targets=(f"{_CPP_WRAPPER}.codegen_while_loop(while_loop)",),
        apply=loops_begin_with_copies,
    ),
    Patch(
        name="views_of_views",
        upstream="pytorch#175325",
        torch=">=2.11,<2.13",
        targets=(f"{_LOWERINGS}[aten.as_strided.default]",),
        apply=views_begin_where_theirs_do,
    ),
    Patch(
        name="empty_constants",
        targets=("torch._inductor.graph:GraphLowering.allocate_non_dup_const_name(name, data)",),
        apply=empty_constants_have_no_memory,
    ),
    # -- numbers ------------------------------------------------------------------------------------------------------
    Patch(
        name="assigned_numbers",
        torch=">=2.11,<2.14",
        targets=("torch._inductor.lowering:view(x, sizes)",),
        apply=numbers_are_assigned,
    ),
    Patch(
        name="known_bools",
        upstream="pytorch#188231",
        torch=">=2.11,<2.14",
        targets=("torch.utils._sympy.value_ranges:SymPyValueRangeAnalysis.eq(a, b)",),
        apply=known_bools_are_compared,
    ),
    Patch(
        name="checked_values",
        torch=">=2.13,<2.15",
        targets=("torch._inductor.fx_utils:_is_fake_tensor_same(new, old, ...)",),
        apply=conditions_are_compared,
    ),
    Patch(
        name="indices_of_batches",
        torch=">=2.11,<2.14",
        device="cpu",
        targets=("torch._inductor.codegen.cpp_bmm_template:CppBmmTemplate.get_options(kernel, ...)",),
        apply=batches_are_indexed,
    ),
    Patch(
        name="powers_of_ints",
        torch=">=2.11,<2.15",
        targets=("torch._inductor.lowering:fallback_pow_scalar",),
        apply=powers_of_ints_are_ints,
    ),
    Patch(
        name="rounded_quotients",
        upstream="pytorch#197895",
        targets=(
            "aten.div.Tensor_mode(self, other, rounding_mode)",
            "aten.div.Scalar_mode(self, other, rounding_mode)",
            "aten.remainder.Tensor(self, other)",
            "aten.remainder.Scalar(self, other)",
            "aten.remainder.Scalar_Tensor(self, other)",
        ),
        apply=quotients_from_remainders,
    ),
    Patch(
        name="complex_numbers",
        targets=(
            "aten.full.default(size, fill_value)",
            "aten.scalar_tensor.default(s)",
            "aten.div.Tensor(self, other)",
            "aten.eq.Scalar(self, other)",
            "aten.ne.Scalar(self, other)",
            "aten.sub.Tensor(self, other)",
        ),
        apply=complex_numbers_are_tensors,
    ),
    # -- errors -------------------------------------------------------------------------------------------------------
    Patch(
        name="index_errors",
        upstream="pytorch#195402",
        targets=(
            f"{_CSE}.indirect_indexing(var, size, check, wrap_neg)",
            f"{_CSE}.load(name, index)",
            f"{_CSE}.store(name, index, value, mode)",
            f"{_CPP}:CppKernel.check_bounds(expr, size, lower, upper)",
            f"{_CPP}:CppKernel.device_assert_async(cond, msg)",
            "torch._inductor.index_propagation:IndexPropagation.indirect_indexing(index, size, check, wrap_neg)",
            f"{_CPP}:CppScheduling.can_fuse_vertical(node1, node2)",
        ),
        apply=index_errors_are_raised,
    ),
    Patch(
        name="negative_indices",
        upstream="pytorch#169779",
        targets=(
            "aten.index_select.default(self, dim, index)",
            "aten.index_add.default(self, dim, index, ...)",
            "aten.index_copy.default(self, dim, index, ...)",
            "aten.index_fill.int_Scalar(self, dim, index, ...)",
            "aten.index_fill.int_Tensor(self, dim, index, ...)",
        ),
        apply=negative_indices_are_refused,
    ),
    Patch(
        name="counts_of_rows",
        operators=("aten.repeat_interleave",),
        targets=("aten.repeat_interleave.Tensor(repeats)",),
        apply=counts_of_rows_are_checked,
    ),
    Patch(
        name="integer_divisors",
        upstream="pytorch#143649",
        targets=(f"{_CSE}._default(name, args, kwargs)",),
        apply=divisors_are_checked,
    ),
    Patch(
        name="noted_errors",
        upstream="pytorch#195402",
        targets=(f"{_CPP}:CppScheduling.define_kernel(src_code, ...)",),
        apply=noted_errors_are_thrown,
    ),
    Patch(
        name="operator_errors",
        upstream="pytorch#190909",
        torch=">=2.11,<2.14",
        targets=(
            "torch._inductor.codecache:AotCodeCompiler.compile(graph, wrapper_code, ...)",
            "torch._higher_order_ops.effects:_register_effectful_op(op, effect)",
        ),
        apply=operator_errors_are_raised,
    ),
    # -- replacements of operators, and arguments of operators --------------------------------------------------------
    Patch(
        name="attention_patterns",
        upstream="pytorch#196468",
        torch=">=2.11,<2.15",
        targets=("torch._inductor.pattern_matcher:PatternMatcherPass.apply(gm)",),
        apply=only_equal_attention_is_replaced,
    ),
    Patch(
        name="folded_constants",
        targets=("torch._inductor.pattern_matcher:PatternMatcherPass.apply(gm)",),
        apply=only_constants_of_channels_are_folded,
    ),
    Patch(
        name="operator_enums",
        torch=">=2.11,<2.12",
        targets=(
            "torch._inductor.ir:FallbackKernel.export_extern_kernel_node()",
            "torch._export.serde.serialize:_TORCH_TO_SERIALIZE_DTYPE",
            "torch._export.serde.serialize:_TORCH_TO_SERIALIZE_LAYOUT",
            "torch._export.serde.serialize:_TORCH_TO_SERIALIZE_MEMORY_FORMAT",
        ),
        apply=enums_are_numbers_of_cpp,
    ),
    Patch(
        name="operator_defaults",
        torch=">=2.11,<2.15",
        targets=("torch._inductor.ir:FallbackKernel.export_extern_kernel_node()",),
        apply=defaults_are_written,
    ),
    Patch(
        name="grouped_products",
        operators=("aten._grouped_mm",),
        upstream="pytorch#177307",
        torch=">=2.11,<2.12",
        targets=("torch._inductor.kernel.mm_grouped:aten__grouped_mm.use_fallback_kernel",),
        apply=grouped_products_are_called,
    ),
    # -- C++ code -----------------------------------------------------------------------------------------------------
    Patch(
        name="serial_small_loops",
        kind="performance",
        targets=(
            f"{_CPP}:CppKernel.codegen_loops_impl(loop_nest, code, worksharing)",
            f"{_CPP}:WorkSharing.parallel(threads)",
        ),
        apply=small_loops_are_serial,
    ),
    Patch(
        name="repeatable_code",
        kind="determinism",
        targets=(
            "torch._inductor.codecache:write(content, extension)",
            "torch._inductor.codecache:get_hash(content, extra, hash_type)",
            "torch._inductor.cpp_builder:CppBuilder.get_command_line()",
        ),
        apply=repeatable_code,
    ),
    Patch(
        name="linked_cubins",
        kind="determinism",
        device="cuda",
        targets=("torch._inductor.codecache:convert_cubin_to_obj(cubin_file, kernel_name, ld, objcopy)",),
        apply=cubins_are_linked_by_name,
    ),
    Patch(
        name="arrays_of_integers",
        kind="determinism",
        torch=">=2.11,<2.13",
        targets=(f"{_CPP_WRAPPER}.codegen_int_array_var(int_array, writeline)",),
        apply=arrays_are_found_by_writer,
    ),
)

_BUILD = "torch._inductor.cpp_builder:CppBuilder.build()"
_TIMED = "torch._inductor.runtime.benchmarking:Benchmarker.benchmark_cpu"

HOOKS: Mapping[str, tuple[str, ...]] = {
    "codegen/instruction_sets.py": (
        "torch._inductor.cpu_vec_isa:valid_vec_isa_list()",
        "torch._inductor.cpp_builder:_get_optimization_cflags(cpp_compiler)",
    ),
    "codegen/library_constants.py": ("torch._inductor.codecache:AotCodeCompiler.compile(graph, ...)",),
    "codegen/called_operators.py": (
        "torch._inductor.ir:FallbackKernel.codegen(wrapper)",
        "torch._inductor.ir:FallbackKernel.export_extern_kernel_node()",
    ),
    "codegen/generated_kernels.py": (
        "torch._inductor.codegen.wrapper:PythonWrapperCodegen.define_kernel(kernel_name, kernel_body, metadata)",
        f"{_CPP}:CppScheduling.define_kernel(src_code, nodes)",
    ),
    "autotune/benchmarks.py": (_TIMED,),
    "toolchain/object_cache.py": (_BUILD,),
    "toolchain/parallel_compile.py": (_BUILD, _TIMED),
    "toolchain/precompiled_headers.py": (_BUILD, "torch._inductor.cpp_builder:CppBuilder.get_command_line()"),
    "capture/export.py": ("torch.fx.experimental.symbolic_shapes:GuardOnDataDependentSymNode.__init__(cond, ...)",),
    "capture/custom_backward.py": ("torch.autograd.function:_SingleLevelFunction.apply",),
    "capture/operator_trace.py": ("torch.autograd.function:_SingleLevelFunction.apply",),
    "training/halves.py": ("torch._decomp.decompositions:select_one_layer_lstm_function(input, hx, params)",),
    "capture/facts/custom_operators.py": ("torch:_ops._Ops.load_library(path)",),
    "capture/distributed_tensors.py": ("torch._export.wrappers:_maybe_find_pre_dispatch_tf_mode_for_export()",),
    "absent_gpu/lowering.py": (
        "torch._inductor.codegen.wrapper:PythonWrapperCodegen.generate_and_run_autotune_block()",
        "torch._inductor.fx_passes.joint_graph:UniformValueConstantFolder._deduce_value(node)",
    ),
}
"""Targets of hooks in other modules of the compiler, which observe torch or answer it for a unit. They change no
result, so they have no bounds and no reproducers: a build needs them in every torch. The hooks of
`autotune/hooks.py` have a list there, and those of `workers/inductor_progress.py` none: a build does without them."""
