"""`ExpertExchange`: how tokens reach their experts."""

from __future__ import annotations

from typing import Literal

from isthmus.core.base_model import FrozenModel

Dispatcher = Literal["all_to_all", "all_gather", "deepep"]


class ExpertExchange(FrozenModel):
    """How tokens reach their experts and come back.

    `dispatcher`: `all_to_all` sends a copy of a token to each of its experts, `all_gather` sends every token to all
    chips of the expert group, `deepep` sends one copy to each node that has an expert of the token, where the node's
    links spread it. With `overlap` the exchange runs behind the computation of another micro-batch.
    """

    dispatcher: Dispatcher = "all_to_all"
    overlap: bool = False
