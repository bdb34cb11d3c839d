"""What the tests of manifests share."""

from __future__ import annotations

import pytest

from aotc.tools.recording import check_written, first_manifest


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the check of what was written: its process imports torch's compiler, for seconds each time."""
    for module in (check_written, first_manifest):
        monkeypatch.setattr(module, "check_written", lambda *written: None)
