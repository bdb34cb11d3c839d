"""`compat="abi"`: what another torch built is served by this one, with no compiler.

$AOTC_TESTS_OTHER_TORCH is a store with models of tests/zoo/manifest.yaml, built with another minor version of torch.
In `.ci/run` it is the zoo's store of the whole suite, which $AOTC_TESTS_KEEP_ZOO keeps for the newest torch.
"""

from __future__ import annotations

import os

import pytest
import torch
from processes import run_python
from test_no_compiler import BAN, PROMISED, SERVE_LIVE

import aotc
from aotc.errors import EnvironmentMismatchError

STORE = os.environ.get("AOTC_TESTS_OTHER_TORCH", "")
pytestmark = [
    pytest.mark.every_torch,
    pytest.mark.skipif(not STORE, reason="needs a store that another torch built, in $AOTC_TESTS_OTHER_TORCH"),
]


@pytest.mark.parametrize("model", PROMISED)
def test_it_is_refused_without_that_word_and_both_versions_are_named(model: str) -> None:
    with pytest.raises(EnvironmentMismatchError) as caught:
        aotc.load(model, store=STORE)
    (issue,) = (issue for issue in caught.value.issues if "built with torch" in issue.message)
    assert torch.__version__ in str(issue)


def test_with_it_live_models_give_eagers_results_and_no_compiler_is_imported() -> None:
    serve = SERVE_LIVE.replace("store=store)", 'store=store, compat="abi")')
    assert serve != SERVE_LIVE
    assert run_python(f"{BAN}{serve}\nprint('served')", STORE) == "served\n"


def test_frozen_weights_are_refused_all_the_same() -> None:
    with pytest.raises(EnvironmentMismatchError, match="is for live weights"):
        aotc.load("frozen", store=STORE, compat="abi")
