"""Trains the demo model, in pieces that go on where the last ended: `python -m training.train --help`.

Knows how batches, network and optimizer meet; every picture is new, so the accuracy it logs is on unseen
pictures.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from training.data import LOGGED, MOST_TURNS, Batches, BatchSpec, loader
from training.marks import UnitHeads, marks_loss
from training.network import Network, NetworkConfig
from training.optimizer import Adam, MatrixMomentum, gradients_of, learning_rate, split_parameters
from training.supply import Supply

_CHUNK_BYTES = 15 * 2**20
TOKENIZER = Path(__file__).parent.parent / "runtime" / "demo" / "tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a run is a function of, besides the code."""

    seed: str = "fovea demo"
    peak: float = 2e-3  # of the matrices; AdamW's parts take the shares below
    patch_share: float = 0.12  # neighbouring pixels add up, so their common embedding moves fast
    other_share: float = 0.4
    warmup: int = 500
    uses: int = 3  # of a batch, at most, when drawing lags behind
    seconds: float = 600  # of the whole run, all pieces together
    decay: float = 0.5  # share of the run in which the learning rate falls
    ema: float = 0.999
    marks: float = 0.1  # weight of the loss on what lies where
    batch: BatchSpec = field(default_factory=BatchSpec)


class Trainer:
    """Network, its running average, and the optimizers' state, on one device.

    On a GPU the work of each form of batch is captured once as a graph and then replayed: the network is so
    small
    that launching its kernels one by one would take several times as long as they do.
    """

    def __init__(self, recipe: Recipe, config: NetworkConfig, device: str) -> None:
        torch.manual_seed(0)
        self.recipe, self.device = recipe, device
        self.step, self.drawn, self.seconds = 0, 0, 0.0  # updates, new batches, time, of all pieces
        self.network = Network(config).to(device)
        self.parameters: list[Tensor] = list(self.network.parameters())
        self.heads = UnitHeads(config.hidden_size).to(device)
        self.head_parameters: list[Tensor] = list(self.heads.parameters())
        for parameter in (*self.parameters, *self.head_parameters):
            parameter.grad = torch.zeros_like(parameter)
        matrices, patches, rest = split_parameters(self.network)
        self.muon = MatrixMomentum(matrices)
        others = [*rest, *self.head_parameters]
        shares = [recipe.patch_share] * len(patches) + [recipe.other_share] * len(others)
        self.adam = Adam([*patches, *others], shares, betas=(0.9, 0.98))
        self.ema = [parameter.detach().clone() for parameter in self.parameters]
        self.tally = torch.zeros(len(LOGGED), 4, device=device)  # loss, tokens, turns answered exactly, turns
        self.rate, self.correction, self.share_of_new = (torch.zeros((), device=device) for _ in range(3))
        self.inputs: dict[int, dict[str, Tensor]] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.update_graph: torch.cuda.CUDAGraph | None = None

    def train_step(self, batch: dict[str, Tensor], form: int) -> None:
        """One update from a batch on the device."""
        step, beta1, beta2 = self.step + 1, *self.adam.betas
        self.rate.fill_(
            learning_rate(
                self.step,
                self.seconds / self.recipe.seconds,
                peak=self.recipe.peak,
                warmup=self.recipe.warmup,
                decay=self.recipe.decay,
            )
        )
        self.correction.fill_((1 - beta2**step) ** 0.5 / (1 - beta1**step))
        self.share_of_new.fill_(1 - min(self.recipe.ema, step / (step + 20)))
        if form in self.graphs and self.update_graph is not None:
            for name, tensor in batch.items():
                self.inputs[form][name].copy_(tensor, non_blocking=True)
            self.graphs[form].replay()
            self.update_graph.replay()
        else:
            self._gradients(batch)
            self._update()
        self.step += 1

    def capture(self, batch: dict[str, Tensor], form: int) -> None:
        """Records the work on batches of this form; the state stays as it was."""
        self.inputs[form] = {name: tensor.clone() for name, tensor in batch.items()}
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._gradients(self.inputs[form])
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool(), capture_error_mode="thread_local"):
            self._gradients(self.inputs[form])
        if self.update_graph is None:
            for scalar in (self.rate, self.share_of_new):
                scalar.zero_()
            momenta = [tensor.clone() for tensor in (*self.muon.state(), *self.adam.state())]
            with torch.cuda.stream(side):
                self._update()
            torch.cuda.current_stream().wait_stream(side)
            update = torch.cuda.CUDAGraph()
            with torch.cuda.graph(update, pool=graph.pool(), capture_error_mode="thread_local"):
                self._update()
            torch._foreach_copy_([*self.muon.state(), *self.adam.state()], momenta)
            self.update_graph = update
        self.graphs[form] = graph
        self.tally.zero_()

    def _pool(self) -> Any:
        return next(iter(self.graphs.values())).pool() if self.graphs else None

    def _gradients(self, batch: dict[str, Tensor]) -> None:
        torch._foreach_zero_(gradients_of((*self.parameters, *self.head_parameters)))
        units, loss = batch_loss(self.network, batch, self.tally)
        torch.autograd.backward(loss + self.recipe.marks * marks_loss(self.heads, units, batch["unit_targets"]))

    @torch.no_grad()
    def _update(self) -> None:
        self.muon.step(self.rate)
        self.adam.step(self.rate, self.correction)
        gaps = torch._foreach_sub([parameter.detach() for parameter in self.parameters], self.ema)
        torch._foreach_mul_(gaps, self.share_of_new)
        torch._foreach_add_(self.ema, gaps)

    def average_into_network(self) -> None:
        """Puts the running average in the network's place, to evaluate it at the end of a piece."""
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.ema)

    def save(self, folder: Path) -> None:
        """Writes the state in files of at most 15 MiB: `state.*` to go on, and `average.*`, the running
        average.
        """
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "drawn": self.drawn,
            "seconds": self.seconds,
            "parameters": [parameter.detach() for parameter in (*self.parameters, *self.head_parameters)],
            "muon": self.muon.state(),
            "adam": self.adam.state(),
        }
        _write(folder, "state", state)
        _write(folder, "average", [tensor.half() for tensor in self.ema])

    def load_weights(self, safetensors: Path) -> None:
        """Starts anew from the weights of an exported model: step 0, no momenta."""
        self.network.load_state_dict({name: tensor.float() for name, tensor in load_file(safetensors).items()})
        with torch.no_grad():
            torch._foreach_copy_(self.ema, self.parameters)

    def load(self, folder: Path) -> None:
        """Goes on from what `save` wrote."""
        state = _read(folder, "state")
        self.step, self.drawn, self.seconds = state["step"], state["drawn"], state["seconds"]
        with torch.no_grad():
            torch._foreach_copy_([*self.parameters, *self.head_parameters], state["parameters"])
            self.muon.load_state(state["muon"])
            self.adam.load_state(state["adam"])
            if list(folder.glob("average.*")):
                torch._foreach_copy_(self.ema, _read(folder, "average"))
            else:
                torch._foreach_copy_(self.ema, state["parameters"][: len(self.ema)])


def batch_loss(network: Network, batch: dict[str, Tensor], tally: Tensor) -> tuple[Tensor, Tensor]:
    """The pictures' units [B, U, C], and the mean loss over the answers' tokens.

    Adds to `tally` [len(LOGGED), 4] as `table` reads it.
    """
    pixels = [batch[name] for name in ("pixels0", "pixels1") if name in batch]
    device = batch["token_ids"].device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        units = network.encode(pixels)
        hidden = network.decode(units, batch["token_ids"], batch["positions"], batch["image_index"])
        logits = network.logits(hidden.flatten(0, 1).index_select(0, batch["target_index"])).float()
    categories, turns = batch["target_categories"], batch["target_turns"]
    is_real = (categories < len(LOGGED)).float()
    losses = F.cross_entropy(logits, batch["target_ids"], reduction="none") * is_real
    with torch.no_grad():
        is_right = (logits.argmax(-1) == batch["target_ids"]).float()
        most = MOST_TURNS * batch["token_ids"].shape[0] + 1
        turn_right = torch.ones(most, device=device).scatter_reduce(0, turns, is_right, "amin")
        turn_category = torch.full((most,), len(LOGGED), device=device).scatter(0, turns, categories)
        sums = torch.zeros(len(LOGGED) + 1, 4, device=device)
        sums[:, 0].index_add_(0, categories, losses)
        sums[:, 1].index_add_(0, categories, is_real)
        sums[:, 2].index_add_(0, turn_category, turn_right)
        sums[:, 3].index_add_(0, turn_category, torch.ones_like(turn_right))
        tally += sums[:-1]
    return units, losses.sum() / is_real.sum()


def table(tally: Tensor) -> dict[str, dict[str, float]]:
    """Loss and share of exactly right answers by category."""
    rows = {}
    for name, (loss, tokens, right, turns) in zip(LOGGED, tally.tolist(), strict=True):
        if turns:
            rows[name] = {
                "loss": round(loss / tokens, 4),
                "right": round(100 * right / turns, 2),
                "turns": int(turns),
            }
    return rows


def evaluate(
    network: Network, tokenizer_json: str, num_batches: int, num_workers: int, device: str
) -> dict[str, dict[str, float]]:
    """The table over batches from seeds that no training uses."""
    tally = torch.zeros(len(LOGGED), 4, device=device)
    batches = Batches(tokenizer_json, "held out", 10**8, num_batches, BatchSpec())
    with torch.no_grad():
        for batch in loader(batches, num_workers, is_pinned=device == "cuda"):
            batch_loss(network, {name: tensor.to(device) for name, tensor in batch.items()}, tally)
    return table(tally)


def _write(folder: Path, name: str, value: object) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    data = buffer.getbuffer()
    for stale in folder.glob(f"{name}.*"):
        stale.unlink()
    for number, start in enumerate(range(0, len(data), _CHUNK_BYTES)):
        (folder / f"{name}.{number:02d}").write_bytes(data[start : start + _CHUNK_BYTES])


def read_average(folder: Path) -> list[Tensor]:
    """The running average of a state, in the order of `Network.parameters`."""
    return [tensor.float() for tensor in _read(folder, "average")]


def _read(folder: Path, name: str) -> Any:
    data = b"".join(path.read_bytes() for path in sorted(folder.glob(f"{name}.*")))
    return torch.load(io.BytesIO(data), map_location="cpu")


def default_workers() -> int:
    """Processes that draw batches: one for each core, and no more than keep a GPU busy."""
    return min(15, os.cpu_count() or 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the state and log.jsonl go")
    parser.add_argument("--resume", type=Path, help="folder of an earlier piece's state")
    parser.add_argument("--weights", type=Path, help="model.safetensors to start a new run from")
    parser.add_argument("--first-batch", type=int, default=0, help="of a new run; later ones hold larger pictures")
    parser.add_argument("--seconds", type=float, default=480, help="of this piece, evaluation not counted")
    parser.add_argument("--run-seconds", type=float, default=Recipe.seconds, help="of all pieces together")
    parser.add_argument("--decay", type=float, default=Recipe.decay)
    parser.add_argument("--peak", type=float, default=Recipe.peak)
    parser.add_argument("--uses", type=int, default=Recipe.uses, help="1 makes the run repeat exactly")
    parser.add_argument("--patches", type=int, default=BatchSpec.patches)
    parser.add_argument("--workers", type=int, default=default_workers(), help="that draw [%(default)s]")
    parser.add_argument("--evaluate", type=int, default=60, help="batches of the closing evaluation")
    parser.add_argument("--save-every", type=float, default=150, help="seconds between states")
    parser.add_argument("--log-every", type=int, default=500)
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel by itself, as on a CPU")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    began = time.monotonic()

    tokenizer_json = arguments.tokenizer.read_text()
    tokenizer = Tokenizer.from_str(tokenizer_json)
    recipe = Recipe(
        peak=arguments.peak,
        seconds=arguments.run_seconds,
        decay=arguments.decay,
        uses=arguments.uses,
        batch=BatchSpec(patches=arguments.patches),
    )
    is_cuda = arguments.device == "cuda"
    if not is_cuda:
        print("training on a CPU: a run as good as the shipped model's will take days", file=sys.stderr, flush=True)
    first = arguments.first_batch + (_read(arguments.resume, "state")["drawn"] if arguments.resume is not None else 0)
    stream = iter(
        loader(
            Batches(tokenizer_json, recipe.seed, first, 10**9, recipe.batch),
            arguments.workers,
            is_pinned=is_cuda,
        )
    )
    config = NetworkConfig(vocab_size=tokenizer.get_vocab_size())
    trainer = Trainer(recipe, config, arguments.device)
    if is_cuda:
        torch.set_float32_matmul_precision("high")
        # cuDNN's attention plans anew for every shape, a quarter of a second each, and shapes here always
        # change.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if arguments.weights is not None:
        trainer.load_weights(arguments.weights)
    if arguments.resume is not None:
        trainer.load(arguments.resume)
    spent = trainer.seconds
    print(f"{sum(p.numel() for p in trainer.parameters):,} parameters, from step {trainer.step}", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)

    supply = Supply(stream, recipe.uses, arguments.device)
    pictures = waited = 0.0
    num_new = 0
    mark = saved = time.monotonic()
    with (arguments.out / "log.jsonl").open("a") as log:
        while (elapsed := time.monotonic() - began) < arguments.seconds and trainer.seconds < recipe.seconds:
            trainer.seconds = spent + elapsed
            asked = time.monotonic()
            batch, form, is_new = supply.next()
            waited += time.monotonic() - asked
            pictures += sum(len(batch[name]) for name in ("pixels0", "pixels1") if name in batch)
            num_new += is_new
            trainer.drawn += is_new
            if is_cuda and not arguments.no_graphs and form not in trainer.graphs:
                trainer.capture(batch, form)
            trainer.train_step(batch, form)
            if trainer.step % arguments.log_every == 0:
                rows = table(trainer.tally)
                trainer.tally.zero_()
                now = time.monotonic()
                line = {
                    "step": trainer.step,
                    "seconds": round(trainer.seconds, 1),
                    "pictures_per_second": round(pictures / (now - mark)),
                    "waited_share": round(waited / (now - mark), 2),
                    "new_share": round(num_new / arguments.log_every, 2),
                    "categories": rows,
                }
                log.write(json.dumps(line) + "\n")
                log.flush()
                short = " ".join(f"{name} {row['loss']:.3f}/{row['right']:.0f}" for name, row in rows.items())
                print(
                    f"{trainer.step} {trainer.seconds:.0f}s {line['pictures_per_second']}/s "
                    f"wait {line['waited_share']} new {line['new_share']} | {short}",
                    flush=True,
                )
                pictures = waited = 0.0
                num_new = 0
                mark = now
            if time.monotonic() - saved > arguments.save_every:
                trainer.save(arguments.out)
                saved = time.monotonic()
    trainer.save(arguments.out)
    print(f"saved at step {trainer.step} after {time.monotonic() - began:.0f} s", flush=True)
    if arguments.evaluate:
        trainer.average_into_network()
        rows = evaluate(trainer.network, tokenizer_json, arguments.evaluate, arguments.workers, arguments.device)
        (arguments.out / "held_out.json").write_text(json.dumps({"step": trainer.step, "categories": rows}))
        for name, row in rows.items():
            print(
                f"{name:12} loss {row['loss']:.4f}  right {row['right']:6.2f} %  of {row['turns']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
