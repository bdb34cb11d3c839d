"""How a service starts with a GPT of 12 layers, as `aotc bench` measures it, and limits on it. A script, not a test.

    python tests/benchmarks/startup.py                                          # float32, live weights
    python tests/benchmarks/startup.py --model gpt-bf16                         # bfloat16, frozen weights
    python tests/benchmarks/startup.py -- --contenders eager,aotc --starts 9    # options of `aotc bench`

The models are those of manifests/gpt.yaml. All contenders take about five minutes on two cores; run nothing else
meanwhile.
"""

from __future__ import annotations

from bench_models import (
    ROOT,
    limits_of_a_start,
    limits_of_calls,
    measure,
    parser,
    print_report,
    temporary_store,
    write_json,
)

TOLERANCE = {"gpt": 1e-4, "gpt-bf16": 5e-2}
"""How far an output may be from eager's, as a share of eager's largest."""
PACKED = {"gpt-bf16": {"default": 0.75, "max-autotune": 0.75}}
"""Latency at most, as a share of torch.compile's: frozen weights are packed for oneDNN."""


def main() -> None:
    options = parser(__doc__).parse_args()
    with temporary_store(options):
        names = options.model or ["gpt"]
        found = list(measure(ROOT / "manifests" / "gpt.yaml", names, options.store, options.jobs, options.bench))
    limits = [
        (one.name, limit)
        for one in found
        for limit in (
            *limits_of_a_start(one.report, 1.05, TOLERANCE[one.name]),
            *limits_of_calls(one.report, PACKED.get(one.name, {})),
        )
    ]
    print_report(found, limits)
    write_json(options, found)


if __name__ == "__main__":
    main()
