"""Values of a recording that ranks have in common: in memory of all ranks, which is reused only after a barrier."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quire.ops.native.liveness import Storage, Use


@dataclass(slots=True)
class SharedValues:
    """The values that ranks have in common, in memory of their own."""

    storages: set[Storage] = field(default_factory=set)
    # A rank's columns of a shared value that are computed where they belong: (the shared value, its first column).
    written_in_place: dict[Storage, tuple[Storage, int]] = field(default_factory=dict)
    barriers: set[int] = field(default_factory=set)  # uses where all ranks wait for each other
    logits: bool = False  # whether ranks share the logits
    widest_input: int = 0  # of a matmul that some outputs are computed of here


def own_uses(uses: Sequence[Use], shared: SharedValues) -> list[Use]:
    """The uses of values that are this rank's alone."""

    def own(storages: Sequence[Storage]) -> list[Storage]:
        return [s for s in storages if s not in shared.storages and s not in shared.written_in_place]

    return [
        replace(
            use,
            inputs=own(use.inputs),
            output=next(iter(own([use.output])), None) if use.output else None,
            in_place=own(use.in_place),
        )
        for use in uses
    ]


def shared_uses(uses: Sequence[Use], shared: SharedValues) -> list[Use]:
    """The uses of shared values. A value is written from the op on that computes a rank's columns of it. Memory that
    becomes free may still be read by another rank until all have met."""

    def common(storages: Sequence[Storage]) -> list[Storage]:
        targets = [shared.written_in_place.get(storage, (storage, 0))[0] for storage in storages]
        return [target for target in targets if target in shared.storages]

    mapped: list[Use] = []
    for index, use in enumerate(uses):
        touched = common([*use.inputs, *([use.output] if use.output else [])])
        mapped += [Use([storage], storage, barrier=False) for storage in touched]
        if index in shared.barriers:
            mapped.append(Use([], None, barrier=True))
    return mapped
