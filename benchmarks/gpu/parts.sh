# Sourced, after environment.sh, with $out: parts of one go, each with a limit, whose results are there as soon as they are known.
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONWARNINGS=ignore NCCL_DEBUG=${NCCL_DEBUG:-WARN}
work=${ROLLPLEX_WORK:-${TMPDIR:-/tmp}/rollplex-bench-data}
# Of this go alone, short, since sockets lie in it: meshes that are found there are ours to end.
TMPDIR=$(mktemp -d "${TMPDIR:-/tmp}/rg.XXXXXX")
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
began=$(date +%s)
total=${ROLLPLEX_LIMIT_S:-540}

left() { echo $((total - ($(date +%s) - began))); }

# part NAME LIMIT_S COMMAND...: its output is in OUT/NAME.txt, a line on how it ended in OUT/status.txt. Never fails.
part() {
    name=$1 limit=$2
    shift 2
    [ "$(left)" -lt "$limit" ] && limit=$(left)
    if [ "$limit" -lt 15 ]; then
        echo "$name: no time left" | tee -a "$out/status.txt"
        return 0
    fi
    started=$(date +%s)
    echo "##### $name, at most $limit s: $*"
    grep MemTotal /proc/meminfo
    status=0
    timeout -k 30 "$limit" "$@" >"$out/$name.txt" 2>&1 || status=$?
    echo "$name: status $status after $(($(date +%s) - started)) s of $limit" | tee -a "$out/status.txt"
    tail -"${LINES_KEPT:-25}" "$out/$name.txt" | cut -c1-400
    reap
}

# Ends the mesh of a part that was cut off, so that it does not disturb the next one: its supervisor's number is in its own
# runtime directory, inside this go's. Its logs are kept.
reap() {
    for file in "$TMPDIR"/rpb-*/*/supervisord.pid; do
        [ -e "$file" ] || continue
        pid=$(cat "$file")
        cp -r "$(dirname "$file")/logs" "$out/$name-cut-off" 2>/dev/null || true
        kill -TERM "$pid" 2>/dev/null && echo "a mesh was left behind: supervisor $pid ends"
        for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
            kill -0 "$pid" 2>/dev/null || break
            sleep 1
        done
        rm -rf "$(dirname "$(dirname "$file")")"
    done
}

# bench NAME LIMIT_S OPTIONS...: into OUT/NAME/; bench.json is written after every arm. Data are made once a shape.
bench() {
    name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$python" -m rollplex_client.cli bench --device "$device" --work "$work" --out "$out/$name" "$@"
}

# Whether a part is wanted.
wanted() { case " $parts " in *" $1 "*) return 0 ;; esac; return 1; }
