"""`aotc export --pt2`: packages that torch's own loader opens, in Python and from a C++ program."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner, Result
from processes import ROOT
from torch import Tensor, nn
from torch.utils import cpp_extension

from aotc.cli import main
from examples.models import transformer_block

CPU = "cpu:x86-64-v3", "cpu:x86-64-v4", "cpu:amx"


def export(ref: object, path: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["export", str(ref), "--pt2", str(path), *options])


def exported(ref: object, path: Path) -> list[str]:
    """The names of the models of the package that was written."""
    result = export(ref, path, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["file"] == str(path) and said["target"] in CPU
    return list(said["models"])


def run(package: Path, model: str, module: nn.Module, **inputs: Tensor) -> list[Any]:
    """The model's result, flattened, by what the package says of itself and nothing else."""
    loader: Any = torch._C._aoti.AOTIModelPackageLoader(str(package), model, False, 1, -1)
    said = loader.get_metadata()
    tensors = {"input": inputs, "state": {k: v.detach() for k, v in module.state_dict(keep_vars=True).items()}}
    arguments = [tensors[kind][name] for kind, name in map(str.split, said["aotc.arguments"].splitlines())]
    outputs = loader.boxed_run(arguments)
    results = []
    for kind, what in (line.split(" ", 1) for line in said["aotc.results"].splitlines()):
        if kind == "constant":
            results.append(json.loads(what))
        else:
            results.append(outputs[int(what)] if kind == "output" else tensors[kind][what])
    return results


def test_each_bucket_is_a_model_of_the_package(zoo: Any, zoo_store: Path, tmp_path: Path) -> None:
    package = tmp_path / "grey.pt2"
    assert sorted(exported(f"{zoo_store}#grey", package)) == ["n=3", "n=4..8"]
    module = zoo.Grey().eval()
    for bucket, n in (("n=3", 3), ("n=4..8", 4), ("n=4..8", 7)):
        x = torch.rand(n, 1, 8, 8)
        (result,) = run(package, bucket, module, x=x)
        with torch.no_grad():
            torch.testing.assert_close(result, module(x))


def test_weights_that_are_tied_are_one_argument(zoo: Any, zoo_store: Path, tmp_path: Path) -> None:
    assert exported(f"{zoo_store}#tied", tmp_path / "tied.pt2") == ["model"]
    module, ids = zoo.Tied().eval(), torch.tensor([3, 0, 15, 7])
    (result,) = run(tmp_path / "tied.pt2", "model", module, ids=ids)
    with torch.no_grad():
        torch.testing.assert_close(result, module(ids))


def test_a_program_in_cpp_runs_a_package_without_python(quickstart_store: Path, tmp_path: Path) -> None:
    package, program = tmp_path / "quickstart.pt2", tmp_path / "run"
    assert exported(f"{quickstart_store}#quickstart", package) == ["batch=1,seq=128", "batch=4,seq=128"]
    library = Path(torch.__file__).parent / "lib"
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    links = [f"-L{library}", f"-Wl,-rpath,{library}", "-ltorch", "-ltorch_cpu", "-lc10"]
    source = ROOT / "examples" / "cpp" / "run.cpp"
    subprocess.run(["g++", "-std=c++20", "-O0", *includes, source, "-o", program, *links], check=True)

    module, x = transformer_block(width=256, heads=4).eval(), torch.randn(4, 128, 256)
    torch.save({"x": x, **module.state_dict()}, tmp_path / "tensors.pt")
    files = [tmp_path / "tensors.pt", tmp_path / "results.pt"]
    subprocess.run([program, package, "batch=4,seq=128", *files], check=True, env={"OMP_NUM_THREADS": "2"})
    (result,) = torch.load(tmp_path / "results.pt")
    with torch.no_grad():
        torch.testing.assert_close(result, module(x))


def test_what_a_package_cannot_hold_is_refused_and_nothing_is_written(
    regions_store: Path, zoo_store: Path, tmp_path: Path
) -> None:
    package = tmp_path / "no.pt2"
    result = export(f"{regions_store}#stack", package)
    assert result.exit_code == 2 and "`stack` is compiled by regions" in result.stderr, result.output
    result = export(f"{zoo_store}#frozen", package)
    assert result.exit_code == 2 and "weights: live" in result.stderr, result.output
    result = export(f"{zoo_store}#linear", package, "--target", "cuda:sm_90")
    assert result.exit_code == 2 and "--target: cpu:" in result.stderr, result.output
    assert "holds no artifact for cuda:sm_90; " in result.stderr
    assert not package.exists()
