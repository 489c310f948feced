#!/usr/bin/env bash
# The same as scripts/run_android_world_opt.sh, where guides look for it.
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/run_android_world_opt.sh" "$@"
