"""Rules of `benchmarks.control_core`: its fake sites start every gang, and a standstill is an error, not a wait."""

import pytest

from benchmarks.control_core import Sites, placements

pytestmark = pytest.mark.timeout(60)


def test_every_gang_starts_and_ends():
    """A stage of eight chips has eight workers, and all of them check in."""
    rate, longest_s = placements(40, seed=1)
    assert rate > 0
    assert longest_s > 0


class Idle(Sites):
    """Sites whose workers never check in."""

    def obey(self, *_):
        return iter(())


def test_a_standstill_is_an_error():
    """Where no worker checks in, the run ends and says how many gangs are left."""
    with pytest.raises(RuntimeError, match="40 of 40 gangs are still live"):
        placements(40, seed=1, sites_type=Idle, idle_rounds=3)
