#!/bin/sh
# Two servers behind one address: two_models_behind_proxy.sh [MODEL] [OTHER]
# PORT is the proxy's; the servers take the next two. All three end with this script.
set -eu
port=${PORT:-8080}
proxy=http://127.0.0.1:$port
first=http://127.0.0.1:$((port + 1))
second=http://127.0.0.1:$((port + 2))

wait_for() {
    curl --silent --fail --output /dev/null --retry 120 --retry-delay 1 --retry-all-errors "$1/health"
}

pids=
trap 'kill $pids; wait' EXIT
lmkit serve "${1:-demo}" --served-model-name first --port $((port + 1)) &
pids="$pids $!"
lmkit serve "${2:-demo}" --served-model-name second --port $((port + 2)) &
pids="$pids $!"
wait_for "$first"
wait_for "$second"

lmkit proxy --port "$port" --node "$first" --node "$second" &
pids="$pids $!"
wait_for "$proxy"

for model in first second; do
    lmkit chat "$proxy" --model "$model" --temperature 0 --prompt 'Write a Python function `size`: Return the size.'
done
lmkit proxy status --proxy "$proxy"
