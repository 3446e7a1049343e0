#!/bin/sh
# Quantize a model, then serve it: quantize_and_serve.sh MODEL FOLDER [OPTIONS OF QUANTIZE]
# An interrupted run goes on where it stopped. A FOLDER that is done is served at once.
set -eu
model=${1:-demo}
folder=${2:-demo-awq}
[ $# -lt 2 ] || shift 2
if [ ! -e "$folder/config.json" ]; then
    lmkit quantize "$model" -o "$folder" --kv-bits 8 "$@"
fi
lmkit inspect "$folder"
exec lmkit serve "$folder" --port "${PORT:-8000}"
