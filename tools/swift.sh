#!/bin/bash
# A real S3-compatible server for the tests: OpenStack Swift with its s3api, from PyPI, one node, no root.
#   swift.sh install ENV        a virtual environment with swift in ENV
#   swift.sh run ENV DATA       serve in the foreground until standard input ends; the endpoint is the first line printed
#   swift.sh start ENV DATA     the same in the background; prints the endpoint when it answers
#   swift.sh stop DATA          end what start began
# Ports are picked by the kernel, so any number may run at once. Path style, region us-east-1.
# Keys: test:tester / testing (may do all), test:reader / reading (may only read what a bucket's owner allows).
# DATA must lie on a file system with extended attributes.
set -euo pipefail

usage() { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }

serve() {
  exec "$1/bin/python" -W ignore - "$2" 3<&0 <<'PY'
import os, sys, time
from swift.common.utils import eventlet_monkey_patch
eventlet_monkey_patch()
import eventlet, eventlet.wsgi
from swift.common.ring import RingBuilder
from swift.common.http_protocol import SwiftHttpProtocol

data = os.path.realpath(sys.argv[1])
etc = os.path.join(data, "etc")
for folder in ("etc", "disks/d1", "cache"):
    os.makedirs(os.path.join(data, folder), exist_ok=True)

def write(name, text):
    with open(os.path.join(etc, name), "w") as file:
        file.write(text)

write("swift.conf", "[swift-hash]\nswift_hash_path_prefix = sandkeep\nswift_hash_path_suffix = sandkeep\n"
      "[storage-policy:0]\nname = one\ndefault = yes\n")
import swift.common.utils.config, swift.common.storage_policy
os.environ["SWIFT_TEST_CONFIG"] = etc
swift.common.utils.config.SWIFT_CONF_FILE = os.path.join(etc, "swift.conf")
swift.common.utils.SWIFT_CONF_FILE = os.path.join(etc, "swift.conf")
swift.common.storage_policy.SWIFT_CONF_FILE = os.path.join(etc, "swift.conf")
swift.common.storage_policy.reload_storage_policies()
from swift.common.wsgi import loadapp

common = f"[DEFAULT]\nswift_dir = {etc}\ndevices = {data}/disks\nmount_check = false\nlog_level = ERROR\ndb_preallocation = off\n"
sockets = {}
for name in ("account", "container", "object"):
    sockets[name] = eventlet.listen(("127.0.0.1", 0), backlog=512)
    port = sockets[name].getsockname()[1]
    ring = RingBuilder(4, 1, 0)
    ring.add_dev({"id": 0, "region": 1, "zone": 1, "ip": "127.0.0.1", "port": port, "device": "d1", "weight": 1,
                  "replication_ip": "127.0.0.1", "replication_port": port, "meta": ""})
    ring.rebalance()
    ring.get_ring().save(os.path.join(etc, f"{name}.ring.gz"))
    write(f"{name}.conf", f"{common}bind_ip = 127.0.0.1\nbind_port = {port}\n[pipeline:main]\npipeline = {name}-server\n"
          f"[app:{name}-server]\nuse = egg:swift#{name}\nfallocate_reserve = 0\n")
filters = "catch_errors gatekeeper healthcheck listing_formats bulk s3api tempauth copy slo dlo".split()
options = {"s3api": "s3_acl = false\nlocation = us-east-1\nallow_multipart_uploads = true\ncors_preflight_allow_origin =\n",
           "tempauth": "user_test_tester = testing .admin\nuser_test_reader = reading\n"}
sockets["proxy"] = eventlet.listen(("127.0.0.1", 0), backlog=512)
port = sockets["proxy"].getsockname()[1]
write("proxy.conf", f"{common}bind_ip = 127.0.0.1\nbind_port = {port}\n[pipeline:main]\npipeline = {' '.join(filters)} proxy-server\n"
      "[app:proxy-server]\nuse = egg:swift#proxy\naccount_autocreate = true\nnode_timeout = 120\nconn_timeout = 30\nrecoverable_node_timeout = 120\n"
      + "".join(f"[filter:{name}]\nuse = egg:swift#{name}\n{options.get(name, '')}" for name in filters))

class Quiet:
    def write(self, text): pass
    def flush(self): pass
    def info(self, *args): pass
    debug = warning = error = exception = info

for name, socket in sockets.items():
    app = loadapp(os.path.join(etc, f"{name}.conf"), global_conf={"log_name": name})
    eventlet.spawn(eventlet.wsgi.server, socket, app, log=Quiet(), debug=False, protocol=SwiftHttpProtocol, max_size=256, keepalive=True)
print(f"http://127.0.0.1:{port}", flush=True)
from eventlet import tpool
while tpool.execute(os.read, 3, 4096):
    pass
os._exit(0)
PY
}

case ${1:-} in
install)
  [ $# = 2 ] || usage
  [ -x "$2/bin/swift-proxy-server" ] || { python3 -m venv "$2" && "$2/bin/pip" install -q --disable-pip-version-check swift==2.38.3; } ;;
run)
  [ $# = 3 ] || usage
  mkdir -p "$3"; serve "$2" "$3" ;;
start)
  [ $# = 3 ] || usage
  mkdir -p "$3"; rm -f "$3/endpoint" "$3/input"; mkfifo "$3/input"
  setsid bash -c 'exec sleep infinity' > "$3/input" < /dev/null 2>/dev/null & holder=$!
  setsid "$0" run "$2" "$3" < "$3/input" > "$3/endpoint" 2> "$3/log" & server=$!
  echo "$holder $server" > "$3/pids"
  for _ in $(seq 600); do
    endpoint=$(cat "$3/endpoint"); [ -z "$endpoint" ] || { echo "$endpoint"; exit 0; }
    kill -0 $server 2>/dev/null || break
    sleep .1
  done
  "$0" stop "$3"; echo "swift did not come up: see $3/log" >&2; exit 1 ;;
stop)
  [ $# = 2 ] || usage
  [ -e "$2/pids" ] || exit 0
  read -r holder server < "$2/pids"
  kill "$holder" "$server" 2>/dev/null || true
  rm -f "$2/pids" "$2/input" ;;
*) usage ;;
esac
