"""`aotc.compile` of libraries' models on a GPU: a pipeline's UNet, `generate()`, adapters. In the second process all of
their calls run compiled code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_runs import run_python

pytestmark = pytest.mark.cuda

PIPELINE = """
import json, sys, torch, aotc
from diffusers import CMStochasticIterativeScheduler, ConsistencyModelPipeline, UNet2DModel

torch.manual_seed(0)
unet = UNet2DModel(
    sample_size=32, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=8,
).eval()
pipe = ConsistencyModelPipeline(unet, CMStochasticIterativeScheduler()).to("cuda")
pipe.set_progress_bar_config(disable=True)

def image(seed):
    return torch.from_numpy(pipe(
        timesteps=[22, 11, 0], generator=torch.Generator().manual_seed(seed), output_type="np"
    ).images)

expected, other = image(0), image(1)
pipe.unet = aotc.compile(pipe.unet, store=sys.argv[1], build=sys.argv[2])
found = image(0)
is_built = sys.argv[2] == "never" or pipe.unet.wait()
calls = sum(code.stats().calls for code in pipe.unet._remembering.known.compiled)
state = pipe.unet.explain()
apart = [float((each - expected).abs().max()) for each in (found, other)]
print(json.dumps([is_built, calls, len(state.models), state.notes, apart[0] < 0.02 < apart[1]]))
"""


def test_the_unet_of_a_pipeline_is_compiled_in_the_second_process(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")

    def told(build: str) -> Any:
        return json.loads(run_python(PIPELINE, tmp_path / "store", build).splitlines()[-1])

    assert told("background") == [True, 0, 1, [], True]
    assert told("never") == [True, 3, 1, [], True]


GENERATING = """
import json, sys, torch, aotc
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64)
net = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=50, max_position_embeddings=64)).eval().cuda()
ids = torch.randint(0, 50, (1, 5), device="cuda")
given = dict(do_sample=False, pad_token_id=0, min_new_tokens=12, max_new_tokens=12)
kinds = [{"cache_implementation": "static", "disable_compile": True}, {}]
want = [net.generate(ids, **given, **kind) for kind in kinds]
vars(net).pop("_cache", None)
kinds[0].pop("disable_compile")
model = aotc.compile(net, store=sys.argv[1], build=sys.argv[2])
same = [torch.equal(model.generate(ids, **given, **kind), each) for kind, each in zip(kinds, want) for _ in range(2)]
print(json.dumps([same, model.stats().compiled, model.stats().eager, f"{model.stats()} {model.explain()}"]))
"""


def test_generate_runs_compiled_code_with_either_cache(tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def told(build: str) -> Any:
        return json.loads(run_python(GENERATING, tmp_path / "store", build).splitlines()[-1])

    assert told("exit")[:3] == [[True] * 4, 0, 48]
    *found, state = told("never")
    assert found == [[True] * 4, 48, 0], state


ADAPTED = """
import json, sys, torch, aotc, peft
from gpu_models import Mlp

torch.manual_seed(0)
net = Mlp().eval().cuda()
names = [name for name, part in net.named_modules() if isinstance(part, torch.nn.Linear)]
model = aotc.compile(net, factory="gpu_models:Mlp", store=sys.argv[1], build=sys.argv[2])
x, ran = torch.randn(3, 64, device="cuda"), []
for name in "ab":
    config = peft.LoraConfig(r=2, target_modules=names[:1], init_lora_weights=False)
    peft.inject_adapter_in_model(config, net, name)
    for part in net.modules():
        if hasattr(part, "lora_A"):
            part.set_adapter([name])
    with torch.no_grad():
        before = model.stats().compiled
        ran.append([torch.allclose(model(x), net(x), atol=1e-3), model.stats().compiled - before])
print(json.dumps(ran))
"""


def test_each_state_of_adapters_runs_code_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("peft")

    def told(build: str) -> Any:
        return json.loads(run_python(ADAPTED, tmp_path / "store", build).splitlines()[-1])

    assert told("exit") == [[True, 0]] * 2
    assert told("never") == [[True, 1]] * 2
