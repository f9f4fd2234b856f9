"""Prints how a followed run ended, and where its checkpoint, log and tracker are."""

from collections.abc import Sequence

from rich.console import RenderableType

from fleet import FleetError, inventory
from fleet.progress import Screen, record, report
from fleet.runview import RunView
from fleet.watch import Follower


def close(
    screen: Screen,
    follower: Follower,
    last: Sequence[tuple[str, str]] = (),
    title: str = "python -m fleet watch",
    picture: str | None = None,
) -> None:
    """Print the report of a run that has ended; nothing if no host knows the run.

    last: more (name, text) lines for its end. picture: path of an SVG of the whole screen with this title.
    """
    if not follower.view.found:
        return
    before = list(screen.lines)
    ending = report(follower.view, [*places(follower.view, follower.inventory, follower.args), *last])
    screen.say("")
    screen.say(ending)
    if picture:
        middle: list[RenderableType] = ["", follower.snapshot] if follower.snapshot else []
        record(picture, title, [*before, *middle, "", ending])
        screen.say(f"\nThe picture: {picture}")


def places(view: RunView, where: str | None, extra: Sequence[str] = ()) -> list[tuple[str, str]]:
    """(Name, place) of the checkpoint, the log and the tracker's page, as far as they are known.

    where: the inventory; extra: its `-e` options.
    """
    found = []
    if view.checkpoint:
        path = view.checkpoint if view.checkpoint.startswith("/") else f"{view.run_dir}/{view.checkpoint}"
        found.append(("checkpoint", f"{view.coordinator}:{path}"))
    if view.run_dir:
        found.append(("log", f"{view.coordinator}:{view.run_dir}/train.log"))
    try:
        found.append(("MLflow", inventory.tracker(inventory.read(where, extra))))
    except FleetError as error:
        found.append(("MLflow", f"its address is not known: {error}"))
    return found
