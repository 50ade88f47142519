"""Persistence modes: a sandbox whose state is kept under a name, by hand or by itself.

| mode | loads | saves |
|---|---|---|
| ephemeral | never | never |
| session | on load_state() | on save_state() |
| persistent | when created | after every change (debounced), and on leaving |

One thread per persistent sandbox, for sync and async alike. What goes wrong in it is raised by the next call.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal

from sandkeep.checkpoints.catalog import Store
from sandkeep.checkpoints.records import canonical
from sandkeep.errors import (
    BadArgument,
    CheckpointNotFound,
    Corrupt,
    NotFound,
    SandboxDead,
    SandkeepError,
    StateConflict,
    StoreError,
)
from sandkeep.model import CheckpointInfo, RestoreReport, State
from sandkeep.runtime import cgroup
from sandkeep.sandbox import beginning, keeping, killing, lifecycle
from sandkeep.sandbox.home import Home, boot
from sandkeep.sandbox.machine import Machine
from sandkeep.sandbox.namespaces import KEPT, MOST, Claim, Generation, Namespace, Persisted
from sandkeep.sandbox.record import Record
from sandkeep.sandbox.restoring import guests_part
from sandkeep.sandbox.rhythm import Rhythm
from sandkeep.sandbox.saved import load_saved
from sandkeep.sandbox.saving import Taken, take

MODES = ("ephemeral", "session", "persistent")


@dataclass(frozen=True)
class Persistence:
    """How a sandbox's state outlives it. `takeover` takes the namespace from a living owner, whose saves then fail;
    `generation` loads that one instead of the newest, and sets newer ones aside."""

    mode: Literal["ephemeral", "session", "persistent"] = "ephemeral"
    namespace: str | None = None
    debounce: float = 1.0
    max_wait: float = 5.0
    takeover: bool = False
    generation: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise BadArgument(f"persistence mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        if self.mode != "ephemeral" and not self.namespace:
            raise BadArgument(f"persistence mode {self.mode} needs a namespace", "namespace='my-agent'")
        if not 0 < self.debounce <= self.max_wait:
            raise BadArgument("debounce must be above 0 and at most max_wait")


def begin(
    home: Home, store: keeping.StoreLike, persistence: Persistence, options: dict[str, Any]
) -> tuple[Machine, RestoreReport | None, Keeper]:
    """A sandbox under a namespace: persistent ones go on from the newest generation, after what an owner that died left."""
    claim, before = Namespace(home, persistence.namespace or "").claim(persistence.mode, takeover=persistence.takeover)
    try:
        chosen = keeping.as_store(home, store)
        notes = _last_words(home, chosen, claim, before) if persistence.mode == "persistent" else []
        machine, report = _loaded(home, chosen, persistence, claim, options)
        claim.owns(machine.id)
        if notes:
            with machine.held() as record:
                record.notes += notes
                record.save(machine.folder)
    except BaseException:
        claim.abandon(before)
        raise
    return machine, report, Keeper(machine, claim, persistence)


def _last_words(home: Home, store: Store, claim: Claim, before: dict[str, Any] | None) -> list[str]:
    """Save once more what a former owner's sandbox holds; if that owner is gone, its sandbox goes too."""
    if before is None or before["mode"] != "persistent" or before["sandbox"] is None:
        return []
    machine = Machine(home, before["sandbox"])
    machine.store = store
    try:
        Saver(machine, claim).save("last words")
    except NotFound:
        return []
    except SandboxDead:
        if before["boot"] != boot():
            return [f"sandbox {machine.id} ended with the host before its last save; what it held is still there"]
        _revive(machine, store, claim)
        Saver(machine, claim).save("last words")
    if not claim.namespace.lives(before):
        killing.kill(machine)
    return []


def _revive(machine: Machine, store: Store, claim: Claim) -> None:
    """A dead sandbox's files are whole; its session is that of the newest generation."""
    with claim.held() as state:
        newest = state.generations[0] if state.generations else None
    session = guests_part(dict(load_saved(store, newest.id).session)) if newest else None
    with machine.held() as record:
        machine.stop(record)
        machine.start(record, session, {})


def _loaded(
    home: Home, store: Store, persistence: Persistence, claim: Claim, options: dict[str, Any]
) -> tuple[Machine, RestoreReport | None]:
    with claim.held() as state:
        chosen = choose(claim.namespace, state, persistence.generation) if persistence.mode == "persistent" else None
    if chosen is None:
        machine = lifecycle.create(home, **options)
        keeping.choose_store(machine, store)
        return machine, None
    given = {name: value for name, value in options.items() if name != "base"}
    with loading(claim.namespace, state, chosen):
        machine, report = beginning.create_from(home, store, chosen.id, "files", **given)
    step_over(claim, chosen)
    return machine, report


def choose(namespace: Namespace, state: Persisted, wanted: str | None) -> Generation | None:
    if wanted is None:
        return state.generations[0] if state.generations else None
    found = [one for one in (*state.generations, *state.aside) if one.id == wanted]
    if not found:
        raise CheckpointNotFound(
            f"namespace {namespace.name!r} has no generation {wanted}",
            f"it has {', '.join(one.id for one in state.generations) or 'none'}",
        )
    return found[0]


@contextlib.contextmanager
def loading(namespace: Namespace, state: Persisted, chosen: Generation) -> Any:
    """A generation that can't be read is refused, and the one before it offered."""
    try:
        yield
    except (Corrupt, NotFound) as error:
        earlier = state.before(chosen.id)
        remedy = f"load the one before it: generation={earlier.id!r}" if earlier else "there is none before it"
        raise Corrupt(
            f"the newest state of namespace {namespace.name!r} ({chosen.id}) can't be loaded: {error.message}",
            remedy,
            generation=chosen.id,
            before=earlier.id if earlier else None,
        ) from error


def step_over(claim: Claim, chosen: Generation) -> None:
    """Generations newer than the one that was loaded are kept aside, and never loaded by themselves again."""
    with claim.held() as state:
        ids = [one.id for one in state.generations]
        at = ids.index(chosen.id) if chosen.id in ids else 0
        if at or chosen.id not in ids:
            aside = [*state.generations[:at], *(one for one in state.aside if one.id != chosen.id)]
            kept = state.generations[at:] if chosen.id in ids else [chosen, *state.generations]
            claim.namespace.save(Persisted(kept, aside))


class Saver:
    """Saves one sandbox as generations of one namespace; knows what it saved last."""

    def __init__(self, machine: Machine, claim: Claim) -> None:
        self._machine, self._claim = machine, claim
        self._mark: str | None = None

    def save(self, comment: str) -> CheckpointInfo | None:
        """The new generation; None when the newest is the same state."""
        with self._machine.held() as record:
            if record.state is State.PAUSED:
                return self._asleep(record)
            self._machine.require_running(record)
            taken = take(self._machine, record)
            mark = _mark(taken)
            if mark == self._mark:
                return None
            store = keeping.store_of(self._machine, record)
            with self._claim.held() as state:
                newest = state.generations[0] if state.generations else None
                history = _digest(taken.session.get("history", []))
                same = newest.id if newest is not None and newest.history == history else None
                metadata = {"namespace": self._claim.namespace.name}
                info = keeping.keep(
                    self._machine, record, taken, store, comment=comment, metadata=metadata, unless=same
                )
                if info.id != same:
                    self._add(store, state, Generation(info.id, info.hash, info.timestamp, history))
            self._mark = mark
            return None if info.id == same else info

    def _asleep(self, record: Record) -> CheckpointInfo | None:
        """A paused sandbox has its state in the store already."""
        assert record.paused is not None
        store = keeping.store_of(self._machine, record)
        saved = load_saved(store, record.paused["checkpoint"])
        with self._claim.held() as state:
            if saved.id in [one.id for one in state.generations[:1]]:
                return None
            history = _digest(saved.session["history"])
            self._add(store, state, Generation(saved.id, saved.info.hash, saved.info.timestamp, history))
        return saved.info

    def _add(self, store: Store, state: Persisted, new: Generation) -> None:
        state.generations.insert(0, new)
        gone = state.generations[KEPT:] if len(state.generations) > MOST else []
        if gone:
            del state.generations[KEPT:]
        self._claim.namespace.save(state)
        forget(store, gone)

    def load(self, generation: str | None) -> RestoreReport:
        namespace = self._claim.namespace
        with self._claim.held() as state:
            chosen = choose(namespace, state, generation)
        if chosen is None:
            raise NotFound(f"namespace {namespace.name!r} holds no state", "save_state() first")
        with loading(namespace, state, chosen):
            report = keeping.restore(self._machine, chosen.id)
        step_over(self._claim, chosen)
        return report

    def clear(self) -> None:
        """Nothing is persisted any more; what is there now is not saved again until it changes."""
        with self._machine.held() as record:
            store = keeping.store_of(self._machine, record)
            with self._claim.held() as state:
                self._claim.namespace.save(Persisted())
            forget(store, [*state.generations, *state.aside])
            self._mark = _mark(take(self._machine, record))


def forget(store: Store, gone: list[Generation]) -> None:
    """A generation that has a name, or is gone already, is not ours to forget."""
    for one in gone:
        with contextlib.suppress(CheckpointNotFound, StateConflict):
            store.drop(one.id)


def _mark(taken: Taken) -> str:
    return _digest([taken.stack, taken.session])


def _digest(value: Any) -> str:
    return sha256(canonical(value, "session")).hexdigest()


class Keeper:
    """What a sandbox object holds to keep its state: the claim, the saver and, in mode persistent, the thread."""

    def __init__(self, machine: Machine, claim: Claim, persistence: Persistence) -> None:
        self._machine, self._claim, self._persistence = machine, claim, persistence
        self._saver = Saver(machine, claim)
        self._saving = threading.Lock()
        self._stop = threading.Event()
        self._error: SandkeepError | None = None
        self._over = False  # the thread has given up: what went wrong is not said once, but always
        self._runtime = machine.record().runtime
        self._thread: threading.Thread | None = None
        if persistence.mode == "persistent":
            self._thread = threading.Thread(target=self._run, name=f"autosave {machine.id}", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raise what went wrong behind the user's back: once, as the next save is tried anyway; always, if none is.

        Whose namespace was taken over works for nobody: refused at once.
        """
        error = self._error
        if error is None and self._thread is not None:
            self._claim.require()
        if error is not None:
            if not self._over:
                self._error = None
            raise error

    def save(self) -> CheckpointInfo | None:
        return self._save("saved")

    def _save(self, comment: str) -> CheckpointInfo | None:
        try:
            with self._saving:
                return self._saver.save(comment)
        except OSError as error:
            raise StoreError(
                f"the state could not be saved: {error}", "see whether the store is where it was"
            ) from error

    def load(self, generation: str | None = None) -> RestoreReport:
        with self._saving:
            return self._saver.load(generation)

    def clear(self) -> None:
        with self._saving:
            self._saver.clear()

    def close(self, *, save: bool) -> None:
        """The last save, if the mode has one. When it fails the sandbox is left to the namespace's next owner."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            if save:
                self._save("left")

    def release(self, *, forget: bool) -> None:
        self._claim.release(forget=forget)

    def _run(self) -> None:
        rhythm = Rhythm(self._persistence.debounce, self._persistence.max_wait, time.monotonic())
        pause = min(max(self._persistence.debounce / 4, 0.02), 1.0)
        while not self._stop.wait(pause):
            if not rhythm.due(time.monotonic(), self._moved()):
                continue
            saved = False
            try:
                saved = self._save("autosave") is not None
                self._error = None
            except Exception as error:
                self._over = isinstance(error, (NotFound, StateConflict))
                if not isinstance(error, SandkeepError):
                    error = SandkeepError(f"the state could not be saved: {error!r}")
                self._error = error
                if self._over:
                    return
            rhythm.looked(time.monotonic(), self._moved(), saved)

    def _moved(self) -> object:
        """Changes whenever the sandbox may have. runsc's own kernel is never quite still, so it tells nothing."""
        if self._runtime == "runsc":
            return None
        cpu = cgroup.usage(cgroup.name_of(self._machine.id, self._machine.folder)).get("cpu_seconds")
        try:
            found = (self._machine.folder / "workflow.json").stat()
            workflow = (found.st_ino, found.st_mtime_ns)
        except FileNotFoundError:
            workflow = (0, 0)
        return None if cpu is None else (cpu, workflow)
