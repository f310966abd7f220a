"""What `twinjet` exports, and what importing it costs."""

import subprocess
import sys

import twinjet


def test_all_is_what_is_exported():
    for name in twinjet.__all__:
        assert getattr(twinjet, name) is not None, name
    loaded = {name for name in vars(twinjet) if not name.startswith("_")}
    packages = {name for name in loaded if f"twinjet.{name}" in sys.modules}
    assert loaded - packages - {"TYPE_CHECKING"} <= set(twinjet.__all__)
    assert dir(twinjet) == sorted(twinjet.__all__)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(twinjet, "LLMs")


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_importing_twinjet_loads_nothing_else():
    assert {name for name in modules_after("import twinjet") if name.startswith("twinjet.")} == set()


def test_the_command_line_starts_without_the_heavy_packages():
    loaded = modules_after("import twinjet.cli.main")
    assert loaded.isdisjoint({"jax", "numpy", "fastapi", "uvicorn", "tokenizers", "zmq", "gguf", "rich"})


def test_the_server_process_never_loads_jax():
    loaded = modules_after("import twinjet.api, twinjet.assemble, twinjet.server.app, twinjet.cli.main")
    assert "twinjet.server.app" in loaded
    assert loaded.isdisjoint({"jax", "jaxlib", "twinjet.worker", "twinjet.scheduler", "twinjet.ops"})
