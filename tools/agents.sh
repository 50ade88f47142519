#!/usr/bin/env bash
# The agents' own programs for the tests, from the package registry by name and pinned version. Idempotent.
#   agents.sh            claude, qwen and codex
#   agents.sh all        all six
#   agents.sh NAME...    these
# Each lands in .build/agents/NAME as an npm prefix (bin/, lib/node_modules/), complete or not there at all.
set -euo pipefail
cd "$(dirname "$0")/.."
package() {
  case $1 in
    claude) echo @anthropic-ai/claude-code@2.1.197 ;;
    codex) echo @openai/codex@0.166.0 ;;
    gemini) echo @google/gemini-cli@0.61.0 ;;
    qwen) echo @qwen-code/qwen-code@0.15.10 ;;
    kimi) echo node@22.23.3 @moonshot-ai/kimi-code@2.1.0 ;;
    opencode) echo opencode-ai@1.18.33 ;;
    *) echo "agents: unknown agent $1" >&2; return 2 ;;
  esac
}
names=("$@")
[ ${#names[@]} -gt 0 ] || names=(claude qwen codex)
[ "${names[0]}" != all ] || names=(claude qwen codex gemini kimi opencode)
mkdir -p .build/agents
exec 9>.build/agents/lock
flock 9
for name in "${names[@]}"; do
  wanted=$(package "$name")
  into=.build/agents/$name
  [ "$(cat "$into/package" 2>/dev/null)" != "$wanted" ] || continue
  echo "agents: installing $wanted" >&2
  rm -rf "$into" "$into.making"
  if npm install -g --prefix "$into.making" --no-audit --no-fund --loglevel=error $wanted >".build/agents/$name.log" 2>&1; then
    echo "$wanted" > "$into.making/package"
    mv "$into.making" "$into"
  else
    rm -rf "$into.making"
    echo "agents: could not install $wanted (costs: its tests); see .build/agents/$name.log" >&2
    exit 1
  fi
done
