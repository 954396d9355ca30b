"""What engines say becomes words that a line of a log, a report or a terminal has room for."""

from __future__ import annotations

import pytest

from rollout_svc.engines.calls import Reply
from rollout_svc.engines.parsing import check_status, excerpt, failure_of
from rollout_svc.errors import WorkerFailure

PAGE = b"<!DOCTYPE HTML>\n<html>\r\n\t<head>\n  <title>502</title>\n" + b"\xff" * 500


def test_a_page_of_html_is_one_line() -> None:
    """P35: whatever stands at an address, what it answered is one line of a bounded length."""
    assert excerpt(Reply(404, PAGE)).startswith("<!DOCTYPE HTML> <html> <head> <title>502</title> ")
    with pytest.raises(WorkerFailure) as caught:
        check_status(Reply(502, PAGE))
    for words in (str(caught.value), *(str(failure_of(Reply(status, PAGE))) for status in (400, 404, 502))):
        assert len(words.splitlines()) == 1
        assert len(words) < 300
