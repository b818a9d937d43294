"""Property tests try the same examples in every run, so that a red run means a change and not a draw.

New ones are looked for with `python -m pytest --hypothesis-profile=explore`.
"""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("repeatable")
