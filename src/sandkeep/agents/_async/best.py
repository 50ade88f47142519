"""Several tries of one prompt from one state, and the best of them kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from sandkeep.agents._async.agent import AsyncAgent
from sandkeep.agents._async.bridge import all_of, value_of
from sandkeep.agents.options import check_prompt
from sandkeep.agents.response import AgentResponse, Best
from sandkeep.errors import BadArgument, SandkeepError
from sandkeep.sandbox import AsyncSandbox

Score = Callable[[AsyncSandbox], Any]


async def best_of(
    agent: AsyncAgent,
    prompt: str,
    n: int = 4,
    *,
    score: Score,
    timeout: float | None = None,
    at_once: int = 4,
    checkpoint_comment: str | None = None,
) -> Best:
    """Fork the agent's sandbox n times, run the prompt in each, score each sandbox; the agent goes on in the winner.

    The winner is checkpointed, the others are gone. A fork, a run or a score that raises leaves the agent as it was.
    """
    check_prompt(prompt)
    for what, number in (("n", n), ("at_once", at_once)):
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 100:
            raise BadArgument(f"{what} must be between 1 and 100, not {number!r}")
    with agent._holding.during("best_of"):
        before = await agent._ready(None)
        tries = await forked(agent, before, n)
        winner: AsyncAgent | None = None
        try:
            done = await all_of([partial(_one, one, prompt, timeout, score) for one in tries], at_once)
            pairs = [succeeded(pair) for pair in done]
            scores = [points for points, _ in pairs]
            at = scores.index(max(scores))
            response = await agent._adopt(tries[at].sandbox, pairs[at][1], prompt, checkpoint_comment)
            winner = tries[at]
        finally:
            for one in tries:
                if one is not winner:
                    await one.kill()
        await before.kill()
        return Best(response, scores[at], scores, [one for _, one in pairs])


async def _one(agent: AsyncAgent, prompt: str, timeout: float | None, score: Score) -> tuple[float, AgentResponse]:
    response = await agent.run(prompt, timeout=timeout)
    return float(await value_of(score(agent.sandbox))), response


def succeeded(pair: tuple[float, AgentResponse] | Exception) -> tuple[float, AgentResponse]:
    if isinstance(pair, Exception):
        raise pair
    return pair


async def forked(agent: AsyncAgent, sandbox: AsyncSandbox, n: int) -> list[AsyncAgent]:
    """An agent in each fork; they keep nothing by themselves."""
    made = await sandbox.fork(n, secrets=agent._options.all_secrets)
    forks = [one for one in made if isinstance(one, AsyncSandbox)]
    failed = [one for one in made if isinstance(one, SandkeepError)]
    if failed:
        for fork in forks:
            await fork.kill()
        raise failed[0]
    options = replace(agent._options, storage=False, sandbox_id=None)
    return [agent._in(fork, options) for fork in forks]
