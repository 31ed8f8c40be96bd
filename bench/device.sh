#!/bin/bash
# Everything that needs the GPU machine, step by step: build, op tests, checks under the sanitizer, and every board.
# Usage: [OUT=FOLDER] [PACK=FILE] [STAGE_LIMIT=SECONDS] bench/device.sh STEP...
#   build ops check memory race kernels layers models      as they are named; ops: tests/kernels whole, in JOBS processes
#   whole 32b products attention hybrids                   boards of programs, without HTTP
#   steps                                                  prices of steps, a table without a board
#   serve_bf16 serve_fp8 twin twin_bf16 long guests aside start gaps agents tiers soak fit     boards of servers and of the engine
#   killed company                                         answers after kill -9; alone, together and cut (no figures of time)
#   m s0 s1 s2                                             a release's run: ops; models and BF16; FP8; what must not break
# Logs go to OUT (default build/device), boards to OUT/boards: python -m bench.boards OUT... makes the tree's of them.
# A step is ended at its own limit, and at the end of STAGE_LIMIT; what it had found until then is kept.
set -u
cd "$(dirname "$0")/.."
OUT=$(realpath -m "${OUT:-build/device}")
ARCH=${ARCH:-sm_90a}
PACK=$(realpath -m "${PACK:-runner/paddock_runner/_packs/libpaddock_cuda_${ARCH/_/}.so}")
STAGE_LIMIT=${STAGE_LIMIT:-0}
END=$((${STAGE_LIMIT%.*} > 0 ? SECONDS + ${STAGE_LIMIT%.*} - 6 : 0))
FILES=${FILES:-/dev/shm/paddock-bench}
JOBS=${JOBS:-14}
export PYTHONPATH=runner:manager:.:${PYTHONPATH:-} PYTHONUNBUFFERED=1 PADDOCK_BENCH_OUT=$OUT/boards
mkdir -p "$OUT/boards"
SERVED=(--device cuda --kernel-pack "$PACK" --guesses off)

is_over() { [ $END -gt 0 ] && [ $((END - SECONDS)) -lt 4 ]; }

# limited NAME SECONDS LINES COMMAND...: its log as OUT/NAME.log, the last lines shown.
limited() {
    local name=$1 limit=$2 lines=$3 start=$SECONDS rc
    shift 3
    if is_over; then echo "== $name: no time left"; return; fi
    if [ $END -gt 0 ] && [ $((END - SECONDS)) -lt "$limit" ]; then limit=$((END - SECONDS)); fi
    timeout -k 3 -s INT "$limit" "$@" >"$OUT/$name.log" 2>&1
    rc=$?
    tail -n "$lines" "$OUT/$name.log" | cut -c1-400
    echo "== $name: rc $rc, $((SECONDS - start)) s of $limit"
}

# Minutes of load that a soak has until the end: it starts in three seconds and is left alone for five.
minutes() { python3 -c "print(round(max(0.3, ($END - $SECONDS - 16) / 60), 2) if $END else 1.2)"; }

# made SIZE FORMAT NAME: a checkpoint with made-up weights, once.
made() { [ -e "$FILES/$3/model.safetensors" ] || is_over || python3 -m bench.synthetic "$1" "$2" "$FILES/$3"; }

models() { limited "$1" "$2" 40 python3 -m bench.gpu_models "$PACK" --out "$OUT/boards" --topic "$1" "${@:3}"; }
kernels() { limited "$1" "$2" 70 python3 -m bench.gpu_kernels "$PACK" --out "$OUT/boards" --topic "$1" "${@:3}"; }
cells() { limited "serve_$1" 70 12 python3 -m bench.gpu_cells --pack "$PACK" --out "$OUT/boards/$1" --formats "$1" --folder "$FILES" --cells 128/128c32x128 128/128c1x4 128/128c8x32 128/128c32x128 128/128c128x384 128/128c128x1280 2048/128c32x96; }
long() { limited "$1" "$2" 12 python3 -m bench.longprefill 8b.bf16 --pack "$PACK" --machine h200 "${@:3}"; }
twin() { PADDOCK_BENCH_OUT=$OUT/boards/twin.$1 limited "twin_$1" 60 12 python3 -m bench.twin "8b.$1" --pack "$PACK" --cells 128/128c32 128/128c128 2048/128c32 --rounds 2 --machine h200; }
sanitized() { limited "$1" 200 12 compute-sanitizer --tool "$1" --error-exitcode 9 python3 -m bench.gpu_check "$PACK" --small; }

ops() {
    # pytest-benchmark, where it is installed, breaks xdist: plugins are named.
    PADDOCK_TEST_PACK=$PACK PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 limited ops 160 1 python3 -m pytest -p xdist -p pytest_timeout tests/kernels -p no:cacheprovider -v --tb=short \
        -n "$JOBS" -k "not avx512 and not amx" -o addopts="--strict-markers -m 'not slow'"
    grep -E "^(FAILED|ERROR)|\] (FAILED|ERROR)" "$OUT/ops.log" | cut -c1-230 | sort -u | tail -60
    echo "ops: $(grep -c '\] PASSED' "$OUT/ops.log") passed, $(grep -c '\] SKIPPED' "$OUT/ops.log") skipped, $(grep -c '\] FAILED' "$OUT/ops.log") failed"
}

step() {
    case $1 in
        build) limited build 600 3 python3 packs/cuda/build.py "$ARCH" --jobs "$(nproc)" --lenient ;;
        ops) ops ;;
        check) limited check 200 40 python3 -m bench.gpu_check "$PACK" ;;
        memory) sanitized memcheck ;;
        race) sanitized racecheck ;;
        kernels) kernels kernels 280 ${KERNELS:-} ;;
        layers) limited layers 280 60 python3 -m bench.gpu_layers "$PACK" --out "$OUT" ${LAYERS:-} ;;
        models) models models 280 ${MODELS:-} ;;
        whole) models whole 110 --batches 1 8 16 32 128 --lengths 2048 8192 ;;
        32b) models 32b 90 --models 32b --batches 1 --lengths 2048 ;;
        products) kernels products 100 --only bf16.m8 bf16.m16 bf16.m32 fp8_e4m3.m2048 q4_k.m16 q4_k.m32 fp8_e4m3.m16 q8_0.m16 bf16.m256 bf16.m2048 q8_0.m2048 q4_k.m2048 ;;
        attention) kernels attention 30 --only attn ;;
        hybrids) limited hybrids 80 14 python3 -m bench.gpu_hybrids "$PACK" --out "$OUT/boards" ;;
        steps) limited steps 60 60 python3 -m bench.gpu_steps "$PACK" ${STEPS:-} ;;
        serve_bf16) cells bf16 ;;
        serve_fp8) cells fp8 ;;
        twin) twin fp8 ;;
        twin_bf16) twin bf16 ;;
        long) long long 60 --streams 16 --prompt 65000 --rounds 1 --share 0 0.636 ;;
        guests) long guests 60 --guests ${GUESTS:-128 512 2048} --rounds "${ROUNDS:-3}" ;;
        aside) long aside 40 --prompt 48000 --beside 200 1000 ;;
        start) made 8b fp8 8b-fp8 && limited start 40 30 python3 -m bench.gpu_serve "$FILES/8b-fp8" 8b.fp8 --out "$OUT/boards" --pack "$PACK" --options --max-ctx 8448 --max-batch 128 ;;
        gaps) made 8b fp8 8b-fp8 && limited gaps 60 30 python3 -m bench.gpu_serve "$FILES/8b-fp8" 8b.fp8 --out "$OUT/boards" --pack "$PACK" --gaps --options --max-ctx 8448 --max-batch 128 ;;
        agents) made 0.6b bf16 s06 && limited agents 40 4 python3 -m bench.agents "$FILES/s06" --pack "$PACK" --machine h200 ;;
        tiers) made 8b fp8 8b-fp8 && mkdir -p "$OUT/tmp" && limited tiers 60 6 python3 -m bench.tiers "$FILES/8b-fp8" --pack "$PACK" --tokens 100000 --disk-tokens 2048 --rounds 1 --folder "$OUT/tmp" --machine h200; rm -rf "$OUT/tmp" ;;
        killed) made 0.6b bf16 s06 && limited killed 80 14 python3 -m bench.killed "$FILES/s06" --kills "${KILLS:-8}" --life 1.0 --streams 16 --prompts 200 --in 512 --vocab 150000 --disk-gib 4 --host-gib 0.1 --machine h200 --options "${SERVED[@]}" --max-ctx 4096 --max-batch 16 ;;
        company) limited company 60 20 python3 -m bench.company "$PACK" --models 0.6b.bf16 8b.fp8 8b.q4_k_m 30b-a3b.fp8 --machine h200 ;;
        soak) made 8b fp8 8b-fp8 && limited soak 600 30 python3 -m bench.soak "$FILES/8b-fp8" --minutes "${MINUTES:-$(minutes)}" --every 5 --streams 128 --abort 0.2 --vocab 150000 --idle 5 --machine h200 --options "${SERVED[@]}" --max-ctx 4096 --max-batch 128 ;;
        fit) limited fit 70 50 python3 -m bench.fit_matrix --pack "$PACK" --gpu 0 --out "$OUT/boards" --seconds "${FIT_S:-52}" --only 8b.bf16 8b.fp8 8b.q4_k_m 27b-hybrid.fp8 ${FIT:---ctx 4096 32768 --batch 1 32} ;;
        m) step ops ;;
        s0) for s in whole serve_bf16 32b attention products long twin_bf16; do step $s; done ;;
        s1) for s in serve_fp8 gaps guests twin agents fit hybrids; do step $s; done ;;
        s2) # Nothing is timed in these two.
            step killed & step company
            wait
            step tiers
            step soak ;;
        *) echo "no such step: $1" ;;
    esac
}

for name in "$@"; do step "$name"; done
