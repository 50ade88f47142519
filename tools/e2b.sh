#!/bin/sh
# E2B's own SDKs, the judges of our E2B server, each in a folder of its own below .build/e2b. Does nothing when they are there.
set -eu
cd "$(dirname "$0")/.."
into=.build/e2b
python=${PYTHON:-.venv/bin/python}
mkdir -p "$into"
exec 9>"$into/lock"
flock 9

python_sdk() { # folder, requirement
    [ -e "$into/$1/ready" ] && return
    rm -rf "${into:?}/$1"
    "$python" -m venv "$into/$1"
    "$into/$1/bin/pip" install --quiet --disable-pip-version-check "$2" >>"$into/install.log" 2>&1 || {
        echo "$2 could not be installed: see $into/install.log" >&2
        exit 1
    }
    touch "$into/$1/ready"
}

js_sdk() { # folder, package
    [ -e "$into/$1/ready" ] && return
    rm -rf "${into:?}/$1"
    mkdir -p "$into/$1"
    echo '{"private": true}' >"$into/$1/package.json"
    (cd "$into/$1" && npm install --silent --no-audit --no-fund "$2") >>"$into/install.log" 2>&1 || {
        echo "$2 could not be installed (npm and node 20 are needed): see $into/install.log" >&2
        exit 1
    }
    touch "$into/$1/ready"
}

python_sdk old "e2b==2.45.1"
python_sdk new "e2b"
js_sdk js-old "e2b@2.45.0"
js_sdk js-new "e2b"
