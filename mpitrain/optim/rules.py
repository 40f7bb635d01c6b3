"""The table of all update rules, and the check of [optimizer] against it."""

from mpitrain import config
from mpitrain.errors import ConfigError
from mpitrain.ops import OPERATIONS
from mpitrain.ops.codes import SIGNED, UNSIGNED
from mpitrain.optim.rule import (
    ADAM,
    BlockWise,
    ElementWise,
    Rule,
    TorchClass,
    elements,
    of_adam,
    torch_adam,
)
from mpitrain.optim.schedule import schedule_error
from mpitrain.optim.tensor_rules import ADAFACTOR, LAMB, MUON
from mpitrain.tables import Table

SETTINGS = config.Optimizer.model_fields
EVERY = ("name", "lr", "clip", "warmup", "schedule", "final", "decay_steps", "groups")
"""The keys of [optimizer] that the training step reads with every rule."""

RULES: Table[str, Rule] = Table(
    {
        "sgd": Rule(
            "stochastic gradient descent",
            ("weight_decay",),
            {},
            ElementWise("sgd", lambda update: {}),
        ),
        "momentum": Rule(
            "SGD with heavy-ball momentum (Polyak 1964)",
            ("weight_decay", "momentum"),
            {"momentum": elements},
            ElementWise("momentum", lambda update: {"beta": update.settings.momentum}),
        ),
        "nesterov": Rule(
            "SGD with Nesterov momentum, as torch.optim.SGD (Sutskever et al. 2013)",
            ("weight_decay", "momentum"),
            {"momentum": elements},
            ElementWise("nesterov", lambda update: {"beta": update.settings.momentum}),
            defaults={"lr": 0.1, "weight_decay": 0.0},
            torch=TorchClass(
                "SGD", lambda settings: {"momentum": settings.momentum, "nesterov": True}
            ),
        ),
        "adam": Rule(
            "Adam, whose weight decay is added to the gradient (Kingma and Ba 2015)",
            ADAM,
            {"first_moment": elements, "second_moment": elements},
            ElementWise("adam", of_adam),
            defaults={"weight_decay": 0.0},
            torch=TorchClass("Adam", torch_adam),
        ),
        "adamw": Rule(
            "Adam with decoupled weight decay (Loshchilov and Hutter 2019)",
            ADAM,
            {"first_moment": elements, "second_moment": elements},
            ElementWise("adamw", of_adam),
            torch=TorchClass("AdamW", torch_adam),
        ),
        "adamw8bit": Rule(
            "adamw with moments of 8 bits (Dettmers et al. 2022)",
            ADAM,
            {"first_moment": elements, "second_moment": elements},
            BlockWise(
                "adamw8bit", "adamw", {"first_moment": SIGNED, "second_moment": UNSIGNED}, of_adam
            ),
        ),
        "lion": Rule(
            "the sign of a momentum, with decoupled weight decay (Chen et al. 2023)",
            ("weight_decay", "beta1", "beta2"),
            {"momentum": elements},
            ElementWise(
                "lion",
                lambda update: {"beta1": update.settings.beta1, "beta2": update.settings.beta2},
            ),
            defaults={"lr": 5e-4, "weight_decay": 0.4, "beta1": 0.9, "beta2": 0.99},
        ),
        "lamb": LAMB,
        "adafactor": ADAFACTOR,
        "muon": MUON,
    }
)
"""Update rules by optimizer.name. Configuration, help, memory estimates and checkpoints read the
rows.
"""


def _unread_keys(settings: config.Optimizer) -> list[str]:
    read = (*EVERY, *RULES[settings.name].reads)
    return [
        key
        for key, field in SETTINGS.items()
        if key not in read and getattr(settings, key) != field.default
    ]


def without_unread(settings: config.Optimizer) -> config.Optimizer:
    """Return a copy in which keys that the rule does not read have their defaults.

    Earlier versions accepted such keys; they had no effect.
    """
    keys = _unread_keys(settings) if settings.name in RULES else []
    return settings.model_copy(update={key: SETTINGS[key].default for key in keys})


def checked(whole: config.Config) -> config.Config:
    """Return a copy in which hyper-parameters that are not set have the rule's own defaults.

    raises  ConfigError for a key that the rule does not read, or if the rule refuses another key
    """
    settings = whole.optimizer
    config.check_choice("optimizer.name", settings.name, RULES)
    rule = RULES[settings.name]
    if keys := _unread_keys(settings):
        readers = [name for name, other in RULES.items() if {*keys} <= {*other.reads}]
        values = " and ".join(f"optimizer.{key} is {getattr(settings, key)}" for key in keys)
        raise ConfigError(
            f"Update rule {settings.name} reads {', '.join(rule.reads)} of [optimizer] besides "
            f"{', '.join(EVERY[1:])}, but {values}.",
            f"Leave out {' and '.join(f'optimizer.{key}' for key in keys)}"
            + (f", or set optimizer.name to {' or '.join(readers)}." if readers else "."),
        )
    if error := schedule_error(settings, whole.run.steps):
        raise error
    if isinstance(rule.step, ElementWise | BlockWise) and rule.step.op not in OPERATIONS:
        raise ConfigError(
            f"The step of a rule is an operation of the table OPERATIONS, but {settings.name} names {rule.step.op!r}.",
            "Add the operation to the table, or choose another optimizer.name.",
        )
    if refused := rule.refusal(whole):
        raise refused
    own = {
        key: default
        for key, default in rule.defaults.items()
        if key not in settings.model_fields_set
    }
    return whole.model_copy(update={"optimizer": settings.model_copy(update=own)})
