"""Coding agents in sandboxes: run one, keep every step, go on from any of them."""

from sandkeep.agents._async.agent import AsyncAgent
from sandkeep.agents._async.best import best_of as async_best_of
from sandkeep.agents._sync.agent import Agent
from sandkeep.agents._sync.best import best_of
from sandkeep.agents.events import Event
from sandkeep.agents.facts import Step
from sandkeep.agents.registry import register, types
from sandkeep.agents.response import AgentResponse, AgentStatus, Best
from sandkeep.agents.spec import AgentSpec

__all__ = [
    "Agent", "AgentResponse", "AgentSpec", "AgentStatus", "AsyncAgent", "Best", "Event", "Step", "async_best_of", "best_of",
    "register", "types",
]  # fmt: skip
