"""What is damaged in a store of `aotc.compile` is told once, and made again."""

from __future__ import annotations

from typing import Any

import pytest

CODE = """
model = aotc.compile(Net().eval(), build="exit")
same = called(model, (2, 16), (2, 16))
tell(model, same=same, ran=model.stats()[:2])
"""


@pytest.mark.compile
def test_damaged_code_and_forms_are_told_once_and_built_again(program: Any) -> None:
    name = program.run(CODE)["name"]
    blob = max((program.store / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-9] + b"corrupted")
    damaged = program.run(CODE)
    assert (damaged["same"], damaged["ran"]) == (True, [0, 2])
    assert damaged["log"].count("is built anew") == 1
    assert program.run(CODE)["ran"] == [2, 0]

    (program.files / f"{name}.json").write_bytes(b"\x00{")
    forgotten = program.run(CODE)
    assert forgotten["same"] is True and forgotten["ran"] == [2, 0]
    assert forgotten["log"].count("its forms are remembered anew") == 1
    assert (program.files / f"{name}.damaged").exists()
    healed = program.run(CODE)
    assert "anew" not in healed["log"] and healed["ran"] == [2, 0]
