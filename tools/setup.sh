#!/usr/bin/env bash
# All set-up, idempotent: quick and silent when everything is there, clear about what could not be had and what that costs.
#   setup.sh           .venv with sandkeep, runc, runsc, uidmap
#   setup.sh --tests   also what the tests need
#   setup.sh --bench   also the peers that the bench compares with
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-}
mkdir -p .build
exec 9>.build/setup.lock
flock 9

say() { printf 'setup: %s\n' "$*" >&2; }
have() { command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || [ -x "/sbin/$1" ]; }

if [ "$(id -u)" = 0 ]; then sudo=""; elif sudo -n true 2>/dev/null; then sudo="sudo -n"; else sudo="no"; fi

updated=""
update() { [ -n "$updated" ] || { $sudo apt-get update -qq >.build/apt.log 2>&1 || true; updated=1; }; }

# packages COST NAME... : install Debian packages; without rights say what that costs
packages() {
  local cost=$1; shift
  if [ "$sudo" = no ]; then say "not installed: $* ($cost); an administrator can: apt-get install $*"; return 0; fi
  say "installing $*"
  update
  if ! DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "$@" >>.build/apt.log 2>&1; then
    say "could not install $* ($cost); see .build/apt.log"
  fi
}

need() { # need COMMAND PACKAGE COST
  have "$1" || packages "$3" "$2"
}

# runsc of 2024 or newer. Debian 12 has one of 2022, which is too old: take the next suite's, a static binary.
runsc_release() { "$1" --version 2>/dev/null | grep -oE '20[0-9]{6}' | head -n 1; }
get_runsc() {
  local found; found=$(command -v runsc || true)
  [ -n "$found" ] || { [ -x .build/bin/runsc ] && found=.build/bin/runsc; }
  if [ -n "$found" ] && [ "$(runsc_release "$found" || echo 0)" -ge 20240101 ] 2>/dev/null; then return 0; fi
  local uri; uri=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2>/dev/null |
    grep -oE 'https?://[^ ]+/debian/?( |$)' | head -n 1 | tr -d ' ') || true
  if [ -z "$uri" ]; then say "no runsc: no Debian mirror is configured (costs: the gVisor runtime and saved memory)"; return 0; fi
  say "fetching runsc of the next suite"
  local work=.build/runsc; rm -rf "$work"; mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
  local here; here=$(cd "$work" && pwd)
  printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s trixie main\n' "$uri" > "$here/sources.list"
  local options=(-o "Dir::Etc::sourcelist=$here/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$here/lists"
    -o "Dir::Cache=$here/cache" -o APT::Sandbox::User=root -o Debug::NoLocking=1)
  if (cd "$here" && apt-get "${options[@]}" update -qq && apt-get "${options[@]}" download -qq runsc) >>.build/apt.log 2>&1 &&
    dpkg -x "$here"/runsc_*.deb "$here/unpacked"; then
    mkdir -p .build/bin
    if [ "$sudo" = no ]; then install -m 755 "$here/unpacked/usr/bin/runsc" .build/bin/runsc
    else $sudo install -m 755 "$here/unpacked/usr/bin/runsc" /usr/local/bin/runsc; fi
  else
    say "could not fetch runsc (costs: the gVisor runtime and saved memory); see .build/apt.log"
  fi
  rm -rf "$work"
}

# venv EXTRAS... : the environment, made again when constraints or project change
venv() {
  local mark=.build/venv.$1 sum
  sum=$(cat pyproject.toml constraints.txt "$0" | sha256sum | cut -d' ' -f1)
  if [ -x .venv/bin/python ] && [ "$(cat "$mark" 2>/dev/null)" = "$sum" ]; then return 0; fi
  say "making .venv ($1)"
  if [ ! -x .venv/bin/python ]; then
    python3 -m venv .venv 2>.build/venv.log || { packages "no environment" python3-venv; python3 -m venv .venv; }
  fi
  .venv/bin/pip install -q --disable-pip-version-check -c constraints.txt -e ".$2" >.build/pip.log 2>&1 || { cat .build/pip.log >&2; return 1; }
  echo "$sum" > "$mark"
}

need runc runc "costs: the default runtime"
need newuidmap uidmap "costs: more than one user id in sandboxes of ordinary users"
get_runsc
case $what in
  "") venv base "[langgraph,server,client]" ;;
  --tests)
    need crun crun "costs: tests of crun"
    need sudo sudo "costs: sudo inside sandboxes"
    need ip iproute2 "costs: tests of networks"
    need setfattr attr "costs: tests of attributes"
    [ -x /usr/lib/postgresql/15/bin/postgres ] || ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || packages "costs: tests on PostgreSQL" postgresql
    venv tests "[langgraph,server,client,dev]"
    need npm npm "costs: tests of agents and of the JavaScript client"
    tools/agents.sh
    tools/e2b.sh
    ldconfig -p | grep -q libnss3.so || packages "costs: tests in Chromium" libnss3
    tools/js.sh install >.build/js.log 2>&1 || { cat .build/js.log >&2; exit 1; }
    tools/swift.sh install .build/swift >.build/swift.log 2>&1 || { cat .build/swift.log >&2; exit 1; } ;;
  --bench)
    for tool in restic:restic borg:borgbackup casync:casync zstd:zstd git:git; do need "${tool%%:*}" "${tool##*:}" "costs: a row of the table"; done
    venv bench "[langgraph,server,client,dev]" ;;
  *) say "unknown option $what"; exit 2 ;;
esac
