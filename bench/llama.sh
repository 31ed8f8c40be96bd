#!/bin/bash
# llama.cpp as a peer on a GPU machine that has neither its build nor the minutes for one.
# Usage: bench/llama.sh make FOLDER    here, without a GPU: five minutes of two cores, FOLDER/llama.txz of 9 MB. Needs npm, CUDA's ptxas, cuobjdump and fatbinary, g++
#        bench/llama.sh run FOLDER     there: OUT/8b.FORMAT.jsonl for bench.boards --peer 8b.FORMAT=FILE --llama NAME. About 75 s; needs CUDA 13's cudart and cuBLAS
# The libraries are those of the package node-llama-cpp for CUDA 13, in which this machine's architecture is PTX; its sources, for the two benchmarks, are the bundle in
# node-llama-cpp itself. ARCH, FORMATS, NPL, REPEATS, LAYERS (fewer, to try whether it starts), STAGE_LIMIT (seconds) may be set.
set -eu
top=$(realpath "$(dirname "$0")/..")
mkdir -p "$2"
folder=$(realpath "$2")
LIBRARIES="libllama-common.so libllama.cuda* libggml.cuda* libggml-base.so libggml-cpu-x64.so libggml-cpu-haswell.so libggml-cpu-icelake.so libggml-cpu-sapphirerapids.so"

make_it() {
    cd "$folder"
    npm pack --silent node-llama-cpp@"${VERSION:-3.22.1}" @node-llama-cpp/linux-x64-cuda@"${VERSION:-3.22.1}"
    rm -rf source package libraries packed && mkdir libraries packed
    tar xzf node-llama-cpp-linux-x64-cuda-*.tgz -C libraries --strip-components=3
    tar xzf node-llama-cpp-[0-9]*.tgz package/llama/gitRelease.bundle package/llama/llama.cpp.info.json
    git clone -q package/llama/gitRelease.bundle source
    local flags="-O3 -DNDEBUG -std=c++17 -w -DLLAMA_SUBPROCESS -DLLAMA_SHARED -DGGML_SHARED -DGGML_BACKEND_SHARED -s" tool
    for tool in llama-bench batched-bench; do
        (cd source && g++ $flags -I include -I ggml/include -I common -I vendor -I src tools/$tool/*.cpp -o "../packed/llama-${tool#llama-}" ../libraries/libllama-common.so \
            ../libraries/libllama.cuda* ../libraries/libggml.cuda* ../libraries/libggml-base.so -lpthread -Wl,--allow-shlib-undefined '-Wl,-rpath,$ORIGIN')
    done
    (cd "$top" && PYTHONPATH=.:${PYTHONPATH:-} python3 -m bench.fatbins "$folder/libraries/libggml-cuda.so" "$folder/packed/libggml-cuda.so" --work "$folder/ptx" --to "${ARCH:-sm_90}")
    (cd libraries && cp $LIBRARIES ../packed/)
    (cd packed && tar cf - -- * | xz -6 >../llama.txz)
    cat package/llama/llama.cpp.info.json
    ls -l llama.txz
}

# part NAME FORMAT COMMAND...: its lines of JSON to OUT/8b.FORMAT.jsonl.
part() {
    local name=$1 format=$2 left=$((end - SECONDS)) rc=0
    shift 2
    if [ $left -lt 4 ]; then echo "$name $format: no time left"; return; fi
    timeout -k 1 "$left" "$@" >"$OUT/$name.$format.log" 2>"$OUT/$name.$format.err" || rc=$?
    grep '^{' "$OUT/$name.$format.log" >>"$OUT/8b.$format.jsonl" || tail -n 5 "$OUT/$name.$format.err" | cut -c1-300
    echo "[$SECONDS] $name $format: rc $rc"
}

run_it() {
    local end=$((SECONDS + ${STAGE_LIMIT:-80} - 4)) formats=${FORMATS:-bf16 q8_0 q4_k_m} format files=/dev/shm programs=/tmp/llama
    OUT=$(realpath -m "${OUT:-build/device}")
    [ "$(df --output=avail -BG /dev/shm | tail -1 | tr -dc 0-9)" -gt 34 ] || files=/tmp
    files=$files/llama-files
    mkdir -p "$OUT" $programs $files
    cd "$top"
    export PYTHONPATH=runner:manager:.:${PYTHONPATH:-}
    for format in $formats; do python3 -m bench.llama_file "$format" "$files/$format.gguf" ${LAYERS:+--layers "$LAYERS"} & done
    [ -e $programs/llama-bench ] || tar xJf "$folder/llama.txz" -C $programs
    LD_LIBRARY_PATH=$programs:$(dirname "$(find $(python3 -c 'import nvidia; print(*nvidia.__path__)') /usr/local/cuda*/ -name libcublas.so.13 | head -1)"):/usr/local/cuda/lib64
    export LD_LIBRARY_PATH
    for format in $formats; do
        while [ ! -e "$files/$format.gguf" ] && [ $SECONDS -lt $end ]; do sleep 0.1; done
        rm -f "$OUT/8b.$format.jsonl"
        part bench "$format" $programs/llama-bench -m "$files/$format.gguf" -ngl 99 -fa 1 -p 2048,8192 -n 128 -b 2048 -ub 2048 -r "${REPEATS:-2}" -o jsonl
        part batched "$format" $programs/llama-batched-bench -m "$files/$format.gguf" -ngl 99 -fa on -c 24576 -b 2048 -ub 2048 -npp 128 -ntg 64 -npl "${NPL:-1,8,32,128}" --output-format jsonl
        cut -c1-20000 "$OUT/8b.$format.jsonl" | grep -oE '"(n_prompt|n_gen|avg_ts|pl|speed_pp|speed_tg)": [0-9.]+' | tr '\n' ' '
        echo
        rm -f "$files/$format.gguf"
    done
    wait
    rm -rf "$files"
}

case $1 in
    make) make_it ;;
    run) run_it ;;
    *) echo "no such step: $1" >&2; exit 2 ;;
esac
