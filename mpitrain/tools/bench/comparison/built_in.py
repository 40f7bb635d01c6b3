"""The built-in jobs of `mpitrain compare`, in which a trick helps or costs."""

JOBS: dict[str, tuple[str, ...]] = {
    "small": (
        "model.layers=2",
        "model.width=64",
        "model.heads=4",
        "model.context=64",
        "batch.size=128",
    ),
    "large": (
        "model.layers=3",
        "model.width=384",
        "model.heads=8",
        "model.context=16",
        "batch.size=8",
    ),
}
"""{--job: its settings}: a small model with a large batch, and a large model with a small batch.

In the first, activations are most of the memory. In the second, parameters and their state are.
"""
