"""Explain why a unit failed: the stage, the line of the model, what to change."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx

from aotc.errors import AotcError, BuildError
from aotc.reads.sources import is_installed as is_installed_file

_TORCH = str(Path(torch.__file__).parent)
_AOTC = str(Path(__file__).parents[1])

SPARSE = (
    "Inductor does not support sparse parameters and buffers, nor results in CSR and similar formats: keep them dense, "
    "or compile the parts around them: `aotc build MANIFEST --suggest-regions`"
)
BEYOND = (
    "an index is out of range: is the bucket longer than the table of positions, or does `init: {randint: …}` exceed "
    "the vocabulary?"
)
OUT_OF_MEMORY = "out of memory|OutOfMemoryError|MemoryError|t allocate memory"
"""A pattern in the messages of CUDA's allocator, of the CPU's and of Python's."""
FREE_MEMORY = "free memory, or build the large buckets one at a time, with --jobs 1"
_NESTED = "nested tensors cannot be captured: pad the sequences, and pass their lengths or a mask as an input"

_GRADIENTS = (
    "torch.export loses a tensor that is created here. If forward computes gradients (torch.autograd.grad, "
    "torch.func.grad), trace the model in the factory, and call the traced graph in forward, as "
    "`self.traced(weights, x)` with `weights = dict(self.model.named_parameters())`:\n"
    "      call = lambda weights, x: torch.func.functional_call(model, weights, (x,))\n"
    "      traced = torch.fx.experimental.proxy_tensor.make_fx(call)(weights, x)  # for the sizes of this x"
)

_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"LoweringException: GuardOnDataDependentSymNode",
        "a size depends on a tensor's values, and this operator needs a fixed one: make tensors of a fixed size, and a "
        "mask. For `repeat_interleave(x, counts)`, with `N` rows at most: `rows = torch.searchsorted(counts.cumsum(0), "
        "torch.arange(N), right=True)`, then `x[rows.clamp(max=len(x) - 1)]`, of which `counts.sum()` rows count. Or "
        "compile the parts around it: `aotc build MANIFEST --suggest-regions`",
    ),
    (
        r"GuardOnDataDependentSymNode|data-dependent|DataDependentOutputException|DynamicOutputShapeException|"
        r"PendingUnbackedSymbolNotFound|Could not guard on|Could not extract",
        "a branch or a size depends on a tensor's value: use torch.where or torch.cond for the branch, "
        "keep this part out of forward, or compile the parts around it: `aotc build MANIFEST --suggest-regions`",
    ),
    (
        r"Cannot access data pointer",
        "a kernel of your own was called with torch.export's fake tensors, which have no data: make it an operator. A "
        "Triton kernel: launch it as torch.library.wrap_triton(kernel)[grid](…) in a function under "
        "@torch.library.triton_op; any other: @torch.library.custom_op, with a fake kernel",
    ),
    (r"in the exported program constant's list|view functorch tensor|does not require grad", _GRADIENTS),
    (
        r"Couldn't swap \w+\.",
        "forward casts or moves a part of the module (`.to()`): do it once, in the factory",
    ),
    (
        r"SparseTensorImpl|Sparse \w+ tensors do not have strides",
        SPARSE,
    ),
    (r"nested_tensor|NestedTensor", _NESTED),
    (
        r"traceable tensor subclass",
        "forward makes or returns tensor subclasses, which only weights may be: let it return plain tensors",
    ),
    (
        r"KeyError: torch\.\w+",
        "torch's compiler has no code for this dtype on a CPU: where only weights have it, use `weights: frozen`; or "
        "build for a GPU",
    ),
    (
        r"lifted_tensor_\d+ is not in the constants dictionary",
        "a tensor subclass among the weights makes tensors of its own, which torch.export loses: use `weights: frozen`",
    ),
    (
        r"__obj_flatten__|PackedParams",
        "modules of torch.ao.quantization hold packed weights, which a graph cannot contain: quantize with torchao's "
        "`quantize_`, or leave these modules to eager, with regions around them",
    ),
    (
        r"aotc compiles for a GPU that this machine lacks",
        "no fault of the model: torch asks the absent GPU for more than aotc stands in for; build on a machine with "
        "such a GPU, or with another version of torch",
    ),
    (
        r"CantSplit",
        "Inductor cannot divide the loops of a kernel over a range of sizes: list fixed buckets instead of the range",
    ),
    (OUT_OF_MEMORY + "|Killed signal terminated", FREE_MEMORY),
    (r"No space left on device", "free the disk, or set TMPDIR to a folder with room"),
    (r"failed to map segment", "TMPDIR is mounted noexec: let it be a folder from which code may be run"),
    (
        r"No C\+\+ compiler|InvalidCxxCompiler|No working C\+\+|cannot execute \S*cc1plus",
        "a C++ compiler is needed where aotc builds (not where it loads): install g++ or set CXX",
    ),
    (
        r"(?s)CppCompileError.*fatal error: \S+: No such file",
        "headers are needed where aotc builds: `cuda.h` is part of the CUDA toolkit, whose folder CUDA_HOME names; "
        "`Python.h` is part of python3-dev",
    ),
    (
        r"(?s)CppCompileError.*:\d+:\d+: error: ",
        "torch generated code that the C++ compiler rejects: try another version of torch, or leave this part of the "
        "model to eager: `aotc build MANIFEST --suggest-regions`",
    ),
    (r"CppCompileError", "the C++ compiler or its linker fails before it reads the code: set CXX to another compiler"),
    (
        r"index out of bounds",
        BEYOND,
    ),
    (
        r"\bspecialized\b|ConstraintViolation|Constraints violated|suggested fixes|Suggested fixes",
        "one graph does not hold for every size of the range; the log has the condition: narrow the range, give it "
        "`multiple_of`, or list fixed buckets",
    ),
    (
        r"is returned whose `\w+` is a .*; no record can hold it",
        "let forward return a DynamicCache or a StaticCache without offloading, or pass `use_cache: false` as an input",
    ),
    (r"\b(mutat|in-place\b)", "write the change as a new tensor, or keep the buffer out of forward"),
)

WRITE_IN_FUNC = (
    "torch.export cannot follow a write in place (`z[…] = …`, `z.mul_(…)`) in what torch.func differentiates: make new "
    "tensors there, as torch.where and torch.cat do"
)

_HINTS_WITHIN: tuple[tuple[str, str, str], ...] = (
    (
        "data-dependent",
        "distributions/",
        "torch.distributions checks values here, in a branch, since it was told to: leave out `validate_args=True`",
    ),
    (
        "data-dependent",
        "nn/modules/batchnorm.py",
        "a batch norm with `momentum=None` divides by a count, which is in a tensor: give it a momentum to train it",
    ),
    (
        "Cannot access data pointer",
        "_functorch/eager_transforms.py",
        WRITE_IN_FUNC,
    ),
)
"""For failures within a part of torch: what the message says, the part, and the hint."""

_PLAIN: tuple[tuple[str, str], ...] = (
    (
        r"^InductorError: LoweringException: GuardOnDataDependentSymNode: [^\n]*? data-dependent expression (.+?) "
        r"\(unhinted: (?s:.+)\n\s*target: (\S+)(?s:.*)",
        r"`\2` needs a fixed size, and `\1` depends on a tensor's values",
    ),
    (
        r"^InductorError: LoweringException: (?P<what>(?s:.+))\n\s*target: (?P<operator>\S+)(?s:.*)",
        r"torch's compiler fails at the operator `\g<operator>`: \g<what>",
    ),
    (
        r"^DataDependentOutputException: (\S+?)(\.default)?$",
        r"forward takes a number or a bool from what `\1` computes, and a capture has no values",
    ),
    (
        r"^DynamicOutputShapeException: (\S+?)(\.default)?$",
        r"the sizes of what `\1` returns depend on values, and a capture has none",
    ),
    (
        r"^GuardOnDataDependentSymNode: Could not guard on data-dependent expression (.+?) \(unhinted: .+\)",
        r"forward takes a branch by `\1`, which is data-dependent",
    ),
    (
        r"^GuardOnDataDependentSymNode: Could not extract specialized \w+ from data-dependent expression (.+?) "
        r"\(unhinted: .+\)",
        r"forward takes `\1` for a Python number, which is data-dependent",
    ),
    (
        r"^SpecViolationError: Node\.meta (\S+) is missing val field\.",
        r"torch.export's graphs cannot hold the operator `\1`",
    ),
    (
        r"^SpecViolationError: Operator '<function (?:\S+\.)?(\w+) at .+?>' is not an allowed operator type(?s:.*)",
        r"torch.export's graphs cannot hold the function `\1`, which torch calls here",
    ),
    (
        r"^InductorError: NotImplementedError: NYI cpp wrapper for (\w+)",
        r"AOTInductor has no code for the operator `\1`",
    ),
    (
        r"^RuntimeError: (\S+) does not support tracing with fx\.symbolic_trace\. .*",
        r"`\1` cannot be captured",
    ),
)
"""Messages of torch's in words of the model."""

_ONLY_EXPORT = (
    "the model runs in eager and fails under torch.export: change this line, or compile the parts around it: "
    "`aotc build MANIFEST --suggest-regions`"
)
_ONLY_COMPILE = (
    "torch's compiler fails here, or lacks code for it: write this line with other operators, try a newer torch, or "
    "compile the parts around it: `aotc build MANIFEST --suggest-regions`"
)


def explain_failure(error: BaseException, stage: str) -> BuildError:
    """The BuildError for an exception that a unit raised."""
    if isinstance(inner := getattr(error, "inner_exception", None), BuildError):  # of aotc's own code within Inductor
        error = inner
    if isinstance(error, BuildError):
        return error.with_fields(stage=error.fields.get("stage", stage), source=error.fields.get("source", ""))
    source, stack = model_line(error), traceback.extract_tb(error.__traceback__)
    text = str(error).strip()
    if found := _UNKNOWN_RESULT.search(text):
        return _unknown_result(found["module"], found["name"], stage)
    own = error.hint if isinstance(error, AotcError) else ""
    hint = own or _fake_kernel_hint(f"{type(error).__name__}: {text}") or hint_for(f"{type(error).__name__} {text}")
    if stage == "export" and not hint:
        hint = _NESTED if "torch.nested" in source else _ONLY_EXPORT
    if stage == "compile" and not hint and any("/torch/_inductor/" in frame.filename for frame in stack):
        hint = _ONLY_COMPILE
    hint = next(
        (
            better
            for pattern, folder, better in _HINTS_WITHIN
            if pattern in text and any(f"/torch/{folder}" in frame.filename for frame in stack)
        ),
        hint,
    )
    if "expert" in source and "data-dependent" in text:
        hint += "; transformers: `experts_implementation: batched_mm` in the kwargs of the configuration"
    said = f"{type(error).__name__}: {_first_lines(text)}"
    if re.fullmatch(r"(\w+: )*AssertionError:? *", said) and stack:
        said = f"{said.rstrip(': ')}: `{stack[-1].line}` of {_place(stack[-1])}"
    message = _plain(said)
    if hint == _ONLY_EXPORT and message == said:
        message = f"torch.export fails where eager does not: {said}"
    return BuildError(f"{stage}: {message}", hint=hint, stage=stage, source=source)


def _place(frame: traceback.FrameSummary) -> str:
    """`torch/_inductor/ir.py:9485`, of a frame in an installed package."""
    return f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno}"


def _plain(message: str) -> str:
    for pattern, words in _PLAIN:
        message = re.sub(pattern, words, message)
    return message


def hint_for(text: str) -> str:
    """A hint for a failure whose message or log is `text`; "" if no pattern matches."""
    return next((hint for pattern, hint in _HINTS if re.search(pattern, text)), "")


_NO_FAKE_KERNEL = re.compile(
    r"no fake impl registered for <CustomOpDef\((?P<custom>[\w:]+)\)>|"
    r"UnsupportedOperatorException: (?P<cpp>\w+\.\w+)|"
    r"(?P<name>\w+[.:]+\w+)(\.\w+)?:? .*(missing fake|does not have a fake|no fake|register_fake|fake tensors)"
)


def _fake_kernel_hint(text: str) -> str:
    """A hint with the code of the fake kernel that an operator lacks; "" for any other failure."""
    found = _NO_FAKE_KERNEL.search(text)
    if found is None:
        return ""
    namespace, _, name = re.sub(r"[.:]+", "::", found["custom"] or found["cpp"] or found["name"]).partition("::")
    try:
        schema = getattr(getattr(torch.ops, namespace), name).default._schema
    except AttributeError:
        return ""
    if namespace == "aten":  # torch's own: only torch registers operators there
        return ""
    names = [argument.name for argument in schema.arguments]
    tensor = next((argument.name for argument in schema.arguments if str(argument.type) == "Tensor"), "…")
    results = ", ".join(f"torch.empty_like({tensor})" for _ in schema.returns)
    return (
        f"the operator {namespace}::{name} needs a fake kernel, which returns tensors of the results' shapes and "
        "dtypes, beside its registration:\n"
        f'      @torch.library.register_fake("{namespace}::{name}")\n'
        f"      def _({', '.join(names)}):\n"
        f"          return {results or None}"
    )


_UNKNOWN_RESULT = re.compile(r"Found <class '(?P<module>[\w.]+)\.(?P<name>\w+)'> in output, which is not a known type")


def _unknown_result(module: str, name: str, stage: str) -> BuildError:
    """The error of a model that returns an object which torch cannot take apart into tensors."""
    if name.endswith("Cache"):
        hint = (
            "return the cache's tensors in tuples or lists, or register its class: "
            f"torch.export.register_dataclass({name}). Hold a cache that lives between calls in buffers of the module: "
            "see CachedLM in examples/language_models.py"
        )
    else:
        hint = (
            "return tensors in tuples, lists, dicts or registered dataclasses; register the class beside its "
            "definition:\n"
            f"      torch.export.register_dataclass({name})  # or torch.utils._pytree.register_pytree_node"
        )
    message = f"{stage}: the model returns a {name} (of {module}), which torch cannot take apart into tensors"
    return BuildError(message, hint=hint, stage=stage, source="")


_ADVICE = re.compile(
    r"^\s*(For more information, run with|For extended logs|If you suspect the guard|Caused by: \(|For C\+\+ stack|"
    r"For more debugging help|The error above occurred|The following call raised|"
    r"consider using data-dependent friendly)"
)
"""Lines of torch's messages that are for torch's own developers."""


_CPP_ERROR = re.compile(r"(?P<folder>\S*/)?(?P<rest>\S+:\d+:\d+: (?:fatal )?error: .*)")
"""An error line in a C++ compiler's output."""


_ARGUMENTS = re.compile(r"(?m)^\s*(args\[\d+\]|kwargs): (?s:.*)")
"""The arguments of an operator that fails in Inductor, as Inductor's own objects."""


def _first_lines(text: str) -> str:
    text = _ARGUMENTS.sub("", text)
    lines = [line for line in text.splitlines() if line.strip() and not _ADVICE.match(line)]
    if wrong := [found["rest"] for line in lines if (found := _CPP_ERROR.match(line.strip()))]:
        lines = [*lines[:1], *wrong]
    return "\n    ".join(line[:400] for line in lines[:6])


def model_line(error: BaseException) -> str:
    """`file.py:12 in forward: x = …`: the innermost line that is neither torch's nor aotc's nor the interpreter's.

    If this line is a library's, the innermost line of the user's own code comes first: `… → library/file.py:34 …`.
    """
    return lines_shown(traceback.extract_tb(error.__traceback__)) or line_named(str(error)) or _line_of_node(error)


def _line_of_node(error: BaseException) -> str:
    """The line of the model that created the graph node, or uses the constant, which torch was processing."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for value in frame.f_locals.values():
            if line := _line_of_nodes(_nodes_of(value)):
                return line
        constant, artifact = frame.f_locals.get("const"), frame.f_locals.get("export_artifact")
        if isinstance(constant, str) and artifact is not None:
            graphs = [part.graph for part in artifact.aten.gm.modules() if isinstance(part, fx.GraphModule)]
            inputs = [node for graph in graphs for node in graph.nodes if node.name.endswith(constant)]
            return _line_of_nodes(user for node in inputs for user in node.users)
    return ""


def _nodes_of(value: Any) -> Iterable[fx.Node]:
    """A graph node, and those that use it; the nodes from which Inductor made an operation."""
    if isinstance(value, fx.Node):
        return (value, *value.users)
    return getattr(value, "origins", ()) if type(value).__module__ == "torch._inductor.ir" else ()


def _line_of_nodes(nodes: Iterable[fx.Node]) -> str:
    return next((line for node in nodes if (line := line_named(node.meta.get("stack_trace") or ""))), "")


def lines_shown(stack: Iterable[traceback.FrameSummary]) -> str:
    """The lines for `model_line` in a stack, outermost first; "" if the stack has none."""
    frames = [frame for frame in stack if is_model_code(frame.filename)]
    own = [index for index, frame in enumerate(frames) if not is_installed(frame.filename)]
    chosen = sorted({own[-1], len(frames) - 1} if own else {len(frames) - 1}) if frames else []
    return " → ".join(_shown(frames[index]) for index in chosen)


def stack_of(frame: FrameType, line: int = 0) -> list[traceback.FrameSummary]:
    """The stack of a frame, outermost first; `line` is the innermost frame's, if it is not the one that runs."""
    frames = [traceback.FrameSummary(frame.f_code.co_filename, line or frame.f_lineno, frame.f_code.co_name)]
    outer = frame.f_back
    while outer is not None:
        frames.append(traceback.FrameSummary(outer.f_code.co_filename, outer.f_lineno, outer.f_code.co_name))
        outer = outer.f_back
    return frames[::-1]


def line_named(text: str) -> str:
    """The innermost line, neither torch's nor aotc's nor of generated code, of a text with lines of a traceback."""
    found = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', text)
    named = [match for match in found if not match[0].startswith((_TORCH, _AOTC, "<"))]
    return f"{Path(named[-1][0]).name}:{named[-1][1]} in {named[-1][2]}" if named else ""


def is_model_code(filename: str) -> bool:
    """Whether a file is neither torch's nor aotc's nor the interpreter's."""
    return not filename.startswith((_TORCH, _AOTC, "<")) and (is_installed(filename) or "/lib/python" not in filename)


def is_installed(filename: str) -> bool:
    """Whether a file is of an installed package."""
    return is_installed_file(Path(filename))


def _shown(frame: traceback.FrameSummary) -> str:
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    name = Path(frame.filename).name
    if "-packages/" in frame.filename:
        name = re.split(r"(?:site|dist)-packages/", frame.filename)[-1]
    return f"{name}:{frame.lineno} in {frame.name}: {line}"
