"""What runs inside a sandbox for the model: makes edits, says how each ended, lists what the model knows. Stands alone."""

import contextlib
import errno
import hashlib
import json
import mmap
import os
import shutil
import stat
import sys

held = {}  # mappings by name, and the files that they show


def content(size, seed):
    return (hashlib.sha256(str(seed).encode()).digest() * (size // 32 + 1))[:size]


def regular(path):
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, path)


@contextlib.contextmanager
def opened(path, flags):
    if os.path.lexists(path):
        regular(path)
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        yield file
    finally:
        os.close(file)


def write(path, size, seed):
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
        os.write(file, content(size, seed))


def append(path, size, seed):
    with opened(path, os.O_WRONLY | os.O_APPEND) as file:
        os.write(file, content(size, seed))


def poke(path, at, size, seed):
    with opened(path, os.O_WRONLY) as file:
        os.pwrite(file, content(size, seed), at)


def cut(path, size):
    with opened(path, os.O_WRONLY) as file:
        os.ftruncate(file, size)


def paint(path, size, seed):
    """Through a shared mapping, never synced."""
    with opened(path, os.O_RDWR) as file, mmap.mmap(file, 0) as shared:
        shared[:size] = content(size, seed)[: len(shared)]


def hold(path, name):
    with opened(path, os.O_RDWR) as file:
        held[name] = mmap.mmap(file, 0), os.dup(file)


def let_go():
    for shared, file in held.values():
        shared.close()
        os.close(file)
    held.clear()


def repaint(name, size, seed):
    """As far as there is file still: beyond its end a touch would end us."""
    shared, file = held[name]
    size = min(size, len(shared), os.fstat(file).st_size)
    shared[:size] = content(size, seed)


def own(path, uid, gid, mode):
    os.chown(path, uid, gid, follow_symlinks=False)
    if not os.path.islink(path):
        os.chmod(path, mode)


def chmod(path, mode):
    if os.path.islink(path):
        raise OSError(errno.ELOOP, path)
    os.chmod(path, mode)


def mkdir(path, mode):
    os.mkdir(path)
    os.chmod(path, mode)


def remove(path):
    """The whole of it."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def tag(path, name, value):
    os.setxattr(path, name, value.encode(), follow_symlinks=False)


def untag(path, name):
    os.removexattr(path, name, follow_symlinks=False)


def date(path, at):
    os.utime(path, ns=(at, at), follow_symlinks=False)


VERBS = {
    "write": write, "append": append, "poke": poke, "cut": cut, "paint": paint, "hold": hold, "repaint": repaint,
    "own": own, "chmod": chmod, "mkdir": mkdir, "remove": remove, "tag": tag, "untag": untag, "date": date,
    "symlink": lambda path, target: os.symlink(target, path),
    "fifo": lambda path, mode: (os.mkfifo(path), os.chmod(path, mode)),
    "link": lambda path, other: os.link(other, path, follow_symlinks=False),
    "rename": lambda path, other: os.rename(other, path),
}  # fmt: skip


def edit(edits):
    """0 for each that was made, else its error number."""
    ended = []
    for verb, *arguments in edits:
        try:
            VERBS[verb](*arguments)
            ended.append(0)
        except OSError as error:
            ended.append(error.errno)
        except (KeyError, ValueError):
            ended.append(errno.EINVAL)
    return ended


def facts(path, info, whole=True):
    """Kind, mode, owner, group, attributes, contents, modification time, inode."""
    kind, body = "?", None
    if stat.S_ISREG(info.st_mode):
        kind = "file"
        data = b""
        if whole:
            with open(path, "rb") as file:
                data = file.read()
        body = body_of(data)
    elif stat.S_ISLNK(info.st_mode):
        kind, body = "symlink", os.readlink(path)
    elif stat.S_ISFIFO(info.st_mode):
        kind = "fifo"
    elif stat.S_ISDIR(info.st_mode):
        kind = "dir"
    tags = {
        name: os.getxattr(path, name, follow_symlinks=False).hex()
        for name in (os.listxattr(path, follow_symlinks=False) if whole else [])
        if name.startswith("user.") and not name.startswith("user.overlay.")
    }
    return [kind, stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, tags, body, info.st_mtime_ns, info.st_ino]


def body_of(data):
    return f"{len(data)}:{hashlib.sha256(data).hexdigest()[:16]}:{data[:8].hex()}"


def look(roots, alone, under=""):
    """Everything below the roots, and of the folders named `alone` their own facts; by path."""
    found, todo = {}, list(roots)
    while todo:
        path = todo.pop()
        try:
            info = os.lstat(under + path)
            found[path] = facts(under + path, info)
            if stat.S_ISDIR(info.st_mode):
                todo += [path + "/" + name for name in os.listdir(under + path)]
        except OSError as error:
            found[path] = [f"error {errno.errorcode.get(error.errno, error.errno)}", 0, 0, 0, {}, None, 0, 0]
    for path in alone:
        found[path] = facts(under + path, os.lstat(under + path), False)
    return found


def answer(request):
    before = look(request["roots"], request["alone"])
    ended = edit(request["edits"])
    after = look(request["roots"], request["alone"]) if request["edits"] else before
    return {"before": before, "ended": ended, "after": after}


def main():
    os.umask(0)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
