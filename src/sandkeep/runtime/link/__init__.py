"""The host's side of the guest's socket. docs/design.md, section 6, is the protocol."""

from sandkeep.runtime.link._async.link import AsyncLink
from sandkeep.runtime.link._sync.link import Link
from sandkeep.runtime.link.launch import guest_argv, guest_code, guest_source

__all__ = ["AsyncLink", "Link", "guest_argv", "guest_code", "guest_source"]
