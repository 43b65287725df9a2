"""Which shard has which ids: the placement that a client goes by now, and who is told when it changes."""

from __future__ import annotations

from collections.abc import Callable

from embershard.proto.routing import Placement, Route, regroup


class Directory:
    """The placement now. Any thread may read it; a route of an earlier placement is regrouped when it is used."""

    def __init__(self, placement: Placement) -> None:
        self.current = placement
        self._followers: list[Callable[[Placement], None]] = []

    def subscribe(self, follow: Callable[[Placement], None]) -> None:
        """Have `follow` called with each placement that takes the place of the one now."""
        self._followers.append(follow)

    def move(self, placement: Placement) -> None:
        """Go by a newer placement; an older one, or the one now, changes nothing."""
        if placement.epoch <= self.current.epoch:
            return
        self.current = placement
        for follow in self._followers:
            follow(placement)


def placed(route: Route, placement: Placement) -> Route:
    """The route of the same ids under a placement; the route itself where it is of this one."""
    return route if route.epoch == placement.epoch else regroup(route, placement)
