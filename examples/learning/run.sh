#!/usr/bin/env bash
# Runs the full form on a machine with one GPU, torch and numpy, in about 12 minutes. Rows appear in OUT as they come.
#
#   examples/learning/run.sh DATA.npz OUT_FOLDER [STAGE...]
#
# The package's library, python/cinch/lib/libcinch.so.0, must have kernels. Tasks that are small train on host memory in
# the background, each in a process of its own; textures and characters train on the GPU, the most important first.
# Stages are named below; by default all run but those that only add seeds. LEARNING_COMMIT names the commit where git
# does not. TOTAL is the limit of all stages on the GPU, in seconds.
set -uo pipefail
cd "$(dirname "$0")/../.."
data=$1 out=$2
shift 2
stages=("$@")
[ $# -gt 0 ] || stages=(host profile mlp conv calm characters mlp-few conv-few characters-few)
total=${TOTAL:-720}
export CUDA_DEVICE_MAX_CONNECTIONS=32 OPENBLAS_NUM_THREADS=2 OMP_NUM_THREADS=4 PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
run=("$python" examples/learning/run.py --full "$data")

background=()
# on_host PARTS: tasks in the background.
on_host() {
    timeout -k 5 "$total" "${run[@]}" --parts "$1" --limit 200 --out "$out/host-${1%%,*}.jsonl" \
        >"$out/host-${1%%,*}.log" 2>&1 &
    background+=($!)
}

# gpu SECONDS NAME ARGUMENT...: one part on the GPU within its limit.
gpu() {
    local limit=$1 name=$2 left=$((total - SECONDS))
    shift 2
    [ "$limit" -le "$left" ] || limit=$left
    if [ "$limit" -lt 30 ]; then
        echo "left out, no time: $name"
        return
    fi
    # shellcheck disable=SC2086 # words of one command
    timeout -k 5 "$limit" "${run[@]}" $mode --out "$out/gpu-$name.jsonl" --limit $((limit - 15)) "$@" \
        >"$out/gpu-$name.log" 2>&1
    tail -n 40 "$out/gpu-$name.log"
}

# text SECONDS NAME ARGUMENT...: the transformer.
text() {
    gpu "$1" "$2" --parts characters --steps "${STEPS:-800}" "${@:3}"
}

# Averages on the GPU must err as those on host memory do before anything trains there. If not, the networks train on the
# GPU, and their gradients are averaged in host memory, which is slower.
mode=--gpu
if ! timeout -k 5 90 "$python" examples/learning/gpu_check.py >"$out/check.log" 2>&1; then
    mode="--gpu --host-averages"
fi
tail -n 3 "$out/check.log"

few="onebit, with feedback;terngrad;terngrad, with feedback;threshold2:tau=0.01, with feedback"
half="dynamic8, planted: half scale"
for stage in "${stages[@]}"; do
    case $stage in
        host) for parts in diabetes,ratings digits half,weights,split; do on_host "$parts"; done ;;
        profile) gpu 30 profile --parts profile ;;
        mlp) gpu 75 mlp --parts textures-mlp --cases close ;;
        mlp-few) gpu 50 mlp-few --parts textures-mlp --cases few ;;
        conv) gpu 90 conv --parts textures-conv --cases close ;;
        conv-few) gpu 60 conv-few --parts textures-conv --cases few ;;
        calm)
            # Blocks of seeds, as cases.CALM states them.
            for first in 1 21 41; do
                gpu 70 "calm-$first" --parts textures-conv --cases calm --first-seed "$first"
            done
            ;;
        conv-4bits)
            # Blocks of seeds, as cases.py states them.
            for block in 21:60 81:60 141:60 201:60 261:60 321:60 381:60 441:60 {501..1851..150}:150; do
                gpu 90 "conv-4bits-${block%:*}" --parts textures-conv --cases few --only "minmax4, with feedback" \
                    --rate 1 --first-seed "${block%:*}" --seeds "${block#*:}"
            done
            ;;
        characters) text 140 characters --cases close ;;
        characters-few) text 60 characters-few --cases few ;;
        # The rest of the codecs of few bits, with the whole rate and a fifth of it.
        characters-rest) text 150 characters-rest --cases few --only "$few" --rate 1 ;;
        characters-slow) text 150 characters-slow --cases few --only "$few" --rate 0.2 ;;
        # More seeds where five leave a power below 0.8: the first stage brings ten, the second fifteen to the planted scale.
        characters-10) text 90 characters-10 --only "$half;minmax4, with feedback" --rate 1 --first-seed 6 ;;
        characters-15) text 70 characters-15 --only "$half" --rate 1 --first-seed 11 ;;
        *)
            echo "run.sh: unknown stage $stage" >&2
            exit 2
            ;;
    esac
done
[ ${#background[@]} = 0 ] || wait "${background[@]}"
for log in "$out"/host-*.log; do
    [ ! -e "$log" ] || tail -n 3 "$log"
done
