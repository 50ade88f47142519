"""Checkpoints: saving a sandbox's state in a store, and having it back. docs/design.md, section 8, is the specification."""

from sandkeep.checkpoints.base import Base
from sandkeep.checkpoints.capture import Source, capture
from sandkeep.checkpoints.catalog import Store, list_checkpoints
from sandkeep.checkpoints.remote import RepositorySpec, capture_here, unpack_attachment_here, unpack_here
from sandkeep.checkpoints.unpack import Unpacked, unpack, unpack_attachment

__all__ = [
    "Base", "RepositorySpec", "Source", "Store", "Unpacked", "capture", "capture_here", "list_checkpoints", "unpack",
    "unpack_attachment", "unpack_attachment_here", "unpack_here",
]  # fmt: skip
