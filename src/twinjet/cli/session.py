"""What `run` and `chat` share: an `LLM` opened behind progress bars, and sampling from options."""

import os
import secrets

from twinjet.api import LLM
from twinjet.assemble import open_model
from twinjet.cli.progress import ProgressReport
from twinjet.core.types import SamplingParams
from twinjet.options import EngineOptions, default_home


def open_llm(model: str, options: EngineOptions) -> LLM:
    """Raises: CheckpointError, ConfigError, EngineDead."""
    home = default_home(os.environ)
    with ProgressReport() as report:
        open_model(model, home, report.pulling(model))  # pulls with a bar; a file that is there is only opened
        return LLM(model, options=options, home=home, on_progress=report.engine)


def sampling_params(temperature: float, top_k: int, top_p: float, min_p: float, seed: int | None) -> SamplingParams:
    """Raises: InvalidRequest."""
    return SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=secrets.randbits(63) if seed is None else seed,
    )
