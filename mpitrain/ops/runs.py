"""Element-wise steps over a flat buffer with several parameter groups, each with rates of its own."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class GroupRun(NamedTuple):
    """Elements [start, stop) of a flat buffer, all of one parameter group.

    lr            factor of the learning rate
    weight_decay  of the group
    """

    start: int
    stop: int
    lr: float
    weight_decay: float


def over_runs(operation: Callable[..., None], runs: Sequence[GroupRun]) -> Callable[..., None]:
    """Return one step for all runs of a flat buffer (as torch.optim's fused optimizers).

    operation  (p, g, *state, scale, lr, weight_decay, arena, mirror=None, ...), element by element
    runs       ascending; their starts differ by multiples of 32. Elements between two runs are
               padding, all 0, and may be stepped with the earlier run
    launches   one, if the operation offers `over_runs` itself; otherwise one for each run
    returns    (p, g, *state, lr, mirror=None, ...) -> None, without weight_decay; lr is that of a
               factor 1, and all arrays have the elements of all runs
    """
    if not runs:
        return lambda *arrays, **named: None
    offered = getattr(operation, "over_runs", None)
    if offered is None:
        steps = [(_cut(run, run), _stepped(operation, run)) for run in runs]
    else:
        steps = [(_cut(runs[0], runs[-1]), offered(runs))]

    def step(*arrays: Any, mirror: Any = None, **named: Any) -> None:
        for elements, each in steps:
            each(
                *(array[elements] for array in arrays),
                **named,
                **({} if mirror is None else {"mirror": mirror[elements]}),
            )

    return step


def _cut(first: GroupRun, last: GroupRun) -> slice:
    return slice(first.start, last.stop)


def _stepped(operation: Callable[..., None], run: GroupRun) -> Callable[..., None]:
    def step(*arrays: Any, lr: float, **named: Any) -> None:
        operation(*arrays, lr=lr * run.lr, weight_decay=run.weight_decay, **named)

    return step
