"""The end of a run: which one counts, what it is called, and who gives everything back."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from tests.support.tools import PATIENCE
from torch_grad_exporter.lifecycle import Ending
from torch_grad_exporter.model.watched import WatchedModels

# The exception; then state, error, and whether somebody waits for the end, of one rank and of several.
ENDS: list[tuple[BaseException | None, tuple[str, str | None, bool, bool]]] = [
    (None, ("finished", None, False, False)),
    (SystemExit(0), ("finished", None, False, False)),
    (SystemExit(None), ("finished", None, False, False)),
    (SystemExit(3), ("failed", "SystemExit", False, True)),
    (ValueError("secret"), ("failed", "ValueError", False, True)),
    (KeyboardInterrupt(), ("finished", None, True, True)),
]


@pytest.mark.parametrize(("error", "expected"), ENDS, ids=repr)
def test_every_kind_of_end(error: BaseException | None, expected: tuple[str, str | None, bool, bool]) -> None:
    """An exception fails a run, under the name of its type alone; Ctrl-C and a successful exit do not; failed ranks hurry."""
    alone, several = Ending(), Ending(ranks=2)
    assert (alone.state, alone.error, alone.hurried) == (None, None, False)
    alone.by(error)
    several.by(error)
    assert (alone.state, alone.error, alone.hurried, several.hurried) == expected


def test_the_first_end_is_the_one_that_counts() -> None:
    """A run that has finished does not fail later, and one that has failed does not finish."""
    finished, failed = Ending(), Ending()
    assert finished.close()
    finished.by(ValueError())
    failed.by(ValueError())
    assert failed.close()
    assert (finished.state, failed.state) == ("finished", "failed")


def test_one_of_many_gives_everything_back() -> None:
    """Of many threads that close at once exactly one is told to give everything back; in a forked child none is."""
    ending, child = Ending(), Ending()
    ready, first = threading.Barrier(8), []

    def close() -> None:
        ready.wait(PATIENCE)
        if ending.close():
            first.append(threading.current_thread())

    threads = [threading.Thread(target=close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    child.after_fork_in_child()
    assert (len(first), ending.closed) == (1, True)
    assert (child.close(), child.closed) == (False, True)


def test_watched_models_are_free_to_go() -> None:
    """Models are held weakly: whoever watches is told when one goes, until it closes."""
    gone: list[str] = []
    models = [torch.nn.Linear(2, 2) for _ in range(3)]
    watched = WatchedModels(models, lambda: gone.append("one"))
    assert watched.any_of([torch.nn.ReLU(), models[1]])
    assert not watched.any_of([torch.nn.ReLU()])
    del models[1]
    gc.collect()
    assert (gone, watched.all_gone, watched.any_of(models)) == (["one"], False, True)
    watched.close()
    models.clear()
    gc.collect()
    assert (gone, watched.all_gone) == (["one"], True)
