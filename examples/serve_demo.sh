#!/usr/bin/env bash
# What it shows: on one machine without a GPU, three short prompts arrive while two long ones are being prefilled. With
# temporal disaggregation the short ones answer first, and /pla/state says how often a long was parked, and why.
#
#   make setup && bash examples/serve_demo.sh
#   PORT=30001 MODE=off bash examples/serve_demo.sh          # the same on stock scheduling
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-.venv/bin/python}
PORT=${PORT:-30000}
MODE=${MODE:-temporal}
URL=http://127.0.0.1:$PORT
LOG=$(mktemp "${TMPDIR:-/tmp}/pla_serve_demo.XXXXXX.log")
BODIES=$(mktemp -d)

call() { curl --silent --show-error --fail --noproxy '*' "$@"; } # the environment may name a proxy for the outside world

stop() {
    kill "$SERVER" 2>/dev/null || true
    for _ in $(seq 50); do kill -0 "$SERVER" 2>/dev/null && sleep 0.2 || break; done
    kill -KILL -- "-$SERVER" 2>/dev/null || true # whatever is left of its process group
    rm -rf "$BODIES"
}

# Without --model-path the launcher serves the demo model. Small chunks, so that a long prompt has several.
setsid "$PYTHON" -m pla_sglang.launch_server --device cpu --port "$PORT" --prefill-disagg "$MODE" \
    --chunked-prefill-size 1024 --disable-overlap-schedule >"$LOG" 2>&1 &
SERVER=$! && disown # or the shell reports its end
trap stop EXIT

echo "starting (log: $LOG)"
until call "$URL/health" >/dev/null 2>&1; do
    kill -0 "$SERVER" 2>/dev/null || { tail -n 30 "$LOG" && exit 1; }
    sleep 1
done

# Token ids instead of text, so that the lengths are exact. The ids are ordinary words of the demo model.
body() { # number of tokens, seed
    "$PYTHON" - "$1" "$2" <<'PY'
import json, random, sys

rng = random.Random(int(sys.argv[2]))
prompt = [rng.randrange(300, 2000) for _ in range(int(sys.argv[1]))]
print(json.dumps({"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}))
PY
}

body 6000 1 >"$BODIES/long-1"
body 6000 2 >"$BODIES/long-2"
for seed in 1 2 3; do body 40 "$seed" >"$BODIES/short-$seed"; done

ask() { # name: send the request and say how long its first (and only) token took
    call --output /dev/null --write-out "$1: %{time_total} s\n" \
        -H 'Content-Type: application/json' --data "@$BODIES/$1" "$URL/generate"
}

ask long-1 &
LONG_1=$!
ask long-2 &
LONG_2=$!
sleep 0.3
for seed in 1 2 3; do ask "short-$seed"; done
wait "$LONG_1" "$LONG_2"

if [[ $MODE == temporal ]]; then
    echo "passes by action and reason:"
    call "$URL/pla/state" | "$PYTHON" -c '
import json, sys
state = json.load(sys.stdin)["schedulers"][0]
for name, count in sorted(state["decisions"].items()):
    print(f"  {name:24}{count}")
print("parks:", state["parks"], " mixed batches:", state["mixed_batches"], " boundary:", state["boundary_tokens"], "tokens")'
fi
