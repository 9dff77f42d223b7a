#!/bin/bash
# Trains the clients of a node by HTTP, with a program that knows nothing of this package:
# bash train.sh STATE_DIR TABLE [ADDRESS]; ends when it is interrupted.
set -euo pipefail
state_dir=$1 table=$2 address=${3:-http://127.0.0.1:8765}
here=$(dirname "$0") work=$(mktemp -d)
token=$(cat "$state_dir/project/token")
trap 'rm -r "$work"' EXIT
ask() { curl --silent --show-error --fail-with-body --header "Authorization: Bearer $token" "$@"; }

while sleep 0.5; do
  now=$(ask "$address/project")
  round=$(jq .current_round <<< "$now")
  for link in $(jq '.datalinks[]' <<< "$now"); do
    ask "$address/model?round=$round" --output "$work/model.safetensors"
    scores=$(python "$here/train_numpy.py" "$work/model.safetensors" "$table" "$link" \
      "$work/trained.safetensors")
    ask --data "{\"scores\": $scores, \"round\": $round, \"datalink\": $link}" "$address/scores"
    # An update that comes too late is refused; the next round is another chance.
    ask --upload-file "$work/trained.safetensors" \
      "$address/update?round=$round&datalink=$link" || true
    echo
  done
done
