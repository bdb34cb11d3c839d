"""An unchanged script, run three times: `aotc.compile` beside `torch.compile` with warm caches, and eager.

    python tests/benchmarks/remembered.py [encoder gpt lengths training train diffusers]

`training` trains a head on a frozen body, `train` all of a GPT (`train=True`), `diffusers` denoises with a tiny UNet of
random weights in a pipeline (`pip install diffusers`); each call of `lengths` is one of a GPT with another length.

Each run is a process of its own, with one thread. Of each: seconds from its start to the first output; seconds of CPU
to its end; and the median CPU time of a call at its end, beside that of the module itself in the same process, called
in turns: their quotient, in a first run, is what recording costs. Of `train`, a call is forward and backward. CPU times
say the same on a busy machine. The build of `aotc.compile` goes on after the first run, and is waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from own_caches import environment

SCRIPT = """
import json, os, statistics, sys, time
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
kind, way = sys.argv[1:]


def made():
    if kind == "encoder":
        from transformers import BertConfig, BertModel

        config = BertConfig(num_hidden_layers=6, hidden_size=384, num_attention_heads=6, intermediate_size=1536)
        return BertModel(config).eval(), (torch.randint(0, 1000, (1, 64)),)
    if kind == "diffusers":
        from diffusers import UNet2DModel

        unet = UNet2DModel(
            sample_size=32, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=8,
        )
        return unet.eval(), (torch.randn(1, 3, 32, 32), torch.tensor(10))
    from examples.models import GPT

    return GPT(layers=6, width=256, heads=8, vocabulary=1000, positions=256).eval(), (torch.randint(0, 1000, (1, 64)),)


def compiled(module):
    if way == "torch":
        return torch.compile(module)
    if way == "aotc":
        import aotc

        factory = {} if kind in ("encoder", "diffusers") else {"factory": "examples.models:gpt", "kwargs": SIZES}
        return aotc.compile(module, train=kind == "train", **factory)
    return module


SIZES = {"layers": 6, "width": 256, "heads": 8, "vocabulary": 1000, "positions": 256}


def seconds_since_start():
    ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def medians(calls, args, count=60):
    times = [[] for _ in calls]
    for number in range(count):
        given = (args[0][:, : 4 + number].clone(),) if kind == "lengths" else args
        for call, of_call in [*zip(calls, times)][:: 1 if number % 2 else -1]:  # the first of a new length pays for it
            began = time.process_time()
            call(*given)
            of_call.append(time.process_time() - began)
    return [1000 * statistics.median(each) for each in times]


def trained(model, args):
    import aotc

    optimizer = aotc.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(20):
        stepped(model, args)
        optimizer.step()
        optimizer.zero_grad()


def stepped(model, args):
    out = model(*args)
    getattr(out, "logits", out).square().mean().backward()


def denoised(unet):
    "Through a pipeline, in the place of its own UNet."
    from diffusers import DDIMPipeline, DDIMScheduler

    pipe = DDIMPipeline(unet, DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    pipe(batch_size=1, num_inference_steps=4, output_type="np")


def main():
    module, args = made()
    model = compiled(module)
    if kind == "training":  # a head on a frozen body, which is in eval mode
        head = torch.nn.Linear(1000, 2)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    trains = kind == "train"
    with torch.set_grad_enabled(trains):
        if trains:
            module.train()
            stepped(model, args)
        elif kind == "diffusers":
            denoised(model)
        else:
            model(*args)
        first = seconds_since_start()
        if kind == "training":
            for _ in range(20):
                with torch.enable_grad():
                    with torch.no_grad():
                        features = model(*args)
                    head(features).square().mean().backward()
                    optimizer.step()
        if trains:
            trained(model, args)
        both = (model, module) if way != "torch" else (model,)
        calls = [(lambda *args, each=each: stepped(each, args)) if trains else each for each in both]
        latency, eager, *_ = [*medians(calls, args), 0.0]
    compilers = [name for name in ("torch._dynamo", "torch._inductor", "triton", "sympy") if name in sys.modules]
    print(json.dumps({"first": first, "latency": latency, "eager": eager, "compilers": compilers}))


if __name__ == "__main__":
    main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=["encoder", "gpt", "lengths", "training", "train", "diffusers"])
    kinds = parser.parse_args().kinds
    print("| script | way | run | first output, s | CPU, s | a call, CPU ms | eager's | ratio | compilers imported |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---|")
    for kind in kinds:
        for way in ("eager", "torch", "aotc"):
            with tempfile.TemporaryDirectory(prefix="aotc-remembered-") as folder:
                for run in (1, 2, 3)[: 1 if way == "eager" else 3]:
                    _show(kind, way, str(run), *_run(Path(folder), kind, way))
                    if way == "aotc" and run == 1:
                        print(f"| {kind} | its build | | {_wait_for_builds(Path(folder)):.1f} | | | | | |", flush=True)


def _run(folder: Path, kind: str, way: str) -> tuple[dict[str, Any], float]:
    """What the script told, and its seconds of CPU."""
    script = folder / "script" / "script.py"  # no cache's folder, as `triton`, is beside it
    script.parent.mkdir(exist_ok=True)
    script.write_text(SCRIPT)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(
        [sys.executable, str(script), kind, way], env=environment(folder), stdout=subprocess.PIPE, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(ran.stdout.splitlines()[-1]), cpu


def _wait_for_builds(folder: Path) -> float:
    """Seconds until no process builds into a store of this folder."""
    began = time.monotonic()
    while _is_building(f"AOTC_CACHE_DIR={folder}/".encode()):
        time.sleep(0.2)
    return time.monotonic() - began


def _is_building(variable: bytes) -> bool:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, variables = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue
        if b"building.build_process" in command and variable in variables and process.name != str(os.getpid()):
            return True
    return False


def _show(kind: str, way: str, run: str, told: dict[str, Any], cpu: float) -> None:
    names = {"torch": "`torch.compile`", "aotc": "`aotc.compile`", "eager": "eager"}
    eager = f"{told['eager']:.2f}" if told["eager"] else ""
    ratio = f"{told['latency'] / told['eager']:.3f}" if told["eager"] else ""
    compilers = ", ".join(told["compilers"]) or "none"
    cells = [
        kind,
        names[way],
        run,
        f"{told['first']:.2f}",
        f"{cpu:.1f}",
        f"{told['latency']:.2f}",
        eager,
        ratio,
        compilers,
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
