"""The promise: a process that has called `aotc.load` holds no compiler, needs none, and cannot recompile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import ZOO, run_python

pytestmark = pytest.mark.every_torch

PROMISED = ("linear", "frozen", "pooled", "ranged", "semantics")
BANNED = ("torch._dynamo", "torch._inductor", "triton", "sympy", "aotc.compiler")

# After `import torch`, which may look some of them up. `torch.testing` imports sympy: compare with `torch.allclose`.
BAN = f"""
import sys
import torch

class Ban:
    def find_spec(self, name, path=None, target=None):
        if any(name == banned or name.startswith(banned + ".") for banned in {BANNED!r}):
            raise ImportError(name + " is banned here")

sys.meta_path.insert(0, Ban())
"""

SERVE_LIVE = """
import sys
import torch
import aotc, models

store = sys.argv[1]

def equal(compiled, eager):
    if isinstance(eager, torch.Tensor):
        assert compiled.dtype == eager.dtype and compiled.shape == eager.shape
        assert torch.allclose(compiled, eager, atol=1e-5, equal_nan=False)
    elif isinstance(eager, dict):
        assert type(compiled) is dict and list(compiled) == list(eager)
        [equal(compiled[name], eager[name]) for name in eager]
    elif isinstance(eager, (list, tuple)):
        assert type(compiled) is type(eager) and len(compiled) == len(eager)
        [equal(*pair) for pair in zip(compiled, eager)]
    else:
        assert compiled == eager

def check(name, module, *args, **kwargs):
    clone = lambda tree: torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)
    with torch.no_grad():
        before = {key: value.clone() for key, value in module.state_dict().items()}
        eager = module(*clone(args), **clone(kwargs))
        module.load_state_dict(before)
        compiled = aotc.load(name, module, store=store)
        equal(compiled(*clone(args), **clone(kwargs)), eager)

def made(factory, **kwargs):
    torch.manual_seed(0)
    return factory(**kwargs).eval()

check("linear", made(models.Linear), torch.randn(2, 8))
check("linear", made(models.Linear), torch.randn(4, 8))
check("pooled", made(models.Pooled), torch.randint(0, 32, (3, 11)), mask=torch.rand(3, 11) > 0.2)
check("ranged", made(models.Block), torch.randn(1, 77, 32))
check(
    "semantics",
    made(models.Semantics),
    {"x": torch.randn(2, 4), "flags": torch.tensor([True, False])},
    state=torch.zeros(3, dtype=torch.int64),
    flip=False,
)
"""

SERVE = f"""
{SERVE_LIVE}
check("frozen", made(models.Linear, width=64), torch.randn(2, 64))
compiled = aotc.load("frozen", store=store)
equal(compiled(torch.ones(2, 64)), made(models.Linear, width=64)(torch.ones(2, 64)))
print("served")
"""


@pytest.fixture(scope="session")
def promised_store(shared_folder: Path, built: Any) -> Path:
    """The zoo's store with the models that are served here; others may be in it."""
    store: Path = built(shared_folder, "zoo-store", ZOO / "manifest.yaml", PROMISED)
    return store


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """A machine with no tool on the path, a compiler that fails, and an empty home."""
    home = tmp_path / "home"
    home.mkdir()
    return {
        "PATH": "",
        "CXX": "/bin/false",
        "CC": "/bin/false",
        "HOME": str(home),
        "XDG_CACHE_HOME": "",
        "AOTC_CACHE_DIR": "",
    }


def test_models_are_served_where_no_compiler_can_be_imported_or_run(promised_store: Path, bare: dict[str, str]) -> None:
    """And nothing is written: the home stays empty."""
    assert run_python(BAN + SERVE, promised_store, **bare) == "served\n"
    assert list(Path(bare["HOME"]).iterdir()) == []


def test_nothing_of_a_compiler_is_loaded_after_serving(promised_store: Path, bare: dict[str, str]) -> None:
    shown = run_python(SERVE + "print(*sys.modules)", promised_store, **bare)
    loaded = shown.splitlines()[-1].split()
    assert "aotc.runtime.load" in loaded
    assert not [name for name in loaded if any(name == ban or name.startswith(f"{ban}.") for ban in BANNED)]


def test_a_forked_child_serves_what_its_parent_prepared_with_no_compiler(
    promised_store: Path, bare: dict[str, str]
) -> None:
    forked = f"""
import os, sys
import aotc

prepared = {{name: aotc.prepare(name, store=sys.argv[1]) for name in {PROMISED!r}}}
if pid := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    serve = SERVE.replace("aotc.load(name, module, store=store)", "prepared[name].load(module)")
    serve = serve.replace('aotc.load("frozen", store=store)', 'prepared["frozen"].load()')
    assert "aotc.load" not in serve
    assert run_python(BAN + forked + serve, promised_store, **bare) == "served\n"


def test_the_ban_of_these_tests_works(bare: dict[str, str]) -> None:
    attempts = [f"try:\n    import {ban}\nexcept ImportError as error:\n    print(error)\n" for ban in BANNED]
    assert run_python(BAN + "".join(attempts), **bare).count("is banned here") == len(BANNED)
