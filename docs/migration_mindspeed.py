"""Writes the table of `migration_mindspeed.md` from `raycp.mindspeed.FLAGS`; a test fails when it is not current.

python docs/migration_mindspeed.py
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from raycp.mindspeed import table

PAGE = Path(__file__).with_suffix(".md")
_TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of table -->)", re.DOTALL)


def current(page: str) -> str:
    """The page with the table as the code has it."""
    return _TABLE.sub(lambda _: table(), page)


def main() -> None:
    """Rewrites the page."""
    PAGE.write_text(current(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
