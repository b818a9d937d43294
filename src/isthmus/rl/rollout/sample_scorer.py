"""`SampleScorer`: what follows a turn of the model: an observation, or the reward of the response."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from isthmus.data import Prompt, PromptSet
from isthmus.rl.environments.turn_error import TurnError
from isthmus.rl.environments.turn_taker import TurnTaker
from isthmus.rl.ledger.ledger_records import TokenRange
from isthmus.rl.ledger.rollout_events import ObservationAdded, SampleScored, ScoreFailed
from isthmus.rl.ledger.rollout_instructions import ScoreSample
from isthmus.rl.rewards.reward_error import RewardError
from isthmus.rl.rewards.reward_pool import RewardPool

Scored = SampleScored | ScoreFailed | ObservationAdded


class SampleScorer:
    """Calls environments and rewards, both in processes or services of their own; any thread may call it.

    `penalty_of` returns what is added to the reward of a response of so many tokens.
    """

    def __init__(
        self, prompts: PromptSet, reward: RewardPool, turns: TurnTaker | None, penalty_of: Callable[[int], float]
    ) -> None:
        self._prompts, self._reward, self._turns, self._penalty_of = prompts, reward, turns, penalty_of

    @property
    def num_workers(self) -> int:
        """Return how many samples are worked on at a time; 0 if none waits for another process."""
        if self._reward.is_immediate and self._turns is None:
            return 0
        return max(self._reward.num_workers, 0 if self._turns is None else self._turns.num_workers)

    def score(
        self, wanted: ScoreSample, prompt: Prompt, ranges: Sequence[TokenRange], tokens: Sequence[int],
        is_refused: Callable[[], bool],
    ) -> tuple[Scored | None, tuple[int, ...], str]:  # fmt: skip
        """Return the event that follows, the tokens of an observation, and what failed ("": nothing).

        `is_refused` is asked once the response is complete; where it says so there is no event.
        """
        sample, score_try = wanted.sample, wanted.score_try
        try:
            text = self._prompts.text_of(tokens)
            if self._turns is not None:
                if added := self._turns.observe(prompt.text, prompt.answer, ranges, tokens):
                    found = ObservationAdded(sample=sample, score_try=score_try, num_tokens=len(added))
                    return found, added, ""
                text = self._turns.scored_text(ranges, tokens)
            if is_refused():
                return None, (), ""
            value = self._reward(prompt.text, text, prompt.answer) + self._penalty_of(len(tokens))
        except (RewardError, TurnError) as error:
            what = "reward" if isinstance(error, RewardError) else "environment"
            problem = f"the {what} of sample {tuple(sample)} failed: {error.message}"
            return ScoreFailed(sample=sample, score_try=score_try), (), problem
        return SampleScored(sample=sample, score_try=score_try, reward=value), (), ""

    def close(self) -> None:
        """End processes and connections; no call is under way."""
        self._reward.close()
        if self._turns is not None:
            self._turns.close()
