"""Parameter groups: weight decay and factor of the learning rate of each tensor (as in torch.optim)."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from mpitrain import config
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Parameter


class HyperParameters(NamedTuple):
    """The hyper-parameters that tensors may have for themselves.

    lr            factor of the learning rate
    weight_decay  0 for tensors without decay
    """

    lr: float
    weight_decay: float


def group_of(settings: config.Optimizer, tensor: Parameter) -> HyperParameters:
    """Return the group of a tensor under its full name: the first match of optimizer.groups.

    Without a match, matrices and embeddings have the decay of the section; vectors have none.
    """
    decay = settings.weight_decay if tensor.decayed else 0.0
    for group in settings.groups:
        if fnmatchcase(tensor.name, group.match):
            own = group.weight_decay
            return HyperParameters(group.lr, decay if own is None else own)
    return HyperParameters(1.0, decay)


def check_groups(settings: config.Optimizer, names: Iterable[str]) -> None:
    """Raise ConfigError for a group that is the first match of no parameter.

    names  full names of all parameters of the model
    """
    names = list(names)
    left = {*names}
    for group in settings.groups:
        matched = {name for name in names if fnmatchcase(name, group.match)}
        if not matched & left:
            reason = "all its matches are in earlier groups" if matched else "nothing matches"
            raise ConfigError(
                f"Each of optimizer.groups matches a parameter first, but of {group.match!r} "
                f"{reason}.",
                "Put it before these groups."
                if matched
                else f"Full names are {names[0]} to {names[-1]}; a * matches dots, too.",
            )
        left -= matched
