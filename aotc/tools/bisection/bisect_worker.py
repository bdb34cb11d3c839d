"""The process that bisects: `python -m aotc.tools.bisection.bisect_worker JOB.json`, which sends a `Bisection`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.capture.export import capture
from aotc.compiler.capture.lifting.lift import Capture
from aotc.compiler.codegen.inductor_options import inductor_options
from aotc.compiler.messages import Job, Unit
from aotc.compiler.publish.unit_record import RECORD
from aotc.compiler.unit import compile_unit
from aotc.compiler.wrong_code.bisection_records import CompileStage, Culprit, Remedy
from aotc.compiler.wrong_code.ladder import walk
from aotc.compiler.wrong_code.lowering import Lowering
from aotc.digest import sha256_bytes
from aotc.errors import AotcError
from aotc.machine.processes import Parent
from aotc.machine.targets import parse_target
from aotc.models.calls import modes_of, signature_leaves
from aotc.models.decided_values import first_wrong_value
from aotc.models.factory import told
from aotc.models.tolerance import Judgement, judge
from aotc.provenance import BuiltArtifact
from aotc.reads.tensors import named_state
from aotc.records import Bucket, Dims, SizeRange, bucket_name, decode
from aotc.runtime.libraries.library_folder import FilesInFolder
from aotc.runtime.load import bind_artifact
from aotc.runtime.options import LoadOptions
from aotc.runtime.select import Chosen
from aotc.tools.bisection.bisection_messages import Bisection, BisectJob
from aotc.tools.bisection.divergence import first_divergence
from aotc.tools.bisection.foreign_weights import not_followed, wrongly_bound
from aotc.verify.compare_worker import worst_of
from aotc.verify.comparison import Comparison, CouldNotRun, JudgedCode

ARTIFACT = "artifact in the store"
EXPORTED = "exported program in eager"
LIBRARY = "library built anew"

TRACED = (
    "torch.export captured another computation: look there for code that asks whether it is traced (`is_compiling`, "
    "`is_exporting`, `is_tracing`); else report it with the model"
)
_FROZEN = "; its weights are frozen, and may be others than the factory gives now"
AGAIN = "build it again with `aotc build … --force`: a fresh library is right, and the stored one is not"
UNSEEN = (
    "\nwithout --force, the old one is found in the store where the model reads files or global variables that changed"
)


def bisect(job: BisectJob) -> Bisection:
    """Walk from eager to the artifact. Raises AotcError where nothing can be run."""
    return _Bisecting(job).run()


class _Bisecting:
    def __init__(self, job: BisectJob) -> None:
        self.job, self.spec = job, job.verify.spec
        self.target = parse_target(job.verify.target)
        self.comparison = Comparison(job.verify)
        self.stages: list[CompileStage] = []
        self.seed = 0

    def run(self) -> Bisection:
        if not self._artifact_is_wrong():
            return self._end(conclusion="it is right here: compiled code agrees with eager at these sizes")
        try:
            captured = self._captured()
        except Exception as error:
            self.stages.append(CompileStage(EXPORTED, "failed", _first_line(error)))
            return self._end(conclusion="the model cannot be captured as a whole, so no further step can be tried")
        if culprit := self._wrong_weight(captured):
            return self._end(culprit, conclusion=AGAIN + UNSEEN)
        if flaw := self._exported(captured):
            self.stages.append(CompileStage(EXPORTED, "wrong", flaw))
            return self._end(self._diverging(captured), conclusion=TRACED)
        self.stages.append(CompileStage(EXPORTED, "right"))
        options, off = inductor_options(self.spec, self.target), self.spec.patches_off
        lowering = Lowering(
            self.target,
            options,
            off,
            extremes=bool(self.job.extremes),
            standalone=self.spec.runtime == "standalone",
        )
        with modes_of(self.spec, self.target.device):
            walked = walk(lowering, captured.graph, captured.examples)
        self.stages += walked.stages
        if any(stage.outcome != "right" for stage in walked.stages):
            return self._end(walked.culprit, walked.remedies)
        return self._library()

    # -- the steps ----------------------------------------------------------------------------------------------------

    def _artifact_is_wrong(self) -> bool:
        """With the weights of the build; the first seed with which it is wrong is the one that is looked at."""
        if self.job.extremes:
            flaw = self._flaw(JudgedCode(self.comparison.compiled, self.comparison.module), 0)
            self.stages.append(CompileStage(ARTIFACT, "wrong" if flaw else "right", flaw))
            return bool(flaw)
        for seed in range(max(self.job.verify.seeds, len(self.comparison.forms), 2)):
            if flaw := self._flaw(JudgedCode(self.comparison.compiled, self.comparison.module), seed):
                self.seed = seed
                self.stages.append(CompileStage(ARTIFACT, "wrong", flaw))
                return True
        self.stages.append(CompileStage(ARTIFACT, "right"))
        return self._with_other_weights()

    def _with_other_weights(self) -> bool:
        state = named_state(self.comparison.module)
        culprit = None
        if self.comparison.compiled.artifact.weights == "live":
            subject = JudgedCode(self.comparison.compiled, self.comparison.module)
            culprit = not_followed(self.comparison, list(state), lambda: not self._flaw(subject, 0))
        if culprit is None:
            return False
        self.stages[-1] = CompileStage(ARTIFACT, "wrong", "with other weights than those of its build")
        self.held = culprit
        return True

    held: Culprit | None = None

    def _flaw(self, subject: JudgedCode, seed: int) -> str:
        """Why a call differs from eager, "" where it does not. Raises CouldNotRun."""
        if self.job.extremes:
            found = self.comparison.compare_at_extremes(self.job.dims, self.job.extremes, subject)
            self.extreme_leaves = found.leaves
            return found.wrong
        try:
            verdicts = self.comparison.compare_subjects([subject], self.job.dims, seed)
        except CouldNotRun:
            raise
        except Exception as error:  # of the compiled code: eager can be run
            return _first_line(error)
        worst = worst_of(verdicts.all())
        return "" if worst.ok else worst.detail

    extreme_leaves: Sequence[Any] = ()

    def _captured(self) -> Capture:
        """The graph at the sizes that differ, with the inputs of the seed that does."""
        module = self.comparison.copy_of(self.comparison.eager)
        with modes_of(self.spec, self.target.device):
            return capture(module, self.comparison.signature, self._leaves(), None, frozen=False)

    def _leaves(self) -> list[Any]:
        if self.job.extremes:
            return list(self.extreme_leaves)
        form = self.comparison.forms[self.seed % len(self.comparison.forms)]
        signature, device, folder = self.comparison.signature, self.comparison.device, Path(self.job.verify.folder)
        return signature_leaves(form, signature, self.job.dims, device, self.seed, folder)

    def _wrong_weight(self, captured: Capture) -> Culprit | None:
        if self.held is not None:
            return self.held
        artifact = self.comparison.compiled.artifact
        variant = next((one for one in artifact.variants if one.bucket == self.job.bucket), None)
        if artifact.weights != "live" or artifact.regions or variant is None:
            return None
        return wrongly_bound(variant.arguments, captured.arguments, named_state(self.comparison.module))

    def _exported(self, captured: Capture) -> str:
        """Why the exported program differs from the model; "" where it does not."""
        leaves = self._leaves()
        eager = self.comparison.run_eager(leaves)
        reference = self.comparison.run_reference(leaves) or eager
        inputs = [one.detach().clone() if isinstance(one, Tensor) else one for one in captured.examples]
        torch.manual_seed(0)
        with torch.no_grad(), modes_of(self.spec, self.target.device):
            given = captured.graph(*inputs)
        theirs = [value for value in eager.outputs.values() if isinstance(value, Tensor)]
        exact = [value for value in reference.outputs.values() if isinstance(value, Tensor)]
        mine = [given[output.index] if output.index is not None else None for output in captured.outputs]
        if len(mine) != len(theirs) or len(exact) != len(theirs):
            return ""  # it is built otherwise: verify compares the whole
        if self.job.extremes:
            wrong = first_wrong_value(theirs, mine, self._tensors_of_eager, leaves)
            return wrong.said if wrong else ""
        judged: list[Judgement] = [
            judge(one, other, wide)
            for one, other, wide in zip(mine, theirs, exact, strict=True)
            if isinstance(one, Tensor)
        ]
        found = worst_of(judged) if judged else None
        return "" if found is None or found.ok else found.detail

    def _tensors_of_eager(self, leaves: Sequence[Any]) -> list[Tensor]:
        outputs = self.comparison.run_eager(leaves).outputs
        return [value for value in outputs.values() if isinstance(value, Tensor)]

    def _diverging(self, captured: Capture) -> Culprit | None:
        """The operator at which the exported program leaves what eager computes, where one can be found."""
        try:
            with modes_of(self.spec, self.target.device):
                return first_divergence(
                    captured.graph, captured.examples, lambda: self.comparison.run_eager(self._leaves())
                )
        except Exception:  # of operators that take no dispatch mode
            return None

    def _library(self) -> Bisection:
        """All steps up to Inductor are right, at fixed sizes. What is left: AOTInductor, ranges, and the artifact."""
        ranges = [name for name, size in self.job.bucket.items() if isinstance(size, SizeRange)]
        try:
            flaw = self._built_anew(self.job.bucket)
            self.stages.append(CompileStage(LIBRARY, "wrong" if flaw else "right", flaw))
            if not flaw:
                frozen = self.spec.weights == "frozen"
                return self._end(conclusion=f"{AGAIN}{_FROZEN if frozen else ''}{UNSEEN}")
            fixed: Bucket = dict(self.job.dims)
            if ranges and not self._built_anew(fixed):
                name = f"{LIBRARY}, of fixed sizes"
                self.stages.append(CompileStage(name, "right"))
                remedy = Remedy("a bucket of these sizes", f"buckets: [{{{_as_yaml(fixed)}}}]", whole=True)
                return self._end(None, (remedy,), f"only code for a range of {', '.join(ranges)} is wrong")
        except Exception as error:
            self.stages.append(CompileStage(LIBRARY, "failed", _first_line(error)))
            return self._end(conclusion="the model cannot be compiled again here")
        return self._end(
            conclusion="Inductor's code is right, and AOTInductor's library is not: report it with the model"
        )

    def _built_anew(self, bucket: Bucket) -> str:
        with tempfile.TemporaryDirectory(prefix="aotc-bisect-") as folder:
            output = Path(folder)
            unit = Unit(self.spec, bucket, self.target, {}, sha256_bytes(b"bisection"))
            compile_unit(Job(unit, self.job.verify.folder, str(output)), lambda stage: None)
            artifact = decode((output / RECORD).read_bytes(), BuiltArtifact)
            module = self.comparison.copy_of(self.comparison.eager)
            chosen = Chosen(
                artifact,
                self.comparison.device,
                files_of=lambda variant: FilesInFolder(output, variant.library),
                read_file=lambda file: (output / file.name).read_bytes(),
            )
            compiled = bind_artifact(chosen, module, LoadOptions(allow_imports=True))
            return self._flaw(JudgedCode(compiled, module), self.seed)

    def _end(self, culprit: Culprit | None = None, remedies: Sequence[Remedy] = (), conclusion: str = "") -> Bisection:
        return Bisection(
            model=self.spec.name,
            bucket=bucket_name(self.job.bucket),
            target=self.target.name,
            sizes=_as_yaml(self.job.dims),
            stages=tuple(self.stages),
            culprit=culprit,
            remedies=tuple(remedies),
            conclusion=conclusion,
        )


def _as_yaml(dims: Dims | Bucket) -> str:
    return ", ".join(f"{name}: {size}" for name, size in sorted(dims.items())) or "-"


def _first_line(error: Exception) -> str:
    text = str(error) if isinstance(error, AotcError) else told(error)
    return (text.strip().splitlines() or [type(error).__name__])[0][:300]


def main() -> int:
    parent = Parent()
    parent.send(bisect(parent.job(BisectJob)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
