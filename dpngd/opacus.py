"""DP-NGD for people who already use Opacus.

    engine = PrivacyEngine(accountant="prv")
    model, optimizer, loader = engine.make_private(...)            # as for DP-SGD
    optimizer = DPNGD(optimizer, model, T=steps, shape=(1, 28, 28))   # the whole change

Nothing is left to tune: public images are made for the shape (1/f noise), the floor is found from their curvature
(`clamping.floor_by_rank`), C from their whitened gradients, and the length of every step from a KL budget
(`dpngd.steps`), all before or after the mechanism and without private data. The wrapped optimizer is plain SGD in this
mode, and its rate has no effect.

    optimizer = DPNGD(optimizer, model, public_loader, lambda_safe=0.3, T=steps)

keeps the rate and the clipping threshold of DP-SGD, and whatever optimizer is wrapped; so does kl_budget=None with the
floor found as above. kl_radius is a guard in that mode: steps that are too long are shortened.

Whitening is by F~ / lambda_safe, whose floor is 1 where the schedule is at lambda_safe: directions on the floor take
DP-SGD's step, steep ones a damped one. In the paper's terms C_ngd = C_sgd / sqrt(lambda_safe) and
eta_ngd = eta_sgd lambda_safe, which is its equation eta_ngd C_ngd = eta_sgd C_sgd sqrt(lambda_safe); as lambda_safe
grows, the step becomes DP-SGD's exactly.

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
    p.grad_sample changed or replaced by you    what is in it is clipped and summed, whatever it was computed from
    an exception or interrupt inside step       its sums are dropped: they never reach a later step
    a virtual batch left unfinished             a new loop over the memory manager's loader drops its sums; in a loop of
                                                your own (signal_skip_step) call `abandon()`
    a physical batch without its step           an error at the next step of that loop: its flags are out of order. An
                                                empty batch needs its step too
    a pass over the memory manager's loader     an error at a step with another batch, if flags were read ahead for it;
    that was left                               a new pass, or `abandon()`, drops them
    a layer frozen, unfrozen or added later     an error: its gradients would be neither clipped nor noised
    autocast                                    switched off inside step; gradients below float32 are an error, and so
                                                is a forward pass that made them: each would move with the others
    max_grad_norm or noise_multiplier changed   an error inside a logical batch; between two, the accountant sees it
    more than T steps                           an error, until T is raised: optimizer.T = ...
    the private loader as public                an error
    several processes (DPDDP)                   wraps DistributedDPOptimizer: each clips its samples, the sums are added
                                                up, and the first process adds noise, once (`dpngd.group`)

Poisson sampling is Opacus's: its loader draws from torch's global generator unless make_private gets one. For weights
that are published, who was in a batch must stay secret too: do not publish the seed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType

import torch
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DistributedDPOptimizer, DPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from dpngd import images
from dpngd.clamping import AUTO, check_lambda_safe, check_share, dynamic_floor
from dpngd.curvature import KFAC, LayerCurvature, SteepKFAC
from dpngd.disjoint import overlap
from dpngd.errors import UsageError
from dpngd.geometry import Kronecker
from dpngd.gradients import Blocks, PerSample, SampleGradients, check_precision
from dpngd.group import ALONE, Processes
from dpngd.layers import Dense, Factors, Layer, LayerGradient, trainable_layers
from dpngd.layers.forms import product
from dpngd.mechanism import GaussianMechanism
from dpngd.natural import Natural, public_clip
from dpngd.noise import SecretNoise, TorchNoise, stream
from dpngd.steps import (
    GROWTH,
    K_DEFAULT,
    K_NOISE_DEFAULT,
    PROBE,
    SMALLEST_PROBE,
    WITHIN,
    Direction,
    KLBudget,
    Probe,
    Rate,
    Step,
    Steps,
)

SMALLEST = 50
"""Public images at least: of fewer the curvature is mostly sampling error."""
MADE = 250
"""Public images that are made where none are given. With 500 a refresh takes twice as long. The study's rule would have
taken 250 with T_cur = 32; on a CNN without normalisation 250 at T_cur = 8 cost 1.0 (0.2) points in one setting and
gained 0.2 (0.2) in the other, and that arm was not run in the study's cells (docs/study.md). For 500, pass your own
images."""
CHECKED = 8
"""Public images on which Opacus's per-sample gradients are compared with ours."""
CLIP_RATIO = 0.05
MOST = 0.03
"""Share of all directions that may be above the floor: ten times what is at the start. The small network reaches 3 to
5 % in the middle of a run; without normalisation F grows, and a floor that stays is soon below a quarter of it."""
RESOLVED = 1e-10
"""Eigenvalues below this share of the largest are rounding: public images span fewer directions than there are."""
PLAIN = {"momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}
"""What an SGD has that does nothing but theta <- theta - eta grad."""

# Opacus's hooks, although switched off for them, make torch warn of every pass over public images. Ours only: passes of
# a user's own loop warn as they do with DP-SGD.
warnings.filterwarnings("ignore", "Full backward hook is firing when gradients", UserWarning, r"dpngd\.")


class DPNGD(DPOptimizer):
    """Wraps the DPOptimizer that `PrivacyEngine.make_private` returned; use it in that one's place.

    optimizer    what make_private returned (flat clipping, one device, grad_sample_mode hooks, functorch or ew)
    module       the model that make_private returned, or the hooks (wrap_model=False)
    public       at least 50 public images as the model gets them (floats, normalised), or for a model that starts with
                 an embedding sequences of tokens (int64): a tensor (n, ...), or a loader whose batches are images or
                 (images, anything). Or the name of images to make for `shape`: "noise" (1/f
                 noise, the default), "dead-leaves" or "photos"; about zero mean and unit variance
    shape        (C, H, W) of an input, for made images
    lambda_safe  the floor; larger is closer to DP-SGD. "auto" finds it from the curvature of the public images
    kl_budget    nats by which the run may move the predictions on public images, in T equal steps: it decides how far
                 each step goes. "auto" is 10, or None where a floor or kl_radius is given; None keeps the wrapped
                 optimizer's rate
    kl_noise     nats of it that may be the noise's own; None for no such bound
    kl_radius    guard for the wrapped optimizer's steps: those of a larger KL divergence are shortened
    probe        public images on which KL divergences are measured, at least 16; all of them where there are fewer
    clip_ratio   with a KL budget, C = max_grad_norm over the median whitened gradient norm of public images at the
                 start; None keeps the C of make_private. The sensitivity is max_grad_norm in either case
    T            steps the run will take (the schedule ends at T). A step beyond it is an error
    private      the private data set (a data set, a loader or a tensor), to check that no public image is in it, nor a
                 copy with a changed pixel, mirrored or shifted by one (`dpngd.disjoint`). Reads it once
    lambda_base, T1, p, T_cur   the schedule's other values and the curvature's refresh, as in the paper
    most         with a KL budget and a floor that is found, the share of all directions that may be above the floor:
                 where F has outgrown it, it rises to the eigenvalue of that rank. None: never
    """

    def __init__(self, optimizer: DPOptimizer, module: nn.Module, public: Tensor | Iterable | str | None = None, *,
                 T: int, lambda_safe: float | str = AUTO, lambda_base: float | None = None, T1: float = 0.1,
                 p: float = 10.0, T_cur: int = 8, labels: str = "sampled", seed: int = 0,
                 private: Tensor | Dataset | DataLoader | None = None, shape: tuple[int, int, int] | None = None,
                 kl_budget: float | str | None = AUTO, kl_noise: float | None = K_NOISE_DEFAULT,
                 kl_radius: float | None = None, probe: int = PROBE, clip_ratio: float | None = CLIP_RATIO,
                 most: float | None = MOST):
        if type(optimizer) not in (DPOptimizer, DistributedDPOptimizer):
            raise UsageError(f"optimizer is a {type(optimizer).__name__}: DPNGD wraps the DPOptimizer that "
                             "make_private returns with clipping='flat', grad_sample_mode='hooks', 'functorch' or "
                             "'ew', or on several processes (DPDDP) its DistributedDPOptimizer")
        self.group = Processes() if isinstance(optimizer, DistributedDPOptimizer) else ALONE
        B = optimizer.expected_batch_size  # of one process, where there are several
        super().__init__(optimizer.original_optimizer, noise_multiplier=optimizer.noise_multiplier,
                         max_grad_norm=optimizer.max_grad_norm,
                         expected_batch_size=B if B is None else B * self.group.size,
                         loss_reduction=optimizer.loss_reduction, generator=optimizer.generator,
                         secure_mode=optimizer.secure_mode)
        self.attach_step_hook(optimizer.step_hook)
        self._module = module
        model = getattr(module, "_module", module)
        if model is module and hasattr(module, "autograd_grad_sample_hooks"):
            raise UsageError("module is the model itself, whose hooks DPNGD cannot switch off for public images: pass "
                             "what make_private returned in its place")
        self.layers = trainable_layers(model)
        check_precision(self.layers)
        check_batch_first(module, self.layers)
        ours = {id(p) for layer in self.layers for p in layer.params().values()}
        if {id(p) for p in self.params} != ours:
            raise UsageError("the optimizer's parameters are not the module's trainable parameters: build the "
                             "optimizer from module.parameters(); freeze what must not train by requires_grad_(False)")
        check_numbers(whole={"T": T, "T_cur": T_cur, "probe": probe, "seed": seed},
                      real={"T1": T1, "p": p} | ({} if kl_noise is None else {"kl_noise": kl_noise}))
        if probe < SMALLEST_PROBE:
            raise UsageError(f"the probe has {probe} images: a step's KL divergence needs at least {SMALLEST_PROBE} "
                             "public images")
        if kl_noise is not None and not 0 < kl_noise < math.inf:
            raise UsageError(f"kl_noise is {kl_noise!r}: it must be a positive number, or None for no bound")
        if most is not None:
            check_share("most", most)
        if lambda_safe is None or isinstance(lambda_safe, bool):
            raise UsageError(f"lambda_safe is {lambda_safe!r}: it must be a positive number, or {AUTO!r}")
        check_lambda_safe(lambda_safe)
        kl_budget = budget_of(kl_budget, lambda_safe, kl_radius, clip_ratio)
        if kl_budget is not None:
            check_plain(self.original_optimizer)
        weight = self.layers[0].like
        x = public_images(made_images(public, shape, seed), private)
        x = x.to(weight) if x.is_floating_point() else x.to(weight.device)
        with in_training(module):  # as the steps will be: evaluation mode may hide what mixes samples
            with self._hooks_off():
                check_model(model, x)
            Sampler.install(module, self.layers)
            check_opacus(module, self.layers, x, self._hooks_off)
        labelled = {"labels": labels, "generator": stream(seed, "labels") if labels != "exact" else None}
        self.kfac = KFAC(model, x, span=True, **labelled)  # at theta_0: all of F, for the floor
        with self._hooks_off():
            self.steep = SteepKFAC(model, x, floor=lambda: self.natural.reaches(self.floor.lambda_base), **labelled)
            self.steps: Steps | None = None  # None: the wrapped optimizer's own step
            if kl_budget is not None:
                self.steps = LastingBudget(kl_budget, T, LastingProbe(model, x[:probe]), kl_noise)
            elif kl_radius is not None:
                self.steps = Rate(1.0, kl_radius, LastingProbe(model, x[:probe]))
        self.t = 0
        start = self._public_curvature()
        self.floor = dynamic_floor(lambda_safe, T, lambda_base=lambda_base, T1=T1, p=p, curvature=lambda: start)
        self.natural = Natural(self._public_curvature, self.floor, T_cur, unit=self.floor.lambda_safe,
                               geometry=Whitening(), dtype=weight.dtype, start=start,
                               most=most if kl_budget is not None and lambda_safe == AUTO else None)
        if kl_budget is not None and clip_ratio is not None:
            self.max_grad_norm = self._public_clip(start, x, clip_ratio, stream(seed, "clip"))
        self.clipped, self.seen = 0, 0  # samples that were scaled down, and all: outside the guarantee
        self.nonfinite = 0  # samples so far that contributed zero because their gradient was not finite
        self._sums: Blocks | None = None  # of the logical batch so far
        self._numbers: tuple[float, float] | None = None  # C and sigma of that batch
        self._in_order = True  # whether the last step came to its end: only then do its sums count
        self._signaller: FrameType | None = None  # the pass over a memory manager's loader whose flags are in the queue
        self._out_of_order: FrameType | None = None  # a pass whose flags no longer belong to its batches
        self._reader: weakref.ref | None = None  # the loader's iterator that the pass belongs to, where it is found
        self._waiting: int | None = None  # flags in the queue when the last step began

    @property
    def T(self) -> int:
        """Steps of the run. It may be raised: the schedule is a function of t and T, not of private data."""
        return self.floor.T

    @T.setter
    def T(self, T: int) -> None:
        self.floor = self.natural.floor = dataclasses.replace(self.floor, T=T)
        if isinstance(self.steps, KLBudget):
            self.steps.T = T

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """A private step; its length is the KL budget's, or the wrapped optimizer's, with a guard where there is one.

        Everything after `pre_step` is post-processing of p.grad, which is private by then (see `dpngd.steps`).
        """
        if self.steps is None:
            return super().step(closure)
        if closure is not None:
            with torch.enable_grad():
                closure()
        if self.pre_step():
            self._move()
        return None

    def _full_precision(self) -> torch.autocast:
        """Autocast off: norms, sums and the probe's passes would be of 8 bits inside a user's."""
        return torch.autocast(self.layers[0].like.device.type, enabled=False)

    @torch.no_grad()
    def _move(self) -> None:
        """theta <- theta - s d: d is p.grad, or what the wrapped optimizer makes of it."""
        params = {name: p for layer in self.layers for name, p in layer.params().items()}
        if isinstance(self.steps, KLBudget):
            direction, after = {name: p.grad for name, p in params.items()}, None
        else:  # the guard: d is the step that the wrapped optimizer takes, which is then taken back
            before = {name: p.detach().clone() for name, p in params.items()}
            self.original_optimizer.step()
            after = {name: p.detach().clone() for name, p in params.items()}
            direction = {name: before[name] - after[name] for name in params}
            for name, p in params.items():
                p.copy_(before[name])
        with self._hooks_off(), self._full_precision():
            s = self.group.first(lambda: self.steps(direction, self._noise_kl)).s
        for name, p in params.items():
            if after is not None and s == 1.0:
                p.copy_(after[name])  # bit for bit, which theta - (theta - after) need not be
            else:
                p.add_(direction[name], alpha=-s)

    def _noise_kl(self) -> float:
        """The KL divergence that this step's noise causes at s = 1: (sigma C / B)^2 / 2 tr(R F R)."""
        B = self.expected_batch_size if self.loss_reduction == "mean" else 1
        return (self.noise_multiplier * self.max_grad_norm / B) ** 2 / 2 * self.natural.noise_energy()

    def summary(self) -> str:
        """What the optimizer does at this point of the run, as a table. The last row is outside the guarantee."""
        if self.natural.F is None:
            self.natural.prepare(min(self.t, self.T))
        floor = self.natural.geometry.lambda_t
        above = [int((F.spectrum() > floor).sum()) for F in self.natural.F]
        sizes = [F.spectrum().numel() for F in self.natural.F]
        risen = "; raised, since F has grown" if math.isclose(floor * self.natural.unit, self.natural.raised) else ""
        rows = [("step", f"{self.t} of {self.T}, {self.T - self.t} left"),
                ("lambda_t", f"{floor * self.natural.unit:.4g} (lambda_safe {self.floor.lambda_safe:.4g}, lambda_base "
                             f"{self.floor.lambda_base:.4g}{risen})"),
                ("above the floor", f"{sum(above)} of {sum(sizes)} directions")]
        rows += [(f"  {layer.name or 'model'}", f"{a} of {n}")
                 for layer, a, n in zip(self.layers, above, sizes, strict=True)]
        rows += [("C", f"{self.max_grad_norm:.4g} (max_grad_norm, in units of lambda_safe^-1/2)"),
                 ("length of a step", self._length())]
        share = f"{100 * self.clipped / self.seen:.0f} %" if self.seen else "-"
        rows += [("clipped", f"{share} of the samples so far; {self.nonfinite} not finite  [from private data, outside "
                             "the guarantee: do not publish]")]
        return "\n".join(f"{name:20}{value}" for name, value in rows)

    def _length(self) -> str:
        if self.steps is None:
            return "the wrapped optimizer's"
        last, budget = self.steps.last, isinstance(self.steps, KLBudget)
        bound = f"kappa = {self.steps.kappa:.4g}" if budget else f"kl_radius = {self.steps.kl_radius:.4g}"
        if last is None or (not budget and self.t == 0):
            return f"by KL divergence, {bound}; no step yet"
        held = budget and last.kl < self.steps.kappa and math.isclose(last.s, self.steps.limit(self._noise_kl()))
        return f"s = {last.s:.4g}, KL {last.kl:.4g} against {bound}" + (" (the noise's share ended it)" if held else "")

    def pre_step(self, closure=None) -> bool:
        """Clip, and at the end of a logical batch count, add noise and scale: whether the weights are to be updated.

        `_in_order` is False from the first line to the last. So wherever an exception leaves this method, the next
        call, or `zero_grad`, finds that and drops the sums: a sample is in one release at most once.
        """
        if not self._in_order:
            self._drop()
        self._in_order = False
        self._check_flags()
        skip = self._check_skip_next_step()  # a flag belongs to one call, whatever becomes of it
        self._check_trainable()
        if self.t >= self.T:
            raise UsageError(f"step {self.t + 1} of a run of T = {self.T} steps: the schedule and the budget end at T; "
                             "set optimizer.T to go on, and mind what the accountant says")
        with self._full_precision():
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
        for layer in self.layers:  # also what Opacus passes over, because it does not train at the moment
            for p in layer.params().values():
                p.grad_sample = None
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
            self._reader = reader_of(frame)
        super().signal_skip_step(do_skip)

    def _check_flags(self) -> None:
        """At a step's begin: an error where the skip flags in the queue are not those of the batches to come.

        A pass has a flag for each batch that its sampler gave out. So waiting are that of this batch and those of the
        batches that the loader's workers read ahead. One more is that of a batch that never came to its step: all
        later flags would be applied to the wrong batches, logical batches would overlap, and a sample could be in one
        release twice. One less is a step without a batch of this pass.
        """
        if self._signaller is None:
            return
        waiting = len(self._step_skip_queue)
        if not waiting:  # a step outside the pass: what the pass left unfinished does not belong to it
            self._sums = self._numbers = self._signaller = self._out_of_order = self._reader = None
            return
        if self._reader is None:  # a loader that is not torch's: as many wait as at the last step, until all are read
            ordered = self._waiting is None or waiting <= self._waiting
        else:
            reader = self._reader()  # None: the pass was left
            ordered = reader is not None and waiting == 1 + len(getattr(reader, "_task_info", ()))
        if not ordered:
            self._out_of_order = self._signaller
        self._waiting = waiting
        if self._out_of_order is self._signaller:
            raise UsageError("a physical batch was interrupted or did not come to its step (an empty one needs its "
                             "step too): what is left of this pass over the loader cannot be used; start a new one "
                             "(for ... in the memory manager's loader), or call optimizer.abandon() before steps with "
                             "another")

    def _check_trainable(self) -> None:
        """An error where other parameters train than at construction: they would move by raw private gradients."""
        ours = {id(p): name for layer in self.layers for name, p in layer.params().items()}
        now = {id(p) for p in self.params}
        if now != ours.keys():
            frozen = [name for key, name in ours.items() if key not in now]
            what = f"{frozen[0]} was frozen" if frozen else "a parameter was unfrozen or added"
            raise UsageError(f"{what} after DPNGD was constructed: only what it knows is clipped and gets noise; call "
                             "make_private and DPNGD again when the trainable layers change")

    def clip_and_accumulate(self) -> None:
        """Add the clipped whitened gradients of one physical batch to the sums of the current step."""
        if self._sums is None:  # F~ is fixed before the step's first batch is looked at
            self.natural.prepare(min(self.t, self.T))
            if self.t == 0:
                self._warn_of_the_floor()
        mechanism = self._mechanism()
        zeros = [layer.like.new_zeros(layer.shape) for layer in self.layers]
        clipped = mechanism.clipped_sums([self._gradients()], self.natural.geometry, zeros)
        self.nonfinite += clipped.seen - clipped.norms.shape[1]
        self.clipped += int((clipped.norms > self.max_grad_norm).sum())
        self.seen += clipped.norms.shape[1]
        sums = clipped.sums[0]
        self._sums = sums if self._sums is None else [s + new for s, new in zip(self._sums, sums, strict=True)]

    def add_noise(self) -> None:
        """Noise in whitened space, then the way back: p.grad becomes R (L sum + sigma C xi)."""
        if self._sums is None:
            raise UsageError("there are no clipped sums to add noise to: call step() after a backward pass")
        mechanism = self._mechanism()
        sums, self._sums, self._numbers = self.group.sum(self._sums), None, None
        noise = SecretNoise() if self.generator is None else TorchNoise(self.generator)
        (flat,), = dataclasses.replace(mechanism, group=self.group).add_noise(
            [[torch.cat([block.flatten() for block in sums])]], noise)  # one draw for all
        noisy = [part.view_as(block) for part, block in zip(flat.split([b.numel() for b in sums]), sums, strict=True)]
        for layer, block in zip(self.layers, self.natural.geometry.back([noisy]), strict=True):
            params = layer.params()
            for name, grad in layer.split(block).items():
                params[name].grad = grad.contiguous()  # autograd warns where it adds to a gradient of other strides
        self.t += 1

    def scale_grad(self) -> None:
        """Divide p.grad by the expected batch size, as Opacus does."""
        if self.loss_reduction == "mean":
            count = self.expected_batch_size * self.accumulated_iterations
            for p in self.params:
                p.grad /= count

    def _warn_of_the_floor(self) -> None:
        """A warning where no eigenvalue, or every one but rounding, is above the floor. F is public, so it is too."""
        spectrum = torch.cat([F.spectrum().flatten() for F in self.natural.F])
        floor, top = self.natural.geometry.lambda_t, float(spectrum.max())
        if top <= floor:
            warnings.warn(f"lambda_safe = {self.floor.lambda_safe:.3g} is above every eigenvalue of F: this is DP-SGD; "
                          "take a lower one, or lambda_safe='auto'", stacklevel=2)
        elif float(spectrum[spectrum > RESOLVED * top].min()) > floor:
            warnings.warn(f"lambda_safe = {self.floor.lambda_safe:.3g} is under every eigenvalue of F: nothing is "
                          "clamped, and steps are unstable; take a higher one, or lambda_safe='auto'", stacklevel=2)

    def state_dict(self) -> dict:
        """Opacus's, and under "dpngd" what a run needs to go on: t, labels, the length of a step, the floor and C.

        The floor and C may have been found at theta_0: at later weights they would be others.
        """
        floor = (self.floor.lambda_safe, self.floor.lambda_base)
        steps = None if self.steps is None else self.steps.state_dict()
        return {**super().state_dict(), "dpngd": {"t": self.t, "labels": self._label_state(), "floor": floor,
                                                  "raised": self.natural.raised, "C": self.max_grad_norm,
                                                  "steps": steps}}

    def load_state_dict(self, state_dict: dict) -> None:
        """Also takes up the schedule; the curvature is computed again at the next step."""
        state = dict(state_dict)
        own = state.pop("dpngd", None)
        if own is None:
            raise UsageError("the checkpoint has no 'dpngd' entry: it was not saved by a DPNGD optimizer")
        super().load_state_dict(state)
        self.abandon()
        self.t = own["t"]
        self.natural.load_state_dict({"F": None, "raised": own.get("raised", 0.0)})
        if "floor" in own:  # a checkpoint of an earlier version has a floor that was given, and no steps
            safe, base = own["floor"]
            self.floor = self.natural.floor = dataclasses.replace(self.floor, lambda_safe=safe, lambda_base=base)
            self.natural.unit, self.max_grad_norm = safe, own["C"]
            if (own["steps"] is None) != (self.steps is None):
                raise UsageError("the checkpoint and this optimizer differ in kl_budget or kl_radius: construct it as "
                                 "the one that saved it")
            if self.steps is not None:
                self.steps.load_state_dict(own["steps"])
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
        """K-FAC on the public images: all of F at theta_0, and what is above the lowest floor later."""
        with self._hooks_off():
            return self.group.first(self.steep if self.t else self.kfac)

    def _public_clip(self, F: list[LayerCurvature], x: Tensor, ratio: float, labels: torch.Generator) -> float:
        """C from the whitened gradients of the public images at theta_0 (`natural.public_clip`)."""
        whitened, unit = Kronecker(), self.floor.lambda_safe
        whitened.set([layer.scaled(1 / unit) for layer in F], self.floor(0) / unit, self.natural.dtype)
        with self._hooks_off():
            return public_clip(PerSample(self.kfac.model, check=False), whitened, x, ratio, labels)

    def _gradients(self) -> SampleGradients:
        """Opacus's p.grad_sample as layers."""
        samples: dict[str, Tensor] = {}
        for layer in self.layers:
            for name, p in layer.params().items():
                _check_processed_flag(p.grad_sample)
                for g in p.grad_sample if isinstance(p.grad_sample, list) else [p.grad_sample]:
                    if g.dtype not in (torch.float32, torch.float64):
                        raise UsageError(f"per-sample gradients of {name!r} are {str(g.dtype).removeprefix('torch.')}, "
                                         "whose rounding changes with the other samples: train without autocast")
                samples[name] = self._get_flat_grad_sample(p).to(p.dtype)
                _mark_as_processed(p.grad_sample)
        sizes = {name: len(g) for name, g in samples.items()}
        b = min(sizes.values())
        if b == 0:  # Opacus gives an embedding one row of zeros for an empty batch
            samples = {name: g[:0] for name, g in samples.items()}
        elif max(sizes.values()) != b:
            most, least = max(sizes, key=sizes.get), min(sizes, key=sizes.get)
            raise UsageError(f"Opacus has {sizes[most]} per-sample gradients of {most!r} and {b} of {least!r}: every "
                             "layer must see the batch as the first axis of its input, once per forward pass")
        layers = [gradient_of(layer, [samples[name] for name in layer.params()]) for layer in self.layers]
        return SampleGradients(layers, self.layers[0].like.new_zeros(b))  # Opacus keeps no per-sample losses


class Sampler:
    """Takes the place of one of Opacus's own per-sample gradient functions in a model: the same gradients, sooner.

    Opacus fills a tensor of zeros and copies the gradients into it: where they are the whole batch's, they are handed
    over as they are. And a kind of layer may have a faster way to them (`Layer.samples`), or none may be needed until
    somebody looks at them (`Deferred`). A function that a user
    registered stays, and so do other modes than hooks. `check_opacus` compares what comes of it with autograd.

    function   Opacus's
    layers     those of the module's type, by the id of their module
    """

    def __init__(self, function: Callable, layers: dict[int, Layer]):
        self.function, self.layers = function, layers

    @classmethod
    def install(cls, module: nn.Module, layers: list[Layer]) -> None:
        """Give the model that make_private returned samplers of its own; other models keep Opacus's."""
        if not hasattr(module, "GRAD_SAMPLERS") or getattr(module, "force_functorch", False):
            return
        own = {id(layer.module): layer for layer in layers}
        module.GRAD_SAMPLERS = {kind: cls(f, own) if f.__module__.startswith("opacus.") else f
                                for kind, f in type(module).GRAD_SAMPLERS.items()}

    def __call__(self, module: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
        grads = self._samples(module, activations[0], backprops) or self.function(module, activations, backprops)
        memory = {t.untyped_storage().data_ptr() for t in (*activations, backprops)}
        left = {}
        for p, g in grads.items():
            own = isinstance(g, Deferred) or g.untyped_storage().data_ptr() not in memory
            if p.requires_grad and own and len(g) == module.max_batch_len and not hasattr(p, "_current_grad_sample"):
                p._current_grad_sample = g
            else:
                left[p] = g
        return left

    def _samples(self, module: nn.Module, a: Tensor, d: Tensor) -> dict[nn.Parameter, Tensor] | None:
        layer = self.layers.get(id(module))
        if layer is None or not len(a) or getattr(module, "padding_mode", "zeros") != "zeros":
            return None
        g, params = layer.samples(a.to(d.dtype), d), list(layer.params().values())
        if g is None:
            return None
        if isinstance(g, Factors):
            return {p: Deferred(layer, g, i) for i, p in enumerate(params)}
        return dict(zip(params, layer.apart(g), strict=True))

    def __reduce__(self) -> tuple:
        """A copy of the model, and one that is saved, gets Opacus's own function."""
        return _itself, (self.function,)


def _itself(function: Callable) -> Callable:
    return function


class Whitening(Kronecker):
    """DP-NGD's geometry; norms that float32 has lost are subtracted in float64 first, before they are added up densely.

    In float64 the subtraction is exact to 1e-8 of a norm^2 that is 1e-8 of what it was subtracted from.
    """

    def _exact(self, g: SampleGradients) -> Tensor:
        pairs = [layer.sq_norms(x.double(), self.left, (layer.Q_G, layer.Q_A))
                 for layer, x in zip(self.layers, g.layers, strict=True)]
        total, energy = (torch.stack(parts).sum(0) for parts in zip(*pairs, strict=True))
        lost = (total < 1e-8 * energy).nonzero()[:, 0]
        if len(lost):
            total[lost] = super()._exact(g.select(lost))
        return total


class Deferred(Tensor):
    """p.grad_sample that is computed when somebody looks at it: until then, only the factors of a layer's gradients.

    g is d a' for a linear layer: b (O + I) numbers instead of b O I, and norms, projections and sums of whitened
    gradients need no more. Every operation on the tensor, also in place, works on the gradients themselves, and from
    then on the optimizer takes those: who changes p.grad_sample gets what is in it.
    """

    layer: Layer
    form: Factors
    place: int  # of the parameter among the layer's
    made: Tensor | None

    @staticmethod
    def __new__(cls, layer: Layer, form: Factors, place: int) -> Deferred:
        p = list(layer.params().values())[place]
        self = Tensor._make_wrapper_subclass(cls, (len(form.d), *p.shape), dtype=form.d.dtype, device=form.d.device)
        self.layer, self.form, self.place, self.made = layer, form, place, None
        return self

    def real(self) -> Tensor:
        """The gradients."""
        if self.made is None:
            self.made = self.layer.apart(self.form)[self.place]
        return self.made

    @classmethod
    def __torch_dispatch__(cls, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        args, kwargs = tree_map_only(cls, cls.real, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.real())

    def __reduce_ex__(self, protocol: int) -> tuple:
        return self.real().__reduce_ex__(protocol)

    @classmethod
    def form_of(cls, samples: list[Tensor]) -> Factors | None:
        """The factors that all p.grad_sample of a layer stand for; None where one does not, or was looked at."""
        if all(isinstance(s, cls) and s.made is None for s in samples) and len({id(s.form) for s in samples}) == 1:
            return samples[0].form
        return None


class GradSample(Dense):
    """Opacus's per-sample gradients of a layer, whose projections are ordered for few directions on the input side."""

    def projected_energy(self, Q_G: Tensor, Q_A: Tensor, w: Tensor) -> Tensor:
        """sum(w (Q_G' g_i Q_A)^2): with Q_A' (k, I) stored row by row, a product with g' reads g once for all k.

        By `product`: the library's BLAS takes twice as long.
        """
        (b, R, O, I), m, k = self.w.shape, Q_G.shape[2], Q_A.shape[2]
        if R > 1 or m * I * (O + k) < O * k * (I + m):  # the output side first leaves less to do
            return super().projected_energy(Q_G, Q_A, w)
        Q = self._as_held(Q_A[0, :I].mT).contiguous()
        T = product(Q, self.w.view(-1, I)).view(k, b, O)
        if self.bias is not None:
            T.addcmul_(Q_A[0, I].view(k, 1, 1), self.bias.view(1, b, O))
        P = product(T.view(-1, O), Q_G[0].mT.contiguous())
        return torch.bmm(P.square_().view(k, b, m), w[0].mT.to(P.dtype).unsqueeze(2)).sum(0)[:, 0]


class OneDNNFactors(Factors):
    """Factors whose projections are by `product`, for many directions twice as fast. Training runs keep to BLAS, whose
    rounding their records have."""

    def _times(self, Q_A: Tensor) -> Tensor:
        return product(self.a.flatten(0, 1), Q_A.mT.contiguous())

    def select(self, keep: Tensor) -> OneDNNFactors:
        return OneDNNFactors(self.a[keep], self.d[keep])

    def double(self) -> OneDNNFactors:
        return OneDNNFactors(self.a.double(), self.d.double())


def gradient_of(layer: Layer, samples: list[Tensor]) -> LayerGradient:
    """A layer's per-sample gradients from p.grad_sample of its parameters."""
    form = Deferred.form_of(samples)
    if form is not None:
        return OneDNNFactors(form.a, form.d)
    g = layer.join(*[s.real() if isinstance(s, Deferred) else s for s in samples])
    return GradSample(g.w, g.bias, g.taps)


class LastingProbe(Probe):
    """A probe that keeps the predictions of its last trial: where that step was taken, they are those of the weights.

    The weights are compared bit for bit, so that weights which were changed in between are seen.
    """

    _trial: tuple[dict[str, Tensor], Tensor] | None = None

    def _log_p(self, weights: Mapping[str, Tensor]) -> Tensor:
        if not weights and self._trial is not None:
            held, log_p = self._trial
            params = dict(self.model.named_parameters())
            if all(torch.equal(params[name], w) for name, w in held.items()):
                return log_p
        log_p = super()._log_p(weights)
        if weights:
            self._trial = dict(weights), log_p
        return log_p


class LastingBudget(KLBudget):
    """A KL budget whose search, after a step that the noise's share ended, starts where the KL divergence would end it.

    That share changes a little from step to step. From the last s, a first pass would find that there is room, and a
    second one would take it.
    """

    def __call__(self, direction: Direction, noise: Callable[[], float] | None = None) -> Step:
        step = super().__call__(direction, noise)
        if 0 < step.kl < (1 - WITHIN) * self.kappa and step.s > 0:
            self.start = step.s * min(GROWTH, math.sqrt(self.kappa / step.kl))
        return step


@contextlib.contextmanager
def in_training(module: nn.Module) -> Iterator[None]:
    """A module in evaluation mode is in training mode here. Where the whole is in training mode, its parts stay."""
    whole = isinstance(module, nn.Module) and not module.training
    modes = [(m, m.training) for m in module.modules()] if whole else []
    try:
        if modes:
            module.train()
        yield
    finally:
        for m, mode in modes:
            m.training = mode


def reader_of(frame: FrameType) -> weakref.ref | None:
    """The iterator of torch's loader that asks this sampler for a batch: the nearest of the frame's callers."""
    caller = frame.f_back
    while caller is not None:
        if isinstance(reader := caller.f_locals.get("self"), _BaseDataLoaderIter):
            return weakref.ref(reader)
        caller = caller.f_back
    return None


def check_numbers(whole: Mapping[str, object], real: Mapping[str, object]) -> None:
    """Refuse what is no number of its kind; which numbers make sense is for those to say who use them."""
    for names, kind, wanted in ((whole, int, "a whole number"), (real, int | float, "a number")):
        for name, value in names.items():
            if isinstance(value, bool) or not isinstance(value, kind) or (kind is int and value < 0):
                raise UsageError(f"{name} is {value!r}: it must be {wanted}, and not negative" if kind is int else
                                 f"{name} is {value!r}: it must be {wanted}")


def budget_of(kl_budget: float | str | None, lambda_safe: float | str, kl_radius: float | None,
              clip_ratio: float | None) -> float | None:
    """The KL budget that was asked for, or None; an error for choices that exclude one another."""
    if isinstance(kl_budget, str) and kl_budget != AUTO:
        raise UsageError(f"kl_budget is {kl_budget!r}: it must be a positive number, {AUTO!r} or None")
    if clip_ratio is not None and not (isinstance(clip_ratio, int | float) and not isinstance(clip_ratio, bool)
                                       and 0 < clip_ratio < math.inf):
        raise UsageError(f"clip_ratio is {clip_ratio!r}: it must be a positive number, or None")
    if kl_budget == AUTO:
        return K_DEFAULT if lambda_safe == AUTO and kl_radius is None else None
    if kl_budget is not None and kl_radius is not None:
        raise UsageError("kl_budget and kl_radius exclude one another: a KL budget decides how far to go, kl_radius "
                         "guards the steps of a rate; leave one out")
    return kl_budget


def check_plain(optimizer: torch.optim.Optimizer) -> None:
    """Refuse anything but plain SGD where a KL budget decides how far to go: what it does would be lost."""
    kind = type(optimizer).__name__
    extras = [f"{name}={group[name]}" for group in optimizer.param_groups for name, value in PLAIN.items()
              if group.get(name, value) != value]
    if type(optimizer) is not torch.optim.SGD or extras:
        raise UsageError(f"the wrapped optimizer is {kind}{' with ' + extras[0] if extras else ''}: with a KL budget "
                         "it must be plain torch.optim.SGD, whose rate has no effect; to keep yours, pass "
                         "kl_budget=None, and kl_radius=0.1 as a guard")


def made_images(public: Tensor | Iterable | str | None, shape: tuple[int, int, int] | None, seed: int,
                ) -> Tensor | Iterable:
    """The public images: given, or made for the shape where their name, or nothing, is given."""
    if public is None or isinstance(public, str):
        if shape is None:
            raise UsageError("no public images are given: pass shape=(C, H, W) of an input, for which they are made, "
                             "or public images of your own")
        return images.standardised(public or "noise", MADE, shape, seed)
    if shape is not None:
        raise UsageError("shape is for images that are made: leave it out beside public images of your own")
    return public


def public_images(public: Tensor | Iterable, private: Tensor | Dataset | DataLoader | None = None) -> Tensor:
    """All images of a tensor or of a loader's batches, as one tensor, checked to be public and to be images."""
    same = private is not None and _source(public) == _source(private)
    if isinstance(public, DPDataLoader) or same:
        raise UsageError("public is the private data: its curvature would leave without any noise; pass images that "
                         "are not in the private set")
    if isinstance(public, Tensor):
        x = public
    else:
        if not isinstance(public, Iterable):
            raise UsageError(f"public is {public!r}: pass a tensor of images, a loader of batches, or the name of "
                             "images to make")
        batches = [batch[0] if isinstance(batch, list | tuple) else batch for batch in public]
        if not batches:
            raise UsageError(f"the public loader is empty: curvature needs at least {SMALLEST} images")
        if not all(isinstance(batch, Tensor) for batch in batches):
            other = next(type(batch).__name__ for batch in batches if not isinstance(batch, Tensor))
            raise UsageError(f"the public loader gives batches of {other}: a batch must be a tensor of images, or "
                             "begin with one")
        x = torch.cat(batches)
    tokens = x.dtype in (torch.int32, torch.int64)
    if not (x.is_floating_point() or tokens):
        raise UsageError(f"public images are {str(x.dtype).removeprefix('torch.')}: pass floats as the model gets "
                         "them, normalised in the same way as the private images; or tokens as int64")
    if len(x) < SMALLEST:
        raise UsageError(f"there are {len(x)} public images: curvature needs at least {SMALLEST}")
    if not x.isfinite().all():
        raise UsageError("a public image has values that are not finite: leave it out")
    if not tokens and private is None and float(x.max()) > 20 and x.min() >= 0 and (x == x.round()).all():
        raise UsageError(f"public images are whole numbers up to {float(x.max()):g}: pass them as the model gets them, "
                         "normalised in the same way as the private images; if it does get these, pass private=...")
    if private is not None:
        theirs = _private_images(private)
        if theirs.shape[1:] != x.shape[1:]:
            raise UsageError(f"public images are {tuple(x.shape[1:])}, private ones {tuple(theirs.shape[1:])}: make "
                             "them alike")
        sizes = [float(images.abs().max()) for images in (x, theirs)]
        if not tokens and max(sizes) > 10 * min(sizes):
            raise UsageError(f"public images reach {sizes[0]:.3g} and private ones {sizes[1]:.3g}: normalise both in "
                             "the same way, as the model gets them")
        if (found := (equal_rows if tokens else overlap)(theirs, x)) is not None and tokens:
            raise UsageError(f"public sequence {found[1]} is also private sequence {found[0]}: a public set must not "
                             "hold private data")
        if found is not None:
            raise UsageError(f"public image {found[1]} is also private image {found[0]} (as it is, mirrored, shifted "
                             "by a pixel or changed in one): a public set must not hold private images")
    return x


def equal_rows(private: Tensor, public: Tensor) -> tuple[int, int] | None:
    """(i, j) of a private row i and a public row j that are equal, or None."""
    rows = {tuple(row): i for i, row in enumerate(private.flatten(1).tolist())}
    return next(((rows[tuple(row)], j) for j, row in enumerate(public.flatten(1).tolist()) if tuple(row) in rows), None)


def check_batch_first(module: nn.Module, layers: list[Layer]) -> None:
    """Refuse layers whose batch is not where Opacus looks for it: it would take positions for samples."""
    if not getattr(module, "batch_first", True):
        raise UsageError("make_private was called with batch_first=False: samples must be the first axis of every "
                         "layer's input; pass batch_first=True, and transpose inside the model where needed")
    for layer in layers:
        if layer.batch_axis != 0:
            raise UsageError(f"layer {layer.name!r} ({type(layer.module).__name__}) has the batch in axis "
                             f"{layer.batch_axis}, where Opacus does not look for it: use add_bias_kv=False, or "
                             "freeze it with requires_grad_(False)")


def check_model(model: nn.Module, x: Tensor) -> None:
    """One pass over public images: their shape is the model's, samples do not mix, no buffer changes."""
    try:
        with torch.no_grad():
            out = model(x[:2])
    except (RuntimeError, ValueError, IndexError) as error:
        raise UsageError(f"the model cannot take public images of shape {tuple(x.shape[1:])}: "
                         f"{str(error).splitlines()[0]}") from error
    if out.dim() != 2 or out.shape[1] < 2:
        raise UsageError(f"the model's output for two images has shape {tuple(out.shape)}: DPNGD is for "
                         "classification, with logits (images, classes) of two classes or more")
    per_sample = PerSample(model)
    per_sample(x[:SMALLEST], torch.arange(min(len(x), SMALLEST), device=x.device) % out.shape[1])
    if not per_sample.checked:
        raise UsageError("the model's gradients on public images are not finite: start from finite weights")


def check_opacus(module: nn.Module, layers: list[Layer], x: Tensor, hooks_off: Callable) -> None:
    """Compare Opacus's per-sample gradients of a few public rows with ours, which were checked against autograd.

    Its hooks ignore some options of a layer (padding_mode of a convolution), and a sampler that someone registered may
    be wrong. What is in p.grad and p.grad_sample stays as it was.
    """
    model = getattr(module, "_module", None)
    if model is None or not model.training:
        return  # Opacus computes nothing in evaluation mode
    x, params = x[:CHECKED], [p for layer in layers for p in layer.params().values()]
    held = [(p, p.grad, getattr(p, "grad_sample", None)) for p in params]
    try:
        for p in params:
            p.grad = p.grad_sample = None
        with torch.random.fork_rng(), torch.enable_grad():
            torch.manual_seed(0)  # the same dropout masks in both passes
            logits = (module if isinstance(module, nn.Module) else model)(x)  # hooks without a wrapper are on the model
            y = torch.arange(len(x), device=x.device) % logits.shape[1]
            cross_entropy(logits, y, reduction=module.loss_reduction).backward()
            torch.manual_seed(0)
            with hooks_off():
                ours = [g.materialise() for g in PerSample(model, check=False)(x, y).layers]
        theirs = [layer.join(*[p.grad_sample for p in layer.params().values()]).materialise() for layer in layers]
    finally:
        for p, grad, sample in held:
            p.grad, p.grad_sample = grad, sample
    scale = torch.stack([g.flatten(1).norm(dim=1) for g in ours]).norm(dim=0)
    for layer, g, e in zip(layers, theirs, ours, strict=True):
        if g.shape != e.shape or ((g - e).flatten(1).norm(dim=1) > 1e-3 * scale + 1e-12).any():
            raise UsageError(f"Opacus's per-sample gradients of layer {layer.name!r} ({type(layer.module).__name__}) "
                             "are not autograd's (its hooks ignore padding_mode, for one): pass "
                             "grad_sample_mode='functorch' to make_private, or change the layer")


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
    if not (hasattr(private, "__getitem__") and hasattr(private, "__len__")):
        raise UsageError(f"private is a {type(private).__name__}: pass the private data set, its loader, or a tensor")
    items = (private[i] for i in range(len(private)))
    return torch.stack([item[0] if isinstance(item, list | tuple) else item for item in items])
