"""A turn of an agent: a block after which the state is saved, if it is another than the last saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from sandkeep.model import CheckpointInfo, SnapshotInfo
from sandkeep.sandbox import turns
from sandkeep.sandbox._async.bridge import blocking

if TYPE_CHECKING:
    from sandkeep.sandbox._async.sandbox import AsyncSandbox


class AsyncTurn:
    """`checkpoint` is what was saved, or None; `reason` says why it was or was not."""

    def __init__(self, sandbox: AsyncSandbox, name: str, *, keep_failed: bool, rollback: bool) -> None:
        turns.check(name)
        self.name = name
        self.checkpoint: CheckpointInfo | None = None
        self.reason = "it has not ended"
        self._sandbox = sandbox
        self._keep_failed, self._rollback = keep_failed, rollback
        self._begin: SnapshotInfo | None = None

    async def __aenter__(self) -> Self:
        if self._rollback:
            self._begin = await self._sandbox.snapshot(f"before {self.name}")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self.checkpoint, self.reason = await blocking(turns.save, self._sandbox._held, self.name)
                return
            self.reason = f"failed ({type(error).__name__}), not saved"
            if self._keep_failed:
                self.checkpoint = await blocking(turns.save_failed, self._sandbox._held, self.name, error)
                self.reason = f"failed ({type(error).__name__}), saved as it was"
            if self._begin is not None:
                await self._sandbox.restore(self._begin)
                self.reason += ", rolled back"
        finally:
            if self._begin is not None:
                await self._sandbox.delete_snapshot(self._begin)
