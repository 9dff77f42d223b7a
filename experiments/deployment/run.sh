#!/bin/bash
# Runs a federation of four participants on this machine, and its simulation beside it:
# bash experiments/deployment/run.sh OUTPUT
# Two nodes train by themselves, one by PyTorch, of the interpreter TORCH_PYTHON, and one by curl.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" && cd "$1"
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FEDJAX_DP_DATA=$PWD/data
python "$here/prepare.py" data
(cd data && fedjax-dp run "$here/federation.toml" --output ../simulated --quiet)
fedjax-dp export flower "$here/federation.toml" app --output "$PWD/federated" --quiet

trap 'kill $(jobs -p) 2> /dev/null; wait' EXIT
export FLWR_HOME=$PWD/app/.flwr
flower-superlink --insecure --disable-runtime-dependency-installation > link.log 2>&1 &
until curl --silent --fail http://127.0.0.1:8000/health > health.log; do sleep 0.5; done
training=(package package script script)
mkdir -p states-2 states-3
for node in 0 1 2 3; do
  config="clients=\"$((25 * node))-$((25 * node + 24))\" data=\"$PWD/data/node-$node.csv\""
  config+=" state-dir=\"$PWD/states-$node\" training=\"${training[node]}\" scores=\"exact\""
  flower-supernode --insecure --superlink 127.0.0.1:8000 --port $((9094 + node)) \
    --node-config "$config" > "node-$node.log" 2>&1 &
done
"${TORCH_PYTHON:-python}" "$here/train_torch.py" states-2 data/node-2.csv > torch.log 2>&1 &
fedjax-dp gateway --state-dir states-3 > gateway.log 2>&1 &
until [ -s states-3/project/token ]; do sleep 0.5; done
bash "$here/train.sh" states-3 data/node-3.csv > curl.log 2>&1 &
bash "$here/refusals.sh" states-3 > refusals.log 2>&1 &

SECONDS=0
flwr run app --stream --run-config 'own-data=true scores="exact"' > run.log 2>&1
echo "$SECONDS seconds"
jq --raw-output '"round \(.round): \(.nodes_replied) of \(.nodes_asked) nodes replied"' \
  federated/metrics.jsonl
jq --raw-output '"\(input_filename): accuracy \(.test_accuracy), ε \(.epsilon)"' \
  simulated/summary.json federated/summary.json
cat refusals.log
