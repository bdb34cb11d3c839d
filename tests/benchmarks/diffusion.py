"""A Flux transformer of diffusers by its blocks: eager, torch.compile, AOTInductor by hand, aotc. A script, not a test.

    python tests/benchmarks/diffusion.py                     # small, float32, on this CPU
    python tests/benchmarks/diffusion.py --device cuda       # 1.3 billion parameters, bfloat16, 4096 + 512 tokens
    python tests/benchmarks/diffusion.py --form int8 fp8 --ways eager compile aotc
    python tests/benchmarks/diffusion.py --form lora --ways eager aotc

The ways to compile the two classes of blocks:

- compile: `model.compile_repeated_blocks(fullgraph=True)`, in a process with empty caches, and in one that finds them;
- aoti: each class exported and packed by `aoti_compile_and_package`, without its weights, and loaded once per block, as
  the `aoti_blocks_load` of Hugging Face's ZeroGPU does;
- aotc: `aotc build` of a manifest with `regions`, and `aotc.load`.

Each way starts in a fresh process. What is measured: seconds from the start of the process to the first image (a
denoising loop of --steps calls, without text encoder and decoder), and how many of these come after the module was
constructed; the median milliseconds of a step after it; what was compiled before, in seconds and bytes; and the lines
that a user writes. Error is the root mean square of the difference of one call's output from eager's, over that of
eager's. Which compilers are imported is not shown: diffusers and torchao import them themselves.

Forms: `int8` and `fp8` quantise the linear layers of the blocks by torchao, weights and activations (on a CPU, fp8
weights only), and are compared with the plain model, too; `lora` has an adapter of peft, in the place of which another
of half the rank is swapped.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from own_caches import ROOT, environment

SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"heads": 4, "head": 32, "axes": (8, 12, 12), "channels": 16, "prompt": 128, "pooled": 64}
    | {"side": 16, "words": 64, "dtype": "float32"},
    "cuda": {"heads": 24, "head": 128, "axes": (16, 56, 56), "channels": 64, "prompt": 4096, "pooled": 768}
    | {"side": 64, "words": 512, "dtype": "bfloat16"},
}
WAYS = ("eager", "compile", "aoti", "aotc")
QUANTISED = ("int8", "fp8")
FORMS = ("plain", *QUANTISED, "lora")
RANK = 16

MANIFEST = """\
version: 1
models:
  flux-{form}:
    factory: {file}:transformer
    kwargs: {{device: {device}, form: {form}, double: {double}, single: {single}}}
    regions: ["transformer_blocks.*", "single_transformer_blocks.*"]
    targets: [{target}]
    dtype: {dtype}
    mode: default
    inputs:
      hidden_states: {{shape: [1, {pixels}, {channels}]}}
      encoder_hidden_states: {{shape: [1, {words}, {prompt}]}}
      pooled_projections: {{shape: [1, {pooled}]}}
      timestep: {{shape: [1], init: ones}}
      img_ids: {{shape: [{pixels}, 3], init: zeros}}
      txt_ids: {{shape: [{words}, 3], init: zeros}}
      return_dict: false
"""


# -- the model --------------------------------------------------------------------------------------------------------


def transformer(device: str = "cpu", form: str = "plain", double: int = 2, single: int = 4) -> Any:
    """A Flux transformer with random weights, of the same values in each process of a device."""
    import torch
    from diffusers import FluxTransformer2DModel

    size = SIZES[device]
    with torch.device("meta"):
        model = FluxTransformer2DModel(
            patch_size=1,
            in_channels=size["channels"],
            num_layers=double,
            num_single_layers=single,
            attention_head_dim=size["head"],
            num_attention_heads=size["heads"],
            joint_attention_dim=size["prompt"],
            pooled_projection_dim=size["pooled"],
            axes_dims_rope=size["axes"],
        )
    model = model.to(getattr(torch, size["dtype"])).to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight") and parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0, 0.02, generator=generator)
    if form == "lora":
        add_adapter(model)
    elif form != "plain":
        quantise(model, form, device)
    return model


def quantise(model: Any, form: str, device: str) -> None:
    import torch
    import torchao.quantization as ao

    fp8 = ao.Float8DynamicActivationFloat8WeightConfig if device == "cuda" else ao.Float8WeightOnlyConfig
    config = ao.Int8DynamicActivationInt8WeightConfig() if form == "int8" else fp8()
    ao.quantize_(
        model,
        config,
        # The linear layers of a norm have one row, which int8 products of a GPU refuse.
        lambda part, name: isinstance(part, torch.nn.Linear) and "transformer_blocks" in name and "norm" not in name,
    )


def adapter_config(rank: int) -> Any:
    import peft

    targets = ["to_q", "to_k", "to_v", "to_out.0", "proj_mlp", "proj_out"]
    return peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, exclude_modules=["proj_out"])


def add_adapter(model: Any) -> None:
    """Of rank RANK, scaled by a tensor: eager and torch.compile as peft prepares it, aotc as aotc does."""
    import torch

    model.add_adapter(adapter_config(RANK), "style")
    fill(model, seed=1)
    if os.environ.get("WAY") in ("eager", "compile"):
        from peft.utils.hotswap import prepare_model_for_compiled_hotswap

        prepare_model_for_compiled_hotswap(model, target_rank=RANK, config=model.peft_config)
    else:
        from aotc import adapters

        adapters.prepare(model, rank=RANK)
    assert isinstance(model, torch.nn.Module)
    model.eval().requires_grad_(False)


def fill(model: Any, seed: int) -> None:
    import torch

    for name, parameter in model.named_parameters():
        if "lora_" in name:
            generator = torch.Generator(parameter.device).manual_seed(seed)
            parameter.data.normal_(0, 0.02, generator=generator)


def swap_adapter(model: Any) -> None:
    """Another adapter, of half the rank, in the place of the first one."""
    import torch
    from peft.utils.hotswap import hotswap_adapter_from_state_dict

    state = {}
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            generator = torch.Generator(parameter.device).manual_seed(2)
            other = torch.empty_like(parameter).normal_(0, 0.05, generator=generator)
            state[name] = other[: RANK // 2] if "lora_A" in name else other[:, : RANK // 2]
    hotswap_adapter_from_state_dict(model, state, "style", adapter_config(RANK // 2))


def arguments(device: str) -> dict[str, Any]:
    """Of one call, all but the image and the time."""
    import torch

    size = SIZES[device]
    generator = torch.Generator().manual_seed(0)
    along = torch.arange(float(size["side"]))
    made = {
        "hidden_states": torch.randn(1, size["side"] ** 2, size["channels"], generator=generator),
        "encoder_hidden_states": torch.randn(1, size["words"], size["prompt"], generator=generator),
        "pooled_projections": torch.randn(1, size["pooled"], generator=generator),
        "timestep": torch.ones(1),
        "img_ids": torch.cartesian_prod(torch.zeros(1), along, along),
        "txt_ids": torch.zeros(size["words"], 3),
    }
    dtype = getattr(torch, size["dtype"])
    return {name: value.to(device, dtype) for name, value in made.items()} | {"return_dict": False}


def denoise(model: Any, given: dict[str, Any], steps: int) -> Any:
    """The image, `[1, pixels, channels]` of the device's dtype: Euler's method from pure noise."""
    import torch

    image = given["hidden_states"]
    with torch.no_grad():
        for step in range(steps):
            time_left = torch.full_like(given["timestep"], 1 - step / steps)
            image = image - model(**given | {"hidden_states": image, "timestep": time_left})[0] / steps
    return image


def one_call(model: Any, given: dict[str, Any]) -> Any:
    """What the model predicts for the first step, in float32 on the CPU."""
    import torch

    with torch.no_grad():
        return model(**given)[0].float().cpu()


# -- the ways: what a user writes --------------------------------------------------------------------------------------


def load_eager(model: Any, work: Path) -> None:
    pass


def load_compile(model: Any, work: Path) -> None:
    model.compile_repeated_blocks(fullgraph=True)


def export_aoti(model: Any, work: Path, call: Callable[[], Any]) -> None:
    import torch
    from torch._functorch._aot_autograd.subclass_parametrization import unwrap_tensor_subclass_parameters

    for name in model._repeated_blocks:
        block = next(part for part in model.modules() if type(part).__name__ == name)
        given: dict[str, Any] = {}
        hook = block.register_forward_pre_hook(
            lambda _, args, kwargs, given=given: given.update(args=args, kwargs=kwargs), with_kwargs=True
        )
        call()
        hook.remove()
        unwrap_tensor_subclass_parameters(block)
        with torch.no_grad():
            exported = torch.export.export(block, given["args"], given["kwargs"])
        torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(work / f"{name}.pt2"),
            inductor_configs={"aot_inductor.package_constants_in_so": False},
        )


def load_aoti(model: Any, work: Path) -> None:
    import torch._inductor
    from torch._functorch._aot_autograd.subclass_parametrization import unwrap_tensor_subclass_parameters

    for block in list(model.modules()):
        if type(block).__name__ in model._repeated_blocks:
            compiled = torch._inductor.aoti_load_package(str(work / f"{type(block).__name__}.pt2"))
            unwrap_tensor_subclass_parameters(block)
            state = block.state_dict()
            constants = {name: state[name] for name in compiled.get_constant_fqns()}
            compiled.load_constants(constants, check_full_update=True, user_managed=True)
            block.forward = compiled


def load_aotc(model: Any, work: Path) -> None:
    import aotc

    aotc.load(f"{work / 'store'}#{work.name}", model)


def lines_written(way: str) -> int:
    """Of code and manifest, without the model and its calls."""
    functions = {"eager": [], "compile": [load_compile], "aoti": [export_aoti, load_aoti], "aotc": [load_aotc]}[way]
    bodies = [inspect.getsource(function).split("None:\n", 1)[1] for function in functions]
    text = "\n".join([*bodies, MANIFEST if way == "aotc" else ""])
    return sum(1 for line in text.splitlines() if line.strip())


# -- a process --------------------------------------------------------------------------------------------------------


def child(task: dict[str, Any]) -> None:
    start, device, work = task["start"], task["device"], Path(task["work"])
    import torch

    def done() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.time() - start

    model = transformer(device, task["form"], task["double"], task["single"])
    given = arguments(device)
    result: dict[str, Any] = {"model": done()}
    if task["way"] == "export":
        export_aoti(model, work, lambda: denoise(model, given, 1))
        result["all"] = done()
    else:
        globals()[f"load_{task['way']}"](model, work)
        denoise(model, given, task["steps"])
        result["image"] = done()
        outputs = [one_call(model, given)]
        steps: list[float] = []
        began = time.time()
        while len(steps) < 5 or (time.time() - began < task["seconds"] and len(steps) < 100):
            at = done()
            denoise(model, given, 1)
            steps.append(1000 * (done() - at))
        result["step"], result["steps"] = statistics.median(steps), len(steps)
        if task["form"] == "lora":
            at = done()
            with torch.no_grad():
                swap_adapter(model)
            result["swap"] = 1000 * (done() - at)
            at = done()
            denoise(model, given, task["steps"])
            result["image after the swap"] = 1000 * (done() - at)
            outputs.append(one_call(model, given))
        torch.save(outputs, task["outputs"])
    Path(task["result"]).write_text(json.dumps(result))


# -- all of them ------------------------------------------------------------------------------------------------------


class Benchmark:
    """The processes of all forms and ways, over a folder."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.rows: list[dict[str, Any]] = []
        self.phases: dict[str, str] = {}

    def run(self) -> None:
        forms = self.options.form
        ways = dict.fromkeys(forms, self.options.ways)
        if not {*forms}.isdisjoint(QUANTISED):
            ways = {"plain": ("eager",)} | ways
        for form in ways:
            folder = self.work / f"flux-{form}"
            folder.mkdir()
        if self.options.together:
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda pair: self.attempt(self.prepare, *pair), self.pairs(ways)))
        for form, way in self.pairs(ways):
            self.attempt(self.measure, form, way, way)
            if form == "plain" and way == "compile":
                self.attempt(self.measure, form, way, "compile, with its caches")

    @staticmethod
    def pairs(ways: dict[str, Sequence[str]]) -> list[tuple[str, str]]:
        return [(form, way) for form, of_form in ways.items() for way in of_form if way != "aoti" or form == "plain"]

    def attempt(self, action: Callable[..., None], form: str, way: str, *label: str) -> None:
        print(f"{form}, {way}, {action.__name__} …", file=sys.stderr, flush=True)
        try:
            action(form, way, *label)
        except subprocess.SubprocessError as error:
            late = isinstance(error, subprocess.TimeoutExpired)
            print(
                f"ended after {self.options.limit:.0f} s" if late else str(getattr(error, "stderr", error))[-3000:],
                file=sys.stderr,
                flush=True,
            )
            if action == self.measure:
                failed = f"more than {self.options.limit:.0f}" if late else "failed"
                self.rows.append({"form": form, "way": label[0], "failed": failed})
        if self.options.json:
            self.options.json.write_text(json.dumps(self.rows, indent=2) + "\n")

    def prepare(self, form: str, way: str) -> None:
        folder = self.work / f"flux-{form}"
        if way == "aoti":
            self.process(form, "export", folder, folder / "caches-export")
        elif way == "aotc":
            self.build(form, folder)

    def measure(self, form: str, way: str, label: str) -> None:
        folder = self.work / f"flux-{form}"
        row: dict[str, Any] = {"form": form, "way": label, "lines": lines_written(way)}
        if not self.options.together:
            began = time.time()
            self.prepare(form, way)
            row["before"] = time.time() - began
        files = {"aoti": list(folder.glob("*.pt2")), "aotc": list((folder / "store").rglob("*"))}.get(way, [])
        row["bytes"] = sum(path.stat().st_size for path in files if path.is_file())
        row |= self.process(form, way, folder, folder / f"caches-{way}")
        row["errors"] = self.errors(form, way)
        self.rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)

    def process(self, form: str, way: str, folder: Path, caches: Path) -> dict[str, Any]:
        options = self.options
        result, outputs = self.work / f"{form}-{way}.json", self.work / f"{form}-{way}.pt"
        task = {"way": way, "form": form, "device": options.device, "double": options.double, "single": options.single}
        task |= {"steps": options.steps, "seconds": options.seconds, "work": str(folder), "outputs": str(outputs)}
        task |= {"result": str(result), "start": time.time()}
        self.python([__file__, "--child", json.dumps(task)], caches, way)
        read: dict[str, Any] = json.loads(result.read_text())
        return read

    def build(self, form: str, folder: Path) -> None:
        options, size = self.options, SIZES[self.options.device]
        target = "native" if options.device == "cpu" else "cuda"
        text = MANIFEST.format(
            **size,
            **vars(options) | {"form": form},
            file=os.path.relpath(__file__, folder),
            target=target,
            pixels=size["side"] ** 2,
        )
        (folder / "manifest.yaml").write_text(text)
        command = ["-m", "aotc", "build", str(folder / "manifest.yaml"), "--store", str(folder / "store"), "--yes"]
        trace = folder / "trace.json"
        try:
            self.python([*command, "--trace", str(trace)], folder / "caches-build", "aotc")
        finally:
            self.phases[form] = phases(trace)
            print(f"{form}, build: {self.phases[form]}", file=sys.stderr, flush=True)

    def python(self, command: list[str], caches: Path, way: str) -> None:
        variables = environment(caches) | {"WAY": way}
        variables["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parent}"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        options: dict[str, Any] = {"cwd": ROOT, "env": variables, **pipes}
        with subprocess.Popen([sys.executable, *command], text=True, **options) as process:
            try:
                output, errors = process.communicate(timeout=self.options.limit)
            except subprocess.TimeoutExpired:
                process.terminate()  # a build then writes its trace
                process.communicate()
                raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, output, errors)

    def errors(self, form: str, way: str) -> dict[str, float]:
        """Against eager of the same form, and eager of this form against eager of `plain`."""
        found = {}
        for name, other in (("eager", f"{form}-eager"), ("plain", "plain-eager")):
            if (self.work / f"{other}.pt").exists():
                found[name] = max(map(error, self.outputs(f"{form}-{way}"), self.outputs(other)))
        return found

    def outputs(self, name: str) -> list[Any]:
        import torch

        loaded: list[Any] = torch.load(self.work / f"{name}.pt")
        return loaded

    def table(self) -> str:
        header = ("form", "way", "first image, s", "after the model, s", "ms a step", "before: s", "MB", "lines")
        rows = [(*header, "error"), ("---", "---", *["---:"] * 7)]
        for row in self.rows:
            if "failed" in row:
                rows.append((row["form"], row["way"], row["failed"], *["–"] * 6))
                continue
            before = "–", f"{row['bytes'] / 1e6:.2f}"
            if "before" in row and row["bytes"]:
                before = f"{row['before']:.1f}", before[1]
            times = (f"{row['image']:.2f}", f"{row['image'] - row['model']:.2f}", f"{row['step']:.2f}")
            of_eager = f"{row['errors'].get('eager', float('nan')):.1e}"
            rows.append((row["form"], row["way"], *times, *before, str(row["lines"]), of_eager))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def phases(trace: Path) -> str:
    """Of a build's trace: seconds of each stage, of the unit in which it took longest."""
    longest: dict[str, float] = {}
    for event in json.loads(trace.read_text())["traceEvents"] if trace.exists() else ():
        if event.get("cat") == "stage":
            longest[event["name"]] = max(longest.get(event["name"], 0.0), event["dur"] / 1e6)
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in longest.items())


def error(output: Any, reference: Any) -> float:
    return float((output - reference).square().mean().sqrt() / reference.square().mean().sqrt())


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--form", choices=FORMS, nargs="+", default=["plain"])
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS)
    parser.add_argument("--double", type=int, default=2, help="double blocks")
    parser.add_argument("--single", type=int, default=4, help="single blocks")
    parser.add_argument("--steps", type=int, default=4, help="of an image")
    parser.add_argument("--seconds", type=float, default=3.0, help="of the measurement of a step")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which a process is ended")
    parser.add_argument(
        "--together", action="store_true", help="compile ahead for all forms at once, and do not time it"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aotc-diffusion-") as work:
        benchmark = Benchmark(options, Path(work))
        benchmark.run()
    print(benchmark.table())
    for form, stages in benchmark.phases.items():
        print(f"- {form}, aotc's build: {stages}, each of the unit that took longest")
    for row in benchmark.rows:
        name = f"{row['form']}, {row['way']}"
        if "swap" in row:
            print(f"- {name}: a swap {row['swap']:.1f} ms, an image after it {row['image after the swap']:.1f} ms")
        if row.get("errors", {}).get("plain") and row["form"] in QUANTISED:
            print(f"- {name}: error against the plain model in eager {row['errors']['plain']:.1e}")


if __name__ == "__main__":
    main()
