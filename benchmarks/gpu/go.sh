#!/bin/sh
# For a go that lasts longer than a node's commands may: it runs in a session of its own, and calls wait for it.
#   sh benchmarks/gpu/go.sh DIR SECONDS COMMAND...    # begins it, in a copy of this tree at DIR/tree, and waits SECONDS at most
#   sh benchmarks/gpu/go.sh DIR SECONDS               # waits on, from the next call
# DIR/log is its output, whose last lines every call prints; DIR/ended its exit status, which the call that sees the end has too.
# A call that does not see it has 75; 1 where the go was killed.
set -eu
[ $# -ge 2 ] || { sed -n '2,6s/^# //p' "$0" >&2; exit 2; }
mkdir -p "$1"
dir=$(cd "$1" && pwd) seconds=$2
shift 2
root=$(cd "$(dirname "$0")/../.." && pwd)
until=$(($(date +%s) + seconds))
if [ $# -gt 0 ]; then
    [ ! -e "$dir/begun" ] || { echo "$dir: a go was begun there" >&2; exit 2; }
    # Half of a copy is made again.
    rm -rf "$dir/tree"
    cp -R "$root" "$dir/tree"
    # What writes the end belongs to that session: a node may end everything else when this call returns.
    (cd "$dir/tree" && exec setsid sh -c 'dir=$1; shift; echo $$ >"$dir/beginning"; mv "$dir/beginning" "$dir/begun"
        "$@"; echo $? >"$dir/ending"; mv "$dir/ending" "$dir/ended"' go "$dir" "$@") >"$dir/log" 2>&1 </dev/null &
    starting=$!
    while [ ! -e "$dir/begun" ]; do
        kill -0 $starting 2>/dev/null || [ -e "$dir/begun" ] || { cat "$dir/log" >&2; exit 2; }
        sleep 0.1
    done
fi
[ -e "$dir/begun" ] || { echo "$dir: no go was begun there" >&2; exit 2; }
runs() { kill -0 "$(cat "$dir/begun")" 2>/dev/null; }
while [ ! -e "$dir/ended" ] && [ "$(date +%s)" -lt "$until" ] && runs; do sleep 1; done
alive=true
runs || alive=false
tail -"${LINES_KEPT:-25}" "$dir/log"
# In this order: what ends between the two looks is not taken for killed.
[ ! -e "$dir/ended" ] || exit "$(cat "$dir/ended")"
$alive || { echo "$dir: the go was killed" >&2; exit 1; }
exit 75
