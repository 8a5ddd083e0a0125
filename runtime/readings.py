"""The device's memory as a start goes on: from readings to the ledger's rows. Plans nothing.

The KV cache's memory is in no reading: it is planned whole. On a CPU, what is resident beside weights and attention's
workspace is the row `context`: interpreter, libraries, what the allocator keeps, and the few pages of other buffers
that are resident by then, which have rows too. On a GPU `context` is the driver's context and modules, and
`static_buffers` holds, beside the buffers, what torch's segments have more than their contents.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from runtime.assembly import EncoderParts, Parts
from runtime.config import MIB, ConfigError, ResolvedConfig
from runtime.executor.arena import retry_on_empty_cache
from runtime.executor.cuda_device import CudaDevice
from runtime.executor.device import Device, trim_heap
from runtime.executor.kv_cache import KVCache
from runtime.executor.memory import MeasuredRows
from runtime.executor.profile import load_products, run_first_step, run_steps_of_all_sizes, run_worst_step

log = logging.getLogger(__name__)

# What the scheduler keeps of each block once all have a name in the prefix cache: measured, 216-241 bytes with CPython.
BLOCK_NUMBER_BYTES = 256

# How often the arena is made larger, by a sixteenth at least, until all forwards fit.
MAX_PROOFS = 6
PROOF_STEP = 16
MIN_PROOF_STEP_BYTES = 8 * MIB

# What an interpreter without a scheduler comes to hold beyond its reading while it serves (threads, Pillow): 3.7 MiB
# were measured.
HOST_GROWTH_BYTES = 8 * MIB


class Readings(Protocol):
    """In the order of a start: `use_kv`, `measure_transient`, `prove_transient`, `rows`, `keep_transient`,
    `used_bytes`."""

    def use_kv(self, kv: KVCache | None) -> None:
        """From now on this is the KV cache; `None`: there is none."""
        ...

    def measure_transient(self, parts: EncoderParts, config: ResolvedConfig) -> None:
        """The peaks of the worst encoder forward and the worst step, which run at the same time only where images are
        encoded beside the steps."""
        ...

    def prove_transient(self, parts: EncoderParts, config: ResolvedConfig) -> None:
        """Sees, now that the graphs are there, that forwards of all sizes fit into what was measured, under the limit
        that they will run under; raises the reading until they do.

        Raises:
            ConfigError: they never do.
        """
        ...

    def rows(self, parts: EncoderParts) -> MeasuredRows:
        """Everything but the KV cache, now that all else is there."""
        ...

    def keep_transient(self, parts: EncoderParts, config: ResolvedConfig) -> None:
        """Sees that eager shapes find the memory that was planned for them, and no more. Before graphs are in use."""
        ...

    def used_bytes(self) -> int:
        """What the process uses now, with the KV cache at its full planned size whether touched or not."""
        ...

    def give_back(self) -> bool:
        """Lets an allocator give back what is free and merely kept; says whether there is such a way."""
        ...


def _worst_cases(parts: EncoderParts, config: ResolvedConfig) -> list[Callable[[], None]]:
    """The worst encoder forward, and the worst step where there is a decoder."""
    runs: list[Callable[[], None]] = [partial(parts.encoder.profile, max_tokens_per_image=config.max_tokens_per_image)]
    if isinstance(parts, Parts):
        runs.append(partial(run_worst_step, parts.runner, config))
    return runs


def _peaks(parts: EncoderParts, config: ResolvedConfig, device: Device) -> list[int]:
    if isinstance(parts, Parts):
        run_first_step(parts.runner, config)
    return [device.peak_bytes(run) for run in _worst_cases(parts, config)]


@torch.inference_mode()  # as requests are served: layers are compiled for each mode apart
def _run_all_sizes(parts: EncoderParts, config: ResolvedConfig) -> None:
    """Launches what requests of any size launch: its code is there afterwards."""
    program, most = parts.encoder.program, config.max_tokens_per_image
    for power in range(2, most.bit_length()):
        for num_tokens in {2**power, min(most, 3 * 2 ** (power - 1))}:
            program.eager([program.noise(num_tokens)])
    if isinstance(parts, Parts):
        run_steps_of_all_sizes(parts.runner, config)


class CpuReadings:
    """Readings of the resident set."""

    def __init__(self, device: Device, *, baseline_bytes: int) -> None:
        """`baseline_bytes`: what was resident before anything was built."""
        self._device = device
        self._kv: KVCache | None = None
        self._baseline_bytes = baseline_bytes
        self._resident_bytes = 0
        self._peak_bytes = 0

    def use_kv(self, kv: KVCache | None) -> None:
        self._kv = kv

    def measure_transient(self, parts: EncoderParts, config: ResolvedConfig) -> None:
        peaks = _peaks(parts, config, self._device)
        self._resident_bytes = self._without_kv()
        self._peak_bytes = max(*peaks, self._resident_bytes)
        if isinstance(parts, Parts) and parts.ahead is not None:
            # One thread is at an image while the other one is at a step, or at an image too.
            self._peak_bytes += max(0, peaks[0] - self._resident_bytes)

    def prove_transient(self, parts: EncoderParts, config: ResolvedConfig) -> None:
        """A CPU's allocator has no limit of its own."""

    def rows(self, parts: EncoderParts) -> MeasuredRows:
        """`context + weights + attention_workspace + transient` is at least the highest reading of the profile."""
        encoder, decoder, workspace, static = _exact_bytes(parts)
        resident_bytes = max(self._resident_bytes, self._without_kv() - encoder - decoder)
        own_bytes = max(self._baseline_bytes, resident_bytes - parts.weight_bytes - workspace)
        growth_bytes = BLOCK_NUMBER_BYTES * self._kv.max_blocks if self._kv else HOST_GROWTH_BYTES
        return MeasuredRows(
            context=own_bytes + growth_bytes,
            weights=parts.weight_bytes,
            attention_workspace=workspace,
            static_buffers=static,
            embedding_store=parts.store.num_bytes + (parts.ahead_bytes if isinstance(parts, Parts) else 0),
            transient=self._peak_bytes - self._resident_bytes,
            encoder_graphs=encoder,
            decoder_graphs=decoder,
        )

    def keep_transient(self, parts: EncoderParts, config: ResolvedConfig) -> None:
        """A CPU's allocator takes memory from the system as it needs it."""

    def used_bytes(self) -> int:
        return self._without_kv() + (self._kv.num_bytes if self._kv else 0)

    def give_back(self) -> bool:
        return trim_heap()

    def _without_kv(self) -> int:
        return self._device.used_bytes() - (self._kv.resident_bytes() if self._kv else 0)


class CudaReadings:
    """Readings of the device and of torch's segments.

    With the cache emptied, what we use is: context and modules, torch's segments, mapped KV, graphs in the driver. The
    first is what remains when the others are taken away, so that the rows sum to the reading.
    """

    def __init__(self, device: CudaDevice, *, is_kv_in_torch: bool) -> None:
        """`is_kv_in_torch`: the KV cache's memory is a segment of torch's allocator."""
        self._device = device
        self._is_kv_in_torch = is_kv_in_torch
        self._kv: KVCache | None = None
        # What eager forwards find in one piece, and what small blocks may take beside it.
        self._arena_bytes = 0
        self._small_bytes = 0

    def use_kv(self, kv: KVCache | None) -> None:
        self._kv = kv

    def measure_transient(self, parts: EncoderParts, config: ResolvedConfig) -> None:
        with torch.inference_mode():
            load_products(parts.linears, config.engine.max_num_batched_tokens)
        self._small_bytes = self._device.small_peak_bytes(partial(_run_all_sizes, parts, config))
        peaks = _peaks(parts, config, self._device)
        self._arena_bytes = max(0, max(peaks) - self._device.settled_bytes())

    def prove_transient(self, parts: EncoderParts, config: ResolvedConfig) -> None:
        for _ in range(MAX_PROOFS):
            try:
                self._limit()
                _run_all_sizes(parts, config)
                for run in _worst_cases(parts, config):
                    run()
                return
            except torch.OutOfMemoryError as error:
                more = max(self._arena_bytes // PROOF_STEP, MIN_PROOF_STEP_BYTES)
                log.warning(
                    "eager forwards need more than the largest took at its peak; the plan gives them more",
                    extra={"arena_bytes": self._arena_bytes, "more_bytes": more, "error": str(error)[:200]},
                )
                self._arena_bytes += more
            finally:
                self._device.lift_limit()
                self._device.settled_bytes()
        raise ConfigError(
            f"eager forwards do not fit into {self._arena_bytes} bytes, much more than the largest took at its peak: "
            "lower max_pixels or max_num_batched_tokens"
        )

    def rows(self, parts: EncoderParts) -> MeasuredRows:
        used_bytes = self._device.settled_bytes()
        kv_bytes = self._kv.resident_bytes() if self._kv else 0
        segments = self._device.reserved_bytes() - (kv_bytes if self._is_kv_in_torch else 0)
        encoder, decoder, workspace, static = _exact_bytes(parts)
        driver = _driver_bytes(parts)
        encoder, decoder = encoder - driver[0], decoder - driver[1]
        contents = parts.weight_bytes + workspace + parts.store.num_bytes + encoder + decoder
        context = used_bytes - kv_bytes - segments - sum(driver)
        if context < 0:
            log.warning("readings leave nothing for the context", extra={"context_bytes": context})
        return MeasuredRows(
            context=max(0, context),
            weights=parts.weight_bytes,
            attention_workspace=workspace,
            static_buffers=max(static, segments - contents),
            embedding_store=parts.store.num_bytes,
            transient=self._arena_bytes + self._small_bytes,
            encoder_graphs=encoder,
            decoder_graphs=decoder,
            graph_driver=sum(driver),
        )

    def keep_transient(self, parts: EncoderParts, config: ResolvedConfig) -> None:
        """Lets torch's allocator keep what the transient's row has, and hold no more from now on; the worst case runs
        once more under that limit."""
        self._limit()
        for run in _worst_cases(parts, config):
            retry_on_empty_cache(run)

    def _limit(self) -> None:
        self._device.settled_bytes()
        most = self._device.reserved_bytes() + self._arena_bytes + self._small_bytes
        self._device.limit_reserved(most, arena_bytes=self._arena_bytes)

    def used_bytes(self) -> int:
        if self._kv is None:
            return self._device.used_bytes()
        return self._device.used_bytes() - self._kv.resident_bytes() + self._kv.num_bytes

    def give_back(self) -> bool:
        return False  # its allocator gives back before it takes more, see `keep_transient`


def _exact_bytes(parts: EncoderParts) -> tuple[int, int, int, int]:
    """Encoder graphs, decoder graphs, attention's workspace, static buffers."""
    encoder = parts.encoder.graphs.graph_bytes
    if not isinstance(parts, Parts):
        return encoder, 0, 0, 0
    static = parts.runner.static_bytes + parts.row_bytes
    return encoder, parts.decoder_graphs.graph_bytes, parts.attention.workspace_bytes, static


def _driver_bytes(parts: EncoderParts) -> tuple[int, int]:
    decoder = parts.decoder_graphs.driver_bytes if isinstance(parts, Parts) else 0
    return parts.encoder.graphs.driver_bytes, decoder
