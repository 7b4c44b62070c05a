# SPDX-License-Identifier: Apache-2.0
if __name__ != "puzzle.search_spaces":  # the clone's root is on the path: this would load a second time
    raise ImportError("import puzzle.search_spaces instead of search_spaces")

from pathlib import Path

from puzzle.errors import ConfigError, did_you_mean

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The presets that come with Puzzle."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def path(name_or_file: str) -> Path:
    """The file of a preset (`smollm2-quick`) or of the user (`my.yaml`, any path).

    Raises:
        ConfigError: neither a preset nor a file.
    """
    name = Path(name_or_file).stem if name_or_file.startswith("search_spaces/") else name_or_file
    if Path(name_or_file).is_file():
        return Path(name_or_file)
    if name in names():
        return FOLDER / f"{name}.yaml"
    raise ConfigError(
        f"search space {name_or_file!r} is neither a file nor a preset{did_you_mean(name, names())} "
        f"(presets: {', '.join(names())})"
    )
