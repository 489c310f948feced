#!/usr/bin/env bash
# Trains Android World on several nodes with large GPUs (two nodes, eight tensor ranks).
# --dry-run prints the exact commands; --help lists the environment variables; what follows -- goes to slime.
set -euo pipefail
here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
exec python3 "$here/../../tools/launch_training.py" android_world_opt "$@"
