#!/usr/bin/env bash
# The JavaScript client: install what its tests need, check its types, build it, and test it against a real server, in Node
# and in Chromium.
#   js.sh install   only the node packages
#   js.sh           all of it
set -euo pipefail
cd "$(dirname "$0")/../clients/js"

if ! command -v node >/dev/null || [ "$(node -p 'process.versions.node.split(".")[0]')" -lt 20 ]; then
  echo "js: Node 20 or newer is needed: apt-get install nodejs npm, or a newer release of Node" >&2
  exit 1
fi
mark=node_modules/.installed
sum=$(sha256sum package.json | cut -d' ' -f1)
if [ "$(cat "$mark" 2>/dev/null)" != "$sum" ]; then
  npm install --no-audit --no-fund --no-package-lock --loglevel=error
  echo "$sum" > "$mark"
fi
if ! ldconfig -p | grep libnss3.so >/dev/null; then
  echo "js: the tests in Chromium need libnss3: apt-get install libnss3" >&2
fi
[ "${1:-}" = install ] || npm test --silent
