#!/usr/bin/env bash
# The same as scripts/cleanup.sh, where guides look for it.
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/cleanup.sh" "$@"
