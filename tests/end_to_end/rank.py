"""One rank of the tests of parallel models: `rank.py STORE SCENARIO SECONDS [cuda]`, with the variables of torchrun.

Prints a JSON line of what happened.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "tensor_parallel"))
from model import Llama, llama
from safetensors.torch import save_file
from torch.distributed import destroy_process_group  # before aotc is imported
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import aotc

COMPILERS = ("torch._dynamo", "torch._inductor", "triton", "sympy")
STORE, SCENARIO = sys.argv[1:3]
TIMEOUT = float(sys.argv[3])
DEVICE = torch.device("cuda", int(os.environ["RANK"])) if "cuda" in sys.argv[4:] else torch.device("cpu")
said: dict[str, Any] = {}


def error_of(function: Any) -> list[Any]:
    """The name of the error that it raises, its message, and after how many seconds."""
    began = time.monotonic()
    try:
        function()
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - began]
    return ["", "", time.monotonic() - began]


def made(group: Any = None) -> Llama:
    return llama(group=group).eval().to(DEVICE)


def load(group: Any, module: Any = None, **more: Any) -> aotc.Compiled:
    module = made(group) if module is None else module
    return aotc.load("llama", module, store=STORE, ranks=aotc.Ranks(group, timeout=TIMEOUT), **more)


def prompt(*tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([tokens], device=DEVICE), torch.tensor(0, device=DEVICE)


def agree(group: Any) -> None:
    """Compiled code, eager of this rank, and the whole model: a prompt, then one token."""
    said["no group"] = error_of(lambda: aotc.load("llama", made(group), store=STORE))
    said["not a group"] = error_of(lambda: load("tensor", made(group)))
    compiled, eager, whole = load(group), made(group), made()
    calls = prompt(3, 5, 7, 9, 11), (torch.tensor([[4]], device=DEVICE), torch.tensor(5, device=DEVICE))
    results = [compiled(*call) for call in calls]
    # Before eager runs, whose functional collectives import them.
    said["compilers"] = [name for name in COMPILERS if name in sys.modules]
    said["differences"] = [
        float((result - other(*call)).abs().max())
        for result, call in zip(results, calls, strict=True)
        for other in (eager, whole)
    ]
    said["DTensors"] = of_dtensors(group)
    said["constants"] = of_constants(group)
    # A rank whose load fails is an error on all, and the group can be used again.
    said["one fails"] = error_of(
        lambda: load(group, made(group) if group.rank() == 0 else torch.nn.Linear(2, 2).eval().to(DEVICE))
    )
    another = load(group)
    said["other sizes"] = error_of(lambda: another(*prompt(*range(3 + group.rank()))))
    said["miss on all"] = error_of(lambda: compiled(*prompt(*range(40))))
    compiled(*prompt(1, 2))
    said["miss on one"] = error_of(lambda: compiled(*prompt(*range(2 if group.rank() == 0 else 40))))
    said["call after it"] = error_of(lambda: compiled(*prompt(1, 2)))  # not the sum of two ranks' different calls


def of_dtensors(group: Any) -> list[float]:
    """A module of DTensors, before and after its weights change."""
    from dtensors import feed_forward  # torch's DTensors import SymPy

    mesh = DeviceMesh.from_group(group, DEVICE.type, mesh_dim_names=("tensor",))
    module, eager, whole = (feed_forward(hidden=5, mesh=each).eval().to(DEVICE) for each in (mesh, mesh, None))
    compiled = aotc.load("feed-forward", module, store=STORE, ranks=aotc.Ranks(mesh, timeout=TIMEOUT))
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found = [float((compiled(x) - other(x)).abs().max()) for other in (eager, whole)]
    for each in (module, eager):
        each.down.bias.mul_(2)
    found.append(float((compiled(x) - eager(x)).abs().max()))
    said["swap in the module"] = error_of(lambda: compiled.update_weights(whole.state_dict()))[0]
    # A checkpoint of the whole model: each rank takes its parts, at a load without the module, and later.
    state = {name: tensor.contiguous() for name, tensor in whole.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        save_file(state, path := Path(folder, "model.safetensors"))
        compiled = aotc.load(
            "feed-forward", weights=path, store=STORE, device=DEVICE, ranks=aotc.Ranks(mesh, timeout=TIMEOUT)
        )
        found.append(float((compiled(x) - whole(x)).abs().max()))
        prepared = aotc.prepare("feed-forward", weights=path, store=STORE, device=DEVICE.type)
        halves = prepared.load(ranks=aotc.Ranks(mesh, timeout=TIMEOUT))
        found.append(float((halves(x) - whole(x)).abs().max()))
    whole.up.weight.mul_(1.5)
    compiled.update_weights({"up.weight": whole.up.weight})
    return [*found, float((compiled(x) - whole(x)).abs().max())]


def of_constants(group: Any) -> list[float]:
    """Each rank's first row is a constant of its code."""
    from embedding import embedding

    eager, whole = (embedding(group=each).eval().to(DEVICE) for each in (group, None))
    tokens = torch.arange(0, 96, 7, device=DEVICE)
    compiled = aotc.load("embedding", eager, store=STORE, ranks=aotc.Ranks(group, timeout=TIMEOUT))
    return [float((compiled(tokens) - one(tokens)).abs().max()) for one in (eager, whole)]


def regions(group: Any) -> None:
    """Layers, by a call of what was loaded and of the module itself; then a call that the other ranks do not make."""
    if group.size() == 4:
        said["another size"] = error_of(lambda: load(group, made()))
        of_mesh()
    module, *others = (llama(layers=3, group=each).eval().to(DEVICE) for each in (group, group, None))
    compiled = aotc.load("llama-layers", module, store=STORE, ranks=aotc.Ranks(group, timeout=TIMEOUT))
    call = prompt(7)
    results = [compiled(*call), module(*call)]
    said["differences"] = [float((one - other(*call)).abs().max()) for one in results for other in others]
    said["calls"] = compiled.stats().calls
    if group.rank() == 0:
        said["alone"] = error_of(lambda: module(*call))
    else:
        time.sleep(TIMEOUT + 1)
    compiled.detach()
    said["detached"] = "forward" not in vars(module)


def of_mesh() -> None:
    """Of four ranks, each two of the mesh's dim `tensor` run the model for two; a load that rank 3 cannot begin."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("data", "tensor"))
    compiled, whole, call = load(mesh, made(mesh.get_group("tensor"))), made(), prompt(3, 5, 7)
    said["mesh"] = float((compiled(*call) - whole(*call)).abs().max())
    name = "llama:absent" if dist.get_rank() == 3 else "llama"
    module = made(mesh.get_group("tensor"))
    said["load with a mesh"] = error_of(
        lambda: aotc.load(name, module, store=STORE, ranks=aotc.Ranks(mesh, timeout=10 * TIMEOUT))
    )


def ends(group: Any) -> None:
    """Rank 1 ends in the middle of a call of rank 0."""
    compiled = load(group)
    compiled(*prompt(1, 2))
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said["call"] = error_of(lambda: [compiled(*prompt(1, 2)) for _ in range(3)])


def absent(group: Any) -> None:
    """Rank 1 never loads."""
    if group.rank() == 0:
        said["load"] = error_of(lambda: load(group))
    else:
        time.sleep(TIMEOUT + 1)


def destroyed(group: Any) -> None:
    """The group goes while compiled code with graphs is still there."""
    compiled = load(group)
    compiled(*prompt(1, 2))
    destroy_process_group()
    said["destroyed"] = error_of(lambda: compiled(*prompt(1, 2)))[0] == "GroupError"


if __name__ == "__main__":
    more = {}
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        more = {"device_id": DEVICE}
    dist.init_process_group("nccl" if more else "gloo", timeout=datetime.timedelta(seconds=120), **more)
    with torch.no_grad():
        globals()[SCENARIO](dist.group.WORLD)
    print(json.dumps(said), flush=True)
    os._exit(0)  # the other rank may be gone
