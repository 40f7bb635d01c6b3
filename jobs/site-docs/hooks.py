"""What MkDocs asks of us: the pages of this repository where they are, and pages that are made from the code."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from mkdocs.structure.files import File, Files

from mpitrain.cli import commands
from mpitrain.run.choices import keys
from mpitrain.tools.textbook.explain.page import write_all

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("*/**/*.md"))]
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)")
"""A link to a file."""

_FOLDER = TemporaryDirectory()
LEARN = Path(_FOLDER.name)
"""The pages of `learn explain`."""


def on_config(config):
    """Name headings as GitHub does, so that a link leads to the same heading in both."""
    config.mdx_configs["toc"] = {"slugify": lambda heading, separator: slug(heading)}
    return config


def slug(heading):
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


def on_files(files, config):
    """Add the pages, the files to which they link, and the pages that are made."""
    sources = {path for path in PAGES if ".venv" not in path.parts and "build" not in path.parts}
    for page in [*sources]:
        linked = {(page.parent / name).resolve() for name in LINK.findall(page.read_text())}
        sources |= {path for path in linked if path.is_file() and path.is_relative_to(ROOT)}
    added = [
        File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
        for path in sorted(sources)
    ]
    for _ in write_all(LEARN, "en"):
        pass
    added += [
        File.generated(config, f"learn/{path.name}", abs_src_path=str(path))
        for path in sorted(LEARN.iterdir())
    ]
    made = {"commands.md": commands_page(), "keys.md": keys_page()}
    added += [File.generated(config, name, content=text) for name, text in made.items()]
    return Files([*files, *added])


def on_page_markdown(markdown, page, config, files):
    """Unlink folders: a site has no page for them. Give lists the blank line that GitHub does not need."""
    folder = (ROOT / page.file.src_uri).parent
    links = re.compile(r"\[([^\]]*)\]\((?!\w+:)([^)#\s]+)\)")
    markdown = links.sub(lambda m: m[1] if (folder / m[2]).is_dir() else m[0], markdown)
    return re.sub(r"(?m)^((?![-\s#|>`<]).+)\n(?=- )", r"\1\n\n", markdown)


def commands_page():
    """Return the help of each command, as Click has it."""
    lines = ["# Commands", ""]
    for words, command, context in listed(commands, click.Context(commands, info_name="mpitrain")):
        text = command.get_help(context).replace("\b", "")
        lines += [f"## {' '.join(words)}", "", "```text", text, "```", ""]
    return "\n".join(lines)


def listed(command, context):
    """Yield (words, command, its context) of a command and of those below it."""
    yield context.command_path.split(), command, context
    for name in command.list_commands(context) if isinstance(command, click.Group) else []:
        below = command.get_command(context, name)
        if below and not below.hidden:
            yield from listed(below, click.Context(below, info_name=name, parent=context))


def keys_page():
    """Return a table of all configuration keys for each section, as pydantic has them."""
    lines, section = ["# Keys", "", "`mpitrain train --set section.key=value`, or a TOML file."], ""
    for key in keys():
        if key.name.partition(".")[0] != section:
            section = key.name.partition(".")[0]
            lines += [
                "",
                f"## {section}",
                "",
                "| key | default | values | |",
                "| --- | --- | --- | --- |",
            ]
        cells = [f"`{key.name}`", f"`{key.default!r}`", f"{key.type} {key.range}".strip(), key.help]
        lines.append(
            "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
        )
    return "\n".join([*lines, ""])
