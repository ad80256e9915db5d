"""One rank's part of an update, made ready while the server still generates.

``stage`` lays out what a run of links changes: positions in live storages, the old bits and the
new. ``stage_full`` does so for a whole checkpoint, whatever is live. Both write nothing, and have
checked all that one rank can check alone; ``Staged.sums`` is for the ranks to check together. What
is left for the pause is to compare, write and read back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from deltactl.checkpoint.checkpoint import Checkpoint
from deltactl.codec import encoding_named
from deltactl.codec.bits import Bits, Positions
from deltactl.core.errors import Conflict, DeltactlError, Unsupported
from deltactl.files.parallel import map_largest_first
from deltactl.format.delta import Delta
from deltactl.format.header import utf8
from deltactl.vllm.layout.regions import TensorSpec
from deltactl.vllm.layout.weight_map import Storage, WeightMap
from deltactl.vllm.staging import live_weights
from deltactl.vllm.staging.dense_regions import Scattered, Stretch, differences
from deltactl.vllm.staging.merging import Flags, check_form, layers_of
from deltactl.vllm.staging.sums import Sums
from deltactl.vllm.staging.tensor_stage import StagedTensor, stage_tensor
from deltactl.vllm.update.directory import file_times, unwritten_since


@dataclass(frozen=True, slots=True)
class Staged:
    """What the pause needs of an update, on one rank.

    ``full``: whether it is a whole checkpoint. ``sums``: whether all ranks stand where the links
    do; of a full update the new sums alone mean something. ``reload``: tensors that change and are
    not in the map; they have to go through the model's loader. ``ignored``: that change and that
    the model does not hold.
    """

    update_id: str
    from_step: int | None
    from_state: str | None
    to_step: int
    to_state: str
    full: bool
    patches: live_weights.Patches
    stretches: tuple[Stretch, ...]
    sums: Sums
    reload: tuple[str, ...]
    ignored: tuple[str, ...]
    _sources_stand: Callable[[], bool]

    @property
    def elements(self) -> int:
        """How many it writes."""
        return self.patches.elements + sum(stretch.elements for stretch in self.stretches)

    @property
    def nbytes(self) -> int:
        """Memory that is held for it, on the device and on the host."""
        return self.patches.nbytes + sum(stretch.nbytes for stretch in self.stretches)

    def replace(self) -> bool:
        """Where the live bits are those that were found when this was staged, exactly, make single
        elements the new ones and read them back. Else False, and all is as it was; also where the
        files that new bits come from are not as they were. Old bits that were not kept are not
        compared.

        Raises DeltactlError where they do not read back. Then, and after a failure in the middle,
        ``roll_back`` puts the old ones back, whatever has been written.
        """
        stand = self._sources_stand() and all(stretch.is_old() for stretch in self.stretches)
        return stand and self.patches.replace()

    def complete(self) -> None:
        """Write the stretches and read all back. Raises DeltactlError as ``replace``."""
        for stretch in self.stretches:
            stretch.write_new()
        if self.stretches and not self.verify():
            raise DeltactlError(live_weights.LOST)

    def verify(self) -> bool:
        """Whether the live bits are the new ones, exactly."""
        good = self.patches.is_new() and all(stretch.is_new() for stretch in self.stretches)
        return good and self._sources_stand()

    def roll_back(self) -> bool:
        """Write the old bits back; whether all of them are there again, exactly. False where they
        were not kept: of a full update's stretches."""
        self.patches.write_old()
        kept = [stretch.write_old() for stretch in self.stretches]
        stand = self.patches.is_old() and all(stretch.is_old() for stretch in self.stretches)
        return stand and all(kept)


def needs_base(deltas: Iterable[Delta]) -> bool:
    """Whether links can only be decoded with the checkpoint at hand that they stand on."""
    return any(encoding_named(delta.header.encoding).needs_base for delta in deltas)


def stage(
    weight_map: WeightMap,
    deltas: Sequence[Delta],
    *,
    update_id: str,
    from_step: int | None,
    from_state: str,
    to_step: int,
    to_state: str,
    base: Checkpoint | None = None,
) -> Staged:
    """Stage what a run of links leads to from the live weights; reads those, writes nothing.

    ``deltas``: as ``host.open_links`` gives them, their payloads checked. ``base``: the checkpoint
    of ``from_state``, where ``needs_base``. Raises Conflict where the links do not lead from one
    state to the other or do not fit the model, Unsupported where they change its structure,
    Malformed.
    """
    _check_run(deltas, from_state, to_state)
    if base is None and needs_base(deltas):
        raise ValueError("these links cannot be decoded without a base")
    for delta in deltas:
        for record in delta.records.values():
            mapped = weight_map.tensors.get(record.name)
            check_form(delta, record, None if mapped is None else mapped.spec)
    elsewhere = {*weight_map.ignored, *weight_map.unmapped}
    sums = Sums(
        (number, delta, record)
        for number, delta in enumerate(deltas)
        for record in delta.records.values()
        if record.name not in elsewhere
    )
    names = sorted({name for delta in deltas for name in delta.records}, key=utf8)
    held = [name for name in names if name in weight_map.tensors]

    def tensor(name: str) -> StagedTensor:
        mapped = weight_map.tensors[name]
        before = None if base is None else checked_bits(base, mapped.spec, from_step)
        layers = layers_of(mapped.spec, deltas)
        return stage_tensor(mapped, weight_map.storages, layers, before)

    def changed(name: str) -> int:
        return sum(delta.records[name].changed for delta in deltas if name in delta.records)

    found = map_largest_first(tensor, held, changed)
    for staged in found:
        sums.enter(staged.layers)
    return Staged(
        update_id=update_id,
        from_step=from_step,
        from_state=from_state,
        to_step=to_step,
        to_state=to_state,
        full=False,
        patches=_patches(weight_map.storages, found),
        stretches=tuple(one for staged in found for one in staged.stretches),
        sums=sums,
        reload=tuple(name for name in names if name in weight_map.unmapped),
        ignored=tuple(name for name in names if name in weight_map.ignored),
        _sources_stand=lambda: all(delta.stands() for delta in deltas),
    )


def _check_run(deltas: Sequence[Delta], from_state: str, to_state: str) -> None:
    """Raise Conflict unless each link stands on what the one before leads to."""
    state, step = from_state, None
    for delta in deltas:
        if delta.header.base_state != state:
            raise _apart(delta.path, delta.header.step, state, delta.header.base_state)
        state, step = str(delta.header.result_state), delta.header.step
    if state != to_state:
        raise _apart(deltas[-1].path if deltas else None, step, to_state, state)


def _apart(file: object, step: int | None, expected: str, found: str | None) -> Conflict:
    return Conflict(
        "the links do not lead from the server's state to the one that is asked for",
        file=file,
        step=step,
        expected=f"state {expected}",
        found=f"state {found}",
    )


def stage_full(
    weight_map: WeightMap, checkpoint: Checkpoint, *, update_id: str, to_step: int, to_state: str
) -> Staged:
    """Stage all of a checkpoint, mapped from disk and proven to be ``to_state``, whatever is live.

    Every live element is compared with it, so that nothing need be known of the live weights. Old
    bits are kept of single elements alone: what is written in stretches cannot be taken back. What
    the map is not proven for goes through the model's loader. Raises Conflict where the checkpoint
    is not of the model's tensors.
    """
    times, tensors = file_times(checkpoint), checkpoint.tensors
    bits = {
        name: checked_bits(checkpoint, mapped.spec, to_step)
        for name, mapped in weight_map.tensors.items()
    }
    by_loader = {*weight_map.unmapped, *weight_map.unproven}

    def tensor(name: str) -> StagedTensor:
        found = StagedTensor()
        mapped = weight_map.tensors[name]
        found.add(differences(mapped, weight_map.storages, bits[name], keep_old=False))
        return found

    proven = [name for name in bits if name not in by_loader]
    found = map_largest_first(tensor, proven, lambda name: bits[name].nbytes)
    return Staged(
        update_id=update_id,
        from_step=None,
        from_state=None,
        to_step=to_step,
        to_state=to_state,
        full=True,
        patches=_patches(weight_map.storages, found),
        stretches=tuple(one for staged in found for one in staged.stretches),
        sums=Sums(()),
        reload=tuple(name for name in tensors if name in by_loader),
        ignored=tuple(name for name in weight_map.ignored if name in tensors),
        _sources_stand=lambda: unwritten_since(checkpoint, times),
    )


def checked_bits(checkpoint: Checkpoint, spec: TensorSpec, step: int | None) -> Bits:
    """All elements of a tensor. Raises Conflict unless the checkpoint has it as the model does."""
    found = checkpoint.tensors.get(spec.name)
    if found is not None and (found.dtype, found.shape) == (spec.dtype, spec.shape):
        return found.bits
    raise Conflict(
        "the step is of another model than the one that is served",
        file=checkpoint.path,
        tensor=spec.name,
        step=step,
        expected=f"{spec.dtype} {list(spec.shape)}",
        found="no such tensor" if found is None else f"{found.dtype} {list(found.shape)}",
    )


def _patches(storages: Sequence[Storage], found: Iterable[StagedTensor]) -> live_weights.Patches:
    """What is scattered, storage by storage, on its device; in order, as memory likes it."""
    of_storage: dict[int, list[Scattered]] = {}
    for tensor in found:
        for one in tensor.scattered:
            of_storage.setdefault(one.storage, []).append(one)
    patches = []
    for number in sorted(of_storage):
        parts, storage = of_storage.pop(number), storages[number]
        positions = np.concatenate([part.positions for part in parts])
        old = np.concatenate([part.old for part in parts])
        new = np.concatenate([part.new for part in parts])
        if np.any(positions[1:] <= positions[:-1]):
            order = np.argsort(positions)
            positions, old, new = positions[order], old[order], new[order]
            once = _once(storage, positions, new)
            positions, old, new = positions[once], old[once], new[once]
        patches.append(
            live_weights.Patch(
                storage,
                live_weights.positions_in(storage, positions),
                live_weights.to_device(storage, old),
                live_weights.to_device(storage, new),
            )
        )
    return live_weights.Patches(patches)


def _once(storage: Storage, positions: Positions, new: Bits) -> Flags:
    """One of each position, of which there are more where tensors lie in the same elements. Raises
    Unsupported where such tensors become different."""
    again = positions[1:] == positions[:-1]
    differ = again & (new[1:] != new[:-1])
    if differ.any():
        raise Unsupported(
            "two tensors of the checkpoint share their elements in the model that is served, and "
            "the step gives them different bits",
            found=f"element {int(positions[1:][differ][0])} of {storage.name}",
            hint="pull the step, and start the server anew on it",
        )
    return np.concatenate((np.ones(1, np.bool_), ~again))
