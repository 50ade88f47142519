"""Workflow state: the JSON variables of the program that drives a sandbox, kept as carefully as the sandbox itself."""

from sandkeep.workflow.bound import BoundState
from sandkeep.workflow.manager import Problem, StateManager, WorkflowCheckpoint
from sandkeep.workflow.state import WorkflowState

__all__ = ["BoundState", "Problem", "StateManager", "WorkflowCheckpoint", "WorkflowState"]
