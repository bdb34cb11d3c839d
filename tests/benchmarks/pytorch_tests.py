"""PyTorch's own tests as models: which are right, refused with a way out, or wrong.

    python tests/benchmarks/pytorch_tests.py --jobs 2 --out pytorch_tests.json
    python tests/benchmarks/pytorch_tests.py --tests FOLDER --source test_aot_inductor.py --out aot_inductor.json
    python tests/benchmarks/pytorch_tests.py --capture --source exportdb
    python tests/benchmarks/pytorch_tests.py --device cuda --jobs 12 --out cuda.json
    python tests/benchmarks/pytorch_tests.py --table pytorch_tests.json aot_inductor.json

The models of `torch._export.db` (`exportdb`) and of torch's higher-order operators (`hop_db`) are in its wheel. The
test files are not: take them from PyTorch's repository, at the tag of the torch that is installed, into FOLDER:
test/inductor/test_aot_inductor.py, test/inductor/test_control_flow.py (whose models the first one imports) and
test/export/test_export.py. Files that they import and FOLDER lacks are replaced by mocks.

Each model that a test exports or compiles becomes one of a manifest, as `aotc.record` writes it, with the ranges that
the test names. First all are captured, as by `aotc build --fix-buckets`; `--capture` ends there. What can be captured
is built, loaded, and called with the inputs of the test and with others at the ends of the ranges, beside eager:
results, what is written to inputs, and buffers are compared. Each step runs in processes that may die.

    right      equal to eager in all calls
    refused    an error of aotc with a hint, in the build, the load or the call
    nameless   another error
    wrong      anything that is not equal, or the process died; the exit status is then 1
    unknown    `--capture`: it can be captured
    not tried  fails in eager, or draws random numbers
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # and not this folder, whose cuda.py torch takes for a package

import torch  # noqa: E402
import yaml  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

import aotc  # noqa: E402
from aotc.errors import AotcError  # noqa: E402
from aotc.manifest import ModelSpec, read_manifest  # noqa: E402
from aotc.manifest.sizes import extreme_dims  # noqa: E402
from aotc.models.calls import arguments_of, signature_leaves  # noqa: E402
from aotc.models.signature import make_signature  # noqa: E402
from aotc.tensors.contents import contents  # noqa: E402
from aotc.tensors.rounding import difference  # noqa: E402
from tests.benchmarks.outcomes import Said, build, in_processes, kind_of, parser, run, say  # noqa: E402
from tests.benchmarks.pytorch_tests_models import IN_THE_WHEEL, Call, case_of, entry, names_of  # noqa: E402

Named = tuple[str, str, str]
"""A source, the name of one of its cases, and the device."""
AT_ONCE = 12
"""Models in one build, after which the outcomes are written; two for each job where that is more."""


def outcomes(
    sources: Sequence[str], device: str, capture_only: bool, jobs: int, folder: Path, known: Said
) -> Iterator[Said]:
    said = dict(known)
    named: list[Named] = []
    for source, names in in_processes(__file__, "names", sources, jobs, device):
        if isinstance(names, str):
            sys.exit(f"{source}: {names}")
        named += [(source, name, device) for name in names if _shown(source, name) not in known]
    models: dict[str, dict[str, Any]] = {}
    for each, found in in_processes(__file__, "capture", named, jobs):
        shown = _shown(*each)
        if isinstance(found, str):
            said[shown] = ["wrong", found]
        elif "outcome" in found:
            said[shown] = found["outcome"]
        else:
            said[shown] = ["unknown", "can be captured"]
            models[f"case{len(models)}"] = found["model"]
    yield said
    if capture_only:
        return
    left = [*models.items()]
    while left:
        count = max(AT_ONCE, 2 * jobs)
        batch, left = dict(left[:count]), left[count:]
        shown_by = {name: _shown(**model["kwargs"]) for name, model in batch.items()}
        errors = build(batch, folder, jobs)
        said |= {shown_by[name]: [kind_of(error), error] for name, error in errors.items()}
        built = [(name, model) for name, model in batch.items() if name not in errors]
        for (name, _), found in in_processes(__file__, "compare", built, jobs, str(folder / "store")):
            said[shown_by[name]] = ["wrong", found] if isinstance(found, str) else found
        yield said


def _shown(source: str, name: str, device: str = "") -> str:
    return f"{Path(source).stem}:{name}"


# -- the processes ----------------------------------------------------------------------------------------------------


def run_names(device: str, sources: Sequence[str]) -> None:
    for source in sources:
        say(names_of(source, device))


def run_capture(named: Sequence[Named]) -> None:
    """Say the model of a manifest that can be captured, or what came of it."""
    for each in named:
        try:
            say({"outcome": ["not tried", why]} if (why := _why_not(*each)) else _captured(*each))
        except AotcError as error:
            say({"outcome": _refusal(error)})


def _why_not(*named: str) -> str:
    """Why a case cannot be tried."""
    case = case_of(*named)
    try:
        (results, _, _), (others, _, _) = (_eager(named, case.calls[0], seed) for seed in (0, 1))
    except Exception as error:  # of the model
        return f"eager: {type(error).__name__}: {error}"
    return "draws random numbers" if _difference(results, others) else ""


def _captured(*named: str) -> dict[str, Any]:
    from aotc.compiler.fix_buckets import fix_buckets
    from aotc.manifest.edit import edited

    text = yaml.safe_dump({"version": 1, "models": {"one": entry(*named)}}, sort_keys=False)
    edit = fix_buckets(_read(text), ROOT)
    if edit.problem is not None:
        told = f"{edit.problem.message}, at {edit.problem.source}" if edit.problem.source else edit.problem.message
        return {"outcome": ["refused" if edit.problem.hint else "nameless", f"{told}\nhint: {edit.problem.hint}"]}
    mended, errors = edited(text, [edit], comments=False)
    if errors:
        raise errors[0]
    return {"model": yaml.safe_load(mended)["models"]["one"]}


def _read(text: str) -> ModelSpec:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "one.yaml")
        path.write_text(text)
        return read_manifest(path).models["one"]


def _refusal(error: AotcError) -> list[str]:
    told = "; ".join([error.message, *(issue.message for issue in error.issues)])
    hint = error.hint or next((issue.hint for issue in error.issues if issue.hint), "")
    return ["refused" if hint else "nameless", f"{told}\nhint: {hint}"]


def run_compare(store: str, models: Sequence[tuple[str, dict[str, Any]]]) -> None:
    for name, model in models:
        named = tuple(model["kwargs"].values())
        try:
            flaw = _flaw(f"{store}#{name}", named, [*case_of(*named).calls, *_at_the_ends(model)])
            say(["wrong", flaw] if flaw else ["right", ""])
        except AotcError as error:
            say(_refusal(error))


def _flaw(ref: str, named: Sequence[str], calls: Sequence[Call]) -> str:
    for number, call in enumerate(calls):
        try:
            expected = _eager(named, call)
        except Exception:  # of the model: an input that aotc has drawn
            continue
        module = case_of(*named).module.eval()
        compiled = aotc.load(ref, module, on_miss="error")
        found = _called(compiled, module, call)
        for what, ours, eager in zip(("results", "inputs", "state"), found, expected, strict=True):
            if flaw := _difference(eager, ours):
                return f"call {number}: {what}: {flaw}"
        if (shared := _shared(found)) != (as_eager := _shared(expected)):
            return f"call {number}: share memory: {shared}, and in eager {as_eager}"
    return ""


def _at_the_ends(model: dict[str, Any]) -> Iterator[Call]:
    """Calls with inputs that aotc draws, at the ends of the ranges."""
    spec = _read(json.dumps({"version": 1, "models": {"one": model}}))
    signature = make_signature(spec, case_of(**model["kwargs"]).module)
    for bucket in spec.buckets:
        for dims in extreme_dims(bucket, bucket):
            yield arguments_of(signature, signature_leaves(spec, signature, dims, model["kwargs"]["device"], 7, ROOT))


Ran = tuple[Any, Any, dict[str, torch.Tensor]]
"""The results of a call, its inputs after it, and the module's state."""


def _eager(named: Sequence[str], call: Call, seed: int = 0) -> Ran:
    module = case_of(*named).module.eval()
    return _called(module, module, call, seed)


def _called(function: Any, module: nn.Module, call: Call, seed: int = 0) -> Ran:
    args, kwargs = tree_map_only(torch.Tensor, torch.clone, call)
    torch.manual_seed(seed)
    with torch.no_grad():
        return function(*args, **kwargs), (args, kwargs), dict(module.state_dict())


def _shared(ran: Ran) -> list[tuple[str, ...]]:
    """The results and inputs that share memory, of those that hold any."""
    by_memory: dict[int, list[str]] = {}
    for path, value in contents({"results": ran[0], "inputs": ran[1]}).items():
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel():
            by_memory.setdefault(value.untyped_storage().data_ptr(), []).append(path)
    return sorted(tuple(paths) for paths in by_memory.values() if len(paths) > 1)


def _difference(eager: Any, ours: Any) -> str:
    expected, found = contents(eager), contents(ours)
    if expected.keys() != found.keys():
        return f"{[*found]}, and in eager {[*expected]}"
    for path, one in expected.items():
        other = found[path]
        if difference([one], [other]) > 1:
            return f"{path}: {_told(other)}, and in eager {_told(one)}"
        if isinstance(one, torch.Tensor) and one.layout == torch.strided and one.numel():
            if one.stride() != other.stride():
                return f"{path}: strides of {other.stride()}, and in eager {one.stride()}"
            if one.dtype in (torch.float32, torch.float64):
                error = torch.nan_to_num(one - other, posinf=0, neginf=0).abs().max()
                if error > 1e-4 * torch.nan_to_num(one, posinf=0, neginf=0).abs().max() + 1e-5:
                    return f"{path}: differs from eager by {error:.2g}"
    return ""


def _told(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)[:80]


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        task, *given, names = sys.argv[2:]
        {"names": run_names, "capture": run_capture, "compare": run_compare}[task](*given, json.loads(names))
        return 0
    options = parser(__doc__)
    options.add_argument("--tests", type=Path, metavar="FOLDER", help="where the test files are")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--source", action="append", default=[], help="exportdb, hop_db, or a file of FOLDER")
    options.add_argument("--capture", action="store_true", help="compile nothing")
    asked = options.parse_args()
    files = sorted(path.name for path in asked.tests.glob("test_*.py")) if asked.tests else []
    chosen = asked.source or [*IN_THE_WHEEL, *files]
    sources = [each if each in IN_THE_WHEEL else str((asked.tests / each).resolve()) for each in chosen]
    return run(asked, functools.partial(outcomes, sources, asked.device, asked.capture, asked.jobs))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
