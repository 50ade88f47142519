"""What can be wrong with a request: one exception that carries the answer's code, message and errno."""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Optional

BAD_ARGUMENT = "BAD_ARGUMENT"
BUSY = "BUSY"
FILE_ERROR = "FILE_ERROR"
FILE_NOT_FOUND = "FILE_NOT_FOUND"
GUEST_PROTOCOL = "GUEST_PROTOCOL"
PROCESS_NOT_FOUND = "PROCESS_NOT_FOUND"
UNSUPPORTED = "UNSUPPORTED"


class Problem(Exception):
    def __init__(self, code: str, message: str, number: Optional[int] = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.number = number

    def answer(self) -> Dict[str, Any]:
        return {"ok": False, "code": self.code, "message": self.message, "errno": self.number}


def file_problem(error: OSError, path: Optional[str] = None) -> Problem:
    """The problem for a failed call on a file: FILE_NOT_FOUND for ENOENT, FILE_ERROR for the rest."""
    name = error.filename if path is None else path
    if isinstance(name, bytes):
        name = os.fsdecode(name)
    number = error.errno
    text = os.strerror(number) if number else str(error)
    code = FILE_NOT_FOUND if number == errno.ENOENT else FILE_ERROR
    return Problem(code, "{}: {}".format(name, text) if name is not None else text, number)


def spawn_problem(error: OSError, what: str) -> Problem:
    """The problem for a process that could not be started."""
    if error.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        return Problem(BUSY, "no process could be started: " + os.strerror(error.errno), error.errno)
    if error.errno == errno.E2BIG:
        return Problem(BAD_ARGUMENT, "arguments and environment are too large", error.errno)
    return file_problem(error, what)
