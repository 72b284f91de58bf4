"""docs/faults.md: every test that it names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_line_names_a_test_that_is_there():
    lines = [line for line in (ROOT / "docs" / "faults.md").read_text().splitlines() if line.startswith("| ")][2:]
    named = [re.search(r"(tests/\S+\.py)::(test_\w+)", line) for line in lines]
    without = [line for line, found in zip(lines, named, strict=True) if not found]
    assert len(lines) > 25 and len(without) == 1, "the one that torch alone decides"
    for found in named:
        if found:
            file, name = found.groups()
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M), f"{file} has no {name}"
