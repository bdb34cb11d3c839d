"""Arrays of any form, and producers of DLPack that keep to nothing, in a process without torch: `hostile_arrays.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import finish, start
from sanitized_runtime import preloaded, sanitized_copy
from test_swaps_without_torch import told

HERE = Path(__file__).parent
CALLS = 1200


def test_a_call_with_any_array_is_numpy_s_of_a_copy_or_a_miss_and_what_it_took_is_deleted_once(zoo_store: Path) -> None:
    """Strides of any sign, gaps, offsets, read-only, empty, unaligned, shared, of other devices, dtypes and versions,
    consumed before, and producers that raise. For more: `python tests/standalone/hostile_arrays.py STORE FIRST COUNT`,
    with `.` and `tests` on PYTHONPATH."""
    ran = finish(start(HERE / "hostile_arrays.py", zoo_store, 0, CALLS))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout)
    calls, misses = found["counts"]
    assert found["wrong"] == {} and ran.stderr == ""
    assert calls + misses == CALLS and min(calls, misses) > CALLS / 5
    assert found["stats"][:2] == [calls, misses] and found["stats"][2] > CALLS / 10


def test_with_sanitizers_a_call_with_any_array_reads_and_writes_no_other_memory(
    zoo_store: Path, tmp_path: Path
) -> None:
    """AddressSanitizer's and UndefinedBehaviorSanitizer's build of the runtime, in a copy of the package."""
    settings = {"ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0"}
    settings["LD_PRELOAD"] = preloaded("asan", "ubsan", "stdc++")
    sanitized_copy(tmp_path, "address,undefined")
    code = (
        "import sys; sys.path[:0] = sys.argv[3:]; import hostile_arrays as h; h.main(sys.argv[1], 0, int(sys.argv[2]))"
    )
    ran = finish(start("-c", code, zoo_store, CALLS, tmp_path, HERE, **settings))
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    found = json.loads(ran.stdout)
    assert found["wrong"] == {} and found["runtime"].startswith(str(tmp_path))


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "SystemExit"])
def test_what_ends_a_process_is_no_miss(zoo_store: Path, kind: str) -> None:
    code = f"""
class Interrupted:
    def __dlpack_device__(self):
        return 1, 0
    def __dlpack__(self, **options):
        raise {kind}
model = linear()
try:
    model(Interrupted())
except {kind}:
    print(json.dumps([model.stats().misses, served(model)]))
"""
    assert told(code, zoo_store) == [0, [9]]


def test_ten_thousand_calls_leave_nothing_behind(zoo_store: Path) -> None:
    """Of arrays of numpy, buffers, DLPack, padded ones and misses, in turn; no collection of garbage helps."""
    code = """
import gc
class Speaking:
    def __init__(self, array):
        self.array = array
    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)
    def __dlpack_device__(self):
        return 1, 0
from aotc.errors import MissError
gc.disable()
plain = linear()
model = aotc.standalone.load(f"{store}#accumulating", weights={})
total, wide = numpy.zeros((4, 6), "f4"), numpy.ones((4, 6), "f4")
def missed(given):
    try:
        plain(given)
    except MissError:
        pass
def one(turn):
    plain(x), plain(memoryview(x)), missed(x[:1]), missed([1, 2]), plain(Speaking(x)), missed(Speaking(x[:1]))
    model(total[: turn % 5], Speaking(wide[: turn % 5]))["first"]
    model(numpy.asfortranarray(wide), wide)
    return 8
def resident():
    return int(open("/proc/self/statm").read().split()[1])
[one(turn) for turn in range(200)]
before = resident()
calls = sum(one(turn) for turn in range(1250))
print(json.dumps([calls, resident() / before, plain.stats().calls, plain.stats().misses, model.stats().padded_calls]))
"""
    calls, growth, ran, misses, padded = told(code, zoo_store)
    assert (calls, ran, misses, padded) == (10_000, 3 * 1450, 3 * 1450, 4 * 290)
    assert growth < 1.05
