"""An E2B program that wants out: internet access, allow and deny lists, and their change while it runs. Its word is an address."""

import sys
import time

import e2b
from e2b import Sandbox

URL = sys.argv[1]
HOST = URL.split("/")[2].split(":")[0]


def reaches(sbx):
    """Without access there may be no proxy at all."""
    done = sbx.commands.run(f"curl -sS --max-time 60 {URL}/hi 2>&1 || true")
    return done.stdout == "got /hi"


def main():
    with Sandbox.create(timeout=300) as sbx:
        assert reaches(sbx)
        assert sbx.get_info().allow_internet_access is True
        sbx.update_network({"allow_internet_access": False})
        assert not reaches(sbx)
        assert sbx.get_info().allow_internet_access is False
        sbx.update_network({"deny_out": [f"{HOST}/32"]})
        assert not reaches(sbx)
        sbx.update_network({"allow_out": [HOST], "deny_out": lambda ctx: [ctx.all_traffic]})
        assert reaches(sbx)
        sbx.update_network({})
        assert reaches(sbx)
        sbx.pause()
        assert reaches(Sandbox.connect(sbx.sandbox_id, timeout=300))
    with Sandbox.create(timeout=300, allow_internet_access=False) as sbx:
        assert not reaches(sbx)
        assert sbx.get_info().allow_internet_access is False
    with Sandbox.create(timeout=300, network={"deny_out": ["0.0.0.0/0"], "allow_out": [HOST, "*.example.com"]}) as sbx:
        assert reaches(sbx)
        assert sbx.get_info().network["allow_out"] == [HOST, "*.example.com"]
    named = URL.replace(HOST, "localhost")
    with Sandbox.create(timeout=300, network={"deny_out": ["localhost", "*.example.com"]}) as sbx:
        said = "EGRESS_DENIED"
        assert said in sbx.commands.run(f"curl -sS --noproxy '' --max-time 60 {named} 2>&1").stdout
        assert said in sbx.commands.run("curl -sS --max-time 60 http://www.example.com/ 2>&1").stdout
        assert reaches(sbx)
        sbx.update_network({"deny_out": ["other.example"]})
        assert said not in sbx.commands.run(f"curl -sS --noproxy '' --max-time 60 {named} 2>&1 || true").stdout
    for wrong in ("*", "a b", "example.com/8"):
        try:
            Sandbox.create(timeout=300, network={"deny_out": [wrong]})
        except e2b.SandboxException:
            continue
        raise AssertionError(f"{wrong!r} was taken")


began = time.monotonic()
main()
print(f"{time.monotonic() - began:.1f} s")
