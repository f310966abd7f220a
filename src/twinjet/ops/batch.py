"""The inputs of one step: one packed int32 array on the host, and the views that ops read on the device.

Owns the layout. One array means one transfer; floats and unsigned words travel as their bits.
Counts are scalars inside it, so that a backend can skip padding.

Rows of a sequence that has one row in the step (a decoding row, mostly) are listed as *singles*, the
others are cut into *tiles* of up to `tile_rows` rows of one sequence; each row is in exactly one of them.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

NUM_COUNTS = 5
"""Scalars at the head: samples, singles, tiles, samples that want log-probabilities, and the step's tag, by which who
dispatched the step finds its results again."""

MAX_TILE_ROWS = 128
"""Rows of an attention tile: enough to make its products compute-bound in XLA."""

ROW_FIELDS = 3  # token id (-1: the slot's last token), slot, position
SAMPLE_FIELDS = 10  # row, slot, position, temperature, top_k, top_p, min_p, seed low, seed high, choice
TILE_FIELDS = 4  # slot, first row, rows, first position


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Samples:
    """Rows whose logits choose a token; entries from `count` on are padding, with `slot` out of range."""

    count: Int[Array, ""]
    with_logprobs: Int[Array, ""]
    """How many rows asked for log-probabilities."""
    row: Int[Array, " S"]
    slot: Int[Array, " S"]
    position: Int[Array, " S"]
    """Position of the token to be chosen."""
    temperature: Float[Array, " S"]
    top_k: Int[Array, " S"]
    top_p: Float[Array, " S"]
    min_p: Float[Array, " S"]
    seed: UInt[Array, "S 2"]
    """High word, low word."""
    choice: Int[Array, " S"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Batch:
    """One step as ops see it. Padding rows have position -1 and a slot out of range."""

    token_ids: Int[Array, " T"]
    slot: Int[Array, " T"]
    position: Int[Array, " T"]
    num_singles: Int[Array, ""]
    single_rows: Int[Array, " S"]
    """Row numbers; padding entries are out of range."""
    num_tiles: Int[Array, ""]
    tiles: Int[Array, "NT 4"]
    page_table: Int[Array, "B MP"]
    samples: Samples


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Sizes of one bucket's packed array, and where its parts lie."""

    num_rows: int
    """T."""
    num_slots: int
    """B."""
    table_width: int
    """MP, page table entries per slot."""

    @property
    def max_samples(self) -> int:
        return min(self.num_rows, self.num_slots)

    @property
    def tile_rows(self) -> int:
        return min(self.num_rows, MAX_TILE_ROWS)

    @property
    def max_tiles(self) -> int:
        # Every sequence with two rows or more may leave one tile partly filled.
        return self.num_rows // self.tile_rows + min(self.num_rows // 2, self.num_slots)

    def sections(self) -> dict[str, tuple[int, int, tuple[int, ...]]]:
        """Name -> (start, stop, shape) in the packed array."""
        shapes = {
            "counts": (NUM_COUNTS,),
            "rows": (ROW_FIELDS, self.num_rows),
            "samples": (SAMPLE_FIELDS, self.max_samples),
            "singles": (self.max_samples,),
            "tiles": (self.max_tiles, TILE_FIELDS),
            "page_table": (self.num_slots, self.table_width),
        }
        sections, start = {}, 0
        for name, shape in shapes.items():
            stop = start + int(np.prod(shape))
            sections[name] = (start, stop, shape)
            start = stop
        return sections

    @property
    def size(self) -> int:
        """Length of the packed array."""
        return self.sections()["page_table"][1]

    def unpack(self, packed: Int[Array, " X"], last_token: Int[Array, " B"]) -> Batch:
        """Views of the packed array; rows that say so take the device's own last token of their slot."""
        part = {name: packed[a:b].reshape(shape) for name, (a, b, shape) in self.sections().items()}
        token_ids, slot, position = part["rows"]
        from_slot = last_token[jnp.minimum(slot, self.num_slots - 1)]
        sample = part["samples"]
        return Batch(
            token_ids=jnp.where(token_ids < 0, from_slot, token_ids),
            slot=slot,
            position=position,
            num_singles=part["counts"][1],
            single_rows=part["singles"],
            num_tiles=part["counts"][2],
            tiles=part["tiles"],
            page_table=part["page_table"],
            samples=Samples(
                count=part["counts"][0],
                with_logprobs=part["counts"][3],
                row=sample[0],
                slot=sample[1],
                position=sample[2],
                temperature=_floats(sample[3]),
                top_k=sample[4],
                top_p=_floats(sample[5]),
                min_p=_floats(sample[6]),
                seed=jax.lax.bitcast_convert_type(jnp.stack([sample[8], sample[7]], axis=1), jnp.uint32),
                choice=sample[9],
            ),
        )


def _floats(bits: Int[Array, " S"]) -> Float[Array, " S"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
