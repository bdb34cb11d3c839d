#!/usr/bin/env bash
# The CUDA suite, then CUDA benchmarks, on a machine with a GPU and this checkout; nothing need be installed but
# aotc's dependencies and pytest.
#
#   tests/cuda/run.sh                 # both, the benchmarks with few starts and one model of each kind
#   tests/cuda/run.sh suite [...]     # the suite; further arguments go to pytest
#   tests/cuda/run.sh bench [...]     # the benchmarks; further arguments go to tests/benchmarks/cuda.py
set -euo pipefail
cd "$(dirname "$0")/../.."
export CXX="${CXX_FOR_AOTC:-g++}" # the default of some machines links libstdc++ statically
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python="${PYTHON:-python3}"
what="${1:-all}"
[ $# -eq 0 ] || shift

suite() { "$python" -m pytest tests/cuda -q -p no:cacheprovider --durations=15 "$@"; }
bench() { "$python" tests/benchmarks/cuda.py "$@"; }

case "$what" in
  suite) suite "$@" ;;
  bench) bench "$@" ;;
  all)
    status=0
    suite || status=$? # the figures are wanted all the same
    bench --jobs 4 --many-buckets 64 --replicate --storage --repeat 1 \
      --model pointwise-fp16 --model matmul-tf32 --model tinyblock-fp16 --model gpt-bf16 -- --starts 1 --rounds 7
    exit "$status"
    ;;
  *)
    echo "usage: $0 [all | suite [PYTEST ARGUMENTS] | bench [BENCHMARK ARGUMENTS]]" >&2
    exit 2
    ;;
esac
