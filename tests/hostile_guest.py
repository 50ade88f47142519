"""A guest that has been taken over: honest until it is asked for a trick (a `file_stat` of `#trick:NAME`)."""

from __future__ import annotations

import shutil
from pathlib import Path

from sandkeep.runtime.link import guest_code, guest_source

MAIN = r"""
import json, os, struct, threading, time

from . import honest


def frame(kind, payload):
    return struct.pack("!IB", len(payload) + 1, kind) + payload


OK = frame(0, b'{"ok":true,"entry":{}}')


def for_ever(piece, pause=0.0):
    def play(sock):
        while True:
            sock.sendall(piece)
            time.sleep(pause)
    return play


def once(piece):
    def play(sock):
        sock.sendall(piece)
        time.sleep(1000)
    return play


def die(words):
    def play(sock):
        sock.sendall(words)
        os._exit(1)
    return play


TRICKS = {
    "empty parts": for_ever(frame(4, b"") * 20000),
    "many parts": for_ever(frame(4, b" ") * 20000),
    "large parts": for_ever(frame(4, b" " * (1 << 20))),
    "output": for_ever(frame(1, b"x" * (1 << 20))),
    "small output": for_ever(frame(2, b"x") * 50000),
    "data": for_ever(frame(3, b"x" * (1 << 20))),
    "events": for_ever(frame(0, b'{"event":1}') * 10000),
    "too long": once(struct.pack("!IB", 1 << 31, 0)),
    "no length": once(bytes(5)),
    "another kind": once(frame(9, b"x")),
    "no JSON": once(frame(0, b"nope")),
    "no object": once(frame(0, b"[]")),
    "depth": once(frame(0, b'{"ok":true,"entry":' + b"[" * 900 + b"]" * 900 + b"}")),
    "digits": once(frame(0, b'{"ok":true,"entry":' + b"9" * 4000 + b"}")),
    "endless": once(frame(0, b'{"ok":true,"entry":1e999}')),
    "no answer": once(b""),
    "half an answer": once(OK[:9]),
    "slowly": for_ever(b"\0", 0.05),
    "slow parts": for_ever(frame(4, b" "), 0.05),
    "an end": lambda sock: None,
    "half and an end": lambda sock: sock.sendall(OK[:9]),
    "death": die(b""),
    "half and death": die(OK[:9]),
    "answers nobody asked for": once(OK * 100),
}


class Hostile(honest.Guest):
    def _serve(self, conn, request):
        path = str(request.get("path"))
        if not path.startswith("#trick:"):
            return super()._serve(conn, request)
        conn.detach()
        conn.sock.setblocking(True)
        threading.Thread(target=self.play, args=(path[7:], conn.sock), daemon=True).start()

    def play(self, trick, sock):
        try:
            TRICKS[trick](sock)
        except OSError:
            pass
        finally:
            sock.close()


def main():
    honest.Guest = Hostile
    honest.main()
"""
FATAL = ("death", "half and death")
LATER = "answers nobody asked for"  # shows with the next request, if at all
TRICKS = [line.split('"')[1] for line in MAIN.splitlines() if line.startswith('    "') and '": ' in line]


def plant(home: Path) -> None:
    """Sandboxes of this home run it as process 1."""
    made = guest_code(home)
    shutil.rmtree(made)
    shutil.copytree(guest_source(), made, ignore=shutil.ignore_patterns("__pycache__"))
    (made / "main.py").rename(made / "honest.py")
    (made / "main.py").write_text(MAIN)
