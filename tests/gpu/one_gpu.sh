#!/usr/bin/env bash
# tests/gpu and the GPU benchmarks on one GPU, in at most eight minutes, with whatever torch is found there.
#
#     tests/gpu/one_gpu.sh                      PYTHON=python3, results to OUT=benchmarks/results-gpu
#     DEVICE=cpu tests/gpu/one_gpu.sh --quick   a trial without a GPU; more arguments go to tests/gpu/run.py
#
# Nothing is installed: the checkout is put on PYTHONPATH. The benchmarks run also where a test has failed; the exit code
# says whether one has. Without a GPU it says what it skips, and writes nothing.
set -u
cd "$(dirname "$0")/../.." || exit 2
PYTHON=${PYTHON:-python3}
DEVICE=${DEVICE:-cuda}
OUT=${OUT:-benchmarks/results-gpu}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
if ! there=$("$PYTHON" -c 'import networkx, numpy, torch; print(torch.cuda.device_count())' 2>&1); then
    echo "$PYTHON lacks torch, numpy or networkx, and nothing is installed here: PYTHON=.venv/bin/python make gpu-check"
    echo "  it said: ${there##*$'\n'}"
    exit 2
fi
if [ "$DEVICE" = cuda ] && [ "${there##*$'\n'}" -eq 0 ]; then
    "$PYTHON" tests/gpu/run.py --worlds 1 && "$PYTHON" benchmarks/gpu.py --worlds 1
    exit
fi
mkdir -p "$OUT"
{
    date -u +%FT%TZ
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo "no nvidia-smi"
    "$PYTHON" -c 'import sys, torch; print("python", sys.version.split()[0], "torch", torch.__version__, torch.version.cuda)'
} 2>&1 | tee "$OUT/machine.txt"
timeout 280 "$PYTHON" tests/gpu/run.py --worlds 1 --device "$DEVICE" --timeout 260 "$@" 2>&1 | tee "$OUT/tests.txt"
tests=${PIPESTATUS[0]}
tiny=()
[ "$DEVICE" = cpu ] && tiny=(--tiny)
timeout 190 "$PYTHON" benchmarks/gpu.py --worlds 1 --device "$DEVICE" --timeout 175 --out "$OUT" "${tiny[@]}" 2>&1 |
    tee "$OUT/bench.txt"
bench=${PIPESTATUS[0]}
echo "tests: exit code $tests, benchmarks: exit code $bench"
[ "$tests" -eq 0 ] && [ "$bench" -eq 0 ]
