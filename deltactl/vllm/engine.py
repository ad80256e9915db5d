"""The weight-transfer engine that vLLM makes in each worker for the backend ``deltactl``.

All that an update is stands in ``Serving``; vLLM's routes reach it through here, the worker
extension's methods through ``engine.serving``. No method raises once the server runs: with several
ranks an exception would leave the replies of later ranks in vLLM's queue, and each later call would
get the reply before.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deltactl.core.errors import DeltactlError, NotFound, Unsupported
from deltactl.vllm.update.canary import Canary, ask
from deltactl.vllm.update.model_weights import ModelWork
from deltactl.vllm.update.peers import Alone, Group, Peers
from deltactl.vllm.update.serving import Serving

if TYPE_CHECKING:
    import torch

    from deltactl.checkpoint.checkpoint import Checkpoint


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """``{"init_info": {}}``: there is nothing to set up."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """``{"update_info": {"update": ID}}``: the update that was staged and sealed under this id."""

    update: str


class Engine(WeightTransferEngine):  # type: ignore[misc]
    """Commits updates that were staged and sealed through the worker extension.

    A second model for speculative decoding is not updated. Data parallelism is refused: its
    replicas are servers of their own to a client, which this engine cannot tell apart.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        refusal = _refusal(vllm_config)
        peers = _peers() if refusal is None else Alone()  # the others would not be called
        work = ModelWork(model, lambda: _directory(vllm_config), peers.size, self._reload)
        self.serving = Serving(work, peers, refusal, Canary(lambda: ask(self.runner), peers))
        self.runner: Any = None  # vLLM's, of this rank; the worker extension has it
        if refusal is None:
            work.look()

    def _reload(self, names: tuple[str, ...], checkpoint: Checkpoint) -> None:
        from deltactl.vllm.update.reload import reload_tensors

        reload_tensors(self.model, self.model_config, names, checkpoint)

    def parse_init_info(self, init_dict: object) -> InitInfo:
        """Take whatever is given: nothing of it is used, and nothing may raise."""
        return InitInfo()

    def init_transfer_engine(self, init_info: Any) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing to do: what an update needs is staged already."""

    def update_weights(self, update_info: Any) -> None:
        """Commit, or record why not; an ``update_info`` of another shape is no reason to raise."""
        self.serving.commit(str(update_info.get("update")) if isinstance(update_info, dict) else "")

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Commit, or record why not."""
        self.serving.commit(update_info.update)

    def finish_weight_update(self) -> None:
        """Nothing to do. That vLLM is given a version here makes no step: ``serving`` knows it."""

    def shutdown(self) -> None:
        """Nothing to do; threads are daemons and write nothing to the model."""


def _directory(vllm_config: Any) -> Path:
    """Where the model was loaded from: as it was given, or the Hub's cache. Raises NotFound."""
    model = vllm_config.model_config
    given = Path(model.model)
    if given.is_dir():
        return given
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cache = vllm_config.load_config.download_dir
        found = snapshot_download(
            model.model, revision=model.revision, cache_dir=cache, local_files_only=True
        )
    except (LocalEntryNotFoundError, ValueError) as error:
        what = "the model was loaded from no directory that can be found again"
        raise NotFound(what, file=model.model, found=str(error)) from error
    return Path(found)


def _peers() -> Peers:
    from vllm.distributed.parallel_state import get_world_group

    world = get_world_group()
    if world.world_size == 1:
        return Alone()
    return Group(world.cpu_group, world.rank_in_group, world.world_size)


def _refusal(vllm_config: Any) -> DeltactlError | None:
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1:
        return Unsupported(
            "a server with data parallelism takes no updates",
            expected="--data-parallel-size 1",
            found=parallel.data_parallel_size,
            hint="run each replica as a server of its own, and give each as --server",
        )
    if getattr(parallel, "enable_eplb", False):
        return Unsupported(
            "a server that moves its experts about takes no updates",
            found="--enable-eplb",
            hint="start vLLM without it",
        )
    return None
