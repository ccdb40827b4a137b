"""Tasks by name, strict arguments, and the faults of the faulty task."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from jaxrl_sync.tasks.faulty import FaultyArgs, FaultyTask, InjectedError
from jaxrl_sync.tasks.protocol import Dataset, Task, TaskError
from jaxrl_sync.tasks.registry import make_task, register, task_names
from tests.tasks.episodes import play, single_turn


@pytest.mark.parametrize("name", ["addition", "reasoning", "guess", "faulty"])
def test_every_task_says_what_the_loop_needs(name: str) -> None:
    task: Task = make_task(name, {})
    assert name in task_names()
    ids = set(task.stop_token_ids)
    assert ids and all(0 <= i < task.tokenizer.vocab_size for i in ids)
    data = task.dataset("train", 0)
    for item in range(5):
        prompt = task.prompt(data[item])
        assert 0 < len(prompt) <= task.max_prompt_len
        assert all(0 <= t < task.tokenizer.vocab_size for t in prompt)
        assert "exact" in task.score(single_turn(task, data[item], [3, 2])).components
    assert task.max_new_tokens > 0 and task.max_turns > 0
    assert (task.max_turns > 1) or task.environment(data[0]).step([3]).done


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("adition", {}, "unknown task 'adition', expected one of addition"),
        ("addition", {"digit": 2}, "no argument 'digit'; did you mean 'digits'?"),
        ("addition", {"digits": "2"}, "digits='2', expected a value of type int"),
        ("addition", {"digits": True}, "digits=True, expected a value of type int"),
        ("addition", {"eval_share": True}, "eval_share=True, expected a value of type float"),
        ("no_such_module:Task", {}, "needs the module 'no_such_module'"),
        ("jaxrl_sync.tasks.addition:Subtraction", {}, "has no task 'Subtraction'"),
        ("jaxrl_sync.tasks.addition:AdditionArgs", {}, "has no Args dataclass"),
    ],
)
def test_what_cannot_be_made_is_one_clear_line(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message) as e:
        make_task(name, args)
    assert e.value.exit_code == 2 and "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class T(\n", "import of 'own_task' raised SyntaxError"),
        ("import os\nos.nothing\n", "import of 'own_task' raised AttributeError: module 'os' has no"),
        ("import no_such_package\n", "needs the module 'no_such_package', which is neither installed nor on"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_clear_line(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_task.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TaskError, match=message) as e:
        make_task("own_task:T")
    assert "\n" not in str(e.value)


def test_an_integer_serves_where_a_float_is_wanted() -> None:
    assert make_task("addition", {"eval_share": 0}).dataset("eval", 0).size == 100


def test_a_task_can_be_named_by_module_and_class_or_registered() -> None:
    assert isinstance(make_task("jaxrl_sync.tasks.faulty:FaultyTask"), FaultyTask)
    register("test-only")(FaultyTask)
    assert isinstance(make_task("test-only", {"size": 2}), FaultyTask)
    with pytest.raises(TaskError, match="'test-only' is taken"):
        register("test-only")(FaultyTask)


def test_data_sets_are_indexed_iterated_and_bounded() -> None:
    data = Dataset.of(["a", "b"])
    assert list(data) == ["a", "b"] and data[1] == "b"
    for item in (-1, 2):
        with pytest.raises(IndexError, match=f"prompt {item}"):
            data[item]
    endless = Dataset(None, str)
    assert endless[10**12] == str(10**12)


def test_faults_come_where_they_are_ordered() -> None:
    task = FaultyTask(
        FaultyArgs(size=4, prompt_raises="1", score_raises="2", step_raises="3", never_ends="0", turns=2)
    )
    with pytest.raises(InjectedError, match="prompt\\(\\) of item-1"):
        task.prompt("item-1")
    with pytest.raises(InjectedError, match="score\\(\\) of item-2"):
        task.score(single_turn(task, "item-2", [4]))
    with pytest.raises(InjectedError, match="step\\(\\) of item-3"):
        task.environment("item-3").step([4])
    endless = task.environment("item-0")
    assert not any(endless.step([4]).done for _ in range(1000))
    assert len(play(task, "item-2", [[4]] * 5).turns) == 2
    assert task.score(single_turn(task, "item-0", [4, 5])).value == 0.5


def test_slow_scores_block_and_an_empty_set_is_empty() -> None:
    task = FaultyTask(FaultyArgs(size=0, slow_score="*", slow_score_s=0.05, no_stop=True))
    assert list(task.dataset("train", 0)) == [] and task.stop_token_ids == ()
    started = time.monotonic()
    task.score(single_turn(task, "item-0", [4]))
    assert time.monotonic() - started >= 0.05
