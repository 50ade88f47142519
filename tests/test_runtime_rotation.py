"""Switching a living sandbox's root: writes land in the right top, mounts keep their flags, failure changes nothing."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from runtime_box import Box
from sandkeep.errors import RuntimeFailed
from sandkeep.model import Mount
from sandkeep.runtime.driver import DRIVERS, Driver


@pytest.fixture(params=["runc", "crun"])
def driver(request: pytest.FixtureRequest) -> Driver:
    return DRIVERS[request.param]


def files(folder: Path) -> set[str]:
    return {str(Path(top, name).relative_to(folder)) for top, _, names in os.walk(folder) for name in names}


def flags(box: Box) -> dict[str, tuple[str, ...]]:
    """Mount point to its flags and kind, as seen from inside; the overlay's own settings left out."""
    found = {}
    for line in box.sh("cat /proc/self/mountinfo").splitlines():
        left, right = line.split(" - ")
        found[left.split()[4]] = (left.split()[3], left.split()[5], right.split()[0])
    return found


def test_twenty_rotations_each_write_into_their_own_top(driver: Driver, tmp_path: Path) -> None:
    with Box(driver, tmp_path) as box:
        box.sh("echo 0 > /root/at-0; echo 0 > /usr/at-0; echo 0 > /tmp/same")
        shape, boot = flags(box), box.sh("cat /proc/sys/kernel/random/boot_id")
        tops = [box.plan.upper]
        for number in range(1, 21):
            frozen = files(tops[-1])
            driver.rotate(box.turn(number))
            tops.append(box.plan.upper)
            box.sh(f"echo {number} > /root/at-{number}; echo {number} > /usr/at-{number}; echo {number} > /tmp/same")
            assert files(tops[-1]) == {f"root/at-{number}", f"usr/at-{number}", "tmp/same"}
            assert files(tops[-2]) == frozen
        assert flags(box) == shape
        assert box.sh("cat /proc/sys/kernel/random/boot_id") == boot
        assert box.sh("cat /tmp/same; ls /root /usr | grep -c at-").split() == ["20", "42"]
        for number, top in enumerate(tops):
            assert (top / "tmp/same").read_text() == f"{number}\n"
        assert str(box.dir) not in Path("/proc/self/mountinfo").read_text()
        assert box.sh("cat /proc/self/mountinfo | wc -l") == str(len(shape))


def test_deletions_and_process_1_follow(driver: Driver, tmp_path: Path) -> None:
    with Box(driver, tmp_path) as box:
        box.sh("echo x > /usr/gone; mkdir /srv/full; echo x > /srv/full/inner")
        driver.rotate(box.turn(1))
        box.sh("rm -r /usr/gone /srv/full; mkdir /srv/full; rm /usr/bin/false")
        driver.rotate(box.turn(2))
        assert box.sh("ls -A /srv/full; ls /usr/gone /usr/bin/false 2>&1 | grep -c such") == "2"
        assert box.sh("readlink /proc/1/root /proc/1/cwd").split() == ["/", "/"]
        assert box.sh("stat -c %d:%i / /proc/1/root/. | uniq | wc -l") == "1"


def test_goes_back_to_an_earlier_stack(driver: Driver, tmp_path: Path) -> None:
    with Box(driver, tmp_path) as box:
        box.sh("echo first > /root/a")
        first = box.turn(1)
        driver.rotate(first)
        box.sh("echo second > /root/a; echo b > /usr/b")
        driver.rotate(replace(first, upper=box.dir / "again", work=box.dir / "again-work"))
        assert box.sh("cat /root/a; ls /usr/b 2>&1 | grep -c such").split() == ["first", "1"]


def test_mounts_of_the_user_come_along(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "shown").mkdir()
    (tmp_path / "file").write_text("text")
    mounts = [
        Mount(str(tmp_path / "shown"), "/data/fixed"),
        Mount(str(tmp_path / "shown"), "/usr/share/shown", readonly=False),
        Mount(str(tmp_path / "file"), "/home/user/a file"),
    ]
    with Box(driver, tmp_path / "home", mounts=mounts) as box:
        shape = flags(box)
        # A stack in which the mount points were never made.
        driver.rotate(replace(box.plan, layers=[], upper=box.dir / "upper1", work=box.dir / "work1"))
        assert flags(box) == shape
        box.fails("touch /data/fixed/x")
        box.sh("touch /usr/share/shown/x; test \"$(cat '/home/user/a file')\" = text")
    assert (tmp_path / "shown/x").exists()


def test_a_failed_rotation_changes_nothing(driver: Driver, tmp_path: Path) -> None:
    with Box(driver, tmp_path) as box:
        box.sh("echo a > /root/a")
        shape = flags(box)
        with pytest.raises(RuntimeFailed):
            driver.rotate(replace(box.plan, layers=[tmp_path / "missing"], upper=box.dir / "u", work=box.dir / "w"))
        hostile = tmp_path / "hostile"
        (hostile / "usr").mkdir(parents=True)
        (hostile / ".sandkeep").symlink_to("/etc")
        with pytest.raises(RuntimeFailed):
            driver.rotate(replace(box.plan, layers=[hostile], upper=box.dir / "u2", work=box.dir / "w2"))
        assert flags(box) == shape
        box.sh("echo b > /root/b")
        assert (box.plan.upper / "root/b").exists()


def test_a_dead_sandbox_is_not_rotated(driver: Driver, tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailed, match="does not run"):
        driver.rotate(Box(driver, tmp_path).plan)


def test_a_volatile_top_starts_again_unless_the_host_went_down(driver: Driver, tmp_path: Path) -> None:
    box = Box(driver, tmp_path, volatile=True)
    with box:
        box.sh("echo kept > /root/a; echo kept > /usr/a")
    with box:
        assert box.sh("cat /root/a /usr/a").split() == ["kept", "kept"]
        driver.rotate(box.turn(1))
        assert box.sh("cat /root/a /usr/a").split() == ["kept", "kept"]
    (box.plan.work / "boot").write_text("another boot")
    with pytest.raises(RuntimeFailed, match="went down"):
        driver.start(box.plan)
