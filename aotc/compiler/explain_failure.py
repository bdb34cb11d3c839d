"""Why a unit failed, for a person: the stage, the model's own line, what to change."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import fx

from aotc.errors import AotcError, BuildError

_TORCH = str(Path(torch.__file__).parent)
_AOTC = str(Path(__file__).parents[1])

SPARSE = (
    "Inductor compiles no parameters and buffers that are sparse, and no results that are in CSR or its kin: keep them "
    "dense, or compile the parts around them: `aotc build --suggest-regions`"
)
BEYOND = (
    "an index is beyond what it indexes: is the bucket longer than a table of positions, or "
    "`init: {randint: …}` beyond the vocabulary?"
)
_NESTED = "nested tensors are not captured: pad what they hold, and take the lengths or a mask as an input"

_GRADIENTS = (
    "torch.export loses a tensor that is made here. Where forward takes gradients (torch.autograd.grad, "
    "torch.func.grad), let the factory trace the model, and forward call what it gives, as `self.traced(weights, x)` "
    "with `weights = dict(self.model.named_parameters())`:\n"
    "      call = lambda weights, x: torch.func.functional_call(model, weights, (x,))\n"
    "      traced = torch.fx.experimental.proxy_tensor.make_fx(call)(weights, x)  # for the sizes of this x"
)

_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"GuardOnDataDependentSymNode|data-dependent|DataDependentOutputException|Could not guard on|Could not extract",
        "the code branches on, or sizes something by, a tensor's value: use torch.where or torch.cond for the branch, "
        "keep this part out of forward, or compile the parts around it: `aotc build --suggest-regions`",
    ),
    (
        r"Cannot access data pointer",
        "a kernel of yours was called while torch.export had tensors without data: make it an operator. A Triton "
        "kernel: launch it as torch.library.wrap_triton(kernel)[grid](…) in a function under @torch.library.triton_op; "
        "any other: @torch.library.custom_op, with a fake kernel",
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
        "its weights are tensors of a class of their own, as torchao's `quantize_` makes them: use `weights: frozen`, "
        "which folds them into the code, for this model",
    ),
    (
        r"__obj_flatten__|PackedParams",
        "modules that torch.ao.quantization made keep their weights packed, where no graph can hold them: quantize "
        "with torchao's `quantize_` and `weights: frozen`, or leave these modules to eager, with regions around them",
    ),
    (
        r"out of memory|OutOfMemoryError|Killed signal terminated",
        "free the device, or build the large buckets alone with --jobs 1",
    ),
    (r"No space left on device", "free the disk, or set TMPDIR to a folder with room"),
    (
        r"No C\+\+ compiler|InvalidCxxCompiler|No working C\+\+|cannot execute \S*cc1plus",
        "a C++ compiler is needed where aotc builds (not where it loads): install g++ or set CXX",
    ),
    (
        r"(?s)CppCompileError.*fatal error: \S+: No such file",
        "headers are needed where aotc builds: `cuda.h` is the CUDA toolkit's, whose folder CUDA_HOME names; `Python.h`"
        " is python3-dev's",
    ),
    (
        r"(?s)CppCompileError.*:\d+:\d+: error: ",
        "torch wrote code that the C++ compiler refuses: another version of torch may not, or leave this part of the "
        "model to eager: `aotc build --suggest-regions`",
    ),
    (r"CppCompileError", "the C++ compiler or its linker fails before it comes to the code: try another, set CXX"),
    (
        r"index out of bounds",
        BEYOND,
    ),
    (
        r"\bspecialized\b|ConstraintViolation|Constraints violated|suggested fixes|Suggested fixes",
        "the model does not take every size of the range as one graph; the log says which: narrow the range, give it "
        "`multiple_of`, or list fixed buckets",
    ),
    (r"\b(mutat|in-place\b)", "write the change as a new tensor, or keep the buffer out of forward"),
)


_ONLY_EXPORT = (
    "the model runs when it is called, and not while torch.export watches: change this line, or compile the parts "
    "around it: `aotc build --suggest-regions`"
)


def explain_failure(error: BaseException, stage: str) -> BuildError:
    """The BuildError for whatever a unit raised."""
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
    if "data-dependent" in text and any("/torch/distributions/" in frame.filename for frame in stack):
        hint = (
            "torch.distributions checks values here, in a branch: leave that out with `validate_args=False`, or, where "
            "the distribution is made elsewhere, torch.distributions.Distribution.set_default_validate_args(False) in "
            "the factory"
        )
    if "expert" in source and "data-dependent" in text:
        hint += "; transformers: `experts_implementation: batched_mm` in the kwargs of the configuration"
    proposal = _proposed_ranges(text)
    return BuildError(
        f"{stage}: {type(error).__name__}: {_first_lines(text)}",
        hint=f"{proposal}; {hint}" if proposal and hint else proposal or hint,
        stage=stage,
        source=source,
    )


def hint_for(text: str) -> str:
    """What to do about a failure whose message or log is `text`; "" where nothing is known."""
    return next((hint for pattern, hint in _HINTS if re.search(pattern, text)), "")


_NO_FAKE_KERNEL = re.compile(
    r"no fake impl registered for <CustomOpDef\((?P<custom>[\w:]+)\)>|"
    r"UnsupportedOperatorException: (?P<cpp>\w+\.\w+)|"
    r"(?P<name>\w+[.:]+\w+)(\.\w+)?:? .*(missing fake|does not have a fake|no fake|register_fake|fake tensors)"
)


def _fake_kernel_hint(text: str) -> str:
    """The lines that give an operator the fake kernel that torch.export misses."""
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
        f"the operator {namespace}::{name} needs a fake kernel, which gives tensors of the results' shapes and dtypes, "
        "beside its registration:\n"
        f'      @torch.library.register_fake("{namespace}::{name}")\n'
        f"      def _({', '.join(names)}):\n"
        f"          return {results or None}"
    )


_UNKNOWN_RESULT = re.compile(r"Found <class '(?P<module>[\w.]+)\.(?P<name>\w+)'> in output, which is not a known type")


def _unknown_result(module: str, name: str, stage: str) -> BuildError:
    """A model that returns an object which torch cannot take apart into tensors."""
    if name.endswith("Cache"):
        hint = (
            "let the model keep it to itself: write the inputs out, with `use_cache: false` among them, and pass "
            "use_cache=False in the service, too. (`use_cache: false` in the configuration, or in its `text_config`, "
            "does where the service's module has it there: a checkpoint's own says true.) A cache that is kept between "
            "calls is buffers of the module: see CachedLM in examples/language_models.py"
        )
    else:
        hint = (
            "return tensors in tuples, lists, dicts or dataclasses that are registered, where the class is defined:\n"
            f"      torch.export.register_dataclass({name})  # or torch.utils._pytree.register_pytree_node"
        )
    message = f"{stage}: the model returns a {name} (of {module}), which torch cannot take apart into tensors"
    return BuildError(message, hint=hint, stage=stage, source="")


_ADVICE = re.compile(
    r"^\s*(For more information, run with|For extended logs|If you suspect the guard|Caused by: \(|For C\+\+ stack|"
    r"For more debugging help|The error above occurred|The following call raised|"
    r"consider using data-dependent friendly)"
)
"""Lines of torch's messages that speak to its own developers."""


_CPP_ERROR = re.compile(r"(?P<folder>\S*/)?(?P<rest>\S+:\d+:\d+: (?:fatal )?error: .*)")
"""What a C++ compiler says is wrong, among much else."""


def _first_lines(text: str, count: int = 6, width: int = 400) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not _ADVICE.match(line)]
    if wrong := [found["rest"] for line in lines if (found := _CPP_ERROR.match(line.strip()))]:
        lines = [*lines[:1], *wrong[: count - 1]]
    return "\n    ".join(line[:width] for line in lines[:count])


def model_line(error: BaseException) -> str:
    """`file.py:12 in forward: x = …`: the innermost line that is neither torch's nor aotc's nor the interpreter's.

    Where that is a library's, the innermost line of the user's own code stands before it: `… → library/file.py:34 …`.
    """
    return lines_shown(traceback.extract_tb(error.__traceback__)) or line_named(str(error)) or _line_of_node(error)


def _line_of_node(error: BaseException) -> str:
    """The line of the model that made what torch was looking at in its graph when it failed."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for value in frame.f_locals.values():
            nodes = (value, *value.users) if isinstance(value, fx.Node) else ()
            if line := _line_of_nodes(nodes):
                return line
        constant, artifact = frame.f_locals.get("const"), frame.f_locals.get("export_artifact")
        if isinstance(constant, str) and artifact is not None:
            graphs = [part.graph for part in artifact.aten.gm.modules() if isinstance(part, fx.GraphModule)]
            inputs = [node for graph in graphs for node in graph.nodes if node.name.endswith(constant)]
            return _line_of_nodes(user for node in inputs for user in node.users)
    return ""


def _line_of_nodes(nodes: Iterable[fx.Node]) -> str:
    return next((line for node in nodes if (line := line_named(node.meta.get("stack_trace") or ""))), "")


def lines_shown(stack: Iterable[traceback.FrameSummary]) -> str:
    """The lines of `model_line` in a stack, outermost first; "" where it has none."""
    frames = [frame for frame in stack if is_model_code(frame.filename)]
    own = [index for index, frame in enumerate(frames) if not _is_installed(frame.filename)]
    chosen = sorted({own[-1], len(frames) - 1} if own else {len(frames) - 1}) if frames else []
    return " → ".join(_shown(frames[index]) for index in chosen)


def line_named(text: str) -> str:
    """The innermost line that is neither torch's nor aotc's in a text that has them as tracebacks do."""
    found = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', text)
    named = [match for match in found if not match[0].startswith((_TORCH, _AOTC))]
    return f"{Path(named[-1][0]).name}:{named[-1][1]} in {named[-1][2]}" if named else ""


def is_model_code(filename: str) -> bool:
    """Whether a file is neither torch's nor aotc's nor the interpreter's."""
    return not filename.startswith((_TORCH, _AOTC, "<")) and (_is_installed(filename) or "/lib/python" not in filename)


def _is_installed(filename: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(filename).parts)


def _shown(frame: traceback.FrameSummary) -> str:
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    name = Path(frame.filename).name
    if _is_installed(frame.filename):
        name = re.split(r"(?:site|dist)-packages/", frame.filename)[-1]
    return f"{name}:{frame.lineno} in {frame.name}: {line}"


_FIX = re.compile(r"^\s*(?P<name>\w+) = (?P<value>.+)$", re.MULTILINE)


def _proposed_ranges(text: str) -> str:
    """torch.export's suggested fixes in the manifest's words."""
    _, _, fixes = text.partition("uggested fixes")
    proposals = []
    for match in _FIX.finditer(fixes):
        name, value = match["name"], match["value"].strip()
        if times := re.fullmatch(r"(\d+)\s*\*\s*_\w+", value):
            proposals.append(f"`{name}: {{range: […], multiple_of: {times[1]}}}`")
        elif value.isdigit():
            proposals.append(f"`{name}: {value}` (one fixed size)")
        elif limits := re.search(r"(min|max)=(\d+)(?:, max=(\d+))?", value):
            proposals.append(f"`{name}` with {limits[0]}")
    return f"the model needs, in the manifest's words: {', '.join(proposals)}" if proposals else ""
