"""How a child interpreter is started so that it finds the same code as this one."""

import os
import site
import sys
from collections.abc import Mapping


def worker_command() -> list[str]:
    """-P: the directory somebody happens to start the server in must not shadow modules."""
    return [sys.executable, "-P", "-X", "faulthandler", "-m", "twinjet.worker"]


def worker_environment(base: Mapping[str, str], jax_platforms: str | None) -> dict[str, str]:
    """`base` with JAX's platform pinned and with the import path of this process.

    Args:
        jax_platforms: value of JAX_PLATFORMS; None keeps that of `base`, or JAX's own choice.
    """
    environment = dict(base)
    if jax_platforms is not None:
        environment["JAX_PLATFORMS"] = jax_platforms
    paths = [os.path.abspath(path) for path in sys.path if not _is_builtin(path)]
    inherited = environment.get("PYTHONPATH", "").split(os.pathsep)
    merged = dict.fromkeys(path for path in (*paths, *inherited) if path)
    if merged:
        environment["PYTHONPATH"] = os.pathsep.join(merged)
    return environment


def _is_builtin(path: str) -> bool:
    """Whether any child of the same interpreter has this entry anyway: in PYTHONPATH it would go before the
    standard library, and could hide parts of it."""
    path = os.path.abspath(path)
    if path in (site.getusersitepackages(), *site.getsitepackages()):
        return True
    roots = [os.path.join(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix)]
    return any(os.path.commonpath([root, path]) == root for root in roots)
