"""Finds stop strings in a text that arrives in parts."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from twinjet.core.errors import InvalidRequest

MAX_STOP_CHARACTERS = 1 << 14
"""Of all stop strings of a request together: each character costs a few hundred bytes while the request runs."""


@dataclass(frozen=True, slots=True)
class StopScan:
    """What one more part of the text brought."""

    text: str
    """Text that can no longer be part of a stop string: all before the stop string, if one was found."""
    stop: str | None = None
    """The stop string found."""


class StopMatcher:
    """Searches for several strings at once (Aho-Corasick): each character costs the same, however many strings.

    The string that is complete first ends the text, as it does when a model writes character by character; of several
    that end together, the longest, which begins earliest. How the text is cut into parts makes no difference. What is
    withheld is the longest tail of the text that begins a stop string, and no more.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise InvalidRequest("a stop string must not be empty", "stop")
        if (size := sum(map(len, stops))) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(f"stop strings may have {MAX_STOP_CHARACTERS} characters in all, got {size}", "stop")
        self.stop: str | None = None
        self._withheld = ""
        self._state = 0
        # State 0 is the empty string, every other a beginning of a stop string.
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]
        for stop in stops:
            state = 0
            for character in stop:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._depth.append(self._depth[state] + 1)
                    self._found.append(None)
                state = self._next[state][character]
            self._found[state] = stop
        self._fallback = self._fallbacks()

    def _fallbacks(self) -> list[int]:
        """For each state that of its longest proper tail; stop strings that end there end in the longer one too."""
        fallback = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, target in self._next[state].items():
                fallback[target] = self._step(fallback, fallback[state], character)
                if self._found[target] is None:
                    self._found[target] = self._found[fallback[target]]
                queue.append(target)
        return fallback

    def _step(self, fallback: list[int], state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = fallback[state]
        return self._next[state].get(character, 0)

    def push(self, text: str) -> StopScan:
        """Take more text. After a stop was found, nothing comes any more."""
        if self.stop is not None:
            return StopScan("", self.stop)
        if len(self._next) == 1:
            return StopScan(text)
        state = self._state
        for position, character in enumerate(text):
            state = self._step(self._fallback, state, character)
            stop = self._found[state]
            if stop is not None:
                self.stop = stop
                before = (self._withheld + text[: position + 1])[: -len(stop)]
                self._withheld = ""
                return StopScan(before, stop)
        self._state = state
        known = self._withheld + text
        certain = len(known) - self._depth[state]
        self._withheld = known[certain:]
        return StopScan(known[:certain])

    def finish(self) -> str:
        """What was withheld: the text is over, so it is no stop string."""
        withheld, self._withheld, self._state = self._withheld, "", 0
        return withheld
