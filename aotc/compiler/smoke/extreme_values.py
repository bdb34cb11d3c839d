"""The smoke run's second comparison: one call in eager and one of the compiled code, with extreme values.

It is the last thing that the process does: on a GPU, an index that is computed from such a value and is beyond its
tensor ends the process's use of the GPU, in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from aotc.errors import LibraryError
from aotc.models.calls import Called
from aotc.models.extreme_calls import compare_at_extreme_values
from aotc.models.extreme_inputs import Freedom
from aotc.models.tolerance import TF32, may_use_tf32
from aotc.records import Dims
from aotc.tensors.rounding import Result

AT_EXTREMES = "at extreme values (NaN, infinities, limits of dtypes)"


def compare_at_the_extremes(
    called: Called,
    compiled: Callable[..., Any],
    free: Sequence[Freedom],
    device: torch.device,
    examples: Iterable[tuple[Dims, Callable[[], Sequence[Any]]]],
) -> tuple[str, ...]:
    """Compare at the first sizes of `examples`, each with a function that makes its ordinary leaves, at which the model
    and the compiled code can be called. Returns a note where nothing could be compared.

    Raises LibraryError where the compiled code is wrong.
    """
    step = TF32 if may_use_tf32(called.module) else 0.0
    skipped = ""
    for dims, make_leaves in examples:
        at = called._replace(leaves=make_leaves())

        def call(leaves: Sequence[Any], at: Called = at) -> Result:
            return at._replace(leaves=leaves).call(compiled)

        found = compare_at_extreme_values(at, call, free, device, step=step)
        if found.wrong:
            raise LibraryError(
                f"{AT_EXTREMES}, the compiled code does not compute what the model does: {found.wrong}",
                hint="torch's compiler miscompiles this model: replace the operator by others, or leave that part to "
                "eager: `aotc build MANIFEST --suggest-regions`",
                miscompiled=True,
                extremes=dims,
            )
        if not found.skipped:
            return ()
        skipped = skipped or found.skipped
    return (f"not compared {AT_EXTREMES}: {skipped}",)
