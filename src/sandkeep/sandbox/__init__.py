"""The object a user holds, sync and async, over one core."""

from sandkeep.sandbox._async.commands import AsyncCommands, AsyncProcess
from sandkeep.sandbox._async.sandbox import AsyncSandbox
from sandkeep.sandbox._sync.commands import Commands, Process
from sandkeep.sandbox._sync.sandbox import Sandbox
from sandkeep.sandbox.persistence import Persistence

__all__ = ["AsyncCommands", "AsyncProcess", "AsyncSandbox", "Commands", "Persistence", "Process", "Sandbox"]
