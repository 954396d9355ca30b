"""What `bench.weights` measures: the sizes that its cases are about."""

import pytest
import torch

from bench import weights
from bench.ipc import measure_ipc


def test_three_hundred_tensors_of_half_a_billion_parameters() -> None:
    """Sizes alone, nothing is allocated: bfloat16, and as many small ones as a model has."""
    with torch.device("meta"):
        tensors = weights.half_a_billion()
    assert len(tensors) == len({name for name, _ in tensors}) == 300
    assert 0.48e9 < sum(tensor.numel() for _, tensor in tensors) < 0.52e9
    assert {tensor.dtype for _, tensor in tensors} == {torch.bfloat16}
    assert sum(tensor.dim() == 1 for _, tensor in tensors) > 100


def test_flatten_is_told_as_its_issue_spells_it() -> None:
    """One round, of few tensors."""
    point = weights.measure_flatten([("a", torch.ones(3)), ("b", torch.ones(2, 2))], rounds=1)
    assert (point.case, point.bound, point.better) == ("flatten", 0.8, "higher")
    assert point.value > 0


def test_the_floor_copies_every_byte_twice() -> None:
    """Also those of the last piece, which is shorter."""
    copies = weights.TwoCopies(3 * 2**20 + 5, piece_bytes=2**20)
    copies.source.random_()
    assert copies.seconds() > 0
    assert torch.equal(copies.target, copies.source)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it is measured")
def test_without_a_device_the_case_is_left_out_with_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is made for it."""
    assert measure_ipc(lambda: pytest.fail("made"), rounds=1) == []
    assert "ipc: left out, there is no CUDA device" in "".join(capsys.readouterr())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: there is nothing to measure")
def test_buckets_reach_another_process() -> None:
    """One round, of few tensors."""
    [point] = measure_ipc(lambda: [("a", torch.ones(3)), ("b", torch.ones(2, 2))], rounds=1)
    assert (point.case, point.bound, point.better) == ("ipc", None, "higher")
