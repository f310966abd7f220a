"""Reads tests/golden; see the README there for where the values come from."""

import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"


def golden_cases(model: str) -> list[dict[str, Any]]:
    """Cases of `<model>.json`, `prompt_ids` and `messages` or `text` among their keys."""
    inputs = {case["name"]: case for case in json.loads((GOLDEN / "prompts.json").read_text())}
    cases = json.loads((GOLDEN / f"{model}.json").read_text())["cases"]
    return [inputs[case["name"]] | case for case in cases]
