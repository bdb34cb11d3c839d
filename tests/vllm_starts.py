"""Starts of a real vLLM on the CPU: a Llama of four layers with dummy weights, a process from nothing to 16 tokens.

Of the standard library, but for `aotc.tools.caches.receipt`: `tests/engines` and `tests/benchmarks/engines.py` use it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from aotc.tools.caches.receipt import Receipt, begin, read

ROOT = Path(__file__).parents[1]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROGRAM = """
import json, sys, time
from pathlib import Path

def main():
    from vllm import LLM, SamplingParams

    options = json.loads(sys.argv[1])
    fixed = dict(skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", max_model_len=256)
    engine = LLM("model", **fixed, max_num_batched_tokens=256, **{"max_num_seqs": 8, **options})
    prompt = [{"prompt_token_ids": [1, 5, 9, 11]}]
    engine.generate(prompt, SamplingParams(max_tokens=1, detokenize=False, temperature=0), use_tqdm=False)
    first = time.time()
    sampling = SamplingParams(max_tokens=16, detokenize=False, temperature=0, ignore_eos=True)
    made = engine.generate(prompt, sampling, use_tqdm=False)
    found = {"first": first, "tokens": list(made[0].outputs[0].token_ids)}
    Path("found.json").write_text(json.dumps(found))

if __name__ == "__main__":
    main()
"""
COMPILERS = re.compile(r"(.*-)?(gcc|g\+\+|cc|c\+\+|clang|clang\+\+|cpp)(-[\d.]+)?")


class Start(NamedTuple):
    """seconds: from the process's start to the first token; engine: of its initialisation, as vLLM's log has it.
    `tokens` are empty where it did not start; `compiled` has the files that compilers were given."""

    seconds: float
    engine: float
    tokens: list[int]
    receipt: Receipt
    log: str

    @property
    def compiled(self) -> list[str]:
        return [source for each in self.receipt.compilers for source in each.sources]

    def lines(self) -> list[str]:
        """What the plug-in has written into vLLM's log."""
        return [line for line in self.log.splitlines() if "aotc: " in line or line.startswith("  ")]


def start(work: Path, caches: Path, python: str = sys.executable, path: str = "", **settings: object) -> Start:
    """One engine, in a process of its own, with all of its caches in the folder `caches`.

    Args:
        work: a folder for the model, the program and the receipt; the model's path is part of vLLM's key, and relative.
        python: the interpreter, whose environment has vLLM and aotc.
        path: PATH, if it is another.
        settings: variables in capitals, else options of `vllm.LLM`. With AOTC_RECEIPT, a restore began the receipt.
    """
    (work / "model").mkdir(parents=True, exist_ok=True)
    (work / "model" / "config.json").write_text(json.dumps(CONFIG))
    (work / "program.py").write_text(PROGRAM)
    (work / "found.json").unlink(missing_ok=True)
    given = {name: str(value) for name, value in settings.items() if name.isupper()}
    options = {name: value for name, value in settings.items() if not name.isupper()}
    folders = {"vllm": caches / "vllm", "triton": caches / "triton", "inductor": caches / "inductor"}
    receipt = Path(given.get("AOTC_RECEIPT") or work / "receipt")
    watched = {}
    if "AOTC_VLLM" in given:  # which begins it, after its restore
        watched = {"AOTC_RECEIPT": str(receipt)}
    elif "AOTC_RECEIPT" not in given:
        watched = begin(receipt, None, folders)
    foreign = ("TORCHINDUCTOR", "TRITON", "VLLM", "AOTC", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    variables = {
        **kept,
        "VLLM_CACHE_ROOT": str(folders["vllm"]),
        "TRITON_CACHE_DIR": str(folders["triton"]),
        "TORCHINDUCTOR_CACHE_DIR": str(folders["inductor"]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": path or os.environ["PATH"],
        **watched,
        **given,
    }
    with tempfile.TemporaryDirectory(prefix="vllm-") as temporary:  # the paths of vLLM's sockets have to be short
        began = time.time()
        ran = subprocess.run(
            [python, "program.py", json.dumps(options)],
            cwd=work,
            env={**variables, "TMPDIR": temporary},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=1200,
        )
    (work / "log").write_text(ran.stdout)
    (work / "began").write_text(repr(began))
    return ended(work, receipt)


def ended(work: Path, receipt: Path | None = None) -> Start:
    """What a start has left in its folder."""
    log, folder = (work / "log").read_text(), receipt or work / "receipt"
    begun = (folder / "restored.json").exists()  # not after a restore that was refused
    found = read(folder) if begun else Receipt(0, (), (), (), (), 0)
    if not (work / "found.json").exists():
        return Start(0, 0, [], found, log)
    result = json.loads((work / "found.json").read_text())
    took = re.search(r"init engine .* took ([\d.]+) s", log)
    assert took is not None, log
    return Start(result["first"] - float((work / "began").read_text()), float(took[1]), result["tokens"], found, log)


def without_compilers(folder: Path) -> str:
    """A PATH with all that the machine's has, but for compilers of C and C++."""
    folder.mkdir(parents=True)
    for entry in os.environ["PATH"].split(os.pathsep):
        for program in Path(entry).iterdir() if Path(entry).is_dir() else ():
            if not COMPILERS.fullmatch(program.name) and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    return str(folder)


def elsewhere(folder: Path) -> str:
    """The interpreter of this environment at another path, and so torch and vLLM."""
    folder.symlink_to(sys.prefix)
    return str(folder / "bin" / "python")
