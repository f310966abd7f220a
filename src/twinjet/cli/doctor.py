"""`twinjet doctor`: what this machine has, and what Twinjet will use of it."""

import importlib.metadata
import os
import platform
from pathlib import Path

import typer

from twinjet.options import DEFAULT_MODEL, EngineOptions, default_home, packed_folder


def doctor() -> None:
    """Say what the machine has and what will be used."""
    from twinjet import __version__, machine
    from twinjet.cli.tables import print_facts

    home = default_home(os.environ)
    cores = machine.usable_cores()
    total, available = map(machine.format_bytes, (machine.total_memory(), machine.available_memory()))
    found = machine.accelerators()
    typer.echo("This machine")
    print_facts(
        (
            ("processor", machine.processor_name()),
            ("cores", f"{cores.physical} physical, {cores.logical} logical usable"),
            ("instruction sets", " ".join(machine.instruction_sets()) or "unknown"),
            ("memory", f"{total}, {available} available"),
            ("accelerators", ", ".join(found) or "none found"),
        ),
        indent="  ",
    )
    kernels, backend = _describe_kernels()
    typer.echo("Installed")
    print_facts(
        (
            ("twinjet", __version__),
            ("python", f"{platform.python_version()} on {platform.platform(terse=True)}"),
            ("jax", f"{_version('jax')}, jaxlib {_version('jaxlib')}"),
            ("compiled kernels", kernels),
            ("home", _describe_home(home)),
            ("packed weights", _describe_packed(home)),
        ),
        indent="  ",
    )
    typer.echo(f"What `twinjet serve {DEFAULT_MODEL}` will use")
    note = " (accelerators are not used yet)" if found else ""
    print_facts((("backend", f"{backend}{note}"), *_plan(home)), indent="  ")


def _describe_kernels() -> tuple[str, str]:
    """The kernels' state, and the backend that follows from it."""
    from twinjet.kernels import LIBRARY, KernelsUnavailable, open_library

    try:
        open_library()
    except KernelsUnavailable as reason:
        return f"none: {reason}", "reference ops, compiled by XLA for the CPU: right, and many times slower"
    return LIBRARY.name, "CPU kernels; with --exact the reference ops, compiled by XLA"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _describe_home(home: Path) -> str:
    from twinjet.checkpoints.pull import list_models

    here = [entry.name for entry in list_models(home) if entry.path is not None]
    return f"{home}; models there: {', '.join(here) or 'none'}"


def _describe_packed(home: Path) -> str:
    from twinjet.checkpoints.packed import list_packed
    from twinjet.machine import format_bytes

    folder = packed_folder(home)
    kept = list_packed(folder)
    if not kept:
        return f"none in {folder}"
    each = ", ".join(f"{Path(one.source).name} {format_bytes(one.size_bytes)}" for one in kept)
    return f"{each}; in {folder}, which may be deleted: a start packs anew"


def _plan(home: Path) -> tuple[tuple[str, str], ...]:
    """What would be decided for the default model; a model that has yet to be pulled is not pulled for this."""
    from twinjet.assemble import assemble, open_model
    from twinjet.checkpoints.pull import list_models

    if not any(entry.name == DEFAULT_MODEL and entry.path is not None for entry in list_models(home)):
        return (("model", f"{DEFAULT_MODEL} is not here yet: twinjet pull {DEFAULT_MODEL}"),)
    return assemble(open_model(DEFAULT_MODEL, home), EngineOptions(), home).summary()
