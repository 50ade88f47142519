#!/usr/bin/env bash
# Every test, in parallel. What fails there runs once more alone, and is named: a test that only fails beside others on a
# busy machine is a finding, not a red build; a test that fails twice is. All temporary files of the run lie in one folder;
# at the end, whatever still runs or is mounted there was left behind.
set -uo pipefail
cd "$(dirname "$0")/.."
TMPDIR=$(mktemp -d /tmp/sk-run-XXXXXX)
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
chmod 755 "$TMPDIR"
run() { .venv/bin/python -m pytest "$@"; }
rm -rf .build/pytest
run -n "${JOBS:-4}" --dist worksteal --max-worker-restart 2
code=$?
if [ "$code" = 1 ]; then
  echo "test: what failed beside others runs again alone"
  run --last-failed --last-failed-no-failures none -v
  code=$?
fi
[ "$code" = 0 ] || exit "$code"
tools/js.sh || { echo "test: the JavaScript tests run again"; tools/js.sh; } || exit 1
.venv/bin/python tools/leftovers.py "$(basename "$TMPDIR")"
