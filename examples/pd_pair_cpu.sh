#!/usr/bin/env bash
# What it shows: prefill and decode in two servers on one machine without a GPU. The KV cache travels from one process to
# the other through NIXL. The prefill server runs temporal disaggregation, the decode server runs stock scheduling. The
# function `ask` does what a load balancer does for each request.
#
#   make setup && bash examples/pd_pair_cpu.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-.venv/bin/python}
PREFILL_PORT=${PREFILL_PORT:-30000}
DECODE_PORT=${DECODE_PORT:-30001}
BOOTSTRAP_PORT=${BOOTSTRAP_PORT:-30100} # where the decode server asks the prefill server how to reach its KV cache
LOGS=$(mktemp -d "${TMPDIR:-/tmp}/pla_pd_pair.XXXXXX")
MODEL=$("$PYTHON" -c 'from pla_sglang.plugin.demo import demo_model_path; print(demo_model_path())')
COMMON=(--model-path "$MODEL" --device cpu --host 127.0.0.1 --disaggregation-transfer-backend nixl)
SERVERS=()

call() { curl --silent --show-error --fail --noproxy '*' "$@"; } # the environment may name a proxy for the outside world

stop() {
    local server
    for server in "${SERVERS[@]}"; do kill "$server" 2>/dev/null || true; done
    for server in "${SERVERS[@]}"; do
        for _ in $(seq 50); do kill -0 "$server" 2>/dev/null && sleep 0.2 || break; done
        kill -KILL -- "-$server" 2>/dev/null || true # whatever is left of its process group
    done
}
trap stop EXIT

setsid "$PYTHON" -m pla_sglang.launch_server "${COMMON[@]}" --port "$PREFILL_PORT" --disaggregation-mode prefill \
    --disaggregation-bootstrap-port "$BOOTSTRAP_PORT" --chunked-prefill-size 512 \
    --prefill-disagg temporal >"$LOGS/prefill.log" 2>&1 &
SERVERS+=($!) && disown # or the shell reports their end
setsid "$PYTHON" -m sglang.launch_server "${COMMON[@]}" --port "$DECODE_PORT" --disaggregation-mode decode \
    >"$LOGS/decode.log" 2>&1 &
SERVERS+=($!) && disown # or the shell reports their end

wait_ready() { # port, process id, log
    until call "http://127.0.0.1:$1/health" >/dev/null 2>&1; do
        kill -0 "$2" 2>/dev/null || { tail -n 30 "$3" && exit 1; }
        sleep 1
    done
}

echo "starting two servers (logs: $LOGS)"
wait_ready "$PREFILL_PORT" "${SERVERS[0]}" "$LOGS/prefill.log"
wait_ready "$DECODE_PORT" "${SERVERS[1]}" "$LOGS/decode.log"

ROOM=0

# One request, as a load balancer sends it: the same body to both servers at the same time, with a room number that no
# other request uses. The prefill server computes the prompt and sends its KV cache; the decode server answers. These
# three fields name hosts to connect to, so only a load balancer may set them, never a client.
ask() { # prompt (no quotes in it)
    local body room prefill
    ROOM=$((ROOM + 1))
    room="\"bootstrap_host\": \"127.0.0.1\", \"bootstrap_port\": $BOOTSTRAP_PORT, \"bootstrap_room\": $ROOM"
    body="{\"model\": \"default\", \"messages\": [{\"role\": \"user\", \"content\": \"$1\"}], \"max_tokens\": 24,"
    body+=" \"temperature\": 0, $room}"
    call -H 'Content-Type: application/json' --data "$body" --output /dev/null \
        "http://127.0.0.1:$PREFILL_PORT/v1/chat/completions" &
    prefill=$!
    call -H 'Content-Type: application/json' --data "$body" "http://127.0.0.1:$DECODE_PORT/v1/chat/completions" |
        "$PYTHON" -c 'import json, sys; print("answer:", json.load(sys.stdin)["choices"][0]["message"]["content"])'
    wait "$prefill"
}

ask "What is a list?"
ask "What does a dictionary do?"
ask "$(for _ in $(seq 400); do printf 'A list is a sequence. '; done)What is a list?" # several chunks of 512 tokens

echo "passes of the prefill server, by action and reason:"
call "http://127.0.0.1:$PREFILL_PORT/pla/state" |
    "$PYTHON" -c 'import json, sys; print(" ", json.load(sys.stdin)["schedulers"][0]["decisions"])'
