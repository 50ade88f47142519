"""This terminal joined to one inside a sandbox."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import termios
import threading
import tty

from sandkeep.errors import BadArgument
from sandkeep.sandbox import Sandbox


def attach(sandbox: Sandbox) -> int:
    """Raw mode until the shell inside ends; its exit code."""
    if not sys.stdin.isatty():
        raise BadArgument("shell needs a terminal", "use `sandkeep sandbox exec` in scripts")
    cols, rows = shutil.get_terminal_size()
    inside = sandbox.pty.start(cols=cols, rows=rows)
    ended = threading.Event()
    code = [0]

    def show() -> None:
        try:
            for _, data in inside.output():
                os.write(sys.stdout.fileno(), data)
            code[0] = inside.wait().exit_code
        finally:
            ended.set()

    before = termios.tcgetattr(sys.stdin)
    signal.signal(signal.SIGWINCH, lambda *_: inside.resize(*shutil.get_terminal_size()))
    reader = threading.Thread(target=show, daemon=True)
    try:
        tty.setraw(sys.stdin, termios.TCSADRAIN)  # what was typed ahead stays
        reader.start()
        while not ended.is_set():
            ready, _, _ = select.select([sys.stdin], [], [], 0.1)
            if ready and not ended.is_set():
                data = os.read(sys.stdin.fileno(), 4096)
                if not data:
                    break
                inside.send(data)
        reader.join(5)
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        signal.signal(signal.SIGWINCH, signal.SIG_DFL)
    return code[0]
