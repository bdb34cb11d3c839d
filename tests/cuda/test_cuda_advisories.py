"""What is built on a GPU with all patches is of no advisory, and says which operators its graphs have."""

from __future__ import annotations

import pytest
from gpu_runs import Gpu

from aotc.advisories import own_feed
from aotc.store.layout.built import read_report
from aotc.store.layout.store import Store
from aotc.tools.audit.audit import audit

pytestmark = pytest.mark.cuda


def test_a_build_on_a_gpu_has_no_advisory_of_the_aotc_that_built_it(gpu: Gpu) -> None:
    done = audit([str(gpu.store)], own_feed(), "")
    assert len(done.artifacts) > 1 and (done.found, done.unread) == ((), [])
    store = Store.open(gpu.store)
    (report, *_) = (read_report(store, variant) for variant in gpu.artifact("attention").variants)
    assert report is not None and report.operators is not None
    assert any(name.startswith("aten.scaled_dot_product_attention") for name in report.operators)
