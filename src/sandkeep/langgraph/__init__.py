"""LangGraph's checkpointer on Sandkeep: threads in one SQLite file, and a sandbox that is rewound with its thread.

The only part of Sandkeep that imports langgraph (extra `langgraph`).
"""

try:
    from sandkeep.langgraph.saver import SNAPSHOT_KEY, CheckpointSaver
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: pip install 'sandkeep[langgraph]'", name=error.name) from error

__all__ = ["SNAPSHOT_KEY", "CheckpointSaver"]
