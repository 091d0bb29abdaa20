"""The unfolding-free second moment of patches against unfolding."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpngd.layers.conv import Conv2dLayer, keeps_size, patch_moment


@pytest.mark.parametrize(("k", "C", "H", "W"), [(3, 5, 9, 7), (3, 1, 3, 4), (5, 3, 11, 12), (7, 2, 9, 8)])
def test_equals_unfolding(k, C, H, W):
    x = torch.randn(4, C, H, W, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
    U = F.unfold(x, k, padding=k // 2).transpose(0, 1).flatten(1)
    A, s = patch_moment(x, k)
    torch.testing.assert_close(A, U @ U.mT)
    torch.testing.assert_close(s, U.sum(1))


@pytest.mark.parametrize("options", [
    {"stride": 2}, {"padding": 0}, {"dilation": 2}, {"groups": 2}, {"kernel_size": (3, 5)}, {"kernel_size": 2},
    {"kernel_size": 1, "padding": 0}])
def test_other_convolutions_are_not_covered(options):
    conv = nn.Conv2d(4, 4, **{"kernel_size": 3, "padding": 1, **options})
    assert not keeps_size(conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", [
    {"padding": 1}, {"padding": 1, "stride": 2}, {"padding": "same"}, {"padding": 1, "padding_mode": "reflect"},
    {"padding": 0}, {"kernel_size": 1, "padding": 0}, {"kernel_size": 1, "padding": 0, "stride": (2, 3)},
    {"kernel_size": 1, "padding": 1}])
def test_a_layer_takes_the_right_way(options, bias):
    conv = nn.Conv2d(3, 4, bias=bias, **{"kernel_size": 3, **options}).double()
    x = torch.randn(2, 3, 18, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    H, W = conv(x).shape[2:]
    A = Conv2dLayer("conv", conv).second_moment(x, H, W)
    padding = 1 if options["padding"] == "same" else options["padding"]
    mode = {"zeros": "constant"}.get(conv.padding_mode, conv.padding_mode)
    U = F.unfold(F.pad(x, (padding,) * 4, mode=mode), conv.kernel_size, stride=conv.stride).transpose(0, 1).flatten(1)
    if bias:
        U = F.pad(U, (0, 0, 0, 1), value=1.0)
    torch.testing.assert_close(A[0], U @ U.mT)


@pytest.mark.parametrize(("k", "H", "W"), [(3, 4, 5), (3, 3, 9), (5, 4, 6), (5, 5, 5), (9, 4, 4), (11, 4, 12)])
def test_a_kernel_may_be_larger_than_the_image(k, H, W):
    conv = nn.Conv2d(2, 3, k, padding=k // 2).double()
    x = torch.randn(3, 2, H, W, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    U = F.pad(F.unfold(x, k, padding=k // 2).transpose(0, 1).flatten(1), (0, 0, 0, 1), value=1.0)
    torch.testing.assert_close(Conv2dLayer("conv", conv).second_moment(x, H, W)[0], U @ U.mT)


@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("options", [
    {"padding": 1}, {"padding": 0}, {"padding": (0, 2)}, {"padding": 2, "dilation": 2}, {"kernel_size": (1, 3)},
    {"kernel_size": 5, "padding": 4}])
def test_pairs_of_patches_from_pairs_of_pixels(options, K):
    conv = nn.Conv2d(3, 4, **{"kernel_size": 3, **options}).double()
    layer, x = Conv2dLayer("conv", conv), torch.randn(2 * K, 3, 7, 6, dtype=torch.float64,
                                                      generator=torch.Generator().manual_seed(0))
    H, W = conv(x).shape[2:]
    U = F.unfold(x, conv.kernel_size, conv.dilation, conv.padding).unflatten(0, (2, K)).transpose(2, 3).flatten(1, 2)
    torch.testing.assert_close(layer.patch_pairs(x, 2, H, W), U @ U.mT)


@pytest.mark.parametrize(("options", "covered"), [({}, True), ({"stride": 2}, False), ({"groups": 2}, False),
                                                  ({"kernel_size": 1, "padding": 0}, False)])
def test_pairs_of_pixels_are_taken_where_they_cover_the_convolution(monkeypatch, options, covered):
    conv = nn.Conv2d(64, 64, **{"kernel_size": 3, "padding": 1, **options})
    layer, taken, pairs = Conv2dLayer("conv", conv), [], Conv2dLayer.patch_pairs
    monkeypatch.setattr(Conv2dLayer, "patch_pairs", lambda *a: taken.append(1) or pairs(*a))
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(5, 64, 8, 8, generator=generator)
    d = torch.randn(conv(a).shape, generator=generator)
    g = layer.gradient(a, d, 1)
    torch.testing.assert_close(g.sq_norms(), g.materialise().flatten(1).square().sum(1))
    assert bool(taken) == covered


def test_gradients_that_were_formed_are_summed_and_not_formed_again(monkeypatch):
    """AdaDPS and GEP look at g itself."""
    layer, generator = Conv2dLayer("conv", nn.Conv2d(64, 64, 3, padding=1)), torch.Generator().manual_seed(0)
    a, d = (torch.randn(5, 64, 8, 8, generator=generator) for _ in range(2))
    c, g = torch.rand(5, generator=generator), layer.gradient(a, d, 1)
    by_factors, whole = g.weighted_sum(c), g.materialise()
    monkeypatch.setattr(Conv2dLayer, "weight_gradient", lambda *a: pytest.fail("computed again"))
    torch.testing.assert_close(g.weighted_sum(c), by_factors)
    torch.testing.assert_close(g.weighted_sum(c), torch.einsum("b,broi->roi", c, whole))
