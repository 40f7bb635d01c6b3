"""The file with which a student begins: the statement, and a function without a body."""

from mpitrain.tools.textbook.exercises.exercise import Exercise
from mpitrain.tools.textbook.words import text


def skeleton(name: str, exercise: Exercise, language: str) -> str:
    statement = text(exercise.statement, language)
    check = text("Check it with: mpitrain learn check FILE", language)
    cost = text(
        "{cost}: at most {formula}",
        language,
        cost=text(exercise.cost, language),
        formula=text(exercise.formula, language),
    )
    imports = "import numpy as np\n\n" if exercise.way == "programs" else ""
    return (
        f'"""{statement}\n\n{cost}\n{check}\n"""\n\n{imports}EXERCISE = "{name}"\n\n\n'
        f"def {exercise.function}({exercise.arguments}):\n{exercise.body}"
    )
