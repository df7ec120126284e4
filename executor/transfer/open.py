"""Makes an executor's endpoint out of its configuration."""

from __future__ import annotations

from batch_manager import BatchManager, KvCacheManager
from engine_build.engine_dir import EngineDirectory
from executor.api.errors import InvalidRequestError, UnsupportedFeatureError
from executor.api.kv_cache_config import CacheTransceiverConfig
from executor.engines.interface import Engine
from executor.transfer.credentials import PeerCredentials
from executor.transfer.endpoint import TransferEndpoint
from executor.transfer.grpc_network import GrpcNetwork
from executor.transfer.integrity import ModelIdentity
from executor.transfer.layout import ELEMENT_TYPES
from executor.transfer.nixl_transport import check_nixl
from executor.transfer.peer import TransferNetwork


def open_network(config: CacheTransceiverConfig, kv_dtype: str) -> TransferNetwork:
    """How instances reach each other: all that can be checked before there is an engine.

    Args:
        config: validated.
        kv_dtype: what the pool will keep keys and values in.

    Raises:
        InvalidRequestError: `listen` or one of `peers` is no address, or a TLS file cannot be used.
        UnsupportedFeatureError: NIXL is not installed, or the type cannot be exchanged.
    """
    if kv_dtype not in ELEMENT_TYPES:
        raise UnsupportedFeatureError(
            f"keys and values in {kv_dtype} cannot be exchanged between instances; those in "
            f"{', '.join(ELEMENT_TYPES)} can",
            field="kv_cache_config.kv_cache_dtype",
        )
    for name, addresses in (("listen", [config.listen]), ("peers", config.peers)):
        for address in addresses:
            _check_address(f"cache_transceiver_config.{name}", address)
    if config.network is not None:
        return config.network
    check_nixl()
    return GrpcNetwork(PeerCredentials.of(config))


def open_endpoint(
    config: CacheTransceiverConfig,
    network: TransferNetwork,
    engine: Engine,
    engine_dir: EngineDirectory,
    kv_dtype: str,
    kv: KvCacheManager,
    batch_manager: BatchManager,
) -> TransferEndpoint:
    """An endpoint that is not started yet.

    Args:
        config: validated.
        network: what `open_network` made of it.
        engine: has the pool.
        engine_dir: what it was opened from.
        kv_dtype: what the pool keeps keys and values in.
        kv: has the blocks.
        batch_manager: has the requests.

    Raises:
        UnsupportedFeatureError: the pool is not in main memory.
    """
    return TransferEndpoint(
        network,
        config.listen,
        engine,
        ModelIdentity.of(engine_dir),
        kv_dtype,
        kv,
        batch_manager,
        config.kv_transfer_timeout_ms / 1000,
        config.peers,
    )


def _check_address(field: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidRequestError(f"{field} has {address!r}; it must be HOST:PORT", field=field)
