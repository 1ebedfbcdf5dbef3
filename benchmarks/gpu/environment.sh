# Sourced, with $bundle and $root: what rollplex needs on a node without a network, from a source tree. Nothing is installed.
python=${PYTHON:-python3}
site=${ROLLPLEX_SITE:-${TMPDIR:-/tmp}/rollplex-site}
if [ "$bundle" != - ]; then
    # The stamp comes last: half of a bundle is unpacked again.
    [ -e "$site/.unpacked" ] || { sh "$bundle/unpack.sh" "$bundle" "$site" >/dev/null && : >"$site/.unpacked"; }
    PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$root/services:$root/protos/gen:$root${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 TOKENIZERS_PARALLELISM=false
export PYTHONUNBUFFERED=1
