"""A sample as its judger sees it.

Invariant: a judger is given lists of its own: what it does to them changes no sample.
"""

from __future__ import annotations

from rollout_svc.errors import SampleFailure
from rollout_svc.judging import REPORTED, JudgedSample
from rollout_svc.prompt import Prompt
from rollout_svc.sample import Sample
from rollout_svc.tokens import TextCodec

__all__ = ["view_of"]


async def view_of(sample: Sample, attempt: int, prompt: Prompt, codec: TextCodec) -> JudgedSample:
    """What a judger sees of a sample; its text is decoded once, and kept.

    Raises:
        SampleFailure: `invalid_response`: its tokens are no text.
        StaleAttempt: the attempt was revoked meanwhile.
    """
    ids = sample.response_ids
    if sample.response is None:
        try:
            response = await codec.decode(ids)
        except Exception as error:
            raise SampleFailure("invalid_response", f"cannot decode: {type(error).__name__}: {error}") from error
        sample.check(attempt)
        sample.response = response
    return JudgedSample(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        task=prompt.task,
        prompt=prompt.content,
        prompt_ids=list(sample.prompt_ids),
        response=sample.response,
        response_ids=list(ids),
        ground_truth=prompt.ground_truth,
        meta=prompt.meta,
        finish_reason=sample.finish_reason,
        reported=sample.meta.get(REPORTED),
    )
