"""The part table of an agent: what is written is read again, also by a later version."""

from __future__ import annotations

from isthmus.agent.service.part_table import SavedParts, dump_parts, parse_parts
from isthmus.site import SitePart, SiteWorker

FIRST_VERSION = b"""{"fence": 3, "parts": [{
  "job": "j", "attempt": 1, "state": "running", "reported": "running", "level": "middle",
  "workers": {"0": {"node_group": "g", "chips": 2, "cards": ["g/0/0", "g/0/1"], "live": true}},
  "runs": 2, "story": ["new", "prepared"]
}]}"""


def test_a_table_of_the_first_version_is_read() -> None:
    """Fields that were renamed since keep the names of the file."""
    (part,) = parse_parts(FIRST_VERSION).parts
    assert part.workers[0].devices == ("g/0/0", "g/0/1")
    assert (part.num_preemptions, part.history, part.wanted) == (2, ("new", "prepared"), {"g": 2})
    assert b'"cards":["g/0/0","g/0/1"]' in dump_parts(SavedParts(parts=[part]))


def test_what_is_written_is_read_again() -> None:
    """Times and observations of the agent's life are left out."""
    part = SitePart(job="j", attempt=2, state="prepared", level="high", since_s=7.0)
    part.set_workers({4: SiteWorker(node_group="g", chips=1, devices=("g/0/3",), unsaved_s=9.0)})
    (known,) = parse_parts(dump_parts(SavedParts(fence=1, parts=[part]))).parts
    assert (known.key, known.state, known.level, known.since_s) == (("j", 2), "prepared", "high", 0.0)
    assert known.workers[4].devices == ("g/0/3",)
    assert known.workers[4].unsaved_s == 0.0
    assert known.wanted == {"g": 1}
