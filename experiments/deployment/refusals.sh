#!/bin/bash
# Sends updates that are refused, while train.sh takes part in a round, and prints the answers:
# bash refusals.sh STATE_DIR [ADDRESS]
set -euo pipefail
state_dir=$1 address=${2:-http://127.0.0.1:8765}
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
token=$(cat "$state_dir/project/token")
ask() { curl --silent --header "Authorization: Bearer $token" "$@"; }
links() { ask "$address/project" | jq ".datalinks[]"; }
send() { # NAME FILE ROUND LINK [TOKEN]
  curl --silent --header "Authorization: Bearer ${5:-$token}" --upload-file "$2" \
    --write-out " %{http_code} $1\n" "$address/update?round=$3&datalink=$4"
}

until ask --fail "$address/model?round=0" --output "$work/model"; do sleep 0.2; done
head --bytes=-3 "$work/model" > "$work/truncated"
python - "$work" << 'END'
import sys

import numpy as np
from safetensors.numpy import load_file, save_file

model = load_file(f"{sys.argv[1]}/model")
name = min(model)
for wrong, array in {"nan": model[name] * np.nan, "shape": model[name][:-1]}.items():
    save_file(model | {name: array}, f"{sys.argv[1]}/{wrong}")
END

is_time='.current_round > 0 and (.datalinks | length) > 2'
until [ "$(ask "$address/project" | jq "$is_time")" = true ]; do sleep 0.1; done
round=$(ask "$address/project" | jq .current_round)
first=$(links | head -n 1) last=$(links | tail -n 1)
send "another token" "$work/model" "$round" "$last" another
send "a truncated file" "$work/truncated" "$round" "$last"
send "NaN" "$work/nan" "$round" "$last"
send "another shape" "$work/shape" "$round" "$last"
send "an old round" "$work/model" 0 "$last"
while links | grep --quiet --line-regexp "$first"; do sleep 0.1; done
send "a second update" "$work/model" "$round" "$first"
