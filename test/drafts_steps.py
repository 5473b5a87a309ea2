"""Draft-extend steps that move a conv state forward, and the states after them, token by token."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from formula import INTEGERS
from hypothesis import strategies as st

FLOATS = (torch.float32, torch.float64, torch.bfloat16)
MARGIN = 1
"""Slots, rows and channels around the cache that a step hands over. They have labels too."""


@dataclass(frozen=True)
class Step:
    """Arguments of ``update_draft_conv_state``; each request has ``front + width`` token rows."""

    own: list[int]
    accepted: list[int]
    base: list[int]
    kept: list[int] | None
    slots: int
    """How many the cache has."""
    width: int = 4
    front: int = 0
    interval: int = 8
    window: int = 3
    channels: int = 2
    dtypes: tuple[torch.dtype, ...] = (torch.int32, torch.int32, torch.int32, torch.int64)
    floats: torch.dtype = torch.float32
    spread: int = 1
    """Every second (third, ...) row and request of a larger tensor."""
    longer: int = 0
    """Entries of the integer tensors past the last request, all 0."""

    @property
    def rows(self) -> int:
        """How many requests there are."""
        return len(self.own)

    def memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers of hidden states and cache; every element has a label of its own."""
        length = self.width + self.front
        hidden = (self.rows * self.spread + 1, length * self.spread + 1, self.channels + 1)
        cache = (self.slots + 2 * MARGIN, self.window + 2 * MARGIN, self.channels + MARGIN)
        first = hidden[0] * hidden[1] * hidden[2]
        return (
            self._labels(0, first).view(hidden),
            self._labels(first, first + cache[0] * cache[1] * cache[2]).view(cache),
        )

    def _labels(self, start: int, end: int) -> torch.Tensor:
        # No label is 0, which a masked load may give. In 16 bits, each is another finite number.
        labels = torch.arange(start + 1, end + 1)
        if self.floats is torch.bfloat16:
            assert end < 0x7F80
            return labels.to(torch.int16).view(torch.bfloat16)
        return labels.to(self.floats)

    def views(self, hidden: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The parts of ``memory()`` to hand over: ``[rows, T, D]`` and ``[slots, window, D]``."""
        rows, length = self.rows * self.spread, (self.width + self.front) * self.spread
        return (
            hidden[: rows : self.spread, : length : self.spread, : self.channels],
            cache[MARGIN:-MARGIN, MARGIN:-MARGIN, : self.channels],
        )

    def integers(self) -> dict[str, torch.Tensor | None]:
        """The integer tensors by name."""
        lists = {
            "cache_indices": self.own,
            "accepted": self.accepted,
            "seq_lens": [base + self.width for base in self.base],
            "track_slots": self.kept,
        }
        return {
            name: None if values is None else torch.tensor(values + [0] * self.longer, dtype=dtype)
            for (name, values), dtype in zip(lists.items(), self.dtypes, strict=True)
        }


def run(function: Any, step: Step, device: str = "cpu") -> torch.Tensor:
    """The whole buffer around the cache after ``function``; nothing else may have changed."""
    memory = tuple(buffer.to(device) for buffer in step.memory())
    hidden, cache = step.views(*memory)
    integers = {n: None if t is None else t.to(device) for n, t in step.integers().items()}
    before = {name: None if t is None else t.clone() for name, t in integers.items()}
    function(hidden, cache, **integers, front=step.front, interval=step.interval)
    assert torch.equal(_bits(memory[0].cpu()), _bits(step.memory()[0])), "hidden states written"
    for name, tensor in integers.items():
        assert tensor is before[name] or torch.equal(tensor, before[name]), f"{name} written"
    return _bits(memory[1].cpu())


def expected(step: Step) -> torch.Tensor:
    """The buffer that ``run`` should give: each row found by its position in the sequence."""
    memory = step.memory()
    hidden, before = step.views(*memory)
    result = memory[1].clone()
    _, target = step.views(memory[0], result)
    for r, (own, n, base) in enumerate(zip(step.own, step.accepted, step.base, strict=True)):
        if n < 0:
            continue
        # Rows by position; front rows replace the state's own.
        row_at = {base - step.window + i: row for i, row in enumerate(before[own])}
        row_at |= {base - step.front + i: row for i, row in enumerate(hidden[r])}
        # A boundary is saved again while its window, and a row before it, are front rows.
        reach = max(step.front - step.window, 0)
        first = max(base - reach, 0) + 1
        boundaries = [p for p in range(first, base + n + 1) if p % step.interval == 0]
        ends = {own: base + n}
        if boundaries and step.kept is not None and step.kept[r] >= 0:
            ends[step.kept[r]] = boundaries[-1]
        for slot, end in ends.items():
            for w in range(step.window):
                target[slot, w] = row_at[end - step.window + w]
    return _bits(result)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Any step whose requests have slots of their own; padded ones may name any slot."""
    rows = draw(st.integers(0, 4))
    width = draw(st.integers(1, 6))
    slots = 2 * rows + draw(st.integers(1, 2))
    order = draw(st.permutations(range(slots)))
    accepted = draw(st.lists(st.integers(-1, width), min_size=rows, max_size=rows))
    own, kept = list(order[:rows]), list(order[rows : 2 * rows])
    for r, n in enumerate(accepted):
        if n < 0:
            own[r], kept[r] = (draw(st.integers(0, slots - 1)) for _ in range(2))
        elif draw(st.integers(0, 3)) == 0:
            kept[r] = -1
    return Step(
        own,
        accepted,
        draw(st.lists(st.integers(0, 40), min_size=rows, max_size=rows)),
        kept if draw(st.booleans()) else None,
        slots,
        width=width,
        front=draw(st.integers(0, 8)),
        interval=draw(st.integers(1, 12) | st.sampled_from((64, 256, 1 << 20))),
        window=draw(st.integers(1, 4)),
        channels=draw(st.sampled_from((1, 2, 3, 5))),
        dtypes=tuple(draw(st.sampled_from(INTEGERS)) for _ in range(4)),
        floats=draw(st.sampled_from(FLOATS)),
        spread=draw(st.sampled_from((1, 1, 2, 3))),
        longer=draw(st.integers(0, 2)),
    )


MIXED = Step(
    own=[3, 1, 6, 2],
    accepted=[3, 0, 4, -1],
    base=[6, 8, 5, 6],
    kept=[5, 4, 0, 3],
    slots=8,
    front=2,
    spread=2,
    longer=1,
)
"""A boundary within the accepted, at the beginning, at the end, and in a padded request."""
BATCHES = (
    MIXED,
    dataclasses.replace(MIXED, kept=None),
    dataclasses.replace(MIXED, front=0, channels=1030, spread=1),
    dataclasses.replace(MIXED, interval=2, window=1),
    dataclasses.replace(MIXED, front=6, base=[11, 10, 8, 6]),
    dataclasses.replace(MIXED, kept=[5, 4, -1, 3]),
    dataclasses.replace(
        MIXED, base=[2**33 - b for b in (2, 0, 3, 2)], dtypes=(torch.int64,) * 4, interval=6
    ),
)
