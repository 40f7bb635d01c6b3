"""Build the page of the textbook's systems, with a picture of each, from recordings of this version.

Run `python jobs/prove/textbook.py` after a change of a topic; a test finds a page that is out of date. It needs mpitrain[report].
"""

from pathlib import Path

from PIL import Image
from tqdm import tqdm

from mpitrain.files import write_whole
from mpitrain.tools.textbook.explain.page import FRAMES, PICTURES, digests, systems
from mpitrain.tools.textbook.explain.picture import draw_one
from mpitrain.tools.textbook.explain.topics import TOPICS

COLOURS = 24
"""Colours of a picture: a third of the bytes of one with all."""


def main() -> None:
    """Write the page, the pictures and the digests of their frames."""
    folder = Path(__file__).parents[2] / PICTURES
    folder.mkdir(exist_ok=True)
    explanations = {name: topic.explained(topic.setting(name)) for name, topic in TOPICS.items()}
    for name in tqdm(explanations, desc="pictures", leave=False, disable=None):
        path = folder / f"{name}.png"
        draw_one(explanations[name], path)
        with Image.open(path) as drawn:
            small = drawn.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        small.save(path, optimize=True)
    write_whole(folder / FRAMES, digests(explanations))
    write_whole(folder / "README.md", systems(explanations))


if __name__ == "__main__":
    main()
