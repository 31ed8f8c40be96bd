#!/bin/bash
# Everything that needs the GPU machine, in one call: build, op tests, product checks, memory checker, kernel board.
# Usage: bench/device.sh [build] [ops] [check] [memory] [kernels] ...; results and logs go to $OUT (default build/device).
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-build/device}
mkdir -p "$OUT"
export PYTHONPATH=runner:manager:. PYTHONUNBUFFERED=1
ARCH=${ARCH:-sm_90a}
PACK=runner/paddock_runner/_packs/libpaddock_cuda_${ARCH/_/}.so
for step in "$@"; do
    start=$SECONDS
    case $step in
        build) python3 packs/cuda/build.py "$ARCH" --jobs "$(nproc)" --lenient >"$OUT/build.log" 2>&1; tail -3 "$OUT/build.log" ;;
        ops) PADDOCK_TEST_PACK=$PWD/$PACK timeout 150 python3 -m pytest tests/kernels -p no:cacheprovider -q --tb=short -k "not avx512 and not amx" >"$OUT/ops.log" 2>&1; grep -E "^(FAILED|ERROR)|passed|failed" "$OUT/ops.log" | cut -c1-230 | tail -60 ;;
        check) timeout 200 python3 -m bench.gpu_check "$PACK" 2>&1 | tee "$OUT/check.log" | tail -40 ;;
        memory) timeout 200 compute-sanitizer --tool memcheck --error-exitcode 9 python3 -m bench.gpu_check "$PACK" --small >"$OUT/memcheck.log" 2>&1; tail -12 "$OUT/memcheck.log" ;;
        race) timeout 200 compute-sanitizer --tool racecheck --error-exitcode 9 python3 -m bench.gpu_check "$PACK" --small >"$OUT/racecheck.log" 2>&1; tail -12 "$OUT/racecheck.log" ;;
        kernels) timeout 280 python3 -m bench.gpu_kernels "$PACK" --out "$OUT" ${KERNELS:-} 2>&1 | tee "$OUT/kernels.log" | tail -90 ;;
        layers) timeout 280 python3 -m bench.gpu_layers "$PACK" --out "$OUT" ${LAYERS:-} 2>&1 | tee "$OUT/layers.log" | tail -60 ;;
        models) timeout 280 python3 -m bench.gpu_models "$PACK" --out "$OUT" ${MODELS:-} 2>&1 | tee "$OUT/models.log" | tail -60 ;;
        *) echo "no such step: $step" ;;
    esac
    echo "== $step took $((SECONDS - start)) s"
done
