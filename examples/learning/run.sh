#!/usr/bin/env bash
# Runs the full form on a machine with one GPU, torch and numpy, in about 8 minutes. Rows appear in OUT as they come.
#
#   examples/learning/run.sh DATA.npz OUT_FOLDER
#
# The package's library, python/cinch/lib/libcinch.so.0, must have kernels. Tasks that are small train on host memory in
# the background, each in a process of its own; textures and characters train on the GPU, the most important first.
# LEARNING_COMMIT names the commit where git does not. TOTAL is the limit of all parts on the GPU, in seconds.
set -uo pipefail
cd "$(dirname "$0")/../.."
data=$1 out=$2
export CUDA_DEVICE_MAX_CONNECTIONS=32 OPENBLAS_NUM_THREADS=2 OMP_NUM_THREADS=4 PYTHONUNBUFFERED=1
run=(python3 examples/learning/run.py --full "$data")

background=()
for parts in diabetes,ratings digits half,weights,split; do
    timeout -k 5 "${TOTAL:-470}" "${run[@]}" --parts "$parts" --limit 200 --out "$out/host-${parts%%,*}.jsonl" \
        >"$out/host-${parts%%,*}.log" 2>&1 &
    background+=($!)
done

# Averages on the GPU must err as those on host memory do before anything trains there. If not, the networks train on the
# GPU, and their gradients are averaged in host memory, which is slower.
mode=--gpu
if ! timeout -k 5 90 python3 examples/learning/gpu_check.py >"$out/check.log" 2>&1; then
    mode="--gpu --host-averages"
fi
tail -n 3 "$out/check.log"

# gpu SECONDS NAME ARGUMENT...: one part on the GPU within its limit.
gpu() {
    local limit=$1 name=$2 left=$((${TOTAL:-470} - SECONDS))
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
gpu 30 profile --parts profile
gpu 75 mlp --parts textures-mlp --cases close
gpu 90 conv --parts textures-conv --cases close
gpu 140 characters --parts characters --cases close --steps "${STEPS:-800}"
gpu 50 mlp-few --parts textures-mlp --cases few
gpu 60 conv-few --parts textures-conv --cases few
gpu 60 characters-few --parts characters --cases few --steps "${STEPS:-800}"
wait "${background[@]}"
for log in "$out"/host-*.log; do tail -n 3 "$log"; done
