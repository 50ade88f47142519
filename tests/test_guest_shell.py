"""The shell session: what lasts from call to call, what does not, and what never gets in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from guest_box import Box, guest


@pytest.mark.parametrize(
    ("made", "asked", "told"),
    [
        ("x='a  b'", 'printf %s "$x"', "a  b"),
        ("export X=1", "sh -c 'printf %s $X'", "1"),
        ("export X=1; unset X", "printf %s ${X-none}", "none"),
        ("a=(1 '2 3' [7]='$y')", 'printf "%s|" "${!a[@]}" "${a[@]}"', "0|1|7|1|2 3|$y|"),
        ("declare -A m=([k]=v ['a b']=\"c'd\")", 'printf "%s|" "${m[k]}" "${m[a b]}"', "v|c'd|"),
        ("declare -i n=5; n+=2", "n+=1; printf %s $n", "8"),
        ("readonly r=4", "printf %s $r; (r=5) 2>/dev/null || printf ' still'", "4 still"),
        ("readonly r=4", "true; printf %s $r", "4"),
        ("declare -n ref=target; target=9", "printf %s $ref", "9"),
        ("q=$'\\'\"\\n\\t\\\\ `$(x)`'", "printf %s \"$q\" | od -An -tx1 | tr -d ' \\n'", "27220a095c206024287829 60".replace(" ", "")),
        ("export E=$'\\377\\001é'", "printf %s \"$E\" | od -An -tx1 | tr -d ' \\n'", "ff01c3a9"),
        ("f() { printf '%s' \"<$1>\"; }", "f 'a b'", "<a b>"),
        ("a-b.c() { printf odd; }; function g:h { printf ' too'; }", "a-b.c; g:h", "odd too"),
        ("f() { cat <<EOF\nhere $1\nEOF\n}", "f doc", "here doc\n"),
        ("f() { printf sub; }; export -f f", "bash -c f", "sub"),
        ("shopt -s expand_aliases; alias hi='printf hello'", "hi", "hello"),
        ("shopt -s nullglob extglob", "printf '[%s]' /nonexistent*; [[ aab == +(a)b ]] && printf yes", "[]yes"),
        ("set -o pipefail", "false | true; printf %s $?", "1"),
        ("set -f", "printf %s /*", "/*"),
        ("umask 077", "umask", "0077\n"),
        ("IFS=,", "set -- $(printf 'a,b'); printf %s $#", "2"),
        ("cd /usr/bin; cd /usr", "cd - >/dev/null; printf %s $PWD", "/usr/bin"),
        ("exec 9>/dev/null; flock=9", "printf %s $flock", "9"),
        ("declare() { :; }; printf() { :; }; keep=1", "echo $keep", "1\n"),
        ("set -u; a=1", "printf %s $a", "1"),
        ("trap 'echo bye' EXIT; t=2", "printf %s $t", "2"),
    ],
)  # fmt: skip
def test_what_a_call_makes_is_there_in_the_next(box: Box, made: str, asked: str, told: str) -> None:
    assert box.run(made).result["session_saved"] is True
    assert box.text("true") == ""
    assert box.text(asked) == told


def test_exit_ends_the_call_and_keeps_what_it_made(box: Box) -> None:
    assert box.run("x=1; cd /usr; exit 3; x=2").exit_code == 3
    assert box.text("printf %s $x$PWD") == "1/usr"


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("trap 'echo bye' EXIT; x=1; cd /usr; exit 3", 3, "bye\n"),
        ("trap 'echo bye; exit 5' EXIT; x=1; cd /usr; exit 3", 5, "bye\n"),
        ("trap 'echo $?; exit' EXIT; x=1; cd /usr; (exit 4); exit", 4, "4\n"),
        ("trap 'echo bye' 0; f() { x=1; cd /usr; false; exit; }; f", 1, "bye\n"),
        ("trap 'echo a' EXIT; (trap 'echo b' EXIT; x=2; exit 6); echo $?; x=1; cd /usr; exit 0", 0, "b\n6\na\n"),
        ("trap 'echo bye; exit 2' TERM; trap : EXIT; x=1; cd /usr; kill $$; x=2", 2, "bye\n"),
        ("trap 'echo bye; exit' EXIT; set -e; x=1; cd /usr; false; x=2", 1, "bye\n"),
        ("trap 'echo bye' EXIT; x=1; cd /usr; exit 3 4 2>/dev/null; x=2", 1, "bye\n"),
        ("set -u; trap 'echo bye' EXIT; x=1; cd /usr; exit 3", 3, "bye\n"),
    ],
)  # fmt: skip
def test_a_call_with_its_own_exit_trap_leaves_by_exit(box: Box, code: str, exit_code: int, said: str) -> None:
    done = box.run(code)
    assert (done.exit_code, done.stdout.decode(), done.stderr) == (exit_code, said, b"")
    assert done.result["session_saved"] is True
    assert box.text("set +u; printf '%s %s ' $x $PWD; type -t exit") == "1 /usr builtin\n"


def test_a_function_of_the_session_may_set_the_trap_and_exit_may_be_ones_own(box: Box) -> None:
    box.text("tidy() { trap 'echo tidied' EXIT; }; x=0")
    assert box.run("tidy; x=1; exit 3").stdout == b"tidied\n"
    assert box.text("printf %s $x; unset -f tidy") == "1"
    box.text("exit() { echo mine; }; trap : EXIT")
    assert box.text("exit; echo on") == "mine\non\n"


def test_set_e_ends_the_call_where_it_fails(box: Box) -> None:
    box.text("set -e")
    failed = box.run("x=1; false; x=2")
    assert failed.exit_code == 1
    assert box.text("printf %s $x") == "1"


def test_trace_shows_the_calls_own_commands_only(box: Box) -> None:
    box.text("set -x")
    done = box.run("echo hi")
    assert done.stdout == b"hi\n"
    assert [line.lstrip(b"+") for line in done.stderr.splitlines()] == [b" echo hi"]


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("if", 2, b"syntax error"),
        ("echo 'open", 2, b"unexpected EOF"),
        ("no-such-command", 127, b"line 1: no-such-command: command not found"),
        ("/etc", 126, b"Is a directory"),
        ("kill -TERM $$", 143, b""),
        ("kill -9 $$", 137, b""),
        ("(exit 200)", 200, b""),
        ("true\nnope", 127, b"line 2: nope"),
        ("cat <<EOF\nopen", 0, b"here-document"),
    ],
)
def test_exit_codes_and_messages(box: Box, code: str, exit_code: int, said: bytes) -> None:
    done = box.run(code)
    assert done.exit_code == exit_code
    assert said in done.stderr


def test_an_open_here_document_shows_nothing_of_ours(box: Box) -> None:
    assert box.run("cat <<EOF\nopen").stdout == b"open\n"


def test_a_killed_call_leaves_the_session_as_it_was(box: Box) -> None:
    box.text("x=1")
    assert box.run("x=2; kill -9 $$").result["session_saved"] is False
    assert box.run("x=3; sleep 600", timeout=1).result["timed_out"] is True
    assert box.text("printf %s $x") == "1"


def test_a_call_that_becomes_another_program_says_that_nothing_was_saved(box: Box) -> None:
    assert box.run("x=1; exec true").result["session_saved"] is False
    assert box.text("printf %s ${x-none}") == "none"


def test_env_cwd_and_user_hold_for_one_call(box: Box) -> None:
    box.text("export A=session")
    assert box.text("printf %s $A$B$PWD", env={"A": "call", "B": "b"}, cwd="/usr") == "callb/usr"
    assert box.text("printf %s $A${B-}; [ $PWD != /usr ]") == "session"
    assert box.text("id -u; printf %s $HOME", user=65534).startswith("65534\n")
    assert box.text("id -u") == "0\n"


def test_streams_are_apart_and_any_bytes_come_through(box: Box) -> None:
    done = box.run("printf '\\000\\377\\r\\n'; printf err >&2")
    assert (done.stdout, done.stderr) == (b"\x00\xff\r\n", b"err")


def test_a_command_of_any_bytes_and_any_length(box: Box) -> None:
    odd = b"\xff\xfe'\"".decode("utf-8", "surrogateescape")
    assert box.run(f"printf %s $'\\xff'{odd[0]}x").stdout == b"\xff\xffx"
    long = "a" * 3_000_000
    assert box.run(f"v={long}; printf %s ${{#v}}").stdout == b"3000000"
    assert box.run("printf %s ${#v}").stdout == b"3000000"


def test_stdin_is_empty_unless_given(box: Box) -> None:
    assert box.run("cat; echo end").stdout == b"end\n"
    assert box.run("cat", [b"a\0b", b"c" * 2_000_000]).stdout == b"a\0b" + b"c" * 2_000_000
    assert box.run("cat", []).stdout == b""


def test_input_that_nobody_reads_blocks_nothing(box: Box) -> None:
    assert box.run("exit 4", [b"x" * 100_000] * 50).exit_code == 4
    assert box.run("head -c 3", [b"abcdef" * 100_000] * 20).stdout == b"abc"
    assert box.text("echo on") == "on\n"


def test_history_inside_and_outside_is_one_list(box: Box) -> None:
    for code in ("echo one", "echo two | cat", "history clear", "echo é 'three'"):
        box.run(code)
    assert box.text("history | tail -n 2") == "    1  echo é 'three'\n    2  history | tail -n 2\n"
    assert box.text("history list | grep -c three") == "2\n"
    assert box.text("history 1") == "    4  history 1\n"
    listed = box.link.call("history_list")["history"]
    assert [(one["index"], one["command"]) for one in listed][:2] == [(1, "echo é 'three'"), (2, "history | tail -n 2")]
    assert listed[0]["timestamp"] <= listed[1]["timestamp"]
    box.run("unseen", record=False)
    assert len(box.link.call("history_list")["history"]) == len(listed)
    assert box.text("(history clear) | cat; history") == ""
    assert box.link.call("history_list")["history"] == []


def test_secrets_are_in_the_environment_and_nowhere_else(box: Box) -> None:
    box.link.call("secrets_set", secrets={"API_KEY": "s3cr3t-value", "PIN": "42"})
    assert (
        box.text("printf %s $API_KEY$PIN; copy=$API_KEY; export OTHER=x$API_KEY; n=42; API_KEY=changed")
        == "s3cr3t-value42"
    )
    assert box.text("printf %s $API_KEY; echo s3cr3t-value >/dev/null") == "s3cr3t-value"
    assert box.text("printf %s $copy") == "s3cr3t-value"
    box.link.call("run", code="sleep 600 # s3cr3t-value", background=True, env={"T": "s3cr3t-value"})
    told = box.link.call("session_get")
    assert told["withheld"] == ["OTHER", "copy"]
    everything = repr([told, box.link.call("list"), box.link.call("history_list"), box.link.call("env_get")["cwd"]])
    assert "s3cr3t-value" not in everything
    assert "n=" in repr(told["shell"]) or '"42"' in repr(told["shell"])
    assert "API_KEY" not in told["env"]


def test_the_whole_session_can_be_carried_to_another_guest(box: Box, tmp_path: Path) -> None:
    box.text("cd /usr; export A='é 1'; b=(x y); f() { echo f$1; }; set -o noglob; unset LANG; umask 027")
    session = box.link.call("session_get")
    del session["withheld"]
    other = tmp_path / "other"
    other.mkdir()
    with guest(other) as second:
        second.text("gone=1; export GONE=1")
        second.link.call("session_set", **session)
        assert (
            second.text("echo $PWD $A ${b[1]} $(f 2) * ${LANG-none} $(umask) ${gone-}${GONE-}")
            == "/usr é 1 y f2 * none 0027\n"
        )
        again = second.link.call("session_get")
        assert again["history"][: len(session["history"])] == session["history"]


def test_the_environment_by_request(box: Box) -> None:
    box.link.call("env_set", env={"N": "a b", "odd.name": "kept"})
    assert box.text("printf %s \"$N\"; env | grep -c '^odd.name=kept$'") == "a b1\n"
    env = box.link.call("env_get")["env"]
    assert (env["N"], env["odd.name"]) == ("a b", "kept")
    box.link.call("env_unset", names=["N", "never"])
    assert box.text("printf %s ${N-none}") == "none"


def test_a_removed_folder_gives_way_to_what_is_left_of_it(box: Box, tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    box.text(f"cd {deep}")
    deep.rmdir()
    assert box.text("pwd") == f"{tmp_path}/a\n"


def test_calls_at_once_begin_alike_and_the_last_to_end_wins(box: Box, tmp_path: Path) -> None:
    box.text("x=0")
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with box.link.stream("run", {"code": f"read line <{gate}; x=first$x"}, timeout=60) as first:
        assert first.first_json()["started"] > 0
        assert box.text("x=second$x; printf %s $x") == "second0"
        gate.write_text("go\n")
        assert list(first) == []
    assert box.text("printf %s $x") == "first0"


def test_output_past_the_limit_is_drained_and_said(box: Box) -> None:
    done = box.run("head -c 5000000 /dev/zero; echo all >&2", max_output=1000)
    assert (len(done.stdout), done.stderr, done.exit_code) == (1000, b"all\n", 0)
    assert done.result["truncated"] is True
    assert done.result["positions"]["stdout"] == 5_000_000


def test_what_a_call_leaves_running_does_not_hold_it(box: Box) -> None:
    done = box.run("sleep 600 & echo $!")
    assert done.exit_code == 0
    assert box.text(f"kill -0 {int(done.stdout)} && echo alive") == "alive\n"


def test_where_there_is_no_bash_sh_keeps_what_it_can_tell(tmp_path: Path) -> None:
    plain = "import os.path as p, guest.shell as s\nseen = p.exists\np.exists = lambda path: 'bash' not in str(path) and seen(path)"
    with guest(tmp_path, before=plain) as box:
        assert box.link.call("hello")["shell"] == "/bin/sh"
        assert box.run("x=\"it's\"; export Y='a  b'; cd /usr; umask 077; exit 3").result["session_saved"] is True
        assert box.text('printf "%s|" "$x" "$Y" "$PWD" "$(umask)"') == "it's|a  b|/usr|0077|"
        assert box.text("history | wc -l").strip() == "3"
        assert box.run("if").exit_code == 2
        assert box.run("nope").exit_code == 127
