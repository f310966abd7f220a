"""What `run` and `chat` share: a model opened and its engines started behind progress bars, sampling from options."""

import os
import secrets

from twinjet.api import LLM
from twinjet.assemble import OpenedModel, open_model
from twinjet.cli.progress import ProgressReport
from twinjet.core.types import SamplingParams
from twinjet.options import EngineOptions, default_home


def open_with_progress(model: str) -> OpenedModel:
    """Raises: CheckpointError."""
    with ProgressReport() as report:
        return open_model(model, default_home(os.environ), report.pulling(model))


def start_with_progress(model: OpenedModel, options: EngineOptions) -> LLM:
    """Raises: CheckpointError, ConfigError, EngineDead."""
    with ProgressReport() as report:
        return LLM(model, options=options, on_progress=report.engine)


def sampling_params(temperature: float, top_k: int, top_p: float, min_p: float, seed: int | None) -> SamplingParams:
    """Raises: InvalidRequest."""
    return SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=secrets.randbits(63) if seed is None else seed,
    )
