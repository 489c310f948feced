#!/usr/bin/env bash
# Starts Ray over several nodes: the head on the machine it runs on, then a worker on every other one over ssh.
#
#     MASTER_ADDR=10.0.0.1 examples/android_world/multi_node_ray_start.sh 10.0.0.2 10.0.0.3     # --dry-run prints the commands
#
# Afterwards: SLIME_SCRIPT_EXTERNAL_RAY=1 SLIME_SCRIPT_NUM_NODES=3 examples/android_world/run_android_world.sh
# If none are named, the nodes are read from the file HOSTFILE (/root/mpi_rack_hostfile), the first word of each line.
# MASTER_ADDR: the address under which they reach this node (its network's). SLIME_SCRIPT_NUM_GPUS: GPUs of each node
# (8). RAY_PORT: the head's port (6379). Ray must be on each node's PATH, in the same version; the workers' shell gets
# no other environment.
set -euo pipefail

usage() { sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
fail() { echo "multi_node_ray_start: $1" >&2; exit 2; }

dry_run=0
nodes=()
for argument in "$@"; do
  case "$argument" in
    --dry-run) dry_run=1 ;;
    --help | -h) usage; exit 0 ;;
    -*) fail "there is no option $argument" ;;
    *) nodes+=("$argument") ;;
  esac
done

gpus="${SLIME_SCRIPT_NUM_GPUS:-8}"
port="${RAY_PORT:-6379}"
[[ "$gpus" =~ ^[0-9]+$ ]] || fail "SLIME_SCRIPT_NUM_GPUS is '$gpus': say a number"
[[ "$port" =~ ^[0-9]+$ ]] || fail "RAY_PORT is '$port': say a number"
master="${MASTER_ADDR:-$(hostname -I 2>/dev/null | awk '{print $1}')}"
case "$master" in
  "" | localhost | 127.* | ::1 | 0.0.0.0 | ::)
    fail "say in MASTER_ADDR under which address the other nodes reach this one, not '$master'" ;;
esac
hostfile="${HOSTFILE:-/root/mpi_rack_hostfile}"
if (( ${#nodes[@]} == 0 )) && [[ -r "$hostfile" ]]; then
  while read -r node _; do
    [[ -z "$node" || "$node" == "$master" || "$node" == "$(hostname)" ]] || nodes+=("$node")
  done < "$hostfile"
fi
(( ${#nodes[@]} > 0 )) || fail "name the other nodes, here or in HOSTFILE; a single one needs run_android_world.sh alone"

run() {
  printf '%q ' "$@"
  printf '\n'
  if (( ! dry_run )); then "$@"; fi
}

run ray start --head --node-ip-address "$master" --port "$port" --num-gpus "$gpus" \
  --dashboard-host 0.0.0.0 --disable-usage-stats
failed=()
for node in "${nodes[@]}"; do
  run ssh -o BatchMode=yes "$node" \
    "ray start --address $master:$port --node-ip-address $node --num-gpus $gpus --disable-usage-stats" \
    || failed+=("$node")
done
(( ${#failed[@]} == 0 )) || fail "these nodes did not join: ${failed[*]}; the head runs on (end it with: ray stop)"
