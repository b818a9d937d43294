"""Property tests try the same examples in every run, so that a red run means a change and not a draw.

Nothing is judged by its time: the machine may be busy. New examples are looked for with
`python -m pytest --hypothesis-profile=explore`.
"""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile("repeatable")
