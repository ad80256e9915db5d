"""What runs inside vLLM: the plugin, the map from a checkpoint to live weights, and the engine."""


def register() -> None:
    """Make the backend ``deltactl`` known to vLLM, which calls this in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "deltactl" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("deltactl", "deltactl.vllm.engine", "Engine")
