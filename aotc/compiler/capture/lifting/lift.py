"""From an exported program to a graph whose inputs are all named.

In the graph of `torch.export`, parameters and buffers are the first inputs. They stay inputs (frozen weights become
constants), so that a library holds no state of its own: see `aotc.runtime.state.weights`. The graph writes to inputs
and buffers in place, and each computed tensor is an output once.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import is_fake
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from aotc.adapters import unregistered_scale
from aotc.compiler.capture.lifting.export_errors import (
    another_view,
    becomes_another,
    branch_returns_view,
    kind_of,
    reached_outside,
    returns_constant,
    returns_frozen,
    unregistered,
    unregistered_adapter_scale,
    view_of_written,
    without_values,
    writes_to_expanded,
    writes_to_windows,
)
from aotc.compiler.capture.lifting.mutations import written_values
from aotc.compiler.capture.lifting.result_tree import result_tree
from aotc.compiler.capture.lifting.shared_memory import (
    PLAIN,
    base_of,
    form_of,
    has_elements,
    has_no_gaps,
    is_expanded,
    is_parameters,
    itself,
    leaves_gaps,
    share_storage,
    sharing_memory,
    views_of,
)
from aotc.compiler.capture.lifting.views import SizeTexts, strided_view
from aotc.compiler.explain_failure import SPARSE, line_named
from aotc.errors import BuildError
from aotc.models.calls import arguments_of
from aotc.reads.tensors import named_state, plain_state
from aotc.records import Argument, Output, ResultContainer, Signature, TensorLeaf
from aotc.tensors.layouts import has_memory
from aotc.tensors.overlaps import extent, overlapping


@dataclass
class Capture:
    """A captured model, ready to compile.

    `graph` takes `examples` in the order of `arguments` and returns a tuple of tensors. `outputs` and `output_tree`
    describe how the model's result is built from them; `output_paths` are their places in it (`['logits']`); `state`
    names the module's tensors that the graph uses.
    """

    graph: fx.GraphModule
    examples: tuple[Tensor, ...]
    arguments: tuple[Argument, ...]
    outputs: tuple[Output, ...]
    output_tree: int | ResultContainer
    output_paths: tuple[str, ...]
    state: tuple[str, ...]
    mutated_leaves: tuple[int, ...] = ()
    storage_leaves: tuple[int, ...] = ()
    mutated_state: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    program: Any = field(default=None, repr=False)


def lift(
    program: torch.export.ExportedProgram,
    module: nn.Module,
    signature: Signature,
    leaves: Sequence[Any],
    frozen: bool,
    outside: Mapping[str, Tensor],
    *,
    train: bool = False,
) -> Capture:
    """The capture of an exported program; for a region, `outside` are the model's tensors. Raises BuildError for a
    program that cannot become an artifact."""
    return _Lifting(program, module, signature, leaves, frozen, outside, train=train).lift()


class _Lifting:
    """One pass over an exported program, from its placeholders and outputs to a Capture."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        module: nn.Module,
        signature: Signature,
        leaves: Sequence[Any],
        frozen: bool,
        outside: Mapping[str, Tensor],
        *,
        train: bool,
    ) -> None:
        self.program = program
        self.graph_module = program.graph_module
        self.graph = program.graph_module.graph
        self.nodes: dict[str, fx.Node] = {node.name: node for node in self.graph.nodes if node.op == "placeholder"}
        self.module = module
        self.tensors = {**named_state(module), **plain_state(module)}
        self.outside = outside
        self.leaves = leaves
        self.leaf_of = self._leaf_by_placeholder(signature)
        self._tell_equal_sizes(signature)
        self.size_texts = SizeTexts(signature, self.leaf_of, self.nodes)
        self.paths = [leaf.path for leaf in signature.leaves]
        self.replaced: set[fx.Node] = set()
        """Arguments to which the graph writes only at its end: a view of one has the old values."""
        self.frozen, self.train = frozen, train
        self.state: list[str] = []
        self.arguments: list[Argument] = []
        self.examples: list[Tensor] = []
        self.argument_of: dict[str, Argument] = {}
        self.constants: dict[str, str] = {}
        self.frozen_in: dict[str, str] = {}

    def _leaf_by_placeholder(self, signature: Signature) -> dict[str, int]:
        """Each user placeholder's leaf: the exported input structure, filled with leaf numbers."""
        numbered = arguments_of(signature, list(range(len(signature.leaves))))
        names = [
            getattr(spec.arg, "name", "")
            for spec in self.program.graph_signature.input_specs
            if spec.kind.name == "USER_INPUT"
        ]
        in_spec = self.program.call_spec.in_spec
        assert in_spec is not None
        order = _reorder_kwargs(numbered, in_spec)
        return dict(zip(names, pytree.tree_leaves(order), strict=True))

    def _tell_equal_sizes(self, signature: Signature) -> None:
        """Let torch know that axes of one dim have one size. It has two symbols of them where the model's operators
        compare only what is computed from both; Inductor's code would seem not to hold for all sizes."""
        size_of: dict[str, Any] = {}
        for name, number in self.leaf_of.items():
            leaf, value = signature.leaves[number], self.nodes[name].meta.get("val")
            if isinstance(leaf, TensorLeaf) and isinstance(value, Tensor):
                sizes: tuple[Any, ...] = tuple(value.shape)
                for entry, size in zip(leaf.shape, sizes, strict=True):
                    if isinstance(entry, str) and isinstance(size, torch.SymInt):
                        expression = size.node.expr
                        known = size_of.setdefault(entry, expression)
                        if known != expression and expression.is_Symbol:
                            size.node.shape_env._set_replacement(expression, known, "one dim of the manifest")

    def lift(self) -> Capture:
        with_offsets = [
            node
            for target, position in _WITH_OFFSET.items()
            for node in self.graph.find_nodes(op="call_function", target=target)
            if _offset(node, position) is not None
        ]
        for spec in self.program.graph_signature.input_specs:
            self._lift_input(spec)
        self._keep_assigned_over()
        self._copy_operands_that_branches_return()
        storage_leaves = self._read_from_storage(with_offsets)
        mutated = self.written = self._write_mutations()
        outputs = self._lift_outputs()
        self.graph.set_codegen(fx.graph.CodeGen())
        self._drop_unused()
        if not self.arguments:
            raise BuildError(
                "the model's result depends on none of its inputs, nor on weights that may change: torch's compiler "
                "does not support such a graph",
                hint="use `weights: live`, or store the result as a tensor",
                stage="export",
            )
        self._refuse_shared({state for _, state in mutated if state is not None})
        self.graph.lint()
        self.graph_module.recompile()
        out_spec = self.program.call_spec.out_spec
        assert out_spec is not None
        return Capture(
            graph=self.graph_module,
            examples=tuple(self.examples),
            arguments=tuple(self.arguments),
            outputs=outputs,
            output_tree=result_tree(out_spec),
            output_paths=_paths(out_spec),
            state=tuple(self.state),
            mutated_leaves=tuple(sorted(leaf for leaf, _ in mutated if leaf is not None)),
            storage_leaves=storage_leaves,
            mutated_state=tuple(sorted(state for _, state in mutated if state is not None)),
            guards=tuple(self.program._guards_code),
            program=self.program,
        )

    def _lift_input(self, spec: Any) -> None:
        kind, node = spec.kind.name, self.nodes[spec.arg.name]
        if kind == "USER_INPUT":
            leaf = self.leaf_of[node.name]
            self.argument_of[node.name] = Argument(leaf=leaf)
        elif kind in ("PARAMETER", "BUFFER"):
            self.argument_of[node.name] = Argument(state=spec.target)
            if self.frozen and node.users:
                self.frozen_in[self._bake(node, self.tensors[spec.target].detach())] = spec.target
        elif kind == "CONSTANT_TENSOR":
            self._lift_constant(node, spec.target)
        else:
            raise BuildError(
                f"the model uses `{spec.target}`, a {kind.lower().replace('_', ' ')}; a library cannot hold it",
                hint="pass it as a tensor input, or keep it out of forward",
                stage="export",
            )

    def _lift_constant(self, node: fx.Node, target: str) -> None:
        """Bind a tensor that forward does not reach by its name (through a list, say) to its name in the module."""
        tensor = self.program.constants[target]
        if is_fake(tensor) and node.users:
            raise without_values(node)
        if type(tensor) not in PLAIN or not node.users or not has_memory(tensor):
            self.constants[self._bake(node, tensor)] = target
        elif (name := sharing_memory(self.tensors, tensor)) is not None:
            if self.frozen:
                self.frozen_in[self._bake(node, tensor)] = name
            else:
                node.replace_all_uses_with(self._view_of_state(name, node, tensor))
        elif (name := sharing_memory(self.outside, tensor)) is not None:
            raise reached_outside(name, node)
        elif tensor.requires_grad or is_parameters(tensor):
            raise unregistered(node, tensor)
        elif unregistered_scale(self.module, tensor):
            raise unregistered_adapter_scale(node)
        else:
            self.constants[self._bake(node, tensor)] = target

    def _view_of_state(self, name: str, node: fx.Node, tensor: Tensor) -> fx.Node:
        """The placeholder of the module's tensor `name`, or a view of it with the layout of `tensor`."""
        whole = self.tensors[name].detach()
        placeholders = [
            self.nodes[key]
            for key, argument in self.argument_of.items()
            if argument.state is not None and self.tensors[argument.state] is self.tensors[name]
        ]
        placeholder = next((each for each in placeholders if each.users), placeholders[0])  # one for all tied tensors
        offset = tensor.storage_offset() - whole.storage_offset()
        layout = tensor.dtype, tensor.shape, tensor.stride(), offset
        if layout == (whole.dtype, whole.shape, whole.stride(), 0):
            return placeholder
        (first, end), (whole_first, whole_end) = extent(tensor), extent(whole)
        if (
            tensor.dtype != whole.dtype
            or tensor.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
            or whole.storage_offset() != 0  # compiled code counts from the tensor, eager from its storage
            or not (has_no_gaps(whole) and whole_first <= first and end <= whole_end)
            or any(each.is_conj() or each.is_neg() for each in (tensor, whole))
        ):
            raise another_view(name, node)
        with self.graph.inserting_before(node):
            view: fx.Node = self.graph.call_function(
                torch.ops.aten.as_strided.default, (placeholder, list(tensor.shape), list(tensor.stride()), offset)
            )
        view.meta = dict(node.meta)
        return view

    def _bake(self, node: fx.Node, tensor: Tensor) -> str:
        """Make a placeholder a constant of the graph. Returns the constant's name."""
        name = f"constant_{node.name}"
        self.graph_module.register_buffer(name, tensor)
        with self.graph.inserting_before(node):
            constant = self.graph.get_attr(name)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        return name

    def _copy_operands_that_branches_return(self) -> None:
        """Make each branch of `torch.cond` return new tensors: torch's compiler does not support a branch that returns
        an operand, or one tensor twice.

        Raises BuildError for a branch that returns a tensor and a view of it, which share memory in eager.
        """
        for cond in self.graph.find_nodes(op="call_function", target=torch.ops.higher_order.cond):
            for branch in (getattr(self.graph_module, str(each.target)) for each in cond.args[1:3]):
                output = branch.graph.output_node()
                returned: list[Any] = []
                own: list[Any] = []
                for value in output.args[0]:
                    if isinstance(value, fx.Node) and (base_of(value) is not None or value in returned):
                        with branch.graph.inserting_before(output):
                            copy = branch.graph.call_function(torch.ops.aten.clone.default, (value,))
                        copy.meta = dict(value.meta)
                        value = copy
                    elif any(share_storage(value, each) for each in own):
                        raise branch_returns_view(value)
                    else:
                        own.append(value)
                    returned.append(value)
                output.args = (tuple(returned),)
                branch.recompile()

    def _read_from_storage(self, nodes: Sequence[fx.Node]) -> tuple[int, ...]:
        """The inputs of `as_strided` with an offset, which counts from the beginning of the storage in eager, and from
        the tensor in a library."""
        found = set()
        for node in nodes:
            base = base_of(node.args[0])
            if base is not None and base.name in self.argument_of:
                argument = self.argument_of[base.name]
                if argument.leaf is None:
                    raise BuildError(
                        f"`as_strided` of the module's `{argument.state}` has an offset: eager counts from the "
                        "beginning of the storage, compiled code from the tensor's",
                        hint="leave `storage_offset` out, and take a slice first: `w[1:].as_strided(size, stride)`",
                        stage="export",
                        source=line_named(node.meta.get("stack_trace") or ""),
                    )
                found.add(argument.leaf)
        return tuple(sorted(found))

    def _write_mutations(self) -> set[tuple[int | None, str | None]]:
        """Write the new values of inputs and buffers into them, as eager does. Returns those that are written."""
        output = self.graph.output_node()
        values: list[Any] = list(cast("tuple[Any, ...]", output.args[0]))
        kept = []
        for spec, value in zip(self.program.graph_signature.output_specs, values, strict=True):
            if "MUTATION" not in spec.kind.name:
                kept.append(value)
                continue
            target = self.nodes[spec.target] if spec.target in self.nodes else self._state_node(spec.target)
            if target is not value:
                self.replaced.add(target)
                with self.graph.inserting_before(output):
                    self.graph.call_function(torch.ops.aten.copy_.default, (target, value))
        output.args = (tuple(kept),)
        return {(self.argument_of[name].leaf, self.argument_of[name].state) for name in self._mutated_placeholders()}

    def _keep_assigned_over(self) -> None:
        """Copy a buffer's old tensor where it is still used after forward has assigned another tensor to the buffer.

        For an assignment, export ends the graph with a `copy_` into the buffer, with the meta of the assigned tensor.
        """
        copies = (
            self.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default) if not self.frozen else []
        )
        assigned = [
            copy
            for copy in copies
            if isinstance(copy.args[1], fx.Node)  # not a number: x[0].copy_(1)
            and copy.meta.get("val") is copy.args[1].meta.get("val")
            and itself(copy.args[1]) is not copy.args[0]
        ]
        buffers = [copy.args[0] for copy in assigned]
        for copy, buffer in zip(assigned, buffers, strict=True):
            if kind_of(copy) != kind_of(buffer):
                raise becomes_another(self.argument_of[buffer.name].state, buffer, copy)
        wholes: dict[fx.Node, fx.Node] = {}
        for user in (*assigned, self.graph.output_node()):
            for value in user.all_input_nodes:
                base = base_of(value)
                if base is not None and base in buffers and value is not user.args[0]:
                    with self.graph.inserting_before(assigned[0]):
                        if base not in wholes:
                            wholes[base] = self._cloned(base)
                        user.replace_input_with(value, self._view_of_clone(wholes[base], base, value))

    def _cloned(self, value: fx.Node) -> fx.Node:
        kept: fx.Node = self.graph.call_function(torch.ops.aten.clone.default, (value,))
        kept.meta = {**value.meta, "val": value.meta["val"].clone()}  # in memory of its own
        return kept

    def _view_of_clone(self, clone: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node:
        """The view of a clone that corresponds to a value's view of its base; a clone of the value if the two have
        different strides."""
        whole, own, copied = (each.meta["val"] for each in (base, value, clone))
        if own.dtype != whole.dtype or own.is_conj() or own.is_neg() or copied.stride() != whole.stride():
            return self._cloned(value)
        if form_of(base) == form_of(value) and own.storage_offset() == whole.storage_offset():
            return clone
        offset = own.storage_offset() - whole.storage_offset()
        form = list(own.shape), list(own.stride()), offset
        view: fx.Node = self.graph.call_function(torch.ops.aten.as_strided.default, (clone, *form))
        view.meta = {**value.meta, "val": copied.as_strided(*form)}
        return view

    def _refuse_shared(self, written: Container[str]) -> None:
        """Raises BuildError where tensors that the model uses share memory, and it writes to one of them."""
        tensors = {id(self.tensors[name]): (name, self.tensors[name]) for name in self.state}
        names = [name for name, _ in tensors.values()]
        own = {index for index, name in enumerate(names) if name in written}
        for one, other in overlapping([tensor for _, tensor in tensors.values()], own):
            raise BuildError(
                f"the model's `{names[one]}` and `{names[other]}` share memory, and forward writes to it: compiled "
                "code treats them as separate",
                hint="register the whole as one buffer, and take views of it in forward; or register a clone",
                stage="export",
            )

    def _state_node(self, target: str) -> fx.Node:
        return self.nodes[next(name for name in self.nodes if self.argument_of[name].state == target)]

    def _mutated_placeholders(self) -> list[str]:
        """Placeholders that an operator of the graph writes to in place."""
        found = []
        for node in self.graph.nodes:
            for value in written_values(node):
                if any(map(leaves_gaps, views_of(value))):
                    raise writes_to_windows(node)
                if is_expanded(value):
                    raise writes_to_expanded(node)
                base = base_of(value)
                if base is not None and str(base.target) in {**self.constants, **self.frozen_in}:
                    raise self._writes_to_constant(str(base.target), node)
                if base is not None and base.name in self.argument_of:
                    found.append(base.name)
        return found

    def _writes_to_constant(self, name: str, node: fx.Node) -> BuildError:
        source = line_named(node.meta.get("stack_trace") or "")
        if name in self.frozen_in:
            return BuildError(
                f"the model writes to its own buffer `{self.frozen_in[name]}`; frozen weights cannot",
                hint="use `weights: live` for this model",
                stage="export",
                source=source,
            )
        form, kept = node.meta.get("val"), self.constants.get(name, "")
        shape = f" of shape {list(form.shape)}" if isinstance(form, Tensor) else ""
        return BuildError(
            f"forward writes to {_attribute_named(kept)}a tensor{shape} that is kept from call to call and is not a "
            "buffer: it would be a constant of the compiled code, and writes to it would be lost",
            hint="make it a buffer, also where another object holds it: "
            "register_buffer(name, tensor, persistent=False)",
            stage="export",
            source=source,
        )

    def _lift_outputs(self) -> tuple[Output, ...]:
        """Keep each computed tensor once as an output of the graph. Returns the source of every flat output."""
        node = self.graph.output_node()
        specs = [spec for spec in self.program.graph_signature.output_specs if "MUTATION" not in spec.kind.name]
        computed: list[fx.Node] = []
        outputs = []
        for spec, value in zip(specs, cast("tuple[Any, ...]", node.args[0]), strict=True):
            outputs.append(self._output(spec, value, computed))
        if not computed:
            # All outputs are inputs or buffers. A library returns at least one tensor: return one that it wrote to.
            given = [value for value in cast("tuple[Any, ...]", node.args[0]) if isinstance(value, fx.Node)]
            written = [value for each in self.graph.nodes for value in written_values(each)]
            computed = [*(value for value in given if value.op == "call_function"), *written][:1]
        node.args = (tuple(computed),)
        if not computed:
            raise BuildError(
                "the model returns no tensor that it computes",
                hint="return at least one tensor that depends on the inputs or the weights",
                stage="export",
            )
        return tuple(outputs)

    def _output(self, spec: Any, value: Any, computed: list[fx.Node]) -> Output:
        if not isinstance(value, fx.Node):
            if isinstance(value, float) and not isfinite(value):
                raise BuildError(
                    f"the model returns the Python number {value}, which a record cannot hold",
                    hint="return it as a tensor",
                    stage="export",
                )
            return Output(constant=value)
        if not isinstance(value.meta.get("val"), Tensor):
            return self._size_of_input(value)
        tensor_node = itself(value)
        if tensor_node.op == "placeholder" and tensor_node.name in self.argument_of:
            argument = self.argument_of[tensor_node.name]
            if argument.state is None or not self.frozen:
                self._keep_state(argument)
                return Output(leaf=argument.leaf, state=argument.state)
        if (view := self._view(value)) is not None:
            return view
        if value not in computed:
            computed.append(value)
        return Output(index=computed.index(value))

    def _view(self, value: fx.Node) -> Output | None:
        """The output for a view of an argument, which is made of the tensor that the caller gave: a library would have
        a view of what it ran with, which may be a copy, or of values that it writes to it later. In training it is a
        copy, as a result with a gradient of its own.

        Raises BuildError for a view of what forward writes to that the record cannot say, and for a tensor that is a
        constant of the code.
        """
        base = base_of(value)
        if base is not None and has_elements(value):
            if (name := self.frozen_in.get(str(base.target))) is not None:
                raise returns_frozen(name, value)
            if (name := self.constants.get(str(base.target))) is not None:
                raise returns_constant(_attribute_named(name), value)
        argument = self.argument_of.get(base.name) if base is not None else None
        if base is None or argument is None or self.train or (argument.state is not None and self.frozen):
            return None
        if base in self.replaced:  # a view of the old values
            return None
        one, other = base.meta["val"], value.meta["val"]
        forms = [(each.dtype, each.is_conj(), each.is_neg(), str(each.storage_offset())) for each in (one, other)]
        if forms[0] == forms[1] and form_of(base) == form_of(value):
            self._keep_state(argument)
            return Output(leaf=argument.leaf, state=argument.state, view=True)
        if (view := strided_view(one, other, self.size_texts)) is not None:
            self._keep_state(argument)
            return Output(leaf=argument.leaf, state=argument.state, view=view)
        if (argument.leaf, argument.state) in self.written:
            raise view_of_written(self._told(argument), value)
        return None

    def _told(self, argument: Argument) -> str:
        return f"its `{argument.state}`" if argument.leaf is None else f"the input `{self.paths[argument.leaf]}`"

    def _size_of_input(self, node: fx.Node) -> Output:
        """The axis of an input whose size the number is. Raises BuildError for any other number."""
        number = _expression(node.meta.get("val"))
        for name, argument in self.argument_of.items():
            tensor = self.nodes[name].meta.get("val")
            if number is None or argument.leaf is None or not isinstance(tensor, Tensor):
                continue
            for axis, size in enumerate(tensor.shape):
                if _expression(size) == number:
                    return Output(leaf=argument.leaf, axis=axis)
        source, hint = (
            "the inputs' sizes",
            "return torch.tensor(...) of it, or let the caller take it from the input's shape",
        )
        if free_unbacked_symbols(node.meta.get("val")):
            source, hint = "values (`.item()`)", "return the tensor, and let the caller call .item()"
        raise BuildError(
            f"the model returns {node.name}, a Python number that is computed from {source}", hint=hint, stage="export"
        )

    def _keep_state(self, argument: Argument) -> None:
        if argument.state is not None and argument.state not in self.state:
            if (layout := self.tensors[argument.state].layout) != torch.strided:
                raise BuildError(f"the model uses `{argument.state}`, a {layout} tensor", hint=SPARSE, stage="export")
            self.state.append(argument.state)

    def _drop_unused(self) -> None:
        """Erase placeholders that nothing reads; name the rest as arguments, in the graph's order."""
        for node in [node for node in self.graph.nodes if node.op == "placeholder"]:
            argument = self.argument_of.get(node.name)
            if not node.users or argument is None:
                self.graph.erase_node(node)
                continue
            self._keep_state(argument)
            self.arguments.append(argument)
            example = self.tensors[argument.state].detach() if argument.state else self.leaves[argument.leaf or 0]
            self.examples.append(example)


def _attribute_named(target: str) -> str:
    """The beginning of a sentence about a constant. Export makes up names for constants that are not attributes."""
    return "" if ".lifted_" in f".{target}" else f"`{target}`, "


def _paths(spec: pytree.TreeSpec) -> tuple[str, ...]:
    """The place of each output in the result; numbers for classes that register no names, such as diffusers'."""
    numbered = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    try:
        return tuple(pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(numbered))
    except ValueError:
        return tuple(f"[{index}]" for index in range(spec.num_leaves))


def _expression(size: Any) -> Any:
    """The expression of a symbolic size; None for a number that no input determines."""
    return size.node.expr if isinstance(size, torch.SymInt) else None


_WITH_OFFSET = {
    torch.ops.aten.as_strided.default: 3,
    torch.ops.aten.as_strided_copy.default: 3,
    torch.ops.aten.as_strided_scatter.default: 4,
}
"""Operators that take an offset into the storage, and its position among their arguments."""


def _offset(node: fx.Node, position: int) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get("storage_offset")


def _reorder_kwargs(call: tuple[tuple[Any, ...], dict[str, Any]], in_spec: Any) -> Any:
    """The call with its keyword arguments in the order of the exported input structure."""
    args, kwargs = call
    return args, {name: kwargs[name] for name in in_spec.children()[1].context or ()}
