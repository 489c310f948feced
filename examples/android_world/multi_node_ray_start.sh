#!/usr/bin/env bash
# The same as scripts/multi_node_ray_start.sh, where guides look for it.
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/multi_node_ray_start.sh" "$@"
