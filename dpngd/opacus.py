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
noise is Opacus's own; the accountant's hook is handed on.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _generate_noise, _mark_as_processed
from torch import Tensor, nn

from dpngd.clamping import DynamicFloor
from dpngd.curvature import KFAC, LayerCurvature
from dpngd.errors import UsageError
from dpngd.gradients import Blocks, SampleGradients
from dpngd.layers import trainable_layers
from dpngd.mechanism import GaussianMechanism
from dpngd.natural import Natural
from dpngd.noise import stream


class DPNGD(DPOptimizer):
    """Wraps the DPOptimizer that `PrivacyEngine.make_private` returned; use it in that one's place.

    optimizer    what make_private returned (flat clipping, one device, not ghost mode)
    module       the model that make_private returned
    public       public images: a tensor (n, ...), or a loader whose batches are images or (images, anything)
    lambda_safe  the floor; larger is closer to DP-SGD. Try 1, 0.3, 0.1; much lower and the step loses stability
    T            steps the run will take (the schedule ends at T)
    lambda_base, T1, p, T_cur   the schedule's other values and the curvature's refresh, as in the paper
    """

    def __init__(self, optimizer: DPOptimizer, module: nn.Module, public: Tensor | Iterable, *, lambda_safe: float,
                 T: int, lambda_base: float | None = None, T1: float = 0.1, p: float = 10.0, T_cur: int = 8,
                 labels: str = "sampled", seed: int = 0):
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
        ours = {id(p) for layer in self.layers for p in layer.params().values()}
        if {id(p) for p in self.params} != ours:
            raise UsageError("the optimizer's parameters are not the module's trainable parameters: build the "
                             "optimizer from module.parameters(); freeze what must not train by requires_grad_(False)")
        weight = self.layers[0].like
        x = public_images(public).to(weight)
        self.kfac = KFAC(model, x, labels=labels, generator=stream(seed, "labels") if labels != "exact" else None)
        self.floor = DynamicFloor(lambda_safe, lambda_safe / 4 if lambda_base is None else lambda_base, T, T1, p)
        self.natural = Natural(self._public_curvature, self.floor, T_cur, unit=lambda_safe, dtype=weight.dtype)
        self.t = 0
        self.nonfinite = 0  # samples so far that contributed zero because their gradient was not finite
        self._sums: Blocks | None = None

    def clip_and_accumulate(self) -> None:
        """Add the clipped whitened gradients of one physical batch to the sums of the current step."""
        if self._sums is None:  # F~ is fixed before the step's first batch is looked at
            self.natural.prepare(min(self.t, self.floor.T))
        zeros = [layer.like.new_zeros(layer.shape) for layer in self.layers]
        clipped = self._mechanism().clipped_sums([self._gradients()], self.natural.geometry, zeros)
        self.nonfinite += clipped.seen - clipped.norms.shape[1]
        sums = clipped.sums[0]
        self._sums = sums if self._sums is None else [s + new for s, new in zip(self._sums, sums, strict=True)]

    def add_noise(self) -> None:
        """Noise in whitened space, then the way back: p.grad becomes R (L sum + sigma C xi)."""
        noisy = self._mechanism().add_noise([self._sums], self._noise)
        for layer, block in zip(self.layers, self.natural.geometry.back(noisy), strict=True):
            params = layer.params()
            for name, grad in layer.split(block).items():
                params[name].grad = grad
        self._sums = None
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
        self.t, self.natural.F = own["t"], None
        if own["labels"] is not None:
            self.kfac.generator.set_state(own["labels"])

    def _label_state(self) -> Tensor | None:
        return None if self.kfac.generator is None else self.kfac.generator.get_state()

    def _mechanism(self) -> GaussianMechanism:
        """The mechanism with Opacus's present numbers (schedulers may change them); its optimizer divides by B."""
        return GaussianMechanism((self.max_grad_norm,), self.noise_multiplier, B=1.0)

    def _noise(self, like: Tensor, std: float) -> Tensor:
        """Opacus's own noise, from its generator or its secure mode."""
        return _generate_noise(std=std, reference=like, generator=self.generator, secure_mode=self.secure_mode)

    def _public_curvature(self) -> list[LayerCurvature]:
        """K-FAC on the public images, with Opacus's hooks off: they must not enter the per-sample gradients."""
        hooks = getattr(self._module, "hooks_enabled", False)
        if hooks:
            self._module.disable_hooks()
        try:
            return self.kfac()
        finally:
            if hooks:
                self._module.enable_hooks()

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


def public_images(public: Tensor | Iterable) -> Tensor:
    """All images of a tensor or of a loader's batches, as one tensor."""
    if isinstance(public, Tensor):
        return public
    batches = [batch[0] if isinstance(batch, list | tuple) else batch for batch in public]
    if not batches:
        raise UsageError("the public loader is empty: curvature needs at least one image")
    return torch.cat(batches)
