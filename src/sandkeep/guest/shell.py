"""A shell session as text: the script that restores it in a fresh shell, and the reading of what that shell became.

Every foreground call is a shell of its own. It waits for a line at its gate (descriptor GATE), reads a script from a memory
file (BLOB), takes a second line from the gate when it begins the command, and when it ends it writes its variables, functions,
aliases, options and folder behind that script. Nothing goes through argv or the disk.
"""

from __future__ import annotations

import os
import re

from .spawn import BLOB, GATE, HISTORY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List, Optional, Set, Tuple

_VALUE = rb"""(?:"[^"\\]*(?:\\.[^"\\]*)*"|\$'[^'\\]*(?:\\.[^'\\]*)*'|'[^']*'|\\.|(?!\$')[^"'\n\\])*"""
_DECLARE = re.compile(rb"declare -([-a-zA-Z]+) (\w+)(?:=(" + _VALUE + rb"))?\n", re.DOTALL)
_ASSIGN = re.compile(rb"(?:(export|readonly) )?(\w+)(?:=(" + _VALUE + rb"))?\n", re.DOTALL)
_TOKEN = re.compile(
    rb""""([^"\\]*(?:\\.[^"\\]*)*)"|\$'([^'\\]*(?:\\.[^'\\]*)*)'|'([^']*)'|\\(.)|([^"'\\])""", re.DOTALL
)
_ANSI = re.compile(rb"\\([0-7]{1,3}|.)", re.DOTALL)
_LETTERS = {
    b"a": b"\a",
    b"b": b"\b",
    b"e": b"\x1b",
    b"E": b"\x1b",
    b"f": b"\f",
    b"n": b"\n",
    b"r": b"\r",
    b"t": b"\t",
    b"v": b"\v",
}

# What a shell sets by itself: never saved.
_OWN = frozenset(
    "_ BASH BASHOPTS BASHPID BASH_ALIASES BASH_ARGC BASH_ARGV BASH_ARGV0 BASH_CMDS BASH_COMMAND BASH_EXECUTION_STRING BASH_LINENO "
    "BASH_LOADABLES_PATH BASH_REMATCH BASH_SOURCE BASH_SUBSHELL BASH_VERSINFO BASH_VERSION COLUMNS COMP_WORDBREAKS DIRSTACK "
    "EPOCHREALTIME EPOCHSECONDS EUID FUNCNAME GROUPS HISTCMD HOSTNAME HOSTTYPE LINENO LINES MACHTYPE OPTERR OPTIND OSTYPE "
    "PIPESTATUS PPID PWD RANDOM SECONDS SHELLOPTS SHLVL SRANDOM UID SANDKEEP_RUN_ID PS1 PS2 __sk __sk_code __sk_done __sk_end __sk_set __sk_shopt".split()
)
_LOUD = ("set -o verbose", "set -o xtrace")  # set inside the call's own text, so that they do not show ours
_UNSTICKY = frozenset(
    "noexec onecmd privileged history histexpand monitor emacs vi login_shell restricted_shell".split()
)

_HISTORY = """history() {
case "${1-list}" in
list) while IFS= read -r __sk; do printf '%%s\\n' "$__sk"; done </proc/self/fd/%(fd)d; unset __sk;;
clear|-c) : >|/proc/self/fd/%(fd)d;;
*[!0-9]*) command history "$@";;
*) tail -n "$1" </proc/self/fd/%(fd)d;;
esac
}
""" % {"fd": HISTORY}

_BASH_SAVE = (
    """{ [[ -n ${__sk_done-} ]] || { __sk_done=1; \\builtin unset -f history; \\builtin unset __sk __sk_code __sk_end; """
    """\\builtin declare -p; \\builtin printf "\\0"; \\builtin declare -f; \\builtin declare -Fx; \\builtin printf "\\0"; """
    """\\builtin alias -p; \\builtin printf "\\0"; \\builtin umask -p; \\builtin printf "\\0%s\\0end" "$PWD"; """
    """}; } 2>/dev/null >&""" + str(BLOB)
)
# Stands for `exit` in a call that may set its own EXIT trap, which takes the place of ours: the session is saved before that trap
# runs. Only the shell itself saves, no subshell of it.
_BASH_EXIT = """exit() {
{ \\builtin set -- "$?" "$@"; [[ $BASHPID != "$$" ]] || %s; } 2>/dev/null
if [[ $# -gt 1 ]]; then \\builtin exit "${@:2}"; else (\\builtin exit "$1") || \\builtin exit; \\builtin exit; fi
}
"""
_NO_EXIT = "[[ $(\\builtin declare -f exit) != *__sk_done* ]] || \\builtin unset -f exit; "
_TRAP = re.compile(r"\btrap\b")
_SH_SAVE = (
    """{ [ -n "${__sk_done-}" ] || { __sk_done=1; set; printf "\\0"; export -p; printf "\\0"; alias; printf "\\0"; """
    """printf "umask %s\\0%s\\0end" "$(umask)" "$PWD"; }; } 2>/dev/null >>/proc/self/fd/""" + str(BLOB)
)
# All on one line, so that the code's first line is line 1 in the shell's messages.
_START = (
    'read -ru{gate} __sk;IFS= read -rd "" -u{blob} __sk;IFS= read -rd "" -u{blob} __sk_code;eval "$__sk";'
    'builtin read -ru{gate} __sk;builtin eval "$__sk_code";{{ builtin eval "$__sk_end";}} 2>/dev/null;builtin exit $1'
).format(blob=BLOB, gate=GATE)
_SH_START = ". /proc/self/fd/{}".format(BLOB)


class State:
    """What a shell is beyond its environment and folder. Every value is a text that the shell itself wrote."""

    def __init__(
        self, variables: Optional[Dict[str, str]] = None, functions: str = "", aliases: str = "", options: str = ""
    ) -> None:
        self.variables = variables or {}
        self.functions = functions
        self.aliases = aliases
        self.options = options

    def as_dict(self) -> Dict[str, object]:
        return {
            "variables": self.variables,
            "functions": self.functions,
            "aliases": self.aliases,
            "options": self.options,
        }


class Shell:
    """The shell program of a sandbox: bash where there is one, else sh."""

    def __init__(self) -> None:
        self.program = next(
            (p for p in ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash") if os.path.exists(p)), "/bin/sh"
        )
        self.bash = self.program != "/bin/sh"

    def argv(self) -> List[str]:
        return [self.program, "-c", _START if self.bash else _SH_START]

    def script(self, state: Optional[State], code: str, save: bool) -> bytes:
        """What the fresh shell reads: how to be the session, if there is one, then the code."""
        save_text = (_BASH_SAVE if self.bash else _SH_SAVE) if save else ":"
        own_exit = ""
        if save and self.bash and state is not None and (_TRAP.search(code) or _TRAP.search(state.functions)):
            save_text = save_text.replace("\\builtin unset -f history; ", "\\builtin unset -f history; " + _NO_EXIT)
            own_exit = _BASH_EXIT % save_text
        end = "set -- $?; {}; set +vx".format(save_text)
        parts = []
        if self.bash:
            parts.append("SECONDS=0 __sk_set=$SHELLOPTS __sk_shopt=$BASHOPTS __sk_end={}\n".format(quote(end)))
        if save:
            parts.append("trap {} EXIT\n".format(quote(save_text)))
        loud = ""
        if state is not None:
            quiet = state.options
            for line in _LOUD:
                if line + "\n" in quiet:
                    quiet = quiet.replace(line + "\n", "")
                    loud += line + ";"
            parts += [_HISTORY, own_exit, *state.variables.values(), state.functions, state.aliases, quiet]
        if self.bash:
            parts += ["\0", loud, code, "\0"]
        else:
            parts.append("eval {}\n{{ {}; }} 2>/dev/null; exit $1\n".format(quote(loud + code), end))
        return os.fsencode("".join(parts))

    def read(self, dump: bytes) -> Optional[Tuple[Dict[str, str], State, str]]:
        """(exported variables, state, folder) from what a shell wrote when it ended; None if it is not whole."""
        parts = dump.split(b"\0")
        if len(parts) != 6 or parts[5] != b"end":
            return None
        variables, functions, aliases, mask, folder, _ = parts
        try:
            if not self.bash:
                env, kept = _read_sh(variables, functions)
                return env, State(kept, "", _aliases(aliases), os.fsdecode(mask) + "\n"), os.fsdecode(folder)
            env, kept, now = _read_declare(variables)
        except ValueError:
            return None
        options = _changed("set -o", "set +o", _set(now["__sk_set"]), _set(now["SHELLOPTS"]))
        options += _changed("shopt -s", "shopt -u", _set(now["__sk_shopt"]), _set(now["BASHOPTS"]))
        if mask != b"umask 0022\n":
            options = os.fsdecode(mask) + options
        return env, State(kept, os.fsdecode(functions), os.fsdecode(aliases), options), os.fsdecode(folder)


def quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _set(options: bytes) -> Set[str]:
    return set(os.fsdecode(options).split(":")) - _UNSTICKY - {""}


def _changed(on: str, off: str, then: Set[str], now: Set[str]) -> str:
    lines = ["{} {}\n".format(on, name) for name in sorted(now - then)]
    return "".join(lines + ["{} {}\n".format(off, name) for name in sorted(then - now)])


def _read_declare(text: bytes) -> Tuple[Dict[str, str], Dict[str, str], Dict[str, bytes]]:
    env: Dict[str, str] = {}
    kept: Dict[str, str] = {}
    now = {"SHELLOPTS": b"", "BASHOPTS": b"", "__sk_set": b"", "__sk_shopt": b""}
    at = 0
    while at < len(text):
        match = _DECLARE.match(text, at)
        if match is None:
            raise ValueError("not what declare -p writes")
        at = match.end()
        flags, name, value = match[1].decode(), match[2].decode(), match[3]
        if name in now:
            now[name] = unquote(value or b"")
        if name in _OWN or (name in ("TERM", "SHELL", "PATH") and "x" not in flags):
            continue
        if (name == "IFS" and value == b"$' \\t\\n'") or (name == "PS4" and value == b'"+ "'):
            continue
        if "x" in flags and value is not None and not set(flags) & set("aAn") and name != "OLDPWD":
            env[name] = os.fsdecode(unquote(value))
            if flags == "x":
                continue
        if name != "OLDPWD" or value is not None:
            kept[name] = os.fsdecode(match[0])
    return env, kept, now


def _read_sh(variables: bytes, exported: bytes) -> Tuple[Dict[str, str], Dict[str, str]]:
    env = {name: os.fsdecode(unquote(value)) for name, value in _assignments(exported) if value is not None}
    kept = {}
    for name, value in _assignments(variables):
        if name not in env and name not in _OWN and value is not None and name not in ("IFS", "PS4", "OPTIND"):
            kept[name] = "{}={}\n".format(name, os.fsdecode(value))
    return {name: value for name, value in env.items() if name not in _OWN}, kept


def _assignments(text: bytes) -> List[Tuple[str, Optional[bytes]]]:
    found = []
    at = 0
    while at < len(text):
        match = _ASSIGN.match(text, at)
        if match is None:
            raise ValueError("not what set writes")
        at = match.end()
        found.append((match[2].decode(), match[3]))
    return found


def _aliases(text: bytes) -> str:
    lines = os.fsdecode(text).splitlines(keepends=True)
    return "".join(line if line.startswith("alias ") else "alias " + line for line in lines)


def unquote(text: bytes) -> bytes:
    """The value of a word that a shell has quoted."""
    out = []
    for double, ansi, single, escaped, plain in _TOKEN.findall(text):
        if double:
            out.append(re.sub(rb'\\([\\"$`])', rb"\1", double))
        elif ansi:
            out.append(_ANSI.sub(_unescape, ansi))
        else:
            out.append(single or escaped or plain)
    return b"".join(out)


def _unescape(match: re.Match[bytes]) -> bytes:
    word = match[1]
    if word[:1].isdigit():
        return bytes([int(word, 8) & 255])
    return _LETTERS.get(word, word)
