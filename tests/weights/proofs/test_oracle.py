"""What proofs compare with is itself right: the replay agrees with the model wherever the model can say."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.weights.proofs import oracle
from tests.weights.proofs.scene import CONFIGS, every_model, trained

MODELS = {name: {version: trained(config, version) for version in range(3)} for name, config in CONFIGS.items()}

tokens_by = st.lists(st.tuples(st.integers(0, 255), st.integers(0, 2)), min_size=2, max_size=40)


@every_model
@settings(max_examples=15, deadline=None)
@given(pairs=tokens_by, data=st.data())
def test_a_replay_is_the_models_own_pass_where_one_made_all(
    model: str, pairs: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Up to the first position of other weights it is the plain pass; no position sees a later one, nor who made it."""
    models, tokens, by = MODELS[model], [token for token, _ in pairs], [version for _, version in pairs]
    logits = oracle.replay(models, tokens, by)
    first = next((place for place, version in enumerate(by) if version != by[0]), len(by))
    with torch.inference_mode():
        whole = models[by[0]](torch.tensor([tokens]))[0]
    torch.testing.assert_close(logits[:first], whole[:first], atol=2e-5, rtol=1e-5)
    cut = data.draw(st.integers(1, len(tokens)))
    torch.testing.assert_close(oracle.replay(models, tokens[:cut], by[:cut]), logits[:cut], atol=2e-5, rtol=1e-5)


def test_who_made_an_earlier_position_shows() -> None:
    """One old key and value among new ones changes what follows, by more than any tolerance here."""
    models = MODELS["tiny"]
    one = oracle.replay(models, [1, 2, 3, 4], [0, 1, 1, 1])
    other = oracle.replay(models, [1, 2, 3, 4], [1, 1, 1, 1])
    assert (one[-1] - other[-1]).abs().max() > 0.01
