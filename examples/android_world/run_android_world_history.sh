#!/usr/bin/env bash
# Trains Android World, each turn a prompt and a training row of its own.
# --dry-run prints the exact commands; --help lists the environment variables; what follows -- goes to slime.
set -euo pipefail
here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
exec python3 "$here/../../tools/launch_training.py" android_world_history "$@"
