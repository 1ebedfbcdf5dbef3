#!/bin/sh
# What one GPU has to show beside speed, in one go: exactness, a CPU run replayed, kills and a device fault, the update's peak,
# ablations under a budget. Results lie in OUT as they come: NAME.txt, figures.jsonl, status.txt, update.json, ablations/.
#   sh benchmarks/gpu/prove.sh BUNDLE OUT [--device cpu] [PART...]
# BUNDLE as in run.sh. Parts, in this order: exact prompts replay kills kills-vllm update ablations (all of them by default), and on
# demand kills-time-slice. $ROLLPLEX_LIMIT_S bounds the whole (default 540 s): what has no time left is skipped, so give a call few
# parts. $ROLLPLEX_HOST_GIB (110): what slabs may take of the host in `ablations`, which needs 93. --device cpu tries what a CPU
# can do.
set -eu
[ $# -ge 2 ] || { sed -n '2,9s/^# //p' "$0" >&2; exit 2; }
bundle=$1 out=$2 device=cuda
shift 2
[ "${1:-}" = --device ] && { device=$2; shift 2; }
parts=${*:-exact prompts replay kills kills-vllm update ablations}
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/benchmarks/gpu/environment.sh"
. "$root/benchmarks/gpu/parts.sh"
export ROLLPLEX_FIGURES="$out/figures.jsonl"
cd "$root"
tests="$python -m pytest -rA -p no:cacheprovider"

if [ "$device" = cpu ]; then
    export OMP_NUM_THREADS=1 ROLLPLEX_TRY_ON_CPU=1
    job="--shape tiny --prompt-tokens 160 --groups 2 --samples 2 --response-tokens 6 --max-response-tokens 12 --iterations 2"
    wanted exact && part exact 120 $tests -m "not gpu" tests/gpu/test_gpu_exactness.py
    wanted replay && part replay 300 $tests -m "not gpu" tests/gpu/test_gpu_replay.py
    wanted kills && part kills 500 $tests -m "not gpu" tests/gpu/test_gpu_mesh.py
    wanted update && part update 60 "$python" benchmarks/kernels/update_peak.py --device cpu --parameters 3000000 9000000 --chunk-elements 300000 --out "$out/update.json"
    wanted ablations && part ablations 300 "$python" benchmarks/gpu/ablations.py --device cpu $job --kl-coef 0.04 --work "$work" --out "$out/ablations"
    exit 0
fi

gpu="$tests -m gpu"
wanted exact && part exact 200 $gpu tests/gpu/test_gpu_exactness.py
wanted prompts && part prompts 120 $gpu tests/gpu/test_gpu_vllm_prompts.py
wanted replay && part replay 240 $gpu tests/gpu/test_gpu_replay.py
wanted kills && part kills 540 $gpu tests/gpu/test_gpu_mesh.py -k cuda-torch-mps
wanted kills-vllm && part kills-vllm 540 $gpu tests/gpu/test_gpu_mesh.py -k cuda-vllm
wanted kills-time-slice && part kills-time-slice 300 $gpu tests/gpu/test_gpu_mesh.py -k cuda-torch-time-slice
wanted update && part update 200 "$python" benchmarks/kernels/update_peak.py --out "$out/update.json"
wanted ablations && part ablations 520 "$python" benchmarks/gpu/ablations.py --shape 3b --groups 16 --samples 8 --iterations 2 --kl-coef 0.04 --host-gib "${ROLLPLEX_HOST_GIB:-110}" --work "$work" --out "$out/ablations"
exit 0
