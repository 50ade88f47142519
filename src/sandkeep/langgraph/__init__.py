"""LangGraph's checkpointer on Sandkeep: threads in one SQLite file, and a sandbox that is rewound with its thread.

The only part of Sandkeep that imports langgraph (extra `langgraph`).
"""

from sandkeep.langgraph.saver import SNAPSHOT_KEY, CheckpointSaver

__all__ = ["SNAPSHOT_KEY", "CheckpointSaver"]
