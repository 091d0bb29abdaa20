"""One run: `run(config) -> Record`, the only training loop. It reads like Algorithm 2 of the paper.

`dpngd train --method dp-ngd --data digits --public photos --epsilon 2` does one from the command line.

A run is a simulation by default: a seed decides its batches and its noise. That is for research. Runs of one seed share
both across methods and budgets, so their difference has less variance, and a run repeats bit for bit. For the same
reasons its weights are no release: the noise can be computed again from the recorded seed, and cancels between runs.
With noise="secret" batches and noise come from the operating system's entropy (`dpngd.training.release`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import dpngd
from dpngd import privacy
from dpngd.data import Private, Public, check_disjoint, load_private, load_public
from dpngd.errors import UsageError, unknown
from dpngd.gradients import MICRO_BATCH, PerSample, micro_batch_size, views_at_once
from dpngd.group import ALONE, Group, check_same
from dpngd.methods import Setting, build, method, spends_of
from dpngd.noise import Noise, SecretNoise, secret_stream, secret_uniform, seeded_noise, stream
from dpngd.sampling import PoissonSampler
from dpngd.training import models
from dpngd.training.checkpoint import Checkpoint
from dpngd.training.config import RunConfig
from dpngd.training.log import Clock, Log, Sealed
from dpngd.training.parallel import Workers
from dpngd.training.pretrain import pretrained
from dpngd.training.recipe import EMA, draw_views, take_views, to_float, views_of
from dpngd.training.record import Record

Progress = Callable[[int, float, Callable[[], float]], None]
"""Called after each step: the number of steps done, the batch's loss, and a function that computes epsilon so far."""


VIEWS_ON_GPU = 1024
CPU = torch.device("cpu")


NOISES = ("seeded", "secret")


@dataclass(frozen=True)
class Trained:
    """What a run leaves: its record, and the model with its averaged weights."""

    record: Record
    model: nn.Module


def run(config: RunConfig, *, noise: str = "seeded", progress: Progress | None = None, views: int | None = None,
        device: str | torch.device | None = None, checkpoint: Checkpoint | None = None,
        group: Group = ALONE) -> Record:
    """Train as the config says and report. The same config gives the same facts, bit for bit, on one machine with one
    number of threads (eigenvectors of F, for one, round otherwise with several).

    `noise` is "seeded", a simulation, or "secret": then batches and noise are never the same again, and the record
    holds nothing that the guarantee does not cover (no losses, norms, accuracies). `device` is a GPU where there is
    one. `views` is how many images are worked on at once: a matter of memory, not of results. Seeded random numbers are
    drawn on the CPU, so the device does not change them. With a `checkpoint` the run goes on from where an earlier
    process left it, and keeps its own state there (`dpngd.training.checkpoint`); not with secret noise. A `group` of
    processes, each of which calls this, trains one model together (`dpngd.group`) and gets the same record.
    """
    return train(config, noise=noise, progress=progress, views=views, device=device, checkpoint=checkpoint,
                 group=group).record


def train(config: RunConfig, *, noise: str = "seeded", progress: Progress | None = None, views: int | None = None,
          device: str | torch.device | None = None, checkpoint: Checkpoint | None = None,
          group: Group = ALONE) -> Trained:
    """As `run`, with the model."""
    if noise not in NOISES:
        raise unknown("noise", noise, NOISES)
    secret = noise == "secret"
    if secret and checkpoint:
        raise UsageError("a release has no checkpoints: its noise cannot be drawn again, so a resumed run would spend "
                         "more than its budget; leave the checkpoint out")
    noise_of: Callable[[str], Noise] = (lambda name: SecretNoise()) if secret else partial(seeded_noise, config.seed)
    clock = Clock()
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with clock.phase("setup"):
        check_views(config)
        private, public = load(config)
        digests = [part.digest for part in (private, public) if part]
        check_same(group, {"config": config.canonical(), "data": digests, "dpngd": dpngd.__version__})
        batches = Batches(private, config, device=device, secret=secret, group=group)
        q, N = batches.sampler.q, batches.sampler.N
        spends = spends_of(config, q, N)  # an impossible budget is an error before anything is computed
        images = None if public is None else to_float(public.x).to(device)
        model = initial_model(config, private, public, images).to(device)
        per_sample = PerSample(model, K=config.K)
        workers = Workers(per_sample, torch.get_num_threads() if device.type == "cpu" else 1)
        apart = Batches(private, config, device=device, purpose="curvature-", secret=secret, group=group)
        if not views:
            on_cpu = device.type == "cpu"
            views = views_at_once(model, private.shape, workers.threads) if on_cpu else VIEWS_ON_GPU
        batches.views = apart.views = views
        built = build(Setting(config, per_sample, spends, private.shape, images, apart.draw_whole, noise_of,
                              group))
        ema, log = EMA(model, config.ema), (Sealed if secret else Log)(config, model, built)
        xi = noise_of("noise")
        start = 0
        if checkpoint:
            held = None if built.held is None else {
                "weights": model, "average": ema, "batches": batches, "curvature batches": apart, "noise": xi,
                "steps": built.steps, "log": log, "clock": clock, **built.held}
            start = checkpoint.resume(config, held, device, digests, group)

    for t in range(start, config.T):
        try:
            with clock.phase("curvature"):
                built.prepare(t)  # Modules 1 and 2: the geometry is fixed before the batch is drawn
        except FloatingPointError:  # its estimate overflows at these weights, or is nan
            log.diverged()
            break
        with workers.alone():
            with clock.phase("mechanism"):  # Module 3
                release = built.mechanism.release(batches.draw(), built.geometry, per_sample.zeros(), xi,
                                                  partial(workers.map, clock=clock))
            try:
                with clock.phase("step"):  # post-processing: public images, released weights and the release
                    d = per_sample.to_params(release.direction)
                    s = group.first(partial(built.steps, d, built.noise_kl)).s
                    if not abs(s) <= torch.finfo(torch.float32).max:
                        raise FloatingPointError(f"a step of length {s}")
            except FloatingPointError:
                log.diverged()
                break
            per_sample.add_(release.direction, -s)
            ema.update()
            log.step(release)
        if progress:
            loss = math.nan if secret else release.loss
            progress(t + 1, loss, lambda steps=t + 1: privacy.composed(spends, q, steps, config.delta))
        if log.due:
            with clock.phase("evaluation"), ema.averaged():
                log.evaluate(private.x_test, private.y_test)
        if group.first(lambda: log.status) == "diverged":
            log.diverged()
            break
        if checkpoint:
            checkpoint.after(t + 1)
    record = group.first(lambda: log.record(private, public, spends, q, clock))
    ema.keep()
    return Trained(record, model)


def check_views(config: RunConfig) -> None:
    if config.augment and views_of(config.data) is None:
        raise UsageError(f"augment is set, but {config.data} has no views that keep its labels: leave it out")


def load(config: RunConfig) -> tuple[Private, Public | None]:
    """The private and the public set of a run, checked to have no image in common."""
    private = load_private(config.data, N=config.N, seed=config.seed, validation=config.validation,
                           test_share=config.test_share, digest=config.data_digest)
    if config.public is None:
        return private, None
    public = load_public(config.public, config.public_size, seed=config.seed, shape=private.shape,
                         digest=config.public_digest)
    check_disjoint(private, public)
    return private, public


def initial_model(config: RunConfig, private: Private, public: Public | None, images: Tensor | None) -> nn.Module:
    """theta_0: random, or pre-trained on the public set where the method says so."""
    channels, size = private.shape[:2]
    weights = stream(config.seed, "weights")
    if not method(config.method).pretrained:
        return models.build(config.model, classes=private.classes, in_channels=channels, size=size, generator=weights)
    return pretrained(config.model, x=images, y=public.y, public_classes=public.classes,
                      classes=private.classes, steps=config.pt_steps, eta=config.pt_eta, weights=weights,
                      order=stream(config.seed, "pretraining"))


class Batches:
    """Poisson batches of the private set, as micro-batches of K views per sample.

    `purpose` names their random streams, so that every method takes its gradients from the very same batches. `secret`
    batches are drawn with the operating system's entropy, and so are their views (`noise.secret_stream` says why).
    Of a group the first process draws a batch, and each takes its share of it.
    """

    def __init__(self, private: Private, config: RunConfig, views: int = MICRO_BATCH, device: torch.device = CPU,
                 purpose: str = "", secret: bool = False, group: Group = ALONE):
        self.private, self.K, self.views, self.device, self.group = private, config.K, views, device, group
        source = secret_uniform if secret else stream(config.seed, f"{purpose}sampling")
        self.sampler = PoissonSampler(private.N, config.B, source)
        self.augmentation = secret_stream() if secret else stream(config.seed, f"{purpose}augmentation")
        self.rule = views_of(config.data) if config.augment else None

    def state_dict(self) -> dict[str, Tensor]:
        """The positions of the two streams of a seeded run."""
        return {"sampling": self.sampler.source.get_state(), "augmentation": self.augmentation.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.sampler.source.set_state(state["sampling"])
        self.augmentation.set_state(state["augmentation"])

    def draw(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One batch, or this process's share of it: x (b*K, C, H, W) float, y (b,), a micro-batch at a time."""
        return self._draw(self.group)

    def draw_whole(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One batch, all of it on every process."""
        return self._draw(ALONE)

    def _draw(self, among: Group) -> Iterator[tuple[Tensor, Tensor]]:
        rows = self.group.first(self.sampler.draw)
        chosen = None
        if self.rule is not None:  # drawn for the whole batch, so that the micro-batch size changes nothing
            chosen = draw_views(len(rows), self.K, self.augmentation, pad=self.rule.pad, flip=self.rule.flip)
        # Two parts for two cores, also with one thread: where they are as small, both train on the same micro-batches.
        size = micro_batch_size(self.K, self.views, samples=len(rows), threads=2 if len(rows) * self.K >= 128 else 1)
        starts = range(0, len(rows), size)
        for lo in starts[among.share(len(starts))]:  # whole micro-batches: each is computed as one process would
            part = rows[lo : lo + size]
            x = self.private.x_train[part].to(self.device)
            x = to_float(x) if chosen is None else take_views(x, chosen[lo * self.K : (lo + size) * self.K],
                                                              pad=self.rule.pad)
            yield x, self.private.y_train[part].to(self.device)
