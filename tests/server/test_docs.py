"""docs/http-api.md against the code: every route and every field is there by name."""

import re
from pathlib import Path

import msgspec
import pytest

from tests.server.fakes import FakeOrchestrator, fake_service
from twinjet.server import requests as bodies
from twinjet.server.app import create_app

PAGE = (Path(__file__).parents[2] / "docs/http-api.md").read_text()
NAMES = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`]+)`", PAGE))))


@pytest.mark.parametrize(
    "body",
    [
        bodies.CompletionBody,
        bodies.ChatBody,
        bodies.ChatMessage,
        bodies.StreamOptions,
        bodies.TokenizeBody,
        bodies.DetokenizeBody,
    ],
)
def test_every_field_is_documented(body: type[msgspec.Struct]) -> None:
    assert set(body.__struct_fields__) - NAMES == set()


def test_every_field_that_is_refused_is_listed_as_such() -> None:
    refused = PAGE.partition("## Refused by name")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`([a-z_]+)`", "".join(re.findall(r"^\|([^|]+)\|", refused, re.MULTILINE))))
    assert listed == {*bodies.UNSUPPORTED_COMPLETION, *bodies.UNSUPPORTED_CHAT, "best_of"}


def test_every_route_is_documented() -> None:
    routes = {route.path for route in create_app(fake_service(FakeOrchestrator())).routes}  # pyright: ignore[reportAttributeAccessIssue]
    aliases = {"/v1/tokenize", "/v1/detokenize"}
    documented = {path.replace("{name}", "{name:path}") for path in re.findall(r"`(?:GET|POST) (/[^`]*)`", PAGE)}
    assert routes - aliases == documented
