"""`aotc tune`: measures what a build decides by measurement, and writes a lock file for builds elsewhere."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aotc.amounts import counted
from aotc.cli.build import BuildOptions, Shown, import_pipeline, request_of
from aotc.cli.build_output import failures_shown, show_failure
from aotc.cli.output import echo

if TYPE_CHECKING:
    from aotc.compiler.planning.cache_lookup import PlannedUnit

TAG = "tuned"


@click.command()
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    show_default="the manifest's name with .picks.json",
    help="The lock file to write.",
)
@click.option("--model", "models", multiple=True, help="Tune only this model (repeatable).")
@click.option("--target", "targets", multiple=True, help="Tune only for this target (repeatable).")
@click.option(
    "--picks",
    "picks_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep the autotune picks of this file; measure all other decisions.",
)
@click.option("--jobs", type=click.IntRange(min=1), show_default="as cores and memory allow", help="Units at a time.")
def tune(
    manifest: Path,
    out: Path | None,
    models: Sequence[str],
    targets: Sequence[str],
    picks_path: Path | None,
    jobs: int | None,
) -> None:
    """Measure on this machine, and write the picks to a lock file.

    Nothing is published: `aotc build --picks FILE --locked` builds from the file, also on a machine without a GPU. Exit
    code 1 if a unit fails; the file then has the picks of the others.
    """
    from aotc.compiler.messages import Settings
    from aotc.compiler.mistakes import read_checked
    from aotc.compiler.workers.unit_servers import ForkServers
    from aotc.store.files.writing import write_output
    from aotc.tools.inspection.artifact_picks import exported, picks_of

    read = read_checked(manifest, models)
    servers = ForkServers()
    click.get_current_context().call_on_close(servers.close)
    pipeline = import_pipeline()
    with tempfile.TemporaryDirectory(prefix="aotc-tune-") as folder:
        store = Path(folder) / "store"
        settings = Settings(force=True, jobs=jobs)
        options = BuildOptions(manifest, store, settings, models, TAG, targets=targets, picks_path=picks_path, yes=True)
        request = request_of(options, read)
        shown = _Tuning(options, request.picks)
        with failures_shown(shown.outcomes, shown.plan):
            report = pipeline.build(request, servers, shown)
        units = [unit for model in report.bundles for unit in picks_of(f"{model}:{TAG}", store)]
    for outcome in report.failed:
        show_failure(outcome)
    where = out or manifest.with_suffix(".picks.json")
    write_output(where, exported(units))
    wrote = counted(sum(len(unit.picks) for unit in units), "pick")
    echo(f"wrote {wrote} of {counted(len(units), 'unit')} to {where}")
    sys.exit(1 if report.failed else 0)


class _Tuning(Shown):
    """Shows the build of `aotc tune`, which measures on this machine or not at all."""

    def planned(self, planned: Sequence[PlannedUnit]) -> None:
        from aotc.errors import BuildError

        if absent := sorted({plan.unit.target.name for plan in planned if plan.unit.gpu is not None}):
            raise BuildError(
                f"nothing can be measured for {', '.join(absent)}: there is no such GPU here",
                hint="run `aotc tune` on a machine with one, and name its target with --target",
            )
        super().planned(planned)
