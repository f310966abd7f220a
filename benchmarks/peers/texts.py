"""English texts of several kinds, out of Debian packages: fetched, never kept here.

A Debian or Ubuntu with apt is needed; nothing is installed, packages are only unpacked. Lines that a text file broke
are joined again, so that a model reads paragraphs.
"""

import gzip
import hashlib
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Text:
    """One text, and where it came from."""

    name: str
    source: str
    content: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()


def fetch_texts(folder: Path) -> list[Text]:
    """A history, a lexicon of slang, anecdotes, and a tale told in dialogue. Downloads what `folder` has not yet.

    Raises: OSError or subprocess.CalledProcessError where apt cannot bring a package.
    """
    texts = []
    for name, (pattern, extract) in _SOURCES.items():
        package = _package_named(pattern)
        unpacked = folder / package
        if not unpacked.exists():
            _unpack(package, folder, unpacked)
        texts.append(Text(name, f"Debian package {package}", extract(unpacked)))
    return texts


def read_text(path: Path) -> Text:
    return Text(path.stem, path.name, path.read_text())


def _package_named(pattern: str) -> str:
    names = subprocess.run(["apt-cache", "pkgnames"], check=True, capture_output=True, text=True).stdout.split()
    found = sorted(name for name in names if re.fullmatch(pattern, name))
    if not found:
        raise OSError(f"apt knows no package {pattern}; run apt-get update, or give files with --text")
    return found[-1]


def _unpack(package: str, folder: Path, unpacked: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", "-qq", package], cwd=folder, check=True)
    (archive,) = folder.glob(f"{package}_*.deb")
    subprocess.run(["dpkg-deb", "-x", archive, unpacked], check=True)
    archive.unlink()


def _history(root: Path) -> str:
    (path,) = root.rglob("project-history.en.txt.gz")
    return "\n\n".join(_long_paragraphs(gzip.decompress(path.read_bytes()).decode()))


def _lexicon(root: Path) -> str:
    (path,) = root.rglob("jargon.txt.gz")
    return "\n\n".join(_long_paragraphs(gzip.decompress(path.read_bytes()).decode("utf-8", "replace")))


def _anecdotes(root: Path) -> str:
    pieces = []
    for name in ("humorists", "people"):
        (path,) = (path for path in root.rglob(name) if path.is_file())
        pieces += path.read_text().split("\n%\n")
    return "\n\n".join(joined for piece in pieces for joined in joined_paragraphs(piece))


def _tale(root: Path) -> str:
    scenarios = sorted(root.rglob("scenarios/*.cfg"))
    spoken = [
        line for path in scenarios for line in re.findall(r'(?:message|story)\s*=\s*_\s*"([^"]+)"', path.read_text())
    ]
    return "\n\n".join(re.sub(r"<[^>]+>", "", line) for line in spoken)


_SOURCES: dict[str, tuple[str, Callable[[Path], str]]] = {
    "history": ("debian-history", _history),
    "lexicon": ("jargon-text", _lexicon),
    "anecdotes": ("fortunes", _anecdotes),
    "tale": (r"wesnoth-1\.\d+-did", _tale),
}
"""Kind of text -> pattern of the package's name, and what takes the text out of it."""

_SHORTEST_PARAGRAPH = 200
"""Characters; under it are headings, tables of contents and lists."""


def joined_paragraphs(text: str) -> Iterator[str]:
    """Paragraphs, each on one line."""
    for paragraph in re.split(r"\n\s*\n", text):
        joined = " ".join(paragraph.split())
        if joined:
            yield joined


def _long_paragraphs(text: str) -> Iterator[str]:
    return (paragraph for paragraph in joined_paragraphs(text) if len(paragraph) >= _SHORTEST_PARAGRAPH)
