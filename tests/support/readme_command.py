"""README's commands, as they stand: ``python -m tests.support.readme_command NUMBER`` prints one.

The first shows what deltactl does, the second runs the tests. They are the blocks of code above
README's first heading but the title; one that begins with a prompt shows a terminal, and is none.
Imports nothing, so that any Python runs it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
COMMANDS = 2

_BLOCK = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(readme: str) -> list[str]:
    """Raises ValueError unless there are as many as there should be, each a single line."""
    blocks = _BLOCK.findall(readme.partition("\n## ")[0])
    found = [block.strip() for block in blocks if not block.startswith("$ ")]
    if len(found) != COMMANDS or any(len(block.splitlines()) != 1 for block in found):
        raise ValueError(f"README has to begin with {COMMANDS} commands of one line: {found}")
    return found


if __name__ == "__main__":
    print(commands(README.read_text())[int(sys.argv[1]) - 1])
