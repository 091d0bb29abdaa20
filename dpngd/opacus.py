"""DP-NGD for people who already use Opacus.

    engine = PrivacyEngine(accountant="prv")
    model, optimizer, loader = engine.make_private(...)            # as for DP-SGD
    optimizer = DPNGD(optimizer, model, public_loader, lambda_safe=0.3, T=steps)

The rate and the clipping threshold stay those of DP-SGD. Whitening is by F~ / lambda_safe, whose floor is 1 where the
schedule stands at lambda_safe: directions on the floor take DP-SGD's step, steep ones a damped one. In the paper's
terms C_ngd = C_sgd / sqrt(lambda_safe) and eta_ngd = eta_sgd lambda_safe, which is its equation
eta_ngd C_ngd = eta_sgd C_sgd sqrt(lambda_safe); as lambda_safe grows, the step becomes DP-SGD's exactly.

Guarantee: that of Opacus's DPOptimizer with the same noise multiplier, sampling and number of steps. The whitening
comes from public data and t alone; clipping bounds each sample by max_grad_norm in whitened space (see `mechanism`);
the accountant's hook is handed on, and called before the noise is drawn: a step that is interrupted after that is
counted, though nothing came of it.

    case                                        what happens
    noise_generator=None in make_private        noise from the operating system's entropy (`noise.SecretNoise`), never
                                                torch's global generator
    a noise_generator                           noise from it, in float64: secret only as far as its state is
    momentum, Adam, weight decay, schedulers    the wrapped optimizer gets the private direction as p.grad: whatever it
                                                makes of it is post-processing and costs nothing
    an exception or interrupt inside step       its sums are dropped: they never reach a later step
    a virtual batch left unfinished             a new loop over the memory manager's loader drops its sums; in a loop of
                                                your own (signal_skip_step) call `abandon()`
    a physical batch without its step           an error at the next step of that loop: its flags are out of order
    max_grad_norm or noise_multiplier changed   an error inside a logical batch; between two, the accountant sees it
    more than T steps                           an error, until T is raised: optimizer.T = ...
    the private loader as public                an error

Poisson sampling is Opacus's: its loader draws from torch's global generator unless make_private gets one. For weights
that are published, who was in a batch must stay secret too: do not publish the seed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Iterator
from types import FrameType

import torch
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpngd.clamping import DynamicFloor
from dpngd.curvature import KFAC, LayerCurvature
from dpngd.disjoint import overlap
from dpngd.errors import UsageError
from dpngd.gradients import Blocks, PerSample, SampleGradients, check_precision
from dpngd.layers import trainable_layers
from dpngd.mechanism import GaussianMechanism
from dpngd.natural import Natural
from dpngd.noise import SecretNoise, TorchNoise, stream

SMALLEST = 50
"""Public images at least: of fewer the curvature is mostly sampling error."""


class DPNGD(DPOptimizer):
    """Wraps the DPOptimizer that `PrivacyEngine.make_private` returned; use it in that one's place.

    optimizer    what make_private returned (flat clipping, one device, not ghost mode)
    module       the model that make_private returned
    public       at least 50 public images as the model gets them (floats, normalised): a tensor (n, ...), or a loader
                 whose batches are images or (images, anything)
    lambda_safe  the floor; larger is closer to DP-SGD. Try 1, 0.3, 0.1; much lower and the step loses stability
    T            steps the run will take (the schedule ends at T). A step beyond it is an error
    private      the private data set (a data set, a loader or a tensor), to check that no public image is in it, nor a
                 copy with a changed pixel, mirrored or shifted by one (`dpngd.disjoint`). Reads it once
    lambda_base, T1, p, T_cur   the schedule's other values and the curvature's refresh, as in the paper
    """

    def __init__(self, optimizer: DPOptimizer, module: nn.Module, public: Tensor | Iterable, *, lambda_safe: float,
                 T: int, lambda_base: float | None = None, T1: float = 0.1, p: float = 10.0, T_cur: int = 8,
                 labels: str = "sampled", seed: int = 0, private: Tensor | Dataset | DataLoader | None = None):
        if type(optimizer) is not DPOptimizer:
            raise UsageError(f"optimizer is a {type(optimizer).__name__}: DPNGD wraps the DPOptimizer that "
                             "make_private returns with clipping='flat', grad_sample_mode='hooks' and one process")
        super().__init__(optimizer.original_optimizer, noise_multiplier=optimizer.noise_multiplier,
                         max_grad_norm=optimizer.max_grad_norm, expected_batch_size=optimizer.expected_batch_size,
                         loss_reduction=optimizer.loss_reduction, generator=optimizer.generator,
                         secure_mode=optimizer.secure_mode)
        self.attach_step_hook(optimizer.step_hook)
        self._module = module
        model = getattr(module, "_module", module)
        self.layers = trainable_layers(model)
        check_precision(self.layers)
        ours = {id(p) for layer in self.layers for p in layer.params().values()}
        if {id(p) for p in self.params} != ours:
            raise UsageError("the optimizer's parameters are not the module's trainable parameters: build the "
                             "optimizer from module.parameters(); freeze what must not train by requires_grad_(False)")
        weight = self.layers[0].like
        x = public_images(public, private).to(weight)
        with self._hooks_off():
            check_model(model, x)
        self.kfac = KFAC(model, x, labels=labels, generator=stream(seed, "labels") if labels != "exact" else None)
        self.floor = DynamicFloor(lambda_safe, lambda_safe / 4 if lambda_base is None else lambda_base, T, T1, p)
        self.natural = Natural(self._public_curvature, self.floor, T_cur, unit=lambda_safe, dtype=weight.dtype)
        self.t = 0
        self.nonfinite = 0  # samples so far that contributed zero because their gradient was not finite
        self._sums: Blocks | None = None  # of the logical batch so far
        self._numbers: tuple[float, float] | None = None  # C and sigma of that batch
        self._in_order = True  # whether the last step came to its end: only then do its sums count
        self._signaller: FrameType | None = None  # the pass over a memory manager's loader whose flags are in the queue
        self._out_of_order: FrameType | None = None  # a pass whose flags no longer belong to its batches
        self._waiting: int | None = None  # flags in the queue when the last step began

    @property
    def T(self) -> int:
        """Steps of the run. It may be raised: the schedule is a function of t and T, not of private data."""
        return self.floor.T

    @T.setter
    def T(self, T: int) -> None:
        self.floor = self.natural.floor = dataclasses.replace(self.floor, T=T)

    def pre_step(self, closure=None) -> bool:
        """Clip, and at the end of a logical batch count, add noise and scale: whether the weights are to be updated.

        `_in_order` is False from the first line to the last. So wherever an exception leaves this method, the next
        call, or `zero_grad`, finds that and drops the sums: a sample is in one release at most once.
        """
        if not self._in_order:
            self._drop()
        self._in_order = False
        left = len(self._step_skip_queue)
        skip = self._check_skip_next_step()  # first of all: a flag belongs to one call, whatever becomes of it
        self._check_flags(left)
        if self.t >= self.T:
            raise UsageError(f"step {self.t + 1} of a run of T = {self.T} steps: the schedule and the budget end at T; "
                             "set optimizer.T to go on, and mind what the accountant says")
        self.clip_and_accumulate()
        self._is_last_step_skipped = skip
        if not skip:
            if self.step_hook:
                self.step_hook(self)
            self.add_noise()
            self.scale_grad()
        self._in_order = True
        return not skip

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear gradients, and the sums too unless a step was skipped in order: then the logical batch goes on."""
        if not self._in_order:
            self._drop()
        super().zero_grad(set_to_none)
        if not self._is_last_step_skipped:
            self._sums = self._numbers = None

    def abandon(self) -> None:
        """Drop an unfinished logical batch: its sums, and the flags of the batches that were to follow.

        What is left of a pass over a memory manager's loader cannot be used after that; a new pass can.
        """
        self._drop()
        self._step_skip_queue.clear()

    def _drop(self) -> None:
        """Drop the sums; the rest of a memory manager's pass is out of order then."""
        self._sums = self._numbers = None
        self._is_last_step_skipped = False
        self._out_of_order = self._signaller
        if self._signaller is None:
            self._step_skip_queue.clear()
        self._in_order = True

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """As Opacus's. A new pass of a memory manager starts a logical batch: what an earlier one left is dropped."""
        frame = sys._getframe(1)  # the sampler's generator: one frame per pass, and nothing else tells passes apart
        if isinstance(frame.f_locals.get("self"), BatchSplittingSampler) and frame is not self._signaller:
            self.abandon()
            self._signaller, self._out_of_order, self._waiting = frame, None, None
        super().signal_skip_step(do_skip)

    def _check_flags(self, waiting: int) -> None:
        """Given the number of skip flags in the queue at a step's begin: an error where they are not its batches'.

        A loader that reads ahead has the same number of flags waiting at every step, until it has read all. One more
        is that of a batch that never came to its step: all later flags would be applied to the wrong batches, logical
        batches would overlap, and a sample could be in one release twice.
        """
        if self._signaller is None:
            return
        if not waiting:  # a step outside the pass: what the pass left unfinished does not belong to it
            self._sums = self._numbers = self._signaller = self._out_of_order = None
            return
        if self._waiting is not None and waiting > self._waiting:
            self._out_of_order = self._signaller
        self._waiting = waiting
        if self._out_of_order is self._signaller:
            raise UsageError("a physical batch was interrupted or did not come to its step: what is left of this pass "
                             "over the loader cannot be used; start a new one (for ... in the memory manager's loader)")

    def clip_and_accumulate(self) -> None:
        """Add the clipped whitened gradients of one physical batch to the sums of the current step."""
        if self._sums is None:  # F~ is fixed before the step's first batch is looked at
            self.natural.prepare(min(self.t, self.T))
        mechanism = self._mechanism()
        zeros = [layer.like.new_zeros(layer.shape) for layer in self.layers]
        clipped = mechanism.clipped_sums([self._gradients()], self.natural.geometry, zeros)
        self.nonfinite += clipped.seen - clipped.norms.shape[1]
        sums = clipped.sums[0]
        self._sums = sums if self._sums is None else [s + new for s, new in zip(self._sums, sums, strict=True)]

    def add_noise(self) -> None:
        """Noise in whitened space, then the way back: p.grad becomes R (L sum + sigma C xi)."""
        if self._sums is None:
            raise UsageError("there are no clipped sums to add noise to: call step() after a backward pass")
        mechanism = self._mechanism()
        sums, self._sums, self._numbers = self._sums, None, None
        noise = SecretNoise() if self.generator is None else TorchNoise(self.generator)
        noisy = mechanism.add_noise([sums], noise)
        for layer, block in zip(self.layers, self.natural.geometry.back(noisy), strict=True):
            params = layer.params()
            for name, grad in layer.split(block).items():
                params[name].grad = grad
        self.t += 1

    def state_dict(self) -> dict:
        return {**super().state_dict(), "dpngd": {"t": self.t, "labels": self._label_state()}}

    def load_state_dict(self, state_dict: dict) -> None:
        """Also takes up the schedule; the curvature is computed anew at the next step."""
        state = dict(state_dict)
        own = state.pop("dpngd", None)
        if own is None:
            raise UsageError("the checkpoint has no 'dpngd' entry: it was not saved by a DPNGD optimizer")
        super().load_state_dict(state)
        self.abandon()
        self.t, self.natural.F = own["t"], None
        if own["labels"] is not None:
            self.kfac.generator.set_state(own["labels"])

    def _label_state(self) -> Tensor | None:
        return None if self.kfac.generator is None else self.kfac.generator.get_state()

    def _mechanism(self) -> GaussianMechanism:
        """The mechanism with Opacus's present numbers; its optimizer divides by B.

        Schedulers may change them between logical batches, not inside one, whose sums were clipped with the old ones.
        """
        numbers = (self.max_grad_norm, self.noise_multiplier)
        if self._sums is not None and numbers != self._numbers:
            was = self._numbers
            self._drop()
            raise UsageError(f"max_grad_norm and noise_multiplier changed from {was} to {numbers} inside a logical "
                             "batch, whose sums were dropped: change them after a step that updates the weights")
        self._numbers = numbers
        return GaussianMechanism((self.max_grad_norm,), self.noise_multiplier, B=1.0)

    @contextlib.contextmanager
    def _hooks_off(self) -> Iterator[None]:
        """Opacus's hooks off: public images must not enter the per-sample gradients."""
        hooks = getattr(self._module, "hooks_enabled", False)
        if hooks:
            self._module.disable_hooks()
        try:
            yield
        finally:
            if hooks:
                self._module.enable_hooks()

    def _public_curvature(self) -> list[LayerCurvature]:
        """K-FAC on the public images."""
        with self._hooks_off():
            return self.kfac()

    def _gradients(self) -> SampleGradients:
        """Opacus's p.grad_sample as layers."""
        layers = []
        for layer in self.layers:
            samples = []
            for p in layer.params().values():
                _check_processed_flag(p.grad_sample)
                samples.append(self._get_flat_grad_sample(p).to(p.dtype))
                _mark_as_processed(p.grad_sample)
            layers.append(layer.join(*samples))
        losses = samples[0].new_zeros(len(samples[0]))  # Opacus keeps no per-sample losses
        return SampleGradients(layers, losses)


def public_images(public: Tensor | Iterable, private: Tensor | Dataset | DataLoader | None = None) -> Tensor:
    """All images of a tensor or of a loader's batches, as one tensor, checked to be public and to be images."""
    same = private is not None and _source(public) == _source(private)
    if isinstance(public, DPDataLoader) or same:
        raise UsageError("public is the private data: its curvature would leave without any noise; pass images that "
                         "are not in the private set")
    if isinstance(public, Tensor):
        x = public
    else:
        batches = [batch[0] if isinstance(batch, list | tuple) else batch for batch in public]
        if not batches:
            raise UsageError(f"the public loader is empty: curvature needs at least {SMALLEST} images")
        x = torch.cat(batches)
    if not x.is_floating_point():
        raise UsageError(f"public images are {str(x.dtype).removeprefix('torch.')}: pass floats as the model gets "
                         "them, normalised in the same way as the private images")
    if len(x) < SMALLEST:
        raise UsageError(f"there are {len(x)} public images: curvature needs at least {SMALLEST}")
    if not x.isfinite().all():
        raise UsageError("a public image has values that are not finite: leave it out")
    if private is not None:
        theirs = _private_images(private)
        if theirs.shape[1:] != x.shape[1:]:
            raise UsageError(f"public images are {tuple(x.shape[1:])}, private ones {tuple(theirs.shape[1:])}: make "
                             "them alike")
        if (found := overlap(theirs, x)) is not None:
            raise UsageError(f"public image {found[1]} is also private image {found[0]} (as it is, mirrored, shifted "
                             "by a pixel or changed in one): a public set must not hold private images")
    return x


def check_model(model: nn.Module, x: Tensor) -> None:
    """One pass over public images: their shape is the model's, samples do not mix, no buffer changes."""
    try:
        with torch.no_grad():
            classes = model(x[:2]).shape[1]
    except (RuntimeError, ValueError, IndexError) as error:
        raise UsageError(f"the model cannot take public images of shape {tuple(x.shape[1:])}: "
                         f"{str(error).splitlines()[0]}") from error
    per_sample = PerSample(model)
    per_sample(x[:SMALLEST], torch.arange(min(len(x), SMALLEST), device=x.device) % classes)
    if not per_sample.checked:
        raise UsageError("the model's gradients on public images are not finite: start from finite weights")


def _source(data: object) -> tuple[str, int]:
    """What tells the data set behind a loader from any other; of tensors, the memory that they are in."""
    if isinstance(data, DataLoader):
        data = data.dataset
    if isinstance(data, TensorDataset):
        data = data.tensors[0]
    return ("memory", data.untyped_storage().data_ptr()) if isinstance(data, Tensor) else ("object", id(data))


def _private_images(private: Tensor | Dataset | DataLoader) -> Tensor:
    if isinstance(private, DataLoader):
        private = private.dataset
    if isinstance(private, TensorDataset):
        private = private.tensors[0]
    if isinstance(private, Tensor):
        return private
    items = (private[i] for i in range(len(private)))
    return torch.stack([item[0] if isinstance(item, list | tuple) else item for item in items])
