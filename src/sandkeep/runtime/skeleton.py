"""The made root of the `host` base: a small /etc and empty folders. /usr is the host's, added by an overlay.

Only what programs of /usr need is taken from the host's /etc, by an allow-list of public files; accounts, secrets,
keys, host names and network settings are made, never copied.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from sandkeep.model import HOME, WORKSPACE

_VERSION = "2"

_COPIED = (
    "alternatives",
    "bash.bashrc",
    "bash_completion.d",
    "ca-certificates",
    "ca-certificates.conf",
    "debian_version",
    "fonts",
    "gai.conf",
    "groff",
    "host.conf",
    "inputrc",
    "java-11-openjdk",
    "java-17-openjdk",
    "java-21-openjdk",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "libaudit.conf",
    "locale.alias",
    "localtime",
    "login.defs",
    "magic",
    "magic.mime",
    "mime.types",
    "nanorc",
    "networks",
    "os-release",
    "pam.conf",
    "pam.d",
    "perl",
    "protocols",
    "python3",
    "python3.10",
    "python3.11",
    "python3.12",
    "python3.13",
    "redhat-release",
    "rpc",
    "security",
    "services",
    "shells",
    "skel",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
    "vim",
    "xattr.conf",
)

_PASSWD = f"""root:x:0:0:root:/root:/bin/bash
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
bin:x:2:2:bin:/bin:/usr/sbin/nologin
sys:x:3:3:sys:/dev:/usr/sbin/nologin
man:x:6:12:man:/var/cache/man:/usr/sbin/nologin
mail:x:8:8:mail:/var/mail:/usr/sbin/nologin
www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin
_apt:x:42:65534::/nonexistent:/usr/sbin/nologin
user:x:1000:1000:user:{HOME}:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
_GROUP = """root:x:0:
daemon:x:1:
bin:x:2:
sys:x:3:
adm:x:4:
tty:x:5:
disk:x:6:
mail:x:8:
man:x:12:
kmem:x:15:
sudo:x:27:user
www-data:x:33:
shadow:x:42:
utmp:x:43:
staff:x:50:
users:x:100:
user:x:1000:
nogroup:x:65534:
"""
_MADE = {
    "passwd": _PASSWD,
    "group": _GROUP,
    "hostname": "sandbox\n",
    "hosts": "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n",
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\nprotocols: files\nservices: files\n",
    "profile": (
        "PATH=${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}\nexport PATH\n"
        '[ -n "$BASH_VERSION" ] && [ -n "$PS1" ] && [ -r /etc/bash.bashrc ] && . /etc/bash.bashrc\n'
        'for part in /etc/profile.d/*.sh; do [ -r "$part" ] && . "$part"; done\nunset part\n'
    ),
    # fqdn is on in Debian's sudo and would look the host's name up in the network.
    "sudoers": (
        "Defaults env_reset, !fqdn, !lecture\n"
        'Defaults secure_path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"\n'
        "root ALL=(ALL:ALL) ALL\nuser ALL=(ALL:ALL) NOPASSWD: ALL\n@includedir /etc/sudoers.d\n"
    ),
    "machine-id": "",
}
_PRIVATE = {
    "shadow": (0o640, "".join(f"{line.split(':')[0]}:*:19000:0:99999:7:::\n" for line in _PASSWD.splitlines())),
    "gshadow": (0o640, "".join(f"{line.split(':')[0]}:*::\n" for line in _GROUP.splitlines())),
}
_FOLDERS = (
    *("boot", "dev", "etc/profile.d", "home", "media", "mnt", "opt", "proc", "run", "run/lock", "srv", "sys", "usr"),
    *("var/cache", "var/lib", "var/log", "var/mail", "var/spool", ".sandkeep/run", ".sandkeep/guest"),
)
_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_SHADOW_GROUP, _USER = 42, 1000
_USR_DEPTH = 3


def version(ids: str) -> str:
    """Names a skeleton by what it is made of: this code, the host's copied files, and the ids that can own files."""
    digest = hashlib.sha256(f"{_VERSION}\0{ids}\0{_MADE}\0{_PRIVATE}\0{_FOLDERS}".encode())
    for name in _COPIED:
        try:
            found = os.lstat(f"/etc/{name}")
        except FileNotFoundError:
            continue
        digest.update(f"{name}\0{found.st_mtime_ns}\0{found.st_size}\0{found.st_ino}\0".encode())
    for name in _LINKS:
        if os.path.islink(f"/{name}"):
            digest.update(f"{name}\0{os.readlink(f'/{name}')}\0".encode())
    return digest.hexdigest()[:16]


def build(into: str, ids: str) -> None:
    """Fill the empty folder `into` for sandboxes whose ids are mapped as `ids` says."""
    root = Path(into)
    os.chmod(root, 0o755)
    for folder in _FOLDERS:
        (root / folder).mkdir(parents=True)
    for name in _LINKS:
        if os.path.islink(f"/{name}"):
            (root / name).symlink_to(os.readlink(f"/{name}"))
    if ids != "root":
        _open_usr(Path("/usr"), root / "usr", _USR_DEPTH)
    etc = root / "etc"
    for name in _COPIED:
        _copy(Path("/etc") / name, etc / name)
    for name, text in _MADE.items():
        (etc / name).write_text(text)
    (etc / "sudoers").chmod(0o440)
    (etc / "sudoers.d").mkdir(mode=0o750)
    (etc / "mtab").symlink_to("/proc/mounts")
    for name, (mode, text) in _PRIVATE.items():
        (etc / name).write_text(text)
        (etc / name).chmod(mode)
        _own(etc / name, 0, _SHADOW_GROUP)
    (root / "root").mkdir(mode=0o700)
    for folder in ("tmp", "var/tmp"):
        (root / folder).mkdir()
        (root / folder).chmod(0o1777)
    (root / "var/run").symlink_to("/run")
    (root / "var/lock").symlink_to("/run/lock")
    home = root / HOME.lstrip("/")
    workspace = root / WORKSPACE.lstrip("/")
    workspace.mkdir(parents=True)
    for file in sorted(Path("/etc/skel").glob(".*")):
        if file.is_file():
            shutil.copyfile(file, home / file.name)
    for path in (home, workspace, *home.iterdir()):
        _own(path, _USER, _USER)
    home.chmod(0o755)


def _open_usr(source: Path, target: Path, depth: int) -> None:
    """Folders of the host's /usr again, owned by root inside: an ordinary user can then add to them and delete in them."""
    for entry in _entries(source):
        if entry.is_dir(follow_symlinks=False) and os.access(entry.path, os.R_OK | os.X_OK):
            made = target / entry.name
            made.mkdir()
            made.chmod(entry.stat(follow_symlinks=False).st_mode & 0o0777)
            if depth > 1:
                _open_usr(Path(entry.path), made, depth - 1)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        return list(found)


def _copy(source: Path, target: Path) -> None:
    if not os.path.lexists(source):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(os.readlink(source))
    elif source.is_dir():
        target.mkdir(exist_ok=True)
        for entry in _entries(source):
            _copy(Path(entry.path), target / entry.name)
    elif source.is_file() and source.stat().st_mode & 0o004:
        shutil.copyfile(source, target)
        shutil.copymode(source, target)


def _own(path: Path, uid: int, gid: int) -> None:
    """Give a file away where the id exists here; a user namespace with one id can't, and all is root's inside."""
    try:
        os.lchown(path, uid, gid)
    except OSError:
        with open("/proc/self/uid_map") as ids:
            if sum(int(line.split()[2]) for line in ids) > max(uid, gid):
                raise
