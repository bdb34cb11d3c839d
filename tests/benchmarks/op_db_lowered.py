"""torch's own list of operators, `op_db`, with extreme values, each lowered by Inductor as aotc has it lowered.

    python tests/benchmarks/op_db_lowered.py --part 1/6 --out lowered-1.json
    python tests/benchmarks/op_db_lowered.py --device cuda --part 1/2 --out lowered-1.json
    python tests/benchmarks/op_db_lowered.py --table lowered-1.json lowered-2.json

The second draw of op_db.py without artifacts, some ten times as fast: `BATCH` operators are one graph, which this
process compiles with aotc's patches and options, and calls with both draws of `aotc.models.extreme_inputs` in the
tensors of one operator after the other. `aotc.models.decided_values` judges the results in float32.

    right      the results of both draws
    refused    torch.export takes no such operator, or Inductor does not compile it
    nameless   the compiled code raises, and eager does not
    wrong      a result is wrong by the rule, also on one thread; the exit status is then 1
    not tried  op_db has no sample (random, or no gradient), or eager raises with such values
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # and not this folder, whose cuda.py torch takes for a package

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from aotc.compiler.codegen.inductor_options import inductor_options  # noqa: E402
from aotc.compiler.wrong_code.lowering import Lowering, copy_of_graph  # noqa: E402
from aotc.machine.native_target import resolve_target  # noqa: E402
from aotc.machine.targets import parse_target  # noqa: E402
from aotc.manifest.types import ModelSpec  # noqa: E402
from tests.benchmarks.op_db import NOT_TRIED, Chosen, flaw_at_extremes  # noqa: E402
from tests.benchmarks.op_db_models import Operators, operators, sample_of  # noqa: E402
from tests.benchmarks.outcomes import Said, parser, run  # noqa: E402

BATCH = 12
_SIZES_OF_VALUES = (
    "masked_select",
    "nonzero",
    "unique",
    "argwhere",
    "repeat_interleave",
    "tensor_split",
    "combinations",
)
"""Inductor's code is for sizes that are known; one of these in a batch fails all of it."""


def outcomes(part: str, device: str, folder: Path, known: Said) -> Iterator[Said]:
    index, count = map(int, part.split("/"))
    said, tried = dict(known), []
    for place, name in enumerate(operators()):
        if place % count != index - 1 or name in known:
            continue
        if any(part in name for part in _SIZES_OF_VALUES):
            said[name] = ["refused", "sizes of its results are values of tensors"]
        elif (sample := sample_of(name)) is None:
            said[name] = ["not tried", "random, or eager cannot differentiate it"]
        else:
            tried.append((name, sample))
    for at in range(0, len(tried), BATCH):
        said |= _of_batch(tried[at : at + BATCH], device)
        yield said


def _of_batch(batch: Sequence[Chosen], device: str) -> Said:
    """Each by itself where one of them cannot be compiled."""
    try:
        return _compared(batch, device)
    except Exception as error:  # of torch's compiler
        if len(batch) > 1:
            return {name: each for one in batch for name, each in _of_batch([one], device).items()}
        return {batch[0][0]: ["refused", str(error)[:300]]}


@torch.no_grad()
def _compared(batch: Sequence[Chosen], device: str) -> Said:
    module = Operators(batch, 0).eval().to(device)
    program = torch.export.export(module, ())
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names = [each.target for each in program.graph_signature.input_specs]
    inputs: list[Any] = [state.get(str(name), program.constants.get(str(name))) for name in names]
    call = _compiled(program.graph_module, [each.detach() for each in inputs], device)
    counts = [len(each) for each in module()]
    said: Said = {}
    for place, ((name, _), operator) in enumerate(zip(batch, module.operators, strict=True)):
        first = sum(counts[:place])

        def results(first: int = first, count: int = counts[place]) -> Sequence[Tensor]:
            given: Sequence[Tensor] = call([state.get(str(of), each) for of, each in zip(names, inputs, strict=True)])
            return given[first : first + count]

        try:
            flaw = flaw_at_extremes(operator, results)
        except Exception as error:  # of the compiled code
            said[name] = ["nameless", str(error)[:300]]
            continue
        if flaw.startswith(NOT_TRIED):
            said[name] = ["not tried", flaw.removeprefix(NOT_TRIED)]
        else:
            said[name] = ["wrong", flaw] if flaw else ["right", ""]
    return said


def _compiled(graph: torch.fx.GraphModule, inputs: Sequence[Tensor], device: str) -> Callable[[Sequence[Any]], Any]:
    """The graph as aotc has it compiled, for inputs like these."""
    from torch._inductor.compile_fx import compile_fx

    target = parse_target(resolve_target("cuda" if device == "cuda" else "native"))
    spec = ModelSpec(name="operators", factory="", inputs={}, buckets=({},), targets=(target.name,), mode="default")
    lowering = Lowering(target, inductor_options(spec, target), frozenset())
    torch._dynamo.reset()
    with lowering.active(graph):
        own = [each.clone() for each in inputs]
        compiled: Any = compile_fx(copy_of_graph(graph), own, decompositions=lowering.decompositions())
        compiled(*own)
    return lambda given: compiled(*(each.detach().clone() for each in given))


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--part", default="1/1", help="I/N: every N-th operator, from the I-th on")
    asked = options.parse_args()
    return run(asked, functools.partial(outcomes, asked.part, asked.device))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if os.environ.get("PYTHONHASHSEED") != "0":  # some samples come from sets of names
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
